"""Casts from fp32 to the codes of narrow types, rounding to nearest even with saturation, and back.

The results are the same bits on every device and torch version. torch's own casts differ in overflow (NaN in torch
2.11, the largest value later), in infinities, and in the bits of NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedmoe.numerics.formats.format import E2M1, Element

_NAN_CODE = 0x7F  # of E4M3 and E5M2, as the hardware writes it


def to_codes(x: Tensor, element: Element, random_bits: Tensor | None = None) -> Tensor:
    """Return the codes of fp32 values: FP8 in its own dtype, E2M1 in uint8, one code per byte (see `pack`).

    Finite values beyond the largest saturate. NaN and infinities become NaN in FP8. E2M1 has no NaN: NaN becomes +6,
    infinities saturate, and the caller marks the block by its scale (see `fusedmoe.numerics.formats.quantizers`).

    - ``x``: fp32.
    - ``element``: the type to round to.
    - ``random_bits``: uint8 in the shape of ``x``, for stochastic rounding; None rounds to nearest even. E2M1 only.
    """
    if element == E2M1:
        return _to_e2m1(x) if random_bits is None else _to_e2m1_stochastic(x, random_bits)
    codes = x.clamp(-element.max, element.max).to(element.dtype)
    codes.view(torch.uint8).masked_fill_((x - x).isnan(), _NAN_CODE)  # infinity minus infinity is NaN
    return codes


def from_codes(codes: Tensor, element: Element, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of unpacked codes, in fp32 or bf16; both are exact."""
    return codes.to(dtype) if element != E2M1 else _from_e2m1(codes).to(dtype)


def _from_e2m1(codes: Tensor) -> Tensor:
    magnitude = (codes & 7).to(torch.int32)
    # from 1 up, the code's bits are the exponent and first mantissa bit of fp32, with another bias
    normal = (0x3F000000 + (magnitude << 22)).view(torch.float32)
    value = torch.where(magnitude < 2, magnitude * 0.5, normal)
    return torch.where(codes >= 8, -value, value)


def _to_e2m1(x: Tensor) -> Tensor:
    # ties go to the even code: the comparison is strict if the code below the tie is even
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
    # |x| plus a random fraction of the grid step, truncated: rounds up with a probability in multiples of 1/256
    a = x.abs()
    t = a + random_bits.to(torch.float32) / 256 * _step(a)
    code = torch.where(t < 2, (t * 2).floor(), torch.where(t < 4, t.floor() + 2, (t / 2).floor() + 4))
    return _with_sign(code.clamp_(max=7).nan_to_num_(nan=7).to(torch.uint8), x)


def _step(a: Tensor) -> Tensor:
    """The step of E2M1's grid at a magnitude."""
    return torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))


def _with_sign(code: Tensor, x: Tensor) -> Tensor:
    """Add the sign, including that of -0; NaN becomes +6, as in hardware."""
    nan = x.isnan()
    return code.masked_fill_(nan, 7).add_((x.signbit() & ~nan).to(torch.uint8), alpha=8)


def pack(codes: Tensor) -> Tensor:
    """Pack two E2M1 codes per byte, the even element in the low half: (..., N) uint8 to (..., ceil(N / 2)).

    If N is odd, the last high half is zero.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor, length: int) -> Tensor:
    """Undo `pack`: (..., ceil(length / 2)) to (..., length)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :length]


def random_bytes(shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Return random uint8 bits for `to_codes`, drawn as integers of 64 bits, which takes an eighth of the draws."""
    count = math.prod(shape)
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=device).random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].view(*shape)
