"""Rows on their way to the experts: in their own dtype, or as FP8 codes with scales (``dispatch_dtype``).

Axes: R rows, H features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedmoe.numerics.formats import QuantizedSpec, fp8_block, quantize

FORMAT = fp8_block()  # that of rows and gradients in the recipe "fp8_block"
LAUNCHES = 24  # of `packed` and `unpacked` with codes, and of their exchange


def packed(x: Tensor, dispatch_dtype: torch.dtype | None) -> list[Tensor]:
    """Return the tensors that travel for rows (R, H), contiguous.

    These are the rows, or their scales (R, ceil(H / 128)) fp32 and their codes (R, H).
    """
    if dispatch_dtype is None:
        return [x.contiguous()]
    rows = quantize(x, FORMAT)
    return [rows.scale, rows.data]


def unpacked(arrived: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the rows of tensors as `packed` returns them; ``dtype`` is that of the rows that were packed."""
    if len(arrived) == 1:
        return arrived[0]
    scale, codes = arrived
    rows = QuantizedSpec(tuple(codes.shape), dtype, FORMAT, -1).tensor([codes, scale], None)
    return rows.dequantize().contiguous()  # with a last block of fewer than 128 values, it is a part of a wider tensor
