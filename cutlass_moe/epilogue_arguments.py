"""What an epilogue adds to a grouped GEMM's arguments: its tensors and scalars, and its side outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epilogues import INPUT, Epilogue, EpilogueTensor, SideOutput
from epilogues.base import BROADCASTS


def resolve_dtype(dtype: str, operands: torch.dtype) -> torch.dtype:
    """The dtype that an epilogue declares, where `operands` is that of the GEMM's operands."""
    return operands if dtype == INPUT else getattr(torch, dtype)


def tensor_shape(declared: EpilogueTensor, rows: int, experts: int, columns: int) -> tuple[int, ...]:
    """The shape that a tensor of the epilogue must have, for a GEMM of M rows, E experts and N output columns."""
    extents = {"M": rows, "E": experts, "N": columns}
    return tuple(extents[symbol] for symbol in BROADCASTS[declared.broadcast].split(", "))


def wrong_shape_hint(declared: EpilogueTensor, shape: Sequence[int], rows: int, experts: int, columns: int) -> str:
    """Says where the tensor's broadcast is declared and, where another one fits `shape`, which."""
    fitting = [
        name
        for name in BROADCASTS
        if tensor_shape(EpilogueTensor(declared.name, name), rows, experts, columns) == tuple(shape)
    ]
    hint = f" (broadcast={declared.broadcast!r}, declared at {declared.where}"
    return hint + (f"; for this tensor change it there to {' or '.join(map(repr, fitting))})" if fitting else ")")


def make_side_outputs(epilogue: Epilogue, out: Tensor, operands: torch.dtype) -> tuple[Tensor, ...]:
    """New tensors for the epilogue's side outputs beside `out`; a row maximum starts from 0."""
    rows, columns = out.shape

    def make(side: SideOutput) -> Tensor:
        if side.row_absmax:
            return out.new_zeros(rows, dtype=torch.float32)
        shape = (rows, columns) if side.values == 1 else (rows, side.values, columns)
        return out.new_empty(shape, dtype=resolve_dtype(side.dtype, operands))

    return tuple(make(side) for side in epilogue.side_outputs)


def kernel_arguments(
    epilogue: Epilogue, inputs: Mapping[str, Any], side_outputs: Sequence[Tensor]
) -> tuple[Tensor | float, ...]:
    """The tensors, scalars and side outputs in the order that the kernel takes them."""
    sides = (
        tensor[:, None] if side.values == 1 and not side.row_absmax else tensor
        for side, tensor in zip(epilogue.side_outputs, side_outputs, strict=True)
    )
    return (
        *(inputs[declared.name] for declared in epilogue.tensors),
        *(float(inputs[name]) for name in epilogue.scalars),
        *sides,
    )


def expert_inputs(
    epilogue: Epilogue, inputs: Mapping[str, Any], expert: int, start: int, stop: int
) -> dict[str, Tensor]:
    """The epilogue's tensors and scalars for the rows start .. stop - 1 of one expert, in fp32, as its math on torch
    tensors takes them."""
    taken: dict[str, Tensor] = {}
    for declared in epilogue.tensors:
        tensor = inputs[declared.name]
        if declared.broadcast == "row":
            taken[declared.name] = tensor[start:stop, None].float()
        elif declared.broadcast == "full":
            taken[declared.name] = tensor[start:stop].float()
        else:
            taken[declared.name] = tensor[expert].float()
    for name in epilogue.scalars:
        taken[name] = torch.tensor(float(inputs[name]))
    return taken
