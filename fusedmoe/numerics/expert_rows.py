"""Rows sorted by expert: their offsets, the tail after the last expert's rows, and sorting by expert.

Axes: R rows, E experts, T tokens, K chosen experts per token, H features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.base.estimating import has_values


def offsets_from_splits(splits_E: Tensor, num_rows: int) -> Tensor:
    """Return the ends of the experts' rows: ``offsets[e] = min(sum(max(splits[: e + 1], 0)), num_rows)``.

    The ends are clamped on the device, so that kernels stay within the rows for any values of ``splits``.

    - ``splits_E``: rows per expert, shape (E,), any integer dtype.
    - ``num_rows``: R, the number of rows.

    Returns: int32, shape (E,), non-decreasing, within [0, R].
    """
    return splits_E.clamp(min=0).cumsum(0, dtype=torch.int64).clamp_(max=num_rows).to(torch.int32)


def padded_rows(num_rows: int, experts: int, block: int) -> int:
    """Return an upper bound, for any splits, on the rows if each expert's are padded to a multiple of ``block``."""
    return (num_rows // block + torch.sym_min(experts, num_rows)) * block  # type: ignore[no-any-return]


def tail_mask(offsets_E: Tensor, num_rows: int) -> Tensor:
    """``mask[r] = r >= offsets[-1]``: bool, shape (R,), true for the rows that belong to no expert."""
    return torch.arange(num_rows, device=offsets_E.device, dtype=torch.int32) >= offsets_E[-1]


def zero_tail_(rows: Tensor, offsets_E: Tensor) -> Tensor:
    """Set the rows that belong to no expert to zero, in place. ``rows`` is (R,) or (R, H)."""
    # on a CPU, reading one number costs less than a mask
    if rows.is_cpu and not torch.compiler.is_compiling() and has_values(offsets_E):
        end = offsets_E.tolist()[-1]  # faster than indexing the tensor
        if end < rows.shape[0]:
            rows[end:].zero_()
        return rows
    mask = tail_mask(offsets_E, rows.shape[0])
    return rows.masked_fill_(mask.view(-1, *(1,) * (rows.dim() - 1)), 0)


def without_tail(rows: Tensor, splits_E: Tensor) -> Tensor:
    """Return ``rows`` (R, ...) with zeros in the rows after ``splits.sum()``; the gradient has zeros there too.

    Differentiable, without a host synchronisation. ``splits`` (E,) are not checked.
    """
    total = splits_E.to(torch.int64).clamp(min=0).sum()
    tail = torch.arange(rows.shape[0], device=rows.device) >= total
    return rows.masked_fill(tail.view(-1, *(1,) * (rows.dim() - 1)), 0)


def sort_by_expert(
    expert_index_TK: Tensor, num_experts: int, num_rows: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the T*K routing slots by expert, stably.

    A slot with an id outside [0, E) is a sentinel: its row comes after those of all experts and is not counted. With
    fewer rows than slots, the last slots in this order have no row.

    - ``expert_index_TK``: (T, K) integers.
    - ``num_experts``: E.
    - ``num_rows``: R, at most T*K; None for T*K.

    Returns: ``slot_of_row`` (R,) int64, the routing slot ``t * K + k`` of row r; ``row_of_slot`` (T, K) int64, the row
    of a slot, R for a sentinel and for a slot without a row; ``splits`` (E,) int64, rows per expert.
    """
    # int64: the ids' dtype may be too narrow for E, which the comparison and the sentinels' key need
    flat_R = expert_index_TK.reshape(-1).to(torch.int64)
    chosen_R = (flat_R >= 0) & (flat_R < num_experts)
    key_R, slot_of_row = torch.where(chosen_R, flat_R, num_experts).sort(stable=True)
    splits_E = _counts_of_sorted(key_R, num_experts)
    row_ids_R = torch.arange(flat_R.numel(), device=flat_R.device)
    row_of_slot = torch.empty_like(row_ids_R).scatter_(0, slot_of_row, row_ids_R)
    row_of_slot = torch.where(chosen_R, row_of_slot, flat_R.numel()).view_as(expert_index_TK)
    if num_rows is None or num_rows == flat_R.numel():
        return slot_of_row, row_of_slot, splits_E
    ends_E = splits_E.cumsum(0).clamp_(max=num_rows)
    splits_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    # a copy: rows that a backward pass keeps must not hold the memory of all slots
    return slot_of_row[:num_rows].clone(), row_of_slot.clamp_(max=num_rows), splits_E


def _counts_of_sorted(key_R: Tensor, num_experts: int) -> Tensor:
    # not bincount, which synchronises with the host on CUDA, nor scatter_add, which uses atomics
    experts_E = torch.arange(num_experts, device=key_R.device, dtype=key_R.dtype)
    ends_E = torch.searchsorted(key_R, experts_E, right=True)
    return ends_E.diff(prepend=torch.searchsorted(key_R, experts_E[:1]))


def rows_per_expert(expert_index: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert was chosen, without sentinels: (E,) int64, counted on the device."""
    return _counts_of_sorted(expert_index.reshape(-1).to(torch.int64).sort().values, num_experts)


def gather_rows(rows_RH: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """Return ``out[t, k] = rows[row_of_slot[t, k]]``, exactly zero for a sentinel: (T, K, H), or (T, K) of a vector."""
    num_rows = rows_RH.shape[0]
    if num_rows == 0:
        return rows_RH.new_zeros(*row_of_slot_TK.shape, *rows_RH.shape[1:])
    skipped = row_of_slot_TK >= num_rows
    out = rows_RH[row_of_slot_TK.clamp(max=num_rows - 1)]
    return out.masked_fill_(skipped.view(*skipped.shape, *(1,) * (rows_RH.dim() - 1)), 0)
