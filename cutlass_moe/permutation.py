"""Permutation: copies of the tokens' rows, grouped by expert, for the first grouped GEMM."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from cutlass_moe import checks, dlpack
from cutlass_moe.config import PermuteSpec
from cutlass_moe.routing import RoutingPlan


def permute(x_TH: Tensor, plan: RoutingPlan) -> Tensor:
    """Copies row t of `x_TH` to the row of each of its kept slots.

    Args:
        x_TH: bfloat16 or float16 [T, H]; rows may be strided, 16-byte aligned.
        plan: what `plan_routing` returned for the same T tokens.

    Returns:
        `x_MH` [M, H], M = T * K. Rows from `plan.expert_offsets_E1[E]` on are unspecified.

    Raises:
        TypeError, ValueError, RuntimeError: naming the argument, what was expected and what came.
    """
    if dlpack.is_foreign(x_TH):
        return dlpack.through_torch(permute, x_TH, plan)
    checks.check_permute(x_TH, plan.slot_row_TK)
    return torch.ops.cutlass_moe.permute(x_TH, plan.slot_row_TK)


@lru_cache
def _permute_kernel(dtype: torch.dtype) -> Callable[..., None]:
    # Imported on first launch: the CPU implementation needs neither TVM-FFI nor the kernel library.
    from cutlass_moe.aot.load import get_kernel

    return get_kernel(PermuteSpec(str(dtype).removeprefix("torch.")))


def launch_permute(x_TH: Tensor, slot_row_TK: Tensor, x_MH: Tensor) -> None:
    """Permutes checked CUDA tensors with T * K > 0."""
    _permute_kernel(x_TH.dtype)(checks.canonical_strides(x_TH), slot_row_TK, x_MH)
