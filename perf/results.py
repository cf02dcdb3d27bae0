"""The result of a run, and its file."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perf import json_file

SCHEMA = "cutlass_moe.perf/3"
RECORD_ROUNDS = 10  # of the check, for a result to stand in perf/results/<device>
ROOT = Path(__file__).with_name("results")


@dataclass(frozen=True)
class PeerResult:
    """A peer on the same inputs; its replays are timed in turns with ours.

    Attributes:
        what: exactly what its time includes.
        scope: "layer", from ids to output; or "gemms", its two GEMMs with what lies between them.
        ms, p10_ms, p90_ms: graph replay, hot; `eager_ms` where the peer can't be captured (`captured` False).
        eager_ms, queued_ms, host_us: as of `CaseResult`.
        cool_ms: graph replay, cool.
        first_call_s: its first call on these inputs, with what it compiles or tunes then.
        error: why it did not run or was not timed. `absent`: why it is not here at all.
    """

    what: str
    scope: str = "layer"
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    eager_ms: float | None = None
    host_us: float | None = None
    cool_ms: float | None = None
    captured: bool = True
    first_call_s: float | None = None
    relative_error: float | None = None
    error: str | None = None
    absent: str | None = None
    queued_ms: float | None = None


@dataclass(frozen=True)
class StepResult:
    """A public step by itself with cold caches, hot, and the least it must do."""

    ms: float
    p10_ms: float
    p90_ms: float
    flops: int
    bytes: int


@dataclass(frozen=True)
class CaseResult:
    """One case. Times without another word are CUDA graph replay on a hot card; all are medians.

    Attributes:
        grid: "headline", "decode" or "free".
        routing: how the ids were drawn.
        shape: hidden, intermediate, experts, top_k.
        repeats: how many times each contender was replayed hot; p10_ms and p90_ms are percentiles of `ms`.
        cool_ms: 30 ms of idle time before each call; `hot_state` and `cool_state` have clock and power.
        eager_ms, host_us: a call that meets an idle device, right after an untimed one, and the host's part; after
            other host work, with cold CPU caches, it takes about twice the host time.
        queued_ms: likewise a call that the host issues while the device is still busy with what came before.
        flops, bytes: the least the call must do; only experts that are hit count.
        rows_max: rows of the busiest expert.
        roof_ms, roof_ms_datasheet: the speed of light by the measured and by the datasheet's roofs.
        sol_score: with the measured roof and the torch layer as baseline.
        dense_ms, dense_cool_ms: cuBLAS on two dense GEMMs of the same total rows.
        pair_ms, pair_dense_ms: ours and dense cuBLAS hot, in turns with nothing else between them. None in results
            from before this was timed.
        match_ratio, relative_error: the worst over `check_rounds`; None where not checked.
        passed: the case passes its check, and graph replay gives bitwise what an eager call gives.
        gaps_ms: what the whole takes beyond the sum of its steps, where that is positive.
        stock_two_gemms_ms: the stock GEMM as recorded at the same average rows per expert.
        recorded_peers_ms: tuned peers of earlier sessions: orientation, not a comparison.
    """

    workload: str
    grid: str
    routing: str
    shape: dict[str, int]
    tokens: int
    ms: float
    p10_ms: float
    p90_ms: float
    repeats: int
    cool_ms: float
    cool_p10_ms: float
    cool_p90_ms: float
    eager_ms: float
    host_us: float
    hot_state: dict[str, float]
    cool_state: dict[str, float]
    flops: int
    bytes: int
    experts_hit: int
    rows_max: int
    roof_ms: float
    roof_ms_datasheet: float
    sol_score: float | None
    dense_ms: float
    dense_cool_ms: float
    match_ratio: float | None
    relative_error: float | None
    check_rounds: int
    passed: bool | None
    steps: dict[str, StepResult]
    gaps_ms: float
    peers: dict[str, PeerResult]
    queued_ms: float | None = None
    pair_ms: float | None = None
    pair_dense_ms: float | None = None
    stock_two_gemms_ms: float | None = None
    recorded_peers_ms: dict[str, float] = field(default_factory=dict)
    batch: int | None = None
    seq: int | None = None

    @property
    def key(self) -> str:
        """What two results must share to be the same case."""
        return f"{self.workload}|{self.routing}|{self.tokens}|{self.batch}x{self.seq}"

    @property
    def roof_share(self) -> float:
        return self.roof_ms / self.ms

    @property
    def gemms_ms(self) -> float:
        return self.steps["gemm1"].ms + self.steps["gemm2"].ms

    @property
    def gemms_over_stock(self) -> float | None:
        return self.gemms_ms / self.stock_two_gemms_ms if self.stock_two_gemms_ms else None

    @property
    def over_dense(self) -> float | None:
        """Our time over dense cuBLAS's, hot, of the two in turns alone."""
        return self.pair_ms / self.pair_dense_ms if self.pair_ms and self.pair_dense_ms else None

    @property
    def over_dense_cool(self) -> float:
        return self.cool_ms / self.dense_cool_ms

    def over_ours(self, peer: PeerResult) -> float | None:
        """A peer's time over ours; over our eager call where the peer was timed eagerly too."""
        return peer.ms / (self.ms if peer.captured else self.eager_ms) if peer.ms else None

    def best_peer(self) -> tuple[str, float] | None:
        """The fastest peer that runs the whole layer and is right, hot."""
        timed = {n: p.ms for n, p in self.peers.items() if p.scope == "layer" and p.ms is not None}
        return min(timed.items(), key=lambda item: item[1]) if timed else None


@dataclass
class RunResult:
    """A run: what was measured on, and the cases, in the order they were measured.

    `not_for_the_record` says why the result can't stand as the record; `complete`, that the run came to its end;
    `seconds`, how long it had taken when it was last saved.
    """

    device: str
    date: str
    commit: str
    versions: dict[str, str | None]
    roofs: dict[str, float]
    roofs_datasheet: dict[str, float]
    options: dict[str, Any]
    state: dict[str, dict[str, Any]]
    not_for_the_record: str | None = None
    complete: bool = False
    seconds: float | None = None
    cases: list[CaseResult] = field(default_factory=list)
    schema: str = SCHEMA


def to_json(result: RunResult) -> dict[str, Any]:
    document = asdict(result)
    for case in document["cases"]:
        # {name: ms}, as readers of the record expect; the rest of each step beside it.
        case["step_details"] = {name: dict(step) for name, step in case["steps"].items()}
        case["steps"] = {name: step.pop("ms") for name, step in case["step_details"].items()}
        for name in ("batch", "seq"):  # only where the case has them
            if case[name] is None:
                del case[name]
    return {"schema": document.pop("schema"), **document}


def _from_json(document: dict[str, Any]) -> RunResult:
    return RunResult(**{**document, "cases": [_case(case) for case in document["cases"]]})


def _case(case: dict[str, Any]) -> CaseResult:
    details = case["step_details"]
    steps = {name: StepResult(ms=ms, **details[name]) for name, ms in case["steps"].items()}
    peers = {name: PeerResult(**peer) for name, peer in case["peers"].items()}
    rest = {name: value for name, value in case.items() if name != "step_details"}
    return CaseResult(**{**rest, "steps": steps, "peers": peers})


def save(result: RunResult, path: Path) -> None:
    json_file.save(to_json(result), path)


def load(path: Path) -> RunResult:
    """Reads a result file.

    Raises:
        PerfError: it is none of this schema.
    """
    return json_file.load(path, SCHEMA, "a result", _from_json)


def result_path(output: Path | None, device: str, name: str, *, record: bool) -> Path:
    """A run's file: in `output`, else in perf/results/<device> or, unless for the record, its `partial`."""
    folder = output or (ROOT / device if record else ROOT / device / "partial")
    return folder / f"{name}.json"


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
