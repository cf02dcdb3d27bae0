"""Command line of the kernel library: `python -m cutlass_moe build` and `list`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cutlass_moe.aot.catalogue import catalogue
from cutlass_moe.aot.locations import default_output, find_library
from cutlass_moe.aot.manifest import KernelEntry, LibraryError, json_form, read_manifest


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, or 1 with one line on stderr that says what is wrong."""
    parsed = _parser().parse_args(arguments)
    try:
        return _build(parsed) if parsed.command == "build" else _list()
    except (RuntimeError, OSError) as error:
        print(f"cutlass_moe {parsed.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cutlass_moe", description="The library of compiled kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the catalogue's kernels that changed, and link the library")
    build.add_argument("--output", type=Path, metavar="DIR", help="where the library goes (default: into the package)")
    build.add_argument("--jobs", type=_positive, metavar="N", help="compile in N processes (default: one a CPU)")
    commands.add_parser("list", help="show the catalogue, and what of it is in the library")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _build(parsed: argparse.Namespace) -> int:
    from cutlass_moe.aot.build import build

    output = (parsed.output or default_output()).resolve()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    remaining = (TextColumn("about"), TimeRemainingColumn(), TextColumn("to go"))
    with Progress(*columns, *remaining, console=Console(stderr=True)) as bar:
        task = bar.add_task("Compiling kernels", total=None, visible=False)

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        result = build(catalogue(), output, jobs=parsed.jobs, progress=show)
    unchanged = len(result.manifest.kernels) - len(result.compiled)
    print(f"{len(result.compiled)} kernels compiled, {unchanged} unchanged, in {result.seconds:.1f} s: {output}")
    return 0


def _list() -> int:
    directory = find_library()
    entries: dict[str, KernelEntry] = {}
    if directory is None:
        print("There is no library; build one with `python -m cutlass_moe build`.")
    else:
        manifest = read_manifest(directory)
        entries = manifest.kernels
        print(f"{directory}: {len(entries)} kernels for {manifest.arch}, compiled by DSL {manifest.dsl}")
    table = Table(box=None)
    table.add_column("kernel", no_wrap=True)
    table.add_column("state")
    for column in ("registers", "stack", "spills", "HGMMA", "TMA loads"):
        table.add_column(column, justify="right")
    specs = {spec.name: json_form(spec.describe()) for spec in catalogue()}
    for name in sorted(specs.keys() | entries.keys()):
        table.add_row(name, *_row(specs.get(name), entries.get(name)))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def _row(spec: dict[str, object] | None, entry: KernelEntry | None) -> list[str]:
    if entry is None:
        return ["not built"]
    state = "built" if entry.spec == spec else "outdated" if spec else "not in the catalogue"
    used = entry.resources
    if used is None:
        return [state]
    numbers = (used.registers, used.stack_bytes, used.spill_loads + used.spill_stores, used.hgmma, used.bulk_loads)
    return [state, *map(str, numbers)]


if __name__ == "__main__":
    sys.exit(main())
