"""Loads the rows of a tile into the stages of the pipeline: whole boxes of neighbouring rows, or single rows from
anywhere."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from cutlass_moe.config import PRODUCER_WARPS, REDUCTION_TILE, GemmConfig


class RowLoader:
    """The loading warps of a cluster take its tile's boxes in turns, and each box goes to every CTA of the cluster.

    A box is one TMA load. With `gather` it is four, of a row each, and what they cost is the instructions: a warp has
    half a microsecond for the dozen rows of its stage. So a box is loaded without a branch (one that the rows do not
    fill is filled with the last of them), the row numbers stay in registers, and a stage's addresses are computed once.
    """

    def __init__(self, config: GemmConfig):
        self.gather = config.gather
        self.cluster = config.cluster
        self.loaders = config.loaders
        self.token_box = config.token_box
        self.load_rows = 1 if config.gather else config.token_box  # of one TMA load
        self.stage_tokens = config.stage_tokens
        self.warp_boxes = -(-config.stage_tokens // config.token_box // config.loaders)  # of the widest tile, at most

    def make_tma(self, rows_MK: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """The TMA of rows_MK, and its view of them."""
        operation = (
            cpasync.CopyBulkTensorTileG2SOp()
            if cutlass.const_expr(self.cluster == 1)
            else cpasync.CopyBulkTensorTileG2SMulticastOp()
        )
        # One load in shared memory, as the TMA writes it. The swizzle is one of the address's bits, so this need not be
        # whole atoms of 8 rows.
        layout = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3),
            0,
            cute.make_layout((self.load_rows, REDUCTION_TILE), stride=(REDUCTION_TILE, 1)),
        )
        # num_multicast stays 1: a warp loads whole boxes, and each goes to all CTAs.
        return cpasync.make_tiled_tma_atom(operation, rows_MK, layout, (self.load_rows, REDUCTION_TILE))

    def bind(
        self,
        tma: cute.CopyAtom,
        rows_MK: cute.Tensor,
        source_index_M: cute.Tensor | None,
        s_rows: cute.Tensor,
        full: cute.Pointer,
        rank: Int32,
    ) -> None:
        """Takes the kernel's tensors and barriers, and the CTA's rank in the cluster."""
        self.tma, self.rows, self.source_index = tma, rows_MK, source_index_M
        self.s_rows, self.full, self.rank = s_rows, full, rank

    @cute.jit
    def open_tile(self, first_row: Int32, tokens: Int32) -> Any:
        """What `load` needs of a tile: this warp's first box and number of boxes, the rows, and the numbers of those
        that it gathers."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first_box = self.rank
        if cutlass.const_expr(self.gather):
            # The warps that load weights, too, come last. The first CTA has a loader less: its scheduler.
            first_box = (PRODUCER_WARPS - 2) * self.rank + warp - 1
            if warp == 0:
                first_box = self.loaders - self.cluster + self.rank
        boxes = cutlass.max(0, cute.ceil_div(cute.ceil_div(tokens, self.token_box) - first_box, self.loaders))
        sources = []
        rows_MK = self.rows
        if cutlass.const_expr(self.gather):
            # Lane i looks up the i-th row of its warp.
            lane = cute.arch.lane_idx()
            row = (first_box + lane // self.token_box * self.loaders) * self.token_box + lane % self.token_box
            source = Int32(0)
            if lane < boxes * self.token_box:
                source = self.source_index[first_row + cutlass.min(row, tokens - 1)]
            sources = [cute.arch.shuffle_sync(source, i) for i in range(self.warp_boxes * self.token_box)]
        else:
            rows_MK = cute.domain_offset((first_row, 0), rows_MK)
        return first_box, boxes, rows_MK, sources

    @cute.jit
    def load(self, tile: Any, k: Int32, stage: Int32):
        """Loads this warp's boxes of reduction tile k of a tile that was opened."""
        first_box, boxes, rows_MK, sources = tile
        box_elements = self.token_box * REDUCTION_TILE
        # The TMA swizzles by the address: the pointer that it gets must be plain. Behind the shuffle in
        # `make_warp_uniform` the compiler does not compute address and barrier anew for every load.
        place = self.s_rows.iterator.toint() + (stage * self.stage_tokens + first_box * self.token_box) * 128
        address = cute.arch.make_warp_uniform(Int32(place))
        target = cute.make_ptr(self.s_rows.element_type, address, cute.AddressSpace.smem, assumed_align=128)
        barrier = cute.make_ptr(
            Int64,
            cute.arch.make_warp_uniform(Int32((self.full + stage).toint())),
            cute.AddressSpace.smem,
            assumed_align=8,
        )
        if cutlass.const_expr(self.gather):
            for i in cutlass.range_constexpr(self.warp_boxes):
                if i < boxes:
                    for r in cutlass.range_constexpr(self.token_box):
                        offset = i * self.loaders * box_elements + r * REDUCTION_TILE
                        self._load(rows_MK, sources[i * self.token_box + r], k, target + offset, barrier)
        else:
            for i in cutlass.range(boxes, unroll=1):
                offset = i * (self.loaders * box_elements)
                self._load(rows_MK, first_box + i * self.loaders, k, target + offset, barrier)

    @cute.jit
    def _load(self, rows_MK: cute.Tensor, box: Int32, k: Int32, target: cute.Pointer, barrier: cute.Pointer):
        """One TMA load: the box-th of the rows, to the same place in every CTA of the cluster."""
        extents = (self.load_rows, REDUCTION_TILE)
        to_rows, from_rows = cpasync.tma_partition(
            self.tma,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(target, cute.make_layout(extents, stride=(REDUCTION_TILE, 1))), 0, 2),
            cute.group_modes(cute.local_tile(rows_MK, extents, (box, k)), 0, 2),
        )
        multicast = {}
        if cutlass.const_expr(self.cluster > 1):
            multicast = {"mcast_mask": cutlass.Int16((1 << self.cluster) - 1)}
        cute.copy(self.tma, from_rows, to_rows, tma_bar_ptr=barrier, **multicast)
