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
    find_library,
    package_directory,
)
from cutlass_moe.aot.manifest import REBUILD, LibraryError, check_library, json_form, read_manifest
from cutlass_moe.config import KernelSpec

logger = logging.getLogger("cutlass_moe")

_lock = threading.RLock()
_kernels: dict[KernelSpec, Any] = {}
_libraries: dict[Path, KernelLibrary] = {}


class KernelLibrary:
    """One library of kernels: its manifest, and its functions, loaded from `directory`.

    Raises LibraryError when the library is missing, damaged, or was built for other versions or another architecture.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        path = check_library(directory, self.manifest, tvm_ffi.__version__)
        _load_cuda_runtime()
        try:
            self._module = tvm_ffi.load_module(str(path))
        except (OSError, RuntimeError) as error:
            raise LibraryError(f"The kernel library {path} cannot be loaded: {error}. {REBUILD}") from error

    def holds(self, spec: KernelSpec) -> bool:
        """Whether the library has this kernel, built to this very spec."""
        entry = self.manifest.kernels.get(spec.name)
        return entry is not None and entry.spec == json_form(spec.describe())

    def function(self, spec: KernelSpec) -> Any:
        """The kernel's launcher. Raises LibraryError when the library lacks a kernel that its manifest lists."""
        try:
            return self._module.get_function(spec.name)
        except AttributeError as error:
            raise LibraryError(f"The kernel library in {self.directory} lacks {spec.name}. {REBUILD}") from error


def get_kernel(spec: KernelSpec) -> Any:
    """The launcher of a kernel: a `tvm_ffi.Function` that takes torch tensors and launches on their current stream.

    Taken from the library at hand (`locations.find_library`). A kernel that is not in it is compiled where the DSL is
    installed, and kept in the user's cache. Thread-safe; after the first call for a spec it is one dictionary look-up.

    Raises:
        LibraryError: the library is damaged, or built for other versions or another architecture.
        RuntimeError: the kernel is in no library and cannot be compiled here; or it does not compile.
    """
    kernel = _kernels.get(spec)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(spec)
            if kernel is None:
                kernel = _kernels[spec] = _find_kernel(spec)
    return kernel


def reset() -> None:
    """Forgets every loaded library and kernel, so that the next `get_kernel` looks again (at another library, say)."""
    with _lock:
        _kernels.clear()
        _libraries.clear()


def _find_kernel(spec: KernelSpec) -> Any:
    directory = find_library()
    if directory is not None:
        library = _open(directory)
        if library.holds(spec):
            return library.function(spec)
    return _compile_on_first_use(spec, directory)


def _open(directory: Path) -> KernelLibrary:
    if directory not in _libraries:
        _libraries[directory] = KernelLibrary(directory)
    return _libraries[directory]


def _compile_on_first_use(spec: KernelSpec, library: Path | None) -> Any:
    from cutlass_moe.aot import build

    where = f"the library in {library}" if library else f"{package_directory()} or {cache_directory() / 'lib'}"
    if build.dsl_version() is None:
        raise RuntimeError(
            f"Kernel {spec.name} is not in {where}, and cannot be compiled here because {build.DSL_PACKAGE} is not "
            f"installed. {REBUILD} Then copy the library here, or point {LIBRARY_VARIABLE} to it."
        )
    directory = cache_directory() / "first_use" / f"{spec.name}-{build.source_hash(spec)[:16]}"
    if not (directory / MANIFEST_NAME).exists():
        logger.warning(
            "Kernel %s is not in %s: compiling it (some seconds, once; kept in %s)", spec.name, where, directory
        )
        build.build([spec], directory, jobs=1)
    return _open(directory).function(spec)


def _load_cuda_runtime() -> None:
    """Brings the CUDA runtime into the process, where the library finds it by name. PyTorch's is taken if it is there."""
    path = find_cuda_runtime()
    for candidate in (CUDA_RUNTIME_NAME, str(path) if path else None):
        if candidate is None:
            continue
        try:
            ctypes.CDLL(candidate)
            return
        except OSError:
            continue
    raise LibraryError(
        f"{CUDA_RUNTIME_NAME}, which the kernels need, is neither in this process nor installed: use PyTorch built for "
        "CUDA 13, or `pip install 'nvidia-cuda-runtime>=13,<14'`."
    )
