"""Grouped GEMM for sm_90a: out[r] = epilogue(rows_MK[r] @ weights_ENK[e]^T) for the rows r of each expert e.

Where the configuration gathers, row r of the product is rows_MK[source_index_M[r]] instead: tokens are taken from where
they lie.

Weights stand on the WGMMA M side and tokens on N (any multiple of 8), so each weight byte is read once
when an expert's rows fit one tile, padding is a few tokens, and one kernel class serves decode and prefill by its
token width.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from cutlass_moe.config import CONSUMERS, LONG_REDUCTION, MAX_EXPERTS, PRODUCER_WARPS, REDUCTION_TILE, GemmSpec
from cutlass_moe.kernels import l2_policy, tile_scheduler, work_queue
from cutlass_moe.kernels.row_loader import RowLoader
from cutlass_moe.kernels.tile_store import FIRST_BARRIER, VECTOR, WARPGROUP, TileStore

PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
WGMMA_K = 16
ALIGNMENT = 1024  # of a swizzled shared-memory tile
SCHEDULER_WARP = PRODUCER_WARPS - 1
FIRST_TURN_BARRIER = FIRST_BARRIER + CONSUMERS  # named barriers, one for each consumer warpgroup


class GroupedGemm:
    """One kernel: a dtype, a tile configuration and an epilogue.

    Warp roles (warpgroups of 128 threads):

    | warpgroup | registers | does |
    |---|---|---|
    | 0 (its warp 0) | 40 | producer: waits on `empty[stage]`, loads a weight tile and the tile's token boxes by TMA; |
    | | | with `gather` all warps but the scheduler load, each its share of the tile's rows, one TMA a row |
    | 0 (its warp 3) | 40 | scheduler, in the first CTA of a cluster: draws the cluster's next tiles |
    | 1 and 2 | 232 | consumers: wait on `full[stage]`, WGMMA, then `TileStore`. Cooperative: half of each tile's |
    | | | weight rows each; ping-pong: every other tile, so that one's ending runs under the other's WGMMA |

    Pipelines: one ring of `stages` shared-memory stages. `full[s]` counts the arrivals of the warps that load, also of
    one that has no row in the tile (else it could fall two fills behind and mistake a parity), and the TMA bytes;
    `empty[s]` counts one arrival of each warp that reads the stage in each CTA of the cluster, since the token tile
    is multicast and a producer overwrites the stage of its peer too.

    Persistent: cluster c starts with work number c of `tile_scheduler` and then takes what comes next, from a counter
    in global memory. So clusters that are done early take more, and the tiles that share weights or tokens, whose
    numbers are neighbours, run side by side to the end: with numbers dealt out beforehand they drift apart, and each
    reads the same bytes from HBM again. The scheduler locates a number's tile in a table of the experts' tiles, made in
    shared memory at the start, and `WorkQueue` passes it to all roles. Which cluster computes a tile changes nothing in
    its result.

    Programmatic dependent launch: the kernel may start while the one before it runs. With `early` it reads the
    offsets, or counts them from the ids, and fills its first stages with weights before it waits for that one; see
    `__call__`.

    Gate and up (an epilogue with two accumulators): one 5-D TMA view takes 8 gate rows, the 8 matching up rows, and
    so on.
    """

    def __init__(self, spec: GemmSpec):
        config = spec.config
        self.gated = spec.epilogue.accumulators == 2
        self.tile_features = config.tile_features
        self.tile_outputs = config.tile_features // spec.epilogue.accumulators
        self.token_widths = config.token_widths
        self.token_box = config.token_box
        self.stage_tokens = config.stage_tokens
        self.cluster = config.cluster
        self.ping_pong = config.ping_pong
        self.gather = config.gather
        self.loaders = config.loaders
        self.stages = config.stages(spec.epilogue)
        self.threads = WARPGROUP * (1 + CONSUMERS)
        self.sharers = 1 if config.ping_pong else CONSUMERS  # warpgroups that read one stage
        self.blocks = config.consumer_blocks
        self.rows = RowLoader(config)
        self.store = TileStore(spec)
        self.queue = work_queue.WorkQueue(config.cluster)

    @cute.jit
    def __call__(
        self,
        rows_MK: cute.Tensor,
        source_index_M: cute.Tensor | None,
        ids_TKW: cute.Tensor | None,
        first_ENK: cute.Tensor,
        second_ENK: cute.Tensor | None,
        offsets_E1: cute.Tensor,
        epilogue_arguments: tuple | None,
        row_index_M: cute.Tensor | None,
        out_MN: cute.Tensor,
        tile_counter_1: cute.Tensor,
        early: Boolean,
        sm_count: Int32,
        stream,
    ):
        """Launches the kernel.

        Args:
            rows_MK: rows grouped by expert, [M, K], last dimension contiguous; with `gather` [.., K] in any order.
            source_index_M: with `gather` int32 [M], the row of rows_MK that each row is; else None.
            ids_TKW: with `gather` the words of the expert ids (`kernels/slots.py`), if the offsets are to be counted
                from them, or T = 0; else None.
            first_ENK: weights [E, N, K]; with two accumulators the gate's.
            second_ENK: the up weights, same shape and strides; None with one accumulator.
            offsets_E1: int32 [E + 1], first row of each expert, then their number.
            epilogue_arguments: the epilogue's tensors, scalars (fp32) and side outputs, in this order; None where it
                has none. A side output is [rows, values, N], or fp32 [rows].
            row_index_M: int32 [M], where each row is stored; None stores row r at row r.
            out_MN: output rows [.., N].
            tile_counter_1: int32 [1], 0 when the previous kernel is complete; it counts the tiles that were drawn.
            early: the weights and the offsets, or the ids, were complete before the previous kernel on the stream
                let this one start. It is one of this library's: those do when their own predecessor is complete.
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
        tma_rows, tma_rows_MK = self.rows.make_tma(rows_MK)
        clusters = sm_count // self.cluster
        self.kernel(
            tma_weights,
            tma_weights_NKE,
            tma_rows,
            tma_rows_MK,
            source_index_M,
            ids_TKW,
            offsets_E1,
            () if epilogue_arguments is None else epilogue_arguments,
            row_index_M,
            out_MN,
            tile_counter_1,
            early,
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
        """Shared-memory layouts, 128-byte swizzle: weights (features, K, stages) and tokens (tokens, K, stages)."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        weights = cute.tile_to_shape(atom, (self.tile_features, REDUCTION_TILE, self.stages), order=(0, 1, 2))
        rows = cute.tile_to_shape(atom, (self.stage_tokens, REDUCTION_TILE, self.stages), order=(0, 1, 2))
        return weights, rows

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
        source_index_M: cute.Tensor | None,
        ids_TKW: cute.Tensor | None,
        offsets_E1: cute.Tensor,
        epilogue_arguments: tuple,
        row_index_M: cute.Tensor | None,
        out_MN: cute.Tensor,
        tile_counter_1: cute.Tensor,
        early: Boolean,
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
        self.s_weights = smem.allocate_tensor(
            self.dtype, weights_layout.outer, byte_alignment=ALIGNMENT, swizzle=weights_layout.inner
        )
        self.s_rows = smem.allocate_tensor(
            self.dtype, rows_layout.outer, byte_alignment=ALIGNMENT, swizzle=rows_layout.inner
        )
        reduction = cute.size(weights_NKE, mode=[1])
        self.store.bind(smem, epilogue_arguments, row_index_M, out_MN, reduction, swap)
        s_offsets, s_tile_starts, s_warps, s_tile = (
            smem.allocate_tensor(Int32, cute.make_layout(count), byte_alignment=16)
            for count in (MAX_EXPERTS + 1, MAX_EXPERTS + 1, self.threads // 32, 4)
        )
        self.full = smem.allocate_array(Int64, self.stages)
        self.empty = smem.allocate_array(Int64, self.stages)
        self.queue.bind(smem, tile_counter_1)
        self.rows.bind(tma_rows, rows_MK, source_index_M, self.s_rows, self.full, rank)
        self.rank = rank
        loaders = Int32(1)  # of this CTA
        if cutlass.const_expr(self.gather):
            loaders = PRODUCER_WARPS - 1 + rank

        if warp == 0:
            cpasync.prefetch_descriptor(tma_weights)
            cpasync.prefetch_descriptor(tma_rows)
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(self.full + s, loaders)
                    cute.arch.mbarrier_init(self.empty + s, self.sharers * 4 * self.cluster)
                self.queue.initialize(self.loaders + 4 * CONSUMERS * self.cluster)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()  # the fence behind the barriers' initialisation is release enough
        if not early:
            cute.arch.griddepcontrol_wait()

        feature_tiles = cute.ceil_div(cute.size(weights_NKE, mode=[0]), self.tile_features * self.cluster)
        self.expert_fills_gpu = feature_tiles >= grid // self.cluster
        self.scatters_much = Boolean(False)
        if cutlass.const_expr(row_index_M is not None):
            self.scatters_much = l2_policy.bytes_of(out_MN) >= l2_policy.MUCH_BYTES
        self.reduction_tiles = cute.ceil_div(reduction, REDUCTION_TILE)
        tile_scheduler.fill_tables(
            offsets_E1,
            ids_TKW,
            self.threads,
            self.token_widths[-1],
            block // self.cluster,
            feature_tiles,
            s_offsets,
            s_tile_starts,
            s_warps,
            s_tile,
        )
        # Of a tile: expert, place along the weight rows (of a whole cluster), first row, number of rows.
        expert, feature_tile, first_row, tokens = work_queue.read_tile(s_tile)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        stage = Int32(0)
        phase = Int32(0)
        tile_phase = Int32(0)

        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            # Where the reduction is long, and many experts have several token tiles.
            experts = cute.size(offsets_E1) - 1
            token_tiles = tile_scheduler.all_tiles(s_tile_starts[experts])
            together = self.reduction_tiles >= LONG_REDUCTION and token_tiles > experts
            if warp == SCHEDULER_WARP and rank == 0:
                if early:
                    cute.arch.griddepcontrol_wait()  # the counter may be what the kernel before sets
                while tokens > 0:
                    work = self.queue.draw(grid // self.cluster, tile_phase, together, token_tiles * feature_tiles)
                    expert, feature_tile, first_row, tokens = tile_scheduler.locate_tile(
                        work, feature_tiles, experts, s_offsets, s_tile_starts
                    )
                    self.queue.hand_out((expert, feature_tile, first_row, tokens), tile_phase)
                    tile_phase ^= 1
                if cutlass.const_expr(self.ping_pong):
                    # One more than tiles: a warpgroup always takes two at a time.
                    self.queue.hand_out((expert, feature_tile, first_row, tokens), tile_phase)
            if warp < loaders:
                primed = Int32(0)  # stages of the first tile that hold their weights already
                if early:
                    if warp == 0 and tokens > 0:
                        primed = cutlass.min(self.reduction_tiles, Int32(self.stages))
                        to_weights, from_weights = self._partition_weights(
                            tma_weights, weights_NKE, feature_tile, expert
                        )
                        policy = self._weights_policy(s_offsets, expert, tokens)
                        for k in cutlass.range(primed):
                            self._load_weights(tma_weights, from_weights, to_weights, policy, tokens, k, k)
                    cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
                while tokens > 0:
                    to_weights, from_weights = self._partition_weights(tma_weights, weights_NKE, feature_tile, expert)
                    stage, phase = self._load_tile(
                        tma_weights,
                        from_weights,
                        to_weights,
                        self._weights_policy(s_offsets, expert, tokens),
                        first_row,
                        tokens,
                        primed,
                        stage,
                        phase,
                    )
                    primed = Int32(0)
                    if together and warp == 0:
                        self.queue.ask()
                    (expert, feature_tile, first_row, tokens), tile_phase = self.queue.take(tile_phase)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if early:
                cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            consumer = warpgroup_index - 1
            if cutlass.const_expr(self.ping_pong):
                if consumer == 1:
                    stage, phase = self._skip(stage, phase)
                    self._pass_turn(consumer)
                    (expert, feature_tile, first_row, tokens), tile_phase = self.queue.take(tile_phase)
            while tokens > 0:
                first_output = (feature_tile * self.cluster + rank) * self.tile_outputs
                # One branch for each compiled width: the WGMMA's N is part of the instruction.
                for i in cutlass.range_constexpr(len(self.token_widths)):
                    narrower = 0 if i == 0 else self.token_widths[i - 1]
                    if tokens > narrower and tokens <= self.token_widths[i]:
                        width = self.token_widths[i]
                        fetched = self.store.fetch(width, expert, first_row, tokens, first_output, consumer)
                        accumulator, stage, phase = self._multiply(width, consumer, stage, phase)
                        if cutlass.const_expr(self.ping_pong):
                            # The other warpgroup's tile, which is not this one's. Now and not behind the stores: the
                            # scheduler waits for it before it draws the next.
                            tile_phase = self.queue.skip(tile_phase)
                        self.store.store(width, accumulator, fetched, first_row, tokens, first_output, consumer)
                if cutlass.const_expr(self.ping_pong):
                    stage, phase = self._skip(stage, phase)
                (expert, feature_tile, first_row, tokens), tile_phase = self.queue.take(tile_phase)
        # A CTA must not leave while its peer may still write to it or arrive on its barriers.
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def _partition_weights(
        self, tma_weights: cute.CopyAtom, weights_NKE: cute.Tensor, feature_tile: Int32, expert: Int32
    ):
        """This CTA's weight tile as TMA views: (box, stages) in shared memory, (box, reduction tiles) in global
        memory."""
        tile = cute.local_tile(
            weights_NKE,
            (self.tile_features, REDUCTION_TILE),
            (feature_tile * self.cluster + self.rank, None, expert),
        )
        return cpasync.tma_partition(
            tma_weights,
            0,
            cute.make_layout(1),
            cute.group_modes(self.s_weights, 0, 2),
            cute.group_modes(tile, 0, 2),
        )

    @cute.jit
    def _weights_policy(self, offsets_E1: cute.Tensor, expert: Int32, tokens: Int32) -> Int64:
        rows = offsets_E1[expert + 1] - offsets_E1[expert]
        return l2_policy.of_weights(rows, tokens, self.expert_fills_gpu, self.scatters_much)

    @cute.jit
    def _load_weights(
        self,
        tma_weights: cute.CopyAtom,
        from_weights: cute.Tensor,
        to_weights: cute.Tensor,
        policy: Int64,
        tokens: Int32,
        k: Int32,
        stage: Int32,
    ):
        """Announces all bytes of a stage and loads its weights."""
        boxes = cute.ceil_div(tokens, self.token_box)
        stage_bytes = (self.tile_features + boxes * self.token_box) * (REDUCTION_TILE * (self.dtype.width // 8))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + stage, stage_bytes)
        cute.copy(
            tma_weights,
            from_weights[None, k],
            to_weights[None, stage],
            tma_bar_ptr=self.full + stage,
            cache_policy=policy,
        )

    @cute.jit
    def _load_tile(
        self,
        tma_weights: cute.CopyAtom,
        from_weights: cute.Tensor,
        to_weights: cute.Tensor,
        policy: Int64,
        first_row: Int32,
        tokens: Int32,
        primed: Int32,
        stage: Int32,
        phase: Int32,
    ):
        """Producer: one stage for each reduction tile. Warp 0 loads the weights; rows load all that load."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = self.rows.open_tile(first_row, tokens)
        for k in cutlass.range(self.reduction_tiles):
            if k >= primed:
                cute.arch.mbarrier_wait(self.empty + stage, phase ^ 1)
                if warp == 0:
                    self._load_weights(tma_weights, from_weights, to_weights, policy, tokens, k, stage)
                elif cutlass.const_expr(self.gather):
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(self.full + stage)
            self.rows.load(tile, k, stage)
            stage, phase = self._advance(stage, phase)
        return stage, phase

    @cute.jit
    def _multiply(self, width: cutlass.Constexpr[int], consumer: Int32, stage: Int32, phase: Int32):
        """Mainloop. Returns the accumulator in the form that `TileStore.store` takes, and the ring's next place."""
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
        a = tiled_mma.make_fragment_A(thr_mma.partition_A(self.s_weights))
        b = tiled_mma.make_fragment_B(thr_mma.partition_B(cute.make_tensor(self.s_rows.iterator, narrow)))
        accumulator = cute.make_rmem_tensor(tiled_mma.partition_shape_C((self.tile_features, width)), Float32)
        accumulator.fill(0.0)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        previous = stage
        if cutlass.const_expr(self.ping_pong):
            # In turns: a warpgroup that waited for a stage while it is two fills behind would mistake the fill's
            # parity.
            cute.arch.barrier(barrier_id=FIRST_TURN_BARRIER + consumer, number_of_threads=CONSUMERS * WARPGROUP)
        for k in cutlass.range(self.reduction_tiles):
            cute.arch.mbarrier_wait(self.full + stage, phase)
            for block in cutlass.range_constexpr(REDUCTION_TILE // WGMMA_K):
                cute.gemm(tiled_mma, accumulator, a[None, None, block, stage], b[None, None, block, stage], accumulator)
            warpgroup.commit_group()
            if k > 0:
                warpgroup.wait_group(1)
                self._release(previous)
            previous = stage
            stage, phase = self._advance(stage, phase)
        if cutlass.const_expr(self.ping_pong):
            self._pass_turn(consumer)
        warpgroup.wait_group(0)
        self._release(previous)
        # From ((c, r, j), blocks, instructions), compact, to (c, r, (j, instructions), blocks).
        j = width // instructions // 8
        layout = cute.make_layout(
            (2, 2, (j, instructions), self.blocks), stride=(1, 2, (4, 4 * j * self.blocks), 4 * j)
        )
        return cute.make_tensor(accumulator.iterator, layout), stage, phase

    @cute.jit
    def _release(self, stage: Int32):
        """A consumer warp hands a stage back, to every CTA of the cluster that writes to it."""
        lane = cute.arch.lane_idx()
        if lane < self.cluster:
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.mbarrier_arrive(self.empty + stage, lane)
            else:
                cute.arch.mbarrier_arrive(self.empty + stage)

    @cute.jit
    def _advance(self, stage: Int32, phase: Int32):
        """The next stage of the ring; the phase flips when it wraps."""
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

    @cute.jit
    def _skip(self, stage: Int32, phase: Int32):
        """Ping-pong: the ring's place behind a tile of the other warpgroup."""
        total = stage + self.reduction_tiles
        return total % self.stages, phase ^ (total // self.stages % 2)

    @cute.jit
    def _pass_turn(self, consumer: Int32):
        """Ping-pong: lets the other consumer warpgroup multiply."""
        cute.arch.barrier_arrive(barrier_id=FIRST_TURN_BARRIER + 1 - consumer, number_of_threads=CONSUMERS * WARPGROUP)
