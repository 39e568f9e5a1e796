"""The part of torch's symmetric memory that the engine ``"symmetric"`` uses: an alpha interface, tested on 2.11.

A symmetric buffer has the same size on every rank of a group. A kernel or a copy of one rank can address the buffers of
all ranks. Allocation and `rendezvous` are collectives, and impossible while a CUDA graph is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def why_not() -> str | None:
    """Return the reason why this process cannot use symmetric memory; None if it can."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "it needs NVIDIA GPUs, and torch sees none"
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401 (a torch without distributed lacks it)
    except ImportError as error:
        return f"torch has no symmetric memory: {error}"
    device = torch.cuda.current_device()
    others = [i for i in range(torch.cuda.device_count()) if i != device]
    apart = [i for i in others if not torch.cuda.can_device_access_peer(device, i)]
    if apart:
        return f"device {device} cannot access the memory of device {apart[0]}"
    return None


class SymmetricBuffer:
    """Memory of the same size on every rank, zeros at first, which every rank can address.

    - ``nbytes``: bytes on each rank: the same number on every rank.
    - ``group``, ``device``: the ranks, and the device of this one.
    """

    def __init__(self, nbytes: int, group: ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory  # imported here: CPU builds may lack it

        self.nbytes = nbytes
        self._memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device).zero_()
        self._handle = symmetric_memory.rendezvous(self._memory, group)
        torch.cuda.synchronize(device)
        dist.all_gather_object([None] * group.size(), None, group)  # every rank's memory has its zeros
        self._views: dict[tuple[object, ...], Tensor] = {}

    def of_rank(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the memory of a rank from a byte on, as a tensor. The byte is a multiple of 16."""
        key = rank, offset, tuple(shape), dtype
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 1024:
                self._views.clear()
            start = offset // dtype.itemsize
            with torch.inference_mode(False):  # a later call may train
                view = self._views[key] = self._handle.get_buffer(rank, (*shape,), dtype, start)
        return view
