"""Products with cooperative tiles that store a tile's result during the next tile's main loop.

Cooperative warpgroups share each tile, so the tensor cores idle while both store their result. Here a math warpgroup
rounds its result to the type of the output, keeps it in registers, and issues the first products of the next tile
before it stores the result:

    products of stages 0 and 1 of the next tile are issued, and run
    half of the result is stored
    stage 0 is released as soon as its products are done
    the other half is stored
    the main loop continues with stage 2

A 16-bit result takes half as many registers as the accumulators, which fits beside them. Of an fp32 result only the
second half is kept; the first half is stored before the next main loop.

The fences before the products of each stage are those of explicit_fences.py. The first product clears the accumulators
by a predicate at run time. `Gemm.main_loop` has code of its own for the first stage, and in cooperative tiles ptxas
waits for its products before it issues the next.

In ragged K, gathering warps read the indices of rows two stages ahead, where `RaggedK` reads them one stage ahead.
In ragged M, the epilogue is that of a product without activation, bias and row scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from fusedmoe.kernels.sm90 import tiles
from fusedmoe.kernels.sm90.config import BLOCK_ROWS, EPILOGUE_COLUMNS
from fusedmoe.kernels.sm90.epilogues import Block, Box
from fusedmoe.kernels.sm90.gather import COPY_ROWS, ROW_BYTES, chunk, copy_rows, own_row, spread
from fusedmoe.kernels.sm90.gemm import PRODUCER, VALUES, WARPGROUP, Consumer, Gemm
from fusedmoe.kernels.sm90.ragged_k import RaggedK
from fusedmoe.kernels.sm90.ragged_m import RaggedM
from fusedmoe.kernels.sm90.warps import LANES

AHEAD = 2  # stages whose products are issued before the last tile's result is stored


@dataclass(frozen=True)
class LateStores(Gemm):
    """A product with cooperative tiles and late stores. A subclass states where a box is stored: `put`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.pingpong:
            raise ValueError(f"late stores: expected cooperative tiles, got {self.config.name}")

    @property
    def symbol(self) -> str:
        return f"{super().symbol}_late"

    @property
    def sources(self) -> tuple[str, ...]:
        return (__name__, *super().sources)

    @property
    def tile_boxes(self) -> int:
        """Boxes of a warpgroup's result."""
        return self.config.blocks * self.boxes_per_block

    @property
    def kept(self) -> int:
        """Boxes of a warpgroup's result that are stored late: all, or half of an fp32 result."""
        return self.tile_boxes // 2 if self.box_element.width == 32 else self.tile_boxes

    @property
    def adds(self) -> bool:
        """Whether the result is added to the output."""
        return False

    def put(self, box: int, values, tile, consumer, env) -> None:
        """Store box ``box`` of a warpgroup's result."""
        raise NotImplementedError

    @cute.jit
    def math(self, tiled_mma, shared, rings, group, env):
        config, ab = self.config, rings.ab
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % WARPGROUP
        part = tiled_mma.get_slice(group * WARPGROUP)
        r_a = tiled_mma.make_fragment_A(part.partition_A(shared.a))
        r_b = tiled_mma.make_fragment_B(part.partition_B(shared.b))
        acc = cute.make_rmem_tensor(part.partition_shape_C((config.tile_m, config.tile_n)), Float32)
        late = cute.make_rmem_tensor((self.kept * VALUES,), self.box_element)
        late.fill(0.0)
        consumer = Consumer(group, thread, shared.boxes, self.box_copies(thread), rings.inputs)
        boxes = self.tile_boxes
        now, half = boxes - self.kept, boxes - self.kept // 2

        consumed, turn = Int32(0), Int32(0)
        turn, tile = tiles.take(rings.tiles, turn, shared.slots)
        before = tiles.Tile(Int32(tiles.END), *[Int32(0)] * 5)  # the tile whose result is in `late`
        while tile.expert != tiles.END:
            state = pipeline.PipelineState(self.stages, consumed, consumed % self.stages, consumed // self.stages % 2)
            released = state.clone()
            ahead = cutlass.min(tile.depth, AHEAD)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            for _ in cutlass.range(ahead, unroll=1):
                self.wait_for_stage(ab, state)
                warpgroup.fence()
                for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                    cute.gemm(tiled_mma, acc, r_a[None, None, kb, state.index], r_b[None, None, kb, state.index], acc)
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                state.advance()
            if before.expert != tiles.END:
                self.store_kept(late, now, half, before, consumer, env)
            warpgroup.wait_group(AHEAD - 1)
            for _ in cutlass.range(ahead - 1, unroll=1):
                ab.consumer_release(released)
                released.advance()
            if before.expert != tiles.END:
                self.store_kept(late, half, boxes, before, consumer, env)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            for _ in cutlass.range(tile.depth - ahead, unroll=1):
                self.wait_for_stage(ab, state)
                warpgroup.fence()
                for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                    cute.gemm(tiled_mma, acc, r_a[None, None, kb, state.index], r_b[None, None, kb, state.index], acc)
                warpgroup.commit_group()
                state.advance()
                warpgroup.wait_group(1)
                ab.consumer_release(released)
                released.advance()
            warpgroup.wait_group(0)
            if tile.depth > 0:
                ab.consumer_release(released)
            if const_expr(now > 0):
                self.store_first(acc, now, tile, consumer, env)
            for box in cutlass.range_constexpr(now, boxes):
                values = self.packed([acc[box * VALUES + v] for v in range(VALUES)])
                for v in cutlass.range_constexpr(VALUES):
                    late[(box - now) * VALUES + v] = values[v]
            if tile.depth == 0:
                late.fill(0.0)
            before = tile
            if const_expr(self.adds):
                # nothing is added for an expert without rows
                before = before._replace(expert=cutlass.select_(tile.depth > 0, tile.expert, Int32(tiles.END)))
            consumed += tile.depth
            turn, tile = tiles.take(rings.tiles, turn, shared.slots)
        if before.expert != tiles.END:
            self.store_kept(late, now, boxes, before, consumer, env)
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_kept(self, late, first: cutlass.Constexpr[int], end: cutlass.Constexpr[int], tile, consumer, env):
        """Store boxes ``first`` to ``end`` of a tile from the registers that keep them."""
        for box in cutlass.range_constexpr(first, end):
            values = cute.make_rmem_tensor((VALUES,), self.box_element)
            for v in cutlass.range_constexpr(VALUES):
                values[v] = late[(box - self.tile_boxes + self.kept) * VALUES + v]
            self.put(box, values, tile, consumer, env)

    @cute.jit
    def store_first(self, acc, end: cutlass.Constexpr[int], tile, consumer, env):
        """Store the boxes of an fp32 result that are not kept."""
        wanted = tile.depth > 0
        if const_expr(not self.adds):
            wanted = tile.depth >= 0
        if wanted:
            for box in cutlass.range_constexpr(end):
                values = [cutlass.select_(tile.depth > 0, acc[box * VALUES + v], Float32(0.0)) for v in range(VALUES)]
                self.put(box, values, tile, consumer, env)


@dataclass(frozen=True)
class LateStoresM(LateStores, RaggedM):
    """`RaggedM` without activation, bias and row scale."""

    def put(self, box, values, tile, consumer, env) -> None:
        i, j = divmod(box, self.boxes_per_block)
        shift = self.block_row(i, consumer.group)
        valid = cutlass.max(
            cutlass.min(tile.rows - shift, BLOCK_ROWS), 0
        )  # of a box without valid rows, TMA stores none
        block = Block(None, 0, consumer, tile, tile.row + shift, valid, None, None, None)
        self.store(Box(values, 0, tile.column * self.steps + j), block, box, env.outputs[0])


@dataclass(frozen=True)
class LateStoresK(LateStores, RaggedK):
    """`RaggedK`."""

    @property
    def adds(self) -> bool:
        return self.accumulate

    def put(self, box, values, tile, consumer, env) -> None:
        i, j = divmod(box, self.boxes_per_block)
        top = tile.place * (self.config.tile_m // BLOCK_ROWS) + self.block_row(i, consumer.group) // BLOCK_ROWS
        place = (top, tile.column * self.boxes_per_block + j)
        target = cute.local_tile(env.tensor[None, None, tile.expert], (BLOCK_ROWS, EPILOGUE_COLUMNS), place)
        self.put_box(values, consumer, consumer.copies.store, box, env, target)

    @cute.jit
    def gather_rows(self, gathered, shared, rings, share):
        """As in `RaggedK`, with indices read two stages ahead."""
        ab, lane, of_a = rings.ab, cute.arch.lane_idx(), self.gathered == "a"
        matrix, index = gathered
        value_bytes = self.element.width // 8
        smem, extent = (shared.a, self.config.tile_m) if of_a else (shared.b, self.config.tile_n)
        first_stage = smem.iterator.toint() + share * (LANES * ROW_BYTES)
        pitch = Int32(matrix.stride[0] * value_bytes)
        own = cute.make_rmem_tensor((1,), Int32)
        indices = cute.make_rmem_tensor((LANES // COPY_ROWS,), Int32)
        state = pipeline.make_pipeline_state(PRODUCER, self.stages)
        turn = Int32(0)
        turn, tile = tiles.take(rings.tiles, turn, shared.slots)
        own_first = share * LANES + own_row(lane)
        row, end = tile.row + own_first, tile.row + tile.rows
        first, second = self.index_of(row, end, index), self.index_of(row + self.tile_k, end, index)
        while tile.expert != tiles.END:
            following, later = first, second
            row, end = tile.row + own_first + self.tile_k, tile.row + tile.rows
            column = (tile.place if const_expr(of_a) else tile.column) * extent + chunk(lane) * self.alignment
            operand, left = matrix.iterator.toint() + column * value_bytes, (matrix.shape[1] - column) * value_bytes
            depth = tile.depth
            turn, tile = tiles.take(rings.tiles, turn, shared.slots)
            next_row, next_end = tile.row + own_first, tile.row + tile.rows
            first = self.index_of(next_row, next_end, index)
            second = self.index_of(next_row + self.tile_k, next_end, index)
            for k_tile in cutlass.range(depth, unroll=1):
                own[0] = following
                following = later
                row += self.tile_k
                later = self.index_of(row, end, index)
                spread(indices, own)
                ab.sync_object_empty.wait(state.index, state.phase)
                stage = first_stage + state.index * self.gathered_bytes
                to = (operand, pitch, left, stage, lane, extent // self.tile_k, self.tile_k * ROW_BYTES)
                if k_tile + 1 < depth:
                    copy_rows(indices, *to)
                else:
                    copy_rows(indices, *to, True)
                cute.arch.cp_async_mbarrier_arrive_noinc(ab.producer_get_barrier(state))
                state.advance()
