"""Combine: each token's sum over its slots, in slot order, so that every run gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from cutlass_moe import checks, dlpack
from cutlass_moe.config import CombineSpec
from cutlass_moe.routing import RoutingPlan


def combine(y_MH: Tensor, plan_or_slot_row_TK: RoutingPlan | Tensor, out: Tensor | None = None) -> Tensor:
    """`out[t] = sum over k of y[t * K + k]` in fp32 and in slot order, rounded once. Dropped slots count as
    zero.

    Args:
        y_MH: bfloat16 or float16 [M, H], contiguous, M = T * K; row = slot, as the scattering `RoutingScale`
            GEMM stores it.
        plan_or_slot_row_TK: a plan, or its `slot_row_TK`: int32 [T, K], negative where the slot is dropped.
        out: [T, H] of the same dtype to write to; rows may be strided, 16-byte aligned.

    Returns:
        `out`, or a new [T, H] tensor.

    Raises:
        TypeError, ValueError, RuntimeError: naming the argument, what was expected and what came.
    """
    if dlpack.is_foreign(y_MH):
        return dlpack.through_torch(combine, y_MH, plan_or_slot_row_TK, out=out)
    slot_row_TK = (
        plan_or_slot_row_TK.slot_row_TK if isinstance(plan_or_slot_row_TK, RoutingPlan) else plan_or_slot_row_TK
    )
    checks.check_combine(y_MH, slot_row_TK, out)
    if out is None:
        return torch.ops.cutlass_moe.combine(y_MH, slot_row_TK)
    torch.ops.cutlass_moe.combine_out(y_MH, slot_row_TK, out=out)
    return out


@lru_cache
def _combine_kernel(dtype: torch.dtype) -> Callable[..., None]:
    # Imported on first launch: the CPU implementation needs neither TVM-FFI nor the kernel library.
    from cutlass_moe.aot.load import get_kernel

    return get_kernel(CombineSpec(str(dtype).removeprefix("torch.")))


def launch_combine(y_MH: Tensor, slot_row_TK: Tensor, out_TH: Tensor) -> None:
    """Combines checked CUDA tensors with T * K > 0."""
    _combine_kernel(y_MH.dtype)(y_MH, slot_row_TK, checks.canonical_strides(out_TH))
