"""The layer in torch: two `grouped_mm` calls, and a loop of cuBLAS calls. And dense cuBLAS, which is no layer."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from perf.peers.base import Peer, Prepared, Rows, silu_gate
from perf.workloads import Inputs, Weights


class TorchGroupedMm(Peer):
    """The layer as a careful torch user writes it: two `grouped_mm` calls with eager kernels around them."""

    name = "torch_grouped_mm"
    what = (
        "whole layer, ids to output: stable sort of the ids, searchsorted for the group ends, index_select of x,"
        " F.grouped_mm on one [E, 2I, H] gate-up weight (fused before, not timed), silu * up, F.grouped_mm down,"
        " rows gathered back by the inverse permutation, weight multiply, sum over the slots (deterministic)"
    )

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._gate_up_EHJ = prepared.gate_up_EJH.transpose(1, 2)
        self._down_EIH = prepared.weights.down_EHI.transpose(1, 2)

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        rows = Rows(inputs, self.prepared)
        ends_E = rows.offsets_E1[1:].contiguous()
        x_MH = inputs.x_TH.index_select(0, rows.token_M)
        h_MI = silu_gate(F.grouped_mm(x_MH, self._gate_up_EHJ, offs=ends_E))
        return rows.combine(F.grouped_mm(h_MI, self._down_EIH, offs=ends_E))


class CublasLoop(Peer):
    """One pair of dense products for each expert that is hit."""

    name = "cublas_loop"
    what = (
        "whole layer, ids to output, eager (the counts are read on the host, so no graph): stable sort, index_select"
        " of x, for each expert hit torch.mm on its gate-up weight (fused before, not timed), silu * up, torch.mm"
        " down; rows gathered back, weight multiply, sum over the slots (deterministic)"
    )
    capturable = False

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        gate_up_EJH, down_EHI = self.prepared.gate_up_EJH, self.prepared.weights.down_EHI
        rows = Rows(inputs, self.prepared)
        x_MH = inputs.x_TH.index_select(0, rows.token_M)
        y_MH = torch.empty_like(x_MH)
        offsets = rows.offsets_E1.tolist()
        for expert, (start, end) in enumerate(pairwise(offsets)):
            if start < end:
                h_RI = silu_gate(torch.mm(x_MH[start:end], gate_up_EJH[expert].T))
                torch.mm(h_RI, down_EHI[expert].T, out=y_MH[start:end])
        return rows.combine(y_MH)


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
