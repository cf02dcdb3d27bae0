"""The ending of a GEMM tile: the epilogue's math on the accumulator, the transposition to token-major, the stores."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warp as warp_copy

from cutlass_moe.config import CONSUMERS, STORE_PAD_BYTES, GemmSpec, token_bytes
from cutlass_moe.kernels import l2_policy
from epilogues import INPUT, DslOps
from epilogues.base import as_tuple, stored_planes

WARPGROUP = 128
VECTOR_BYTES = 16  # of one store
VECTOR = 8  # elements of bf16 or fp16 in it
FIRST_BARRIER = 1  # named barriers, one for each consumer warpgroup; 0 is sync_threads
DTYPES = {"float32": Float32, "bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


class Fetched(NamedTuple):
    """A tile's values of the epilogue's tensors, in the registers of a thread; lists in the order of those tensors.

    Attributes:
        rows: of the "row" tensors, those of tokens thread, thread + 128, ...
        index: where the same tokens are stored.
        experts: of the "expert" tensors.
        columns: of the "expert_column" tensors, those of the features that the thread's accumulators have.
    """

    rows: list
    index: cute.Tensor
    experts: list
    columns: list


class TileStore:
    """Stores tiles for the consumer warpgroups of `GroupedGemm`, each through shared memory of its own.

    A warpgroup holds `blocks` blocks of 64 weight rows by the tile's tokens. In the m64nNk16 accumulator a thread holds
    rows r and r + 8 of each 16: with two accumulators these are gate and up of the same output element, since the
    weights are interleaved so. `store_tokens` tokens of a block at a time are transposed (stmatrix.trans) and stored
    with 16 bytes a thread along the features. Rows past the tile's last are masked.

    An epilogue that stores several matrices (`planes`: the output, then its side outputs) has them pass one after
    another; each pass runs the math and keeps one of its values, and the compiler drops what only the others need.

    Where the epilogue's tensors wait for the math: "row" in shared memory, for the whole tile; "expert" and
    "expert_column" in registers; "full" in shared memory, `store_tokens` tokens of a block, requested one step ahead.
    """

    def __init__(self, spec: GemmSpec):
        config, epilogue = spec.config, spec.epilogue
        self.epilogue = epilogue
        self.gated = epilogue.accumulators == 2
        self.halves = 1 if self.gated else 2  # groups of 8 features that a warp holds for each token of a block
        self.ping_pong = config.ping_pong
        self.sharers = 1 if config.ping_pong else CONSUMERS  # warpgroups that work on one tile
        self.blocks = config.consumer_blocks
        self.block_outputs = 64 // epilogue.accumulators
        self.store_tokens = config.store_tokens(epilogue)
        self.stage_tokens = config.stage_tokens
        self.planes = stored_planes(epilogue)
        self.dtypes = [DTYPES[spec.dtype if plane.dtype == INPUT else plane.dtype] for plane in self.planes]
        self.chunk_bytes = self.store_tokens * token_bytes(epilogue, *(plane.dtype for plane in self.planes))

    def bind(
        self,
        smem: Any,
        arguments: tuple,
        row_index_M: cute.Tensor | None,
        out_MN: cute.Tensor,
        reduction: Int32,
        swap: Boolean,
    ) -> None:
        """Takes the kernel's tensors, once, and shared memory for them.

        Args:
            arguments: the epilogue's tensors, scalars and side outputs, in this order.
            reduction: elements of the rows that are multiplied.
        """
        epilogue = self.epilogue
        tensors = dict(zip(epilogue.tensors, arguments[: len(epilogue.tensors)], strict=True))
        scalars_end = len(epilogue.tensors) + len(epilogue.scalars)
        self.scalars = dict(zip(epilogue.scalars, arguments[len(epilogue.tensors) : scalars_end], strict=True))
        self.row_tensors, self.expert_tensors, self.column_tensors, self.full_tensors = (
            {declared.name: tensor for declared, tensor in tensors.items() if declared.broadcast == broadcast}
            for broadcast in ("row", "expert", "expert_column", "full")
        )
        self.row_index_M = row_index_M
        self.swap = swap
        self.outputs = cute.size(out_MN, mode=[1])
        self.policy = l2_policy.of_output(out_MN, row_index_M, reduction)
        sides = dict(enumerate(zip(epilogue.side_outputs, arguments[scalars_end:], strict=True), start=1))
        self.targets = [
            out_MN if plane.output == 0 else sides[plane.output][1][None, plane.index, None] for plane in self.planes
        ]
        self.row_absmax_M: Any = next((tensor for side, tensor in sides.values() if side.row_absmax), None)

        layout = cute.make_layout((self.stage_tokens, CONSUMERS))
        self.s_chunks = smem.allocate_array(cutlass.Uint8, 2 * CONSUMERS * self.chunk_bytes, byte_alignment=16)
        self.s_rows = [smem.allocate_tensor(Float32, layout, byte_alignment=16) for _ in self.row_tensors]
        self.s_index = None
        if row_index_M is not None:
            self.s_index = smem.allocate_tensor(Int32, layout, byte_alignment=16)
        self.s_full = {
            name: smem.allocate_array(
                tensor.element_type,
                CONSUMERS * self.store_tokens * self._pitch(tensor.element_type),
                byte_alignment=16,
            )
            for name, tensor in self.full_tensors.items()
        }

    def _pitch(self, dtype: Any) -> int:
        """Elements from one token to the next in shared memory."""
        return self.block_outputs + STORE_PAD_BYTES * 8 // dtype.width

    @cute.jit
    def fetch(
        self,
        width: cutlass.Constexpr[int],
        expert: Int32,
        first_row: Int32,
        tokens: Int32,
        first_output: Int32,
        consumer: Int32,
    ):
        """Asks for the tile's values and places, in registers: before the multiplication, which hides the latency."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        per_thread = cute.ceil_div(width, WARPGROUP)
        rows = [cute.make_rmem_tensor(per_thread, Float32) for _ in self.row_tensors]
        index = cute.make_rmem_tensor(per_thread, Int32)
        row_tensors = list(self.row_tensors.values())
        for i in cutlass.range_constexpr(per_thread):
            # Of the last token again where there are fewer: a branch here would keep ptxas from overlapping WGMMAs.
            row = first_row + cutlass.min(thread + i * WARPGROUP, tokens - 1)
            for t in cutlass.range_constexpr(len(row_tensors)):
                rows[t][i] = row_tensors[t][row].to(Float32)
            if cutlass.const_expr(self.row_index_M is not None):
                index[i] = self.row_index_M[row]
        experts = [tensor[expert].to(Float32) for tensor in self.expert_tensors.values()]
        columns = [cute.make_rmem_tensor((self.halves, self.blocks), Float32) for _ in self.column_tensors]
        column_tensors = list(self.column_tensors.values())
        if cutlass.const_expr(len(column_tensors) > 0):
            for block in cutlass.range_constexpr(self.blocks):
                for r in cutlass.range_constexpr(self.halves):
                    output = first_output + self._block_output(block, consumer) + self._feature(r)
                    output = cutlass.min(output, self.outputs - 1)
                    for t in cutlass.range_constexpr(len(column_tensors)):
                        columns[t][r, block] = column_tensors[t][expert, output].to(Float32)
        return Fetched(rows, index, experts, columns)

    def _block_output(self, block: int, consumer: Int32) -> Any:
        """First output feature of a block, within the tile."""
        output = block * self.block_outputs * self.sharers
        return output if self.ping_pong else output + consumer * self.block_outputs

    def _feature(self, r: int) -> Any:
        """The output feature, within its block, of this thread's accumulators of half `r`."""
        return cute.arch.warp_idx() % 4 * (8 * self.halves) + 8 * r + cute.arch.lane_idx() // 4

    @cute.jit
    def store(
        self,
        width: cutlass.Constexpr[int],
        accumulator: cute.Tensor,
        fetched: Fetched,
        first_row: Int32,
        tokens: Int32,
        first_output: Int32,
        consumer: Int32,
    ):
        """Stores a tile of up to `width` tokens.

        Args:
            accumulator: (c, r, j, block): the value at row lane / 4 + 8 * r + 16 * warp of that block, and token
                2 * (lane % 4) + c + 8 * j.
            fetched: from `fetch`.
            first_row, tokens: the tile's rows.
            first_output: first output feature of the tile.
            consumer: this warpgroup, 0 or 1.
        """
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        barrier = FIRST_BARRIER + consumer
        s_rows, s_index, rows, index = self.s_rows, self.s_index, fetched.rows, fetched.index
        requested = self._make_requests()
        self._request(requested, 0, first_row, tokens, first_output, consumer)
        # Past this barrier the previous tile's buffers are free.
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        for i in cutlass.range_constexpr(cute.size(index)):
            token = thread + i * WARPGROUP
            if token < tokens:
                for t in cutlass.range_constexpr(len(s_rows)):
                    s_rows[t][token, consumer] = rows[t][i]
                if cutlass.const_expr(self.row_index_M is not None):
                    s_index[token, consumer] = index[i]
        if cutlass.const_expr(len(s_rows) > 0 or self.row_index_M is not None):
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)

        for chunk in cutlass.range_constexpr(cute.ceil_div(width, self.store_tokens)):
            chunk_begin = chunk * self.store_tokens
            if chunk_begin < tokens:
                chunk_tokens = min(self.store_tokens, width - chunk_begin)
                for block in cutlass.range_constexpr(self.blocks):
                    if cutlass.const_expr(len(self.s_full) > 0):
                        self._deposit(requested, consumer)
                        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
                        following = chunk * self.blocks + block + 1
                        self._request(requested, following, first_row, tokens, first_output, consumer)
                    for plane in cutlass.range_constexpr(len(self.planes)):
                        # Two buffers in turn: whoever is past the barrier below has read the other one.
                        step = (chunk * self.blocks + block) * len(self.planes) + plane
                        s_chunk = cute.recast_ptr(
                            self.s_chunks + (step % 2 + 2 * consumer) * self.chunk_bytes, dtype=self.dtypes[plane]
                        )
                        for token in cutlass.range_constexpr(0, chunk_tokens, 16):
                            self._transpose(
                                plane, accumulator, fetched, block, chunk_begin + token,
                                min(16, chunk_tokens - token), token, s_chunk, consumer,
                            )  # fmt: skip
                        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
                        self._store_chunk(
                            plane, s_chunk, chunk_begin, chunk_tokens, first_row, tokens,
                            first_output + self._block_output(block, consumer), consumer,
                        )  # fmt: skip

    def _vectors(self, dtype: Any) -> int:
        """16-byte vectors of a token's outputs in one block."""
        return self.block_outputs * dtype.width // 8 // VECTOR_BYTES

    def _make_requests(self) -> list:
        """Registers for one step's vectors of the "full" tensors: (elements, vectors of a thread) each."""
        requests = []
        for tensor in self.full_tensors.values():
            dtype = tensor.element_type
            count = -(-self.store_tokens * self._vectors(dtype) // WARPGROUP)
            requests.append(cute.make_rmem_tensor((VECTOR_BYTES * 8 // dtype.width, count), dtype))
        return requests

    @cute.jit
    def _request(
        self,
        requests: list,
        step: cutlass.Constexpr[int],
        first_row: Int32,
        tokens: Int32,
        first_output: Int32,
        consumer: Int32,
    ):
        """Loads the "full" tensors of a step (block `step % blocks` of chunk `step // blocks`), 16 bytes a thread."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        tensors = list(self.full_tensors.values())
        chunk_begin = step // self.blocks * self.store_tokens
        block_output = first_output + self._block_output(step % self.blocks, consumer)
        for t in cutlass.range_constexpr(len(tensors)):
            elements, count = requests[t].shape
            vectors = self._vectors(tensors[t].element_type)
            for i in cutlass.range_constexpr(count):
                position = thread + i * WARPGROUP
                row = position // vectors
                output = block_output + position % vectors * elements
                if row < self.store_tokens and chunk_begin + row < tokens and output < self.outputs:
                    place = (Int64(first_row + chunk_begin + row), output // elements)
                    requests[t][None, i].store(cute.local_tile(tensors[t], (1, elements), place)[0, None].load())

    @cute.jit
    def _deposit(self, requests: list, consumer: Int32):
        """Writes what was requested to shared memory."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        names = list(self.s_full)
        for t in cutlass.range_constexpr(len(names)):
            elements, count = requests[t].shape
            dtype = requests[t].element_type
            vectors, pitch = self._vectors(dtype), self._pitch(dtype)
            s_full = self.s_full[names[t]] + consumer * (self.store_tokens * pitch)
            for i in cutlass.range_constexpr(count):
                position = thread + i * WARPGROUP
                row = position // vectors
                if row < self.store_tokens:
                    address = (s_full + (row * pitch + position % vectors * elements)).align(VECTOR_BYTES)
                    cute.make_tensor(address, cute.make_layout(elements)).store(requests[t][None, i].load())

    def _inputs(self, fetched: Fetched, token: Any, chunk_token: Any, r: int, block: int, consumer: Any) -> dict:
        """The epilogue's tensors and scalars for one element, by name."""
        inputs = dict(self.scalars)
        inputs.update({name: self.s_rows[n][token, consumer] for n, name in enumerate(self.row_tensors)})
        inputs.update(zip(self.expert_tensors, fetched.experts, strict=True))
        inputs.update({name: fetched.columns[n][r, block] for n, name in enumerate(self.column_tensors)})
        for name, s_full in self.s_full.items():
            pitch = self._pitch(s_full.dtype)
            address = s_full + ((consumer * self.store_tokens + chunk_token) * pitch + self._feature(r))
            inputs[name] = cute.make_tensor(address, cute.make_layout(1))[0].to(Float32)
        return inputs

    @cute.jit
    def _transpose(
        self,
        plane: cutlass.Constexpr[int],
        accumulator: cute.Tensor,
        fetched: Fetched,
        block: cutlass.Constexpr[int],
        first_token: cutlass.Constexpr[int],
        tokens: cutlass.Constexpr[int],
        chunk_token: cutlass.Constexpr[int],
        s_chunk: cute.Pointer,
        consumer: Int32,
    ):
        """Applies the epilogue to 8 or 16 tokens of a block and writes them token-major to `s_chunk`, from row
        `chunk_token`."""
        lane = cute.arch.lane_idx()
        dtype = self.dtypes[plane]
        pitch = self._pitch(dtype)
        matrices = tokens // 8 * self.halves
        packed = cute.make_rmem_tensor((2 * matrices,), dtype)
        for j in cutlass.range_constexpr(tokens // 8):
            for c in cutlass.range_constexpr(2):
                column = 8 * j + 2 * (lane % 4) + c
                values = accumulator[c, None, first_token // 8 + j, block]
                for r in cutlass.range_constexpr(self.halves):
                    taken = [values[r]]
                    if cutlass.const_expr(self.gated):
                        gate = values[1] if self.swap else values[0]
                        up = values[0] if self.swap else values[1]
                        taken = [gate, up]
                    inputs = self._inputs(fetched, first_token + column, chunk_token + column, r, block, consumer)
                    value = as_tuple(self.epilogue.math(DslOps, *taken, **inputs))[plane].to(dtype)
                    if cutlass.const_expr(dtype.width == 16):
                        packed[2 * (self.halves * j + r) + c] = value
                    else:
                        address = s_chunk + ((chunk_token + column) * pitch + self._feature(r))
                        cute.make_tensor(address, cute.make_layout(1))[0] = value
        if cutlass.const_expr(dtype.width == 16):
            # Lane l gives the address of row l % 8 of matrix l / 8: token l % 8, and the 8 features of that matrix.
            matrix = lane // 8
            row = chunk_token + lane % 8 + 8 * (matrix // self.halves % (tokens // 8))
            feature = 8 * self.halves * (cute.arch.warp_idx() % 4) + 8 * (matrix % self.halves)
            address = (s_chunk + (row * pitch + feature)).align(VECTOR_BYTES)
            operation = warp_copy.StMatrix8x8x16bOp(transpose=True, num_matrices=matrices)
            atom = cute.make_copy_atom(operation, dtype)
            cute.copy_atom_call(atom, packed, cute.make_tensor(address, cute.make_layout((VECTOR,))))

    @cute.jit
    def _store_chunk(
        self,
        plane: cutlass.Constexpr[int],
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
        dtype = self.dtypes[plane]
        elements = VECTOR_BYTES * 8 // dtype.width
        pitch = self._pitch(dtype)
        vectors = self._vectors(dtype)
        measured = self.row_absmax_M is not None and plane == 0
        for i in cutlass.range_constexpr(cute.ceil_div(chunk_tokens * vectors, WARPGROUP)):
            position = thread + i * WARPGROUP
            row = position // vectors
            output = first_output + position % vectors * elements
            token = chunk_begin + row
            largest = Int32(0)
            if row < chunk_tokens and token < tokens and output < self.outputs:
                out_row = self._out_row(first_row, token, consumer)
                address = (s_chunk + (row * pitch + position % vectors * elements)).align(VECTOR_BYTES)
                vector = cute.make_tensor(address, cute.make_layout((elements,))).load()
                registers = cute.make_rmem_tensor((elements,), dtype)
                registers.store(vector)
                # In 64 bits: out may have more than 2^31 elements.
                target = cute.local_tile(self.targets[plane], (1, elements), (Int64(out_row), output // elements))
                cute.copy(self._store_atom(dtype), registers, target[0, None], cache_policy=self.policy)
                if cutlass.const_expr(measured):
                    largest = self._largest(vector, elements)
            if cutlass.const_expr(measured):
                # A row's threads are neighbours. Its tiles meet in memory: the order of maxima does not matter.
                for step in cutlass.range_constexpr(vectors.bit_length() - 1):
                    largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
                if position % vectors == 0 and row < chunk_tokens and token < tokens:
                    out_row = self._out_row(first_row, token, consumer)
                    maxima = cute.recast_ptr(self.row_absmax_M.iterator, dtype=Int32)
                    cute.arch.atomic_max(maxima + Int64(out_row), largest)

    def _store_atom(self, dtype: Any) -> cute.CopyAtom:
        return cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), dtype, num_bits_per_copy=8 * VECTOR_BYTES)

    @cute.jit
    def _out_row(self, first_row: Int32, token: Int32, consumer: Int32):
        """Where a token of the tile is stored."""
        row = first_row + token
        if cutlass.const_expr(self.row_index_M is not None):
            row = self.s_index[token, consumer]
        return row

    @cute.jit
    def _largest(self, vector: Any, elements: cutlass.Constexpr[int]) -> Int32:
        """The largest absolute value, as the bits of an fp32: these order as integers, NaN on top."""
        bits = vector.to(Float32).bitcast(Int32)
        largest = Int32(0)
        for n in cutlass.range_constexpr(elements):
            largest = cutlass.max(largest, bits[n] & 0x7FFFFFFF)
        return largest
