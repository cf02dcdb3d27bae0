"""What a report shows, worked out from results: plain numbers and words, no layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perf import PerfError
from perf.results import CaseResult, RunResult
from perf.roofline import Roofs, Work
from perf.traffic import StepTraffic, TrafficResult

# Recorded among the peers of earlier sessions, and no layers.
RECORDED_GEMMS = ("cublas_dense_same_flops_one_expert", "deepgemm_two_gemms_only")
TIE = 0.01  # a ratio to the best peer within this of 1 is neither a win nor a loss


@dataclass(frozen=True)
class Row:
    """One case of the summary."""

    case: CaseResult
    best_peer: str | None
    best_peer_ms: float | None

    @property
    def ratio(self) -> float | None:
        """The best peer's time over ours, as `CaseResult.over_ours`: above 1 we are faster."""
        return self.case.over_ours(self.case.peers[self.best_peer]) if self.best_peer else None

    @property
    def verdict(self) -> str:
        return _verdict(self.ratio)

    @property
    def earlier_peer(self) -> tuple[str, float] | None:
        """The fastest of the tuned peers recorded in earlier sessions, and its ms: orientation, not a comparison."""
        layers = {n: ms for n, ms in self.case.recorded_peers_ms.items() if n not in RECORDED_GEMMS}
        return min(layers.items(), key=lambda item: item[1], default=None)

    @property
    def earlier_verdict(self) -> str:
        return _verdict(self.earlier_peer[1] / self.case.ms if self.earlier_peer else None)

    @property
    def check(self) -> str:
        return {True: "pass", False: "FAIL", None: "not checked"}[self.case.passed]


def _verdict(ratio: float | None) -> str:
    if ratio is None:
        return "no peer"
    if abs(ratio - 1) <= TIE:
        return "tie"
    return "win" if ratio > 1 else "loss"


@dataclass(frozen=True)
class Peer:
    """A peer over all cases; `first_call_s` is the longest."""

    name: str
    what: str
    scope: str
    cases: int
    lowest_ratio: float | None
    highest_ratio: float | None
    first_call_s: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """The cases of one workload and routing, and the distinct measurements among them."""

    title: str
    rows: tuple[Row, ...]

    @property
    def timed(self) -> list[CaseResult]:
        """One case for each token count: cases of equal T share their times."""
        return list({row.case.tokens: row.case for row in self.rows}.values())

    @property
    def peers(self) -> list[str]:
        """Peers that were timed in any case."""
        names = dict.fromkeys(name for case in self.timed for name in case.peers)
        return [name for name in names if any(peer_ms(case, name) for case in self.timed)]

    @property
    def steps(self) -> list[str]:
        """Names, in order: of the case that has most, since one whose first GEMM gathers has no permute."""
        return max((list(case.steps) for case in self.timed), key=len)


@dataclass(frozen=True)
class Summary:
    wins: int
    ties: int
    losses: int
    without_peer: int
    failed: int
    worst: Row | None
    earlier: int
    behind_earlier: int

    @property
    def text(self) -> str:
        cases = self.wins + self.ties + self.losses + self.without_peer
        parts = [
            f"of {cases} cases faster than the best peer in {self.wins}",
            f"level in {self.ties}",
            f"slower in {self.losses}",
        ]
        if self.without_peer:
            parts.append(f"without a peer in {self.without_peer}")
        text = ", ".join(parts)
        if self.worst is not None and self.worst.ratio is not None and self.losses:
            worst = self.worst
            text += (
                f"; the worst loss is {worst.case.workload} T = {worst.case.tokens}: {worst.best_peer} takes"
                f" {worst.ratio:.0%} of our time"
            )
        if self.earlier:
            text += f"; behind the best peer tuned in an earlier session in {self.behind_earlier} of {self.earlier}"
        return text + (f"; check FAILED in {self.failed}" if self.failed else "")


def merge(results: Sequence[RunResult]) -> RunResult:
    """One result with the cases of all, those of the first before those of the next.

    Raises:
        PerfError: they are not of one device and commit, or have a case twice.
    """
    first = results[0]
    for other in results[1:]:
        for name in ("device", "commit"):
            if getattr(other, name) != getattr(first, name):
                raise PerfError(
                    f"results of different {name}s can't be put together: {getattr(first, name)} and"
                    f" {getattr(other, name)}; use --before to compare two"
                )
    cases = [case for result in results for case in result.cases]
    reasons = [result.not_for_the_record for result in results if result.not_for_the_record]
    merged = replace(first, cases=cases, not_for_the_record=reasons[0] if reasons else None)
    merged.complete = all(result.complete for result in results)
    times = [result.seconds for result in results if result.seconds is not None]
    merged.seconds = sum(times) if len(times) == len(results) else None
    if not cases:
        raise PerfError("the results have no cases")
    # Several published cases may share shape, batch and T; the same T of one workload twice over results may not.
    for index, result in enumerate(results):
        others = {(case.workload, case.routing, case.tokens) for other in results[:index] for case in other.cases}
        for case in result.cases:
            if (case.workload, case.routing, case.tokens) in others:
                raise PerfError(f"{case.workload} T = {case.tokens} is in two of the results")
    return merged


@dataclass(frozen=True)
class Moved:
    """What the steps of a result's cases moved; `date` and `not_for_the_record` of that count."""

    date: str
    not_for_the_record: str | None
    steps: dict[tuple[str, str, int], dict[str, StepTraffic]]

    def step(self, case: CaseResult, name: str) -> StepTraffic | None:
        return self.steps.get((case.workload, case.routing, case.tokens), {}).get(name)


def match_traffic(result: RunResult, traffic: TrafficResult) -> Moved:
    """Puts what was counted beside a result.

    Raises:
        PerfError: they are not of one device and commit, or have no case in common.
    """
    for name in ("device", "commit"):
        theirs, ours = getattr(traffic, name), getattr(result, name)
        if theirs != ours:
            raise PerfError(f"the traffic is of another {name} than the result: {theirs} and {ours}")
    steps = {(case.workload, case.routing, case.tokens): case.steps for case in traffic.cases}
    if steps.keys().isdisjoint((case.workload, case.routing, case.tokens) for case in result.cases):
        raise PerfError("the traffic and the result have no case in common")
    return Moved(traffic.date, traffic.not_for_the_record, steps)


def groups(result: RunResult) -> list[Group]:
    """The cases by workload and routing, each by ascending T."""
    by_title: dict[str, list[CaseResult]] = {}
    for case in result.cases:
        title = case.workload if case.routing == "uniform" else f"{case.workload}, {case.routing}"
        by_title.setdefault(title, []).append(case)
    return [
        Group(title, tuple(_row(case) for case in sorted(cases, key=lambda case: case.tokens)))
        for title, cases in by_title.items()
    ]


def _row(case: CaseResult) -> Row:
    best = case.best_peer()
    return Row(case, *best) if best else Row(case, None, None)


def summarise(all_groups: Sequence[Group]) -> Summary:
    rows = [row for group in all_groups for row in group.rows]
    verdicts = [row.verdict for row in rows]
    losses = [row for row in rows if row.ratio is not None]
    return Summary(
        wins=verdicts.count("win"),
        ties=verdicts.count("tie"),
        losses=verdicts.count("loss"),
        without_peer=verdicts.count("no peer"),
        failed=sum(row.case.passed is False for row in rows),
        worst=min(losses, key=lambda row: row.ratio or 0.0) if losses else None,
        earlier=sum(row.earlier_peer is not None for row in rows),
        behind_earlier=sum(row.earlier_verdict == "loss" for row in rows),
    )


def peers_of(result: RunResult) -> list[Peer]:
    """Every peer of any case, those timed first."""
    found = []
    for name in dict.fromkeys(name for case in result.cases for name in case.peers):
        entries = [(case, case.peers[name]) for case in result.cases if name in case.peers]
        ratios = sorted(ratio for case, peer in entries if (ratio := case.over_ours(peer)))
        notes = dict.fromkeys(
            f"absent: {peer.absent}" if peer.absent else str(peer.error) for _, peer in entries if peer.ms is None
        )
        first = entries[0][1]
        low, high = (ratios[0], ratios[-1]) if ratios else (None, None)
        first_call_s = max((peer.first_call_s for _, peer in entries if peer.first_call_s is not None), default=None)
        found.append(Peer(name, first.what, first.scope, len(ratios), low, high, first_call_s, tuple(notes)))
    return sorted(found, key=lambda peer: peer.cases == 0)


def peer_ms(case: CaseResult, name: str) -> float | None:
    peer = case.peers.get(name)
    return peer.ms if peer else None


def work_of(case: CaseResult) -> Work:
    return Work(case.flops, case.bytes)


def roof_shares(case: CaseResult, roofs: Roofs) -> tuple[float, float]:
    """Share of the dense rate and of the read bandwidth that the call's least work takes in its time."""
    work = work_of(case)
    return work.tflops(case.ms) / roofs.dense_TFLOPs, work.tbps(case.ms) / roofs.read_TBps


def bound(case: CaseResult, roofs: Roofs) -> str:
    """Which roof sets the speed of light of the case."""
    moving_ms, computing_ms = case.bytes / roofs.read_TBps, case.flops / roofs.dense_TFLOPs
    return "memory" if moving_ms >= computing_ms else "arithmetic"
