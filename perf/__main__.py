"""Command line: `python -m perf run`, `traffic`, `report` and `tune`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from perf import PerfError, report_command, run_command, traffic_command, tune_command


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf", description="Measures cutlass_moe.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "run",
        help="check and time the layer beside its peers",
        description="Checks the layer, then times it beside its peers and dense cuBLAS on a CUDA device."
        " Prints one line a case and saves JSON after each token count. Exit status: 0 when every check"
        " passes, 1 when one fails, 2 when the request cannot be measured. Set CUTLASS_MOE_COMMIT where the"
        " tree has no .git.",
    )
    run_command.add_arguments(command)
    command.set_defaults(run=run_command.command)
    command = commands.add_parser(
        "traffic",
        help="count the bytes that each step of the layer moves",
        description="Runs one call of the layer a token count under Nsight Compute (ncu) and sets the bytes of device"
        " memory that each step moved beside those it has to move.",
    )
    run_command.add_case_arguments(command)
    command.set_defaults(run=traffic_command.command)
    command = commands.add_parser(
        "report",
        help="make an HTML page and Markdown from results",
        description="Makes one self-contained HTML page and the same as Markdown. Results after the first are put"
        " together with it where they are of the same device and commit; with --before one is compared with.",
    )
    report_command.add_arguments(command)
    command.set_defaults(run=report_command.command)
    command = commands.add_parser(
        "tune",
        help="sweep GEMM configurations and make the heuristic's table",
        description="Times every configuration in turns at several rows per expert, each checked first, and says"
        " what the table would change. Goes on where it stopped. Exit status: 1 where a configuration was wrong.",
    )
    tune_command.add_arguments(command)
    command.set_defaults(run=tune_command.command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = build_parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except PerfError as error:
        print(f"perf: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not type(error).__module__.startswith("cutlass_moe."):
            raise
        print(f"perf: {error}", file=sys.stderr)  # the library's own errors say what to do: a kernel library is missing
        return 2


if __name__ == "__main__":
    sys.exit(main())
