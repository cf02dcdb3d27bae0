"""Grouped GEMM: the rows of each expert times that expert's weights, with an epilogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cutlass_moe import checks, dlpack, reference
from cutlass_moe.config import GemmSpec
from cutlass_moe.epilogue_arguments import kernel_arguments, make_side_outputs, resolve_dtype
from epilogues import Epilogue, Identity


def grouped_gemm(
    a_MK: Tensor,
    b: Tensor | tuple[Tensor, Tensor],
    expert_offsets_E1: Tensor,
    *,
    epilogue: Epilogue | None = None,
    tensors: Mapping[str, Any] | None = None,
    source_index: Tensor | None = None,
    row_index: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """`out[r] = epilogue(a[r] @ b[e].T)` for the rows r of each expert e, in fp32 and rounded once.

    Runs eagerly: under `torch.compile` it is a graph break (`fused_experts` is one operator and is none).

    Args:
        a_MK: bfloat16 or float16 [M, K], rows grouped by expert; rows may be strided, 16-byte aligned. With a
            `source_index` [any, K], rows in any order.
        b: [E, N, K] of the same dtype, last dimension contiguous, other strides multiples of 8 elements; for
            an epilogue of two accumulators a pair (gate, up) of such tensors with equal strides. N and K are
            multiples of 8.
        expert_offsets_E1: int32 [E + 1], ascending, not past M: expert e has the rows from `[e]` up to
            `[e + 1]`.
        epilogue: an `epilogues.Epilogue`; `Identity()` when None.
        tensors: the epilogue's tensors and scalars by name. By its `broadcast` a tensor is "row": [M], "expert": [E],
            both contiguous; "expert_column": [E, N], any strides; or "full": [M, N], rows 16-byte aligned. A scalar is
            a float.
        source_index: int32 [M]: row r of the product is `a[source_index[r]]` (a plan's `row_token_M` takes tokens from
            where they lie). Each kept index is within `a`.
        row_index: int32 [M], for an epilogue that scatters: row r is stored at row `row_index[r]` of `out`.
            The indices of kept rows must be distinct and within `out`.
        out: [M, N], or [any, N] where the epilogue scatters, of the epilogue's `out_dtype`; rows may be strided,
            16-byte aligned.

    Returns:
        `out`, or a new [M, N] tensor. For an epilogue with side outputs a tuple: `out`, then each of them, newly made
        ([rows, N], [rows, values, N] or float32 [rows]). Rows that no expert has (for a scattering epilogue: that no
        index names) are not written; their maxima are 0.

    Raises:
        TypeError, ValueError, RuntimeError: naming the argument, what was expected and what came.
    """
    if dlpack.is_foreign(a_MK):
        if epilogue is not None and epilogue.side_outputs:
            raise TypeError(f"a must be a torch.Tensor: epilogue {epilogue.name} has side outputs")
        indices = {"source_index": source_index, "row_index": row_index}
        arguments = {"epilogue": epilogue, "tensors": tensors, **indices, "out": out}
        return dlpack.through_torch(grouped_gemm, a_MK, b, expert_offsets_E1, **arguments)
    if torch.compiler.is_compiling():
        # An epilogue is a Python object, which an operator's schema cannot hold. Disabled here and not by a
        # decorator, which would import the compiler with this package: that takes a second.
        run = torch.compiler.disable(_grouped_gemm)
        return run(a_MK, b, expert_offsets_E1, epilogue, tensors, source_index, row_index, out)
    return _grouped_gemm(a_MK, b, expert_offsets_E1, epilogue, tensors, source_index, row_index, out)


def _grouped_gemm(
    a_MK: Tensor,
    b: Tensor | tuple[Tensor, Tensor],
    expert_offsets_E1: Tensor,
    epilogue: Epilogue | None,
    tensors: Mapping[str, Any] | None,
    source_index: Tensor | None,
    row_index: Tensor | None,
    out: Tensor | None,
) -> Any:
    epilogue = Identity() if epilogue is None else epilogue
    weights = (b,) if isinstance(b, Tensor) else tuple(b)
    tensors = {} if tensors is None else dict(tensors)
    checks.check_grouped_gemm(a_MK, weights, expert_offsets_E1, epilogue, tensors, source_index, row_index, out)
    rows = a_MK.shape[0] if source_index is None else source_index.shape[0]
    if out is None:
        out = a_MK.new_empty(rows, weights[0].shape[1], dtype=resolve_dtype(epilogue.out_dtype, a_MK.dtype))
    checks.check_grouped_gemm_memory(a_MK, weights, epilogue, tensors, out)
    sides = make_side_outputs(epilogue, out, a_MK.dtype)
    if rows > 0 and a_MK.is_cuda:
        arguments = kernel_arguments(epilogue, tensors, sides)
        with torch.cuda.device(a_MK.device):
            launch_grouped_gemm(a_MK, source_index, weights, expert_offsets_E1, epilogue, arguments, row_index, out)
    elif rows > 0:
        if source_index is not None:
            a_MK = a_MK.index_select(0, source_index.clamp(0, a_MK.shape[0] - 1))
        reference.grouped_gemm(a_MK, weights, expert_offsets_E1, epilogue, tensors, row_index, out, sides)
    return (out, *sides) if sides else out


@lru_cache(maxsize=4096)
def _gemm_kernel(
    dtype: torch.dtype, rows: int, experts: int, features: int, reduction: int, epilogue: Epilogue, gather: bool
) -> tuple[Callable[..., None], bool]:
    """The kernel, and whether it gathers: `gather` allows it to."""
    # Imported on first launch: the CPU implementation needs neither TVM-FFI nor the kernel library.
    from cutlass_moe.aot.load import get_kernel
    from cutlass_moe.heuristics import choose_gemm_config

    config = choose_gemm_config(rows, experts, features, reduction, epilogue.accumulators, gather)
    return get_kernel(GemmSpec(str(dtype).removeprefix("torch."), config, epilogue)), config.gather


def launch_grouped_gemm(
    a_MK: Tensor,
    source_index_M: Tensor | None,
    weights: Sequence[Tensor],
    expert_offsets_E1: Tensor,
    epilogue: Epilogue,
    epilogue_arguments: Sequence[Tensor | float],
    row_index_M: Tensor | None,
    out: Tensor,
) -> None:
    """Multiplies checked CUDA tensors with M > 0. `epilogue_arguments` are tensors, scalars, side outputs, in order."""
    experts, features, reduction = weights[0].shape
    rows = a_MK.shape[0] if source_index_M is None else source_index_M.shape[0]
    shape = (rows, experts, features * len(weights), reduction)
    kernel, gathers = _gemm_kernel(a_MK.dtype, *shape, epilogue, source_index_M is not None)
    if source_index_M is not None and not gathers:
        # With many rows per expert a copy costs less. Rows past the last kept one may have any index.
        a_MK = a_MK.index_select(0, source_index_M.clamp(0, a_MK.shape[0] - 1))
    kernel(
        checks.canonical_strides(a_MK),
        source_index_M if gathers else None,
        expert_offsets_E1.new_empty((0, 1, 1)) if gathers else None,  # no ids: the offsets are there
        checks.canonical_strides(weights[0]),
        checks.canonical_strides(weights[1]) if len(weights) > 1 else None,
        expert_offsets_E1,
        tuple(map(canonical_argument, epilogue_arguments)) or None,
        row_index_M,
        checks.canonical_strides(out),
        expert_offsets_E1.new_zeros(1),
        False,  # not early: the kernel before may have made the offsets
        checks.hopper_sm_count(a_MK.device),
    )


def canonical_argument(argument: Tensor | float) -> Tensor | float:
    return checks.canonical_strides(argument) if isinstance(argument, Tensor) else argument
