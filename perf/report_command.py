"""Command line of `python -m perf report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from perf import PerfError, results, traffic
from perf.report import compare, model
from perf.report.compare import Change


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("results", nargs="+", type=Path, metavar="RESULT.json", help="results of perf run")
    command.add_argument(
        "--before", type=Path, metavar="RESULT.json", help="an earlier result, to mark what changed beyond noise"
    )
    command.add_argument(
        "--traffic", type=Path, metavar="TRAFFIC.json", help="what perf traffic counted on the same device and commit"
    )
    command.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of the pages and pictures (default: that of the first result)",
    )


def command(arguments: argparse.Namespace) -> int:
    """Writes the report and returns 0.

    Raises:
        PerfError: a file is no result, or the results don't go together, or what draws it is not installed.
    """
    result = model.merge([results.load(path) for path in arguments.results])
    before = results.load(arguments.before) if arguments.before else None
    changes: list[Change] = compare.compare(before, result) if before else []
    moved = model.match_traffic(result, traffic.load(arguments.traffic)) if arguments.traffic else None
    try:
        from perf.report.page import HTML_NAME, MARKDOWN_NAME, make_report
    except ModuleNotFoundError as error:
        raise PerfError(f"a report needs {error.name}: pip install 'cutlass-moe[perf]'") from error
    folder = arguments.output or arguments.results[0].parent
    make_report(result, changes, before, moved).write(folder)
    print(f"{folder / HTML_NAME}\n{folder / MARKDOWN_NAME}")
    return 0
