"""Where and on what code a measurement was made."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

COMMIT_VARIABLE = "CUTLASS_MOE_COMMIT"
PEER_PACKAGES = (
    "transformers",
    "quack-kernels",
    "sonic-moe",
    "vllm",
    "flashinfer-python",
    "triton",
    "triton-kernels",
    "deep-gemm",
    "liger-kernel",
    "nvidia-cutlass",
    "nvidia-cutlass-dsl",
)
_ROOT = Path(__file__).parents[1]
_SMI_FIELDS = {
    "sm_clock_MHz": "clocks.sm",
    "memory_clock_MHz": "clocks.mem",
    "power_W": "power.draw",
    "power_limit_W": "power.limit",
    "temperature_C": "temperature.gpu",
}


def short_device_name(name: str) -> str:
    """A folder name for a device: `NVIDIA H200` gives `h200`."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower().replace("nvidia", "")).strip("_")


def commit() -> str:
    """The commit measured: `$CUTLASS_MOE_COMMIT` where set (for a copy of the tree without .git), else git's
    with `-dirty` appended when files outside perf/results differ from it; `unknown` without either."""
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    head = _output_of("git", "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    changes = _output_of("git", "status", "--porcelain", "--", ".", ":(exclude)perf/results")
    return head if changes == "" else f"{head}-dirty"


def why_not_for_the_record(commit: str) -> str | None:
    """Why a result of this commit can't be traced to a source tree, or None when it can."""
    if commit == "unknown":
        return f"the commit is unknown: run it in a git checkout or set {COMMIT_VARIABLE}"
    if commit.endswith("-dirty"):
        return "the tree differs from its commit"
    return None


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _smi("driver_version"),
        "apache-tvm-ffi": _installed("apache-tvm-ffi"),
        "cutlass-moe": _installed("cutlass-moe"),
        **{name: found for name in PEER_PACKAGES if (found := _installed(name))},
    }


def device_state() -> dict[str, Any]:
    """Clocks, power and temperature by nvidia-smi, as numbers; empty where it is not to be had."""
    answer = _smi(",".join(_SMI_FIELDS.values()))
    if answer is None:
        return {}
    return {name: _number(value) for name, value in zip(_SMI_FIELDS, answer.split(","), strict=False)}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _smi(query: str) -> str | None:
    """nvidia-smi's answer for torch's current device, which it knows by its UUID."""
    table = _output_of("nvidia-smi", f"--query-gpu=uuid,{query}", "--format=csv,noheader,nounits")
    if not table:
        return None
    rows = dict(line.split(", ", 1) for line in table.splitlines() if ", " in line)
    if len(rows) == 1:
        return next(iter(rows.values()))
    return rows.get(gpu_uuid())


def gpu_uuid() -> str:
    """The name nvidia-smi knows torch's current device by."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _output_of(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    finished = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    return finished.stdout.strip() if finished.returncode == 0 else None


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
