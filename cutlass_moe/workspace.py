"""The memory between the steps of the layer: its buffers' places in one workspace."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from cutlass_moe.config import route_chunks

ALIGNMENT_BYTES = 256  # of every buffer within a workspace: whole cache lines


class Layout(NamedTuple):
    """Byte offset of each buffer in the workspace, in the order of `aot/layer.c`, and the bytes of them all."""

    offsets: tuple[int, ...]
    size: int


def workspace_size(tokens: int, top_k: int, hidden: int, intermediate: int, experts: int, dtype: torch.dtype) -> int:
    """Bytes of the `workspace` that `fused_experts` takes for T tokens, K slots each, of these extents.

    A workspace for more tokens serves fewer, too: the size grows with each argument. About `2 * M * (H + I)` bytes with
    M = T * K, for the permuted tokens (whose place the rows of the second GEMM take) and the gated product.

    Args:
        tokens, top_k, hidden, intermediate, experts: T, K, H, I and E.
        dtype: of x and the weights, torch.bfloat16 or torch.float16.
    """
    return layout(tokens, top_k, hidden, intermediate, experts, dtype).size


@lru_cache(maxsize=4096)
def layout(tokens: int, top_k: int, hidden: int, intermediate: int, experts: int, dtype: torch.dtype) -> Layout:
    """Where the steps of a layer of these extents keep what they hand to each other; M = T * K rows."""
    slots = tokens * top_k
    index, value = 4, dtype.itemsize  # int32 or float32, and x's dtype
    sizes = (
        (experts + 1) * index,  # expert_offsets_E1
        slots * index,  # row_slot_M
        slots * index,  # row_token_M
        slots * index,  # slot_row_TK
        slots * index,  # row_weight_M
        route_chunks(slots) * experts * index,  # chunk_counts_CE
        2 * index,  # tile_counters_2
        slots * hidden * value,  # rows_MH: the permuted tokens, then the rows of the second GEMM
        slots * intermediate * value,  # h_MI
    )
    *offsets, size = accumulate((-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes), initial=0)
    return Layout(tuple(offsets), size)
