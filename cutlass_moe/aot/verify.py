"""Runs the kernels of a library against the reference on the GPU at hand: small problems with every edge in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from cutlass_moe import checks, reference
from cutlass_moe.aot.load import KernelLibrary
from cutlass_moe.aot.specs import SpecError, read_spec
from cutlass_moe.config import (
    CHUNK_SLOTS,
    COUNTED_SLOTS,
    MAX_CHUNKS,
    MAX_EXPERTS,
    CombineSpec,
    GemmSpec,
    KernelSpec,
    PermuteSpec,
    RouteSpec,
    route_chunks,
)
from cutlass_moe.epilogue_arguments import kernel_arguments, make_side_outputs, resolve_dtype, tensor_shape
from epilogues import Epilogue, EpilogueTensor

# Relative Frobenius error that one rounding of the output may make, with room for the special-function units.
ROUNDING_ERROR = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 1e-5}
NEAR_ZERO = 4e-3  # error allowed in an element near zero, in units of the output's root mean square
SPARE_ROWS = 5  # rows after the last expert's, which a kernel must not write
Kernel = Callable[..., object]


class WrongResult(RuntimeError):
    """A kernel whose output is not the reference's. The message says where and by how much."""


@dataclass(frozen=True)
class Verdict:
    """What `verify` found out about one kernel.

    Attributes:
        name: of the kernel.
        problem: what is wrong with it; None when nothing is.
        error: its largest relative Frobenius error.
    """

    name: str
    problem: str | None
    error: float = 0.0


def verify(library: KernelLibrary) -> Iterator[Verdict]:
    """Runs every kernel of a library on the current CUDA device, in order of their names, and judges each.

    Raises RuntimeError when there is no GPU of compute capability 9.0.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("a GPU of compute capability 9.0 (H100, H200, GH200) is needed, torch sees no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    sm_count = checks.hopper_sm_count(device)
    for name, entry in sorted(library.manifest.kernels.items()):
        try:
            spec = read_spec(entry.spec)
            error = check_kernel(spec, library.function(spec), device, sm_count)
        except (SpecError, WrongResult) as problem:
            yield Verdict(name, str(problem))
        except RuntimeError as problem:  # of the library or the launch; after some, the device is lost
            yield Verdict(name, f"{type(problem).__name__}: {problem}")
        else:
            yield Verdict(name, None, error)


def check_kernel(spec: KernelSpec, kernel: Kernel, device: torch.device, sm_count: int) -> float:
    """Runs one kernel on `device` and returns its largest relative error. Raises WrongResult when it is wrong."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # the reference multiplies in fp32
    try:
        if isinstance(spec, RouteSpec):
            return _check_route(spec, kernel, device)
        if isinstance(spec, PermuteSpec):
            return _check_permute(spec, kernel, device)
        if isinstance(spec, CombineSpec):
            return _check_combine(spec, kernel, device)
        error = _check_gemm(spec, kernel, device, sm_count)
        if spec.config.gather:
            error = max(error, _check_gemm(spec, kernel, device, sm_count, counts_ids=True))
        return error
    finally:
        torch.set_float32_matmul_precision(precision)


def _check_route(spec: RouteSpec, kernel: Kernel, device: torch.device) -> float:
    """Few slots, some chunks, more than each CTA counts, and more chunks than CTAs; experts without slots and ids that
    drop theirs."""
    id_dtype = getattr(torch, spec.id_dtype)
    for slots, experts in (
        (1, 1),
        (2 * CHUNK_SLOTS + 1, 5),
        (COUNTED_SLOTS + 1, 7),
        (MAX_CHUNKS * CHUNK_SLOTS + 77, MAX_EXPERTS),
    ):
        generator = torch.Generator(device).manual_seed(slots)
        top_k = 1 if slots % 3 else 3
        shape = (slots // top_k, top_k)
        ids_TK = torch.randint(-1, experts + 1, shape, generator=generator, device=device, dtype=id_dtype)
        weights_TK = None
        if spec.weight_dtype is not None:
            weights_TK = torch.rand(shape, generator=generator, device=device).to(getattr(torch, spec.weight_dtype))
        offsets_E1, row_slot_M, row_token_M, slot_row_TK = (
            torch.full(extents, -7, dtype=torch.int32, device=device)
            for extents in ((experts + 1,), (slots,), (slots,), shape)
        )
        row_weight_M = None if weights_TK is None else torch.full((slots,), torch.nan, device=device)
        chunk_counts_CE = torch.full((route_chunks(slots), experts), -7, dtype=torch.int32, device=device)
        tables = (offsets_E1, row_slot_M, row_token_M, slot_row_TK, row_weight_M)
        tile_counters_2 = torch.full((2,), -7, dtype=torch.int32, device=device)
        kernel(ids_TK, weights_TK, *tables, chunk_counts_CE, tile_counters_2)
        expected = reference.route(ids_TK, weights_TK, experts)
        kept = int(expected[0][-1])
        where = f"{slots} slots, {experts} experts"
        _require_equal("expert_offsets", where, offsets_E1, expected[0])
        _require_equal("tile_counters", where, tile_counters_2, torch.zeros_like(tile_counters_2))
        _require_equal("row_slot", where, row_slot_M[:kept], expected[1][:kept])
        _require_equal("row_token", where, row_token_M[:kept], expected[2][:kept])
        _require_equal("slot_row", where, slot_row_TK, expected[3])
        if row_weight_M is not None and expected[4] is not None:
            _require_equal("row_weight", where, row_weight_M[:kept], expected[4][:kept])
    return 0.0


def _check_permute(spec: PermuteSpec, kernel: Kernel, device: torch.device) -> float:
    """Rows that are strided and no multiple of a warp's width, dropped slots."""
    tokens, top_k, hidden = 77, 3, 1032
    generator = torch.Generator(device).manual_seed(0)
    x_TH = _normal((tokens, hidden + 8), getattr(torch, spec.dtype), generator)[:, :hidden]
    slot_row_TK, kept = _random_slots(tokens, top_k, generator)
    x_MH = torch.full((tokens * top_k, hidden), torch.nan, dtype=x_TH.dtype, device=device)
    kernel(x_TH, slot_row_TK, x_MH)
    _require_equal("x_MH", f"{tokens} tokens", x_MH[:kept], reference.permute(x_TH, slot_row_TK)[:kept])
    return 0.0


def _check_combine(spec: CombineSpec, kernel: Kernel, device: torch.device) -> float:
    """Strided rows of output, dropped slots whose rows hold NaN."""
    tokens, top_k, hidden = 77, 3, 1032
    generator = torch.Generator(device).manual_seed(0)
    slot_row_TK, _ = _random_slots(tokens, top_k, generator)
    y_MH = _normal((tokens * top_k, hidden), getattr(torch, spec.dtype), generator)
    y_MH[slot_row_TK.view(-1) < 0] = torch.nan
    wide = torch.full((tokens, hidden + 8), torch.nan, dtype=y_MH.dtype, device=device)
    kernel(y_MH, slot_row_TK, wide[:, :hidden])
    if not wide[:, hidden:].isnan().all():
        raise WrongResult("out: it wrote between the rows")
    kept_TK1 = (slot_row_TK >= 0)[..., None]
    expected_TH = torch.where(kept_TK1, y_MH.view(tokens, top_k, hidden).float(), 0.0).sum(1)
    return _require_close("out", f"{tokens} tokens", wide[:, :hidden], expected_TH)


def _check_gemm(spec: GemmSpec, kernel: Kernel, device: torch.device, sm_count: int, counts_ids: bool = False) -> float:
    """Experts with as many rows as each tile width, one less, and more than the widest; one without rows.

    Weight rows are no multiple of a tile; the reduction is no multiple of a stage and longer than all stages. With
    `counts_ids` the kernel gets the words of ids instead of the offsets.
    """
    config, epilogue, dtype = spec.config, spec.epilogue, getattr(torch, spec.dtype)
    counts_E = [2 * config.tile_tokens + 1, 0]
    for width in config.token_widths:
        counts_E += [width - 1, width]
    features, reduction = 2 * config.tile_features + 8, 64 * 13 + 8
    generator = torch.Generator(device).manual_seed(0)
    offsets_E1 = torch.tensor([0, *accumulate(counts_E)], dtype=torch.int32, device=device)
    rows = sum(counts_E) + SPARE_ROWS
    a_MK = _normal((rows, reduction), dtype, generator)
    a_MK[-SPARE_ROWS:] = torch.nan
    shape = (len(counts_E), features, reduction)
    weights = [_normal(shape, dtype, generator, scale=reduction**-0.5) for _ in range(epilogue.accumulators)]
    inputs = random_inputs(epilogue, rows, len(counts_E), features, dtype, generator)
    out_rows, row_index_M = rows, None
    if epilogue.scatter:
        out_rows = rows + SPARE_ROWS
        row_index_M = torch.randperm(out_rows, generator=generator, device=device)[:rows].to(torch.int32)
    out_dtype = resolve_dtype(epilogue.out_dtype, dtype)
    wide = torch.full((out_rows, features + 8), torch.nan, dtype=out_dtype, device=device)
    out = wide[:, :features]
    sides = make_side_outputs(epilogue, out, dtype)
    expected_sides = tuple(side.to(torch.float32, copy=True) for side in sides)
    for declared, side, expected_side in zip(epilogue.side_outputs, sides, expected_sides, strict=True):
        if not declared.row_absmax:
            side.fill_(torch.nan)
            expected_side.fill_(torch.nan)
    source_MK, source_index_M, ids_TKW = a_MK, None, None
    if config.gather:  # the same rows, from a shuffled matrix
        ids_TKW = offsets_E1.new_empty((0, 1, 1))
        order = torch.randperm(rows, generator=generator, device=device)
        source_MK, source_index_M = a_MK[order], torch.argsort(order).to(torch.int32)
    given_offsets_E1 = offsets_E1
    if counts_ids:
        ids = torch.arange(len(counts_E), device=device).repeat_interleave(offsets_E1.diff())
        ids_TKW = ids[torch.randperm(len(ids), generator=generator, device=device)].view(torch.int32).view(-1, 1, 2)
        given_offsets_E1 = torch.full_like(offsets_E1, -7)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the ids are complete, as an early start takes for granted
    kernel(
        source_MK,
        source_index_M,
        ids_TKW,
        weights[0],
        weights[1] if len(weights) > 1 else None,
        given_offsets_E1,
        kernel_arguments(epilogue, inputs, sides) or None,
        row_index_M,
        out,
        offsets_E1.new_zeros(1),
        counts_ids,
        sm_count,
    )
    expected = torch.full((out_rows, features), torch.nan, device=device)
    reference.grouped_gemm(a_MK, weights, offsets_E1, epilogue, inputs, row_index_M, expected, expected_sides)
    unwritten = expected.isnan().all(dim=1)
    if not wide[:, features:].isnan().all() or not wide[unwritten].isnan().all():
        raise WrongResult("out: it wrote where it must not")
    where = f"experts of {min(counts_E)} to {max(counts_E)} rows"
    error = _require_close("out", where, out[~unwritten], expected[~unwritten])
    for declared, side, expected_side in zip(epilogue.side_outputs, sides, expected_sides, strict=True):
        if declared.row_absmax:
            _require_equal(declared.name, where, side, out.float().abs().amax(1).nan_to_num(0.0))
            continue
        if not side[unwritten].isnan().all():
            raise WrongResult(f"{declared.name}: it wrote where it must not")
        error = max(error, _require_close(declared.name, where, side[~unwritten], expected_side[~unwritten]))
    return error


def random_inputs(
    epilogue: Epilogue, rows: int, experts: int, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    """Tensors and scalars for a GEMM with this epilogue, by name, between 0.1 and 1.1, strided where that is allowed.

    Args:
        rows, experts, columns: M, E and N of the GEMM.
        dtype: of its operands.
    """

    def uniform(declared: EpilogueTensor, *shape: int) -> Tensor:
        values = torch.rand(shape, generator=generator, device=generator.device) + 0.1
        return values.to(resolve_dtype(declared.dtype, dtype))

    inputs: dict[str, Any] = dict.fromkeys(epilogue.scalars, 0.75)
    for declared in epilogue.tensors:
        if declared.broadcast == "expert_column":
            inputs[declared.name] = uniform(declared, experts, 2 * columns)[:, ::2]
        elif declared.broadcast == "full":
            inputs[declared.name] = uniform(declared, rows, columns + 8)[:, :columns]
        else:
            inputs[declared.name] = uniform(declared, *tensor_shape(declared, rows, experts, columns))
    return inputs


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator, device=generator.device) * scale).to(dtype)


def _random_slots(tokens: int, top_k: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """A permutation of the slots that drops about a fifth, int32 [T, K], and the number of kept ones."""
    shape = (tokens, top_k)
    ids_TK = torch.randint(-1, 4, shape, generator=generator, device=generator.device)
    offsets_E1, _, _, slot_row_TK, _ = reference.route(ids_TK, None, 4)
    return slot_row_TK, int(offsets_E1[-1])


def _require_equal(name: str, where: str, actual: Tensor, expected: Tensor) -> None:
    wrong = int((actual != expected).sum())
    if wrong:
        raise WrongResult(f"{name}: {wrong} of {expected.numel()} values are wrong ({where})")


def _require_close(name: str, where: str, actual: Tensor, expected: Tensor) -> float:
    """The relative Frobenius error to the fp32 truth. Every element must be within its own rounding, too."""
    difference = (actual.double() - expected.double()).abs()
    size = expected.double().square().mean().sqrt()
    error = float(difference.square().mean().sqrt() / size) if size > 0 else float(difference.max())
    if not error <= ROUNDING_ERROR[actual.dtype]:  # NaN is no less
        raise WrongResult(f"{name}: relative error {error:.1e}, allowed {ROUNDING_ERROR[actual.dtype]:.0e} ({where})")
    allowed = torch.finfo(actual.dtype).eps * expected.double().abs() + NEAR_ZERO * size
    wrong = int((difference > allowed).sum())
    if wrong:
        raise WrongResult(f"{name}: {wrong} of {expected.numel()} values are off by more than a rounding ({where})")
    return error
