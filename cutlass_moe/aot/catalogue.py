"""The kernels that ship: every one that the layer can ask for with the configurations of `heuristics`."""

from __future__ import annotations

from cutlass_moe.config import CombineSpec, GemmSpec, KernelSpec, PermuteSpec, RouteSpec, why_not_implementable
from cutlass_moe.heuristics import CONFIGS
from epilogues import Bias, ClampedSwiglu, GeluGate, Identity, RoutingScale, SiluGate

DTYPES = ("bfloat16", "float16")
EPILOGUES = (SiluGate(), RoutingScale(), Identity())
# What other models need: gpt-oss (both biases), and GELU. Their checkpoints are in bfloat16.
BFLOAT16_EPILOGUES = (Bias(operands=2) | ClampedSwiglu(), Bias() | RoutingScale(), GeluGate("tanh"))


def catalogue() -> list[KernelSpec]:
    """Every kernel of the shipped library, the slowest to compile first."""
    gemms = [
        GemmSpec(dtype, config, epilogue)
        for config in reversed(CONFIGS)
        for dtype in DTYPES
        for epilogue in (*EPILOGUES, *(BFLOAT16_EPILOGUES if dtype == "bfloat16" else ()))
        if why_not_implementable(config, epilogue) is None
    ]
    routes = [
        RouteSpec(id_dtype, weight_dtype)
        for id_dtype in ("int32", "int64")
        for weight_dtype in (None, "float32", "bfloat16", "float16")
    ]
    glue = [spec for dtype in DTYPES for spec in (PermuteSpec(dtype), CombineSpec(dtype))]
    return [*gemms, *routes, *glue]
