"""The functions an epilogue's `math` may use beyond `+ - * /` and comparisons, for torch tensors and for the kernel.

`maximum` and `minimum` give NaN where either argument is NaN, as torch does.
"""

from __future__ import annotations

from typing import Any


class TorchOps:
    """On fp32 torch tensors: the CPU implementation and the tests. A float may stand for a tensor, but not for all."""

    @staticmethod
    def exp(x: Any) -> Any:
        return x.exp()

    @staticmethod
    def reciprocal(x: Any) -> Any:
        return x.reciprocal()

    @staticmethod
    def sqrt(x: Any) -> Any:
        return x.sqrt()

    @staticmethod
    def absolute(x: Any) -> Any:
        return x.abs()

    @staticmethod
    def maximum(x: Any, y: Any) -> Any:
        return x.clamp(min=y)

    @staticmethod
    def minimum(x: Any, y: Any) -> Any:
        return x.clamp(max=y)

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        import torch  # here: the kernels' side of this package does without

        return torch.where(condition, x, y)


class DslOps:
    """On `cutlass.Float32` registers. `exp`, `reciprocal` and `sqrt` use the special-function units: relative error of
    each below 2^-21, and results below 2^-126 may be flushed to zero."""

    @staticmethod
    def exp(x: Any) -> Any:
        from cutlass import cute

        return cute.math.exp(x, fastmath=True)

    @staticmethod
    def reciprocal(x: Any) -> Any:
        from cutlass import cute

        return cute.arch.rcp_approx(x)

    @staticmethod
    def sqrt(x: Any) -> Any:
        from cutlass import cute

        return cute.math.sqrt(x, fastmath=True)

    @staticmethod
    def absolute(x: Any) -> Any:
        from cutlass import cute

        return cute.math.abs(x)

    @staticmethod
    def maximum(x: Any, y: Any) -> Any:
        from cutlass import cute

        return cute.arch.fmax(x, y, nan=True)

    @staticmethod
    def minimum(x: Any, y: Any) -> Any:
        from cutlass import cute

        return cute.arch.fmin(x, y, nan=True)

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        import cutlass

        return cutlass.select_(condition, cutlass.Float32(x), cutlass.Float32(y))
