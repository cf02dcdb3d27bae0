"""The fp32 truth against an independent loop over tokens, and the CPU operator against the fp32 truth."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cutlass_moe import fused_experts, fused_experts_gate_up, reference_experts

HIDDEN, INTERMEDIATE = 32, 24
LAYER_ERROR = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


class Routing(NamedTuple):
    experts: int
    ids: Tensor
    weights: Tensor
    seed: int


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Odd routings: T = 0, empty experts, duplicates, one expert for all, dropped ids, ids beyond int32."""
    experts, tokens, top_k = draw(st.integers(1, 6)), draw(st.integers(0, 9)), draw(st.integers(1, 4))
    id_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    one_id = st.integers(-2, experts + 1)
    if id_dtype == torch.int64:
        one_id |= st.integers(2**32, 2**32 + experts - 1)  # a valid id if it were cut to 32 bits
    if draw(st.booleans()):
        flat = [draw(one_id)] * (tokens * top_k)
    else:
        flat = draw(st.lists(one_id, min_size=tokens * top_k, max_size=tokens * top_k))
    seed = draw(st.integers(0, 2**16))
    weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(seed)) + 0.1
    weights = weights.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    return Routing(experts, torch.tensor(flat, dtype=id_dtype).view(tokens, top_k), weights, seed)


def token_loop(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The layer's formula in float64, one token and one slot at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if 0 <= expert < w_gate.shape[0]:
                gate = w_gate[expert].double() @ x[token].double()
                up = w_up[expert].double() @ x[token].double()
                h = gate / (1 + torch.exp(-gate)) * up
                out[token] += weights[token, slot].double() * (w_down[expert].double() @ h)
    return out


@given(routing=routings())
def test_reference_matches_loop_over_tokens(routing: Routing, make_layer: Any, relative_error: Any) -> None:
    layer = make_layer(len(routing.ids), 1, routing.experts, HIDDEN, INTERMEDIATE, seed=routing.seed)
    arguments = (layer.x, layer.w_gate, layer.w_up, layer.w_down, routing.ids, routing.weights)
    actual = reference_experts(*arguments)
    assert actual.dtype == torch.float32 and actual.shape == layer.x.shape
    assert relative_error(actual, token_loop(*arguments)) < 1e-6


@given(
    routing=routings(),
    layout=st.sampled_from(["separate", "concatenated", "interleaved"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    with_out=st.booleans(),
)
def test_operator_matches_reference(
    routing: Routing, layout: str, dtype: torch.dtype, with_out: bool, make_layer: Any, relative_error: Any
) -> None:
    layer = make_layer(
        len(routing.ids),
        1,
        routing.experts,
        HIDDEN,
        INTERMEDIATE,
        layout=layout,
        dtype=dtype,
        seed=routing.seed,
    )
    arguments = (layer.x, layer.w_gate, layer.w_up, layer.w_down, routing.ids, routing.weights)
    out = torch.full_like(layer.x, torch.nan) if with_out else None
    if layer.w_gate_up is None:
        actual = fused_experts(*arguments, out=out)
    else:
        actual = fused_experts_gate_up(
            layer.x, layer.w_gate_up, *arguments[3:], interleaved=layout == "interleaved", out=out
        )
    assert out is None or actual is out
    assert actual.dtype == dtype and actual.shape == layer.x.shape
    assert relative_error(actual, reference_experts(*arguments)) < LAYER_ERROR[dtype]


def test_roundings_are_where_the_kernels_have_them(make_layer: Any) -> None:
    """The gated product, each weighted row and the sum are rounded once each, and nothing else is."""
    layer = make_layer(5, 3, 2, HIDDEN, INTERMEDIATE)
    x, w_gate, w_up, w_down, ids, weights = layer.arguments
    expected = torch.zeros(5, HIDDEN)
    for token in range(5):
        for slot in range(3):
            expert = int(ids[token, slot])
            gate, up = w_gate[expert].float() @ x[token].float(), w_up[expert].float() @ x[token].float()
            h = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            expected[token] += (w_down[expert].float() @ h * weights[token, slot]).bfloat16().float()
    # The last bit of an fp32 sum can move a value over a rounding boundary: almost all elements are equal.
    equal = fused_experts(*layer.arguments) == expected.bfloat16()
    assert equal.float().mean() > 0.97


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reference_takes_any_floating_dtype(dtype: torch.dtype, make_layer: Any, relative_error: Any) -> None:
    layer = make_layer(4, 2, 3, HIDDEN, INTERMEDIATE)
    arguments = [t.to(dtype) if t.is_floating_point() else t for t in layer.arguments]
    assert relative_error(reference_experts(*arguments), reference_experts(*layer.arguments)) < 1e-6
