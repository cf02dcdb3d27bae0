"""Two results before and after a change: which cases moved by more than their noise."""

from __future__ import annotations

from dataclasses import dataclass

from perf import PerfError
from perf.results import CaseResult, RunResult

LEAST_CHANGE = 0.01  # smaller changes are not called any, however narrow the spreads


@dataclass(frozen=True)
class Change:
    """One case in both results, hot.

    Attributes:
        of_dense_before, of_dense_after: time over dense cuBLAS in turns in the same run: it takes most of what
            another card or temperature changes out of the comparison.
    """

    case: CaseResult
    before_ms: float
    after_ms: float
    of_dense_before: float
    of_dense_after: float
    verdict: str

    @property
    def share(self) -> float:
        """Change of the time: negative is faster."""
        return self.after_ms / self.before_ms - 1

    @property
    def dense_share(self) -> float:
        """Change of the time over dense cuBLAS."""
        return self.of_dense_after / self.of_dense_before - 1


def compare(before: RunResult, after: RunResult) -> list[Change]:
    """The cases that both have, in the order of `after`; one for each workload, routing and T.

    A change is beyond noise where the spreads from the 10th to the 90th percentile don't meet and it is at least 1 %.

    Raises:
        PerfError: they have no case in common.
    """
    known = {_key(case): case for case in before.cases}
    shared = {_key(case): case for case in after.cases if _key(case) in known}
    if not shared:
        raise PerfError("the two results have no case in common")
    return [_change(known[key], case) for key, case in shared.items()]


def _key(case: CaseResult) -> tuple[str, str, int]:
    return case.workload, case.routing, case.tokens


def _change(before: CaseResult, after: CaseResult) -> Change:
    apart = after.p10_ms > before.p90_ms or after.p90_ms < before.p10_ms
    if not apart or abs(after.ms / before.ms - 1) < LEAST_CHANGE:
        verdict = "within noise"
    else:
        verdict = "faster" if after.ms < before.ms else "slower"
    return Change(after, before.ms, after.ms, before.ms / before.dense_ms, after.ms / after.dense_ms, verdict)
