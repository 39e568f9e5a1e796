"""Products of FP8 codes whose blocks have scales: the loads of the scales, the mainloop, and the stores.

    acc[r, n] = sum over blocks b of K of (sum over k in b of a[r, k] * b[n, k]) * a_scale[r, b] * b_scale[n, b]

A block has 128 elements of K: one stage. Tensor cores add FP8 products with about 14 bits, so they sum only one block.
The math warps scale each of these sums, and add it to accumulators in fp32 registers (*promotion*).

**Scales.** Those of a ragged M product's A are (R, K / 128), one per row, stored with unit stride along rows. Those of
its weight are (E, N / 128, K / 128), one per 128 x 128 elements, stored with unit stride along N. So TMA loads those of
a tile with each stage. The first element of a box must be at a multiple of 16 bytes: otherwise, an H200 stops at an
"illegal instruction". So a box begins up to three scales early: boxes of 132 scales for 128 rows, and a box of 32
scales of the weight, of which a tile needs one or two. block_scaled_k.py has the scales of a ragged K product.

**Turns.** A *wave* is 64 rows and 128 columns of a warpgroup: 64 registers beside the accumulators. Both warpgroups
share a tile. If they ran freely, they would multiply at the same time and promote at the same time, and the tensor
cores would idle meanwhile. So they take turns: a warpgroup passes the tensor cores on when the first of the four
products of its wave is done. It reads the scales before its turn. If it reads them after it has issued the first
product, the wait for them delays the other three. A stage is released once its products are done and its scales are in
registers: the next load of the stage overwrites both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.predicated import WORDS, arrive_if, store_if
from fusedmoe.kernels.device.warps import LANES, one_after
from fusedmoe.kernels.sm90.gemm.common import LOAD, MATH_WARPGROUPS, TURN_BARRIER, WARPGROUP, Gemm, Tma
from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM
from fusedmoe.kernels.sm90.tiles.config import BLOCK_ROWS, EPILOGUE_COLUMNS, SCALE_BLOCK, SCALE_PITCH

BOX_ROWS = 128  # rows whose scales a box has
ROW_SCALES = BOX_ROWS + SCALE_PITCH  # per box
ROW_SPACE = 160  # fp32 values per box: TMA writes at multiples of 128 bytes
WEIGHT_SCALES = 32  # per box
WAVE_VALUES = BLOCK_ROWS * SCALE_BLOCK // WARPGROUP  # per thread


class BlockScaled(Gemm):
    """A product of FP8 codes whose blocks have scales. It precedes the kind of product in the bases."""

    @property
    def takes_turns(self) -> bool:
        return True

    @property
    def wave_columns(self) -> int:
        return SCALE_BLOCK

    # -- mainloop

    @cute.jit
    def main_loop(self, tiled_mma, acc, r_a, r_b, ab, consumed, tile, group, scales, env):
        """The scaled products of the tiles of K, added up in ``acc``."""
        state = pipeline.PipelineState(self.stages, consumed, consumed % self.stages, consumed // self.stages % 2)
        tall, wide = cute.size(acc, mode=[1]), cute.size(acc, mode=[2])
        wave = cute.make_rmem_tensor(cute.make_layout((acc.shape[0], 1, 1)), Float32)
        tidx, _, _ = cute.arch.thread_idx()
        source = self.factor_source(scales, tile, group, tidx % WARPGROUP, env)
        acc.fill(0.0)
        for _ in cutlass.range(tile.depth, unroll=1):
            ab.consumer_wait(state)
            for i in cutlass.range_constexpr(tall):
                for j in cutlass.range_constexpr(wide):
                    last = i == tall - 1 and j == wide - 1
                    factors = self.factors(source, i, j, state.index)  # see the docstring of the module
                    cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=MATH_WARPGROUPS * WARPGROUP)
                    self.multiply_wave(tiled_mma, wave, r_a, r_b, i, j, state.index)
                    warpgroup.wait_group(1)
                    self.pass_turn(group)
                    warpgroup.wait_group(0)
                    if const_expr(last):
                        self.release_stage(ab, state, factors)
                    self.promote(acc, WAVE_VALUES * (i + tall * j), wave, factors)
            state.advance()

    def factor_source(self, scales, tile, group, thread, env):
        """What `factors` needs to find the scales of a thread's values of a tile."""
        raise NotImplementedError

    def factors(self, source, i: int, j: int, stage):
        """Read the scales of the wave at block ``i`` of 64 rows and block ``j`` of 128 columns: all that `promote`
        uses, since the stage is released before.
        """
        raise NotImplementedError

    def from_stage(self, factors) -> list[Any]:
        """The factors that the last wave of a stage read last. Loads of a warp complete in order, so once these are in
        registers, all are.
        """
        raise NotImplementedError

    def promote(self, acc, first: int, wave, factors):
        """Add the scaled values of a wave to those of the accumulators from ``first`` on."""
        raise NotImplementedError

    def release_stage(self, ab, state, factors) -> None:
        """Release a stage once the factors are in registers. TMA overwrites it then, in another CTA too."""
        count = one_after(*self.from_stage(factors))
        arrive_if(ab.is_signaling_thread, ab.consumer_get_barrier(state), ab.consumer_mask, count)

    @cute.jit
    def multiply_wave(self, tiled_mma, wave, r_a, r_b, i: cutlass.Constexpr[int], j: cutlass.Constexpr[int], stage):
        """Issue the products of one wave: the first one, and the others, as two groups."""
        depth = cute.size(r_a, mode=[2])
        warpgroup.fence()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        for kb in cutlass.range_constexpr(depth):
            a = cute.append_ones(r_a[None, i, kb, stage], up_to_rank=2)
            b = cute.append_ones(r_b[None, j, kb, stage], up_to_rank=2)
            cute.gemm(tiled_mma, wave, a, b, wave)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            if const_expr(kb == 0):
                warpgroup.commit_group()
        warpgroup.commit_group()

    # -- results

    @cute.jit
    def store(self, box, block, count: cutlass.Constexpr[int], to):
        """Store the valid rows of a box. Each warp turns its 16 rows of accumulators into whole rows in shared memory.

        Both warpgroups share a tile, so the tensor cores idle while results are stored. TMA would store boxes of a
        whole warpgroup, which waits at a barrier for each box. Here no warp waits for another one.
        """
        consumer, element = block.consumer, self.box_element
        boxes = consumer.boxes
        if const_expr(self.store_stages == 1):
            cute.arch.sync_warp()  # all lanes have read the box before
        where = consumer.group * self.store_stages + count % self.store_stages
        packed = box.values
        if const_expr(isinstance(packed, list)):
            packed = self.packed(packed)
        assert box.columns is None, "interleaved gate and up"
        copy = consumer.copies.pairs if const_expr(box.paired) else consumer.copies.store
        into = copy.partition_D(boxes)[None, None, None, where]
        cute.copy(copy, cute.make_tensor(packed.iterator, cute.make_layout(into.shape)), into)
        if const_expr(self.boxes_read > 0):  # see `RaggedM.release`
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        vector = 128 // element.width
        lanes = EPILOGUE_COLUMNS // vector  # per row
        row, column = block.warp_row + block.lane // lanes, box.column * EPILOGUE_COLUMNS + block.lane % lanes * vector
        inside = column < to.shape[1]
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), element, num_bits_per_copy=128)
        pitch = to.stride[0] * (element.width // 8)
        first = to.iterator.toint() + Int64(block.top + row) * pitch
        across = Int64(box.part * to.stride[2] + column) * (element.width // 8)
        for i in cutlass.range_constexpr(16 * lanes // LANES):
            below = i * (LANES // lanes)
            held = cute.make_rmem_tensor((vector,), element)
            source = cute.local_tile(boxes[None, None, where], (1, vector), (row + below, block.lane % lanes))
            cute.copy(atom, source[0, None], held)
            words = [cute.recast_tensor(held, Int32)[w] for w in range(WORDS)]
            if const_expr(box.arranged is not None):
                words = box.arranged(words)
            self.put(inside & (row + below < block.valid), first + below * pitch + across, words)

    def put(self, wanted, address, words) -> None:
        """Write 16 bytes of a result."""
        store_if(wanted, address, words)


class Scales(NamedTuple):
    """Stages of the scales in shared memory."""

    rows: cute.Tensor  # (ROW_SPACE, boxes, stages)
    weight: cute.Tensor  # (WEIGHT_SCALES, boxes, stages)


@dataclass(frozen=True)
class BlockScaledRaggedM(BlockScaled, RaggedM):
    """A ragged M kernel of FP8 codes: ``dtype`` "e4m3", or "e5m2" with a weight in E4M3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        wide = SCALE_BLOCK * self.weight_boxes
        if config.pingpong or config.tile_n % wide or self.b_major != "k":
            raise ValueError(
                f"FP8: expected a K-major weight and cooperative tiles of a multiple of {wide} columns, got "
                f"b_major {self.b_major!r} and {config.name}"
            )

    @property
    def rounds(self) -> bool:
        return True

    @property
    def row_boxes(self) -> int:
        """Boxes of row scales per stage."""
        return self.config.tile_m // BOX_ROWS

    @property
    def weight_boxes(self) -> int:
        """Boxes of the weight's scales per stage: two if a tile has columns of gate and columns of up."""
        return 2 if self.paired else 1

    @property
    def scale_bytes(self) -> int:
        return 4 * (ROW_SCALES * self.row_boxes + WEIGHT_SCALES * self.weight_boxes)

    @property
    def scale_space(self) -> int:
        return 4 * (ROW_SPACE * self.row_boxes + WEIGHT_SCALES * self.weight_boxes)

    # -- host side of a launch

    def fake_scales(self, rows: Any, experts: Any) -> list[Any]:
        fake, pitch = cute.runtime.make_fake_tensor, lambda: cute.sym_int64(divisibility=SCALE_PITCH)
        of_rows = fake(Float32, (rows, cute.sym_int()), (1, pitch()), assumed_align=16)
        of_weight = fake(
            Float32, (experts, cute.sym_int(), cute.sym_int()), (pitch(), 1, pitch()), assumed_align=16
        )  # fmt: skip
        return [of_rows, of_weight]

    def scale_loads(self, tensors: Any) -> tuple[Tma, Tma]:
        """The loads of a stage's row scales, and of a box of the weight's scales, (N / 128, K / 128 * E)."""
        of_rows, of_weight = tensors
        experts, wide, deep = of_weight.shape
        layout = cute.make_layout((wide, deep * experts), stride=(1, of_weight.stride[2]))
        of_weight = cute.make_tensor(of_weight.iterator, layout)
        rows, weight = (
            cpasync.make_tiled_tma_atom(LOAD, scales, cute.make_layout((size, 1)), (size, 1))
            for scales, size in ((of_rows, ROW_SCALES), (of_weight, WEIGHT_SCALES))
        )
        return Tma(*rows), Tma(*weight)

    # -- device side

    def shared_scales(self, smem: SmemAllocator) -> Scales:
        sizes = ((ROW_SPACE, self.row_boxes), (WEIGHT_SCALES, self.weight_boxes))
        return Scales(*[smem.allocate_tensor(Float32, cute.make_layout((*size, self.stages)), 128) for size in sizes])

    def first_weight_scale(self, tile, n, part: int):
        """The first of a tile's scales among those along N; with ``part`` 1, the first of its columns of up."""
        per_part = self.config.tile_n // self.weight_boxes // SCALE_BLOCK
        return part * (n // 2 // SCALE_BLOCK) + tile.column * per_part

    def scale_copies(self, loads, scales, tile, n):
        """Atom, shared side by stages, and global side by tiles of K, of each load of a tile's scales."""
        of_rows, of_weight = loads
        boxes = [(of_rows, tile.row + i * BOX_ROWS, 0, scales.rows[None, i, None]) for i in range(self.row_boxes)]
        for part in range(self.weight_boxes):
            first = self.first_weight_scale(tile, n, part)
            boxes.append((of_weight, first, tile.expert * tile.depth, scales.weight[None, part, None]))
        copies = []
        for (atom, source), first, block, stages in boxes:
            size = ROW_SCALES if atom is of_rows.atom else WEIGHT_SCALES
            aligned = first // SCALE_PITCH * SCALE_PITCH
            g = cute.local_tile(cute.domain_offset((aligned, block), source), (size, 1), (0, None))
            layout = cute.make_layout((size, 1, self.stages), stride=(1, 1, stages.stride[1]))
            s = cute.make_tensor(stages.iterator, layout)
            to, of = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
            )
            copies.append((atom, to, of))
        return copies

    def load_scales(self, copies, k_tile, stage, full) -> None:
        for atom, to, source in copies:
            cute.copy(atom, source[None, k_tile], to[None, stage], tma_bar_ptr=full)

    def factor_source(self, scales, tile, group, thread, env):
        return scales, tile, env.n, self.block_row(0, group) + self.row_of(thread, 0) + tile.row % SCALE_PITCH

    def factors(self, source, i, j, stage):
        """A factor for each of the two rows of a thread."""
        scales, tile, n, row = source
        factors = cute.make_rmem_tensor((2,), Float32)
        part, column = (j, 0) if self.weight_boxes == 2 else (0, j)
        column += self.first_weight_scale(tile, n, part) % SCALE_PITCH
        of_weight = scales.weight[column, part, stage]
        for h in range(2):
            factors[h] = scales.rows[row + 8 * h, i, stage] * of_weight
        return factors

    def from_stage(self, factors):
        return [factors[0], factors[1]]

    def promote(self, acc, first, wave, factors):
        for pair in range(WAVE_VALUES // 2):  # two of one row, two of the other
            for v in (2 * pair, 2 * pair + 1):
                acc[first + v] = acc[first + v] + wave[v] * factors[pair % 2]

    # -- results

    def store_atom(self, t: cute.Tensor, parts: int) -> cute.Tensor:
        """A result as (R, W, parts): rows are stored by threads, not by TMA."""
        width = cute.assume(t.shape[1] // parts, divby=128 // self.box_element.width)
        return cute.make_tensor(
            t.iterator, cute.make_layout((t.shape[0], width, parts), stride=(t.stride[0], 1, width))
        )
