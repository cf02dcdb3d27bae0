"""Clock, power and temperature while something is timed: nvidia-smi samples them in the background."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

SAMPLE_MS = 50
FIELDS = {"sm_clock_MHz": "clocks.sm", "power_W": "power.draw", "temperature_C": "temperature.gpu"}


class Monitor:
    """Samples a GPU from `with` on; `over(start)` tells the state since a time of `time.monotonic()`.

    Where nvidia-smi is missing there are no samples and every state is empty.

    Args:
        command: for tests: a command that prints a line of comma-separated numbers for each sample.
    """

    def __init__(self, gpu: str | None, command: Sequence[str] | None = None) -> None:
        query = ",".join(FIELDS.values())
        smi = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--loop-ms={SAMPLE_MS}"]
        self._command = list(command) if command else [*smi, *(["-i", gpu] if gpu else [])]
        self._samples: deque[tuple[float, list[float]]] = deque(maxlen=100_000)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Monitor:
        if shutil.which(self._command[0]):
            # Into a terminal each line comes at once; into a pipe it might wait in a buffer.
            reading, writing = os.openpty()
            self._process = subprocess.Popen(self._command, stdout=writing, stderr=subprocess.DEVNULL)
            os.close(writing)
            threading.Thread(target=self._read, args=(reading,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, terminal: int) -> None:
        with os.fdopen(terminal) as lines, suppress(OSError):  # reading ends in an error when the process ends
            for line in lines:
                try:
                    values = [float(value) for value in line.split(",")]
                except ValueError:  # "[N/A]"
                    continue
                if len(values) == len(FIELDS):
                    self._samples.append((time.monotonic(), values))

    def over(self, start: float) -> dict[str, float]:
        """Medians of the samples since `start`; empty where there is none."""
        values = [sample for taken, sample in list(self._samples) if taken >= start]
        return {
            name: statistics.median(column) for name, column in zip(FIELDS, zip(*values, strict=True), strict=False)
        }
