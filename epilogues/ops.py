"""The functions an epilogue's `math` may use beyond `+ - * /`, once for torch tensors and once for the kernel's
registers."""

from __future__ import annotations

from typing import Any


class TorchOps:
    """On fp32 torch tensors: the CPU implementation and the tests."""

    @staticmethod
    def exp(x: Any) -> Any:
        return x.exp()

    @staticmethod
    def reciprocal(x: Any) -> Any:
        return x.reciprocal()


class DslOps:
    """On `cutlass.Float32` registers, in the special-function units: relative error of each below 2^-21."""

    @staticmethod
    def exp(x: Any) -> Any:
        from cutlass import cute

        return cute.math.exp(x, fastmath=True)

    @staticmethod
    def reciprocal(x: Any) -> Any:
        from cutlass import cute

        return cute.arch.rcp_approx(x)
