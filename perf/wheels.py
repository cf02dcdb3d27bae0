"""Wheels for a GPU machine, whose Python and platform are not those of this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


def download(folder: Path, python_version: str, requirements: Sequence[str]) -> None:
    """Fetches the wheels of exactly these packages for that Python. Raises CalledProcessError if pip fails."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python_version, "--implementation", "cp", "-d", str(folder), *requirements]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run(command, check=True)
