"""Instructions that compute each lane's result from the lane's own operands.

A function takes and returns arrays of unsigned integers, as registers hold them. The approximate instructions of the
GPU (`ex2.approx`, `rcp.approx`) are those of NumPy, so results may differ by a unit in the last place.
"""

import numpy as np

U2, U4, U8 = np.uint16, np.uint32, np.uint64
S2, S4, S8 = np.int16, np.int32, np.int64
F2, F4, F8 = np.float16, np.float32, np.float64
VIEWS = {
    "s16": (U2, S2), "u16": (U2, U2), "b16": (U2, U2), "f16": (U2, F2),
    "s32": (U4, S4), "u32": (U4, U4), "b32": (U4, U4), "f32": (U4, F4),
    "s64": (U8, S8), "u64": (U8, U8), "b64": (U8, U8),
}  # fmt: skip
KINDS = {"pred": "p", "b16": "rs", "s16": "rs", "u16": "rs", "f16": "rs", "bf16": "rs", "e4m3x2": "rs", "e5m2x2": "rs"}
KINDS |= dict.fromkeys(("b32", "s32", "u32", "f32", "f16x2", "bf16x2", "s16x2", "u16x2"), "r")
KINDS |= dict.fromkeys(("u8", "s8"), "rs")  # in a wider register
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
    if name == "bfe":
        return kind, "r", "r"
    if name == "bfi":
        return kind, kind, "r", "r"
    return kind, kind, kind, kind


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


def _halves(a):
    """Return the upper and the lower 16 bits."""
    return (a >> U4(16)).astype(U2), a.astype(U2)


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


def _different(a, b):
    """NumPy's != is true for NaN; that of the GPU is not."""
    return (a != b) & (a == a) & (b == b)


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


def _extreme(function, largest, xorsign):
    """Make the function of `max` and `min`, for which +0 is larger than -0, and whose NaN is 0x7FFFFFFF.

    With `xorsign` it is that of the magnitudes, and its sign is the exclusive or of the signs.
    """

    def run(a, b):
        negative = np.signbit(a) != np.signbit(b)
        if xorsign:
            a, b = np.abs(a), np.abs(b)
        value = np.where(a == b, np.where(np.signbit(a) == largest, b, a), function(a, b))
        if xorsign:
            value = np.where(negative, -value, value)
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


def _logic(a, b, c, table):
    """Bit 4 a + 2 b + c of the table, which is the same for all lanes."""
    out = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _funnel(left, clamp):
    def run(a, b, c):
        both, by = b.astype(U8) << U8(32) | a, (np.minimum(c, U4(32)) if clamp else c & U4(31)).astype(U8)
        return (both << by >> U8(32) if left else both >> by).astype(U4)

    return run


def _low_bits(count, dtype):
    """Return masks of the low bits; `count` may be more than the width."""
    width = 8 * np.dtype(dtype).itemsize
    masks = (U8(1) << np.minimum(count, U4(63)).astype(U8)) - U8(1)
    return np.where(count >= width, ~dtype(0), masks.astype(dtype))


def _extracted(bits, view):
    """Bits of `bfe`: those past the end are zeros, or copies of the sign."""
    width = 8 * np.dtype(bits).itemsize

    def run(a, at, count):
        at, count = at & U4(0xFF), count & U4(0xFF)
        shifted = a.view(view) >> np.minimum(at, U4(width - 1)).astype(view)
        if bits is view:
            return np.where(at < width, shifted & _low_bits(count, bits), bits(0))
        spare = (U4(64) - np.clip(count, U4(1), U4(width))).astype(S8)
        return np.where(count == 0, bits(0), (shifted.astype(S8) << spare >> spare).astype(view).view(bits))

    return run


def _inserted(a, b, at, count):
    dtype, at, count = a.dtype.type, at & U4(0xFF), count & U4(0xFF)
    by = np.minimum(at, U4(8 * a.itemsize - 1)).astype(dtype)
    mask = np.where(at < 8 * a.itemsize, _low_bits(count, dtype) << by, dtype(0))
    return b & ~mask | a << by & mask


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
    table["mul.wide.s16"] = lambda a, b: (a.view(S2).astype(S4) * b.view(S2)).view(U4)
    table["mul.wide.u16"] = lambda a, b: a.astype(U4) * b
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
    table["clz.b32"] = lambda a: np.where(a == 0, 32, 31 - np.floor(np.log2(np.maximum(a, 1).astype(F8)))).astype(U4)

    for type_ in ("b16", "b32", "b64", "f32", "u32", "s32", "u64", "s64"):
        table[f"selp.{type_}"] = lambda a, b, p: np.where(p, a, b)
    for type_ in ("b16", "s16", "u16", "b32", "s32", "u32", "b64", "s64", "u64", "f32", "bf16"):
        for name, function in (
            ("eq", np.equal), ("lt", np.less), ("le", np.less_equal), ("gt", np.greater), ("ge", np.greater_equal),
        ):  # fmt: skip
            table[f"setp.{name}.{type_}"] = _compared(type_, function)
        table[f"setp.ne.{type_}"] = _compared(type_, _different if type_ in ("f32", "bf16") else np.not_equal)
        for name, function in (
            ("equ", np.equal), ("ltu", np.less), ("leu", np.less_equal), ("gtu", np.greater), ("geu", np.greater_equal),
        ):  # fmt: skip
            table[f"setp.{name}.{type_}"] = _compared(
                type_, lambda a, b, function=function: function(a, b) | np.isnan(a) | np.isnan(b)
            )
        table[f"setp.neu.{type_}"] = _compared(type_, np.not_equal)
        table[f"setp.nan.{type_}"] = _compared(type_, lambda a, b: np.isnan(a) | np.isnan(b))
        table[f"setp.num.{type_}"] = _compared(type_, lambda a, b: ~(np.isnan(a) | np.isnan(b)))

    one = {
        "neg": np.negative, "abs": np.abs, "rcp.rn": lambda a: F4(1) / a, "sqrt.rn": np.sqrt,
        "rcp.approx.ftz": lambda a: _flushed(F4(1) / _flushed(a)),
        "ex2.approx.ftz": lambda a: _flushed(np.exp2(_flushed(a))), "lg2.approx.ftz": lambda a: np.log2(_flushed(a)),
        "tanh.approx": np.tanh,
    }  # fmt: skip
    two = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "add.rn": np.add, "sub.rn": np.subtract,
        "mul.rn": np.multiply, "div.rn": np.divide, "copysign": lambda a, b: np.copysign(b, a),
        "div.full": np.divide,
    }  # fmt: skip
    three = {"fma.rn": lambda a, b, c: _fused(a, b, c).astype(F4), "fma.rm": _fused_down}
    for count, functions in ((1, one), (2, two), (3, three)):
        for name, function in functions.items():
            table[f"{name}.f32"] = _typed("f32", function, count)
    for name, function in (
        ("min", np.fmin), ("max", np.fmax), ("min.NaN", np.minimum), ("max.NaN", np.maximum),
    ):  # fmt: skip
        for suffix in ("", ".xorsign.abs"):
            extreme = _extreme(function, name.startswith("max"), bool(suffix))
            table[f"{name}{suffix}.f32"] = _typed("f32", extreme)
            table[f"{name}{suffix}.bf16"] = _of_bf16(extreme)
    table["abs.bf16"], table["neg.bf16"] = lambda a: a & U2(0x7FFF), lambda a: a ^ U2(0x8000)
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        table[f"{name}.bf16"] = table[f"{name}.rn.bf16"] = _of_bf16(function)
    table["fma.rn.bf16"] = _of_bf16(_fused_odd)
    for name in [name for name in table if name.endswith(".bf16") and not name.startswith("setp")]:
        table[name + "x2"] = _of_pairs(table[name])

    table["prmt.b32"], table["lop3.b32"] = _permuted, _logic
    for mode in ("wrap", "clamp"):
        table[f"shf.l.{mode}.b32"], table[f"shf.r.{mode}.b32"] = (_funnel(x, mode == "clamp") for x in (True, False))
    for type_ in ("u32", "s32", "u64", "s64"):
        table[f"bfe.{type_}"] = _extracted(*VIEWS[type_])
    table["bfi.b32"] = table["bfi.b64"] = _inserted

    table["cvt.sat.f32.f32"] = _typed("f32", lambda a: np.where(np.isnan(a), F4(0), np.clip(a, F4(0), F4(1))), 1)

    for type_, view in (("s16x2", S2), ("u16x2", U2)):
        table[f"min.{type_}"], table[f"max.{type_}"] = _pairwise(view, np.minimum), _pairwise(view, np.maximum)
    for name, function in (("add", np.add), ("sub", np.subtract)):
        table[f"{name}.f16x2"] = table[f"{name}.rn.f16x2"] = _pairwise(F2, function)

    table["cvt.f32.bf16"] = lambda a: from_bf16(a).view(U4)
    table["cvt.f32.f16"] = lambda a: a.view(F2).astype(F4).view(U4)
    table["cvt.rn.bf16.f32"] = lambda a: to_bf16(a.view(F4))
    table["cvt.rn.f16.f32"] = lambda a: to_f16(a.view(F4))
    table["cvt.rn.bf16x2.f32"] = lambda a, b: to_bf16(a.view(F4)).astype(U4) << U4(16) | to_bf16(b.view(F4))
    table["cvt.rn.f16x2.f32"] = lambda a, b: to_f16(a.view(F4)).astype(U4) << U4(16) | to_f16(b.view(F4))
    for type_ in FP8:
        table[f"cvt.rn.satfinite.{type_}x2.f32"] = lambda a, b, t=type_: _fp8_pair(t, a.view(F4), b.view(F4))
        table[f"cvt.rn.satfinite.{type_}x2.f16x2"] = lambda a, t=type_: _fp8_pair(t, *(h.view(F2) for h in _halves(a)))
        table[f"cvt.rn.f16x2.{type_}x2"] = lambda a, t=type_: _f16_pair(t, a)
    for type_ in ("s32", "u32", "s64", "u64"):
        bits, view = VIEWS[type_]
        table[f"cvt.rn.f32.{type_}"] = lambda a, view=view: a.view(view).astype(F4).view(U4)
        for suffix, rounded in (("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)):
            table[f"cvt.{suffix}.{type_}.f32"] = _to_integer(rounded, bits, view)
    for wide, narrow in (("64", "32"), ("64", "16"), ("32", "16")):
        for s in "su":
            for t in "su":
                table[f"cvt.{s}{wide}.{t}{narrow}"] = _widened(t + narrow, "u" + wide)
                table[f"cvt.{s}{narrow}.{t}{wide}"] = lambda a, to=VIEWS["u" + narrow][0]: a.astype(to)
    for to in ("u16", "s16", "u32", "s32", "u64", "s64"):
        table[f"cvt.{to}.u8"] = lambda a, bits=VIEWS[to][0]: (a & U2(0xFF)).astype(bits)
        table[f"cvt.{to}.s8"] = lambda a, bits=VIEWS[to][0]: a.astype(np.int8).astype(bits)


def _to_integer(rounded, bits, view):
    """Round fp32 to an integer. Values outside of the range become the nearest integer, and NaN becomes 0."""
    least, most = np.iinfo(view).min, np.iinfo(view).max

    def convert(a):
        exact = rounded(a.view(F4)).astype(F8)
        inside = np.where(np.isnan(exact) | (exact <= least) | (exact >= most), 0, exact).astype(view)
        return np.where(exact <= least, view(least), np.where(exact >= most, view(most), inside)).view(bits)

    return convert


def _widened(source, to):
    view, bits = VIEWS[source][1], VIEWS[to][0]
    return lambda a: a.view(view).astype(VIEWS["s" + to[1:]][1] if source[0] == "s" else bits).view(bits)


_define()
