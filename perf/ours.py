"""The layer under test and its steps, called as a user of the library calls them."""

from __future__ import annotations

from collections.abc import Callable

import torch

import cutlass_moe
from cutlass_moe import heuristics
from epilogues import RoutingScale, SiluGate
from perf.workloads import Inputs, Weights


def run_layer(inputs: Inputs, weights: Weights, out_TH: torch.Tensor) -> None:
    """The whole layer, from ids to output, into `out_TH`."""
    cutlass_moe.fused_experts(
        inputs.x_TH,
        weights.gate_EIH,
        weights.up_EIH,
        weights.down_EHI,
        inputs.topk_ids_TK,
        inputs.topk_weights_TK,
        out=out_TH,
    )


def gathers(rows: int, weights: Weights) -> bool:
    """Whether the layer's first GEMM gathers its rows, of `rows` slots, so that there is no permute."""
    experts, intermediate, hidden = weights.gate_EIH.shape
    return heuristics.choose_gemm_config(rows, experts, 2 * intermediate, hidden, accumulators=2, gather=True).gather


class Steps:
    """The layer as its public steps, run once in order; `calls` runs any of them again by itself.

    Attributes:
        x_MH, h_MI: rows grouped by expert, and the intermediate.
        out_TH: the combined output.
        calls: route, permute, gemm1, gemm2, combine; no permute where the layer's first GEMM gathers its rows.
    """

    def __init__(self, inputs: Inputs, weights: Weights) -> None:
        experts = len(weights.gate_EIH)
        gathered = gathers(inputs.topk_ids_TK.numel(), weights)
        gate_up = (weights.gate_EIH, weights.up_EIH)

        def route() -> cutlass_moe.RoutingPlan:
            return cutlass_moe.plan_routing(inputs.topk_ids_TK, experts, inputs.topk_weights_TK)

        plan = route()
        offsets_E1 = plan.expert_offsets_E1

        def permute() -> torch.Tensor:
            return cutlass_moe.permute(inputs.x_TH, plan)

        x_MH = permute()

        def gemm1() -> torch.Tensor:
            source, index = (inputs.x_TH, plan.row_token_M) if gathered else (x_MH, None)
            return cutlass_moe.grouped_gemm(source, gate_up, offsets_E1, epilogue=SiluGate(), source_index=index)

        h_MI = gemm1()

        def gemm2() -> torch.Tensor:
            return cutlass_moe.grouped_gemm(
                h_MI,
                weights.down_EHI,
                offsets_E1,
                epilogue=RoutingScale(),
                tensors={"row_weight": plan.row_weight_M},
                row_index=plan.row_slot_M,
            )

        y_MH = gemm2()

        def combine() -> torch.Tensor:
            return cutlass_moe.combine(y_MH, plan)

        self.x_MH, self.h_MI, self.out_TH = x_MH, h_MI, combine()
        self.calls: dict[str, Callable[[], object]] = {
            "route": route,
            "permute": permute,
            "gemm1": gemm1,
            "gemm2": gemm2,
            "combine": combine,
        }
        if gathered:
            del self.calls["permute"]
