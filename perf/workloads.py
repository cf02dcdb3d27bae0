"""The workloads: shapes, cases and checks (data in workloads.json), and the recipe of their inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from perf import PerfError
from perf.roofline import ELEMENT_BYTES, Work, step_works
from perf.routing import Recorded, Routing, Uniform, parse_routing

WEIGHT_SCALE = 0.02
FREE_TOKENS = (4096, 16384)  # of a workload that publishes no cases
_DATA = Path(__file__).with_name("workloads.json")


@dataclass(frozen=True)
class Case:
    """One measured problem, right to within `atol + rtol * |reference|`. B200 times are published figures.

    `atol` None: nothing is published, and the relative error decides. `grid` is "headline", "decode" or "free".
    """

    tokens: int
    atol: float | None
    batch: int | None = None
    seq: int | None = None
    sol_b200_ms: float | None = None
    baseline_b200_ms: float | None = None
    grid: str = "headline"


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
    """An MoE layer. The two headline layers have published cases, a decode grid, and times recorded earlier.

    `stock_gemms` holds `(rows per expert, GEMM 1 ms, GEMM 2 ms)`, ascending; `recorded_prefill_ms` and
    `recorded_decode_ms` map a peer to its time for each T. All of it was recorded with uniform routing.
    """

    name: str
    source: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    weight_dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int64
    rtol: float = 0.05
    required_match: float = 0.98
    prefill_cases: tuple[Case, ...] = ()
    decode_cases: tuple[Case, ...] = ()
    stock_gemms: tuple[tuple[float, float, float], ...] = ()
    recorded_prefill_ms: dict[str, dict[int, float]] = field(default_factory=dict)
    recorded_decode_ms: dict[str, dict[int, float]] = field(default_factory=dict)
    routing: Routing = field(default_factory=Uniform)

    def cases(self, grid: str, tokens: Sequence[int] | None = None) -> tuple[Case, ...]:
        """The cases of a grid, by ascending T; `tokens` keeps only those token counts, or, where the workload
        publishes no cases, names them.

        Raises:
            PerfError: none of the cases has one of `tokens`, or recorded ids do not fit.
        """
        published = {"headline": self.prefill_cases, "decode": self.decode_cases}
        published["all"] = self.prefill_cases + self.decode_cases
        if published["all"]:
            chosen = self._filter(published[grid], grid, tokens)
        else:
            chosen = tuple(Case(count, None, grid="free") for count in sorted(set(tokens or FREE_TOKENS)))
        if isinstance(self.routing, Recorded):
            self.routing.require(max(case.tokens for case in chosen), self.top_k, self.experts)
        return chosen

    def _filter(self, cases: Sequence[Case], grid: str, tokens: Sequence[int] | None) -> tuple[Case, ...]:
        known = sorted({case.tokens for case in cases})
        unknown = sorted(set(tokens or ()) - set(known))
        if unknown:
            which = f"{grid} case" if grid != "all" else "case"
            raise PerfError(f"{self.name} has no {which} of {_listed(unknown)} tokens; it has {_listed(known)}")
        kept = [case for case in cases if tokens is None or case.tokens in tokens]
        return tuple(sorted(kept, key=lambda case: case.tokens))

    def weight_bytes(self) -> int:
        return 3 * self.experts * self.hidden * self.intermediate * ELEMENT_BYTES

    def step_works(self, tokens: int, experts_hit: int, *, gathers: bool) -> dict[str, Work]:
        """`roofline.step_works` of T tokens whose slots hit so many experts."""
        return step_works(
            tokens=tokens,
            top_k=self.top_k,
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=self.experts,
            experts_hit=experts_hit,
            weight_bytes=self.weight_dtype.itemsize,
            gathers=gathers,
        )

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
        """Draws x ~ N(0, 1), the ids by the routing, routing weights rand / sum over the slots."""
        device = generator.device
        x_TH = torch.randn(tokens, self.hidden, dtype=torch.bfloat16, device=device, generator=generator)
        ids_TK = self.routing.draw(tokens, self.top_k, self.experts, generator).to(self.id_dtype)
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
        decode_cases=tuple(Case(tokens, decode["atol"], grid="decode") for tokens in decode["tokens"]),
        stock_gemms=tuple((rows, gemm1_ms, gemm2_ms) for rows, gemm1_ms, gemm2_ms in recorded["stock_dsl_gemms"]),
        recorded_prefill_ms=_by_tokens(recorded["prefill_ms"]),
        recorded_decode_ms=_by_tokens(recorded["decode_ms"]),
    )


@cache
def _data() -> dict[str, Any]:
    return json.loads(_DATA.read_text())


@cache
def workloads() -> dict[str, Workload]:
    """The headline workloads by name."""
    return {name: _parse(name, data) for name, data in _data()["workloads"].items()}


@cache
def more_models() -> dict[str, Workload]:
    """Layers of public models, for coverage of shapes, by name."""
    known = {}
    for name, data in _data()["more_models"].items():
        shape = {key: value for key, value in data.items() if key != "routing"}
        routing = parse_routing(data.get("routing", "uniform"))
        known[name] = Workload(name, "public model configuration", routing=routing, **shape)
    return known


def get_workload(name: str) -> Workload:
    """Looks a workload up.

    Raises:
        PerfError: there is none of that name.
    """
    known = {**workloads(), **more_models()}
    if name not in known:
        raise PerfError(f"unknown workload {name!r}: known are {', '.join(known)}")
    return known[name]


def custom_workload(shape: str) -> Workload:
    """A workload of the shape `H,I,E,K`.

    Raises:
        PerfError: not four whole numbers from 1 up, or more slots than experts.
    """
    try:
        hidden, intermediate, experts, top_k = (int(part) for part in shape.split(","))
    except ValueError:
        raise PerfError(f"a shape is H,I,E,K in whole numbers, as 4096,1024,256,8: got {shape!r}") from None
    if min(hidden, intermediate, experts, top_k) < 1 or hidden % 8 or intermediate % 8 or top_k > experts:
        raise PerfError(f"{shape!r}: H and I must be multiples of 8 and K between 1 and E")
    name = f"H{hidden}_I{intermediate}_E{experts}_K{top_k}"
    return Workload(name, "given on the command line", hidden, intermediate, experts, top_k)
