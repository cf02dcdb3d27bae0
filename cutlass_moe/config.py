"""What a kernel is built from: specs and GEMM configurations, and which of them are legal."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from epilogues import Epilogue
from epilogues.base import stored_planes

MAX_EXPERTS = 512  # the GEMM keeps two tables of this many experts in shared memory
CHUNK_SLOTS = 512  # slots one CTA of the routing kernel ranks at a time
MAX_CHUNKS = 128  # beyond this many chunks each CTA ranks several in turn, so that work stays linear in the slots
COUNTED_SLOTS = 4096  # up to this many, route's CTAs and a GEMM that gathers behind it count all ids themselves
ROW_GRANULE = 16  # an expert's rows are split into tiles at multiples of it
REDUCTION_TILE = 64  # elements of the reduction dimension in one stage: one 128-byte swizzle line
LONG_REDUCTION = 192  # stages from which the clusters of a wave stay together: their tiles read twice the L2 then
SHARED_MEMORY_BYTES = 227 * 1024  # what one CTA may use on compute capability 9.0
BARRIER_BYTES = 1024  # mbarriers and alignment slack
STORE_PAD_BYTES = 16  # after each transposed row, so that the rows of a stmatrix fall into different banks
ELEMENT_BYTES = 2  # bf16 and fp16
CONSUMERS = 2  # consumer warpgroups of a GEMM CTA
PRODUCER_WARPS = 4  # of a GEMM CTA
MAX_ACCUMULATOR_REGISTERS = 192  # of the 232 that a consumer thread has


def token_bytes(epilogue: Epilogue, *dtypes: str) -> int:
    """Shared memory of one token's outputs in a 64-row block of weights, in the widest of these dtypes."""
    element = max(4 if dtype == "float32" else ELEMENT_BYTES for dtype in dtypes)
    return 64 // epilogue.accumulators * element + STORE_PAD_BYTES


GATHER_SUFFIX = "_g"  # of the names of configurations that gather
_CONFIG_NAME = re.compile(rf"(\d+)x(\d+(?:_\d+)*)_c(\d+)(_pp)?({GATHER_SUFFIX})?")


def route_chunks(slots: int) -> int:
    """Number of CTAs that rank `slots` (token, slot) pairs: the extent C of `route`'s scratch `chunk_counts_CE`."""
    return max(1, min(MAX_CHUNKS, -(-slots // CHUNK_SLOTS)))


@dataclass(frozen=True)
class GemmConfig:
    """Tile shape of one grouped GEMM kernel: `tile_features` weight rows by up to `token_widths[-1]` tokens a CTA.

    Attributes:
        tile_features: weight rows (WGMMA M) of a CTA tile: 128 or 256.
        token_widths: ascending token widths compiled into the kernel; a tile takes the narrowest that holds its
            tokens. A width is one WGMMA N up to 256, two of half the width beyond.
        cluster: CTAs along the weight rows that share one token tile by TMA multicast: 1 or 2.
        ping_pong: False splits a tile's weight rows over the two consumer warpgroups; True gives them a tile each, in
            turns, so that the epilogue of one runs under the multiplication of the other.
        gather: the kernel takes its rows from anywhere, by an index: one TMA load for each row and stage.
    """

    tile_features: int
    token_widths: tuple[int, ...]
    cluster: int
    ping_pong: bool = False
    gather: bool = False

    @classmethod
    def from_name(cls, name: str) -> GemmConfig:
        """The configuration of this `name`. Raises ValueError where it is none."""
        match = _CONFIG_NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is no GEMM configuration; one is 128x64_96_128_c2 or 128x64_96_c2_pp")
        features, widths, cluster, ping_pong, gather = match.groups()
        token_widths = tuple(int(width) for width in widths.split("_"))
        return cls(int(features), token_widths, int(cluster), ping_pong is not None, gather is not None)

    @property
    def loaders(self) -> int:
        """Warps of a cluster that load rows: one in each CTA, and of gathered rows all producer warps but the one that
        draws tiles."""
        return PRODUCER_WARPS * self.cluster - 1 if self.gather else self.cluster

    @property
    def tile_tokens(self) -> int:
        return self.token_widths[-1]

    @property
    def token_box(self) -> int:
        """Rows that a warp loads at a time: by one TMA load, or with `gather` by one for each row. A tile loads as many
        boxes as its tokens need."""
        narrow = self.tile_tokens <= 96
        if self.gather:
            return 4 if narrow else 8
        return 16 if narrow else 32

    @property
    def name(self) -> str:
        widths = "_".join(map(str, self.token_widths))
        flags = ("_pp" if self.ping_pong else "") + (GATHER_SUFFIX if self.gather else "")
        return f"{self.tile_features}x{widths}_c{self.cluster}{flags}"

    @property
    def consumer_blocks(self) -> int:
        """64-row blocks of weights that one consumer warpgroup multiplies."""
        return self.tile_features // 64 // (1 if self.ping_pong else CONSUMERS)

    @property
    def accumulator_registers(self) -> int:
        """Accumulator registers of a consumer thread at the widest tile."""
        return self.consumer_blocks * self.tile_tokens // 2

    @property
    def stage_tokens(self) -> int:
        """Token rows of a stage in shared memory: whole boxes."""
        return -(-self.tile_tokens // self.token_box) * self.token_box

    def stage_bytes(self) -> int:
        return (self.tile_features + self.stage_tokens) * REDUCTION_TILE * ELEMENT_BYTES

    def store_tokens(self, epilogue: Epilogue) -> int:
        """Tokens that a consumer warpgroup transposes at a time through one of two buffers: 16 if 32 cost a stage."""
        return 32 if self._stages_beside(32, epilogue) == self._stages_beside(16, epilogue) else 16

    def stages(self, epilogue: Epilogue) -> int:
        """Depth of the load pipeline: as many stages as shared memory holds, at most 12."""
        return self._stages_beside(self.store_tokens(epilogue), epilogue)

    def _stages_beside(self, store_tokens: int, epilogue: Epilogue) -> int:
        # Of each consumer warpgroup: two transposition buffers, the tile's row values, and parts of the "full" tensors.
        stored = 2 * token_bytes(epilogue, *(plane.dtype for plane in stored_planes(epilogue)))
        loaded = sum(token_bytes(epilogue, t.dtype) for t in epilogue.tensors if t.broadcast == "full")
        kinds = [tensor.broadcast for tensor in epilogue.tensors]
        rows = 4 * self.stage_tokens * (kinds.count("row") + epilogue.scatter)
        tables = 2 * 4 * (MAX_EXPERTS + 4)
        free = SHARED_MEMORY_BYTES - BARRIER_BYTES - tables - CONSUMERS * (store_tokens * (stored + loaded) + rows)
        return min(12, free // self.stage_bytes())


@dataclass(frozen=True)
class RouteSpec:
    """Routing kernel: stable counting sort of expert ids."""

    id_dtype: str
    weight_dtype: str | None

    @property
    def name(self) -> str:
        return f"route_{self.id_dtype}" + (f"_{self.weight_dtype}" if self.weight_dtype else "")

    def describe(self) -> dict[str, Any]:
        return {"kind": "route", **asdict(self)}


@dataclass(frozen=True)
class PermuteSpec:
    """Copies each token's row to the places of its slots, grouped by expert."""

    dtype: str

    @property
    def name(self) -> str:
        return f"permute_{self.dtype}"

    def describe(self) -> dict[str, Any]:
        return {"kind": "permute", **asdict(self)}


@dataclass(frozen=True)
class CombineSpec:
    """Sums a token's rows in slot order."""

    dtype: str

    @property
    def name(self) -> str:
        return f"combine_{self.dtype}"

    def describe(self) -> dict[str, Any]:
        return {"kind": "combine", **asdict(self)}


@dataclass(frozen=True)
class GemmSpec:
    """Grouped GEMM with an epilogue."""

    dtype: str
    config: GemmConfig
    epilogue: Epilogue

    @property
    def name(self) -> str:
        return f"gemm_{self.dtype}_{self.config.name}_{self.epilogue.name}"

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "gemm",
            "dtype": self.dtype,
            "config": asdict(self.config),
            "epilogue": self.epilogue.describe(),
            "stages": self.config.stages(self.epilogue),
        }


KernelSpec = RouteSpec | PermuteSpec | CombineSpec | GemmSpec


def why_not_implementable(config: GemmConfig, epilogue: Epilogue) -> str | None:
    """Why this kernel cannot be built, or None when it can. The one place that knows the kernel's limits."""
    if config.tile_features not in (128, 256):
        return f"tile_features must be 128 or 256, got {config.tile_features}"
    if config.cluster not in (1, 2):
        return f"cluster must be 1 or 2, got {config.cluster}"
    widths = config.token_widths
    if not widths or list(widths) != sorted(set(widths)) or widths[0] < 8:
        return f"token_widths must be ascending and at least 8, got {widths}"
    if any(width % (8 if width <= 256 else 16) for width in widths):
        return f"token_widths must be multiples of 8, and of 16 beyond 256 (two instructions of half), got {widths}"
    if config.tile_tokens % ROW_GRANULE:
        return f"the largest token width must be a multiple of {ROW_GRANULE}, got {config.tile_tokens}"
    most = 32 * config.loaders  # a lane keeps the number of a row
    if config.gather and config.tile_tokens > most:
        return f"gather in a cluster of {config.cluster} takes tiles of at most {most} tokens, got {config.tile_tokens}"
    if config.accumulator_registers > MAX_ACCUMULATOR_REGISTERS:
        return (
            f"{config.name} needs {config.accumulator_registers} accumulator registers a thread; "
            f"{MAX_ACCUMULATOR_REGISTERS} leave room for the rest"
        )
    if config.stages(epilogue) < 3:
        return f"{config.name} leaves room for {config.stages(epilogue)} stages in shared memory; 3 are needed"
    return None
