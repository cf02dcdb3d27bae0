"""How tokens choose experts in a measured workload: uniform, skewed, all alike, or recorded ids."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from perf import PerfError

HELP = "uniform, replacement, zipf[:S], all-to-one, or a file of recorded ids [T, K] (.json, .npy, .pt)"


class Routing(Protocol):
    """Draws the expert ids of tokens; `name` is how `--routing` and results spell it."""

    @property
    def name(self) -> str: ...

    def draw(self, tokens: int, top_k: int, experts: int, generator: torch.Generator) -> torch.Tensor:
        """`ids_TK` int64 on the generator's device."""
        ...


@dataclass(frozen=True)
class Uniform:
    """K distinct experts a token, each set equally likely."""

    name: str = "uniform"

    def draw(self, tokens: int, top_k: int, experts: int, generator: torch.Generator) -> torch.Tensor:
        # The order of the largest of E uniform numbers is a uniform draw of K distinct experts.
        keys_TE = torch.rand(tokens, experts, device=generator.device, generator=generator)
        return keys_TE.topk(top_k, dim=1).indices


@dataclass(frozen=True)
class Replacement:
    """K experts a token drawn with replacement: a token may name one twice, and both slots count."""

    name: str = "replacement"

    def draw(self, tokens: int, top_k: int, experts: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(experts, (tokens, top_k), device=generator.device, generator=generator)


@dataclass(frozen=True)
class Zipf:
    """K distinct experts a token; expert r is drawn with probability proportional to `(r + 1) ** -skew`."""

    skew: float = 1.0

    @property
    def name(self) -> str:
        return f"zipf:{self.skew:g}"

    def draw(self, tokens: int, top_k: int, experts: int, generator: torch.Generator) -> torch.Tensor:
        device = generator.device
        logits_E = -self.skew * torch.arange(1, experts + 1, dtype=torch.float32, device=device).log()
        uniform_TE = torch.rand(tokens, experts, device=device, generator=generator)
        gumbel_TE = -torch.log(-torch.log(uniform_TE.clamp(1e-12, 1 - 1e-7)))
        # The largest of logits plus Gumbel noise are draws without replacement.
        return (logits_E + gumbel_TE).topk(top_k, dim=1).indices


@dataclass(frozen=True)
class AllToOne:
    """Every slot of every token names expert 0."""

    name: str = "all-to-one"

    def draw(self, tokens: int, top_k: int, experts: int, generator: torch.Generator) -> torch.Tensor:
        return torch.zeros(tokens, top_k, dtype=torch.int64, device=generator.device)


@dataclass(frozen=True)
class Recorded:
    """Ids from a file: a run of T tokens takes its first T rows."""

    name: str
    ids_TK: torch.Tensor = field(compare=False)

    def draw(self, tokens: int, top_k: int, experts: int, generator: torch.Generator) -> torch.Tensor:
        self.require(tokens, top_k, experts)
        return self.ids_TK[:tokens].to(generator.device)

    def require(self, tokens: int, top_k: int, experts: int) -> None:
        """Raises PerfError where the file does not fit the workload."""
        rows, columns = self.ids_TK.shape
        if columns != top_k:
            raise PerfError(f"{self.name} has {columns} ids a token and the workload {top_k}")
        if tokens > rows:
            raise PerfError(f"{self.name} has {rows} tokens, fewer than the {tokens} asked for")
        low, high = int(self.ids_TK.min()), int(self.ids_TK.max())
        if low < 0 or high >= experts:
            raise PerfError(f"{self.name} has ids from {low} to {high}, outside the {experts} experts")


def parse_routing(text: str) -> Routing:
    """Reads `--routing`.

    Raises:
        PerfError: neither a known name nor a readable file of ids.
    """
    kind, _, detail = text.partition(":")
    if kind == "zipf":
        try:
            skew = float(detail or 1)
        except ValueError:
            skew = math.nan
        if not 0 <= skew < math.inf:
            raise PerfError(f"the exponent of {text!r} must be a number from 0 up")
        return Zipf(skew)
    for plain in (Uniform(), Replacement(), AllToOne()):
        if text == plain.name:
            return plain
    if Path(text).suffix not in (".json", ".npy", ".pt"):
        raise PerfError(f"unknown routing {text!r}: known are {HELP}")
    return Recorded(Path(text).name, _read_ids(Path(text)))


def _read_ids(path: Path) -> torch.Tensor:
    try:
        if path.suffix == ".json":
            ids = torch.tensor(json.loads(path.read_text()))
        elif path.suffix == ".npy":
            import numpy

            ids = torch.from_numpy(numpy.load(path))
        else:
            ids = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise PerfError(f"{path} cannot be read as expert ids: {error}") from error
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.numel() == 0:
        raise PerfError(f"{path} must hold whole numbers of shape [T, K]")
    return ids.long()
