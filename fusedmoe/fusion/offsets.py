"""The one glue step that a device may have a kernel for: the offsets that a chain derives from its splits."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import torch

from fusedmoe.builtin_rules.sm90.backend import OnSm90
from fusedmoe.environment import debugging
from fusedmoe.fusion.rule import Declined
from fusedmoe.kernels.sm90 import functions
from fusedmoe.ops.derived import OFFSETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from fusedmoe.fusion.plain import Plain

NAME = "sm90.offsets_from_splits"
"""What ``fm.disabled`` calls it."""


def with_kernels(
    derived: Iterable[Plain],
    device: torch.device,
    arch: int | None,
    disabled: tuple[str, ...],
    assume_installed: bool = False,
) -> tuple[Plain, ...]:
    """Return the steps that derive offsets, in one launch each where the device has the kernel."""
    if any(fnmatchcase(NAME, pattern) for pattern in disabled):
        return tuple(derived)
    try:
        OnSm90.available(device, arch)
        if not assume_installed:
            OnSm90.installed()
    except Declined:
        return tuple(derived)
    return tuple(
        replace(step, bind=partial(_bind, step.run), launches=1)
        if step.gives[0].rpartition(".")[2] == OFFSETS.name
        else step
        for step in derived
    )


def _bind(run: Callable[..., Tensor], splits_E: Tensor, rows: Tensor) -> Callable[..., Tensor]:
    """Return the kernel, for splits and rows like these, where it reads such splits; or ``run``."""
    if splits_E.dtype not in (torch.int32, torch.int64) or not splits_E.is_contiguous():
        return run
    kernel: Callable[..., Tensor] = functions.bind_offsets_from_splits(splits_E, rows.shape[0])
    return partial(run, kernel=kernel) if debugging() else kernel
