"""Views of a matrix with its blocks as separate axes.

Axes: M rows and L columns, in blocks of ``across`` x ``along``.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def blocks_of(values: Tensor, across: int, along: int) -> Tensor:
    """Return (..., M, L) as (..., ceil(M / across), across, ceil(L / along), along); zeros pad partial blocks."""
    rows, columns = values.shape[-2:]
    if rows % across or columns % along:
        values = F.pad(values, (0, -columns % along, 0, -rows % across))
    blocks: Tensor = values.unflatten(-1, (-1, along)).unflatten(-3, (-1, across))
    return blocks


def times_blocks(values: Tensor, factor: Tensor, across: int, along: int) -> Tensor:
    """Multiply values (..., M, L) by their blocks' factors (..., ceil(M / across), ceil(L / along))."""
    rows, columns = values.shape[-2:]
    product = blocks_of(values, across, along) * factor[..., :, None, :, None]
    return product.flatten(-4, -3).flatten(-2)[..., :rows, :columns]
