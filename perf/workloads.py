"""The workloads: shapes, cases and checks (data in workloads.json), and the recipe of their inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from perf import PerfError

WEIGHT_SCALE = 0.02
ELEMENT_BYTES = 2  # bf16
_DATA = Path(__file__).with_name("workloads.json")


@dataclass(frozen=True)
class Case:
    """One measured problem, right to within `atol + rtol * |reference|`. B200 times are published figures."""

    tokens: int
    atol: float
    batch: int | None = None
    seq: int | None = None
    sol_b200_ms: float | None = None
    baseline_b200_ms: float | None = None


@dataclass(frozen=True)
class Inputs:
    """What is new in every round: `x_TH` bf16, `topk_ids_TK`, `topk_weights_TK`."""

    x_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    topk_weights_TK: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """The experts as three separate bf16 tensors: `gate_EIH`, `up_EIH`, `down_EHI`."""

    gate_EIH: torch.Tensor
    up_EIH: torch.Tensor
    down_EHI: torch.Tensor

    def refill(self, generator: torch.Generator) -> None:
        """Draws new weights in place: N(0, 1) rounded to bf16, then times 0.02 in bf16."""
        for tensor in (self.gate_EIH, self.up_EIH, self.down_EHI):
            for expert in tensor:  # one expert at a time: no call handles more than 2^31 elements
                expert.normal_(generator=generator).mul_(WEIGHT_SCALE)


@dataclass(frozen=True)
class Workload:
    """An MoE layer with its headline cases, its decode grid, and times recorded earlier on an H200.

    `stock_gemms` holds `(rows per expert, GEMM 1 ms, GEMM 2 ms)`, ascending; `recorded_prefill_ms` and
    `recorded_decode_ms` map a peer to its time for each T.
    """

    name: str
    source: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    weight_dtype: torch.dtype
    id_dtype: torch.dtype
    rtol: float
    required_match: float
    prefill_cases: tuple[Case, ...]
    decode_cases: tuple[Case, ...]
    stock_gemms: tuple[tuple[float, float, float], ...]
    recorded_prefill_ms: dict[str, dict[int, float]]
    recorded_decode_ms: dict[str, dict[int, float]]

    def cases(self, decode: bool, tokens: Sequence[int] | None = None) -> tuple[Case, ...]:
        """The headline cases or the decode grid, by ascending T; `tokens` keeps only those token counts.

        Raises:
            PerfError: none of the cases has one of `tokens`.
        """
        chosen = sorted(self.decode_cases if decode else self.prefill_cases, key=lambda case: case.tokens)
        if tokens is None:
            return tuple(chosen)
        known = sorted({case.tokens for case in chosen})
        unknown = sorted(set(tokens) - set(known))
        if unknown:
            raise PerfError(
                f"{self.name} has no {'decode' if decode else 'headline'} case of {_listed(unknown)} tokens;"
                f" it has {_listed(known)}"
            )
        return tuple(case for case in chosen if case.tokens in tokens)

    def weight_bytes(self) -> int:
        return 3 * self.experts * self.hidden * self.intermediate * ELEMENT_BYTES

    def stock_two_gemms_ms(self, tokens: int) -> float | None:
        """The stock GEMM on both GEMMs at the same average rows per expert; None outside the records."""
        rows = tokens * self.top_k / self.experts
        for (low, *low_ms), (high, *high_ms) in zip(self.stock_gemms, self.stock_gemms[1:], strict=False):
            if low <= rows <= high:
                share = (rows - low) / (high - low)
                return sum(low_ms) + share * (sum(high_ms) - sum(low_ms))
        return None

    def make_weights(self, device: torch.device) -> Weights:
        """Allocates the weights, uninitialised: `Weights.refill` draws them."""
        experts, intermediate, hidden = self.experts, self.intermediate, self.hidden

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device)

        return Weights(
            gate_EIH=empty(experts, intermediate, hidden),
            up_EIH=empty(experts, intermediate, hidden),
            down_EHI=empty(experts, hidden, intermediate),
        )

    def make_inputs(self, tokens: int, generator: torch.Generator) -> Inputs:
        """Draws x ~ N(0, 1), `top_k` distinct experts a token, routing weights rand / sum over the slots."""
        device = generator.device
        x_TH = torch.randn(tokens, self.hidden, dtype=torch.bfloat16, device=device, generator=generator)
        # The order of the largest of E uniform numbers is a uniform draw of K distinct experts.
        keys_TE = torch.rand(tokens, self.experts, device=device, generator=generator)
        ids_TK = keys_TE.topk(self.top_k, dim=1).indices.to(self.id_dtype)
        weights_TK = torch.rand(tokens, self.top_k, dtype=self.weight_dtype, device=device, generator=generator)
        return Inputs(x_TH, ids_TK, weights_TK / weights_TK.sum(dim=1, keepdim=True))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _by_tokens(table: dict[str, dict[str, float]]) -> dict[str, dict[int, float]]:
    return {peer: {int(tokens): ms for tokens, ms in row.items()} for peer, row in table.items()}


def _parse(name: str, data: dict[str, Any]) -> Workload:
    decode, recorded = data["decode"], data["recorded_h200"]
    return Workload(
        name=name,
        source=data["source"],
        hidden=data["hidden"],
        intermediate=data["intermediate"],
        experts=data["experts"],
        top_k=data["top_k"],
        weight_dtype=getattr(torch, data["routing_weight_dtype"]),
        id_dtype=getattr(torch, data["expert_id_dtype"]),
        rtol=data["rtol"],
        required_match=data["required_match"],
        prefill_cases=tuple(Case(**case) for case in data["cases"]),
        decode_cases=tuple(Case(tokens, decode["atol"]) for tokens in decode["tokens"]),
        stock_gemms=tuple((rows, gemm1_ms, gemm2_ms) for rows, gemm1_ms, gemm2_ms in recorded["stock_dsl_gemms"]),
        recorded_prefill_ms=_by_tokens(recorded["prefill_ms"]),
        recorded_decode_ms=_by_tokens(recorded["decode_ms"]),
    )


@cache
def workloads() -> dict[str, Workload]:
    """Every workload by name."""
    return {name: _parse(name, data) for name, data in json.loads(_DATA.read_text())["workloads"].items()}


def get_workload(name: str) -> Workload:
    """Looks a workload up.

    Raises:
        PerfError: there is none of that name.
    """
    try:
        return workloads()[name]
    except KeyError:
        raise PerfError(f"unknown workload {name!r}: known are {', '.join(workloads())}") from None
