"""The MoE layer: its public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_moe import checks, dlpack
from cutlass_moe.activations import activation_key
from epilogues import Epilogue


def fused_experts(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str | Epilogue = "silu",
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """A mixture-of-experts layer with gated experts, from routed tokens to combined output.

    `out[t] = sum over k of w[t, k] * (act(x[t] @ w_gate[e].T) * (x[t] @ w_up[e].T)) @ w_down[e].T` with
    `e = ids[t, k]`; a bias, where given, is added to its product. Computed in fp32 and rounded three times: the gated
    product, each slot's weighted row, and their sum, which runs in slot order. So every run on a device gives the same
    bits.

    On CUDA the kernels run on the current stream; the call never waits for the device and can be captured in
    a CUDA graph. On the CPU it is plain torch. Under torch.compile it is one operator. It has no backward.

    Args:
        x: bfloat16 or float16 [..., H], last dimension contiguous, rows 16-byte aligned, H a multiple of 8.
            Leading dimensions are flattened to T tokens: a view where their strides allow, else a copy of x.
        w_gate, w_up: [E, I, H] of x's dtype and with equal strides, each expert's rows 16-byte aligned, I a
            multiple of 8. They may be views of one tensor or separate allocations.
        w_down: [E, H, I], likewise.
        topk_ids: int32 or int64 [..., K], at most 2^21 of them. An id outside [0, E) drops its slot.
        topk_weights: float32, bfloat16 or float16 [..., K].
        activation: "silu"; "gelu" (erf), "gelu_tanh"; "clamped_swiglu", also called "swiglu_oai", as in gpt-oss; or an
            `epilogues.Epilogue` that takes a gate and an up value (for one of a caller's own see docs/epilogues.md).
            Kernels that are not in a library are compiled on first use.
        b_gate, b_up: [E, I] of x's dtype, any strides; both or neither.
        b_down: [E, H], likewise; the routing weight scales it, too.
        out: [..., H] of x's dtype to write to; viewable as [T, H], rows 16-byte aligned, no memory in common
            with x.
        workspace: uint8 [bytes], contiguous, 16-byte aligned (256 is better), at least `workspace_size(T, K, H, I, E,
            x.dtype)` bytes, no memory in common with x or out. What lies between the steps goes there; with `out`
            given, too, the call allocates nothing. Its contents are overwritten: calls that share one must run on one
            stream. Without it torch's allocator gives one. The CPU implementation checks it and does not use it.

    Arrays of CuPy, JAX, NumPy or another library with `__dlpack__` do as well as tensors, without a copy; the result is
    then one of x's library, computed on CuPy's current stream, or ordered with JAX's.

    Returns:
        `out`, or a new contiguous tensor of x's shape. A token whose slots are all dropped gets zeros.

    Raises:
        ValueError: wrong shape, stride, alignment, device or activation.
        TypeError: wrong dtype or no tensor.
        RuntimeError: an argument requires grad while gradients are enabled, or the GPU is not of compute
            capability 9.0.
    """
    if dlpack.is_foreign(x):
        arrays = (x, w_gate, w_up, w_down, topk_ids, topk_weights)
        named = {"b_gate": b_gate, "b_up": b_up, "b_down": b_down}
        keywords = {"activation": activation, **named, "out": out, "workspace": workspace}
        return dlpack.through_torch(fused_experts, *arrays, **keywords)
    key = activation_key(activation)
    biases = (b_gate, b_up, b_down)
    checks.check_experts(x, w_gate, w_up, w_down, topk_ids, topk_weights, key, biases, out, workspace)
    x_TH, topk_ids_TK, topk_weights_TK = x, topk_ids, topk_weights
    if x.dim() != 2:
        x_TH = x.reshape(-1, x.shape[-1])
        topk_ids_TK = topk_ids.reshape(x_TH.shape[0], topk_ids.shape[-1])
        topk_weights_TK = topk_weights.reshape(x_TH.shape[0], topk_ids.shape[-1])
    arguments: tuple[Any, ...] = (x_TH, w_gate, w_up, w_down, topk_ids_TK, topk_weights_TK, key)
    if b_gate is not None or b_down is not None:
        arguments += biases
    if out is None and workspace is None:
        out_TH = torch.ops.cutlass_moe.fused_experts.default(*arguments)
        return out_TH if x.dim() == 2 else out_TH.view(x.shape)
    if out is None:
        out = x.new_empty(x.shape)
    out_TH = out if x.dim() == 2 else out.view(x_TH.shape)
    torch.ops.cutlass_moe.fused_experts_out.default(*arguments, out=out_TH, workspace=workspace)
    return out


def fused_experts_gate_up(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    interleaved: bool = False,
    activation: str | Epilogue = "silu",
    b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """`fused_experts` with the gate and the up weights in one tensor, which is read where it lies.

    Args:
        w_gate_up: [E, 2I, H]. Rows 0 to I - 1 of an expert are its gate and the rest its up weights; or,
            where `interleaved`, even rows are gate and odd rows up.
        b_gate_up: [E, 2I] of x's dtype, its columns in the order of w_gate_up's rows.

    The other arguments, the result and the errors are those of `fused_experts`.
    """
    keywords: dict[str, Any] = {"activation": activation, "b_down": b_down, "out": out, "workspace": workspace}
    if dlpack.is_foreign(x):
        arrays = (x, w_gate_up, w_down, topk_ids, topk_weights)
        keywords |= {"interleaved": interleaved, "b_gate_up": b_gate_up}
        return dlpack.through_torch(fused_experts_gate_up, *arrays, **keywords)
    checks.check_gate_up(x, w_gate_up, b_gate_up)
    if interleaved:
        w_gate, w_up = w_gate_up[:, 0::2], w_gate_up[:, 1::2]
    else:
        w_gate, w_up = w_gate_up.chunk(2, dim=1)
    if b_gate_up is not None:
        b_gate, b_up = (b_gate_up[:, 0::2], b_gate_up[:, 1::2]) if interleaved else b_gate_up.chunk(2, dim=1)
        keywords |= {"b_gate": b_gate, "b_up": b_up}
    return fused_experts(x, w_gate, w_up, w_down, topk_ids, topk_weights, **keywords)
