"""Tensors that are kept longer than the call in which they are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
NO_ROW = 2**31 - 1  # of a slot without a row: at least any R

_FAKE = torch._C._TorchDispatchModeKey.FAKE


def lasting(make: Callable[[], _T], device: torch.device) -> _T:
    """Return the tensors that ``make`` allocates and fills on a device, in memory that belongs to no CUDA graph.

    With ``torch.compile(mode="reduce-overhead")``, torch runs a graph once before it captures the graph. In that run,
    the memory pool of the graph gets all allocations of the thread, and torch raises an error if a tensor that is not
    a result of the graph stays alive. So ``make`` runs in another thread, and the host waits until the tensors are
    filled, since other streams may read them.

    While a CUDA graph is being captured, the graph owns the memory, and fills it only in a replay. In a
    `FakeTensorMode`, the tensors are fake.
    """
    if torch._C._get_dispatch_mode(_FAKE) is not None:
        return make()
    return _made(make, device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device, which this machine need not have, is being captured."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """Return the address of a GPU's current stream. `torch.cuda.current_stream` makes an object, which takes longer."""
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


def external_stream(device: torch.device, address: int) -> torch.cuda.Stream:
    """Return the stream of an address that `current_stream` has returned."""
    return torch.cuda.ExternalStream(address, device)


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # not in a CPU build


@functools.cache
def unread(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor for an argument that a kernel neither reads nor writes. All callers share it."""
    return _made(lambda: torch.empty(shape, dtype=dtype, device=device), device)


_first_slots: dict[tuple[torch.device, int, int], Tensor] = {}


def row_of_first_slot(rows: int, chosen: int, device: torch.device) -> Tensor:
    """Return the rows of slots (R, K) int64, of which the first one of row r has row r, and the others have none.

    Nothing may change them. They are a part of a table that exists as long as the process, since a CUDA graph may have
    recorded its address. Tables have powers of two of rows: together, they are at most twice as large as the largest.
    """
    size = 1 << max(rows - 1, 0).bit_length()
    table = _first_slots.get((device, chosen, size))
    if table is None:

        def made() -> Tensor:
            table = torch.full((size, chosen), NO_ROW, device=device)
            table[:, 0] = torch.arange(size, device=device)
            return table

        table = lasting(made, device)
        if not is_capturing(device):  # a graph fills it only when it is replayed
            _first_slots[device, chosen, size] = table
    return table[:rows]


def _made(make: Callable[[], _T], device: torch.device) -> _T:
    if is_capturing(device):
        with torch.inference_mode(False):
            return make()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def filled() -> _T:
        if stream is None:
            return make()
        with torch.cuda.stream(stream):  # so that work of the stream is done before freed memory has new contents
            made = make()
        stream.record_event().synchronize()
        return made

    with ThreadPoolExecutor(1) as other:
        try:
            result = other.submit(filled)
        except RuntimeError:  # the interpreter is shutting down
            return filled()
        return result.result()
