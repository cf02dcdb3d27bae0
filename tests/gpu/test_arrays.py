"""The public functions on CuPy and JAX arrays: the caller's kind comes back, in order with the caller's streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import cutlass_moe
from epilogues import RoutingScale, SiluGate

T, K, E, H, I = 257, 3, 7, 392, 200  # noqa: E741


@pytest.fixture
def layer(make_layer: Any) -> Any:
    return make_layer(T, K, E, H, I, dtype=torch.float16, device="cuda")


def test_cupy_on_its_current_stream(layer: Any) -> None:
    """The side stream waits about 50 ms before it writes x: a launch on any other stream would read zeros."""
    cupy = pytest.importorskip("cupy")
    expected = cupy.from_dlpack(cutlass_moe.fused_experts(*layer.arguments))
    torch.cuda.synchronize()
    arguments = [cupy.from_dlpack(tensor) for tensor in layer.arguments]
    assert isinstance(cutlass_moe.fused_experts(*arguments), cupy.ndarray)  # loads the kernels
    x = cupy.zeros_like(arguments[0])
    out = cupy.full_like(x, cupy.nan)
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
            torch.cuda._sleep(100_000_000)
        x[...] = arguments[0]
        new = cutlass_moe.fused_experts(x, *arguments[1:])
        assert cutlass_moe.fused_experts(x, *arguments[1:], out=out) is out
    side.synchronize()
    assert isinstance(new, cupy.ndarray) and bool((new == expected).all()) and bool((out == expected).all())


def test_cupy_steps(layer: Any) -> None:
    cupy = pytest.importorskip("cupy")
    x, w_gate, w_up, w_down, ids, weights = (cupy.from_dlpack(tensor) for tensor in layer.arguments)
    plan = cutlass_moe.plan_routing(ids, E, weights)
    h_MI = cutlass_moe.grouped_gemm(
        cutlass_moe.permute(x, plan), (w_gate, w_up), plan.expert_offsets_E1, epilogue=SiluGate()
    )
    y_MH = cutlass_moe.grouped_gemm(
        h_MI,
        w_down,
        plan.expert_offsets_E1,
        epilogue=RoutingScale(),
        tensors={"row_weight": plan.row_weight_M},
        row_index=plan.row_slot_M,
    )
    out = cutlass_moe.combine(y_MH, plan)
    cupy.cuda.get_current_stream().synchronize()
    assert isinstance(out, cupy.ndarray)
    assert torch.equal(from_dlpack(out), cutlass_moe.fused_experts(*layer.arguments))


def test_jax_is_ordered_both_ways(make_layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that JAX is still computing, and a result that JAX goes on with at once; bfloat16 as well."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("needs JAX on the GPU")
    layer = make_layer(T, K, E, H, I, device="cuda", id_dtype=torch.int32)
    expected: Tensor = cutlass_moe.fused_experts(*layer.arguments)
    torch.cuda.synchronize()
    x, *rest = (jax.dlpack.from_dlpack(tensor) for tensor in layer.arguments)
    busy = jax.numpy.ones((4096, 4096), dtype=jax.numpy.float32)

    @jax.jit
    def slowly(x: Any, matrix: Any) -> Any:
        """x, after a few milliseconds of products that come to zero."""
        for _ in range(20):
            matrix = matrix @ matrix * 0
        return x + matrix[0, 0].astype(x.dtype)

    slowly(x, busy).block_until_ready()
    for _ in range(20):
        out = cutlass_moe.fused_experts(slowly(x, busy), *rest)
        doubled = out + out
        assert isinstance(out, jax.Array)
        assert torch.equal(from_dlpack(doubled), 2 * expected)
    with pytest.raises(TypeError, match="cannot be written to"):
        cutlass_moe.fused_experts(x, *rest, out=x)
