"""Grouped GEMM for sm_90a: out[r] = epilogue(rows_MK[r] @ weights_ENK[e]^T) for the rows r of each expert e.

Weights stand on the WGMMA M side and tokens on N (any multiple of 16 up to 256), so each weight byte is read once when an
expert's rows fit one tile, padding is a few tokens, and one kernel class serves decode and prefill by its token width.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu import warp as warp_copy
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from cutlass_moe.config import CONSUMERS, MAX_EXPERTS, REDUCTION_TILE, STORE_PAD, GemmSpec
from cutlass_moe.kernels import tile_scheduler
from epilogues import DslOps

WARPGROUP = 128
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
WGMMA_K = 16
VECTOR = 8  # elements of one 16-byte store
ALIGNMENT = 1024  # of a swizzled shared-memory tile
FIRST_STORE_BARRIER = 1  # named barriers, one for each consumer warpgroup; 0 is sync_threads
FIRST_TURN_BARRIER = FIRST_STORE_BARRIER + CONSUMERS


class GroupedGemm:
    """One kernel: a dtype, a tile configuration and an epilogue.

    Warp roles (one warpgroup of 128 threads each):

    | warpgroup | registers | does |
    |---|---|---|
    | 0 (its warp 0) | 40 | producer: waits on `empty[stage]`, loads one weight tile and the tile's token boxes by TMA |
    | 1 and 2 | 232 | consumers: wait on `full[stage]`, WGMMA, then the epilogue. Cooperative: half of each tile's weight rows |
    | | | each; ping-pong: every other tile, so that one's epilogue runs under the other's WGMMA |

    Pipelines: one ring of `stages` shared-memory stages. `full[s]` counts the producer's arrival and the TMA bytes;
    `empty[s]` counts one arrival of each warp that reads the stage in each CTA of the cluster, since the token tile is
    multicast and a producer overwrites the stage of its peer too.

    Persistent: cluster c takes the work numbers c, c + clusters, ... of `tile_scheduler`. Every role computes them itself
    from a table of the experts' tiles, made in shared memory at the start.

    Gate and up (an epilogue with two accumulators): one 5-D TMA view takes 8 gate rows, the 8 matching up rows, and so on.
    In the m64nNk16 accumulator a thread holds rows r and r + 8 of each 16: gate and up of the same output element.

    Store: a consumer warpgroup transposes `store_tokens` tokens at a time through its own shared memory (stmatrix.trans),
    then stores 16 bytes a thread along the features. Rows past the tile's last are masked.
    """

    def __init__(self, spec: GemmSpec):
        config = spec.config
        self.epilogue = spec.epilogue
        self.gated = spec.epilogue.accumulators == 2
        self.tile_features = config.tile_features
        self.tile_outputs = config.tile_features // spec.epilogue.accumulators
        self.token_widths = config.token_widths
        self.token_box = config.token_box
        self.stage_tokens = config.stage_tokens
        self.cluster = config.cluster
        self.ping_pong = config.ping_pong
        self.stages = config.stages(spec.epilogue)
        self.threads = WARPGROUP * (1 + CONSUMERS)
        self.sharers = 1 if config.ping_pong else CONSUMERS  # warpgroups that work on one tile
        self.blocks = config.consumer_blocks
        self.block_outputs = 64 // spec.epilogue.accumulators
        self.store_tokens = config.store_tokens
        self.store_pitch = self.block_outputs + STORE_PAD

    @cute.jit
    def __call__(
        self,
        rows_MK: cute.Tensor,
        first_ENK: cute.Tensor,
        second_ENK: cute.Tensor | None,
        offsets_E1: cute.Tensor,
        row_tensors: tuple | None,
        row_index_M: cute.Tensor | None,
        out_MN: cute.Tensor,
        sm_count: Int32,
        stream,
    ):
        """Launches the kernel.

        Args:
            rows_MK: rows grouped by expert, [M, K], last dimension contiguous.
            first_ENK: weights [E, N, K]; with two accumulators the gate's.
            second_ENK: the up weights, same shape and strides; None with one accumulator.
            offsets_E1: int32 [E + 1], first row of each expert, then their number.
            row_tensors: fp32 [M] each, the epilogue's tensors; None where it has none.
            row_index_M: int32 [M], where each row is stored; None stores row r at row r.
            out_MN: output rows [.., N].
            sm_count: multiprocessors of the device.
        """
        self.dtype = rows_MK.element_type
        weights_layout, rows_layout = self._stage_layouts()
        swap = Boolean(False)
        if cutlass.const_expr(self.gated):
            weights, swap = self._interleave(first_ENK, second_ENK)
        else:
            experts, features, reduction = first_ENK.shape
            stride = first_ENK.stride
            weights = cute.make_tensor(
                first_ENK.iterator,
                cute.make_layout((features, reduction, experts), stride=(stride[1], stride[2], stride[0])),
            )
        tma_weights, tma_weights_NKE = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            weights,
            cute.slice_(weights_layout, (None, None, 0)),
            (self.tile_features, REDUCTION_TILE),
        )
        rows_op = (
            cpasync.CopyBulkTensorTileG2SOp()
            if cutlass.const_expr(self.cluster == 1)
            else cpasync.CopyBulkTensorTileG2SMulticastOp()
        )
        # num_multicast stays 1: a CTA loads whole boxes, alternating with its peer, and each box goes to both.
        tma_rows, tma_rows_MK = cpasync.make_tiled_tma_atom(
            rows_op,
            rows_MK,
            cute.slice_(rows_layout, (None, None, 0, 0)),
            (self.token_box, REDUCTION_TILE),
        )
        clusters = sm_count // self.cluster
        self.kernel(
            tma_weights,
            tma_weights_NKE,
            tma_rows,
            tma_rows_MK,
            offsets_E1,
            () if row_tensors is None else row_tensors,
            row_index_M,
            out_MN,
            swap,
            weights_layout,
            rows_layout,
        ).launch(
            grid=(clusters * self.cluster, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    def _stage_layouts(self):
        """Shared-memory layouts: weights (features, K, stages) and tokens (box, K, boxes, stages), 128-byte swizzle."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        weights = cute.tile_to_shape(atom, (self.tile_features, REDUCTION_TILE, self.stages), order=(0, 1, 2))
        boxes = self.stage_tokens // self.token_box
        tokens = cute.tile_to_shape(atom, (self.token_box, REDUCTION_TILE, boxes, self.stages), order=(0, 1, 2, 3))
        return weights, tokens

    @cute.jit
    def _interleave(self, gate_EIK: cute.Tensor, up_EIK: cute.Tensor):
        """Gate and up as one tensor ((8, 2, I/8), K, E) based at the lower of the two, and whether that is the up."""
        experts, outputs, reduction = gate_EIK.shape
        expert_stride, row_stride, _ = gate_EIK.stride
        gate_address = gate_EIK.iterator.toint()
        up_address = up_EIK.iterator.toint()
        swap = up_address < gate_address
        low = cutlass.min(gate_address, up_address)
        high = cutlass.max(gate_address, up_address)
        # A difference of 16-byte aligned addresses: the assumption that the TMA's stride needs.
        to_second = cute.assume((high - low) // (self.dtype.width // 8), divby=VECTOR)
        base = cute.make_ptr(self.dtype, low, cute.AddressSpace.gmem, assumed_align=16)
        layout = cute.make_layout(
            ((8, 2, outputs // 8), reduction, experts),
            stride=((row_stride, to_second, row_stride * 8), 1, expert_stride),
        )
        return cute.make_tensor(base, layout), swap

    @cute.kernel
    def kernel(
        self,
        tma_weights: cute.CopyAtom,
        weights_NKE: cute.Tensor,
        tma_rows: cute.CopyAtom,
        rows_MK: cute.Tensor,
        offsets_E1: cute.Tensor,
        row_tensors: tuple,
        row_index_M: cute.Tensor | None,
        out_MN: cute.Tensor,
        swap: Boolean,
        weights_layout: cute.ComposedLayout,
        rows_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)

        smem = SmemAllocator()
        s_weights = smem.allocate_tensor(
            self.dtype, weights_layout.outer, byte_alignment=ALIGNMENT, swizzle=weights_layout.inner
        )
        s_rows = smem.allocate_tensor(
            self.dtype, rows_layout.outer, byte_alignment=ALIGNMENT, swizzle=rows_layout.inner
        )
        store_rows = 2 * CONSUMERS * self.store_tokens
        s_store = smem.allocate_array(self.dtype, store_rows * self.store_pitch, byte_alignment=16)
        row_layout = cute.make_layout((self.stage_tokens, CONSUMERS))
        s_row_values = [smem.allocate_tensor(Float32, row_layout, byte_alignment=16) for _ in row_tensors]
        s_row_index = None
        if cutlass.const_expr(row_index_M is not None):
            s_row_index = smem.allocate_tensor(Int32, row_layout, byte_alignment=16)
        s_offsets = smem.allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS + 1), byte_alignment=16)
        s_tile_starts = smem.allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS + 1), byte_alignment=16)
        full = smem.allocate_array(Int64, self.stages)
        empty = smem.allocate_array(Int64, self.stages)

        if warp == 0:
            cpasync.prefetch_descriptor(tma_weights)
            cpasync.prefetch_descriptor(tma_rows)
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + s, 1)
                    cute.arch.mbarrier_init(empty + s, self.sharers * 4 * self.cluster)
            cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        experts = cute.size(offsets_E1) - 1
        for i in cutlass.range(thread, experts + 1, self.threads):
            s_offsets[i] = offsets_E1[i]
        cute.arch.sync_threads()
        for i in cutlass.range(thread, experts, self.threads):
            s_tile_starts[i] = tile_scheduler.count_token_tiles(s_offsets[i + 1] - s_offsets[i], self.token_widths[-1])
        cute.arch.sync_threads()
        if warp == 0:
            tile_scheduler.prefix_sum_by_warp(s_tile_starts, experts, cute.arch.lane_idx())
        cute.arch.sync_threads()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

        feature_tiles = cute.ceil_div(cute.size(weights_NKE, mode=[0]), self.tile_features * self.cluster)
        reduction_tiles = cute.ceil_div(cute.size(weights_NKE, mode=[1]), REDUCTION_TILE)
        work = block // self.cluster
        work_step = grid // self.cluster
        work_end = s_tile_starts[experts] * feature_tiles
        stage = Int32(0)
        phase = Int32(0)

        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                while work < work_end:
                    expert, feature_tile, first_row, tokens = tile_scheduler.locate_tile(
                        work, feature_tiles, experts, s_offsets, s_tile_starts
                    )
                    g_weights = cute.local_tile(
                        weights_NKE,
                        (self.tile_features, REDUCTION_TILE),
                        (feature_tile * self.cluster + rank, None, expert),
                    )
                    g_rows = cute.local_tile(
                        cute.domain_offset((first_row, 0), rows_MK), (self.token_box, REDUCTION_TILE), (None, None)
                    )
                    stage, phase = self._load_tile(
                        tma_weights,
                        g_weights,
                        s_weights,
                        tma_rows,
                        g_rows,
                        s_rows,
                        tokens,
                        rank,
                        full,
                        empty,
                        stage,
                        phase,
                    )
                    work += work_step
                # A CTA must not leave while its peer may still write to it or arrive on its barriers.
                if cutlass.const_expr(self.cluster > 1):
                    for _ in cutlass.range(self.stages):
                        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                        stage, phase = self._advance(stage, phase)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = warpgroup_index - 1
            if cutlass.const_expr(self.ping_pong):
                work += consumer * work_step
                work_step *= CONSUMERS
                if consumer == 1:
                    stage, phase = self._skip(stage, phase, reduction_tiles)
                    self._pass_turn(consumer)
            while work < work_end:
                _, feature_tile, first_row, tokens = tile_scheduler.locate_tile(
                    work, feature_tiles, experts, s_offsets, s_tile_starts
                )
                first_output = (feature_tile * self.cluster + rank) * self.tile_outputs
                # One branch for each compiled width: the WGMMA's N is part of the instruction.
                for i in cutlass.range_constexpr(len(self.token_widths)):
                    narrower = 0 if i == 0 else self.token_widths[i - 1]
                    if tokens > narrower and tokens <= self.token_widths[i]:
                        stage, phase = self._consume_tile(
                            self.token_widths[i], s_weights, s_rows, s_store, s_row_values, s_row_index,
                            row_tensors, row_index_M, out_MN, first_row, tokens, first_output, consumer,
                            reduction_tiles, swap, full, empty, stage, phase,
                        )  # fmt: skip
                if cutlass.const_expr(self.ping_pong):
                    stage, phase = self._skip(stage, phase, reduction_tiles)
                work += work_step

    @cute.jit
    def _load_tile(
        self,
        tma_weights: cute.CopyAtom,
        g_weights: cute.Tensor,
        s_weights: cute.Tensor,
        tma_rows: cute.CopyAtom,
        g_rows: cute.Tensor,
        s_rows: cute.Tensor,
        tokens: Int32,
        rank: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        stage: Int32,
        phase: Int32,
    ):
        """Producer: fills one stage for each reduction tile. g_weights (features, k, k tiles), g_rows (box, k, boxes, k tiles)."""
        one_cta = cute.make_layout(1)
        to_weights, from_weights = cpasync.tma_partition(
            tma_weights, 0, one_cta, cute.group_modes(s_weights, 0, 2), cute.group_modes(g_weights, 0, 2)
        )
        to_rows, from_rows = cpasync.tma_partition(
            tma_rows, 0, one_cta, cute.group_modes(s_rows, 0, 2), cute.group_modes(g_rows, 0, 2)
        )
        boxes = cute.ceil_div(tokens, self.token_box)
        element_bytes = self.dtype.width // 8
        stage_bytes = (self.tile_features + boxes * self.token_box) * (REDUCTION_TILE * element_bytes)
        for k in cutlass.range(cute.size(from_weights, mode=[1])):
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, stage_bytes)
            cute.copy(tma_weights, from_weights[None, k], to_weights[None, stage], tma_bar_ptr=full + stage)
            for box in cutlass.range(rank, boxes, self.cluster):
                if cutlass.const_expr(self.cluster > 1):
                    cute.copy(
                        tma_rows,
                        from_rows[None, box, k],
                        to_rows[None, box, stage],
                        tma_bar_ptr=full + stage,
                        mcast_mask=cutlass.Int16((1 << self.cluster) - 1),
                    )
                else:
                    cute.copy(tma_rows, from_rows[None, box, k], to_rows[None, box, stage], tma_bar_ptr=full + stage)
            stage, phase = self._advance(stage, phase)
        return stage, phase

    @cute.jit
    def _consume_tile(
        self,
        width: cutlass.Constexpr[int],
        s_weights: cute.Tensor,
        s_rows: cute.Tensor,
        s_store: cute.Pointer,
        s_row_values: list,
        s_row_index: cute.Tensor | None,
        row_tensors: tuple,
        row_index_M: cute.Tensor | None,
        out_MN: cute.Tensor,
        first_row: Int32,
        tokens: Int32,
        first_output: Int32,
        consumer: Int32,
        reduction_tiles: Int32,
        swap: Boolean,
        full: cute.Pointer,
        empty: cute.Pointer,
        stage: Int32,
        phase: Int32,
    ):
        """Consumer: one tile of up to `width` tokens, multiplied and stored."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        per_thread = cute.ceil_div(width, WARPGROUP)
        # The rows' values are asked for before the multiplication, which hides their latency.
        values = [cute.make_rmem_tensor(per_thread, Float32) for _ in row_tensors]
        index = cute.make_rmem_tensor(per_thread, Int32)
        for i in cutlass.range_constexpr(per_thread):
            token = thread + i * WARPGROUP
            if token < tokens:
                for t in cutlass.range_constexpr(len(row_tensors)):
                    values[t][i] = row_tensors[t][first_row + token]
                if cutlass.const_expr(row_index_M is not None):
                    index[i] = row_index_M[first_row + token]

        accumulator, stage, phase = self._multiply(
            width, s_weights, s_rows, consumer, reduction_tiles, full, empty, stage, phase
        )

        barrier = FIRST_STORE_BARRIER + consumer
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        for i in cutlass.range_constexpr(per_thread):
            token = thread + i * WARPGROUP
            if token < tokens:
                for t in cutlass.range_constexpr(len(row_tensors)):
                    s_row_values[t][token, consumer] = values[t][i]
                if cutlass.const_expr(row_index_M is not None):
                    s_row_index[token, consumer] = index[i]
        if cutlass.const_expr(len(row_tensors) > 0 or row_index_M is not None):
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)

        for chunk in cutlass.range_constexpr(cute.ceil_div(width, self.store_tokens)):
            if chunk * self.store_tokens < tokens:
                chunk_tokens = min(self.store_tokens, width - chunk * self.store_tokens)
                for block in cutlass.range_constexpr(self.blocks):
                    # Two buffers in turn: whoever is past this barrier has read the other one.
                    buffer = (chunk * self.blocks + block) % 2 + 2 * consumer
                    s_chunk = s_store + buffer * (self.store_tokens * self.store_pitch)
                    for token in cutlass.range_constexpr(0, chunk_tokens, 16):
                        self._transpose(
                            accumulator, block, chunk * self.store_tokens + token, min(16, chunk_tokens - token), token,
                            s_chunk, s_row_values, consumer, swap,
                        )  # fmt: skip
                    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
                    block_output = block * self.block_outputs * self.sharers
                    if cutlass.const_expr(not self.ping_pong):
                        block_output += consumer * self.block_outputs
                    self._store_chunk(
                        s_chunk, s_row_index, out_MN, chunk * self.store_tokens, chunk_tokens, first_row, tokens,
                        first_output + block_output, consumer,
                    )  # fmt: skip
        return stage, phase

    @cute.jit
    def _multiply(
        self,
        width: cutlass.Constexpr[int],
        s_weights: cute.Tensor,
        s_rows: cute.Tensor,
        consumer: Int32,
        reduction_tiles: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        stage: Int32,
        phase: Int32,
    ):
        """Mainloop. Returns the accumulator as (c, r, j, block): the value at row lane / 4 + 8 * r + 16 * warp of that 64-row
        block of weights, and token 2 * (lane % 4) + c + 8 * j."""
        instructions = 1 if width <= 256 else 2
        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            (self.sharers, 1, 1),
            tiler_mn=(64, width // instructions),
        )
        thr_mma = tiled_mma.get_slice(0 if self.ping_pong else consumer * WARPGROUP)
        # The first `width` rows of a stage: 8-row swizzle atoms, a stage apart.
        atom_elements = 8 * REDUCTION_TILE
        narrow = cute.make_layout(
            ((8, width // 8), REDUCTION_TILE, self.stages),
            stride=((REDUCTION_TILE, atom_elements), 1, self.stage_tokens * REDUCTION_TILE),
        )
        a = tiled_mma.make_fragment_A(thr_mma.partition_A(s_weights))
        b = tiled_mma.make_fragment_B(thr_mma.partition_B(cute.make_tensor(s_rows.iterator, narrow)))
        accumulator = cute.make_rmem_tensor(tiled_mma.partition_shape_C((self.tile_features, width)), Float32)
        accumulator.fill(0.0)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        previous = stage
        if cutlass.const_expr(self.ping_pong):
            # In turns: a warpgroup that waited for a stage while it is two fills behind would mistake the fill's parity.
            cute.arch.barrier(barrier_id=FIRST_TURN_BARRIER + consumer, number_of_threads=CONSUMERS * WARPGROUP)
        for k in cutlass.range(reduction_tiles):
            cute.arch.mbarrier_wait(full + stage, phase)
            for block in cutlass.range_constexpr(REDUCTION_TILE // WGMMA_K):
                cute.gemm(tiled_mma, accumulator, a[None, None, block, stage], b[None, None, block, stage], accumulator)
            warpgroup.commit_group()
            if k > 0:
                warpgroup.wait_group(1)
                self._release(empty, previous)
            previous = stage
            stage, phase = self._advance(stage, phase)
        if cutlass.const_expr(self.ping_pong):
            self._pass_turn(consumer)
        warpgroup.wait_group(0)
        self._release(empty, previous)
        # From ((c, r, j), blocks, instructions), compact, to (c, r, (j, instructions), blocks).
        j = width // instructions // 8
        layout = cute.make_layout(
            (2, 2, (j, instructions), self.blocks), stride=(1, 2, (4, 4 * j * self.blocks), 4 * j)
        )
        return cute.make_tensor(accumulator.iterator, layout), stage, phase

    @cute.jit
    def _release(self, empty: cute.Pointer, stage: Int32):
        """A consumer warp hands a stage back, to every CTA of the cluster that writes to it."""
        lane = cute.arch.lane_idx()
        if lane < self.cluster:
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.mbarrier_arrive(empty + stage, lane)
            else:
                cute.arch.mbarrier_arrive(empty + stage)

    @cute.jit
    def _transpose(
        self,
        accumulator: cute.Tensor,
        block: cutlass.Constexpr[int],
        first_token: cutlass.Constexpr[int],
        tokens: cutlass.Constexpr[int],
        store_token: cutlass.Constexpr[int],
        s_chunk: cute.Pointer,
        s_row_values: list,
        consumer: Int32,
        swap: Boolean,
    ):
        """Applies the epilogue to 8 or 16 tokens of a 64-row block; writes them token-major to `s_chunk` from row `store_token`."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx() % 4
        halves = 1 if self.gated else 2  # 8-feature blocks that a warp holds for each token
        matrices = tokens // 8 * halves
        packed = cute.make_rmem_tensor((2 * matrices,), self.dtype)
        for j in cutlass.range_constexpr(tokens // 8):
            for c in cutlass.range_constexpr(2):
                token = first_token + 8 * j + 2 * (lane % 4) + c
                tensors = {t.name: s_row_values[n][token, consumer] for n, t in enumerate(self.epilogue.tensors)}
                values = accumulator[c, None, first_token // 8 + j, block]
                if cutlass.const_expr(self.gated):
                    gate = values[1] if swap else values[0]
                    up = values[0] if swap else values[1]
                    packed[2 * j + c] = self.epilogue.math(DslOps, gate, up, **tensors).to(self.dtype)
                else:
                    for r in cutlass.range_constexpr(2):
                        value = self.epilogue.math(DslOps, values[r], **tensors)
                        packed[4 * j + 2 * r + c] = value.to(self.dtype)
        # Lane l gives the address of row l % 8 of matrix l / 8: token l % 8, and the 8 features of that matrix.
        matrix = lane // 8
        row = store_token + lane % 8 + 8 * (matrix // halves % (tokens // 8))
        column = 8 * halves * warp + 8 * (matrix % halves)
        address = (s_chunk + (row * self.store_pitch + column)).align(16)
        atom = cute.make_copy_atom(warp_copy.StMatrix8x8x16bOp(transpose=True, num_matrices=matrices), self.dtype)
        cute.copy_atom_call(atom, packed, cute.make_tensor(address, cute.make_layout((VECTOR,))))

    @cute.jit
    def _store_chunk(
        self,
        s_chunk: cute.Pointer,
        s_row_index: cute.Tensor | None,
        out_MN: cute.Tensor,
        chunk_begin: cutlass.Constexpr[int],
        chunk_tokens: cutlass.Constexpr[int],
        first_row: Int32,
        tokens: Int32,
        first_output: Int32,
        consumer: Int32,
    ):
        """Stores the token rows of one block's outputs, 16 bytes a thread."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        vectors = self.block_outputs // VECTOR
        for i in cutlass.range_constexpr(cute.ceil_div(chunk_tokens * vectors, WARPGROUP)):
            position = thread + i * WARPGROUP
            row = position // vectors
            output = first_output + position % vectors * VECTOR
            token = chunk_begin + row
            if row < chunk_tokens and token < tokens and output < cute.size(out_MN, mode=[1]):
                out_row = first_row + token
                if cutlass.const_expr(s_row_index is not None):
                    out_row = s_row_index[token, consumer]
                address = (s_chunk + (row * self.store_pitch + position % vectors * VECTOR)).align(16)
                vector = cute.make_tensor(address, cute.make_layout((1, VECTOR))).load()
                cute.local_tile(out_MN, (1, VECTOR), (Int64(out_row), output // VECTOR)).store(vector)

    @cute.jit
    def _advance(self, stage: Int32, phase: Int32):
        """The next stage of the ring; the phase flips when it wraps."""
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

    @cute.jit
    def _skip(self, stage: Int32, phase: Int32, count: Int32):
        """The stage `count` further on: what the other warpgroup consumes in ping-pong."""
        total = stage + count
        return total % self.stages, phase ^ (total // self.stages % 2)

    @cute.jit
    def _pass_turn(self, consumer: Int32):
        """Ping-pong: lets the other consumer warpgroup multiply."""
        cute.arch.barrier_arrive(barrier_id=FIRST_TURN_BARRIER + 1 - consumer, number_of_threads=CONSUMERS * WARPGROUP)
