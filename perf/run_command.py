"""Command line of `python -m perf run`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from perf import console, routing
from perf.options import Options, make_plans
from perf.peers import PEERS
from perf.results import RECORD_ROUNDS, to_json
from perf.runner import run, steps_of_progress
from perf.timing import Turns
from perf.workloads import more_models, workloads

TUNING_LIMIT_S = 1200.0
QUICK_ROUNDS = 2
QUICK_TURNS = Turns(least=3, most=10, budget_s=0.5, warm_up=1)
QUICK_COOL_TURNS = Turns(least=3, most=3, budget_s=0.0, warm_up=0)


def add_case_arguments(command: argparse.ArgumentParser) -> None:
    """Which cases, and where their result goes: what `case_options` reads."""
    command.add_argument(
        "--workload",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join([*workloads(), *more_models()])} (default, without --shape: the first two)",
    )
    command.add_argument(
        "--shape", nargs="+", default=[], metavar="H,I,E,K", help="layers of these shapes, such as 4096,1024,256,8"
    )
    grid = command.add_mutually_exclusive_group()
    grid.add_argument("--decode", action="store_true", help="the decode grid instead of the headline cases")
    grid.add_argument("--all", action="store_true", help="the headline cases and the decode grid, in one result")
    command.add_argument(
        "--tokens", nargs="+", type=int, metavar="T", help="only these token counts (other layers have them all)"
    )
    command.add_argument("--routing", metavar="HOW", help=f"{routing.HELP} (default: as published, mostly uniform)")
    command.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of the JSON (default: perf/results/<device>; its subfolder partial unless every case is"
        " run in full on a clean tree)",
    )


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_case_arguments(command)
    command.add_argument(
        "--peers",
        nargs="*",
        default=list(PEERS),
        metavar="NAME",
        help=f"of {', '.join(PEERS)} (default: all, of which those not installed are listed as absent; empty: none)",
    )
    command.add_argument(
        "--tune-peers", action="store_true", help="peers that can tune themselves do so first: minutes a shape"
    )
    command.add_argument(
        "--peer-limit",
        type=_positive,
        metavar="SECONDS",
        help="give a peer up whose preparation, first call or fewest turns take longer"
        f" (default: {Options.peer_limit_s:g}, with --tune-peers {TUNING_LIMIT_S:g})",
    )
    command.add_argument("--json", action="store_true", help="the result as JSON on stdout, the lines on stderr")
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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def case_options(arguments: argparse.Namespace) -> Options:
    names = arguments.workload or ([] if arguments.shape else list(workloads()))
    return Options(
        workloads=tuple(names),
        shapes=tuple(arguments.shape),
        grid="all" if arguments.all else "decode" if arguments.decode else "headline",
        tokens=tuple(arguments.tokens) if arguments.tokens else None,
        routing=arguments.routing,
        output=arguments.output,
    )


def options_of(arguments: argparse.Namespace) -> Options:
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else RECORD_ROUNDS)
    options = replace(
        case_options(arguments),
        peers=tuple(arguments.peers),
        rounds=0 if arguments.no_check else rounds,
        tune_peers=arguments.tune_peers,
        peer_limit_s=arguments.peer_limit or (TUNING_LIMIT_S if arguments.tune_peers else Options.peer_limit_s),
    )
    if arguments.quick:
        return replace(options, turns=QUICK_TURNS, pair_turns=QUICK_TURNS, cool_turns=QUICK_COOL_TURNS)
    return options


def command(arguments: argparse.Namespace) -> int:
    """Runs and prints. Returns 0 when every check passes, else 1.

    Raises:
        PerfError: the request cannot be measured.
    """
    options = options_of(arguments)
    lines = sys.stderr if arguments.json else sys.stdout
    began = time.monotonic()
    with console.progress_bar(steps_of_progress(make_plans(options), options)) as advance:
        result = run(
            options,
            started=lambda result, path: print(console.header(result, path), file=lines, flush=True),
            measured=lambda case: print(console.case_line(case), file=lines, flush=True),
            advance=advance,
            note=lambda text: print(f"{time.monotonic() - began:5.0f} s  {text}", file=sys.stderr, flush=True),
        )
    print(console.summary(result), file=lines)
    if arguments.json:
        print(json.dumps(to_json(result), allow_nan=False))
    return 1 if any(case.passed is False for case in result.cases) else 0
