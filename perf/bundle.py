"""`python -m perf.bundle` packs into `.carry/` what a GPU machine with neither the DSL nor a network needs.

There, in the repository's root: `source .carry/env.sh`, then run whatever needs the kernels.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cutlass_moe.__main__ import main as cutlass_moe_main
from cutlass_moe.aot.locations import LIBRARY_NAME, MANIFEST_NAME, cache_directory, default_output
from perf.peers import cutlass_cpp

FOLDER = Path(__file__).resolve().parents[1] / ".carry"
BUILDS = cache_directory() / "bundle"  # of modules' kernels, kept so that only what changed is compiled
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
ENVIRONMENT = """\
# Source this in bash on the GPU machine: it installs the wheel into a temporary folder and sets the paths.
carried="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
carried_site="$(mktemp -d)"
python3 -m pip install -q --no-index --no-deps --no-compile --target "$carried_site" "$carried"/*.whl
export PYTHONPATH="$carried_site:$(dirname "$carried")${PYTHONPATH:+:$PYTHONPATH}"
export LD_LIBRARY_PATH="$carried_site/tvm_ffi/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
if [ -e "$carried/cutlass_peer.so" ]; then export CUTLASS_MOE_PEER_LIBRARY="$carried/cutlass_peer.so"; fi
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Brings the library up to date and packs it, with the wheel of tvm_ffi for the GPU machine's Python."""
    parser = argparse.ArgumentParser(prog="python -m perf.bundle", description=__doc__)
    parser.add_argument("--python-version", default="3.12", help="Python of the GPU machine (default: 3.12)")
    parser.add_argument(
        "--cutlass-peer", action="store_true", help="pack the stock CUTLASS C++ GEMM that perf run compares with, too"
    )
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        help="pack the kernels of this module (its list KERNELS), too; may be repeated: tests.gpu.epilogue_kernels for "
        "the GPU tests of epilogues, perf.epilogues for their times",
    )
    parsed = parser.parse_args(arguments)
    if cutlass_moe_main(["build"]):
        return 1
    extras = {module: BUILDS / module for module in parsed.module}
    if any(cutlass_moe_main(["build", "--module", module, "--output", str(path)]) for module, path in extras.items()):
        return 1
    shutil.rmtree(FOLDER, ignore_errors=True)
    built = {"lib": default_output()} | {f"lib.{module}": path for module, path in extras.items()}
    for folder, source in built.items():
        (FOLDER / folder).mkdir(parents=True)
        for name in (LIBRARY_NAME, MANIFEST_NAME):
            shutil.copy2(source / name, FOLDER / folder / name)
    if parsed.cutlass_peer:
        shutil.copy2(cutlass_cpp.build(cutlass_cpp.CACHE), FOLDER / "cutlass_peer.so")
    libraries = ":".join(f"$carried/{folder}" for folder in built)
    (FOLDER / "env.sh").write_text(f'{ENVIRONMENT}export CUTLASS_MOE_LIBRARY="{libraries}"\n')
    download_tvm_ffi(parsed.python_version)
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    print(f"{FOLDER.name}: {size / 2**20:.1f} MiB; there: source {FOLDER.name}/env.sh")
    return 0


def download_tvm_ffi(python_version: str) -> None:
    """Fetches the installed version of tvm_ffi for that Python. Raises CalledProcessError if pip fails."""
    requirement = f"apache-tvm-ffi=={importlib.metadata.version('apache-tvm-ffi')}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python_version, "--implementation", "cp", "-d", str(FOLDER), requirement]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
