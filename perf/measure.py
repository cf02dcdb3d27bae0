"""Times everything at one token count: ours, its steps, the peers and dense cuBLAS, in turns, hot and cool."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from perf import results
from perf.check import ERROR_LIMIT, reference_layer, relative_error
from perf.limit import OutOfTime, time_limit
from perf.monitor import Monitor
from perf.options import Options
from perf.ours import Steps, run_layer
from perf.peers.base import Call, Finish, Peer, Prepared
from perf.peers.torch_layers import DenseTwoGemms
from perf.results import PeerResult, StepResult
from perf.roofline import Work, layer_work
from perf.timing import Captured, EagerTimer, Spread, Stopwatch, time_in_turns
from perf.workloads import Inputs, Weights, Workload

MEMORY_SHARE = 0.8  # of the free memory that the calls of a peer may take
SLOW_FIRST_CALL_S = 1.0  # a first call from here on is told of

Note = Callable[[str], None]


@dataclass(frozen=True)
class Measurement:
    """Everything timed at one token count; `pair` has "ours" and "dense" in turns with nothing between them."""

    work: Work
    experts_hit: int
    rows_max: int
    replay_equal: bool
    ours: Spread
    ours_cool: Spread
    ours_eager: Spread
    ours_queued: Spread
    host_us: float
    dense: Spread
    dense_cool: Spread
    pair: Mapping[str, Spread]
    hot_state: dict[str, float]
    cool_state: dict[str, float]
    steps: dict[str, StepResult]
    peers: dict[str, PeerResult]


@dataclass
class Contenders:
    """What is timed, by name: graph replays, what runs cool as well, and eager calls."""

    hot: dict[str, Callable[[], float]] = field(default_factory=dict)
    cool: dict[str, Callable[[], float]] = field(default_factory=dict)
    eager: dict[str, EagerTimer] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What a peer is checked and timed on."""

    workload: Workload
    inputs: Inputs
    reference_TH: torch.Tensor
    stopwatch: Stopwatch
    options: Options
    note: Note

    @property
    def tokens(self) -> int:
        return len(self.inputs.x_TH)


def prepare_peers(
    peer_types: Sequence[type[Peer]], weights: Weights, options: Options, note: Note = lambda text: None
) -> dict[str, Peer | PeerResult]:
    """Each peer, or why it is not ready: whatever a peer raises costs its own column only."""
    prepared = Prepared(weights, options.tune_peers)
    peers: dict[str, Peer | PeerResult] = {}
    for peer_type in peer_types:
        empty = PeerResult(peer_type.what, peer_type.scope, captured=peer_type.capturable)
        reason = peer_type.absent()
        if reason:
            peers[peer_type.name] = replace(empty, absent=reason)
            continue
        note(f"{peer_type.name}: preparing")
        try:
            with time_limit(options.peer_limit_s):
                peers[peer_type.name] = peer_type(prepared)
        except Exception as error:
            peers[peer_type.name] = replace(empty, error=_one_line(error))
        except OutOfTime:
            peers[peer_type.name] = replace(empty, error=f"given up: not ready after {options.peer_limit_s:g} s")
    return peers


def measure(
    workload: Workload,
    inputs: Inputs,
    weights: Weights,
    peers: MutableMapping[str, Peer | PeerResult],
    stopwatch: Stopwatch,
    monitor: Monitor,
    options: Options,
    note: Note = lambda text: None,
) -> Measurement:
    """Times ours, its steps, the peers and dense cuBLAS on the same inputs. A peer that is given up leaves `peers`, and
    its result says why."""
    out_TH = torch.empty_like(inputs.x_TH)

    def ours() -> torch.Tensor:
        run_layer(inputs, weights, out_TH)
        return out_TH

    captured = Captured.of(ours)
    steps = Steps(inputs, weights)
    captured_steps = {name: Captured.of(call) for name, call in steps.calls.items()}
    dense = Captured.of(DenseTwoGemms(weights, steps.x_MH, steps.h_MI))
    contenders = Contenders()
    for name, graph in (("ours", captured), ("dense", dense)):
        contenders.hot[name] = partial(stopwatch.device_ms, graph.replay)
        contenders.cool[name] = partial(stopwatch.cool_ms, graph.replay)
    contenders.eager["ours"] = EagerTimer(stopwatch, ours)
    for name, step in captured_steps.items():
        contenders.hot[f"step {name}"] = partial(stopwatch.device_ms, step.replay)

    setting = Setting(workload, inputs, reference_layer(inputs, weights), stopwatch, options, note)
    peer_results = add_peers(contenders, peers, setting)
    replay_equal = _replay_equal(captured, ours)

    began = time.monotonic()
    idle = {f"idle {name}": timer.idle for name, timer in contenders.eager.items()}
    queued = {f"queued {name}": timer.queued for name, timer in contenders.eager.items()}
    hot = time_in_turns({**contenders.hot, **idle, **queued}, options.turns)
    hot_state = monitor.over(began)
    pair = time_in_turns({name: contenders.hot[name] for name in ("ours", "dense")}, options.pair_turns)
    began = time.monotonic()
    cool = time_in_turns(contenders.cool, options.cool_turns)
    cool_state = monitor.over(began)

    for name, checked in peer_results.items():
        if name in contenders.eager:
            peer_results[name] = _with_times(name, checked, hot, cool, contenders.eager[name].host_us)
    counts = inputs.topk_ids_TK.flatten().unique(return_counts=True)[1]
    tokens, experts_hit = inputs.x_TH.shape[0], len(counts)
    return Measurement(
        work=layer_work(
            tokens=tokens,
            top_k=workload.top_k,
            hidden=workload.hidden,
            intermediate=workload.intermediate,
            experts_hit=experts_hit,
        ),
        experts_hit=experts_hit,
        rows_max=int(counts.max()),
        replay_equal=replay_equal,
        ours=hot["ours"],
        ours_cool=cool["ours"],
        ours_eager=hot["idle ours"],
        ours_queued=hot["queued ours"],
        host_us=contenders.eager["ours"].host_us,
        dense=hot["dense"],
        dense_cool=cool["dense"],
        pair=pair,
        hot_state=hot_state,
        cool_state=cool_state,
        steps=_step_results(workload, tokens, experts_hit, {name: hot[f"step {name}"] for name in steps.calls}),
        peers=peer_results,
    )


def _step_results(
    workload: Workload, tokens: int, experts_hit: int, spreads: Mapping[str, Spread]
) -> dict[str, StepResult]:
    works = workload.step_works(tokens, experts_hit, gathers="permute" not in spreads)
    return {
        name: StepResult(spread.ms, spread.p10_ms, spread.p90_ms, works[name].flops, works[name].bytes)
        for name, spread in spreads.items()
    }


def add_peers(
    contenders: Contenders, peers: MutableMapping[str, Peer | PeerResult], setting: Setting
) -> dict[str, PeerResult]:
    """Checks each peer's output and adds those that are right to `contenders`; their times are not known yet."""
    peer_results: dict[str, PeerResult] = {}
    for name, peer in peers.items():
        if isinstance(peer, PeerResult):
            peer_results[name] = peer
            continue
        empty = PeerResult(peer.what, peer.scope, captured=peer.capturable)
        try:
            peer_results[name] = _add_peer(contenders, peer, empty, setting)
        except Exception as error:  # as in prepare_peers
            peer_results[name] = replace(empty, error=_one_line(error))
        except OutOfTime:  # not called again, whatever state it is in
            limit_s = setting.options.peer_limit_s
            reason = f"given up: its first call at T = {setting.tokens} took longer than {limit_s:g} s"
            peers[name] = peer_results[name] = replace(empty, error=reason)
    return peer_results


def _add_peer(contenders: Contenders, peer: Peer, checked: PeerResult, setting: Setting) -> PeerResult:
    options, stopwatch = setting.options, setting.stopwatch
    copies = 2 if peer.capturable else 1  # a graph keeps its memory, and eager calls take as much again
    needed = copies * peer.call_bytes(setting.workload, setting.tokens)
    if needed and needed > MEMORY_SHARE * _free_bytes(setting.inputs.x_TH.device):
        return replace(checked, error="not run: its calls need more device memory than is free")
    call, finish, first_call_s = _first_call(peer, setting)
    checked = replace(checked, first_call_s=first_call_s)
    if peer.capturable:
        graph = Captured.of(call)
        graph.output.fill_(math.nan)
        graph.replay()
        out_TH = finish(graph.output)
    else:
        out_TH = finish(call())
    error = relative_error(out_TH, setting.reference_TH)
    checked = replace(checked, relative_error=results.finite(error))
    if not error <= ERROR_LIMIT:
        wrong = f"wrong output, not timed: relative error {error:.3g}, at most {ERROR_LIMIT:g} expected"
        return replace(checked, error=wrong)
    call_s = stopwatch.eager(call)[0] / 1e3
    turns_s = call_s * copies * (options.turns.warm_up + options.turns.least)
    if turns_s > options.peer_limit_s:
        slow = f"not timed: one call takes {call_s:.3g} s and the fewest turns {turns_s:.0f} s"
        return replace(checked, error=f"{slow}, more than {options.peer_limit_s:g} s")
    if peer.capturable:
        contenders.hot[peer.name] = partial(stopwatch.device_ms, graph.replay)
        if peer.scope == "layer":
            contenders.cool[peer.name] = partial(stopwatch.cool_ms, graph.replay)
    contenders.eager[peer.name] = EagerTimer(stopwatch, call)
    return checked


def _first_call(peer: Peer, setting: Setting) -> tuple[Call, Finish, float]:
    """Binds the peer to the inputs and calls it once, which may import, compile and tune: both, and the seconds.

    Raises:
        OutOfTime: it took longer than the limit.
    """
    if not peer.called:
        setting.note(f"{peer.name}: first call")
    began = time.monotonic()
    with time_limit(setting.options.peer_limit_s):
        call, finish = peer.bind(setting.inputs)
        setting.stopwatch.eager(call)
    peer.called = True
    took_s = time.monotonic() - began
    if took_s >= SLOW_FIRST_CALL_S:
        setting.note(f"{peer.name}: first call at T = {setting.tokens} took {took_s:.1f} s")
    return call, finish, took_s


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 2**62
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _with_times(
    name: str, checked: PeerResult, hot: Mapping[str, Spread], cool: Mapping[str, Spread], host_us: float
) -> PeerResult:
    idle = hot[f"idle {name}"]
    spread = hot.get(name, idle)
    return replace(
        checked,
        ms=spread.ms,
        p10_ms=spread.p10_ms,
        p90_ms=spread.p90_ms,
        eager_ms=idle.ms,
        queued_ms=hot[f"queued {name}"].ms,
        host_us=host_us,
        cool_ms=cool[name].ms if name in cool else None,
    )


def _replay_equal(captured: Captured[torch.Tensor], eager: Callable[[], torch.Tensor]) -> bool:
    """Whether a replay writes, bit for bit, what an eager call writes: an empty graph is fast too."""
    expected_TH = eager().clone()
    captured.output.fill_(math.nan)
    captured.replay()
    return torch.equal(captured.output, expected_TH)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
