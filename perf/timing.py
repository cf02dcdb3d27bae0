"""Timing on a CUDA device: cold caches, events, graph replay, and everything that is compared in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

FLUSH_BYTES = 256 * 2**20  # several times the L2 of any Hopper GPU
COOL_S = 0.03  # idle time before a cool call


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile in ms, and over how many repeats."""

    ms: float
    p10_ms: float
    p90_ms: float
    repeats: int

    @classmethod
    def of(cls, times_ms: list[float]) -> Spread:
        if len(times_ms) == 1:
            return cls(times_ms[0], times_ms[0], times_ms[0], 1)
        deciles = statistics.quantiles(times_ms, n=10, method="inclusive")
        return cls(statistics.median(times_ms), deciles[0], deciles[-1], len(times_ms))


@dataclass(frozen=True)
class Turns:
    """How long to go on: until `budget_s` is spent, from `least` to `most` turns."""

    least: int = 7
    most: int = 50
    budget_s: float = 2.0
    warm_up: int = 2


def time_in_turns(
    timers: Mapping[str, Callable[[], float]], turns: Turns, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Spread]:
    """Times all contenders in turns, so that each meets the same clocks and temperature; in another order in each turn,
    for at the power limit what ran just before decides the clock.

    Args:
        timers: for each contender a function that runs it once and returns the ms it took.
    """
    for _ in range(turns.warm_up):
        for timer in timers.values():
            timer()
    times_ms: dict[str, list[float]] = {name: [] for name in timers}
    order = list(timers)
    shuffler = random.Random(0)
    start = clock()
    done = 0
    while done < turns.least or (done < turns.most and clock() - start < turns.budget_s):
        shuffler.shuffle(order)
        for name in order:
            times_ms[name].append(timers[name]())
        done += 1
    return {name: Spread.of(values) for name, values in times_ms.items()}


class Stopwatch:
    """Times single calls on the current stream of a CUDA device, with none of their data in the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def device_ms(self, call: Callable[[], object]) -> float:
        """Device time of a call that costs the host little, such as a graph replay: it is queued behind the
        cache flush, which hides the host's part."""
        self.flush_cache()
        return self._timed(call)[0]

    def cool_ms(self, call: Callable[[], object]) -> float:
        """`device_ms` on a device that was idle for 30 ms just before the flush."""
        torch.cuda.synchronize(self._device)
        time.sleep(COOL_S)
        return self.device_ms(call)

    def eager(self, call: Callable[[], object]) -> tuple[float, float]:
        """Time of a call that meets an idle device: the host's part before and between launches counts.

        Returns:
            ms between the events, and ms of host time from the call to its return.
        """
        self.flush_cache()
        torch.cuda.synchronize(self._device)
        return self._timed(call)

    def flush_cache(self) -> None:
        """Queues what evicts everything else from the L2 cache."""
        # The write evicts what was cached; the read leaves clean lines: writing dirty ones back would be
        # charged to the call.
        self._flush.fill_(1)
        self._flush.amax()

    def _timed(self, call: Callable[[], object]) -> tuple[float, float]:
        self._start.record()
        called = time.perf_counter()
        call()
        host_ms = 1e3 * (time.perf_counter() - called)
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end), host_ms


class EagerTimer:
    """Times eager calls of one contender, each right after an untimed one: the host's code is then in the CPU's caches,
    as in a loop over layers. In turns with others it would come back into them for every call, which takes longer than
    its work.
    """

    def __init__(self, stopwatch: Stopwatch, call: Callable[[], object]) -> None:
        self._stopwatch, self._call = stopwatch, call
        self._host_ms: list[float] = []

    def idle(self) -> float:
        """The ms of a call that meets an idle device; keeps the host's part."""
        self._call()
        ms, host_ms = self._stopwatch.eager(self._call)
        self._host_ms.append(host_ms)
        return ms

    def queued(self) -> float:
        """The ms of a call that the host issues behind the cache flush, while the device is still busy."""
        self._call()
        return self._stopwatch.device_ms(self._call)

    @property
    def host_us(self) -> float:
        """Median host microseconds of the calls so far that met an idle device."""
        return 1e3 * statistics.median(self._host_ms)


@dataclass(frozen=True)
class Captured(Generic[T]):
    """A call in a CUDA graph; `output` is what the call returned, overwritten by each replay."""

    graph: torch.cuda.CUDAGraph
    output: T
    call: Callable[[], T]  # kept, since the graph uses the memory of every tensor that the call holds

    @classmethod
    def of(cls, call: Callable[[], T]) -> Captured[T]:
        """Captures `call`, after one eager call in which libraries do what a capture forbids."""
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()
        return cls(graph, output, call)

    def replay(self) -> None:
        self.graph.replay()
