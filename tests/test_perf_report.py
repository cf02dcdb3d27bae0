"""perf report on the CPU: what it works out, what it refuses, and the pages from a stored result."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from perf import PerfError, results, traffic
from perf.__main__ import main
from perf.report import compare, model
from perf.results import CaseResult, PeerResult, RunResult, StepResult
from perf.traffic import CaseTraffic, StepTraffic, TrafficResult

VOID_TAGS = {"meta", "br", "wbr", "img", "link", "use"}


def a_case(tokens: int, ms: float = 5.0, **changes: object) -> CaseResult:
    case = CaseResult(
        workload="jamba_large",
        grid="headline",
        routing="uniform",
        shape={"hidden": 8192, "intermediate": 24576, "experts": 16, "top_k": 2},
        tokens=tokens,
        ms=ms,
        p10_ms=0.99 * ms,
        p90_ms=1.01 * ms,
        repeats=20,
        cool_ms=0.95 * ms,
        cool_p10_ms=0.94 * ms,
        cool_p90_ms=0.96 * ms,
        eager_ms=1.02 * ms,
        host_us=38.0,
        hot_state={"sm_clock_MHz": 1500.0, "power_W": 690.0, "temperature_C": 60.0},
        cool_state={},
        flops=6 * tokens * 2 * 8192 * 24576,
        bytes=19_327_352_832,
        experts_hit=16,
        rows_max=80,
        roof_ms=4.4,
        roof_ms_datasheet=4.03,
        sol_score=0.8,
        dense_ms=2.0,
        dense_cool_ms=1.8,
        match_ratio=0.99912,
        relative_error=3e-3,
        check_rounds=10,
        passed=True,
        steps={
            "route": StepResult(0.005, 0.004, 0.006, 0, 50_000),
            "gemm1": StepResult(0.6 * ms, 0.59 * ms, 0.61 * ms, 8 * 10**11, 13 * 10**9),
            "gemm2": StepResult(0.3 * ms, 0.29 * ms, 0.31 * ms, 4 * 10**11, 6 * 10**9),
        },
        gaps_ms=0.1 * ms,
        peers={
            "torch_grouped_mm": PeerResult("all of it, by torch", "layer", 7.0, 6.9, 7.1, 7.2, 90.0, 6.8),
            "rival": PeerResult("all of it, by a rival", "layer", 5.2, 5.1, 5.3, 5.4, 80.0, 5.0, True, 9.8),
            "gemms_only": PeerResult("two GEMMs", "gemms", 4.0, 3.9, 4.1, 4.2, 30.0),
            "looped": PeerResult("a loop", "layer", 9.0, 8.9, 9.1, 9.0, 900.0, captured=False),
            "quack": PeerResult("nothing", absent="quack is not installed"),
            "wrong": PeerResult("nothing", error="wrong output, not timed: relative error 0.5 | bad"),
        },
        stock_two_gemms_ms=4.66,
    )
    return replace(case, **changes)  # type: ignore[arg-type]


def a_result(*cases: CaseResult, **changes: object) -> RunResult:
    result = RunResult(
        device="NVIDIA H200",
        date="2026-01-02T03:04:05+00:00",
        commit="0123456789abcdef",
        versions={"torch": "2.11", "driver": None},
        roofs={"read_TBps": 4.4, "dense_TFLOPs": 750.0},
        roofs_datasheet={"read_TBps": 4.8, "dense_TFLOPs": 989.5},
        options={"rounds": 10},
        state={"start": {"power_W": 100.0}, "end": {"power_W": 690.0}},
        complete=True,
        cases=list(cases),
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def a_traffic(*tokens: int, **changes: object) -> TrafficResult:
    gemm1 = StepTraffic(13 * 10**9, read_bytes=14 * 10**9, written_bytes=3 * 10**8, l2_read_bytes=10**11, us=3300.0)
    cases = [CaseTraffic("jamba_large", "uniform", count, 16, {"gemm1": gemm1}) for count in tokens]
    result = TrafficResult("NVIDIA H200", "2026-01-03T00:00:00+00:00", "0123456789abcdef", {}, cases=cases)
    return replace(result, **changes)  # type: ignore[arg-type]


class TestModel:
    def test_best_peer_runs_the_whole_layer(self) -> None:
        row = model.groups(a_result(a_case(512)))[0].rows[0]
        assert (row.best_peer, row.best_peer_ms, row.verdict) == ("rival", 5.2, "win")
        assert row.ratio == pytest.approx(1.04)

    def test_a_peer_that_cannot_be_captured_is_compared_with_our_eager_call(self) -> None:
        case = a_case(512)
        row = model.groups(a_result(replace(case, peers={"looped": case.peers["looped"]})))[0].rows[0]
        assert row.best_peer == "looped" and row.ratio == pytest.approx(9.0 / 5.1)

    @pytest.mark.parametrize(("ms", "verdict"), [(5.0, "win"), (5.2, "tie"), (5.24, "tie"), (5.5, "loss")])
    def test_verdicts(self, ms: float, verdict: str) -> None:
        assert model.groups(a_result(a_case(512, ms)))[0].rows[0].verdict == verdict

    def test_summary_names_the_worst_loss_and_failures(self) -> None:
        cases = [a_case(1), a_case(2, 5.2), a_case(4, 6.5), a_case(8, 5.5, passed=False), a_case(16, peers={})]
        assert model.summarise(model.groups(a_result(*cases))).text == (
            "of 5 cases faster than the best peer in 1, level in 1, slower in 2, without a peer in 1; the worst loss is"
            " jamba_large T = 4: rival takes 80% of our time; check FAILED in 1"
        )

    @pytest.mark.parametrize(("ms", "verdict"), [(4.9, "loss"), (4.96, "tie"), (5.1, "win")])
    def test_peers_tuned_earlier_are_shown_beside(self, ms: float, verdict: str) -> None:
        cases = [
            a_case(512, recorded_peers_ms={"slow": 9.0, "tuned": ms, "deepgemm_two_gemms_only": 1.0}),
            a_case(1024),
        ]
        (group,) = model.groups(a_result(*cases))
        assert group.rows[0].earlier_peer == ("tuned", ms) and group.rows[0].earlier_verdict == verdict
        assert group.rows[1].earlier_peer is None and group.rows[0].verdict == "win", "of peers in the same run"
        assert f"earlier session in {int(verdict == 'loss')} of 1" in model.summarise([group]).text

    def test_groups_and_what_was_timed_once(self) -> None:
        cases = [a_case(8, batch=2), a_case(8, batch=1), a_case(4), a_case(8, routing="zipf:1")]
        first, second = model.groups(a_result(*cases))
        assert [row.case.tokens for row in first.rows] == [4, 8, 8] and [c.tokens for c in first.timed] == [4, 8]
        assert second.title == "jamba_large, zipf:1"
        assert first.peers == ["torch_grouped_mm", "rival", "gemms_only", "looped"]

    def test_peers_say_why_they_were_not_timed(self) -> None:
        peers = {peer.name: peer for peer in model.peers_of(a_result(a_case(1), a_case(2, 4.0)))}
        assert peers["quack"].notes == ("absent: quack is not installed",) and peers["quack"].cases == 0
        assert (peers["rival"].lowest_ratio, peers["rival"].highest_ratio) == (1.04, 1.3)
        assert peers["looped"].lowest_ratio == pytest.approx(9.0 / 5.1), "eager, over our eager call"
        assert peers["rival"].first_call_s == 9.8 and peers["looped"].first_call_s is None
        assert list(peers)[-2:] == ["quack", "wrong"]

    def test_merge(self) -> None:
        merged = model.merge([a_result(a_case(1), seconds=60.0), a_result(a_case(2), complete=False, seconds=7.5)])
        assert [case.tokens for case in merged.cases] == [1, 2] and not merged.complete and merged.seconds == 67.5
        assert model.merge([merged, a_result(a_case(3))]).seconds is None
        for other, message in (
            (a_result(a_case(1)), "is in two of the results"),
            (a_result(a_case(2), commit="other"), "different commits can't be put together"),
            (a_result(a_case(2), device="NVIDIA H100"), "different devices"),
        ):
            with pytest.raises(PerfError, match=message):
                model.merge([a_result(a_case(1)), other])
        with pytest.raises(PerfError, match="have no cases"):
            model.merge([a_result()])

    def test_traffic_beside_a_result(self) -> None:
        result = a_result(a_case(1), a_case(2), a_case(2, routing="zipf:1"))
        moved = model.match_traffic(result, a_traffic(2, 4))
        step = moved.step(result.cases[1], "gemm1")
        assert step is not None and step.moved_bytes == 143 * 10**8
        assert moved.step(result.cases[1], "gemm2") is None, "a step that was not counted"
        assert moved.step(result.cases[0], "gemm1") is None and moved.step(result.cases[2], "gemm1") is None
        for other, message in (
            (a_traffic(4), "have no case in common"),
            (a_traffic(1, commit="other"), "another commit than the result: other and 0123456789abcdef"),
            (a_traffic(1, device="NVIDIA H100"), "another device"),
        ):
            with pytest.raises(PerfError, match=message):
                model.match_traffic(result, other)


class TestCompare:
    @pytest.mark.parametrize(
        ("after_ms", "verdict"), [(5.0, "within noise"), (5.07, "within noise"), (5.3, "slower"), (4.7, "faster")]
    )
    def test_beyond_noise_is_where_the_spreads_part(self, after_ms: float, verdict: str) -> None:
        (change,) = compare.compare(a_result(a_case(1)), a_result(a_case(1, after_ms)))
        assert change.verdict == verdict and change.share == pytest.approx(after_ms / 5 - 1)

    def test_a_tiny_change_is_not_called(self) -> None:
        narrow = [replace(a_case(1, ms), p10_ms=ms, p90_ms=ms) for ms in (5.0, 5.02)]
        assert compare.compare(a_result(narrow[0]), a_result(narrow[1]))[0].verdict == "within noise"

    def test_dense_takes_the_temperature_out(self) -> None:
        warmer = a_case(1, 5.5, dense_ms=2.2)
        (change,) = compare.compare(a_result(a_case(1)), a_result(warmer))
        assert change.verdict == "slower" and change.dense_share == pytest.approx(0)

    def test_nothing_in_common(self) -> None:
        with pytest.raises(PerfError, match="no case in common"):
            compare.compare(a_result(a_case(1)), a_result(a_case(2)))


class Tags(HTMLParser):
    """Checks that tags nest, and gathers what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID_TAGS:
            self.open.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID_TAGS:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report from stored results, with a comparison."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    folder = tmp_path_factory.mktemp("report")
    ling = a_case(64, 1.4, workload="ling_flash", roof_ms=1.25, passed=False)
    results.save(a_result(a_case(512), a_case(1024, 5.6, batch=4, seq=256)), folder / "headline.json")
    results.save(a_result(ling, not_for_the_record="the tree differs from its commit"), folder / "decode.json")
    results.save(a_result(a_case(512, 5.5), commit="before"), folder / "before.json")
    files = [str(folder / "headline.json"), str(folder / "decode.json")]
    assert main(["report", *files, "--before", str(folder / "before.json")]) == 0
    return folder


class TestPages:
    def test_html_is_whole_and_loads_nothing(self, stored: Path) -> None:
        text = (stored / "report.html").read_text()
        tags = Tags()
        tags.feed(text)
        assert tags.open == [] and all(link.startswith("#") for link in tags.loaded)
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert len(ids) == len(set(ids)) and text.count("<svg") == 5
        assert all(f'id="{link[1:]}"' in text for link in tags.loaded)

    @pytest.mark.parametrize("name", ["report.html", "report.md"])
    def test_both_have_every_number(self, stored: Path, name: str) -> None:
        text = (stored / name).read_text()
        for part in (
            "NVIDIA H200", "0123456789abcdef", "the tree differs from its commit", "jamba_large", "ling_flash",
            "5.600", "4 x 256", "rival", "▼", "FAIL", "1500 MHz, 690 W", "quack is not installed", "two GEMMs",
            "0.99912", "3.0e-03", "9.8 s", "faster", "-9.1 %", "13 GB", "4.40 TB/s read", "power W 690",
        ):  # fmt: skip
            assert part in text, part
        assert "{{" not in text and "None" not in text and "Moved" not in text

    def test_ours_over_dense(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        paired = a_case(512, dense_ms=2.0, dense_cool_ms=4.0, pair_ms=5.1, pair_dense_ms=5.2)
        results.save(a_result(paired, a_case(1024)), tmp_path / "headline.json")
        assert main(["report", str(tmp_path / "headline.json")]) == 0
        text = (tmp_path / "report.md").read_text()
        assert "| 5.100, 5.200 | 0.981, 1.188 |" in text and "| -, - | -, 2.639 |" in text
        assert "<td>5.100</td><td>5.200</td><td>0.981</td><td>1.188</td>" in (tmp_path / "report.html").read_text()

    def test_markdown_tables_are_regular(self, stored: Path) -> None:
        text = (stored / "report.md").read_text()
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(columns) == 1, table
        for picture in re.findall(r"\]\((\w+\.svg)\)", text):
            assert (stored / picture).read_text().startswith("<svg")

    def test_a_step_that_some_cases_lack(self, stored: Path, tmp_path: Path) -> None:
        """The first GEMM gathers, and there is no permute, at one token count only."""
        gathers, permutes = a_case(64), a_case(4096)
        route, gemm1, gemm2 = permutes.steps.items()
        permute = ("permute", StepResult(0.02, 0.02, 0.02, 0, 75_000_000))
        permutes = replace(permutes, steps=dict([route, permute, gemm1, gemm2]))
        results.save(a_result(gathers, permutes), tmp_path / "headline.json")
        assert main(["report", str(tmp_path / "headline.json")]) == 0
        lines = (tmp_path / "report.md").read_text().splitlines()
        head = lines.index("| tokens | route | permute | gemm1 | gemm2 | gaps | whole |")
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[head + 2 : head + 4]]
        assert [(row[0], row[2][:9]) for row in cells] == [("64", "-"), ("4096", "0.0200 ms")]
        assert [row[3][:9] for row in cells] == ["3.0000 ms", "3.0000 ms"]

    def test_bytes_moved_stand_beside_those_needed(self, tmp_path: Path) -> None:
        results.save(a_result(a_case(512), a_case(1024)), tmp_path / "headline.json")
        traffic.save(a_traffic(512, not_for_the_record="it has some of the cases only"), tmp_path / "traffic.json")
        assert main(["report", str(tmp_path / "headline.json"), "--traffic", str(tmp_path / "traffic.json")]) == 0
        for name in ("report.html", "report.md"):
            text = (tmp_path / name).read_text()
            assert text.count("moved 14.3 GB (needed 13 GB, 1.10)") == 1
            assert "(2026-01-03; not for the\nrecord: it has some of the cases only)" in text
        lines = (tmp_path / "report.md").read_text().splitlines()
        (row,) = [line for line in lines if "moved 14.3" in line]
        assert row.startswith("| 512 | ") and row.count("|") == 7

    def test_same_result_same_pictures(self, stored: Path, tmp_path: Path) -> None:
        assert main(["report", str(stored / "headline.json"), "--output", str(tmp_path)]) == 0
        name = "jamba_large_tokens.svg"
        assert (tmp_path / name).read_text() == (stored / name).read_text()

    def test_one_case_without_peers(self, stored: Path, tmp_path: Path) -> None:
        lonely = a_case(3, peers={}, sol_score=None, passed=None, match_ratio=None, relative_error=None, dense_ms=0.01)
        results.save(a_result(lonely, versions={}), tmp_path / "shapes.json")
        assert main(["report", str(tmp_path / "shapes.json")]) == 0
        text = (tmp_path / "report.md").read_text()
        assert "not checked" in text and "without a peer in 1" in text

    def test_a_file_that_is_no_result(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "other.json"
        path.write_text('{"schema": "cutlass_moe.perf/1"}')
        assert main(["report", str(path)]) == 2
        assert "is not a result of this version" in capsys.readouterr().err
