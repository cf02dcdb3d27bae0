"""The whole layer against the fp32 reference."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_moe
from cutlass_moe import fused_experts, fused_experts_gate_up, reference_experts

H, I = 392, 200  # noqa: E741
DTYPES = [torch.bfloat16, torch.float16]
LAYOUTS = ["separate", "concatenated", "interleaved"]


def run(layer: Any, layout: str = "separate", out: Tensor | None = None) -> Tensor:
    """The layer, through the function for a fused weight where there is one."""
    if layer.w_gate_up is None:
        return fused_experts(*layer.arguments, out=out)
    interleaved = layout == "interleaved"
    return fused_experts_gate_up(layer.x, layer.w_gate_up, *layer.arguments[3:], interleaved=interleaved, out=out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [1, 3, 7, 16, 40])
def test_sizes(experts: int, dtype: torch.dtype, make_layer: Any, guarded: Any, assert_layer_close: Any) -> None:
    layouts, top_ks = cycle(LAYOUTS), cycle([1, 2, 3, 8])
    id_dtypes, weight_dtypes = cycle([torch.int64, torch.int32]), cycle([torch.float32, dtype])
    for seed, tokens in enumerate((1, 2, 5, 17, 63, 100, 257, 515)):
        layout = next(layouts)
        layer = make_layer(
            tokens,
            next(top_ks),
            experts,
            H,
            I,
            layout=layout,
            dtype=dtype,
            id_dtype=next(id_dtypes),
            weight_dtype=next(weight_dtypes),
            device="cuda",
            seed=seed,
        )
        out = guarded((tokens, H), dtype, H + 8)
        assert run(layer, layout, out.tensor) is out.tensor
        assert_layer_close(out.tensor, reference_experts(*layer.arguments))
        out.check()
        assert torch.equal(run(layer, layout), out.tensor)


@pytest.mark.parametrize(("tokens", "top_k"), [(512, 8), (4097, 1), (3, 400)])
def test_as_many_slots_as_are_counted_and_one_more(
    tokens: int, top_k: int, make_layer: Any, assert_layer_close: Any
) -> None:
    layer = make_layer(tokens, top_k, 401, 128, 64, device="cuda")
    assert_layer_close(run(layer, "separate"), reference_experts(*layer.arguments))


@pytest.mark.parametrize(("hidden", "intermediate"), [(8, 8), (64, 128), (1032, 264), (128, 1096), (2056, 72)])
def test_shapes(hidden: int, intermediate: int, make_layer: Any, assert_layer_close: Any) -> None:
    for layout in LAYOUTS:
        layer = make_layer(77, 2, 5, hidden, intermediate, layout=layout, device="cuda")
        assert_layer_close(run(layer, layout), reference_experts(*layer.arguments))


def test_odd_routings(make_layer: Any, assert_layer_close: Any) -> None:
    tokens, top_k, experts = 130, 4, 9
    layer = make_layer(tokens, top_k, experts, H, I, device="cuda")
    random = torch.randint(experts, (tokens, top_k), device="cuda")
    dropped = torch.where(torch.rand(tokens, top_k, device="cuda") < 0.3, -1, random)
    beyond = torch.where(torch.rand(tokens, top_k, device="cuda") < 0.3, random + 2**32, random)
    far = torch.where(torch.rand(tokens, top_k, device="cuda") < 0.3, 2**31, random)
    last = torch.full_like(random, experts - 1)
    routings = {
        "one expert has all": torch.full_like(random, 4),
        "the last has all": last,
        "duplicates within a token": random[:, :1].expand(-1, top_k),
        "two experts": random % 2 * (experts - 1),
        "dropped": dropped,
        "beyond E": torch.where(dropped < 0, experts, random),
        "beyond 32 bits": beyond,
        "2^31": far,
        "first slot dropped": torch.cat([torch.full_like(random[:, :1], -1), random[:, 1:]], 1),
        "one slot kept": torch.where(torch.arange(tokens * top_k, device="cuda").view_as(random) == 77, 3, -1),
        "all dropped": torch.full_like(random, -1),
    }
    for name, ids in routings.items():
        arguments = (*layer.arguments[:4], ids, layer.weights)
        out = torch.full_like(layer.x, torch.nan)
        fused_experts(*arguments, out=out)
        try:
            assert_layer_close(out, reference_experts(*arguments))
        except AssertionError as error:
            raise AssertionError(f"routing: {name}") from error


def test_nan_stays_in_its_token(make_layer: Any) -> None:
    layer = make_layer(100, 2, 6, H, I, device="cuda")
    layer.ids[layer.ids == 2] = 1
    expected = fused_experts(*layer.arguments)
    layer.w_gate[2], layer.w_up[2], layer.w_down[2] = torch.nan, torch.nan, torch.nan  # no token goes there
    layer.x[7] = torch.nan
    actual = fused_experts(*layer.arguments)
    others = torch.arange(100, device="cuda") != 7
    assert torch.equal(actual[others], expected[others]) and actual[7].isnan().all()
    layer.ids[7], layer.weights[7] = -1, torch.nan
    assert not fused_experts(*layer.arguments)[7].any()


def test_strided_and_leading_dimensions(make_layer: Any, guarded: Any, assert_layer_close: Any) -> None:
    layer = make_layer(60, 2, 5, H, I, device="cuda")
    x, w_gate, w_up, w_down, ids, weights = layer.arguments
    expected = fused_experts(*layer.arguments)
    assert_layer_close(expected, reference_experts(*layer.arguments))
    wide = torch.full((60, H + 40), torch.nan, device="cuda").bfloat16()
    wide[:, 8 : 8 + H] = x
    ids_wide = torch.full((60, 4), -5, device="cuda")
    weights_wide = torch.full((60, 4), torch.nan, device="cuda")
    ids_wide[:, 1:3], weights_wide[:, 1:3] = ids, weights
    out = guarded((3, 20, H), torch.bfloat16, H + 16)
    fused_experts(
        wide[:, 8 : 8 + H].unflatten(0, (3, 20)),
        w_gate,
        w_up,
        w_down,
        ids_wide[:, 1:3].unflatten(0, (3, 20)),
        weights_wide[:, 1:3].unflatten(0, (3, 20)),
        out=out.tensor,
    )
    assert torch.equal(out.tensor.flatten(0, 1), expected)
    out.check()
    x_transposed, ids_transposed, weights_transposed = (
        t.unflatten(0, (3, 20)).transpose(0, 1) for t in (x, ids, weights)
    )
    actual = fused_experts(x_transposed, w_gate, w_up, w_down, ids_transposed, weights_transposed)
    assert torch.equal(actual.transpose(0, 1).flatten(0, 1), expected)


def test_gate_and_up_anywhere_in_memory(make_layer: Any) -> None:
    """Separate allocations in both orders and strided weights give the bits of the contiguous ones."""
    layer = make_layer(100, 2, 5, H, I, device="cuda")
    x, w_gate, w_up, w_down, ids, weights = layer.arguments
    expected = fused_experts(*layer.arguments)
    size = w_gate.numel()
    arena = torch.full((4 * size,), torch.nan, device="cuda").bfloat16()
    low, high = arena[:size].view_as(w_gate), arena[2 * size : 3 * size].view_as(w_gate)
    for gate, up in ((low, high), (high, low)):
        gate.copy_(w_gate)
        up.copy_(w_up)
        assert torch.equal(fused_experts(x, gate, up, w_down, ids, weights), expected)
    gate, up, down = (
        torch.full((w.shape[0], w.shape[1] + 1, w.shape[2] + 8), torch.nan, device="cuda").bfloat16()
        for w in (w_gate, w_up, w_down)
    )
    gate[:, :I, :H], up[:, :I, :H], down[:, :H, :I] = w_gate, w_up, w_down
    assert torch.equal(fused_experts(x, gate[:, :I, :H], up[:, :I, :H], down[:, :H, :I], ids, weights), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_token_of_one_expert(layout: str, make_layer: Any, assert_layer_close: Any) -> None:
    """Every leading extent is 1, with odd strides there."""
    layer = make_layer(1, 1, 1, H, I, layout=layout, device="cuda")
    odd = [t.as_strided(t.shape, (5, *t.stride()[1:])) for t in layer.arguments]
    out = torch.full((4096,), torch.nan, device="cuda").bfloat16().as_strided((1, H), (3, 1))
    fused_experts(*odd, out=out)
    assert_layer_close(out, reference_experts(*layer.arguments))


def test_nothing_to_do(make_layer: Any) -> None:
    layer = make_layer(0, 2, 3, H, I, device="cuda")
    assert fused_experts(*layer.arguments).shape == (0, H)
    layer = make_layer(4, 1, 3, H, I, device="cuda")
    arguments = (*layer.arguments[:4], layer.ids[:, :0], layer.weights[:, :0])
    assert not fused_experts(*arguments, out=torch.full_like(layer.x, torch.nan)).any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_weights_of_more_than_2_31_elements(interleaved: bool, assert_layer_close: Any) -> None:
    experts, hidden, intermediate, tokens = 9, 8192, 16384, 17
    torch.manual_seed(0)
    w_gate_up = torch.empty(experts, 2 * intermediate, hidden, device="cuda", dtype=torch.bfloat16)
    w_gate_up.normal_(std=hidden**-0.5)
    w_down = torch.empty(experts, hidden, intermediate, device="cuda", dtype=torch.bfloat16)
    w_down.normal_(std=2 * intermediate**-0.5)
    assert w_gate_up.numel() > 2**31
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ids = torch.full((tokens, 1), experts - 1, device="cuda")
    weights = torch.rand(tokens, 1, device="cuda") + 0.5
    actual = fused_experts_gate_up(x, w_gate_up, w_down, ids, weights, interleaved=interleaved)
    last = w_gate_up[-1:]
    w_gate, w_up = (last[:, 0::2], last[:, 1::2]) if interleaved else last.chunk(2, dim=1)
    assert_layer_close(actual, reference_experts(x, w_gate, w_up, w_down[-1:], ids * 0, weights))


def test_rows_of_more_than_2_31_elements(make_layer: Any, assert_layer_close: Any) -> None:
    tokens, top_k, hidden = 140_000, 2, 8192
    _, w_gate, w_up, w_down, _, _ = make_layer(1, top_k, 4, hidden, 64, device="cuda").arguments
    x = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16).normal_()
    ids = torch.randint(4, (tokens, top_k), device="cuda")
    weights = torch.rand(tokens, top_k, device="cuda") + 0.1
    assert tokens * top_k * hidden > 2**31
    actual = fused_experts(x, w_gate, w_up, w_down, ids, weights)
    for part in (slice(0, 50), slice(tokens // 2, tokens // 2 + 50), slice(tokens - 50, tokens)):
        expected = reference_experts(x[part], w_gate, w_up, w_down, ids[part], weights[part])
        assert_layer_close(actual[part], expected)


def test_bad_arguments_fail_before_any_launch(make_layer: Any) -> None:
    layer = make_layer(5, 2, 3, H, I, device="cuda")
    x, w_gate, w_up, w_down, ids, weights = layer.arguments
    misaligned = torch.zeros(x.numel() + 8, device="cuda").bfloat16()[1 : x.numel() + 1].view_as(x)
    with pytest.raises(ValueError, match="x must start at a multiple of 16 bytes"):
        fused_experts(misaligned, w_gate, w_up, w_down, ids, weights)
    with pytest.raises(ValueError, match="topk_ids must be on cuda:0 like the other tensors, got cpu"):
        fused_experts(x, w_gate, w_up, w_down, ids.cpu(), weights)
    with pytest.raises(ValueError, match="w_down must be on cuda:0"):
        fused_experts(x, w_gate, w_up, w_down.cpu(), ids, weights)
    with pytest.raises(ValueError, match="out must not overlap x"):
        fused_experts(x, w_gate, w_up, w_down, ids, weights, out=x)


def test_torch_library(make_layer: Any) -> None:
    layer = make_layer(20, 2, 3, H, I, layout="interleaved", device="cuda")
    arguments = (*layer.arguments, "silu")
    torch.library.opcheck(torch.ops.cutlass_moe.fused_experts.default, arguments)
    torch.library.opcheck(
        torch.ops.cutlass_moe.fused_experts_out.default, arguments, {"out": torch.empty_like(layer.x)}
    )
    compiled = torch.compile(fused_experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (20, 33):
        layer = make_layer(tokens, 2, 3, H, I, layout="interleaved", device="cuda")
        assert torch.equal(compiled(*layer.arguments), fused_experts(*layer.arguments))


def test_agrees_with_the_cpu(make_layer: Any, relative_error: Any) -> None:
    """Same operator, same roundings: closer to each other than either is to fp32."""
    layer = make_layer(64, 2, 5, H, I, device="cuda")
    actual = cutlass_moe.fused_experts(*layer.arguments).cpu()
    expected = cutlass_moe.fused_experts(*(t.cpu() for t in layer.arguments))
    assert relative_error(actual, expected) < 1e-3
