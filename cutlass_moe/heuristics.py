"""Which GEMM configuration for which shape."""

from __future__ import annotations

from cutlass_moe.config import GemmConfig

# Narrowest first. A kernel holds several WGMMA widths and takes, tile by tile, the narrowest that fits the expert's rows.
CONFIGS = (
    GemmConfig(128, (16, 32), 1),
    GemmConfig(128, (32, 48, 64, 96, 128), 1),
    GemmConfig(128, (32, 48, 64, 96, 128), 2),
    GemmConfig(128, (32, 64, 96, 128, 144, 160, 176, 192, 208, 224, 240, 256), 2),
)


def choose_gemm_config(
    rows: int, experts: int, features: int, reduction: int, accumulators: int
) -> GemmConfig:
    """The configuration for `rows` rows spread over `experts` experts.

    Args:
        rows: M, slots of all tokens together; what each expert gets is known on the device only.
        experts: E.
        features: weight rows of one expert, gate and up together.
        reduction: K.
        accumulators: of the epilogue.
    """
    per_expert = rows / experts
    if per_expert <= 16:
        return CONFIGS[0]
    if per_expert <= 96:
        return CONFIGS[2]
    return CONFIGS[3]
