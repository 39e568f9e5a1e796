"""Scales computed from amax.

Powers of two come from integer arithmetic on the bits of fp32: ``log2`` is inexact for some floats near powers of two,
and torch's cast to E8M0 rounds to nearest. Amax is finite, since `quantize` ignores NaN and infinities. Only
`ScaleRule.TWO_LEVEL` takes a NaN amax: it marks a block with a NaN or an infinity, which E2M1 codes cannot represent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.numerics.formats.casts import to_codes
from fusedmoe.numerics.formats.format import E2M1, E4M3, Element, Format, ScaleRule

_FLT_MAX = torch.finfo(torch.float32).max
_MANTISSA = 0x7FFFFF


def encode_and_scale(amax: Tensor, format: Format, tensor_encode: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the factor that elements are multiplied by, in fp32, and the scale to store, in the rule's dtype.

    - ``amax``: fp32, one entry per scale; finite, or NaN for a NaN scale of `ScaleRule.TWO_LEVEL`.
    - ``format``: gives the rule.
    - ``tensor_encode``: for `ScaleRule.TWO_LEVEL`: the result of `tensor_encode`, broadcast against ``amax``.
    """
    rule, element = format.rule, format.element
    if rule is ScaleRule.TWO_LEVEL:
        assert tensor_encode is not None
        return _two_level(amax, tensor_encode)
    if rule in (ScaleRule.RCEIL, ScaleRule.FLOOR):
        byte = e8m0_rceil(amax, element) if rule is ScaleRule.RCEIL else e8m0_floor(amax, element)
        return power_of_two(254 - byte), byte.to(torch.uint8).view(torch.float8_e8m0fnu)
    encode = fp32_encode(amax, format)
    return encode, 1 / encode


def decoded(scale: Tensor) -> Tensor:
    """Return stored scales as fp32."""
    if scale.dtype is torch.float8_e8m0fnu:  # byte 0 is a subnormal fp32, which torch's cast may flush
        return power_of_two(scale.view(torch.uint8).to(torch.int32))
    return scale.to(torch.float32)


def fp32_encode(amax: Tensor, format: Format, margin: int = 0) -> Tensor:
    """``max / 2**margin / max(amax, epsilon)`` by the rules FP32 and POWER_OF_TWO; finite, and 1 where amax is 0."""
    amax = amax.clamp(min=format.amax_epsilon)
    encode = (torch.full_like(amax, format.element.max / 2.0**margin) / amax).clamp(max=_FLT_MAX)
    if format.rule is ScaleRule.POWER_OF_TWO:
        encode = (encode.view(torch.int32) & ~_MANTISSA).view(torch.float32)
    return encode.masked_fill(amax == 0, 1.0)


def e8m0_rceil(amax: Tensor, element: Element) -> Tensor:
    """The E8M0 byte of ``2 ** ceil(log2(amax / max))``, as int32; 0 for amax 0."""
    d = amax * (1.0 / element.max)  # gives the same bytes as division
    bits = d.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    # subnormals up to 2**-127 round up to byte 0
    up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    return exponent + up


def e8m0_floor(amax: Tensor, element: Element) -> Tensor:
    """The E8M0 byte of ``2 ** (floor(log2(amax)) - max_exponent)``, as int32; at least 0."""
    return ((amax.view(torch.int32) >> 23) - element.max_exponent).clamp(min=0)


def power_of_two(byte: Tensor) -> Tensor:
    """``2 ** (byte - 127)`` as fp32, exactly; NaN for 255."""
    byte = byte.to(torch.int32)
    bits = torch.where(byte == 0, 0x400000, torch.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(torch.int32).view(torch.float32)


def tensor_encode(amax: Tensor) -> Tensor:
    """``448 * 6 / amax`` as fp32, 1 for amax 0: the factor of a tensor's E4M3 scales before they are rounded."""
    encode = (torch.full_like(amax, E4M3.max * E2M1.max) / amax).clamp(max=_FLT_MAX)
    return encode.masked_fill(amax == 0, 1.0)


def _two_level(amax: Tensor, tensor_encode: Tensor) -> tuple[Tensor, Tensor]:
    # one rounding before the cast, and no lower bound: a scale that underflows becomes 0
    scale = to_codes((amax * (tensor_encode * (1.0 / E2M1.max))).clamp(max=E4M3.max), E4M3)
    encode = (1 / (scale.to(torch.float32) * (1 / tensor_encode))).clamp(max=_FLT_MAX)
    return encode, scale
