"""Kernels that quantize to narrow formats with blocks of 16 or 32 values, or with given factors.

`QuantizeFormat`: row codes, column codes, or both, of rows and of weights; with delayed scaling, also the largest
magnitudes per expert. `Magnitudes`: those per row, per column of an expert, and per expert, for formats whose factors
depend on more values than a tile has.

A CTA has a tile of 128 x 128 values, which its threads load as in `blocks.py`: a thread has a strip of 8 rows, and 8
columns. If rows are sorted by expert, the tiles are of *padded* rows: each expert's rows begin at a multiple of the
block, and the missing rows are zeros. The 16 rows of a warp are in one block, so each warp finds its rows alone. The
blocks after the last expert's are zeros, and so are the row codes of rows without an expert.

The largest magnitude is found on pairs of 16-bit integers. FP8 ignores magnitudes that are not finite, and makes NaN
codes of them. E2M1 has no NaN: a block with a value that is not finite has the scale NaN.

Axes: B matrices, R rows, T tokens, K columns, E experts, P padded rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.codes import (
    CODES,
    FINITE_BIAS,
    FLT_MAX,
    MANTISSA,
    MOST,
    MOST_EXPONENT,
    NEGATIVES,
    fp32_pair,
    half_of,
    max_of_pairs,
    raise_to,
    value_of_bits,
)
from fusedmoe.kernels.device.warps import ELEMENTS, VECTOR, WarpKernel, fake_vector
from fusedmoe.kernels.rows.quantize.blocks import BLOCK as TILE
from fusedmoe.kernels.rows.quantize.blocks import (
    GROUPS,
    STRIP,
    STRIPS,
    THREADS,
    UNIT,
    WORDS,
    largest_magnitudes,
    load_tile,
    on_tiles,
    rows_of_tile,
)
from fusedmoe.numerics.formats.format import Format, ScaleRule, column_block

CTAS_PER_SM = 2
SHARED_PERCENT = 25  # of an SM's memory: 20 KiB per CTA
WARP_ROWS = 16
INFINITY = {"bf16": 0x7F80, "fp16": 0x7C00}  # bits
FP32_INFINITY = 0x7F800000
SIGN = -0x80000000
ONE = 0x3F800000  # the bits of 1.0
SIX = 0x40C00000
NAN_SCALE = 0x7F  # of E4M3
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # of `fusedmoe.numerics.formats.hadamard`


# ----------------------------------------------------------------------------------------------------------- scales


@cute.jit
def e8m0_encode(amax, element: cutlass.Constexpr[str], rule: cutlass.Constexpr[str]):
    """The factor of a block's values, and the byte of its scale."""
    if const_expr(rule == "rceil"):
        bits = (amax * Float32(1.0 / MOST[element])).bitcast(Int32)
        byte, mantissa = bits >> 23, bits & MANTISSA
        # subnormals up to 2**-127 round up to byte 0
        if mantissa > 0 and (byte > 0 or mantissa > 0x400000):
            byte += 1
    else:
        byte = cutlass.max((amax.bitcast(Int32) >> 23) - MOST_EXPONENT[element], 0)
    return cutlass.max((254 - byte) << 23, 0x400000).bitcast(Float32), byte


@cute.jit
def two_level_encode(amax, finite, tensor_encode):
    """The factors of 8 blocks' values, and the bytes of their scales; NaN for a block with values that are not finite.

    ``amax`` and ``finite`` are lists of 8.
    """
    wanted = cute.make_rmem_tensor((VECTOR,), Float32)
    for i in cutlass.range_constexpr(VECTOR):
        wanted[i] = cutlass.min(amax[i] * (tensor_encode * Float32(1.0 / 6.0)), Float32(448.0))
    codes = cute.make_rmem_tensor((VECTOR,), CODES["e4m3"])
    codes.store(wanted.load().to(CODES["e4m3"]))
    bytes_ = cute.recast_tensor(codes, cutlass.Uint8)
    rounded = cute.make_rmem_tensor((VECTOR,), Float32)
    rounded.store(codes.load().to(Float32))
    tensor_scale = Float32(1.0) / tensor_encode
    factors, scales = [], []
    for i in cutlass.range_constexpr(VECTOR):
        factor = cutlass.min(Float32(1.0) / (rounded[i] * tensor_scale), Float32(FLT_MAX))
        scale = Int32(bytes_[i])
        if finite[i] == 0:
            factor, scale = Float32(float("nan")), Int32(NAN_SCALE)
        factors.append(factor)
        scales.append(scale)
    return factors, scales


# ------------------------------------------------------------------------------------------------------------ codes


@cute.jit
def to_e2m1(value):
    """The code of an fp32 value, rounded to nearest even. NaN is +6."""
    bits = value.bitcast(Int32)
    magnitude, sign = e2m1_parts(bits)
    step = cutlass.max(magnitude & FP32_INFINITY, ONE)
    # in this binade of fp32, the last bit of a number is a step of E2M1
    large = step + (22 << 23)
    steps = (magnitude.bitcast(Float32) + large.bitcast(Float32)).bitcast(Int32) - large
    return steps + ((step - ONE) >> 22) | sign


@cute.jit
def to_e2m1_stochastic(value, random):
    """The code of an fp32 value plus ``random / 256`` of a step, truncated. NaN is +6."""
    bits = value.bitcast(Int32)
    magnitude, sign = e2m1_parts(bits)
    step = (cutlass.max(magnitude & FP32_INFINITY, ONE) - (1 << 23)).bitcast(Float32)
    raised = magnitude.bitcast(Float32) + random.to(Float32) * Float32(1.0 / 256.0) * step
    found = raised.bitcast(Int32)
    code = (found >> 22) - ((ONE >> 22) - 2)
    if found < ONE:
        code = Int32(found >= ONE - (1 << 23))
    return cutlass.min(code, 7) | sign


@cute.jit
def e2m1_parts(bits):
    """The bits of a magnitude, at most 6, and the sign of its code; the magnitude of NaN is 6, without a sign."""
    magnitude = bits & ~SIGN
    sign = (bits >> 28) & 8
    if magnitude > FP32_INFINITY:
        sign = Int32(0)
    return cutlass.min(magnitude, SIX), sign


def sums_and_differences(values: list[Any], size: int) -> list[Any]:
    """A round of Sylvester's transform: pairs of values at a distance of ``size`` become their sum and difference."""
    return [values[i - size] - values[i] if i & size else values[i] + values[i + size] for i in range(len(values))]


# ------------------------------------------------------------------------------------------------------------ tiles


@dataclass(frozen=True)
class _Tiles(WarpKernel):
    """What both kernels have in common: where a warp's rows are, and their values."""

    dtype: str  # of the values: "bf16" or "fp16"
    sorted: bool  # whether rows are sorted by expert
    gathered: bool  # whether a row is a token's: the kernel reads tokens through an index
    rotated: bool  # whether columns are rotated first, in tiles of 16 rows

    @property
    def rotated_dtype(self) -> str:
        """The dtype of the values that column codes are made of."""
        return "bf16" if self.rotated else self.dtype

    @cute.jit
    def where(self, offsets, tile, rows, lane, size: cutlass.Constexpr[int]):
        """The first row of a tile, its rows that have values, and its rows that have row codes, as this warp sees it,
        and the expert of the warp's rows.
        """
        first, expert = tile * TILE, Int32(0)
        present = cutlass.min(rows - first, TILE)
        valid = present
        if const_expr(self.sorted):
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            base = warp * WARP_ROWS // size * size  # of the warp's block, in the tile
            start, valid, present, expert = rows_of_tile(
                offsets, tile * (TILE // size) + base // size, rows, lane, size
            )
            first = start - base
            if valid > 0:
                valid += base
            present += base
        return first, valid, present, expert

    @cute.jit
    def raise_expert(self, maxima, of_words, expert, lane, dtype: cutlass.Constexpr[str]):
        """Raise an expert's maximum to the largest of the warp's values."""
        bits = max_of_pairs(max_of_pairs(of_words[0], of_words[1]), max_of_pairs(of_words[2], of_words[3]))
        for step in cutlass.range_constexpr(5):
            bits = max_of_pairs(bits, cute.arch.shuffle_sync_bfly(bits, 1 << step))
        if lane == 0:
            raise_to(maxima.iterator + expert, cutlass.max(half_of(bits, 0), half_of(bits, 1)), dtype)

    @cute.jit
    def turned(self, values):
        """The values as bf16, rotated in tiles of 16 rows: those of this strip and of the warp's other one."""
        lane = cute.arch.lane_idx()
        upper = lane // GROUPS  # whether this is the second strip of the tile
        signs = []
        for i in cutlass.range_constexpr(STRIP):
            sign = Float32(SIGNS[i])
            if upper == 1:
                sign = Float32(SIGNS[STRIP + i])
            signs.append(sign)
        out = [cute.make_rmem_tensor((VECTOR,), cutlass.BFloat16) for _ in range(STRIP)]
        for w in cutlass.range_constexpr(WORDS):
            for half in cutlass.range_constexpr(2):
                column = [
                    fp32_pair(cute.recast_tensor(values[i], Int32)[w], values[i].element_type)[half] * signs[i]
                    for i in range(STRIP)
                ]
                for step in cutlass.range_constexpr(3):
                    column = sums_and_differences(column, 1 << step)
                for i in cutlass.range_constexpr(STRIP):
                    other = cute.arch.shuffle_sync_bfly(column[i], GROUPS)
                    turned = column[i] + other
                    if upper == 1:
                        turned = other - column[i]
                    out[i][2 * w + half] = (turned * Float32(0.25)).to(cutlass.BFloat16)
        return out


@dataclass(frozen=True)
class QuantizeFormat(_Tiles):
    """Codes of rows (R, K), or of matrices (B, R, K), in a narrow format."""

    format: Format  # without the parts that do not change the code, so that a symbol has one description
    rows: bool  # whether there are row codes
    columns: bool  # whether there are column codes
    stochastic: bool = False  # whether random bits round the codes
    amax: bool = False  # whether the largest magnitude of each expert is found too

    def __post_init__(self) -> None:
        format = replace(self.format, name="")
        if self.given:
            format = replace(format, rule=ScaleRule.FP32, amax_epsilon=0.0)
        object.__setattr__(self, "format", format)

    @property
    def element(self) -> str:
        """Type of the codes; two codes of E2M1 are a byte."""
        return self.format.element.name

    @property
    def given(self) -> bool:
        """Whether there are no blocks: factors are known before."""
        return self.format.block[1] is None

    @property
    def rule(self) -> str:
        """The rule for a block's scale. "given" has a factor for each row by rows, and for each column of an expert by
        columns. "given by expert" has one per expert.
        """
        if self.given:
            return "given" if self.format.block[0] else "given by expert"
        return self.format.rule.value

    @property
    def block(self) -> int:
        """Values per block. By columns, each expert's rows are padded to a multiple of it."""
        return column_block(self.format)

    @property
    def squared(self) -> bool:
        """Whether a block has as many rows as columns."""
        return self.format.block[0] not in (None, 1)

    @property
    def symbol(self) -> str:
        parts = [self.dtype, self.element, self.rule.replace(" ", "_"), str(self.block)]
        flags = {
            "square": self.squared, "rows": self.rows, "columns": self.columns, "sorted": self.sorted,
            "gathered": self.gathered, "rotated": self.rotated, "stochastic": self.stochastic, "amax": self.amax,
        }  # fmt: skip
        return "_".join([f"{self.family}_quantize_format", *parts, *(name for name, on in flags.items() if on)])

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 4 if self.element == "e2m1" else 8

    @property
    def bias(self) -> int:
        """What is added to the bits of magnitudes, for 16-bit comparisons; see `finite_amax`."""
        return 0 if self.element == "e2m1" else FINITE_BIAS[self.dtype]

    @property
    def bias_of_columns(self) -> int:
        return 0 if self.element == "e2m1" else FINITE_BIAS[self.rotated_dtype]

    @property
    def chunk(self) -> type:
        """The codes of a strip and a column."""
        return Int32 if self.bits == 4 else Int64

    def compile(self) -> Any:
        """Compile without a GPU; a function of values (B, R, K) or (1, T, K), index (R,) int32, offsets (E,) int32;
        row codes (B, R, C) uint8, their scale (B, R', K / block) uint8, their factors (R,) or (E,) fp32, and their
        random bits (R, K) uint8; column codes (B, K, C), their scale (B, K', P / block), their factors (E, K) or (E, 1)
        and their random bits (K, P); the largest magnitudes (E,) as those of `Magnitudes`; the number of tiles of rows,
        and R. Arguments that the kernel does not need are not read or written.
        """
        return self.compiled_for(
            fake_matrices(self.dtype), fake_vector("int32", cute.sym_int()), fake_vector("int32", cute.sym_int()),
            _bytes(3, VECTOR * self.bits // 8), _bytes(3, 1), fake_vector("fp32", cute.sym_int()), _bytes(2, VECTOR),
            _bytes(3, UNIT), _bytes(3, 1), _factors(), _bytes(2, VECTOR), fake_vector("int32", cute.sym_int()),
            Int32(1), Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, x, index, offsets, codes, scale, factors, random, codes_t, scale_t, factors_t, random_t, experts_max,
        tiles, rows, stream,
    ):  # fmt: skip
        blocks = cute.ceil_div(x.shape[2], TILE)
        matrices = 1 if const_expr(self.sorted or self.gathered) else x.shape[0]
        self.kernel(
            x, index, offsets, codes, scale, factors, random, codes_t, scale_t, factors_t, random_t, experts_max,
            rows, blocks,
        ).launch(**on_tiles(tiles * blocks, stream, CTAS_PER_SM, SHARED_PERCENT, matrices))  # fmt: skip

    @cute.kernel
    def kernel(
        self, x, index, offsets, codes, scale, factors, random, codes_t, scale_t, factors_t, random_t, experts_max,
        rows, blocks,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        number, matrix, _ = cute.arch.block_idx()
        tile = number // blocks  # adjacent CTAs read adjacent columns
        at = number - tile * blocks
        vector = at * GROUPS + thread % GROUPS
        smem = SmemAllocator()

        first, valid, present, expert = self.where(offsets, tile, rows, lane, self.block)
        if const_expr(not self.sorted):
            expert = matrix
        source = x[matrix, None, None]
        values = load_tile(source, index if const_expr(self.gathered) else None, first, valid, vector)
        of_rows, of_columns, signs = largest_magnitudes(values, self.bias)
        if const_expr(self.amax):
            self.raise_expert(experts_max, of_columns, expert, lane, self.dtype)
        self.end_infinities(values, signs)
        if const_expr(self.squared):
            self.square(
                values, of_columns, smem, codes, scale, factors, codes_t, scale_t, first, present, vector, tile, matrix
            )
        else:
            if const_expr(self.rows):
                encode = self.encode_rows(of_rows, scale, factors, first, present, vector, expert, matrix, rows)
                self.store_rows(values, encode, codes, random, first, present, vector, matrix)
            if const_expr(self.columns):
                if const_expr(self.rotated):
                    values = self.turned(values)
                    _, of_columns, signs = largest_magnitudes(values, self.bias_of_columns)
                    self.end_infinities(values, signs)
                encode = self.encode_columns(of_columns, smem, scale_t, factors_t, tile, vector, expert, matrix)
                self.store_columns(values, encode, smem, codes_t, random_t, tile, at, matrix)

    @cute.jit
    def end_infinities(self, values, signs):
        """Make NaN of infinities, since the conversion to FP8 would saturate them."""
        if const_expr(self.bits == 8):
            if signs & NEGATIVES != 0:
                for i in cutlass.range_constexpr(STRIP):
                    loaded = values[i].load()
                    values[i].store(loaded - (loaded - loaded))

    # -- scales

    @cute.jit
    def finite_amax(self, bits, dtype: cutlass.Constexpr[str]):
        """The largest finite magnitude of a block, and whether all its magnitudes are finite, from the largest 16 bits.

        For FP8, those of a magnitude that is not finite are negative. For E2M1, they are the largest; then the
        magnitude does not matter.
        """
        if const_expr(self.bits == 4):
            finite = Int32(bits < INFINITY[dtype])
            return value_of_bits(bits, ELEMENTS[dtype]), finite
        bias = FINITE_BIAS[dtype]
        return value_of_bits(cutlass.max(bits, bias) - bias, ELEMENTS[dtype]), Int32(1)

    @cute.jit
    def encode(self, largest, dtype: cutlass.Constexpr[str], tensor_encode):
        """The factors of 8 blocks, and the bytes of their scales."""
        amax, finite = [], []
        for i in cutlass.range_constexpr(VECTOR):
            magnitude, all_finite = self.finite_amax(largest[i], dtype)
            amax.append(magnitude)
            finite.append(all_finite)
        if const_expr(self.rule == "two level"):
            return two_level_encode(amax, finite, tensor_encode)
        factors, scales = [], []
        for i in cutlass.range_constexpr(VECTOR):
            factor, byte = e8m0_encode(amax[i], self.element, self.rule)
            factors.append(factor)
            scales.append(byte)
        return factors, scales

    @cute.jit
    def encode_rows(self, largest, scale, factors, first, present, vector, expert, matrix, rows):
        """The factors of this thread's rows; writes the scales of their blocks."""
        thread, _, _ = cute.arch.thread_idx()
        strip = thread // GROUPS * STRIP
        if const_expr(self.rule == "given"):
            last = cutlass.max(rows - 1, 0)
            return [factors[matrix * rows + cutlass.min(first + strip + i, last)] for i in range(STRIP)]
        if const_expr(self.rule == "given by expert"):
            return [factors[expert]] * STRIP
        lanes = self.block // VECTOR  # of a block
        found = []
        for pair in cutlass.range_constexpr(STRIP // 2):
            bits = largest[pair]
            for step in cutlass.range_constexpr(lanes.bit_length() - 1):
                bits = max_of_pairs(bits, cute.arch.shuffle_sync_bfly(bits, 1 << step))
            found += [half_of(bits, 0), half_of(bits, 1)]
        tensor_encode = factors[expert] if const_expr(self.rule == "two level") else None
        encode, stored = self.encode(found, self.dtype, tensor_encode)
        block = vector // lanes
        if vector % lanes == 0 and block < cute.size(scale, mode=[2]):
            for i in cutlass.range_constexpr(STRIP):
                if strip + i < present:
                    scale[matrix, first + strip + i, block] = stored[i].to(cutlass.Uint8)
        return encode

    @cute.jit
    def of_columns(self, largest, smem):
        """The largest 16 bits of each of this thread's columns, over the rows of its block."""
        thread, _, _ = cute.arch.thread_idx()
        group, strip = thread % GROUPS, thread // GROUPS
        s_amax = smem.allocate_tensor(Int32, cute.make_layout((TILE // 2, STRIPS)), 16)
        own = cute.make_rmem_tensor((WORDS,), Int32)
        for w in cutlass.range_constexpr(WORDS):
            own[w] = largest[w]
        cute.autovec_copy(own, cute.local_tile(s_amax[None, strip], (WORDS,), (group,)))
        cute.arch.sync_threads()
        strips = self.block // STRIP  # of a block
        begin = strip // strips * strips
        for s in cutlass.range_constexpr(strips):
            other = cute.make_rmem_tensor((WORDS,), Int32)
            cute.autovec_copy(cute.local_tile(s_amax[None, begin + s], (WORDS,), (group,)), other)
            for w in cutlass.range_constexpr(WORDS):
                own[w] = max_of_pairs(own[w], other[w])
        found = []
        for w in cutlass.range_constexpr(WORDS):
            found += [half_of(own[w], 0), half_of(own[w], 1)]
        return found

    @cute.jit
    def encode_columns(self, largest, smem, scale, factors, tile, vector, expert, matrix):
        """The factors of this thread's columns; writes the scales of their blocks."""
        thread, _, _ = cute.arch.thread_idx()
        strip = thread // GROUPS
        if const_expr(self.rule == "given"):
            columns = factors.shape[1]
            return [factors[expert, cutlass.min(vector * VECTOR + i, columns - 1)] for i in range(VECTOR)]
        if const_expr(self.rule == "given by expert"):
            return [factors[expert, 0]] * VECTOR
        found = self.of_columns(largest, smem)
        tensor_encode = factors[expert, 0] if const_expr(self.rule == "two level") else None
        encode, stored = self.encode(found, self.rotated_dtype, tensor_encode)
        strips = self.block // STRIP
        block = tile * (TILE // self.block) + strip // strips
        blocks, columns = cute.size(scale, mode=[2]), cute.size(scale, mode=[1])
        if strip % strips == 0 and block < blocks and vector * VECTOR < columns:
            for i in cutlass.range_constexpr(VECTOR):
                scale[matrix, vector * VECTOR + i, block] = stored[i].to(cutlass.Uint8)
        return encode

    @cute.jit
    def square(
        self, values, of_columns, smem, codes, scale, factors, codes_t, scale_t, first, present, vector, tile, matrix
    ):
        """Both codes of blocks with as many rows as columns, which have the same scales."""
        thread, _, _ = cute.arch.thread_idx()
        strip = thread // GROUPS
        size = self.block
        lanes, strips = size // VECTOR, size // STRIP
        found = self.of_columns(of_columns, smem)
        bits = found[0]
        for i in cutlass.range_constexpr(1, VECTOR):
            bits = cutlass.max(bits, found[i])
        for step in cutlass.range_constexpr(lanes.bit_length() - 1):
            bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, 1 << step))
        tensor_encode = None
        if const_expr(self.rule == "two level"):
            tensor_encode = factors[matrix]
        encode, stored = self.encode([bits] * VECTOR, self.dtype, tensor_encode)
        line, column = tile * (TILE // size) + strip // strips, vector // lanes
        byte = stored[0].to(cutlass.Uint8)
        if const_expr(self.rows):
            if strip % strips == 0 and vector % lanes == 0:
                if line < scale.shape[1] and column < scale.shape[2]:
                    scale[matrix, line, column] = byte
            self.store_rows(values, encode, codes, None, first, present, vector, matrix)
        if const_expr(self.columns):
            if strip % strips == 0 and vector % lanes == 0:
                if column < scale_t.shape[1] and line < scale_t.shape[2]:
                    scale_t[matrix, column, line] = byte
            self.store_columns(values, encode, smem, codes_t, None, tile, vector // GROUPS, matrix)

    # -- codes

    @cute.jit
    def to_codes(self, values, factors, random):
        """The codes of 8 fp32 values times 8 factors, as 8 bytes of FP8 or 4 of E2M1.

        ``random`` has the 8 random bytes, if the codes are rounded stochastically.
        """
        scaled = cute.make_rmem_tensor((VECTOR,), Float32)
        for i in cutlass.range_constexpr(VECTOR):
            scaled[i] = values[i] * factors[i]
        if const_expr(self.bits == 8):
            codes = cute.make_rmem_tensor((VECTOR,), CODES[self.element])
            codes.store(scaled.load().to(CODES[self.element]))
            return cute.recast_tensor(codes, cutlass.Uint8)
        word = Int32(0)
        for i in cutlass.range_constexpr(VECTOR):
            if const_expr(random is None):
                word = word | to_e2m1(scaled[i]) << 4 * i
            else:
                word = word | to_e2m1_stochastic(scaled[i], Int32(random[i])) << 4 * i
        packed = cute.make_rmem_tensor((VECTOR // 2,), cutlass.Uint8)
        cute.recast_tensor(packed, Int32)[0] = word
        return packed

    @cute.jit
    def store_rows(self, values, factors, codes, random, first, present, vector, matrix):
        """Write the row codes of the tile's values; ``factors`` are those of this thread's rows."""
        thread, _, _ = cute.arch.thread_idx()
        strip = thread // GROUPS * STRIP
        if vector * VECTOR < self.columns_of(codes):
            for i in cutlass.range_constexpr(STRIP):
                if strip + i < present:
                    row = first + strip + i
                    words, wide = cute.recast_tensor(values[i], Int32), []
                    for w in cutlass.range_constexpr(WORDS):
                        wide += [*fp32_pair(words[w], values[i].element_type)]
                    drawn = None
                    if const_expr(self.stochastic):
                        drawn = cute.make_rmem_tensor((VECTOR,), cutlass.Uint8)
                        cute.autovec_copy(cute.local_tile(random[row, None], (VECTOR,), (vector,)), drawn)
                    found = self.to_codes(wide, [factors[i]] * VECTOR, drawn)
                    size = VECTOR * self.bits // 8
                    cute.autovec_copy(found, cute.local_tile(codes[matrix, row, None], (size,), (vector,)))

    def columns_of(self, codes: Any) -> Any:
        """The number of codes of a row."""
        return codes.shape[2] * (8 // self.bits)

    @cute.jit
    def store_columns(self, values, factors, smem, codes, random, tile, at, matrix):
        """Write the column codes of the tile's values; ``factors`` are those of this thread's columns."""
        thread, _, _ = cute.arch.thread_idx()
        group, strip = thread % GROUPS, thread // GROUPS
        s_codes = smem.allocate_tensor(self.chunk, cute.make_layout((STRIPS, TILE)), 16)
        per_unit = UNIT * 8 // self.bits // STRIP  # chunks that a thread stores at once
        for column in cutlass.range_constexpr(VECTOR):
            wide = []
            for i in cutlass.range_constexpr(STRIP):
                word = cute.recast_tensor(values[i], Int32)[column // 2]
                wide.append(fp32_pair(word, values[i].element_type)[column % 2])
            drawn = None
            if const_expr(self.stochastic):
                drawn = cute.make_rmem_tensor((STRIP,), cutlass.Uint8)
                line, place = at * TILE + group * VECTOR + column, tile * STRIPS + strip
                if line < random.shape[0] and place * STRIP < random.shape[1]:
                    cute.autovec_copy(cute.local_tile(random[line, None], (STRIP,), (place,)), drawn)
            found = self.to_codes(wide, [factors[column]] * STRIP, drawn)
            # the chunks of a group of columns have an order of their own, against bank conflicts
            s_codes[strip ^ (group // per_unit * per_unit), group * VECTOR + column] = cute.recast_tensor(
                found, self.chunk
            )[0]
        store_chunks(s_codes, codes[matrix, None, None], tile, at, per_unit)


@dataclass(frozen=True)
class Magnitudes(_Tiles):
    """The largest finite magnitudes of rows (R, K), or of matrices (B, R, K), as the bits of fp32."""

    of_rows: bool  # per row
    of_columns: bool  # per column of an expert
    of_experts: bool  # per expert
    of_experts_rotated: bool  # per expert, of the rotated values

    @property
    def symbol(self) -> str:
        flags = {
            "rows": self.of_rows, "columns": self.of_columns, "experts": self.of_experts,
            "experts_rotated": self.of_experts_rotated, "sorted": self.sorted, "gathered": self.gathered,
        }  # fmt: skip
        return "_".join([f"{self.family}_magnitudes", self.dtype, *(name for name, on in flags.items() if on)])

    def compile(self) -> Any:
        """Compile without a GPU; a function of values (B, R, K) or (1, T, K), index (R,) int32, offsets (E,) int32; the
        results (B R,), (E, K), (E,) and (E,) int32, all zeros before; the number of tiles of rows, and R. Arguments
        that the kernel does not need are not read or written.
        """
        vectors = [fake_vector("int32", cute.sym_int()) for _ in range(5)]
        columns = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
        index, offsets, rows, experts, experts_rotated = vectors
        return self.compiled_for(
            fake_matrices(self.dtype), index, offsets, rows, columns, experts, experts_rotated, Int32(1), Int32(1)
        )

    @cute.jit
    def __call__(self, x, index, offsets, rows_max, columns_max, experts_max, rotated_max, tiles, rows, stream):
        blocks = cute.ceil_div(x.shape[2], TILE)
        matrices = 1 if const_expr(self.sorted or self.gathered) else x.shape[0]
        self.kernel(x, index, offsets, rows_max, columns_max, experts_max, rotated_max, rows, blocks).launch(
            **on_tiles(tiles * blocks, stream, CTAS_PER_SM, SHARED_PERCENT, matrices)
        )

    @cute.kernel
    def kernel(self, x, index, offsets, rows_max, columns_max, experts_max, rotated_max, rows, blocks):
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        number, matrix, _ = cute.arch.block_idx()
        tile = number // blocks
        group, strip = thread % GROUPS, thread // GROUPS * STRIP
        vector = (number - tile * blocks) * GROUPS + group

        first, valid, _, expert = self.where(offsets, tile, rows, lane, WARP_ROWS)
        if const_expr(not self.sorted):
            expert = matrix
        source = x[matrix, None, None]
        values = load_tile(source, index if const_expr(self.gathered) else None, first, valid, vector)
        of_pairs, of_words, _ = largest_magnitudes(values, FINITE_BIAS[self.dtype])
        if const_expr(self.of_rows):
            for pair in cutlass.range_constexpr(STRIP // 2):
                bits = of_pairs[pair]
                for step in cutlass.range_constexpr(4):
                    bits = max_of_pairs(bits, cute.arch.shuffle_sync_bfly(bits, 1 << step))
                for half in cutlass.range_constexpr(2):
                    i = 2 * pair + half
                    if group == i and strip + i < valid:
                        raise_to(
                            rows_max.iterator + (matrix * rows + first + strip + i), half_of(bits, half), self.dtype
                        )
        if const_expr(self.of_columns):
            for w in cutlass.range_constexpr(WORDS):
                bits = max_of_pairs(of_words[w], cute.arch.shuffle_sync_bfly(of_words[w], GROUPS))
                for half in cutlass.range_constexpr(2):
                    column = vector * VECTOR + 2 * w + half
                    if lane < GROUPS and column < columns_max.shape[1] and valid > 0:
                        at = columns_max.iterator + (expert * columns_max.shape[1] + column)
                        raise_to(at, half_of(bits, half), self.dtype)
        if const_expr(self.of_experts):
            self.raise_expert(experts_max, of_words, expert, lane, self.dtype)
        if const_expr(self.of_experts_rotated):
            _, of_words, _ = largest_magnitudes(self.turned(values), FINITE_BIAS["bf16"])
            self.raise_expert(rotated_max, of_words, expert, lane, "bf16")


@cute.jit
def store_chunks(s_codes, codes, tile, at, per_unit: cutlass.Constexpr[int]):
    """Write a tile's column codes (K, P) from chunks in shared memory, with the places of `store_columns`."""
    thread, _, _ = cute.arch.thread_idx()
    cute.arch.sync_threads()
    units = STRIPS // per_unit  # of a column
    for k in cutlass.range_constexpr(TILE * units // THREADS):
        column, unit = k * (THREADS // units) + thread // units, thread % units
        stored = cute.make_rmem_tensor((per_unit,), s_codes.element_type)
        swapped = unit ^ (column // VECTOR // per_unit)
        cute.autovec_copy(cute.local_tile(s_codes[None, column], (per_unit,), (swapped,)), stored)
        line, place = at * TILE + column, tile * units + unit
        if line < codes.shape[0] and place * UNIT < codes.shape[1]:
            cute.autovec_copy(
                cute.recast_tensor(stored, codes.element_type), cute.local_tile(codes[line, None], (UNIT,), (place,))
            )


def fake_matrices(dtype: str) -> Any:
    """Matrices (B, R, K) with unit stride along their columns, for the compiler."""
    shape = (cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=VECTOR))
    strides = (*(cute.sym_int64(divisibility=VECTOR) for _ in range(2)), 1)
    return cute.runtime.make_fake_tensor(ELEMENTS[dtype], shape, strides, assumed_align=16)


def _bytes(axes: int, unit: int) -> Any:
    """Bytes with unit stride along the last axis, whose other strides are multiples of ``unit``, for the compiler."""
    strides = [cute.sym_int64(divisibility=unit) for _ in range(axes - 1)]
    shape = tuple(cute.sym_int() for _ in range(axes))
    return cute.runtime.make_fake_tensor(cutlass.Uint8, shape, (*strides, 1), assumed_align=unit)


def _factors() -> Any:
    """Factors (E, K) in fp32, for the compiler."""
    return cute.runtime.make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
