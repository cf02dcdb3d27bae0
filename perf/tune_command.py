"""Command line of `python -m perf tune`: sweeps configurations and makes the heuristic's table from them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from cutlass_moe.aot.locations import LIBRARY_VARIABLE, MANIFEST_NAME, find_libraries
from cutlass_moe.config import GemmConfig
from perf import PerfError, console, environment, gemm_table, tune_file, tune_space
from perf.gemm_table import TABLE
from perf.monitor import Monitor
from perf.options import Plan, require_device
from perf.results import ROOT
from perf.sweep import problems, sweep
from perf.timing import Stopwatch, Turns
from perf.tune_file import TuneFile
from perf.workloads import Case, Workload, custom_workload, get_workload, more_models, workloads

SEED = 7
TURNS = Turns(least=5, most=20, budget_s=1.5, warm_up=1)


def add_arguments(command: argparse.ArgumentParser) -> None:
    known = ", ".join([*workloads(), *more_models()])
    command.add_argument("--workload", nargs="+", metavar="NAME", help=f"of {known} (default: the first two)")
    command.add_argument("--shape", nargs="+", default=[], metavar="H,I,E,K", help="layers of these shapes")
    command.add_argument(
        "--rows",
        nargs="+",
        type=float,
        default=list(tune_space.ROWS),
        metavar="R",
        help="rows per expert on average to sweep at (default: %(default)s)",
    )
    command.add_argument(
        "--configs",
        nargs="+",
        metavar="NAME",
        help="configurations by name, such as 128x16_32_c2 (default: every legal one of the built-in ladders)",
    )
    command.add_argument(
        "--build",
        type=Path,
        metavar="DIR",
        help="only compile the kernels of the sweep into a library in DIR: needs the DSL and no GPU",
    )
    command.add_argument("--library", type=Path, metavar="DIR", help="sweep with the kernels of this library")
    command.add_argument(
        "--measurements",
        type=Path,
        metavar="FILE",
        help="file of the measurements, continued where it stopped (default: perf/results/<device>/tune.json)",
    )
    command.add_argument("--table-only", action="store_true", help="measure nothing: make the table from the file")
    command.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="how much slower than the best a configuration may be where that saves one (default: %(default)s)",
    )
    command.add_argument("--write", action="store_true", help=f"write {TABLE.name}; else only say what would change")


def command(arguments: argparse.Namespace) -> int:
    """Builds, sweeps, and shows or writes the table. Returns 0, or 1 where a configuration was wrong.

    Raises:
        PerfError: the request cannot be carried out.
    """
    configs = tune_space.named(arguments.configs) if arguments.configs else tune_space.default_space()
    illegal = [config.name for config in configs if not any(tune_space.is_legal(config, n) for n in (1, 2))]
    if illegal:
        raise PerfError(f"{illegal[0]} is not legal: cutlass_moe.config.why_not_implementable says why")
    if arguments.build:
        return build(configs, arguments.build)
    if arguments.table_only:
        if arguments.measurements is None:
            raise PerfError("--table-only needs --measurements")
        file = tune_file.load(arguments.measurements)
    else:
        file = measure(arguments, configs)
    show_table(file, arguments.tolerance, write=arguments.write)
    wrong = {f"{name}: {reason}" for point in file.points for name, reason in point.wrong.items()}
    for line in sorted(wrong):
        print(f"not timed: {line}")
    return 1 if wrong else 0


def build(configs: Sequence[GemmConfig], folder: Path) -> int:
    """Compiles the kernels of a sweep, and those that make its inputs."""
    from cutlass_moe.aot.build import build as build_library
    from cutlass_moe.aot.catalogue import catalogue
    from cutlass_moe.config import GemmSpec, KernelSpec

    specs: list[KernelSpec] = [spec for spec in catalogue() if not isinstance(spec, GemmSpec)]
    specs = [*tune_space.specs(configs), *specs]
    with console.progress_bar(len(specs)) as advance:
        done = 0

        def progress(name: str, finished: int, total: int) -> None:
            nonlocal done
            advance(name, finished - done)
            done = finished

        result = build_library(specs, folder, progress=progress)
    print(f"{len(result.compiled)} of {len(specs)} kernels compiled in {result.seconds:.0f} s: {folder}")
    return 0


def measure(arguments: argparse.Namespace, configs: Sequence[GemmConfig]) -> TuneFile:
    """Sweeps what the file does not have yet; saves after every point."""
    if arguments.library:
        if not (arguments.library / MANIFEST_NAME).exists():
            raise PerfError(f"{arguments.library} has no kernel library: make one with --build {arguments.library}")
        os.environ[LIBRARY_VARIABLE] = str(arguments.library)
    chosen = [get_workload(name) for name in arguments.workload or ([] if arguments.shape else workloads())]
    chosen += [custom_workload(shape) for shape in arguments.shape]
    plans = [plan_of(workload, arguments.rows) for workload in chosen]
    device = require_device(plans, [])
    device_name = torch.cuda.get_device_name(device)
    default = ROOT / environment.short_device_name(device_name) / "tune.json"
    path = arguments.measurements or default
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    file = tune_file.load(path) if path.exists() else TuneFile(device_name, "", now)
    if file.device != device_name:
        raise PerfError(f"{path} was measured on {file.device}, and this is {device_name}")
    file.commit, file.date = environment.commit(), now
    sources = kernel_sources(configs)
    stopwatch = Stopwatch(device)
    generator = torch.Generator(device).manual_seed(SEED)
    print(f"{len(configs)} configurations, measurements in {path}", flush=True)
    total = sum(2 * len(plan.tokens) for plan in plans)
    with console.progress_bar(total) as advance, Monitor(environment.gpu_uuid()) as monitor:
        for plan in plans:
            weights = plan.workload.make_weights(device)
            weights.refill(generator)
            for tokens in plan.tokens:
                for problem in problems(plan.workload, weights, tokens, generator):
                    rows = tokens * plan.workload.top_k / plan.workload.experts
                    count = problem.accumulators
                    tried = [c for c in configs if tune_space.is_legal(c, count) and tune_space.is_sensible(c, rows)]
                    names = [config.name for config in tried]
                    hashes = {name: sources.get((name, count), "") for name in names}
                    key = (count, problem.features, problem.a_MK.shape[1], plan.workload.experts, tokens)
                    known = file.find(key)
                    if known is None or not known.covers(names, hashes):
                        point = sweep(problem, tried, tokens, stopwatch, monitor, TURNS)
                        point.sources = hashes
                        file.put(point)
                        file.save(path)
                        print(point_line(plan.workload, point), flush=True)
                    advance(f"{plan.workload.name}: T = {tokens}", 1)
                torch.cuda.empty_cache()
            del weights
            torch.cuda.empty_cache()
    return file


def plan_of(workload: Workload, rows: Sequence[float]) -> Plan:
    tokens = tune_space.tokens_of(rows, workload.experts, workload.top_k)
    return Plan(workload, tuple(Case(count, None, grid="free") for count in tokens))


def kernel_sources(configs: Sequence[GemmConfig]) -> dict[tuple[str, int], str]:
    """Source hash of each bf16 GEMM kernel in the libraries at hand, by configuration and accumulators."""
    from cutlass_moe.aot.manifest import LibraryError, read_manifest

    kernels = {}
    for directory in reversed(find_libraries()):  # the first one that has a kernel counts
        if (directory / MANIFEST_NAME).exists():
            try:
                kernels.update(read_manifest(directory).kernels)
            except LibraryError as error:
                raise PerfError(str(error)) from error
    return {
        (spec.config.name, spec.epilogue.accumulators): kernels[spec.name].source_hash
        for spec in tune_space.specs(configs)
        if spec.name in kernels
    }


def point_line(workload: Workload, point: tune_file.MeasuredPoint) -> str:
    best = sorted(point.times_ms.items(), key=lambda item: item[1])[:3]
    fastest = ", ".join(f"{name} {ms:.4f}" for name, ms in best)
    gemm = "gemm1" if point.accumulators == 2 else "gemm2"
    return f"{workload.name} T={point.tokens} {gemm}: {fastest or 'none is right'}"


def show_table(file: TuneFile, tolerance: float, *, write: bool) -> None:
    """Prints what changes against the table in the package, and writes the new one where asked to.

    Raises:
        PerfError: there is nothing to make a table from.
    """
    points = file.usable()
    if not points:
        raise PerfError("no configuration that does not gather was timed, so there is no table to make")
    entries = gemm_table.make_entries(points, tolerance)
    changes = gemm_table.describe_changes(gemm_table.load_entries(TABLE), entries, points)
    names = sorted({name for entry in entries for _, name in (*entry["choices"], *entry.get("gather", ()))})
    print(f"the table: {len(entries)} shapes, {len(names)} configurations: {', '.join(names)}")
    print("\n".join(changes) if changes else f"{TABLE.name} would not change at any measured point")
    if write:
        origin = {"device": file.device, "commit": file.commit, "date": file.date, "tolerance": tolerance}
        TABLE.write_text(gemm_table.to_text(entries, origin))
        print(f"written: {TABLE}")
    elif changes:
        print(f"--write makes it so in {TABLE}")
