"""What the layer is compared with: small adapters, each of which says exactly what its time includes."""

from __future__ import annotations

from collections.abc import Sequence

from perf import PerfError
from perf.peers.base import Peer
from perf.peers.cutlass_cpp import CutlassCppGemms
from perf.peers.deep_gemm import DeepGemm
from perf.peers.layers import FlashInferFused, FlashInferOrdered, LigerKernel, Quack, SonicMoE, VllmTriton
from perf.peers.torch_layers import CublasLoop, TorchGroupedMm
from perf.peers.transformers_experts import TransformersBatchedMm, TransformersGroupedMm
from perf.peers.triton_kernels_ogs import TritonKernels

BASELINE_PEER = TorchGroupedMm.name  # of the SOL score
PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        TorchGroupedMm,
        TransformersGroupedMm,
        TransformersBatchedMm,
        CublasLoop,
        CutlassCppGemms,
        Quack,
        SonicMoE,
        VllmTriton,
        FlashInferFused,
        FlashInferOrdered,
        TritonKernels,
        DeepGemm,
        LigerKernel,
    )
}


def get_peers(names: Sequence[str]) -> list[type[Peer]]:
    """Looks peers up.

    Raises:
        PerfError: there is none of one of the names.
    """
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise PerfError(f"unknown peer {unknown[0]!r}: known are {', '.join(PEERS)}")
    return [PEERS[name] for name in dict.fromkeys(names)]
