"""One run: check, measure, and save after every token count."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch

from perf import environment, results
from perf.check import Verdict, check_layer
from perf.measure import Measurement, Note, measure, prepare_peers
from perf.monitor import Monitor
from perf.options import Options, Plan, make_plans, require_device
from perf.ours import run_layer
from perf.peers import BASELINE_PEER, get_peers
from perf.results import CaseResult, RunResult
from perf.roofline import H200_DATASHEET, Roofs, sol_score
from perf.roofs import measure_roofs
from perf.timing import Stopwatch
from perf.workloads import Case, Workload

SEED = 2025
TIMING_WEIGHT = 4  # a timed token count takes about as long as so many rounds of the check
Advance = Callable[[str, int], None]


def steps_of_progress(plans: Sequence[Plan], options: Options) -> int:
    """The sum of what a run tells `advance`."""
    return sum(options.rounds + TIMING_WEIGHT * len(plan.tokens) for plan in plans)


def run(
    options: Options,
    *,
    started: Callable[[RunResult, Path], None] = lambda result, path: None,
    measured: Callable[[CaseResult], None] = lambda case: None,
    advance: Advance = lambda label, amount: None,
    note: Note = lambda text: None,
) -> RunResult:
    """Measures every case and saves the result after each token count.

    Args:
        started: told once the roofs are known, with the file the result goes to.
        measured: told of each case.
        advance: told of what is done, and how much of the run it was.
        note: told what takes its time now.

    Raises:
        PerfError: the request cannot be measured here; nothing was measured.
    """
    began = time.monotonic()
    peer_types = get_peers(options.peers)
    plans = make_plans(options)
    device = require_device(plans, [peer for peer in peer_types if peer.absent() is None])
    stopwatch = Stopwatch(device)
    generator = torch.Generator(device).manual_seed(SEED)

    commit = environment.commit()
    partial_reason = options.why_partial() or environment.why_not_for_the_record(commit)
    device_name = torch.cuda.get_device_name(device)
    state = {"start": environment.device_state()}
    roofs = measure_roofs(stopwatch, device)
    result = RunResult(
        device=device_name,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit,
        versions=environment.versions(),
        roofs=asdict(roofs),
        roofs_datasheet=asdict(H200_DATASHEET),
        options={**asdict(options), "output": None},
        state=state,
        not_for_the_record=partial_reason,
    )
    path = results.result_path(
        options.output,
        environment.short_device_name(device_name),
        options.file_name,
        record=partial_reason is None,
    )
    started(result, path)
    with Monitor(environment.gpu_uuid() if device.type == "cuda" else None) as monitor:
        for plan in plans:
            weights = plan.workload.make_weights(device)
            if options.rounds == 0:
                weights.refill(generator)  # else the check does
            verdicts = check_layer(
                run_layer,
                plan.workload,
                plan.cases,
                weights,
                rounds=options.rounds,
                generator=generator,
                advance=lambda label: advance(label, 1),
            )
            torch.cuda.empty_cache()  # the reference's large fp32 blocks make room for the peers' weights
            note(f"{plan.workload.name}: {options.rounds} rounds of the check done")
            peers = prepare_peers(peer_types, weights, options, note)
            for tokens in plan.tokens:
                inputs = plan.workload.make_inputs(tokens, generator)
                measurement = measure(plan.workload, inputs, weights, peers, stopwatch, monitor, options, note)
                for case in plan.cases:
                    if case.tokens == tokens:
                        case_result = make_case(plan.workload, case, verdicts[tokens], measurement, roofs)
                        result.cases.append(case_result)
                        measured(case_result)
                state["end"] = environment.device_state()
                result.seconds = time.monotonic() - began
                results.save(result, path)
                torch.cuda.empty_cache()
                advance(f"{plan.workload.name}: T = {tokens} timed", TIMING_WEIGHT)
            del weights, peers
            torch.cuda.empty_cache()
    result.complete = True
    results.save(result, path)
    return result


def make_case(workload: Workload, case: Case, verdict: Verdict, measurement: Measurement, roofs: Roofs) -> CaseResult:
    """Puts a case together from its check and from what was timed at its token count."""
    work, ours, cool = measurement.work, measurement.ours, measurement.ours_cool
    roof_ms = work.sol_ms(roofs)
    baseline = measurement.peers.get(BASELINE_PEER)
    # Stock GEMM and tuned peers were recorded with uniform routing, the GEMM with every expert at work.
    as_recorded = workload.routing.name == "uniform"
    all_hit = as_recorded and measurement.experts_hit == workload.experts
    recorded = workload.recorded_decode_ms if case.grid == "decode" else workload.recorded_prefill_ms
    checked = verdict.rounds > 0
    return CaseResult(
        workload=workload.name,
        grid=case.grid,
        routing=workload.routing.name,
        shape={
            "hidden": workload.hidden,
            "intermediate": workload.intermediate,
            "experts": workload.experts,
            "top_k": workload.top_k,
        },
        tokens=case.tokens,
        batch=case.batch,
        seq=case.seq,
        ms=ours.ms,
        p10_ms=ours.p10_ms,
        p90_ms=ours.p90_ms,
        repeats=ours.repeats,
        cool_ms=cool.ms,
        cool_p10_ms=cool.p10_ms,
        cool_p90_ms=cool.p90_ms,
        eager_ms=measurement.ours_eager.ms,
        queued_ms=measurement.ours_queued.ms,
        host_us=measurement.host_us,
        hot_state=measurement.hot_state,
        cool_state=measurement.cool_state,
        flops=work.flops,
        bytes=work.bytes,
        experts_hit=measurement.experts_hit,
        rows_max=measurement.rows_max,
        roof_ms=roof_ms,
        roof_ms_datasheet=work.sol_ms(H200_DATASHEET),
        sol_score=sol_score(ours.ms, roof_ms, baseline.ms) if baseline and baseline.ms else None,
        dense_ms=measurement.dense.ms,
        dense_cool_ms=measurement.dense_cool.ms,
        pair_ms=measurement.pair["ours"].ms,
        pair_dense_ms=measurement.pair["dense"].ms,
        match_ratio=verdict.match_ratios.get(case.atol) if case.atol is not None else None,
        relative_error=results.finite(verdict.relative_error) if checked else None,
        check_rounds=verdict.rounds,
        passed=measurement.replay_equal and verdict.passed(case, workload.required_match) if checked else None,
        steps=measurement.steps,
        gaps_ms=max(0.0, ours.ms - sum(step.ms for step in measurement.steps.values())),
        peers=dict(measurement.peers),
        stock_two_gemms_ms=workload.stock_two_gemms_ms(case.tokens) if all_hit else None,
        recorded_peers_ms={peer: row[case.tokens] for peer, row in recorded.items() if case.tokens in row}
        if as_recorded
        else {},
    )
