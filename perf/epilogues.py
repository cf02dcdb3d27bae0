"""`python -m perf.epilogues` times GEMM 1 of two layers with each epilogue, in turns, against `Identity`.

What is compared with what. Every contender multiplies the same rows by the same weight bytes, [E, 2I, H]: an epilogue
of one operand takes it as it is, one of two operands its halves as gate and up. FLOPs and bytes read are equal, but a
gated epilogue stores half as much. So there are two ratios: to `Identity`, which stores [M, 2I], and to the epilogue
that does no math on as many operands (`Identity`, or `FirstOfPair` for two), which stores as much. The second is what
the math costs. Side outputs, wider dtypes and tensors read are traffic that those two do not have, and count.

Its kernels are in the list KERNELS: `python -m perf.bundle --module perf.epilogues` packs them for a machine without
the DSL.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cutlass_moe
from cutlass_moe.aot.verify import random_inputs
from cutlass_moe.config import GemmSpec
from cutlass_moe.heuristics import choose_gemm_config
from epilogues import (
    Bias,
    Cast,
    ClampedSwiglu,
    Epilogue,
    GeluGate,
    Identity,
    ReluSquared,
    ResidualAdd,
    RoutingScale,
    RowAbsMax,
    Scale,
    SiluGate,
    StorePreActivation,
)
from perf import environment
from perf.results import result_path
from perf.timing import Captured, Stopwatch, Turns, time_in_turns
from perf.workloads import WEIGHT_SCALE, Workload, get_workload

SCHEMA = "cutlass_moe.perf.epilogues/1"
CASES = (("ling_flash", 2048), ("jamba_large", 4096))
TURNS = Turns(least=21, most=60, budget_s=20.0, warm_up=3)


@dataclass(frozen=True)
class FirstOfPair(Epilogue):
    """`out = gate`: what two operands cost without math."""

    accumulators = 2

    def math(self, ops: Any, gate: Any, up: Any) -> Any:
        return gate


ONE_OPERAND: tuple[Epilogue, ...] = (
    Identity(),
    Bias(),
    Scale(),
    ReluSquared(),
    RoutingScale(),
    ResidualAdd(),
    RowAbsMax(),
    Cast("float32"),
)
TWO_OPERANDS: tuple[Epilogue, ...] = (
    FirstOfPair(),
    SiluGate(),
    GeluGate(),
    GeluGate("tanh"),
    ClampedSwiglu(),
    Bias(operands=2) | SiluGate(),
    Bias(operands=2) | ClampedSwiglu(),
    SiluGate() | RowAbsMax(),
    StorePreActivation() | SiluGate(),
)


def _config(workload: Workload, tokens: int, accumulators: int) -> Any:
    rows, features = tokens * workload.top_k, 2 * workload.intermediate
    return choose_gemm_config(rows, workload.experts, features, workload.hidden, accumulators, gather=False)


def _kernels() -> list[GemmSpec]:
    specs = (
        GemmSpec("bfloat16", _config(get_workload(name), tokens, epilogue.accumulators), epilogue)
        for name, tokens in CASES
        for epilogue in (*ONE_OPERAND, *TWO_OPERANDS)
    )
    return list(dict.fromkeys(specs))


KERNELS = _kernels()


@dataclass(frozen=True)
class EpilogueResult:
    """One epilogue: median and percentiles of GEMM 1, and its time over that of Identity and of no math."""

    name: str
    accumulators: int
    ms: float
    p10_ms: float
    p90_ms: float
    over_identity: float
    over_no_math: float


def measure(workload: Workload, tokens: int, device: torch.device, turns: Turns) -> list[EpilogueResult]:
    """Times GEMM 1 of a layer with every epilogue, as graph replays in turns on a hot card."""
    generator = torch.Generator(device).manual_seed(0)
    inputs = workload.make_inputs(tokens, generator)
    experts, columns, hidden = workload.experts, 2 * workload.intermediate, workload.hidden
    gate_up_ENH = torch.empty(experts, columns, hidden, dtype=torch.bfloat16, device=device)
    for expert in gate_up_ENH:  # one at a time: no call handles more than 2^31 elements
        expert.normal_(generator=generator).mul_(WEIGHT_SCALE)
    plan = cutlass_moe.plan_routing(inputs.topk_ids_TK, experts, inputs.topk_weights_TK)
    x_MH = cutlass_moe.permute(inputs.x_TH, plan)
    gate, up = gate_up_ENH.chunk(2, dim=1)
    stopwatch = Stopwatch(device)

    def contender(epilogue: Epilogue) -> Callable[[], float]:
        weights = gate_up_ENH if epilogue.accumulators == 1 else (gate, up)
        outputs = columns // epilogue.accumulators
        call = partial(
            cutlass_moe.grouped_gemm,
            x_MH,
            weights,
            plan.expert_offsets_E1,
            epilogue=epilogue,
            tensors=random_inputs(epilogue, x_MH.shape[0], experts, outputs, torch.bfloat16, generator),
            row_index=plan.row_slot_M if epilogue.scatter else None,
        )
        captured = Captured.of(call)
        return lambda: stopwatch.device_ms(captured.replay)

    everyone = (*ONE_OPERAND, *TWO_OPERANDS)
    spreads = time_in_turns({epilogue.name: contender(epilogue) for epilogue in everyone}, turns)
    identity, pair = spreads[Identity().name].ms, spreads[FirstOfPair().name].ms
    return [
        EpilogueResult(
            epilogue.name,
            epilogue.accumulators,
            (spread := spreads[epilogue.name]).ms,
            spread.p10_ms,
            spread.p90_ms,
            spread.ms / identity,
            spread.ms / (identity if epilogue.accumulators == 1 else pair),
        )
        for epilogue in everyone
    ]


def table(title: str, results: Sequence[EpilogueResult]) -> str:
    """Markdown."""
    lines = [f"| {title} | operands | ms | p10 - p90 | to Identity | to no math |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r.name} | {r.accumulators} | {r.ms:.3f} | {r.p10_ms:.3f} - {r.p90_ms:.3f} | {r.over_identity:.3f} | "
        f"{r.over_no_math:.3f} |"
        for r in results
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.epilogues", description="Times GEMM 1 with each epilogue.")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the JSON (perf/results/<device>)")
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parsed = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("perf.epilogues: a CUDA device of compute capability 9.0 is needed", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    turns = Turns(least=5, most=5, budget_s=0.0) if parsed.quick else TURNS
    layers = []
    for name, tokens in CASES:
        workload = get_workload(name)
        results = measure(workload, tokens, device, turns)
        print(table(f"{name}, T = {tokens}", results), flush=True)
        configs = {str(count): asdict(_config(workload, tokens, count)) for count in (1, 2)}
        timed = [asdict(result) for result in results]
        layers.append({"workload": name, "tokens": tokens, "configs": configs, "epilogues": timed})
        torch.cuda.empty_cache()
    short_name = environment.short_device_name(torch.cuda.get_device_name(device))
    path = result_path(parsed.output, short_name, "epilogues", record=not parsed.quick)
    document = {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(device),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": environment.commit(),
        "versions": environment.versions(),
        "layers": layers,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    print(f"\nsaved: {path}")
    return 0


if __name__ == "__main__":
    # Under its own name: the module of an epilogue's class is part of what a kernel is found by.
    from perf.epilogues import main as run

    sys.exit(run())
