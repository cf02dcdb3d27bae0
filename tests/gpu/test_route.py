"""The kernels around the GEMMs: route, permute and combine, bit by bit against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_moe
from cutlass_moe import reference
from cutlass_moe.aot.load import get_kernel
from cutlass_moe.config import CHUNK_SLOTS, COUNTED_SLOTS, MAX_CHUNKS, MAX_EXPERTS, RouteSpec, route_chunks

DTYPES = [torch.bfloat16, torch.float16]
TOKENS = (1, 2, 5, 17, 63, 100, 257, 515)
MANY = MAX_CHUNKS * CHUNK_SLOTS  # beyond this many slots a CTA ranks several chunks


def make_ids(tokens: int, top_k: int, experts: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Ids with about a tenth dropped: -1, E and, in int64, values that would be valid if cut to 32 bits."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(experts, (tokens, top_k), generator=generator, dtype=dtype)
    bad = [-1, experts, -(2**31), 2**31 - 1]
    if dtype == torch.int64:
        bad += [2**31, 2**32, 2**32 + experts - 1, -(2**32), -(2**63)]
    choice = torch.randint(len(bad), (tokens, top_k), generator=generator)
    dropped = torch.rand(tokens, top_k, generator=generator) < 0.1
    return torch.where(dropped, torch.tensor(bad, dtype=dtype)[choice], ids)


def check_route(ids: Tensor, experts: int, weight_dtype: torch.dtype | None, guarded: Any) -> None:
    """Runs the kernel on poisoned outputs: what it writes is exact, and it writes nothing else."""
    slots = ids.numel()
    weights = None if weight_dtype is None else torch.rand(ids.shape).to(weight_dtype)
    weight_name = None if weight_dtype is None else str(weight_dtype).removeprefix("torch.")
    offsets = guarded((experts + 1,), torch.int32)
    row_slot, row_token = (guarded((slots,), torch.int32) for _ in range(2))
    slot_row = guarded(tuple(ids.shape), torch.int32)
    row_weight = None if weights is None else guarded((slots,), torch.float32)
    chunk_counts = guarded((route_chunks(slots), experts), torch.int32)
    tile_counters = guarded((2,), torch.int32)
    get_kernel(RouteSpec(str(ids.dtype).removeprefix("torch."), weight_name))(
        ids.cuda(),
        None if weights is None else weights.cuda(),
        offsets.tensor,
        row_slot.tensor,
        row_token.tensor,
        slot_row.tensor,
        None if row_weight is None else row_weight.tensor,
        chunk_counts.tensor,
        tile_counters.tensor,
    )
    expected_offsets, expected_slots, expected_tokens, expected_rows, expected_weights = reference.route(
        ids, weights, experts
    )
    kept = int(expected_offsets[-1])
    assert torch.equal(offsets.tensor.cpu(), expected_offsets)
    assert torch.equal(slot_row.tensor.cpu(), expected_rows)
    for rows, expected in ((row_slot, expected_slots), (row_token, expected_tokens)):
        assert torch.equal(rows.tensor[:kept].cpu(), expected[:kept])
        assert rows.is_poison(rows.tensor[kept:])
    if row_weight is not None and expected_weights is not None:
        assert torch.equal(row_weight.tensor[:kept].cpu(), expected_weights[:kept])
        assert row_weight.is_poison(row_weight.tensor[kept:])
        row_weight.check()
    assert not tile_counters.tensor.any()
    for table in (tile_counters, offsets, row_slot, row_token, slot_row, chunk_counts):
        table.check()


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_route(id_dtype: torch.dtype, weight_dtype: torch.dtype | None, guarded: Any) -> None:
    for seed, tokens in enumerate(TOKENS):
        for experts, top_k in ((1, 1), (3, 2), (7, 3), (16, 2), (40, 8)):
            check_route(make_ids(tokens, top_k, experts, id_dtype, seed), experts, weight_dtype, guarded)


BORDERS = [at + past for at in (32, CHUNK_SLOTS, COUNTED_SLOTS, MANY) for past in (-1, 0, 1)]


@pytest.mark.parametrize("slots", [*BORDERS, 3 * MANY + 77])
def test_route_at_the_borders_of_its_chunks(slots: int, guarded: Any) -> None:
    for experts in (1, 16, MAX_EXPERTS):
        check_route(make_ids(slots, 1, experts, torch.int64, slots), experts, torch.float32, guarded)


def test_route_many_slots_a_token(guarded: Any) -> None:
    for top_k in (CHUNK_SLOTS - 1, CHUNK_SLOTS, CHUNK_SLOTS + 1, 1500):
        check_route(make_ids(2, top_k, 16, torch.int32, top_k), 16, torch.float32, guarded)


def test_route_odd_distributions(guarded: Any) -> None:
    tokens, top_k, experts = 700, 2, 16
    for value in (-1, 0, 7, experts - 1, experts):
        check_route(torch.full((tokens, top_k), value), experts, torch.float32, guarded)
    ascending = torch.arange(tokens * top_k).view(tokens, top_k)
    check_route(ascending % experts, experts, torch.float32, guarded)
    check_route(experts - 1 - ascending * experts // (tokens * top_k), experts, torch.float32, guarded)


def test_plan_routing_takes_strided_and_leading_dimensions() -> None:
    ids = make_ids(24, 4, 7, torch.int64, 0)
    weights = torch.rand(24, 4)
    plan = cutlass_moe.plan_routing(ids.cuda().view(2, 12, 4)[..., ::2], 7, weights.cuda().view(2, 12, 4)[..., ::2])
    expected = reference.route(ids[:, ::2], weights[:, ::2], 7)
    kept = int(expected[0][-1])
    assert torch.equal(plan.expert_offsets_E1.cpu(), expected[0])
    assert torch.equal(plan.row_slot_M[:kept].cpu(), expected[1][:kept])
    assert torch.equal(plan.row_token_M[:kept].cpu(), expected[2][:kept])
    assert torch.equal(plan.slot_row_TK.cpu(), expected[3])
    assert plan.row_weight_M is not None and expected[4] is not None
    assert torch.equal(plan.row_weight_M[:kept].cpu(), expected[4][:kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_permute(dtype: torch.dtype) -> None:
    for seed, tokens in enumerate(TOKENS):
        for hidden, top_k, experts in ((8, 1, 1), (392, 2, 7), (1032, 8, 40), (4104, 3, 16)):
            plan = cutlass_moe.plan_routing(make_ids(tokens, top_k, experts, torch.int32, seed).cuda(), experts)
            wide = torch.randn(tokens, hidden + 16, device="cuda").to(dtype)
            for x in (wide[:, :hidden], wide[:, 8 : 8 + hidden], wide[:, :hidden].contiguous()):
                kept = int(plan.expert_offsets_E1[-1])
                actual = cutlass_moe.permute(x, plan)
                expected = x[plan.row_slot_M[:kept].long() // top_k]
                assert actual.shape == (tokens * top_k, hidden)
                assert torch.equal(actual[:kept], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(dtype: torch.dtype, guarded: Any) -> None:
    for seed, tokens in enumerate(TOKENS):
        for hidden, top_k, experts in ((8, 1, 1), (392, 2, 7), (1032, 8, 40), (4104, 3, 16)):
            plan = cutlass_moe.plan_routing(make_ids(tokens, top_k, experts, torch.int32, seed).cuda(), experts)
            y = torch.randn(tokens * top_k, hidden, device="cuda").to(dtype)
            y[plan.slot_row_TK.flatten() < 0] = torch.nan
            expected = reference.combine(y, plan.slot_row_TK)
            assert expected.isfinite().all()
            for row_stride in (hidden, hidden + 24):
                out = guarded((tokens, hidden), dtype, row_stride)
                cutlass_moe.combine(y, plan, out=out.tensor)
                assert torch.equal(out.tensor, expected)
                out.check()
            assert torch.equal(cutlass_moe.combine(y, plan.slot_row_TK), expected)


def test_nothing_to_do() -> None:
    ids = torch.zeros(0, 2, dtype=torch.int32, device="cuda")
    plan = cutlass_moe.plan_routing(ids, 5, ids.float())
    assert plan.expert_offsets_E1.tolist() == [0] * 6
    x_MH = cutlass_moe.permute(torch.zeros(0, 16, device="cuda").half(), plan)
    assert x_MH.shape == (0, 16)
    assert cutlass_moe.combine(x_MH, plan).shape == (0, 16)
