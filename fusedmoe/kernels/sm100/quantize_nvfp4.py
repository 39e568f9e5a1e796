"""A kernel that quantizes packed rows to NVFP4 for Blackwell's grouped products: by rows, by columns, or both.

It has the codes of `fusedmoe.kernels.rows.quantize.formats`, at the places of packed rows: each expert's rows are
followed by zeros up to a multiple of 256. A CTA has 128 packed rows and 128 features. These are two tiles of scales by
rows, and two by columns, in the layout that the tensor cores read; see `fusedmoe.numerics.formats.swizzle`. A CTA that
comes after the last expert's rows writes nothing.

It uses no instruction that Hopper lacks, and runs there too.

Axes: R rows, T tokens, K features, E experts, P packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.warps import LANES, VECTOR
from fusedmoe.kernels.rows.quantize.blocks import BLOCK as TILE
from fusedmoe.kernels.rows.quantize.blocks import GROUPS, largest_magnitudes, load_tile, rows_of_tile
from fusedmoe.kernels.rows.quantize.formats import QuantizeFormat
from fusedmoe.kernels.sm100.quantize import PACKING, TILES, source_of

BLOCKS = 4  # of a line in a tile of scales
SCALES = TILE * BLOCKS  # bytes of a tile of scales
ACROSS = 2  # tiles of scales for 128 codes
MOST_TILES = 1 << 20  # more than the tiles of any lines or codes


@dataclass(frozen=True)
class QuantizePackedFormat(QuantizeFormat):
    """NVFP4 codes and scales of packed rows. ``sorted`` is true, and ``amax`` is false."""

    halves: bool = False  # whether features are [gate | up], which become blocks of 32 in turn

    @property
    def symbol(self) -> str:
        return super().symbol.replace("quantize_format", "quantize_packed_format") + "_halves" * self.halves

    @cute.kernel
    def kernel(
        self, x, index, offsets, codes, scale, factors, random, codes_t, scale_t, factors_t, random_t, experts_max,
        rows, blocks,
    ):  # fmt: skip
        """As of the parent, for codes (1, P, K / 2) and (1, K, P / 2), and scales as tiles (1, tiles, 512)."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        number, _, _ = cute.arch.block_idx()
        tile = number // blocks  # adjacent CTAs read adjacent features
        at = number - tile * blocks
        vector = at * GROUPS + thread % GROUPS
        smem = SmemAllocator()

        first, packed, _, expert = rows_of_tile(offsets, tile // TILES, Int32(0), lane, PACKING)
        if packed > 0:
            skipped = tile % TILES * TILE
            source = vector
            if const_expr(self.halves):
                source = source_of(vector, x.shape[2] // VECTOR)
            values = load_tile(
                x[0, None, None],
                index if const_expr(self.gathered) else None,
                first + skipped,
                packed - skipped,
                source,
            )
            of_rows, of_columns, _ = largest_magnitudes(values, self.bias)
            if const_expr(self.rows):
                own = tiles_of(scale, number * ACROSS)
                encode = self.encode_rows(of_rows, own, factors, tile * TILE, TILE, vector, expert, 0, rows)
                self.store_rows(values, encode, codes, random, tile * TILE, TILE, vector, 0)
            if const_expr(self.columns):
                if const_expr(self.rotated):
                    values = self.turned(values)
                    _, of_columns, _ = largest_magnitudes(values, self.bias_of_columns)
                start = Int32(0)
                if expert > 0:
                    start = offsets[expert - 1]
                down = cute.ceil_div(offsets[expert] - start, PACKING) * TILES  # tiles of the expert's rows
                of_expert = (first - start) // PACKING * TILES + tile % TILES
                before = (tile - of_expert) * blocks + at * down + of_expert
                own = tiles_of(scale_t, before * ACROSS)
                encode = self.encode_columns(of_columns, smem, own, factors_t, tile, vector, expert, 0)
                self.store_columns(values, encode, smem, codes_t, random_t, tile, at, 0)


@cute.jit
def tiles_of(scale, number):
    """The scales of a CTA, in two tiles from ``number`` on, with the coordinates that they have among all scales: lines
    in tiles of 128, and blocks in tiles of 4.
    """
    shape = (1, (LANES, TILE // LANES, MOST_TILES), (BLOCKS, ACROSS, MOST_TILES))
    strides = (0, (BLOCKS * TILE // LANES, BLOCKS, 0), (1, SCALES, 0))
    return cute.make_tensor(scale.iterator + number * SCALES, cute.make_layout(shape, stride=strides))
