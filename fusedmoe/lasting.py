"""Tensors that are kept longer than the call in which they are made."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


def lasting(make: Callable[[], _T], device: torch.device) -> _T:
    """Return the tensors that ``make`` allocates and fills on a device, in memory that belongs to no CUDA graph.

    With ``torch.compile(mode="reduce-overhead")``, torch runs a graph once before it captures the graph. In that run,
    the memory pool of the graph gets all allocations of the thread, and torch raises an error if a tensor that is not
    a result of the graph stays alive. So ``make`` runs in another thread, and the host waits until the tensors are
    filled, since other streams may read them.

    While a CUDA graph is being captured, the graph owns the memory, and fills it only in a replay.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False):
            return make()
    with ThreadPoolExecutor(1) as other:
        return other.submit(_filled, make, device).result()


def _filled(make: Callable[[], _T], device: torch.device) -> _T:
    made = make()
    if device.type == "cuda":
        torch.cuda.current_stream(device).record_event().synchronize()
    return made


@functools.cache
def unread(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor for an argument that a kernel neither reads nor writes. All callers share it."""
    return lasting(lambda: torch.empty(shape, dtype=dtype, device=device), device)
