"""Every argument check: the error's type, and that it names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_moe
from cutlass_moe import checks
from cutlass_moe.config import MAX_EXPERTS
from epilogues import Identity, RoutingScale, SiluGate

T, K, E, H, I = 5, 2, 3, 32, 24  # noqa: E741
BF16 = torch.bfloat16
TOO_MANY = MAX_EXPERTS + 1


@pytest.fixture
def call(make_layer: Any) -> dict[str, Any]:
    layer = make_layer(T, K, E, H, I)
    names = ("x", "w_gate", "w_up", "w_down", "topk_ids", "topk_weights")
    return dict(zip(names, layer.arguments, strict=True))


def strided(shape: tuple[int, ...], row_stride: int) -> Tensor:
    return torch.zeros(*shape[:-1], row_stride, dtype=BF16)[..., : shape[-1]]


def misaligned(shape: tuple[int, ...]) -> Tensor:
    """Rows at multiples of 16 bytes from a base that is not one."""
    count = torch.Size(shape).numel()
    return torch.zeros(count + 8, dtype=BF16)[1 : count + 1].view(shape)


def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


BAD_LAYER_ARGUMENTS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("x", lambda: [1.0], TypeError, r"x must be a torch.Tensor, got list"),
    ("x", lambda: ones(H), ValueError, r"x must have 2 or more dimensions \[\.\.\., H\], got shape \[32\]"),
    (
        "x",
        lambda: ones(T, H, dtype=torch.float32),
        TypeError,
        r"x must have dtype .*bfloat16 or .*float16, got .*32",
    ),
    ("x", lambda: ones(T, 20), ValueError, r"x: H must be a positive multiple of 8, got H = 20"),
    ("x", lambda: ones(T, 0), ValueError, r"x: H must be a positive multiple of 8, got H = 0"),
    (
        "x",
        lambda: ones(H, T).T,
        ValueError,
        r"x must be contiguous in its last dimension .* got strides \[1, 5\]",
    ),
    (
        "x",
        lambda: strided((T, H), 36),
        ValueError,
        r"x must have rows aligned to 16 bytes .* got strides \[36, 1\]",
    ),
    ("x", lambda: misaligned((T, H)), ValueError, r"x must start at a multiple of 16 bytes, got address 0x"),
    (
        "x",
        lambda: ones(T, 40),
        ValueError,
        r"w_gate must have shape \[E, I, H\] = \[E, I, 40\], got \[3, 24, 32\]",
    ),
    (
        "x",
        lambda: ones(T + 1, H),
        ValueError,
        r"topk_ids must have shape \[\.\.\., K\] = \[6, K\], got \[5, 2\]",
    ),
    ("x", lambda: ones(T, H).requires_grad_(), RuntimeError, r"x requires grad.*inference only.*no_grad"),
    (
        "w_gate",
        lambda: ones(I, H),
        ValueError,
        r"w_gate must have 3 dimensions \[E, I, H\], got shape \[24, 32\]",
    ),
    (
        "w_gate",
        lambda: ones(E, I, H).half(),
        TypeError,
        r"w_gate must have dtype torch.bfloat16, got torch.float16",
    ),
    ("w_gate", lambda: ones(E, I, H).to("meta"), ValueError, r"w_gate must be on cpu like .*, got meta"),
    (
        "w_gate",
        lambda: strided((E, I, H), 36),
        ValueError,
        r"w_gate must have rows aligned .* \[864, 36, 1\]",
    ),
    (
        "w_gate",
        lambda: strided((E, I, H), 40),
        ValueError,
        r"w_up must have the strides of w_gate, \[960, 40, 1\], got",
    ),
    (
        "w_gate",
        lambda: misaligned((E, I, H)),
        ValueError,
        r"w_gate \(or w_gate_up\) must start at a multiple of 16",
    ),
    (
        "w_gate",
        lambda: ones(E, H, I).transpose(1, 2),
        ValueError,
        r"w_gate must be contiguous in its last dimension",
    ),
    (
        "w_up",
        lambda: ones(E, I + 8, H),
        ValueError,
        r"w_up must have shape \[E, I, H\] = \[3, 24, 32\], got \[3, 32, 32\]",
    ),
    ("w_up", lambda: ones(E, I, H).requires_grad_(), RuntimeError, r"w_up requires grad"),
    ("w_up", lambda: misaligned((E, I, H)), ValueError, r"w_up must start at a multiple of 16 bytes"),
    (
        "w_down",
        lambda: ones(E, I, H),
        ValueError,
        r"w_down must have shape \[E, H, I\] = \[3, 32, 24\], got \[3, 24, 32\]",
    ),
    ("w_down", lambda: ones(E + 1, H, I), ValueError, r"w_down must have shape .* got \[4, 32, 24\]"),
    ("w_down", lambda: strided((E, H, I), 28), ValueError, r"w_down must have rows aligned to 16 bytes"),
    ("w_down", lambda: misaligned((E, H, I)), ValueError, r"w_down must start at a multiple of 16 bytes"),
    (
        "topk_ids",
        lambda: torch.zeros(T),
        TypeError,
        r"topk_ids must have dtype torch.int32 or torch.int64, got .*float32",
    ),
    (
        "topk_ids",
        lambda: torch.zeros(T, dtype=torch.int32),
        ValueError,
        r"topk_ids must have 2 or more dimensions",
    ),
    (
        "topk_ids",
        lambda: torch.zeros(T, K, device="meta").int(),
        ValueError,
        r"topk_ids must be on cpu .* got meta",
    ),
    (
        "topk_weights",
        lambda: torch.ones(T, 3),
        ValueError,
        r"topk_weights must have shape .* = \[5, 2\], got \[5, 3\]",
    ),
    (
        "topk_weights",
        lambda: torch.ones(T, K).double(),
        TypeError,
        r"topk_weights must have dtype .* got .*float64",
    ),
    ("topk_weights", lambda: torch.ones(T, K).requires_grad_(), RuntimeError, r"topk_weights requires grad"),
    ("activation", lambda: "relu", ValueError, r"activation must be one of \['clamped_swiglu', .*\].*, got 'relu'"),
    ("activation", lambda: 3, TypeError, r"activation must be one of .* epilogues.Epilogue, got int"),
    ("activation", Identity, ValueError, r"of a gate and an up value .*, got Identity\(\)"),
    ("b_gate", lambda: ones(E, I), ValueError, r"b_up must be given where b_gate is, got None"),
    ("b_down", lambda: ones(E, I), ValueError, r"b_down must have shape \[E, H\] = \[3, 32\], got \[3, 24\]"),
    ("b_down", lambda: torch.ones(E, H), TypeError, r"b_down must have dtype torch.bfloat16, got torch.float32"),
    ("out", lambda: ones(T, H).half(), TypeError, r"out must have dtype torch.bfloat16, got torch.float16"),
    ("out", lambda: ones(T, 16), ValueError, r"out must have shape \[\.\.\., H\] = \[5, 32\], got \[5, 16\]"),
    ("out", lambda: ones(T, H).to("meta"), ValueError, r"out must be on cpu like .*, got meta"),
    (
        "out",
        lambda: ones(1, H).expand(T, H),
        ValueError,
        r"out must have rows that do not overlap.* \[0, 1\]",
    ),
    ("out", lambda: strided((T, H), 36), ValueError, r"out must have rows aligned to 16 bytes"),
    ("out", lambda: misaligned((T, H)), ValueError, r"out must start at a multiple of 16 bytes"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD_LAYER_ARGUMENTS)
def test_layer_argument(
    name: str, value: Callable[[], Any], error: type[Exception], message: str, call: dict[str, Any]
) -> None:
    cutlass_moe.fused_experts(**call)  # what is right about the others is known then
    call[name] = value()
    for _ in range(2):
        with pytest.raises(error, match=message):
            cutlass_moe.fused_experts(**call)


def test_calls_that_passed_are_told_apart(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look is taken at what was not seen yet, and only at that."""
    monkeypatch.setattr(checks, "_passed", set())
    looked: list[Tensor] = []
    monkeypatch.setattr(checks, "_check_hidden_states", looked.append)
    out = torch.empty_like(call["x"])
    expected = 0
    for change in ({}, {"out": out}, {"activation": "gelu"}, {"x": strided((T, H), 40)}, {"b_down": ones(E, H)}):
        expected += 1
        for _ in range(3):
            cutlass_moe.fused_experts(**(call | change))
            assert len(looked) == expected
    assert len(checks._passed) == expected
    monkeypatch.setattr(checks, "MAX_PASSED", expected)
    cutlass_moe.fused_experts(**(call | {"activation": "gelu_tanh"}))
    assert len(checks._passed) == 1, "what is remembered is bounded"


def test_calls_under_the_compiler_are_not_remembered(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_passed", set())
    torch.compile(cutlass_moe.fused_experts, fullgraph=True, backend="eager")(**call)
    assert not checks._passed


def test_out_must_not_overlap_x(call: dict[str, Any]) -> None:
    both = torch.zeros(2 * T, H, dtype=BF16)
    call |= {"x": both[:T], "out": both[T - 1 : 2 * T - 1]}
    with pytest.raises(ValueError, match=r"out must not overlap x in memory, got out at \[0x.* and x at \[0x"):
        cutlass_moe.fused_experts(**call)
    cutlass_moe.fused_experts(**(call | {"out": both[T:]}))


def test_out_with_leading_dimensions_must_be_viewable_as_rows(make_layer: Any) -> None:
    layer = make_layer(6, K, E, H, I)
    leading = [t.view(2, 3, t.shape[-1]) if t.shape[0] == 6 else t for t in layer.arguments]
    with pytest.raises(ValueError, match=r"out must be viewable as \[T, H\] without a copy, got strides \[32, 64, 1\]"):
        cutlass_moe.fused_experts(*leading, out=ones(3, 2, H).transpose(0, 1))


def test_grad_is_accepted_where_gradients_are_disabled(call: dict[str, Any]) -> None:
    call["w_gate"].requires_grad_()
    with torch.no_grad():
        assert not cutlass_moe.fused_experts(**call).requires_grad
    with pytest.raises(RuntimeError, match="w_gate requires grad"):
        cutlass_moe.fused_experts(**call)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (
            lambda: ones(E, 2 * I + 1, H),
            r"w_gate_up must have shape \[E, 2I, H\] = \[E, 2I, 32\], got \[3, 49, 32\]",
        ),
        (
            lambda: ones(E, 2 * I, 40),
            r"w_gate_up must have shape \[E, 2I, H\] = \[E, 2I, 32\], got \[3, 48, 40\]",
        ),
        (lambda: ones(E, 2 * 20, H), r"w_gate_up: I must be a positive multiple of 8, got I = 20"),
        (lambda: ones(2 * I, H), r"w_gate_up must have 3 dimensions \[E, 2I, H\], got shape \[48, 32\]"),
        (lambda: strided((E, 2 * I, H), 36), r"w_gate_up must have rows aligned to 16 bytes"),
        (lambda: ones(TOO_MANY, 16, H), f"w_gate_up: E must be from 1 to {MAX_EXPERTS}, got E = {TOO_MANY}"),
    ],
)
def test_fused_weight(weight: Callable[[], Tensor], message: str, call: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        cutlass_moe.fused_experts_gate_up(call["x"], weight(), call["w_down"], call["topk_ids"], call["topk_weights"])


def test_experts_and_rows_are_limited(call: dict[str, Any]) -> None:
    ids = torch.zeros(T, K, dtype=torch.int32)
    for experts in (0, TOO_MANY):
        with pytest.raises(ValueError, match=f"num_experts must be from 1 to {MAX_EXPERTS}, got {experts}"):
            cutlass_moe.plan_routing(ids, experts)
    with pytest.raises(TypeError, match="num_experts must be an int, got float"):
        cutlass_moe.plan_routing(ids, 3.0)  # type: ignore[arg-type]
    many = torch.zeros(1, 1, dtype=torch.int32).expand(2**20, 2**11)
    with pytest.raises(ValueError, match=rf"rows .* must be at most {checks.MAX_ROWS}, got {2**31}"):
        cutlass_moe.plan_routing(many, 4)
    with pytest.raises(ValueError, match=f"w_gate: E must be from 1 to {MAX_EXPERTS}, got E = {TOO_MANY}"):
        cutlass_moe.fused_experts(
            **(
                call
                | {
                    "w_gate": ones(TOO_MANY, 8, H),
                    "w_up": ones(TOO_MANY, 8, H),
                    "w_down": ones(TOO_MANY, H, 8),
                }
            )
        )
    with pytest.raises(ValueError, match="w_gate: I must be a positive multiple of 8, got I = 12"):
        cutlass_moe.fused_experts(
            **(call | {"w_gate": ones(E, 12, H), "w_up": ones(E, 12, H), "w_down": ones(E, H, 12)})
        )


def test_permute_arguments(call: dict[str, Any]) -> None:
    plan = cutlass_moe.plan_routing(call["topk_ids"], E)
    with pytest.raises(ValueError, match=r"plan.slot_row_TK must have shape \[T, K\] = \[6, K\], got \[5, 2\]"):
        cutlass_moe.permute(ones(6, H), plan)
    with pytest.raises(ValueError, match=r"x must have 2 dimensions \[T, H\], got shape \[5, 1, 32\]"):
        cutlass_moe.permute(ones(T, 1, H), plan)
    with pytest.raises(ValueError, match="x must start at a multiple of 16 bytes"):
        cutlass_moe.permute(misaligned((T, H)), plan)


def test_combine_arguments(call: dict[str, Any]) -> None:
    plan = cutlass_moe.plan_routing(call["topk_ids"], E)
    with pytest.raises(ValueError, match=r"y must have shape \[M, H\] = \[10, 32\], got \[9, 32\]"):
        cutlass_moe.combine(ones(9, H), plan)
    with pytest.raises(ValueError, match=r"y must be contiguous, got shape \[10, 32\] with strides \[40, 1\]"):
        cutlass_moe.combine(strided((T * K, H), 40), plan)
    with pytest.raises(TypeError, match=r"slot_row_TK must have dtype torch.int32, got torch.int64"):
        cutlass_moe.combine(ones(T * K, H), plan.slot_row_TK.long())
    with pytest.raises(ValueError, match=r"out must have shape \[T, H\] = \[5, 32\], got \[5, 40\]"):
        cutlass_moe.combine(ones(T * K, H), plan, out=ones(T, 40))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a_MK": ones(10)}, ValueError, r"a must have 2 dimensions \[M, K\], got shape \[10\]"),
        (
            {"a_MK": ones(10, 40)},
            ValueError,
            r"b must have shape \[E, N, K\] = \[E, N, 40\], got \[3, 24, 32\]",
        ),
        ({"b": ones(E, 20, H)}, ValueError, r"b: N must be a positive multiple of 8, got N = 20"),
        (
            {"b": (ones(E, I, H), ones(E, I, H))},
            ValueError,
            r"b must be a tensor for epilogue identity, got 2",
        ),
        (
            {"epilogue": SiluGate()},
            ValueError,
            r"b must be a \(gate, up\) pair of tensors for epilogue silu_gate",
        ),
        ({"epilogue": "silu"}, TypeError, r"epilogue must be an epilogues.Epilogue, got str"),
        ({"expert_offsets_E1": torch.zeros(4)}, TypeError, r"expert_offsets must have dtype torch.int32"),
        (
            {"expert_offsets_E1": torch.zeros(3).int()},
            ValueError,
            r"expert_offsets must have shape .* \[4\], got \[3\]",
        ),
        ({"expert_offsets_E1": torch.zeros(8).int()[::2]}, ValueError, r"expert_offsets must be contiguous"),
        ({"row_index": torch.zeros(10).int()}, ValueError, r"row_index must be None: epilogue identity"),
        (
            {"tensors": {"bias": ones(10)}},
            ValueError,
            r"tensors must hold \[\] for epilogue identity, got \['bias'\]",
        ),
        (
            {"epilogue": RoutingScale()},
            ValueError,
            r"tensors must hold \['row_weight'\] for .*routing_scale, got \[\]",
        ),
        ({"out": ones(11, I)}, ValueError, r"out must have shape \[rows, N\] = \[10, 24\], got \[11, 24\]"),
        ({"out": misaligned((10, I))}, ValueError, r"out must start at a multiple of 16 bytes"),
        ({"a_MK": misaligned((10, H))}, ValueError, r"a must start at a multiple of 16 bytes"),
    ],
)
def test_grouped_gemm_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    offsets_E1 = torch.tensor([0, 3, 3, 10]).int()
    good: dict[str, Any] = {"a_MK": ones(10, H), "b": ones(E, I, H), "expert_offsets_E1": offsets_E1}
    cutlass_moe.grouped_gemm(**good, epilogue=Identity())
    with pytest.raises(error, match=message):
        cutlass_moe.grouped_gemm(**(good | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"source_index": [0] * 10}, TypeError, r"source_index must be a torch.Tensor, got list"),
        (
            {"source_index": torch.zeros(10).long()},
            TypeError,
            r"source_index must have dtype torch.int32, got torch.int64",
        ),
        (
            {"source_index": torch.zeros(5, 2).int()},
            ValueError,
            r"source_index must have 1 dimensions \[M\], got shape \[5, 2\]",
        ),
        (
            {"source_index": torch.zeros(10, device="meta").int()},
            ValueError,
            r"source_index must be on cpu like the other tensors, got meta",
        ),
        (
            {"source_index": torch.zeros(20).int()[::2]},
            ValueError,
            r"source_index must be contiguous, got shape \[10\] with strides \[2\]",
        ),
        ({"a_MK": ones(0, H)}, ValueError, r"a must have rows for source_index to take, got \[0, 32\]"),
        (
            {"source_index": torch.zeros(checks.MAX_ROWS + 1).int()},
            ValueError,
            rf"rows .* must be at most {checks.MAX_ROWS}, got {checks.MAX_ROWS + 1}",
        ),
        (
            {"tensors": {"row_weight": torch.ones(6)}},
            ValueError,
            r"tensors\['row_weight'\] must have shape \[M\] = \[10\], got \[6\]",
        ),
        ({"row_index": torch.arange(6).int()}, ValueError, r"row_index must have shape \[M\] = \[10\], got \[6\]"),
        (
            {"epilogue": Identity(), "tensors": {}, "row_index": None, "out": ones(6, I)},
            ValueError,
            r"out must have shape \[rows, N\] = \[10, 24\], got \[6, 24\]",
        ),
    ],
)
def test_grouped_gemm_source_index(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """M is the index's length here, not that of a."""
    good: dict[str, Any] = {
        "a_MK": ones(6, H),
        "b": ones(E, I, H),
        "expert_offsets_E1": torch.tensor([0, 3, 3, 10]).int(),
        "epilogue": RoutingScale(),
        "tensors": {"row_weight": torch.ones(10)},
        "source_index": torch.arange(10).int() % 6,
        "row_index": torch.arange(10).int(),
    }
    assert cutlass_moe.grouped_gemm(**good).shape == (10, I)
    with pytest.raises(error, match=message):
        cutlass_moe.grouped_gemm(**(good | change))


def test_grouped_gemm_scatter_arguments() -> None:
    good: dict[str, Any] = {
        "a_MK": ones(10, H),
        "b": ones(E, I, H),
        "expert_offsets_E1": torch.tensor([0, 3, 3, 10]).int(),
        "epilogue": RoutingScale(),
        "tensors": {"row_weight": torch.ones(10)},
        "row_index": torch.arange(10).int(),
    }
    assert cutlass_moe.grouped_gemm(**good, out=ones(12, I)).shape == (12, I)
    with pytest.raises(ValueError, match="row_index must be given: epilogue routing_scale"):
        cutlass_moe.grouped_gemm(**(good | {"row_index": None}))
    with pytest.raises(ValueError, match=r"row_index must have shape \[M\] = \[10\], got \[9\]"):
        cutlass_moe.grouped_gemm(**(good | {"row_index": torch.arange(9).int()}))
    with pytest.raises(TypeError, match=r"tensors\['row_weight'\] must have dtype torch.float32, got torch.bfloat16"):
        cutlass_moe.grouped_gemm(**(good | {"tensors": {"row_weight": ones(10)}}))


def test_distance_of_gate_and_up_fits_a_tensor_map() -> None:
    def tensor_at(address: int) -> Any:
        return SimpleNamespace(data_ptr=lambda: address)

    checks.check_pair_memory("w_gate", tensor_at(2**40), "w_up", tensor_at(16))
    with pytest.raises(ValueError, match=r"w_up must lie .* less than 2.40 bytes away from w_gate, got 1099511627776"):
        checks.check_pair_memory("w_gate", tensor_at(0), "w_up", tensor_at(2**40))
    with pytest.raises(ValueError, match=r"w_up must lie a multiple of 16 bytes .*, got 24 bytes"):
        checks.check_pair_memory("w_gate", tensor_at(32), "w_up", tensor_at(8))


def test_gpu_must_be_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    checks.hopper_sm_count.cache_clear()
    with pytest.raises(RuntimeError, match=r"compute capability 9.0 .* got cuda:0 \(NVIDIA A100\) of .* 8.0"):
        checks.hopper_sm_count(torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((1, 32), (7, 1), (32, 1)),
        ((5, 32), (40, 1), (40, 1)),
        ((1, 24, 32), (5, 64, 1), (768, 64, 1)),
        ((3, 1, 32), (64, 3, 1), (64, 32, 1)),
        ((1,), (7,), (1,)),
    ],
)
def test_strides_of_size_one_dimensions(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    tensor = torch.zeros(4096).as_strided(shape, strides)
    canonical = checks.canonical_strides(tensor)
    assert canonical.shape == tensor.shape and canonical.stride() == expected
    assert canonical.data_ptr() == tensor.data_ptr()


def test_odd_strides_of_size_one_dimensions_are_accepted(make_layer: Any) -> None:
    layer = make_layer(1, 1, 1, H, I)
    expected = cutlass_moe.fused_experts(*layer.arguments)
    odd = [t.as_strided(t.shape, (5, *t.stride()[1:])) for t in layer.arguments]
    out = torch.empty(4096, dtype=BF16).as_strided((1, H), (3, 1))
    assert torch.equal(cutlass_moe.fused_experts(*odd), expected)
    assert torch.equal(cutlass_moe.fused_experts(*odd, out=out), expected)
