"""Command line of the kernel library: `cutlass-moe build | list | inspect | verify`, or `python -m cutlass_moe`."""

from __future__ import annotations

import argparse
import difflib
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from cutlass_moe.aot.catalogue import catalogue
from cutlass_moe.aot.locations import default_output, find_libraries
from cutlass_moe.aot.manifest import REBUILD, KernelEntry, LibraryError, Manifest, json_form, read_manifest
from cutlass_moe.aot.sass import disassemble_embedded
from cutlass_moe.aot.specs import module_specs

COLUMNS = ("kernel", "state", "registers", "stack", "spills", "HGMMA", "TMA loads")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, or 1 with one line on stderr that says what is wrong."""
    parsed = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except (RuntimeError, OSError) as error:
        print(f"cutlass-moe {parsed.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cutlass-moe", description="The library of compiled kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the kernels that changed, and link the library")
    build.set_defaults(run=_build)
    build.add_argument("--output", type=Path, metavar="DIR", help="where the library goes (default: into the package)")
    build.add_argument("--jobs", type=_positive, metavar="N", help="compile in N processes (default: one a CPU)")
    build.add_argument(
        "--module",
        metavar="MODULE",
        help="build the list KERNELS of this module (a dotted name or a .py file) instead of the catalogue",
    )
    listing = commands.add_parser("list", help="show which kernels are built, and what each uses")
    listing.set_defaults(run=_list)
    inspect = commands.add_parser("inspect", help="show one kernel")
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("kernel", metavar="KERNEL", help="its name, as `list` shows it")
    inspect.add_argument("--sass", action="store_true", help="disassemble it, too (needs nvdisasm)")
    verify = commands.add_parser("verify", help="run every kernel against the reference on this machine's GPU")
    verify.set_defaults(run=_verify)
    for command in (listing, inspect, verify):
        command.add_argument(
            "--library", type=Path, metavar="DIR", help="look at this library (default: those that a call uses)"
        )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _build(parsed: argparse.Namespace) -> int:
    from cutlass_moe.aot.build import BuildError, CompileError, build

    if parsed.module is not None and parsed.output is None:
        raise BuildError("--module needs --output DIR: its kernels make a library of their own")
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining
    except ImportError:
        raise BuildError("the builder is not installed: `pip install 'cutlass-moe[build]'`") from None

    output = (parsed.output or default_output()).resolve()
    specs = catalogue() if parsed.module is None else module_specs(parsed.module)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    remaining = (TextColumn("about"), Remaining(), TextColumn("to go"))
    with Progress(*columns, *remaining, console=Console(stderr=True)) as bar:
        task = bar.add_task("Compiling kernels", total=None, visible=False)

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        try:
            result = build(specs, output, jobs=parsed.jobs, progress=show)
        except CompileError:
            traceback.print_exc()  # where in the kernel's source
            raise
    unchanged = len(result.manifest.kernels) - len(result.compiled)
    print(f"{len(result.compiled)} kernels compiled, {unchanged} unchanged, in {result.seconds:.1f} s: {output}")
    return 0


def _libraries(parsed: argparse.Namespace) -> list[tuple[Path, Manifest]]:
    """The libraries to look at. Raises LibraryError when one cannot be read, or there is none."""
    directories = find_libraries() if parsed.library is None else [parsed.library]
    if not directories:
        raise LibraryError(f"there is no kernel library: {REBUILD}")
    return [(directory, read_manifest(directory)) for directory in directories]


def _list(parsed: argparse.Namespace) -> int:
    libraries = _libraries(parsed)
    shipped = {spec.name: json_form(spec.describe()) for spec in catalogue()}
    for directory, manifest in libraries:
        print(
            f"{directory}: {len(manifest.kernels)} kernels for {manifest.arch}, built by cutlass_moe "
            f"{manifest.cutlass_moe} with DSL {manifest.dsl} and {manifest.c_compiler}"
        )
        _print_table([_row(entry, shipped.get(name)) for name, entry in sorted(manifest.kernels.items())])
    built = {name for _, manifest in libraries for name in manifest.kernels}
    missing = sorted(shipped.keys() - built)
    if missing:
        print(f"\nOf the catalogue's {len(shipped)} kernels {len(missing)} are not built:")
        print("\n".join(f"  {name}" for name in missing))
    return 0


def _row(entry: KernelEntry, shipped: dict[str, object] | None) -> tuple[str, ...]:
    state = "built" if entry.spec == shipped else "outdated" if _same_epilogue(entry, shipped) else "not shipped"
    used = entry.resources
    if used is None:
        return (entry.name, state)
    spills = used.spill_loads + used.spill_stores
    numbers = (used.registers, used.stack_bytes, spills, used.hgmma, used.bulk_loads)
    return (entry.name, state, *map(str, numbers))


def _same_epilogue(entry: KernelEntry, shipped: dict[str, object] | None) -> bool:
    return shipped is not None and entry.spec.get("epilogue") == shipped.get("epilogue")


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [COLUMNS, *rows] if len(row) > i) for i in range(len(COLUMNS))]
    for row in (COLUMNS, *rows):
        texts = (
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        print(("  " + "  ".join(texts)).rstrip())


def _inspect(parsed: argparse.Namespace) -> int:
    libraries = _libraries(parsed)
    holders = [(directory, manifest) for directory, manifest in libraries if parsed.kernel in manifest.kernels]
    if not holders:
        names = sorted({name for _, manifest in libraries for name in manifest.kernels})
        close = difflib.get_close_matches(parsed.kernel, names, n=3, cutoff=0.4)
        hint = f" (did you mean {' or '.join(close)}?)" if close else " (`cutlass-moe list` shows them)"
        raise LibraryError(f"no library holds a kernel {parsed.kernel!r}{hint}")
    for directory, manifest in holders:
        entry = manifest.kernels[parsed.kernel]
        print(entry.name)
        facts: dict[str, object] = {
            "library": directory / manifest.library,
            "architecture": manifest.arch,
            "built by": f"cutlass_moe {manifest.cutlass_moe}, DSL {manifest.dsl}, {manifest.c_compiler}",
            **_flatten(entry.spec),
            "source hash": entry.source_hash,
            "cubin SHA-256": entry.cubin_sha256,
        }
        if entry.resources is None:
            facts["resources"] = "unknown: built without cuobjdump and nvdisasm"
        else:
            facts |= {name.replace("_", " "): value for name, value in vars(entry.resources).items()}
        width = max(map(len, facts))
        print("\n".join(f"  {name.ljust(width)}  {value}" for name, value in facts.items()))
        if parsed.sass:
            print(disassemble_embedded(directory / manifest.library, entry.cubin_sha256))
    return 0


def _flatten(spec: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in spec.items():
        label = f"{prefix}{name}".replace("_", " ")
        flat |= _flatten(value, f"{label} ") if isinstance(value, dict) else {label: value}
    return flat


def _verify(parsed: argparse.Namespace) -> int:
    # Here, because a library can be listed where neither torch's CUDA nor the CUDA runtime is there.
    from cutlass_moe.aot.load import KernelLibrary
    from cutlass_moe.aot.verify import verify

    wrong = total = 0
    for directory, _ in _libraries(parsed):
        for verdict in verify(KernelLibrary(directory)):
            total += 1
            wrong += verdict.problem is not None
            said = verdict.problem or f"relative error {verdict.error:.1e}"
            print(f"{'ok   ' if verdict.problem is None else 'WRONG'} {verdict.name}: {said}", flush=True)
    print(f"{total - wrong} of {total} kernels agree with the reference")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
