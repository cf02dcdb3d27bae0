"""Arithmetic of the roofline: the work of a layer, its speed of light, and the score of a time."""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT_BYTES = 2  # bf16 and fp16


@dataclass(frozen=True)
class Roofs:
    """What a device can do at most: TB/s read from memory, dense bf16 TFLOP/s."""

    read_TBps: float
    dense_TFLOPs: float


H200_DATASHEET = Roofs(read_TBps=4.8, dense_TFLOPs=989.5)


@dataclass(frozen=True)
class Work:
    """The least that one call of the layer must do."""

    flops: int
    bytes: int

    def sol_ms(self, roofs: Roofs) -> float:
        """Speed of light: the longer of arithmetic at the full rate and traffic at the full bandwidth."""
        return max(self.flops / (roofs.dense_TFLOPs * 1e9), self.bytes / (roofs.read_TBps * 1e9))

    def tflops(self, ms: float) -> float:
        return self.flops / (ms * 1e9)

    def tbps(self, ms: float) -> float:
        return self.bytes / (ms * 1e9)


def layer_work(*, tokens: int, top_k: int, hidden: int, intermediate: int, experts_hit: int) -> Work:
    """Work of the layer: three products of `[T*K, H]` by `[H, I]` size; the weights of every expert that is
    hit read once, x read once, the output written once."""
    return Work(
        flops=6 * tokens * top_k * hidden * intermediate,
        bytes=ELEMENT_BYTES * (3 * experts_hit * hidden * intermediate + 2 * tokens * hidden),
    )


def step_works(
    *,
    tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    experts: int,
    experts_hit: int,
    weight_bytes: int,
    gathers: bool,
) -> dict[str, Work]:
    """Work of each public step by itself: its inputs read once, its outputs written once. They add up to more
    bytes than `layer_work`, whose intermediates need not touch memory.

    Args:
        weight_bytes: of one routing weight; ids are int64.
        gathers: gemm1 takes its rows from x, by an index, and there is no permute.
    """
    rows = tokens * top_k
    x_rows, h_rows = rows * hidden * ELEMENT_BYTES, rows * intermediate * ELEMENT_BYTES
    x_bytes = tokens * hidden * ELEMENT_BYTES
    expert = hidden * intermediate * ELEMENT_BYTES
    product = 2 * rows * hidden * intermediate
    table = 4 * rows  # an int32 or fp32 for each row
    permute = {} if gathers else {"permute": Work(0, x_bytes + table + x_rows)}
    return {
        "route": Work(0, rows * (8 + weight_bytes) + 4 * table + 4 * (experts + 1)),
        **permute,
        "gemm1": Work(2 * product, 2 * experts_hit * expert + (x_bytes + table if gathers else x_rows) + h_rows),
        "gemm2": Work(product, experts_hit * expert + h_rows + 2 * table + x_rows),
        "combine": Work(2 * rows * hidden, x_rows + table + x_bytes),
    }


def sol_score(ms: float, sol_ms: float, baseline_ms: float) -> float | None:
    """`1 / (1 + (t - t_sol) / (t_base - t_sol))`: 1 at the speed of light, 0.5 at the baseline.

    None where it has no meaning: a baseline at or under the speed of light, or a time so far under it that
    the denominator is not positive.
    """
    room = baseline_ms - sol_ms
    if room <= 0 or ms - sol_ms + room <= 0:
        return None
    return 1 / (1 + (ms - sol_ms) / room)
