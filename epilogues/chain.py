"""Epilogues one after another: bias, then activation, then scale, without a class for each combination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from epilogues.base import INPUT, Epilogue, EpilogueError, EpilogueTensor, SideOutput, as_tuple


@dataclass(frozen=True, init=False)
class Chain(Epilogue):
    """Each part's results are the next part's accumulators: `Chain(Bias(2), SiluGate(), Cast("float32"))`, or with `|`.

    It takes what its first part takes. Tensors, scalars and side outputs are those of all parts, in order; rows are
    scattered if any part says so. The math is inlined: a chain costs what one class with all of it would cost.

    Raises EpilogueError where parts do not fit together: another number of values than the next part takes, one name
    twice, values that change after their row's absolute maximum was declared.
    """

    links: tuple[Epilogue, ...]

    def __init__(self, *parts: Epilogue) -> None:
        for part in parts:
            if not isinstance(part, Epilogue):
                raise EpilogueError(f"a chain must be of epilogues, got {part!r}: an instance, not a class or a name?")
        flat = tuple(each for part in parts for each in part.parts)
        if not flat:
            raise EpilogueError("a chain must have at least one part, got none")
        object.__setattr__(self, "links", flat)
        self._check_links()

    def _check_links(self) -> None:
        for part, following in pairwise(self.links):
            if part.results != following.accumulators:
                advice = (
                    f"give {type(part).__name__} operands=2, or put a gate before it"
                    if part.results < following.accumulators
                    else "put a gate between them, such as SiluGate()"
                )
                raise EpilogueError(
                    f"chain {self.name}: {following!r} takes {following.accumulators} value(s), and {part!r} before it "
                    f"gives {part.results}: {advice}, in the line that makes the chain"
                )
            if any(side.row_absmax for side in part.side_outputs):
                raise EpilogueError(
                    f"chain {self.name}: {part!r} is of the output as stored and must come last, got {following!r} "
                    "after it: move it to the end, in the line that makes the chain"
                )
        names = [*(t.name for t in self.tensors), *self.scalars, *(side.name for side in self.side_outputs)]
        for name in names:
            if names.count(name) > 1:
                raise EpilogueError(
                    f"chain {self.name}: two of its parts have a tensor, scalar or side output {name!r}: give one "
                    "another, in the line that makes the chain (Bias and Scale take tensor=)"
                )

    @property
    def parts(self) -> tuple[Epilogue, ...]:
        return self.links

    @property
    def accumulators(self) -> int:
        return self.links[0].accumulators

    @property
    def results(self) -> int:
        return self.links[-1].results

    @property
    def tensors(self) -> tuple[EpilogueTensor, ...]:
        return tuple(tensor for part in self.links for tensor in part.tensors)

    @property
    def scalars(self) -> tuple[str, ...]:
        return tuple(name for part in self.links for name in part.scalars)

    @property
    def side_outputs(self) -> tuple[SideOutput, ...]:
        return tuple(side for part in self.links for side in part.side_outputs)

    @property
    def out_dtype(self) -> str:
        """That of the last part that has one."""
        return next((part.out_dtype for part in reversed(self.links) if part.out_dtype != INPUT), INPUT)

    @property
    def scatter(self) -> bool:
        return any(part.scatter for part in self.links)

    def math(self, ops: Any, *accumulators: Any, **inputs: Any) -> Any:
        values: tuple[Any, ...] = accumulators
        sides: list[Any] = []
        for part in self.links:
            names = [*(tensor.name for tensor in part.tensors), *part.scalars]
            given = as_tuple(part.math(ops, *values, **{name: inputs[name] for name in names}))
            values = given[: part.results]
            sides += given[part.results :]
        return (*values, *sides) if len(values) + len(sides) > 1 else values[0]

    @property
    def name(self) -> str:
        return "_".join(part.name for part in self.links)

    def describe(self) -> dict[str, Any]:
        fields = {"links": [part.describe() for part in self.links]}
        return {"module": type(self).__module__, "class": type(self).__qualname__, "fields": fields}

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Epilogue:
        from epilogues.describe import read_epilogue

        return cls(*(read_epilogue(part) for part in values["links"]))

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.links))})"
