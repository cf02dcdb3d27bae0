"""`python -m perf.bundle` packs into `.carry/` what a GPU machine with neither the DSL nor a network needs, and with
`--peers` into `.peers/` the peers that such a machine lacks.

There, in the repository's root: `source .carry/env.sh`, then run whatever needs the kernels.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cutlass_moe.__main__ import main as cutlass_moe_main
from cutlass_moe.aot.locations import LIBRARY_NAME, MANIFEST_NAME, cache_directory, default_output
from perf import bundle_peers
from perf.peers import cutlass_cpp
from perf.wheels import download

FOLDER = Path(__file__).resolve().parents[1] / ".carry"
BUILDS = cache_directory() / "bundle"  # of modules' kernels, kept so that only what changed is compiled
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
        "--peers", action="store_true", help="pack QuACK, liger and the DSL that QuACK compiles with into .peers/, too"
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
    tvm_ffi = f"apache-tvm-ffi=={importlib.metadata.version('apache-tvm-ffi')}"
    download(FOLDER, parsed.python_version, [tvm_ffi])
    folders = [FOLDER]
    if parsed.peers:
        bundle_peers.pack(parsed.python_version)
        folders.append(bundle_peers.FOLDER)
    for folder in folders:
        print(f"{folder.name}: {size_MiB(folder):.1f} MiB; there: source {folder.name}/env.sh")
    return 0


def size_MiB(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


if __name__ == "__main__":
    sys.exit(main())
