"""From measured GEMM times to the table that the library's heuristic reads. No GPU, no torch.

Its form is that of `cutlass_moe.heuristics`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cutlass_moe import heuristics
from cutlass_moe.config import GATHER_SUFFIX, GemmConfig
from perf import PerfError

SCHEMA = "cutlass_moe.gemm_table/1"
TABLE = heuristics.TABLE


@dataclass(frozen=True, order=True)
class Shape:
    """What a grouped GEMM multiplies, but for its rows."""

    accumulators: int
    features: int
    reduction: int


@dataclass(frozen=True)
class Point:
    """One shape at one number of rows per expert (the mean over all experts), and each configuration's ms."""

    shape: Shape
    rows: float
    times_ms: Mapping[str, float] = field(hash=False)

    @property
    def best_ms(self) -> float:
        return min(self.times_ms.values())


def config_from_name(name: str) -> GemmConfig:
    """The configuration of a `GemmConfig.name`.

    Raises:
        PerfError: not such a name.
    """
    try:
        return GemmConfig.from_name(name)
    except ValueError as error:
        raise PerfError(str(error)) from None


def shortlist(points: Sequence[Point], tolerance: float) -> list[str]:
    """The fewest configurations (greedily) such that each point has one within `tolerance` of its best: every
    further one is more kernels to compile and ship."""
    good = [{name for name, ms in point.times_ms.items() if ms <= point.best_ms * (1 + tolerance)} for point in points]
    open_points = set(range(len(points)))
    chosen: list[str] = []

    def merit(name: str) -> tuple[int, float, str]:
        covered = [index for index in open_points if name in good[index]]
        loss = sum(points[index].times_ms[name] / points[index].best_ms for index in covered)
        return len(covered), -loss, name

    while open_points:
        best = max({name for index in open_points for name in good[index]}, key=merit)
        chosen.append(best)
        open_points -= {index for index in open_points if best in good[index]}
    return sorted(chosen)


def choose(points: Sequence[Point], names: Iterable[str], tolerance: float) -> list[tuple[float, str]]:
    """Of one shape's points the choices `(most rows, name)`, ascending; the last has no limit.

    A point keeps its neighbour's configuration while that is within `tolerance` of the best of `names`; a change
    falls at the geometric mean of the two rows.
    """
    allowed = set(names)
    ordered = sorted(points, key=lambda point: point.rows)
    picked: list[str] = []
    for point in ordered:
        times = {name: ms for name, ms in point.times_ms.items() if name in allowed}
        best = min(times, key=lambda name: (times[name], name))
        before = picked[-1] if picked else best
        picked.append(before if times.get(before, math.inf) <= times[best] * (1 + tolerance) else best)
    choices: list[tuple[float, str]] = []
    for index, name in enumerate(picked):
        last = index + 1 == len(picked)
        if last or picked[index + 1] != name:
            most = math.inf if last else math.sqrt(ordered[index].rows * ordered[index + 1].rows)
            choices.append((most, name))
    return choices


def make_entries(points: Sequence[Point], tolerance: float) -> list[dict[str, Any]]:
    """The table's entries from the measurements of any number of shapes."""
    plain = [_restricted(point, gather=False) for point in points]
    names = shortlist(plain, tolerance)
    gathered = {shape: _where_gather_wins(points, shape, tolerance) for shape in {point.shape for point in points}}
    gather_names = shortlist([point for won, _ in gathered.values() for point in won], tolerance)
    entries = []
    for shape in sorted(gathered):
        entry: dict[str, Any] = {
            "accumulators": shape.accumulators,
            "features": shape.features,
            "reduction": shape.reduction,
        }
        won, limit = gathered[shape]
        kinds = {"choices": choose([point for point in plain if point.shape == shape], names, tolerance)}
        if won:
            *most, (_, last) = choose(won, gather_names, tolerance)
            kinds["gather"] = [*most, (limit, last)]
        for kind, choices in kinds.items():
            entry[kind] = [[None if most == math.inf else round(most, 2), name] for most, name in choices]
        entries.append(entry)
    return entries


def _restricted(point: Point, *, gather: bool) -> Point:
    """The point with the times of the configurations that gather, or of those that do not."""
    times = {name: ms for name, ms in point.times_ms.items() if name.endswith(GATHER_SUFFIX) is gather}
    return replace(point, times_ms=times)


def _where_gather_wins(points: Sequence[Point], shape: Shape, tolerance: float) -> tuple[list[Point], float]:
    """The points, from the fewest rows on, at which the best that gathers is not slower, within the tolerance, than the
    best that does not: it saves a launch. With the former's times only; and up to how many rows that goes."""
    won: list[Point] = []
    for point in sorted((point for point in points if point.shape == shape), key=lambda point: point.rows):
        gather, plain = _restricted(point, gather=True), _restricted(point, gather=False)
        if not gather.times_ms or gather.best_ms > plain.best_ms * (1 + tolerance):
            return won, math.sqrt(won[-1].rows * point.rows) if won else 0.0
        won.append(gather)
    return won, math.inf


def look_up(entries: Sequence[dict[str, Any]], shape: Shape, rows: float) -> str:
    """The name of the configuration that the table gives the layer for `rows` rows per expert."""
    return heuristics.look_up(entries, shape.accumulators, shape.features, shape.reduction, rows, gather=True)


def describe_changes(
    old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], points: Sequence[Point]
) -> list[str]:
    """One line for each measured point whose configuration changes, with both times where they are known."""
    lines = []
    for point in sorted(points, key=lambda point: (point.shape, point.rows)):
        before = look_up(old, point.shape, point.rows) if old else None
        after = look_up(new, point.shape, point.rows)
        if before == after:
            continue
        shape = point.shape
        where = f"{shape.accumulators} x {shape.features // shape.accumulators} x {shape.reduction}"
        after_ms, before_ms = point.times_ms[after], point.times_ms.get(before or "")
        was = f"{before} ({before_ms:.4f} ms)" if before_ms else f"{before or 'nothing'}"
        gain = f", {1 - after_ms / before_ms:+.1%} of the time saved" if before_ms else ""
        lines.append(f"{where}, {point.rows:g} rows: {was} -> {after} ({after_ms:.4f} ms{gain})")
    return lines


def load_entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a table; none where there is no file.

    Raises:
        PerfError: not a table of this schema.
    """
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise PerfError(f"{path} cannot be read as a table: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise PerfError(f"{path} is not a table of this version: expected schema {SCHEMA!r}")
    return document["entries"]


def to_text(entries: Sequence[dict[str, Any]], origin: Mapping[str, Any]) -> str:
    """The table's file: one entry a line."""
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in {"schema": SCHEMA, **origin}.items())
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    return f'{{\n{head} "entries": [\n{lines}\n ]\n}}\n'
