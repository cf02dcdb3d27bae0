"""The pictures of a report as SVG. Colours are Okabe and Ito's; markers, dashes and hatches tell apart in grey too."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from perf.report.model import Group, peer_ms, work_of
from perf.results import CaseResult
from perf.roofline import Roofs

CLOSE = 1.12  # token counts closer than this share a point in the picture; the tables have them all
DENSE_MATTERS = 0.5  # dense cuBLAS, which reads one expert, is drawn where it is at least so much of the roof
OURS = "#0072B2"
BLACK, GREY = "#000000", "#767676"
COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D00")
MARKERS = ("s", "^", "v", "D", "P", "X", "<", ">", "*", "h")
DASHES = ("-", "--", "-.", ":")
STEP_STYLES = (
    ("route", "#F0E442", "...."),
    ("permute", "#E69F00", "////"),
    ("gemm1", "#0072B2", ""),
    ("gemm2", "#56B4E9", ""),
    ("combine", "#009E73", "\\\\\\\\"),
    ("gaps", "#BBBBBB", "xxxx"),
)
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "cutlass_moe",
    "hatch.linewidth": 0.6,
}


def roofline(groups: Sequence[Group], measured: Roofs, datasheet: Roofs) -> str:
    """Every case: what it reaches over the FLOP it does for each byte it must move, under both roofs; below, how
    close to the measured one."""
    with plt.rc_context(STYLE):
        figure, (upper, lower) = plt.subplots(
            2, 1, figsize=(8, 6.4), layout="constrained", sharex=True, height_ratios=(3, 2)
        )
        intensity = [case.flops / case.bytes for group in groups for case in group.timed]
        low, high = min(intensity) / 1.6, max(max(intensity) * 1.6, 600)
        for roofs, dash, name in ((measured, "-", "measured roof"), (datasheet, "--", "datasheet roof")):
            xs = sorted({low, min(max(roofs.dense_TFLOPs / roofs.read_TBps, low), high), high})
            ys = [min(roofs.dense_TFLOPs, x * roofs.read_TBps) for x in xs]
            label = f"{name}: {roofs.read_TBps:.2f} TB/s, {roofs.dense_TFLOPs:.0f} TFLOP/s"
            upper.plot(xs, ys, dash, color=BLACK if dash == "-" else GREY, linewidth=1.3, label=label)
        lower.axhline(100, color=BLACK, linewidth=1.3)
        styles = zip(groups, cycle(("o", *MARKERS)), cycle((OURS, *COLOURS)), strict=False)
        for group, marker, colour in styles:
            ours = [(case, case.ms) for case in group.timed]
            best = [(case, found[1]) for case in group.timed if (found := case.best_peer())]
            for points, fill, label in ((best, "none", "best peer"), (ours, "full", "ours")):
                xs = [case.flops / case.bytes for case, _ in points]
                style = {"color": colour, "fillstyle": fill, "markersize": 6, "label": f"{group.title}, {label}"}
                upper.plot(xs, [work_of(case).tflops(ms) for case, ms in points], marker, **style)
                lower.plot(xs, [100 * case.roof_ms / ms for case, ms in points], marker, **style)
        upper.set(xscale="log", yscale="log", xlim=(low, high), ylabel="TFLOP/s")
        lower.set(ylim=(0, None), ylabel="% of the measured roof")
        lower.set_xlabel("FLOP for each byte that must move (T rises to the right)")
        _plain_ticks(upper)
        upper.legend(loc="lower right", fontsize=8)
        return _svg(figure)


def time_split(group: Group) -> str:
    """Bars of the share of each step in every case; the time of the whole beside it."""
    cases = group.timed
    with plt.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = plt.subplots(figsize=(8, 1.1 + 0.27 * len(cases)), layout="constrained")
        lefts = [0.0] * len(cases)
        totals = [_step_sum(case) for case in cases]
        for name, colour, hatch in STEP_STYLES:
            shares = [100 * _step(case, name) / total for case, total in zip(cases, totals, strict=True)]
            axes.barh(range(len(cases)), shares, left=lefts, color=colour, hatch=hatch, label=name, height=0.72,
                      edgecolor="white", linewidth=0.5)  # fmt: skip
            for index, (left, share) in enumerate(zip(lefts, shares, strict=True)):
                if share >= 10:
                    ink = "white" if name == "gemm1" else BLACK
                    text = _three_digits(_step(cases[index], name))
                    axes.text(left + share / 2, index, text, ha="center", va="center", fontsize=7.5, color=ink)
            lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
        for index, case in enumerate(cases):
            axes.text(101, index, f"{_three_digits(case.ms)} ms", va="center", fontsize=8)
        axes.set_yticks(range(len(cases)), [f"T = {case.tokens}" for case in cases])
        axes.invert_yaxis()
        axes.set(
            xlim=(0, 112), xlabel="share of the sum of the steps in %; ms in the bars, the whole layer beside them"
        )
        axes.set_xticks(range(0, 101, 20))
        axes.legend(ncols=6, loc="lower center", bbox_to_anchor=(0.45, 1.0), fontsize=8, handlelength=1.6)
        return _svg(figure)


def _three_digits(ms: float) -> str:
    return f"{ms:#.3g}" if ms < 100 else f"{ms:.0f}"


def _step(case: CaseResult, name: str) -> float:
    if name == "gaps":
        return case.gaps_ms
    return case.steps[name].ms if name in case.steps else 0.0


def _step_sum(case: CaseResult) -> float:
    return sum(_step(case, name) for name, _, _ in STEP_STYLES)


def time_against_tokens(group: Group) -> str:
    """Ours, dense cuBLAS, each peer and the roof over T; above as times, below as multiples of the roof."""
    kept = _spaced([case.tokens for case in group.timed], CLOSE)
    cases = [case for case in group.timed if case.tokens in kept]
    tokens = [case.tokens for case in cases]
    dense = [case.dense_ms if case.dense_ms >= DENSE_MATTERS * case.roof_ms else None for case in cases]
    roofs = [case.roof_ms for case in cases]
    with plt.rc_context(STYLE):
        figure, (upper, lower) = plt.subplots(
            2, 1, figsize=(8, 6.6), layout="constrained", sharex=True, height_ratios=(1, 1)
        )
        curves: list[tuple[str, list[float | None], dict[str, Any]]] = [
            ("ours", [case.ms for case in cases], {"color": OURS, "marker": "o", "linewidth": 2.2, "zorder": 5}),
            ("ours, cool", [case.cool_ms for case in cases], {"color": OURS, "marker": "o", "fillstyle": "none",
             "linestyle": ":", "zorder": 4}),
            ("dense cuBLAS", dense, {"color": GREY, "linestyle": "--", "marker": "."}),
        ]  # fmt: skip
        styles = zip(group.peers, cycle(COLOURS), cycle(MARKERS), cycle(DASHES[1:]), strict=False)
        for name, colour, marker, dash in styles:
            times = [peer_ms(case, name) for case in cases]
            style = {"color": colour, "marker": marker, "linestyle": dash, "linewidth": 1.1, "markersize": 4.5}
            scope = next(case.peers[name].scope for case in cases if name in case.peers)
            curves.append((name if scope == "layer" else f"{name} (GEMMs only)", times, style))
        upper.plot(tokens, roofs, color=BLACK, linewidth=1.6, label="roof, measured")
        lower.axhline(1, color=BLACK, linewidth=1.6)
        ratios: list[float] = []
        for label, times, style in curves:
            if not any(times):
                continue
            over = [ms / roof if ms else math.nan for ms, roof in zip(times, roofs, strict=True)]
            upper.plot(tokens, [ms or math.nan for ms in times], label=label, **style)  # NaN: a gap in the line
            lower.plot(tokens, over, **style)
            ratios += [ratio for ratio in over if not math.isnan(ratio) and label != "dense cuBLAS"]
        upper.set(xscale="log", yscale="log", ylabel="ms a call")
        top = min(max(ratios) * 1.05, 4.0)
        lower.set(xscale="log", ylim=(min(0.9, *ratios) - 0.02, top), ylabel="times the roof", xlabel="tokens")
        if max(ratios) > top:
            lower.annotate(f"up to {max(ratios):.1f} not shown", (1, 1.01), xycoords="axes fraction", ha="right",
                           va="bottom", fontsize=8, color=GREY)  # fmt: skip
        _plain_ticks(upper)
        lower.xaxis.set_major_locator(FixedLocator(_spaced(tokens)))
        lower.xaxis.set_minor_locator(NullLocator())
        lower.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        figure.legend(*upper.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
        return _svg(figure)


def _spaced(tokens: Sequence[int], apart: float = 1.25) -> list[int]:
    """Token counts to label, each at least so many times the one before."""
    kept: list[int] = []
    for count in sorted(set(tokens)):
        if not kept or count >= kept[-1] * apart:
            kept.append(count)
    return kept


def _plain_ticks(axes: Any) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        low, high = axis.get_view_interval()
        if high / max(low, 1e-9) < 30:  # few decades: label between the powers of ten too
            axis.set_minor_formatter(FuncFormatter(_two_and_five))
        else:
            axis.set_minor_formatter(NullFormatter())


def _two_and_five(value: float, _: int) -> str:
    return f"{value:g}" if round(value / 10 ** math.floor(math.log10(value)), 6) in (2, 5) else ""


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
