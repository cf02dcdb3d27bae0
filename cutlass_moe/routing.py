"""Routing: which row of the grouped GEMMs each (token, slot) pair becomes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cutlass_moe import checks, dlpack
from cutlass_moe.config import RouteSpec, route_chunks


class RoutingPlan(NamedTuple):
    """The (token, slot) pairs, M = T * K of them, sorted by expert. `slot` counts pairs: `slot = t * K + k`.

    Attributes:
        expert_offsets_E1: int32 [E + 1]. Expert e has the rows from `[e]` up to `[e + 1]`; `[E]` is the
            number of kept slots.
        row_slot_M: int32 [M], the slot of each row; within an expert, rows are in slot order. Unspecified
            from row `[E]` on.
        row_token_M: int32 [M], the token of each row. Unspecified from row `[E]` on.
        slot_row_TK: int32 [T, K], the row of each slot, -1 where the slot is dropped.
        row_weight_M: float32 [M], the routing weight of each row, or None. Unspecified from row `[E]` on.
        num_experts: E.
    """

    expert_offsets_E1: Tensor
    row_slot_M: Tensor
    row_token_M: Tensor
    slot_row_TK: Tensor
    row_weight_M: Tensor | None
    num_experts: int


def plan_routing(topk_ids: Tensor, num_experts: int, topk_weights: Tensor | None = None) -> RoutingPlan:
    """Sorts (token, slot) pairs by expert: stable, deterministic, without waiting for the device.

    Args:
        topk_ids: int32 or int64 [..., K]; leading dimensions are flattened to T. An id outside
            [0, num_experts) drops its slot.
        num_experts: from 1 to 512.
        topk_weights: float32, bfloat16 or float16 [..., K], or None.

    Raises:
        TypeError, ValueError, RuntimeError: naming the argument, what was expected and what came.
    """
    if dlpack.is_foreign(topk_ids):
        return dlpack.through_torch(plan_routing, topk_ids, num_experts, topk_weights)
    checks.check_plan_routing(topk_ids, num_experts, topk_weights)
    top_k = topk_ids.shape[-1]
    tokens = math.prod(topk_ids.shape[:-1])
    if topk_ids.dim() != 2:
        topk_ids = topk_ids.reshape(tokens, top_k)
        topk_weights = None if topk_weights is None else topk_weights.reshape(tokens, top_k)
    offsets_E1, row_slot_M, row_token_M, slot_row_TK, row_weight_M = torch.ops.cutlass_moe.plan_routing(
        topk_ids, topk_weights, num_experts
    )
    weights = None if topk_weights is None else row_weight_M
    return RoutingPlan(offsets_E1, row_slot_M, row_token_M, slot_row_TK, weights, num_experts)


@lru_cache
def _route_kernel(id_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> Callable[..., None]:
    # Imported on first launch: the CPU implementation needs neither TVM-FFI nor the kernel library.
    from cutlass_moe.aot.load import get_kernel

    weight_name = None if weight_dtype is None else str(weight_dtype).removeprefix("torch.")
    return get_kernel(RouteSpec(str(id_dtype).removeprefix("torch."), weight_name))


def launch_route(
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor | None,
    expert_offsets_E1: Tensor,
    row_slot_M: Tensor,
    row_token_M: Tensor,
    slot_row_TK: Tensor,
    row_weight_M: Tensor | None,
    chunk_counts_CE: Tensor,
    tile_counters_2: Tensor,
) -> None:
    """Routes checked CUDA tensors with T * K > 0 into the tensors of a `RoutingPlan`, through scratch of C chunks."""
    kernel = _route_kernel(topk_ids_TK.dtype, None if topk_weights_TK is None else topk_weights_TK.dtype)
    tables = (expert_offsets_E1, row_slot_M, row_token_M, slot_row_TK, row_weight_M, chunk_counts_CE, tile_counters_2)
    kernel(topk_ids_TK, topk_weights_TK, *tables)


def launch_plan(
    topk_ids_TK: Tensor, topk_weights_TK: Tensor | None, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Routes checked CUDA tensors with T * K > 0. Returns the tensors of a `RoutingPlan`."""
    slots = topk_ids_TK.numel()
    expert_offsets_E1 = topk_ids_TK.new_empty(num_experts + 1, dtype=torch.int32)
    row_slot_M = topk_ids_TK.new_empty(slots, dtype=torch.int32)
    row_token_M = topk_ids_TK.new_empty(slots, dtype=torch.int32)
    slot_row_TK = topk_ids_TK.new_empty(topk_ids_TK.shape, dtype=torch.int32)
    row_weight_M = None if topk_weights_TK is None else topk_weights_TK.new_empty(slots, dtype=torch.float32)
    chunk_counts_CE = topk_ids_TK.new_empty((route_chunks(slots), num_experts), dtype=torch.int32)
    tables = (expert_offsets_E1, row_slot_M, row_token_M, slot_row_TK, row_weight_M)
    launch_route(topk_ids_TK, topk_weights_TK, *tables, chunk_counts_CE, expert_offsets_E1.new_empty(2))
    return tables
