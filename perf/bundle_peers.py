"""Packs peers that a GPU machine without a network lacks: QuACK, liger and the DSL, in one archive in `.peers/`."""

from __future__ import annotations

import io
import lzma
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from cutlass_moe.aot.build import DSL_PACKAGE, dsl_version
from perf.wheels import download

FOLDER = Path(__file__).resolve().parents[1] / ".peers"
ARCHIVE, CONTENTS, SCRIPT = "peers.tar.xz", "contents.txt", "env.sh"
DSL_PACKAGES = (DSL_PACKAGE, *(f"{DSL_PACKAGE}-libs-{part}" for part in ("base", "core", "cu13")))
PEERS = ("quack-kernels==0.6.5", "liger-kernel==0.8.5")
NOT_RUN = ("*.a", "*.h", "*.md", "*.pyi", "*/stubs/*", "*/dsl_packages/iket/*")
# The DSL's two libraries share much code: the dictionary spans both. The filter makes calls of one function alike.
FILTERS = (
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 256 * 2**20},
)
ENVIRONMENT = f"""\
# Source this in bash on the GPU machine, after .carry/env.sh: it unpacks the peers into a temporary folder and sets the
# path. QuACK's cache of kernels wants its packages in a folder named site-packages.
peers="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
peers_site="$(mktemp -d)/site-packages"
python3 -m tarfile -e "$peers/{ARCHIVE}" "$peers_site"
export PYTHONPATH="$peers_site:$peers_site/nvidia_cutlass_dsl/dsl_packages${{PYTHONPATH:+:$PYTHONPATH}}"
"""


def pack(python_version: str, folder: Path = FOLDER) -> None:
    """Makes the archive, which takes minutes, and the script that unpacks it; nothing where both are up to date.

    Raises CalledProcessError if pip cannot download a wheel.
    """
    # The DSL that compiles our kernels: bundling needs it installed.
    requirements = (*(f"{package}=={dsl_version()}" for package in DSL_PACKAGES), *PEERS)
    contents = "\n".join((f"Python {python_version}", *requirements, *NOT_RUN, "")) + ENVIRONMENT
    stamp = folder / CONTENTS
    if stamp.exists() and stamp.read_text() == contents:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as wheels:
        download(Path(wheels), python_version, requirements)
        write_archive(sorted(Path(wheels).glob("*.whl")), folder / ARCHIVE)
    (folder / SCRIPT).write_text(ENVIRONMENT)
    stamp.write_text(contents)


def write_archive(wheels: Iterable[Path], path: Path) -> None:
    """What the wheels install and Python runs; the libraries first and side by side, which packs best."""
    members = [(wheel, info) for wheel in wheels for info in zipfile.ZipFile(wheel).infolist() if _runs(info.filename)]
    members.sort(key=lambda member: (-member[1].file_size, member[1].filename))
    with lzma.open(path, "wb", filters=FILTERS) as compressed, tarfile.open(fileobj=compressed, mode="w") as archive:
        for wheel, info in members:
            entry = tarfile.TarInfo(info.filename)
            entry.size, entry.mode = info.file_size, 0o644
            with zipfile.ZipFile(wheel) as opened:
                archive.addfile(entry, io.BytesIO(opened.read(info)))


def _runs(name: str) -> bool:
    return not name.endswith("/") and not any(fnmatch(name, pattern) for pattern in NOT_RUN)
