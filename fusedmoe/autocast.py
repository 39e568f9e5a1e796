"""Autocast, as chains and routers treat it: dtypes are settled where a call comes in, nothing inside is cast again."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


@functools.cache
def _kind(device: torch.device) -> str:
    return device.type  # makes a new text every time


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return what autocast computes in on a device; None where it is off, or knows no such device."""
    kind = device.type if torch.compiler.is_compiling() else _kind(device)
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast is off."""
    if autocast_dtype(device) is None:
        return _NOTHING
    return torch.autocast(device.type, enabled=False)
