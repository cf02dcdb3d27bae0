"""The ending of a GEMM tile: the epilogue's math on the accumulator, the transposition to token-major, the stores."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warp as warp_copy

from cutlass_moe.config import CONSUMERS, STORE_PAD, GemmSpec
from epilogues import DslOps

WARPGROUP = 128
VECTOR = 8  # elements of one 16-byte store
FIRST_BARRIER = 1  # named barriers, one for each consumer warpgroup; 0 is sync_threads


class TileStore:
    """Stores tiles for the consumer warpgroups of `GroupedGemm`, each through shared memory of its own.

    A warpgroup holds `blocks` blocks of 64 weight rows by the tile's tokens. In the m64nNk16 accumulator a thread
    holds rows r and r + 8 of each 16: with two accumulators these are gate and up of the same output element, since
    the weights are interleaved so. `store_tokens` tokens of a block at a time are transposed (stmatrix.trans) and
    stored with 16 bytes a thread along the features. Rows past the tile's last are masked.
    """

    def __init__(self, spec: GemmSpec):
        config = spec.config
        self.epilogue = spec.epilogue
        self.gated = spec.epilogue.accumulators == 2
        self.ping_pong = config.ping_pong
        self.sharers = 1 if config.ping_pong else CONSUMERS  # warpgroups that work on one tile
        self.blocks = config.consumer_blocks
        self.block_outputs = 64 // spec.epilogue.accumulators
        self.store_tokens = config.store_tokens(spec.epilogue)
        self.store_pitch = self.block_outputs + STORE_PAD
        self.stage_tokens = config.stage_tokens

    def bind(
        self,
        smem: Any,
        row_tensors: tuple,
        row_index_M: cute.Tensor | None,
        out_MN: cute.Tensor,
        swap: Boolean,
    ) -> None:
        """Takes the kernel's tensors, once, and shared memory for them."""
        self.row_tensors = row_tensors
        self.row_index_M = row_index_M
        self.out_MN = out_MN
        self.swap = swap
        self.dtype = out_MN.element_type
        chunk = self.store_tokens * self.store_pitch
        self.s_chunks = smem.allocate_array(self.dtype, 2 * CONSUMERS * chunk, byte_alignment=16)
        layout = cute.make_layout((self.stage_tokens, CONSUMERS))
        self.s_row_values = [smem.allocate_tensor(Float32, layout, byte_alignment=16) for _ in row_tensors]
        self.s_row_index = None
        if row_index_M is not None:
            self.s_row_index = smem.allocate_tensor(Int32, layout, byte_alignment=16)

    @cute.jit
    def fetch_rows(self, width: cutlass.Constexpr[int], first_row: Int32, tokens: Int32):
        """Asks for the rows' values and places, in registers: called before the multiplication, which hides the
        latency."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        per_thread = cute.ceil_div(width, WARPGROUP)
        values = [cute.make_rmem_tensor(per_thread, Float32) for _ in self.row_tensors]
        index = cute.make_rmem_tensor(per_thread, Int32)
        for i in cutlass.range_constexpr(per_thread):
            token = thread + i * WARPGROUP
            if token < tokens:
                for t in cutlass.range_constexpr(len(self.row_tensors)):
                    values[t][i] = self.row_tensors[t][first_row + token]
                if cutlass.const_expr(self.row_index_M is not None):
                    index[i] = self.row_index_M[first_row + token]
        return values, index

    @cute.jit
    def store(
        self,
        width: cutlass.Constexpr[int],
        accumulator: cute.Tensor,
        values: list,
        index: cute.Tensor,
        first_row: Int32,
        tokens: Int32,
        first_output: Int32,
        consumer: Int32,
    ):
        """Stores a tile of up to `width` tokens.

        Args:
            accumulator: (c, r, j, block): the value at row lane / 4 + 8 * r + 16 * warp of that block, and token
                2 * (lane % 4) + c + 8 * j.
            values, index: from `fetch_rows`.
            first_row, tokens: the tile's rows.
            first_output: first output feature of the tile.
            consumer: this warpgroup, 0 or 1.
        """
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        barrier = FIRST_BARRIER + consumer
        s_row_values, s_row_index = self.s_row_values, self.s_row_index
        # Past this barrier the previous tile's buffers are free.
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        for i in cutlass.range_constexpr(cute.size(index)):
            token = thread + i * WARPGROUP
            if token < tokens:
                for t in cutlass.range_constexpr(len(self.row_tensors)):
                    s_row_values[t][token, consumer] = values[t][i]
                if cutlass.const_expr(self.row_index_M is not None):
                    s_row_index[token, consumer] = index[i]
        if cutlass.const_expr(len(self.row_tensors) > 0 or self.row_index_M is not None):
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)

        for chunk in cutlass.range_constexpr(cute.ceil_div(width, self.store_tokens)):
            chunk_begin = chunk * self.store_tokens
            if chunk_begin < tokens:
                chunk_tokens = min(self.store_tokens, width - chunk_begin)
                for block in cutlass.range_constexpr(self.blocks):
                    # Two buffers in turn: whoever is past the barrier below has read the other one.
                    buffer = (chunk * self.blocks + block) % 2 + 2 * consumer
                    s_chunk = self.s_chunks + buffer * (self.store_tokens * self.store_pitch)
                    for token in cutlass.range_constexpr(0, chunk_tokens, 16):
                        self._transpose(
                            accumulator,
                            block,
                            chunk_begin + token,
                            min(16, chunk_tokens - token),
                            token,
                            s_chunk,
                            consumer,
                        )
                    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
                    block_output = block * self.block_outputs * self.sharers
                    if cutlass.const_expr(not self.ping_pong):
                        block_output += consumer * self.block_outputs
                    self._store_chunk(
                        s_chunk, chunk_begin, chunk_tokens, first_row, tokens, first_output + block_output, consumer
                    )

    @cute.jit
    def _transpose(
        self,
        accumulator: cute.Tensor,
        block: cutlass.Constexpr[int],
        first_token: cutlass.Constexpr[int],
        tokens: cutlass.Constexpr[int],
        store_token: cutlass.Constexpr[int],
        s_chunk: cute.Pointer,
        consumer: Int32,
    ):
        """Applies the epilogue to 8 or 16 tokens of a block and writes them token-major to `s_chunk`, from row
        `store_token`."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx() % 4
        halves = 1 if self.gated else 2  # groups of 8 features that a warp holds for each token
        matrices = tokens // 8 * halves
        packed = cute.make_rmem_tensor((2 * matrices,), self.dtype)
        for j in cutlass.range_constexpr(tokens // 8):
            for c in cutlass.range_constexpr(2):
                token = first_token + 8 * j + 2 * (lane % 4) + c
                tensors = {t.name: self.s_row_values[n][token, consumer] for n, t in enumerate(self.epilogue.tensors)}
                values = accumulator[c, None, first_token // 8 + j, block]
                if cutlass.const_expr(self.gated):
                    gate = values[1] if self.swap else values[0]
                    up = values[0] if self.swap else values[1]
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
        operation = warp_copy.StMatrix8x8x16bOp(transpose=True, num_matrices=matrices)
        atom = cute.make_copy_atom(operation, self.dtype)
        cute.copy_atom_call(atom, packed, cute.make_tensor(address, cute.make_layout((VECTOR,))))

    @cute.jit
    def _store_chunk(
        self,
        s_chunk: cute.Pointer,
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
            if row < chunk_tokens and token < tokens and output < cute.size(self.out_MN, mode=[1]):
                out_row = first_row + token
                if cutlass.const_expr(self.row_index_M is not None):
                    out_row = self.s_row_index[token, consumer]
                address = (s_chunk + (row * self.store_pitch + position % vectors * VECTOR)).align(16)
                vector = cute.make_tensor(address, cute.make_layout((1, VECTOR))).load()
                # In 64 bits: out may have more than 2^31 elements.
                cute.local_tile(self.out_MN, (1, VECTOR), (Int64(out_row), output // VECTOR)).store(vector)
