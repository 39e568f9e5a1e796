"""The swizzled layout of scales that Blackwell's tensor cores read, for blocks of 32 and of 16 elements.

Source: NVIDIA, cuBLAS documentation, "1D Block Scaling Factors Layout".

A matrix of scales has one row per row of codes and one column per block. It is padded with zeros to whole tiles of
128 x 4, and the tiles are stored in row-major order. With C columns, the scale in row i and column j has the index::

    ((i // 128) * ceil(C / 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4

Axes: E experts, M rows and C columns of scales, B entries of the swizzled layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.numerics.formats.groups import PaddedRows, group_of

TILE_ROWS, TILE_COLUMNS = 128, 4
_TILE = TILE_ROWS * TILE_COLUMNS


class SwizzledGroups(NamedTuple):
    """The scales of several experts, each swizzled separately, concatenated."""

    blocked: Tensor  #: (B,), where B is an upper bound for any splits; zeros after the last expert
    #: (E,) int64: start of each expert's part in ``blocked``. The part of an expert without scales is empty.
    starts: Tensor


def swizzled_length(rows: int, columns: int) -> int:
    """Return the number of swizzled scales of a matrix of scales."""
    return -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS) * _TILE


def swizzle(scale: Tensor) -> Tensor:
    """Return swizzled scales: (..., M, C) of any dtype to (..., B), B = ceil(M / 128) * ceil(C / 4) * 512."""
    return _tiles(_storage(scale)).flatten(-3).view(scale.dtype)


def unswizzle(blocked: Tensor, rows: int, columns: int) -> Tensor:
    """Undo `swizzle`: (..., B) to (..., rows, columns)."""
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    tiles: Tensor = _storage(blocked).unflatten(-1, (down, across, 32, 4, TILE_COLUMNS))
    # a row is 128 down + 32 i4 + i32, a column 4 across + j
    matrix = tiles.transpose(-4, -2).flatten(-5, -3).flatten(-2)
    return matrix[..., :rows, :columns].contiguous().view(blocked.dtype)


def swizzle_row_groups(scale_MC: Tensor, ends_E: Tensor) -> SwizzledGroups:
    """Swizzle scales whose rows are sorted by expert, for a grouped product over ragged M.

    Each expert's rows are padded to a multiple of 128, so that experts share no tile.

    Parameters
    ----------
    scale_MC
        One row per row of codes.
    ends_E
        End of each expert's rows, int32. Later rows are ignored.
    """
    padded = PaddedRows.of(ends_E, scale_MC.shape[0], TILE_ROWS)
    tiles = _tiles(padded.spread(_storage(scale_MC)))
    row_of_tiles = tiles.shape[-2] * _TILE
    starts_E = F.pad(padded.ends_E[:-1], (1, 0)).to(torch.int64) // TILE_ROWS * row_of_tiles
    return SwizzledGroups(tiles.flatten().view(scale_MC.dtype), starts_E)


def swizzle_column_groups(scale_MC: Tensor, ends_E: Tensor) -> SwizzledGroups:
    """Swizzle scales whose columns are sorted by expert, for a grouped product over ragged K.

    Each expert's columns are padded to a multiple of 4, and its tiles are contiguous.

    Parameters
    ----------
    scale_MC
        One column per block of rows; each expert's rows start a new block.
    ends_E
        End of each expert's blocks, int32. Later blocks are ignored.
    """
    padded = PaddedRows.of(ends_E, scale_MC.shape[1], TILE_COLUMNS)
    tiles = _tiles(padded.spread(_storage(scale_MC).mT).mT)
    down, across = tiles.shape[:2]
    # the columns of zeros after the last expert count as one more expert
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
    """View one-byte types as uint8, which torch can pad and copy in every version and on every device."""
    return scale.view(torch.uint8) if scale.element_size() == 1 else scale


def _tiles(scale: Tensor) -> Tensor:
    """(..., M, C) to (..., ceil(M / 128), ceil(C / 4), 512)."""
    rows, columns = scale.shape[-2:]
    padded = F.pad(scale, (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    down, across = padded.shape[-2] // TILE_ROWS, padded.shape[-1] // TILE_COLUMNS
    flat = padded.contiguous().view(-1)
    words = flat.view(torch.int32) if scale.element_size() == 1 else flat  # which take a quarter of the copies
    of_word = TILE_COLUMNS * scale.element_size() // words.element_size()
    parts = words.view(*scale.shape[:-2], down, 4, 32, across, of_word)
    return parts.transpose(-4, -2).flatten(-3).view(scale.dtype)
