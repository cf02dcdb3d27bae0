"""Every shipped GEMM kernel against fp32, at token counts around each of its widths, and kernels that gather in a
cluster of one CTA; and `grouped_gemm`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_moe
from cutlass_moe import checks, reference
from cutlass_moe.aot.catalogue import catalogue
from cutlass_moe.aot.load import get_kernel
from cutlass_moe.aot.verify import random_inputs
from cutlass_moe.config import LONG_REDUCTION, REDUCTION_TILE, GemmSpec
from cutlass_moe.epilogue_arguments import kernel_arguments
from epilogues import Identity, RoutingScale, SiluGate
from tests.gpu.epilogue_kernels import GATHERING

GEMMS = [*(spec for spec in catalogue() if isinstance(spec, GemmSpec)), *GATHERING]
UNUSED_ROWS = 37  # rows past the last expert's: dropped slots leave them unwritten


def random_weights(
    experts: int, features: int, reduction: int, dtype: torch.dtype, accumulators: int, layout: str
) -> tuple[Tensor, ...]:
    """One or two weight operands [E, N, K], N(0, 1/K), surrounded by NaN where the layout leaves gaps."""

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").mul_(reduction**-0.5).to(dtype)

    def padded(*shape: int) -> Tensor:
        wide = torch.full((*shape[:-2], shape[-2] + 3, shape[-1] + 8), torch.nan, dtype=dtype, device="cuda")
        inner = wide[..., : shape[-2], : shape[-1]]
        return inner.copy_(values(*shape))

    if accumulators == 1:
        make = padded if layout == "padded" else values
        return (make(experts, features, reduction),)
    if layout == "concatenated":
        fused = values(experts, 2 * features, reduction)
        return fused[:, :features], fused[:, features:]
    if layout == "interleaved":
        fused = values(experts, 2 * features, reduction)
        return fused[:, 0::2], fused[:, 1::2]
    if layout == "padded":
        both = padded(2, experts, features, reduction)
        return both[0], both[1]
    both = values(3, experts, features, reduction)
    both[1] = torch.nan
    return (both[2], both[0]) if layout == "up below gate" else (both[0], both[2])


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cuda")


def words_of_ids(counts: list[int]) -> Tensor:
    """The words [T, 3, 2] of int64 ids in any order, of which so many name each expert, and some none."""
    named = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    none = torch.tensor([-1, len(counts), 2**32, -(2**32), 2**31])
    named = torch.cat([named, none, none[: -(len(named) + len(none)) % 3]])
    return named[torch.randperm(len(named))].cuda().view(torch.int32).view(-1, 3, 2)


def check_kernel(
    spec: GemmSpec,
    counts: list[int],
    features: int,
    reduction: int,
    layout: str,
    sm_count: int,
    counts_ids: bool,
    guarded: Any,
    assert_gemm_close: Any,
) -> None:
    """Runs the kernel on poisoned outputs: rows that experts have are right, nothing else is written. With `counts_ids`
    it gets ids instead of offsets."""
    dtype = getattr(torch, spec.dtype)
    epilogue = spec.epilogue
    offsets = offsets_of(counts)
    kept = sum(counts)
    rows = kept + UNUSED_ROWS
    wide = torch.randn(rows, reduction + 8, device="cuda").to(dtype)
    wide[kept:], wide[:, reduction:] = torch.nan, torch.nan
    a_MK = wide[:, :reduction]
    weights = random_weights(len(counts), features, reduction, dtype, epilogue.accumulators, layout)
    for weight in weights:
        weight[torch.tensor(counts, device="cuda") == 0] = torch.nan
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = random_inputs(epilogue, rows, len(counts), features, dtype, generator)
    row_index = None
    out_rows = rows
    if epilogue.scatter:
        out_rows = rows + 5
        row_index = torch.randperm(out_rows, device="cuda")[:rows].int()
    out = guarded((out_rows, features), dtype, features + 8)
    counter = offsets.new_zeros(1)
    early = sm_count == 2 or counts_ids
    source_index, ids, given_offsets = None, None, offsets
    if spec.config.gather:  # the same rows, from a shuffled matrix
        order = torch.randperm(rows, device="cuda")
        a_MK, source_index = wide[order][:, :reduction], torch.argsort(order).int()
        ids = offsets.new_empty(0, 1, 1)
        if counts_ids:
            ids = words_of_ids(counts)
            given_offsets = torch.full_like(offsets, -7)
    if early:  # what it promises: weights and offsets or ids are complete before the previous kernel starts
        torch.cuda.synchronize()
    get_kernel(spec)(
        checks.canonical_strides(a_MK),
        source_index,
        ids,
        checks.canonical_strides(weights[0]),
        checks.canonical_strides(weights[1]) if len(weights) == 2 else None,
        given_offsets,
        kernel_arguments(epilogue, inputs, ()) or None,
        row_index,
        checks.canonical_strides(out.tensor),
        counter,
        early,
        sm_count,
    )
    expected = torch.full((out_rows, features), torch.nan, device="cuda")
    reference.grouped_gemm(wide[:, :reduction], weights, offsets, epilogue, inputs, row_index, expected)
    written = expected[:, 0].isfinite()
    assert int(written.sum()) == kept
    assert_gemm_close(out.tensor[written], expected[written])
    assert out.is_poison(out.tensor[~written])
    out.check()


@pytest.mark.parametrize("spec", GEMMS, ids=lambda spec: spec.name)
def test_shipped_kernel(spec: GemmSpec, guarded: Any, assert_gemm_close: Any) -> None:
    torch.manual_seed(0)
    sm_count = checks.hopper_sm_count(torch.device("cuda", torch.cuda.current_device()))
    tile = spec.config.tile_tokens
    around = [count for width in spec.config.token_widths for count in (width - 1, width, width + 1)]
    odd = [0, 1, *around, 0, 0, 7, 2 * tile, 2 * tile + 1, 0, 3 * tile - 1, 1, 0]
    long_reduction = REDUCTION_TILE * LONG_REDUCTION + 8  # clusters wait for each other
    shapes = [
        (odd, 200, 392, "concatenated", sm_count),
        (odd, 1032, 72, "interleaved", sm_count),
        (odd, 136, 520, "up below gate", sm_count),
        (around, 264, 64, "padded", sm_count),
        (odd, 72, 2056, "separate", 2),  # two CTAs walk all tiles
        ([tile + 5], 392, 136, "concatenated", sm_count),
        ([2 * tile + 1, 3 * tile - 1, 5, 2 * tile], 520, long_reduction, "separate", 8),
        ([0, 0, 3] * 16, 8, 8, "padded", sm_count),
        ([0] * 16, 64, 64, "separate", sm_count),
    ]
    for shape in shapes:
        if sum(shape[0]):
            for counts_ids in {False, spec.config.gather}:
                check_kernel(spec, *shape, counts_ids, guarded, assert_gemm_close)
        else:
            check_all_empty(spec, len(shape[0]), guarded)


def check_all_empty(spec: GemmSpec, experts: int, guarded: Any) -> None:
    """No expert has rows: the kernel writes nothing."""
    dtype = getattr(torch, spec.dtype)
    weights = random_weights(experts, 64, 64, dtype, spec.epilogue.accumulators, "separate")
    out = guarded((UNUSED_ROWS, 64), dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = random_inputs(spec.epilogue, UNUSED_ROWS, experts, 64, dtype, generator)
    get_kernel(spec)(
        torch.full((UNUSED_ROWS, 64), torch.nan, dtype=dtype, device="cuda"),
        torch.arange(UNUSED_ROWS, dtype=torch.int32, device="cuda") if spec.config.gather else None,
        words_of_ids([0] * experts) if spec.config.gather else None,
        weights[0],
        weights[1] if len(weights) == 2 else None,
        offsets_of([0] * experts),
        kernel_arguments(spec.epilogue, inputs, ()) or None,
        torch.arange(UNUSED_ROWS, dtype=torch.int32, device="cuda") if spec.epilogue.scatter else None,
        out.tensor,
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        False,
        132,
    )
    assert out.is_poison(out.buffer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_public_function(dtype: torch.dtype, guarded: Any, assert_gemm_close: Any) -> None:
    """Through the heuristic, all three epilogues, for few and for many rows per expert."""
    torch.manual_seed(1)
    features, reduction = 200, 392
    for counts in ([1], [0, 3, 0], [5] * 7, [63, 0, 100, 1, 17], [257, 515, 0], [2] * 40):
        offsets, rows = offsets_of(counts), sum(counts)
        a_MK = torch.randn(rows, reduction, device="cuda").to(dtype)
        row_weight = {"row_weight": torch.rand(rows, device="cuda") + 0.5}
        row_index = torch.randperm(rows, device="cuda").int()
        for epilogue in (Identity(), SiluGate(), RoutingScale()):
            weights = random_weights(len(counts), features, reduction, dtype, epilogue.accumulators, "separate")
            tensors = row_weight if epilogue.tensors else {}
            index = row_index if epilogue.scatter else None
            out = guarded((rows, features), dtype, features + 8)
            cutlass_moe.grouped_gemm(
                a_MK,
                weights if len(weights) == 2 else weights[0],
                offsets,
                epilogue=epilogue,
                tensors=tensors,
                row_index=index,
                out=out.tensor,
            )
            expected = torch.full((rows, features), torch.nan, device="cuda")
            reference.grouped_gemm(a_MK, weights, offsets, epilogue, tensors, index, expected)
            assert_gemm_close(out.tensor, expected)
            out.check()


@pytest.mark.parametrize("counts", [[3, 60, 0, 70], [40, 300, 400, 0, 500]])
def test_some_of_the_experts(counts: list[int], guarded: Any, assert_gemm_close: Any) -> None:
    """Offsets of the last experts only: their first row is not row 0."""
    torch.manual_seed(3)
    offsets, rows = offsets_of(counts)[1:], sum(counts)
    a_MK = torch.randn(rows, 392, device="cuda").bfloat16()
    gate, up = weights = random_weights(len(counts) - 1, 200, 392, torch.bfloat16, 2, "separate")
    out = guarded((rows, 200), torch.bfloat16)
    cutlass_moe.grouped_gemm(a_MK, (gate, up), offsets, epilogue=SiluGate(), out=out.tensor)
    expected = torch.full((rows, 200), torch.nan, device="cuda")
    reference.grouped_gemm(a_MK, weights, offsets, SiluGate(), {}, None, expected)
    assert_gemm_close(out.tensor[counts[0] :], expected[counts[0] :])
    assert out.is_poison(out.tensor[: counts[0]])


def test_operands_of_odd_strides_in_size_one_dimensions(assert_gemm_close: Any) -> None:
    torch.manual_seed(2)
    a_MK = torch.randn(1, 64, device="cuda").bfloat16().as_strided((1, 64), (3, 1))
    b_ENK = random_weights(1, 72, 64, torch.bfloat16, 1, "separate")[0].as_strided((1, 72, 64), (5, 64, 1))
    out = torch.full((4096,), torch.nan, device="cuda").bfloat16().as_strided((1, 72), (7, 1))
    cutlass_moe.grouped_gemm(a_MK, b_ENK, offsets_of([1]), out=out)
    assert_gemm_close(out, a_MK.float() @ b_ENK[0].float().T)


def test_no_rows() -> None:
    a_MK = torch.zeros(0, 64, device="cuda").half()
    b_ENK = torch.zeros(3, 72, 64, device="cuda").half()
    assert cutlass_moe.grouped_gemm(a_MK, b_ENK, offsets_of([0, 0, 0])).shape == (0, 72)
