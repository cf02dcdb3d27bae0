"""Mixture-of-experts layers on NVIDIA Hopper: `fused_experts`, and each of its steps alone. See docs/."""

from cutlass_moe import torch_ops as torch_ops
from cutlass_moe.combine import combine
from cutlass_moe.experts import fused_experts, fused_experts_gate_up
from cutlass_moe.grouped_gemm import grouped_gemm
from cutlass_moe.permutation import permute
from cutlass_moe.reference import reference_experts
from cutlass_moe.routing import RoutingPlan, plan_routing
from cutlass_moe.version import VERSION as __version__
from cutlass_moe.workspace import workspace_size

__all__ = [
    "RoutingPlan",
    "__version__",
    "combine",
    "fused_experts",
    "fused_experts_gate_up",
    "grouped_gemm",
    "permute",
    "plan_routing",
    "reference_experts",
    "workspace_size",
]
