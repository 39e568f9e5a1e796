"""Operands of FP8 codes with scales: the mainloop, and the stores of its results by threads.

    acc[r, n] = sum over blocks b of K of (sum over k in b of a[r, k] * b[n, k]) * scale of A * scale of B

A block has 128 elements of K: one stage. Tensor cores add FP8 products with about 14 bits, so they sum only one block.
The math warps scale each of these sums, and add it to accumulators in fp32 registers (*promotion*). block_scales.py,
block_scales_k.py and tensor_scales.py have the scales.

**Turns.** A *wave* is 64 rows and 128 columns of a warpgroup: 64 registers beside the accumulators. Both warpgroups
share a tile. If they ran freely, they would multiply at the same time and promote at the same time, and the tensor
cores would idle meanwhile. So they take turns: a warpgroup passes the tensor cores on when the first of the four
products of its wave is done. It reads the scales before its turn. If it reads them after it has issued the first
product, the wait for them delays the other three. A stage is released once its products are done and its scales are in
registers: the next load of the stage overwrites both.

| barrier | arrives | waits |
|---|---|---|
| `TURN_BARRIER` + g | the other math warpgroup, once its wave's first product is done | warpgroup g, before a wave |
| a stage is full | TMA: codes, and scales if stages have some | both math warpgroups |
| a stage is empty | both math warpgroups, with the factors in registers (`Scaled.release_stage`) | the loading warp |

Run: tests/unit/test_kernels_compile.py, tests/gpu/test_hopper_products.py; ``python -m benchmarks --only fp8``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from fusedmoe.kernels.device.predicated import WORDS, add_if, arrive_if, store_if
from fusedmoe.kernels.device.warps import LANES, one_after
from fusedmoe.kernels.sm90.gemm.common import MATH_WARPGROUPS, TURN_BARRIER, WARPGROUP, pass_turn
from fusedmoe.kernels.sm90.gemm.operands import Operands
from fusedmoe.kernels.sm90.tiles.config import BLOCK_ROWS, EPILOGUE_COLUMNS, SCALE_BLOCK, TileConfig

WAVE_VALUES = BLOCK_ROWS * SCALE_BLOCK // WARPGROUP  # per thread


@dataclass(frozen=True)
class Scaled(Operands):
    """FP8 codes: ``dtype`` "e4m3", or "e5m2" with B in E4M3."""

    scaled = True
    takes_turns = True

    def wave_columns(self, config: TileConfig) -> int:
        return SCALE_BLOCK

    @cute.jit
    def main_loop(self, kernel, tiled_mma, acc, r_a, r_b, ab, consumed, tile, group, scales, env):
        """The scaled products of the tiles of K, added up in ``acc``."""
        state = pipeline.PipelineState(kernel.stages, consumed, consumed % kernel.stages, consumed // kernel.stages % 2)
        tall, wide = cute.size(acc, mode=[1]), cute.size(acc, mode=[2])
        wave = cute.make_rmem_tensor(cute.make_layout((acc.shape[0], 1, 1)), Float32)
        tidx, _, _ = cute.arch.thread_idx()
        source = self.factor_source(kernel, scales, tile, group, tidx % WARPGROUP, env)
        acc.fill(0.0)
        for _ in cutlass.range(tile.depth, unroll=1):
            ab.consumer_wait(state)
            for i in cutlass.range_constexpr(tall):
                for j in cutlass.range_constexpr(wide):
                    last = i == tall - 1 and j == wide - 1
                    factors = self.factors(source, i, j, state.index)  # see the docstring of the module
                    cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=MATH_WARPGROUPS * WARPGROUP)
                    multiply_wave(tiled_mma, wave, r_a, r_b, i, j, state.index)
                    warpgroup.wait_group(1)
                    pass_turn(group)
                    warpgroup.wait_group(0)
                    if const_expr(last):
                        self.release_stage(ab, state, factors)
                    self.promote(acc, WAVE_VALUES * (i + tall * j), wave, factors)
            state.advance()

    def release_stage(self, ab, state, factors) -> None:
        """Release a stage once the factors are in registers. TMA overwrites it then, in another CTA too."""
        count = one_after(*self.from_stage(factors))
        arrive_if(ab.is_signaling_thread, ab.consumer_get_barrier(state), ab.consumer_mask, count)

    @cute.jit
    def store(self, kernel, box, block, count: cutlass.Constexpr[int], to, adds: cutlass.Constexpr[str] = ""):
        """Store the valid rows of a box, or add them to those in memory, whose type ``adds`` names. Each warp turns its
        16 rows of accumulators into whole rows in shared memory.

        Both warpgroups share a tile, so the tensor cores idle while results are stored. TMA would store boxes of a
        whole warpgroup, which waits at a barrier for each box. Here no warp waits for another one.
        """
        consumer, element = block.consumer, kernel.box_element
        boxes = consumer.boxes
        if const_expr(kernel.store_stages == 1):
            cute.arch.sync_warp()  # all lanes have read the box before
        where = consumer.group * kernel.store_stages + count % kernel.store_stages
        packed = box.values
        if const_expr(isinstance(packed, list)):
            packed = kernel.packed(packed)
        assert box.columns is None, "interleaved gate and up"
        copy = consumer.copies.pairs if const_expr(box.paired) else consumer.copies.store
        into = copy.partition_D(boxes)[None, None, None, where]
        cute.copy(copy, cute.make_tensor(packed.iterator, cute.make_layout(into.shape)), into)
        if const_expr(kernel.boxes_read > 0):  # see `RaggedM.release`
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
            put(inside & (row + below < block.valid), first + below * pitch + across, words, adds)

    @abstractmethod
    def fake_scales(self, experts: Any, *extents: Any) -> list[Any]:
        """The scales of A and B, for the compiler. ``extents``: R of a ragged M product; M and N of a ragged K one."""

    @abstractmethod
    def factor_source(self, kernel, scales, tile, group, thread, env):
        """What `factors` needs to find the scales of a thread's values of a tile."""

    @abstractmethod
    def factors(self, source, i: int, j: int, stage):
        """Read the scales of the wave at 64 rows ``i`` and 128 columns ``j``: all that `promote` uses later."""

    @abstractmethod
    def from_stage(self, factors) -> list[Any]:
        """The factors that the last wave of a stage read last. Loads of a warp complete in order, so once these are in
        registers, all are.
        """

    @abstractmethod
    def promote(self, acc, first: int, wave, factors) -> None:
        """Add the scaled values of a wave to those of the accumulators from ``first`` on."""


@dataclass(frozen=True)
class Staged(Scaled):
    """FP8 codes whose blocks have scales, which TMA loads with each stage."""

    staged = True

    @abstractmethod
    def scale_bytes(self, kernel: Any) -> int:
        """Bytes that TMA loads to a stage's scales."""

    @abstractmethod
    def scale_space(self, kernel: Any) -> int:
        """Shared memory of a stage's scales."""

    @abstractmethod
    def shared_scales(self, kernel: Any, smem: Any) -> Any:
        """Allocate the stages of the scales."""


def put(wanted, address, words, adds: str) -> None:
    """Write 16 bytes of a result, or add them: once per launch, so the result does not depend on the order."""
    if adds:
        add_if(wanted, address, words, adds)
    else:
        store_if(wanted, address, words)


@cute.jit
def multiply_wave(tiled_mma, wave, r_a, r_b, i: cutlass.Constexpr[int], j: cutlass.Constexpr[int], stage):
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
