"""Arithmetic of kernels that quantize to FP8: the scale of a block, and magnitudes of bf16 and fp16 values in pairs."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
CODES = {"e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2}
MOST = {"e4m3": 448.0, "e5m2": 57344.0}  # both are 1.75 * 2**exponent
MOST_EXPONENT = {"e4m3": 8, "e5m2": 15}
MANTISSA = 0x7FFFFF
MANTISSA_OF_MOST = 0x600000
FLT_MAX = 3.4028234663852886e38
FINITE_BIAS = {"bf16": 0x80, "fp16": 0x400}  # 2**15 less the bits of infinity
MAGNITUDES = 0x7FFF7FFF  # of a pair
NEGATIVES = -0x7FFF8000  # the signs of a pair


@dsl_user_op
def max_of_pairs(a: Int32, b: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The larger of each of two signed 16-bit integers."""
    operands = [v.ir_value(loc=loc, ip=ip) for v in (Int32(a), Int32(b))]
    return Int32(llvm.inline_asm(T.i32(), operands, "max.s16x2 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip))


@cute.jit
def biased_magnitudes(word, bias: cutlass.Constexpr[int]):
    """The magnitudes of a pair of values as integers that order them, ``bias`` for zero, negative if not finite."""
    return (word & MAGNITUDES) + (bias << 16 | bias)


@cute.jit
def value_of_bits(bits, element: cutlass.Constexpr[type]):
    """The fp32 value of a bf16 or fp16 number, which is given by its bits."""
    word = cute.make_rmem_tensor((1,), Int32)
    word[0] = bits
    return cute.recast_tensor(word, element)[0].to(Float32)


@cute.jit
def finite_amax(bits, bias: cutlass.Constexpr[int], element: cutlass.Constexpr[type]):
    """The fp32 value of the largest of biased magnitudes, in the low half of ``bits``: zero if none is finite."""
    magnitude = (bits & 0xFFFF) - bias
    return value_of_bits(cutlass.select_(bits & 0x8000 != 0, Int32(0), magnitude), element)


@cute.jit
def fp32_pair(word, element: cutlass.Constexpr[type]):
    """The fp32 values of a pair of bf16 or fp16 numbers."""
    if const_expr(element is cutlass.BFloat16):  # in one instruction each
        return (word << 16).bitcast(Float32), (word & -0x10000).bitcast(Float32)
    words = cute.make_rmem_tensor((2,), Int32)  # a single word would have stride 0, and so would its halves
    words[0] = word
    halves = cute.recast_tensor(words, element)
    return halves[0].to(Float32), halves[1].to(Float32)


@cute.jit
def encode_and_scale(amax, element: cutlass.Constexpr[str], power_of_two: cutlass.Constexpr[bool]):
    """The factor of a block's values, and its scale: see `fusedmoe.numerics.formats.scales`. ``amax`` is not NaN."""
    encode, scale = Float32(1.0), Float32(1.0)
    if const_expr(power_of_two):
        bits = amax.bitcast(Int32)
        exponent = MOST_EXPONENT[element] + 127 - (bits >> 23)
        exponent = cutlass.min(exponent - Int32((bits & MANTISSA) > MANTISSA_OF_MOST), 127)
        exponent = Int32(cutlass.select_(amax > 0.0, exponent, Int32(0)))
        encode = ((exponent + 127) << 23).bitcast(Float32)
        scale = cutlass.max((127 - exponent) << 23, 1 << 22).bitcast(Float32)  # 2**-127 is subnormal
    else:
        if amax > 0.0:
            encode = cutlass.min(Float32(MOST[element]) / amax, Float32(FLT_MAX))
            scale = Float32(1.0) / encode
    return encode, scale


@dsl_user_op
def nan_of_infinities(word: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """A pair of bf16 values with NaN in place of infinities: ``0 * x + x``."""
    operands = [v.ir_value(loc=loc, ip=ip) for v in (Int32(word), Int32(0))]
    return Int32(llvm.inline_asm(T.i32(), operands, "fma.rn.bf16x2 $0, $1, $2, $1;", "=r,r,r", loc=loc, ip=ip))


@dsl_user_op
def larger(a: Int32, b: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The larger of each of two bf16 values, or the one that is not NaN."""
    operands = [v.ir_value(loc=loc, ip=ip) for v in (Int32(a), Int32(b))]
    return Int32(llvm.inline_asm(T.i32(), operands, "max.bf16x2 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip))


def pair_of(factor):
    """A power of two as a pair of bf16 values."""
    bits = factor.bitcast(Int32)
    return bits | (bits >> 16)


@cute.jit
def encoded(words, factors, element: cutlass.Constexpr[str]):
    """The codes of pairs of bf16 values times pairs of factors, two pairs per word. The factors are powers of two, so
    products in bf16 are exact, or too small for a code other than zero.
    """
    count: cutlass.Constexpr[int] = len(words)
    values, scaled = (cute.make_rmem_tensor((count,), Int32) for _ in range(2))
    for w in cutlass.range_constexpr(count):
        values[w], scaled[w] = words[w], factors[w]
    products = cute.recast_tensor(values, cutlass.BFloat16)
    products.store(products.load() * cute.recast_tensor(scaled, cutlass.BFloat16).load())
    wide = cute.make_rmem_tensor((2 * count,), Float32)
    for w in cutlass.range_constexpr(count):
        wide[2 * w], wide[2 * w + 1] = fp32_pair(values[w], cutlass.BFloat16)
    codes = cute.make_rmem_tensor((2 * count,), CODES[element])
    codes.store(wide.load().to(CODES[element]))
    return cute.recast_tensor(codes, Int32)


def half_of(word: Any, half: int) -> Any:
    """The lower or the upper signed 16-bit integer of a pair."""
    return word >> 16 if half else word << 16 >> 16


@cute.jit
def raise_to(at, biased, dtype: cutlass.Constexpr[str]):
    """Raise the magnitude at a place in global memory; both are bits, and those of zero need no store."""
    bias = FINITE_BIAS[dtype]
    if biased > bias:
        cute.arch.atomic_max(at, value_of_bits(biased - bias, ELEMENTS[dtype]).bitcast(Int32))
