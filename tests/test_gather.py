"""`grouped_gemm` with a `source_index` on the CPU, and the host's choice between a kernel that gathers and a copy."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_moe
from cutlass_moe import checks, heuristics
from cutlass_moe.aot import load
from cutlass_moe.aot.verify import random_inputs
from cutlass_moe.config import GemmConfig, GemmSpec
from epilogues import (
    Bias,
    Cast,
    Epilogue,
    Identity,
    ResidualAdd,
    RoutingScale,
    RowAbsMax,
    Scale,
    SiluGate,
    StorePreActivation,
)

T, M, E, N, K = 7, 23, 4, 24, 32
OFFSETS_E1 = torch.tensor([0, 5, 5, 12, 19], dtype=torch.int32)  # an expert without rows, and rows without an expert
KEPT = int(OFFSETS_E1[-1])
UNKEPT = (-1, T, 2**31 - 1, -(2**31))  # what a plan leaves unspecified may be anything
EPILOGUES: list[Epilogue] = [
    Identity(),
    SiluGate(),
    Bias() | Cast("float32"),
    Scale("row"),
    ResidualAdd(),
    RoutingScale(),
    StorePreActivation() | SiluGate() | RowAbsMax(),
    Scale("expert") | StorePreActivation(operands=1) | RoutingScale(),
]
BY_EPILOGUE = pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda epilogue: epilogue.name)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def x_TH(generator: torch.Generator) -> Tensor:
    return torch.randn(T, K, generator=generator).bfloat16()


@pytest.fixture
def source_index_M(generator: torch.Generator) -> Tensor:
    index_M = torch.randint(T, (M,), generator=generator, dtype=torch.int32)
    index_M[KEPT:] = torch.tensor(UNKEPT, dtype=torch.int32)
    return index_M


def rows_of(x_TH: Tensor, source_index_M: Tensor) -> Tensor:
    """The same rows, grouped by expert; NaN where no expert has them."""
    rows_MK = torch.full((len(source_index_M), K), torch.nan, dtype=x_TH.dtype)
    rows_MK[:KEPT] = x_TH[source_index_M[:KEPT].long()]
    return rows_MK


def keywords(epilogue: Epilogue, generator: torch.Generator) -> dict[str, Any]:
    """What the epilogue takes beside the rows: weights, tensors, and rows of `out` that are no rows of x."""
    weights = tuple(torch.randn(E, N, K, generator=generator).bfloat16() for _ in range(epilogue.accumulators))
    return {
        "b": weights if len(weights) == 2 else weights[0],
        "expert_offsets_E1": OFFSETS_E1,
        "epilogue": epilogue,
        "tensors": random_inputs(epilogue, M, E, N, torch.bfloat16, generator),
        "row_index": torch.randperm(M, generator=generator).int() if epilogue.scatter else None,
    }


def assert_same_rows(actual: Any, expected: Any, row_index: Tensor | None) -> None:
    """Bit for bit in every output, in the rows that an expert has."""
    rows = slice(KEPT) if row_index is None else row_index[:KEPT].long()
    assert isinstance(actual, tuple) == isinstance(expected, tuple)
    actual, expected = (each if isinstance(each, tuple) else (each,) for each in (actual, expected))
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and torch.equal(one[rows], other[rows])
        assert one[rows].isfinite().all() and one[rows].any()


@BY_EPILOGUE
def test_gives_the_bits_of_permuted_rows(
    epilogue: Epilogue, x_TH: Tensor, source_index_M: Tensor, generator: torch.Generator
) -> None:
    given = keywords(epilogue, generator)
    expected = cutlass_moe.grouped_gemm(rows_of(x_TH, source_index_M), **given)
    actual = cutlass_moe.grouped_gemm(x_TH, source_index=source_index_M, **given)
    assert_same_rows(actual, expected, given["row_index"])
    wide = torch.full((T, K + 8), torch.nan, dtype=torch.bfloat16)
    wide[:, :K] = x_TH
    strided = cutlass_moe.grouped_gemm(wide[:, :K], source_index=source_index_M, **given)
    assert_same_rows(strided, expected, given["row_index"])


def test_writes_only_rows_that_experts_have(x_TH: Tensor, source_index_M: Tensor, generator: torch.Generator) -> None:
    out = torch.full((M, N), torch.nan, dtype=torch.bfloat16)
    given = keywords(SiluGate(), generator)
    assert cutlass_moe.grouped_gemm(x_TH, source_index=source_index_M, out=out, **given) is out
    assert out[:KEPT].isfinite().all() and out[KEPT:].isnan().all()


@pytest.mark.parametrize("tokens", [0, T])
@BY_EPILOGUE
def test_no_rows(epilogue: Epilogue, tokens: int, generator: torch.Generator) -> None:
    """M is the index's; x may be empty then, too."""
    given = keywords(epilogue, generator) | {"expert_offsets_E1": torch.zeros(E + 1, dtype=torch.int32)}
    given["tensors"] = random_inputs(epilogue, 0, E, N, torch.bfloat16, generator)
    none = torch.zeros(0, dtype=torch.int32)
    given["row_index"] = none if epilogue.scatter else None
    result = cutlass_moe.grouped_gemm(torch.ones(tokens, K).bfloat16(), source_index=none, **given)
    out, *sides = result if isinstance(result, tuple) else (result,)
    assert out.shape == (0, N) and len(sides) == len(epilogue.side_outputs)
    assert all(side.shape[0] == 0 for side in sides)


def test_the_rows_of_a_plan(x_TH: Tensor, generator: torch.Generator) -> None:
    """`row_token_M` in place of `permute`, dropped slots included."""
    ids_TK = torch.randint(-1, E + 1, (T, 3), generator=generator)
    plan = cutlass_moe.plan_routing(ids_TK, E)
    kept = int(plan.expert_offsets_E1[-1])
    assert 0 < kept < ids_TK.numel()
    given = keywords(SiluGate(), generator) | {"expert_offsets_E1": plan.expert_offsets_E1}
    expected = cutlass_moe.grouped_gemm(cutlass_moe.permute(x_TH, plan), **given)
    actual = cutlass_moe.grouped_gemm(x_TH, source_index=plan.row_token_M, **given)
    assert actual.shape == expected.shape and torch.equal(actual[:kept], expected[:kept])


def test_under_compile(x_TH: Tensor, source_index_M: Tensor, generator: torch.Generator) -> None:
    given = keywords(RoutingScale(), generator)

    def block(x_TH: Tensor) -> Tensor:
        return 2 * cutlass_moe.grouped_gemm(x_TH + 1, source_index=source_index_M, **given)

    torch._dynamo.reset()
    assert_same_rows(torch.compile(block, backend="eager")(x_TH), block(x_TH), given["row_index"])


class Launches:
    """Kernels in plain torch: the specs that were asked for, and the rows and the index that each launch got."""

    def __init__(self, torch_kernel: Any) -> None:
        self.specs: list[GemmSpec] = []
        self.rows: list[Tensor] = []
        self.indices: list[Tensor | None] = []
        self._torch_kernel = torch_kernel

    def get_kernel(self, spec: GemmSpec) -> Any:
        self.specs.append(spec)
        kernel = self._torch_kernel(spec, early=False)

        def launch(rows: Tensor, source_index: Tensor | None, *others: Any) -> None:
            self.rows.append(rows)
            self.indices.append(source_index)
            kernel(rows, source_index, *others)

        return launch


@pytest.fixture
def gemm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, whose name in the package is the function's; no kernel of another test, no question to the GPU."""
    module = importlib.import_module("cutlass_moe.grouped_gemm")
    monkeypatch.setattr(checks, "hopper_sm_count", lambda device: 132)
    module._gemm_kernel.cache_clear()
    yield module
    module._gemm_kernel.cache_clear()


@pytest.mark.parametrize("gathers", [False, True])
def test_the_kernel_gathers_or_gets_a_copy(
    gathers: bool,
    gemm: Any,
    x_TH: Tensor,
    source_index_M: Tensor,
    generator: torch.Generator,
    torch_kernel: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the table's answer for the rows of the index, and only where there is one."""
    asked: list[tuple[Any, ...]] = []

    def choose(*arguments: Any) -> GemmConfig:
        asked.append(arguments)
        return GemmConfig(128, (16, 32), 2, gather=arguments[-1] and gathers)

    launches = Launches(torch_kernel)
    monkeypatch.setattr(heuristics, "choose_gemm_config", choose)
    monkeypatch.setattr(load, "get_kernel", launches.get_kernel)
    given = keywords(SiluGate(), generator)
    rows_MK = rows_of(x_TH, source_index_M)
    expected = cutlass_moe.grouped_gemm(rows_MK, **given)
    for rows, index in ((x_TH, source_index_M), (rows_MK, None)):
        out = torch.full((M, N), torch.nan, dtype=torch.bfloat16)
        gemm.launch_grouped_gemm(rows, index, given["b"], OFFSETS_E1, SiluGate(), (), None, out)
        assert torch.equal(out[:KEPT], expected[:KEPT]) and out[KEPT:].isnan().all()
    assert asked == [(M, E, 2 * N, K, 2, True), (M, E, 2 * N, K, 2, False)]
    assert [spec.config.gather for spec in launches.specs] == [gathers, False]
    assert launches.indices == [source_index_M if gathers else None, None]
    assert launches.rows[0].shape == ((T, K) if gathers else (M, K))
    assert (launches.rows[0].data_ptr() == x_TH.data_ptr()) == gathers
