"""What the L2 cache shall do with the lines of an access: cache policies, as `createpolicy.fractional` encodes them.

The limits are measured, up to a factor; docs/design.md says what each is worth. Plain integer logic, which also runs on
the host.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from cutlass_moe.config import ELEMENT_BYTES

EVICT_FIRST = 0x12F0000000000000
EVICT_NORMAL = 0x1000000000000000
EVICT_LAST = 0x14F0000000000000

# Rows of an expert, the least and the most with which its weights may go last.
FEWEST_ROWS, MOST_ROWS = 24, 192
MUCH_BYTES = 180 * 2**20  # of scattered rows, from which weights go last
KEPT_BYTES = 2**28  # of an output, below which it is kept
INPUT_BYTES = 24 * 2**20  # of the rows that are multiplied, from which scattered outputs are kept, too


@cute.jit
def bytes_of(matrix: cute.Tensor) -> Int64:
    rows, columns = matrix.shape
    return Int64(rows) * columns * (matrix.element_type.width // 8)


@cute.jit
def of_weights(rows: Int32, tokens: Int32, fills_gpu: Boolean, scatters_much: Boolean) -> Int64:
    """Of the weights of a tile of `tokens` of an expert's rows.

    Those of one token tile are a stream. It goes first where it would push out activations that are read again later.
    Where one expert's weight tiles keep all clusters busy (`fills_gpu`), its rows stay in L2 by being read, and the
    stream is faster if it goes last; so it is beside many writes (`scatters_much`: MUCH_BYTES or more of scattered
    rows). The weights of several token tiles, which run side by side, must stay until the last has read them.
    """
    policy = Int64(EVICT_FIRST)
    if fills_gpu and tokens >= FEWEST_ROWS and tokens <= MOST_ROWS:
        policy = Int64(EVICT_LAST)
    if scatters_much:
        policy = Int64(EVICT_LAST)
    if rows > tokens:
        policy = Int64(EVICT_NORMAL)
    return policy


@cute.jit
def of_output(out_MN: cute.Tensor, row_index_M: cute.Tensor | None, reduction: Int32) -> Int64:
    """Of what a GEMM stores: out_MN, its rows scattered by row_index_M or, without, in their order.

    The next kernel reads it, and the stream of weights must not push it out of L2; but a large output only pushes out
    the operands of the tiles that run side by side. Scattered rows are read by combine, which streams no weights: they
    may go first, but where the rows that are multiplied, of `reduction` elements, fill L2.
    """
    policy = Int64(EVICT_LAST)
    if cutlass.const_expr(row_index_M is not None):
        if Int64(cute.size(row_index_M)) * reduction * ELEMENT_BYTES < INPUT_BYTES:
            policy = Int64(EVICT_FIRST)
    if bytes_of(out_MN) >= KEPT_BYTES:
        policy = Int64(EVICT_NORMAL)
    return policy
