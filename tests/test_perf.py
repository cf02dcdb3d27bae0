"""perf on the CPU: arithmetic, inputs, check, files, refusals, and a whole run with fake clocks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perf import PerfError, console, environment, results, runner
from perf.__main__ import build_parser, main, options_of
from perf.check import Verdict, check_layer, match_ratio, reference_layer, relative_error
from perf.ours import Steps, run_layer
from perf.peers import PEERS, TorchGroupedMm, get_peers
from perf.results import CaseResult, PeerResult, RunResult
from perf.roofline import Roofs, Work, layer_work, sol_score
from perf.timing import Captured, Spread, Turns, time_in_turns
from perf.workloads import Case, Inputs, Weights, Workload, get_workload, workloads

B200 = Roofs(read_TBps=7.667, dense_TFLOPs=1811)
CPU = torch.device("cpu")


@pytest.fixture
def tiny() -> Workload:
    """A layer small enough for any CPU, with two cases of equal T and different atol."""
    return replace(
        get_workload("jamba_large"),
        name="tiny",
        hidden=64,
        intermediate=32,
        experts=6,
        prefill_cases=(Case(5, 0.05), Case(3, 0.05, batch=1, seq=3), Case(5, 0.01)),
        recorded_prefill_ms={"other": {5: 1.5}},
        stock_gemms=((1, 2.0, 1.0), (3, 4.0, 2.0)),
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(CPU).manual_seed(seed)


def made_weights(workload: Workload, seed: int = 0) -> Weights:
    weights = workload.make_weights(CPU)
    weights.refill(generator(seed))
    return weights


def work_of(workload: Workload, tokens: int) -> Work:
    return layer_work(
        tokens=tokens,
        top_k=workload.top_k,
        hidden=workload.hidden,
        intermediate=workload.intermediate,
        experts_hit=workload.experts,
    )


class TestRoofline:
    @pytest.mark.parametrize("name", ["jamba_large", "ling_flash"])
    def test_reproduces_the_published_speed_of_light(self, name: str) -> None:
        workload = get_workload(name)
        assert len(workload.prefill_cases) == 16
        for case in workload.prefill_cases:
            assert work_of(workload, case.tokens).sol_ms(B200) == pytest.approx(case.sol_b200_ms, rel=0.005)

    def test_work_counts_only_experts_that_are_hit(self) -> None:
        work = layer_work(tokens=1, top_k=2, hidden=8, intermediate=4, experts_hit=2)
        assert work.flops == 6 * 2 * 8 * 4
        assert work.bytes == 3 * 2 * 8 * 4 * 2 + 4 * 8

    def test_rates(self) -> None:
        work = Work(flops=2 * 10**12, bytes=10**9)
        assert work.tflops(2.0) == pytest.approx(1000)
        assert work.tbps(2.0) == pytest.approx(0.5)

    def test_score_is_one_at_the_speed_of_light_and_half_at_the_baseline(self) -> None:
        assert sol_score(2.0, 2.0, 6.0) == 1.0
        assert sol_score(6.0, 2.0, 6.0) == 0.5
        assert sol_score(3.0, 2.0, 6.0) == pytest.approx(0.8)

    def test_score_has_no_meaning_without_room(self) -> None:
        assert sol_score(3.0, 2.0, 2.0) is None
        assert sol_score(0.1, 10.0, 11.0) is None


class TestWorkloads:
    def test_cases_are_those_published(self) -> None:
        jamba, ling = get_workload("jamba_large"), get_workload("ling_flash")
        assert (jamba.hidden, jamba.intermediate, jamba.experts, jamba.top_k) == (8192, 24576, 16, 2)
        assert (ling.hidden, ling.intermediate, ling.experts, ling.top_k) == (4096, 1024, 256, 8)
        assert all(case.batch and case.seq and case.batch * case.seq == case.tokens for case in jamba.prefill_cases)
        assert {case.tokens: case.atol for case in ling.prefill_cases}[2368] == 1e-5
        assert [case.tokens for case in ling.cases(decode=True)] == [1, 4, 16, 64, 256, 1024]

    def test_filter_by_tokens(self) -> None:
        cases = get_workload("jamba_large").cases(decode=False, tokens=[2048, 512])
        assert [case.tokens for case in cases] == [512] * 3 + [2048] * 5

    def test_inputs_follow_the_recipe(self) -> None:
        for workload in workloads().values():
            inputs = replace(workload, hidden=256).make_inputs(1000, generator())
            ids_TK, weights_TK = inputs.topk_ids_TK, inputs.topk_weights_TK
            assert inputs.x_TH.dtype == torch.bfloat16
            assert inputs.x_TH.float().std() == pytest.approx(1.0, abs=0.01)
            assert ids_TK.dtype == torch.int64 and ids_TK.shape == (1000, workload.top_k)
            assert ids_TK.sort(dim=1).values.diff(dim=1).min() > 0, "distinct within a token"
            share = torch.bincount(ids_TK.flatten(), minlength=workload.experts) / ids_TK.numel()
            assert share.max() < 2.5 / workload.experts and share.min() > 0, "uniform"
            assert weights_TK.dtype == workload.weight_dtype
            torch.testing.assert_close(weights_TK.float().sum(dim=1), torch.ones(1000), atol=0.02, rtol=0)

    def test_weights_follow_the_recipe(self, tiny: Workload) -> None:
        weights = made_weights(replace(tiny, hidden=128, intermediate=128))
        assert weights.down_EHI.shape == (6, 128, 128)
        for tensor in (weights.gate_EIH, weights.up_EIH, weights.down_EHI):
            assert tensor.dtype == torch.bfloat16
            assert tensor.float().std() == pytest.approx(0.02, rel=0.02)
        assert not torch.equal(weights.gate_EIH, weights.up_EIH)

    def test_stock_times_are_interpolated_between_records(self) -> None:
        jamba, ling = get_workload("jamba_large"), get_workload("ling_flash")
        assert jamba.stock_two_gemms_ms(512) == pytest.approx(3.13 + 1.53)
        assert jamba.stock_two_gemms_ms(8192) == pytest.approx(19.68 + 9.77)
        rows = 898 * 2 / 16
        low, high = 3.18 + 1.57, 3.43 + 1.74
        assert jamba.stock_two_gemms_ms(898) == pytest.approx(low + (rows - 96) / 32 * (high - low))
        assert ling.stock_two_gemms_ms(2048) == pytest.approx(1.084 + 0.56)
        assert ling.stock_two_gemms_ms(1) is None
        assert all(w.stock_two_gemms_ms(c.tokens) for w in (jamba, ling) for c in w.prefill_cases)


class TestCheck:
    def test_match_ratio(self) -> None:
        reference = torch.tensor([1.0, 1.0, 0.0, 100.0, 1.0])
        out = torch.tensor([1.05, 1.15, 0.05, math.nan, math.inf])
        assert match_ratio(out, reference, atol=0.1, rtol=0.0) == 2 / 5
        assert match_ratio(out, reference, atol=0.1, rtol=0.1) == 3 / 5

    def test_a_layer_that_is_right_passes(self, tiny: Workload) -> None:
        labels: list[str] = []
        weights = tiny.make_weights(CPU)
        verdicts = check_layer(
            run_layer,
            tiny,
            tiny.prefill_cases,
            weights,
            rounds=3,
            generator=generator(),
            advance=labels.append,
        )
        assert len(labels) == 3 and set(verdicts) == {3, 5}
        assert all(verdicts[case.tokens].passed(case, 0.98) for case in tiny.prefill_cases)
        assert verdicts[5].rounds == 3 and set(verdicts[5].match_ratios) == {0.05, 0.01}
        assert 0 < verdicts[5].relative_error < 5e-3

    def test_an_element_never_written_fails(self, tiny: Workload) -> None:
        def forgetful(inputs: Inputs, weights: Weights, out_TH: torch.Tensor) -> None:
            expected_TH = out_TH.clone()
            run_layer(inputs, weights, expected_TH)
            out_TH[:, 1:] = expected_TH[:, 1:]

        verdicts = check_layer(
            forgetful, tiny, tiny.prefill_cases, tiny.make_weights(CPU), rounds=1, generator=generator()
        )
        assert verdicts[5].match_ratios[0.05] > 0.98, "one column of 64 would slip through the ratio"
        assert not verdicts[5].finite and not verdicts[5].passed(tiny.prefill_cases[0], 0.98)

    def test_the_worst_round_counts(self) -> None:
        verdict, reference = Verdict(), torch.ones(1, 4)
        verdict.add(reference.clone(), reference, {0.1}, 0.0)
        verdict.add(torch.tensor([[1.0, 1.0, 1.0, 2.0]]), reference, {0.1}, 0.0)
        verdict.add(reference.clone(), reference, {0.1}, 0.0)
        assert verdict.match_ratios == {0.1: 0.75} and verdict.relative_error == pytest.approx(0.5)

    def test_nothing_passes_unchecked(self) -> None:
        assert not Verdict().passed(Case(1, 0.1), 0.98)


class TestContenders:
    def test_steps_give_the_layer(self, tiny: Workload) -> None:
        weights, inputs = made_weights(tiny), tiny.make_inputs(7, generator(1))
        out_TH = torch.empty_like(inputs.x_TH)
        run_layer(inputs, weights, out_TH)
        steps = Steps(inputs, weights)
        assert torch.equal(steps.out_TH, out_TH)
        assert list(steps.calls) == ["route", "permute", "gemm1", "gemm2", "combine"]

    def test_torch_peer_gives_the_layer(self, tiny: Workload) -> None:
        weights, inputs = made_weights(tiny), tiny.make_inputs(7, generator(1))
        assert relative_error(TorchGroupedMm(weights)(inputs), reference_layer(inputs, weights)) < 1e-2


class TestTiming:
    def test_spread(self) -> None:
        spread = Spread.of([float(ms) for ms in range(11)])
        assert (spread.ms, spread.p10_ms, spread.p90_ms, spread.repeats) == (5.0, 1.0, 9.0, 11)
        assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 1)

    def test_contenders_take_turns(self) -> None:
        order: list[str] = []

        def timer(name: str, ms: float) -> Callable[[], float]:
            def run() -> float:
                order.append(name)
                return ms

            return run

        turns = Turns(least=2, most=9, budget_s=0.0, warm_up=1)
        spreads = time_in_turns({"a": timer("a", 1.0), "b": timer("b", 2.0)}, turns)
        assert order == ["a", "b"] * 3
        assert spreads["b"] == Spread(2.0, 2.0, 2.0, 2)

    @pytest.mark.parametrize(("budget_s", "expected"), [(0.0, 3), (5.5, 4), (1e9, 8)])
    def test_turns_stay_within_the_budget(self, budget_s: float, expected: int) -> None:
        now = iter(range(100))
        turns = Turns(least=3, most=8, budget_s=budget_s, warm_up=0)
        # The clock is read at the start and before each turn after the third.
        spreads = time_in_turns({"a": lambda: 1.0}, turns, clock=lambda: 3.0 * next(now))
        assert spreads["a"].repeats == expected


def a_case(**changes: Any) -> CaseResult:
    case = CaseResult(
        workload="jamba_large",
        tokens=512,
        batch=2,
        seq=256,
        ms=5.0,
        p10_ms=4.9,
        p90_ms=5.2,
        repeats=20,
        eager_ms=5.1,
        flops=10**12,
        bytes=2 * 10**10,
        experts_hit=16,
        roof_ms=4.5,
        roof_ms_datasheet=4.0,
        sol_score=0.8,
        dense_ms=2.0,
        match_ratio=0.999,
        relative_error=3e-3,
        check_rounds=10,
        passed=True,
        steps={"gemm1": 3.0, "gemm2": 1.5, "gaps": 0.0},
        peers={"torch_grouped_mm": PeerResult("all of it", 7.0, 6.9, 7.1, 7.2, 4e-3)},
        stock_two_gemms_ms=4.66,
        gemms_over_stock=4.5 / 4.66,
        recorded_peers_ms={"liger": 6.21},
    )
    return replace(case, **changes)


def a_result(*cases: CaseResult) -> RunResult:
    return RunResult(
        device="NVIDIA H200",
        date="2026-01-01T00:00:00+00:00",
        commit="0123",
        versions={"torch": "2.11", "driver": None},
        roofs={"read_TBps": 4.4, "dense_TFLOPs": 750.0},
        roofs_datasheet={"read_TBps": 4.8, "dense_TFLOPs": 989.5},
        options={"rounds": 10, "peers": ["torch_grouped_mm"]},
        state={"start": {"power_W": 100.0}},
        cases=list(cases),
    )


class TestResults:
    def test_round_trip(self, tmp_path: Path) -> None:
        result = a_result(a_case(), a_case(workload="ling_flash", batch=None, seq=None, passed=None, match_ratio=None))
        path = tmp_path / "new" / "headline.json"
        results.save(result, path)
        assert results.load(path) == result
        assert [entry.name for entry in path.parent.iterdir()] == ["headline.json"], "no temporary file stays"

    def test_has_the_fields_of_the_contract(self) -> None:
        document = results.to_json(a_result(a_case(), a_case(batch=None, seq=None)))
        assert {"device", "date", "commit", "versions", "roofs", "cases"} <= set(document)
        case, without_batch = document["cases"]
        fields = "workload tokens batch seq ms roof_ms dense_ms match_ratio passed steps peers"
        assert set(fields.split()) <= set(case)
        assert {"ms", "what"} <= set(case["peers"]["torch_grouped_mm"])
        assert "batch" not in without_batch and "seq" not in without_batch

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "cannot be read as a result"),
            ("[]", "its schema is None"),
            ('{"schema": "other/2"}', "its schema is 'other/2'"),
            (json.dumps({"schema": results.SCHEMA}), "does not follow it"),
            (json.dumps({"schema": results.SCHEMA, "cases": [{"peers": {}}]}), "does not follow it"),
        ],
    )
    def test_refuses_other_files(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "result.json"
        path.write_text(text)
        with pytest.raises(PerfError, match=message):
            results.load(path)

    def test_refuses_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(PerfError, match="cannot be read"):
            results.load(tmp_path / "none.json")

    def test_only_full_runs_take_the_place_of_the_record(self) -> None:
        full = results.result_path(None, "h200", decode=False, record=True)
        part = results.result_path(None, "h200", decode=True, record=False)
        assert full.parts[-4:] == ("perf", "results", "h200", "headline.json")
        assert part.parts[-3:] == ("h200", "partial", "decode.json")
        assert results.result_path(Path("x"), "h200", decode=False, record=False) == Path("x/headline.json")


class TestConsole:
    def test_line_of_a_case(self) -> None:
        line = console.case_line(a_case())
        for part in (
            "jamba_large",
            "512",
            "2x256",
            "5.000",
            "200",
            "4.00",
            "90.0%",
            "7.000",
            "1.40",
            "0.97",
            "pass",
        ):
            assert part in line.split()
        assert "FAIL" in console.case_line(a_case(passed=False))

    def test_output_of_all_cases_fits_what_comes_back(self) -> None:
        result = a_result(*[a_case()] * 32)
        lines = [console.header(result, Path("x/headline.json")), *map(console.case_line, result.cases)]
        assert len("\n".join([*lines, console.summary(result)])) < 6000
        assert len(lines[0].splitlines()[-1]) == len(lines[1]) + 1, "columns line up"

    def test_summary_names_what_went_wrong(self) -> None:
        broken = a_case(peers={"torch_grouped_mm": PeerResult("all", error="RuntimeError: no")}, passed=False)
        assert console.summary(a_result(a_case(), broken)).splitlines() == [
            "1 of 2 checked cases pass",
            "torch_grouped_mm: RuntimeError: no",
        ]
        assert "error" in console.case_line(broken)

    def test_no_progress_bar_without_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        with console.progress_bar(3) as advance:
            advance("a step")
        assert capsys.readouterr() == ("", "")


class TestEnvironment:
    def test_commit_given_by_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc-dirty")
        assert environment.commit() == "abc-dirty"

    def test_short_names(self) -> None:
        assert environment.short_device_name("NVIDIA H200") == "h200"
        assert environment.short_device_name("NVIDIA H100 80GB HBM3") == "h100_80gb_hbm3"


class TestRefusals:
    def refusal(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        assert main(["run", *arguments]) == 2
        message = capsys.readouterr().err.strip()
        assert len(message.splitlines()) == 1
        return message

    def test_unknown_workload(self, capsys: pytest.CaptureFixture[str]) -> None:
        message = self.refusal(capsys, "--workload", "jambo")
        assert message == "perf: unknown workload 'jambo': known are jamba_large, ling_flash"

    def test_unknown_tokens(self, capsys: pytest.CaptureFixture[str]) -> None:
        message = self.refusal(capsys, "--workload", "jamba_large", "--tokens", "7", "512")
        assert message.startswith("perf: jamba_large has no headline case of 7 tokens; it has 512, 898")

    def test_unknown_peer(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "unknown peer 'cudnn'" in self.refusal(capsys, "--peers", "cudnn")

    def test_no_cuda_device(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert self.refusal(capsys) == "perf: perf run needs a CUDA device and torch sees none"

    def test_too_little_memory(self) -> None:
        plans = runner.make_plans(runner.Options(workloads=("jamba_large",)))
        with pytest.raises(PerfError, match=r"jamba_large needs about .* NVIDIA L4 has 24 GB free"):
            runner.require_memory(plans, get_peers(list(PEERS)), 24 * 10**9, "NVIDIA L4")

    def test_both_workloads_fit_an_h200(self) -> None:
        plans = runner.make_plans(runner.Options(workloads=tuple(workloads())))
        runner.require_memory(plans, get_peers(list(PEERS)), 139 * 2**30, "NVIDIA H200")

    @pytest.mark.parametrize("rounds", ["0", "-1", "x"])
    def test_bad_rounds(self, rounds: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            build_parser().parse_args(["run", "--rounds", rounds])
        assert "--rounds" in capsys.readouterr().err


class TestOptions:
    def options(self, *arguments: str) -> runner.Options:
        return options_of(build_parser().parse_args(["run", *arguments]))

    def test_defaults_are_for_the_record(self) -> None:
        options = self.options()
        assert options.rounds == 10 and options.for_the_record
        assert self.options("--decode").for_the_record

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--quick"],
            ["--no-check"],
            ["--rounds", "3"],
            ["--tokens", "512"],
            ["--workload", "ling_flash"],
            ["--peers"],
        ],
    )
    def test_anything_less_is_not(self, arguments: list[str]) -> None:
        assert not self.options(*arguments).for_the_record


class FakeStopwatch:
    """Runs the calls; every call takes 2 ms."""

    def __init__(self, device: torch.device) -> None:
        pass

    def device_ms(self, call: Callable[[], object]) -> float:
        call()
        return 2.0

    eager_ms = device_ms


class FakeGraph:
    """Replays by calling again and copying into the captured output, as a graph writes to the same memory."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.output = call, call()

    def replay(self) -> None:
        again = self.call()
        if isinstance(again, torch.Tensor):
            self.output.copy_(again)


@pytest.fixture
def cpu_run(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `runner.run` measure the tiny workload on the CPU, with fake clocks and graphs."""
    monkeypatch.setattr(runner, "get_workload", lambda name: tiny)
    monkeypatch.setattr(runner, "require_device", lambda plans, peers: CPU)
    monkeypatch.setattr(runner, "Stopwatch", FakeStopwatch)
    monkeypatch.setattr(Captured, "of", FakeGraph)
    monkeypatch.setattr(runner, "measure_roofs", lambda stopwatch, device: Roofs(4.4, 750.0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.usefixtures("cpu_run")
class TestRun:
    def run(self, folder: Path, **arguments: Any) -> RunResult:
        return runner.run(runner.Options(workloads=("tiny",), rounds=2, output=folder, **arguments))

    def test_every_case_is_checked_timed_and_saved(self, tmp_path: Path) -> None:
        result = self.run(tmp_path)
        assert [(case.tokens, case.match_ratio, case.passed) for case in result.cases] == [
            (3, 1.0, True),
            (5, 1.0, True),
            (5, 1.0, True),
        ]
        case = result.cases[1]
        assert case.ms == case.eager_ms == case.dense_ms == 2.0
        assert case.steps == {
            "route": 2.0,
            "permute": 2.0,
            "gemm1": 2.0,
            "gemm2": 2.0,
            "combine": 2.0,
            "gaps": 0.0,
        }
        peer = case.peers["torch_grouped_mm"]
        assert peer.error is None and peer.ms == 2.0 and peer.relative_error is not None
        assert case.sol_score == pytest.approx(0.5) and case.recorded_peers_ms == {"other": 1.5}
        saved = results.load(tmp_path / "headline.json")
        assert saved.cases == result.cases and not saved.complete

    def test_what_was_measured_survives_a_crash(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        measure = runner._measure

        def dies_at_5(workload: Workload, inputs: Inputs, *rest: Any) -> runner.Measurement:
            if len(inputs.x_TH) == 5:
                raise RuntimeError("unspecified launch failure")
            return measure(workload, inputs, *rest)

        monkeypatch.setattr(runner, "_measure", dies_at_5)
        with pytest.raises(RuntimeError, match="launch failure"):
            self.run(tmp_path)
        assert [case.tokens for case in results.load(tmp_path / "headline.json").cases] == [3]

    def test_a_wrong_peer_is_not_timed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TorchGroupedMm, "__call__", lambda self, inputs: torch.zeros_like(inputs.x_TH))
        peer = self.run(tmp_path).cases[0].peers["torch_grouped_mm"]
        assert peer.ms is None and peer.error is not None and "wrong output" in peer.error

    def test_a_peer_that_raises_costs_its_own_column(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(self: TorchGroupedMm, weights: Weights) -> None:
            raise RuntimeError("no kernel\nfor this device")

        monkeypatch.setattr(TorchGroupedMm, "__init__", broken)
        case = self.run(tmp_path).cases[0]
        assert case.passed and case.peers["torch_grouped_mm"].error == "RuntimeError: no kernel for this device"
        assert case.sol_score is None

    def test_a_replay_that_writes_nothing_fails_the_case(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeGraph, "replay", lambda self: None)
        case = self.run(tmp_path).cases[0]
        assert case.match_ratio == 1.0 and case.passed is False

    def test_unchecked_is_neither_passed_nor_failed(self, tmp_path: Path) -> None:
        result = runner.run(runner.Options(workloads=("tiny",), rounds=0, peers=(), output=tmp_path))
        assert {(case.passed, case.match_ratio) for case in result.cases} == {(None, None)}
