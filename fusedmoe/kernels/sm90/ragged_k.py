"""Gradient of grouped weights: for every expert the product of its rows of two matrices.

    out[e] = sum over the rows r of e of a[r, :]ᵀ b[r, :]        (E, M, N), accumulated in fp32

``a`` (R, M) is the gradient of the layer's output, ``b`` (R, N) its input; both lie row by row, so the contraction runs
across the rows and both operands are M- or N-major in shared memory. An expert without rows gets exact zeros.

Ragged K. What a load reads past an expert's last row would be added: it has to be zero, in both operands, since 0 x
NaN is NaN. Each operand's descriptor has two dimensions more than the tensor: its rows end at 2^30, so a box that
starts at row ``2^30 - valid`` has ``valid`` rows and zeros behind them. The first extra dimension, always at 2^30,
takes those 2^30 rows back, by address arithmetic modulo 2^64; the second one counts rows, and is at ``first + valid``.
(A descriptor whose base lies before the tensor, as ragged_m.py has for its stores, is not possible here: loads check
the base.)

``out`` may be fp32 and already hold a gradient, which is then added to by the copy engine: each element is touched
once a launch, so the sum does not depend on an order.

Axes: R rows, M and N features, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync

from fusedmoe.kernels.sm90 import tiles
from fusedmoe.kernels.sm90.config import BLOCK_ROWS, EPILOGUE_COLUMNS, TILE_K
from fusedmoe.kernels.sm90.gemm import LOAD_WARP, PRODUCER, SCHEDULER_WARP, VALUES, Gemm

END_ROW = 2**30
WRAP = 2**34  # elements: END_ROW of them are 2^64, or a multiple, in bytes


@dataclass(frozen=True)
class RaggedK(Gemm):
    """One kernel of this page."""

    out: str = "bf16"  # or "fp16", "fp32"
    accumulate: bool = False

    @property
    def symbol(self) -> str:
        add = "_add" if self.accumulate else ""
        return f"sm90_ragged_k_{self.dtype}_{self.out}{add}_{self.config.name}"

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(f"fusedmoe.kernels.sm90.{name}" for name in ("ragged_k", "gemm", "tiles", "config"))

    @property
    def box_element(self) -> Any:
        return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}[self.out]

    @property
    def boxes_a_block(self) -> int:
        return self.config.tile_n // EPILOGUE_COLUMNS

    # -- compile

    def compile(self) -> Any:
        """Compile without a GPU; a function of torch tensors and numbers, to be called as `functions.py` does."""
        fake, rows, experts = cute.runtime.make_fake_tensor, cute.sym_int(), cute.sym_int()
        m, n = cute.sym_int(), cute.sym_int()
        pitch = lambda: cute.sym_int64(divisibility=8)  # noqa: E731
        a = fake(self.element, (rows, m), (pitch(), 1), assumed_align=16)
        b = fake(self.element, (rows, n), (pitch(), 1), assumed_align=16)
        out = fake(self.box_element, (experts, m, n), (pitch(), pitch(), 1), assumed_align=16)
        return cute.compile(
            self, a, b, fake(Int32, (experts,), (1,)), out, fake(Int32, (1,), (1,)), Int32(0), Int32(0), Int32(0),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {self.arch}",
        )  # fmt: skip

    # -- host side of a launch

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offsets: cute.Tensor,
        out: cute.Tensor,
        counter: cute.Tensor,
        band: Int32,
        ctas: Int32,
        dynamic: Int32,
        stream,
    ):
        config = self.config
        across = OperandMajorMode.MN
        tiled_mma = self.tiled_mma(across, across)
        a_smem = self.smem_layout((config.tile_m, TILE_K), across, self.stages)
        b_smem = self.smem_layout((config.tile_n, TILE_K), across, self.stages)
        box_smem = self.box_layout(self.boxes)
        tma_a, a_tma = self.across_atom(self.ragged(a), a_smem, config.cluster_n)
        tma_b, b_tma = self.across_atom(self.ragged(b), b_smem, config.cluster_m)
        by_expert = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[1, 2, 0]))
        store = cpasync.CopyBulkTensorTileS2GOp()
        if const_expr(self.accumulate):
            store = cpasync.CopyReduceBulkTensorTileS2GOp()
        tma_out, out_tma = cpasync.make_tiled_tma_atom(
            store, by_expert, cute.slice_(box_smem, (None, None, 0)), (BLOCK_ROWS, EPILOGUE_COLUMNS)
        )
        self.kernel(
            tma_a, a_tma, tma_b, b_tma, tma_out, out_tma, tiled_mma, a_smem, b_smem, box_smem,
            offsets, counter, band, dynamic, a.shape[1], b.shape[1],
        ).launch(stream=stream, **self.grid(ctas))  # fmt: skip

    def ragged(self, t: cute.Tensor) -> cute.Tensor:
        """(R, W) as (W, rows, -, first row + rows); see the module's page."""
        pitch = t.stride[0]
        layout = cute.make_layout(
            (t.shape[1], END_ROW, END_ROW + 1, t.shape[0] + 1), stride=(1, pitch, Int64(WRAP) - pitch, pitch)
        )
        return cute.make_tensor(t.iterator, layout)

    # -- device side

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        a_tma: cute.Tensor,
        tma_b: cute.CopyAtom,
        b_tma: cute.Tensor,
        tma_out: cute.CopyAtom,
        out_tma: cute.Tensor,
        tiled_mma: cute.TiledMma,
        a_smem: cute.ComposedLayout,
        b_smem: cute.ComposedLayout,
        box_smem: cute.ComposedLayout,
        offsets: cute.Tensor,
        counter: cute.Tensor,
        band: Int32,
        dynamic: Int32,
        m: Int32,
        n: Int32,
    ):
        config = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared, rings = self.shared_memory(a_smem, b_smem, box_smem)
        if warp_idx >= LOAD_WARP:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_idx == LOAD_WARP:
                self.load(tma_a, a_tma, tma_b, b_tma, shared, rings, m, n)
            elif warp_idx == SCHEDULER_WARP:
                tiles_m, tiles_n = (m + config.tile_m - 1) // config.tile_m, (n + config.tile_n - 1) // config.tile_n
                share = tiles.Share(config, band, counter, dynamic, shared[4])
                tiles.schedule_ragged_k(offsets, tiles_m, tiles_n, TILE_K, share, rings[1], shared[3])
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.math(tiled_mma, shared, rings, warp_idx // 4, SimpleNamespace(out=(tma_out, out_tma)))

    def multicast_masks(self, rank_m, rank_n):
        """Which CTAs of the cluster a load of A goes to, and of B; None where it stays at home."""
        config = self.config
        layout = cute.make_layout((1, config.cluster_m, config.cluster_n, 1))
        place = (0, rank_m, rank_n, 0)
        a_mask = cpasync.create_tma_multicast_mask(layout, place, mcast_mode=2) if config.cluster_n > 1 else None
        b_mask = cpasync.create_tma_multicast_mask(layout, place, mcast_mode=1) if config.cluster_m > 1 else None
        return a_mask, b_mask

    @cute.jit
    def load(self, tma_a, a_tma, tma_b, b_tma, shared, rings, m, n):
        """The loading warp: A and B of every tile, 64 rows at a time, zeros behind an expert's last."""
        config = self.config
        s_a, s_b, _, slots, _ = shared
        ab, ring, _ = rings
        rank_m, rank_n = tiles.ranks(config)
        a_mask, b_mask = self.multicast_masks(rank_m, rank_n)
        ab_state = pipeline.make_pipeline_state(PRODUCER, self.stages)
        turn = Int32(0)
        turn, slot = tiles.take(ring, turn, slots)
        expert, row, left, column, row_tile, depth = slot
        while expert != tiles.END:
            for k_tile in cutlass.range(depth, unroll=1):
                valid = cutlass.min(left - k_tile * TILE_K, TILE_K)
                end = row + k_tile * TILE_K + valid
                ab.producer_acquire(ab_state)
                full = ab.producer_get_barrier(ab_state)
                a_here = cute.domain_offset((0, END_ROW - valid), a_tma[None, None, END_ROW, end])
                b_here = cute.domain_offset((0, END_ROW - valid), b_tma[None, None, END_ROW, end])
                a_loads = self.across(tma_a, a_here, s_a, config.tile_m, row_tile, m, rank_n, config.cluster_n)
                b_loads = self.across(tma_b, b_here, s_b, config.tile_n, column, n, rank_m, config.cluster_m)
                for to_a, from_a in a_loads:
                    cute.copy(tma_a, from_a[None, 0], to_a[None, ab_state.index], tma_bar_ptr=full, mcast_mask=a_mask)
                for to_b, from_b in b_loads:
                    cute.copy(tma_b, from_b[None, 0], to_b[None, ab_state.index], tma_bar_ptr=full, mcast_mask=b_mask)
                ab_state.advance()
            turn, slot = tiles.take(ring, turn, slots)
            expert, row, left, column, row_tile, depth = slot
        ab.producer_tail(ab_state)

    @cute.jit
    def finish(
        self, acc, s_box, copies, rings, box_state, group, thread, env,
        expert, row, left, column, row_tile, live,
    ):  # fmt: skip
        """Accumulators to the expert's gradient; of an expert without rows zeros, or nothing where gradients add up."""
        config = self.config
        to_box, _ = copies
        tma, view = env.out
        wanted = live
        if const_expr(not self.accumulate):
            wanted = True
        if wanted:
            for i in cutlass.range_constexpr(config.blocks):
                top = row_tile * (config.tile_m // BLOCK_ROWS) + self.block_row(i, group) // BLOCK_ROWS
                for j in cutlass.range_constexpr(self.boxes_a_block):
                    base = i * (config.tile_n // 2) + j * VALUES
                    target = cute.local_tile(
                        view[None, None, expert],
                        (BLOCK_ROWS, EPILOGUE_COLUMNS),
                        (top, column * self.boxes_a_block + j),
                    )
                    values = [acc[base + v] for v in range(VALUES)]
                    self.put_box(values, s_box, to_box, group, thread, j, tma, target)
        return box_state
