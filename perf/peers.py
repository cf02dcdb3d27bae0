"""What the layer is compared with: small adapters, each of which says exactly what its time includes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F

from perf import PerfError
from perf.workloads import Inputs, Weights, Workload


class Peer(ABC):
    """Another implementation of the same layer.

    Class attributes:
        name: as `--peers` and the results spell it.
        what: exactly what its time includes and what was done before.
    """

    name: ClassVar[str]
    what: ClassVar[str]

    @abstractmethod
    def __init__(self, weights: Weights) -> None:
        """Prepares the weights as the peer wants them, outside the timing."""

    @abstractmethod
    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Runs the layer: `[T, H]`."""

    @staticmethod
    @abstractmethod
    def extra_bytes(workload: Workload) -> int:
        """Memory that the prepared weights take besides the originals."""


class TorchGroupedMm(Peer):
    """The layer as a careful torch user writes it: two `grouped_mm` calls with eager kernels around them."""

    name = "torch_grouped_mm"
    what = (
        "whole layer, ids to output, CUDA graph replay: stable sort of the ids, searchsorted for the group"
        " ends, index_select of x, F.grouped_mm on one [E, 2I, H] gate-up weight (fused before, not timed),"
        " silu * up, F.grouped_mm down, rows gathered back by the inverse permutation, weight multiply, sum"
        " over the slots (deterministic)"
    )

    def __init__(self, weights: Weights) -> None:
        self._gate_up_EJH = torch.cat((weights.gate_EIH, weights.up_EIH), dim=1)
        self._down_EHI = weights.down_EHI
        experts = weights.gate_EIH.shape[0]
        self._experts_E = torch.arange(experts, device=weights.gate_EIH.device)

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        x_TH, ids_TK = inputs.x_TH, inputs.topk_ids_TK
        tokens, top_k = ids_TK.shape
        sorted_ids_M, slot_M = ids_TK.flatten().sort(stable=True)
        ends_E = torch.searchsorted(sorted_ids_M, self._experts_E, right=True, out_int32=True)
        x_MH = x_TH.index_select(0, slot_M // top_k)
        gate_up_MJ = F.grouped_mm(x_MH, self._gate_up_EJH.transpose(1, 2), offs=ends_E)
        gate_MI, up_MI = gate_up_MJ.chunk(2, dim=1)
        h_MI = F.silu(gate_MI).mul_(up_MI)
        y_MH = F.grouped_mm(h_MI, self._down_EHI.transpose(1, 2), offs=ends_E)
        row_M = torch.empty_like(slot_M)
        row_M[slot_M] = torch.arange(len(slot_M), device=slot_M.device)
        y_TKH = y_MH.index_select(0, row_M).view(tokens, top_k, -1)
        return y_TKH.mul_(inputs.topk_weights_TK.to(y_TKH.dtype).unsqueeze(-1)).sum(dim=1)

    @staticmethod
    def extra_bytes(workload: Workload) -> int:
        return workload.weight_bytes() * 2 // 3


class DenseTwoGemms:
    """cuBLAS on the two dense GEMMs of the same total rows, with expert 0's weights: the practical roof of
    compute-bound cases. Not a layer: it computes something else."""

    def __init__(self, weights: Weights, x_MH: torch.Tensor, h_MI: torch.Tensor) -> None:
        self._x_MH, self._h_MI = x_MH, h_MI
        self._gate_up_JH = torch.cat((weights.gate_EIH[0], weights.up_EIH[0]))
        self._down_HI = weights.down_EHI[0]
        rows = x_MH.shape[0]
        self._gate_up_MJ = x_MH.new_empty(rows, self._gate_up_JH.shape[0])
        self._y_MH = x_MH.new_empty(rows, self._down_HI.shape[0])

    def __call__(self) -> torch.Tensor:
        torch.mm(self._x_MH, self._gate_up_JH.T, out=self._gate_up_MJ)
        return torch.mm(self._h_MI, self._down_HI.T, out=self._y_MH)


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (TorchGroupedMm,)}


def get_peers(names: Sequence[str]) -> list[type[Peer]]:
    """Looks peers up.

    Raises:
        PerfError: there is none of one of the names.
    """
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise PerfError(f"unknown peer {unknown[0]!r}: known are {', '.join(PEERS)}")
    return [PEERS[name] for name in dict.fromkeys(names)]
