"""The wheel: the kernels are in it, what they were made from is not, and it runs without the DSL."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cutlass_moe.aot.build import build
from cutlass_moe.aot.locations import LIBRARY_NAME, MANIFEST_NAME
from cutlass_moe.config import CombineSpec, KernelSpec, RouteSpec

ROOT = Path(__file__).resolve().parents[1]
SPECS: list[KernelSpec] = [CombineSpec("bfloat16"), RouteSpec("int64", "float32")]
# What a user's machine does with the wheel: no DSL, none of the builder's packages.
LOAD = """
import sys
for absent in ("cutlass", "filelock", "rich", "numpy"):
    sys.modules[absent] = None
sys.path.insert(0, sys.argv[1])
import torch
import cutlass_moe
from cutlass_moe.aot.load import get_kernel
from cutlass_moe.config import CombineSpec
assert cutlass_moe.__file__.startswith(sys.argv[1])
try:
    get_kernel(CombineSpec("bfloat16"))()
except TypeError:  # too few arguments: the launcher checks them before it touches a GPU
    print("loaded")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree without its kernels."""
    tree = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md"):
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, tree)
    for package in ("cutlass_moe", "epilogues"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    return tree


def pack(source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(output),
        str(source),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with two kernels in it."""
    refused = pack(source, source / "nothing")
    assert refused.returncode != 0 and "run `make kernels`" in refused.stdout + refused.stderr
    build(SPECS, source / "cutlass_moe" / "lib")
    output = tmp_path_factory.mktemp("wheel")
    packed = pack(source, output)
    assert packed.returncode == 0, packed.stderr
    (made,) = output.iterdir()
    return made


def test_wheel_is_for_the_platform_and_every_python(wheel: Path) -> None:
    assert re.fullmatch(rf"cutlass_moe-[\d.]+-py3-none-manylinux_2_28_{platform.machine()}\.whl", wheel.name)


def test_wheel_holds_the_kernels_and_not_their_objects(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in names if name.endswith("METADATA"))
    inside = {name.removeprefix("cutlass_moe/lib/") for name in names if name.startswith("cutlass_moe/lib/")}
    assert inside == {LIBRARY_NAME, MANIFEST_NAME}
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"cutlass_moe", "epilogues"}
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert sorted(required) == ["apache-tvm-ffi", "torch"]


def test_installed_wheel_loads_without_the_dsl(wheel: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
        str(wheel),
    ]
    subprocess.run(command, check=True)
    command = [sys.executable, "-c", LOAD, str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "loaded\n", done.stderr


def test_library_asks_for_no_newer_glibc_than_its_tag(source: Path, wheel: Path) -> None:
    library = source / "cutlass_moe" / "lib" / LIBRARY_NAME
    shown = subprocess.run(["readelf", "-VW", str(library)], capture_output=True, text=True, check=True).stdout
    versions = [tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([\d.]+)", shown)]
    assert versions and max(versions) <= (2, 28)
