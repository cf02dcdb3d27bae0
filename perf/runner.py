"""One run: check, then time ours, the peers and dense cuBLAS in turns, and save after every token count."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch

from perf import PerfError, environment, results
from perf.check import Verdict, check_layer, reference_layer, relative_error
from perf.ours import Steps, run_layer
from perf.peers import DenseTwoGemms, Peer, get_peers
from perf.results import CaseResult, PeerResult, RunResult
from perf.roofline import H200_DATASHEET, Roofs, Work, layer_work, sol_score
from perf.roofs import measure_roofs
from perf.timing import Captured, Spread, Stopwatch, Turns, time_in_turns
from perf.workloads import Case, Inputs, Weights, Workload, get_workload, workloads

SEED = 2025
BASELINE_PEER = "torch_grouped_mm"  # the baseline of the SOL score
PEER_ERROR_LIMIT = 1e-2  # Frobenius, relative: bf16 peers that round more often than ours stay well below
BUFFER_BYTES = 5 * 2**30  # cache flush, read-bandwidth probe, library workspaces


@dataclass(frozen=True)
class Options:
    """What to run; `tokens` None means every case."""

    workloads: tuple[str, ...]
    decode: bool = False
    tokens: tuple[int, ...] | None = None
    peers: tuple[str, ...] = (BASELINE_PEER,)
    rounds: int = results.RECORD_ROUNDS
    turns: Turns = field(default_factory=Turns)
    output: Path | None = None

    @property
    def for_the_record(self) -> bool:
        """Whether the result has every case, fully checked, with the baseline beside it."""
        return (
            set(self.workloads) == set(workloads())
            and self.tokens is None
            and self.rounds >= results.RECORD_ROUNDS
            and BASELINE_PEER in self.peers
            and self.turns.least >= Turns().least
        )


@dataclass(frozen=True)
class Plan:
    """The cases of one workload, looked up and found possible."""

    workload: Workload
    cases: tuple[Case, ...]

    @property
    def tokens(self) -> list[int]:
        """Distinct token counts: each is timed once."""
        return sorted({case.tokens for case in self.cases})


@dataclass(frozen=True)
class Measurement:
    """Everything timed at one token count."""

    work: Work
    experts_hit: int
    replay_equal: bool
    ours: Spread
    ours_eager: Spread
    dense: Spread
    steps: dict[str, Spread]
    peers: dict[str, PeerResult]


def make_plans(options: Options) -> list[Plan]:
    """Looks up what is asked for.

    Raises:
        PerfError: an unknown workload, or a token count that a workload does not have.
    """
    chosen = [get_workload(name) for name in dict.fromkeys(options.workloads)]
    return [Plan(workload, workload.cases(options.decode, options.tokens)) for workload in chosen]


def steps_of_progress(plans: Sequence[Plan], options: Options) -> int:
    """How often a run calls `advance`."""
    return sum(options.rounds + len(plan.tokens) for plan in plans)


def bytes_needed(plan: Plan, peers: Sequence[type[Peer]]) -> int:
    """Upper estimate of device memory: weights, the peers' copies, activations, the reference."""
    workload = plan.workload
    hidden, intermediate, top_k = workload.hidden, workload.intermediate, workload.top_k
    weights = workload.weight_bytes() + sum(peer.extra_bytes(workload) for peer in peers)
    # Ours, its steps and each peer keep a captured graph with its own x, gate and up, h, y of every row.
    rows = max(plan.tokens) * top_k
    activations = (3 + 2 * len(peers)) * rows * (3 * hidden + 4 * intermediate) * 2
    all_tokens = sum(plan.tokens)
    expert_rows = 2 * max(all_tokens * top_k // workload.experts, 1)
    expert = 3 * (hidden * intermediate + expert_rows * (hidden + intermediate))
    reference = 4 * (expert + all_tokens * hidden * (top_k + 3))
    return weights + max(activations, reference) + BUFFER_BYTES


def require_device(plans: Sequence[Plan], peers: Sequence[type[Peer]]) -> torch.device:
    """The device to measure on.

    Raises:
        PerfError: there is no CUDA device, or too little of its memory is free.
    """
    if not torch.cuda.is_available():
        raise PerfError("perf run needs a CUDA device and torch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    free, _ = torch.cuda.mem_get_info(device)
    require_memory(plans, peers, free, torch.cuda.get_device_name(device))
    return device


def require_memory(plans: Sequence[Plan], peers: Sequence[type[Peer]], free: int, device_name: str) -> None:
    """Raises PerfError when a workload does not fit into `free` bytes."""
    for plan in plans:
        needed = bytes_needed(plan, peers)
        if needed > free:
            raise PerfError(
                f"{plan.workload.name} needs about {needed / 1e9:.0f} GB of device memory"
                f" and {device_name} has {free / 1e9:.0f} GB free"
            )


def run(
    options: Options,
    *,
    started: Callable[[RunResult, Path], None] = lambda result, path: None,
    measured: Callable[[CaseResult], None] = lambda case: None,
    advance: Callable[[str], None] = lambda label: None,
) -> RunResult:
    """Measures every case and saves the result after each token count.

    Args:
        started: told once the roofs are known, with the file the result goes to.
        measured: told of each case.
        advance: told of each step done.

    Raises:
        PerfError: the request cannot be measured here; nothing was measured.
    """
    peer_types = get_peers(options.peers)
    plans = make_plans(options)
    device = require_device(plans, peer_types)
    stopwatch = Stopwatch(device)
    generator = torch.Generator(device).manual_seed(SEED)

    device_name = torch.cuda.get_device_name(device)
    state = {"start": environment.device_state()}
    roofs = measure_roofs(stopwatch, device)
    result = RunResult(
        device=device_name,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=environment.commit(),
        versions=environment.versions(),
        roofs=asdict(roofs),
        roofs_datasheet=asdict(H200_DATASHEET),
        options={**asdict(options), "output": None},
        state=state,
    )
    short_name = environment.short_device_name(device_name)
    path = results.result_path(options.output, short_name, decode=options.decode, record=options.for_the_record)
    started(result, path)
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
            advance=advance,
        )
        torch.cuda.empty_cache()  # the reference's large fp32 blocks make room for the peers' weights
        peers = _prepare_peers(peer_types, weights)
        for tokens in plan.tokens:
            inputs = plan.workload.make_inputs(tokens, generator)
            measurement = _measure(plan.workload, inputs, weights, peers, stopwatch, options.turns)
            for case in plan.cases:
                if case.tokens == tokens:
                    case_result = make_case(plan.workload, case, options.decode, verdicts[tokens], measurement, roofs)
                    result.cases.append(case_result)
                    measured(case_result)
            results.save(result, path)
            torch.cuda.empty_cache()
            advance(f"{plan.workload.name}: T = {tokens} timed")
        state["end"] = environment.device_state()
        del weights, peers
        torch.cuda.empty_cache()
    result.complete = options.for_the_record
    results.save(result, path)
    return result


def _prepare_peers(peer_types: Sequence[type[Peer]], weights: Weights) -> dict[str, Peer | PeerResult]:
    """Each peer, or why it is not ready: whatever a peer raises costs its own column only."""
    peers: dict[str, Peer | PeerResult] = {}
    for peer_type in peer_types:
        try:
            peers[peer_type.name] = peer_type(weights)
        except Exception as error:
            peers[peer_type.name] = PeerResult(peer_type.what, error=_one_line(error))
    return peers


def _measure(
    workload: Workload,
    inputs: Inputs,
    weights: Weights,
    peers: Mapping[str, Peer | PeerResult],
    stopwatch: Stopwatch,
    turns: Turns,
) -> Measurement:
    """Times ours, its steps, the peers and dense cuBLAS on the same inputs, in turns."""
    out_TH = torch.empty_like(inputs.x_TH)

    def ours() -> torch.Tensor:
        run_layer(inputs, weights, out_TH)
        return out_TH

    captured = Captured.of(ours)
    steps = Steps(inputs, weights)
    captured_steps = {name: Captured.of(call) for name, call in steps.calls.items()}
    dense = Captured.of(DenseTwoGemms(weights, steps.x_MH, steps.h_MI))
    timers: dict[str, Callable[[], float]] = {
        "ours": partial(stopwatch.device_ms, captured.replay),
        "ours eager": partial(stopwatch.eager_ms, ours),
        "dense": partial(stopwatch.device_ms, dense.replay),
    }
    for name, step in captured_steps.items():
        timers[f"step {name}"] = partial(stopwatch.device_ms, step.replay)

    peer_results = _add_peers(timers, peers, inputs, reference_layer(inputs, weights), stopwatch)
    replay_equal = _replay_equal(captured, ours)
    spreads = time_in_turns(timers, turns)
    for name, checked in peer_results.items():
        if checked.error is None:
            peer_results[name] = _with_times(checked, spreads[f"peer {name}"], spreads[f"peer {name} eager"])
    tokens = inputs.x_TH.shape[0]
    experts_hit = len(inputs.topk_ids_TK.unique())
    return Measurement(
        work=layer_work(
            tokens=tokens,
            top_k=workload.top_k,
            hidden=workload.hidden,
            intermediate=workload.intermediate,
            experts_hit=experts_hit,
        ),
        experts_hit=experts_hit,
        replay_equal=replay_equal,
        ours=spreads["ours"],
        ours_eager=spreads["ours eager"],
        dense=spreads["dense"],
        steps={name: spreads[f"step {name}"] for name in steps.calls},
        peers=peer_results,
    )


def _add_peers(
    timers: dict[str, Callable[[], float]],
    peers: Mapping[str, Peer | PeerResult],
    inputs: Inputs,
    reference_TH: torch.Tensor,
    stopwatch: Stopwatch,
) -> dict[str, PeerResult]:
    """Checks each peer's output and adds those that are right to `timers`; their times are not known yet."""
    peer_results: dict[str, PeerResult] = {}
    for name, peer in peers.items():
        if isinstance(peer, PeerResult):
            peer_results[name] = peer
            continue
        call = partial(peer, inputs)
        try:
            captured = Captured.of(call)
            peer_results[name] = _checked(peer, captured, reference_TH)
        except Exception as error:  # as in _prepare_peers
            peer_results[name] = PeerResult(peer.what, error=_one_line(error))
        if peer_results[name].error is None:
            timers[f"peer {name}"] = partial(stopwatch.device_ms, captured.replay)
            timers[f"peer {name} eager"] = partial(stopwatch.eager_ms, call)
    return peer_results


def _replay_equal(captured: Captured[torch.Tensor], eager: Callable[[], torch.Tensor]) -> bool:
    """Whether a replay writes, bit for bit, what an eager call writes: an empty graph is fast too."""
    expected_TH = eager().clone()
    captured.output.fill_(math.nan)
    captured.replay()
    return torch.equal(captured.output, expected_TH)


def _checked(peer: Peer, replay: Captured[torch.Tensor], reference_TH: torch.Tensor) -> PeerResult:
    """The peer's error, from a replay into a poisoned output."""
    replay.output.fill_(math.nan)
    replay.replay()
    error = relative_error(replay.output, reference_TH)
    if not error <= PEER_ERROR_LIMIT:
        wrong = f"wrong output, not timed: relative error {error:.3g}, at most {PEER_ERROR_LIMIT:g} expected"
        return PeerResult(peer.what, relative_error=results.finite(error), error=wrong)
    return PeerResult(peer.what, relative_error=error)


def _with_times(checked: PeerResult, replay: Spread, eager: Spread) -> PeerResult:
    return PeerResult(
        checked.what, replay.ms, replay.p10_ms, replay.p90_ms, eager.ms, relative_error=checked.relative_error
    )


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def make_case(
    workload: Workload, case: Case, decode: bool, verdict: Verdict, measurement: Measurement, roofs: Roofs
) -> CaseResult:
    """Puts a case together from its check and from what was timed at its token count."""
    work, ours = measurement.work, measurement.ours
    roof_ms = work.sol_ms(roofs)
    baseline = measurement.peers.get(BASELINE_PEER)
    steps = {name: spread.ms for name, spread in measurement.steps.items()}
    gemms_ms = steps["gemm1"] + steps["gemm2"]
    # The stock GEMM was recorded with every expert at work.
    all_hit = measurement.experts_hit == workload.experts
    stock_ms = workload.stock_two_gemms_ms(case.tokens) if all_hit else None
    checked = verdict.rounds > 0
    recorded = workload.recorded_decode_ms if decode else workload.recorded_prefill_ms
    return CaseResult(
        workload=workload.name,
        tokens=case.tokens,
        batch=case.batch,
        seq=case.seq,
        ms=ours.ms,
        p10_ms=ours.p10_ms,
        p90_ms=ours.p90_ms,
        repeats=ours.repeats,
        eager_ms=measurement.ours_eager.ms,
        flops=work.flops,
        bytes=work.bytes,
        experts_hit=measurement.experts_hit,
        roof_ms=roof_ms,
        roof_ms_datasheet=work.sol_ms(H200_DATASHEET),
        sol_score=sol_score(ours.ms, roof_ms, baseline.ms) if baseline and baseline.ms else None,
        dense_ms=measurement.dense.ms,
        match_ratio=verdict.match_ratios[case.atol] if checked else None,
        relative_error=results.finite(verdict.relative_error) if checked else None,
        check_rounds=verdict.rounds,
        passed=measurement.replay_equal and verdict.passed(case, workload.required_match) if checked else None,
        steps={**steps, "gaps": max(0.0, ours.ms - sum(steps.values()))},
        peers=dict(measurement.peers),
        stock_two_gemms_ms=stock_ms,
        gemms_over_stock=gemms_ms / stock_ms if stock_ms else None,
        recorded_peers_ms={peer: row[case.tokens] for peer, row in recorded.items() if case.tokens in row},
    )
