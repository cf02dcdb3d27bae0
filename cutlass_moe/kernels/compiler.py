"""Compiles one kernel spec for sm_90a with the DSL, on any machine: fake tensors stand for the arguments."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # before the DSL is imported: there may be no GPU to ask

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutlass_moe.config import CombineSpec, GemmSpec, KernelSpec, PermuteSpec, RouteSpec
from epilogues import INPUT, check_epilogue

OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a --keep-cubin --dump-dir "
_DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


def _vector(dtype: str, length: Any) -> Any:
    """A contiguous 1-D tensor."""
    element = _DTYPES[dtype]
    return make_fake_tensor(element, (length,), (1,), assumed_align=element.width // 8)


def _matrix(dtype: str, rows: Any, columns: Any) -> Any:
    """A row-major matrix whose rows start at 16-byte boundaries; strides in 64 bits."""
    return make_fake_tensor(_DTYPES[dtype], (rows, columns), (cute.sym_int64(divisibility=8), 1), assumed_align=16)


def compile_kernel(spec: KernelSpec) -> Any:
    """The compiled TVM-FFI function of `spec`: `export_to_c(path, function_name=spec.name)` writes an object file.

    The function takes its arguments in the order of the kernel's host function, None where that says so, and
    launches on the caller's current stream.
    """
    function, args = _gemm(spec) if isinstance(spec, GemmSpec) else _glue(spec)
    # The DSL drops the cubin as a file too, under a name that does not tell kernels apart.
    with tempfile.TemporaryDirectory() as dumps:
        return cute.compile(function, *args, make_fake_stream(use_tvm_ffi_env_stream=True), options=OPTIONS + dumps)


def _glue(spec: RouteSpec | PermuteSpec | CombineSpec) -> tuple[Any, list[Any]]:
    rows, slots, tokens, top_k = (cute.sym_int32() for _ in range(4))
    hidden = cute.sym_int32(divisibility=8)
    slot_row = make_fake_tensor(cutlass.Int32, (tokens, top_k), (cute.sym_int64(), 1), assumed_align=4)
    if isinstance(spec, CombineSpec):
        from cutlass_moe.kernels.combine import combine

        return combine, [_matrix(spec.dtype, rows, hidden), slot_row, _matrix(spec.dtype, tokens, hidden)]
    if isinstance(spec, PermuteSpec):
        from cutlass_moe.kernels.permute import permute

        return permute, [_matrix(spec.dtype, tokens, hidden), slot_row, _matrix(spec.dtype, rows, hidden)]
    from cutlass_moe.kernels.route import route

    chunks, experts, experts_1 = (cute.sym_int32() for _ in range(3))

    def strided(dtype: str) -> Any:
        strides = (cute.sym_int64(), cute.sym_int64())
        return make_fake_tensor(_DTYPES[dtype], (tokens, top_k), strides, assumed_align=_DTYPES[dtype].width // 8)

    return route, [
        strided(spec.id_dtype),
        strided(spec.weight_dtype) if spec.weight_dtype else None,
        _vector("int32", experts_1),
        _vector("int32", slots),
        _vector("int32", slots),
        slot_row,
        _vector("float32", slots) if spec.weight_dtype else None,
        make_fake_tensor(cutlass.Int32, (chunks, experts), (cute.sym_int64(), 1), assumed_align=4),
        _vector("int32", 2),
    ]


def _gemm(spec: GemmSpec) -> tuple[Any, list[Any]]:
    from cutlass_moe.kernels.grouped_gemm import GroupedGemm

    check_epilogue(spec.epilogue)
    rows, experts, experts_1, row_count, out_rows = (cute.sym_int32() for _ in range(5))
    reduction, outputs = (cute.sym_int32(divisibility=8) for _ in range(2))
    strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
    weights = [
        make_fake_tensor(_DTYPES[spec.dtype], (experts, outputs, reduction), strides, assumed_align=16)
        for _ in range(spec.epilogue.accumulators)
    ]
    return GroupedGemm(spec), [
        _matrix(spec.dtype, rows, reduction),
        _vector("int32", row_count) if spec.config.gather else None,
        _words() if spec.config.gather else None,
        weights[0],
        weights[1] if len(weights) > 1 else None,
        _vector("int32", experts_1),
        _epilogue_arguments(spec, row_count, experts, out_rows, outputs),
        _vector("int32", row_count) if spec.epilogue.scatter else None,
        _matrix(_resolve(spec, spec.epilogue.out_dtype), out_rows, outputs),
        _vector("int32", 1),
        Boolean(False),
        Int32(132),
    ]


def _words() -> Any:
    """The words of expert ids."""
    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32())
    return make_fake_tensor(_DTYPES["int32"], shape, (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)


def _resolve(spec: GemmSpec, dtype: str) -> str:
    return spec.dtype if dtype == INPUT else dtype


def _epilogue_arguments(spec: GemmSpec, row_count: Any, experts: Any, out_rows: Any, outputs: Any) -> tuple | None:
    """Stand-ins for what the epilogue adds: its tensors, scalars and side outputs."""
    arguments: list[Any] = []
    for tensor in spec.epilogue.tensors:
        dtype = _resolve(spec, tensor.dtype)
        if tensor.broadcast in ("row", "expert"):
            arguments.append(_vector(dtype, row_count if tensor.broadcast == "row" else experts))
        elif tensor.broadcast == "full":
            arguments.append(_matrix(dtype, row_count, outputs))
        else:
            # Read element by element: any strides, as those of a view of every other column.
            strides = (cute.sym_int64(), cute.sym_int64())
            align = _DTYPES[dtype].width // 8
            arguments.append(make_fake_tensor(_DTYPES[dtype], (experts, outputs), strides, assumed_align=align))
    arguments += [Float32(0.0) for _ in spec.epilogue.scalars]
    for side in spec.epilogue.side_outputs:
        dtype = _resolve(spec, side.dtype)
        if side.row_absmax:
            arguments.append(_vector("float32", out_rows))
        else:
            rows_values_outputs = (out_rows, side.values, outputs)
            row_strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
            arguments.append(make_fake_tensor(_DTYPES[dtype], rows_values_outputs, row_strides, assumed_align=16))
    return tuple(arguments) or None


def kernel_sources(spec: KernelSpec) -> list[Path]:
    """The files whose text decides the code of `spec`: hash them to know whether a compiled kernel is current."""
    modules = {
        "route": ["route", "slots", "tile_scheduler"],
        "permute": ["permute"],
        "combine": ["combine", "l2_policy"],
        "gemm": ["grouped_gemm", "l2_policy", "row_loader", "slots", "tile_scheduler", "tile_store", "work_queue"],
    }[spec.describe()["kind"]]
    names = ["cutlass_moe.config", "cutlass_moe.kernels.compiler", *(f"cutlass_moe.kernels.{m}" for m in modules)]
    if isinstance(spec, GemmSpec):
        names += ["epilogues.base", "epilogues.ops", *spec.epilogue.modules()]
    return [Path(str(importlib.import_module(name).__file__)) for name in names]
