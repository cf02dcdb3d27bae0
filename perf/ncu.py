"""Runs a program under Nsight Compute and reads what each of its kernels moved."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perf import PerfError

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_SECTORS, DURATION = "lts__t_sectors_op_read.sum", "gpu__time_duration.sum"
PASSES = "profiler__replayer_passes"  # in every table, asked for or not
UNITS = {READ: "byte", WRITTEN: "byte", L2_SECTORS: "sector", DURATION: "ns", PASSES: "pass"}
SECTOR_BYTES = 32
ERROR = "==ERROR=="


@dataclass(frozen=True)
class Kernel:
    """One launch: bytes from and to device memory, bytes read from the L2 cache, and its duration in us."""

    name: str
    read_bytes: int
    written_bytes: int
    l2_read_bytes: int
    us: float


def require() -> None:
    """Raises PerfError where there is no ncu."""
    if shutil.which("ncu") is None:
        raise PerfError("perf traffic needs Nsight Compute, and its command `ncu` is not on the PATH")


def profile(program: Sequence[str]) -> list[Kernel]:
    """Runs `program` and returns the kernels that it launches between cudaProfilerStart and cudaProfilerStop, in order.
    They run one at a time, with clocks and caches left as they are.

    Raises:
        PerfError: ncu or the program failed, or ncu's output is not what was asked for.
    """
    left_alone = ["--cache-control", "none", "--clock-control", "none"]
    table = ["--csv", "--page", "raw", "--metrics", ",".join((READ, WRITTEN, L2_SECTORS, DURATION))]
    command = ["ncu", "--profile-from-start", "off", *left_alone, *table, *program]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in (finished.stdout + finished.stderr).splitlines() if line.strip()]
    # Where the counters can't be read, the program itself still ends well.
    if finished.returncode or any(line.startswith(ERROR) for line in lines):
        raise PerfError(f"ncu failed: {_why_failed(lines)}")
    return parse(finished.stdout)


def _why_failed(lines: Sequence[str]) -> str:
    """ncu's first error; where that says only that the program failed, the program's last line."""
    errors = [line.removeprefix(ERROR).strip() for line in lines if line.startswith(ERROR)]
    if errors and not errors[0].startswith("The application returned an error code"):
        return errors[0]
    of_the_program = [line.strip() for line in lines if not line.startswith(("==", '"'))]
    return (of_the_program or errors or ["it printed no reason"])[-1]


def parse(output: str) -> list[Kernel]:
    """Reads ncu's raw page as CSV: a line of names, one of units, then one for each kernel, among lines of other kinds.

    Raises:
        PerfError: there is no table, a metric is missing or in another unit, or a kernel took several passes: all but
            the first find in the caches what the one before left there.
    """
    table = list(csv.reader(line for line in output.splitlines() if line.startswith('"')))
    if len(table) < 3:
        raise PerfError("ncu saw no kernel")
    names, units, *rows = table
    found = dict(zip(names, units, strict=False))
    for metric, unit in UNITS.items():
        if found.get(metric) != unit:
            raise PerfError(f"ncu gave {metric} in {found.get(metric)!r}, expected {unit!r}")
    return [_kernel(dict(zip(names, row, strict=False))) for row in rows]


def _kernel(row: Mapping[str, str]) -> Kernel:
    name = row["Kernel Name"]
    try:
        values = {metric: float(row[metric].replace(",", "")) for metric in UNITS}
    except (KeyError, ValueError) as error:
        raise PerfError(f"ncu has no numbers for the kernel {name}: {error}") from error
    if values[PASSES] != 1:
        raise PerfError(f"ncu took {values[PASSES]:.0f} passes over the kernel {name}, expected 1")
    return Kernel(
        name=name,
        read_bytes=int(values[READ]),
        written_bytes=int(values[WRITTEN]),
        l2_read_bytes=int(values[L2_SECTORS]) * SECTOR_BYTES,
        us=values[DURATION] / 1e3,
    )
