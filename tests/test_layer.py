"""The host path of the layer on CUDA, on CPU tensors: `layer.c` launches functions that stand for the kernels."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cutlass_moe
from cutlass_moe import checks, heuristics, layer
from cutlass_moe.activations import activation_key, down_epilogue
from cutlass_moe.aot import build, load
from cutlass_moe.aot.manifest import LibraryError
from cutlass_moe.config import CombineSpec, GemmConfig, GemmSpec, KernelSpec, PermuteSpec, RouteSpec
from cutlass_moe.workspace import ALIGNMENT_BYTES, layout, workspace_size
from epilogues import Epilogue, SiluGate

T, K, E, H, I = 11, 3, 5, 32, 24  # noqa: E741
choose_gemm_config = heuristics.choose_gemm_config


class Kernels:
    """Stand-ins for the kernels: the specs that were asked for, and the arguments of each launch by the spec's kind.
    `failing` names the kind whose launch raises."""

    def __init__(self, torch_kernel: Callable[..., Callable[..., None]], launched_kernel: Callable[..., Any]) -> None:
        self.specs: list[KernelSpec] = []
        self.launches: list[tuple[str, tuple[Any, ...]]] = []
        self.failing: str | None = None
        self._torch_kernel, self._launched_kernel = torch_kernel, launched_kernel

    def get_kernel(self, spec: KernelSpec) -> Any:
        self.specs.append(spec)
        gathers = isinstance(spec, GemmSpec) and spec.config.gather
        kernel = self._torch_kernel(spec, early=not gathers)
        kind = spec.describe()["kind"]
        if isinstance(spec, GemmSpec):
            kind = "gate" if spec.epilogue.accumulators == 2 else "down"

        def launch(*arguments: Any) -> None:
            if kind == self.failing:
                raise ValueError(f"{kind} cannot be launched")
            self.launches.append((kind, arguments))
            kernel(*arguments)

        return self._launched_kernel(launch)

    @property
    def launched(self) -> list[str]:
        return [kind for kind, _ in self.launches]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plan of another test, and no question about the GPU."""
    monkeypatch.setattr(checks, "hopper_sm_count", lambda device: 132)
    layer._plan.cache_clear()
    yield
    layer._plan.cache_clear()


@pytest.fixture
def kernels(
    torch_kernel: Callable[..., Callable[..., None]],
    launched_kernel: Callable[..., Any],
    layer_launcher: Any,
    on_the_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Kernels:
    made = Kernels(torch_kernel, launched_kernel)
    monkeypatch.setattr(load, "get_kernel", made.get_kernel)
    monkeypatch.setattr(load, "get_layer_launcher", lambda spec: layer_launcher)
    return made


@pytest.fixture(params=[False, True], ids=["permute", "gather"])
def gather(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the first GEMM gathers its rows; the table's own answer does not count."""

    def choose(rows: int, experts: int, features: int, reduction: int, accumulators: int, gather: bool) -> GemmConfig:
        config = choose_gemm_config(rows, experts, features, reduction, accumulators, gather=False)
        return dataclasses.replace(config, gather=gather and request.param)

    monkeypatch.setattr(heuristics, "choose_gemm_config", choose)
    return bool(request.param)


@pytest.fixture
def permutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first GEMM does not gather, whatever the table says."""
    never = functools.partial(choose_gemm_config, gather=False)
    monkeypatch.setattr(heuristics, "choose_gemm_config", lambda *shape, gather, **named: never(*shape, **named))


class Allocations(TorchDispatchMode):
    """Counts the tensors that the package's host functions make; what the stand-ins do is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "empty" in function.name():
            callers = (Path(info.filename) for info in inspect.stack()[1:] if "/torch/" not in info.filename)
            caller = next(callers)
            self.count += caller.parent.name == "cutlass_moe" and caller.name != "reference.py"
        return function(*args, **(kwargs or {}))


def launch(*arguments: Any) -> None:
    """`launch_experts`, whose arguments mypy cannot count in tuples."""
    layer.launch_experts(*arguments)


def random_biases(experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up as views of every other column."""
    gate_up, down = torch.randn(experts, 2 * I).bfloat16(), torch.randn(experts, H).bfloat16()
    return gate_up[:, 0::2], gate_up[:, 1::2], down


@pytest.mark.parametrize("in_workspace", [False, True])
@pytest.mark.parametrize("layout", ["separate", "concatenated", "interleaved"])
@pytest.mark.parametrize("shape", [(T, K, E), (1, 1, 1), (3, 1, 1), (1, 4, 2)])
def test_launches_make_the_layer(
    in_workspace: bool, layout: str, shape: tuple[int, int, int], gather: bool, make_layer: Any, kernels: Kernels
) -> None:
    tokens, top_k, experts = shape
    inputs = make_layer(tokens, top_k, experts, H, I, layout=layout, id_dtype=torch.int32, weight_dtype=torch.float16)
    expected = cutlass_moe.fused_experts(*inputs.arguments)
    wide = torch.full((tokens, H + 8), torch.nan, dtype=torch.bfloat16)
    out = wide[:, :H].as_strided((tokens, H), (3 if tokens == 1 else H + 8, 1))
    workspace = None
    if in_workspace:
        size = workspace_size(tokens, top_k, H, I, experts, torch.bfloat16)
        guarded = torch.full((size + 512,), 77, dtype=torch.uint8)
        workspace = guarded[256:-256]
    with Allocations() as allocations:
        launch(*inputs.arguments, "silu", out, workspace)
    assert allocations.count == (0 if in_workspace else 1)
    if in_workspace:
        assert (guarded[:256] == 77).all() and (guarded[-256:] == 77).all()
    assert torch.equal(out, expected) and wide[:, H:].isnan().all()
    middle = ["gate"] if gather else ["permute", "gate"]
    assert kernels.launched == ["route", *middle, "down", "combine"]
    assert kernels.specs[0] == RouteSpec("int32", "float16") and len(kernels.specs) == len(kernels.launched)


@pytest.mark.parametrize("given", ["gate, up", "down", "gate, up, down"])
def test_biases(given: str, gather: bool, make_layer: Any, kernels: Kernels) -> None:
    inputs = make_layer(T, K, E, H, I)
    b_gate, b_up, b_down = random_biases(E)
    biases = (b_gate, b_up) if "gate" in given else (None, None), b_down if "down" in given else None
    named: Any = {"b_gate": biases[0][0], "b_up": biases[0][1], "b_down": biases[1]}
    expected = cutlass_moe.fused_experts(*inputs.arguments, activation="gelu", **named)
    out = torch.full_like(inputs.x, torch.nan)
    launch(*inputs.arguments, "gelu", out, None, *biases[0], biases[1])
    assert torch.equal(out, expected)


def test_views(gather: bool, make_layer: Any, kernels: Kernels) -> None:
    """Each buffer lies at its place in the workspace; ids, weights and biases keep their strides."""
    inputs = make_layer(T, K, E, H, I)
    x, w_gate, w_up, w_down, ids, weights = inputs.arguments
    ids, weights = (torch.cat([t, t], 1)[:, ::2].contiguous().repeat_interleave(2, 1)[:, ::2] for t in (ids, weights))
    workspace = torch.zeros(workspace_size(T, K, H, I, E, x.dtype) + 999, dtype=torch.uint8)
    out = torch.empty_like(x)
    launch(x, w_gate, w_up, w_down, ids, weights, "silu", out, workspace, *random_biases(E))
    arguments = dict(kernels.launches)
    places = [workspace.data_ptr() + offset for offset in layout(T, K, H, I, E, x.dtype).offsets]
    assert all(place % ALIGNMENT_BYTES == workspace.data_ptr() % ALIGNMENT_BYTES for place in places)
    offsets, row_slot, row_token, slot_row, row_weight, chunk_counts, counters, rows, h = places

    def pointers(kind: str) -> list[Any]:
        return [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments[kind]]

    assert pointers("route")[2:] == [offsets, row_slot, row_token, slot_row, row_weight, chunk_counts, counters]
    for given, seen in zip((ids, weights), arguments["route"][:2], strict=True):
        assert (given.data_ptr(), given.stride()) == (seen.data_ptr(), seen.stride())
    pair = [w_gate.data_ptr(), w_up.data_ptr(), offsets]
    first = [x.data_ptr(), row_token, ids.data_ptr()] if gather else [rows, None, None]
    assert pointers("gate")[:6] == first + pair and pointers("gate")[7:] == [None, h, counters, True, 132]
    assert [bias.stride() for bias in arguments["gate"][6]] == [(2 * I, 2)] * 2
    down = [h, None, None, w_down.data_ptr(), None, offsets]
    assert pointers("down")[:6] == down and pointers("down")[7:] == [row_slot, rows, counters + 4, True, 132]
    assert arguments["down"][6][1].data_ptr() == row_weight and arguments["down"][6][1].dtype == torch.float32
    assert pointers("combine") == [rows, slot_row, out.data_ptr()]
    if not gather:
        assert pointers("permute") == [x.data_ptr(), slot_row, rows]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("counts_ids", [False, True])
def test_few_ids_are_counted_by_the_first_gemm(
    id_dtype: torch.dtype,
    counts_ids: bool,
    gather: bool,
    make_layer: Any,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer, "COUNTED_SLOTS", T * K if counts_ids else 0)
    inputs = make_layer(T, K, E, H, I)
    x, w_gate, w_up, w_down, ids, weights = inputs.arguments
    ids = ids.to(id_dtype)
    ids[3:5, 1] = torch.tensor([-1, E])
    out = torch.empty_like(inputs.x)
    launch(x, w_gate, w_up, w_down, ids, weights, "silu", out, None)
    assert torch.equal(out, cutlass_moe.fused_experts(x, w_gate, w_up, w_down, ids, weights))
    words = dict(kernels.launches)["gate"][2]
    if not gather:
        assert words is None
    else:
        assert words.shape == (T if counts_ids else 0, K, id_dtype.itemsize // 4)
        assert torch.equal(words, ids.view(torch.int32).view(T, K, -1)[: len(words)])


@pytest.mark.parametrize("failing", ["route", "permute", "gate", "down", "combine"])
def test_an_error_of_a_kernel_ends_the_layer(failing: str, make_layer: Any, kernels: Kernels, permutes: None) -> None:
    inputs = make_layer(T, K, E, H, I)
    out = torch.empty_like(inputs.x)
    kernels.failing = failing
    with pytest.raises(ValueError, match=f"{failing} cannot be launched"):
        launch(*inputs.arguments, "silu", out, None)
    order = ["route", "permute", "gate", "down", "combine"]
    assert kernels.launched == order[: order.index(failing)]
    kernels.failing = None
    launch(*inputs.arguments, "silu", out, None)  # as if nothing had been
    assert torch.equal(out, cutlass_moe.fused_experts(*inputs.arguments))


def test_a_plan_is_made_once_for_a_shape(make_layer: Any, kernels: Kernels, permutes: None) -> None:
    for tokens, asked in ((T, 5), (T, 5), (T + 1, 10), (T, 10)):
        inputs = make_layer(tokens, K, E, H, I)
        launch(*inputs.arguments, "silu", torch.empty_like(inputs.x), None)
        assert len(kernels.specs) == asked
    launch(*inputs.arguments, "gelu", torch.empty_like(inputs.x), None)
    launch(*inputs.arguments, "silu", torch.empty_like(inputs.x), None, *random_biases(E))
    assert len(kernels.specs) == 20


def test_nothing_is_launched_without_slots(make_layer: Any, kernels: Kernels) -> None:
    inputs = make_layer(3, 1, E, H, I)
    out = torch.full((3, H), torch.nan, dtype=torch.bfloat16)
    arguments = (*inputs.arguments[:4], inputs.ids[:, :0], inputs.weights[:, :0])
    launch(*arguments, "silu", out, None)
    assert not out.any() and not kernels.specs


def test_a_launcher_that_takes_other_arguments_says_so(layer_launcher: Any) -> None:
    with pytest.raises(TypeError, match="another version of cutlass_moe"):
        layer_launcher(1, 2)


# ---- out of libraries


@dataclasses.dataclass(frozen=True)
class Mine(SiluGate):
    """A user's activation: its kernel is in a library of its own."""


def gemm_spec(gate: Epilogue | None) -> GemmSpec:
    shape = (T * K, E, 2 * I, H, 2) if gate else (T * K, E, H, I, 1)
    config = choose_gemm_config(*shape, gather=gate is not None)
    return GemmSpec("bfloat16", config, gate or down_epilogue(False))


def test_kernels_of_several_libraries(
    tmp_path: Path, c_compiler: Any, on_the_cpu: None, make_layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher is the shipped library's, the gate's kernel a user's; the kernels for this x are compiled for it."""
    inputs = make_layer(T, K, E, H, I)
    key = activation_key(Mine())
    shipped: list[KernelSpec] = [RouteSpec("int64", "float32"), gemm_spec(None), CombineSpec("bfloat16")]
    mine = gemm_spec(Mine())
    c_compiler.bodies[mine.name] = (
        'TVMFFIErrorSetRaisedFromCStrParts("ValueError", (const char *[]){"mine"}, 1); return -1;'
    )
    build.build(shipped, tmp_path / "shipped", jobs=1)
    build.build([mine], tmp_path / "mine", jobs=1)
    c_compiler.calls.clear()
    monkeypatch.setenv("CUTLASS_MOE_LIBRARY", f"{tmp_path / 'shipped'}{os.pathsep}{tmp_path / 'mine'}")
    load.reset()
    try:
        with pytest.raises(ValueError, match="mine"):
            launch(*inputs.arguments, key, torch.empty_like(inputs.x), None)
        assert c_compiler.calls == ([] if mine.config.gather else [PermuteSpec("bfloat16").name])
    finally:
        load.reset()


def test_a_library_without_the_launcher_is_refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "C_SOURCES", build.C_SOURCES[:1])
    build.build([CombineSpec("bfloat16")], library, jobs=1)
    load.reset()
    with pytest.raises(LibraryError, match="lacks launch_layer: build it with"):
        load.get_layer_launcher(CombineSpec("bfloat16"))
