"""Fixtures that the CPU and the GPU tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from torch import Tensor

settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("default")


@dataclass
class LayerInputs:
    """Arguments of one call, outputs of order 1. `w_gate_up` is None where gate and up are separate."""

    x: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    ids: Tensor
    weights: Tensor
    w_gate_up: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return (self.x, self.w_gate, self.w_up, self.w_down, self.ids, self.weights)


def _make_layer(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int,
    *,
    layout: str = "separate",
    dtype: torch.dtype = torch.bfloat16,
    id_dtype: torch.dtype = torch.int64,
    weight_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> LayerInputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=device)
        return values.mul_(scale).to(dtype)

    x = normal(tokens, hidden)
    w_gate_up = None
    if layout == "separate":
        w_gate = normal(experts, intermediate, hidden, scale=hidden**-0.5)
        w_up = normal(experts, intermediate, hidden, scale=hidden**-0.5)
    else:
        w_gate_up = normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
        if layout == "interleaved":
            w_gate, w_up = w_gate_up[:, 0::2], w_gate_up[:, 1::2]
        else:
            w_gate, w_up = w_gate_up[:, :intermediate], w_gate_up[:, intermediate:]
    w_down = normal(experts, hidden, intermediate, scale=2 * intermediate**-0.5)
    ids = torch.randint(experts, (tokens, top_k), generator=generator, device=device, dtype=id_dtype)
    weights = torch.rand(tokens, top_k, generator=generator, device=device) + 0.1
    weights = (weights / weights.sum(1, keepdim=True)).to(weight_dtype)
    return LayerInputs(x, w_gate, w_up, w_down, ids, weights, w_gate_up)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; the norm itself where zeros are expected."""
    norm = expected.double().norm().item()
    error = (actual.double() - expected.double()).norm().item()
    return error / norm if norm else error


@pytest.fixture(scope="session")
def make_layer() -> Callable[..., LayerInputs]:
    """`make_layer(tokens, top_k, experts, hidden, intermediate, layout=..., ...)`: random `LayerInputs`."""
    return _make_layer


@pytest.fixture(scope="session")
def relative_error() -> Callable[[Tensor, Tensor], float]:
    return _relative_error
