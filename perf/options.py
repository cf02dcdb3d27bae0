"""What a run is asked for, looked up and found possible before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from perf import PerfError, results
from perf.peers import BASELINE_PEER
from perf.peers.base import Peer
from perf.routing import parse_routing
from perf.timing import Turns
from perf.workloads import Case, Workload, custom_workload, get_workload, workloads

BUFFER_BYTES = 5 * 2**30  # cache flush, read-bandwidth probe, library workspaces


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        workloads: names. shapes: layers given as `H,I,E,K` besides them.
        grid: of the headline workloads: "headline", "decode" or "all".
        tokens: None means every case.
        routing: None means each workload's own.
        turns, cool_turns: repeats of hot and of cool timing, of all contenders together. pair_turns: of ours and dense
            cuBLAS with nothing between them.
        tune_peers: whether peers may tune themselves first.
        peer_limit_s: how long a peer's preparation, its first call on new inputs, and its turns may each take.
    """

    workloads: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    grid: str = "headline"
    tokens: tuple[int, ...] | None = None
    routing: str | None = None
    peers: tuple[str, ...] = (BASELINE_PEER,)
    rounds: int = results.RECORD_ROUNDS
    turns: Turns = field(default_factory=Turns)
    pair_turns: Turns = field(default_factory=lambda: Turns(budget_s=4.0))
    cool_turns: Turns = field(default_factory=lambda: Turns(least=5, most=10, budget_s=1.0, warm_up=0))
    tune_peers: bool = False
    peer_limit_s: float = 120.0
    output: Path | None = None

    def why_partial(self) -> str | None:
        """Why this can't be the record of a device: it has every headline or decode case, fully checked, with the
        baseline beside it. None when it can."""
        if set(self.workloads) != set(workloads()) or self.shapes or self.routing not in (None, "uniform"):
            return "it is not the two headline workloads as published"
        if self.tokens is not None:
            return "it has some of the cases only"
        if self.rounds < results.RECORD_ROUNDS or self.turns.least < Turns().least:
            return "it was checked or repeated less"
        if BASELINE_PEER not in self.peers:
            return f"{BASELINE_PEER} is not beside it"
        return None

    @property
    def file_name(self) -> str:
        """Stem of the result's file."""
        headline = set(self.workloads) <= set(workloads()) and not self.shapes
        stem = {"headline": "headline", "decode": "decode", "all": "full"}[self.grid] if headline else "shapes"
        if self.routing in (None, "uniform"):
            return stem
        return f"{stem}-{self.routing}".replace(":", "_").replace("/", "_")


@dataclass(frozen=True)
class Plan:
    """The cases of one workload."""

    workload: Workload
    cases: tuple[Case, ...]

    @property
    def tokens(self) -> list[int]:
        """Distinct token counts: each is timed once."""
        return sorted({case.tokens for case in self.cases})


def make_plans(options: Options) -> list[Plan]:
    """Looks up what is asked for.

    Raises:
        PerfError: an unknown workload or routing, a bad shape, or a token count that a workload does not have.
    """
    chosen = [get_workload(name) for name in dict.fromkeys(options.workloads)]
    chosen += [custom_workload(shape) for shape in dict.fromkeys(options.shapes)]
    if options.routing is not None:
        routing = parse_routing(options.routing)
        chosen = [replace(workload, routing=routing) for workload in chosen]
    if any(count < 1 for count in options.tokens or ()):
        raise PerfError("a token count is at least 1")
    return [Plan(workload, workload.cases(options.grid, options.tokens)) for workload in chosen]


def bytes_needed(plan: Plan, peers: Sequence[type[Peer]]) -> int:
    """Upper estimate of device memory: weights, the peers' copies, activations, the reference."""
    workload = plan.workload
    hidden, intermediate, top_k = workload.hidden, workload.intermediate, workload.top_k
    shared = workload.weight_bytes() * 2 // 3 if peers else 0  # gate and up in one tensor
    weights = workload.weight_bytes() + shared + sum(peer.extra_bytes(workload) for peer in peers)
    # Ours, its steps and each peer keep a captured graph with its own x, gate and up, h, y of every row.
    rows = max(plan.tokens) * top_k
    activations = (3 + len(peers)) * rows * (3 * hidden + 4 * intermediate) * 2
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
        raise PerfError("perf needs a CUDA device and torch sees none")
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
