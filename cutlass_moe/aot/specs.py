"""Kernel specs from elsewhere than the catalogue: from a manifest, from a user's module, for a user's epilogue."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cutlass_moe.config import (
    CombineSpec,
    GemmConfig,
    GemmSpec,
    KernelSpec,
    PermuteSpec,
    RouteSpec,
    why_not_implementable,
)
from cutlass_moe.heuristics import configs_of
from epilogues import Epilogue
from epilogues.describe import read_epilogue

KERNELS = "KERNELS"  # the list of specs in a user's module
_SIMPLE: dict[str, type[RouteSpec | PermuteSpec | CombineSpec]] = {
    "route": RouteSpec,
    "permute": PermuteSpec,
    "combine": CombineSpec,
}


class SpecError(RuntimeError):
    """Specs that cannot be had. The message says from where, and why."""


def gemm_specs(epilogue: Epilogue, dtypes: Iterable[str] = ("bfloat16", "float16")) -> list[GemmSpec]:
    """The grouped GEMMs with this epilogue that `grouped_gemm` can ask for: those of `heuristics`."""
    return [
        GemmSpec(dtype, config, epilogue)
        for config in configs_of(epilogue.accumulators)
        for dtype in dtypes
        if why_not_implementable(config, epilogue) is None
    ]


def module_specs(module: str) -> list[KernelSpec]:
    """The list `KERNELS` of a user's module: a dotted name, or a path ending in .py.

    A path is imported under the name of its file, and its folder becomes importable: that name is part of what the
    kernels are built to, so the module that runs them must import their epilogues under the same one.
    Raises SpecError when there is no such module or no list of specs in it.
    """
    name = module
    if module.endswith(".py"):
        path = Path(module).resolve()
        if not path.exists():
            raise SpecError(f"no kernels to build: there is no file {path}")
        name = path.stem
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
    try:
        imported = importlib.import_module(name)
    except ImportError as error:
        raise SpecError(f"no kernels to build: {module} cannot be imported, {error}") from error
    specs = getattr(imported, KERNELS, None)
    kinds = (RouteSpec, PermuteSpec, CombineSpec, GemmSpec)
    if not isinstance(specs, list | tuple) or not specs or not all(isinstance(spec, kinds) for spec in specs):
        raise SpecError(f"{module} must define {KERNELS}, a list of kernel specs, got {specs!r:.80}")
    return list(specs)


def read_spec(description: Mapping[str, Any]) -> KernelSpec:
    """The spec whose `describe()` this is, as read from a manifest. Imports the epilogue's module.

    Raises SpecError when it is no spec of this version, or its epilogue cannot be imported or has changed.
    """
    values = dict(description)
    kind = values.pop("kind", None)
    try:
        if kind in _SIMPLE:
            return _SIMPLE[kind](**values)
        if kind != "gemm":
            raise SpecError(f"this version has no kernels of kind {kind!r}")
        config = dict(values["config"])
        config["token_widths"] = tuple(config["token_widths"])
        return GemmSpec(values["dtype"], GemmConfig(**config), _read_epilogue(values["epilogue"]))
    except (KeyError, TypeError) as error:
        raise SpecError(f"its spec is not one of this version ({error})") from error


def _read_epilogue(description: Mapping[str, Any]) -> Epilogue:
    name = f"{description['module']}.{description['class']}"
    try:
        return read_epilogue(description)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"its epilogue {name} cannot be imported ({error}): put its folder on PYTHONPATH") from error
    except (TypeError, ValueError) as error:
        raise SpecError(f"its epilogue {name} has changed ({error})") from error
