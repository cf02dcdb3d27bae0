"""What a peer is, and the rows grouped by expert that several of them start from."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from perf.workloads import Inputs, Weights, Workload

Call = Callable[[], torch.Tensor]
Finish = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Prepared:
    """The weights of a run as peers want them, made once and shared.

    Attributes:
        tune: whether a peer may tune itself, which takes minutes.
    """

    weights: Weights
    tune: bool = False

    @property
    def experts(self) -> int:
        return self.weights.gate_EIH.shape[0]

    @cached_property
    def gate_up_EJH(self) -> torch.Tensor:
        """Gate rows, then up rows, of each expert in one tensor: J = 2I."""
        return torch.cat((self.weights.gate_EIH, self.weights.up_EIH), dim=1)

    @cached_property
    def experts_E1(self) -> torch.Tensor:
        return torch.arange(self.experts + 1, device=self.weights.gate_EIH.device)


class Peer(ABC):
    """Another implementation of the same layer.

    Class attributes:
        name: as `--peers` and the results spell it.
        what: exactly what its time includes and what was done before.
        module: what must be importable for it to run; empty where torch is enough.
        scope: "layer", or "gemms" for the two GEMMs with what lies between them.
        capturable: False where a call waits for the device, which a CUDA graph forbids.

    Attributes:
        called: whether it was called before.
    """

    name: ClassVar[str]
    what: ClassVar[str]
    module: ClassVar[str] = ""
    scope: ClassVar[str] = "layer"
    capturable: ClassVar[bool] = True

    def __init__(self, prepared: Prepared) -> None:
        """Prepares the weights as the peer wants them, outside the timing."""
        self.prepared = prepared
        self.called = False

    @classmethod
    def absent(cls) -> str | None:
        """Why it can't run here, or None."""
        return why_not_importable(cls.module) if cls.module else None

    @classmethod
    def extra_bytes(cls, workload: Workload) -> int:
        """Memory that its own copies of the weights take, besides the shared `Prepared`."""
        return 0

    @classmethod
    def call_bytes(cls, workload: Workload, tokens: int) -> int:
        """Memory of one call beyond the activations of any layer."""
        return 0

    @abstractmethod
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Runs the layer: `[T, H]`."""

    def bind(self, inputs: Inputs) -> tuple[Call, Finish]:
        """The call that is timed, and what turns its output into the layer's, for the check."""
        return partial(self, inputs), lambda out_TH: out_TH


class GemmsPeer(Peer):
    """A peer that has the two GEMMs only: rows are grouped before, and combined after, outside the timing."""

    scope = "gemms"

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        call, finish = self.bind(inputs)
        return finish(call())

    @abstractmethod
    def bind(self, inputs: Inputs) -> tuple[Call, Finish]:
        """The two GEMMs on rows that are grouped here, and what weights and combines their output."""


class Rows:
    """The slots of a layer grouped by expert, by torch kernels that never wait for the device.

    Attributes:
        sorted_ids_M: expert of each row, ascending. slot_M, token_M: its slot and token.
        offsets_E1: int32: expert e has the rows from `[e]` up to `[e + 1]`.
    """

    def __init__(self, inputs: Inputs, prepared: Prepared) -> None:
        ids_TK = inputs.topk_ids_TK
        self._inputs = inputs
        self.sorted_ids_M, self.slot_M = ids_TK.flatten().sort(stable=True)
        self.token_M = self.slot_M // ids_TK.shape[1]
        self.offsets_E1 = torch.searchsorted(self.sorted_ids_M, prepared.experts_E1, out_int32=True)

    def combine(self, y_MH: torch.Tensor) -> torch.Tensor:
        """Rows back in slot order, times their weights, summed over the slots (deterministic): `[T, H]`."""
        tokens, top_k = self._inputs.topk_ids_TK.shape
        row_M = torch.empty_like(self.slot_M)
        row_M[self.slot_M] = torch.arange(len(row_M), device=row_M.device)
        y_TKH = y_MH.index_select(0, row_M).view(tokens, top_k, -1)
        return y_TKH.mul_(self._inputs.topk_weights_TK.to(y_TKH.dtype).unsqueeze(-1)).sum(dim=1)


def silu_gate(gate_up_MJ: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` by two eager kernels."""
    gate_MI, up_MI = gate_up_MJ.chunk(2, dim=1)
    return F.silu(gate_MI).mul_(up_MI)


def load(module: str) -> Any:
    """A peer's module, imported on first use."""
    return importlib.import_module(module)


def why_not_importable(module: str) -> str | None:
    """Why a module, by its dotted name, can't be used here, or None. Imports its parents."""
    package = module.partition(".")[0]
    try:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        if importlib.util.find_spec(module) is None:
            return f"the installed {package} has no {module}"
    except Exception as error:  # a parent fails to import, in a way of its own
        return " ".join(f"{package} can't be imported: {type(error).__name__}: {error}".split())[:200]
    return None
