"""Builds, loads and refuses libraries. Their kernels are in C: fast to compile, and they run on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cutlass_moe.aot import build, load, locations
from cutlass_moe.aot.locations import LIBRARY_NAME, LIBRARY_VARIABLE, MANIFEST_NAME
from cutlass_moe.aot.manifest import (
    SCHEMA_VERSION,
    KernelEntry,
    LibraryError,
    Manifest,
    file_sha256,
    read_manifest,
)
from cutlass_moe.aot.sass import Resources
from cutlass_moe.config import CombineSpec, GemmSpec, KernelSpec, PermuteSpec
from cutlass_moe.heuristics import configs_of
from cutlass_moe.kernels import compiler
from cutlass_moe.version import VERSION
from epilogues import Epilogue, SiluGate

KERNEL_SOURCES = compiler.kernel_sources  # most tests replace it
COMBINE, PERMUTE = CombineSpec("bfloat16"), PermuteSpec("bfloat16")
OUT_OF_MEMORY = "CuteDSLRT_TVMFFISetRaisedCudaError(TVMFFIErrorSetRaisedFromCStrParts, 2); return -1;"
TOO_LARGE = """CuteDSLRT_TVMFFISetRaisedCudaLaunchError(TVMFFIErrorSetRaisedFromCStrParts,
    1, 2, 3, 512, 1, 1, 512, 300000, 0, 1024, 1024, 1024, 64, 2147483647, 65535, 65535, 49152, 232448,
    "dynamic_smem", "gemm.py", 7, 0, 0); return -1;"""

# ---- build


def test_build_makes_a_library_that_runs(library: Path) -> None:
    assert load.get_kernel(COMBINE)(1, 2.0) is None
    assert load.get_kernel(COMBINE) is load.get_kernel(COMBINE)


def test_build_compiles_only_what_changed(tmp_path: Path, c_compiler: Any) -> None:
    specs: list[KernelSpec] = [COMBINE, PERMUTE]
    assert build.build(specs, tmp_path, jobs=1).compiled == (COMBINE.name, PERMUTE.name)
    before = (tmp_path / LIBRARY_NAME).stat()
    assert build.build(specs, tmp_path, jobs=1).compiled == ()
    assert (tmp_path / LIBRARY_NAME).stat().st_mtime_ns == before.st_mtime_ns
    c_compiler.source(PERMUTE).write_text("second version")
    result = build.build(specs, tmp_path, jobs=1)
    assert result.compiled == (PERMUTE.name,)
    assert c_compiler.calls == [COMBINE.name, PERMUTE.name, PERMUTE.name]
    assert result.manifest == read_manifest(tmp_path)
    assert len(list((tmp_path / "objects").glob("*.o"))) == 2  # the old one is gone


EPILOGUE = """
from dataclasses import dataclass
from epilogues import Epilogue

@dataclass(frozen=True)
class {name}(Epilogue):
    def math(self, ops, *accumulators, **tensors):
        return accumulators[0]
"""


def test_changed_epilogue_rebuilds_exactly_its_kernels(
    tmp_path: Path, c_compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "kernel_sources", KERNEL_SOURCES)
    monkeypatch.syspath_prepend(str(tmp_path))
    specs: list[KernelSpec] = [COMBINE, GemmSpec("bfloat16", configs_of(2)[0], SiluGate())]
    for name in ("FirstOfTwo", "SecondOfTwo"):
        (tmp_path / f"{name.lower()}.py").write_text(EPILOGUE.format(name=name))
        epilogue = getattr(importlib.import_module(name.lower()), name)()
        specs += [GemmSpec("bfloat16", config, epilogue) for config in configs_of(2)[:2]]
    assert len(build.build(specs, tmp_path / "lib", jobs=1).compiled) == 6
    with (tmp_path / "secondoftwo.py").open("a") as source:
        source.write("# changed\n")
    assert build.build(specs, tmp_path / "lib", jobs=1).compiled == tuple(spec.name for spec in specs[-2:])


def test_build_reports_progress(tmp_path: Path, c_compiler: Any) -> None:
    seen: list[tuple[str, int, int]] = []
    build.build([COMBINE, PERMUTE], tmp_path, jobs=1, progress=lambda *step: seen.append(step))
    assert seen == [("", 0, 2), (COMBINE.name, 1, 2), (PERMUTE.name, 2, 2)]


def test_failed_build_leaves_the_library_as_it_was(
    library: Path, c_compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: (library / name).read_bytes() for name in (LIBRARY_NAME, MANIFEST_NAME)}

    def fail(spec: KernelSpec) -> Any:
        raise ValueError("bad layout")

    monkeypatch.setattr(compiler, "compile_kernel", fail)
    with pytest.raises(build.BuildError, match=f"{PERMUTE.name} does not compile: ValueError: bad layout"):
        build.build([COMBINE, PERMUTE], library, jobs=1)
    assert before == {name: (library / name).read_bytes() for name in before}


def test_build_without_a_c_compiler(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no C compiler: 'no-such-compiler' is not on the PATH"):
        build.build([COMBINE], library, jobs=1)


def test_build_refuses_two_kernels_of_one_name(tmp_path: Path, c_compiler: Any) -> None:
    with pytest.raises(build.BuildError, match=f"got twice: {COMBINE.name}"):
        build.build([COMBINE, CombineSpec("bfloat16")], tmp_path, jobs=1)


def test_hash_follows_source_spec_and_dsl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("first version")
    first = build.hash_sources(COMBINE, [source])
    assert build.hash_sources(CombineSpec("float16"), [source]) != first

    elsewhere = tmp_path / "elsewhere" / "kernel.py"
    elsewhere.parent.mkdir()
    elsewhere.write_text("first version")
    assert build.hash_sources(COMBINE, [elsewhere]) == first
    assert build.hash_sources(COMBINE, [source, elsewhere]) != first

    source.write_text("second version")
    assert build.hash_sources(COMBINE, [source]) != first
    source.write_text("first version")
    assert build.hash_sources(COMBINE, [source]) == first
    monkeypatch.setattr(build, "dsl_version", lambda: "4.9.0")
    assert build.hash_sources(COMBINE, [source]) != first


def test_library_shows_only_its_functions(library: Path) -> None:
    shared = ctypes.CDLL(str(library / LIBRARY_NAME))
    assert hasattr(shared, f"__tvm_ffi_{COMBINE.name}") and hasattr(shared, "__tvm_ffi_launch_layer")
    for private in ("CuteDSLRT_TVMFFISetRaisedCudaError", "cuda_dialect_init_library_once", "_cudaMalloc"):
        assert not hasattr(shared, private)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (OUT_OF_MEMORY, ["cudaErrorMemoryAllocation", "out of memory"]),
        (TOO_LARGE, ["dynamic_smem", "grid (1, 2, 3)", "300000 bytes", "232448 bytes", "gemm.py:7"]),
    ],
)
def test_cuda_errors_become_exceptions(tmp_path: Path, c_compiler: Any, body: str, words: list[str]) -> None:
    c_compiler.bodies[COMBINE.name] = body
    build.build([COMBINE], tmp_path / "library", jobs=1)
    kernel = load.KernelLibrary(tmp_path / "library").function(COMBINE)
    with pytest.raises(RuntimeError) as raised:
        kernel()
    assert all(word in str(raised.value) for word in words), raised.value


# ---- manifest

ENTRY = KernelEntry(
    name="combine_bfloat16",
    spec={"kind": "combine", "widths": [8, 16]},
    source_hash="ab12",
    cubin_sha256="ef56",
    resources=Resources(32, 0, 0, 0, 0, 0, 4, 1, 2),
)
MANIFEST = Manifest(
    schema=SCHEMA_VERSION,
    cutlass_moe=VERSION,
    arch="sm_90a",
    dsl="4.8.1",
    c_compiler="cc 12",
    tvm_ffi="0.1",
    cuda=13,
    library=LIBRARY_NAME,
    library_sha256="cd34",
    kernels={ENTRY.name: ENTRY},
)


def test_manifest_round_trip(tmp_path: Path) -> None:
    uninspected = dataclasses.replace(ENTRY, name="other", resources=None)
    manifest = dataclasses.replace(MANIFEST, kernels={**MANIFEST.kernels, "other": uninspected})
    manifest.write(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("schema"), "it has no schema version"),
        (lambda content: content.update(schema=99), f"is 99, and this version reads schema {SCHEMA_VERSION}"),
        (lambda content: content.pop("arch"), "it lacks arch"),
        (lambda content: content["kernels"][0].pop("spec"), "a kernel's entry is malformed"),
        (
            lambda content: content["kernels"][0]["resources"].update(colour=1),
            "a kernel's entry is malformed",
        ),
    ],
)
def test_manifest_that_cannot_be_read(change: Callable[[Any], Any], message: str) -> None:
    content = json.loads(MANIFEST.to_json())
    change(content)
    with pytest.raises(ValueError, match=message):
        Manifest.from_json(json.dumps(content))


# ---- load


def edit_manifest(directory: Path, **values: Any) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def entry(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "spec": spec, "source_hash": "", "cubin_sha256": "", "resources": None}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: truncate(d / LIBRARY_NAME), "is damaged, or not the one that its manifest describes"),
        (lambda d: (d / LIBRARY_NAME).unlink(), "is missing, though its manifest is there"),
        (lambda d: (d / MANIFEST_NAME).unlink(), "no kernel library in"),
        (lambda d: (d / MANIFEST_NAME).write_text("{"), "cannot be read"),
        (lambda d: edit_manifest(d, schema=0), f"its schema is 0, and this version reads schema {SCHEMA_VERSION}"),
        (lambda d: edit_manifest(d, cutlass_moe="0.0.1"), f"by cutlass_moe 0.0.1, and this is {VERSION}"),
        (lambda d: edit_manifest(d, arch="sm_100a"), "is for sm_100a, and this version needs sm_90a"),
        (lambda d: edit_manifest(d, tvm_ffi="0.9"), "was linked to tvm_ffi 0.9, and tvm_ffi"),
        (lambda d: edit_manifest(d, cuda=12), "is for CUDA 12, and this version needs CUDA 13"),
    ],
)
def test_library_that_is_refused(library: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(library)
    with pytest.raises(LibraryError, match=message) as raised:
        load.get_kernel(COMBINE)
    assert "python -m cutlass_moe build" in str(raised.value)


def test_library_that_does_not_load(library: Path) -> None:
    (library / LIBRARY_NAME).write_bytes(b"not a library")
    edit_manifest(library, library_sha256=file_sha256(library / LIBRARY_NAME))
    with pytest.raises(LibraryError, match="cannot be loaded"):
        load.get_kernel(COMBINE)


def test_library_that_lacks_a_kernel_of_its_manifest(library: Path) -> None:
    edit_manifest(library, kernels=[entry(PERMUTE.name, PERMUTE.describe())])
    with pytest.raises(LibraryError, match=f"lacks {PERMUTE.name}"):
        load.get_kernel(PERMUTE)


def test_missing_kernel_without_the_dsl(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "dsl_version", lambda: None)
    with pytest.raises(RuntimeError) as raised:
        load.get_kernel(PERMUTE)
    for words in (
        PERMUTE.name,
        str(library),
        "nvidia-cutlass-dsl is not installed",
        "python -m cutlass_moe build",
    ):
        assert words in str(raised.value)


def test_missing_library_without_the_dsl(c_compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(locations, "package_directory", lambda: tmp_path / "package")
    monkeypatch.setattr(build, "dsl_version", lambda: None)
    load.reset()
    with pytest.raises(RuntimeError, match=f"kernel {COMBINE.name} is not in .*python -m cutlass_moe build"):
        load.get_kernel(COMBINE)


def test_missing_kernel_is_compiled_on_first_use_and_kept(
    library: Path, c_compiler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="cutlass_moe"):
        assert load.get_kernel(PERMUTE)() is None
        assert load.get_kernel(PERMUTE)() is None
    assert len(caplog.records) == 1
    assert PERMUTE.name in caplog.text
    load.reset()  # as in a new process
    assert load.get_kernel(PERMUTE)() is None
    assert c_compiler.calls == [PERMUTE.name]
    c_compiler.source(PERMUTE).write_text("second version")
    load.reset()
    load.get_kernel(PERMUTE)
    assert c_compiler.calls == [PERMUTE.name] * 2


def test_kernel_built_to_another_spec_is_not_used(library: Path, c_compiler: Any) -> None:
    edit_manifest(library, kernels=[entry(COMBINE.name, {"kind": "older"})])
    load.get_kernel(COMBINE)
    assert c_compiler.calls == [COMBINE.name]


def test_threads_get_one_kernel(library: Path, c_compiler: Any) -> None:
    start = threading.Barrier(8)

    def get(_: int) -> Any:
        start.wait()
        return load.get_kernel(PERMUTE)

    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(get, range(8)))
    assert all(kernel is kernels[0] for kernel in kernels)
    assert c_compiler.calls == [PERMUTE.name]


def test_missing_cuda_runtime_is_said(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "CUDA_RUNTIME_NAME", "libcudart.so.0")
    monkeypatch.setattr(load, "find_cuda_runtime", lambda: None)
    with pytest.raises(LibraryError, match=r"libcudart\.so\.0, which the kernels need, is neither"):
        load.get_kernel(COMBINE)


@dataclass(frozen=True)
class OtherSiluGate(Epilogue):
    """Has the name of the shipped SiluGate, and is another one."""

    accumulators: ClassVar[int] = 2

    def math(self, ops: Any, *accumulators: Any, **tensors: Any) -> Any:
        return accumulators[0] + accumulators[1]


OtherSiluGate.__qualname__ = OtherSiluGate.__name__ = "SiluGate"


def test_epilogue_of_the_same_name_is_not_used(library: Path, c_compiler: Any) -> None:
    shipped, other = (GemmSpec("bfloat16", configs_of(2)[0], epilogue) for epilogue in (SiluGate(), OtherSiluGate()))
    assert shipped.name == other.name and shipped != other
    build.build([shipped], library, jobs=1)
    opened = load.KernelLibrary(library)
    assert opened.holds(shipped) and not opened.holds(other)
    c_compiler.calls.clear()
    assert load.get_kernel(other) is not load.get_kernel(shipped)
    assert c_compiler.calls == [other.name]


def test_libraries_load_side_by_side(
    library: Path, tmp_path: Path, c_compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's library beside the shipped one; both even have a kernel of one name."""
    c_compiler.bodies[COMBINE.name] = OUT_OF_MEMORY
    mine = tmp_path / "mine"
    build.build([COMBINE, PERMUTE], mine, jobs=1)
    c_compiler.calls.clear()
    monkeypatch.setenv(LIBRARY_VARIABLE, f"{library}{os.pathsep}{mine}")
    assert load.get_kernel(COMBINE)() is None and load.get_kernel(PERMUTE)() is None
    load.reset()
    monkeypatch.setenv(LIBRARY_VARIABLE, f"{mine}{os.pathsep}{library}")
    with pytest.raises(RuntimeError, match="out of memory"):
        load.get_kernel(COMBINE)()
    assert c_compiler.calls == []


def test_loading_does_not_import_the_dsl() -> None:
    code = "import sys, cutlass_moe.aot.load; sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- where libraries are


def test_variable_names_a_directory_or_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for value in (tmp_path, tmp_path / LIBRARY_NAME):
        monkeypatch.setenv(LIBRARY_VARIABLE, str(value))
        assert locations.find_libraries() == [tmp_path]


def test_variable_names_several_and_an_empty_one_is_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    default, mine, other = (tmp_path / name for name in ("default", "mine", "other"))
    default.mkdir()
    MANIFEST.write(default)
    monkeypatch.setattr(locations, "package_directory", lambda: default)
    monkeypatch.setenv(LIBRARY_VARIABLE, f"{mine}{os.pathsep}{other / LIBRARY_NAME}{os.pathsep}{mine}")
    assert locations.find_libraries() == [mine, other]
    monkeypatch.setenv(LIBRARY_VARIABLE, f"{mine}{os.pathsep}")
    assert locations.find_libraries() == [mine, default]
    monkeypatch.setenv(LIBRARY_VARIABLE, "")
    assert locations.find_libraries() == [default]


def test_default_output_is_writable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert locations.default_output() == tmp_path / "cutlass_moe" / "lib"


def test_library_in_the_cache_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(locations, "package_directory", lambda: tmp_path / "package")
    assert locations.find_libraries() == []
    cached = tmp_path / "cutlass_moe" / "lib"
    cached.mkdir(parents=True)
    MANIFEST.write(cached)
    assert locations.find_libraries() == [cached]
