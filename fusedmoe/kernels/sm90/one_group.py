"""The offsets of one group: the grouped kernels then compute dense products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedmoe.base.lasting import is_capturing, lasting

_TABLE_ROWS = 1 << 18  # a table takes 1 MiB; where there are more rows, a launch that fills one number takes no time

_tables: dict[torch.device, Tensor] = {}


def bind_offsets(rows: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that returns ``[rows]``, int32, on a device: without a launch if there is a table."""
    kept = offsets_of_one_group(rows, device)
    return (lambda: new_offsets(rows, device)) if kept is None else lambda: kept


def offsets_of_one_group(rows: int, device: torch.device) -> Tensor | None:
    """Return ``[rows]``, int32, on a device: a view of a table that exists as long as the process.

    None if there is no table for so many rows, or none can be made now; `new_offsets` makes the tensor for one call.

    A cached tensor per number of rows would need an eviction, and a CUDA graph may have recorded its address.
    """
    if rows >= _TABLE_ROWS:
        return None
    table = _tables.get(device)
    if table is None:
        if is_capturing(device):
            return None  # the graph would own the memory, and fill it only when it is replayed
        table = lasting(lambda: torch.arange(_TABLE_ROWS, dtype=torch.int32, device=device), device)
        table = _tables.setdefault(device, table)
    return table[rows : rows + 1]


def new_offsets(rows: int, device: torch.device) -> Tensor:
    """Return a new ``[rows]``, int32, in one launch."""
    return torch.full((1,), rows, dtype=torch.int32, device=device)
