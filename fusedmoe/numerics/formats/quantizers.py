"""`quantize`, the reference of every format in plain PyTorch: fused kernels must match it bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.base.checks import TENSOR, instance, said
from fusedmoe.base.errors import InputError
from fusedmoe.numerics.expert_rows import tail_mask
from fusedmoe.numerics.formats.blocks import blocks_of, times_blocks
from fusedmoe.numerics.formats.casts import pack, random_bytes, to_codes
from fusedmoe.numerics.formats.format import E2M1, Format, Quantizer, column_block
from fusedmoe.numerics.formats.groups import PaddedRows, group_of, max_by_group, of_group
from fusedmoe.numerics.formats.hadamard import TILE, rotate
from fusedmoe.numerics.formats.roles import ROLES
from fusedmoe.numerics.formats.scales import encode_and_scale, tensor_encode
from fusedmoe.numerics.formats.tensor import QuantizedTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the dtypes that `quantize` accepts
_GENERATOR = instance(torch.Generator, "a torch.Generator").or_none()
_FLT_MAX = torch.finfo(torch.float32).max


def quantize(
    x: Tensor,
    quantizer: str | Quantizer | Format,
    axis: int = -1,
    *,
    offsets: Tensor | None = None,
    encode: Tensor | None = None,
    random_bits: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> QuantizedTensor:
    """Return ``q = round(x * encode)`` with its scales, in a narrow format.

    The elements of a block share one ``encode``. It follows from their largest finite magnitude by the format's
    `ScaleRule`. Finite values beyond the largest code saturate. A NaN or an infinity becomes NaN in FP8 and affects no
    other element. E2M1 has no NaN: there the scale of its block becomes NaN.

    Raises `InputError`: an argument has a type, shape or dtype that is not supported, or not supported by the format.

    Parameters
    ----------
    x
        fp32, bf16 or fp16: rows (R, K), or one weight per expert (E, N, K).
    quantizer
        A format, or a `Quantizer`, which adds options to a format. The name of a recipe, such as ``"mxfp8"``, selects
        its quantizer of rows if ``x`` is (R, K), or of weights if ``x`` is (E, N, K).
    axis
        The axis along which blocks run and over which a product will sum: -1 by rows, -2 by columns.
    offsets
        For rows sorted by expert: the end of each expert's rows, (E,) int32. Experts share no scale and no block. Rows
        without an expert become zeros, whatever they contain.
    encode
        (E,) fp32, for a format with one scale per tensor: the factor to use instead of the one that follows from
        ``x``. Required for delayed scaling.
    random_bits
        For stochastic rounding: uint8, one per element, in the layout of the result's codes. Drawn if None.
    generator
        Draws the random bits; by default torch's generator of the device.
    """
    quantizer = _resolved(TENSOR("quantize: x", x), quantizer)
    _GENERATOR("quantize: generator", generator)
    format = quantizer.format
    _check(x, axis, offsets, format, encode)
    if quantizer.delayed is not None and encode is None:
        raise InputError("quantize: encode: expected (E,) float32, since the quantizer has delayed scaling, got None")
    values, experts = _laid_out(x, axis, offsets, column_block(format))
    rotated = quantizer.hadamard and axis == -2
    if rotated:
        values = rotate(F.pad(values, (0, -values.shape[-1] % TILE))).to(torch.float32)
    tensor_scale = None
    if format.block[1] is None:
        values, scale = _scaled_by_row(values, format, experts, encode)
    else:
        values, scale, tensor_scale = _scaled_by_block(values, format, experts)
    codes = to_codes(values, format.element, _random_bits(quantizer, values, random_bits, generator))
    data = pack(codes) if format.element == E2M1 else codes
    return QuantizedTensor(data, scale, format, axis, tuple(x.shape), x.dtype, tensor_scale, offsets, rotated)


def amax_by_expert(x: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Return the largest finite magnitude per expert, fp32.

    The shape is (E,) for rows (R, K) with offsets and for weights (E, N, K); it is (1,) for rows without offsets.
    """
    values, experts = _laid_out(x, -1, offsets, 1)
    return experts.amax(_finite_magnitude(values))


def _resolved(x: Tensor, quantizer: object) -> Quantizer:
    if isinstance(quantizer, str) and quantizer in ROLES:
        roles = ROLES[quantizer]
        found = roles.weight if x.dim() == 3 else roles.input
        assert found is not None, "every recipe in ROLES quantizes both"
        return found
    if isinstance(quantizer, Format):
        return Quantizer(quantizer)
    if not isinstance(quantizer, Quantizer):
        names = ", ".join(map(repr, ROLES))
        raise InputError(
            f"quantize: quantizer: expected a Quantizer, a Format or one of {names}, got {said(quantizer)}"
        )
    return quantizer


def _check(x: Tensor, axis: int, offsets: Tensor | None, format: Format, encode: Tensor | None) -> None:
    if x.dtype not in DTYPES:
        raise InputError(f"quantize: x: expected float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() not in (2, 3) or (offsets is not None and x.dim() != 2):
        raise InputError(f"quantize: x: expected rows (R, K), or (E, N, K) without offsets, got {tuple(x.shape)}")
    for name, t in (("offsets", offsets), ("encode", encode)):
        if t is not None:
            TENSOR(f"quantize: {name}", t)
    if type(axis) is not int or axis not in (-1, -2):
        raise InputError(f"quantize: axis: expected -1 (by rows) or -2 (by columns), got {axis!r}")
    if offsets is not None and axis == -1 and (format.block[0] or 1) > 1:
        raise InputError(f"quantize: offsets: expected none by rows for {format}, whose blocks experts would share")
    if offsets is not None and (offsets.dim() != 1 or offsets.dtype is not torch.int32 or not offsets.shape[0]):
        raise InputError(f"quantize: offsets: expected (E,) int32, got {tuple(offsets.shape)} {offsets.dtype}")
    if encode is None:
        return
    if format.block != (None, None):
        raise InputError(f"quantize: encode: expected none for {format}, which has more than one scale per tensor")
    experts = x.shape[0] if x.dim() == 3 else 1 if offsets is None else offsets.shape[0]
    if tuple(encode.shape) != (experts,) or encode.dtype is not torch.float32:
        raise InputError(f"quantize: encode: expected ({experts},) float32, got {tuple(encode.shape)} {encode.dtype}")


class _Experts(NamedTuple):
    """The experts of values (..., M, L), which are quantized along the last axis.

    With ``ends_E``, the axis M has rows sorted by expert, and ``ends_E`` are the ends of the experts' rows. With
    ``padded``, the axis L has such rows, padded. With neither, every matrix belongs to one expert.
    """

    ends_E: Tensor | None = None  # noqa: N815
    padded: PaddedRows | None = None

    def amax(self, magnitude: Tensor) -> Tensor:
        """Maximum per expert: (E,); (1,) for a single matrix."""
        if self.padded is not None:
            return max_by_group(_amax(magnitude, 0), self.padded.ends_E)
        if self.ends_E is not None:
            return max_by_group(_amax(magnitude, 1), self.ends_E)
        return _amax(magnitude.flatten(1) if magnitude.dim() == 3 else magnitude.flatten()[None], 1)

    def amax_of_rows(self, magnitude: Tensor) -> Tensor:
        """Maximum along L: (..., M, 1), or per expert (M, E) if L has rows sorted by expert."""
        if self.padded is not None:
            return max_by_group(magnitude.mT.contiguous(), self.padded.ends_E).mT.contiguous()
        return _amax(magnitude, -1)[..., None]

    def spread(self, of_expert: Tensor, shape: torch.Size, along: int = 1) -> Tensor:
        """Expand a value per expert, (E,) or (M, E), to broadcast against values of ``shape``, or against one entry per
        ``along`` values of the last axis.
        """
        if self.padded is not None:
            return of_group(of_expert, self.padded.expert_of_padded()[::along])
        if self.ends_E is not None:
            return of_group(of_expert, group_of(self.ends_E, shape[0]))[:, None]
        return of_expert[:, None, None] if len(shape) == 3 else of_expert


def _laid_out(x: Tensor, axis: int, offsets: Tensor | None, block: int) -> tuple[Tensor, _Experts]:
    """Return the values in fp32, contiguous, with the quantized axis last.

    If that axis has rows sorted by expert, each expert's rows are padded to a multiple of ``block``.
    """
    if axis == -1:
        values = x.to(torch.float32, copy=offsets is not None).contiguous()
        if offsets is not None:
            values.masked_fill_(tail_mask(offsets, x.shape[0])[:, None], 0)
        return values, _Experts(ends_E=offsets)
    if offsets is None:
        return x.mT.contiguous().to(torch.float32), _Experts()  # transposing before the cast moves half the bytes
    padded = PaddedRows.of(offsets, x.shape[0], block)
    return padded.spread(x).mT.contiguous().to(torch.float32), _Experts(padded=padded)


def _scaled_by_row(values: Tensor, format: Format, experts: _Experts, encode: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the scaled values before rounding, and one scale per expert or per row."""
    by_tensor = format.block[0] is None
    if encode is not None:
        scaled = (values * experts.spread(encode, values.shape)).clamp_(-_FLT_MAX, _FLT_MAX)
        return torch.where(values.isinf(), values, scaled), 1 / encode  # finite values saturate for any factor
    magnitude = _finite_magnitude(values)
    amax = experts.amax(magnitude) if by_tensor else experts.amax_of_rows(magnitude)
    encode, scale = encode_and_scale(amax, format)
    of_expert = by_tensor or experts.padded is not None
    return values * (experts.spread(encode, values.shape) if of_expert else encode), scale


def _scaled_by_block(values: Tensor, format: Format, experts: _Experts) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the scaled values before rounding, one scale per block, and one per expert if the format has them."""
    across, along = format.block
    assert across is not None, "Format requires it"
    assert along is not None, "formats without blocks take _scaled_by_row"
    magnitude = _finite_magnitude(values)
    encode_E = tensor_scale = None
    if format.tensor_scale:
        encode_E = tensor_encode(experts.amax(magnitude))
        tensor_scale = 1 / encode_E
        encode_E = experts.spread(encode_E, values.shape, along)
        magnitude += values - values  # NaN if a value is not finite: E2M1 has no NaN, so the block's scale becomes NaN
    amax = blocks_of(magnitude, across, along).amax((-3, -1))
    encode, scale = encode_and_scale(amax, format, encode_E)
    return times_blocks(values, encode, across, along), scale, tensor_scale


def _finite_magnitude(values: Tensor) -> Tensor:
    """Return absolute values, 0 for NaN and infinities."""
    return values.abs().nan_to_num_(nan=0.0, posinf=0.0)


def _amax(magnitude: Tensor, dim: int) -> Tensor:
    """``amax`` that returns 0 along an empty axis."""
    if magnitude.shape[dim] == 0:
        shape = list(magnitude.shape)
        del shape[dim]
        return magnitude.new_zeros(shape)
    return magnitude.amax(dim)


def _random_bits(
    quantizer: Quantizer, values: Tensor, given: Tensor | None, generator: torch.Generator | None
) -> Tensor | None:
    if not quantizer.stochastic_rounding:
        return None
    if given is None:
        return random_bytes(values.shape, values.device, generator)
    TENSOR("quantize: random_bits", given)
    if given.shape != values.shape or given.dtype is not torch.uint8:
        expected = f"{tuple(values.shape)} uint8, in the layout of the codes"
        raise InputError(f"quantize: random_bits: expected {expected}, got {tuple(given.shape)} {given.dtype}")
    return given
