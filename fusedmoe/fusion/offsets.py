"""The one glue step that a device may have a kernel for: the offsets that a chain derives from its splits."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import torch

from fusedmoe.fusion.rule import Declined
from fusedmoe.fusion.rules.hopper import functions, require_hopper
from fusedmoe.kernels.torch.rows import offsets_from_splits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fusedmoe.fusion.graph import Plain

NAME = "sm90.offsets_from_splits"
"""What ``fm.disabled`` calls it."""


def with_kernels(
    derived: Iterable[Plain], device: torch.device, arch: int | None, disabled: tuple[str, ...]
) -> tuple[Plain, ...]:
    """Return the steps that derive offsets, in one launch each where the device has the kernel."""
    if any(fnmatchcase(NAME, pattern) for pattern in disabled):
        return tuple(derived)
    try:
        require_hopper(device, arch)
    except Declined:
        return tuple(derived)
    return tuple(replace(step, run=partial(step.run, kernel=_in_one_launch), launches=1) for step in derived)


def _in_one_launch(splits_E: torch.Tensor, num_rows: int) -> torch.Tensor:
    if splits_E.dtype not in (torch.int32, torch.int64) or not splits_E.is_contiguous():
        return offsets_from_splits(splits_E, num_rows)
    return functions().offsets_from_splits(splits_E, num_rows)  # type: ignore[no-any-return]
