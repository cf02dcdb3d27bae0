"""The roofs of a device, measured: how fast it reads memory, and what dense cuBLAS reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from perf.roofline import Roofs
from perf.timing import Stopwatch

READ_BYTES = 4 * 2**30
DENSE_EXTENT = 8192
REPEATS = 20
WARM_UP_S = 0.5  # of dense products: the clock falls under load, and the layer is timed on a warm card


def measure_roofs(stopwatch: Stopwatch, device: torch.device) -> Roofs:
    """Read bandwidth: the best of several kernels that stream 4 GiB of random bf16. Dense: bf16 8192^3."""
    return Roofs(read_TBps=_read_TBps(stopwatch, device), dense_TFLOPs=_dense_TFLOPs(stopwatch, device))


def _median_ms(stopwatch: Stopwatch, call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    return median(stopwatch.device_ms(call) for _ in range(REPEATS))


def _read_TBps(stopwatch: Stopwatch, device: torch.device) -> float:
    columns = 8192
    rows = READ_BYTES // 2 // columns
    data_RC = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_()
    vector_C = torch.randn(columns, dtype=torch.bfloat16, device=device)
    long_rows = data_RC.view(columns, rows)
    readers: tuple[Callable[[], object], ...] = (
        lambda: data_RC.sum(),
        lambda: data_RC.amax(),
        lambda: long_rows.sum(dim=1),
        lambda: long_rows.amax(dim=1),
        lambda: long_rows.view(torch.float32).amax(dim=1),
        lambda: torch.mv(data_RC, vector_C),
    )
    fastest_ms = min(_median_ms(stopwatch, reader) for reader in readers)
    return READ_BYTES / fastest_ms / 1e9


def _dense_TFLOPs(stopwatch: Stopwatch, device: torch.device) -> float:
    a, b, out = (torch.empty(DENSE_EXTENT, DENSE_EXTENT, dtype=torch.bfloat16, device=device) for _ in range(3))
    a.normal_()
    b.normal_()

    def product() -> None:
        torch.mm(a, b.T, out=out)

    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_S:
        product()
        torch.cuda.synchronize(device)
    return 2 * DENSE_EXTENT**3 / _median_ms(stopwatch, product) / 1e9
