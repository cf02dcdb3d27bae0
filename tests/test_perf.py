"""perf on the CPU: arithmetic, inputs, check, files, refusals, and a whole run with fake clocks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perf import PerfError, console, environment, options, results
from perf.__main__ import build_parser, main
from perf.check import Verdict, check_layer, match_ratio
from perf.monitor import Monitor
from perf.options import Options
from perf.ours import run_layer
from perf.peers import PEERS, get_peers
from perf.results import CaseResult, PeerResult, RunResult, StepResult
from perf.roofline import Roofs, Work, layer_work, sol_score, step_works
from perf.run_command import options_of
from perf.timing import EagerTimer, Spread, Stopwatch, Turns, time_in_turns
from perf.workloads import Case, Inputs, Weights, Workload, custom_workload, get_workload, more_models, workloads

B200 = Roofs(read_TBps=7.667, dense_TFLOPs=1811)
CPU = torch.device("cpu")


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

    def test_steps_add_up_to_the_layer_and_their_intermediates(self) -> None:
        shape = {"tokens": 5, "top_k": 2, "hidden": 64, "intermediate": 32}
        steps = step_works(**shape, experts=8, experts_hit=4, weight_bytes=4, gathers=False)
        layer = layer_work(**shape, experts_hit=4)
        gemms = steps["gemm1"], steps["gemm2"]
        assert sum(step.flops for step in gemms) == layer.flops
        weights, x_rows, h_rows = 3 * 4 * 64 * 32 * 2, 10 * 64 * 2, 10 * 32 * 2
        assert sum(step.bytes for step in gemms) == weights + 2 * x_rows + 2 * h_rows + 2 * 4 * 10
        x_and_index = 5 * 64 * 2 + 4 * 10
        assert steps["permute"].bytes == x_and_index + x_rows
        assert steps["route"].bytes == 10 * (8 + 4) + 4 * 9 + 4 * 4 * 10, "four tables of rows"
        gathering = step_works(**shape, experts=8, experts_hit=4, weight_bytes=4, gathers=True)
        assert "permute" not in gathering
        assert gathering["gemm1"].bytes == steps["gemm1"].bytes - x_rows + x_and_index

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
        assert [case.tokens for case in ling.cases("decode")] == [1, 4, 16, 64, 256, 1024]

    def test_filter_by_tokens(self) -> None:
        cases = get_workload("jamba_large").cases("headline", tokens=[2048, 512])
        assert [case.tokens for case in cases] == [512] * 3 + [2048] * 5

    def test_other_layers(self) -> None:
        assert [case.tokens for case in get_workload("deepseek_v3").cases("headline")] == [4096, 16384]
        assert get_workload("mimo_v2_flash").routing.name == "replacement" and len(more_models()) == 5
        custom = custom_workload("4096,1024,256,8")
        assert custom.name == "H4096_I1024_E256_K8" and custom.experts == 256
        assert [case.tokens for case in custom.cases("headline", [9, 2])] == [2, 9]

    def test_all_is_both_grids(self) -> None:
        cases = get_workload("ling_flash").cases("all")
        assert len(cases) == 22 and {case.grid for case in cases} == {"headline", "decode"}

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
        turns_taken = [order[start : start + 2] for start in (0, 2, 4)]
        assert all(sorted(taken) == ["a", "b"] for taken in turns_taken)
        assert spreads["b"] == Spread(2.0, 2.0, 2.0, 2)

    @pytest.mark.parametrize(("budget_s", "expected"), [(0.0, 3), (5.5, 4), (1e9, 8)])
    def test_turns_stay_within_the_budget(self, budget_s: float, expected: int) -> None:
        now = iter(range(100))
        turns = Turns(least=3, most=8, budget_s=budget_s, warm_up=0)
        # The clock is read at the start and before each turn after the third.
        spreads = time_in_turns({"a": lambda: 1.0}, turns, clock=lambda: 3.0 * next(now))
        assert spreads["a"].repeats == expected

    def test_an_eager_call_is_timed_right_after_an_untimed_one(self) -> None:
        host_ms = iter([0.04, 0.05, 0.06])
        order: list[str] = []

        class FakeStopwatch(Stopwatch):
            def __init__(self) -> None:
                pass

            def eager(self, call: Callable[[], object]) -> tuple[float, float]:
                order.append("idle")
                return 2.0, next(host_ms)

            def device_ms(self, call: Callable[[], object]) -> float:
                order.append("queued")
                return 1.0

        timer = EagerTimer(FakeStopwatch(), lambda: order.append("call"))
        assert [timer.idle(), timer.idle(), timer.idle(), timer.queued()] == [2.0, 2.0, 2.0, 1.0]
        assert order == 3 * ["call", "idle"] + ["call", "queued"]
        assert timer.host_us == pytest.approx(50.0)

    def test_monitor_reads_samples_and_survives_their_absence(self) -> None:
        with Monitor(None, ["sh", "-c", "echo 1500, 690.5, 50; echo '[N/A], 1, 2'; echo 1700, 700.5, 60"]) as monitor:
            assert monitor._process is not None
            monitor._process.wait()
            time.sleep(0.2)
            assert monitor.over(0.0) == {"sm_clock_MHz": 1600.0, "power_W": 695.5, "temperature_C": 55.0}
            assert monitor.over(math.inf) == {}
        with Monitor(None, ["no-such-program"]) as monitor:
            assert monitor.over(0.0) == {}


def a_case(**changes: Any) -> CaseResult:
    case = CaseResult(
        workload="jamba_large",
        grid="headline",
        routing="uniform",
        shape={"hidden": 8192, "intermediate": 24576, "experts": 16, "top_k": 2},
        tokens=512,
        batch=2,
        seq=256,
        ms=5.0,
        p10_ms=4.9,
        p90_ms=5.2,
        repeats=20,
        cool_ms=4.8,
        cool_p10_ms=4.7,
        cool_p90_ms=4.9,
        eager_ms=5.1,
        host_us=38.0,
        hot_state={"sm_clock_MHz": 1500.0, "power_W": 690.0},
        cool_state={},
        flops=10**12,
        bytes=2 * 10**10,
        experts_hit=16,
        rows_max=80,
        roof_ms=4.5,
        roof_ms_datasheet=4.0,
        sol_score=0.8,
        dense_ms=2.0,
        dense_cool_ms=1.8,
        match_ratio=0.999,
        relative_error=3e-3,
        check_rounds=10,
        passed=True,
        steps={
            "gemm1": StepResult(3.0, 2.9, 3.1, 6 * 10**11, 13 * 10**9),
            "gemm2": StepResult(1.5, 1.4, 1.6, 4 * 10**11, 6 * 10**9),
        },
        gaps_ms=0.5,
        peers={"torch_grouped_mm": PeerResult("all of it", "layer", 7.0, 6.9, 7.1, 7.2, 90.0, 6.8)},
        stock_two_gemms_ms=4.66,
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
        fields = "workload tokens batch seq ms cool_ms host_us roof_ms dense_ms match_ratio passed steps peers"
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
            (json.dumps({"schema": results.SCHEMA, "cases": [{"peers": {}, "steps": {}}]}), "does not follow it"),
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
        full = results.result_path(None, "h200", "headline", record=True)
        part = results.result_path(None, "h200", "decode", record=False)
        assert full.parts[-4:] == ("perf", "results", "h200", "headline.json")
        assert part.parts[-3:] == ("h200", "partial", "decode.json")
        assert results.result_path(Path("x"), "h200", "headline", record=False) == Path("x/headline.json")


class TestConsole:
    def test_line_of_a_case(self) -> None:
        line = console.case_line(a_case()).split()
        for part in (
            "jamba_large",
            "512",
            "5.000",
            "4.800",
            "5.100",
            "38",
            "200",
            "4.00",
            "90.0%",
            "0.80",
            "1.40",
            "0.97",
        ):
            assert part in line
        assert "FAIL" in console.case_line(a_case(passed=False))

    def test_output_of_all_cases_fits_what_comes_back(self) -> None:
        result = a_result(*[a_case()] * 43)
        lines = [console.header(result, Path("x/headline.json")), *map(console.case_line, result.cases)]
        assert len("\n".join([*lines, console.summary(result)])) < 9000
        assert len(lines[0].splitlines()[-1]) == len(lines[1]) + 1, "columns line up"

    def test_summary_names_what_went_wrong(self) -> None:
        peers = {
            "torch_grouped_mm": PeerResult("all", error="RuntimeError: no"),
            "quack": PeerResult("all", absent="quack is not installed"),
        }
        result = a_result(a_case(), a_case(peers=peers, passed=False))
        result.not_for_the_record = "the tree differs from its commit"
        assert console.summary(result).splitlines() == [
            "1 of 2 checked cases pass",
            "torch_grouped_mm: 1.40 to 1.40 times ours in 1 cases; RuntimeError: no",
            "quack: absent: quack is not installed",
            "not for the record: the tree differs from its commit",
        ]

    def test_no_progress_bar_without_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        with console.progress_bar(3) as advance:
            advance("a step", 1)
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
        assert message.startswith("perf: unknown workload 'jambo': known are jamba_large, ling_flash, mixtral_8x7b")

    def test_unknown_tokens(self, capsys: pytest.CaptureFixture[str]) -> None:
        message = self.refusal(capsys, "--workload", "jamba_large", "--tokens", "7", "512")
        assert message.startswith("perf: jamba_large has no headline case of 7 tokens; it has 512, 898")

    def test_unknown_peer(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "unknown peer 'cudnn'" in self.refusal(capsys, "--peers", "cudnn")

    def test_no_cuda_device(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert self.refusal(capsys) == "perf: perf needs a CUDA device and torch sees none"

    def test_too_little_memory(self) -> None:
        plans = options.make_plans(Options(workloads=("jamba_large",)))
        with pytest.raises(PerfError, match=r"jamba_large needs about .* NVIDIA L4 has 24 GB free"):
            options.require_memory(plans, get_peers(list(PEERS)), 24 * 10**9, "NVIDIA L4")

    def test_both_workloads_fit_an_h200(self) -> None:
        plans = options.make_plans(Options(workloads=tuple(workloads()), grid="all"))
        options.require_memory(plans, get_peers(list(PEERS)), 139 * 2**30, "NVIDIA H200")

    @pytest.mark.parametrize("rounds", ["0", "-1", "x"])
    def test_bad_rounds(self, rounds: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            build_parser().parse_args(["run", "--rounds", rounds])
        assert "--rounds" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--shape", "64,32,4"], "a shape is H,I,E,K"),
            (["--shape", "64,32,4,5"], "K between 1 and E"),
            (["--shape", "60,32,4,1"], "multiples of 8"),
            (["--routing", "zipf:x"], "must be a number"),
            (["--routing", "most"], "unknown routing 'most'"),
            (["--routing", "nowhere.npy"], "cannot be read as expert ids"),
            (["--shape", "64,32,4,1", "--tokens", "0"], "at least 1"),
        ],
    )
    def test_bad_requests(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert message in self.refusal(capsys, *arguments)

    def test_recorded_ids_that_do_not_fit(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "ids.json"
        for ids, tokens, message in (
            ([[0, 1, 2]], 1, "has 3 ids a token and the workload 2"),
            ([[0, 1]], 2, "has 1 tokens, fewer than the 2"),
            ([[0, 4]], 1, "ids from 0 to 4, outside the 4"),
            ([0, 1], 1, "whole numbers of shape [T, K]"),
        ):
            path.write_text(json.dumps(ids))
            request = ["--shape", "64,32,4,2", "--tokens", str(tokens), "--routing", str(path)]
            assert message in self.refusal(capsys, *request)


class TestOptions:
    def options(self, *arguments: str) -> Options:
        return options_of(build_parser().parse_args(["run", *arguments]))

    def test_defaults_can_be_the_record(self) -> None:
        chosen = self.options()
        assert chosen.rounds == 10 and chosen.why_partial() is None and chosen.file_name == "headline"
        for flag, name in (("--decode", "decode"), ("--all", "full")):
            assert self.options(flag).why_partial() is None and self.options(flag).file_name == name

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--quick"],
            ["--no-check"],
            ["--rounds", "3"],
            ["--tokens", "512"],
            ["--workload", "ling_flash"],
            ["--routing", "zipf"],
            ["--shape", "64,32,4,2"],
            ["--peers"],
        ],
    )
    def test_anything_less_is_not(self, arguments: list[str]) -> None:
        assert self.options(*arguments).why_partial()

    def test_a_dirty_or_unknown_tree_is_not_for_the_record(self) -> None:
        assert environment.why_not_for_the_record("0123") is None
        assert "differs" in str(environment.why_not_for_the_record("0123-dirty"))
        assert environment.COMMIT_VARIABLE in str(environment.why_not_for_the_record("unknown"))

    def test_files_of_other_runs(self) -> None:
        assert self.options("--routing", "zipf:1.2", "--decode").file_name == "decode-zipf_1.2"
        assert self.options("--shape", "64,32,4,2").file_name == "shapes"
        assert self.options("--workload", "deepseek_v3").file_name == "shapes"
