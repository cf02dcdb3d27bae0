"""perf's runs on the CPU: a whole run with fake clocks and graphs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from cutlass_moe import heuristics
from cutlass_moe.aot.manifest import LibraryError
from cutlass_moe.config import GemmConfig
from perf import measure, options, results, runner
from perf.__main__ import main
from perf.check import reference_layer
from perf.options import Options
from perf.peers.base import Prepared
from perf.peers.torch_layers import CublasLoop, TorchGroupedMm
from perf.results import RunResult
from perf.roofline import Roofs
from perf.timing import Captured, Spread, Turns, time_in_turns
from perf.workloads import Inputs, Workload

CPU = torch.device("cpu")


class FakeStopwatch:
    """Runs the calls; every call takes 2 ms."""

    def __init__(self, device: torch.device) -> None:
        pass

    def device_ms(self, call: Callable[[], object]) -> float:
        call()
        return 2.0

    cool_ms = device_ms

    def eager(self, call: Callable[[], object]) -> tuple[float, float]:
        return self.device_ms(call), 0.04


class FakeGraph:
    """Replays by calling again and copying into the captured output, as a graph writes to the same memory."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.output = call, call()

    def replay(self) -> None:
        again = self.call()
        if isinstance(again, torch.Tensor):
            self.output.copy_(again)


@pytest.fixture
def cpu_run(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets `runner.run` measure the tiny workload on the CPU, with fake clocks and graphs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other cost more than so little work
    monkeypatch.setattr(heuristics, "choose_gemm_config", lambda *shape, **named: GemmConfig(128, (16, 32), 2))
    monkeypatch.setattr(options, "get_workload", lambda name: tiny)
    monkeypatch.setattr(runner, "require_device", lambda plans, peers: CPU)
    monkeypatch.setattr(runner, "Stopwatch", FakeStopwatch)
    monkeypatch.setattr(Captured, "of", FakeGraph)
    monkeypatch.setattr(runner, "measure_roofs", lambda stopwatch, device: Roofs(4.4, 750.0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("cpu_run")
class TestRun:
    def run(self, folder: Path, note: Callable[[str], None] = lambda text: None, **arguments: Any) -> RunResult:
        given = Options(**{"workloads": ("tiny",), "rounds": 2, "output": folder, **arguments})
        return runner.run(given, note=note)

    def test_every_case_is_checked_timed_and_saved(self, tmp_path: Path) -> None:
        result = self.run(tmp_path, peers=("torch_grouped_mm", "cublas_loop", "deep_gemm"))
        assert [(case.tokens, case.match_ratio, case.passed) for case in result.cases] == [
            (3, 1.0, True),
            (5, 1.0, True),
            (5, 1.0, True),
        ]
        case = result.cases[1]
        assert case.ms == case.cool_ms == case.eager_ms == case.dense_ms == case.dense_cool_ms == 2.0
        assert case.pair_ms == case.pair_dense_ms == 2.0 and case.over_dense == case.over_dense_cool == 1.0
        assert case.host_us == pytest.approx(40) and case.rows_max >= 2
        assert list(case.steps) == ["route", "permute", "gemm1", "gemm2", "combine"]
        assert {step.ms for step in case.steps.values()} == {2.0} and case.gaps_ms == 0.0
        assert case.steps["gemm1"].flops + case.steps["gemm2"].flops == case.flops
        torch_peer, loop = case.peers["torch_grouped_mm"], case.peers["cublas_loop"]
        assert torch_peer.error is None and torch_peer.ms == torch_peer.cool_ms == 2.0 and torch_peer.captured
        assert loop.error is None and loop.ms == 2.0 and loop.cool_ms is None and not loop.captured
        assert case.peers["deep_gemm"].ms is None
        assert case.sol_score == pytest.approx(0.5) and case.recorded_peers_ms == {"other": 1.5}
        saved = results.load(tmp_path / "shapes.json")
        assert saved.cases == result.cases and saved.complete and saved.not_for_the_record and saved.seconds

    def test_ours_and_dense_alone_are_the_pair(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[list[str]] = []

        def in_turns(timers: dict[str, Callable[[], float]], turns: Turns) -> dict[str, Spread]:
            calls.append(list(timers))
            return time_in_turns(timers, turns)

        monkeypatch.setattr(measure, "time_in_turns", in_turns)
        self.run(tmp_path, tokens=(3,), peers=("torch_grouped_mm",), pair_turns=Turns(least=3, most=3))
        mixed, pair, cool = calls
        assert {"ours", "dense", "torch_grouped_mm", "idle ours"} < set(mixed)
        assert pair == ["ours", "dense"] and cool == ["ours", "dense", "torch_grouped_mm"]

    def test_a_layer_that_gathers_has_no_permute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        permutes = self.run(tmp_path).cases[0]
        config = GemmConfig(128, (16, 32), 2, gather=True)
        monkeypatch.setattr(heuristics, "choose_gemm_config", lambda *shape, **named: config)
        gathers = self.run(tmp_path).cases[0]
        assert list(gathers.steps) == ["route", "gemm1", "gemm2", "combine"]
        x_TH, index, x_MH = 3 * 64 * 2, 6 * 4, 6 * 64 * 2
        assert permutes.steps["gemm1"].bytes - gathers.steps["gemm1"].bytes == x_MH - (x_TH + index)

    def test_routing_given_on_the_command_line(self, tmp_path: Path) -> None:
        case = self.run(tmp_path, routing="all-to-one").cases[0]
        assert (case.experts_hit, case.rows_max, case.routing) == (1, 6, "all-to-one") and case.passed
        assert case.recorded_peers_ms == {} and (tmp_path / "shapes-all-to-one.json").exists()

    def test_a_shape_has_no_published_tolerance(self, tmp_path: Path) -> None:
        case = self.run(tmp_path, workloads=(), shapes=("32,16,4,2",), tokens=(6,)).cases[0]
        assert case.passed and case.match_ratio is None and case.relative_error and case.grid == "free"

    def test_what_was_measured_survives_a_crash(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def dies_at_5(workload: Workload, inputs: Inputs, *rest: Any) -> measure.Measurement:
            if len(inputs.x_TH) == 5:
                raise RuntimeError("unspecified launch failure")
            return measure.measure(workload, inputs, *rest)

        monkeypatch.setattr(runner, "measure", dies_at_5)
        with pytest.raises(RuntimeError, match="launch failure"):
            self.run(tmp_path)
        saved = results.load(tmp_path / "shapes.json")
        assert [case.tokens for case in saved.cases] == [3] and not saved.complete

    def test_a_wrong_peer_is_not_timed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TorchGroupedMm, "__call__", lambda self, inputs: torch.zeros_like(inputs.x_TH))
        peer = self.run(tmp_path).cases[0].peers["torch_grouped_mm"]
        assert peer.ms is None and peer.error is not None and "wrong output" in peer.error

    def test_a_peer_that_raises_costs_its_own_column(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(self: TorchGroupedMm, prepared: Prepared) -> None:
            raise RuntimeError("no kernel\nfor this device")

        monkeypatch.setattr(TorchGroupedMm, "__init__", broken)
        case = self.run(tmp_path).cases[0]
        assert case.passed and case.peers["torch_grouped_mm"].error == "RuntimeError: no kernel for this device"
        assert case.sol_score is None

    def test_a_peer_that_needs_too_much_memory_is_not_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TorchGroupedMm, "call_bytes", staticmethod(lambda workload, tokens: 2**63))
        peer = self.run(tmp_path).cases[0].peers["torch_grouped_mm"]
        assert peer.error == "not run: its calls need more device memory than is free"

    def test_a_graph_takes_memory_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for peer_type in (TorchGroupedMm, CublasLoop):
            monkeypatch.setattr(peer_type, "call_bytes", staticmethod(lambda workload, tokens: 60))
        monkeypatch.setattr(measure, "_free_bytes", lambda device: 100)
        peers = self.run(tmp_path, peers=("torch_grouped_mm", "cublas_loop")).cases[0].peers
        assert peers["torch_grouped_mm"].error and not peers["cublas_loop"].error

    def test_a_first_call_is_timed_and_told_of(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def compiles(self: TorchGroupedMm, inputs: Inputs) -> torch.Tensor:
            if not self.called:
                time.sleep(0.02)
            return reference_layer(inputs, self.prepared.weights).bfloat16()

        monkeypatch.setattr(TorchGroupedMm, "__call__", compiles)
        monkeypatch.setattr(measure, "SLOW_FIRST_CALL_S", 0.02)
        notes: list[str] = []
        first, second, _ = self.run(tmp_path, note=notes.append).cases
        assert (first.peers["torch_grouped_mm"].first_call_s or 0) >= 0.02
        assert (second.peers["torch_grouped_mm"].first_call_s or 1) < 0.02
        assert [text for text in notes if "grouped" in text] == [
            "torch_grouped_mm: preparing",
            "torch_grouped_mm: first call",
            "torch_grouped_mm: first call at T = 3 took 0.0 s",
        ]

    def test_a_first_call_that_takes_too_long_is_given_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []

        def tunes(self: TorchGroupedMm, inputs: Inputs) -> torch.Tensor:
            calls.append(len(inputs.x_TH))
            with suppress(Exception):  # as tuners do
                time.sleep(60)
            raise AssertionError("not ended")

        monkeypatch.setattr(TorchGroupedMm, "__call__", tunes)
        cases = self.run(tmp_path, peer_limit_s=0.05).cases
        assert {case.peers["torch_grouped_mm"].error for case in cases} == {
            "given up: its first call at T = 3 took longer than 0.05 s"
        }
        assert calls == [3] and all(case.passed for case in cases)

    def test_a_preparation_that_takes_too_long_is_given_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TorchGroupedMm, "__init__", lambda self, prepared: time.sleep(60))
        peer = self.run(tmp_path, peer_limit_s=0.05).cases[0].peers["torch_grouped_mm"]
        assert peer.error == "given up: not ready after 0.05 s"

    def test_a_peer_too_slow_for_its_turns_is_not_timed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeStopwatch, "eager", lambda self, call: (FakeStopwatch.device_ms(self, call) * 1e3, 0.1))
        peer = self.run(tmp_path, peer_limit_s=35).cases[0].peers["torch_grouped_mm"]
        assert peer.error == "not timed: one call takes 2 s and the fewest turns 36 s, more than 35 s"
        assert peer.ms is None and peer.first_call_s is not None and peer.relative_error is not None

    def test_a_replay_that_writes_nothing_fails_the_case(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeGraph, "replay", lambda self: None)
        case = self.run(tmp_path).cases[0]
        assert case.match_ratio == 1.0 and case.passed is False

    def test_unchecked_is_neither_passed_nor_failed(self, tmp_path: Path) -> None:
        result = self.run(tmp_path, rounds=0, peers=())
        assert {(case.passed, case.match_ratio) for case in result.cases} == {(None, None)}

    def test_an_error_of_the_library_is_one_sentence(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def no_library(*arguments: Any) -> None:
            raise LibraryError("kernel library is damaged: build it")

        monkeypatch.setattr(runner, "run_layer", no_library)
        assert main(["run", "--workload", "tiny", "--output", str(tmp_path)]) == 2
        assert capsys.readouterr().err == "perf: kernel library is damaged: build it\n"

    def test_json_on_stdout(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", "--workload", "tiny", "--rounds", "1", "--peers", "--json", "--output", str(tmp_path)]) == 0
        output = capsys.readouterr()
        assert json.loads(output.out)["schema"] == results.SCHEMA and "3 of 3 checked cases pass" in output.err
