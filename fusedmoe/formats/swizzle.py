"""Scales in the order in which the matrix units of Blackwell read them.

Source: NVIDIA, cuBLAS documentation, "1D Block Scaling Factors Layout"; the same for blocks of 32 and of 16 elements.

A matrix of scales, one row for each row of codes and one column for each block along it, is padded with zeros to whole
tiles of 128 x 4 and stored tile by tile, a row of tiles after the other. The scale in row i and column j of C columns
comes to::

    ((i // 128) * ceil(C / 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4

Axes: E experts, M rows and C columns of scales, B entries in the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.formats.groups import PaddedRows, group_of

TILE_ROWS, TILE_COLUMNS = 128, 4
_TILE = TILE_ROWS * TILE_COLUMNS


class SwizzledGroups(NamedTuple):
    """The scales of several experts, each expert's tiled on its own, one after the other.

    Attributes
    ----------
    blocked : Tensor
        (B,): as many as any splits need, so that there are zeros behind the last expert.
    starts : Tensor
        Where each expert's part begins in ``blocked``, int64. An expert without scales has none.
    """

    blocked: Tensor
    starts: Tensor


def swizzle(scale: Tensor) -> Tensor:
    """Return scales in the order of tiles: (..., M, C) to (..., B) with B = ceil(M / 128) * ceil(C / 4) * 512.

    Parameters
    ----------
    scale
        Of any dtype; every leading index is a matrix of its own.
    """
    return _tiles(_storage(scale)).flatten(-3).view(scale.dtype)


def unswizzle(blocked: Tensor, rows: int, columns: int) -> Tensor:
    """Undo `swizzle`: (..., B) to (..., rows, columns)."""
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    tiles: Tensor = _storage(blocked).unflatten(-1, (down, across, 32, 4, TILE_COLUMNS))
    # a row is 128 down + 32 i4 + i32, a column 4 across + j
    matrix = tiles.transpose(-4, -2).flatten(-5, -3).flatten(-2)
    return matrix[..., :rows, :columns].contiguous().view(blocked.dtype)


def swizzle_row_groups(scale_MC: Tensor, ends_E: Tensor) -> SwizzledGroups:
    """Tile scales whose rows are sorted by expert, for a product of each expert's rows: every expert's rows are padded
    to a multiple of 128, so that its tiles are its own.

    Parameters
    ----------
    scale_MC
        One row of scales for each row of codes.
    ends_E
        Where each expert's rows end, int32. Rows behind the last are left out.
    """
    padded = PaddedRows.of(ends_E, scale_MC.shape[0], TILE_ROWS)
    tiles = _tiles(padded.spread(_storage(scale_MC)))
    row_of_tiles = tiles.shape[-2] * _TILE
    starts_E = F.pad(padded.ends_E[:-1], (1, 0)).to(torch.int64) // TILE_ROWS * row_of_tiles
    return SwizzledGroups(tiles.flatten().view(scale_MC.dtype), starts_E)


def swizzle_column_groups(scale_MC: Tensor, ends_E: Tensor) -> SwizzledGroups:
    """Tile scales whose columns are sorted by expert, for a product that sums over each expert's rows apart: every
    expert's columns are padded to a multiple of 4, and its tiles follow one another.

    Parameters
    ----------
    scale_MC
        One column of scales for each block of rows: blocks begin anew with every expert.
    ends_E
        Where each expert's blocks end, int32. Blocks behind the last are left out.
    """
    padded = PaddedRows.of(ends_E, scale_MC.shape[1], TILE_COLUMNS)
    tiles = _tiles(padded.spread(_storage(scale_MC).mT).mT)
    down, across = tiles.shape[:2]
    # behind the last expert come columns of tiles that are zeros: one expert more
    ends = F.pad(padded.ends_E.to(torch.int64) // TILE_COLUMNS, (0, 1), value=across)
    starts = F.pad(ends[:-1], (1, 0))
    group = group_of(ends, across)
    column = torch.arange(across, device=tiles.device) - starts[group]
    row = torch.arange(down, device=tiles.device)[:, None]
    place = starts[group] * down + row * (ends - starts)[group] + column
    blocked = torch.empty_like(tiles).view(-1, _TILE)
    blocked[place.flatten()] = tiles.flatten(0, 1)
    return SwizzledGroups(blocked.flatten().view(scale_MC.dtype), starts[:-1] * down * _TILE)


def _storage(scale: Tensor) -> Tensor:
    """The bytes of small types, which torch pads and copies on every version and device."""
    return scale.view(torch.uint8) if scale.element_size() == 1 else scale


def _tiles(scale: Tensor) -> Tensor:
    """(..., M, C) to (..., ceil(M / 128), ceil(C / 4), 512)."""
    rows, columns = scale.shape[-2:]
    padded = F.pad(scale, (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    down, across = padded.shape[-2] // TILE_ROWS, padded.shape[-1] // TILE_COLUMNS
    parts: Tensor = padded.unflatten(-1, (across, TILE_COLUMNS)).unflatten(-3, (down, 4, 32))
    return parts.transpose(-4, -2).flatten(-3)
