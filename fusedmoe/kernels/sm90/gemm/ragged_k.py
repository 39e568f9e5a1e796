"""Ragged K grouped GEMM: the gradient of the weights, one product per expert.

    out[e] = sum over the rows r of e of a[r, :]ᵀ b[r, :]        (E, M, N), accumulated in fp32

``a`` (R, M) is the gradient of the layer's output, ``b`` (R, N) the layer's input. Both are row-major and the
contraction runs over rows, so both operands are MN-major in shared memory. FP8 codes are by columns instead, see
columns.py. An expert without rows gets exact zeros.

**Bounds.** Rows past an expert's last row would be added to the result. They must be zero in both operands, because
NaN times zero is NaN. Each operand's TMA descriptor therefore has two more dimensions than the tensor:

- The rows end at 2^30. A box that starts at row ``2^30 - valid`` has ``valid`` rows, followed by zeros.
- The coordinate of the first extra dimension is always 2^30. It subtracts those 2^30 rows again, by address arithmetic
  modulo 2^64.
- The second extra dimension counts rows. Its coordinate is ``first + valid``, for the rows from ``first``.

The stores of ragged_m.py use a descriptor whose base is before the tensor. Loads cannot: the hardware checks theirs.

**Gathered rows.** One operand may be a matrix of T rows, with an index: row r of the operand is row ``index[r]`` of the
matrix. Two warps copy these rows (gather.py), 32 of the 64 rows of each stage; with four, a product takes 4% longer.
They read indices two stages ahead, and fill rows past an expert's last row with zeros too. A cluster can share only the
other operand.

**Late stores.** Cooperative warpgroups share each tile, so the tensor cores would idle while both store their result. A
result of 16 bits per value fits beside the accumulators of the next tile. So a math warpgroup keeps it in registers and
stores it while the next tile is multiplied:

- It issues the products of the next tile's stages 0 and 1.
- It stores half of the result.
- It releases stage 0, whose products are done by then.
- It stores the other half, and continues with stage 2.

An fp32 result is stored at once. If half of it is kept and stored late, most products take longer, by up to 13%.

``out`` may hold a gradient already. TMA then adds to it: once per element and launch, so the result does not depend on
the order. In 16 bits, the gradient is rounded before it is added, and the sum once more, as by autograd.

| warps | role | takes a tile from the ring | other barriers |
|---|---|---|---|
| 0 to 3, 4 to 7 | math warpgroups: products and stores | yes | see the table of common.py |
| 8 | loads both operands, or the one that is not gathered | yes | stages of A and B: waits for empty, arrives at full |
| 9 | scheduler | fills it | `scheduler.Drawing` |
| 10, 11 | gather rows, if an operand is gathered | yes | the same stages: all 64 lanes arrive, after their copies |

Run: tests/unit/test_kernels_compile.py, tests/gpu/test_hopper_products.py;
``python -m benchmarks --only tiles``.

Axes: R rows, T rows of a gathered matrix, M and N features, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from fusedmoe.kernels.device.gather import COPY_ROWS, ROW_BYTES, Gathered, chunk, copy_rows, own_row, spread
from fusedmoe.kernels.device.warps import LANES
from fusedmoe.kernels.sm90.epilogue.outputs import Block, Box
from fusedmoe.kernels.sm90.gemm import columns, scheduler
from fusedmoe.kernels.sm90.gemm.arguments import RaggedKArguments
from fusedmoe.kernels.sm90.gemm.common import (
    LOAD_WARP,
    PRODUCER,
    SCHEDULER_WARP,
    VALUES,
    WARPGROUP,
    Consumer,
    Gemm,
    Tma,
)
from fusedmoe.kernels.sm90.gemm.operands import Plain, multiply_stages
from fusedmoe.kernels.sm90.tiles import legal
from fusedmoe.kernels.sm90.tiles.config import BLOCK_ROWS, EPILOGUE_COLUMNS, SWIZZLE_BYTES

AHEAD = 2  # stages of a tile whose products are issued before the last tile's result is stored: late stores
END_ROW = 2**30
WRAP = 2**34  # elements: END_ROW rows of this pitch are a multiple of 2^64 bytes


class Output(NamedTuple):
    """The result, and the scales of the operands if there is one per expert, for the mainloop."""

    to: Any  # a store by TMA; by threads, the tensor (M, N, E)
    scales: Any = None  # of A and of B


@dataclass(frozen=True)
class RaggedK(Gemm):
    """A ragged K kernel."""

    out: str = "bf16"  # or "fp16", "fp32"
    accumulate: bool = False
    gathered: str | None = None  # "a" or "b": the operand whose rows are read through an index
    beside: bool = False  # whether it may start while the kernel before it runs, on whose results it does not depend

    def __post_init__(self) -> None:
        legal.check(self.config, legal.RaggedKNeeds(self.operands.scaled, self.gathered))

    @property
    def symbol(self) -> str:
        add = "_add" if self.accumulate else ""
        gather = f"_gather_{self.gathered}" if self.gathered else ""
        beside = "_beside" if self.beside else ""
        name = f"{self.operands.dtype}_{self.out}{add}_{self.config.name}{beside}{self.operands.suffix}"
        return f"sm90_ragged_k{gather}_{name}"

    @property
    def gathered_bytes(self) -> int:
        extent = {None: 0, "a": self.config.tile_m, "b": self.config.tile_n}[self.gathered]
        return extent * SWIZZLE_BYTES

    @property
    def box_element(self) -> Any:
        return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}[self.out]

    @property
    def boxes_per_block(self) -> int:
        return self.config.tile_n // EPILOGUE_COLUMNS

    @property
    def boxes_read(self) -> int:
        return 0

    @property
    def adjacent(self) -> bool:
        return False

    @property
    def crowded(self) -> bool:
        return self.operands.scaled

    @property
    def tile_kind(self) -> type:
        return scheduler.Tile

    @property
    def late(self) -> bool:
        """Whether a tile is stored during the next tile's main loop."""
        return not self.config.pingpong and isinstance(self.operands, Plain) and self.box_element.width == 16

    @property
    def fp32_by_threads(self) -> bool:
        """Whether threads store results in fp32. Two boxes of them would cost a stage of A and B."""
        return self.operands.scaled and self.box_element.width == 32

    @property
    def store_stages(self) -> int:
        return 1 if self.fp32_by_threads else super().store_stages

    @property
    def box_bytes(self) -> int:
        return columns.FP32_BOX_BYTES if self.fp32_by_threads else super().box_bytes

    def box_layout(self, boxes: int) -> Any:
        return columns.fp32_box_layout(boxes) if self.fp32_by_threads else super().box_layout(boxes)

    # -- compile

    def compile(self) -> Any:
        """Compile without a GPU; the arguments are those of ``__call__``, without the stream."""
        fake, rows, experts = cute.runtime.make_fake_tensor, cute.sym_int(), cute.sym_int()
        m, n = cute.sym_int(), cute.sym_int()
        stored = self.operands.stored_element
        pitch = lambda: cute.sym_int64(divisibility=self.operands.alignment)  # noqa: E731
        if self.operands.scaled:
            a, b = (fake(stored, (extent, rows), (pitch(), 1), assumed_align=16) for extent in (m, n))
            others = self.operands.fake_scales(experts, m, n)
        else:
            tokens = cute.sym_int()
            a = fake(stored, (tokens if self.gathered == "a" else rows, m), (pitch(), 1), assumed_align=16)
            b = fake(stored, (tokens if self.gathered == "b" else rows, n), (pitch(), 1), assumed_align=16)
            others = [fake(Int32, (rows,), (1,))] if self.gathered else []
        out = fake(self.box_element, (experts, m, n), (pitch(), pitch(), 1), assumed_align=16)
        return cute.compile(
            self, *RaggedKArguments(a, b, fake(Int32, (experts,), (1,)), out, fake(Int32, (1,), (1,)), *[Int32(0)] * 3),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), *others,
            options=f"--enable-tvm-ffi --gpu-arch {self.arch}",
        )  # fmt: skip

    # -- host side of a launch

    @cute.jit
    def __call__(self, a, b, offsets, out, counter, band, ctas, dynamic, stream, *tensors):
        """Launch. ``tensors`` are the scales of a and b, if they have scales, or the index, if one is gathered."""
        if const_expr(self.operands.scaled):
            self.launch_columns(a, b, offsets, out, counter, band, ctas, dynamic, stream, tensors)
        else:
            self.launch_rows(a, b, offsets, out, counter, band, ctas, dynamic, stream, tensors)

    def launch_rows(self, a, b, offsets, out, counter, band, ctas, dynamic, stream, index) -> None:
        """Launch, of operands by rows."""
        config = self.config
        major = OperandMajorMode.MN
        tiled_mma = self.tiled_mma(major, major)
        layouts = self.layouts(major, major)
        load_a = load_b = gathered = None
        if self.gathered != "a":
            load_a = self.across_atom(self.ragged(a), layouts.a, config.cluster_n)
        if self.gathered != "b":
            load_b = self.across_atom(self.ragged(b), layouts.b, config.cluster_m)
        if self.gathered is not None:
            gathered = Gathered(a if self.gathered == "a" else b, index[0])
        by_expert = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[1, 2, 0]))
        store = cpasync.CopyReduceBulkTensorTileS2GOp() if self.accumulate else cpasync.CopyBulkTensorTileS2GOp()
        box = cute.slice_(layouts.boxes, (None, None, 0))
        store_out = Tma(*cpasync.make_tiled_tma_atom(store, by_expert, box, (BLOCK_ROWS, EPILOGUE_COLUMNS)))
        self.kernel(
            load_a, load_b, store_out, None, tiled_mma, layouts, offsets, counter, band, dynamic,
            a.shape[1], b.shape[1], gathered,
        ).launch(stream=stream, use_pdl=self.beside, **self.grid(ctas))  # fmt: skip

    def launch_columns(self, a, b, offsets, out, counter, band, ctas, dynamic, stream, scales) -> None:
        """Launch, of codes by columns."""
        config, operands = self.config, self.operands
        a, b = cute.recast_tensor(a, operands.element), cute.recast_tensor(b, operands.b_element)
        major = OperandMajorMode.K
        layouts = self.layouts(major, major)
        load_a = columns.operand(self, a, scales[0], layouts.a, config.tile_m, config.cluster_n)
        load_b = columns.operand(self, b, scales[1], layouts.b, config.tile_n, config.cluster_m)
        by_expert = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[1, 2, 0]))
        self.kernel(
            load_a, load_b, by_expert, None if operands.staged else tuple(scales), self.tiled_mma(major, major),
            layouts, offsets, counter, band, dynamic, a.shape[0], b.shape[0], None,
        ).launch(stream=stream, use_pdl=self.beside, **self.grid(ctas))  # fmt: skip

    def ragged(self, t: cute.Tensor) -> cute.Tensor:
        """(R, W) as (W, rows, -, first row + rows); see the module's docstring."""
        pitch = t.stride[0]
        layout = cute.make_layout(
            (t.shape[1], END_ROW, END_ROW + 1, t.shape[0] + 1), stride=(1, pitch, Int64(WRAP) - pitch, pitch)
        )
        return cute.make_tensor(t.iterator, layout)

    # -- device side

    @cute.kernel
    def kernel(
        self, load_a, load_b, out, scales, tiled_mma, layouts, offsets, counter, band, dynamic, m, n, gathered
    ):  # fmt: skip
        config, operands = self.config, self.operands
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared, rings = self.shared_memory(layouts)
        if warp_idx >= LOAD_WARP:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_idx == LOAD_WARP:
                if const_expr(operands.scaled):
                    columns.load(self, load_a, load_b, shared, rings, m, n)
                else:
                    self.load(load_a, load_b, shared, rings, m, n)
            elif warp_idx == SCHEDULER_WARP:
                tiles_m, tiles_n = (m + config.tile_m - 1) // config.tile_m, (n + config.tile_n - 1) // config.tile_n
                share = scheduler.Share(config, band, counter, dynamic, shared.drawing)
                scheduler.schedule_ragged_k(
                    offsets, tiles_m, tiles_n, operands.tile_k, operands.scaled, share, rings.tiles, shared.slots
                )
                if const_expr(self.beside):
                    cute.arch.griddepcontrol_wait()  # kernels after this one depend on both
            elif const_expr(self.gathered is not None):
                self.gather_rows(gathered, shared, rings, warp_idx - self.gather_warp)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            if const_expr(self.late):
                self.math_late(tiled_mma, shared, rings, warp_idx // 4, out)
            else:
                self.math(tiled_mma, shared, rings, warp_idx // 4, Output(out, scales))

    def multicast_masks(self, rank_m, rank_n):
        """The CTAs of the cluster that receive a load of A, and of B; None for this CTA alone."""
        config = self.config
        layout = cute.make_layout((1, config.cluster_m, config.cluster_n, 1))
        place = (0, rank_m, rank_n, 0)
        a_mask = cpasync.create_tma_multicast_mask(layout, place, mcast_mode=2) if config.cluster_n > 1 else None
        b_mask = cpasync.create_tma_multicast_mask(layout, place, mcast_mode=1) if config.cluster_m > 1 else None
        return a_mask, b_mask

    @cute.jit
    def load(self, load_a, load_b, shared, rings, m, n):
        """The loading warp: A and B of every tile, 64 rows at a time, with zeros after an expert's last row."""
        config, tile_k, ab = self.config, self.operands.tile_k, rings.ab
        rank_m, rank_n = scheduler.ranks(config)
        a_mask, b_mask = self.multicast_masks(rank_m, rank_n)
        state = pipeline.make_pipeline_state(PRODUCER, self.stages)
        turn = Int32(0)
        turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        while tile.expert != scheduler.END:
            for k_tile in cutlass.range(tile.depth, unroll=1):
                valid = cutlass.min(tile.rows - k_tile * tile_k, tile_k)
                end = tile.row + k_tile * tile_k + valid
                ab.producer_acquire(state)
                full = ab.producer_get_barrier(state)
                operands = []  # that are not gathered
                if const_expr(self.gathered != "a"):
                    of_a = (shared.a, config.tile_m, tile.place, m, rank_n, config.cluster_n)
                    operands.append((load_a, a_mask, of_a))
                if const_expr(self.gathered != "b"):
                    of_b = (shared.b, config.tile_n, tile.column, n, rank_m, config.cluster_m)
                    operands.append((load_b, b_mask, of_b))
                for load, mask, of in operands:
                    here = cute.domain_offset((0, END_ROW - valid), load.tensor[None, None, END_ROW, end])
                    for to, source in self.across(load.atom, here, *of):
                        cute.copy(load.atom, source[None, 0], to[None, state.index], tma_bar_ptr=full, mcast_mask=mask)
                state.advance()
            turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        ab.producer_tail(state)

    @cute.jit
    def gather_rows(self, gathered, shared, rings, share):
        """A gathering warp: 32 of the 64 rows of each stage, with zeros after an expert's last row. See gather.py."""
        ab, lane, of_a = rings.ab, cute.arch.lane_idx(), self.gathered == "a"
        matrix, index = gathered
        tile_k, value_bytes = self.operands.tile_k, self.operands.element.width // 8
        smem, extent = (shared.a, self.config.tile_m) if of_a else (shared.b, self.config.tile_n)
        first_stage = smem.iterator.toint() + share * (LANES * ROW_BYTES)
        pitch = Int32(matrix.stride[0] * value_bytes)
        own = cute.make_rmem_tensor((1,), Int32)
        indices = cute.make_rmem_tensor((LANES // COPY_ROWS,), Int32)
        state = pipeline.make_pipeline_state(PRODUCER, self.stages)
        turn = Int32(0)
        turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        own_first = share * LANES + own_row(lane)
        row, end = tile.row + own_first, tile.row + tile.rows
        first, second = self.index_of(row, end, index), self.index_of(row + tile_k, end, index)
        while tile.expert != scheduler.END:
            following, later = first, second  # indices of the next stage, and of the one after it
            row, end = tile.row + own_first + tile_k, tile.row + tile.rows
            column = (tile.place if const_expr(of_a) else tile.column) * extent + chunk(lane) * self.operands.alignment
            operand, left = matrix.iterator.toint() + column * value_bytes, (matrix.shape[1] - column) * value_bytes
            depth = tile.depth
            turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
            next_row, next_end = tile.row + own_first, tile.row + tile.rows
            first = self.index_of(next_row, next_end, index)
            second = self.index_of(next_row + tile_k, next_end, index)
            for k_tile in cutlass.range(depth, unroll=1):
                own[0] = following
                following = later
                row += tile_k
                later = self.index_of(row, end, index)
                spread(indices, own)
                ab.sync_object_empty.wait(state.index, state.phase)
                stage = first_stage + state.index * self.gathered_bytes
                to = (operand, pitch, left, stage, lane, extent // tile_k, tile_k * ROW_BYTES)
                if k_tile + 1 < depth:
                    copy_rows(indices, *to)
                else:
                    copy_rows(indices, *to, True)
                cute.arch.cp_async_mbarrier_arrive_noinc(ab.producer_get_barrier(state))
                state.advance()

    @cute.jit
    def index_of(self, row, end, index):
        """Index of a row before ``end``; -1 from there."""
        value = Int32(-1)
        if row < end:
            value = index[row]
        return value

    @cute.jit
    def math_late(self, tiled_mma, shared, rings, group, store_out):
        """`Gemm.math` of cooperative tiles with late stores."""
        config, ab = self.config, rings.ab
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % WARPGROUP
        part = tiled_mma.get_slice(group * WARPGROUP)
        r_a = tiled_mma.make_fragment_A(part.partition_A(shared.a))
        r_b = tiled_mma.make_fragment_B(part.partition_B(shared.b))
        acc = cute.make_rmem_tensor(part.partition_shape_C((config.tile_m, config.tile_n)), Float32)
        boxes = config.blocks * self.boxes_per_block
        result = cute.make_rmem_tensor((boxes * VALUES,), self.box_element)
        result.fill(0.0)
        consumer = Consumer(group, thread, shared.boxes, self.box_copies(thread), rings.inputs)

        consumed, turn = Int32(0), Int32(0)
        turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        before = scheduler.Tile(Int32(scheduler.END), *[Int32(0)] * 5)  # the tile of `result`
        while tile.expert != scheduler.END:
            state = pipeline.PipelineState(self.stages, consumed, consumed % self.stages, consumed // self.stages % 2)
            released = state.clone()
            ahead = cutlass.min(tile.depth, AHEAD)
            # The first product clears the accumulators by a predicate at run time. With code of its own for the first
            # stage, as in `main_loop`, ptxas waits for that stage's products before it issues the next.
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            for _ in cutlass.range(ahead, unroll=1):
                self.wait_for_stage(ab, state)
                warpgroup.fence()
                for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                    cute.gemm(tiled_mma, acc, r_a[None, None, kb, state.index], r_b[None, None, kb, state.index], acc)
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                state.advance()
            if self.is_stored(before):
                self.store(result, 0, boxes // 2, before, consumer, store_out)
            warpgroup.wait_group(AHEAD - 1)
            for _ in cutlass.range(ahead - 1, unroll=1):
                ab.consumer_release(released)
                released.advance()
            if self.is_stored(before):
                self.store(result, boxes // 2, boxes, before, consumer, store_out)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            released = multiply_stages(self, tiled_mma, acc, r_a, r_b, ab, state, released, tile.depth - ahead)
            warpgroup.wait_group(0)
            if tile.depth > 0:
                ab.consumer_release(released)
            for box in cutlass.range_constexpr(boxes):
                values = self.packed([acc[box * VALUES + v] for v in range(VALUES)])
                for v in cutlass.range_constexpr(VALUES):
                    result[box * VALUES + v] = values[v]
            if tile.depth == 0:
                result.fill(0.0)
            before = tile
            consumed += tile.depth
            turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        if self.is_stored(before):
            self.store(result, 0, boxes, before, consumer, store_out)
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def is_stored(self, tile):
        """Whether a tile has a result. That of an expert without rows is zero, and is not added."""
        if const_expr(self.accumulate):
            return tile.depth > 0  # 0 for the end
        return tile.expert != scheduler.END

    @cute.jit
    def store(self, result, first: cutlass.Constexpr[int], end: cutlass.Constexpr[int], tile, consumer, store_out):
        """Store boxes ``first`` to ``end`` of a warpgroup's result; both are multiples of `store_stages`."""
        for box in cutlass.range_constexpr(first, end):
            values = cute.make_rmem_tensor((VALUES,), self.box_element)
            for v in cutlass.range_constexpr(VALUES):
                values[v] = result[box * VALUES + v]
            target = self.target(box, tile, consumer, store_out)
            self.put_box(values, consumer, consumer.copies.store, box, store_out, target)

    def target(self, box: int, tile, consumer, store_out):
        """A box of a warpgroup's result in the output."""
        i, j = divmod(box, self.boxes_per_block)
        top = tile.place * (self.config.tile_m // BLOCK_ROWS) + self.block_row(i, consumer.group) // BLOCK_ROWS
        place = (top, tile.column * self.boxes_per_block + j)
        return cute.local_tile(store_out.tensor[None, None, tile.expert], (BLOCK_ROWS, EPILOGUE_COLUMNS), place)

    @cute.jit
    def finish(self, acc, tile, consumer, inputs, env):
        """Store the gradient. An expert without rows gets zeros, or nothing if the kernel accumulates."""
        wanted = tile.depth > 0
        if const_expr(not self.accumulate):
            wanted = True
        if wanted:
            if const_expr(self.operands.scaled):
                self.finish_by_threads(acc, tile, consumer, env.to)
            else:
                for box in cutlass.range_constexpr(self.config.blocks * self.boxes_per_block):
                    values = [acc[box * VALUES + v] for v in range(VALUES)]
                    target = self.target(box, tile, consumer, env.to)
                    self.put_box(values, consumer, consumer.copies.store, box, env.to, target)
        return inputs

    @cute.jit
    def finish_by_threads(self, acc, tile, consumer, out):
        """Store or add the gradient; see columns.py."""
        lane, warp_row = consumer.thread % LANES, consumer.thread // LANES * 16
        count = self.boxes_per_block
        for i in cutlass.range_constexpr(self.config.blocks):
            top = tile.place * self.config.tile_m + self.block_row(i, consumer.group)
            valid = out.shape[0] - top
            if valid > 0:
                block = Block(acc, 0, consumer, tile, top, valid, lane, warp_row, True)
                for j in cutlass.range_constexpr(count):
                    values = [acc[(i * count + j) * VALUES + v] for v in range(VALUES)]
                    box = Box(values, tile.expert, tile.column * count + j)
                    self.operands.store(self, box, block, i * count + j, out, self.out if self.accumulate else "")
