"""Autocast: a chain casts its arguments once, when it is called, and runs its ops without autocast."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fusedmoe.base.specs import TensorSpec

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


def cast_arguments(
    arguments: Sequence[Tensor | None], dtype: torch.dtype, casts: Sequence[bool]
) -> list[Tensor | None]:
    """Return the arguments of a chain in this dtype, except those of fp64. ``casts`` is whether each one is cast."""
    return [
        t.to(dtype) if cast and t is not None and is_cast(t.dtype) else t
        for t, cast in zip(arguments, casts, strict=True)
    ]


def cast_specs(
    specs: Sequence[TensorSpec | None], dtype: torch.dtype, casts: Sequence[bool]
) -> list[TensorSpec | None]:
    """Return the specs of the tensors that `cast_arguments` would return."""
    return [
        s._replace(dtype=dtype) if cast and s is not None and is_cast(s.dtype) else s
        for s, cast in zip(specs, casts, strict=True)
    ]


def casts_rows(x: Tensor) -> bool | None:
    """Return whether autocast changes the dtype of rows like x; None if it is off."""
    dtype = autocast_dtype(x.device)
    return None if dtype is None else x.dtype is not dtype and is_cast(x.dtype)


def is_cast(dtype: torch.dtype) -> bool:
    """Whether autocast casts tensors of this dtype."""
    return dtype.is_floating_point and dtype is not torch.float64
