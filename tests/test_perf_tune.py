"""perf tune on the CPU: from times to the table, what a sweep rejects, and that it goes on where it stopped."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cutlass_moe
from cutlass_moe import heuristics
from cutlass_moe.config import GemmConfig
from perf import PerfError, environment, gemm_table, sweep, tune_command, tune_file, tune_space
from perf.__main__ import main
from perf.gemm_table import Point, Shape
from perf.monitor import Monitor
from perf.sweep import Problem, forced, problems
from perf.timing import Captured, Turns
from perf.tune_file import MeasuredPoint, TuneFile
from perf.workloads import Workload

SHAPE = Shape(2, 2048, 4096)
NARROW, WIDE, GATHER = "128x16_32_c2", "128x64_96_128_c2_pp", "128x16_32_c2_g"
WORKLOAD = Workload("tiny", "", hidden=64, intermediate=32, experts=4, top_k=2)


def point(rows: float, **times_ms: float) -> Point:
    return Point(SHAPE, rows, times_ms)


class TestTable:
    def test_names_are_read_back(self) -> None:
        for config in [*tune_space.default_space(), *heuristics.configs_of(1), *heuristics.configs_of(2)]:
            assert gemm_table.config_from_name(config.name) == config
        with pytest.raises(PerfError, match="is no GEMM configuration"):
            gemm_table.config_from_name("128x64")

    def test_few_configurations_cover_all_points(self) -> None:
        points = [point(1, a=1.0, b=1.005), point(10, b=2.0, c=2.01), point(99, c=3.0, d=2.99)]
        assert gemm_table.shortlist(points, 0.01) == ["b", "d"], "the least loss where as many are covered"
        assert gemm_table.shortlist(points, 0.0) == ["a", "b", "d"]

    def test_a_change_falls_between_the_points(self) -> None:
        points = [point(4, a=1.0, b=2.0), point(16, a=2.0, b=1.0), point(64, a=3.0, b=1.0)]
        assert gemm_table.choose(points, ["a", "b"], 0.01) == [(8.0, "a"), (float("inf"), "b")]

    def test_a_neighbour_within_the_tolerance_stays(self) -> None:
        points = [point(4, a=1.0, b=1.1), point(16, a=1.005, b=1.0), point(64, a=1.0, b=1.1)]
        assert gemm_table.choose(points, ["a", "b"], 0.01) == [(float("inf"), "a")]

    def test_look_up(self) -> None:
        other = Point(Shape(2, 49152, 8192), 4, {"c": 1.0})
        down = Point(Shape(1, 4096, 1024), 4, {"d": 1.0})
        entries = gemm_table.make_entries([point(4, a=1.0, b=2.0), point(16, a=2.0, b=1.0), other, down], 0.01)
        assert json.loads(gemm_table.to_text(entries, {"device": "x"}))["entries"] == entries
        assert [gemm_table.look_up(entries, SHAPE, rows) for rows in (0.1, 8.0, 8.1, 1e6)] == ["a", "a", "b", "b"]
        assert gemm_table.look_up(entries, Shape(2, 40000, 8000), 5) == "c", "the nearest shape"
        assert gemm_table.look_up(entries, Shape(1, 2048, 4096), 5) == "d", "accumulators come first"

    @pytest.mark.parametrize(
        ("gathering_ms", "choices"),
        [
            ((0.9, 0.9, 0.9), [[None, "a_g"]]),
            ((0.9, 0.9, 1.1), [[32.0, "a_g"]]),
            ((0.9, 1.005, 0.9), [[None, "a_g"]]),
            ((0.9, 1.02, 0.9), [[8.0, "a_g"]]),
            ((0.9, None, 0.9), [[8.0, "a_g"]]),
            ((1.1, 0.9, 0.9), None),
            ((1.1, 1.1, 1.1), None),
            ((None, None, None), None),
        ],
        ids=["all", "some", "as-fast-will-do", "slower", "not-timed", "not-from-the-fewest", "none", "never-timed"],
    )
    def test_gather_reaches_as_far_as_it_wins(
        self, gathering_ms: tuple[float | None, ...], choices: list[list[Any]] | None
    ) -> None:
        """From the fewest rows on, up to between the last point won and the first one lost."""
        points = [
            point(rows, **{"a": 1.0, **({} if ms is None else {"a_g": ms})})
            for rows, ms in zip((4, 16, 64), gathering_ms, strict=True)
        ]
        other = Point(Shape(2, 49152, 8192), 4, {"a": 1.0})
        entry, other_entry = gemm_table.make_entries([*reversed(points), other], 0.01)
        assert entry.get("gather") == choices and entry["choices"] == [[None, "a"]]
        assert "gather" not in other_entry

    def test_choices_that_gather(self) -> None:
        """Among themselves as few as can be, by the points that they win; `choices` are as they would be without."""
        times = [(4, 1.0, 1.2, 0.5, 0.6), (16, 1.0, 1.2, 0.8, 0.6), (64, 1.0, 1.2, 0.9, 0.6), (256, 1.0, 0.5, 0.7, 1.5)]
        points = [point(rows, a=a, b=b, c_g=c, d_g=d) for rows, a, b, c, d in times]
        (entry,) = gemm_table.make_entries(points, 0.01)
        assert entry["choices"] == [[128.0, "a"], [None, "b"]]
        assert entry["gather"] == [[8.0, "c_g"], [128.0, "d_g"]]
        assert json.loads(gemm_table.to_text([entry], {}))["entries"] == [entry]
        names = [gemm_table.look_up([entry], SHAPE, rows) for rows in (4, 9, 128, 129)]
        assert names == ["c_g", "d_g", "d_g", "b"]
        (without,) = gemm_table.make_entries([point(rows, a=a, b=b) for rows, a, b, *_ in times], 0.01)
        assert without == {key: value for key, value in entry.items() if key != "gather"}
        assert gemm_table.describe_changes([without], [entry], points)[0] == (
            "2 x 1024 x 4096, 4 rows: a (1.0000 ms) -> c_g (0.5000 ms, +50.0% of the time saved)"
        )

    def test_says_what_would_change(self) -> None:
        points = [point(4, a=1.0, b=1.25)]
        new = gemm_table.make_entries(points, 0.01)
        (line,) = gemm_table.describe_changes([], new, points)
        assert line == "2 x 1024 x 4096, 4 rows: nothing -> a (1.0000 ms)"
        old = [{**new[0], "choices": [[None, "b"]]}]
        (line,) = gemm_table.describe_changes(old, new, points)
        assert line == "2 x 1024 x 4096, 4 rows: b (1.2500 ms) -> a (1.0000 ms, +20.0% of the time saved)"
        assert gemm_table.describe_changes(new, new, points) == []

    def test_refuses_another_file(self, tmp_path: Path) -> None:
        path = tmp_path / "table.json"
        assert gemm_table.load_entries(path) == []
        path.write_text('{"schema": "other"}')
        with pytest.raises(PerfError, match="is not a table of this version"):
            gemm_table.load_entries(path)


class TestSpace:
    def test_is_legal(self) -> None:
        space = tune_space.default_space()
        assert len(space) == len(set(space)) > 20
        assert all(tune_space.is_legal(config, 2) for config in space)
        plain = [config for config in space if not config.gather]
        assert all(tune_space.is_legal(config, 1) for config in plain)
        gathering = [config for config in space if config.gather]
        assert gathering and {replace(config, gather=False) for config in gathering} < set(plain)
        assert not any(tune_space.is_legal(config, 1) for config in gathering), "GEMM 2's rows are grouped already"
        kernels = tune_space.specs(space)
        assert len(kernels) == 2 * len(plain) + len(gathering)
        assert all(spec.epilogue.accumulators == 2 for spec in kernels if spec.config.gather)

    def test_sensible_widths(self) -> None:
        narrow, wide = GemmConfig(128, (16, 32), 2), GemmConfig(128, (64, 128, 256), 2)
        assert tune_space.is_sensible(narrow, 1) and not tune_space.is_sensible(narrow, 300)
        assert tune_space.is_sensible(wide, 1000) and not tune_space.is_sensible(wide, 4)

    def test_tokens(self) -> None:
        assert tune_space.tokens_of((0.1, 64), experts=256, top_k=8) == [3, 2048]


@pytest.fixture
def cpu_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake clocks and graphs."""

    class FakeGraph:
        def __init__(self, call: Callable[[], torch.Tensor]) -> None:
            self.output = call()
            self.replay = call

    monkeypatch.setattr(Captured, "of", FakeGraph)


class FakeStopwatch:
    def device_ms(self, call: Callable[[], object]) -> float:
        call()
        return 2.0


def made_problems() -> list[Problem]:
    generator = torch.Generator("cpu").manual_seed(0)
    weights = WORKLOAD.make_weights(torch.device("cpu"))
    weights.refill(generator)
    return list(problems(WORKLOAD, weights, 9, generator))


def swept(problem: Problem, names: Sequence[str] = (NARROW, WIDE)) -> MeasuredPoint:
    configs = tune_space.named(names)
    turns = Turns(least=1, most=1, budget_s=0.0, warm_up=0)
    return sweep.sweep(problem, configs, 9, FakeStopwatch(), Monitor(None), turns)  # type: ignore[arg-type]


@pytest.mark.usefixtures("cpu_sweep")
class TestSweep:
    def test_both_gemms(self) -> None:
        first, second = (swept(problem) for problem in made_problems())
        assert first.key == (2, 64, 64, 4, 9) and second.key == (1, 64, 32, 4, 9)
        assert first.rows == 4.5 and first.times_ms == second.times_ms == {NARROW: 2.0, WIDE: 2.0}
        assert first.wrong == second.wrong == {}

    def test_a_permuted_copy_is_timed_where_rows_are_not_gathered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        permute, permuted = cutlass_moe.permute, []

        def counted(*arguments: Any) -> torch.Tensor:
            permuted.append(arguments)
            return permute(*arguments)

        problem, second = made_problems()
        monkeypatch.setattr(cutlass_moe, "permute", counted)
        for name, copies in ((NARROW, 3), (GATHER, 0)):  # captured, checked and timed
            permuted.clear()
            assert list(swept(problem, [name]).times_ms) == [name] and len(permuted) == copies
        permuted.clear()
        assert list(swept(problem, [NARROW, GATHER]).times_ms) == [NARROW, GATHER], "bit for bit the same"
        swept(second)
        assert len(permuted) == 3, "GEMM 2's rows are grouped already"

    def test_wrong_configurations_are_not_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run, calls = Problem.run, iter(range(100))

        def sometimes_wrong(self: Problem, gather: bool) -> torch.Tensor:
            out = run(self, gather)
            if next(calls) >= 2:  # the second configuration
                out[0, 0] += 1
            return out

        monkeypatch.setattr(Problem, "run", sometimes_wrong)
        point = swept(made_problems()[0])
        assert list(point.times_ms) == [NARROW] and "not bitwise" in point.wrong[WIDE]
        monkeypatch.setattr(Problem, "run", lambda self, gather: self.out.zero_())
        point = swept(made_problems()[1])
        assert point.times_ms == {} and "relative error 1" in point.wrong[NARROW]

    def test_a_kernel_that_is_missing_is_listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(self: Problem, gather: bool) -> torch.Tensor:
            raise RuntimeError("kernel is in\nno library")

        monkeypatch.setattr(Problem, "run", missing)
        assert swept(made_problems()[0]).wrong[NARROW] == "RuntimeError: kernel is in no library"

    def test_forced_configuration(self) -> None:
        config = GemmConfig(256, (16, 32), 1)
        with forced(config):
            assert heuristics.choose_gemm_config(1, 2, 3, 4, 5, gather=True) == config
        assert heuristics.choose_gemm_config(64, 4, 64, 64, 1, False) in heuristics.configs_of(1)
        assert hasattr(importlib.import_module("cutlass_moe.grouped_gemm"), "_gemm_kernel"), "whose cache it clears"


def measured(rows: float, **times_ms: float) -> MeasuredPoint:
    return MeasuredPoint(2, 2048, 4096, 256, round(rows * 32), rows, times_ms, sources=dict.fromkeys(times_ms, "1"))


class TestFile:
    def test_round_trip(self, tmp_path: Path) -> None:
        file = TuneFile("NVIDIA H200", "0123", "2026-01-01", [measured(4, a=1.0)])
        file.put(measured(4, a=2.0))
        file.save(tmp_path / "tune.json")
        loaded = tune_file.load(tmp_path / "tune.json")
        assert loaded == file and [point.times_ms for point in loaded.points] == [{"a": 2.0}]

    def test_points_of_a_table(self) -> None:
        """Those with a configuration that does not gather: a table of others would lack `choices`."""
        points = [measured(4, **{GATHER: 1.0}), measured(8, **{GATHER: 1.0, NARROW: 2.0}), measured(16)]
        assert [point.rows for point in TuneFile("NVIDIA H200", "0123", "2026-01-01", points).usable()] == [8]

    def test_what_is_known_is_not_measured_again(self) -> None:
        known = measured(4, a=1.0, b=1.0)
        assert known.covers(["a"], {"a": "1"}) and known.covers(["a", "b"], {"a": "1", "b": "1"})
        assert not known.covers(["a", "c"], {"a": "1", "c": "1"}), "another configuration"
        assert not known.covers(["a"], {"a": "2"}), "the kernel changed"

    @pytest.mark.parametrize("text", ["{", "[]", '{"schema": "cutlass_moe.tune/1"}', '{"schema": "x"}'])
    def test_refuses_other_files(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "tune.json"
        path.write_text(text)
        with pytest.raises(PerfError):
            tune_file.load(path)


class TestCommand:
    @pytest.fixture
    def table(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = tmp_path / "gemm_table.json"
        monkeypatch.setattr(tune_command, "TABLE", path)
        return path

    @pytest.fixture
    def measurements(self, tmp_path: Path) -> Path:
        path = tmp_path / "tune.json"
        points = [measured(4, **{NARROW: 1.0, WIDE: 1.2}), measured(64, **{NARROW: 2.0, WIDE: 1.5})]
        TuneFile("NVIDIA H200", "0123", "2026-01-01", points).save(path)
        return path

    def test_says_before_it_writes(self, table: Path, measurements: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["tune", "--table-only", "--measurements", str(measurements)]
        assert main(arguments) == 0 and not table.exists()
        said = capsys.readouterr().out
        assert f"4 rows: nothing -> {NARROW}" in said and "--write makes it so" in said
        assert main([*arguments, "--write"]) == 0
        entries = gemm_table.load_entries(table)
        assert entries[0]["choices"] == [[16.0, NARROW], [None, WIDE]]
        capsys.readouterr()
        assert main(arguments) == 0 and "would not change" in capsys.readouterr().out

    def test_no_table_without_what_grouped_rows_need(
        self, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "gather.json"
        TuneFile("NVIDIA H200", "0123", "2026-01-01", [measured(4, **{GATHER: 1.0})]).save(path)
        assert main(["tune", "--table-only", "--write", "--measurements", str(path)]) == 2 and not table.exists()
        assert "no configuration that does not gather was timed" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--configs", "64x8"], "is no GEMM configuration"),
            (["--configs", "64x8_c2"], "64x8_c2 is not legal"),
            (["--table-only"], "needs --measurements"),
            (["--library", "nowhere"], "has no kernel library"),
            (["--workload", "jambo"], "unknown workload"),
        ],
    )
    def test_refusals(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["tune", *arguments]) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.usefixtures("cpu_sweep")
    def test_goes_on_where_it_stopped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fake_sweep(problem: Problem, configs: Any, tokens: int, *rest: Any) -> MeasuredPoint:
            measured_keys.append((problem.accumulators, tokens))
            tried.setdefault(problem.accumulators, []).append([config.name for config in configs])
            if len(measured_keys) == 3:
                raise RuntimeError("unspecified launch failure")
            times_ms = {config.name: 1.0 for config in configs}
            key = (problem.features, problem.a_MK.shape[1], 4)
            return MeasuredPoint(problem.accumulators, *key, tokens, tokens / 2, times_ms)

        measured_keys: list[tuple[int, int]] = []
        tried: dict[int, list[list[str]]] = {}
        monkeypatch.setattr(tune_command, "sweep", fake_sweep)
        monkeypatch.setattr(tune_command, "custom_workload", lambda shape: WORKLOAD)
        monkeypatch.setattr(tune_command, "require_device", lambda plans, peers: torch.device("cpu"))
        monkeypatch.setattr(tune_command, "Stopwatch", lambda device: FakeStopwatch())
        monkeypatch.setattr(environment, "gpu_uuid", lambda: None)
        monkeypatch.setattr(tune_command, "kernel_sources", lambda configs: {})
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        arguments = argparse.Namespace(
            library=None, workload=None, shape=["x"], rows=[2.0, 4.0], measurements=tmp_path / "tune.json"
        )
        configs = tune_space.named([NARROW, GATHER])
        with pytest.raises(RuntimeError, match="launch failure"):
            tune_command.measure(arguments, configs)
        file = tune_command.measure(arguments, configs)
        assert measured_keys == [(2, 4), (1, 4), (2, 8), (2, 8), (1, 8)]
        assert tried == {2: [[NARROW, GATHER]] * 3, 1: [[NARROW]] * 2}, "GEMM 2 has no use for gather"
        assert len(file.points) == len(tune_file.load(tmp_path / "tune.json").points) == 4
