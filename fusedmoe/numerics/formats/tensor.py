"""`QuantizedTensor`: codes and scales with their format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.base.errors import InputError
from fusedmoe.numerics.formats.blocks import times_blocks
from fusedmoe.numerics.formats.casts import from_codes, unpack
from fusedmoe.numerics.formats.format import E2M1, Format, column_block
from fusedmoe.numerics.formats.groups import PACKED_ROWS, PaddedRows, group_of, of_group, padded_rows
from fusedmoe.numerics.formats.hadamard import TILE, rotate_back
from fusedmoe.numerics.formats.scales import decoded
from fusedmoe.numerics.formats.swizzle import swizzled_length


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A matrix, or one matrix per expert, in a narrow format; `dequantize` returns its values.

    A product sums over one axis of its operands, and the blocks of an operand must run along that axis. An operand of
    two products that sum over different axes is therefore quantized twice: along the last axis ("by rows") and along
    the second to last ("by columns"). Each result is a separate `QuantizedTensor`.

    - ``shape``, ``dtype`` (tuple of int, torch.dtype): shape and dtype of the source. Rows may have more than one
      leading axis.
    """

    #: The codes, in the element's dtype; two 4-bit codes per byte. **The quantized axis is the last**: (R, K) for rows
    #: by rows; (K, P) for rows by columns, with each expert's rows padded to whole blocks; (E, N, K) and (E, K, N) for
    #: weights.
    data: Tensor
    #: In the rule's dtype, for data (..., M, L): one per block, (..., M / across, L / along); one per row, (..., M, 1),
    #: or (M, E) for rows by columns; or one per expert, (E,).
    scale: Tensor
    format: Format  #: Format of codes and scales
    axis: int  #: The axis of the source along which blocks run: -1 or -2
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor_scale: Tensor | None = None  #: (E,) fp32, the scale of each expert; None if the format has none
    offsets: Tensor | None = None  #: For rows sorted by expert: the end of each expert's rows
    #: Whether tiles of 16 rows were rotated before quantization: see `fusedmoe.numerics.formats.hadamard`.
    rotated: bool = False

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """Return codes, scale and, if the format has one, tensor scale, in the order of `QuantizedSpec.tensors`."""
        return (self.data, self.scale) if self.tensor_scale is None else (self.data, self.scale, self.tensor_scale)

    def along(self, axis: int, what: str = "a product") -> QuantizedTensor:
        """Return this tensor; raise `InputError` if it was quantized along the other axis."""
        if axis != self.axis:
            raise InputError(
                f"{what} sums over axis {axis} of a tensor of shape {tuple(self.shape)} that was quantized along axis "
                f"{self.axis}: quantize the high-precision values along axis {axis}"
            )
        return self

    @property
    def padded(self) -> PaddedRows | None:
        """Padded layout of rows sorted by expert that were quantized by columns; None for other tensors."""
        if self.axis != -2 or self.offsets is None:
            return None
        return PaddedRows.of(self.offsets, self.shape[0], column_block(self.format))

    @property
    def length(self) -> int:
        """Number of elements along the last axis of the codes."""
        return self.data.shape[-1] * (2 if self.format.element == E2M1 else 1)

    def codes(self) -> Tensor:
        """Return the codes, one per entry; 4-bit codes as uint8."""
        return unpack(self.data, self.length) if self.format.element == E2M1 else self.data

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return codes times scales, in the source's shape and layout.

        Parameters
        ----------
        dtype
            Dtype of the result; the source's by default. The arithmetic is fp32. bf16 is exact for MXFP8 and for FP8
            with power-of-two scales, unless the tensor is rotated.
        """
        values, factor = self.split()
        if factor is not None:
            values = values * self._per_value(factor)
        if self.rotated:
            values = rotate_back(values)
        if self.axis == -2:
            padded = self.padded
            values = values.mT if padded is None else padded.collect(values.mT)
        rows, columns = self.matrix_shape
        return values[..., :rows, :columns].reshape(self.shape).to(self.dtype if dtype is None else dtype)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and features of one matrix."""
        return (math.prod(self.shape[:-1]) if self.data.dim() == 2 else self.shape[-2]), self.shape[-1]

    def split(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
        """Return the values divided by `factor`, fp32 or bf16 in the layout of the codes, and `factor`.

        bf16 holds the divided values exactly, except with fp32 block scales that are not powers of two.
        """
        across, along = self.format.block
        if along is None:
            return from_codes(self.codes(), self.format.element, dtype), self.factor
        assert across is not None, "Format requires it"
        exact = dtype if self.format.scales_are_exact else torch.float32
        values, scale = from_codes(self.codes(), self.format.element, exact), decoded(self.scale).to(exact)
        return times_blocks(values, scale, across, along).to(dtype), self.factor

    @property
    def factor(self) -> Tensor | None:
        """The factor that remains for the values of `split`, fp32; None for 1.

        (R,) for rows by rows; (E, M) or (E, 1) for all other codes (..., M, L).
        """
        across, along = self.format.block
        if along is not None:
            return None if self.tensor_scale is None else self._by_expert(self.tensor_scale)
        if across is None:
            return self._by_expert(self.scale)
        return self.scale.mT if self.axis == -2 and self.scale.dim() == 2 else self.scale[..., 0]

    def _by_expert(self, scale_E: Tensor) -> Tensor:
        """Return a `factor` of one value per expert."""
        if self.axis == -1 and self.offsets is not None:
            return of_group(scale_E, group_of(self.offsets, self.shape[0]))
        return scale_E[:, None]

    def _per_value(self, factor: Tensor) -> Tensor:
        """Expand a factor to broadcast against the values of `split`."""
        padded = self.padded
        if padded is not None:  # (E, M or 1) for values (M, P)
            return of_group(factor.mT, padded.expert_of_padded())
        if self.data.dim() == 2:
            return factor.reshape(-1, 1)
        return factor[..., None]


class QuantizedSpec(NamedTuple):
    """Shape, dtype and format of a `QuantizedTensor` that does not exist yet.

    - ``shape``, ``dtype``, ``format``, ``axis``, ``rotated``: as of `QuantizedTensor`.
    - ``packed``, ``halves`` (bool): codes and scales are in the layout of `fusedmoe.numerics.formats.packed`, which
      only kernels read; gate and up alternate.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    format: Format
    axis: int
    experts: int | None = None  #: For rows sorted by expert: the number of experts
    #: One matrix per expert, (E, N, K); otherwise one matrix, whose rows may have more than one leading axis.
    stacked: bool = False
    rotated: bool = False
    packed: bool = False
    halves: bool = False

    def tensors(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and dtype of codes, scale and, if the format has one, tensor scale, for any splits."""
        if self.packed:
            return self._packed_tensors()
        stack = self.shape[:1] if self.stacked else ()
        lines, length = self._matrix_of_codes()
        sharing = self.shape[0] if self.stacked else 1 if self.experts is None else self.experts
        across, along = self.format.block
        if across is None:
            scales: tuple[int, ...] = (sharing,)
        elif along is None:
            scales = (*stack, lines, 1 if self.axis == -1 or self.experts is None else sharing)
        else:
            scales = (*stack, _ceil_div(lines, across), _ceil_div(length, along))
        codes = (*stack, lines, _ceil_div(length * self.format.element.bits, 8)), self.format.element.dtype
        found = codes, (scales, self.format.rule.dtype)
        return (*found, ((sharing,), torch.float32)) if self.format.tensor_scale else found

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors())

    def tensor(self, tensors: Sequence[Tensor], offsets: Tensor | None) -> QuantizedTensor:
        """Return the tensor with this spec that holds `tensors`."""
        data, scale, *rest = tensors
        tensor_scale = rest[0] if rest else None
        return QuantizedTensor(
            data, scale, self.format, self.axis, tuple(self.shape), self.dtype, tensor_scale, offsets, self.rotated
        )

    def _packed_tensors(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        along, element = self.format.block[1], self.format.element
        assert along is not None, "fusedmoe.numerics.formats.packed.can_pack requires it"
        matrices, (rows, features) = 1, self.shape[-2:]
        if self.stacked:
            matrices = experts = self.shape[0]
        else:
            assert self.experts is not None, "packed rows are sorted by expert"
            experts, rows = self.experts, padded_rows(rows, self.experts, PACKED_ROWS)
        lines, length = (rows, features) if self.axis == -1 else (features, rows)
        codes: tuple[int, ...] = lines, length * element.bits // 8
        if self.stacked:
            codes = matrices, *codes
        elif element != E2M1:
            codes = rows, features
        scales = matrices * swizzled_length(lines, _ceil_div(length, along))
        found = (codes, element.dtype), ((scales,), self.format.rule.dtype)
        return (*found, ((experts,), torch.float32)) if self.format.tensor_scale else found

    def _matrix_of_codes(self) -> tuple[int, int]:
        """Return M and L of one matrix of codes (M, L), the quantized axis last."""
        rows, columns = math.prod(self.shape[1 if self.stacked else 0 : -1]), self.shape[-1]
        if self.axis == -1:
            return rows, columns
        if self.experts is not None:
            rows = padded_rows(rows, self.experts, column_block(self.format))
        return columns, rows + (-rows % TILE if self.rotated else 0)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
