"""`quantize`: the definition of every format, in plain PyTorch. Fused kernels are tested against it bit for bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.errors import InputError
from fusedmoe.formats.casts import pack, to_codes
from fusedmoe.formats.format import E2M1, Format, Quantizer
from fusedmoe.formats.groups import PaddedRows, group_of, max_by_group, of_group
from fusedmoe.formats.hadamard import TILE, rotate
from fusedmoe.formats.scales import encode_and_scale, tensor_encode
from fusedmoe.formats.tensor import QuantizedTensor, column_block
from fusedmoe.kernels.torch.rows import tail_mask

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantized."""


def quantize(
    x: Tensor,
    quantizer: Quantizer | Format,
    axis: int = -1,
    *,
    offsets: Tensor | None = None,
    encode: Tensor | None = None,
    random_bits: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> QuantizedTensor:
    """Return a tensor in a small format.

    ``q = round(x * encode)``, where elements of a block share one ``encode``, which follows from their largest
    magnitude by the format's `ScaleRule`. NaNs are left out of that; they stay NaNs in FP8, and become +6 in E2M1.

    Parameters
    ----------
    x
        fp32, bf16 or fp16: rows (R, K), or a weight an expert (E, N, K).
    quantizer
        The format, or a format with stochastic rounding, rotation.
    axis
        Which axis blocks run along: the one that a product will sum over. -1 by rows, -2 by columns.
    offsets
        Of rows sorted by expert: where each expert's rows end, (E,) int32. Nothing is shared between experts, blocks
        along the rows begin anew with each; rows that belong to none are not looked at, and become zeros.
    encode
        For a format with one scale a tensor: what to multiply by, (E,) fp32, instead of what follows from ``x``.
    random_bits
        For stochastic rounding: uint8, one an element in the layout of the result's codes. Drawn where missing.
    generator
        What draws them; torch's default generator of the device otherwise.

    Raises
    ------
    InputError
        A shape or dtype that cannot be quantized so.
    """
    if isinstance(quantizer, Format):
        quantizer = Quantizer(quantizer)
    format = quantizer.format
    _check(x, axis, offsets, format, encode)
    values, padded = _laid_out(x, axis, offsets, format)
    rotated = quantizer.hadamard and axis == -2
    if rotated:
        values = rotate(_whole_tiles(values)).to(torch.float32)
    magnitude = values.abs().nan_to_num_(nan=0.0, posinf=torch.inf)
    tensor_scale = None
    across, along = format.block
    if along is None:
        if encode is None:
            amax = (
                _amax_of_tensor(magnitude, axis, offsets, padded)
                if across is None
                else _amax_of_rows(magnitude, padded)
            )
            encode, scale = encode_and_scale(amax, format)
        else:
            scale = 1 / encode
        per_element = _of_elements(encode, format, x, axis, offsets, padded)
    else:
        assert across is not None, "Format sees to that"
        amax = _amax_of_blocks(magnitude, across, along)
        encode_E = None
        if format.tensor_scale:
            encode_E = tensor_encode(_amax_of_tensor(magnitude, axis, offsets, padded))
            tensor_scale = 1 / encode_E
            encode_E = _of_blocks(encode_E, along, x, axis, offsets, padded)
        encode, scale = encode_and_scale(amax, format, encode_E)
        per_element = encode.repeat_interleave(along, -1)[..., : values.shape[-1]]
        if across > 1:
            per_element = per_element.repeat_interleave(across, -2)[..., : values.shape[-2], :]
    values = values * per_element
    codes = to_codes(values, format.element, _random_bits(quantizer, values, random_bits, generator))
    data = pack(codes) if format.element is E2M1 else codes
    return QuantizedTensor(data, scale, format, axis, tuple(x.shape), x.dtype, tensor_scale, offsets, rotated)


def amax_by_expert(x: Tensor, offsets: Tensor | None = None) -> Tensor:
    """The largest magnitude of each expert's elements, NaNs apart: (E,) fp32 of rows (R, K) with offsets or of a weight
    (E, N, K); (1,) of rows alone.
    """
    values, padded = _laid_out(x, -1, offsets, None)
    return _amax_of_tensor(values.abs().nan_to_num_(nan=0.0, posinf=torch.inf), -1, offsets, padded)


def _check(x: Tensor, axis: int, offsets: Tensor | None, format: Format, encode: Tensor | None) -> None:
    if x.dtype not in DTYPES:
        raise InputError(f"quantize: x: expected float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() not in (2, 3) or (offsets is not None and x.dim() != 2):
        raise InputError(f"quantize: x: expected rows (R, K), or (E, N, K) without offsets, got {tuple(x.shape)}")
    if axis not in (-1, -2):
        raise InputError(f"quantize: axis: expected -1 (by rows) or -2 (by columns), got {axis!r}")
    if offsets is not None and axis == -1 and (format.block[0] or 1) > 1:
        raise InputError(f"quantize: offsets: expected none by rows for {format}, whose blocks experts would share")
    if offsets is not None and (offsets.dim() != 1 or offsets.dtype is not torch.int32 or not offsets.shape[0]):
        raise InputError(f"quantize: offsets: expected (E,) int32, got {tuple(offsets.shape)} {offsets.dtype}")
    if encode is None:
        return
    if format.block != (None, None):
        raise InputError(f"quantize: encode: expected none for {format}, which has more than one scale a tensor")
    experts = x.shape[0] if x.dim() == 3 else 1 if offsets is None else offsets.shape[0]
    if tuple(encode.shape) != (experts,) or encode.dtype is not torch.float32:
        raise InputError(f"quantize: encode: expected ({experts},) float32, got {tuple(encode.shape)} {encode.dtype}")


def _laid_out(x: Tensor, axis: int, offsets: Tensor | None, format: Format | None) -> tuple[Tensor, PaddedRows | None]:
    """Return the values in fp32, contiguous, with the axis quantized along last, and how rows are padded there."""
    if axis == -1:
        values = x.to(torch.float32, copy=offsets is not None).contiguous()
        if offsets is not None:
            values.masked_fill_(tail_mask(offsets, x.shape[0])[:, None], 0)
        return values, None
    if offsets is None:
        return x.mT.to(torch.float32).contiguous(), None
    assert format is not None
    padded = PaddedRows.of(offsets, x.shape[0], column_block(format))
    return padded.spread(x).mT.to(torch.float32).contiguous(), padded


def _random_bits(
    quantizer: Quantizer, values: Tensor, given: Tensor | None, generator: torch.Generator | None
) -> Tensor | None:
    if not quantizer.stochastic_rounding:
        return None
    if given is None:
        return torch.randint(0, 256, values.shape, dtype=torch.uint8, device=values.device, generator=generator)
    if given.shape != values.shape or given.dtype is not torch.uint8:
        expected = f"{tuple(values.shape)} uint8, as the codes lie"
        raise InputError(f"quantize: random_bits: expected {expected}, got {tuple(given.shape)} {given.dtype}")
    return given


def _whole_tiles(values: Tensor) -> Tensor:
    return F.pad(values, (0, -values.shape[-1] % TILE))


def _amax_of_tensor(magnitude: Tensor, axis: int, offsets: Tensor | None, padded: PaddedRows | None) -> Tensor:
    """(E,), (1,) without experts."""
    if magnitude.dim() == 3:
        return _amax(magnitude.flatten(1), 1)
    if offsets is None:
        return _amax(magnitude.flatten()[None], 1)
    if padded is not None:
        return max_by_group(_amax(magnitude, 0), padded.ends_E)
    return max_by_group(_amax(magnitude, 1), offsets)


def _amax_of_rows(magnitude: Tensor, padded: PaddedRows | None) -> Tensor:
    """(..., M, 1), or (M, E) of rows by columns."""
    if padded is not None:
        return max_by_group(magnitude.mT.contiguous(), padded.ends_E).mT.contiguous()
    return _amax(magnitude, -1)[..., None]


def _amax_of_blocks(magnitude: Tensor, across: int, along: int) -> Tensor:
    """(..., ceil(M / across), ceil(L / along))."""
    rows, columns = magnitude.shape[-2:]
    magnitude = F.pad(magnitude, (0, -columns % along, 0, -rows % across))
    if across == 1:
        return _amax(magnitude.unflatten(-1, (-1, along)), -1)
    return _amax(magnitude.unflatten(-1, (-1, along)).unflatten(-3, (-1, across)), -1).amax(-2)


def _amax(magnitude: Tensor, dim: int) -> Tensor:
    """``amax`` that is 0 of nothing."""
    if magnitude.shape[dim] == 0:
        shape = list(magnitude.shape)
        del shape[dim]
        return magnitude.new_zeros(shape)
    return magnitude.amax(dim)


def _of_elements(
    encode: Tensor, format: Format, x: Tensor, axis: int, offsets: Tensor | None, padded: PaddedRows | None
) -> Tensor:
    """Return what follows from a scale a tensor, or a row, as something to multiply the values by."""
    if format.block[0] is not None:  # one a row
        return encode if padded is None else of_group(encode, padded.expert_of_padded())
    if x.dim() == 3:
        return encode[:, None, None]
    if offsets is None:
        return encode
    if padded is not None:
        return of_group(encode, padded.expert_of_padded())
    return of_group(encode, group_of(offsets, x.shape[0]))[:, None]


def _of_blocks(
    encode_E: Tensor, along: int, x: Tensor, axis: int, offsets: Tensor | None, padded: PaddedRows | None
) -> Tensor:
    """Return each expert's encoding factor as something that broadcasts against scales of blocks."""
    if x.dim() == 3:
        return encode_E[:, None, None]
    if offsets is None:
        return encode_E
    if padded is not None:
        return of_group(encode_E, padded.expert_of_padded()[::along])
    return of_group(encode_E, group_of(offsets, x.shape[0]))[:, None]
