"""Finds mistakes in an epilogue before it is compiled, and says which line to change."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from epilogues.base import DTYPES, INPUT, Epilogue, EpilogueError, EpilogueTensor, SideOutput, as_tuple
from epilogues.ops import TorchOps


@lru_cache(maxsize=1024)
def check_epilogue(epilogue: Epilogue) -> None:
    """Raises EpilogueError when the epilogue, or a part of it, cannot be built.

    Reads the declarations, and runs the math once on values that only record what is done to them.
    """
    for part in epilogue.parts:
        _check_part(part)
    if epilogue.results != 1:
        raise EpilogueError(
            f"{epilogue!r} ends with {epilogue.results} values, and one is stored: put a gate after it, such as "
            f"SiluGate(), in the line that makes the chain, or change `results` at "
            f"{locate(type(epilogue.parts[-1]), 'results')}"
        )


def locate(kind: type, attribute: str | None = None) -> str:
    """File and line where the class, or its attribute, is written."""
    for owner in kind.__mro__:
        if attribute is None or attribute in vars(owner):
            try:
                lines, first = inspect.getsourcelines(owner)
                file = Path(inspect.getsourcefile(owner) or "?").name
            except (OSError, TypeError):
                return owner.__qualname__
            offset = 0
            if attribute is not None:
                starts = (f"{attribute} =", f"{attribute}:", f"def {attribute}(")
                offset = next((n for n, line in enumerate(lines) if line.lstrip().startswith(starts)), 0)
            return f"{file}:{first + offset}"
    return kind.__qualname__


def _fail(kind: type, attribute: str | None, problem: str, change: str) -> NoReturn:
    raise EpilogueError(f"{locate(kind, attribute)}: {problem}: {change}")


def _check_part(part: Epilogue) -> None:
    kind = type(part)
    annotated = {
        name
        for owner in kind.__mro__
        if owner is not Epilogue
        for name, annotation in vars(owner).get("__annotations__", {}).items()
        if "ClassVar" not in str(annotation)
    }
    if annotated - {declared.name for declared in fields(part)}:
        _fail(kind, None, f"class {kind.__name__} has fields", "put @dataclass(frozen=True) above it")
    for attribute in ("accumulators", "results"):
        value = getattr(part, attribute)
        if value not in (1, 2):
            _fail(kind, attribute, f"{kind.__name__}.{attribute} must be 1 or 2, got {value!r}", "change that line")
    for attribute, item in (("tensors", EpilogueTensor), ("side_outputs", SideOutput), ("scalars", str)):
        values = getattr(part, attribute)
        if not isinstance(values, tuple) or not all(isinstance(value, item) for value in values):
            _fail(
                kind,
                attribute,
                f"{kind.__name__}.{attribute} must be a tuple of {item.__name__}, got {values!r}",
                "change that line (a tuple of one has a comma)",
            )
    if part.out_dtype not in (*DTYPES, INPUT):
        _fail(
            kind,
            "out_dtype",
            f"{kind.__name__}.out_dtype must be one of {[*DTYPES, INPUT]}, got {part.out_dtype!r}, not storable",
            "change that line",
        )
    _check_names(part)
    _run_math(part)


def _check_names(part: Epilogue) -> None:
    declared = (
        ("tensors", [tensor.name for tensor in part.tensors]),
        ("scalars", list(part.scalars)),
        ("side_outputs", [side.name for side in part.side_outputs]),
    )
    seen: set[str] = set()
    for attribute, names in declared:
        for name in names:
            if not name.isidentifier() or name in seen:
                problem = f"{type(part).__name__}.{attribute} has {name!r}, which is no identifier or is there twice"
                _fail(type(part), attribute, problem, "give it another name in that line")
            seen.add(name)


class _Recorded:
    """Stands for the values of one element: arithmetic and comparisons give another one."""

    def __bool__(self) -> bool:
        raise EpilogueError("a value has no truth while the kernel is built: use ops.where(condition, x, y), not if")


def _arithmetic(*_: Any) -> _Recorded:
    return _Recorded()


for _name in ("add", "sub", "mul", "truediv"):
    setattr(_Recorded, f"__{_name}__", _arithmetic)
    setattr(_Recorded, f"__r{_name}__", _arithmetic)
for _name in ("neg", "lt", "le", "gt", "ge"):
    setattr(_Recorded, f"__{_name}__", _arithmetic)


class _RecordingOps:
    def __getattr__(self, name: str) -> Callable[..., _Recorded]:
        if not hasattr(TorchOps, name):
            known = [each for each in vars(TorchOps) if not each.startswith("_")]
            raise EpilogueError(f"ops has no {name}: it has {', '.join(known)}")
        return _arithmetic


def _run_math(part: Epilogue) -> None:
    """Runs the math, and counts what it gives."""
    kind = type(part)
    inputs = {name: _Recorded() for name in (*(tensor.name for tensor in part.tensors), *part.scalars)}
    accumulators = [_Recorded() for _ in range(part.accumulators)]
    try:
        given = as_tuple(part.math(_RecordingOps(), *accumulators, **inputs))
    except EpilogueError as error:
        raise EpilogueError(f"{_line_of(error, kind)}: in {kind.__name__}.math: {error}: change that line") from None
    except Exception as error:
        told = f"{part.accumulators} accumulator(s)" + "".join(f", {name}" for name in inputs)
        raise EpilogueError(
            f"{_line_of(error, kind)}: {kind.__name__}.math does not run, given {told} (as declared at "
            f"{locate(kind, 'accumulators')} and {locate(kind, 'tensors')}): {type(error).__name__}: {error}: change "
            "its parameters, or `accumulators` (2 for gate and up), `tensors` and `scalars` of the class"
        ) from error
    wanted = part.results + sum(side.values for side in part.side_outputs if not side.row_absmax)
    if len(given) != wanted:
        _fail(
            kind,
            "math",
            f"{kind.__name__}.math must return {wanted} value(s), its results and then those of its side outputs, got "
            f"{len(given)}",
            "change its return, or `results` and `side_outputs` of the class",
        )


def _line_of(error: Exception, kind: type) -> str:
    """File and line of the math where the error came from."""
    trace = error.__traceback__
    where = locate(kind, "math")
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "math" and code.co_filename == getattr(sys.modules.get(kind.__module__), "__file__", None):
            where = f"{Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where
