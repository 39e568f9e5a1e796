"""Padded layout of rows sorted by expert, for blocks along the rows: each expert's rows start a new block.

Axes: R rows, E experts, P padded rows. Shapes depend only on R, E and the block size; no tensor is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.numerics.expert_rows import padded_rows, tail_mask

__all__ = ["PACKED_ROWS", "PaddedRows", "group_of", "max_by_group", "of_group", "padded_rows"]


PACKED_ROWS = 256
"""The multiple to which each expert's rows are padded in the packed layout; see `fusedmoe.numerics.formats.packed`."""


@dataclass(frozen=True)
class PaddedRows:
    """Each expert's rows, padded with zero rows to a multiple of ``block``."""

    # end of each expert's rows among the R rows, int32
    offsets_E: Tensor  # noqa: N815
    # end of each expert's padded rows, int32: multiples of ``block``
    ends_E: Tensor  # noqa: N815
    num_rows: int  # R
    block: int  # rows per block

    @classmethod
    def of(cls, offsets_E: Tensor, num_rows: int, block: int) -> PaddedRows:
        """Return the layout of ``num_rows`` rows with these offsets."""
        return cls(offsets_E, padded_ends(offsets_E, block), num_rows, block)

    @property
    def num_padded(self) -> int:
        """P, an upper bound for any splits; the experts' padded rows may end earlier."""
        return padded_rows(self.num_rows, self.offsets_E.shape[0], self.block)

    def expert_of_padded(self) -> Tensor:
        """Return the expert of each padded row: (P,) int64, E after the last expert's rows."""
        return group_of(self.ends_E, self.num_padded)

    def spread(self, x_RK: Tensor) -> Tensor:
        """Copy rows (R, K) to their padded positions: (P, K), zeros elsewhere."""
        padded_P = torch.arange(self.num_padded, device=x_RK.device, dtype=torch.int32)
        if not self.num_padded:
            return x_RK.new_zeros(0, x_RK.shape[1])
        expert_P = self.expert_of_padded().clamp(max=self.offsets_E.shape[0] - 1)
        row_P = padded_P - _starts(self.ends_E)[expert_P] + _starts(self.offsets_E)[expert_P]
        padding_P = row_P >= self.offsets_E[expert_P]
        return x_RK[row_P.clamp(max=self.num_rows - 1)].masked_fill_(padding_P[:, None], 0)

    def collect(self, x_PK: Tensor) -> Tensor:
        """Undo `spread`: (R, K), zeros in rows that belong to no expert."""
        if not self.num_rows:
            return x_PK.new_zeros(0, x_PK.shape[1])
        row_R = torch.arange(self.num_rows, device=x_PK.device, dtype=torch.int32)
        expert_R = group_of(self.offsets_E, self.num_rows).clamp(max=self.offsets_E.shape[0] - 1)
        place_R = row_R - _starts(self.offsets_E)[expert_R] + _starts(self.ends_E)[expert_R]
        tail_R = tail_mask(self.offsets_E, self.num_rows)
        return x_PK[place_R.clamp(max=self.num_padded - 1)].masked_fill_(tail_R[:, None], 0)


def padded_ends(offsets_E: Tensor, block: int) -> Tensor:
    """Return `PaddedRows.ends_E` for these offsets."""
    counts_E = offsets_E - _starts(offsets_E)
    return ((counts_E + block - 1) // block * block).cumsum(0, dtype=torch.int32)


def _starts(ends_E: Tensor) -> Tensor:
    return F.pad(ends_E[:-1], (1, 0))


def group_of(ends_E: Tensor, num_rows: int) -> Tensor:
    """Return the expert of each row: (num_rows,) int64, E after the last expert's rows."""
    rows_R = torch.arange(num_rows, device=ends_E.device, dtype=torch.int32)
    return torch.searchsorted(ends_E, rows_R, right=True)


def of_group(values_E: Tensor, group: Tensor) -> Tensor:
    """Return the value of each row's expert, 1 for rows without an expert: (..., E) to (..., rows)."""
    return F.pad(values_E, (0, 1), value=1.0)[..., group]


def max_by_group(x_R: Tensor, ends_E: Tensor) -> Tensor:
    """Return the maximum over each expert's rows, 0 for no rows: (R, ...) to (E, ...). Entries must not be negative."""
    starts = F.pad(ends_E.to(torch.int64), (1, 0))
    return torch.segment_reduce(x_R, "max", offsets=starts, axis=0, initial=0, unsafe=True)
