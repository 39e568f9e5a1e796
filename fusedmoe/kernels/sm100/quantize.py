"""Kernels that quantize to MXFP8 for Blackwell's grouped products: by rows, by columns, or both, in one read.

The scales are in the layout that the tensor cores read, in tiles of 128 lines x 4 blocks; see
`fusedmoe.numerics.formats.swizzle`.

A CTA has 128 rows and 128 features. These are one tile of scales by rows, and one of scales by columns. Its threads
load as in `rows/quantize/blocks.py`: a thread has 8 rows and 8 features, in registers, for both forms. The blocks by
rows have the features of 4 lanes. The blocks by columns have the rows of two warps, which exchange their largest
magnitudes through shared memory. There the tiles of scales are put together too, and a warp writes each.

`QuantizePacked`: rows that are *packed*: each expert's rows are followed by zeros up to a multiple of 256. Each warp
finds its rows in ``offsets``. A CTA that comes after the last expert's rows writes nothing. Padding needs no code of
its own: the scale of a block of zeros is the byte 0, which the layout of scales has as padding too.

`QuantizePackedWeight`: weights. Their codes by columns are transposed through shared memory.

They use no instruction that Hopper lacks, and run there too.

Axes: R rows, T tokens, K features, E experts, P packed rows, N rows of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.codes import CODES, FINITE_BIAS, finite_amax, fp32_pair, max_of_pairs
from fusedmoe.kernels.device.warps import ELEMENTS, LANES, VECTOR, WarpKernel, fake_matrix, fake_vector
from fusedmoe.kernels.rows.quantize.blocks import BLOCK as TILE
from fusedmoe.kernels.rows.quantize.blocks import (
    CTAS_PER_SM,
    GROUPS,
    STRIP,
    UNIT,
    WARPS,
    WORDS,
    allocate_codes,
    fake_codes,
    fake_weight,
    largest_and_no_infinity,
    load_tile,
    on_tiles,
    rows_of_tile,
    transpose,
    write_columns,
)
from fusedmoe.kernels.rows.quantize.formats import e8m0_encode

PACKING = 256  # rows to a multiple of which those of an expert are packed
TILES = PACKING // TILE
ELEMENT = "e4m3"
SIZE = 32  # values per block
BLOCKS = TILE // SIZE  # of a line of a tile
LANES_PER_BLOCK = SIZE // VECTOR
WARPS_PER_BLOCK = SIZE // STRIP * GROUPS // LANES
SCALES = TILE * BLOCKS  # bytes of a tile of scales
SHARED_PERCENT = 10  # of an SM's memory: 3 KiB per CTA
SHARED_PERCENT_OF_WEIGHTS = 40  # 19 KiB per CTA, most of it codes to be transposed


@dataclass(frozen=True)
class _Tiles(WarpKernel):
    """What tiles of rows and tiles of weights have in common."""

    dtype: str  # of the values: "bf16" or "fp16"
    halves: bool  # whether features, or the rows of a weight, are [gate | up], which become blocks of 32 in turn
    rows: bool  # whether there are codes by rows
    columns: bool  # whether there are codes by columns

    @property
    def _suffix(self) -> str:
        flags = {"rows": self.rows, "columns": self.columns, "halves": self.halves}
        return "_".join([self.dtype, *(name for name, on in flags.items() if on)])

    @cute.jit
    def encode(self, pair):
        """The factors of two blocks, from the bits of their largest magnitudes, and the bytes of their scales."""
        found = []
        for half in cutlass.range_constexpr(2):
            amax = finite_amax(pair >> 16 * half, FINITE_BIAS[self.dtype], ELEMENTS[self.dtype])
            found.append(e8m0_encode(amax, ELEMENT, "rceil"))
        return [factor for factor, _ in found], [byte.to(cutlass.Uint8) for _, byte in found]

    @cute.jit
    def encode_rows(self, largest, s_scale):
        """The factors of this thread's rows; writes their scales to shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        group, strip = thread % GROUPS, thread // GROUPS
        factors, scales = [], []
        for i in cutlass.range_constexpr(STRIP // 2):
            pair = largest[i]
            for step in cutlass.range_constexpr(LANES_PER_BLOCK.bit_length() - 1):
                pair = max_of_pairs(pair, cute.arch.shuffle_sync_bfly(pair, 1 << step))
            found, stored = self.encode(pair)
            factors += found
            scales += stored
        if group % LANES_PER_BLOCK == 0:
            for i in cutlass.range_constexpr(STRIP):
                s_scale[strip * STRIP + i, group // LANES_PER_BLOCK] = scales[i]
        return factors

    @cute.jit
    def encode_columns(self, largest, s_amax, s_scale):
        """The factors of this thread's features; writes their scales to shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        group, lane = thread % GROUPS, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        own, other = (cute.make_rmem_tensor((WORDS,), Int32) for _ in range(2))
        for w in cutlass.range_constexpr(WORDS):
            own[w] = max_of_pairs(largest[w], cute.arch.shuffle_sync_bfly(largest[w], GROUPS))
        if lane < GROUPS:
            cute.autovec_copy(own, cute.local_tile(s_amax[None, warp], (WORDS,), (group,)))
        cute.arch.sync_threads()
        cute.autovec_copy(cute.local_tile(s_amax[None, warp ^ 1], (WORDS,), (group,)), other)
        factors, scales = [], []
        for w in cutlass.range_constexpr(WORDS):
            found, stored = self.encode(max_of_pairs(own[w], other[w]))
            factors += found
            scales += stored
        if warp % WARPS_PER_BLOCK == 0 and lane < GROUPS:
            for i in cutlass.range_constexpr(VECTOR):
                s_scale[group * VECTOR + i, warp // WARPS_PER_BLOCK] = scales[i]
        return factors

    @cute.jit
    def store(self, values, factors, codes, tile, at):
        """Write the codes of this thread's values times ``factors``, which has a list of 8 for each row."""
        thread, _, _ = cute.arch.thread_idx()
        vector = at * GROUPS + thread % GROUPS
        if vector * VECTOR < codes.shape[1]:
            row = cute.local_tile(codes[tile * TILE + thread // GROUPS * STRIP, None], (VECTOR,), (vector,)).iterator
            for i in cutlass.range_constexpr(STRIP):
                words = cute.recast_tensor(values[i], Int32)
                scaled, found = (cute.make_rmem_tensor((VECTOR,), t) for t in (Float32, CODES[ELEMENT]))
                for w in cutlass.range_constexpr(WORDS):
                    low, high = fp32_pair(words[w], values[i].element_type)
                    scaled[2 * w], scaled[2 * w + 1] = low * factors[i][2 * w], high * factors[i][2 * w + 1]
                found.store(scaled.load().to(CODES[ELEMENT]))
                stored = cute.recast_tensor(found, codes.element_type)
                cute.autovec_copy(stored, cute.make_tensor(row, cute.make_layout((VECTOR,))))
                row += codes.stride[0]


@dataclass(frozen=True)
class QuantizePacked(_Tiles):
    """MXFP8 codes and scales of packed rows."""

    gathered: bool = False  # whether a row is a token's: the kernel reads tokens through an index

    @property
    def symbol(self) -> str:
        return f"{self.family}_quantize_packed_{self._suffix}{'_gathered' if self.gathered else ''}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of values (R, K) or (T, K), index (R,) int32, offsets (E,) int32; codes
        (P, K) uint8 by rows and their tiles of scales (P / 128 * ceil(K / 128), 512) uint8; and the same by columns.
        Arguments that the kernel does not need are not read or written.
        """
        columns = cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), columns), fake_vector("int32", cute.sym_int()),
            fake_vector("int32", cute.sym_int()), _bytes(), _bytes(), _bytes(), _bytes(),
        )  # fmt: skip

    @cute.jit
    def __call__(self, x, index, offsets, row_codes, row_scale, column_codes, column_scale, stream):
        across = cute.ceil_div(x.shape[1], TILE)
        self.kernel(x, index, offsets, row_codes, row_scale, column_codes, column_scale, across).launch(
            **on_tiles(row_codes.shape[0] // TILE * across, stream, CTAS_PER_SM, SHARED_PERCENT)
        )

    @cute.kernel
    def kernel(self, x, index, offsets, row_codes, row_scale, column_codes, column_scale, across):
        lane = cute.arch.lane_idx()
        number, _, _ = cute.arch.block_idx()
        tile = number // across  # adjacent CTAs read adjacent features
        at = number - tile * across
        smem = SmemAllocator()
        s_rows, s_columns, s_amax = allocate_scales(smem)

        first, packed, _, expert = rows_of_tile(offsets, tile // TILES, Int32(0), lane, PACKING)
        if packed > 0:
            skipped = tile % TILES * TILE
            values = self.load(x, index, first + skipped, packed - skipped, at)
            of_rows, of_columns = largest_and_no_infinity(values, self.dtype)
            if const_expr(self.rows):
                factors = self.encode_rows(of_rows, s_rows)
                self.store(values, [[factor] * VECTOR for factor in factors], row_codes, tile, at)
            if const_expr(self.columns):
                factors = self.encode_columns(of_columns, s_amax, s_columns)
                self.store(values, [factors] * STRIP, column_codes, tile, at)
            cute.arch.sync_threads()
            if const_expr(self.rows):
                copy_scales(s_rows, row_scale, number, 0)
            if const_expr(self.columns):
                start, end = Int32(0), offsets[expert]
                if expert > 0:
                    start = offsets[expert - 1]
                down = cute.ceil_div(end - start, PACKING) * TILES  # tiles of the expert's rows
                own = (first - start) // PACKING * TILES + tile % TILES
                copy_scales(s_columns, column_scale, (tile - own) * across + at * down + own, 1)

    @cute.jit
    def load(self, x, index, first, valid, at):
        """The values of this thread: 8 features of each of its 8 rows; zeros after ``valid`` rows of the tile."""
        thread, _, _ = cute.arch.thread_idx()
        vector = at * GROUPS + thread % GROUPS
        if const_expr(self.halves):
            vector = source_of(vector, x.shape[1] // VECTOR)
        return load_tile(x, index if const_expr(self.gathered) else None, first, valid, vector)


@dataclass(frozen=True)
class QuantizePackedWeight(_Tiles):
    """MXFP8 codes and scales of weights (E, N, K); N and K are multiples of 128."""

    @property
    def symbol(self) -> str:
        return f"{self.family}_quantize_packed_weight_{self._suffix}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of weight (E, N, K); codes (E * N, K) uint8 by rows and their tiles of
        scales (E * N / 128 * K / 128, 512) uint8; and codes (E, K, N) uint8 by columns and as many tiles of scales.
        Arguments that the kernel does not need are not written.
        """
        weight = fake_weight(self.dtype, *[cute.sym_int(divisibility=TILE) for _ in range(2)])
        return self.compiled_for(weight, _bytes(), _bytes(), fake_codes(cute.sym_int()), _bytes())

    @cute.jit
    def __call__(self, weight, row_codes, row_scale, column_codes, column_scale, stream):
        experts, lines, features = weight.shape
        down, across = lines // TILE, features // TILE
        self.kernel(weight, row_codes, row_scale, column_codes, column_scale, down, across).launch(
            **on_tiles(experts * down * across, stream, CTAS_PER_SM, SHARED_PERCENT_OF_WEIGHTS)
        )

    @cute.kernel
    def kernel(self, weight, row_codes, row_scale, column_codes, column_scale, down, across):
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        tile = number // across  # over all experts; adjacent CTAs read adjacent features
        at = number - tile * across
        expert = tile // down
        line = tile - expert * down
        smem = SmemAllocator()
        s_rows, s_columns, s_amax = allocate_scales(smem)

        first = line * TILE
        if const_expr(self.halves):  # the rows of a strip follow each other, those of a tile do not
            row = first + thread // GROUPS * STRIP
            source = row // (2 * SIZE) * SIZE + row // SIZE % 2 * (weight.shape[1] // 2) + row % SIZE
            first += source - row
        values = load_tile(weight[expert, None, None], None, first, TILE, at * GROUPS + thread % GROUPS)
        of_rows, of_columns = largest_and_no_infinity(values, self.dtype)
        if const_expr(self.rows):
            factors = self.encode_rows(of_rows, s_rows)
            self.store(values, [[factor] * VECTOR for factor in factors], row_codes, tile, at)
        if const_expr(self.columns):
            s_codes = allocate_codes(smem)
            factors = self.encode_columns(of_columns, s_amax, s_columns)
            transpose(values, factors, ELEMENT, s_codes)
        cute.arch.sync_threads()
        if const_expr(self.rows):
            copy_scales(s_rows, row_scale, number, 0)
        if const_expr(self.columns):
            write_columns(s_codes, column_codes[expert, None, None], at, line)
            copy_scales(s_columns, column_scale, (expert * across + at) * down + line, 1)


@cute.jit
def source_of(vector, vectors):
    """The vector of [gate | up] with the features of this one, where gate and up alternate in blocks of 32."""
    block = vector // LANES_PER_BLOCK
    source = block // 2 * LANES_PER_BLOCK + block % 2 * (vectors // 2) + vector % LANES_PER_BLOCK
    return cutlass.select_(vector < vectors, source, vector)


def allocate_scales(smem: SmemAllocator) -> tuple[Any, Any, Any]:
    """Shared memory for a tile of scales by rows, for one by columns, and for the magnitudes that warps exchange."""
    lines = cute.make_layout(((LANES, TILE // LANES), BLOCKS), stride=((UNIT, BLOCKS), 1))
    s_rows, s_columns = (smem.allocate_tensor(cutlass.Uint8, lines, UNIT) for _ in range(2))
    return s_rows, s_columns, smem.allocate_tensor(Int32, cute.make_layout((TILE // 2, WARPS)), UNIT)


@cute.jit
def copy_scales(s_scale, scale, number, warp: cutlass.Constexpr[int]):
    """Write a tile of scales from shared memory, by one warp."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == warp:
        lane = cute.arch.lane_idx()
        held = cute.make_rmem_tensor((UNIT,), cutlass.Uint8)
        source = cute.make_tensor(s_scale.iterator, cute.make_layout((SCALES,)))
        cute.autovec_copy(cute.local_tile(source, (UNIT,), (lane,)), held)
        cute.autovec_copy(held, cute.local_tile(scale[number, None], (UNIT,), (lane,)))


def _bytes() -> Any:
    """A matrix of bytes with unit stride along its columns, whose rows begin at multiples of 16, for the compiler."""
    shape = tuple(cute.sym_int() for _ in range(2))
    strides = (cute.sym_int64(divisibility=UNIT), 1)
    return cute.runtime.make_fake_tensor(cutlass.Uint8, shape, strides, assumed_align=UNIT)
