"""Floats to the codes of small types and back, by rounding to nearest even, saturating; right on every version of torch
and, bit for bit, the same on every device.

What torch's own casts leave open is settled here: overflow (NaN on torch 2.11, the largest value on later ones),
infinities and the bits of a NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.formats.format import E2M1, Element

_NAN_CODE = 0x7F  # of E4M3 and of E5M2, as the hardware writes it


def to_codes(x: Tensor, element: Element, random_bits: Tensor | None = None) -> Tensor:
    """Return the codes of fp32 values: FP8 in its own dtype, E2M1 in uint8, one code per byte (see `pack`).

    Finite values beyond the largest saturate. NaN and infinities become NaN in FP8. E2M1 has no NaN: there NaN becomes
    +6 and infinities saturate, so that the caller must mark the block (see `fusedmoe.formats.quantizers`).

    Parameters
    ----------
    x
        fp32.
    element
        The type to round to.
    random_bits
        uint8 in the shape of ``x``, to round stochastically by; None rounds to nearest even. E2M1 alone.
    """
    if element is E2M1:
        return _to_e2m1(x) if random_bits is None else _to_e2m1_stochastic(x, random_bits)
    codes = x.clamp(-element.max, element.max).to(element.dtype)
    codes.view(torch.uint8).masked_fill_((x - x).isnan(), _NAN_CODE)  # infinity minus infinity is NaN
    return codes


def from_codes(codes: Tensor, element: Element, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of codes, one code an entry, in fp32 or bf16: both hold them."""
    return codes.to(dtype) if element is not E2M1 else _from_e2m1(codes).to(dtype)


def _from_e2m1(codes: Tensor) -> Tensor:
    magnitude = (codes & 7).to(torch.int32)
    # from 1 on, E2M1 and fp32 count through exponent and mantissa alike: half a binade a code
    normal = (0x3F000000 + (magnitude << 22)).view(torch.float32)
    value = torch.where(magnitude < 2, magnitude * 0.5, normal)
    return torch.where(codes >= 8, -value, value)


def _to_e2m1(x: Tensor) -> Tensor:
    # ties go to the even code: the comparison is strict where the code below the tie is the even one
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    code += a >= 0.75
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5.0
    return _with_sign(code, x)


def _to_e2m1_stochastic(x: Tensor, random_bits: Tensor) -> Tensor:
    # |x| plus a random part of the step there, cut off to the grid: up with a probability in multiples of 1/256
    a = x.abs()
    t = a + random_bits.to(torch.float32) / 256 * _step(a)
    code = torch.where(t < 2, (t * 2).floor(), torch.where(t < 4, t.floor() + 2, (t / 2).floor() + 4))
    return _with_sign(code.clamp_(max=7).nan_to_num_(nan=7).to(torch.uint8), x)


def _step(a: Tensor) -> Tensor:
    """The distance between the neighbours of a magnitude on E2M1's grid."""
    return torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))


def _with_sign(code: Tensor, x: Tensor) -> Tensor:
    """Add the sign, also that of -0; a NaN is +6, as the hardware has it."""
    nan = x.isnan()
    return code.masked_fill_(nan, 7).add_((x.signbit() & ~nan).to(torch.uint8), alpha=8)


def pack(codes: Tensor) -> Tensor:
    """Two E2M1 codes a byte, the even element in the low half; a last odd one is followed by a zero. (..., N) uint8 to
    (..., ceil(N / 2)).
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor, length: int) -> Tensor:
    """Return what `pack` packed: (..., length)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :length]
