"""What an epilogue is: the ending that a grouped GEMM applies to its fp32 accumulators before it stores them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True)
class EpilogueTensor:
    """An extra tensor that an epilogue reads: one value for each row (token, slot pair) of the GEMM's output.

    Attributes:
        name: keyword under which `Epilogue.math` receives the value, and key of `grouped_gemm(tensors=...)`.
        dtype: torch dtype name of its elements. The value reaches the math as fp32.
    """

    name: str
    dtype: str = "float32"


@dataclass(frozen=True)
class Epilogue(ABC):
    """Base class. A subclass is a frozen dataclass: its fields are compile-time constants and part of the kernel's
    name.

    Class attributes:
        accumulators: 1 for one weight operand; 2 for a gate and an up operand, whose products reach the math as a pair.
        tensors: the extra tensors it loads.
        scatter: False stores row r at row r; True stores it at row `row_index[r]`, so that a permutation costs nothing.
    """

    accumulators: ClassVar[int] = 1
    tensors: ClassVar[tuple[EpilogueTensor, ...]] = ()
    scatter: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name used in kernel names, for example `silu_gate`; fields follow as `_field_value`."""
        snake = re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()
        values = (f"_{f.name}_{getattr(self, f.name)}" for f in fields(self))
        return re.sub(r"\W", "_", snake + "".join(values))

    @abstractmethod
    def math(self, ops: Any, *accumulators: Any, **tensors: Any) -> Any:
        """The element-wise formula in fp32: takes the accumulators and the tensors' values, returns the output value.

        Args:
            ops: functions beyond `+ - * /` (see `TorchOps`, `DslOps`): the same source runs on torch tensors and in
            the kernel.
        """
