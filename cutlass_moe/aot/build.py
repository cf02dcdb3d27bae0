"""Compiles kernels ahead of time into one shared library with a manifest. Needs the DSL and a C compiler.

Each kernel is compiled to an object file in `<output>/objects`, named by the hash of what it is made from, so
that a build compiles only what changed. `cute.compile` is not thread-safe: processes compile in parallel.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tvm_ffi
from filelock import FileLock
from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

from cutlass_moe.aot.locations import CUDA_RUNTIME_NAME, LIBRARY_NAME, find_cuda_runtime
from cutlass_moe.aot.manifest import (
    ARCH,
    CUDA_MAJOR,
    SCHEMA_VERSION,
    KernelEntry,
    Manifest,
    file_sha256,
    json_form,
    tvm_ffi_interface,
    write_atomically,
)
from cutlass_moe.aot.sass import Resources, can_inspect, inspect_cubin
from cutlass_moe.config import KernelSpec
from cutlass_moe.version import VERSION

DSL_PACKAGE = "nvidia-cutlass-dsl"
DSL_RUNTIME_PACKAGE = "nvidia-cutlass-dsl-libs-cu13"
DSL_RUNTIME_ARCHIVE = "libcuda_dialect_runtime_static.a"
# Every CPU beside a Hopper GPU has these. Both must be said: without a feature those of the build machine's CPU hold.
HOST_CPU, HOST_FEATURE = {"x86_64": ("x86-64-v2", "+sse4.2")}.get(platform.machine(), ("generic", "+neon"))
# C code that goes into each library beside its kernels.
C_SOURCES = tuple(Path(__file__).with_name(name) for name in ("cuda_errors.c", "layer.c"))
# Only functions for TVM-FFI are visible. The DSL's helpers stay private to each library, so that several of them in one
# process, and the DSL's own runtime, do not call each other's.
EXPORTS = "{ global: __tvm_ffi_*; local: *; };\n"

Progress = Callable[[str, int, int], None]


class BuildError(RuntimeError):
    """A library that cannot be built: a part of the tool chain is missing, or a kernel does not compile."""


class CompileError(BuildError):
    """A kernel that does not compile. Its cause is the DSL's error."""


@dataclass(frozen=True)
class BuildResult:
    """What a build did.

    Attributes:
        manifest: the library's manifest, as written.
        compiled: names of the kernels that were compiled; the others were unchanged.
        seconds: wall time.
    """

    manifest: Manifest
    compiled: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class _Target:
    """One kernel to build: its files carry its name and source hash."""

    spec: KernelSpec
    source_hash: str
    objects: Path

    def file(self, suffix: str) -> Path:
        return self.objects / f"{self.spec.name}-{self.source_hash[:16]}{suffix}"

    def is_compiled(self) -> bool:
        return self.file(".o").exists()

    def is_inspected(self) -> bool:
        return self.file(".json").exists()


def dsl_version() -> str | None:
    """Version of the installed nvidia-cutlass-dsl; None where it is not installed."""
    try:
        return importlib.metadata.version(DSL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def source_hash(spec: KernelSpec) -> str:
    """Hash of what a kernel is made from: its spec, its source files, the DSL's version and the architecture.

    Raises BuildError where the DSL is not installed.
    """
    from cutlass_moe.kernels.compiler import kernel_sources

    return hash_sources(spec, kernel_sources(spec))


def hash_sources(spec: KernelSpec, sources: Sequence[Path]) -> str:
    """`source_hash` of a kernel with these source files. Their names count, their folders do not. So does the
    manifest's version: what it says of a kernel is kept beside its object."""
    digest = hashlib.sha256()
    identity = {
        "name": spec.name,
        "spec": spec.describe(),
        "dsl": _require_dsl(),
        "arch": ARCH,
        "host": HOST_CPU,
        "schema": SCHEMA_VERSION,
    }
    digest.update(json.dumps(identity, sort_keys=True).encode())
    for source in sorted(sources, key=lambda path: (path.name, str(path))):
        digest.update(f"\0{source.name}\0".encode())
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def build(
    specs: Sequence[KernelSpec], output: Path, *, jobs: int | None = None, progress: Progress | None = None
) -> BuildResult:
    """Builds a library of these kernels: the shared library and `manifest.json` in `output`.

    Args:
        specs: kernels, each with a name of its own.
        output: directory; made if missing. Two builds into the same one wait for each other.
        jobs: processes that compile; by default one for each CPU. 1 compiles in this process.
        progress: called as `progress(name, done, total)`: first with ("", 0, total), then after each
            compiled kernel.

    Raises BuildError when a kernel does not compile or a tool is missing; the old library then stays.
    """
    started = time.perf_counter()
    version = _require_dsl()
    names = [spec.name for spec in specs]
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        raise BuildError(f"specs must have names of their own, got twice: {', '.join(sorted(duplicates))}")
    objects = output / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    with FileLock(output / ".lock"):
        targets = [_Target(spec, source_hash(spec), objects) for spec in specs]
        c_compiler = _c_compiler_version()  # first: what is missing should not show after minutes of compiling
        inspects = can_inspect()
        compiled = tuple(target.spec.name for target in targets if not target.is_compiled())
        stale = [t for t in targets if not t.is_compiled() or (inspects and not t.is_inspected())]
        _make_objects(stale, jobs or _cpu_count(), progress)
        library = _link([target.file(".o") for target in targets])
        path = output / LIBRARY_NAME
        if not path.exists() or path.read_bytes() != library:
            write_atomically(path, library)
        manifest = Manifest(
            schema=SCHEMA_VERSION,
            cutlass_moe=VERSION,
            arch=ARCH,
            dsl=version,
            c_compiler=c_compiler,
            tvm_ffi=tvm_ffi_interface(tvm_ffi.__version__),
            cuda=CUDA_MAJOR,
            library=LIBRARY_NAME,
            library_sha256=file_sha256(path),
            kernels={target.spec.name: _entry(target) for target in targets},
        )
        manifest.write(output)
        _remove_unused(objects, targets)
    return BuildResult(manifest, compiled, time.perf_counter() - started)


def _require_dsl() -> str:
    version = dsl_version()
    if version is None:
        raise BuildError(
            f"Kernels cannot be compiled: {DSL_PACKAGE} is not installed (`pip install 'cutlass-moe[build]'`)"
        )
    return version


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0))


def _make_objects(targets: list[_Target], jobs: int, progress: Progress | None) -> None:
    if not targets:
        return
    report = progress or (lambda name, done, total: None)
    report("", 0, len(targets))
    if jobs == 1:
        for done, target in enumerate(targets, start=1):
            report(_make_object(target), done, len(targets))
        return
    # spawn: the DSL's compiler holds threads and state that a fork would copy.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        workers = min(jobs, len(targets))
        with ProcessPoolExecutor(workers, context, _prepare_worker, (scratch,)) as pool:
            futures = [pool.submit(_make_object, target) for target in targets]
            try:
                for done, future in enumerate(as_completed(futures), start=1):
                    report(future.result(), done, len(targets))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _prepare_worker(scratch: str) -> None:
    """Gives the DSL in this process its own folder for dumps: their names do not tell kernels apart."""
    os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp(dir=scratch)


def _make_object(target: _Target) -> str:
    """Compiles a kernel and notes its resources, unless that is done already. Runs in a worker process."""
    try:
        if not target.is_compiled():
            _compile(target)
        if can_inspect() and not target.is_inspected():
            resources = inspect_cubin(target.file(".cubin"))
            write_atomically(target.file(".json"), json.dumps(asdict(resources)).encode())
    except Exception as error:
        # As text: the DSL's exceptions hold MLIR objects, which do not travel between processes.
        raise CompileError(f"{target.spec.name} does not compile: {type(error).__name__}: {error}") from error
    return target.spec.name


def _compile(target: _Target) -> None:
    from cutlass_moe.kernels.compiler import compile_kernel

    compiled = compile_kernel(target.spec)
    make_portable(compiled.ir_module)
    with tempfile.TemporaryDirectory(dir=target.objects, prefix=".compiling-") as scratch:
        made = Path(scratch) / "kernel.o"
        compiled.export_to_c(object_file_path=str(made), function_name=target.spec.name)
        write_atomically(target.file(".cubin"), compiled.artifacts.CUBIN)
        os.replace(made, target.file(".o"))  # last: that it exists says that the kernel is compiled


def make_portable(module: Any) -> None:
    """Has the launchers' host code compiled for `HOST_CPU`: the DSL compiles it for the CPU that it runs on, so that
    a library built where there is AVX-512 would die of illegal instructions where there is none."""
    from cutlass._mlir import ir

    with module.context, ir.Location.unknown():
        attributes = {
            "target_cpu": ir.StringAttr.get(HOST_CPU),
            "target_features": ir.Attribute.parse(f'#llvm.target_features<["{HOST_FEATURE}"]>'),
        }

        def set_target(operation: Any) -> Any:
            if operation.name == "llvm.func":
                for name, value in attributes.items():
                    operation.attributes[name] = value
            return ir.WalkResult.ADVANCE

        module.operation.walk(set_target)


def _link(objects: Sequence[Path]) -> bytes:
    """The shared library of these objects. It finds libtvm_ffi and the CUDA runtime by name."""
    runtime = find_cuda_runtime()
    if runtime is None:
        raise BuildError(f"{CUDA_RUNTIME_NAME} to link to is missing: `pip install 'nvidia-cuda-runtime>=13,<14'`")
    with tempfile.TemporaryDirectory() as scratch:
        exports = Path(scratch) / "exports.map"
        exports.write_text(EXPORTS)
        library = Path(scratch) / LIBRARY_NAME
        command = ["-shared", "-fPIC", "-O2", "-s", "-o", str(library)]
        command += [f"-I{find_include_path()}", f"-I{find_dlpack_include_path()}"]
        command += [*map(str, C_SOURCES), *map(str, objects), str(_dsl_runtime())]
        command += [
            str(runtime),
            find_libtvm_ffi(),
            f"-Wl,--version-script={exports}",
            "-Wl,-z,defs",
            "-Wl,--gc-sections",
        ]
        done = _run_c_compiler(*command)
        if done.returncode != 0:
            raise BuildError(f"the kernels do not link: {done.stderr.strip()}")
        return library.read_bytes()


def _c_compiler_version() -> str:
    """What the C compiler calls itself: the first line of `cc --version`."""
    return _run_c_compiler("--version").stdout.partition("\n")[0].strip()


def _run_c_compiler(*arguments: str) -> subprocess.CompletedProcess[str]:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    try:
        return subprocess.run([*compiler, *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BuildError(
            f"no C compiler: {compiler[0]!r} is not on the PATH (install gcc or clang, or set CC)"
        ) from None


def _dsl_runtime() -> Path:
    """The DSL's static runtime: wrappers of the CUDA calls that kernels make when they are launched."""
    try:
        files = importlib.metadata.files(DSL_RUNTIME_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == DSL_RUNTIME_ARCHIVE:
            return Path(str(file.locate()))
    raise BuildError(f"{DSL_RUNTIME_ARCHIVE} is missing: `pip install '{DSL_PACKAGE}[cu13]'`")


def _entry(target: _Target) -> KernelEntry:
    inspected = target.file(".json")
    resources = Resources(**json.loads(inspected.read_text())) if inspected.exists() else None
    return KernelEntry(
        name=target.spec.name,
        spec=json_form(target.spec.describe()),
        source_hash=target.source_hash,
        cubin_sha256=file_sha256(target.file(".cubin")),
        resources=resources,
    )


def _remove_unused(objects: Path, targets: Sequence[_Target]) -> None:
    """Deletes the files of kernels as they were before, which would pile up."""
    used = {target.file(suffix) for target in targets for suffix in (".o", ".cubin", ".json")}
    for path in objects.iterdir():
        if path.is_file() and path not in used:
            path.unlink()
