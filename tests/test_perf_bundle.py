"""perf.bundle's archive of peers, from made-up wheels, unpacked by its script."""

from __future__ import annotations

import lzma
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from cutlass_moe.aot.locations import LIBRARY_NAME, MANIFEST_NAME
from perf import bundle, bundle_peers

PURE = {"quack/__init__.py": "ABOVE = __file__.split('/')[-3]", "quack/notes.md": "", "quack/typed.pyi": ""}
NATIVE = {
    "nvidia_cutlass_dsl/dsl_packages/cutlass/__init__.py": "VERSION = 1",
    "nvidia_cutlass_dsl/dsl_packages/iket/__init__.py": "",
    "nvidia_cutlass_dsl/cu13/lib/runtime.so": "\x7fELF" * 100,
    "nvidia_cutlass_dsl/cu13/lib/stubs/other/runtime.so": "",
    "nvidia_cutlass_dsl/cu13/lib/static.a": "",
    "nvidia_cutlass_dsl/cu13/include/runtime.h": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packed `.peers`."""

    def download(wheels: Path, python_version: str, requirements: Sequence[str]) -> None:
        assert python_version == "3.12" and len(requirements) == 6
        for name, files in {"quack": PURE, "dsl": NATIVE}.items():
            with zipfile.ZipFile(wheels / f"{name}.whl", "w") as wheel:
                for path, text in files.items():
                    wheel.writestr(path, text)

    monkeypatch.setattr(bundle_peers, "download", download)
    monkeypatch.setattr(bundle_peers, "FILTERS", ({"id": lzma.FILTER_LZMA2, "preset": 0},))
    bundle_peers.pack("3.12", tmp_path / ".peers")
    return tmp_path / ".peers"


def test_what_python_does_not_run_is_left_out(folder: Path) -> None:
    with tarfile.open(folder / bundle_peers.ARCHIVE) as archive:
        names = archive.getnames()
    assert names[0] == "nvidia_cutlass_dsl/cu13/lib/runtime.so", "the largest comes first"
    assert sorted(names[1:]) == ["nvidia_cutlass_dsl/dsl_packages/cutlass/__init__.py", "quack/__init__.py"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is for bash")
def test_the_script_makes_them_importable(folder: Path) -> None:
    script = f"set -eu; source {folder}/env.sh; python3 -c 'import quack, cutlass; print(quack.ABOVE, cutlass.VERSION)'"
    finished = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout == "site-packages 1\n"


def test_it_is_packed_again_only_where_something_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (folder / bundle_peers.ARCHIVE).stat().st_mtime_ns
    bundle_peers.pack("3.12", folder)
    assert (folder / bundle_peers.ARCHIVE).stat().st_mtime_ns == before
    monkeypatch.setattr(bundle_peers, "NOT_RUN", ("*.so",))
    bundle_peers.pack("3.12", folder)
    with tarfile.open(folder / bundle_peers.ARCHIVE) as archive:
        assert "quack/notes.md" in archive.getnames()


@pytest.mark.parametrize("arguments", [[], ["--peers", "--python-version", "3.13"]])
def test_peers_are_packed_only_when_asked(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed: list[str] = []
    for name in (LIBRARY_NAME, MANIFEST_NAME):
        (tmp_path / name).touch()
    monkeypatch.setattr(bundle, "FOLDER", tmp_path / ".carry")
    monkeypatch.setattr(bundle_peers, "FOLDER", tmp_path / ".peers")
    monkeypatch.setattr(bundle, "cutlass_moe_main", lambda arguments: 0)
    monkeypatch.setattr(bundle, "default_output", lambda: tmp_path)
    monkeypatch.setattr(bundle, "download", lambda folder, python_version, requirements: None)
    monkeypatch.setattr(bundle_peers, "pack", packed.append)
    assert bundle.main(arguments) == 0
    assert packed == arguments[2:]
    said = [f"{name}: 0.0 MiB; there: source {name}/env.sh" for name in (".carry", ".peers")]
    assert capsys.readouterr().out.splitlines() == said[: 1 + len(packed)]
