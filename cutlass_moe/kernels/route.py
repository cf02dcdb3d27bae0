"""route: stable counting sort of the (token, slot) pairs by expert, without a host synchronisation.

Rows are numbered expert by expert and, within an expert, in slot order, so the result depends on nothing but the ids.

Each CTA of `place_kernel` ranks the slots of a chunk, CHUNK_SLOTS at a time. How many slots each expert has, and how
many in earlier chunks, it counts itself where that is quicker than a launch; else `count_kernel` did, chunk by chunk.
Integer counters in shared memory are the only atomics: their sums do not depend on the order.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, cute
from cutlass.memory import SmemAllocator

from cutlass_moe.config import CHUNK_SLOTS, COUNTED_SLOTS, MAX_EXPERTS
from cutlass_moe.kernels import tile_scheduler
from cutlass_moe.kernels.slots import DROPPED, count_slots, expert_of, place_of

THREADS = CHUNK_SLOTS  # one slot a thread and round
assert THREADS >= MAX_EXPERTS, "each expert needs a thread"
WARPS = THREADS // 32
ALL_LANES = 0xFFFFFFFF


@cute.jit
def expert_at(slot: Int32, ids_TK: cute.Tensor, experts: Int32) -> Int32:
    """The expert of a slot; DROPPED past the last slot, too."""
    expert = Int32(DROPPED)
    if slot < cute.size(ids_TK):
        expert = expert_of(ids_TK[place_of(slot, ids_TK)], experts)
    return expert


@cute.jit
def weight_at(slot: Int32, weights_TK: cute.Tensor | None) -> Float32:
    """The routing weight of a slot; 0 past the last slot, and where there are none."""
    weight = Float32(0.0)
    if cutlass.const_expr(weights_TK is not None):
        if slot < cute.size(weights_TK):
            weight = weights_TK[place_of(slot, weights_TK)].to(Float32)
    return weight


@cute.jit
def chunk_rounds(slots: Int32, chunks: Int32) -> Int32:
    """Rounds of CHUNK_SLOTS slots that each chunk takes, so that `chunks` of them cover all slots."""
    return cute.ceil_div(cute.ceil_div(slots, CHUNK_SLOTS), chunks)


@cute.kernel
def count_kernel(ids_TK: cute.Tensor, chunk_counts_CE: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    chunk, _, _ = cute.arch.block_idx()
    chunks, experts = chunk_counts_CE.shape
    slots = cute.size(ids_TK)
    s_counts = SmemAllocator().allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS), byte_alignment=16)
    for e in cutlass.range(thread, experts, THREADS):
        s_counts[e] = Int32(0)
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    rounds = chunk_rounds(slots, chunks)
    for r in cutlass.range(rounds):
        expert = expert_at((chunk * rounds + r) * THREADS + thread, ids_TK, experts)
        if expert >= 0:
            cute.arch.atomic_add(s_counts.iterator + expert, Int32(1))
    cute.arch.sync_threads()
    for e in cutlass.range(thread, experts, THREADS):
        chunk_counts_CE[chunk, e] = s_counts[e]


@cute.kernel
def place_kernel(
    ids_TK: cute.Tensor,
    weights_TK: cute.Tensor | None,
    expert_offsets_E1: cute.Tensor,
    row_slot_M: cute.Tensor,
    row_token_M: cute.Tensor,
    slot_row_TK: cute.Tensor,
    row_weight_M: cute.Tensor | None,
    chunk_counts_CE: cute.Tensor,
    tile_counters_2: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    chunk, _, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    chunks, experts = chunk_counts_CE.shape
    slots = cute.size(ids_TK)
    smem = SmemAllocator()
    s_offsets = smem.allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS + 1), byte_alignment=16)
    s_next_row = smem.allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS), byte_alignment=16)
    s_warps = smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
    # Of each warp: its slots of each expert, then the row of the first of them.
    layout = cute.make_layout((WARPS, MAX_EXPERTS), stride=(MAX_EXPERTS, 1))
    s_rows = smem.allocate_tensor(Int32, layout, byte_alignment=16)
    if thread < experts:
        s_offsets[thread] = Int32(0)
        s_next_row[thread] = Int32(0)
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

    rounds = chunk_rounds(slots, chunks)
    first_slot = chunk * rounds * THREADS
    warps = cutlass.min(cute.ceil_div(slots, 32), WARPS)  # that have slots
    slot = first_slot + thread
    expert = expert_at(slot, ids_TK, experts)
    weight = weight_at(slot, weights_TK)  # long before it is stored: both loads are on the way together

    # Totals of each expert, and how many of them lie in earlier chunks.
    if chunks == 1:
        if expert >= 0:
            cute.arch.atomic_add(s_offsets.iterator + expert, Int32(1))
    elif slots <= COUNTED_SLOTS:
        totals_E = cute.make_tensor(s_offsets.iterator, cute.make_layout(experts))
        count_slots(ids_TK, THREADS, totals_E, s_next_row, first_slot)
    elif thread < experts:
        total = Int32(0)
        before = Int32(0)
        for c in cutlass.range(chunks, unroll=16):
            count = chunk_counts_CE[c, thread]
            total += count
            if c < chunk:
                before += count
        s_offsets[thread] = total
        s_next_row[thread] = before
    cute.arch.sync_threads()
    first, second = tile_scheduler.two_counts(s_offsets, experts)
    tile_scheduler.sum_up(first, second, experts, s_offsets, s_warps)
    cute.arch.sync_threads()
    if thread < experts:
        s_next_row[thread] = s_next_row[thread] + s_offsets[thread]
    if chunk == 0:
        for e in cutlass.range(thread, experts + 1, THREADS):
            expert_offsets_E1[e] = s_offsets[e]
        if thread < cute.size(tile_counters_2):
            tile_counters_2[thread] = Int32(0)

    earlier = (Uint32(1) << lane) - 1  # lanes
    for r in cutlass.range(rounds):
        if thread < experts:
            for w in cutlass.range(warps):
                s_rows[w, thread] = Int32(0)
        cute.arch.sync_threads()
        same = cute.arch.match_sync(ALL_LANES, expert)
        if expert >= 0 and same & earlier == 0:
            s_rows[warp, expert] = cute.arch.popc(same)
        cute.arch.sync_threads()
        if thread < experts:
            row = s_next_row[thread]
            for w in cutlass.range(warps, unroll=8):
                count = s_rows[w, thread]
                s_rows[w, thread] = row
                row += count
            s_next_row[thread] = row
        cute.arch.sync_threads()
        if expert >= 0:
            row = s_rows[warp, expert] + cute.arch.popc(same & earlier)
            token, k = place_of(slot, ids_TK)
            row_slot_M[row] = slot
            row_token_M[row] = token
            slot_row_TK[token, k] = row
            if cutlass.const_expr(weights_TK is not None):
                row_weight_M[row] = weight
        elif slot < slots:
            slot_row_TK[place_of(slot, ids_TK)] = Int32(DROPPED)
        slot += THREADS
        if r + 1 < rounds:
            cute.arch.sync_threads()
            expert = expert_at(slot, ids_TK, experts)
            weight = weight_at(slot, weights_TK)


@cute.jit
def route(
    ids_TK: cute.Tensor,
    weights_TK: cute.Tensor | None,
    expert_offsets_E1: cute.Tensor,
    row_slot_M: cute.Tensor,
    row_token_M: cute.Tensor,
    slot_row_TK: cute.Tensor,
    row_weight_M: cute.Tensor | None,
    chunk_counts_CE: cute.Tensor,
    tile_counters_2: cute.Tensor,
    stream,
):
    """Sorts the slots by expert.

    Args:
        ids_TK: expert id of each slot, int32 or int64, any strides.
        weights_TK: routing weight of each slot, likewise, or None.
        expert_offsets_E1: out, int32: first row of each expert, then the number of rows.
        row_slot_M: out, int32: the slot of each row; unset past the last row.
        row_token_M: out, int32: the token of each row; unset past the last row.
        slot_row_TK: out, int32: the row of each slot, -1 where it is dropped.
        row_weight_M: out, fp32: the routing weight of each row, or None.
        chunk_counts_CE: scratch, int32, C = `config.route_chunks(M)` chunks; used beyond COUNTED_SLOTS slots.
        tile_counters_2: out, int32: zeros, from which the layer's two GEMMs count their tiles.
    """
    chunks, _ = chunk_counts_CE.shape
    if cute.size(ids_TK) > COUNTED_SLOTS:
        count_kernel(ids_TK, chunk_counts_CE).launch(
            grid=(chunks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )
    place_kernel(
        ids_TK,
        weights_TK,
        expert_offsets_E1,
        row_slot_M,
        row_token_M,
        slot_row_TK,
        row_weight_M,
        chunk_counts_CE,
        tile_counters_2,
    ).launch(grid=(chunks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)
