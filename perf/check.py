"""Is the layer right? Fresh inputs in every round, against the fp32 reference on the same device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

import cutlass_moe
from perf.workloads import Case, Inputs, Weights, Workload

Layer = Callable[[Inputs, Weights, torch.Tensor], None]
"""Runs the layer on inputs and weights into an output `[T, H]`."""

ERROR_LIMIT = 1e-2  # Frobenius, relative: bf16 layers that round more often than ours stay well below


@contextmanager
def ieee_fp32() -> Iterator[None]:
    """Keeps TF32 out of fp32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def reference_layer(inputs: Inputs, weights: Weights) -> torch.Tensor:
    """The layer in fp32 from the bf16 operands, with nothing rounded in between: `[T, H]` fp32.

    Plain fp32 products (no TF32): the dearest way, and the one that needs no argument. It stays affordable
    because `check_layer` calls it once a round for the tokens of every case.
    """
    with ieee_fp32():
        return cutlass_moe.reference_experts(
            inputs.x_TH,
            weights.gate_EIH,
            weights.up_EIH,
            weights.down_EHI,
            inputs.topk_ids_TK,
            inputs.topk_weights_TK,
        )


def match_ratio(out_TH: torch.Tensor, reference_TH: torch.Tensor, atol: float, rtol: float) -> float:
    """Share of elements with `|out - ref| <= atol + rtol * |ref|`; NaN and infinity never match."""
    error_TH = (out_TH.float() - reference_TH).abs()
    return int((error_TH <= atol + rtol * reference_TH.abs()).sum()) / error_TH.numel()


def relative_error(out_TH: torch.Tensor, reference_TH: torch.Tensor) -> float:
    """`||out - ref|| / ||ref||` (Frobenius)."""
    return float(torch.linalg.vector_norm(out_TH.float() - reference_TH) / torch.linalg.vector_norm(reference_TH))


@dataclass
class Verdict:
    """The worst over the rounds at one token count. `match_ratios` has one for each published atol."""

    rounds: int = 0
    match_ratios: dict[float, float] = field(default_factory=dict)
    relative_error: float = 0.0
    finite: bool = True

    def add(self, out_TH: torch.Tensor, reference_TH: torch.Tensor, atols: set[float | None], rtol: float) -> None:
        self.rounds += 1
        self.finite &= bool(torch.isfinite(out_TH).all())
        error = relative_error(out_TH, reference_TH)
        self.relative_error = max(self.relative_error, error if math.isfinite(error) else math.inf)
        for atol in atols:
            if atol is not None:
                ratio = match_ratio(out_TH, reference_TH, atol, rtol)
                self.match_ratios[atol] = min(ratio, self.match_ratios.get(atol, 1.0))

    def passed(self, case: Case, required_match: float) -> bool:
        if self.rounds == 0 or not self.finite:
            return False
        if case.atol is None:
            return self.relative_error <= ERROR_LIMIT
        return self.match_ratios[case.atol] >= required_match


def check_layer(
    layer: Layer,
    workload: Workload,
    cases: Sequence[Case],
    weights: Weights,
    *,
    rounds: int,
    generator: torch.Generator,
    advance: Callable[[str], None] = lambda label: None,
) -> dict[int, Verdict]:
    """Checks the layer at every token count of `cases`: one verdict for each.

    Every round has new weights, new inputs and an output poisoned with NaN. The layer treats tokens one by
    one, so the reference of a round is computed on the tokens of all counts at once and then split.

    Args:
        layer: what is checked.
        weights: refilled in place; the last round's stay.
        rounds: number of rounds, each of which every case must pass.
        generator: source of all random numbers; names the device.
        advance: told after each round.
    """
    atols: dict[int, set[float | None]] = {}
    for case in cases:
        atols.setdefault(case.tokens, set()).add(case.atol)
    verdicts = {tokens: Verdict() for tokens in atols}
    for number in range(rounds):
        weights.refill(generator)
        inputs = [workload.make_inputs(tokens, generator) for tokens in atols]
        reference_TH = reference_layer(_joined(inputs), weights)
        for tokens, given, expected_TH in zip(atols, inputs, reference_TH.split(list(atols)), strict=True):
            out_TH = torch.full_like(given.x_TH, math.nan)
            layer(given, weights, out_TH)
            verdicts[tokens].add(out_TH, expected_TH, atols[tokens], workload.rtol)
        advance(f"{workload.name}: check, round {number + 1} of {rounds}")
    return verdicts


def _joined(inputs: Sequence[Inputs]) -> Inputs:
    return Inputs(
        x_TH=torch.cat([given.x_TH for given in inputs]),
        topk_ids_TK=torch.cat([given.topk_ids_TK for given in inputs]),
        topk_weights_TK=torch.cat([given.topk_weights_TK for given in inputs]),
    )
