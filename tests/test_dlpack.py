"""The public functions on NumPy arrays, which go through DLPack on the CPU as CuPy's and JAX's do on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cutlass_moe
from epilogues import RoutingScale, SiluGate

T, K, E, H, I = 11, 3, 5, 32, 24  # noqa: E741


@pytest.fixture
def layer(make_layer: Any) -> Any:
    return make_layer(T, K, E, H, I, dtype=torch.float16, layout="interleaved")  # NumPy has no bfloat16


def arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.numpy() for tensor in tensors]


def test_layer_returns_the_callers_kind(layer: Any) -> None:
    expected = cutlass_moe.fused_experts(*layer.arguments)
    out: Any = cutlass_moe.fused_experts(*arrays(*layer.arguments))
    assert isinstance(out, np.ndarray) and out.dtype == np.float16
    assert np.array_equal(out, expected.numpy())
    x, _, _, w_down, ids, weights = arrays(*layer.arguments)
    fused: Any = cutlass_moe.fused_experts_gate_up(x, layer.w_gate_up.numpy(), w_down, ids, weights, interleaved=True)
    assert isinstance(fused, np.ndarray) and np.array_equal(fused, expected.numpy())


def test_layer_writes_to_the_callers_array(layer: Any) -> None:
    expected = cutlass_moe.fused_experts(*layer.arguments)
    wide: Any = np.full((T, H + 8), np.nan, dtype=np.float16)
    out = wide[:, :H]
    assert cutlass_moe.fused_experts(*arrays(*layer.arguments), out=out) is out
    assert np.array_equal(wide[:, :H], expected.numpy()) and np.isnan(wide[:, H:]).all()
    size = cutlass_moe.workspace_size(T, K, H, I, E, torch.float16)
    workspace: Any = np.zeros(size, dtype=np.uint8)
    assert np.array_equal(cutlass_moe.fused_experts(*arrays(*layer.arguments), workspace=workspace), expected.numpy())


def test_steps_take_and_return_arrays(layer: Any) -> None:
    x, w_gate, w_up, w_down, ids, weights = arrays(*layer.arguments)
    plan: Any = cutlass_moe.plan_routing(ids, E, weights)
    assert isinstance(plan, cutlass_moe.RoutingPlan) and plan.num_experts == E
    assert all(isinstance(table, np.ndarray) for table in plan[:5])
    x_MH: Any = cutlass_moe.permute(x, plan)
    h_MI: Any = cutlass_moe.grouped_gemm(x_MH, (w_gate, w_up), plan.expert_offsets_E1, epilogue=SiluGate())
    y_MH: Any = np.zeros((T * K, H), dtype=np.float16)
    returned = cutlass_moe.grouped_gemm(
        h_MI,
        w_down,
        plan.expert_offsets_E1,
        epilogue=RoutingScale(),
        tensors={"row_weight": plan.row_weight_M},
        row_index=plan.row_slot_M,
        out=y_MH,
    )
    assert returned is y_MH and isinstance(x_MH, np.ndarray) and isinstance(h_MI, np.ndarray)
    out: Any = cutlass_moe.combine(y_MH, plan)
    assert np.array_equal(out, cutlass_moe.combine(y_MH, plan.slot_row_TK))
    assert np.array_equal(out, cutlass_moe.fused_experts(*layer.arguments).numpy())
    assert cutlass_moe.plan_routing(ids, E).row_weight_M is None
    gate_up: Any = (w_gate, w_up)
    index: Any = plan.row_token_M
    gathered: Any = cutlass_moe.grouped_gemm(
        x, gate_up, plan.expert_offsets_E1, epilogue=SiluGate(), source_index=index
    )
    assert isinstance(gathered, np.ndarray) and np.array_equal(gathered, h_MI)
    with pytest.raises(TypeError, match=r"source_index must have dtype torch\.int32, got torch\.int64"):
        cutlass_moe.grouped_gemm(x, w_gate, plan.expert_offsets_E1, source_index=index.astype(np.int64))
    with pytest.raises(TypeError, match="source_index must be an array that DLPack can hand to torch, got ndarray"):
        cutlass_moe.grouped_gemm(x, w_gate, plan.expert_offsets_E1, source_index=index.astype(object))
    with pytest.raises(TypeError, match=r"source_index must be a torch\.Tensor, got ndarray"):
        cutlass_moe.grouped_gemm(layer.x, layer.w_gate, torch.zeros(E + 1).int(), source_index=index)


def test_wrong_arrays_are_named(layer: Any) -> None:
    values = arrays(*layer.arguments)
    with pytest.raises(TypeError, match="argument 0 must be an array that DLPack can hand to torch, got ndarray"):
        cutlass_moe.fused_experts(values[0].astype(object), *values[1:])
    with pytest.raises(ValueError, match="w_down must have shape"):
        cutlass_moe.fused_experts(*[*values[:3], values[1], *values[4:]])
    with pytest.raises(TypeError, match=r"w_gate must be a torch\.Tensor, got ndarray"):
        cutlass_moe.fused_experts(layer.x, *values[1:])
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
        cutlass_moe.fused_experts(layer.x.tolist(), *values[1:])


class NoWayBack:
    """An array of a library without `from_dlpack`: this module."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_library_that_takes_no_dlpack(layer: Any) -> None:
    x, *rest = arrays(*layer.arguments)
    with pytest.raises(TypeError, match="has no from_dlpack: pass torch tensors"):
        cutlass_moe.fused_experts(*[NoWayBack(x), *rest])
