"""perf traffic on the CPU: ncu's output read and told apart by call and step, what it refuses, and a whole command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cutlass_moe import heuristics
from cutlass_moe.config import GemmConfig
from perf import PerfError, ncu, options, profiled, traffic, traffic_command
from perf.__main__ import main
from perf.ncu import Kernel
from perf.options import Options, Plan, make_plans
from perf.traffic import CaseTraffic, ProfiledCase, StepTraffic, TrafficResult
from perf.workloads import Workload

NAMES = (
    "ID",
    "Kernel Name",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "gpu__time_duration.sum",
    "lts__t_sectors_op_read.sum",
    "profiler__replayer_passes",
)
UNITS = ("", "", "byte", "byte", "ns", "sector", "pass")
OUTPUT = """\
==PROF== Connected to process 824
==PROF== Profiling "kernel_count_kernel_0": 0%....100% - 1 pass
"ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum","dram__bytes_write.sum",\
"lts__t_sectors_op_read.sum","profiler__replayer_passes"
"","","byte","ns","byte","sector","pass"
"0","kernel_count_kernel_0","142,848","3,808","512","9,368","1"
==WARNING== something else
"1","kernel_moeGroupedGemm_object_0","22,943,576,576","17,009,152","820,404,224","3,913,347,787","1"
==PROF== Disconnected from process 824
"""


def table(*rows: Sequence[str], names: Sequence[str] = NAMES, units: Sequence[str] = UNITS) -> str:
    return "\n".join(",".join(f'"{value}"' for value in row) for row in (names, units, *rows)) + "\n"


def a_row(name: str, *numbers: str) -> tuple[str, ...]:
    return ("0", name, *(numbers or ("1,000", "24", "2,000", "100", "1")))


def a_kernel(name: str, read_bytes: int = 1000) -> Kernel:
    return Kernel(name, read_bytes=read_bytes, written_bytes=24, l2_read_bytes=3200, us=2.0)


GATHERS = ("x_place_kernel", "x_GroupedGemm_1", "x_GroupedGemm_2", "x_combine_kernel")
PERMUTES = ("x_count_kernel", "x_place_kernel", "x_permute_kernel", *GATHERS[1:])


def a_case(tokens: int, *, permutes: bool = False) -> ProfiledCase:
    steps = ("route", *(["permute"] if permutes else []), "gemm1", "gemm2", "combine")
    return ProfiledCase("tiny", "uniform", tokens, 6, dict.fromkeys(steps, 512))


class TestParser:
    def test_reads_the_table_among_other_lines(self) -> None:
        assert ncu.parse(OUTPUT) == [
            Kernel("kernel_count_kernel_0", 142_848, 512, 9368 * 32, 3.808),
            Kernel("kernel_moeGroupedGemm_object_0", 22_943_576_576, 820_404_224, 3_913_347_787 * 32, 17_009.152),
        ]

    @pytest.mark.parametrize(
        ("output", "message"),
        [
            ("==WARNING== No kernels were profiled.", "ncu saw no kernel"),
            (table(), "ncu saw no kernel"),
            (
                table(a_row("k"), units=(*UNITS[:2], "Mbyte", *UNITS[3:])),
                "ncu gave dram__bytes_read.sum in 'Mbyte', expected 'byte'",
            ),
            (table(a_row("k"), names=NAMES[:-1], units=UNITS[:-1]), "gave profiler__replayer_passes in None"),
            (table(a_row("k", "n/a", "0", "1", "1", "1")), "no numbers for the kernel k: .*n/a"),
            (table(a_row("k", "1", "0")), "no numbers for the kernel k: 'lts__t_sectors_op_read.sum'"),
            (table(a_row("k", "1", "0", "1", "1", "3")), "took 3 passes over the kernel k, expected 1"),
        ],
    )
    def test_refuses_what_was_not_asked_for(self, output: str, message: str) -> None:
        with pytest.raises(PerfError, match=message):
            ncu.parse(output)


class TestSteps:
    def test_kernels_are_told_apart_by_call_and_step(self) -> None:
        kernels = [a_kernel(name, 100 * index) for index, name in enumerate((*GATHERS, *PERMUTES))]
        gathers, permutes = traffic.put_together(kernels, [a_case(1), a_case(64, permutes=True)])
        assert (gathers.tokens, permutes.tokens, permutes.workload, permutes.experts_hit) == (1, 64, "tiny", 6)
        assert {name: step.read_bytes for name, step in gathers.steps.items()} == {
            "route": 0,
            "gemm1": 100,
            "gemm2": 200,
            "combine": 300,
        }
        assert {name: step.read_bytes for name, step in permutes.steps.items()} == {
            "route": 400 + 500,
            "permute": 600,
            "gemm1": 700,
            "gemm2": 800,
            "combine": 900,
        }
        route = permutes.steps["route"]
        assert route == StepTraffic(512, read_bytes=900, written_bytes=48, l2_read_bytes=6400, us=4.0)
        assert route.moved_bytes == 948 and route.ratio == pytest.approx(948 / 512)

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (GATHERS, "ncu saw 1 calls of the layer, expected 2"),
            ((*GATHERS, *GATHERS, *GATHERS), "ncu saw 3 calls of the layer, expected 2"),
            (
                (*GATHERS, *PERMUTES),
                "steps route, permute, gemm1, gemm2, combine at tiny T = 2, expected route, gemm1, gemm2, combine",
            ),
            ((*GATHERS, *GATHERS[:3]), "steps route, gemm1, gemm2 at tiny T = 2"),
            ((*GATHERS, *GATHERS[:2], *GATHERS[1:]), "steps route, gemm1, gemm2, gemm3, combine at tiny T = 2"),
            ((*GATHERS, "vectorized_fill", *GATHERS), "no step of the layer: vectorized_fill"),
        ],
    )
    def test_other_kernels_are_refused(self, names: Sequence[str], message: str) -> None:
        with pytest.raises(PerfError, match=message):
            traffic.put_together([a_kernel(name) for name in names], [a_case(1), a_case(2)])


class TestFile:
    def test_round_trip(self, tmp_path: Path) -> None:
        steps = {"route": StepTraffic(1, 2, 3, 4, 5.5)}
        versions = {"torch": "2.11", "driver": None}
        cases = [CaseTraffic("tiny", "uniform", 5, 6, steps)]
        result = TrafficResult("NVIDIA H200", "2026-01-02", "0123", versions, "the tree differs", cases)
        path = tmp_path / "new" / "traffic.json"
        traffic.save(result, path)
        assert traffic.load(path) == result
        assert json.loads(path.read_text())["schema"] == "cutlass_moe.traffic/1"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"schema": "cutlass_moe.perf/3"}', "is not a traffic result of this version"),
            ('{"schema": "cutlass_moe.traffic/1", "cases": [{}]}', "does not follow it: 'steps'"),
        ],
    )
    def test_refuses_other_files(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "traffic.json"
        path.write_text(text)
        with pytest.raises(PerfError, match=message):
            traffic.load(path)


def test_the_profiler_sees_one_call_of_each_token_count(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs under ncu, on the CPU."""
    events: list[str] = []

    class FakeStopwatch:
        def __init__(self, device: torch.device) -> None:
            pass

        def flush_cache(self) -> None:
            events.append("flush")

    @contextmanager
    def profile() -> Iterator[None]:
        events.append("start")
        yield
        events.append("stop")

    configs = {6: GemmConfig(128, (16, 32), 2, gather=True), 10: GemmConfig(128, (16, 32), 2)}
    monkeypatch.setattr(heuristics, "choose_gemm_config", lambda rows, *shape, **named: configs[rows])
    monkeypatch.setattr(profiled, "Stopwatch", FakeStopwatch)
    monkeypatch.setattr(profiled, "run_layer", lambda inputs, weights, out_TH: events.append(f"T={len(out_TH)}"))
    monkeypatch.setattr(torch.cuda.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    plan = Plan(tiny, tiny.prefill_cases)
    three, five = profiled.profile([plan], torch.device("cpu"))
    calls = [["T=" + tokens, "flush", "wait", "start", "T=" + tokens, "wait", "stop"] for tokens in "35"]
    assert events == [*calls[0], *calls[1]]
    assert list(three.needed_bytes) == ["route", "gemm1", "gemm2", "combine"]
    assert list(five.needed_bytes) == ["route", "permute", "gemm1", "gemm2", "combine"]
    hit = five.experts_hit
    assert (five.workload, five.routing, five.tokens) == ("tiny", "uniform", 5) and 2 <= hit <= 6
    assert five.needed_bytes["gemm2"] == 2 * (hit * 64 * 32 + 10 * 32 + 10 * 64) + 2 * 4 * 10


FAKE_NCU = """\
#!{python}
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
(folder / "argv.json").write_text(json.dumps(sys.argv[1:]))
pathlib.Path(sys.argv[-1]).write_text((folder / "cases").read_text())
print((folder / "output").read_text())
print((folder / "errors").read_text(), file=sys.stderr)
sys.exit(int((folder / "status").read_text()))
"""


@pytest.fixture
def fake_ncu(tmp_path: Path, tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the PATH with an `ncu` that prints what stands there, for two calls of the tiny workload."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ncu").write_text(FAKE_NCU.format(python=sys.executable))
    (folder / "ncu").chmod(0o755)
    cases = [a_case(3), a_case(5, permutes=True)]
    (folder / "cases").write_text("".join(json.dumps(asdict(case)) + "\n" for case in cases))
    (folder / "output").write_text("==PROF== Connected\n" + table(*map(a_row, (*GATHERS, *PERMUTES))))
    (folder / "errors").write_text("")
    (folder / "status").write_text("0")
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(options, "get_workload", lambda name: tiny)
    monkeypatch.setattr(traffic_command, "require_device", lambda plans, peers: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    return folder


class TestCommand:
    def run(self, fake_ncu: Path, *arguments: str) -> int:
        return main(["traffic", "--workload", "tiny", "--output", str(fake_ncu.parent / "out"), *arguments])

    def test_profiles_saves_and_prints(self, fake_ncu: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(fake_ncu, "--all", "--tokens", "3", "5") == 0
        result = traffic.load(fake_ncu.parent / "out" / "traffic.json")
        assert [(case.workload, case.tokens, list(case.steps)) for case in result.cases] == [
            ("tiny", 3, ["route", "gemm1", "gemm2", "combine"]),
            ("tiny", 5, ["route", "permute", "gemm1", "gemm2", "combine"]),
        ]
        assert result.cases[1].steps["route"].moved_bytes == 2 * 1024 and result.device == "NVIDIA H200"
        assert result.not_for_the_record == "it is not the two headline workloads as published"
        head, columns, *lines, remark = capsys.readouterr().out.splitlines()
        assert "NVIDIA H200" in head and "permute MB  ratio       us" in columns and remark.startswith("not for the")
        assert all(len(line) == len(columns) for line in lines[1:]) and lines[0].split()[5] == "-"

    def test_asks_ncu_for_what_it_reads(self, fake_ncu: Path) -> None:
        assert self.run(fake_ncu, "--all", "--tokens", "3", "5") == 0
        arguments: list[str] = json.loads((fake_ncu / "argv.json").read_text())
        start = arguments.index(sys.executable)
        given = dict(zip(arguments[:start:2], arguments[1:start:2], strict=False))
        assert given["--profile-from-start"] == "off" and given["--cache-control"] == given["--clock-control"] == "none"
        metrics = arguments[arguments.index("--metrics") + 1].split(",")
        assert sorted(metrics) == sorted(NAMES[2:-1])
        assert arguments[start + 1 : start + 3] == ["-m", "perf.profiled"]
        chosen = Options(**json.loads(arguments[start + 3]))
        (plan,) = make_plans(chosen)
        assert plan.tokens == [3, 5] and chosen.grid == "all"

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (
                {"output": "==ERROR== ERR_NVGPUCTRPERM - no permission\n==ERROR== more"},
                "ERR_NVGPUCTRPERM - no permission",
            ),
            (
                {
                    "status": "1",
                    "output": "==ERROR== The application returned an error code (1).",
                    "errors": "Traceback:\n  File\nLibraryError: build it",
                },
                "LibraryError: build it",
            ),
            ({"status": "9", "output": ""}, "it printed no reason"),
        ],
    )
    def test_why_ncu_failed(
        self, fake_ncu: Path, files: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name, text in files.items():
            (fake_ncu / name).write_text(text)
        assert self.run(fake_ncu) == 2
        assert capsys.readouterr().err == f"perf: ncu failed: {message}\n"

    def test_no_ncu(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("PATH", "")
        assert main(["traffic"]) == 2
        error = capsys.readouterr().err
        assert error == "perf: perf traffic needs Nsight Compute, and its command `ncu` is not on the PATH\n"

    @pytest.mark.parametrize(
        ("grid", "reason"), [([], "it has some of the cases only"), (["--all"], "the tree differs from its commit")]
    )
    def test_the_record_has_every_case(
        self, fake_ncu: Path, grid: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, tiny: Workload
    ) -> None:
        monkeypatch.setattr(options, "workloads", lambda: {"tiny": tiny})
        monkeypatch.setenv("CUTLASS_MOE_COMMIT", "0123-dirty")
        assert self.run(fake_ncu, *grid) == 0
        assert traffic.load(fake_ncu.parent / "out" / "traffic.json").not_for_the_record == reason
