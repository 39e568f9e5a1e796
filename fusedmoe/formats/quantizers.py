"""`quantize`: the definition of every format, in plain PyTorch. Fused kernels are tested against it bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.checks import TENSOR, instance, said
from fusedmoe.errors import InputError
from fusedmoe.formats.blocks import blocks_of, times_blocks
from fusedmoe.formats.casts import pack, to_codes
from fusedmoe.formats.format import E2M1, Format, Quantizer
from fusedmoe.formats.groups import PaddedRows, group_of, max_by_group, of_group
from fusedmoe.formats.hadamard import TILE, rotate
from fusedmoe.formats.roles import ROLES
from fusedmoe.formats.scales import encode_and_scale, tensor_encode
from fusedmoe.formats.tensor import QuantizedTensor, column_block
from fusedmoe.kernels.torch.rows import tail_mask

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantized."""
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
    """Return a tensor in a small format.

    ``q = round(x * encode)``, where elements of a block share one ``encode``, which follows from their largest
    finite magnitude by the format's `ScaleRule`. Finite values beyond the largest code saturate. A NaN or an infinity
    becomes NaN in FP8 and changes nothing else; in E2M1, which has no NaN, its block gets the scale NaN.

    Parameters
    ----------
    x
        fp32, bf16 or fp16: rows (R, K), or a weight an expert (E, N, K).
    quantizer
        The format, or a format with stochastic rounding, rotation, delayed scales (then with ``encode``). Or the name
        of a recipe, such as ``"mxfp8"``: what it quantizes rows (R, K) to, or a weight (E, N, K).
    axis
        Which axis blocks run along: the one that a product will sum over. -1 by rows, -2 by columns.
    offsets
        Of rows sorted by expert: where each expert's rows end, (E,) int32. Nothing is shared between experts, blocks
        along the rows begin anew with each; rows that belong to none are not looked at, and become zeros.
    encode
        For a format with one scale per tensor: what to multiply by, (E,) fp32, instead of what follows from ``x``.
    random_bits
        For stochastic rounding: uint8, one an element in the layout of the result's codes. Drawn where missing.
    generator
        What draws them; torch's default generator of the device otherwise.

    Raises
    ------
    InputError
        A shape or dtype that cannot be quantized so.
    """
    quantizer = _resolved(TENSOR("quantize: x", x), quantizer)
    _GENERATOR("quantize: generator", generator)
    format = quantizer.format
    _check(x, axis, offsets, format, encode)
    if quantizer.delayed is not None and encode is None:
        raise InputError("quantize: encode: expected for delayed scales, which follow from steps before, got None")
    values, experts = _laid_out(x, axis, offsets, column_block(format))
    rotated = quantizer.hadamard and axis == -2
    if rotated:
        values = rotate(_whole_tiles(values)).to(torch.float32)
    tensor_scale = None
    if format.block[1] is None:
        values, scale = _scaled_by_row(values, format, experts, encode)
    else:
        values, scale, tensor_scale = _scaled_by_block(values, format, experts)
    codes = to_codes(values, format.element, _random_bits(quantizer, values, random_bits, generator))
    data = pack(codes) if format.element is E2M1 else codes
    return QuantizedTensor(data, scale, format, axis, tuple(x.shape), x.dtype, tensor_scale, offsets, rotated)


def amax_by_expert(x: Tensor, offsets: Tensor | None = None) -> Tensor:
    """The largest finite magnitude of each expert's elements: (E,) fp32 of rows (R, K) with offsets or of a weight
    (E, N, K); (1,) of rows alone.
    """
    values, experts = _laid_out(x, -1, offsets, 1)
    return experts.amax(_finite_magnitude(values))


def _resolved(x: Tensor, quantizer: object) -> Quantizer:
    if isinstance(quantizer, str) and quantizer in ROLES:
        roles = ROLES[quantizer]
        found = roles.weight if x.dim() == 3 else roles.input
        assert found is not None, "every recipe here quantizes both"
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
    """Which expert each of the values (..., M, L) belongs to, that lie with the axis quantized along last.

    Either the M are rows sorted by expert (``ends_E``: where each expert's end), or the L are (``padded``), or there is
    a matrix an expert, or one matrix alone.
    """

    ends_E: Tensor | None = None  # noqa: N815
    padded: PaddedRows | None = None

    def amax(self, magnitude: Tensor) -> Tensor:
        """(E,), (1,) of one matrix."""
        if self.padded is not None:
            return max_by_group(_amax(magnitude, 0), self.padded.ends_E)
        if self.ends_E is not None:
            return max_by_group(_amax(magnitude, 1), self.ends_E)
        return _amax(magnitude.flatten(1) if magnitude.dim() == 3 else magnitude.flatten()[None], 1)

    def amax_of_rows(self, magnitude: Tensor) -> Tensor:
        """(..., M, 1), or (M, E) where the L are rows."""
        if self.padded is not None:
            return max_by_group(magnitude.mT.contiguous(), self.padded.ends_E).mT.contiguous()
        return _amax(magnitude, -1)[..., None]

    def spread(self, of_expert: Tensor, shape: torch.Size, along: int = 1) -> Tensor:
        """Return what each expert has, (E,) or (M, E), as something that broadcasts against the values of this shape,
        or against one entry for every ``along`` of them.
        """
        if self.padded is not None:
            return of_group(of_expert, self.padded.expert_of_padded()[::along])
        if self.ends_E is not None:
            return of_group(of_expert, group_of(self.ends_E, shape[0]))[:, None]
        return of_expert[:, None, None] if len(shape) == 3 else of_expert


def _laid_out(x: Tensor, axis: int, offsets: Tensor | None, block: int) -> tuple[Tensor, _Experts]:
    """Return the values in fp32, contiguous, with the axis quantized along last: an expert's rows padded to a multiple
    of ``block`` there.
    """
    if axis == -1:
        values = x.to(torch.float32, copy=offsets is not None).contiguous()
        if offsets is not None:
            values.masked_fill_(tail_mask(offsets, x.shape[0])[:, None], 0)
        return values, _Experts(ends_E=offsets)
    if offsets is None:
        return x.mT.contiguous().to(torch.float32), _Experts()  # transposed first: it is half of the bytes
    padded = PaddedRows.of(offsets, x.shape[0], block)
    return padded.spread(x).mT.contiguous().to(torch.float32), _Experts(padded=padded)


def _scaled_by_row(values: Tensor, format: Format, experts: _Experts, encode: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the values as they are to be rounded, and the scales: one an expert, or one a row."""
    by_tensor = format.block[0] is None
    if encode is not None:
        scaled = (values * experts.spread(encode, values.shape)).clamp_(-_FLT_MAX, _FLT_MAX)
        return torch.where(values.isinf(), values, scaled), 1 / encode  # a finite value saturates, whatever the factor
    magnitude = _finite_magnitude(values)
    amax = experts.amax(magnitude) if by_tensor else experts.amax_of_rows(magnitude)
    encode, scale = encode_and_scale(amax, format)
    of_expert = by_tensor or experts.padded is not None
    return values * (experts.spread(encode, values.shape) if of_expert else encode), scale


def _scaled_by_block(values: Tensor, format: Format, experts: _Experts) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the values as they are to be rounded, the scales of blocks, and of experts where the format has them."""
    across, along = format.block
    assert across is not None, "Format sees to that"
    assert along is not None, "where it is None, there are no blocks"
    magnitude = _finite_magnitude(values)
    encode_E = tensor_scale = None
    if format.tensor_scale:
        encode_E = tensor_encode(experts.amax(magnitude))
        tensor_scale = 1 / encode_E
        encode_E = experts.spread(encode_E, values.shape, along)
        magnitude += values - values  # the codes have no NaN: NaN where a value is not finite gives the block's scale
    amax = blocks_of(magnitude, across, along).amax((-3, -1))
    encode, scale = encode_and_scale(amax, format, encode_E)
    return times_blocks(values, encode, across, along), scale, tensor_scale


def _finite_magnitude(values: Tensor) -> Tensor:
    """Return magnitudes, 0 for NaN and infinities."""
    return values.abs().nan_to_num_(nan=0.0, posinf=0.0)


def _amax(magnitude: Tensor, dim: int) -> Tensor:
    """``amax`` that is 0 of nothing."""
    if magnitude.shape[dim] == 0:
        shape = list(magnitude.shape)
        del shape[dim]
        return magnitude.new_zeros(shape)
    return magnitude.amax(dim)


def _whole_tiles(values: Tensor) -> Tensor:
    return F.pad(values, (0, -values.shape[-1] % TILE))


def _random_bits(
    quantizer: Quantizer, values: Tensor, given: Tensor | None, generator: torch.Generator | None
) -> Tensor | None:
    if not quantizer.stochastic_rounding:
        return None
    if given is None:
        return torch.randint(0, 256, values.shape, dtype=torch.uint8, device=values.device, generator=generator)
    TENSOR("quantize: random_bits", given)
    if given.shape != values.shape or given.dtype is not torch.uint8:
        expected = f"{tuple(values.shape)} uint8, as the codes lie"
        raise InputError(f"quantize: random_bits: expected {expected}, got {tuple(given.shape)} {given.dtype}")
    return given
