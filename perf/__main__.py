"""Command line: `python -m perf run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perf import PerfError, console
from perf.peers import PEERS
from perf.results import RECORD_ROUNDS, RunResult
from perf.runner import Options, make_plans, run, steps_of_progress
from perf.timing import Turns
from perf.workloads import workloads

QUICK_ROUNDS = 2
QUICK_TURNS = Turns(least=3, most=10, budget_s=0.5, warm_up=1)


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
    command.add_argument(
        "--workload",
        nargs="+",
        default=list(workloads()),
        metavar="NAME",
        help=f"of {', '.join(workloads())} (default: all)",
    )
    command.add_argument(
        "--decode", action="store_true", help="the decode grid, saved as decode.json, not the headline cases"
    )
    command.add_argument("--tokens", nargs="+", type=int, metavar="T", help="only the cases of these token counts")
    command.add_argument(
        "--peers",
        nargs="*",
        default=list(PEERS),
        metavar="NAME",
        help=f"of {', '.join(PEERS)} (default: all; empty: none)",
    )
    command.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of the JSON (default: perf/results/<device>; its subfolder partial unless every case is"
        " run in full)",
    )
    check = command.add_mutually_exclusive_group()
    check.add_argument(
        "--rounds",
        type=_positive,
        metavar="N",
        help=f"rounds of the check (default: {RECORD_ROUNDS}, with --quick {QUICK_ROUNDS})",
    )
    check.add_argument(
        "--no-check", action="store_true", help="time without checking: for profiling, never for a claim"
    )
    command.add_argument("--quick", action="store_true", help="fewer repeats and rounds, for a first look")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def options_of(arguments: argparse.Namespace) -> Options:
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else RECORD_ROUNDS)
    return Options(
        workloads=tuple(arguments.workload),
        decode=arguments.decode,
        tokens=tuple(arguments.tokens) if arguments.tokens else None,
        peers=tuple(arguments.peers),
        rounds=0 if arguments.no_check else rounds,
        turns=QUICK_TURNS if arguments.quick else Turns(),
        output=arguments.output,
    )


def run_command(options: Options) -> RunResult:
    with console.progress_bar(steps_of_progress(make_plans(options), options)) as advance:
        result = run(
            options,
            started=lambda result, path: print(console.header(result, path), flush=True),
            measured=lambda case: print(console.case_line(case), flush=True),
            advance=advance,
        )
    print(console.summary(result))
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(build_parser().parse_args(arguments))
    try:
        result = run_command(options)
    except PerfError as error:
        print(f"perf: {error}", file=sys.stderr)
        return 2
    return 1 if any(case.passed is False for case in result.cases) else 0


if __name__ == "__main__":
    sys.exit(main())
