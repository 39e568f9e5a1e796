"""Products with the accuracy of fp32: a mainloop that adds up its accumulators in fp32 registers.

Tensor cores add each step of 16 elements of K to the accumulators, and truncate the sum. Over thousands of elements,
these errors exceed those of fp32 additions that round, because all of them have the same sign. So the tensor cores sum
only `CHUNK` tiles of K. These sums are added to a second set of registers, rounded to the nearest.

Tiles are cooperative and small, since both sets of registers must fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from fusedmoe.kernels.sm90.gemm.common import Gemm
from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK
from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM

CHUNK = 4  # tiles of K, of 64 elements each


class Promoted(Gemm):
    """A product whose tensor cores sum a few tiles of K at a time. It precedes the kind of product in the bases."""

    @property
    def symbol(self) -> str:
        return f"{super().symbol}_promoted"  # type: ignore[misc]

    @cute.jit
    def main_loop(self, tiled_mma, acc, r_a, r_b, ab, consumed, tile, group, scales, env):
        """A @ B into ``acc`` over the tiles of K, in chunks."""
        state = pipeline.PipelineState(self.stages, consumed, consumed % self.stages, consumed // self.stages % 2)
        released = state.clone()
        chunk = cute.make_rmem_tensor(acc.layout, Float32)
        acc.fill(0.0)
        for first in cutlass.range(0, tile.depth, CHUNK, unroll=1):
            warpgroup.fence()
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            self.wait_for_stage(ab, state)
            for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                cute.gemm(tiled_mma, chunk, r_a[None, None, kb, state.index], r_b[None, None, kb, state.index], chunk)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            state.advance()
            for _ in cutlass.range(cutlass.min(tile.depth - first, CHUNK) - 1, unroll=1):
                self.wait_for_stage(ab, state)
                for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                    at = (None, None, kb, state.index)
                    cute.gemm(tiled_mma, chunk, r_a[at], r_b[at], chunk)
                warpgroup.commit_group()
                state.advance()
                warpgroup.wait_group(1)
                ab.consumer_release(released)
                released.advance()
            warpgroup.wait_group(0)
            ab.consumer_release(released)
            released.advance()
            acc.store(acc.load() + chunk.load())


@dataclass(frozen=True)
class PromotedRaggedM(Promoted, RaggedM):
    """A ragged M kernel with the accuracy of fp32."""


@dataclass(frozen=True)
class PromotedRaggedK(Promoted, RaggedK):
    """A ragged K kernel with the accuracy of fp32."""
