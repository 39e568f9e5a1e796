"""The small formats again, written on their own: numpy, ml_dtypes' casts, loops over experts and blocks, scales by
exact fractions. Nothing here calls the package's arithmetic; of a `Format` only what it says is read.

Axes: R rows, E experts, M rows and L columns of what is quantized along its columns.
"""

from fractions import Fraction
from typing import NamedTuple

import ml_dtypes
import numpy as np

ELEMENTS = {  # largest value, type, code of NaN
    "e4m3": (448.0, ml_dtypes.float8_e4m3fn, 0x7F),
    "e5m2": (57344.0, ml_dtypes.float8_e5m2, 0x7F),
    "e2m1": (6.0, ml_dtypes.float4_e2m1fn, 7),
}
STORED = {"fp32": np.float32, "power of two": np.float32, "rceil": np.uint8, "floor": np.uint8, "two level": np.uint8}
FLT_MAX = np.finfo(np.float32).max
SYLVESTER = np.ones((1, 1))
for _ in range(4):
    SYLVESTER = np.kron([[1.0, 1.0], [1.0, -1.0]], SYLVESTER)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.0])
HADAMARD = SIGNS[:, None] * SYLVESTER / 4


def f32(x):
    return np.float32(x)


def codes_of(x, element):
    """fp32 to codes, one per byte: clamped first, since ml_dtypes makes NaNs of values that are too large. Infinities
    are NaNs in FP8; E2M1 has none.
    """
    largest, dtype, nan = ELEMENTS[element]
    as_nan = np.isnan(x) if element == "e2m1" else ~np.isfinite(x)
    codes = np.clip(np.where(as_nan, f32(0), x), -f32(largest), f32(largest)).astype(dtype).view(np.uint8)
    return np.where(as_nan, np.uint8(nan), codes)


def values_of(codes, element):
    """Codes, one a byte, to fp32."""
    return np.asarray(codes, dtype=np.uint8).view(ELEMENTS[element][1]).astype(np.float32)


def packed(codes):
    """Two codes per byte: the even one is the low half."""
    if codes.shape[-1] % 2:
        codes = np.concatenate((codes, np.zeros_like(codes[..., :1])), -1)
    return codes[..., 0::2] + 16 * codes[..., 1::2]


def stochastic_codes(x, bits):
    """NVFP4's stochastic rounding: a part of the step at |x| is added in fp32, the rest cut off to the grid there."""
    magnitude = np.abs(x)
    below = magnitude + bits.astype(np.float32) / f32(256) * step(magnitude)
    cut = np.minimum(np.floor(below / step(below)) * step(below), f32(6))
    return codes_of(np.copysign(cut, x), "e2m1")


def step(magnitude):
    """Between neighbours of E2M1."""
    return np.select([magnitude < 2, magnitude < 4], [f32(0.5), f32(1)], f32(2)).astype(np.float32)


def fp32_encode(amax, largest, epsilon=0.0):
    """An fp32 rule's factor: one division in fp32."""
    amax = max(f32(amax), f32(epsilon))
    if amax == 0:
        return f32(1)
    with np.errstate(over="ignore"):
        return min(f32(largest) / amax, FLT_MAX)


def power_of_two_encode(amax, largest, epsilon=0.0):
    """The largest power of two that is no larger."""
    _, exponent = np.frexp(fp32_encode(amax, largest, epsilon))
    return np.ldexp(f32(1), exponent - 1)


def exponent_above(ratio):
    """``ceil(log2(ratio))`` of a positive fraction, by integers."""
    exponent = ratio.numerator.bit_length() - ratio.denominator.bit_length() - 1
    while Fraction(2) ** exponent < ratio:
        exponent += 1
    return exponent


def rceil_byte(amax, largest):
    """The smallest power of two that clips nothing: exact."""
    if amax == 0:
        return 0
    return max(exponent_above(Fraction(float(amax)) / Fraction(largest)) + 127, 0)


def floor_byte(amax, largest):
    """The power of two below amax over the one below the largest value: exact."""
    if amax == 0:
        return 0
    exponent = np.frexp(np.float64(amax))[1] - 1
    return max(int(exponent) - int(np.frexp(largest)[1] - 1) + 127, 0)


def e8m0(byte):
    """What a byte stands for."""
    return f32(np.ldexp(np.float64(1), int(byte) - 127))


def tensor_encode(amax):
    """What NVFP4 multiplies the scales of a tensor by, before they are rounded to E4M3."""
    if amax == 0:
        return f32(1)
    with np.errstate(over="ignore"):
        return min(f32(448 * 6) / f32(amax), FLT_MAX)


def two_level(amax, encode):
    """NVFP4's code of a block's scale, and what the elements are multiplied by. A NaN gives NaNs."""
    if np.isnan(amax):
        return np.uint8(0x7F), f32(np.nan)
    with np.errstate(over="ignore", divide="ignore"):
        code = codes_of(np.array(min(f32(amax) * (encode * (f32(1) / f32(6))), f32(448))), "e4m3")
        return code, min(f32(1) / (values_of(code, "e4m3") * (f32(1) / encode)), FLT_MAX)


class Scale(NamedTuple):
    encode: np.float32
    stored: float  # or the bits of a byte
    decoded: np.float32


def scale_of(amax, format, encode=None):
    """A block's scale, by the format's rule."""
    rule, largest = format.rule.value, ELEMENTS[format.element.name][0]
    if rule in ("fp32", "power of two"):
        encode = (fp32_encode if rule == "fp32" else power_of_two_encode)(amax, largest, format.amax_epsilon)
        return Scale(encode, f32(1) / encode, f32(1) / encode)
    if rule == "two level":
        code, factor = two_level(amax, encode)
        return Scale(factor, code, values_of(code, "e4m3"))
    byte = (rceil_byte if rule == "rceil" else floor_byte)(amax, largest)
    return Scale(e8m0(254 - byte), byte, e8m0(byte))


class Matrix(NamedTuple):
    """Of one expert, quantized along its columns."""

    codes: np.ndarray  # (M, L), one a byte
    scale: np.ndarray  # (blocks down, blocks across), fp32 or bytes
    tensor_scale: np.float32
    values: np.ndarray  # (M, L) fp32


def amax_of(x):
    magnitude = np.abs(x[np.isfinite(x)])
    return magnitude.max() if magnitude.size else f32(0)


def quantize_matrix(x, format, random_bits=None):
    """One block after the other."""
    element, (down, right) = format.element.name, format.block
    rows, columns = x.shape
    # None is all that there is: one block, even of nothing
    tops = range(0, rows, down) if down else [0]
    lefts = range(0, columns, right) if right else [0]
    codes, values = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32)
    scale = np.zeros((len(tops), len(lefts)), STORED[format.rule.value])
    encode = tensor_encode(amax_of(x)) if format.tensor_scale else f32(1)
    tensor_scale = f32(1) / encode
    for i, top in enumerate(tops):
        for j, left in enumerate(lefts):
            block = (slice(top, top + (down or rows)), slice(left, left + (right or columns)))
            spoiled = format.element.bits == 4 and not np.isfinite(x[block]).all()
            found = scale_of(f32(np.nan) if spoiled else amax_of(x[block]), format, encode)
            scale[i, j] = found.stored
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = x[block] * found.encode
                bits = None if random_bits is None else random_bits[block]
                codes[block] = codes_of(scaled, element) if bits is None else stochastic_codes(scaled, bits)
                values[block] = values_of(codes[block], element) * found.decoded * tensor_scale
    return Matrix(codes, scale, tensor_scale, values)


class Expected(NamedTuple):
    """What a `QuantizedTensor` should hold: bytes of codes, scales as fp32 or bytes."""

    data: np.ndarray
    scale: np.ndarray
    tensor_scale: np.ndarray | None
    values: np.ndarray  # of the source's shape, fp32


def quantize(x, format, axis, offsets=None, hadamard=False):
    """Every expert's rows, or weight, on their own, put together as `QuantizedTensor` has it."""
    if offsets is None:
        matrices = [quantize_matrix(along_last(part, axis, hadamard), format) for part in (x if x.ndim == 3 else [x])]
        codes, scale, values = (np.stack([getattr(m, name) for m in matrices]) for name in ("codes", "scale", "values"))
        if axis == -2:
            values = values.swapaxes(-1, -2)[:, : x.shape[-2]]
        if x.ndim == 2:
            codes, scale, values = codes[0], scale[0], values[0]
        return assembled(format, matrices, codes, scale, values)
    starts = [0, *offsets[:-1]]
    parts = [x[start:end] for start, end in zip(starts, offsets, strict=True)]
    return (by_rows if axis == -1 else by_columns)(x.shape, parts, format, hadamard)


def assembled(format, matrices, codes, scale, values):
    tensor_scale = np.array([m.tensor_scale for m in matrices]) if format.tensor_scale else None
    if format.block == (None, None):
        scale = np.array([m.scale[0, 0] for m in matrices])
    return Expected(packed(codes) if format.element.bits == 4 else codes, scale, tensor_scale, values)


def by_rows(shape, parts, format, hadamard):
    """The experts' rows one after the other, then rows of zeros."""
    matrices = [quantize_matrix(part, format) for part in parts]
    tail = quantize_matrix(np.zeros((shape[0] - sum(map(len, parts)), shape[1]), np.float32), format)
    codes, scale, values = (
        np.concatenate([getattr(m, name) for m in (*matrices, tail)]) for name in ("codes", "scale", "values")
    )
    return assembled(format, matrices, codes, scale, values)


def by_columns(shape, parts, format, hadamard):
    """The experts' columns one after the other, each padded to whole blocks, then columns of zeros: as many as there
    would have to be for any splits.
    """
    block = format.block[1] or (16 if format.block[0] else 128)
    matrices = [quantize_matrix(along_last(zero_rows(part, block), -2, hadamard), format) for part in parts]
    width = (shape[0] // block + min(len(parts), shape[0])) * block
    used = sum(m.codes.shape[1] for m in matrices)
    assert used <= width
    tail = quantize_matrix(np.zeros((shape[1], width - used), np.float32), format)
    codes = np.concatenate([m.codes for m in (*matrices, tail)], 1)
    # with one scale per row, an expert's rows have scales, and the rows after the last expert's have none
    scale = np.concatenate([m.scale for m in (*matrices, *([tail] if format.block[1] else []))], 1)
    values = np.zeros(shape, np.float32)
    first = 0
    for part, m in zip(parts, matrices, strict=True):
        values[first : first + len(part)] = m.values.T[: len(part)]
        first += len(part)
    return assembled(format, matrices, codes, scale, values)


def zero_rows(x, multiple):
    """Followed by zero rows, up to a multiple."""
    return np.concatenate((x, np.zeros((-len(x) % multiple, x.shape[1]), x.dtype)))


def along_last(x, axis, hadamard):
    """What is quantized along its columns; by columns, and rotated if asked: in fp64, rounded to bf16."""
    if axis == -1:
        return x
    if not hadamard:
        return x.T
    x = zero_rows(x, 16).T.astype(np.float64)
    for left in range(0, x.shape[1], 16):
        x[:, left : left + 16] = x[:, left : left + 16] @ HADAMARD
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
