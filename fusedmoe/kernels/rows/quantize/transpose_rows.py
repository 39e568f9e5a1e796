"""Column codes (K, P) of row codes (R, K): their transpose, with each expert's rows padded to a multiple of 128.

They are those of the values if one scale per expert belongs to both forms. A CTA has a tile of 128 x 128 codes. A
thread has a strip of 8 rows, and 8 columns, which it transposes in registers, byte by byte. The layout in shared memory
is that of `quantize_formats`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.warps import VECTOR, WarpKernel, fake_vector
from fusedmoe.kernels.rows.quantize.blocks import BLOCK as TILE
from fusedmoe.kernels.rows.quantize.blocks import GROUPS, STRIP, STRIPS, UNIT, on_tiles, rows_of_tile, transposed_bytes
from fusedmoe.kernels.rows.quantize.formats import CTAS_PER_SM, SHARED_PERCENT, store_chunks

PER_UNIT = UNIT // STRIP  # chunks that a thread stores at once
HALF = 4  # bytes of a word


@dataclass(frozen=True)
class TransposeRows(WarpKernel):
    """Column codes of row codes."""

    @property
    def symbol(self) -> str:
        return "sm90_transpose_rows"

    def compile(self) -> Any:
        """Compile without a GPU; a function of row codes (R, K), K a multiple of 16, and column codes (K, P), both
        bytes, and offsets (E,) int32; the number of tiles of rows, and R.
        """
        rows, columns = cute.sym_int(), cute.sym_int(divisibility=UNIT)
        codes, codes_t = (
            cute.runtime.make_fake_tensor(
                cutlass.Uint8, shape, (cute.sym_int64(divisibility=UNIT), 1), assumed_align=UNIT
            )
            for shape in ((rows, columns), (columns, cute.sym_int()))
        )
        return self.compiled_for(codes, codes_t, fake_vector("int32", cute.sym_int()), Int32(1), Int32(1))

    @cute.jit
    def __call__(self, codes, codes_t, offsets, tiles, rows, stream):
        blocks = cute.ceil_div(codes.shape[1], TILE)
        self.kernel(codes, codes_t, offsets, rows, blocks).launch(
            **on_tiles(tiles * blocks, stream, CTAS_PER_SM, SHARED_PERCENT)
        )

    @cute.kernel
    def kernel(self, codes, codes_t, offsets, rows, blocks):
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        tile = number // blocks
        at = number - tile * blocks
        group, strip = thread % GROUPS, thread // GROUPS
        vector = at * GROUPS + group
        first, valid, _, _ = rows_of_tile(offsets, tile, rows, cute.arch.lane_idx(), TILE)

        words = cute.make_rmem_tensor((2 * STRIP,), Int32)  # two per row
        words.fill(0)
        for i in cutlass.range_constexpr(STRIP):
            if strip * STRIP + i < valid and vector * VECTOR < codes.shape[1]:
                held = cute.make_rmem_tensor((VECTOR,), cutlass.Uint8)
                row = codes[first + strip * STRIP + i, None]
                cute.autovec_copy(cute.local_tile(row, (VECTOR,), (vector,)), held)
                both = cute.recast_tensor(held, Int32)
                words[2 * i], words[2 * i + 1] = both[0], both[1]

        s_codes = SmemAllocator().allocate_tensor(Int64, cute.make_layout((STRIPS, TILE)), 16)
        for half in cutlass.range_constexpr(2):  # of the columns
            upper = transposed_bytes([words[2 * i + half] for i in range(HALF)])
            lower = transposed_bytes([words[2 * (HALF + i) + half] for i in range(HALF)])
            for c in cutlass.range_constexpr(HALF):
                chunk = cute.make_rmem_tensor((2,), Int32)
                chunk[0], chunk[1] = upper[c], lower[c]
                column = group * VECTOR + half * HALF + c
                s_codes[strip ^ (group // PER_UNIT * PER_UNIT), column] = cute.recast_tensor(chunk, Int64)[0]
        store_chunks(s_codes, codes_t, tile, at, PER_UNIT)
