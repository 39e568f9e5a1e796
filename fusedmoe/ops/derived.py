"""Values that a chain derives from a runtime input once and hands to every op that names them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from fusedmoe.environment import debugging
from fusedmoe.errors import InputError
from fusedmoe.kernels.torch.rows import offsets_from_splits
from fusedmoe.ops.op import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fusedmoe.ops.op import SpecLike


@dataclass(frozen=True)
class Derived:
    """A value computed from the runtime input ``source`` and the rows of the first op that wants it."""

    name: str
    source: str
    compute: Callable[..., Tensor]  # (source, rows, kernel=None): a kernel for such rows, of the source alone
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


def _offsets(splits_E: Tensor, rows: Tensor, kernel: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    if kernel is None and splits_E.device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.tensor(_checked_ends(splits_E, rows.shape[0]), dtype=torch.int32)
    if debugging():
        _checked_ends(splits_E, rows.shape[0])
    return offsets_from_splits(splits_E, rows.shape[0]) if kernel is None else kernel(splits_E)


def _infer_offsets(splits_E: SpecLike, rows: SpecLike) -> TensorSpec:
    if len(splits_E.shape) != 1 or not splits_E.shape[0]:
        raise InputError(f"splits: expected shape (experts,), got {tuple(splits_E.shape)}")
    if splits_E.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise InputError(f"splits: expected integers, rows an expert, got {splits_E.dtype}")
    return TensorSpec(tuple(splits_E.shape), torch.int32)


OFFSETS = Derived("offsets", source="splits", compute=_offsets, infer=_infer_offsets)
"""``offsets[e]``: where the rows of expert e end; int32, clamped to the rows that there are."""

DERIVED = {OFFSETS.name: OFFSETS}
