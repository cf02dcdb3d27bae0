"""The layer and its steps in plain torch: the CPU implementation of each operator, and the fp32 truth.

`route`, `permute`, `grouped_gemm`, `combine` and `experts` round where the kernels round (each GEMM's output
once, the sum once) and compute in fp32 in between. `reference_experts` rounds nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cutlass_moe.activations import activation_key, down_epilogue, gate_epilogue
from cutlass_moe.epilogue_arguments import expert_inputs
from epilogues import Epilogue, TorchOps
from epilogues.base import as_tuple, stored_planes


def reference_experts(
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
) -> Tensor:
    """The layer in fp32 from the given inputs, with no rounding in between: `[..., H]` float32.

    Takes the arguments of `fused_experts` on any device and of any floating dtype. Upcasts one expert's
    weights at a time. On CUDA it synchronises, and is fp32 only while `torch.backends.cuda.matmul.allow_tf32`
    is False (torch's default).
    """
    epilogue = gate_epilogue(activation_key(activation), False)
    hidden, top_k = x.shape[-1], topk_ids.shape[-1]
    x_TH = x.reshape(-1, hidden)
    tokens = x_TH.shape[0]
    ids_TK = topk_ids.reshape(tokens, top_k)
    weights_TK = topk_weights.reshape(tokens, top_k).float()
    y_TKH = torch.zeros(tokens, top_k, hidden, dtype=torch.float32, device=x.device)
    for expert in range(w_gate.shape[0]):
        token, slot = torch.nonzero(ids_TK == expert, as_tuple=True)
        if len(token) == 0:
            continue
        rows = x_TH[token]
        gate, up = _multiply(rows, w_gate[expert]), _multiply(rows, w_up[expert])
        if b_gate is not None and b_up is not None:
            gate, up = gate + b_gate[expert].float(), up + b_up[expert].float()
        (h,) = as_tuple(epilogue.math(TorchOps, gate, up))
        y = _multiply(h, w_down[expert])
        if b_down is not None:
            y = y + b_down[expert].float()
        y_TKH[token, slot] = y * weights_TK[token, slot, None]
    return y_TKH.sum(dim=1).view(x.shape)


def _multiply(a_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """`a @ weight.T` in fp32, also where the caller autocasts matrix products to less."""
    with torch.autocast(a_MK.device.type, enabled=False):
        return a_MK.float() @ weight_NK.float().T


def route(
    ids_TK: Tensor, weights_TK: Tensor | None, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Stable counting sort of the slots by expert id; ids outside [0, num_experts) drop their slot.

    Returns:
        `expert_offsets_E1` int32, `row_slot_M` int32, `row_token_M` int32, `slot_row_TK` int32 (-1 for a dropped slot)
        and, where weights are given, `row_weight_M` float32. Rows past the last kept one hold -1 and weight 0.
    """
    ids_M = ids_TK.reshape(-1)
    kept_M = (ids_M >= 0) & (ids_M < num_experts)
    expert_M = torch.where(kept_M, ids_M, num_experts).long()
    slot_M = torch.argsort(expert_M, stable=True)
    counts_E = torch.bincount(expert_M, minlength=num_experts + 1)[:num_experts]
    expert_offsets_E1 = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids_TK.device)
    expert_offsets_E1[1:] = counts_E.cumsum(0)
    rows = int(expert_offsets_E1[-1])
    row_slot_M = slot_M.to(torch.int32)
    row_token_M = row_slot_M // ids_TK.shape[1]
    row_slot_M[rows:] = -1
    row_token_M[rows:] = -1
    slot_row_M = torch.full_like(row_slot_M, -1)
    slot_row_M[slot_M[:rows]] = torch.arange(rows, dtype=torch.int32, device=ids_TK.device)
    row_weight_M = None
    if weights_TK is not None:
        row_weight_M = weights_TK.reshape(-1).float()[slot_M]
        row_weight_M[rows:] = 0
    return expert_offsets_E1, row_slot_M, row_token_M, slot_row_M.view(ids_TK.shape), row_weight_M


def permute(x_TH: Tensor, slot_row_TK: Tensor) -> Tensor:
    """`x_MH[slot_row[t, k]] = x[t]`; rows that no slot has are zero."""
    x_MH = x_TH.new_zeros(slot_row_TK.numel(), x_TH.shape[1])
    token, slot = torch.nonzero(slot_row_TK >= 0, as_tuple=True)
    x_MH[slot_row_TK[token, slot]] = x_TH[token]
    return x_MH


def grouped_gemm(
    a_MK: Tensor,
    weights: Sequence[Tensor],
    expert_offsets_E1: Tensor,
    epilogue: Epilogue,
    inputs: Mapping[str, Any],
    row_index_M: Tensor | None,
    out: Tensor,
    side_outputs: Sequence[Tensor] = (),
) -> None:
    """Each expert's rows times its weights in fp32, the epilogue's own formula, one rounding into `out` and each of
    `side_outputs`. `inputs` are the epilogue's tensors and scalars by name."""
    targets = (out, *side_outputs)
    for expert, (start, stop) in enumerate(pairwise(expert_offsets_E1.tolist())):
        if start == stop:
            continue
        accumulators = [_multiply(a_MK[start:stop], weight[expert]) for weight in weights]
        values = epilogue.math(TorchOps, *accumulators, **expert_inputs(epilogue, inputs, expert, start, stop))
        rows = slice(start, stop) if row_index_M is None else row_index_M[start:stop].long()
        for plane, value in zip(stored_planes(epilogue), as_tuple(values), strict=True):
            target = targets[plane.output]
            if target.dim() == 3:
                target = target[:, plane.index]
            target[rows] = value.to(target.dtype)
        for side, target in zip(epilogue.side_outputs, side_outputs, strict=True):
            if side.row_absmax:
                target[rows] = out[rows].float().abs().amax(1)


def combine(y_MH: Tensor, slot_row_TK: Tensor) -> Tensor:
    """Sum over each token's kept slots in slot order in fp32, one rounding. Rows of dropped slots are not
    read into it."""
    tokens, top_k = slot_row_TK.shape
    y_TKH = y_MH.view(tokens, top_k, y_MH.shape[1])
    out_TH = torch.zeros(tokens, y_MH.shape[1], dtype=torch.float32, device=y_MH.device)
    for slot in range(top_k):
        out_TH += torch.where(slot_row_TK[:, slot, None] >= 0, y_TKH[:, slot].float(), 0.0)
    return out_TH.to(y_MH.dtype)


def experts(
    x_TH: Tensor,
    w_gate_EIH: Tensor,
    w_up_EIH: Tensor,
    w_down_EHI: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    activation: str,
    b_gate_EI: Tensor | None = None,
    b_up_EI: Tensor | None = None,
    b_down_EH: Tensor | None = None,
) -> Tensor:
    """The layer from the steps above: the CPU implementation of `fused_experts`."""
    offsets_E1, row_slot_M, _, slot_row_TK, row_weight_M = route(topk_ids_TK, topk_weights_TK, w_gate_EIH.shape[0])
    assert row_weight_M is not None
    x_MH = permute(x_TH, slot_row_TK)
    h_MI = x_TH.new_empty(x_MH.shape[0], w_gate_EIH.shape[1])
    gate = gate_epilogue(activation, b_gate_EI is not None)
    biases = {"gate_bias": b_gate_EI, "up_bias": b_up_EI}
    grouped_gemm(x_MH, (w_gate_EIH, w_up_EIH), offsets_E1, gate, biases, None, h_MI)
    y_MH = torch.empty_like(x_MH)
    down = down_epilogue(b_down_EH is not None)
    inputs = {"bias": b_down_EH, "row_weight": row_weight_M}
    grouped_gemm(h_MI, (w_down_EHI,), offsets_E1, down, inputs, row_slot_M, y_MH)
    return combine(y_MH, slot_row_TK)
