"""Which tile a CTA works on: integer logic over the experts' row counts, read on the device.

Most functions here are plain integer arithmetic on tensors, so they also run on the host: the CPU tests call the very
source that the kernels use. Only `sum_up`, `fill_tables` and what this calls need a CTA.

An expert's rows are split evenly, in granules of 16, over the fewest tiles of at most `tile_tokens` rows: 257 rows
under a width of 256 are two tiles of 128 and 129, not one of 256 and one of 1; and no more than one granule of an
expert is padded. Within an expert neighbouring tiles are the token tiles of one weight tile, so that a weight tile is
read from HBM once and then from L2.

Experts with several token tiles keep the tensor cores busy, those with one keep HBM busy. With skewed routing there are
both, and one kind after the other would leave half of the GPU idle in turns: so work numbers mix the two kinds evenly,
each expert by expert. Where all are of one kind, work goes simply expert by expert.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute

from cutlass_moe.config import MAX_EXPERTS, ROW_GRANULE
from cutlass_moe.kernels import slots

# A count of token tiles keeps those of experts with several above, and those of experts with one in this many bits.
SINGLE_BITS = MAX_EXPERTS.bit_length()


@cute.jit
def count_token_tiles(rows: Int32, tile_tokens: cutlass.Constexpr[int]) -> Int32:
    """Token tiles of an expert with `rows` rows."""
    return (rows + (tile_tokens - 1)) // tile_tokens


@cute.jit
def count_by_kind(tiles: Int32) -> Int32:
    """The token tiles of one expert as a count by kind. Such counts add up."""
    several = cutlass.min(tiles - 1, 1)  # 1 or 0; without tiles nothing counts
    return tiles * (1 + several * ((1 << SINGLE_BITS) - 1))


@cute.jit
def of_kind(count: Int32, several: Boolean) -> Int32:
    """The tiles of one kind in a count."""
    tiles = count & ((1 << SINGLE_BITS) - 1)
    if several:
        tiles = count >> SINGLE_BITS
    return tiles


@cute.jit
def all_tiles(count: Int32) -> Int32:
    return (count >> SINGLE_BITS) + (count & ((1 << SINGLE_BITS) - 1))


@cute.jit
def tile_begin(rows: Int32, tiles: Int32, tile: Int32) -> Int32:
    """First row, within its expert, of token tile `tile` of `tiles`; of tile == tiles the end, up to a granule more."""
    granules = (rows + (ROW_GRANULE - 1)) // ROW_GRANULE
    each = granules // tiles
    rest = granules - each * tiles  # the last so many tiles have one more
    return (tile * each + cutlass.max(0, tile - (tiles - rest))) * ROW_GRANULE


@cute.jit
def find_expert(tile_starts_E1: cute.Tensor, experts: Int32, token_tile: Int32, several: Boolean) -> Int32:
    """The expert that holds token tile `token_tile` of a kind: the last one that starts with it or before."""
    low = Int32(0)
    high = experts
    while high - low > 1:
        middle = (low + high) // 2
        if of_kind(tile_starts_E1[middle], several) <= token_tile:
            low = middle
        else:
            high = middle
    return low


@cute.jit
def mix(work: Int32, tiles: Int32):
    """Work number `work` -> (whether its expert has several token tiles, its number among the work of that kind).

    In each round of as many numbers as there are token tiles both kinds have their share, evenly spread.

    Args:
        tiles: all token tiles, a count by kind.
    """
    total = all_tiles(tiles)
    singles = of_kind(tiles, Boolean(False))
    several = singles == 0
    number = work
    if singles > 0 and singles < total:
        turn = work // total
        place = work - turn * total
        # place * singles // total of a round's first `place` numbers are singles: at most one for each expert, so that
        # no product overflows.
        singles_before = place * singles // total
        several = place * singles - singles_before * total + singles < total
        number = turn * singles + singles_before
        if several:
            number = turn * (total - singles) + place - singles_before
    return several, number


@cute.jit
def tile_of_expert(
    number: Int32, feature_tiles: Int32, expert: Int32, offsets_E1: cute.Tensor, first_tile: Int32, token_tiles: Int32
):
    """Number among the work of a kind, of this expert -> (expert, feature tile, first row, rows).

    Args:
        feature_tiles: tiles of the weight rows (of a whole cluster).
        offsets_E1: first row of each expert, then the number of rows.
        first_tile, token_tiles: of this kind the token tiles before the expert, and its own.
    """
    inner = number - first_tile * feature_tiles
    feature_tile = inner // token_tiles
    token_tile = inner - feature_tile * token_tiles
    first_row = offsets_E1[expert]
    rows = offsets_E1[expert + 1] - first_row
    begin = tile_begin(rows, token_tiles, token_tile)
    end = cutlass.min(tile_begin(rows, token_tiles, token_tile + 1), rows)
    return expert, feature_tile, first_row + begin, end - begin


@cute.jit
def locate_tile(
    work: Int32,
    feature_tiles: Int32,
    experts: Int32,
    offsets_E1: cute.Tensor,
    tile_starts_E1: cute.Tensor,
):
    """Work number `work` -> its tile, as `tile_of_expert` returns it; no rows behind the last tile.

    Args:
        work: from 0; all_tiles(tile_starts_E1[experts]) * feature_tiles is the first without a tile.
        feature_tiles, offsets_E1: as there.
        tile_starts_E1: token tiles before each expert, then of all, counted by kind.
    """
    tile = Int32(0), Int32(0), Int32(0), Int32(0)
    tiles = tile_starts_E1[experts]
    if work < all_tiles(tiles) * feature_tiles:
        several, number = mix(work, tiles)
        expert = find_expert(tile_starts_E1, experts, number // feature_tiles, several)
        first_tile = of_kind(tile_starts_E1[expert], several)
        token_tiles = of_kind(tile_starts_E1[expert + 1], several) - first_tile
        tile = tile_of_expert(number, feature_tiles, expert, offsets_E1, first_tile, token_tiles)
    return tile


@cute.jit
def two_counts(counts_E: cute.Tensor, experts: Int32):
    """The counts of this thread's two experts, as `sum_up` takes them: zeros past the last."""
    thread, _, _ = cute.arch.thread_idx()
    mine = 2 * thread  # and the next
    first, second = Int32(0), Int32(0)
    if mine < experts:
        first = counts_E[mine]
    if mine + 1 < experts:
        second = counts_E[mine + 1]
    return first, second


@cute.jit
def sum_up(first: Int32, second: Int32, length: Int32, sums_N1: cute.Tensor, s_warps: cute.Tensor):
    """By a whole CTA: sums_N1[i] becomes the sum of the first i values, for 0 <= i <= length <= 2 * threads.

    Thread t brings values 2t and 2t + 1, zeros from `length` on. A barrier is inside; the sums are complete behind the
    next.

    Args:
        sums_N1: in shared memory.
        s_warps: shared memory for an int32 of each of the CTA's warps.

    Returns:
        The sum before this thread's values, and the sum of all.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    inclusive = first + second
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(inclusive, 1 << step)
        if lane >= (1 << step):
            inclusive += below
    if lane == 31:
        s_warps[warp] = inclusive
    cute.arch.sync_threads()
    total = Int32(0)
    before = inclusive - first - second
    for w in cutlass.range_constexpr(cute.size(s_warps)):
        if w < warp:
            before += s_warps[w]
        total += s_warps[w]
    if thread == 0:
        sums_N1[0] = Int32(0)
    if 2 * thread < length:
        sums_N1[2 * thread + 1] = before + first
    if 2 * thread + 1 < length:
        sums_N1[2 * thread + 2] = before + first + second
    return before, total


@cute.jit
def _rows_from_offsets(offsets_E1: cute.Tensor, s_offsets_E1: cute.Tensor):
    """Copies the offsets to shared memory. Returns the first rows of this thread's two experts, and their end."""
    thread, _, _ = cute.arch.thread_idx()
    experts = cute.size(offsets_E1) - 1
    expert = 2 * thread
    # Past the last expert its end again: no rows.
    first_row, second_row, end_row = (offsets_E1[cutlass.min(expert + i, experts)] for i in range(3))
    if thread == 0:
        s_offsets_E1[0] = first_row
    if expert < experts:
        s_offsets_E1[expert + 1] = second_row
    if expert + 1 < experts:
        s_offsets_E1[expert + 2] = end_row
    return first_row, second_row, end_row


@cute.jit
def _rows_from_ids(
    ids_TKW: cute.Tensor,
    threads: cutlass.Constexpr[int],
    s_offsets_E1: cute.Tensor,
    s_counts_E: cute.Tensor,
    s_warps: cute.Tensor,
):
    """The same, from the ids: the offsets that route will store."""
    thread, _, _ = cute.arch.thread_idx()
    experts = cute.size(s_counts_E)
    for e in cutlass.range(thread, experts, threads):
        s_counts_E[e] = Int32(0)
    cute.arch.sync_threads()
    slots.count_slots(ids_TKW, threads, s_counts_E)
    cute.arch.sync_threads()
    first, second = two_counts(s_counts_E, experts)
    before, _ = sum_up(first, second, experts, s_offsets_E1, s_warps)
    cute.arch.sync_threads()  # s_warps is free
    return before, before + first, before + first + second


@cute.jit
def fill_tables(
    offsets_E1: cute.Tensor,
    ids_TKW: cute.Tensor | None,
    threads: cutlass.Constexpr[int],
    tile_tokens: cutlass.Constexpr[int],
    work: Int32,
    feature_tiles: Int32,
    s_offsets_E1: cute.Tensor,
    s_tile_starts_E1: cute.Tensor,
    s_warps: cute.Tensor,
    s_tile: cute.Tensor,
):
    """By a whole CTA of `threads`: fills the two tables in shared memory that `locate_tile` searches, and s_tile with
    what it would find for `work`: the thread that counts that tile's expert needs no search. Complete on return.

    With ids (T > 0) the rows are counted from them, and of offsets_E1 only the length is read."""
    thread, _, _ = cute.arch.thread_idx()
    experts = cute.size(offsets_E1) - 1
    expert = 2 * thread
    if thread == 0:
        for i in cutlass.range_constexpr(4):
            s_tile[i] = Int32(0)
    first_row, second_row, end_row = Int32(0), Int32(0), Int32(0)
    counted = Boolean(False)
    if cutlass.const_expr(ids_TKW is not None):
        counted = cute.size(ids_TKW, mode=[0]) > 0
        if counted:
            s_counts_E = cute.make_tensor(s_tile_starts_E1.iterator, cute.make_layout(experts))
            first_row, second_row, end_row = _rows_from_ids(ids_TKW, threads, s_offsets_E1, s_counts_E, s_warps)
    if not counted:
        first_row, second_row, end_row = _rows_from_offsets(offsets_E1, s_offsets_E1)
    first = count_by_kind(count_token_tiles(second_row - first_row, tile_tokens))
    second = count_by_kind(count_token_tiles(end_row - second_row, tile_tokens))
    before, tiles = sum_up(first, second, experts, s_tile_starts_E1, s_warps)
    several, number = mix(work, tiles)
    begin = of_kind(before, several)
    middle = of_kind(before + first, several)
    end = of_kind(before + first + second, several)
    if number >= begin * feature_tiles and number < end * feature_tiles:
        if number < middle * feature_tiles:
            end = middle
        else:
            begin = middle
            expert += 1
        found = tile_of_expert(number, feature_tiles, expert, s_offsets_E1, begin, end - begin)
        for i in cutlass.range_constexpr(4):
            s_tile[i] = found[i]
    cute.arch.sync_threads()
