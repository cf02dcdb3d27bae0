"""OpenAI's triton_kernels `matmul_ogs`, by itself or as vLLM's wheel carries it."""

from __future__ import annotations

import sys

import torch

from perf.peers.base import Call, Finish, Peer, Rows, load, silu_gate, why_not_importable
from perf.workloads import Inputs

VENDORED = "vllm.third_party.triton_kernels"


class TritonKernels(Peer):
    name = "triton_kernels"
    what = (
        "layer without its routing tables, which are built before: matmul_ogs with the gather of x inside, silu * up by"
        " torch, matmul_ogs that scatters, weights and sums; its default configuration"
    )

    @classmethod
    def absent(cls) -> str | None:
        if why_not_importable("triton_kernels.matmul_ogs") is None:
            return None
        if why_not_importable(VENDORED + ".routing"):
            return f"neither triton_kernels with matmul_ogs nor {VENDORED} is installed"
        return None

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        call, finish = self.bind(inputs)
        return finish(call())

    def bind(self, inputs: Inputs) -> tuple[Call, Finish]:
        if "triton_kernels" not in sys.modules and why_not_importable("triton_kernels.matmul_ogs"):
            sys.modules["triton_kernels"] = load(VENDORED)  # as vLLM does: it imports itself so
        routing = load("triton_kernels.routing")
        matmul_ogs = load("triton_kernels.matmul_ogs").matmul_ogs

        rows, experts = Rows(inputs, self.prepared), self.prepared.experts
        top_k = inputs.topk_ids_TK.shape[1]
        slot_M = rows.slot_M.int()
        row_M = torch.argsort(rows.slot_M).int()
        counts_E = rows.offsets_E1.diff().int()
        weight_M = inputs.topk_weights_TK.flatten().float()[rows.slot_M]
        data = routing.RoutingData(
            weight_M, counts_E, experts, top_k, routing.compute_expt_data(counts_E, experts, len(slot_M))
        )
        gather = routing.GatherIndx(src_indx=slot_M, dst_indx=row_M)
        scatter = routing.ScatterIndx(src_indx=row_M, dst_indx=slot_M)
        gate_up_EHJ = self.prepared.gate_up_EJH.transpose(1, 2)
        down_EIH = self.prepared.weights.down_EHI.transpose(1, 2)

        def call() -> torch.Tensor:
            h_MI = silu_gate(matmul_ogs(inputs.x_TH, gate_up_EHJ, None, data, gather_indx=gather))
            return matmul_ogs(h_MI, down_EIH, None, data, scatter_indx=scatter, gammas=weight_M)

        return call, lambda out_TH: out_TH
