"""perf's peers and routings on the CPU: adapters give the layer, absent ones say so, routings are what they say."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from cutlass_moe import heuristics
from cutlass_moe.config import GemmConfig
from perf import PerfError, measure
from perf.check import reference_layer, relative_error
from perf.options import Options
from perf.ours import Steps, run_layer
from perf.peers import PEERS, cutlass_cpp
from perf.peers.base import Peer, Prepared, Rows, silu_gate
from perf.peers.deep_gemm import DeepGemm
from perf.peers.layers import LigerKernel
from perf.peers.torch_layers import CublasLoop, TorchGroupedMm
from perf.peers.transformers_experts import TransformersGroupedMm
from perf.results import PeerResult
from perf.routing import Replacement, Uniform, Zipf, parse_routing
from perf.workloads import Inputs, Weights, Workload

WORKLOAD = Workload("tiny", "", hidden=64, intermediate=32, experts=6, top_k=2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


@pytest.fixture
def weights() -> Weights:
    weights = WORKLOAD.make_weights(torch.device("cpu"))
    weights.refill(generator())
    return weights


@pytest.fixture
def inputs() -> Inputs:
    return WORKLOAD.make_inputs(7, generator(1))


class TestContenders:
    @pytest.mark.parametrize("gather", [False, True])
    def test_steps_give_the_layer(
        self, gather: bool, weights: Weights, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = GemmConfig(128, (16, 32), 2, gather=gather)
        monkeypatch.setattr(heuristics, "choose_gemm_config", lambda *shape, **named: config)
        out_TH = torch.empty_like(inputs.x_TH)
        run_layer(inputs, weights, out_TH)
        steps = Steps(inputs, weights)
        assert torch.equal(steps.out_TH, out_TH)
        assert list(steps.calls) == ["route", *([] if gather else ["permute"]), "gemm1", "gemm2", "combine"]
        steps.x_MH.fill_(torch.nan)
        h_MI = steps.calls["gemm1"]()
        assert isinstance(h_MI, torch.Tensor) and torch.equal(h_MI, steps.h_MI) == gather

    @pytest.mark.parametrize("peer_type", [TorchGroupedMm, CublasLoop])
    def test_torch_peers_give_the_layer(self, peer_type: type[Peer], weights: Weights, inputs: Inputs) -> None:
        call, finish = peer_type(Prepared(weights)).bind(inputs)
        assert relative_error(finish(call()), reference_layer(inputs, weights)) < 1e-2

    def test_rows_are_grouped_in_slot_order(self, weights: Weights, inputs: Inputs) -> None:
        rows = Rows(inputs, Prepared(weights))
        counts = torch.bincount(inputs.topk_ids_TK.flatten(), minlength=6)
        assert torch.equal(rows.offsets_E1.diff().long(), counts) and rows.offsets_E1[0] == 0
        assert torch.equal(inputs.topk_ids_TK.flatten()[rows.slot_M], rows.sorted_ids_M)

    def test_silu_gate(self) -> None:
        gate_up = torch.randn(3, 8, generator=generator())
        expected = gate_up[:, :4] * torch.sigmoid(gate_up[:, :4]) * gate_up[:, 4:]
        torch.testing.assert_close(silu_gate(gate_up), expected)


class TestAdapters:
    """Adapters of packages that are not here, against stand-ins with the packages' documented signatures."""

    def test_transformers_experts(self, weights: Weights, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
        def grouped_mm(self: Any, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
            assert self.num_experts == 6 and self.has_gate and self.gate_up_proj.shape == (6, 64, 64)
            return TorchGroupedMm(Prepared(weights))(Inputs(x_TH, ids_TK, weights_TK))

        def use_experts_implementation(experts_class: Any) -> Any:
            def make(config: Any) -> Any:
                experts = experts_class(config)
                experts.config, experts.has_gate = config, True
                return lambda *arguments: functions[config._experts_implementation](experts, *arguments)

            return make

        functions = {"grouped_mm": grouped_mm}
        fake = ModuleType("transformers.integrations.moe")
        vars(fake).update(ALL_EXPERTS_FUNCTIONS=functions, use_experts_implementation=use_experts_implementation)
        for name, module in {"transformers": None, "transformers.integrations": None, fake.__name__: fake}.items():
            monkeypatch.setitem(sys.modules, name, module or ModuleType(name))
        out_TH = TransformersGroupedMm(Prepared(weights))(inputs)
        assert relative_error(out_TH, reference_layer(inputs, weights)) < 1e-2

    def test_deep_gemm(self, weights: Weights, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
        def grouped(a_PK: torch.Tensor, b_ENK: torch.Tensor, out_PN: torch.Tensor, expert_P: torch.Tensor) -> None:
            assert len(a_PK) % 8 == 0
            for start in range(0, len(a_PK), 8):
                experts = set(expert_P[start : start + 8].tolist()) - {-1}
                assert len(experts) == 1, "an aligned block has one expert"
                out_PN[start : start + 8] = a_PK[start : start + 8] @ b_ENK[experts.pop()].T

        fake = SimpleNamespace(
            get_mk_alignment_for_contiguous_layout=lambda: 8, m_grouped_bf16_gemm_nt_contiguous=grouped
        )
        monkeypatch.setattr("perf.peers.deep_gemm.why_not_importable", lambda module: None)
        monkeypatch.setattr("perf.peers.deep_gemm.load", lambda module: fake)
        call, finish = DeepGemm(Prepared(weights)).bind(inputs)
        assert relative_error(finish(call()), reference_layer(inputs, weights)) < 1e-2

    @pytest.mark.parametrize(("tune", "setting"), [(False, "0"), (True, None)])
    def test_liger_tunes_only_when_asked(
        self, tune: bool, setting: str | None, weights: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "")  # so that it is as before when the test ends
        monkeypatch.delenv("LIGER_FUSED_MOE_AUTOTUNE")
        LigerKernel(Prepared(weights, tune))
        assert os.environ.get("LIGER_FUSED_MOE_AUTOTUNE") == setting

    def test_absent_peers_say_what_is_missing(self, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(cutlass_cpp.LIBRARY_VARIABLE, raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: None)
        names = ["quack", "sonicmoe", "vllm_triton", "flashinfer_cutedsl", "triton_kernels", "deep_gemm", "liger"]
        peer_types = [PEERS[name] for name in [*names, "cutlass_cpp"]]
        for name, peer in measure.prepare_peers(peer_types, weights, Options()).items():
            assert isinstance(peer, PeerResult) and peer.absent and peer.error is None, name
        with pytest.raises(PerfError, match="there is no nvcc"):
            cutlass_cpp.build(Path("nowhere"))

    def test_every_peer_says_what_it_includes(self) -> None:
        for name, peer in PEERS.items():
            assert peer.name == name and len(peer.what) > 40 and peer.scope in ("layer", "gemms")
        batched = PEERS["transformers_batched_mm"].call_bytes(WORKLOAD, 7)
        assert batched == 7 * 2 * 3 * 64 * 32 * 2


class TestRouting:
    def test_zipf_is_skewed_and_distinct(self) -> None:
        ids_TK = Zipf(1.0).draw(4000, 2, 16, generator())
        assert ids_TK.sort(dim=1).values.diff(dim=1).min() > 0
        share = torch.bincount(ids_TK.flatten(), minlength=16) / ids_TK.numel()
        assert torch.all(share[:-1] >= share[1:] - 0.01) and share[0] > 4 * share[15]

    def test_zipf_of_exponent_zero_is_uniform(self) -> None:
        share = torch.bincount(Zipf(0.0).draw(8000, 1, 8, generator()).flatten(), minlength=8) / 8000
        assert share.min() > 0.11 and share.max() < 0.14

    def test_replacement_repeats_within_a_token(self) -> None:
        ids_TK = Replacement().draw(500, 4, 8, generator())
        assert ids_TK.sort(dim=1).values.diff(dim=1).min() == 0 and ids_TK.max() == 7

    def test_names(self) -> None:
        for text in ("uniform", "replacement", "all-to-one", "zipf:1", "zipf:0.5"):
            assert parse_routing(text).name == text
        assert parse_routing("zipf") == Zipf(1.0)

    @pytest.mark.parametrize("suffix", ["json", "npy", "pt"])
    def test_recorded_ids(self, suffix: str, tmp_path: Path) -> None:
        ids = [[0, 1], [5, 2], [3, 3]]
        path = tmp_path / f"ids.{suffix}"
        if suffix == "json":
            path.write_text(json.dumps(ids))
        elif suffix == "npy":
            numpy.save(path, numpy.array(ids, dtype=numpy.int32))
        else:
            torch.save(torch.tensor(ids, dtype=torch.int16), path)
        workload = replace(WORKLOAD, routing=parse_routing(str(path)))
        assert workload.routing.name == path.name
        assert workload.make_inputs(2, generator()).topk_ids_TK.tolist() == ids[:2]

    def test_uniform_is_the_default(self) -> None:
        assert WORKLOAD.routing == Uniform()
