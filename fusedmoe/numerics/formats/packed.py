"""The packed layout of rows and weights in MXFP8 and NVFP4, which Blackwell's grouped products read.

- **Rows** are sorted by expert. Each expert's rows are padded with zero rows to a multiple of 256. Codes by rows are
  (P, K). Codes by columns are (P, K) in MXFP8, which is not transposed, and (K, P) in NVFP4, since the tensor cores sum
  4-bit codes along the contiguous axis alone. Scales are swizzled (see `swizzle`): by rows as one matrix, by columns
  expert by expert.
- **Weights** have codes (E, N, K) by rows and (E, K, N) by columns, and the scales of each expert are swizzled.
- **Gate and up** alternate in blocks of 32 features, where a gated activation reads them as two halves: ``[gate 0..31,
  up 0..31, gate 32..63, ...]``. This holds for rows before such an activation, and for the weight of the layer that
  makes them. A block of 32 is one block of MXFP8 and two of NVFP4, so reordering and quantization commute.

Source: NVIDIA, cudnn-frontend, ``cudnn.gemm.cutedsl.grouped``.

Axes: R rows, P padded rows, E experts, F features, of which the first half is gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fusedmoe.numerics.expert_rows import tail_mask
from fusedmoe.numerics.formats.format import E2M1, E4M3, ScaleRule
from fusedmoe.numerics.formats.groups import PACKED_ROWS, PaddedRows
from fusedmoe.numerics.formats.quantizers import quantize
from fusedmoe.numerics.formats.swizzle import swizzle, swizzle_column_groups, swizzled_length

if TYPE_CHECKING:
    from fusedmoe.numerics.formats.format import Quantizer

PACKED_FEATURES = 32  # the features of gate, and then of up, that alternate


class Packed(NamedTuple):
    """A packed form of a value: the axis that its blocks run along, and whether gate and up alternate."""

    axis: int
    halves: bool = False


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """Codes and swizzled scales of a packed form, and the scale of each expert if the format has one."""

    data: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """Return codes, scales and, if the format has one, tensor scale."""
        return (self.data, self.scale) if self.tensor_scale is None else (self.data, self.scale, self.tensor_scale)


def can_pack(quantizer: Quantizer) -> bool:
    """Whether the packed layout exists for the values of a quantizer: MXFP8 in E4M3, rounded to nearest; and NVFP4."""
    format = quantizer.format
    if format.element == E2M1:
        return format.block in ((1, 16), (16, 16))
    plain = not (quantizer.hadamard or quantizer.stochastic_rounding)
    return plain and format.element == E4M3 and format.block == (1, 32) and format.rule is ScaleRule.RCEIL


def interleave(x: Tensor, axis: int = -1, size: int = PACKED_FEATURES) -> Tensor:
    """Let gate and up alternate in blocks of 32, from ``[gate | up]``, along an axis. A block has ``size`` entries."""
    return _swapped(x, axis, (2, -1, size))


def deinterleave(x: Tensor, axis: int = -1) -> Tensor:
    """Undo `interleave`."""
    return _swapped(x, axis, (-1, 2, PACKED_FEATURES))


def _swapped(x: Tensor, axis: int, sizes: tuple[int, int, int]) -> Tensor:
    """Return x with the first two of these parts of an axis swapped: contiguous, in one copy."""
    axis %= x.dim()
    parts: Tensor = x.unflatten(axis, sizes)
    return parts.transpose(axis, axis + 1).flatten(axis, axis + 2)


def padded_layout(offsets_E: Tensor, num_rows: int) -> PaddedRows:
    """Return the layout of ``num_rows`` packed rows with these ends of the experts' rows, (E,) int32."""
    return PaddedRows.of(offsets_E, num_rows, PACKED_ROWS)


def pack_rows(x: Tensor, offsets_E: Tensor, halves: bool = False) -> Tensor:
    """Return rows (R, F) in the packed layout without quantization: (P, F). Padding rows are zeros."""
    return padded_layout(offsets_E, x.shape[0]).spread(interleave(x) if halves else x)


def quantize_packed(x: Tensor, quantizer: Quantizer, form: Packed, offsets_E: Tensor | None = None) -> PackedTensor:
    """Return a packed form of rows (R, F), with the ends of the experts' rows, or of weights (E, N, K).

    The values are those of `quantize`. The halves of a weight are those of N.
    """
    format = quantizer.format
    across, along = format.block
    assert along is not None, "can_pack requires it"
    if x.dim() == 3:
        q = quantize(interleave(x, -2) if form.halves else x, quantizer, form.axis)
        # the tensor cores read a scale for each line
        scale = q.scale if across == 1 else q.scale.repeat_interleave(across or 1, -2)[:, : q.data.shape[-2]]
        return PackedTensor(q.data, swizzle(scale).flatten(), q.tensor_scale)
    assert offsets_E is not None, "packed rows are sorted by expert"
    padded = padded_layout(offsets_E, x.shape[0])
    rows = padded.spread(interleave(x) if form.halves else x)
    q = quantize(rows, quantizer, form.axis, offsets=padded.ends_E)
    if form.axis == -1:
        return PackedTensor(q.data, swizzle(q.scale), q.tensor_scale)
    scale = q.scale[:, : rows.shape[0] // along]
    length = swizzled_length(x.shape[1], scale.shape[1])
    codes = q.data[:, : rows.shape[0] * format.element.bits // 8]
    return PackedTensor(
        (codes if format.element == E2M1 else codes.mT).contiguous(),
        swizzle_column_groups(scale, padded.ends_E // along).blocked[:length].contiguous(),
        q.tensor_scale,
    )


def place_of_row(offsets_E: Tensor, num_rows: int) -> Tensor:
    """Return the packed row of each row: (R,) int64; P for rows without an expert."""
    padded = padded_layout(offsets_E, num_rows)
    place_P1 = torch.arange(padded.num_padded, device=offsets_E.device)[:, None]
    return padded.collect(place_P1)[:, 0].masked_fill_(tail_mask(offsets_E, num_rows), padded.num_padded)
