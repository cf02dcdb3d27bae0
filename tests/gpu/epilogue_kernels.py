"""Kernels that only the GPU tests run: `python -m cutlass_moe build --module tests.gpu.epilogue_kernels`.

Every epilogue of the library, alone or in a chain, in a cooperative and in a ping-pong configuration; and what is legal
but not shipped: kernels that gather in a cluster of one CTA.
"""

from __future__ import annotations

from cutlass_moe.config import GemmConfig, GemmSpec
from epilogues import (
    Bias,
    Cast,
    ClampedSwiglu,
    Epilogue,
    GeluGate,
    Identity,
    ReluSquared,
    ResidualAdd,
    RoutingScale,
    RowAbsMax,
    Scale,
    Scatter,
    SiluGate,
    StorePreActivation,
)

COOPERATIVE = GemmConfig(128, (16, 48), cluster=2)
PING_PONG = GemmConfig(128, (64, 160), cluster=2, ping_pong=True)
TALL = GemmConfig(256, (32, 96), cluster=1)
TRAINING = StorePreActivation() | SiluGate() | RowAbsMax()

EPILOGUES: tuple[Epilogue, ...] = (
    Bias(),
    Bias(operands=2) | SiluGate(),
    GeluGate(),
    GeluGate("tanh"),
    ClampedSwiglu(),
    ClampedSwiglu(alpha=1.0, limit=3.0),
    ReluSquared(),
    Scale() | Scale("expert", "expert_scale") | Scale("row", "row_scale"),
    ResidualAdd(),
    ResidualAdd("float32") | Scatter(),
    RoutingScale() | ResidualAdd(),
    TRAINING,
    StorePreActivation(operands=1, dtype="float32") | ReluSquared(),
    RoutingScale() | RowAbsMax(),
    Identity() | Cast("float32"),
    Bias(2, "float32") | StorePreActivation() | SiluGate() | RoutingScale() | Cast("float32") | RowAbsMax(),
)
_TALL: tuple[Epilogue, ...] = (Bias(operands=2) | SiluGate(), ResidualAdd(), TRAINING)

GATHERING = [
    GemmSpec("bfloat16", GemmConfig(128, (16, 48), cluster=1, gather=True), SiluGate()),
    GemmSpec("bfloat16", GemmConfig(128, (32, 96), cluster=1, ping_pong=True, gather=True), SiluGate()),
]
KERNELS = [
    *GATHERING,
    *(GemmSpec("bfloat16", config, epilogue) for config in (COOPERATIVE, PING_PONG) for epilogue in EPILOGUES),
    *(GemmSpec("bfloat16", TALL, epilogue) for epilogue in _TALL),
    *(GemmSpec("float16", COOPERATIVE, epilogue) for epilogue in _TALL),
]
