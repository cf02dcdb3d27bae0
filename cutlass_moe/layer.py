"""The layer on CUDA: which kernels a call takes, and the one function that launches them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_moe import checks
from cutlass_moe.activations import down_epilogue, gate_epilogue
from cutlass_moe.config import COUNTED_SLOTS, CombineSpec, GemmSpec, PermuteSpec, RouteSpec, route_chunks
from cutlass_moe.workspace import layout


class _Plan(NamedTuple):
    """What all calls of one shape have in common.

    Attributes:
        workspace_size: bytes.
        launch: the function of `aot/layer.c`.
        arguments: those that it takes after the tensors: the kernels, the buffers' places, and numbers.
    """

    workspace_size: int
    launch: Callable[..., None]
    arguments: tuple[Any, ...]


def launch_experts(
    x_TH: Tensor,
    w_gate_EIH: Tensor,
    w_up_EIH: Tensor,
    w_down_EHI: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    activation: str,
    out_TH: Tensor,
    workspace: Tensor | None,
    b_gate_EI: Tensor | None = None,
    b_up_EI: Tensor | None = None,
    b_down_EH: Tensor | None = None,
) -> None:
    """The layer on checked CUDA tensors, whose device is the current one. Python calls once for all kernels: a call,
    an allocation and a view cost the host microseconds each."""
    if topk_ids_TK.numel() == 0:
        out_TH.zero_()
        return
    plan = _plan(
        x_TH.dtype,
        topk_ids_TK.dtype,
        topk_weights_TK.dtype,
        topk_ids_TK.shape,
        w_gate_EIH.shape,
        activation,
        b_gate_EI is not None,
        b_down_EH is not None,
        x_TH.device,
    )
    if workspace is None:
        # Like x: half as dear as `torch.empty` with a dtype and a device. Only its address counts.
        workspace = x_TH.new_empty(plan.workspace_size // x_TH.itemsize)
    plan.launch(
        x_TH,
        topk_ids_TK,
        topk_weights_TK,
        w_gate_EIH,
        w_up_EIH,
        w_down_EHI,
        b_gate_EI,
        b_up_EI,
        b_down_EH,
        out_TH,
        workspace,
        *plan.arguments,
    )


@lru_cache(maxsize=4096)
def _plan(
    dtype: torch.dtype,
    id_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    tokens_top_k: tuple[int, int],
    experts_intermediate_hidden: tuple[int, int, int],
    activation: str,
    gate_biased: bool,
    down_biased: bool,
    device: torch.device,
) -> _Plan:
    # Imported on first launch: the CPU implementation needs neither TVM-FFI nor the kernel library.
    from tvm_ffi import Shape

    from cutlass_moe.aot.load import get_kernel, get_layer_launcher
    from cutlass_moe.heuristics import choose_gemm_config

    tokens, top_k = tokens_top_k
    experts, intermediate, hidden = experts_intermediate_hidden
    rows = tokens * top_k
    name, id_name, weight_name = (str(each).removeprefix("torch.") for each in (dtype, id_dtype, weight_dtype))
    gate_config = choose_gemm_config(rows, experts, 2 * intermediate, hidden, accumulators=2, gather=True)
    down_config = choose_gemm_config(rows, experts, hidden, intermediate, accumulators=1, gather=False)
    route = RouteSpec(id_name, weight_name)
    kernels = (
        get_kernel(route),
        None if gate_config.gather else get_kernel(PermuteSpec(name)),
        get_kernel(GemmSpec(name, gate_config, gate_epilogue(activation, gate_biased))),
        get_kernel(GemmSpec(name, down_config, down_epilogue(down_biased))),
        get_kernel(CombineSpec(name)),
    )
    offsets, size = layout(tokens, top_k, hidden, intermediate, experts, dtype)
    sm_count = checks.hopper_sm_count(device)
    arguments = (*kernels, Shape(offsets), route_chunks(rows), rows <= COUNTED_SLOTS, sm_count)
    return _Plan(size, get_layer_launcher(route), arguments)
