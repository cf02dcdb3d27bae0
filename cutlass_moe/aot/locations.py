"""Where kernel libraries live, and what they link to. A library is a directory with a shared library and its manifest."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

LIBRARY_VARIABLE = "CUTLASS_MOE_LIBRARY"
LIBRARY_NAME = "libcutlass_moe_kernels.so"
MANIFEST_NAME = "manifest.json"
CUDA_RUNTIME_NAME = "libcudart.so.13"


def package_directory() -> Path:
    """The library inside the installed package."""
    return Path(__file__).resolve().parents[1] / "lib"


def cache_directory() -> Path:
    """This user's cache: `$XDG_CACHE_HOME/cutlass_moe`, by default `~/.cache/cutlass_moe`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cutlass_moe"


def default_output() -> Path:
    """Where `build` writes: into the package if it can be written to, else into the user's cache."""
    inside = package_directory()
    if os.access(inside if inside.exists() else inside.parent, os.W_OK):
        return inside
    return cache_directory() / "lib"


def find_library() -> Path | None:
    """The directory of the library that `load` uses, or None when there is none.

    `$CUTLASS_MOE_LIBRARY` (a directory, or the shared library in it) decides when it is set; whether a library is there is
    then for `load` to say. Otherwise the package's own library, then the one in the user's cache.
    """
    chosen = os.environ.get(LIBRARY_VARIABLE)
    if chosen:
        path = Path(chosen).expanduser()
        return path.parent if path.suffix == ".so" else path
    for directory in (package_directory(), cache_directory() / "lib"):
        if (directory / MANIFEST_NAME).exists():
            return directory
    return None


def nvidia_wheel_files(pattern: str) -> list[Path]:
    """Files of NVIDIA's installed wheels (`site-packages/nvidia/<part>/...`), by a glob below `nvidia`, latest part first."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or []) if spec else []
    return [path for root in roots for path in sorted(Path(root).glob(pattern), reverse=True)]


def find_cuda_runtime() -> Path | None:
    """The CUDA runtime of an installed nvidia-cuda-runtime wheel, which is also what PyTorch's CUDA wheels bring."""
    return next(iter(nvidia_wheel_files(f"*/lib/{CUDA_RUNTIME_NAME}")), None)
