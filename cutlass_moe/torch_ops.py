"""Registers the operators `torch.ops.cutlass_moe.*` with torch.library: on CUDA, on the CPU, on fake tensors.

The public functions check their arguments and call these. There is no autograd kernel: inference only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from cutlass_moe import checks, reference
from cutlass_moe.combine import launch_combine
from cutlass_moe.layer import launch_experts
from cutlass_moe.permutation import launch_permute
from cutlass_moe.routing import launch_plan

Result = TypeVar("Result")
_LIBRARY = torch.library.Library("cutlass_moe", "DEF")

_EXPERTS_ARGUMENTS = (
    "Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor topk_ids, Tensor topk_weights, str activation, "
    "Tensor? b_gate=None, Tensor? b_up=None, Tensor? b_down=None"
)


def _register(
    name: str, signature: str, *, cuda: Callable[..., Any], cpu: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    # Exact strides: the public functions checked them while tracing, and gate and up are views of one tensor.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _LIBRARY.define(name + signature, tags=tags)
    _LIBRARY.impl(name, cuda, "CUDA")
    _LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"cutlass_moe::{name}", fake, lib=_LIBRARY)


def _on_device_of(tensor: Tensor, function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls the function with the tensor's CUDA device current. Switching costs more than asking which one is."""
    if tensor.device.index == torch.cuda.current_device():
        return function(*arguments)
    with torch.cuda.device(tensor.device):
        return function(*arguments)


def _fused_experts_cuda(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
) -> Tensor:
    checks.check_experts_memory(x, w_gate, w_up, w_down, None)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    arguments = (x, w_gate, w_up, w_down, topk_ids, topk_weights, activation, out, None, b_gate, b_up, b_down)
    _on_device_of(x, launch_experts, *arguments)
    return out


def _fused_experts_cpu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
) -> Tensor:
    checks.check_experts_memory(x, w_gate, w_up, w_down, None)
    return reference.experts(x, w_gate, w_up, w_down, topk_ids, topk_weights, activation, b_gate, b_up, b_down)


def _fused_experts_out_cuda(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    out: Tensor,
    workspace: Tensor | None = None,
) -> None:
    checks.check_experts_memory(x, w_gate, w_up, w_down, out)
    if workspace is not None:
        checks.check_workspace_memory(workspace, x, w_gate, topk_ids, out)
    arguments = (x, w_gate, w_up, w_down, topk_ids, topk_weights, activation, out, workspace, b_gate, b_up, b_down)
    _on_device_of(x, launch_experts, *arguments)


def _fused_experts_out_cpu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    out: Tensor,
    workspace: Tensor | None = None,
) -> None:
    checks.check_experts_memory(x, w_gate, w_up, w_down, out)
    if workspace is not None:
        checks.check_workspace_memory(workspace, x, w_gate, topk_ids, out)
    out.copy_(reference.experts(x, w_gate, w_up, w_down, topk_ids, topk_weights, activation, b_gate, b_up, b_down))


def _plan_routing_cuda(
    topk_ids: Tensor, topk_weights: Tensor | None, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    checks.hopper_sm_count(topk_ids.device)
    if topk_ids.numel() == 0:
        tables = _plan_routing_fake(topk_ids, topk_weights, num_experts)
        tables[0].zero_()  # expert_offsets_E1
        return tables
    return _with_row_weight(*_on_device_of(topk_ids, launch_plan, topk_ids, topk_weights, num_experts))


def _plan_routing_cpu(
    topk_ids: Tensor, topk_weights: Tensor | None, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _with_row_weight(*reference.route(topk_ids, topk_weights, num_experts))


def _plan_routing_fake(
    topk_ids: Tensor, topk_weights: Tensor | None, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots = topk_ids.numel()
    return (
        topk_ids.new_empty(num_experts + 1, dtype=torch.int32),
        topk_ids.new_empty(slots, dtype=torch.int32),
        topk_ids.new_empty(slots, dtype=torch.int32),
        topk_ids.new_empty(topk_ids.shape, dtype=torch.int32),
        topk_ids.new_empty(0 if topk_weights is None else slots, dtype=torch.float32),
    )


def _with_row_weight(
    offsets_E1: Tensor, row_slot_M: Tensor, row_token_M: Tensor, slot_row_TK: Tensor, row_weight_M: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """An operator can't return None: no routing weights are an empty tensor."""
    if row_weight_M is None:
        row_weight_M = offsets_E1.new_empty(0, dtype=torch.float32)
    return offsets_E1, row_slot_M, row_token_M, slot_row_TK, row_weight_M


def _permute_cuda(x: Tensor, slot_row: Tensor) -> Tensor:
    checks.check_rows_memory("x", x, None)
    x_MH = _permute_fake(x, slot_row)
    if slot_row.numel() > 0:
        _on_device_of(x, launch_permute, x, slot_row, x_MH)
    return x_MH


def _permute_cpu(x: Tensor, slot_row: Tensor) -> Tensor:
    checks.check_rows_memory("x", x, None)
    return reference.permute(x, slot_row)


def _permute_fake(x: Tensor, slot_row: Tensor) -> Tensor:
    return x.new_empty(slot_row.numel(), x.shape[1])


def _combine_cuda(y: Tensor, slot_row: Tensor) -> Tensor:
    out = _combine_fake(y, slot_row)
    _combine_out_cuda(y, slot_row, out=out)
    return out


def _combine_cpu(y: Tensor, slot_row: Tensor) -> Tensor:
    checks.check_rows_memory("y", y, None)
    return reference.combine(y, slot_row)


def _combine_fake(y: Tensor, slot_row: Tensor) -> Tensor:
    return y.new_empty(slot_row.shape[0], y.shape[1])


def _combine_out_cuda(y: Tensor, slot_row: Tensor, *, out: Tensor) -> None:
    checks.check_rows_memory("y", y, out)
    if slot_row.numel() == 0:
        out.zero_()
        return
    _on_device_of(y, launch_combine, y, slot_row, out)


def _combine_out_cpu(y: Tensor, slot_row: Tensor, *, out: Tensor) -> None:
    checks.check_rows_memory("y", y, out)
    out.copy_(reference.combine(y, slot_row))


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """Fake implementation of an operator that only writes to `out`."""


_register(
    "fused_experts",
    f"({_EXPERTS_ARGUMENTS}) -> Tensor",
    cuda=_fused_experts_cuda,
    cpu=_fused_experts_cpu,
    fake=lambda x, *_: x.new_empty(x.shape),
)
_register(
    "fused_experts_out",
    f"({_EXPERTS_ARGUMENTS}, *, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()",
    cuda=_fused_experts_out_cuda,
    cpu=_fused_experts_out_cpu,
    fake=_nothing,
)
_register(
    "plan_routing",
    "(Tensor topk_ids, Tensor? topk_weights, int num_experts) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cuda=_plan_routing_cuda,
    cpu=_plan_routing_cpu,
    fake=_plan_routing_fake,
)
_register(
    "permute",
    "(Tensor x, Tensor slot_row) -> Tensor",
    cuda=_permute_cuda,
    cpu=_permute_cpu,
    fake=_permute_fake,
)
_register(
    "combine",
    "(Tensor y, Tensor slot_row) -> Tensor",
    cuda=_combine_cuda,
    cpu=_combine_cpu,
    fake=_combine_fake,
)
_register(
    "combine_out",
    "(Tensor y, Tensor slot_row, *, Tensor(a!) out) -> ()",
    cuda=_combine_out_cuda,
    cpu=_combine_out_cpu,
    fake=_nothing,
)
