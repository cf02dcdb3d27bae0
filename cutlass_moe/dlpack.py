"""The public functions on arrays of other libraries, without a copy: CuPy, JAX, NumPy, anything with `__dlpack__`."""

from __future__ import annotations

import importlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_LEGACY_DEFAULT_STREAMS = (0, 1)  # two handles of what is torch's default stream, too
# Arrays of JAX that kernels may still read: JAX would give their memory to its own streams once they are released.
_in_use_lock = threading.Lock()
_in_use: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()


def is_foreign(array: object) -> bool:
    """Whether this is an array, yet not torch's."""
    return not isinstance(array, Tensor) and hasattr(array, "__dlpack__")


def through_torch(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Calls `function` with its arrays as torch tensors, and returns arrays of the first argument's library.

    Kernels run on CuPy's current stream where the arrays are CuPy's; for others on torch's current stream, before and
    after which the DLPack protocol has the caller's own streams wait. Arrays in tuples and dicts are converted too.

    Raises TypeError when an array cannot be exchanged, or `out` is JAX's, whose arrays cannot be written to.
    """
    first = arguments[0]
    library = _library(first)
    out = keywords.get("out")
    if out is not None and _library(out) == "jax":
        raise TypeError("out must be None with JAX arrays, which cannot be written to, got a JAX array")
    with _caller_stream(first, library):
        imported: list[Tensor] = []
        result = function(
            *(_import(f"argument {place}", value, imported) for place, value in enumerate(arguments)),
            **{name: _import(name, value, imported) for name, value in keywords.items()},
        )
        if library == "jax" and any(tensor.is_cuda for tensor in imported):
            _hold_until_done(imported)
        return _export(result, library, out)


def _library(array: object) -> str:
    """Name of the package an array is from: cupy, numpy, jax."""
    root = type(array).__module__.partition(".")[0]
    return "jax" if root == "jaxlib" else root


def _caller_stream(array: Any, library: str) -> AbstractContextManager[Any]:
    """Makes CuPy's current stream torch's current one."""
    if library != "cupy":
        return nullcontext()
    import cupy

    device = torch.device("cuda", array.device.id)
    with cupy.cuda.Device(device.index):
        handle = cupy.cuda.get_current_stream().ptr
    if handle in _LEGACY_DEFAULT_STREAMS:
        return torch.cuda.stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=device))


def _import(name: str, value: Any, imported: list[Tensor]) -> Any:
    if is_foreign(value):
        try:
            tensor = from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(
                f"{name} must be an array that DLPack can hand to torch, got {type(value).__name__}: {error}"
            ) from error
        imported.append(tensor)
        return tensor
    if isinstance(value, tuple):
        values = [_import(name, each, imported) for each in value]
        return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
    if isinstance(value, Mapping):
        return {key: _import(f"{name}[{key!r}]", each, imported) for key, each in value.items()}
    return value


def _export(value: Any, library: str, out: Any) -> Any:
    if isinstance(value, tuple):
        values = [_export(each, library, out) for each in value]
        return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
    if not isinstance(value, Tensor):
        return value
    if out is not None:  # the functions return what they wrote to
        return out
    module = importlib.import_module("jax.dlpack" if library == "jax" else library)
    if not hasattr(module, "from_dlpack"):
        raise TypeError(f"{library} has no from_dlpack: pass torch tensors, made with torch.from_dlpack")
    return module.from_dlpack(value)


def _hold_until_done(tensors: list[Tensor]) -> None:
    done = torch.cuda.Event()
    done.record()
    with _in_use_lock:
        while _in_use and _in_use[0][0].query():
            _in_use.popleft()
        _in_use.append((done, tensors))
