"""What an epilogue is: the ending that a grouped GEMM applies to its fp32 accumulators before it stores them."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epilogues.chain import Chain

INPUT = "input"  # as a dtype: that of the GEMM's operands, bfloat16 or float16
DTYPES = ("float32", "bfloat16", "float16")
# How an extra tensor meets the output [M, N] of experts 0 .. E - 1, and the tensor's shape.
BROADCASTS = {"row": "M", "expert": "E", "expert_column": "E, N", "full": "M, N"}


class EpilogueError(ValueError):
    """An epilogue that cannot be built. The message says which line to change."""


@dataclass(frozen=True)
class EpilogueTensor:
    """An extra tensor that an epilogue reads. Its values reach the math as fp32.

    Attributes:
        name: keyword under which `Epilogue.math` receives the value, and key of `grouped_gemm(tensors=...)`.
        broadcast: "row": [M], one value for each row (token, slot pair) in the order of the GEMM's input rows;
            "expert": [E]; "expert_column": [E, N], one for each output column of an expert; "full": [M, N], read at the
            row's input place also where rows are scattered.
        dtype: "float32", "bfloat16", "float16", or "input".

    Raises EpilogueError for another broadcast or dtype.
    """

    name: str
    broadcast: str = "row"
    dtype: str = "float32"
    where: str = field(default="", init=False, compare=False, repr=False)  # file and line that made it

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", _where_made())
        if self.broadcast not in BROADCASTS:
            raise EpilogueError(
                f"{self.where}: broadcast of EpilogueTensor {self.name!r} must be one of {list(BROADCASTS)}, got "
                f"{self.broadcast!r}: change broadcast= on that line"
            )
        _check_dtype(self.dtype, f"EpilogueTensor {self.name!r}", "loaded", self.where)

    @property
    def shape(self) -> str:
        return f"[{BROADCASTS[self.broadcast]}]"


@dataclass(frozen=True)
class SideOutput:
    """A tensor that an epilogue stores beside the output, in the same rows.

    Attributes:
        name: its key in the dict that `grouped_gemm` returns beside the output.
        values: how many values `Epilogue.math` gives for each output element. The tensor is [rows, N] for 1, else
            [rows, values, N].
        dtype: "float32", "bfloat16", "float16", or "input".
        row_absmax: the tensor is instead float32 [rows], the largest absolute value of each row of the output as it is
            stored, and `math` gives nothing for it. A NaN in a row makes it NaN.

    Raises EpilogueError for another dtype.
    """

    name: str
    values: int = 1
    dtype: str = INPUT
    row_absmax: bool = False
    where: str = field(default="", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", _where_made())
        _check_dtype(self.dtype, f"SideOutput {self.name!r}", "stored", self.where)


@dataclass(frozen=True)
class Epilogue(ABC):
    """Base class. A subclass is a frozen dataclass: its fields are compile-time constants, part of the kernel's name.

    A subclass overrides what differs, as plain class attributes (or properties, where they depend on its fields), and
    gives the math. Epilogues combine with `|`: see `Chain`.
    """

    @property
    def accumulators(self) -> int:
        """Values it takes: 1 for one weight operand; 2 for a gate and an up operand, whose products come as a pair."""
        return 1

    @property
    def results(self) -> int:
        """Values it gives: 1, to be stored; 2 only for a part of a chain that the next part takes as gate and up."""
        return 1

    @property
    def tensors(self) -> tuple[EpilogueTensor, ...]:
        """The extra tensors it loads."""
        return ()

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the floats that are passed at run time, as `math`'s keywords."""
        return ()

    @property
    def side_outputs(self) -> tuple[SideOutput, ...]:
        """What it stores beside the output."""
        return ()

    @property
    def out_dtype(self) -> str:
        """Dtype of the output: "float32", "bfloat16", "float16", or "input"."""
        return INPUT

    @property
    def scatter(self) -> bool:
        """False stores row r at row r; True at row `row_index[r]`, so that a permutation costs nothing."""
        return False

    @abstractmethod
    def math(self, ops: Any, *args: Any, **kwargs: Any) -> Any:
        """The element-wise formula, in fp32.

        Takes `ops`, the accumulators as positional arguments, and tensors and scalars by name. Returns the value to
        store; where there are more, a tuple of the results and then the side outputs' values.

        Args:
            ops: functions beyond `+ - * /` (see `TorchOps`): the same source runs on torch tensors and in the kernel.
        """

    @property
    def name(self) -> str:
        """Name used in kernel names, for example `silu_gate`; fields that are not at their default follow."""
        snake = re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()
        values = (f"_{f.name}_{getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != _default(f))
        return re.sub(r"\W", "_", snake + "".join(values))

    @property
    def parts(self) -> tuple[Epilogue, ...]:
        """The epilogues it is made of: itself, unless it is a chain."""
        return (self,)

    def __or__(self, other: Epilogue) -> Chain:
        from epilogues.chain import Chain

        return Chain(self, other)

    def describe(self) -> dict[str, Any]:
        """What tells it from another of the same name: its class, module included, and its fields; for the manifest."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"module": type(self).__module__, "class": type(self).__qualname__, "fields": values}

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Epilogue:
        """The epilogue of this class with these fields, as in `describe`; fields it does not have are left out."""
        names = {f.name for f in fields(cls)}
        return cls(**{key: _hashable(value) for key, value in values.items() if key in names})

    def modules(self) -> list[str]:
        """Names of the modules that its source is in."""
        classes = {kind for part in self.parts for kind in type(part).__mro__ if issubclass(kind, Epilogue)}
        return sorted({kind.__module__ for kind in classes} | {type(self).__module__})


@dataclass(frozen=True)
class Plane:
    """One matrix [rows, N] that a kernel stores, of one of the values that `Epilogue.math` gives.

    Attributes:
        output: 0 for the output, 1 and on for the side outputs.
        index: which of that output's matrices.
        dtype: of its elements, or "input".
    """

    output: int
    index: int
    dtype: str


def stored_planes(epilogue: Epilogue) -> tuple[Plane, ...]:
    """What a kernel with this epilogue stores, in the order of the values of `math`."""
    sides = (
        Plane(output, index, side.dtype)
        for output, side in enumerate(epilogue.side_outputs, start=1)
        if not side.row_absmax
        for index in range(side.values)
    )
    return (Plane(0, 0, epilogue.out_dtype), *sides)


def as_tuple(values: Any) -> tuple[Any, ...]:
    """What `math` returned, as a tuple also where it is one value."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _default(declared: Field[Any]) -> Any:
    return declared.default_factory() if declared.default_factory is not MISSING else declared.default


def _hashable(value: Any) -> Any:
    """JSON turns tuples into lists."""
    return tuple(_hashable(each) for each in value) if isinstance(value, list) else value


def _check_dtype(dtype: str, what: str, verb: str, where: str) -> None:
    if dtype not in (*DTYPES, INPUT):
        raise EpilogueError(
            f"{where}: dtype of {what} must be one of {[*DTYPES, INPUT]}, got {dtype!r}, which cannot be {verb}: "
            "change dtype= on that line"
        )


def _where_made() -> str:
    """File and line of the caller outside of this module (and of the code that dataclasses make)."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, "<string>"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
