"""Where kernel libraries live (each a directory with a shared library and its manifest), and what they need."""

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


def find_libraries() -> list[Path]:
    """The directories of the libraries that `load` uses, in the order in which it looks for a kernel.

    `$CUTLASS_MOE_LIBRARY` decides when it is set: directories, or the shared libraries in them, separated like
    those of PATH. An empty one of several stands for the default library, so `mine:` is `mine` and then the
    default. Whether there is a library in each is for `load` to say.
    """
    chosen = os.environ.get(LIBRARY_VARIABLE)
    if not chosen:
        return default_libraries()
    directories: list[Path] = []
    for entry in chosen.split(os.pathsep):
        path = Path(entry).expanduser()
        found = [path.parent if path.suffix == ".so" else path] if entry else default_libraries()
        directories += [directory for directory in found if directory not in directories]
    return directories


def default_libraries() -> list[Path]:
    """The default library as a list of one: the package's own, else the one in the user's cache. Or of none."""
    candidates = (package_directory(), cache_directory() / "lib")
    return [directory for directory in candidates if (directory / MANIFEST_NAME).exists()][:1]


def nvidia_wheel_files(pattern: str) -> list[Path]:
    """Files of NVIDIA's installed wheels, by a glob below `site-packages/nvidia`, latest first."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or []) if spec else []
    return [path for root in roots for path in sorted(Path(root).glob(pattern), reverse=True)]


def find_cuda_runtime() -> Path | None:
    """The CUDA runtime of an installed nvidia-cuda-runtime wheel, which PyTorch's CUDA wheels bring too."""
    return next(iter(nvidia_wheel_files(f"*/lib/{CUDA_RUNTIME_NAME}")), None)
