"""The experts of Hugging Face transformers, called as its model classes call them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.nn.functional as F

from perf.peers.base import Peer, Prepared, load
from perf.roofline import ELEMENT_BYTES
from perf.workloads import Inputs, Workload


class TransformersExperts(Peer):
    """An implementation of `ExpertsInterface`, bound to a module with the attributes that it reads."""

    module = "transformers.integrations.moe"
    implementation: ClassVar[str]

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        moe = load(self.module)

        class Experts(torch.nn.Module):
            def __init__(self, config: SimpleNamespace) -> None:
                super().__init__()
                self.num_experts = prepared.experts
                self.gate_up_proj = prepared.gate_up_EJH
                self.down_proj = prepared.weights.down_EHI
                self.act_fn = F.silu

            def forward(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
                raise NotImplementedError("the eager forward: another implementation was asked for")

        if self.implementation not in moe.ALL_EXPERTS_FUNCTIONS:
            raise RuntimeError(f"this transformers has no experts implementation {self.implementation!r}")
        config = SimpleNamespace(_experts_implementation=self.implementation, hidden_act="silu")
        self._experts = moe.use_experts_implementation(Experts)(config)

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        with torch.no_grad():
            return self._experts(inputs.x_TH, inputs.topk_ids_TK, inputs.topk_weights_TK)


class TransformersGroupedMm(TransformersExperts):
    name = "transformers_grouped_mm"
    implementation = "grouped_mm"
    what = (
        "whole layer, ids to output: transformers' grouped_mm experts (sort, gather, two torch grouped_mm on a gate-up"
        " weight fused before, eager glue that also masks expert-parallel sentinels, sum over the slots)"
    )


class TransformersBatchedMm(TransformersExperts):
    name = "transformers_batched_mm"
    implementation = "batched_mm"
    what = (
        "whole layer, ids to output: transformers' batched_mm experts (gathers both weights of every slot, then two"
        " torch.bmm): for tiny token counts"
    )

    @classmethod
    def call_bytes(cls, workload: Workload, tokens: int) -> int:
        return 3 * workload.hidden * workload.intermediate * ELEMENT_BYTES * tokens * workload.top_k
