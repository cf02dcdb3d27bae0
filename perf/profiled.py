"""The program that `python -m perf traffic` runs under Nsight Compute: one call of the layer for each token count."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from perf.options import Options, Plan, make_plans
from perf.ours import gathers, run_layer
from perf.runner import SEED
from perf.timing import Stopwatch
from perf.traffic import ProfiledCase

CHOICE = ("workloads", "shapes", "grid", "tokens", "routing")  # the options that say which cases


def command_line(options: Options, report: Path) -> list[str]:
    """Runs this module on the cases of `options`; it writes to `report` what `read` returns."""
    choice = {name: getattr(options, name) for name in CHOICE}
    return [sys.executable, "-m", "perf.profiled", json.dumps(choice), str(report)]


def read(report: Path) -> list[ProfiledCase]:
    """The calls that were profiled, in order."""
    return [ProfiledCase(**json.loads(line)) for line in report.read_text().splitlines()]


def profile(plans: Sequence[Plan], device: torch.device) -> Iterator[ProfiledCase]:
    """Calls the layer once for each token count with the profiler on, and with none of its data in the L2 cache."""
    stopwatch = Stopwatch(device)
    generator = torch.Generator(device).manual_seed(SEED)
    for plan in plans:
        weights = plan.workload.make_weights(device)
        weights.refill(generator)
        for tokens in plan.tokens:
            inputs = plan.workload.make_inputs(tokens, generator)
            out_TH = torch.empty_like(inputs.x_TH)
            run_layer(inputs, weights, out_TH)  # loads the kernels
            stopwatch.flush_cache()
            torch.cuda.synchronize()
            with torch.cuda.profiler.profile():
                run_layer(inputs, weights, out_TH)
                torch.cuda.synchronize()
            experts_hit = len(inputs.topk_ids_TK.unique())
            works = plan.workload.step_works(tokens, experts_hit, gathers=gathers(inputs.topk_ids_TK.numel(), weights))
            needed_bytes = {name: work.bytes for name, work in works.items()}
            yield ProfiledCase(plan.workload.name, plan.workload.routing.name, tokens, experts_hit, needed_bytes)
        del weights
        torch.cuda.empty_cache()


def main(arguments: Sequence[str]) -> None:
    choice, report = arguments
    plans = make_plans(Options(**json.loads(choice)))
    with Path(report).open("w") as file:
        for case in profile(plans, torch.device("cuda", torch.cuda.current_device())):
            file.write(json.dumps(asdict(case)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
