"""Integer logic of the kernels, run on the host from the very `@cute.jit` functions that the kernels call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

cute = pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
cutlass = pytest.importorskip("cutlass")

from cutlass.cute.runtime import from_dlpack  # noqa: E402

from cutlass_moe.checks import MAX_ROWS  # noqa: E402
from cutlass_moe.config import CHUNK_SLOTS, ROW_GRANULE, route_chunks  # noqa: E402
from cutlass_moe.kernels import l2_policy, route, slots, tile_scheduler  # noqa: E402

TILE_TOKENS = (32, 160, 288)
row_counts = st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(100, 700)), min_size=1, max_size=40)


@cute.jit
def walk_tiles(
    offsets_E1: cute.Tensor,
    tile_starts_E1: cute.Tensor,
    found_W4: cute.Tensor,
    feature_tiles: cutlass.Int32,
    works: cutlass.Int32,
):
    experts = cute.size(offsets_E1) - 1
    for work in cutlass.range(works):
        expert, feature_tile, row, rows = tile_scheduler.locate_tile(
            work, feature_tiles, experts, offsets_E1, tile_starts_E1
        )
        found_W4[work, 0] = expert
        found_W4[work, 1] = feature_tile
        found_W4[work, 2] = row
        found_W4[work, 3] = rows


@cute.jit
def count_tiles(rows_E: cute.Tensor, tiles_E: cute.Tensor, counts_E: cute.Tensor, tile_tokens: cutlass.Constexpr):
    for e in cutlass.range(cute.size(rows_E)):
        tiles = tile_scheduler.count_token_tiles(rows_E[e], tile_tokens)
        tiles_E[e], counts_E[e] = tiles, tile_scheduler.count_by_kind(tiles)


@cute.jit
def name_experts(ids: cute.Tensor, experts_S: cute.Tensor, experts: cutlass.Int32):
    for i in cutlass.range(cute.size(experts_S)):
        experts_S[i] = slots.expert_of(slots.id_at(i, cutlass.Int32(0), ids), experts)


@cute.jit
def rounds_of(slots_N: cute.Tensor, chunks_N: cute.Tensor, rounds_N: cute.Tensor):
    for i in cutlass.range(cute.size(slots_N)):
        rounds_N[i] = route.chunk_rounds(slots_N[i], chunks_N[i])


def as_cute(tensor: torch.Tensor) -> Any:
    return from_dlpack(tensor).mark_layout_dynamic(tensor.dim() - 1)


@pytest.fixture(scope="module")
def compiled() -> Callable[..., Any]:
    """`cute.compile` with a memory: one compilation for each function and constant."""
    cache: dict[Any, Any] = {}

    def call(function: Any, *arguments: Any, constants: tuple[Any, ...] = ()) -> None:
        runtime = [as_cute(a) if isinstance(a, torch.Tensor) else cutlass.Int32(a) for a in arguments]
        key = (function, constants, tuple((a.dtype, a.dim()) for a in arguments if isinstance(a, torch.Tensor)))
        if key not in cache:
            cache[key] = cute.compile(function, *runtime, *constants)
        cache[key](*runtime)

    return call


def exclusive_sums(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32)


@pytest.mark.parametrize("tile_tokens", TILE_TOKENS)
@settings(max_examples=40, deadline=None)
@given(counts=row_counts, feature_tiles=st.integers(1, 5))
def test_tiles_cover_every_row_once(
    counts: list[int], feature_tiles: int, tile_tokens: int, compiled: Callable[..., Any]
) -> None:
    rows_E = torch.tensor(counts, dtype=torch.int32)
    tiles_E, counts_E = torch.full_like(rows_E, -1), torch.full_like(rows_E, -1)
    compiled(count_tiles, rows_E, tiles_E, counts_E, constants=(tile_tokens,))
    assert tiles_E.tolist() == [-(-count // tile_tokens) for count in counts]
    offsets, starts = exclusive_sums(rows_E), exclusive_sums(counts_E)
    works = int(tiles_E.sum()) * feature_tiles
    found = torch.full((works + 1, 4), -1, dtype=torch.int32)
    compiled(walk_tiles, offsets, starts, found, feature_tiles, works)
    assert found[works].tolist() == [-1] * 4

    covered = torch.zeros(feature_tiles, int(offsets[-1]), dtype=torch.int32)
    for expert, feature_tile, row, rows in found[:works].tolist():
        assert 0 < rows <= tile_tokens, "no tile is empty and none is wider than the widest instruction"
        assert offsets[expert] <= row and row + rows <= offsets[expert + 1], "a tile stays within its expert"
        assert (row - int(offsets[expert])) % ROW_GRANULE == 0
        covered[feature_tile, row : row + rows] += 1
    assert bool((covered == 1).all())
    for e, count in enumerate(counts):
        sizes = [rows for expert, feature_tile, _, rows in found[:works].tolist() if (expert, feature_tile) == (e, 0)]
        assert sum(-(-rows // ROW_GRANULE) for rows in sizes) == -(-count // ROW_GRANULE), (
            "one padded granule an expert"
        )
        assert not sizes or max(sizes) - min(sizes) < 2 * ROW_GRANULE, "tiles of an expert are even"

    # Experts with one tile, and those with several: each kind in the experts' order, and both evenly spread.
    single = [int(tiles_E[expert]) == 1 for expert, *_ in found[:works].tolist()]
    for kind in (True, False):
        experts = [
            expert for (expert, *_), is_single in zip(found[:works].tolist(), single, strict=True) if is_single == kind
        ]
        assert experts == sorted(experts)
    for number in range(works + 1):
        assert abs(sum(single[:number]) - number * sum(single) / max(works, 1)) < 1


@pytest.mark.parametrize("tile_tokens", [32, 96])
def test_all_rows_of_one_expert(tile_tokens: int, compiled: Callable[..., Any]) -> None:
    """As many as are accepted: no product may overflow."""
    offsets, counts = torch.tensor([0, MAX_ROWS], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tiles = torch.zeros(1, dtype=torch.int32)
    compiled(count_tiles, offsets[1:], tiles, counts, constants=(tile_tokens,))
    works = int(tiles)
    found = torch.zeros(works, 4, dtype=torch.int32)
    compiled(walk_tiles, offsets, exclusive_sums(counts), found, 1, works)
    rows = found[:, 3].long()
    assert int(rows.sum()) == MAX_ROWS and int(rows.min()) > 0 and int(rows.max()) <= tile_tokens
    assert torch.equal(found[1:, 2].long(), rows.cumsum(0)[:-1])


def test_one_row_more_than_a_tile_does_not_cost_two_full_tiles(compiled: Callable[..., Any]) -> None:
    offsets, counts = torch.tensor([0, 257], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    compiled(count_tiles, offsets[1:], counts.clone(), counts, constants=(256,))
    starts = exclusive_sums(counts)
    found = torch.zeros(2, 4, dtype=torch.int32)
    compiled(walk_tiles, offsets, starts, found, 1, 2)
    assert found[:, 3].tolist() == [128, 129]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), experts=st.integers(1, 9))
def test_experts_of_ids_and_of_their_words(
    data: st.DataObject, experts: int, dtype: torch.dtype, compiled: Callable[..., Any]
) -> None:
    """Dropped ids, and int64 ids that would be valid if they were cut to 32 bits."""
    wild = [-1, experts, 2**31 - 1, -(2**31)] + ([2**31, 2**32, 2**32 + 1, -(2**40)] if dtype == torch.int64 else [])
    one_id = st.one_of(st.integers(0, experts - 1), st.sampled_from(wild))
    ids = torch.tensor(data.draw(st.lists(one_id, min_size=1, max_size=40)), dtype=dtype).view(-1, 1)
    expected = torch.where((ids >= 0) & (ids < experts), ids, -1).to(torch.int32).flatten()
    for given_ids in (ids, ids.view(torch.int32).view(len(ids), 1, -1)):
        named = torch.full((len(ids),), -7, dtype=torch.int32)
        compiled(name_experts, given_ids, named, experts)
        assert torch.equal(named, expected)


def test_chunks_cover_all_slots(compiled: Callable[..., Any]) -> None:
    slots = torch.tensor([1, 2, 511, 512, 513, 4096, 65536, 65537, 131072, 1_000_003, 2**30], dtype=torch.int32)
    chunks = torch.tensor([route_chunks(int(n)) for n in slots], dtype=torch.int32)
    rounds = torch.zeros_like(slots)
    compiled(rounds_of, slots, chunks, rounds)
    covered = rounds.long() * chunks * CHUNK_SLOTS
    assert bool((covered >= slots).all())
    # Less than one more round of every chunk would be too few.
    assert bool(((rounds.long() - 1) * chunks * CHUNK_SLOTS < slots).all())


@cute.jit
def weights_policies(cases_N4: cute.Tensor, policies_N: cute.Tensor):
    for i in cutlass.range(cute.size(policies_N)):
        rows, tokens, fills_gpu, scatters_much = (cases_N4[i, n] for n in range(4))
        policies_N[i] = l2_policy.of_weights(rows, tokens, fills_gpu != 0, scatters_much != 0)


@cute.jit
def output_policy(out_MN: cute.Tensor, row_index_M: cute.Tensor, policies_2: cute.Tensor, reduction: cutlass.Int32):
    policies_2[0] = l2_policy.of_output(out_MN, None, reduction)
    policies_2[1] = l2_policy.of_output(out_MN, row_index_M, reduction)


def test_weights_are_a_stream_or_shared(compiled: Callable[..., Any]) -> None:
    first, normal, last = l2_policy.EVICT_FIRST, l2_policy.EVICT_NORMAL, l2_policy.EVICT_LAST
    expected = {  # rows of the expert, of the tile, whether an expert fills the GPU, whether much is scattered
        (8, 8, 1, 0): first,
        (23, 23, 1, 0): first,
        (24, 24, 1, 0): last,
        (192, 192, 1, 0): last,
        (193, 193, 1, 0): first,
        (64, 64, 0, 0): first,
        (64, 64, 0, 1): last,
        (200, 100, 1, 0): normal,
        (200, 100, 0, 1): normal,
    }
    policies = torch.zeros(len(expected), dtype=torch.int64)
    compiled(weights_policies, torch.tensor(list(expected), dtype=torch.int32), policies)
    assert policies.tolist() == list(expected.values())


@pytest.mark.parametrize(
    ("rows", "hidden", "reduction", "in_order", "scattered"),
    [  # GEMM 2 of ling_flash at T = 256, 2048 and 4096; of jamba_large at 512
        (2048, 4096, 1024, "EVICT_LAST", "EVICT_FIRST"),
        (16384, 4096, 1024, "EVICT_LAST", "EVICT_LAST"),
        (32768, 4096, 1024, "EVICT_NORMAL", "EVICT_NORMAL"),
        (1024, 8192, 24576, "EVICT_LAST", "EVICT_LAST"),
    ],
)
def test_what_is_stored_stays_where_it_is_read_again(
    rows: int, hidden: int, reduction: int, in_order: str, scattered: str, compiled: Callable[..., Any]
) -> None:
    out, row_index = torch.empty(rows, hidden, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.int32)
    policies = torch.zeros(2, dtype=torch.int64)
    compiled(output_policy, out, row_index, policies, reduction)
    assert policies.tolist() == [getattr(l2_policy, in_order), getattr(l2_policy, scattered)]
