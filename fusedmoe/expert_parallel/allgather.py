"""The engine ``"allgather"``: every rank gets the tokens of all ranks, by the collectives of `torch.distributed`.

No rank waits for its device, since all shapes are static. NCCL and gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist

from fusedmoe.expert_parallel.engine import Engine, Pending, Wanted, as_bytes, nothing, writes_no_weight


class AllGather(Engine):
    """An all-gather, and an all-to-all of equal parts."""

    name: ClassVar[str] = "allgather"

    def start_gather(self, tensors: Sequence[Tensor], rows: int, wanted: Wanted | None = None) -> Pending:
        gathered = [t.new_empty(self.ranks * rows, *t.shape[1:]) for t in tensors]
        own = [out[self.rank * rows :][:rows] for out in gathered]
        for here, t in zip(own, tensors, strict=True):
            here[: t.shape[0]] = t
            here[t.shape[0] :] = 0
        # torch 2.13 renames the function, and warns of the old name
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return Pending(gathered, [*map(self._started, repeat(collective), gathered, own)], own)

    def start_exchange(self, tensors: Sequence[Tensor]) -> Pending:
        received = [torch.empty_like(t) for t in tensors]
        waits = [*map(self._started, repeat(dist.all_to_all_single), received, tensors)]
        return self._exchanged(tensors, received, waits)

    def _started(self, collective: Callable[..., Any], out: Tensor, t: Tensor) -> Callable[[], object]:
        """Start a collective; return the function that waits for it."""
        if not out.numel():
            return nothing
        with writes_no_weight(self.group, out.device):
            work = collective(as_bytes(out), as_bytes(t), group=self.group, async_op=True)
        return work.wait  # type: ignore[no-any-return]
