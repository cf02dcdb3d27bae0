"""Epilogues on the CPU: formulas from their own source, value by value; chains; what they load and store; mistakes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutlass_moe
from cutlass_moe.config import GemmConfig, GemmSpec
from epilogues import (
    Bias,
    Cast,
    Chain,
    ClampedSwiglu,
    DslOps,
    Epilogue,
    EpilogueError,
    EpilogueTensor,
    GeluGate,
    Identity,
    ReluSquared,
    ResidualAdd,
    RoutingScale,
    RowAbsMax,
    Scale,
    Scatter,
    SideOutput,
    SiluGate,
    StorePreActivation,
    TorchOps,
    check_epilogue,
)
from epilogues.base import as_tuple, stored_planes
from epilogues.describe import read_epilogue

INF, NAN = math.inf, math.nan
DENORMAL = 1e-40
SPECIAL = [INF, -INF, NAN, 0.0, -0.0, DENORMAL, -DENORMAL, 1e-30, -1e-30, 1e4, -1e4, 1e30, -1e30, 88.5, -88.5, -104.0]
LIBRARY: tuple[Epilogue, ...] = (
    Identity(),
    Bias() | Scatter(),
    Bias(operands=2) | SiluGate(),
    GeluGate(),
    GeluGate("tanh"),
    Bias(operands=2) | ClampedSwiglu(),
    ReluSquared(),
    RoutingScale(),
    Scale(),
    Scale("expert"),
    ResidualAdd(),
    ResidualAdd("float32") | Cast("float32"),
    StorePreActivation() | SiluGate() | Scale("row"),
    StorePreActivation(operands=1, dtype="float32") | ReluSquared(),
    SiluGate() | RowAbsMax(),
    RoutingScale() | RowAbsMax(),
    SiluGate() | Cast("float32"),
)


def values() -> Tensor:
    return torch.cat([torch.tensor(SPECIAL), torch.linspace(-12, 12, 4801)])


def gates() -> tuple[Tensor, Tensor]:
    """Every gate with some ordinary up values; ordinary and special gates with special ones. (Far left, where a gate is
    about to underflow, it is chance whether infinity times it is infinity or NaN.)"""
    ordinary = torch.meshgrid(values(), torch.tensor([1.0, -0.75, 0.0, 9.0, -9.0]), indexing="ij")
    some = torch.cat([torch.tensor([INF, NAN, 0.0, 1e4, 88.5, -1e4]), torch.linspace(-4, 4, 100)])
    special = torch.meshgrid(some, torch.tensor([INF, -INF, NAN, DENORMAL]), indexing="ij")
    gate, up = (torch.cat([a.reshape(-1), b.reshape(-1)]) for a, b in zip(ordinary, special, strict=True))
    return gate, up


def gpt_oss_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As in openai/gpt-oss, gpt_oss/torch/model.py, on gate and up taken apart."""
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def exact_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """In float64 and by cases: torch's own gives NaN at infinity on some CPUs."""
    wide = gate.double()
    gelu = torch.where(wide == INF, wide, wide * torch.special.erfc(-wide / math.sqrt(2)) / 2)
    return (gelu * up.double()).float()


@pytest.mark.parametrize(
    ("epilogue", "truth", "atol"),
    [
        (SiluGate(), lambda gate, up: F.silu(gate) * up, 1e-37),
        (GeluGate(), exact_gelu, 5e-6),
        (GeluGate("tanh"), lambda gate, up: F.gelu(gate.double(), approximate="tanh").float() * up, 1e-5),
        (ClampedSwiglu(), gpt_oss_swiglu, 1e-36),
    ],
    ids=lambda value: value.name if isinstance(value, Epilogue) else "",
)
def test_gate(epilogue: Epilogue, truth: Callable[[Tensor, Tensor], Tensor], atol: float) -> None:
    gate, up = gates()
    actual, expected = epilogue.math(TorchOps, gate, up), truth(gate, up)
    torch.testing.assert_close(actual, expected, rtol=4e-6, atol=atol, equal_nan=True)


@pytest.mark.parametrize("epilogue", [SiluGate(), GeluGate(), GeluGate("tanh"), ClampedSwiglu()], ids=lambda e: e.name)
def test_large_negative_gate_gives_zero(epilogue: Epilogue) -> None:
    gate = torch.tensor([-1e4, -3e38, -200.0])
    assert (epilogue.math(TorchOps, gate, torch.ones(3)) == 0).all()


def test_gelu_is_as_exact_as_its_formula_says() -> None:
    x = torch.linspace(-10, 10, 200_001)
    error = GeluGate().math(TorchOps, x, torch.ones_like(x)).double() - exact_gelu(x, torch.ones_like(x)).double()
    assert (error.abs() <= 3e-7 * x.abs() + 1e-30).all()


def test_one_operand_formulas() -> None:
    x = values()
    assert torch.equal(Identity().math(TorchOps, x).nan_to_num(), x.nan_to_num())
    torch.testing.assert_close(ReluSquared().math(TorchOps, x), F.relu(x).square(), equal_nan=True, rtol=0, atol=0)
    scale = torch.tensor(0.3)
    for epilogue, name in ((RoutingScale(), "row_weight"), (Scale(), "scale"), (Scale("row", "s"), "s")):
        torch.testing.assert_close(epilogue.math(TorchOps, x, **{name: scale}), x * 0.3, equal_nan=True)
    torch.testing.assert_close(ResidualAdd().math(TorchOps, x, residual=x), x + x, equal_nan=True)


def run_on_host(epilogue: Epilogue, columns: list[Tensor]) -> list[Tensor]:
    """What the math gives for each row of `columns`, which are the accumulators, then the tensors and scalars."""
    import cutlass
    from cutlass import Float32, cute
    from cutlass.cute.runtime import from_dlpack

    class HostOps(DslOps):
        """`DslOps` but for instructions of the GPU (MUFU.RCP, FMNMX.NAN) that have no form on the host."""

        @staticmethod
        def reciprocal(x: Any) -> Any:
            return Float32(1.0) / x

        @staticmethod
        def maximum(x: Any, y: Any) -> Any:
            return DslOps.where(x < y, y, x)

        @staticmethod
        def minimum(x: Any, y: Any) -> Any:
            return DslOps.where(x > y, y, x)

    given = torch.stack(columns, 1)
    names = [*(tensor.name for tensor in epilogue.tensors), *epilogue.scalars]
    results = torch.zeros(len(given), len(stored_planes(epilogue)))

    @cute.jit
    def run(given, results):  # type: ignore[no-untyped-def]  # the DSL would look for `cute` among the globals
        for i in cutlass.range_constexpr(len(columns[0])):
            taken = [given[i, n] for n in range(epilogue.accumulators)]
            inputs = {name: given[i, epilogue.accumulators + n] for n, name in enumerate(names)}
            for n, value in enumerate(as_tuple(epilogue.math(HostOps, *taken, **inputs))):
                results[i, n] = value

    run(from_dlpack(given), from_dlpack(results))
    return list(results.unbind(1))


@pytest.mark.parametrize("epilogue", LIBRARY, ids=lambda e: e.name)
def test_math_runs_through_the_dsl(epilogue: Epilogue) -> None:
    """The same source on the DSL's Float32, compiled for the host, against TorchOps."""
    pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    count = epilogue.accumulators + len(epilogue.tensors) + len(epilogue.scalars)
    x = torch.tensor([*SPECIAL, -3.0, -0.5, 0.7, 6.0, 8.0])
    columns = [x.roll(shift) for shift in range(count)]
    names = [*(tensor.name for tensor in epilogue.tensors), *epilogue.scalars]
    inputs = dict(zip(names, columns[epilogue.accumulators :], strict=True))
    expected = epilogue.math(TorchOps, *columns[: epilogue.accumulators], **inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    actual = run_on_host(epilogue, columns)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("epilogue", LIBRARY, ids=lambda e: e.name)
def test_description_and_name(epilogue: Epilogue) -> None:
    check_epilogue(epilogue)
    assert epilogue.name.isidentifier()
    assert read_epilogue(json.loads(json.dumps(epilogue.describe()))) == epilogue


def test_names_and_descriptions_are_distinct() -> None:
    assert len({epilogue.name for epilogue in LIBRARY}) == len(LIBRARY)
    assert ClampedSwiglu(limit=5.0).name == "clamped_swiglu_limit_5_0"


def test_chain_is_flat_and_takes_part_of_everything() -> None:
    chain = Bias(operands=2) | SiluGate() | Scale() | RoutingScale() | Cast("float32")
    assert chain == Chain(Bias(operands=2), SiluGate() | Scale(), RoutingScale(), Cast("float32"))
    assert (chain.accumulators, chain.results, chain.scatter, chain.out_dtype) == (2, 1, True, "float32")
    assert [tensor.name for tensor in chain.tensors] == ["gate_bias", "up_bias", "row_weight"]
    assert chain.scalars == ("scale",)


def multiply(rows: Tensor, weight: Tensor, offsets: list[int]) -> Tensor:
    """Grouped GEMM in fp32."""
    parts = [rows[a:b].float() @ w.float().T for w, a, b in zip(weight, offsets, offsets[1:], strict=False)]
    return torch.cat(parts)


def test_grouped_gemm_loads_and_stores_everything() -> None:
    """All broadcasts, a scalar, both side outputs and another dtype, scattered."""
    torch.manual_seed(0)
    offsets, columns = [0, 3, 3, 10], 24
    rows = torch.randn(12, 32).bfloat16()  # two more than the experts have
    gate, up = (torch.randn(3, columns, 32).bfloat16() for _ in range(2))
    bias = torch.randn(3, 2 * columns).bfloat16()[:, ::2]
    residual = torch.randn(12, columns).half()
    row, expert = torch.rand(12), torch.rand(3)
    place = torch.randperm(15)[:12].int()
    epilogue = (
        Bias(operands=2)
        | StorePreActivation()
        | SiluGate()
        | Scale("expert", "expert_scale")
        | Scale()
        | ResidualAdd("float16")
        | RoutingScale()
        | Cast("float32")
        | RowAbsMax()
    )
    inputs = {
        "gate_bias": bias,
        "up_bias": -bias,
        "expert_scale": expert,
        "scale": 0.5,
        "residual": residual,
        "row_weight": row,
    }
    out, pre_activation, absmax = cutlass_moe.grouped_gemm(
        rows,
        (gate, up),
        torch.tensor(offsets).int(),
        epilogue=epilogue,
        tensors=inputs,
        row_index=place,
        out=torch.full((15, columns), NAN),
    )
    expert_of = torch.tensor([0] * 3 + [2] * 7)
    a = multiply(rows, gate, offsets) + bias.float()[expert_of]
    b = multiply(rows, up, offsets) - bias.float()[expert_of]
    expected = (F.silu(a) * b * expert[expert_of, None] * 0.5 + residual[:10].float()) * row[:10, None]
    kept = place[:10].long()
    torch.testing.assert_close(out[kept], expected)
    assert pre_activation.shape == (15, 2, columns) and pre_activation.dtype == torch.bfloat16
    torch.testing.assert_close(pre_activation[kept], torch.stack([a, b], 1).bfloat16())
    assert torch.equal(absmax[kept], out[kept].abs().amax(1))
    others = torch.ones(15).bool()
    others[kept] = False
    assert out[others].isnan().all() and not absmax[others].any()


def test_row_absmax_of_nan_is_nan() -> None:
    rows = torch.ones(2, 8).bfloat16()
    rows[1, 3] = NAN
    offsets = torch.tensor([0, 2]).int()
    _, absmax = cutlass_moe.grouped_gemm(rows, torch.ones(1, 8, 8).bfloat16(), offsets, epilogue=RowAbsMax())
    assert absmax[0] == 8 and absmax[1].isnan()


@pytest.mark.parametrize(
    ("activation", "truth"),
    [
        ("silu", lambda gate, up: F.silu(gate) * up),
        ("gelu", lambda gate, up: F.gelu(gate) * up),
        ("gelu_tanh", lambda gate, up: F.gelu(gate, approximate="tanh") * up),
        ("swiglu_oai", gpt_oss_swiglu),
        (ClampedSwiglu(), gpt_oss_swiglu),
        (GeluGate("tanh"), lambda gate, up: F.gelu(gate, approximate="tanh") * up),
    ],
)
@pytest.mark.parametrize("biased", ["", "gate", "down", "both"])
@pytest.mark.parametrize("entry", ["separate", "concatenated", "interleaved"])
def test_layer(
    activation: str | Epilogue,
    truth: Callable[[Tensor, Tensor], Tensor],
    biased: str,
    entry: str,
    make_layer: Any,
    relative_error: Any,
) -> None:
    layer = make_layer(9, 2, 4, 32, 24, layout=entry, seed=3)
    torch.manual_seed(4)
    b_gate_up = torch.randn(4, 48).bfloat16() if biased in ("gate", "both") else None
    b_down = torch.randn(4, 32).bfloat16() if biased in ("down", "both") else None
    b_gate = b_up = None
    if b_gate_up is not None:
        b_gate, b_up = (b_gate_up[:, ::2], b_gate_up[:, 1::2]) if entry == "interleaved" else b_gate_up.chunk(2, 1)
    if entry == "separate":
        biases = {"b_gate": b_gate, "b_up": b_up, "b_down": b_down}
        out = cutlass_moe.fused_experts(*layer.arguments, activation=activation, **biases)  # type: ignore[arg-type]
    else:
        arguments = (layer.x, layer.w_gate_up, layer.w_down, layer.ids, layer.weights)
        keywords: dict[str, Any] = {"interleaved": entry == "interleaved", "b_gate_up": b_gate_up, "b_down": b_down}
        out = cutlass_moe.fused_experts_gate_up(*arguments, activation=activation, **keywords)
    expected = torch.zeros(9, 32)
    for token in range(9):
        for expert, weight in zip(layer.ids[token], layer.weights[token], strict=True):
            x = layer.x[token].float()
            gate, up = layer.w_gate[expert].float() @ x, layer.w_up[expert].float() @ x
            if b_gate is not None and b_up is not None:
                gate, up = gate + b_gate[expert].float(), up + b_up[expert].float()
            y = layer.w_down[expert].float() @ truth(gate, up)
            expected[token] += weight.float() * (y if b_down is None else y + b_down[expert].float())
    assert relative_error(out, expected) < 5e-3


def test_layer_under_compile_is_one_operator(make_layer: Any) -> None:
    layer = make_layer(5, 2, 3, 16, 24)
    biases = {"b_gate": torch.ones(3, 24).bfloat16(), "b_up": torch.ones(3, 24).bfloat16()}

    def call(x: Tensor) -> Tensor:
        return cutlass_moe.fused_experts(x, *layer.arguments[1:], activation="swiglu_oai", **biases)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(layer.x), call(layer.x))


COMPILED = [
    *((config, e) for config in (GemmConfig(128, (16, 48), 2), GemmConfig(128, (64,), 2, True)) for e in LIBRARY),
    (GemmConfig(128, (16, 48), 1, gather=True), SiluGate()),
    (GemmConfig(128, (64,), 2, True, gather=True), SiluGate()),
]


@pytest.mark.parametrize(("config", "epilogue"), COMPILED, ids=lambda each: each.name)
def test_compiles_without_spills(config: GemmConfig, epilogue: Epilogue, tmp_path: Any) -> None:
    pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    from cutlass_moe.aot.sass import can_inspect, inspect_cubin
    from cutlass_moe.kernels.compiler import compile_kernel

    if not can_inspect():
        pytest.skip("needs cuobjdump and nvdisasm")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_kernel(GemmSpec("bfloat16", config, epilogue)).artifacts.CUBIN)
    used = inspect_cubin(cubin)
    assert (used.stack_bytes, used.local_bytes, used.spill_loads, used.spill_stores) == (0, 0, 0, 0)
    assert used.hgmma > 0


# Mistakes. Each error names this file and the line to change.
HERE = r"test_epilogues\.py:\d+"


@dataclass(frozen=True)
class ForgotAccumulators(Epilogue):
    def math(self, ops: Any, gate: Any, up: Any) -> Any:
        return gate * up


@dataclass(frozen=True)
class ForgotResult(Epilogue):
    side_outputs = (SideOutput("copy"),)

    def math(self, ops: Any, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class Branches(Epilogue):
    def math(self, ops: Any, value: Any) -> Any:
        return value if value > 0 else -value


@dataclass(frozen=True)
class UnknownOp(Epilogue):
    def math(self, ops: Any, value: Any) -> Any:
        return ops.gamma(value)


@dataclass(frozen=True)
class ForgotTensor(Epilogue):
    def math(self, ops: Any, value: Any, bias: Any) -> Any:
        return value + bias


@dataclass(frozen=True)
class StoresInt8(Epilogue):
    out_dtype = "int8"

    def math(self, ops: Any, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class NoTuple(Epilogue):
    tensors = EpilogueTensor("bias")  # type: ignore[assignment]

    def math(self, ops: Any, value: Any, bias: Any) -> Any:
        return value + bias


class NoDataclass(Epilogue):
    factor: float = 2.0

    def math(self, ops: Any, value: Any) -> Any:
        return value * self.factor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EpilogueTensor("bias", "columns"), HERE + r": broadcast of EpilogueTensor 'bias' must be .*that line"),
        (lambda: EpilogueTensor("bias", dtype="int8"), HERE + r": dtype of .*cannot be loaded: .*that line"),
        (lambda: SideOutput("copy", dtype="fp8"), HERE + r": dtype of SideOutput 'copy' .*cannot be stored"),
        (lambda: check_epilogue(ForgotAccumulators()), HERE + r": ForgotAccumulators.math does not run.*2 for gate"),
        (lambda: check_epilogue(ForgotResult()), HERE + r": ForgotResult.math must return 2 value\(s\).*got 1"),
        (lambda: check_epilogue(Branches()), HERE + r": in Branches.math: .* use ops.where"),
        (lambda: check_epilogue(UnknownOp()), HERE + r": in UnknownOp.math: ops has no gamma: it has exp, .*"),
        (lambda: check_epilogue(ForgotTensor()), HERE + r": ForgotTensor.math does not run, .*'bias'.*`tensors`"),
        (lambda: check_epilogue(StoresInt8()), HERE + r": StoresInt8.out_dtype must be .*got 'int8'.*that line"),
        (lambda: check_epilogue(NoTuple()), HERE + r": NoTuple.tensors must be a tuple of EpilogueTensor"),
        (lambda: check_epilogue(NoDataclass()), HERE + r": class NoDataclass has fields: put @dataclass"),
        (lambda: check_epilogue(Bias(operands=2)), r"ends with 2 values, and one is stored: put a gate after it"),
        (lambda: check_epilogue(Bias(operands=3)), r"library.py:\d+: Bias.accumulators must be 1 or 2, got 3"),
        (lambda: Bias() | SiluGate(), r"SiluGate\(\) takes 2 value\(s\), and Bias\(.*gives 1: give Bias operands=2"),
        (lambda: SiluGate() | SiluGate(), r"SiluGate\(\) takes 2 value\(s\), and SiluGate\(\) before it gives 1"),
        (lambda: Bias(operands=2) | Scale(), r"Scale\(.*takes 1 value\(s\), and .*gives 2: put a gate between them"),
        (lambda: Bias() | Bias(), r"two of its parts have a tensor, scalar or side output 'bias'"),
        (lambda: RowAbsMax() | Scale(), r"RowAbsMax\(\) is of the output as stored and must come last"),
        (lambda: Chain(SiluGate), r"a chain must be of epilogues, got <class"),  # type: ignore[arg-type]
        (lambda: Cast("int8"), r"Cast: dtype must be one of .*'int8', which cannot be stored"),
        (lambda: GeluGate("sigmoid"), r"approximate must be 'none' or 'tanh', got 'sigmoid'"),
    ],
)  # fmt: skip
def test_mistake(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(EpilogueError, match=message):
        make()


def test_mistakes_come_from_the_compiler_too() -> None:
    pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    from cutlass_moe.kernels.compiler import compile_kernel

    with pytest.raises(EpilogueError, match=HERE):
        compile_kernel(GemmSpec("bfloat16", GemmConfig(128, (16,), 1), StoresInt8()))


def test_call_time_mistakes() -> None:
    rows, weight = torch.ones(5, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16()
    offsets = torch.tensor([0, 2, 5]).int()

    def call(epilogue: Epilogue, **tensors: Any) -> Any:
        return cutlass_moe.grouped_gemm(rows, weight, offsets, epilogue=epilogue, tensors=tensors)

    with pytest.raises(
        ValueError,
        match=r"tensors\['bias'\] must have shape \[E, N\] = \[2, 8\], got \[5\] \(broadcast='expert_column', declared "
        r"at library.py:\d+; for this tensor change it there to 'row'\)",
    ):
        call(Bias(), bias=torch.ones(5).bfloat16())
    with pytest.raises(ValueError, match=r"b must be a \(gate, up\) pair .* 2 is declared at library.py:\d+"):
        call(SiluGate())
    with pytest.raises(TypeError, match=r"tensors\['scale'\] must be a float, got Tensor"):
        call(Scale(), scale=torch.ones(()))
    with pytest.raises(TypeError, match=r"out must have dtype torch.float32, got torch.bfloat16"):
        cutlass_moe.grouped_gemm(rows, weight, offsets, epilogue=Cast("float32"), out=rows[:, :8])


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    """Its files, as they stand in docs/epilogues.md, are built and run."""
    pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    from cutlass_moe.__main__ import main

    root = Path(__file__).resolve().parents[1]
    module, script = re.findall(r"^```python\n(.*?)^```", (root / "docs" / "epilogues.md").read_text(), re.S | re.M)
    (tmp_path / "my_epilogues.py").write_text(module)
    (tmp_path / "try_my_epilogues.py").write_text(script)
    library = tmp_path / "my_library"
    assert main(["build", "--module", str(tmp_path / "my_epilogues.py"), "--output", str(library), "--jobs", "1"]) == 0
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}", "CUTLASS_MOE_LIBRARY": str(library)}
    command = [sys.executable, str(tmp_path / "try_my_epilogues.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cpu: right" in done.stdout
