"""Every argument check of the public functions, in one place.

The checks cost a few microseconds: they read shapes, dtypes, strides and addresses, never data, and never
wait for the device. Each error names the argument, what was expected and what came. Functions named
`check_*_memory` look at addresses and at the GPU; the operators' implementations call them, because tensors
that `torch.compile` traces have no address.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cutlass_moe.config import MAX_EXPERTS
from cutlass_moe.epilogue_arguments import resolve_dtype, tensor_shape, wrong_shape_hint
from cutlass_moe.workspace import workspace_size
from epilogues import Epilogue, check_epilogue
from epilogues.base import BROADCASTS
from epilogues.check import locate

VALUE_DTYPES = (torch.bfloat16, torch.float16)
ID_DTYPES = (torch.int32, torch.int64)
ROUTING_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT_BYTES = 16  # what the TMA asks of addresses and strides
ALIGNMENT_ELEMENTS = 8  # the same in bf16 or fp16; gate and up rows also interleave in groups of 8
# Row numbers are int32 in the kernels, and so are work numbers: token tiles (rows / 16 at most) times weight tiles.
MAX_ROWS = 2**21
MAX_STRIDE_BYTES = 2**40  # strides in a TMA tensor map are below this
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
MAX_PASSED = 4096

_passed: set[tuple[Any, ...]] = set()  # what calls looked like that passed `check_experts`


def check_experts(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    out: Tensor | None,
    workspace: Tensor | None,
) -> None:
    """Arguments of `fused_experts`; `activation` is its `activation_key`, `biases` are b_gate, b_up and b_down.

    A call that looks like one that passed is not taken apart again: that would cost the host twice as much.
    """
    look = _look(activation, x, w_gate, w_up, w_down, topk_ids, topk_weights, *biases, out, workspace)
    if look is not None and look in _passed:  # in this order: a compiled graph would depend on the set
        return
    _check_hidden_states(x)
    dtypes, device = (x.dtype,), x.device
    _check_tensor("w_gate", w_gate, "E, I, H", dtypes, device)
    _check_tensor("w_up", w_up, "E, I, H", dtypes, device)
    _check_tensor("w_down", w_down, "E, H, I", dtypes, device)
    experts, intermediate, hidden = w_gate.shape
    if hidden != x.shape[-1]:
        raise _shape_error("w_gate", w_gate, "E, I, H", ("E", "I", x.shape[-1]))
    _check_shape("w_up", w_up, "E, I, H", (experts, intermediate, hidden))
    _check_shape("w_down", w_down, "E, H, I", (experts, hidden, intermediate))
    _check_extents("w_gate", experts, intermediate, "I")
    _check_rows("w_gate", w_gate)
    _check_rows("w_up", w_up)
    _check_rows("w_down", w_down)
    _check_equal_strides(w_gate, w_up)
    _check_routing("topk_ids", topk_ids, "topk_weights", topk_weights, x)
    if biases != (None, None, None):
        _check_biases(x, biases, experts, intermediate, hidden)
    if out is not None:
        _check_out_tensor(out, "..., H", x.shape, x.dtype, x.device)
    if workspace is not None:
        _check_tensor("workspace", workspace, "bytes", (torch.uint8,), x.device)
        _check_contiguous("workspace", workspace)
    if look is not None:
        if len(_passed) >= MAX_PASSED:
            _passed.clear()
        _passed.add(look)


def _look(key: str, *tensors: Any) -> tuple[Any, ...] | None:
    """All that the checks read of these arguments. None where one is no plain tensor, or the compiler traces them:
    extents may be symbols then."""
    if torch.compiler.is_compiling():
        return None
    look: list[Any] = [key, torch.is_grad_enabled()]
    for tensor in tensors:
        if tensor is None:
            look.append(None)
        elif type(tensor) in PLAIN_TENSORS:
            look += (tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad)
        else:
            return None
    return tuple(look)


def _check_biases(
    x: Tensor, biases: tuple[Tensor | None, Tensor | None, Tensor | None], experts: int, intermediate: int, hidden: int
) -> None:
    b_gate, b_up, b_down = biases
    if (b_gate is None) != (b_up is None):
        given, missing = ("b_up", "b_gate") if b_gate is None else ("b_gate", "b_up")
        raise ValueError(f"{missing} must be given where {given} is, got None")
    named = (("b_gate", b_gate, "I", intermediate), ("b_up", b_up, "I", intermediate), ("b_down", b_down, "H", hidden))
    for name, bias, symbol, columns in named:
        if bias is not None:
            _check_tensor(name, bias, f"E, {symbol}", (x.dtype,), x.device)
            _check_shape(name, bias, f"E, {symbol}", (experts, columns))


def check_gate_up(x: Tensor, w_gate_up: Tensor, b_gate_up: Tensor | None) -> None:
    """The fused weight and bias of `fused_experts_gate_up`, before they are taken apart into views."""
    _check_hidden_states(x)
    _check_tensor("w_gate_up", w_gate_up, "E, 2I, H", (x.dtype,), x.device)
    experts, rows, hidden = w_gate_up.shape
    if hidden != x.shape[-1] or rows % 2:
        raise _shape_error("w_gate_up", w_gate_up, "E, 2I, H", ("E", "2I", x.shape[-1]))
    _check_extents("w_gate_up", experts, rows // 2, "I")
    _check_rows("w_gate_up", w_gate_up)
    if b_gate_up is not None:
        _check_tensor("b_gate_up", b_gate_up, "E, 2I", (x.dtype,), x.device)
        _check_shape("b_gate_up", b_gate_up, "E, 2I", (experts, rows))


def check_experts_memory(
    x_TH: Tensor, w_gate_EIH: Tensor, w_up_EIH: Tensor, w_down_EHI: Tensor, out_TH: Tensor | None
) -> None:
    """Addresses of the layer's tensors and, on CUDA, the device."""
    _check_address("x", x_TH)
    _check_address("w_gate (or w_gate_up)", w_gate_EIH)
    _check_address("w_up", w_up_EIH)
    _check_address("w_down", w_down_EHI)
    if out_TH is not None:
        _check_address("out", out_TH)
        _check_no_overlap("out", out_TH, "x", x_TH)
    if x_TH.is_cuda:
        check_pair_memory("w_gate", w_gate_EIH, "w_up", w_up_EIH)
        hopper_sm_count(x_TH.device)


def check_workspace_memory(
    workspace: Tensor, x_TH: Tensor, w_gate_EIH: Tensor, topk_ids_TK: Tensor, out_TH: Tensor
) -> None:
    """Size and address of a caller's workspace."""
    experts, intermediate, hidden = w_gate_EIH.shape
    tokens, top_k = topk_ids_TK.shape
    needed = workspace_size(tokens, top_k, hidden, intermediate, experts, x_TH.dtype)
    if workspace.numel() < needed:
        raise ValueError(
            f"workspace must have at least workspace_size(...) = {needed} bytes for this call, got {workspace.numel()}"
        )
    _check_address("workspace", workspace)
    _check_no_overlap("workspace", workspace, "x", x_TH)
    _check_no_overlap("workspace", workspace, "out", out_TH)


def check_pair_memory(first_name: str, first: Tensor, second_name: str, second: Tensor) -> None:
    """One TMA tensor map covers both operands on CUDA: the difference of their addresses is one of its
    strides."""
    distance = abs(second.data_ptr() - first.data_ptr())
    if distance % ALIGNMENT_BYTES or distance >= MAX_STRIDE_BYTES:
        raise ValueError(
            f"{second_name} must lie a multiple of {ALIGNMENT_BYTES} bytes and less than 2^40 bytes away "
            f"from {first_name}, got {distance} bytes"
        )


def check_plan_routing(topk_ids: Tensor, num_experts: int, topk_weights: Tensor | None) -> None:
    """Arguments of `plan_routing`."""
    if not isinstance(num_experts, int):
        raise TypeError(f"num_experts must be an int, got {type(num_experts).__name__}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts must be from 1 to {MAX_EXPERTS}, got {num_experts}")
    _check_routing("topk_ids", topk_ids, "topk_weights", topk_weights, None)


def check_permute(x_TH: Tensor, slot_row_TK: Tensor) -> None:
    """Arguments of `permute`."""
    _check_tensor("x", x_TH, "T, H", VALUE_DTYPES, None)
    _check_multiple_of_8("x", "H", x_TH.shape[-1])
    _check_rows("x", x_TH)
    _check_tensor("plan.slot_row_TK", slot_row_TK, "T, K", (torch.int32,), x_TH.device)
    if slot_row_TK.shape[0] != x_TH.shape[0]:
        raise _shape_error("plan.slot_row_TK", slot_row_TK, "T, K", (x_TH.shape[0], "K"))
    _check_contiguous("plan.slot_row_TK", slot_row_TK)


def check_grouped_gemm(
    a_MK: Tensor,
    weights: Sequence[Tensor],
    expert_offsets_E1: Tensor,
    epilogue: Epilogue,
    tensors: dict[str, Any],
    source_index: Tensor | None,
    row_index: Tensor | None,
    out: Tensor | None,
) -> None:
    """Arguments of `grouped_gemm`; `weights` are the operands of `b` in order."""
    if not isinstance(epilogue, Epilogue):
        raise TypeError(f"epilogue must be an epilogues.Epilogue, got {type(epilogue).__name__}")
    check_epilogue(epilogue)
    _check_tensor("a", a_MK, "M, K", VALUE_DTYPES, None)
    rows, reduction = a_MK.shape
    _check_multiple_of_8("a", "K", reduction)
    _check_rows("a", a_MK)
    if source_index is not None:
        _check_tensor("source_index", source_index, "M", (torch.int32,), a_MK.device)
        _check_contiguous("source_index", source_index)
        if rows == 0 and source_index.shape[0] > 0:
            raise ValueError(f"a must have rows for source_index to take, got {_list(a_MK.shape)}")
        rows = source_index.shape[0]
    _check_row_count(rows)
    _check_operands(a_MK, weights, epilogue)
    _check_tensor("expert_offsets", expert_offsets_E1, "E + 1", (torch.int32,), a_MK.device)
    _check_shape("expert_offsets", expert_offsets_E1, "E + 1", (weights[0].shape[0] + 1,))
    _check_contiguous("expert_offsets", expert_offsets_E1)
    _check_epilogue_tensors(a_MK, rows, weights[0], epilogue, tensors)
    if epilogue.scatter:
        if row_index is None:
            raise ValueError(f"row_index must be given: epilogue {epilogue.name} stores each row at its index")
        _check_tensor("row_index", row_index, "M", (torch.int32,), a_MK.device)
        _check_shape("row_index", row_index, "M", (rows,))
        _check_contiguous("row_index", row_index)
    elif row_index is not None:
        raise ValueError(f"row_index must be None: epilogue {epilogue.name} does not scatter")
    if out is not None:
        dtype = resolve_dtype(epilogue.out_dtype, a_MK.dtype)
        _check_tensor("out", out, "rows, N", (dtype,), a_MK.device)
        out_rows = out.shape[0] if epilogue.scatter else rows
        _check_out_tensor(out, "rows, N", (out_rows, weights[0].shape[1]), dtype, a_MK.device)


def check_grouped_gemm_memory(
    a_MK: Tensor, weights: Sequence[Tensor], epilogue: Epilogue, tensors: dict[str, Any], out: Tensor
) -> None:
    """Addresses of the GEMM's tensors and, on CUDA, the device."""
    _check_address("a", a_MK)
    for declared in epilogue.tensors:
        if declared.broadcast == "full":
            _check_address(f"tensors[{declared.name!r}]", tensors[declared.name])
    for weight in weights:
        _check_address("b", weight)
    _check_address("out", out)
    _check_no_overlap("out", out, "a", a_MK)
    if a_MK.is_cuda:
        if len(weights) == 2:
            check_pair_memory("b[0]", weights[0], "b[1]", weights[1])
        hopper_sm_count(a_MK.device)


def check_combine(y_MH: Tensor, slot_row_TK: Tensor, out: Tensor | None) -> None:
    """Arguments of `combine`."""
    _check_tensor("slot_row_TK", slot_row_TK, "T, K", (torch.int32,), None)
    _check_contiguous("slot_row_TK", slot_row_TK)
    _check_tensor("y", y_MH, "M, H", VALUE_DTYPES, slot_row_TK.device)
    tokens, top_k = slot_row_TK.shape
    hidden = y_MH.shape[1]
    _check_multiple_of_8("y", "H", hidden)
    _check_shape("y", y_MH, "M, H", (tokens * top_k, hidden))
    _check_contiguous("y", y_MH)
    if out is not None:
        _check_out_tensor(out, "T, H", (tokens, hidden), y_MH.dtype, y_MH.device)


def check_rows_memory(source_name: str, source: Tensor, out: Tensor | None) -> None:
    """Addresses of a step that copies or sums rows and, on CUDA, the device."""
    _check_address(source_name, source)
    if out is not None:
        _check_address("out", out)
        _check_no_overlap("out", out, source_name, source)
    if source.is_cuda:
        hopper_sm_count(source.device)


@lru_cache
def hopper_sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device. Raises RuntimeError when its compute capability is not
    9.0."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != (9, 0):
        raise RuntimeError(
            "the tensors must be on a GPU of compute capability 9.0 (H100, H200, GH200), got "
            f"{device} ({properties.name}) of compute capability {properties.major}.{properties.minor}"
        )
    return properties.multi_processor_count


def canonical_strides(tensor: Tensor) -> Tensor:
    """The same tensor, each size-1 dimension given the stride that it has in a contiguous tensor. No copy.

    The stride of such a dimension means nothing, yet DLPack export replaces an unusual one by 1, and the
    kernels refuse strides that are no multiple of 8 elements.
    """
    shape = tensor.shape
    if 1 not in shape:
        return tensor
    strides = list(tensor.stride())
    span = 1
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            strides[dim] = span
        span *= shape[dim]
    return tensor.as_strided(shape, strides)


def _list(values: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, values))}]"


def _shape_error(name: str, tensor: Tensor, symbols: str, expected: Sequence[Any]) -> ValueError:
    return ValueError(f"{name} must have shape [{symbols}] = {_list(expected)}, got {_list(tensor.shape)}")


def _check_shape(name: str, tensor: Tensor, symbols: str, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:  # sizes and tuples compare by their elements
        raise _shape_error(name, tensor, symbols, expected)


def _check_kind(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device | None) -> None:
    """Type, dtype, device and gradient; the rank is the caller's business."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is None:
        if tensor.device.type not in ("cuda", "cpu", "meta"):
            raise ValueError(f"{name} must be on a CUDA device or the CPU, got {tensor.device}")
    elif tensor.device != device:
        raise ValueError(f"{name} must be on {device} like the other tensors, got {tensor.device}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} requires grad, but cutlass_moe has no backward (inference only): expected a call under "
            f"torch.no_grad() or {name}.detach(), got requires_grad=True with gradients enabled"
        )


def _check_tensor(
    name: str, tensor: Tensor, symbols: str, dtypes: tuple[torch.dtype, ...], device: torch.device | None
) -> None:
    """`_check_kind`, and one dimension for each of the comma-separated `symbols`."""
    _check_kind(name, tensor, dtypes, device)
    rank = symbols.count(",") + 1
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimensions [{symbols}], got shape {_list(tensor.shape)}")


def _check_multiple_of_8(name: str, symbol: str, extent: int) -> None:
    if extent % ALIGNMENT_ELEMENTS or extent == 0:
        raise ValueError(
            f"{name}: {symbol} must be a positive multiple of {ALIGNMENT_ELEMENTS}, got {symbol} = {extent}"
        )


def _check_extents(name: str, experts: int, features: int, symbol: str) -> None:
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{name}: E must be from 1 to {MAX_EXPERTS}, got E = {experts}")
    _check_multiple_of_8(name, symbol, features)


def _check_row_count(rows: int) -> None:
    if rows > MAX_ROWS:
        raise ValueError(f"rows (tokens times top_k) must be at most {MAX_ROWS}, got {rows}")


def _check_rows(name: str, tensor: Tensor) -> None:
    """Last dimension contiguous, every other stride a multiple of 16 bytes. Strides of size-1 dimensions mean
    nothing."""
    *leading, last = strides = tensor.stride()
    if last != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension (stride 1), got strides {_list(strides)}")
    for dim, stride in enumerate(leading):
        if stride % ALIGNMENT_ELEMENTS and tensor.shape[dim] > 1:
            raise ValueError(
                f"{name} must have rows aligned to {ALIGNMENT_BYTES} bytes (strides in multiples of "
                f"{ALIGNMENT_ELEMENTS} elements), got strides {_list(strides)}"
            )


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        strides = _list(tensor.stride())
        raise ValueError(f"{name} must be contiguous, got shape {_list(tensor.shape)} with strides {strides}")


def _check_equal_strides(w_gate: Tensor, w_up: Tensor, names: tuple[str, str] = ("w_gate", "w_up")) -> None:
    gate, up = w_gate.stride(), w_up.stride()
    if gate[1] != up[1] or (gate[0] != up[0] and w_gate.shape[0] > 1):
        raise ValueError(f"{names[1]} must have the strides of {names[0]}, {_list(gate)}, got {_list(up)}")


def _check_hidden_states(x: Tensor) -> None:
    _check_kind("x", x, VALUE_DTYPES, None)
    if x.dim() < 2:
        raise ValueError(f"x must have 2 or more dimensions [..., H], got shape {_list(x.shape)}")
    _check_multiple_of_8("x", "H", x.shape[-1])
    _check_rows("x", x)


def _check_routing(ids_name: str, ids: Tensor, weights_name: str, weights: Tensor | None, x: Tensor | None) -> None:
    """Expert ids and routing weights, [..., K] each, their leading dimensions those of `x` where it is
    given."""
    _check_kind(ids_name, ids, ID_DTYPES, None if x is None else x.device)
    if ids.dim() < 2:
        raise ValueError(f"{ids_name} must have 2 or more dimensions [..., K], got shape {_list(ids.shape)}")
    if x is not None and ids.shape[:-1] != x.shape[:-1]:
        raise _shape_error(ids_name, ids, "..., K", (*x.shape[:-1], "K"))
    if weights is not None:
        _check_kind(weights_name, weights, ROUTING_WEIGHT_DTYPES, ids.device)
        _check_shape(weights_name, weights, "..., K", ids.shape)
    _check_row_count(ids.numel())


def _check_out_tensor(
    out: Tensor, symbols: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    _check_kind("out", out, (dtype,), device)
    _check_shape("out", out, symbols, shape)
    _check_rows("out", out)
    if out.numel() > 0:
        _check_row_walk("out", out)


def _check_row_walk(name: str, tensor: Tensor) -> None:
    """One row stride walks all leading dimensions (so that a view of the tensor is [T, H]), and rows do not
    overlap."""
    shape, strides = tensor.shape, tensor.stride()
    row_stride = span = None
    for dim in reversed(range(tensor.dim() - 1)):
        if shape[dim] == 1:
            continue
        if row_stride is None or span is None:
            row_stride = span = strides[dim]
        elif strides[dim] != span:
            raise ValueError(f"{name} must be viewable as [T, H] without a copy, got strides {_list(strides)}")
        span *= shape[dim]
    if row_stride is not None and row_stride < shape[-1]:
        raise ValueError(f"{name} must have rows that do not overlap, got strides {_list(strides)}")


def _check_operands(a_MK: Tensor, weights: Sequence[Tensor], epilogue: Epilogue) -> None:
    if len(weights) != epilogue.accumulators:
        expected = "a tensor" if epilogue.accumulators == 1 else "a (gate, up) pair of tensors"
        where = locate(type(epilogue.parts[0]), "accumulators")
        raise ValueError(
            f"b must be {expected} for epilogue {epilogue.name}, got {len(weights)} operand(s): its accumulators = "
            f"{epilogue.accumulators} is declared at {where}"
        )
    names = ("b",) if len(weights) == 1 else ("b[0]", "b[1]")
    for name, weight in zip(names, weights, strict=True):
        _check_tensor(name, weight, "E, N, K", (a_MK.dtype,), a_MK.device)
        if weight.shape[2] != a_MK.shape[1]:
            raise _shape_error(name, weight, "E, N, K", ("E", "N", a_MK.shape[1]))
        _check_extents(name, weight.shape[0], weight.shape[1], "N")
        _check_rows(name, weight)
    if len(weights) == 2:
        _check_shape("b[1]", weights[1], "E, N, K", weights[0].shape)
        _check_equal_strides(weights[0], weights[1], ("b[0]", "b[1]"))


def _check_epilogue_tensors(
    a_MK: Tensor, rows: int, weight: Tensor, epilogue: Epilogue, tensors: dict[str, Any]
) -> None:
    expected = [*(tensor.name for tensor in epilogue.tensors), *epilogue.scalars]
    if sorted(tensors) != sorted(expected):
        raise ValueError(f"tensors must hold {expected} for epilogue {epilogue.name}, got {sorted(tensors)}")
    extents = (rows, weight.shape[0], weight.shape[1])
    for declared in epilogue.tensors:
        name = f"tensors[{declared.name!r}]"
        tensor = tensors[declared.name]
        _check_kind(name, tensor, (resolve_dtype(declared.dtype, a_MK.dtype),), a_MK.device)
        shape = tensor_shape(declared, *extents)
        if tensor.shape != shape:
            hint = wrong_shape_hint(declared, tensor.shape, *extents)
            raise ValueError(f"{_shape_error(name, tensor, BROADCASTS[declared.broadcast], shape)}{hint}")
        if declared.broadcast == "full":
            _check_rows(name, tensor)
        elif declared.broadcast != "expert_column":
            _check_contiguous(name, tensor)
    for scalar in epilogue.scalars:
        if not isinstance(tensors[scalar], int | float):
            raise TypeError(f"tensors[{scalar!r}] must be a float, got {type(tensors[scalar]).__name__}")


def _check_address(name: str, tensor: Tensor) -> None:
    address = tensor.data_ptr()
    if address % ALIGNMENT_BYTES:
        raise ValueError(f"{name} must start at a multiple of {ALIGNMENT_BYTES} bytes, got address {address:#x}")


def _check_no_overlap(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    start, stop = _byte_range(tensor)
    other_start, other_stop = _byte_range(other)
    if start < other_stop and other_start < stop:
        raise ValueError(
            f"{name} must not overlap {other_name} in memory, got {name} at [{start:#x}, {stop:#x}) and "
            f"{other_name} at [{other_start:#x}, {other_stop:#x})"
        )


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
