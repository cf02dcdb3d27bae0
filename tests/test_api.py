"""The public functions on the CPU: steps, layouts, torch.library, torch.compile."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cutlass_moe
from cutlass_moe import checks
from cutlass_moe.workspace import workspace_size
from epilogues import RoutingScale, SiluGate

T, K, E, H, I = 11, 3, 5, 32, 24  # noqa: E741


def with_leading_dimensions(tensors: tuple[Tensor, ...], *leading: int) -> tuple[Tensor, ...]:
    """x, ids and weights of a layer's arguments with the tokens' dimension split."""
    x, w_gate, w_up, w_down, ids, weights = tensors
    split = [t.reshape(*leading, t.shape[-1]) for t in (x, ids, weights)]
    return (split[0], w_gate, w_up, w_down, split[1], split[2])


@given(
    ids=st.integers(1, 4).flatmap(
        lambda k: st.lists(st.lists(st.integers(-2, E + 1), min_size=k, max_size=k), max_size=12)
    ),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_plan_is_a_stable_sort(ids: list[list[int]], id_dtype: torch.dtype) -> None:
    topk_ids = torch.tensor(ids, dtype=id_dtype).view(len(ids), len(ids[0]) if ids else 2)
    weights = torch.arange(topk_ids.numel(), dtype=torch.float32).view_as(topk_ids)
    plan = cutlass_moe.plan_routing(topk_ids, E, weights)
    kept = [slot for slot, e in enumerate(topk_ids.flatten().tolist()) if 0 <= e < E]
    order = sorted(kept, key=lambda slot: int(topk_ids.flatten()[slot]))
    counts = [sum(int(topk_ids.flatten()[slot]) == e for slot in kept) for e in range(E)]
    assert plan.expert_offsets_E1.tolist() == [sum(counts[:e]) for e in range(E + 1)]
    assert plan.row_slot_M[: len(kept)].tolist() == order
    assert plan.row_token_M[: len(kept)].tolist() == [slot // topk_ids.shape[1] for slot in order]
    assert plan.row_weight_M is not None and plan.row_weight_M[: len(kept)].tolist() == order
    rows = {slot: row for row, slot in enumerate(order)}
    assert plan.slot_row_TK.flatten().tolist() == [rows.get(slot, -1) for slot in range(topk_ids.numel())]
    assert plan.slot_row_TK.shape == topk_ids.shape
    assert {t.dtype for t in plan[:4] if isinstance(t, Tensor)} == {torch.int32}


def test_plan_flattens_leading_dimensions_and_needs_no_weights(make_layer: Any) -> None:
    ids = make_layer(12, K, E, H, I).ids
    plan = cutlass_moe.plan_routing(ids.view(3, 2, 2, K), E)
    assert plan.row_weight_M is None and plan.num_experts == E and plan.slot_row_TK.shape == (12, K)
    assert torch.equal(plan.row_slot_M.long(), torch.argsort(ids.flatten(), stable=True))


def test_steps_make_the_layer(make_layer: Any) -> None:
    layer = make_layer(T, K, E, H, I)
    layer.ids[2, 1] = -1
    plan = cutlass_moe.plan_routing(layer.ids, E, layer.weights)
    assert plan.row_weight_M is not None
    h_MI = cutlass_moe.grouped_gemm(
        cutlass_moe.permute(layer.x, plan),
        (layer.w_gate, layer.w_up),
        plan.expert_offsets_E1,
        epilogue=SiluGate(),
    )
    y_MH = cutlass_moe.grouped_gemm(
        h_MI,
        layer.w_down,
        plan.expert_offsets_E1,
        epilogue=RoutingScale(),
        tensors={"row_weight": plan.row_weight_M},
        row_index=plan.row_slot_M,
        out=torch.full((T * K, H), torch.nan, dtype=torch.bfloat16),
    )
    expected = cutlass_moe.fused_experts(*layer.arguments)
    assert torch.equal(cutlass_moe.combine(y_MH, plan), expected)
    out = torch.full((T, 2 * H), torch.nan, dtype=torch.bfloat16)
    assert cutlass_moe.combine(y_MH, plan.slot_row_TK, out=out[:, :H]).data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :H], expected) and out[:, H:].isnan().all()


def test_grouped_gemm_writes_only_rows_that_experts_have() -> None:
    a_MK, b_ENK = torch.randn(9, 16).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    out = torch.full((9, 8), torch.nan, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    assert cutlass_moe.grouped_gemm(a_MK, b_ENK, offsets, out=out) is out
    torch.testing.assert_close(out[:2], a_MK[:2] @ b_ENK[0].T)
    torch.testing.assert_close(out[2:6], a_MK[2:6] @ b_ENK[2].T)
    assert out[6:].isnan().all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_weight_gives_the_bits_of_separate_weights(interleaved: bool, make_layer: Any) -> None:
    layer = make_layer(T, K, E, H, I, layout="interleaved" if interleaved else "concatenated")
    x, w_gate, w_up, w_down, ids, weights = layer.arguments
    actual = cutlass_moe.fused_experts_gate_up(x, layer.w_gate_up, w_down, ids, weights, interleaved=interleaved)
    expected = cutlass_moe.fused_experts(x, w_gate.contiguous(), w_up.contiguous(), w_down, ids, weights)
    assert torch.equal(actual, expected)


def test_leading_dimensions(make_layer: Any) -> None:
    layer = make_layer(12, K, E, H, I)
    expected = cutlass_moe.fused_experts(*layer.arguments)
    leading = with_leading_dimensions(layer.arguments, 2, 3, 2)
    assert torch.equal(cutlass_moe.fused_experts(*leading), expected.view(2, 3, 2, H))
    out = torch.full((2, 3, 2, H), torch.nan, dtype=torch.bfloat16)
    assert cutlass_moe.fused_experts(*leading, out=out) is out
    assert torch.equal(out, expected.view(2, 3, 2, H))
    assert cutlass_moe.fused_experts(*with_leading_dimensions(make_layer(0, K, E, H, I).arguments, 3, 0)).shape == (
        3,
        0,
        H,
    )


def test_strided_arguments(make_layer: Any) -> None:
    """x and out in wider rows, ids and weights in a wider top-k, and x whose flattening takes a copy."""
    layer = make_layer(12, K, E, H, I)
    x, w_gate, w_up, w_down, ids, weights = layer.arguments
    expected = cutlass_moe.fused_experts(*layer.arguments)
    x_wide = torch.full((12, H + 8), torch.nan, dtype=torch.bfloat16)
    x_wide[:, :H] = x
    out_wide = torch.full((12, H + 16), torch.nan, dtype=torch.bfloat16)
    ids_wide, weights_wide = torch.full((12, 2 * K), -7), torch.full((12, 2 * K), torch.nan)
    ids_wide[:, ::2], weights_wide[:, ::2] = ids, weights
    weights_of_layer = (w_gate, w_up, w_down)
    cutlass_moe.fused_experts(
        x_wide[:, :H], *weights_of_layer, ids_wide[:, ::2], weights_wide[:, ::2], out=out_wide[:, :H]
    )
    assert torch.equal(out_wide[:, :H], expected) and out_wide[:, H:].isnan().all()
    x_transposed = x.view(3, 4, H).transpose(0, 1)
    transposed = [t.view(3, 4, K).transpose(0, 1) for t in (ids, weights)]
    actual = cutlass_moe.fused_experts(x_transposed, *weights_of_layer, *transposed)
    assert torch.equal(actual, expected.view(3, 4, H).transpose(0, 1))


def test_dropped_slots_leak_no_nan(make_layer: Any) -> None:
    layer = make_layer(T, K, E, H, I)
    layer.ids[4] = torch.tensor([-1, E, 10**10])
    layer.x[4] = torch.nan
    layer.weights[4] = torch.nan
    layer.ids[5, 0], layer.weights[5, 0] = -1, torch.inf
    layer.w_gate[3], layer.w_down[3] = torch.nan, torch.nan
    layer.ids[layer.ids == 3] = 2
    out = cutlass_moe.fused_experts(*layer.arguments)
    assert out.isfinite().all() and not out[4].any()
    plan = cutlass_moe.plan_routing(layer.ids, E)
    y_MH = torch.ones(T * K, H, dtype=torch.bfloat16)
    y_MH[4 * K : 5 * K] = torch.nan
    assert not cutlass_moe.combine(y_MH, plan)[4].any()


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0), (0, 0)])
def test_nothing_to_do(tokens: int, top_k: int, make_layer: Any) -> None:
    layer = make_layer(tokens, 1, E, H, I)
    empty = torch.zeros(tokens, top_k)
    arguments = (layer.x, layer.w_gate, layer.w_up, layer.w_down, empty.int(), empty)
    out = cutlass_moe.fused_experts(*arguments)
    assert out.shape == (tokens, H) and not out.any()
    plan = cutlass_moe.plan_routing(empty.int(), E, empty)
    assert plan.expert_offsets_E1.tolist() == [0] * (E + 1)
    x_MH = cutlass_moe.permute(layer.x, plan)
    assert x_MH.shape == (0, H)
    assert cutlass_moe.grouped_gemm(x_MH, layer.w_gate, plan.expert_offsets_E1).shape == (0, I)
    assert torch.equal(cutlass_moe.combine(x_MH, plan), out)


def test_repeats_bitwise(make_layer: Any) -> None:
    layer = make_layer(T, K, E, H, I)
    expected = cutlass_moe.fused_experts(*layer.arguments)
    assert all(torch.equal(cutlass_moe.fused_experts(*layer.arguments), expected) for _ in range(5))


@pytest.mark.parametrize("layout", ["separate", "interleaved"])
def test_operators_pass_opcheck(layout: str, make_layer: Any) -> None:
    layer = make_layer(T, K, E, H, I, layout=layout)
    arguments = (*layer.arguments, "silu")
    operators = torch.ops.cutlass_moe
    torch.library.opcheck(operators.fused_experts.default, arguments)
    torch.library.opcheck(operators.fused_experts_out.default, arguments, {"out": torch.empty_like(layer.x)})
    workspace = torch.zeros(workspace_size(T, K, H, I, E, torch.bfloat16), dtype=torch.uint8)
    keywords = {"out": torch.empty_like(layer.x), "workspace": workspace}
    torch.library.opcheck(operators.fused_experts_out.default, arguments, keywords)
    torch.library.opcheck(operators.plan_routing.default, (layer.ids, layer.weights, E))
    torch.library.opcheck(operators.plan_routing.default, (layer.ids, None, E))
    plan = cutlass_moe.plan_routing(layer.ids, E, layer.weights)
    torch.library.opcheck(operators.permute.default, (layer.x, plan.slot_row_TK))
    y_MH = torch.randn(T * K, H).bfloat16()
    torch.library.opcheck(operators.combine.default, (y_MH, plan.slot_row_TK))
    torch.library.opcheck(operators.combine_out.default, (y_MH, plan.slot_row_TK), {"out": torch.empty_like(layer.x)})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_as_one_graph_with_dynamic_tokens(
    backend: str, make_layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(4, K, E, H, I, layout="interleaved")
    graphs, distances = [], []

    def block(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        y = cutlass_moe.fused_experts_gate_up(2 * x, layer.w_gate_up, layer.w_down, ids, weights, interleaved=True)
        cutlass_moe.fused_experts(y, layer.w_gate, layer.w_up, layer.w_down, ids, weights, out=out)
        plan = cutlass_moe.plan_routing(ids, E, weights)
        return y, cutlass_moe.combine(cutlass_moe.permute(x, plan), plan)

    def counting_backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def record_distance(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, out: Tensor | None) -> None:
        distances.append(w_up.data_ptr() - w_gate.data_ptr())

    monkeypatch.setattr(checks, "check_experts_memory", record_distance)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counting_backend)
    for tokens in (4, 7, 13):
        inputs = make_layer(tokens, K, E, H, I, seed=tokens)
        outs = [torch.full_like(inputs.x, torch.nan) for _ in range(2)]
        actual = compiled(inputs.x, inputs.ids, inputs.weights, outs[0])
        expected = block(inputs.x, inputs.ids, inputs.weights, outs[1])
        for a, b in zip((*actual, outs[0]), (*expected, outs[1]), strict=True):
            if backend == "inductor":  # its code rounds elsewhere: within one unit in the last place of bf16
                torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)
            else:
                assert torch.equal(a, b)
    assert len(graphs) == 1
    assert set(distances) == {2 * H}, "the compiler copied the views of the fused weight"


def test_checks_run_while_tracing(make_layer: Any) -> None:
    layer = make_layer(4, K, E, H, I)
    compiled = torch.compile(cutlass_moe.fused_experts, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="w_down must have shape"):
        compiled(layer.x, layer.w_gate, layer.w_up, layer.w_gate, layer.ids, layer.weights)


def test_grouped_gemm_under_compile_is_a_graph_break(make_layer: Any) -> None:
    layer = make_layer(T, K, E, H, I)
    plan = cutlass_moe.plan_routing(layer.ids, E)
    x_MH = cutlass_moe.permute(layer.x, plan)

    def block(a: Tensor) -> Tensor:
        return 2 * cutlass_moe.grouped_gemm(a + 1, layer.w_gate, plan.expert_offsets_E1)

    torch._dynamo.reset()
    kept = int(plan.expert_offsets_E1[-1])
    assert torch.equal(torch.compile(block, backend="eager")(x_MH)[:kept], block(x_MH)[:kept])


def test_inference_mode_and_autocast_change_nothing(make_layer: Any) -> None:
    layer = make_layer(T, K, E, H, I)
    expected = cutlass_moe.fused_experts(*layer.arguments)
    with torch.inference_mode():
        assert torch.equal(cutlass_moe.fused_experts(*layer.arguments), expected)
    with torch.autocast("cpu", dtype=torch.float16):
        actual = cutlass_moe.fused_experts(*layer.arguments)
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected)


def test_workspace_of_the_public_functions(make_layer: Any) -> None:
    layer = make_layer(T, K, E, H, I, layout="interleaved")
    x = layer.x
    size = workspace_size(T, K, H, I, E, torch.bfloat16)
    assert size > 2 * T * K * (H + I) and size % 256 == 0
    assert workspace_size(T - 1, K, H, I, E, torch.bfloat16) <= size
    workspace = torch.zeros(size, dtype=torch.uint8)
    expected = cutlass_moe.fused_experts(*layer.arguments)
    assert torch.equal(cutlass_moe.fused_experts(*layer.arguments, workspace=workspace), expected)
    gate_up = (x, layer.w_gate_up, layer.w_down, layer.ids, layer.weights)
    fused = cutlass_moe.fused_experts_gate_up(*gate_up, interleaved=True, workspace=workspace)
    assert torch.equal(fused, expected)
    out = torch.full_like(x, torch.nan)
    assert cutlass_moe.fused_experts(*layer.arguments, out=out, workspace=workspace) is out
    assert torch.equal(out, expected)
    compiled = torch.compile(cutlass_moe.fused_experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*layer.arguments, workspace=workspace), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w, x: w[:-1], ValueError, "workspace must have at least workspace_size"),
        (lambda w, x: torch.zeros(len(w) + 1, dtype=torch.uint8)[1:], ValueError, "workspace must start at a multiple"),
        (lambda w, x: w.view(torch.int32), TypeError, r"workspace must have dtype torch\.uint8"),
        (lambda w, x: w.view(-1, 2), ValueError, "workspace must have 1 dimensions"),
        (lambda w, x: torch.zeros(2 * len(w), dtype=torch.uint8)[::2], ValueError, "workspace must be contiguous"),
        (lambda w, x: w.tolist(), TypeError, "workspace must be a torch.Tensor"),
        (lambda w, x: x.view(-1).view(torch.uint8), ValueError, "workspace must"),
    ],
)
def test_wrong_workspace(change: Any, error: type[Exception], message: str, make_layer: Any) -> None:
    layer = make_layer(T, K, E, H, I)
    workspace = torch.zeros(workspace_size(T, K, H, I, E, torch.bfloat16), dtype=torch.uint8)
    with pytest.raises(error, match=message):
        cutlass_moe.fused_experts(*layer.arguments, workspace=change(workspace, layer.x))


def test_import_is_light() -> None:
    """Neither the DSL, TVM-FFI nor torch's compiler come with it, nor a CUDA context; at most 0.2 s beyond torch."""
    code = """
import sys, time, torch
start = time.process_time()
import cutlass_moe
print(time.process_time() - start)
heavy = {"cutlass", "tvm_ffi", "torch._dynamo", "rich"} & set(sys.modules)
assert not heavy, heavy
assert not torch.cuda.is_initialized()
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.2
