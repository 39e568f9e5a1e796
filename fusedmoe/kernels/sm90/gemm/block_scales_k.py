"""FP8 codes by columns whose blocks have scales: the operands of ragged K products.

    out[e, n, k] = sum over blocks t of e's rows of
                   (sum over rows r in t of a[n, r] * b[k, r]) * a_scale[n, t] * b_scale[k, t]

columns.py describes the codes, (N, P) and (K, P). 128 rows of one column share a scale. The scales are (N, P / 128) and
(K, P / 128) with unit stride along N and K. TMA brings those of a tile with each stage. A cluster shares the scales of
the operand that it shares.

**Factors.** Each value of a wave has a factor of its own: that of its row times that of its column. A thread has two
rows and 32 columns. It reads these scales before the wave is multiplied, and keeps them in registers; the waves of
several blocks of rows share those of the columns. So promotion takes two instructions per value and no reads: about
130 issue cycles of the 256 that the tensor cores have for the other warpgroup's wave. A value is first multiplied by
the scale of its column, in its own register. The product of both scales would take another register, and read one more.

Run: tests/unit/test_kernels_compile.py, tests/gpu/test_hopper_products.py; ``python -m benchmarks --only fp8``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.sm90.gemm.columns import SharedScales
from fusedmoe.kernels.sm90.gemm.scaled import WAVE_VALUES, Staged
from fusedmoe.kernels.sm90.tiles.config import SCALE_BLOCK, SCALE_PITCH

PAIRS = SCALE_BLOCK // 8  # of adjacent columns of a wave, per thread


class Source(NamedTuple):
    """Where the factors of a thread are."""

    kernel: Any
    scales: SharedScales
    group: Any
    row: Any
    first: Any  # the thread's first pair of columns of 8
    columns: cute.Tensor  # scales of its columns


class Factors(NamedTuple):
    """The scales of a thread's values of a wave."""

    rows: cute.Tensor  # those of its two rows
    columns: cute.Tensor  # those of its columns, in pairs
    shared: bool  # whether an earlier wave of the stage has read the columns


@dataclass(frozen=True)
class BlockScaledColumns(Staged):
    """FP8 codes by columns, with scales per block."""

    def scale_bytes(self, kernel: Any) -> int:
        return int(4 * (kernel.config.tile_m + kernel.config.tile_n))

    def scale_space(self, kernel: Any) -> int:
        return self.scale_bytes(kernel)

    def fake_scales(self, experts: Any, *extents: Any) -> list[Any]:
        blocks, pitch = cute.sym_int(), lambda: cute.sym_int64(divisibility=SCALE_PITCH)
        fake = cute.runtime.make_fake_tensor
        return [fake(Float32, (extent, blocks), (1, pitch()), assumed_align=16) for extent in extents]

    def shared_scales(self, kernel: Any, smem: SmemAllocator) -> SharedScales:
        sizes = [(extent, kernel.stages) for extent in (kernel.config.tile_m, kernel.config.tile_n)]
        return SharedScales(*[smem.allocate_tensor(Float32, cute.make_layout(size), 128) for size in sizes])

    # -- mainloop

    def factor_source(self, kernel, scales, tile, group, thread, env) -> Source:
        columns = cute.make_rmem_tensor((2, PAIRS), Float32)
        return Source(kernel, scales, group, kernel.row_of(thread, 0), thread % 4, columns)

    def factors(self, source, i, j, stage) -> Factors:
        kernel, scales, group, row, first, columns = source
        rows = cute.make_rmem_tensor((2,), Float32)
        for h in range(2):
            rows[h] = scales.a[kernel.block_row(i, group) + row + 8 * h, stage]
        if i == 0:  # the blocks of rows share the columns
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=64)
            of_block = cute.local_tile(scales.b, (SCALE_BLOCK, 1), (j, stage))[None, 0]
            for pair in range(PAIRS):
                cute.copy(atom, cute.local_tile(of_block, (2,), (4 * pair + first,)), columns[None, pair])
        return Factors(rows, columns, kernel.config.blocks > 1)

    def from_stage(self, factors) -> list[Any]:
        last = [factors.rows[0], factors.rows[1]]
        if not factors.shared:
            last.append(factors.columns[1, PAIRS - 1])
        return last

    def promote(self, acc, first, wave, factors) -> None:
        for v in range(WAVE_VALUES):  # two of one row, two of the other
            by_column = wave[v] * factors.columns[v % 2, v // 4]
            acc[first + v] = acc[first + v] + by_column * factors.rows[v // 2 % 2]
