"""What a run prints: one line a case on stdout, and a progress bar on stderr where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from perf.results import CaseResult, PeerResult, RunResult
from perf.roofline import Work


def header(result: RunResult, path: Path) -> str:
    roofs = result.roofs
    peers = " ".join(f"{name[:16]:>16} {'ratio':>6}" for name in result.options["peers"])
    return (
        f"{result.device}, torch {result.versions['torch']}, commit {result.commit[:20]}, {result.date}\n"
        f"measured roofs: {roofs['read_TBps']:.2f} TB/s, {roofs['dense_TFLOPs']:.0f} TFLOP/s;"
        f" results in {path}\n"
        f"{'workload':<12}{'tokens':>7}{'batch x seq':>12}{'ms':>9}{'eager':>9}{'TFLOP/s':>8}{'TB/s':>6}"
        f"{'roof':>6}  {peers}{'dense':>9}{'stock':>6}{'match':>8} check"
    )


def case_line(case: CaseResult) -> str:
    """Times in ms; roof: share of the measured roof; ratio: peer over ours; stock: our GEMMs over stock's."""
    work = Work(case.flops, case.bytes)
    batch_seq = f"{case.batch}x{case.seq}" if case.batch else ""
    peers = " ".join(_peer(peer, case.ms) for peer in case.peers.values())
    stock = f"{case.gemms_over_stock:.2f}" if case.gemms_over_stock else "-"
    match = f"{case.match_ratio:.5f}" if case.match_ratio is not None else "-"
    check = {True: "pass", False: "FAIL", None: "none"}[case.passed]
    return (
        f"{case.workload:<12}{case.tokens:>7}{batch_seq:>12}{case.ms:>9.3f}{case.eager_ms:>9.3f}"
        f"{work.tflops(case.ms):>8.0f}{work.tbps(case.ms):>6.2f}{case.roof_share:>6.1%}"
        f"  {peers}{case.dense_ms:>9.3f}{stock:>6}{match:>8} {check}"
    )


def _peer(peer: PeerResult, ours_ms: float) -> str:
    if peer.ms is None:
        return f"{'error':>16} {'-':>6}"
    return f"{peer.ms:>16.3f} {peer.ms / ours_ms:>6.2f}"


def summary(result: RunResult) -> str:
    """The last lines: how many cases pass, and what went wrong with a peer."""
    checked = [case for case in result.cases if case.passed is not None]
    passed = sum(case.passed is True for case in checked)
    errors = {f"{name}: {peer.error}" for case in result.cases for name, peer in case.peers.items() if peer.error}
    return "\n".join([f"{passed} of {len(checked)} checked cases pass", *sorted(errors)])


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Shows how far a run is and its remaining time, on a terminal; yields what to call after each step."""
    if not sys.stderr.isatty():
        yield lambda label: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # Lines printed to a terminal pass above the bar; lines printed to a file stay in the file.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task("starting", total=total)

        def advance(label: str) -> None:
            progress.update(task, advance=1, description=label)

        yield advance
