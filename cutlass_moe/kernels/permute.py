"""permute: copies each token's row to the rows of its slots, which are grouped by expert.

One thread owns 8 neighbouring columns (16 bytes) of one token: it reads them once and stores them once for each live
slot.
"""

from __future__ import annotations

import cutlass
from cutlass import Int64, cute

VECTOR = 8  # elements of one 16-byte access
THREADS = 256


@cute.kernel
def permute_kernel(x_TH: cute.Tensor, slot_row_TK: cute.Tensor, x_MH: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    token, column_block, _ = cute.arch.block_idx()
    column = column_block * THREADS + thread
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if column * VECTOR < cute.size(x_TH, mode=[1]):
        vector = cute.local_tile(x_TH, (1, VECTOR), (Int64(token), column)).load()
        for k in cutlass.range(cute.size(slot_row_TK, mode=[1]), unroll=8):
            row = slot_row_TK[token, k]
            if row >= 0:
                cute.local_tile(x_MH, (1, VECTOR), (Int64(row), column)).store(vector)


@cute.jit
def permute(x_TH: cute.Tensor, slot_row_TK: cute.Tensor, x_MH: cute.Tensor, stream):
    """x_MH[slot_row_TK[t, k]] = x_TH[t] for the slots with slot_row_TK[t, k] >= 0; other rows are left as they are."""
    tokens, hidden = x_TH.shape
    permute_kernel(x_TH, slot_row_TK, x_MH).launch(
        grid=(tokens, cute.ceil_div(hidden, THREADS * VECTOR), 1),
        block=(THREADS, 1, 1),
        stream=stream,
        use_pdl=True,
    )
