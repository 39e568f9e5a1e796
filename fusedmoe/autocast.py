"""Autocast: a chain or a router casts its arguments once, when it is called, and runs its ops without autocast."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fusedmoe.ops.op import TensorSpec

_NOTHING = nullcontext()


@functools.cache
def _kind(device: torch.device) -> str:
    return device.type  # creates a new string in every call


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast uses on a device; None if autocast is off, and for the meta device."""
    kind = device.type if torch.compiler.is_compiling() else _kind(device)
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast is off."""
    if autocast_dtype(device) is None:
        return _NOTHING
    return torch.autocast(device.type, enabled=False)


def cast_arguments(arguments: Sequence[Tensor | None], dtype: torch.dtype, inputs: int) -> list[Tensor | None]:
    """Return the arguments of a chain with rows and parameters in this dtype, except those of fp64.

    Runtime inputs keep their dtypes; ``inputs`` of them follow the rows.
    """
    return [
        t if t is None or 0 < i <= inputs or not _is_cast(t.dtype) else t.to(dtype) for i, t in enumerate(arguments)
    ]


def cast_specs(specs: Sequence[TensorSpec | None], dtype: torch.dtype, inputs: int) -> list[TensorSpec | None]:
    """Return the specs of the tensors that `cast_arguments` would return."""
    return [
        s if s is None or 0 < i <= inputs or not _is_cast(s.dtype) else s._replace(dtype=dtype)
        for i, s in enumerate(specs)
    ]


def _is_cast(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype is not torch.float64
