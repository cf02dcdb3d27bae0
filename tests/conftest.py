"""Fixtures that the CPU and the GPU tests share."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

import cutlass_moe
from cutlass_moe import reference
from cutlass_moe.config import CombineSpec, GemmSpec, KernelSpec, PermuteSpec, RouteSpec, route_chunks

settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("default")


C_KERNEL = """
#include <stdint.h>
void TVMFFIErrorSetRaisedFromCStrParts(const char *, const char **, int32_t);
typedef void (*SetRaised)(const char *, const char **, int32_t);
void CuteDSLRT_TVMFFISetRaisedCudaError(SetRaised, int32_t);
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(
    SetRaised, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int64_t,
    int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t,
    const char *, const char *, int32_t, int32_t, int32_t);
int __tvm_ffi_%s(void *self, const void *arguments, int32_t count, void *result) { %s }
"""


@dataclass
class LayerInputs:
    """Arguments of one call, outputs of order 1. `w_gate_up` is None where gate and up are separate."""

    x: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    ids: Tensor
    weights: Tensor
    w_gate_up: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return (self.x, self.w_gate, self.w_up, self.w_down, self.ids, self.weights)


def _make_layer(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int,
    *,
    layout: str = "separate",
    dtype: torch.dtype = torch.bfloat16,
    id_dtype: torch.dtype = torch.int64,
    weight_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> LayerInputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=device)
        return values.mul_(scale).to(dtype)

    x = normal(tokens, hidden)
    w_gate_up = None
    if layout == "separate":
        w_gate = normal(experts, intermediate, hidden, scale=hidden**-0.5)
        w_up = normal(experts, intermediate, hidden, scale=hidden**-0.5)
    else:
        w_gate_up = normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
        if layout == "interleaved":
            w_gate, w_up = w_gate_up[:, 0::2], w_gate_up[:, 1::2]
        else:
            w_gate, w_up = w_gate_up[:, :intermediate], w_gate_up[:, intermediate:]
    w_down = normal(experts, hidden, intermediate, scale=2 * intermediate**-0.5)
    ids = torch.randint(experts, (tokens, top_k), generator=generator, device=device, dtype=id_dtype)
    weights = torch.rand(tokens, top_k, generator=generator, device=device) + 0.1
    weights = (weights / weights.sum(1, keepdim=True)).to(weight_dtype)
    return LayerInputs(x, w_gate, w_up, w_down, ids, weights, w_gate_up)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; the norm itself where zeros are expected."""
    norm = expected.double().norm().item()
    error = (actual.double() - expected.double()).norm().item()
    return error / norm if norm else error


@pytest.fixture(scope="session")
def make_layer() -> Callable[..., LayerInputs]:
    """`make_layer(tokens, top_k, experts, hidden, intermediate, layout=..., ...)`: random `LayerInputs`."""
    return _make_layer


@pytest.fixture(scope="session")
def relative_error() -> Callable[[Tensor, Tensor], float]:
    return _relative_error


def _offsets_of_words(ids_TKW: Tensor, experts: int) -> Tensor:
    """The experts' offsets from the int32 words of the ids."""
    words = ids_TKW.long()
    ids_TK = words[..., 0] if words.shape[2] == 1 else words[..., 1] << 32 | words[..., 0] & 0xFFFFFFFF
    return reference.route(ids_TK, None, experts)[0]


def _torch_kernel(spec: KernelSpec, *, early: bool) -> Callable[..., None]:
    """What the kernel of this spec does, in plain torch; checks its arguments and their strides."""
    expected_early = early

    def aligned(*tensors: Tensor) -> None:
        for tensor in tensors:
            assert tensor.stride(-1) == 1 and all(stride % 8 == 0 for stride in tensor.stride()[:-1])
            assert tensor.data_ptr() % 16 == 0 and tensor.numel() > 0

    def route(
        ids: Tensor,
        weights: Tensor | None,
        offsets: Tensor,
        row_slot: Tensor,
        row_token: Tensor,
        slot_row: Tensor,
        row_weight: Tensor | None,
        chunk_counts: Tensor,
        tile_counters: Tensor,
    ) -> None:
        experts = len(offsets) - 1
        assert chunk_counts.shape == (route_chunks(ids.numel()), experts)
        tile_counters.zero_()
        targets = (offsets, row_slot, row_token, slot_row, row_weight)
        results = reference.route(ids, weights, experts)
        kept = int(results[0][-1])
        lengths = (experts + 1, kept, kept, len(ids), kept)
        for target, result, length in zip(targets, results, lengths, strict=True):
            if target is not None and result is not None:
                target[:length] = result[:length]

    def permute(x: Tensor, slot_row: Tensor, x_MH: Tensor) -> None:
        aligned(x, x_MH)
        x_MH.copy_(reference.permute(x, slot_row))

    def gemm(
        rows: Tensor,
        source_index: Tensor | None,
        ids_TKW: Tensor | None,
        first: Tensor,
        second: Tensor | None,
        offsets: Tensor,
        epilogue_arguments: tuple[Any, ...] | None,
        row_index: Tensor | None,
        out: Tensor,
        tile_counter: Tensor,
        early: bool,
        sm_count: int,
    ) -> None:
        assert tile_counter.tolist() == [0]
        tile_counter.fill_(1)  # as the kernel leaves it: not 0
        counts_ids = ids_TKW is not None and len(ids_TKW) > 0
        assert isinstance(spec, GemmSpec) and early is (expected_early or counts_ids) and sm_count == 132
        weights = (first,) if second is None else (first, second)
        assert len(weights) == spec.epilogue.accumulators and first.stride() == weights[-1].stride()
        assert (row_index is not None) == spec.epilogue.scatter
        assert (source_index is not None) == (ids_TKW is not None) == spec.config.gather
        if ids_TKW is not None and counts_ids:
            offsets = _offsets_of_words(ids_TKW, len(offsets) - 1)
        aligned(rows, *weights, out)
        if source_index is not None:
            rows = rows[source_index.clamp(0, len(rows) - 1)]
        arguments = epilogue_arguments or ()
        names = [*(tensor.name for tensor in spec.epilogue.tensors), *spec.epilogue.scalars]
        inputs = dict(zip(names, arguments, strict=False))
        sides = arguments[len(names) :]
        assert len(sides) == len(spec.epilogue.side_outputs)
        reference.grouped_gemm(rows, weights, offsets, spec.epilogue, inputs, row_index, out, sides)

    def combine(y: Tensor, slot_row: Tensor, out: Tensor) -> None:
        aligned(y, out)
        out.copy_(reference.combine(y, slot_row))

    kinds: dict[type, Callable[..., None]] = {
        RouteSpec: route,
        PermuteSpec: permute,
        GemmSpec: gemm,
        CombineSpec: combine,
    }
    return kinds[type(spec)]


@pytest.fixture(scope="session")
def torch_kernel() -> Callable[..., Callable[..., None]]:
    """`torch_kernel(spec, early=...)`: a function that stands for the kernel of this spec, on CPU tensors."""
    return _torch_kernel


def _as_tensors(argument: Any) -> Any:
    """What `layer.c` gives a kernel, in torch: views that nobody owns, which DLPack does not export."""
    import tvm_ffi

    if isinstance(argument, tvm_ffi.Array):
        return tuple(map(_as_tensors, argument))
    if not isinstance(argument, tvm_ffi.Tensor):
        return argument
    shape, strides, dtype = tuple(argument.shape), tuple(argument.strides), getattr(torch, str(argument.dtype))
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_byte * (length * dtype.itemsize)).from_address(argument.data_ptr())
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


@pytest.fixture(scope="session")
def launched_kernel() -> Callable[..., Any]:
    """`launched_kernel(function)`: a TVM-FFI function that calls it with torch tensors, for `layer.c` to launch."""
    import tvm_ffi

    return lambda function: tvm_ffi.convert(lambda *arguments: function(*map(_as_tensors, arguments)))


@pytest.fixture(scope="session")
def layer_launcher(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The function of `layer.c`, from a library of its own."""
    import tvm_ffi
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

    source = Path(cutlass_moe.__file__).parent / "aot" / "layer.c"
    library = tmp_path_factory.mktemp("layer") / "layer.so"
    includes = [f"-I{find_include_path()}", f"-I{find_dlpack_include_path()}"]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    command = ["cc", "-shared", "-fPIC", *warnings, *includes, str(source), "-o", str(library), find_libtvm_ffi()]
    subprocess.run(command, check=True)
    return tvm_ffi.load_module(str(library)).get_function("launch_layer")


@dataclass
class Compiler:
    """Stands for the DSL: `bodies` are the C kernels, by name; `calls` the names compiled so far."""

    sources: Path
    bodies: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def source(self, spec: KernelSpec) -> Path:
        path = self.sources / f"{spec.name}.py"
        if not path.exists():
            path.write_text("first version")
        return path

    def compile_kernel(self, spec: KernelSpec) -> Any:
        self.calls.append(spec.name)
        body = self.bodies.get(spec.name, "return 0;")

        def export_to_c(object_file_path: str, function_name: str) -> None:
            source = self.sources / f"{function_name}.c"
            source.write_text(C_KERNEL % (function_name, body))
            subprocess.run(["cc", "-fPIC", "-c", str(source), "-o", object_file_path], check=True)

        return SimpleNamespace(ir_module=None, artifacts=SimpleNamespace(CUBIN=b"cubin"), export_to_c=export_to_c)


@pytest.fixture
def c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Kernels in C instead of the DSL, and a user's cache of the test's own."""
    # Here: the GPU tests share this file, where the DSL need not be installed.
    from cutlass_moe.aot import build
    from cutlass_moe.kernels import compiler

    made = Compiler(tmp_path / "sources")
    made.sources.mkdir()
    monkeypatch.setattr(compiler, "compile_kernel", made.compile_kernel)
    monkeypatch.setattr(compiler, "kernel_sources", lambda spec: [made.source(spec)])
    monkeypatch.setattr(build, "can_inspect", lambda: False)
    monkeypatch.setattr(build, "make_portable", lambda module: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


@pytest.fixture
def library(tmp_path: Path, c_compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A library with one kernel, `CombineSpec("bfloat16")`, that `load` looks at."""
    from cutlass_moe.aot import build, load

    directory = tmp_path / "library"
    build.build([CombineSpec("bfloat16")], directory, jobs=1)
    c_compiler.calls.clear()
    monkeypatch.setenv("CUTLASS_MOE_LIBRARY", str(directory))
    load.reset()
    yield directory
    load.reset()


@pytest.fixture
def tiny() -> Any:
    """A layer small enough for any CPU, with two cases of equal T and different atol."""
    # Here: the GPU tests use this file, too, where only the installed package and the tests are.
    from perf.workloads import Case, get_workload

    return replace(
        get_workload("jamba_large"),
        name="tiny",
        hidden=64,
        intermediate=32,
        experts=6,
        prefill_cases=(Case(5, 0.05), Case(3, 0.05, batch=1, seq=3), Case(5, 0.01)),
        recorded_prefill_ms={"other": {5: 1.5}},
        stock_gemms=((1, 2.0, 1.0), (3, 4.0, 2.0)),
    )
