"""The epilogues that come with the library, and parts for chains of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epilogues.base import DTYPES, INPUT, Epilogue, EpilogueError, EpilogueTensor, SideOutput


@dataclass(frozen=True)
class Identity(Epilogue):
    """`out = acc`."""

    def math(self, ops: Any, accumulator: Any) -> Any:
        return accumulator


@dataclass(frozen=True)
class Bias(Epilogue):
    """`out = acc + bias[e]`, a bias for each output column of an expert.

    Attributes:
        operands: 1; or 2, before a gate: then its tensors are `gate_<name>` and `up_<name>`.
        dtype: of the tensors; "input" is that of the GEMM's operands.
        tensor: name of the tensor.
    """

    operands: int = 1
    dtype: str = INPUT
    tensor: str = "bias"

    @property
    def accumulators(self) -> int:
        return self.operands

    @property
    def results(self) -> int:
        return self.operands

    @property
    def tensors(self) -> tuple[EpilogueTensor, ...]:
        prefixes = ("",) if self.operands == 1 else ("gate_", "up_")
        return tuple(EpilogueTensor(prefix + self.tensor, "expert_column", self.dtype) for prefix in prefixes)

    def math(self, ops: Any, *accumulators: Any, **biases: Any) -> Any:
        return tuple(value + biases[t.name] for value, t in zip(accumulators, self.tensors, strict=True))


@dataclass(frozen=True)
class SiluGate(Epilogue):
    """`out = silu(gate) * up`, with `silu(g) = g / (1 + exp(-g))` (SwiGLU; Shazeer 2020, arXiv:2002.05202)."""

    accumulators = 2

    def math(self, ops: Any, gate: Any, up: Any) -> Any:
        return gate * ops.reciprocal(ops.exp(-gate) + 1.0) * up


@dataclass(frozen=True)
class GeluGate(Epilogue):
    """`out = gelu(gate) * up`, with `gelu(g) = g * Phi(g)` (GEGLU; Shazeer 2020, arXiv:2002.05202).

    Attributes:
        approximate: "none": Phi from an erf that is within 1.5e-7; "tanh": the formula of `torch.nn.functional.gelu`,
            as a sigmoid, `(1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))`.
    """

    approximate: str = "none"

    accumulators = 2

    def __post_init__(self) -> None:
        if self.approximate not in ("none", "tanh"):
            raise EpilogueError(f"GeluGate: approximate must be 'none' or 'tanh', got {self.approximate!r}")

    def math(self, ops: Any, gate: Any, up: Any) -> Any:
        if self.approximate == "tanh":
            # -2 sqrt(2 / pi) (g + 0.044715 g^3)
            exponent = gate * (gate * gate * -0.07135481282 - 1.595769122)
            return gate * ops.reciprocal(ops.exp(exponent) + 1.0) * up
        return gate * normal_cdf(ops, gate) * up


def normal_cdf(ops: Any, x: Any) -> Any:
    """Phi(x): the tail `erfc(|x| / sqrt(2)) / 2` by Abramowitz & Stegun 7.1.26 (within 8e-8), with halved coefficients.

    From the tail rather than from erf, so that far left nothing cancels. In all as exact as torch's erf in fp32.
    """
    magnitude = ops.absolute(x)
    t = ops.reciprocal(magnitude * 0.23164189 + 1.0)  # 0.3275911 / sqrt(2)
    polynomial = t * (t * (t * (t * (t * 0.5307027145 - 0.7265760135) + 0.7107068705) - 0.142248368) + 0.127414796)
    tail = polynomial * ops.exp(x * x * -0.5)
    return ops.where(x < 0.0, tail, 1.0 - tail)


@dataclass(frozen=True)
class ClampedSwiglu(Epilogue):
    """`out = g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)` and `u` the up value clamped to +-limit.

    As gpt-oss has it (openai/gpt-oss, `swiglu`): alpha 1.702, limit 7.
    """

    alpha: float = 1.702
    limit: float = 7.0

    accumulators = 2

    def math(self, ops: Any, gate: Any, up: Any) -> Any:
        gate = ops.minimum(gate, self.limit)
        up = ops.maximum(ops.minimum(up, self.limit), -self.limit)
        return gate * ops.reciprocal(ops.exp(gate * -self.alpha) + 1.0) * (up + 1.0)


@dataclass(frozen=True)
class ReluSquared(Epilogue):
    """`out = max(acc, 0)^2` (So et al. 2021, Primer, arXiv:2109.08668), for experts without a gate."""

    def math(self, ops: Any, accumulator: Any) -> Any:
        positive = ops.maximum(accumulator, 0.0)
        return positive * positive


@dataclass(frozen=True)
class RoutingScale(Epilogue):
    """`out[row_index[r]] = acc[r] * row_weight[r]`: the routing weight, each row stored at its (token, slot) place."""

    tensors = (EpilogueTensor("row_weight"),)
    scatter = True

    def math(self, ops: Any, accumulator: Any, row_weight: Any) -> Any:
        return accumulator * row_weight


@dataclass(frozen=True)
class Scale(Epilogue):
    """`out = acc * scale`, a float passed at run time; `broadcast` makes it a tensor, one for each row or expert, say.

    Attributes:
        broadcast: None for the float, or that of the float32 tensor.
        tensor: name of the scalar or tensor.
    """

    broadcast: str | None = None
    tensor: str = "scale"

    @property
    def tensors(self) -> tuple[EpilogueTensor, ...]:
        return () if self.broadcast is None else (EpilogueTensor(self.tensor, self.broadcast),)

    @property
    def scalars(self) -> tuple[str, ...]:
        return (self.tensor,) if self.broadcast is None else ()

    def math(self, ops: Any, accumulator: Any, **inputs: Any) -> Any:
        return accumulator * inputs[self.tensor]


@dataclass(frozen=True)
class ResidualAdd(Epilogue):
    """`out = acc + residual`, a tensor of the output's shape, in the order of the input rows.

    Attributes:
        dtype: of the residual.
    """

    dtype: str = INPUT

    @property
    def tensors(self) -> tuple[EpilogueTensor, ...]:
        return (EpilogueTensor("residual", "full", self.dtype),)

    def math(self, ops: Any, accumulator: Any, residual: Any) -> Any:
        return accumulator + residual


@dataclass(frozen=True)
class StorePreActivation(Epilogue):
    """Hands its values on and stores them as the side output `pre_activation`, which a backward pass needs.

    For two operands that is [rows, 2, N], gate then up: flattened, [rows, 2N] as a fused gate-and-up weight gives it.

    Attributes:
        operands: values it takes: 2 before a gate.
        dtype: of the side output.
    """

    operands: int = 2
    dtype: str = INPUT

    @property
    def accumulators(self) -> int:
        return self.operands

    @property
    def results(self) -> int:
        return self.operands

    @property
    def side_outputs(self) -> tuple[SideOutput, ...]:
        return (SideOutput("pre_activation", self.operands, self.dtype),)

    def math(self, ops: Any, *values: Any) -> Any:
        return (*values, *values)


@dataclass(frozen=True)
class RowAbsMax(Epilogue):
    """Beside the output its side output `row_absmax`, float32 [rows]: each row's largest absolute value, as stored.

    It comes last in a chain. A maximum does not depend on the order of its values, so it is the same every run.
    """

    side_outputs = (SideOutput("row_absmax", dtype="float32", row_absmax=True),)

    def math(self, ops: Any, accumulator: Any) -> Any:
        return accumulator


@dataclass(frozen=True)
class Scatter(Epilogue):
    """Stores each row at `row_index[r]`."""

    scatter = True

    def math(self, ops: Any, accumulator: Any) -> Any:
        return accumulator


@dataclass(frozen=True)
class Cast(Epilogue):
    """Gives the output another dtype than the operands': "float32", "bfloat16" or "float16"."""

    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise EpilogueError(
                f"Cast: dtype must be one of {list(DTYPES)}, got {self.dtype!r}, which cannot be stored: change it in "
                "the line that makes the Cast"
            )

    @property
    def out_dtype(self) -> str:
        return self.dtype

    def math(self, ops: Any, accumulator: Any) -> Any:
        return accumulator
