"""`verify` on the CPU: it accepts what does as a kernel should, in plain torch, and finds what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutlass_moe.aot.manifest import KernelEntry, json_form
from cutlass_moe.aot.verify import WrongResult, check_kernel, verify
from cutlass_moe.config import CombineSpec, GemmConfig, GemmSpec, KernelSpec, PermuteSpec, RouteSpec
from epilogues import Bias, Identity, ResidualAdd, RoutingScale, RowAbsMax, Scale, SiluGate, StorePreActivation

CPU = torch.device("cpu")
SMALL = GemmConfig(128, (16, 32), 2)
GATHER = GemmConfig(128, (16, 32), 2, gather=True)
SPECS: list[KernelSpec] = [
    RouteSpec("int32", None),
    RouteSpec("int64", "bfloat16"),
    PermuteSpec("float16"),
    CombineSpec("bfloat16"),
    GemmSpec("bfloat16", SMALL, SiluGate()),
    GemmSpec("bfloat16", GATHER, SiluGate()),
    GemmSpec("float16", SMALL, RoutingScale()),
    GemmSpec("bfloat16", SMALL, Identity()),
    GemmSpec("bfloat16", SMALL, Bias(operands=2) | StorePreActivation() | SiluGate() | Scale() | RowAbsMax()),
    GemmSpec("bfloat16", SMALL, Scale("expert") | ResidualAdd() | StorePreActivation(operands=1) | RoutingScale()),
]
BY_NAME = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
Kernel = Callable[..., None]


@BY_NAME
def test_right_kernel_passes(spec: KernelSpec, torch_kernel: Any) -> None:
    error = check_kernel(spec, torch_kernel(spec, early=False), CPU, 132)
    assert 0 <= error < 3e-3
    assert (error > 0) == isinstance(spec, CombineSpec | GemmSpec)


@BY_NAME
def test_kernel_that_writes_nothing_fails(spec: KernelSpec) -> None:
    with pytest.raises(WrongResult):
        check_kernel(spec, lambda *_: None, CPU, 132)


@BY_NAME
def test_kernel_that_is_off_in_one_place_fails(spec: KernelSpec, torch_kernel: Any) -> None:
    """One value of one output tensor changed, in the first row that is written."""
    right = torch_kernel(spec, early=False)
    place = {RouteSpec: 3, PermuteSpec: 2, CombineSpec: 2, GemmSpec: 8}[type(spec)]

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        out = arguments[place].view(len(arguments[place]), -1)
        row = int((out == out).all(1).nonzero()[0])
        out[row, 0] += 1

    with pytest.raises(WrongResult, match=r"wrong|off by more|relative error"):
        check_kernel(spec, wrong, CPU, 132)


def test_gemm_that_writes_past_the_last_row_fails(torch_kernel: Any) -> None:
    spec = GemmSpec("bfloat16", SMALL, SiluGate())
    right = torch_kernel(spec, early=False)

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[8][int(arguments[5][-1])] = 0  # out, by the expert offsets

    with pytest.raises(WrongResult, match="it wrote where it must not"):
        check_kernel(spec, wrong, CPU, 132)


def test_gemm_that_does_not_gather_fails(torch_kernel: Any) -> None:
    spec = GemmSpec("bfloat16", GATHER, SiluGate())
    right = torch_kernel(spec, early=False)

    def wrong(rows: Tensor, source_index: Tensor, *others: Any) -> None:
        right(rows, torch.arange(len(source_index), dtype=torch.int32), *others)

    with pytest.raises(WrongResult):
        check_kernel(spec, wrong, CPU, 132)


class Library:
    """Stands for a loaded library: right kernels, but for one that fails and one that is no spec of this version."""

    def __init__(self, torch_kernel: Any) -> None:
        self.torch_kernel = torch_kernel
        specs = {spec.name: json_form(spec.describe()) for spec in SPECS}
        specs["zzz"] = {"kind": "newer"}
        entries = {name: KernelEntry(name, spec, "", "", None) for name, spec in specs.items()}
        self.manifest = type("Manifest", (), {"kernels": entries})

    def function(self, spec: KernelSpec) -> Kernel:
        if isinstance(spec, PermuteSpec):
            raise RuntimeError("CUDA error 700")
        kernel: Kernel = self.torch_kernel(spec, early=False)
        return kernel


def test_verify_judges_each_kernel(torch_kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("cutlass_moe.checks.hopper_sm_count", lambda device: 132)
    monkeypatch.setattr(torch, "device", lambda *_: CPU)
    library: Any = Library(torch_kernel)
    verdicts = list(verify(library))
    assert [verdict.name for verdict in verdicts] == sorted(library.manifest.kernels)
    problems = {verdict.name: verdict.problem for verdict in verdicts if verdict.problem}
    assert problems == {
        "permute_float16": "RuntimeError: CUDA error 700",
        "zzz": "this version has no kernels of kind 'newer'",
    }


def test_no_gpu_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match=r"a GPU of compute capability 9\.0"):
        next(verify(Library(None)))  # type: ignore[arg-type]
