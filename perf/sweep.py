"""Times every configuration of a grouped GEMM in turns, each checked first against the others and the truth."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

import cutlass_moe
from cutlass_moe import heuristics
from cutlass_moe.config import GemmConfig
from epilogues import TorchOps
from perf.check import ERROR_LIMIT, ieee_fp32, relative_error
from perf.monitor import Monitor
from perf.timing import Captured, Stopwatch, Turns, time_in_turns
from perf.tune_file import MeasuredPoint
from perf.tune_space import EPILOGUES
from perf.workloads import Weights, Workload

CHECKED_EXPERTS = 4  # whose rows are compared with fp32; all rows are compared between configurations


@dataclass(frozen=True)
class Problem:
    """One GEMM of a layer on routed rows: `accumulators` 2 is gate and up, 1 is down.

    Gate and up start from the tokens, x_TH: a configuration that does not gather is timed with the permuted copy that
    it needs, a_MK.
    """

    accumulators: int
    x_TH: torch.Tensor | None
    a_MK: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    plan: cutlass_moe.RoutingPlan
    out: torch.Tensor

    @property
    def features(self) -> int:
        return self.weights[0].shape[1] * len(self.weights)

    def run(self, gather: bool) -> torch.Tensor:
        """The public calls; which configuration they take is `forced` around them."""
        if self.x_TH is not None:
            return cutlass_moe.grouped_gemm(
                self.x_TH if gather else cutlass_moe.permute(self.x_TH, self.plan),
                (self.weights[0], self.weights[1]),
                self.plan.expert_offsets_E1,
                epilogue=EPILOGUES[2],
                source_index=self.plan.row_token_M if gather else None,
                out=self.out,
            )
        return cutlass_moe.grouped_gemm(
            self.a_MK,
            self.weights[0],
            self.plan.expert_offsets_E1,
            epilogue=EPILOGUES[1],
            tensors={"row_weight": self.plan.row_weight_M},
            row_index=self.plan.row_slot_M,
            out=self.out,
        )

    def error(self) -> float:
        """Relative error of `out` against fp32, on the rows of the busiest experts."""
        offsets = self.plan.expert_offsets_E1.tolist()
        busiest = sorted(range(len(offsets) - 1), key=lambda expert: offsets[expert] - offsets[expert + 1])
        actual, expected = [], []
        with ieee_fp32():
            for expert in busiest[:CHECKED_EXPERTS]:
                rows = slice(offsets[expert], offsets[expert + 1])
                if rows.start == rows.stop:
                    continue
                products = [self.a_MK[rows].float() @ weight[expert].float().T for weight in self.weights]
                if self.accumulators == 2:
                    expected.append(EPILOGUES[2].math(TorchOps, *products))
                    actual.append(self.out[rows])
                else:
                    assert self.plan.row_weight_M is not None
                    expected.append(products[0] * self.plan.row_weight_M[rows, None])
                    actual.append(self.out[self.plan.row_slot_M[rows].long()])
        return relative_error(torch.cat(actual), torch.cat(expected))


def problems(workload: Workload, weights: Weights, tokens: int, generator: torch.Generator) -> Iterator[Problem]:
    """Both GEMMs of a layer, on routed rows of random data."""
    inputs = workload.make_inputs(tokens, generator)
    plan = cutlass_moe.plan_routing(inputs.topk_ids_TK, workload.experts, inputs.topk_weights_TK)
    x_MH = cutlass_moe.permute(inputs.x_TH, plan)
    rows = x_MH.shape[0]
    gate_up = (weights.gate_EIH, weights.up_EIH)
    yield Problem(2, inputs.x_TH, x_MH, gate_up, plan, x_MH.new_empty(rows, workload.intermediate))
    h_MI = x_MH.new_empty(rows, workload.intermediate).normal_(generator=generator)
    yield Problem(1, None, h_MI, (weights.down_EHI,), plan, x_MH.new_empty(rows, workload.hidden))


@contextmanager
def forced(config: GemmConfig) -> Iterator[None]:
    """Makes the library's grouped GEMMs take this configuration, whatever the shape."""
    module = importlib.import_module("cutlass_moe.grouped_gemm")
    before = heuristics.choose_gemm_config
    heuristics.choose_gemm_config = lambda *shape, **named: config
    module._gemm_kernel.cache_clear()
    try:
        yield
    finally:
        heuristics.choose_gemm_config = before
        module._gemm_kernel.cache_clear()


def sweep(
    problem: Problem,
    configs: Sequence[GemmConfig],
    tokens: int,
    stopwatch: Stopwatch,
    monitor: Monitor,
    turns: Turns,
) -> MeasuredPoint:
    """Checks and times the configurations on one problem.

    A configuration is right when its output is finite where rows are, and bit for bit that of the first right one
    (the order of the reduction is the same in all), which is itself right to fp32.
    """
    experts = problem.weights[0].shape[0]
    rows = problem.plan.row_slot_M.shape[0] / experts
    point = MeasuredPoint(
        problem.accumulators, problem.features, problem.a_MK.shape[1], experts, tokens, round(rows, 3), {}
    )
    timers: dict[str, Callable[[], float]] = {}
    first: torch.Tensor | None = None
    for config in configs:
        try:
            with forced(config):
                graph = Captured.of(partial(problem.run, config.gather))
            problem.out.fill_(math.nan)
            graph.replay()
            if first is None:
                error = problem.error()
                if not error <= ERROR_LIMIT:
                    point.wrong[config.name] = f"relative error {error:.3g}, at most {ERROR_LIMIT:g} expected"
                    continue
                first = problem.out.clone()
            elif not torch.equal(first, problem.out):
                point.wrong[config.name] = f"not bitwise what {next(iter(timers))} gives"
                continue
        except Exception as reason:
            point.wrong[config.name] = " ".join(f"{type(reason).__name__}: {reason}".split())[:200]
            continue
        timers[config.name] = partial(stopwatch.device_ms, graph.replay)
    if timers:
        began = time.monotonic()
        point.times_ms = {name: spread.ms for name, spread in time_in_turns(timers, turns).items()}
        point.state = monitor.over(began)
    return point
