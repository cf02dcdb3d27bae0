"""The memory between the steps of the layer: from torch's allocator, or carved out of a caller's workspace."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cutlass_moe.config import route_chunks

ALIGNMENT_BYTES = 256  # of every buffer within a workspace: whole cache lines, and what torch's allocator gives


class Buffers(NamedTuple):
    """What the steps of the layer hand to each other; M = T * K rows."""

    expert_offsets_E1: Tensor
    row_slot_M: Tensor
    row_token_M: Tensor
    slot_row_TK: Tensor
    row_weight_M: Tensor
    chunk_counts_CE: Tensor
    x_MH: Tensor
    h_MI: Tensor


class _Layout(NamedTuple):
    """Shape, dtype and byte offset of each of `Buffers`, and the bytes of them all."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
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
    return _layout(tokens, top_k, hidden, intermediate, experts, dtype).size


def allocate(
    like: Tensor, tokens: int, top_k: int, hidden: int, intermediate: int, experts: int, workspace: Tensor | None
) -> Buffers:
    """The layer's buffers, in `workspace` where one is given, which is large enough; else new, on `like`'s device.

    New ones are allocated one by one, each like a template: views into one allocation, or `torch.empty` with its
    keywords, would take the host twice as long.
    """
    extents = (tokens, top_k, hidden, intermediate, experts, like.dtype)
    if workspace is None:
        return Buffers(*map(torch.empty_like, _templates(*extents, like.device)))
    layout = _layout(*extents)
    views = []
    for shape, dtype, offset in zip(layout.shapes, layout.dtypes, layout.offsets, strict=True):
        length = torch.Size(shape).numel() * dtype.itemsize
        views.append(workspace[offset : offset + length].view(dtype).view(shape))
    return Buffers(*views)


@lru_cache(maxsize=1024)
def _templates(
    tokens: int, top_k: int, hidden: int, intermediate: int, experts: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Tensors of the buffers' shapes and dtypes, each one element stretched over its shape."""
    layout = _layout(tokens, top_k, hidden, intermediate, experts, dtype)
    return tuple(
        _one_element(kind, device).expand(shape) for shape, kind in zip(layout.shapes, layout.dtypes, strict=True)
    )


@lru_cache
def _one_element(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device)


@lru_cache(maxsize=4096)
def _layout(tokens: int, top_k: int, hidden: int, intermediate: int, experts: int, dtype: torch.dtype) -> _Layout:
    slots = tokens * top_k
    shapes: tuple[tuple[int, ...], ...] = (
        (experts + 1,),
        (slots,),
        (slots,),
        (tokens, top_k),
        (slots,),
        (route_chunks(slots), experts),
        (slots, hidden),
        (slots, intermediate),
    )
    dtypes = (torch.int32, torch.int32, torch.int32, torch.int32, torch.float32, torch.int32, dtype, dtype)
    sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, dtypes, strict=True)]
    starts = accumulate((-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes), initial=0)
    *offsets, size = starts
    return _Layout(shapes, dtypes, tuple(offsets), size)
