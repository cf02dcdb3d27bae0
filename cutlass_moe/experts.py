"""The MoE layer: route, permute, two grouped GEMMs, combine."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_moe import checks
from cutlass_moe.combine import launch_combine
from cutlass_moe.grouped_gemm import launch_grouped_gemm
from cutlass_moe.permutation import launch_permute
from cutlass_moe.routing import launch_route
from epilogues import RoutingScale

_ROUTING_SCALE = RoutingScale()


def fused_experts(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """A mixture-of-experts layer with gated experts, from routed tokens to combined output.

    `out[t] = sum over k of w[t, k] * (act(x[t] @ w_gate[e].T) * (x[t] @ w_up[e].T)) @ w_down[e].T` with
    `e = ids[t, k]`. Computed in fp32 and rounded three times: the gated product, each slot's weighted row,
    and their sum, which runs in slot order. So every run on a device gives the same bits.

    On CUDA the kernels run on the current stream; the call never waits for the device and can be captured in
    a CUDA graph. On the CPU it is plain torch. Under torch.compile it is one operator. It has no backward.

    Args:
        x: bfloat16 or float16 [..., H], last dimension contiguous, rows 16-byte aligned, H a multiple of 8.
            Leading dimensions are flattened to T tokens: a view where their strides allow, else a copy of x.
        w_gate, w_up: [E, I, H] of x's dtype and with equal strides, each expert's rows 16-byte aligned, I a
            multiple of 8. They may be views of one tensor or separate allocations.
        w_down: [E, H, I], likewise.
        topk_ids: int32 or int64 [..., K]. An id outside [0, E) drops its slot.
        topk_weights: float32, bfloat16 or float16 [..., K].
        activation: "silu".
        out: [..., H] of x's dtype to write to; viewable as [T, H], rows 16-byte aligned, no memory in common
            with x.

    Returns:
        `out`, or a new contiguous tensor of x's shape. A token whose slots are all dropped gets zeros.

    Raises:
        ValueError: wrong shape, stride, alignment, device or activation.
        TypeError: wrong dtype or no tensor.
        RuntimeError: an argument requires grad while gradients are enabled, or the GPU is not of compute
            capability 9.0.
    """
    checks.check_experts(x, w_gate, w_up, w_down, topk_ids, topk_weights, activation, out)
    x_TH, topk_ids_TK, topk_weights_TK = x, topk_ids, topk_weights
    if x.dim() != 2:
        x_TH = x.reshape(-1, x.shape[-1])
        topk_ids_TK = topk_ids.reshape(x_TH.shape[0], topk_ids.shape[-1])
        topk_weights_TK = topk_weights.reshape(x_TH.shape[0], topk_ids.shape[-1])
    arguments = (x_TH, w_gate, w_up, w_down, topk_ids_TK, topk_weights_TK, activation)
    if out is None:
        out_TH = torch.ops.cutlass_moe.fused_experts(*arguments)
        return out_TH if x.dim() == 2 else out_TH.view(x.shape)
    out_TH = out if x.dim() == 2 else out.view(x_TH.shape)
    torch.ops.cutlass_moe.fused_experts_out(*arguments, out=out_TH)
    return out


def fused_experts_gate_up(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    interleaved: bool = False,
    activation: str = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """`fused_experts` with the gate and the up weights in one tensor, which is read where it lies.

    Args:
        w_gate_up: [E, 2I, H]. Rows 0 to I - 1 of an expert are its gate and the rest its up weights; or,
            where `interleaved`, even rows are gate and odd rows up.

    The other arguments, the result and the errors are those of `fused_experts`.
    """
    checks.check_gate_up(x, w_gate_up)
    if interleaved:
        w_gate, w_up = w_gate_up[:, 0::2], w_gate_up[:, 1::2]
    else:
        w_gate, w_up = w_gate_up.chunk(2, dim=1)
    return fused_experts(x, w_gate, w_up, w_down, topk_ids, topk_weights, activation=activation, out=out)


def launch_experts(
    x_TH: Tensor,
    w_gate_EIH: Tensor,
    w_up_EIH: Tensor,
    w_down_EHI: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    activation: str,
    out_TH: Tensor,
) -> None:
    """The layer on checked CUDA tensors. Launches the kernels directly: a dispatcher hop for each step would
    cost more."""
    experts, intermediate, _ = w_gate_EIH.shape
    if topk_ids_TK.numel() == 0:
        out_TH.zero_()
        return
    offsets_E1, row_slot_M, slot_row_TK, row_weight_M = launch_route(topk_ids_TK, topk_weights_TK, experts)
    assert row_weight_M is not None
    x_MH = launch_permute(x_TH, slot_row_TK)
    h_MI = x_MH.new_empty(x_MH.shape[0], intermediate)
    gate = checks.activation_epilogue(activation)
    launch_grouped_gemm(x_MH, (w_gate_EIH, w_up_EIH), offsets_E1, gate, (), None, h_MI)
    y_MH = x_MH  # GEMM 1 was its last reader
    launch_grouped_gemm(h_MI, (w_down_EHI,), offsets_E1, _ROUTING_SCALE, (row_weight_M,), row_slot_M, y_MH)
    launch_combine(y_MH, slot_row_TK, out_TH)
