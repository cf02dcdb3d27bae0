"""Which GEMM configurations a sweep tries, and at which numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from cutlass_moe.config import GemmConfig, GemmSpec, why_not_implementable
from epilogues import Epilogue, RoutingScale, SiluGate
from perf.gemm_table import config_from_name

EPILOGUES: dict[int, Epilogue] = {2: SiluGate(), 1: RoutingScale()}  # by accumulators: GEMM 1 and GEMM 2
LADDERS = (
    (8, 16, 32),
    (16, 32, 48, 64),
    (16, 32, 48, 64, 80, 96),
    (48, 64, 80, 96, 112, 128),
    (64, 80, 96, 112, 128, 144, 160),
    (64, 96, 128, 144, 160, 176, 192),
    (64, 128, 160, 192, 208, 224, 240, 256),
    (64, 128, 192, 224, 256, 288, 320),
)
ROWS = (0.5, 2, 8, 16, 32, 48, 64, 80, 112, 128, 192, 256, 384, 512, 1024)
WIDEST, NARROWEST = 12.0, 0.2  # a sweep tries widest tiles of so many times the rows per expert


def default_space() -> list[GemmConfig]:
    """Every legal configuration of the ladders of token widths."""
    return [config for config in _all() if all(is_legal(config, n) for n in EPILOGUES if n == 2 or not config.gather)]


def _all() -> list[GemmConfig]:
    parts = product((128, 256), LADDERS, (1, 2), (False, True), (False, True))
    return [GemmConfig(*part) for part in parts]


def named(names: Sequence[str]) -> list[GemmConfig]:
    return [config_from_name(name) for name in names]


def is_legal(config: GemmConfig, accumulators: int) -> bool:
    """Whether there is such a kernel, and the layer has a use for it: GEMM 2's rows are grouped already."""
    if config.gather and accumulators == 1:
        return False
    return why_not_implementable(config, EPILOGUES[accumulators]) is None


def is_sensible(config: GemmConfig, rows: float) -> bool:
    """Whether a configuration is worth a try at so many rows per expert."""
    at_least = max(rows, 16.0)
    return NARROWEST * min(rows, 320.0) <= config.tile_tokens <= WIDEST * at_least


def specs(configs: Sequence[GemmConfig]) -> list[GemmSpec]:
    """The kernels of a sweep."""
    return [
        GemmSpec("bfloat16", config, epilogue)
        for config in configs
        for count, epilogue in EPILOGUES.items()
        if is_legal(config, count)
    ]


def tokens_of(rows: Sequence[float], experts: int, top_k: int) -> list[int]:
    """Token counts that give these rows per expert on average."""
    return sorted({max(1, round(count * experts / top_k)) for count in rows})
