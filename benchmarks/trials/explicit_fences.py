"""A ragged K product that adds to its output, with a fence before the products of each stage.

`Gemm.main_loop` has one fence per tile, and ptxas adds one before the products of each stage. It does not for kernels
that add to their output by TMA: there it waits for each wgmma before it issues the next (C7520, "serialized"). With
these fences, it adds none and serializes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import const_expr
from cutlass.cute.nvgpu import warpgroup

from fusedmoe.kernels.sm90.ragged_k import RaggedK


@dataclass(frozen=True)
class ExplicitFences(RaggedK):
    """`RaggedK` with a fence before the products of each stage."""

    @property
    def symbol(self) -> str:
        return f"{super().symbol}_fences"

    @property
    def sources(self) -> tuple[str, ...]:
        return (__name__, *super().sources)

    @cute.jit
    def main_loop(self, tiled_mma, acc, r_a, r_b, ab, consumed, depth, group):
        """As in `Gemm`, except for the fences."""
        state = pipeline.PipelineState(self.stages, consumed, consumed % self.stages, consumed // self.stages % 2)
        released = state.clone()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        self.wait_for_stage(ab, state)
        warpgroup.fence()
        for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
            cute.gemm(tiled_mma, acc, r_a[None, None, kb, state.index], r_b[None, None, kb, state.index], acc)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        state.advance()
        for _ in cutlass.range(depth - 1, unroll=1):
            self.wait_for_stage(ab, state)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                cute.gemm(tiled_mma, acc, r_a[None, None, kb, state.index], r_b[None, None, kb, state.index], acc)
            warpgroup.commit_group()
            state.advance()
            warpgroup.wait_group(1)
            ab.consumer_release(released)
            released.advance()
        if const_expr(self.config.pingpong):
            self.pass_turn(group)
        warpgroup.wait_group(0)
        ab.consumer_release(released)
