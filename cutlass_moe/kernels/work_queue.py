"""Which tile a cluster takes next: drawn from a counter in global memory by one warp, which tells all the others."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

# Of a wave's clusters, how many must have drawn before one begins its tile. Not all: those with narrower tiles are
# early in every wave, and would idle in every wave.
QUORUM_TENTHS = 7
POLLS = 100  # at most: clusters must go on without those that have no SM. Ten are too few (trials 18)


@cute.jit
def read_tile(s_tile: cute.Tensor):
    """A tile in shared memory, as values that the compiler knows to be the warp's."""
    values = s_tile.load()
    return tuple(cute.arch.make_warp_uniform(values[i]) for i in range(4))


class WorkQueue:
    """Passes the tiles of a cluster, one at a time, from the warp that draws their numbers to every warp that works on
    them.

    A tile is four int32, which mean nothing here. They lie in `s_tile` of each CTA. `full` there counts their
    arrival; `empty`, in the cluster's first CTA, counts an arrival of each warp of the cluster that has read
    them. All sides keep the phase of the next tile.

    A number is not drawn before all have read the tile before: a number drawn long ago is as good as dealt out
    beforehand, and clusters that share weights would drift apart.

    Long tiles drift apart even so, by their widths, and clusters that read the same bytes at different times read them
    from HBM, each by itself. Those can be held together: a cluster then draws only when its last tile is loaded
    (`ask`), and begins its tile when most of its wave have drawn: the tiles that all clusters work on at a time.
    """

    def __init__(self, cluster: int):
        self.cluster = cluster

    def bind(self, smem: Any, tile_counter_1: cute.Tensor) -> None:
        """Takes the counter, int32 [1], 0 when the first number is drawn, and shared memory."""
        self.counter = tile_counter_1
        self.s_tile = smem.allocate_tensor(Int32, cute.make_layout(4), byte_alignment=16)
        self.full = smem.allocate_array(Int64, 1)
        self.empty = smem.allocate_array(Int64, 1)
        self.asked = smem.allocate_array(Int64, 1)

    @cute.jit
    def initialize(self, readers: cutlass.Constexpr[int]):
        """By one thread of each CTA: sets up the barriers for so many reading warps in the cluster."""
        cute.arch.mbarrier_init(self.full, 1)
        cute.arch.mbarrier_init(self.empty, readers)
        cute.arch.mbarrier_init(self.asked, 1)

    @cute.jit
    def draw(self, clusters: Int32, phase: Int32, together: Boolean, numbers: Int32) -> Int32:
        """Draws a number, in a warp of the first CTA, when all have read the tile before; with `together` when that CTA
        has asked for it, too, and returns when most of its wave have drawn. The first `clusters` of all `numbers` are
        not drawn: every cluster starts with its own."""
        cute.arch.mbarrier_wait(self.empty, phase ^ 1)
        if together:
            cute.arch.mbarrier_wait(self.asked, phase)
        drawn = Int32(0)
        if cute.arch.lane_idx() == 0:
            drawn = cute.arch.atomic_add(self.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        number = clusters + cute.arch.shuffle_sync(drawn, 0)
        if together:
            self._wait_for_wave(number, clusters, numbers)
        return number

    @cute.jit
    def _wait_for_wave(self, number: Int32, clusters: Int32, numbers: Int32):
        """Waits, a while at most, until most clusters of the wave of `number` have drawn. A wave that is not full does
        not wait."""
        before = number // clusters * clusters - clusters  # numbers that are drawn before the wave's first
        polls = Int32(0)
        if before + 2 * clusters <= numbers:
            polls = Int32(POLLS)
        drawn = Int32(0)
        while drawn < before + clusters * QUORUM_TENTHS // 10 and polls > 0:
            drawn = cute.arch.load(self.counter.iterator, Int32, sem="relaxed", scope="gpu")
            polls -= 1

    @cute.jit
    def ask(self):
        """By one whole warp of each CTA: its tile's loads are on the way, the next number is wanted. The first CTA's
        counts."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.asked)

    @cute.jit
    def hand_out(self, tile: tuple, phase: Int32):
        """Writes a tile to every CTA of the cluster, lane i to CTA i, when all have read the one before."""
        cute.arch.mbarrier_wait(self.empty, phase ^ 1)
        cute.arch.sync_warp()  # a lane that waited longer would take the next tile's phase for this one's
        lane = cute.arch.lane_idx()
        s_tile = self.s_tile
        if lane < self.cluster:
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.mbarrier_arrive_and_expect_tx(self.full, 16, lane)
                cute.arch.store_async_dsmem(s_tile.iterator, tile, self.full, lane)
            else:  # a CTA by itself is no cluster to write to
                for i in cutlass.range_constexpr(4):
                    s_tile[i] = tile[i]
                cute.arch.mbarrier_arrive(self.full)

    @cute.jit
    def take(self, phase: Int32):
        """Reads a tile, for a whole warp. Returns it and the phase of the one after it."""
        cute.arch.mbarrier_wait(self.full, phase)
        tile = read_tile(self.s_tile)
        self._arrive()
        return tile, phase ^ 1

    @cute.jit
    def skip(self, phase: Int32) -> Int32:
        """Lets a tile pass that is another warp's alone. Returns the phase of the one after it."""
        cute.arch.mbarrier_wait(self.full, phase)
        self._arrive()
        return phase ^ 1

    @cute.jit
    def _arrive(self):
        cute.arch.sync_warp()  # all lanes have seen the tile
        if cute.arch.lane_idx() == 0:
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.mbarrier_arrive(self.empty, 0)
            else:  # through a cluster's address it might come after the CTA has left
                cute.arch.mbarrier_arrive(self.empty)
