"""A report as HTML and as Markdown, from the same numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from perf.report import pictures
from perf.report.compare import LEAST_CHANGE, Change
from perf.report.model import TIE, Moved, bound, groups, peer_ms, peers_of, roof_shares, summarise, work_of
from perf.results import RunResult
from perf.roofline import Roofs, Work

HTML_NAME, MARKDOWN_NAME = "report.html", "report.md"


@dataclass(frozen=True)
class Report:
    """The finished text: a page that needs no other file, and Markdown that names the pictures."""

    html: str
    markdown: str
    pictures: dict[str, str]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HTML_NAME).write_text(self.html)
        (folder / MARKDOWN_NAME).write_text(self.markdown)
        for name, svg in self.pictures.items():
            (folder / name).write_text(svg)


def make_report(
    result: RunResult, changes: Sequence[Change] = (), before: RunResult | None = None, moved: Moved | None = None
) -> Report:
    """Lays a result out; with `before`, its `changes` since then too, and with `moved` what its steps moved."""
    all_groups = groups(result)
    measured, datasheet = Roofs(**result.roofs), Roofs(**result.roofs_datasheet)
    drawn = {"roofline.svg": pictures.roofline(all_groups, measured, datasheet)}
    for group in all_groups:
        slug = re.sub(r"[^a-z0-9]+", "_", group.title.lower()).strip("_")
        drawn[f"{slug}_tokens.svg"] = pictures.time_against_tokens(group)
        drawn[f"{slug}_steps.svg"] = pictures.time_split(group)
    names = iter(list(drawn)[1:])
    context: dict[str, Any] = {
        "result": result,
        "groups": [(group, next(names), next(names)) for group in all_groups],
        "summary": summarise(all_groups),
        "peers": peers_of(result),
        "changes": changes,
        "before": before,
        "moved": moved,
        "measured": measured,
        "datasheet": datasheet,
        "tie": TIE,
        "least_change": LEAST_CHANGE,
        "pictures": {name: _unique_ids(svg, name) for name, svg in drawn.items()},
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perf.report"),
        autoescape=jinja2.select_autoescape(["html.j2"], default=False),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        ms=format_ms, percent=format_percent, number=format_number, size=format_size, state=format_state
    )
    environment.globals.update(work_of=work_of, peer_ms=peer_ms, roof_shares=roof_shares, Work=Work, bound=bound)
    html = environment.get_template("report.html.j2").render(context)
    markdown = environment.get_template("report.md.j2").render(context)
    return Report(html, markdown, drawn)


def _unique_ids(svg: str, name: str) -> str:
    """Ids of one picture made different from another's, for several in one page."""
    prefix = re.sub(r"[^a-z0-9]", "", name)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}", svg)


def format_ms(ms: float | None) -> str:
    """Two to four decimals, the more the shorter."""
    if ms is None:
        return "-"
    return f"{ms:.{2 if ms >= 10 else 3 if ms >= 0.1 else 4}f}"


def format_percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def format_number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def format_size(size: int) -> str:
    """Bytes with three digits and their unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def format_state(state: dict[str, float]) -> str:
    """Clock and power in words."""
    if "sm_clock_MHz" not in state:
        return "-"
    return f"{state['sm_clock_MHz']:.0f} MHz, {state['power_W']:.0f} W"
