"""DeepGEMM's bf16 grouped GEMM, by itself or as vLLM's wheel carries it."""

from __future__ import annotations

import torch

from perf.peers.base import Call, Finish, GemmsPeer, Rows, load, silu_gate, why_not_importable
from perf.workloads import Inputs

MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")


class DeepGemm(GemmsPeer):
    name = "deep_gemm"
    what = (
        "two GEMMs with silu * up between them: m_grouped_bf16_gemm_nt_contiguous on rows that were grouped and"
        " padded to its alignment before; no routing, no combine; kernels are compiled before the timing"
    )

    @classmethod
    def absent(cls) -> str | None:
        if all(why_not_importable(module) for module in MODULES):
            return f"neither {' nor '.join(MODULES)} is installed"
        return None

    def bind(self, inputs: Inputs) -> tuple[Call, Finish]:
        deep_gemm = load(next(m for m in MODULES if why_not_importable(m) is None))
        alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
        rows = Rows(inputs, self.prepared)
        x_MH = inputs.x_TH[rows.token_M]
        counts_E = rows.offsets_E1.diff().long()
        aligned_E = (counts_E + alignment - 1) // alignment * alignment
        shift_E = (aligned_E.cumsum(0) - aligned_E) - rows.offsets_E1[:-1]
        place_M = torch.arange(len(x_MH), device=x_MH.device) + shift_E[rows.sorted_ids_M]
        padded = int(aligned_E.sum())
        x_PH = x_MH.new_zeros(padded, x_MH.shape[1])
        x_PH[place_M] = x_MH
        expert_P = torch.full((padded,), -1, dtype=torch.int32, device=x_MH.device)
        expert_P[place_M] = rows.sorted_ids_M.int()
        gate_up_EJH, down_EHI = self.prepared.gate_up_EJH, self.prepared.weights.down_EHI
        gate_up_PJ = x_MH.new_empty(padded, gate_up_EJH.shape[1])
        y_PH = torch.empty_like(x_PH)

        def call() -> torch.Tensor:
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x_PH, gate_up_EJH, gate_up_PJ, expert_P)
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(silu_gate(gate_up_PJ), down_EHI, y_PH, expert_P)
            return y_PH

        return call, lambda y_PH: rows.combine(y_PH[place_M])
