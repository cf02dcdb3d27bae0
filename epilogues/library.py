"""The epilogues of the MoE layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from epilogues.base import Epilogue, EpilogueTensor


@dataclass(frozen=True)
class Identity(Epilogue):
    """`out = acc`."""

    def math(self, ops: Any, *accumulators: Any, **tensors: Any) -> Any:
        (accumulator,) = accumulators
        return accumulator


@dataclass(frozen=True)
class SiluGate(Epilogue):
    """`out = silu(gate) * up`, with `silu(g) = g / (1 + exp(-g))` (SwiGLU; Shazeer 2020, arXiv:2002.05202)."""

    accumulators: ClassVar[int] = 2

    def math(self, ops: Any, *accumulators: Any, **tensors: Any) -> Any:
        gate, up = accumulators
        return gate * ops.reciprocal(ops.exp(-gate) + 1.0) * up


@dataclass(frozen=True)
class RoutingScale(Epilogue):
    """`out[row_index[r]] = acc[r] * row_weight[r]`: the routing weight, and each row stored at its (token, slot)
    place."""

    tensors: ClassVar[tuple[EpilogueTensor, ...]] = (EpilogueTensor("row_weight"),)
    scatter: ClassVar[bool] = True

    def math(self, ops: Any, *accumulators: Any, **tensors: Any) -> Any:
        (accumulator,) = accumulators
        return accumulator * tensors["row_weight"]
