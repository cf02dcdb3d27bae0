"""What a kernel is built from: specs and GEMM configurations, and which of them are legal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from epilogues import Epilogue

MAX_EXPERTS = 512  # the GEMM keeps two tables of this many experts in shared memory
CHUNK_SLOTS = 256  # slots one CTA of the routing kernel ranks at a time
MAX_CHUNKS = 128  # beyond this many chunks each CTA ranks several in turn, so that work stays linear in the slots
REDUCTION_TILE = 64  # elements of the reduction dimension in one stage: one 128-byte swizzle line
SHARED_MEMORY_BYTES = 227 * 1024  # what one CTA may use on compute capability 9.0
BARRIER_BYTES = 1024  # mbarriers and alignment slack
STORE_TOKENS = 32  # tokens that a consumer warpgroup transposes at a time; two buffers alternate
STORE_PAD = 8  # elements after each transposed row, so that the rows of a stmatrix fall into different banks
ELEMENT_BYTES = 2  # bf16 and fp16


def route_chunks(slots: int) -> int:
    """Number of CTAs that rank `slots` (token, slot) pairs: the extent C of `route`'s scratch `chunk_counts_CE`."""
    return max(1, min(MAX_CHUNKS, -(-slots // CHUNK_SLOTS)))


@dataclass(frozen=True)
class GemmConfig:
    """Tile shape of one grouped GEMM kernel: `tile_features` weight rows by up to `token_widths[-1]` tokens a CTA.

    Attributes:
        tile_features: weight rows (WGMMA M) of a CTA tile: 64 or 128, one consumer warpgroup for each 64.
        token_widths: ascending WGMMA N widths compiled into the kernel; a tile takes the narrowest that holds its tokens.
        cluster: CTAs along the weight rows that share one token tile by TMA multicast: 1 or 2.
    """

    tile_features: int
    token_widths: tuple[int, ...]
    cluster: int

    @property
    def tile_tokens(self) -> int:
        return self.token_widths[-1]

    @property
    def token_box(self) -> int:
        """Rows of one TMA load of tokens by one CTA; a tile loads as many boxes as its tokens need."""
        return 16 if self.tile_tokens <= 64 else 32

    @property
    def name(self) -> str:
        widths = "_".join(map(str, self.token_widths))
        return f"{self.tile_features}x{widths}_c{self.cluster}"

    def stage_bytes(self) -> int:
        return (self.tile_features + self.tile_tokens) * REDUCTION_TILE * ELEMENT_BYTES

    def epilogue_bytes(self, epilogue: Epilogue) -> int:
        """Shared memory of the epilogue: two transposition buffers and the row values of each consumer warpgroup."""
        store = 2 * STORE_TOKENS * (64 // epilogue.accumulators + STORE_PAD) * ELEMENT_BYTES
        rows = 4 * self.tile_tokens * (len(epilogue.tensors) + epilogue.scatter)
        return self.tile_features // 64 * (store + rows)

    def stages(self, epilogue: Epilogue) -> int:
        """Depth of the load pipeline: as many stages as shared memory holds, at most 12."""
        tables = 2 * 4 * (MAX_EXPERTS + 4)
        free = SHARED_MEMORY_BYTES - BARRIER_BYTES - tables - self.epilogue_bytes(epilogue)
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
            "epilogue": self.epilogue.name,
            "stages": self.config.stages(self.epilogue),
        }


KernelSpec = RouteSpec | PermuteSpec | CombineSpec | GemmSpec


def why_not_implementable(config: GemmConfig, epilogue: Epilogue) -> str | None:
    """Why this kernel cannot be built, or None when it can. The one place that knows the kernel's limits."""
    if config.tile_features not in (64, 128):
        return f"tile_features must be 64 or 128 (one warpgroup for each 64), got {config.tile_features}"
    if config.cluster not in (1, 2):
        return f"cluster must be 1 or 2, got {config.cluster}"
    widths = config.token_widths
    if not widths or list(widths) != sorted(set(widths)) or any(w % 16 or not 16 <= w <= 256 for w in widths):
        return f"token_widths must be ascending multiples of 16 from 16 to 256, got {widths}"
    if config.tile_tokens % config.token_box:
        return f"the largest token width must be a multiple of {config.token_box}, got {config.tile_tokens}"
    if config.stages(epilogue) < 3:
        return f"{config.name} leaves room for {config.stages(epilogue)} stages in shared memory; 3 are needed"
    return None
