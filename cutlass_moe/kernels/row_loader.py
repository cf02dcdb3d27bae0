"""Loads the rows of a tile into the stages of the pipeline: whole boxes of neighbouring rows, or single rows from
anywhere."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects import cute as cute_ir
from cutlass._mlir.dialects import cute_nvgpu as cute_nvgpu_ir
from cutlass.cute.nvgpu import cpasync

from cutlass_moe.config import PRODUCER_WARPS, REDUCTION_TILE, GemmConfig


class RowLoader:
    """The loading warps of a cluster take its tile's boxes in turns, and each box goes to every CTA of the cluster.

    A box is one TMA load. With `gather` it is several, of a row each, and what they cost is the instructions: a warp
    has half a microsecond for the dozen rows of its stage. So the row numbers stay in registers, and a box is loaded
    without a branch; one that the rows do not fill is filled with the last of them.
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
        barrier = self.full + stage
        box_bytes = self.token_box * REDUCTION_TILE * self.s_rows.element_type.width // 8
        # The TMA swizzles by the address: what it gets must be plain.
        base = Int32(self.s_rows.iterator.toint()) + stage * (self.stage_tokens // self.token_box * box_bytes)
        target = base + first_box * box_bytes
        if cutlass.const_expr(self.gather):
            descriptor = self._descriptor()
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.warp_boxes):
                    if i < boxes:
                        for r in cutlass.range_constexpr(self.token_box):
                            offset = (i * self.loaders * self.token_box + r) * (box_bytes // self.token_box)
                            row = sources[i * self.token_box + r]
                            self._load_row(descriptor, row, k * REDUCTION_TILE, target + offset, barrier)
        else:
            for i in cutlass.range(boxes, unroll=1):
                self._load_box(
                    rows_MK, first_box + i * self.loaders, k, target + i * (self.loaders * box_bytes), barrier
                )

    def _descriptor(self) -> Int64:
        """The address of the TMA's descriptor, as the DSL's own copies take it."""
        multicast = {"mcast_mask": self._all_ctas()} if self.cluster > 1 else {}
        atom = self.tma._unpack(tma_bar_ptr=self.full, **multicast)
        pointer = cute_ir.PtrType.get(Int64.mlir_type, cute.AddressSpace.generic, 64)
        return Int64(cute_nvgpu_ir.get_tma_desc_addr(pointer, atom).toint())

    def _all_ctas(self) -> cutlass.Int16:
        return cutlass.Int16((1 << self.cluster) - 1)

    @cute.jit
    def _load_row(self, descriptor: Int64, row: Int32, element: Int32, target: Int32, barrier: cute.Pointer):
        """By one thread: loads 128 bytes of a row to the same place in every CTA of the cluster.

        Of `cute.copy` the compiler makes twice the instructions, as it computes descriptor, address and barrier anew
        for each row: the layer took 8 % longer at ling_flash T = 4096."""
        instruction = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        operands = "[{$r0}], [{$r1}, {{$r2}, {$r3}}], [{$r4}]"
        arguments = [target, descriptor, element, row, Int32(barrier.toint())]
        if cutlass.const_expr(self.cluster > 1):
            instruction += ".multicast::cluster"
            operands += ", {$r5}"
            arguments.append(self._all_ctas())
        cute.arch.inline_ptx(f"{instruction} {operands};", read_only_args=arguments)

    @cute.jit
    def _load_box(self, rows_MK: cute.Tensor, box: Int32, k: Int32, target: Int32, barrier: cute.Pointer):
        """Loads the box-th of the rows to the same place in every CTA of the cluster."""
        extents = (self.token_box, REDUCTION_TILE)
        place = cute.make_ptr(self.s_rows.element_type, target, cute.AddressSpace.smem, assumed_align=128)
        to_rows, from_rows = cpasync.tma_partition(
            self.tma,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(place, cute.make_layout(extents, stride=(REDUCTION_TILE, 1))), 0, 2),
            cute.group_modes(cute.local_tile(rows_MK, extents, (box, k)), 0, 2),
        )
        multicast = {}
        if cutlass.const_expr(self.cluster > 1):
            multicast = {"mcast_mask": self._all_ctas()}
        cute.copy(self.tma, from_rows, to_rows, tma_bar_ptr=barrier, **multicast)
