"""The result of a run, and its file."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perf import PerfError

SCHEMA = "cutlass_moe.perf/1"
RECORD_ROUNDS = 10  # of the check, for a result to stand in perf/results/<device>
_ROOT = Path(__file__).with_name("results")


@dataclass(frozen=True)
class PeerResult:
    """A peer on the same inputs, in turns with ours. Where it did not run or ran wrong, `error` says why."""

    what: str
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    eager_ms: float | None = None
    relative_error: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class CaseResult:
    """One case. `ms` is CUDA graph replay, `eager_ms` a call that meets an idle device; both are medians.

    Attributes:
        repeats: how many times each contender ran; p10_ms and p90_ms are percentiles of `ms`.
        flops, bytes: the least the call must do; only experts that are hit count.
        roof_ms, roof_ms_datasheet: the speed of light by the measured and by the datasheet's roofs.
        sol_score: with the measured roof and the torch layer as baseline.
        dense_ms: cuBLAS on two dense GEMMs of the same total rows.
        match_ratio, relative_error: the worst over `check_rounds`; None where not checked.
        passed: the case passes its check, and graph replay gives bitwise what an eager call gives.
        steps: each public step by itself with cold caches, and what the whole takes beyond their sum (gaps).
        stock_two_gemms_ms: the stock GEMM as recorded at the same average rows per expert.
        recorded_peers_ms: tuned peers of earlier sessions: orientation, not a comparison.
    """

    workload: str
    tokens: int
    ms: float
    p10_ms: float
    p90_ms: float
    repeats: int
    eager_ms: float
    flops: int
    bytes: int
    experts_hit: int
    roof_ms: float
    roof_ms_datasheet: float
    sol_score: float | None
    dense_ms: float
    match_ratio: float | None
    relative_error: float | None
    check_rounds: int
    passed: bool | None
    steps: dict[str, float]
    peers: dict[str, PeerResult]
    stock_two_gemms_ms: float | None
    gemms_over_stock: float | None
    recorded_peers_ms: dict[str, float]
    batch: int | None = None
    seq: int | None = None

    @property
    def roof_share(self) -> float:
        return self.roof_ms / self.ms


@dataclass
class RunResult:
    """A run: what was measured on, and the cases, in the order they were measured."""

    device: str
    date: str
    commit: str
    versions: dict[str, str | None]
    roofs: dict[str, float]
    roofs_datasheet: dict[str, float]
    options: dict[str, Any]
    state: dict[str, dict[str, Any]]
    complete: bool = False
    cases: list[CaseResult] = field(default_factory=list)
    schema: str = SCHEMA


def to_json(result: RunResult) -> dict[str, Any]:
    document = asdict(result)
    for case in document["cases"]:
        for name in ("batch", "seq"):  # only where the case has them
            if case[name] is None:
                del case[name]
    return {"schema": document.pop("schema"), **document}


def from_json(document: Any, source: str) -> RunResult:
    """Reads a result.

    Args:
        source: names the document in errors.

    Raises:
        PerfError: of another schema, or a field is missing or unknown.
    """
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise PerfError(f"{source} is not a result of this version: its schema is {schema!r}, expected {SCHEMA!r}")
    try:
        cases = [
            CaseResult(**{**case, "peers": {name: PeerResult(**peer) for name, peer in case["peers"].items()}})
            for case in document["cases"]
        ]
        return RunResult(**{**document, "cases": cases})
    except (KeyError, TypeError, AttributeError) as error:
        raise PerfError(f"{source} says schema {SCHEMA!r} but does not follow it: {error}") from error


def save(result: RunResult, path: Path) -> None:
    """Writes the file whole or not at all: a run that dies leaves the last full state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(to_json(result), indent=1, allow_nan=False) + "\n")
    os.replace(temporary, path)


def load(path: Path) -> RunResult:
    """Reads a result file.

    Raises:
        PerfError: not readable, not JSON, or not of this schema.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise PerfError(f"{path} cannot be read as a result: {error}") from error
    return from_json(document, str(path))


def result_path(output: Path | None, device: str, *, decode: bool, record: bool) -> Path:
    """A run's file: in `output`, else in perf/results/<device> or, unless for the record, its `partial`."""
    folder = output or (_ROOT / device if record else _ROOT / device / "partial")
    return folder / ("decode.json" if decode else "headline.json")


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
