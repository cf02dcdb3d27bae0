"""Composable endings for the grouped GEMM. An epilogue's math is written once, for the kernel and for torch tensors."""

from epilogues.base import INPUT, Epilogue, EpilogueError, EpilogueTensor, SideOutput
from epilogues.chain import Chain
from epilogues.check import check_epilogue
from epilogues.library import (
    Bias,
    Cast,
    ClampedSwiglu,
    GeluGate,
    Identity,
    ReluSquared,
    ResidualAdd,
    RoutingScale,
    RowAbsMax,
    Scale,
    Scatter,
    SiluGate,
    StorePreActivation,
)
from epilogues.ops import DslOps, TorchOps

__all__ = [
    "INPUT",
    "Bias",
    "Cast",
    "Chain",
    "ClampedSwiglu",
    "DslOps",
    "Epilogue",
    "EpilogueError",
    "EpilogueTensor",
    "GeluGate",
    "Identity",
    "ReluSquared",
    "ResidualAdd",
    "RoutingScale",
    "RowAbsMax",
    "Scale",
    "Scatter",
    "SideOutput",
    "SiluGate",
    "StorePreActivation",
    "TorchOps",
    "check_epilogue",
]
