"""`python -m perf.host`: host microseconds of an eager `fused_experts` call, from the call to its return, in a loop.

The layer is so small that the device is done before the host is: calls never wait for a full queue.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import cutlass_moe

T, K, E, H, I = 4, 2, 8, 256, 128  # noqa: E741
CALLS, ROUNDS = 200, 50


def host_us(call: Callable[[], object]) -> float:
    """Median over the rounds of a call's mean time."""
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append(1e6 * (time.perf_counter() - start) / CALLS)
    return statistics.median(rounds)


def main() -> None:
    with torch.device("cuda"):
        x = torch.randn(T, H).bfloat16()
        w_gate, w_up = (torch.randn(E, I, H).bfloat16() for _ in range(2))
        w_down = torch.randn(E, H, I).bfloat16()
        b_gate, b_up, b_down = (torch.randn(E, columns).bfloat16() for columns in (I, I, H))
        topk_weights, topk_ids = torch.rand(T, E).topk(K)
        out = torch.empty_like(x)
        workspace = torch.empty(cutlass_moe.workspace_size(T, K, H, I, E, x.dtype), dtype=torch.uint8)
    arguments = (x, w_gate, w_up, w_down, topk_ids, topk_weights)
    calls: dict[str, Callable[[], object]] = {
        "fused_experts": lambda: cutlass_moe.fused_experts(*arguments),
        "with out and workspace": lambda: cutlass_moe.fused_experts(*arguments, out=out, workspace=workspace),
        "with biases": lambda: cutlass_moe.fused_experts(
            *arguments, activation="clamped_swiglu", b_gate=b_gate, b_up=b_up, b_down=b_down
        ),
    }
    for name, call in calls.items():
        call()  # loads the kernels
        print(f"{name:24}{host_us(call):8.1f} us")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
