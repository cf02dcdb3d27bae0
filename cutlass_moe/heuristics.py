"""Which GEMM configuration for which shape. Chosen by measurement on an H200: docs/performance.md."""

from __future__ import annotations

import math

from cutlass_moe.config import GemmConfig

# A kernel holds several token widths and takes, tile by tile, the narrowest that fits. Routed counts spread by about
# 3 * sqrt(mean) around the mean, so a configuration's widest tile lies above its range.
_FEW = GemmConfig(128, (16, 32), cluster=2)
_SOME = GemmConfig(128, (16, 32, 48, 64, 80, 96), cluster=2)
_MORE = GemmConfig(128, (64, 80, 96, 112, 128, 144, 160, 176, 192), cluster=2, ping_pong=True)
_FULL = GemmConfig(128, (64, 128, 160, 192, 208, 224, 240, 256, 272, 288), cluster=2)

CONFIGS = (_FEW, _SOME, _MORE, _FULL)

_BY_MEAN_ROWS = ((6, _FEW), (72, _SOME), (200, _MORE), (math.inf, _FULL))


def choose_gemm_config(rows: int, experts: int, features: int, reduction: int, accumulators: int) -> GemmConfig:
    """The configuration for `rows` rows spread over `experts` experts.

    Args:
        rows: M, the slots of all tokens; what each expert gets is known on the device only.
        experts: E.
        features: weight rows of one expert, gate and up together.
        reduction: K.
        accumulators: of the epilogue.
    """
    return next(config for most, config in _BY_MEAN_ROWS if rows <= most * experts)
