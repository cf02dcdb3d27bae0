"""The command line, and kernels of a user's own. The kernels are in C, as in test_aot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cutlass_moe.__main__ import main
from cutlass_moe.aot import build, load
from cutlass_moe.aot.catalogue import catalogue
from cutlass_moe.aot.locations import MANIFEST_NAME
from cutlass_moe.aot.manifest import json_form, read_manifest
from cutlass_moe.aot.specs import SpecError, read_spec
from cutlass_moe.config import CombineSpec, GemmSpec, KernelSpec
from cutlass_moe.heuristics import configs_of
from cutlass_moe.kernels import compiler
from cutlass_moe.version import VERSION
from epilogues import SiluGate

COMBINE = CombineSpec("bfloat16")  # the one kernel of the fixture `library`


@pytest.mark.parametrize(
    "arguments", [[], ["biuld"], ["build", "--job", "x"], ["build", "--jobs", "0"], ["list", "--all"]]
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: cutlass-moe" in capsys.readouterr().err


def test_list_shows_what_is_built(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert f"{library}: 1 kernels for sm_90a" in shown
    assert COMBINE.name in shown and "are not built" in shown


def test_inspect_shows_one_kernel(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", COMBINE.name]) == 0
    shown = capsys.readouterr().out
    for words in (COMBINE.name, str(library), "bfloat16", "built without cuobjdump", f"cutlass_moe {VERSION}"):
        assert words in shown
    assert main(["inspect", "combine_bflaot16", "--library", str(library)]) == 1
    assert f"did you mean {COMBINE.name}?" in capsys.readouterr().err


def test_verify_needs_a_gpu(library: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["verify"]) == 1
    assert "a GPU of compute capability 9.0" in capsys.readouterr().err


MODULE = """
from dataclasses import dataclass
from cutlass_moe.aot.specs import gemm_specs
from epilogues import Epilogue

@dataclass(frozen=True)
class Scaled(Epilogue):
    factor: float = 2.0

    def math(self, ops, *accumulators, **tensors):
        return accumulators[0] * self.factor

KERNELS = gemm_specs(Scaled(0.5), dtypes=["bfloat16"])
"""


def test_module_of_a_user_builds_a_library_of_its_own(
    tmp_path: Path, c_compiler: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_epilogues.py").write_text(MODULE)
    output = tmp_path / "mine"
    assert main(["build", "--module", str(tmp_path / "my_epilogues.py"), "--output", str(output), "--jobs", "1"]) == 0
    kernels = read_manifest(output).kernels
    assert len(kernels) == len(configs_of(1))
    specs = [read_spec(kernel.spec) for kernel in kernels.values()]
    assert {spec.name for spec in specs} == set(kernels)
    assert kernels[specs[0].name].spec["epilogue"] == {
        "module": "my_epilogues",
        "class": "Scaled",
        "fields": {"factor": 0.5},
    }
    assert all(load.KernelLibrary(output).holds(spec) for spec in specs)
    assert main(["list", "--library", str(output)]) == 0
    assert "not shipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no file"), ("import no_such_module", "cannot be imported"), ("KERNELS = [1]", "must define")],
)
def test_module_without_kernels(
    content: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / f"kernels_{abs(hash(message))}.py"
    if content is not None:
        path.write_text(content)
    assert main(["build", "--module", str(path), "--output", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert main(["build", "--module", str(path)]) == 1
    assert "--module needs --output" in capsys.readouterr().err


def test_spec_reads_back_from_a_manifest() -> None:
    for spec in (*catalogue(), GemmSpec("float16", configs_of(2)[-1], SiluGate())):
        assert read_spec(json_form(spec.describe())) == spec
    with pytest.raises(SpecError, match="no kernels of kind 'new'"):
        read_spec({"kind": "new"})
    with pytest.raises(SpecError, match="is not one of this version"):
        read_spec({"kind": "combine", "colour": 1})
    unknown = GemmSpec("float16", configs_of(2)[0], SiluGate()).describe()
    unknown["epilogue"]["module"] = "no_such_module"
    with pytest.raises(SpecError, match=r"no_such_module\.SiluGate cannot be imported"):
        read_spec(unknown)


def test_list_refuses_a_bad_library(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = library / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 0}))
    assert main(["list"]) == 1
    assert "its schema is 0" in capsys.readouterr().err


def test_build_shows_where_a_kernel_does_not_compile(
    tmp_path: Path,
    c_compiler: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def trace_the_layout(spec: KernelSpec) -> Any:
        raise ValueError("bad layout")

    monkeypatch.setattr(compiler, "compile_kernel", trace_the_layout)
    assert main(["build", "--output", str(tmp_path), "--jobs", "1"]) == 1
    shown = capsys.readouterr().err
    assert "trace_the_layout" in shown
    assert shown.splitlines()[-1].endswith("does not compile: ValueError: bad layout")


def test_build_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "dsl_version", lambda: None)
    assert main(["build", "--output", str(tmp_path)]) == 1
    assert "nvidia-cutlass-dsl is not installed" in capsys.readouterr().err
