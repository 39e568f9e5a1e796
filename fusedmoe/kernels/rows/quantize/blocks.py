"""Kernels that quantize to FP8 with 1x128 or 128x128 blocks: row codes, column codes, or both, from one read.

A CTA has a tile of 128 x 128 values. So a tile has one block of each of its rows, and one block of each of its columns.

`QuantizeRows`: blocks of one row (row codes), and blocks of one column (column codes). If rows are sorted by expert, a
tile of column codes has rows of one expert only, and the missing rows are zeros. The grid does not depend on the
splits: each CTA finds its expert in ``offsets``. The tiles after the last expert's are zeros, and so are the row codes
of rows without an expert, one more tile if they need it. With ``zero_tail`` 0, the CTAs of these tiles write nothing.

`QuantizeColumnsOfCodes`: the column codes of tokens that have row codes, from these and their scales. The values in
between are rounded to bf16, as if they were written and read again.

`QuantizeWeight`: blocks of 128 x 128. The column codes are the row codes, transposed.

A thread has a *strip* of 8 rows, and 8 columns: 8 loads of 16 bytes, all issued before the first is used. The values
stay in these registers, as bf16 or fp16 pairs, for both codes. Column codes are transposed through shared memory: 8
bytes of one column per store, 16 bytes per load. The columns of a *group*, 8 columns, have their 8-byte chunks in an
order of their own, so that neither has a bank conflict.

The largest magnitude is found on pairs of 16-bit integers: the bits of a magnitude, plus a bias that makes those of NaN
and infinities negative. The conversion makes the code 0x7F of NaN, but would saturate infinities. So a thread that has
any value that is not finite makes NaN of its infinities first.

Axes: R rows, T tokens, K columns, E experts, P padded rows, N rows of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.codes import (
    CODES,
    FINITE_BIAS,
    NEGATIVES,
    biased_magnitudes,
    encode_and_scale,
    finite_amax,
    fp32_pair,
    max_of_pairs,
)
from fusedmoe.kernels.device.warps import ELEMENTS, LANES, VECTOR, WarpKernel, fake_matrix, fake_vector, inclusive_sum

BLOCK = 128  # values per block, rows per tile and columns per tile
GROUPS = BLOCK // VECTOR  # of a tile's columns
STRIP = 8  # rows per thread
STRIPS = BLOCK // STRIP
THREADS = GROUPS * STRIPS
WARPS = THREADS // LANES
CTAS_PER_SM = 3  # 96 KiB of loads in flight
SHARED_PERCENT = 40  # of an SM's memory: 22 KiB per CTA
WORDS = VECTOR // 2  # pairs of values per load
CHUNK = 8  # codes: those of a strip and a column
UNIT = 16  # codes that a thread stores at once
EXPERTS_PER_LANE = 4

# ------------------------------------------------------------------------------------------------- rows and values


@cute.jit
def largest_magnitudes(values, bias: cutlass.Constexpr[int]):
    """A thread's largest biased magnitudes: of pairs of rows, of pairs of columns; and the bits that any has."""
    of_rows: list[Any] = []
    of_columns: list[Any] = []
    signs = Int32(0)
    for i in cutlass.range_constexpr(STRIP):
        words = cute.recast_tensor(values[i], Int32)
        found = [biased_magnitudes(words[w], bias) for w in range(WORDS)]
        of_rows.append(max_of_pairs(max_of_pairs(found[0], found[1]), max_of_pairs(found[2], found[3])))
        of_columns = found if i == 0 else [max_of_pairs(of_columns[w], found[w]) for w in range(WORDS)]
        for w in cutlass.range_constexpr(WORDS):
            signs = signs | found[w]
    of_pairs = []
    for i in cutlass.range_constexpr(0, STRIP, 2):
        low = cute.arch.prmt(of_rows[i], of_rows[i + 1], 0x5410)
        of_pairs.append(max_of_pairs(low, cute.arch.prmt(of_rows[i], of_rows[i + 1], 0x7632)))
    return of_pairs, of_columns, signs


@cute.jit
def rows_of_tile(offsets, tile, rows, lane, size: cutlass.Constexpr[int]):
    """Where a tile of ``size`` rows is, if each expert's rows begin a tile: its first row, its rows that have values,
    its rows that have row codes, and its expert. The rows without an expert follow, without values; theirs is the last
    expert. A warp has one tile.
    """
    experts = cute.size(offsets)
    first, valid, expert = Int32(0), Int32(0), experts - 1
    # tiles of the experts before a chunk of experts, and the end of their rows
    before, end = Int32(0), Int32(0)
    chunk, found = Int32(0), Int32(0)
    while chunk < experts and found == 0:
        ends = cute.make_rmem_tensor((EXPERTS_PER_LANE,), Int32)
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
            ends[i] = offsets[cutlass.min(chunk + lane * EXPERTS_PER_LANE + i, experts - 1)]
        start = cute.arch.shuffle_sync_up(ends[EXPERTS_PER_LANE - 1], 1)
        if lane == 0:
            start = end
        tiles, begin = Int32(0), start
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
            tiles += cute.ceil_div(ends[i] - begin, size)
            begin = ends[i]
        after = before + inclusive_sum(tiles, lane)
        # of the lane that has the tile: the tile's number among each of its experts' tiles
        left, begin = tile - (after - tiles), start
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
            of_expert = cute.ceil_div(ends[i] - begin, size)
            if left >= 0 and left < of_expert:
                first = begin + left * size
                valid = cutlass.min(ends[i] - first, size)
                expert = chunk + lane * EXPERTS_PER_LANE + i
            left -= of_expert
            begin = ends[i]
        owner = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(after <= tile)))
        before = cute.arch.shuffle_sync(after, LANES - 1)
        end = cute.arch.shuffle_sync(ends[EXPERTS_PER_LANE - 1], LANES - 1)
        if owner < LANES:
            first = cute.arch.shuffle_sync(first, owner)
            valid = cute.arch.shuffle_sync(valid, owner)
            expert = cute.arch.shuffle_sync(expert, owner)
            found = Int32(1)
        chunk += LANES * EXPERTS_PER_LANE
    present = valid
    if found == 0:
        first, valid = end + (tile - before) * size, Int32(0)
        present = cutlass.min(rows - first, size)
    return first, valid, present, expert


@cute.jit
def largest_and_no_infinity(values, dtype: cutlass.Constexpr[str]):
    """The largest magnitudes of a thread's values, biased: of pairs of rows, and of pairs of columns.

    Infinities among the values become NaN, for the conversion to codes.
    """
    of_rows, of_columns, signs = largest_magnitudes(values, FINITE_BIAS[dtype])
    if signs & NEGATIVES != 0:
        for i in cutlass.range_constexpr(STRIP):
            loaded = values[i].load()
            values[i].store(loaded - (loaded - loaded))
    return of_rows, of_columns


# ------------------------------------------------------------------------------------------------------------ tiles


@cute.jit
def zero_outside(values, strip, valid, vector, vectors):
    """Zeros in place of a thread's values after ``valid`` rows of the tile, and after the last of the columns."""
    if strip + STRIP > valid or vector >= vectors:
        for i in cutlass.range_constexpr(STRIP):
            if strip + i >= valid or vector >= vectors:
                values[i].fill(0.0)


@cute.jit
def load_tile(x, index, first, valid, vector):
    """A thread's values: a vector of 8 columns of each row of its strip; zeros after ``valid`` rows of the tile.

    ``index`` has the row of ``x`` for each row, if rows are gathered.
    """
    thread, _, _ = cute.arch.thread_idx()
    strip = thread // GROUPS * STRIP
    vectors = x.shape[1] // VECTOR
    values = [cute.make_rmem_tensor((VECTOR,), x.element_type) for _ in range(STRIP)]
    if valid > 0:
        # rows and columns outside of the matrix load others: in a branch, the warp would wait for each load
        inside = cutlass.min(vector, vectors - 1)
        numbers = [first + cutlass.min(strip + i, valid - 1) for i in range(STRIP)]
        if const_expr(index is not None):
            numbers = [index[number] for number in numbers]
        for i in cutlass.range_constexpr(STRIP):
            at = cute.local_tile(x[numbers[i], None], (VECTOR,), (inside,))
            cute.autovec_copy(at, values[i], l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE)
    zero_outside(values, strip, valid, vector, vectors)
    return values


@cute.jit
def load_tile_of_codes(x, scale, index, first, valid, vector, block, element: cutlass.Constexpr[str]):
    """As `load_tile`, of codes and their scales in 1x128 blocks: values in bf16."""
    thread, _, _ = cute.arch.thread_idx()
    strip = thread // GROUPS * STRIP
    vectors = x.shape[1] // VECTOR
    values = [cute.make_rmem_tensor((VECTOR,), cutlass.BFloat16) for _ in range(STRIP)]
    if valid > 0:
        inside = cutlass.min(vector, vectors - 1)
        numbers = [index[first + cutlass.min(strip + i, valid - 1)] for i in range(STRIP)]
        held = [cute.make_rmem_tensor((VECTOR,), x.element_type) for _ in range(STRIP)]
        scales = [scale[number, block] for number in numbers]
        for i in cutlass.range_constexpr(STRIP):
            at = cute.local_tile(x[numbers[i], None], (VECTOR,), (inside,))
            cute.autovec_copy(at, held[i], l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE)
        for i in cutlass.range_constexpr(STRIP):
            wide = cute.recast_tensor(held[i], CODES[element]).load().to(Float32) * scales[i]
            values[i].store(wide.to(cutlass.BFloat16))
    zero_outside(values, strip, valid, vector, vectors)
    return values


def on_tiles(ctas: Any, stream: Any, per_sm: int, shared_percent: int, matrices: Any = 1) -> dict[str, Any]:
    """How to launch a CTA for each tile: ``per_sm`` of them at least, with this part of an SM's memory as shared."""
    return {
        "grid": (ctas, matrices, 1), "block": (THREADS, 1, 1), "min_blocks_per_mp": per_sm,
        "preferred_smem_carveout": shared_percent, "stream": stream,
    }  # fmt: skip


def allocate_codes(smem: SmemAllocator) -> Any:
    """Shared memory for the column codes of a tile: 8-byte chunks of each column."""
    return smem.allocate_tensor(Int64, cute.make_layout((STRIPS, BLOCK)), 16)


@cute.jit
def to_codes(values, factors, element: cutlass.Constexpr[str]):
    """The codes of 8 fp32 values times 8 factors, or times one."""
    codes = cute.make_rmem_tensor((VECTOR,), CODES[element])
    codes.store((values * factors).to(CODES[element]))
    return codes


@cute.jit
def transpose(values, factors, element: cutlass.Constexpr[str], s_codes):
    """Write the column codes of a thread's values to shared memory, for `write_columns`."""
    thread, _, _ = cute.arch.thread_idx()
    group, strip = thread % GROUPS, thread // GROUPS
    for w in cutlass.range_constexpr(WORDS):
        columns = [cute.make_rmem_tensor((STRIP,), Float32) for _ in range(2)]
        for i in cutlass.range_constexpr(STRIP):
            word = cute.recast_tensor(values[i], Int32)[w]
            columns[0][i], columns[1][i] = fp32_pair(word, values[i].element_type)
        for half in cutlass.range_constexpr(2):
            column = 2 * w + half
            found = to_codes(columns[half].load(), factors[column], element)
            s_codes[strip ^ group, group * VECTOR + column] = cute.recast_tensor(found, Int64)[0]


def transposed_bytes(words: list[Any]) -> list[Any]:
    """The transpose of 4 x 4 bytes, a word per row."""
    prmt = cute.arch.prmt
    low = [prmt(words[i], words[i + 1], 0x5140) for i in (0, 2)]  # columns 0 and 1 of two rows
    high = [prmt(words[i], words[i + 1], 0x7362) for i in (0, 2)]
    return [prmt(*pair, selector) for pair in (low, high) for selector in (0x5410, 0x7632)]


@cute.jit
def write_columns(s_codes, codes, block, place):
    """Write the column codes of a tile from shared memory, where chunk ``strip ^ group`` of a column has the codes of a
    strip. ``place`` is the tile's, in the second axis of the codes.
    """
    thread, _, _ = cute.arch.thread_idx()
    units = BLOCK // UNIT
    for k in cutlass.range_constexpr(BLOCK * units // THREADS):
        column, unit = k * (THREADS // units) + thread // units, thread % units
        swaps = column // VECTOR
        pair = cute.make_rmem_tensor((2,), Int64)
        cute.autovec_copy(cute.local_tile(s_codes[None, column], (2,), (unit ^ (swaps >> 1),)), pair)
        low, high = pair[0], pair[1]
        if swaps % 2 == 1:
            low, high = pair[1], pair[0]
        pair[0], pair[1] = low, high
        row, at = block * BLOCK + column, place * (BLOCK // UNIT) + unit
        if row < codes.shape[0] and at * UNIT < codes.shape[1]:
            cute.autovec_copy(
                cute.recast_tensor(pair, codes.element_type), cute.local_tile(codes[row, None], (UNIT,), (at,))
            )


@dataclass(frozen=True)
class _Tiles(WarpKernel):
    """What tiles of rows and tiles of weights have in common."""

    dtype: str  # of the values: "bf16" or "fp16"
    element: str  # of the codes: "e4m3" or "e5m2"
    rows: bool  # whether there are row codes
    columns: bool  # whether there are column codes
    power_of_two: bool  # whether scales are powers of two

    @property
    def _suffix(self) -> str:
        forms = ("_rows" if self.rows else "") + ("_columns" if self.columns else "")
        return f"{self.dtype}_{self.element}{forms}" + ("" if self.power_of_two else "_fp32_scales")

    def encode_and_scale(self, amax, least):
        return encode_and_scale(cute.arch.fmax(amax, least), self.element, self.power_of_two)

    @cute.jit
    def store_rows(self, values, factors, codes, first, present, vector):
        """Write the row codes of the tile's values. ``first`` is the tile's first row, of ``present``."""
        thread, _, _ = cute.arch.thread_idx()
        strip = thread // GROUPS * STRIP
        if vector * VECTOR < codes.shape[1]:
            at = cute.local_tile(codes[first + strip, None], (VECTOR,), (vector,)).iterator
            for i in cutlass.range_constexpr(STRIP):
                words, wide = cute.recast_tensor(values[i], Int32), cute.make_rmem_tensor((VECTOR,), Float32)
                for w in cutlass.range_constexpr(WORDS):
                    wide[2 * w], wide[2 * w + 1] = fp32_pair(words[w], values[i].element_type)
                found = cute.recast_tensor(to_codes(wide.load(), factors[i], self.element), codes.element_type)
                if strip + i < present:
                    cute.autovec_copy(found, cute.make_tensor(at, cute.make_layout((VECTOR,))))
                at += codes.stride[0]

    @cute.jit
    def store_columns(self, values, factors, s_codes, codes, block, place):
        """Write the column codes of the tile's values. ``place`` is the tile's, in the second axis of the codes."""
        transpose(values, factors, self.element, s_codes)
        cute.arch.sync_threads()
        write_columns(s_codes, codes, block, place)


def fake_weight(dtype: str, lines: Any, columns: Any) -> Any:
    """A weight (E, N, K) with unit stride along K, for the compiler."""
    strides = (*(cute.sym_int64(divisibility=VECTOR) for _ in range(2)), 1)
    return cute.runtime.make_fake_tensor(ELEMENTS[dtype], (cute.sym_int(), lines, columns), strides, assumed_align=16)


def fake_codes(*stack: Any) -> Any:
    """Codes (..., lines, length) as bytes, for the compiler."""
    shape = (*stack, cute.sym_int(), cute.sym_int())
    strides = (*(cute.sym_int64(divisibility=UNIT) for _ in stack), cute.sym_int64(divisibility=UNIT), 1)
    return cute.runtime.make_fake_tensor(cutlass.Uint8, shape, strides, assumed_align=16)


def fake_scale(*stack: Any) -> Any:
    """Scales (..., lines, blocks) with unit stride along the lines, for the compiler."""
    shape = (*stack, cute.sym_int(), cute.sym_int())
    strides = (*(cute.sym_int64(divisibility=4) for _ in stack), 1, cute.sym_int64(divisibility=4))
    return cute.runtime.make_fake_tensor(Float32, shape, strides, assumed_align=16)


@dataclass(frozen=True)
class QuantizeRows(_Tiles):
    """Codes of rows (R, K) with 1x128 blocks."""

    sorted: bool  # whether rows are sorted by expert
    gathered: bool = False  # whether a row is a token's: the kernel reads tokens through an index

    @property
    def symbol(self) -> str:
        how = ("_sorted" if self.sorted else "") + ("_gathered" if self.gathered else "")
        return f"sm90_quantize_{self._suffix}{how}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of values (R, K) or (T, K), index (R,) int32, offsets (E,) int32; row codes
        (R, K) uint8 and their scale (R, ceil(K / 128)); column codes (K, P) uint8 and their scale (K, P / 128); the
        number of tiles of rows, R, ``zero_tail``, and amax_epsilon. Arguments that the kernel does not need are not
        read.
        """
        columns = cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), columns), fake_vector("int32", cute.sym_int()),
            fake_vector("int32", cute.sym_int()),
            fake_codes(), fake_scale(), fake_codes(), fake_scale(), *[Int32(1)] * 3, Float32(0.0),
        )  # fmt: skip

    @cute.jit
    def __call__(self, x, index, offsets, codes, scale, codes_t, scale_t, tiles, rows, zero_tail, least, stream):
        blocks = cute.ceil_div(x.shape[1], BLOCK)
        self.kernel(x, index, offsets, codes, scale, codes_t, scale_t, rows, zero_tail, least, blocks).launch(
            **on_tiles(tiles * blocks, stream, CTAS_PER_SM, SHARED_PERCENT)
        )

    @cute.kernel
    def kernel(self, x, index, offsets, codes, scale, codes_t, scale_t, rows, zero_tail, least, blocks):
        lane = cute.arch.lane_idx()
        number, _, _ = cute.arch.block_idx()
        tile = number // blocks  # adjacent CTAs read adjacent columns
        block = number - tile * blocks
        first, valid, present = self.where(offsets, tile, rows, lane)
        if const_expr(self.sorted):
            if (valid > 0) | (zero_tail != 0):
                self.quantize(x, index, codes, scale, codes_t, scale_t, least, block, tile, first, valid, present)
        else:
            self.quantize(x, index, codes, scale, codes_t, scale_t, least, block, tile, first, valid, present)

    @cute.jit
    def quantize(self, x, index, codes, scale, codes_t, scale_t, least, block, tile, first, valid, present):
        """Quantize a tile of rows and a block of columns."""
        thread, _, _ = cute.arch.thread_idx()
        lane, smem = cute.arch.lane_idx(), SmemAllocator()
        vector = block * GROUPS + thread % GROUPS
        values = load_tile(x, index if const_expr(self.gathered) else None, first, valid, vector)
        of_rows, of_columns = largest_and_no_infinity(values, self.dtype)

        if const_expr(self.rows):
            encode = self.encode_rows(of_rows, scale, first, present, block, least)
            factors = [cute.arch.shuffle_sync(encode, lane & GROUPS | i) for i in range(STRIP)]
            self.store_rows(values, factors, codes, first, present, vector)

        if const_expr(self.columns):
            self.quantize_columns(smem, values, of_columns, codes_t, scale_t, least, block, tile)

    def quantize_columns(self, smem, values, of_columns, codes_t, scale_t, least, block, tile):
        """Write the column codes of the tile's values, and their scales."""
        thread, _, _ = cute.arch.thread_idx()
        s_codes = allocate_codes(smem)
        s_amax = smem.allocate_tensor(Int32, cute.make_layout((BLOCK // 2, STRIPS)), 16)
        s_encode = smem.allocate_tensor(Float32, cute.make_layout((BLOCK,)), 16)
        self.encode_columns(of_columns, s_amax, s_encode, scale_t, block, tile, least)
        factors = cute.make_rmem_tensor((VECTOR,), Float32)
        cute.autovec_copy(cute.local_tile(s_encode, (VECTOR,), (thread % GROUPS,)), factors)
        self.store_columns(values, factors, s_codes, codes_t, block, tile)

    # -- where a tile's rows are

    @cute.jit
    def where(self, offsets, tile, rows, lane):
        """First row of a tile, its rows that have values, and its rows that have row codes."""
        first = tile * BLOCK
        present = cutlass.min(rows - first, BLOCK)
        valid = present
        if const_expr(self.sorted):
            if const_expr(self.columns):
                first, valid, present, _ = rows_of_tile(offsets, tile, rows, lane, BLOCK)
            else:
                valid = cutlass.max(cutlass.min(offsets[cute.size(offsets) - 1] - first, BLOCK), 0)
        return first, valid, present

    # -- factors

    @cute.jit
    def encode_rows(self, largest, scale, first, present, block, least):
        """Write the scales of the tile's rows; return the factor of row ``lane % 8`` of this thread's strip."""
        thread, _, _ = cute.arch.thread_idx()
        group, strip = thread % GROUPS, thread // GROUPS
        amax = []
        for pair in cutlass.range_constexpr(STRIP // 2):
            found = largest[pair]
            for step in cutlass.range_constexpr(4):
                found = max_of_pairs(found, cute.arch.shuffle_sync_bfly(found, 1 << step))
            amax.append(found)
        row = group % STRIP
        low, high = amax[0], amax[2]
        if row & 2 != 0:
            low, high = amax[1], amax[3]
        bits = low
        if row & 4 != 0:
            bits = high
        if row & 1 != 0:
            bits = bits >> 16
        of_block = finite_amax(bits, FINITE_BIAS[self.dtype], ELEMENTS[self.dtype])
        encode, stored = self.encode_and_scale(of_block, least)
        if group < STRIP and strip * STRIP + row < present:
            scale[first + strip * STRIP + row, block] = stored
        return encode

    @cute.jit
    def encode_columns(self, largest, s_amax, s_encode, scale, block, tile, least):
        """Write the scales of the tile's columns, and their factors to shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        group, strip = thread % GROUPS, thread // GROUPS
        amax = cute.make_rmem_tensor((WORDS,), Int32)
        for w in cutlass.range_constexpr(WORDS):
            amax[w] = largest[w]
        cute.autovec_copy(amax, cute.local_tile(s_amax[None, strip], (WORDS,), (group,)))
        cute.arch.sync_threads()
        if thread < BLOCK:
            halves = cute.make_tensor(cute.recast_ptr(s_amax.iterator, dtype=Int16), cute.make_layout((BLOCK, STRIPS)))
            bits = Int32(halves[thread, 0])
            for s in cutlass.range_constexpr(1, STRIPS):
                bits = cutlass.max(bits, Int32(halves[thread, s]))
            of_block = finite_amax(bits, FINITE_BIAS[self.dtype], ELEMENTS[self.dtype])
            encode, stored = self.encode_and_scale(of_block, least)
            s_encode[thread] = encode
            column = block * BLOCK + thread
            if column < scale.shape[0] and tile < scale.shape[1]:
                scale[column, tile] = stored
        cute.arch.sync_threads()


@dataclass(frozen=True)
class QuantizeColumnsOfCodes(QuantizeRows):
    """Column codes of gathered rows. The source has E4M3 codes by rows, with scales that are powers of two."""

    dtype: str = "bf16"
    element: str = "e4m3"
    rows: bool = False
    columns: bool = True
    power_of_two: bool = True
    sorted: bool = True
    gathered: bool = True

    @property
    def symbol(self) -> str:
        return f"sm90_quantize_columns_of_{self.element}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of codes (T, K) uint8 and their scale (T, K / 128) with unit stride along
        either axis, index (R,) int32, offsets (E,) int32, column codes (K, P) uint8 and their scale (K, P / 128), and
        the number of tiles of rows. Codes after the last expert's padding are not written.
        """
        scale = cute.runtime.make_fake_tensor(
            Float32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), cute.sym_int64())
        )  # fmt: skip
        vectors = [fake_vector("int32", cute.sym_int()) for _ in range(2)]
        return self.compiled_for(fake_codes(), scale, *vectors, fake_codes(), fake_scale(), Int32(1))

    @cute.jit
    def __call__(self, x, scale, index, offsets, codes_t, scale_t, tiles, stream):
        blocks = cute.ceil_div(x.shape[1], BLOCK)
        self.kernel(x, scale, index, offsets, codes_t, scale_t, blocks).launch(
            **on_tiles(tiles * blocks, stream, CTAS_PER_SM, SHARED_PERCENT)
        )

    @cute.kernel
    def kernel(self, x, scale, index, offsets, codes_t, scale_t, blocks):
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        tile = number // blocks  # adjacent CTAs read adjacent columns
        block = number - tile * blocks
        first, valid, _ = self.where(offsets, tile, Int32(0), cute.arch.lane_idx())
        if valid > 0:
            vector = block * GROUPS + thread % GROUPS
            values = load_tile_of_codes(x, scale, index, first, valid, vector, block, self.element)
            _, of_columns = largest_and_no_infinity(values, self.dtype)
            self.quantize_columns(
                SmemAllocator(), values, of_columns, codes_t, scale_t, Float32(0.0), block, tile
            )  # fmt: skip


@dataclass(frozen=True)
class QuantizeWeight(_Tiles):
    """Codes of weights (E, N, K) with 128x128 blocks."""

    @property
    def symbol(self) -> str:
        return f"sm90_quantize_weight_{self._suffix}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of weight (E, N, K); row codes (E, N, K) uint8 and their scale
        (E, ceil(N / 128), ceil(K / 128)); column codes (E, K, N) uint8 and their scale (E, ceil(K / 128),
        ceil(N / 128)); and amax_epsilon. Arguments that the kernel does not need are not read.
        """
        weight = fake_weight(self.dtype, cute.sym_int(), cute.sym_int(divisibility=VECTOR))
        forms = [make(cute.sym_int()) for _ in range(2) for make in (fake_codes, fake_scale)]
        return self.compiled_for(weight, *forms, Float32(0.0))

    @cute.jit
    def __call__(self, weight, codes, scale, codes_t, scale_t, least, stream):
        experts, lines, columns = weight.shape
        high, wide = cute.ceil_div(lines, BLOCK), cute.ceil_div(columns, BLOCK)
        self.kernel(weight, codes, scale, codes_t, scale_t, least, high, wide).launch(
            **on_tiles(experts * high * wide, stream, CTAS_PER_SM, SHARED_PERCENT)
        )

    @cute.kernel
    def kernel(self, weight, codes, scale, codes_t, scale_t, least, high, wide):
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        row = number // wide  # of blocks, over all experts; adjacent CTAs read adjacent columns
        block = number - row * wide
        expert = row // high
        line = row - expert * high
        first = line * BLOCK
        valid = cutlass.min(weight.shape[1] - first, BLOCK)
        vector = block * GROUPS + thread % GROUPS
        smem = SmemAllocator()
        s_amax = smem.allocate_tensor(Int32, cute.make_layout((WARPS,)), 16)

        values = load_tile(weight[expert, None, None], None, first, valid, vector)
        of_rows, _ = largest_and_no_infinity(values, self.dtype)
        encode, stored = self.encode_block(of_rows, s_amax, least)
        if const_expr(self.rows):
            self.store_rows(values, [encode] * STRIP, codes[expert, None, None], first, valid, vector)
            if thread == 0:
                scale[expert, line, block] = stored
        if const_expr(self.columns):
            s_codes = allocate_codes(smem)
            self.store_columns(values, [encode] * VECTOR, s_codes, codes_t[expert, None, None], block, line)
            if thread == 0:
                scale_t[expert, block, line] = stored

    @cute.jit
    def encode_block(self, largest, s_amax, least):
        """The factor of the tile, which is one block, and its scale."""
        found = max_of_pairs(max_of_pairs(largest[0], largest[1]), max_of_pairs(largest[2], largest[3]))
        for step in cutlass.range_constexpr(5):
            found = max_of_pairs(found, cute.arch.shuffle_sync_bfly(found, 1 << step))
        s_amax[cute.arch.make_warp_uniform(cute.arch.warp_idx())] = found
        cute.arch.sync_threads()
        for w in cutlass.range_constexpr(WARPS):
            found = max_of_pairs(found, s_amax[w])
        bits = max_of_pairs(found, found >> 16)
        of_block = finite_amax(bits, FINITE_BIAS[self.dtype], ELEMENTS[self.dtype])
        return self.encode_and_scale(of_block, least)
