"""The measurements of a sweep in a file, so that a sweep can go on where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cutlass_moe.config import GATHER_SUFFIX
from perf import json_file
from perf.gemm_table import Point, Shape

SCHEMA = "cutlass_moe.tune/1"


@dataclass
class MeasuredPoint:
    """One GEMM at one token count.

    Attributes:
        rows: per expert, the mean over all experts.
        times_ms: median of each configuration that is right.
        wrong: why a configuration was not timed.
        sources: hash of what each kernel was compiled from: a changed kernel is measured again.
    """

    accumulators: int
    features: int
    reduction: int
    experts: int
    tokens: int
    rows: float
    times_ms: dict[str, float]
    wrong: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, ...]:
        return (self.accumulators, self.features, self.reduction, self.experts, self.tokens)

    def covers(self, names: Sequence[str], sources: dict[str, str]) -> bool:
        """Whether all of `names` were measured here, in turns, with the kernels of now."""
        seen = {**self.times_ms, **self.wrong}
        return all(name in seen and self.sources.get(name) == sources.get(name) for name in names)


@dataclass
class TuneFile:
    device: str
    commit: str
    date: str
    points: list[MeasuredPoint] = field(default_factory=list)
    schema: str = SCHEMA

    def find(self, key: tuple[int, ...]) -> MeasuredPoint | None:
        return next((point for point in self.points if point.key == key), None)

    def put(self, point: MeasuredPoint) -> None:
        self.points = [old for old in self.points if old.key != point.key] + [point]

    def usable(self) -> list[Point]:
        """What the table is made from: points with the time of a configuration that does not gather. Callers whose rows
        are grouped already need one."""
        return [
            Point(Shape(point.accumulators, point.features, point.reduction), point.rows, point.times_ms)
            for point in self.points
            if any(not name.endswith(GATHER_SUFFIX) for name in point.times_ms)
        ]

    def save(self, path: Path) -> None:
        json_file.save(asdict(self), path)


def load(path: Path) -> TuneFile:
    """Reads a sweep's file.

    Raises:
        PerfError: it is none of this schema.
    """
    return json_file.load(path, SCHEMA, "a sweep", _from_json)


def _from_json(document: dict[str, Any]) -> TuneFile:
    return TuneFile(**{**document, "points": [MeasuredPoint(**point) for point in document["points"]]})
