"""Values that a chain derives once from a runtime input, for all ops that take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from fusedmoe.base.environment import debugging
from fusedmoe.base.errors import InputError
from fusedmoe.base.estimating import has_values
from fusedmoe.numerics.expert_rows import offsets_from_splits
from fusedmoe.numerics.formats.packed import padded_layout, place_of_row
from fusedmoe.ops.op import SpecLike, TensorSpec


@dataclass(frozen=True)
class Derived:
    """A value computed from the runtime input ``source`` and the rows of the first op that takes it."""

    name: str
    source: str
    compute: Callable[[Tensor, Tensor], Tensor]
    check: Callable[[Tensor, Tensor], None]  # checks the contents of the source on the host
    infer: Callable[[SpecLike, SpecLike], TensorSpec]


def _checked_ends(splits_E: Tensor, num_rows: int) -> list[int]:
    counts = splits_E.tolist()
    ends = list(accumulate(counts))
    if any(c < 0 for c in counts):
        raise InputError(
            f"splits: expected counts of at least 0, got {min(counts)} for expert {counts.index(min(counts))}"
        )
    if ends[-1] > num_rows:
        raise InputError(f"splits: expected a sum of at most {num_rows}, the number of rows, got {ends[-1]}")
    return ends


def _check_splits(splits_E: Tensor, rows: Tensor) -> None:
    _checked_ends(splits_E, rows.shape[0])


def _offsets(splits_E: Tensor, rows: Tensor) -> Tensor:
    if _on_host(splits_E):
        return torch.tensor(_checked_ends(splits_E, rows.shape[0]), dtype=torch.int32, device=splits_E.device)
    if debugging() and has_values(splits_E):
        _check_splits(splits_E, rows)
    return offsets_from_splits(splits_E, rows.shape[0])


def _on_host(t: Tensor) -> bool:
    return t.device.type == "cpu" and not torch.compiler.is_compiling() and has_values(t)


def _infer_offsets(splits_E: SpecLike, rows: SpecLike) -> TensorSpec:
    if len(splits_E.shape) != 1 or not splits_E.shape[0]:
        raise InputError(f"splits: expected shape (experts,), got {tuple(splits_E.shape)}")
    if splits_E.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise InputError(f"splits: expected integers, rows per expert, got {splits_E.dtype}")
    return TensorSpec(tuple(splits_E.shape), torch.int32)


OFFSETS = Derived("offsets", source="splits", compute=_offsets, check=_check_splits, infer=_infer_offsets)
"""``offsets[e]``: the end of the rows of expert e; int32, at most the number of rows."""


def _check_indices(name: str, most: int, indices: Tensor, rows: Tensor) -> None:
    end = rows.shape[0] - 1 + most
    low, high = (t.item() for t in indices.aminmax()) if indices.numel() else (0, 0)
    if low < 0 or high > max(end, 0):
        wrong = low if low < 0 else high
        raise InputError(f"{name}: expected indices from 0 to {end}, for {rows.shape[0]} rows, got {wrong}")


def _checked_indices(name: str, most: int, indices: Tensor, rows: Tensor) -> Tensor:
    """Return row indices that are all in range. ``most`` is 1 if the index after the last row is a sentinel, else 0."""
    if _on_host(indices) or (debugging() and has_values(indices)):
        _check_indices(name, most, indices, rows)
    # clamping does not wait for a GPU: an index out of range becomes the sentinel, or the last row
    end = rows.shape[0] - 1 + most
    return torch.where(indices < 0, end, indices).clamp_(max=max(end, 0))


def _infer_indices(name: str, indices: SpecLike, rows: SpecLike) -> TensorSpec:
    if indices.dtype is not torch.int64:
        raise InputError(f"{name}: expected int64, as Dispatch provides it, got {indices.dtype}")
    return TensorSpec(tuple(indices.shape), indices.dtype)


def _index(name: str, most: int) -> Derived:
    compute, check = partial(_checked_indices, name, most), partial(_check_indices, name, most)
    return Derived(f"checked_{name}", name, compute, check, partial(_infer_indices, name))


def _nothing_to_check(splits_E: Tensor, rows: Tensor) -> None:
    """The offsets are checked."""


def _padded_offsets(splits_E: Tensor, rows: Tensor) -> Tensor:
    return padded_layout(offsets_from_splits(splits_E, rows.shape[0]), rows.shape[0]).ends_E


def _place_of_row(splits_E: Tensor, rows: Tensor) -> Tensor:
    return place_of_row(offsets_from_splits(splits_E, rows.shape[0]), rows.shape[0])


def _infer_places(splits_E: SpecLike, rows: SpecLike) -> TensorSpec:
    return TensorSpec((rows.shape[0],), torch.int64)


PACKED = (
    Derived("padded_offsets", "splits", _padded_offsets, _nothing_to_check, _infer_offsets),
    Derived("place_of_row", "splits", _place_of_row, _nothing_to_check, _infer_places),
)
"""Values of the packed layout (`fusedmoe.numerics.formats.packed`). Rules may read them wherever they may read
``offsets``.

``padded_offsets``: the end of each expert's padded rows, (E,) int32. ``place_of_row``: the packed row of each row, (R,)
int64; for rows without an expert, the number P of packed rows.
"""

CHECKED = {"row_of_slot": _index("row_of_slot", 1), "slot_of_row": _index("slot_of_row", 0)}
"""The checked form of each runtime input that indexes rows. Ops get this form if the caller gives the input."""

DERIVED = {derived.name: derived for derived in (OFFSETS, *CHECKED.values())}  # all derived values by name
