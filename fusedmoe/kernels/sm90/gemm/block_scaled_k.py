"""Ragged K product of FP8 codes with block scales: the gradient of the weights, one product per expert.

    out[e, n, k] = sum over blocks t of e's rows of
                   (sum over rows r in t of a[n, r] * b[k, r]) * a_scale[n, t] * b_scale[k, t]

``a`` (N, P) and ``b`` (K, P) are the gradient and the input in *columns form*: 128 rows of one column share a scale,
and have unit stride, since FP8 products need K-major operands. P counts padded rows: each expert's rows begin at a
multiple of 128. Padding has codes of zero, so no product needs bounds along the rows. What follows the last expert's
padding is not read.

The scales are (N, P / 128) and (K, P / 128) with unit stride along N and K. TMA brings those of a tile with each stage.
A cluster shares the scales of the operand that it shares.

**Factors.** Each value of a wave has a factor of its own: that of its row times that of its column. A thread has two
rows and 32 columns. It reads these scales before the wave is multiplied, and keeps them in registers; the waves of
several blocks of rows share those of the columns. So promotion takes two instructions per value and no reads: about
130 issue cycles of the 256 that the tensor cores have for the other warpgroup's wave. A value is first multiplied by
the scale of its column, in its own register. The product of both scales would take another register, and read one more.

**Results** are stored by threads, as those of ragged M. To a gradient that exists already, threads add 16 bytes at a
time: once per element and launch, so the result does not depend on the order. Neither has a barrier.

Axes: R rows, P padded rows, M and N features (M those of ``a``), E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.predicated import add_if
from fusedmoe.kernels.device.warps import LANES
from fusedmoe.kernels.sm90.epilogue.outputs import Block, Box
from fusedmoe.kernels.sm90.gemm import scheduler
from fusedmoe.kernels.sm90.gemm.block_scaled import WAVE_VALUES, BlockScaled
from fusedmoe.kernels.sm90.gemm.common import LOAD, PRODUCER, SHARED_LOAD, VALUES, Tma
from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK
from fusedmoe.kernels.sm90.tiles.config import BLOCK_ROWS, EPILOGUE_COLUMNS, SCALE_BLOCK, SCALE_PITCH

PAIRS = SCALE_BLOCK // 8  # of adjacent columns of a wave, per thread
# fp32 values between the rows of a box: four rows of eight columns are in different banks. The addresses of a thread
# differ by constants. Those of a swizzled box do not, and ptxas spills other registers to keep them.
FP32_PITCH = EPILOGUE_COLUMNS + 8


class Operand(NamedTuple):
    """The loads of an operand."""

    codes: Tma  # (N, P)
    scales: Tma | None  # (N, P / 128), if blocks have scales


class Scales(NamedTuple):
    """Stages of the scales in shared memory, if blocks have scales."""

    a: cute.Tensor | None  # (tile_m, stages)
    b: cute.Tensor | None  # (tile_n, stages)


class Factors(NamedTuple):
    """The scales of a thread's values of a wave."""

    rows: cute.Tensor  # those of its two rows
    columns: cute.Tensor  # those of its columns, in pairs


@dataclass(frozen=True)
class BlockScaledRaggedK(BlockScaled, RaggedK):
    """A ragged K kernel of FP8 codes: ``dtype`` "e4m3", or "e5m2" with ``b`` in E4M3."""

    def __post_init__(self) -> None:
        if self.gathered is not None or self.config.pingpong or self.config.tile_n % SCALE_BLOCK:
            raise ValueError(
                f"FP8: expected no gathered operand and cooperative tiles of a multiple of {SCALE_BLOCK} columns, got "
                f"{self.gathered!r} and {self.config.name}"
            )

    @property
    def late(self) -> bool:
        return False

    @property
    def padded(self) -> bool:
        return True

    @property
    def registers(self) -> tuple[int, int]:
        return 24, 240

    @property
    def scale_bytes(self) -> int:
        return 4 * (self.config.tile_m + self.config.tile_n)

    @property
    def scale_space(self) -> int:
        return self.scale_bytes

    @property
    def store_stages(self) -> int:
        """Two boxes of fp32 would cost a stage of A and B."""
        return 1 if self.box_element.width == 32 else super().store_stages

    @property
    def box_bytes(self) -> int:
        return BLOCK_ROWS * FP32_PITCH * 4 if self.box_element.width == 32 else super().box_bytes

    def box_layout(self, boxes: int) -> Any:
        if self.box_element.width != 32:
            return super().box_layout(boxes)
        layout = cute.make_layout(
            (BLOCK_ROWS, EPILOGUE_COLUMNS, boxes), stride=(FP32_PITCH, 1, BLOCK_ROWS * FP32_PITCH)
        )
        return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, layout)

    # -- compile

    def compile(self) -> Any:
        """Compile without a GPU; the arguments are those of ``__call__``, without the stream."""
        fake, experts, blocks = cute.runtime.make_fake_tensor, cute.sym_int(), cute.sym_int()
        m, n, padded = cute.sym_int(), cute.sym_int(), cute.sym_int()
        pitch = lambda divisor: cute.sym_int64(divisibility=divisor)  # noqa: E731
        operands = []
        for extent in (m, n):
            operands.append(fake(cutlass.Uint8, (extent, padded), (pitch(self.alignment), 1), assumed_align=16))
            operands.append(self.fake_scales(extent, blocks, experts))
        out_pitch = lambda: pitch(self.alignment)  # noqa: E731
        out = fake(self.box_element, (experts, m, n), (out_pitch(), out_pitch(), 1), assumed_align=16)
        return cute.compile(
            self, *operands, fake(Int32, (experts,), (1,)), out, fake(Int32, (1,), (1,)), *[Int32(0)] * 3,
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {self.arch}",
        )  # fmt: skip

    def fake_scales(self, extent: Any, blocks: Any, experts: Any) -> Any:
        """The scales of an operand, for the compiler."""
        pitch = cute.sym_int64(divisibility=SCALE_PITCH)
        return cute.runtime.make_fake_tensor(Float32, (extent, blocks), (1, pitch), assumed_align=16)

    # -- host side of a launch

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, offsets, out, counter, band, ctas, dynamic, stream):
        """Launch."""
        config = self.config
        a, b = cute.recast_tensor(a, self.element), cute.recast_tensor(b, self.b_element)
        major = OperandMajorMode.K
        layouts = self.layouts(major, major)
        load_a = self.operand(a, a_scale, layouts.a, config.tile_m, config.cluster_n)
        load_b = self.operand(b, b_scale, layouts.b, config.tile_n, config.cluster_m)
        by_expert = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[1, 2, 0]))
        self.kernel(
            load_a, load_b, self.results(by_expert, a_scale, b_scale), self.tiled_mma(major, major), layouts, offsets,
            counter, band, dynamic, a.shape[0], b.shape[0], None,
        ).launch(stream=stream, use_pdl=self.beside, **self.grid(ctas))  # fmt: skip

    def results(self, out, a_scale, b_scale) -> Any:
        """The results, and the scales if there is one per expert, for the epilogue and the main loop."""
        return out

    def operand(self, codes, scales, smem, tile: int, ctas: int) -> Operand:
        """The loads of one stage of a tile's codes and scales, shared by this number of CTAs."""
        op = SHARED_LOAD if ctas > 1 else LOAD
        box = cute.slice_(smem, (None, None, 0))
        of_codes = cpasync.make_tiled_tma_atom(op, codes, box, (tile, self.tile_k), num_multicast=ctas)
        return Operand(Tma(*of_codes), self.load_of_scales(scales, tile, op, ctas))

    def load_of_scales(self, scales, tile: int, op: Any, ctas: int) -> Tma | None:
        """The load of a stage of a tile's scales, shared by this number of CTAs."""
        layout = cute.make_layout((tile, 1))
        return Tma(*cpasync.make_tiled_tma_atom(op, scales, layout, (tile, 1), num_multicast=ctas))

    # -- device side

    def shared_scales(self, smem: SmemAllocator) -> Scales:
        sizes = (self.config.tile_m, self.config.tile_n)
        return Scales(*[smem.allocate_tensor(Float32, cute.make_layout((n, self.stages)), 128) for n in sizes])

    @cute.jit
    def load(self, load_a, load_b, shared, rings, m, n):
        """The loading warp: codes and scales of A and B of every tile, stage by stage."""
        config, ab, scales = self.config, rings.ab, shared.scales
        rank_m, rank_n = scheduler.ranks(config)
        a_mask, b_mask = self.multicast_masks(rank_m, rank_n)
        state = pipeline.make_pipeline_state(PRODUCER, self.stages)
        turn = Int32(0)
        turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        while tile.expert != scheduler.END:
            copies = self.copies(load_a, shared.a, scales.a, tile.place, m, config.tile_m, rank_n, config.cluster_n)
            copies_of_b = self.copies(
                load_b, shared.b, scales.b, tile.column, n, config.tile_n, rank_m, config.cluster_m
            )
            first = tile.row // self.tile_k
            for k_tile in cutlass.range(tile.depth, unroll=1):
                ab.producer_acquire(state)
                full = ab.producer_get_barrier(state)
                for some, mask in ((copies, a_mask), (copies_of_b, b_mask)):
                    for atom, to, source in some:
                        at = (None, first + k_tile)
                        cute.copy(atom, source[at], to[None, state.index], tma_bar_ptr=full, mcast_mask=mask)
                state.advance()
            turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        ab.producer_tail(state)

    def copies(self, load, codes, scales, place, width, tile: int, rank, ctas: int):
        """Atom, shared side by stages, and global side by tiles of P, of each load of an operand's tile."""
        # a tile past the last row loads the last one instead, see `Gemm.across`; its results are not stored
        place = cutlass.min(place, (width + tile - 1) // tile - 1)
        loads = [(load.codes, codes, self.tile_k)]
        if load.scales is not None:
            boxes = cute.make_tensor(scales.iterator, cute.make_layout((tile, 1, self.stages), stride=(1, 1, tile)))
            loads.append((load.scales, boxes, 1))
        copies = []
        for (atom, source), shared, deep in loads:
            g = cute.local_tile(source, (tile, deep), (place, None))
            to, of = cpasync.tma_partition(
                atom, rank, cute.make_layout(ctas), cute.group_modes(shared, 0, 2), cute.group_modes(g, 0, 2)
            )
            copies.append((atom, to, of))
        return copies

    # -- mainloop

    def factor_source(self, scales, tile, group, thread, env):
        columns = cute.make_rmem_tensor((2, PAIRS), Float32)
        return scales, group, self.row_of(thread, 0), thread % 4, columns

    def factors(self, source, i, j, stage):
        scales, group, row, first, columns = source
        rows = cute.make_rmem_tensor((2,), Float32)
        for h in range(2):
            rows[h] = scales.a[self.block_row(i, group) + row + 8 * h, stage]
        if i == 0:  # the blocks of rows share the columns
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=64)
            of_block = cute.local_tile(scales.b, (SCALE_BLOCK, 1), (j, stage))[None, 0]
            for pair in range(PAIRS):
                cute.copy(atom, cute.local_tile(of_block, (2,), (4 * pair + first,)), columns[None, pair])
        return Factors(rows, columns)

    def from_stage(self, factors):
        last = [factors.rows[0], factors.rows[1]]
        if self.config.blocks == 1:  # else an earlier wave has read the columns
            last.append(factors.columns[1, PAIRS - 1])
        return last

    def promote(self, acc, first, wave, factors):
        for v in range(WAVE_VALUES):  # two of one row, two of the other
            by_column = wave[v] * factors.columns[v % 2, v // 4]
            acc[first + v] = acc[first + v] + by_column * factors.rows[v // 2 % 2]

    # -- results

    @cute.jit
    def finish(self, acc, tile, consumer, inputs, env):
        """Store the gradient. An expert without rows gets zeros, or nothing if the kernel accumulates."""
        wanted = tile.depth > 0
        if const_expr(not self.accumulate):
            wanted = True
        if wanted:
            lane, warp_row = consumer.thread % LANES, consumer.thread // LANES * 16
            count = self.boxes_per_block
            for i in cutlass.range_constexpr(self.config.blocks):
                top = tile.place * self.config.tile_m + self.block_row(i, consumer.group)
                valid = env.shape[0] - top
                if valid > 0:
                    block = Block(acc, 0, consumer, tile, top, valid, lane, warp_row, True)
                    for j in cutlass.range_constexpr(count):
                        values = [acc[(i * count + j) * VALUES + v] for v in range(VALUES)]
                        self.store(Box(values, tile.expert, tile.column * count + j), block, i * count + j, env)
        return inputs

    def put(self, wanted, address, words) -> None:
        """Add 16 bytes of a result to those in memory: once per launch, so the result does not depend on the order."""
        if const_expr(self.accumulate):
            add_if(wanted, address, words, self.out)
        else:
            super().put(wanted, address, words)
