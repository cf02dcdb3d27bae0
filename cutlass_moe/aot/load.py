"""Gives kernels from a library that was built ahead of time. Imports neither the DSL nor a compiler."""

from __future__ import annotations

import ctypes
import logging
import threading
from pathlib import Path
from typing import Any

import tvm_ffi

from cutlass_moe.aot.locations import (
    CUDA_RUNTIME_NAME,
    LIBRARY_VARIABLE,
    MANIFEST_NAME,
    cache_directory,
    find_cuda_runtime,
    find_libraries,
    package_directory,
)
from cutlass_moe.aot.manifest import (
    REBUILD,
    SCHEMA_VERSION,
    LibraryError,
    check_library,
    json_form,
    read_manifest,
)
from cutlass_moe.config import KernelSpec

logger = logging.getLogger("cutlass_moe")

_lock = threading.RLock()
_kernels: dict[KernelSpec, Any] = {}
_libraries: dict[Path, KernelLibrary] = {}


class KernelLibrary:
    """One library of kernels: its manifest, and its functions, loaded from `directory`.

    Raises LibraryError when it is missing, damaged, or built for other versions or another architecture.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        path = check_library(directory, self.manifest, tvm_ffi.__version__)
        _load_cuda_runtime()
        try:
            self._module = tvm_ffi.load_module(str(path))
        except (OSError, RuntimeError) as error:
            raise LibraryError(f"kernel library {path} cannot be loaded, {error}: {REBUILD}") from error

    def holds(self, spec: KernelSpec) -> bool:
        """Whether the library has this kernel, built to this very spec: the same epilogue, not one of its name."""
        entry = self.manifest.kernels.get(spec.name)
        return entry is not None and entry.spec == json_form(spec.describe())

    def function(self, spec: KernelSpec) -> Any:
        """The kernel's launcher. Raises LibraryError when the library lacks what its manifest lists."""
        return self._function(spec.name)

    def layer_launcher(self) -> Any:
        """The function of `layer.c`. The kernels that it launches may be those of other libraries."""
        return self._function("launch_layer")

    def _function(self, name: str) -> Any:
        try:
            return self._module.get_function(name)
        except AttributeError as error:
            raise LibraryError(f"kernel library {self.directory} lacks {name}: {REBUILD}") from error


def get_kernel(spec: KernelSpec) -> Any:
    """The launcher of a kernel: a `tvm_ffi.Function` of torch tensors that uses their current stream.

    Taken from the first library that has it (`locations.find_libraries`). A kernel that is in none is compiled
    where the DSL is installed, and kept in the user's cache. Thread-safe; later calls are one dictionary look-up.

    Raises:
        LibraryError: the library is damaged, or built for other versions or another architecture.
        RuntimeError: the kernel is in no library and cannot be compiled here; or it does not compile.
    """
    kernel = _kernels.get(spec)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(spec)
            if kernel is None:
                kernel = _kernels[spec] = _find_library(spec).function(spec)
    return kernel


def get_layer_launcher(spec: KernelSpec) -> Any:
    """The function of `layer.c` out of the library that `get_kernel(spec)` takes its kernel from. Errors as there."""
    with _lock:
        return _find_library(spec).layer_launcher()


def reset() -> None:
    """Forgets loaded libraries and kernels: the next `get_kernel` looks again, at another library, say."""
    with _lock:
        _kernels.clear()
        _libraries.clear()


def _find_library(spec: KernelSpec) -> KernelLibrary:
    directories = find_libraries()
    for directory in directories:
        library = _open(directory)
        if library.holds(spec):
            return library
    return _compile_on_first_use(spec, directories)


def _open(directory: Path) -> KernelLibrary:
    if directory not in _libraries:
        _libraries[directory] = KernelLibrary(directory)
    return _libraries[directory]


def _compile_on_first_use(spec: KernelSpec, libraries: list[Path]) -> KernelLibrary:
    from cutlass_moe.aot import build

    places = ", ".join(map(str, libraries)) or f"{package_directory()} or {cache_directory() / 'lib'}"
    where = f"kernel library {places}" if libraries else f"a kernel library ({places})"
    if build.dsl_version() is None:
        raise RuntimeError(
            f"kernel {spec.name} is not in {where}, and {build.DSL_PACKAGE} is not installed to compile it: "
            f"{REBUILD}, and copy the library here or point {LIBRARY_VARIABLE} to it"
        )
    directory = cache_directory() / "first_use" / f"{spec.name}-{build.source_hash(spec)[:16]}-{SCHEMA_VERSION}"
    if not (directory / MANIFEST_NAME).exists():
        logger.warning("compiling kernel %s, not in %s; it is kept in %s", spec.name, where, directory)
        build.build([spec], directory, jobs=1)
    return _open(directory)


def _load_cuda_runtime() -> None:
    """Brings the CUDA runtime into the process: the library asks for it by name. PyTorch's comes first."""
    for candidate in (CUDA_RUNTIME_NAME, find_cuda_runtime()):
        if candidate is None:
            continue
        try:
            ctypes.CDLL(str(candidate))
            return
        except OSError:
            continue
    raise LibraryError(
        f"{CUDA_RUNTIME_NAME}, which the kernels need, is neither in this process nor installed: "
        "use a PyTorch for CUDA 13, or `pip install 'nvidia-cuda-runtime>=13,<14'`"
    )
