"""Command line of `python -m perf traffic`."""

from __future__ import annotations

import argparse
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import torch

from perf import environment, ncu, profiled, results, traffic
from perf.options import make_plans, require_device
from perf.run_command import case_options
from perf.traffic import STEPS, CaseTraffic, TrafficResult


def command(arguments: argparse.Namespace) -> int:
    """Profiles, saves, prints, and returns 0.

    Raises:
        PerfError: the request cannot be measured.
    """
    options = case_options(arguments)
    plans = make_plans(options)
    ncu.require()
    device_name = torch.cuda.get_device_name(require_device(plans, []))
    commit = environment.commit()
    some_cases = None if options.grid == "all" else "it has some of the cases only"
    reason = options.why_partial() or some_cases or environment.why_not_for_the_record(commit)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "cases"
        kernels = ncu.profile(profiled.command_line(options, report))
        cases = traffic.put_together(kernels, profiled.read(report))
    result = TrafficResult(
        device=device_name,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit,
        versions=environment.versions(),
        not_for_the_record=reason,
        cases=cases,
    )
    short_name = environment.short_device_name(device_name)
    path = results.result_path(options.output, short_name, "traffic", record=reason is None)
    traffic.save(result, path)
    print("\n".join([header(result, path), *map(case_line, cases)]))
    if reason:
        print(f"not for the record: {reason}")
    return 0


def header(result: TrafficResult, path: Path) -> str:
    columns = "".join(f"{f'{name} MB':>12}{'ratio':>7}{'us':>9}" for name in STEPS)
    where = f"{result.device}, commit {result.commit[:20]}, {result.date}; results in {path}"
    return f"{where}\n{'workload':<16}{'tokens':>7}{columns}"


def case_line(case: CaseTraffic) -> str:
    """MB of device memory that each step moved, over those needed, and us under the profiler."""
    line = f"{case.workload[:16]:<16}{case.tokens:>7}"
    for name in STEPS:
        step = case.steps.get(name)
        line += f"{step.moved_bytes / 1e6:>12.2f}{step.ratio:>7.2f}{step.us:>9.1f}" if step else f"{'-':>12}{'':>16}"
    return line
