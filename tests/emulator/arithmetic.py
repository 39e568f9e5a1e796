"""Instructions that compute each lane's result from the lane's own operands.

A function takes and returns arrays of unsigned integers, as registers hold them. The approximate instructions of the
GPU (`ex2.approx`, `rcp.approx`) are those of NumPy, so results may differ by a unit in the last place.
"""

import numpy as np

from emulator.registers import U2, U4, U8

S2, S4, S8 = np.int16, np.int32, np.int64
F2, F4, F8 = np.float16, np.float32, np.float64
VIEWS = {
    "s16": (U2, S2), "u16": (U2, U2), "b16": (U2, U2), "f16": (U2, F2),
    "s32": (U4, S4), "u32": (U4, U4), "b32": (U4, U4), "f32": (U4, F4),
    "s64": (U8, S8), "u64": (U8, U8), "b64": (U8, U8),
}  # fmt: skip
KINDS = {"pred": "p", "b16": "rs", "s16": "rs", "u16": "rs", "f16": "rs", "bf16": "rs", "e4m3x2": "rs", "e5m2x2": "rs"}
KINDS |= dict.fromkeys(("b32", "s32", "u32", "f32", "f16x2", "bf16x2", "s16x2", "u16x2"), "r")
KINDS |= dict.fromkeys(("b64", "s64", "u64"), "rd")


def operand_kinds(opcode):
    """Return the kinds of registers of the sources."""
    name, *rest = opcode.split(".")
    kind = KINDS[next(r for r in reversed(rest) if r in KINDS)]
    if name == "selp":
        return kind, kind, "p"
    if name in ("shl", "shr"):
        return kind, "r"
    if "wide" in rest:
        return kind, kind, {"rs": "r", "r": "rd"}[kind]
    return kind, kind, kind


def from_bf16(a):
    """Return fp32 of bf16."""
    return (a.astype(U4) << U4(16)).view(F4)


def to_bf16(f):
    """Return bf16 of fp32, to nearest even; NaN becomes 0x7FFF."""
    bits = f.view(U4)
    rounded = ((bits + U4(0x7FFF) + (bits >> U4(16) & U4(1))) >> U4(16)).astype(U2)
    nan = np.isnan(f)
    return np.where(nan, U2(0x7FFF), rounded) if nan.any() else rounded


def to_f16(f):
    """Return fp16 of fp32; NaN becomes 0x7FFF."""
    return np.where(np.isnan(f), U2(0x7FFF), f.astype(F2).view(U2))


def nearest(values, mantissa, least, most):
    """Return the bits without the sign of the nearest numbers of a format, to even; those of NaN are 0.

    The format has so many bits of the mantissa; the exponents of its normal numbers begin at `least`. No magnitude is
    larger than `most`.
    """
    magnitude = np.minimum(np.where(np.isnan(values), 0, np.abs(values)).astype(F8), most)
    exponent = np.frexp(np.maximum(magnitude, 2.0**least))[1] - 1
    return (exponent - least << mantissa) + np.rint(np.ldexp(magnitude, mantissa - exponent)).astype(S8)


FP8 = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}  # bits of the mantissa, first exponent, largest number


def to_fp8(values, type_):
    """Return FP8 as bytes. A magnitude that is too large becomes the largest number, and NaN becomes 0x7F."""
    bits = nearest(values, *FP8[type_]) | np.signbit(values) << 7
    return np.where(np.isnan(values), 0x7F, bits).astype(np.uint8)


def _fp8_values(type_):
    if type_ == "e5m2":
        return (np.arange(256) << 8).astype(U2).view(F2).astype(F4)
    code = np.arange(128)
    magnitude = np.where(code < 8, code, 8 + code % 8) * 2.0 ** (np.maximum(code >> 3, 1) - 10)
    magnitude[127] = np.nan
    return np.concatenate((magnitude, -magnitude)).astype(F4)


FP8_VALUES = {type_: _fp8_values(type_) for type_ in FP8}


def from_fp8(codes, type_):
    """Return fp32 of FP8 bytes."""
    return FP8_VALUES[type_][codes]


def _fp8_pair(type_, high, low):
    return to_fp8(high, type_).astype(U2) << U2(8) | to_fp8(low, type_)


def _f16_pair(type_, a):
    """Return two fp16 of two FP8: each FP8 number is an fp16 number."""
    high, low = (to_f16(from_fp8(codes, type_)).astype(U4) for codes in (a >> U2(8), a & U2(0xFF)))
    return high << U4(16) | low


def _typed(type_, function, operands=2):
    """Make a function of values of a type one of registers."""
    bits, view = VIEWS[type_]
    if bits is view:
        return function
    if operands == 1:
        return lambda a: function(a.view(view)).view(bits)
    if operands == 2:
        return lambda a, b: function(a.view(view), b.view(view)).view(bits)
    return lambda a, b, c: function(a.view(view), b.view(view), c.view(view)).view(bits)


def _compared(type_, function):
    if type_ == "bf16":
        return lambda a, b: function(from_bf16(a), from_bf16(b))
    view = VIEWS[type_][1]
    return lambda a, b: function(a.view(view), b.view(view))


def _shift(bits, function):
    """A shift by at least the width shifts all bits out."""
    last = U4(bits - 1)
    return lambda a, b: function(a, np.minimum(b, last), b > last)


def _left(a, b, out):
    return np.where(out, a.dtype.type(0), a << b.astype(a.dtype))


def _right(a, b, out):
    return np.where(out, a.dtype.type(0), a >> b.astype(a.dtype))


def _arithmetic_right(signed):
    return lambda a, b, _: (a.view(signed) >> b.astype(signed)).view(a.dtype)


def _divided(a, b):
    wide = a.astype(S8), np.where(b == 0, 1, b).astype(S8)
    quotient = np.abs(wide[0]) // np.abs(wide[1]) * np.sign(wide[0]) * np.sign(wide[1])
    return quotient.astype(a.dtype)


def _fused(a, b, c):
    """a * b + c: the product of two fp32 is exact in fp64."""
    return a.astype(F8) * b.astype(F8) + c.astype(F8)


def _fused_down(a, b, c):
    exact = _fused(a, b, c)
    near = exact.astype(F4)
    return np.where(near.astype(F8) > exact, np.nextafter(near, F4(-np.inf)), near)


def _fused_odd(a, b, c):
    """a * b + c in fp64, with the last bit set if it is not exact. So a second rounding is that of the exact sum."""
    product, c = a.astype(F8) * b.astype(F8), c.astype(F8)
    total = product + c
    of_c = total - product
    error = product - (total - of_c) + (c - of_c)
    even = total.view(U8) & U8(1) == 0
    return np.where(even & ((error < 0) | (error > 0)), np.nextafter(total, np.copysign(np.inf, error)), total)


def _rounded_bf16(values):
    """Return bf16 of fp64; NaN becomes 0x7FFF."""
    bits = nearest(values, 7, -126, 2.0**128) | np.signbit(values) << 15
    return np.where(np.isnan(values), 0x7FFF, bits).astype(U2)


def _of_bf16(function):
    """Make a function of numbers one of bf16."""
    return lambda *operands: _rounded_bf16(function(*(from_bf16(a).astype(F8) for a in operands)))


def _of_pairs(function):
    """Make a function of 16 bits one of pairs of them."""
    return lambda *operands: function(*(a.view(U2) for a in operands)).view(U4)


NAN = np.array(0x7FFFFFFF, U4).view(F4)


def _extreme(function, largest):
    """Make the function of `max` and `min`, for which +0 is larger than -0, and whose NaN is 0x7FFFFFFF."""

    def run(a, b):
        value = np.where(a == b, np.where(np.signbit(a) == largest, b, a), function(a, b))
        return np.where(np.isnan(value), NAN.astype(value.dtype), value)

    return run


def _permuted(a, b, selectors):
    """Bytes of two registers. The fourth bit of a selector takes the byte's sign instead, eight times."""
    pool, out = b.astype(U8) << U8(32) | a, np.zeros_like(a)
    for i in range(4):
        selector = selectors >> U4(4 * i) & U4(15)
        byte = (pool >> (selector & U4(7)).astype(U8) * U8(8)).astype(U4) & U4(0xFF)
        out |= np.where(selector & U4(8), (byte >> U4(7)) * U4(0xFF), byte) << U4(8 * i)
    return out


def _flushed(a):
    return np.where(np.abs(a) < np.finfo(F4).tiny, np.copysign(F4(0), a), a)


def _pairwise(view, function):
    """Make a function of pairs of 16-bit integers, or of fp16, whose NaN is 0x7FFF."""

    def of_pairs(a, b):
        found = function(a.view(view), b.view(view))
        return np.where(found == found, found.view(U2), U2(0x7FFF)).view(U4)

    return of_pairs


ELEMENTWISE = {}


def _define():
    table = ELEMENTWISE
    for type_ in ("s16", "u16", "s32", "u32", "s64", "u64"):
        table[f"add.{type_}"] = np.add
        table[f"sub.{type_}"] = np.subtract
        table[f"mul.lo.{type_}"] = np.multiply
        table[f"mad.lo.{type_}"] = lambda a, b, c: a * b + c
        table[f"min.{type_}"] = _typed(type_, np.minimum)
        table[f"max.{type_}"] = _typed(type_, np.maximum)
        table[f"neg.{type_}"] = lambda a: a.dtype.type(0) - a
        table[f"abs.{type_}"] = _typed(type_, np.abs, 1)
        table[f"div.{type_}"] = _typed(type_, _divided if type_[0] == "s" else lambda a, b: a // np.maximum(b, 1))
        table[f"rem.{type_}"] = _typed(
            type_, (lambda a, b: a - _divided(a, b) * b) if type_[0] == "s" else lambda a, b: a % np.maximum(b, 1)
        )
    table["mul.hi.s32"] = lambda a, b: (a.view(S4).astype(S8) * b.view(S4) >> S8(32)).astype(S4).view(U4)
    table["mul.hi.u32"] = lambda a, b: (a.astype(U8) * b >> U8(32)).astype(U4)
    table["mul.wide.s32"] = lambda a, b: (a.view(S4).astype(S8) * b.view(S4)).view(U8)
    table["mul.wide.u32"] = lambda a, b: a.astype(U8) * b
    table["mad.wide.s32"] = lambda a, b, c: (a.view(S4).astype(S8) * b.view(S4)).view(U8) + c
    table["mad.wide.u32"] = lambda a, b, c: a.astype(U8) * b + c
    for bits in (16, 32, 64):
        table[f"and.b{bits}"], table[f"or.b{bits}"] = np.bitwise_and, np.bitwise_or
        table[f"xor.b{bits}"], table[f"not.b{bits}"] = np.bitwise_xor, np.invert
        table[f"shl.b{bits}"] = _shift(bits, _left)
        table[f"shr.u{bits}"] = table[f"shr.b{bits}"] = _shift(bits, _right)
        table[f"shr.s{bits}"] = _shift(bits, _arithmetic_right(VIEWS[f"s{bits}"][1]))
    table["and.pred"], table["or.pred"], table["xor.pred"], table["not.pred"] = (
        np.logical_and, np.logical_or, np.logical_xor, np.logical_not,
    )  # fmt: skip
    table["popc.b32"] = lambda a: np.unpackbits(a.view(np.uint8).reshape(-1, 4), axis=1).sum(1).astype(U4)

    for type_ in ("b16", "b32", "b64", "f32", "u32", "s32", "u64", "s64"):
        table[f"selp.{type_}"] = lambda a, b, p: np.where(p, a, b)
    ordered = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    for type_ in ("b16", "s16", "u16", "b32", "s32", "u32", "b64", "s64", "u64", "f32", "bf16"):
        for name, function in ordered.items():
            table[f"setp.{name}.{type_}"] = _compared(type_, function)
        table[f"setp.ne.{type_}"] = _compared(type_, np.not_equal)
    for type_ in ("f32", "bf16"):  # with "u", the comparison of a NaN is true
        for name, function in ordered.items():
            unordered = lambda a, b, function=function: function(a, b) | np.isnan(a) | np.isnan(b)  # noqa: E731
            table[f"setp.{name}u.{type_}"] = _compared(type_, unordered)
        table[f"setp.neu.{type_}"] = _compared(type_, np.not_equal)
        table[f"setp.ne.{type_}"] = _compared(type_, lambda a, b: (a != b) & (a == a) & (b == b))
        table[f"setp.nan.{type_}"] = _compared(type_, lambda a, b: np.isnan(a) | np.isnan(b))

    one = {
        "neg": np.negative, "abs": np.abs, "rcp.rn": lambda a: F4(1) / a,
        "rcp.approx.ftz": lambda a: _flushed(F4(1) / _flushed(a)),
        "ex2.approx.ftz": lambda a: _flushed(np.exp2(_flushed(a))), "lg2.approx.ftz": lambda a: np.log2(_flushed(a)),
        "tanh.approx": np.tanh,
    }  # fmt: skip
    two = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "add.rn": np.add, "sub.rn": np.subtract,
        "mul.rn": np.multiply, "div.rn": np.divide, "div.full": np.divide, "copysign": lambda a, b: np.copysign(b, a),
    }  # fmt: skip
    three = {"fma.rn": lambda a, b, c: _fused(a, b, c).astype(F4), "fma.rm": _fused_down}
    for count, functions in ((1, one), (2, two), (3, three)):
        for name, function in functions.items():
            table[f"{name}.f32"] = _typed("f32", function, count)
    for name, function in (("min", np.fmin), ("max", np.fmax), ("min.NaN", np.minimum), ("max.NaN", np.maximum)):
        extreme = _extreme(function, name.startswith("max"))
        table[f"{name}.f32"], table[f"{name}.bf16"] = _typed("f32", extreme), _of_bf16(extreme)
    table["abs.bf16"], table["neg.bf16"] = lambda a: a & U2(0x7FFF), lambda a: a ^ U2(0x8000)
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        table[f"{name}.bf16"] = table[f"{name}.rn.bf16"] = _of_bf16(function)
    table["fma.rn.bf16"] = _of_bf16(_fused_odd)
    for name in [name for name in table if name.endswith(".bf16") and not name.startswith("setp")]:
        table[name + "x2"] = _of_pairs(table[name])

    table["prmt.b32"] = _permuted
    table["cvt.sat.f32.f32"] = _typed("f32", lambda a: np.where(np.isnan(a), F4(0), np.clip(a, F4(0), F4(1))), 1)

    table["min.s16x2"], table["max.s16x2"] = _pairwise(S2, np.minimum), _pairwise(S2, np.maximum)
    table["add.f16x2"], table["sub.f16x2"] = _pairwise(F2, np.add), _pairwise(F2, np.subtract)

    table["cvt.f32.bf16"] = lambda a: from_bf16(a).view(U4)
    table["cvt.f32.f16"] = lambda a: a.view(F2).astype(F4).view(U4)
    table["cvt.rn.bf16.f32"] = lambda a: to_bf16(a.view(F4))
    table["cvt.rn.f16.f32"] = lambda a: to_f16(a.view(F4))
    table["cvt.rn.bf16x2.f32"] = lambda a, b: to_bf16(a.view(F4)).astype(U4) << U4(16) | to_bf16(b.view(F4))
    table["cvt.rn.f16x2.f32"] = lambda a, b: to_f16(a.view(F4)).astype(U4) << U4(16) | to_f16(b.view(F4))
    for type_ in FP8:
        table[f"cvt.rn.satfinite.{type_}x2.f32"] = lambda a, b, t=type_: _fp8_pair(t, a.view(F4), b.view(F4))
        table[f"cvt.rn.f16x2.{type_}x2"] = lambda a, t=type_: _f16_pair(t, a)
    for type_ in ("s32", "u32", "s64", "u64"):
        view = VIEWS[type_][1]
        table[f"cvt.rn.f32.{type_}"] = lambda a, view=view: a.view(view).astype(F4).view(U4)
    for wide, narrow in (("64", "32"), ("64", "16"), ("32", "16")):
        for s in "su":
            for t in "su":
                table[f"cvt.{s}{wide}.{t}{narrow}"] = _widened(t + narrow, "u" + wide)
                table[f"cvt.{s}{narrow}.{t}{wide}"] = lambda a, to=VIEWS["u" + narrow][0]: a.astype(to)


def _widened(source, to):
    view, bits = VIEWS[source][1], VIEWS[to][0]
    return lambda a: a.view(view).astype(VIEWS["s" + to[1:]][1] if source[0] == "s" else bits).view(bits)


_define()
