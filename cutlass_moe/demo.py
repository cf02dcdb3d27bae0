"""`python -m cutlass_moe.demo`: one small MoE layer, through the kernels on a Hopper GPU, else on the CPU."""

from __future__ import annotations

import sys

import torch

from cutlass_moe import fused_experts
from cutlass_moe.reference import reference_experts

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 256, 512, 8, 2
TOLERANCE = 5e-3  # relative Frobenius error: the roundings to bf16 of the intermediate and of the output


def main() -> int:
    """Runs the layer, compares it with the fp32 reference and says so. Returns 0 if they agree, else 1."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = torch.device("cuda" if hopper else "cpu")
    where = (
        f"the sm_90a kernels on {torch.cuda.get_device_name()}"
        if hopper
        else "the CPU implementation (no Hopper GPU here)"
    )
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16).to(device)

    x_TH = normal(TOKENS, HIDDEN)
    w_gate_EIH = normal(EXPERTS, INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5)
    w_up_EIH = normal(EXPERTS, INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5)
    w_down_EHI = normal(EXPERTS, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5)
    scores_TE = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(dim=-1)
    weights_TK, ids_TK = scores_TE.topk(TOP_K, dim=-1)
    weights_TK = (weights_TK / weights_TK.sum(dim=-1, keepdim=True)).to(device)
    ids_TK = ids_TK.to(device)

    shape = f"hidden {HIDDEN}, intermediate {INTERMEDIATE}, {EXPERTS} experts, top {TOP_K}, bf16"
    print(f"Layer:   {TOKENS} tokens, {shape}")
    rows_E = torch.bincount(ids_TK.flatten(), minlength=EXPERTS).tolist()
    print(f"Routing: {TOKENS * TOP_K} rows, by expert: {rows_E}")
    out_TH = fused_experts(x_TH, w_gate_EIH, w_up_EIH, w_down_EHI, ids_TK, weights_TK)
    print(f"Ran:     cutlass_moe.fused_experts through {where}")
    reference_TH = reference_experts(x_TH, w_gate_EIH, w_up_EIH, w_down_EHI, ids_TK, weights_TK)
    difference = torch.linalg.vector_norm(out_TH.float() - reference_TH.float())
    error = (difference / torch.linalg.vector_norm(reference_TH.float())).item()
    right = error < TOLERANCE  # false for NaN too
    verdict = "OK" if right else "WRONG"
    print(f"Check:   relative error to the fp32 reference {error:.1e}, allowed {TOLERANCE:.0e}: {verdict}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
