"""The kernels that ship: every one that the layer can ask for with the configurations of `heuristics`."""

from __future__ import annotations

from cutlass_moe.aot.specs import gemm_specs
from cutlass_moe.config import CombineSpec, KernelSpec, PermuteSpec, RouteSpec
from epilogues import Bias, ClampedSwiglu, GeluGate, Identity, RoutingScale, SiluGate

DTYPES = ("bfloat16", "float16")
EPILOGUES = (SiluGate(), RoutingScale(), Identity())
# What other models need: gpt-oss (both biases), and GELU. Their checkpoints are in bfloat16.
BFLOAT16_EPILOGUES = (Bias(operands=2) | ClampedSwiglu(), Bias() | RoutingScale(), GeluGate("tanh"))


def catalogue() -> list[KernelSpec]:
    """Every kernel of the shipped library, the slowest to compile first."""
    gemms = [spec for epilogue in EPILOGUES for spec in gemm_specs(epilogue, DTYPES)]
    gemms += [spec for epilogue in BFLOAT16_EPILOGUES for spec in gemm_specs(epilogue, ("bfloat16",))]
    gemms.sort(key=lambda spec: -spec.config.tile_tokens)
    routes = [
        RouteSpec(id_dtype, weight_dtype)
        for id_dtype in ("int32", "int64")
        for weight_dtype in (None, "float32", "bfloat16", "float16")
    ]
    glue = [spec for dtype in DTYPES for spec in (PermuteSpec(dtype), CombineSpec(dtype))]
    return [*gemms, *routes, *glue]
