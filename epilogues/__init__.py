"""Composable endings for the grouped GEMM. An epilogue's math is written once and runs in the kernel and on torch
tensors."""

from epilogues.base import Epilogue, EpilogueTensor
from epilogues.library import Identity, RoutingScale, SiluGate
from epilogues.ops import DslOps, TorchOps

__all__ = ["DslOps", "Epilogue", "EpilogueTensor", "Identity", "RoutingScale", "SiluGate", "TorchOps"]
