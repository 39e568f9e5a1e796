"""The operands of a product as one object: their type, the scales of their values, and the mainloop over their stages.

`RaggedM` and `RaggedK` take one of these objects:

| operands | file | products |
|---|---|---|
| `Plain`: bf16 or fp16 | this one | of both kinds |
| `Promoted`: the same, with the accuracy of fp32 | this one | of both kinds |
| `BlockScaledRows`: FP8 codes by rows, with scales per block | block_scales.py | ragged M |
| `BlockScaledColumns`: FP8 codes by columns, with scales per block | block_scales_k.py | ragged K |
| `TensorScaled`: FP8 codes with one scale per expert | tensor_scales.py | of both kinds |

scaled.py has the common part of the last three: their mainloop, in which the math warpgroups take turns.

**Mainloop.** One wgmma group stays in flight while the next is issued, and a stage is released once the group after it
has been issued.

**Promotion.** Tensor cores add each step of 16 elements of K to the accumulators, and truncate the sum. Over thousands
of elements, these errors exceed those of fp32 additions that round, because all of them have the same sign. So for
`Promoted` operands, the tensor cores sum only `CHUNK` tiles of K. These sums are added to a second set of registers,
rounded to the nearest. Tiles are cooperative and small, since both sets of registers must fit.

Run: tests/unit/test_kernels_compile.py, tests/gpu/test_hopper_products.py, tests/gpu/test_sm90_router.py (`Promoted`);
``python -m benchmarks --only tiles``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warpgroup

from fusedmoe.kernels.sm90.gemm.common import pass_turn
from fusedmoe.kernels.sm90.tiles.config import ALIGNMENT_BYTES, SWIZZLE_BYTES, TileConfig

ELEMENTS = {
    "bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2
}  # fmt: skip
CHUNK = 4  # tiles of K, of 64 elements each, that the tensor cores sum for `Promoted` operands


@dataclass(frozen=True)
class Operands(ABC):
    """Both operands of a product."""

    dtype: str  # a name in `ELEMENTS`; with "e5m2", B is E4M3

    suffix: ClassVar[str] = ""  # of the kernel's symbol
    scaled: ClassVar[bool] = False  # whether they are codes with scales: then they are a `scaled.Scaled`
    staged: ClassVar[bool] = False  # whether a stage has scales: then they are a `scaled.Staged`
    takes_turns: ClassVar[bool] = False  # whether cooperative warpgroups have the tensor cores in turn

    @property
    def element(self) -> Any:
        """Type of A's elements."""
        return ELEMENTS[self.dtype]

    @property
    def b_element(self) -> Any:
        """Type of B's elements; of E4M3 and E5M2 operands, only a gradient, which is A, has more range."""
        return cutlass.Float8E4M3FN if self.element.width == 8 else self.element

    @property
    def value_element(self) -> Any:
        """Type of rows that are not quantized: that of the operands, or bf16 if these are quantized."""
        return cutlass.BFloat16 if self.element.width == 8 else self.element

    @property
    def stored_element(self) -> Any:
        """Type of the operands as arguments: bytes for FP8, which not every torch passes on."""
        return cutlass.Uint8 if self.element.width == 8 else self.element

    @property
    def tile_k(self) -> int:
        """Extent of K in a stage: 64 for two-byte operands."""
        return SWIZZLE_BYTES * 8 // self.element.width

    @property
    def alignment(self) -> int:
        """Every pitch is a multiple of this number of elements, as TMA requires."""
        return ALIGNMENT_BYTES * 8 // self.element.width

    def wave_columns(self, config: TileConfig) -> int:
        """Columns that one wgmma multiplies."""
        return config.tile_n

    @abstractmethod
    def main_loop(self, kernel, tiled_mma, acc, r_a, r_b, ab, consumed, tile, group, scales, env):
        """A @ B into ``acc`` over the tiles of K. ``scales`` are those of the stages, if they have some; ``env`` is
        that of `Gemm.math`.
        """


@dataclass(frozen=True)
class Plain(Operands):
    """bf16 or fp16."""

    @cute.jit
    def main_loop(self, kernel, tiled_mma, acc, r_a, r_b, ab, consumed, tile, group, scales, env):
        """As of `Operands`; one wgmma group stays in flight while the next is issued.

        Every stage has a fence. Without those, ptxas adds them, except in kernels that add to their output by TMA:
        there it waits for each wgmma instead, and a weight gradient takes up to 1.7 times as long.
        """
        # A new state for each tile: one number, not two, stays in registers during the epilogue.
        state = pipeline.PipelineState(kernel.stages, consumed, consumed % kernel.stages, consumed // kernel.stages % 2)
        released = state.clone()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        kernel.wait_for_stage(ab, state)
        warpgroup.fence()
        for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
            cute.gemm(tiled_mma, acc, r_a[None, None, kb, state.index], r_b[None, None, kb, state.index], acc)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        state.advance()
        released = multiply_stages(kernel, tiled_mma, acc, r_a, r_b, ab, state, released, tile.depth - 1)
        if const_expr(kernel.config.pingpong):
            pass_turn(group)
        warpgroup.wait_group(0)
        ab.consumer_release(released)


@cute.jit
def multiply_stages(kernel, tiled_mma, acc, r_a, r_b, ab, state, released, count):
    """Add the products of ``count`` stages from ``state`` on. Each stage is released once the next has been issued,
    from ``released`` on; return the first stage that is not released yet.
    """
    for _ in cutlass.range(count, unroll=1):
        kernel.wait_for_stage(ab, state)
        warpgroup.fence()
        for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
            cute.gemm(tiled_mma, acc, r_a[None, None, kb, state.index], r_b[None, None, kb, state.index], acc)
        warpgroup.commit_group()
        state.advance()
        warpgroup.wait_group(1)
        ab.consumer_release(released)
        released.advance()
    return released


@dataclass(frozen=True)
class Promoted(Operands):
    """bf16 or fp16, with the accuracy of fp32; see the module's docstring."""

    suffix = "_promoted"

    @cute.jit
    def main_loop(self, kernel, tiled_mma, acc, r_a, r_b, ab, consumed, tile, group, scales, env):
        """As of `Operands`, in chunks."""
        state = pipeline.PipelineState(kernel.stages, consumed, consumed % kernel.stages, consumed // kernel.stages % 2)
        released = state.clone()
        chunk = cute.make_rmem_tensor(acc.layout, Float32)
        acc.fill(0.0)
        for first in cutlass.range(0, tile.depth, CHUNK, unroll=1):
            warpgroup.fence()
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            kernel.wait_for_stage(ab, state)
            for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                cute.gemm(tiled_mma, chunk, r_a[None, None, kb, state.index], r_b[None, None, kb, state.index], chunk)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            state.advance()
            for _ in cutlass.range(cutlass.min(tile.depth - first, CHUNK) - 1, unroll=1):
                kernel.wait_for_stage(ab, state)
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
