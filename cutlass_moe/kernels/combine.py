"""combine: sums each token's rows in slot order, in fp32, and rounds once. No atomics: the result is bitwise
repeatable.

One thread owns 8 neighbouring columns (16 bytes) of one token; a CTA covers THREADS * VECTOR of them.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int64, cute

from cutlass_moe.kernels.l2_policy import EVICT_FIRST

VECTOR = 8  # elements of one 16-byte access
THREADS = 256


@cute.kernel
def combine_kernel(y_MH: cute.Tensor, slot_row_TK: cute.Tensor, out_TH: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    token, column_block, _ = cute.arch.block_idx()
    top_k = cute.size(slot_row_TK, mode=[1])
    column = column_block * THREADS + thread
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if column * VECTOR < cute.size(out_TH, mode=[1]):
        dtype = y_MH.element_type
        atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), dtype, num_bits_per_copy=VECTOR * dtype.width)
        total = cute.make_rmem_tensor(cute.make_layout((1, VECTOR)), Float32)
        total.fill(0.0)
        for k in cutlass.range(top_k, unroll=8):
            # The load does not wait for the slot's state; a dropped slot's row was never written and may hold NaN, so
            # it is left out, not multiplied by zero.
            row = cute.make_rmem_tensor((1, VECTOR), dtype)
            source = cute.local_tile(y_MH, (1, VECTOR), (Int64(token) * top_k + k, column))
            # Nobody reads it again: what is still to be read shall stay in L2 instead.
            cute.copy(atom, source[0, None], row[0, None], cache_policy=Int64(EVICT_FIRST))
            if slot_row_TK[token, k] >= 0:
                total.store(total.load() + row.load().to(Float32))
        out = cute.local_tile(out_TH, (1, VECTOR), (Int64(token), column))
        out.store(total.load().to(out_TH.element_type))


@cute.jit
def combine(y_MH: cute.Tensor, slot_row_TK: cute.Tensor, out_TH: cute.Tensor, stream):
    """out_TH[t] = sum over k, in order, of y_MH[t * K + k] for the slots with slot_row_TK[t, k] >= 0."""
    tokens, hidden = out_TH.shape
    combine_kernel(y_MH, slot_row_TK, out_TH).launch(
        grid=(tokens, cute.ceil_div(hidden, THREADS * VECTOR), 1),
        block=(THREADS, 1, 1),
        stream=stream,
        use_pdl=True,
    )
