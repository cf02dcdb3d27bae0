"""Which expert a (token, slot) pair names, and how many name each.

Slot t * K + k has the id ids[t, k]; an id outside [0, E) drops it. Ids are an int32 or int64 tensor [T, K], or the
int32 words of one, [T, K, 1 or 2]: so kernels that only count need no variant for each dtype.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

DROPPED = -1
BATCH = 8  # ids that a thread loads before it looks at the first


@cute.jit
def expert_of(expert_id: cutlass.Numeric, experts: Int32) -> Int32:
    """The expert that an id names, or DROPPED. Compares in the id's own width: an int64 beyond 2^31 must not wrap."""
    expert = Int32(DROPPED)
    if expert_id >= 0 and expert_id < experts:
        expert = Int32(expert_id)
    return expert


@cute.jit
def place_of(slot: Int32, table_TK: cute.Tensor):
    """(token, k) of a slot."""
    top_k = cute.size(table_TK, mode=[1])
    return slot // top_k, slot % top_k


@cute.jit
def id_at(token: Int32, k: Int32, ids: cute.Tensor) -> cutlass.Numeric:
    """An id, from a tensor of ids or of their words."""
    if cutlass.const_expr(cute.rank(ids) == 2):
        return ids[token, k]
    low = ids[token, k, 0]
    high = low >> 31
    if cute.size(ids, mode=[2]) > 1:
        high = ids[token, k, 1]
    return Int64(high) << 32 | Int64(Uint32(low))


@cute.jit
def count_slots(
    ids: cute.Tensor,
    threads: cutlass.Constexpr[int],
    counts_E: cute.Tensor,
    before_E: cute.Tensor | None = None,
    end_slot: Int32 | None = None,
):
    """By a whole CTA: adds to counts_E how many slots name each expert, and to before_E how many before `end_slot`.

    Args:
        threads: of the CTA.
        counts_E, before_E: int32, in shared memory; zeros, and behind a barrier. Complete behind the next.
    """
    thread, _, _ = cute.arch.thread_idx()
    tokens, top_k = cute.size(ids, mode=[0]), cute.size(ids, mode=[1])
    token = thread // top_k
    k = thread - token * top_k
    slot = Int32(thread)
    while token < tokens:
        token, k = _count_batch(ids, threads, counts_E, before_E, end_slot, slot, token, k)
        slot += BATCH * threads


@cute.jit
def _count_batch(
    ids: cute.Tensor,
    threads: cutlass.Constexpr[int],
    counts_E: cute.Tensor,
    before_E: Any,
    end_slot: Int32 | None,
    slot: Int32,
    token: Int32,
    k: Int32,
):
    """Counts BATCH slots of a thread, `threads` apart. Returns the next one's token and k."""
    tokens, top_k = cute.size(ids, mode=[0]), cute.size(ids, mode=[1])
    experts = cute.size(counts_E)
    ids_of_batch, live = [], []
    for _ in cutlass.range_constexpr(BATCH):
        # The last token's past the last one: a load without a branch does not wait for the one before.
        ids_of_batch.append(id_at(cutlass.min(token, tokens - 1), k, ids))
        live.append(token < tokens)
        token += threads // top_k
        k += threads % top_k
        if k >= top_k:  # without a division for each slot
            token += 1
            k -= top_k
    for i in cutlass.range_constexpr(BATCH):
        expert = expert_of(ids_of_batch[i], experts)
        if live[i] and expert >= 0:
            cute.arch.atomic_add(counts_E.iterator + expert, Int32(1))
            if cutlass.const_expr(before_E is not None):
                if slot + i * threads < end_slot:
                    cute.arch.atomic_add(before_E.iterator + expert, Int32(1))
    return token, k
