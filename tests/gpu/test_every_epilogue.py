"""Every epilogue in the kernel against its own formula on torch tensors: several token widths, odd sizes, every store.

Runs the kernels of `epilogue_kernels`, from a library that `$CUTLASS_MOE_LIBRARY` names (`python -m perf.bundle
--module tests.gpu.epilogue_kernels` packs one), or compiled on first use.
"""

from __future__ import annotations

import importlib
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_moe
from cutlass_moe import checks, heuristics, reference
from cutlass_moe.aot.load import get_kernel
from cutlass_moe.aot.verify import random_inputs
from cutlass_moe.config import GemmConfig, GemmSpec
from cutlass_moe.epilogue_arguments import kernel_arguments, resolve_dtype
from epilogues import Epilogue, SiluGate
from tests.gpu.epilogue_kernels import COOPERATIVE, GATHERING, KERNELS, PING_PONG, TRAINING

GEMM_MODULE: Any = importlib.import_module("cutlass_moe.grouped_gemm")  # the package's attribute is the function
SPARE_ROWS = 11
SPREAD = 4.0  # standard deviation of the accumulators: gates far out on both sides, values past every clamp
ERROR = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 2e-5}  # relative Frobenius error


def assert_close(actual: Tensor, expected: Tensor) -> None:
    size = expected.double().square().mean().sqrt()
    difference = (actual.double() - expected.double()).abs()
    assert difference.square().mean().sqrt() <= ERROR[actual.dtype] * size
    rounding = max(torch.finfo(actual.dtype).eps, 1e-5)
    assert (difference <= rounding * expected.double().abs() + 1e-3 * size).all()


def canonical(argument: Tensor | float) -> Tensor | float:
    return checks.canonical_strides(argument) if isinstance(argument, Tensor) else argument


def run(spec: GemmSpec, counts: list[int], features: int, reduction: int, guarded: Any, sm_count: int) -> list[Tensor]:
    """Runs the kernel on poisoned outputs, checks everything it stores, and returns it."""
    dtype, epilogue = getattr(torch, spec.dtype), spec.epilogue
    generator = torch.Generator("cuda").manual_seed(len(counts) + features)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)

    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cuda")
    kept = sum(counts)
    rows = kept + SPARE_ROWS
    a_MK = normal(rows, reduction)
    a_MK[kept:] = torch.nan
    shape = (len(counts), features, reduction)
    weights = [normal(*shape, scale=SPREAD * reduction**-0.5) for _ in range(epilogue.accumulators)]
    inputs = random_inputs(epilogue, rows, len(counts), features, dtype, generator)
    for declared in epilogue.tensors:  # what belongs to no row or to an expert without rows is not read into any other
        if declared.broadcast in ("row", "full"):
            inputs[declared.name][kept:] = torch.nan
        else:
            inputs[declared.name][torch.tensor(counts, device="cuda") == 0] = torch.nan
    out_rows, row_index = rows, None
    if epilogue.scatter:
        out_rows = rows + 5
        row_index = torch.randperm(out_rows, generator=generator, device="cuda")[:rows].int()
    out = guarded((out_rows, features), resolve_dtype(epilogue.out_dtype, dtype), features + 8)
    sides = []
    for side in epilogue.side_outputs:
        if side.row_absmax:
            made = guarded((out_rows,), torch.float32)
            made.tensor.zero_()
        else:
            side_shape = (out_rows, features) if side.values == 1 else (out_rows, side.values, features)
            made = guarded(side_shape, resolve_dtype(side.dtype, dtype), None if side.values == 1 else features + 8)
        sides.append(made)
    side_tensors = [made.tensor for made in sides]
    get_kernel(spec)(
        checks.canonical_strides(a_MK),
        None,
        None,
        checks.canonical_strides(weights[0]),
        checks.canonical_strides(weights[1]) if len(weights) == 2 else None,
        offsets,
        tuple(map(canonical, kernel_arguments(epilogue, inputs, side_tensors))) or None,
        row_index,
        checks.canonical_strides(out.tensor),
        offsets.new_zeros(1),
        False,
        sm_count,
    )
    expected = torch.full((out_rows, features), torch.nan, device="cuda")
    expected_sides = [torch.full(made.tensor.shape, torch.nan, device="cuda") for made in sides]
    reference.grouped_gemm(a_MK, weights, offsets, epilogue, inputs, row_index, expected, expected_sides)
    written = ~expected.isnan().all(1)
    assert int(written.sum()) == kept
    assert_close(out.tensor[written], expected[written])
    assert out.is_poison(out.tensor[~written])
    out.check()
    for side, made, expected_side in zip(epilogue.side_outputs, sides, expected_sides, strict=True):
        if side.row_absmax:
            assert torch.equal(made.tensor[written], out.tensor[written].float().abs().amax(1))
            assert not made.tensor[~written].any()
        else:
            assert_close(made.tensor[written], expected_side[written])
            assert made.is_poison(made.tensor[~written])
        made.check()
    return [out.tensor, *side_tensors]


@pytest.mark.parametrize("spec", [spec for spec in KERNELS if spec not in GATHERING], ids=lambda spec: spec.name)
def test_epilogue(spec: GemmSpec, guarded: Any) -> None:
    tile = spec.config.tile_tokens
    around = [count for width in spec.config.token_widths for count in (width - 1, width, width + 1)]
    counts = [0, 1, *around, 0, 7, 2 * tile + 1, 0]
    sm_count = checks.hopper_sm_count(torch.device("cuda", torch.cuda.current_device()))
    for features, reduction, multiprocessors in ((200, 392, sm_count), (1032, 72, sm_count), (136, 520, 2)):
        run(spec, counts, features, reduction, guarded, multiprocessors)
    run(spec, [tile + 5], 8, 64, guarded, sm_count)


@pytest.mark.parametrize("config", [COOPERATIVE, PING_PONG], ids=lambda config: config.name)
def test_every_run_gives_the_same_bits(config: GemmConfig, guarded: Any) -> None:
    spec = GemmSpec("bfloat16", config, TRAINING)
    first, second = (run(spec, [70, 0, 33], 264, 136, guarded, 132) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_row_absmax_of_special_values(value: float, guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, absmax = call_public(COOPERATIVE, TRAINING, monkeypatch, value)
    assert not absmax[3].isfinite() and absmax[[0, 1, 2, 4]].isfinite().all()


def call_public(config: GemmConfig, epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch, value: float) -> Any:
    """`grouped_gemm` with this configuration, whose kernel is in the tests' library; `value` goes into row 3."""
    monkeypatch.setattr(heuristics, "choose_gemm_config", lambda *_: config)
    GEMM_MODULE._gemm_kernel.cache_clear()
    try:
        torch.manual_seed(5)
        a_MK = torch.randn(5, 64, device="cuda").bfloat16()
        a_MK[3] = value
        weights = [torch.rand(2, 72, 64, device="cuda").bfloat16() for _ in range(2)]
        offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device="cuda")
        return cutlass_moe.grouped_gemm(a_MK, (weights[0], weights[1]), offsets, epilogue=epilogue)
    finally:
        GEMM_MODULE._gemm_kernel.cache_clear()


def test_public_function_returns_side_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    out, pre_activation, absmax = call_public(COOPERATIVE, TRAINING, monkeypatch, 1.0)
    assert (out.shape, pre_activation.shape, absmax.shape) == ((5, 72), (5, 2, 72), (5,))
    gate, up = pre_activation.float().unbind(1)
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(gate) * up, rtol=0.03, atol=0.02)
    assert torch.equal(absmax, out.float().abs().amax(1))


@pytest.mark.parametrize("tokens", [1, 77, 1000])
@pytest.mark.parametrize(("activation", "biased"), [("swiglu_oai", True), ("gelu_tanh", False), (SiluGate(), False)])
def test_layer(activation: Any, biased: bool, tokens: int, make_layer: Any, relative_error: Any) -> None:
    """The shipped kernels of other activations and of biases."""
    layer = make_layer(tokens, 4, 8, 256, 136, layout="interleaved", device="cuda", seed=tokens)
    biases: dict[str, Tensor] = {}
    b_gate_up = b_down = None
    if biased:
        b_gate_up = torch.randn(8, 272, device="cuda").bfloat16()
        b_down = torch.randn(8, 256, device="cuda").bfloat16()
        biases = {"b_gate": b_gate_up[:, ::2], "b_up": b_gate_up[:, 1::2], "b_down": b_down}
    assert layer.w_gate_up is not None
    out = cutlass_moe.fused_experts_gate_up(
        layer.x,
        layer.w_gate_up,
        layer.w_down,
        layer.ids,
        layer.weights,
        interleaved=True,
        activation=activation,
        b_gate_up=b_gate_up,
        b_down=b_down,
    )
    expected = reference.reference_experts(*layer.arguments, activation=activation, **biases)
    assert relative_error(out, expected) < 5e-3
