"""What a run prints: one line a case, and a progress bar on stderr where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from perf.results import CaseResult, RunResult
from perf.roofline import Work


def header(result: RunResult, path: Path) -> str:
    roofs = result.roofs
    return (
        f"{result.device}, torch {result.versions['torch']}, commit {result.commit[:20]}, {result.date}\n"
        f"measured roofs: {roofs['read_TBps']:.2f} TB/s, {roofs['dense_TFLOPs']:.0f} TFLOP/s;"
        f" results in {path}\n"
        f"{'workload':<16}{'tokens':>7}{'ms':>9}{'cool':>9}{'queued':>9}{'eager':>9}{'host us':>8}{'TFLOP/s':>8}"
        f"{'TB/s':>6}{'roof':>7}{'score':>6}{'dense':>9}{'cool':>9}{'stock':>6}  {'best peer':<24}{'ms':>9}{'ratio':>6}"
        f"{'match':>8} check"
    )


def case_line(case: CaseResult) -> str:
    """Times in ms; roof: share of the measured roof; ratio: peer over ours, as `CaseResult.over_ours`; stock: our GEMMs
    over stock's."""
    work = Work(case.flops, case.bytes)
    stock = f"{case.gemms_over_stock:.2f}" if case.gemms_over_stock else "-"
    score = f"{case.sol_score:.2f}" if case.sol_score is not None else "-"
    best = case.best_peer()
    ratio = case.over_ours(case.peers[best[0]]) if best else None
    peer = f"{best[0]:<24}{best[1]:>9.3f}{ratio:>6.2f}" if best else f"{'-':<24}{'-':>9}{'-':>6}"
    queued = f"{case.queued_ms:.3f}" if case.queued_ms else "-"
    match = f"{case.match_ratio:.5f}" if case.match_ratio is not None else "-"
    check = {True: "pass", False: "FAIL", None: "none"}[case.passed]
    return (
        f"{case.workload[:16]:<16}{case.tokens:>7}{case.ms:>9.3f}{case.cool_ms:>9.3f}{queued:>9}{case.eager_ms:>9.3f}"
        f"{case.host_us:>8.0f}{work.tflops(case.ms):>8.0f}{work.tbps(case.ms):>6.2f}{case.roof_share:>7.1%}{score:>6}"
        f"{case.dense_ms:>9.3f}{case.dense_cool_ms:>9.3f}{stock:>6}  {peer}{match:>8} {check}"
    )


def summary(result: RunResult) -> str:
    """The last lines: how many cases pass, what each peer took, and what went wrong with it."""
    checked = [case for case in result.cases if case.passed is not None]
    passed = sum(case.passed is True for case in checked)
    lines = [f"{passed} of {len(checked)} checked cases pass"]
    for name in dict.fromkeys(name for case in result.cases for name in case.peers):
        peers = [(case, case.peers[name]) for case in result.cases if name in case.peers]
        ratios = sorted(ratio for case, peer in peers if (ratio := case.over_ours(peer)))
        reasons = dict.fromkeys(peer.error or f"absent: {peer.absent}" for _, peer in peers if peer.ms is None)
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f} times ours in {len(ratios)} cases" if ratios else ""
        lines.append(f"{name}: " + "; ".join(filter(None, [span, *reasons])))
    if result.not_for_the_record:
        lines.append(f"not for the record: {result.not_for_the_record}")
    return "\n".join(lines)


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str, int], None]]:
    """Shows how far a run is and its remaining time, on a terminal; yields what to call after each step."""
    if not sys.stderr.isatty():
        yield lambda label, amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("about"))
    remaining = (TimeRemainingColumn(), TextColumn("to go"))
    # Lines printed to a terminal pass above the bar; lines printed to a file stay in the file.
    console = Console(stderr=True)
    with Progress(*columns, *remaining, console=console, redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task("starting", total=total)

        def advance(label: str, amount: int) -> None:
            progress.update(task, advance=amount, description=label)

        yield advance
