"""The kernels on a Hopper GPU. Without one the whole folder is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

GUARD = 4096  # elements before and after a guarded tensor
POISON = -1234567
GEMM_ERROR = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
LAYER_ERROR = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


def _why_no_hopper() -> str | None:
    if not torch.cuda.is_available():
        return "tests/gpu needs a GPU of compute capability 9.0: torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        name = torch.cuda.get_device_name()
        return f"tests/gpu needs a GPU of compute capability 9.0: {name} has {capability[0]}.{capability[1]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_hopper()
    if reason is not None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def fp32_references() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@dataclass
class Guarded:
    """A poisoned tensor (NaN, or POISON for integers) inside a larger poisoned buffer."""

    tensor: Tensor
    buffer: Tensor
    inside: Tensor

    def is_poison(self, values: Tensor) -> bool:
        return bool((values.isnan() if values.is_floating_point() else values == POISON).all())

    def check(self) -> None:
        """Nothing outside the tensor was written, padding between its rows included."""
        assert self.is_poison(self.buffer[~self.inside]), "written outside the tensor"


def _guarded(shape: tuple[int, ...], dtype: torch.dtype, row_stride: int | None = None) -> Guarded:
    *rows, columns = shape
    row_stride = columns if row_stride is None else row_stride
    strides = [1]
    for size in reversed([*rows[1:], row_stride] if rows else []):
        strides.insert(0, strides[0] * size)
    count = 2 * GUARD + (torch.Size(rows).numel() * row_stride)
    buffer = torch.full((count,), torch.nan if dtype.is_floating_point else POISON, dtype=dtype, device="cuda")
    inside = torch.zeros(count, dtype=torch.bool, device="cuda")
    inside.as_strided(shape, strides, GUARD).fill_(True)
    return Guarded(buffer.as_strided(shape, strides, GUARD), buffer, inside)


@pytest.fixture(scope="session")
def guarded() -> Callable[..., Guarded]:
    """`guarded(shape, dtype, row_stride=None)`: a poisoned CUDA tensor between guards."""
    return _guarded


def _assert_gemm_close(actual: Tensor, expected: Tensor) -> None:
    """Relative Frobenius error of a GEMM's output, and each element within about one rounding."""
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < GEMM_ERROR[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=torch.finfo(actual.dtype).eps, atol=2e-3)


@pytest.fixture(scope="session")
def assert_gemm_close() -> Callable[[Tensor, Tensor], None]:
    return _assert_gemm_close


def _assert_layer_close(actual: Tensor, expected: Tensor) -> None:
    """Relative Frobenius error of the layer's output, and no element far off, on outputs of order 1."""
    norm = expected.double().norm()
    if norm == 0:
        assert not actual.any()
        return
    assert (actual.double() - expected.double()).norm() / norm < LAYER_ERROR[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=2 * torch.finfo(actual.dtype).eps, atol=4e-2)


@pytest.fixture(scope="session")
def assert_layer_close() -> Callable[[Tensor, Tensor], None]:
    return _assert_layer_close
