"""Ragged K grouped GEMM: the gradient of the weights, one product per expert.

    out[e] = sum over the rows r of e of a[r, :]ᵀ b[r, :]        (E, M, N), accumulated in fp32

``a`` (R, M) is the gradient of the layer's output, ``b`` (R, N) the layer's input. Both are row-major and the
contraction runs over rows, so both operands are MN-major in shared memory. An expert without rows gets exact zeros.

**Bounds.** Rows past an expert's last row would be added to the result. They must be zero in both operands, because
NaN times zero is NaN. Each operand's TMA descriptor therefore has two more dimensions than the tensor:

- The rows end at 2^30. A box that starts at row ``2^30 - valid`` has ``valid`` rows, followed by zeros.
- The coordinate of the first extra dimension is always 2^30. It subtracts those 2^30 rows again, by address arithmetic
  modulo 2^64.
- The second extra dimension counts rows. Its coordinate is ``first + valid``, for the rows from ``first``.

The stores of ragged_m.py use a descriptor whose base is before the tensor. Loads cannot: the hardware checks theirs.

``out`` may be fp32 and hold a gradient already. TMA then adds to it: once per element and launch, so the result does
not depend on the order.

Axes: R rows, M and N features, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync

from fusedmoe.kernels.sm90 import tiles
from fusedmoe.kernels.sm90.config import BLOCK_ROWS, EPILOGUE_COLUMNS
from fusedmoe.kernels.sm90.gemm import LOAD_WARP, PRODUCER, SCHEDULER_WARP, VALUES, Gemm, Tma

END_ROW = 2**30
WRAP = 2**34  # elements: END_ROW rows of this pitch are a multiple of 2^64 bytes


@dataclass(frozen=True)
class RaggedK(Gemm):
    """A ragged K kernel."""

    out: str = "bf16"  # or "fp16", "fp32"
    accumulate: bool = False

    @property
    def symbol(self) -> str:
        add = "_add" if self.accumulate else ""
        return f"sm90_ragged_k_{self.dtype}_{self.out}{add}_{self.config.name}"

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(f"fusedmoe.kernels.sm90.{name}" for name in ("ragged_k", "gemm", "tiles", "warps", "config"))

    @property
    def box_element(self) -> Any:
        return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}[self.out]

    @property
    def boxes_per_block(self) -> int:
        return self.config.tile_n // EPILOGUE_COLUMNS

    # -- compile

    def compile(self) -> Any:
        """Compile without a GPU; the arguments are those of ``__call__``, without the stream."""
        fake, rows, experts = cute.runtime.make_fake_tensor, cute.sym_int(), cute.sym_int()
        m, n = cute.sym_int(), cute.sym_int()
        pitch = lambda: cute.sym_int64(divisibility=self.alignment)  # noqa: E731
        a = fake(self.element, (rows, m), (pitch(), 1), assumed_align=16)
        b = fake(self.element, (rows, n), (pitch(), 1), assumed_align=16)
        out = fake(self.box_element, (experts, m, n), (pitch(), pitch(), 1), assumed_align=16)
        return cute.compile(
            self, a, b, fake(Int32, (experts,), (1,)), out, fake(Int32, (1,), (1,)), *[Int32(0)] * 3,
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {self.arch}",
        )  # fmt: skip

    # -- host side of a launch

    @cute.jit
    def __call__(self, a, b, offsets, out, counter, band, ctas, dynamic, stream):
        config = self.config
        major = OperandMajorMode.MN
        tiled_mma = self.tiled_mma(major, major)
        layouts = self.layouts(major, major)
        load_a = self.across_atom(self.ragged(a), layouts.a, config.cluster_n)
        load_b = self.across_atom(self.ragged(b), layouts.b, config.cluster_m)
        by_expert = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[1, 2, 0]))
        store = cpasync.CopyBulkTensorTileS2GOp()
        if const_expr(self.accumulate):
            store = cpasync.CopyReduceBulkTensorTileS2GOp()
        box = cute.slice_(layouts.boxes, (None, None, 0))
        store_out = Tma(*cpasync.make_tiled_tma_atom(store, by_expert, box, (BLOCK_ROWS, EPILOGUE_COLUMNS)))
        self.kernel(
            load_a, load_b, store_out, tiled_mma, layouts, offsets, counter, band, dynamic, a.shape[1], b.shape[1]
        ).launch(stream=stream, **self.grid(ctas))  # fmt: skip

    def ragged(self, t: cute.Tensor) -> cute.Tensor:
        """(R, W) as (W, rows, -, first row + rows); see the module's docstring."""
        pitch = t.stride[0]
        layout = cute.make_layout(
            (t.shape[1], END_ROW, END_ROW + 1, t.shape[0] + 1), stride=(1, pitch, Int64(WRAP) - pitch, pitch)
        )
        return cute.make_tensor(t.iterator, layout)

    # -- device side

    @cute.kernel
    def kernel(self, load_a, load_b, store_out, tiled_mma, layouts, offsets, counter, band, dynamic, m, n):
        config = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared, rings = self.shared_memory(layouts)
        if warp_idx >= LOAD_WARP:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_idx == LOAD_WARP:
                self.load(load_a, load_b, shared, rings, m, n)
            elif warp_idx == SCHEDULER_WARP:
                tiles_m, tiles_n = (m + config.tile_m - 1) // config.tile_m, (n + config.tile_n - 1) // config.tile_n
                share = tiles.Share(config, band, counter, dynamic, shared.drawing)
                tiles.schedule_ragged_k(offsets, tiles_m, tiles_n, self.tile_k, share, rings.tiles, shared.slots)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.math(tiled_mma, shared, rings, warp_idx // 4, store_out)

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
        config, tile_k, ab = self.config, self.tile_k, rings.ab
        rank_m, rank_n = tiles.ranks(config)
        a_mask, b_mask = self.multicast_masks(rank_m, rank_n)
        state = pipeline.make_pipeline_state(PRODUCER, self.stages)
        turn = Int32(0)
        turn, tile = tiles.take(rings.tiles, turn, shared.slots)
        while tile.expert != tiles.END:
            for k_tile in cutlass.range(tile.depth, unroll=1):
                valid = cutlass.min(tile.rows - k_tile * tile_k, tile_k)
                end = tile.row + k_tile * tile_k + valid
                ab.producer_acquire(state)
                full = ab.producer_get_barrier(state)
                a_here = cute.domain_offset((0, END_ROW - valid), load_a.tensor[None, None, END_ROW, end])
                b_here = cute.domain_offset((0, END_ROW - valid), load_b.tensor[None, None, END_ROW, end])
                of_a = (load_a.atom, a_here, shared.a, config.tile_m, tile.place, m, rank_n, config.cluster_n)
                of_b = (load_b.atom, b_here, shared.b, config.tile_n, tile.column, n, rank_m, config.cluster_m)
                a_loads, b_loads = self.across(*of_a), self.across(*of_b)
                for to, source in a_loads:
                    cute.copy(load_a.atom, source[None, 0], to[None, state.index], tma_bar_ptr=full, mcast_mask=a_mask)
                for to, source in b_loads:
                    cute.copy(load_b.atom, source[None, 0], to[None, state.index], tma_bar_ptr=full, mcast_mask=b_mask)
                state.advance()
            turn, tile = tiles.take(rings.tiles, turn, shared.slots)
        ab.producer_tail(state)

    @cute.jit
    def finish(self, acc, tile, consumer, inputs, env):
        """Store the gradient. An expert without rows gets zeros, or nothing if the kernel accumulates."""
        config, store_out = self.config, env
        wanted = tile.depth > 0
        if const_expr(not self.accumulate):
            wanted = True
        if wanted:
            for i in cutlass.range_constexpr(config.blocks):
                top = tile.place * (config.tile_m // BLOCK_ROWS) + self.block_row(i, consumer.group) // BLOCK_ROWS
                for j in cutlass.range_constexpr(self.boxes_per_block):
                    base = i * (config.tile_n // 2) + j * VALUES
                    place = (top, tile.column * self.boxes_per_block + j)
                    out = store_out.tensor[None, None, tile.expert]
                    target = cute.local_tile(out, (BLOCK_ROWS, EPILOGUE_COLUMNS), place)
                    values = [acc[base + v] for v in range(VALUES)]
                    self.put_box(values, consumer, consumer.copies.store, j, store_out, target)
        return inputs
