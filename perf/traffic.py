"""The bytes that each step of a layer call moved, beside those it has to move, and their file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perf import PerfError, json_file
from perf.ncu import Kernel

SCHEMA = "cutlass_moe.traffic/1"
STEPS = ("route", "permute", "gemm1", "gemm2", "combine")
GEMM = "GroupedGemm"  # in a kernel's name: gemm1 the first time in a call, then gemm2
STEP_OF_KERNEL = {
    "count_kernel": "route",
    "place_kernel": "route",
    "permute_kernel": "permute",
    "combine_kernel": "combine",
}


@dataclass(frozen=True)
class ProfiledCase:
    """One call of the layer that was profiled: `needed_bytes` of each step that it should have, in order."""

    workload: str
    routing: str
    tokens: int
    experts_hit: int
    needed_bytes: dict[str, int]


@dataclass(frozen=True)
class StepTraffic:
    """What one step moved in one call of the layer.

    Attributes:
        needed_bytes: the least it has to read and write by itself, as `StepResult.bytes`.
        read_bytes, written_bytes: from and to device memory.
        l2_read_bytes: read from the L2 cache, hits and misses.
        us: duration under the profiler.
    """

    needed_bytes: int
    read_bytes: int
    written_bytes: int
    l2_read_bytes: int
    us: float

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def ratio(self) -> float:
        """Moved over needed: below 1 where the step found its input in the L2, or left its output there."""
        return self.moved_bytes / self.needed_bytes


@dataclass(frozen=True)
class CaseTraffic:
    """One call of the layer, by step."""

    workload: str
    routing: str
    tokens: int
    experts_hit: int
    steps: dict[str, StepTraffic]


@dataclass(frozen=True)
class TrafficResult:
    """What was counted where; `not_for_the_record` says why it can't stand as the record."""

    device: str
    date: str
    commit: str
    versions: dict[str, str | None]
    not_for_the_record: str | None = None
    cases: list[CaseTraffic] = field(default_factory=list)
    schema: str = SCHEMA


def put_together(kernels: Sequence[Kernel], cases: Sequence[ProfiledCase]) -> list[CaseTraffic]:
    """Tells kernels in the order of their launch apart by call and step.

    Raises:
        PerfError: they are not the calls of these cases.
    """
    calls = _split(kernels)
    if len(calls) != len(cases):
        raise PerfError(f"ncu saw {len(calls)} calls of the layer, expected {len(cases)}")
    return [_case(call, case) for call, case in zip(calls, cases, strict=True)]


def _split(kernels: Sequence[Kernel]) -> list[dict[str, list[Kernel]]]:
    """Kernels by step, for each call: it ends with its combine."""
    calls: list[dict[str, list[Kernel]]] = []
    ended = True
    for kernel in kernels:
        if ended:
            calls.append({})
        step = _step_of(kernel.name, calls[-1])
        calls[-1].setdefault(step, []).append(kernel)
        ended = step == "combine"
    return calls


def _step_of(kernel_name: str, call: dict[str, list[Kernel]]) -> str:
    if GEMM in kernel_name:
        return f"gemm{1 + sum(step.startswith('gemm') for step in call)}"
    step = next((step for part, step in STEP_OF_KERNEL.items() if part in kernel_name), None)
    if step is None:
        raise PerfError(f"ncu saw a kernel that is no step of the layer: {kernel_name}")
    return step


def _case(call: dict[str, list[Kernel]], case: ProfiledCase) -> CaseTraffic:
    if list(call) != list(case.needed_bytes):
        raise PerfError(
            f"ncu saw the steps {', '.join(call)} at {case.workload} T = {case.tokens},"
            f" expected {', '.join(case.needed_bytes)}"
        )
    steps = {
        name: StepTraffic(
            needed_bytes=case.needed_bytes[name],
            read_bytes=sum(kernel.read_bytes for kernel in kernels),
            written_bytes=sum(kernel.written_bytes for kernel in kernels),
            l2_read_bytes=sum(kernel.l2_read_bytes for kernel in kernels),
            us=sum(kernel.us for kernel in kernels),
        )
        for name, kernels in call.items()
    }
    return CaseTraffic(case.workload, case.routing, case.tokens, case.experts_hit, steps)


def save(result: TrafficResult, path: Path) -> None:
    document = asdict(result)
    json_file.save({"schema": document.pop("schema"), **document}, path)


def load(path: Path) -> TrafficResult:
    """Reads a traffic file.

    Raises:
        PerfError: it is none of this schema.
    """
    return json_file.load(path, SCHEMA, "a traffic result", _from_json)


def _from_json(document: dict[str, Any]) -> TrafficResult:
    cases = [
        CaseTraffic(**{**case, "steps": {name: StepTraffic(**step) for name, step in case["steps"].items()}})
        for case in document["cases"]
    ]
    return TrafficResult(**{**document, "cases": cases})
