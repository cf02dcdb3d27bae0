"""The same bits every run: beside a busy stream, back to back, from a CUDA graph. And no host sync."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_moe
from cutlass_moe import fused_experts

H, I, E, K = 392, 200, 7, 2  # noqa: E741
RUNS = 50


@pytest.mark.parametrize("tokens", [1, 17, 515, 2050])
def test_bitwise_equal_beside_a_busy_stream(tokens: int, make_layer: Any) -> None:
    layer = make_layer(tokens, K, E, H, I, device="cuda")
    expected = fused_experts(*layer.arguments)
    busy = torch.cuda.Stream()
    matrix = torch.randn(4096, 4096, device="cuda").bfloat16()
    torch.cuda.synchronize()
    outs = []
    for _ in range(RUNS):
        with torch.cuda.stream(busy):
            matrix @ matrix
        outs.append(fused_experts(*layer.arguments, out=torch.full_like(layer.x, torch.nan)))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


def test_back_to_back_calls_do_not_disturb_each_other(make_layer: Any) -> None:
    """A call's workspace is the last one's memory; its first kernels may start before the last call ends."""
    layers = [
        make_layer(tokens, K, E, H, I, device="cuda", seed=seed, dtype=dtype)
        for seed, (tokens, dtype) in enumerate(
            [
                (1, torch.bfloat16),
                (300, torch.bfloat16),
                (2, torch.float16),
                (1, torch.bfloat16),
                (1000, torch.bfloat16),
            ]
        )
    ]
    expected = []
    for layer in layers:
        expected.append(fused_experts(*layer.arguments))
        torch.cuda.synchronize()
    outs = [[fused_experts(*layer.arguments) for layer in layers] for _ in range(RUNS)]
    torch.cuda.synchronize()
    for run in outs:
        assert all(torch.equal(out, right) for out, right in zip(run, expected, strict=True))


def test_chained_layers(make_layer: Any) -> None:
    """Each layer reads what the one before it wrote, with no other kernel in between."""
    layers = [make_layer(33, K, E, H, I, device="cuda", seed=seed) for seed in range(3)]

    def chain(synchronize: bool) -> Tensor:
        x = layers[0].x
        for layer in layers:
            x = fused_experts(x, *layer.arguments[1:])
            if synchronize:
                torch.cuda.synchronize()
        return x

    expected = chain(synchronize=True)
    assert expected.isfinite().all() and expected.any()
    outs = [chain(synchronize=False) for _ in range(RUNS)]
    assert all(torch.equal(out, expected) for out in outs)


def test_runs_on_the_current_stream(make_layer: Any) -> None:
    """The side stream waits about 50 ms before it writes x: a launch on any other stream would read zeros."""
    layer = make_layer(100, K, E, H, I, device="cuda")
    expected = fused_experts(*layer.arguments)
    x = torch.zeros_like(layer.x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.copy_(layer.x)
        out = fused_experts(x, *layer.arguments[1:])
    side.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("tokens", [1, 40, 515])
def test_graph_replay_follows_its_inputs(tokens: int, make_layer: Any) -> None:
    layer = make_layer(tokens, K, E, H, I, layout="interleaved", device="cuda")
    out = torch.full_like(layer.x, torch.nan)
    fused_experts(*layer.arguments)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new = fused_experts(*layer.arguments)
        fused_experts(*layer.arguments, out=out)
        plan = cutlass_moe.plan_routing(layer.ids, E, layer.weights)
        x_MH = cutlass_moe.permute(layer.x, plan)
        copies = cutlass_moe.combine(x_MH.new_ones(tokens * K, H), plan)
    routings = [
        lambda ids: ids,
        lambda ids: ids * 0 + E - 1,
        lambda ids: torch.where(ids < 3, -1, ids),
        lambda ids: ids * 0 - 1,
        lambda ids: ids.flip(0),
    ]
    for seed, routing in enumerate(routings):
        changed = make_layer(tokens, K, E, H, I, device="cuda", seed=seed + 1)
        layer.x.copy_(changed.x)
        layer.ids.copy_(routing(changed.ids))
        layer.weights.copy_(changed.weights)
        out.fill_(torch.nan)
        new.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = fused_experts(*layer.arguments)
        assert torch.equal(new, expected) and torch.equal(out, expected)
        kept = ((layer.ids >= 0) & (layer.ids < E)).sum(1, keepdim=True)
        assert torch.equal(copies, kept.expand(-1, H).bfloat16())


def test_graph_in_a_workspace_allocates_nothing(make_layer: Any) -> None:
    tokens = 515
    layer = make_layer(tokens, K, E, H, I, device="cuda")
    expected = fused_experts(*layer.arguments)
    size = cutlass_moe.workspace_size(tokens, K, H, I, E, torch.bfloat16)
    guarded = torch.full((size + 512,), 77, dtype=torch.uint8, device="cuda")
    out = torch.full_like(layer.x, torch.nan)
    keywords: Any = {"out": out, "workspace": guarded[256:-256]}
    fused_experts(*layer.arguments, **keywords)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        fused_experts(*layer.arguments, **keywords)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    assert (guarded[:256] == 77).all() and (guarded[-256:] == 77).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_with_dynamic_tokens(dtype: torch.dtype, make_layer: Any) -> None:
    weights: Any = make_layer(1, K, E, H, I, device="cuda", dtype=dtype).arguments[1:4]

    def block(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return fused_experts(*(2 * x, *weights, ids, routing)) + x

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for tokens in (4, 33, 700):
            layer = make_layer(tokens, K, E, H, I, device="cuda", dtype=dtype, seed=tokens)
            arguments = (layer.x, layer.ids, layer.weights)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(compiled(*arguments), block(*arguments), rtol=2 * eps, atol=2 * eps)


def test_autocast_changes_nothing(make_layer: Any) -> None:
    layer = make_layer(33, K, E, H, I, device="cuda")
    expected = fused_experts(*layer.arguments)
    with torch.autocast("cuda", dtype=torch.float16):
        actual = fused_experts(*layer.arguments)
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected)


def test_never_waits_for_the_device(make_layer: Any) -> None:
    layer = make_layer(100, K, E, H, I, device="cuda")
    x, w_gate, w_up, w_down, ids, weights = layer.arguments
    x_leading, ids_leading, weights_leading = (t.unflatten(0, (4, 25)) for t in (x, ids, weights))
    out = torch.empty_like(layer.x)

    def calls() -> None:
        fused_experts(*layer.arguments, out=out)
        fused_experts(x_leading, w_gate, w_up, w_down, ids_leading, weights_leading)
        plan = cutlass_moe.plan_routing(ids, E, weights)
        x_MH = cutlass_moe.permute(x, plan)
        cutlass_moe.grouped_gemm(x_MH, w_gate, plan.expert_offsets_E1)
        cutlass_moe.combine(x_MH, plan)

    calls()  # loads the kernels
    torch.cuda.synchronize()
    finished = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        calls()
        finished.record()
        assert not finished.query(), "a call returned only after the device was done"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def test_threads(make_layer: Any) -> None:
    """Two host threads, a stream each."""
    layers = [make_layer(64, K, E, H, I, device="cuda", seed=seed) for seed in range(2)]
    expected = [fused_experts(*layer.arguments) for layer in layers]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results[number] = [fused_experts(*layers[number].arguments) for _ in range(RUNS)]
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outs, right in zip(results, expected, strict=True):
        assert len(outs) == RUNS and all(torch.equal(out, right) for out in outs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current(make_layer: Any) -> None:
    layer = make_layer(50, K, E, H, I, device="cuda:0")
    expected = fused_experts(*layer.arguments)
    with torch.cuda.device(0):
        actual = fused_experts(*(t.to("cuda:1") for t in layer.arguments))
    assert actual.device.index == 1 and torch.equal(actual.cpu(), expected.cpu())


USE_ONE_DEVICE = """
import ctypes, torch
from cutlass_moe import fused_experts
weights = [torch.zeros(2, 64, 64, dtype=torch.bfloat16, device="cuda:0") for _ in range(3)]
ids, routing = torch.zeros(4, 1, dtype=torch.int64, device="cuda:0"), torch.ones(4, 1, device="cuda:0")
fused_experts(torch.zeros(4, 64, dtype=torch.bfloat16, device="cuda:0"), *weights, ids, routing)
torch.cuda.synchronize()
flags, active = ctypes.c_uint(), ctypes.c_int()
assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(1, ctypes.byref(flags), ctypes.byref(active)) == 0
print("active" if active.value else "inactive")
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_no_context_on_a_device_that_is_not_used() -> None:
    """A context takes hundreds of megabytes, and every rank of a node would take one on every GPU."""
    done = subprocess.run([sys.executable, "-c", USE_ONE_DEVICE], capture_output=True, text=True, check=True)
    assert done.stdout == "inactive\n"
