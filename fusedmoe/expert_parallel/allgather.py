"""The engine ``"allgather"``: every rank gets the tokens of all ranks, by the collectives of `torch.distributed`.

No rank waits for its device, since all shapes are static. NCCL and gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import distributed as dist

from fusedmoe.expert_parallel.engine import Engine, as_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class AllGather(Engine):
    """`gather` is an all-gather, `exchange` an all-to-all of equal parts."""

    name: ClassVar[str] = "allgather"

    def gather(self, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
        gathered = []
        for t in tensors:
            out = t.new_empty(self.ranks * rows, *t.shape[1:])
            if out.numel():
                self._all_gather(as_bytes(out), as_bytes(padded(t, rows)))
            gathered.append(out)
        return gathered

    def exchange(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        received = []
        for t in tensors:
            out = torch.empty_like(t)
            if out.numel():
                dist.all_to_all_single(as_bytes(out), as_bytes(t), group=self.group)
            received.append([*out.view(self.ranks, -1, *t.shape[1:])])
        return received

    def _all_gather(self, out: Tensor, t: Tensor) -> None:
        # torch 2.13 renames the function, and warns of the old name
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        collective(out, t, group=self.group)


def padded(t: Tensor, rows: int) -> Tensor:
    """Return a tensor (T, ...) with zero rows after its own: (rows, ...); the tensor itself if it has them all."""
    if t.shape[0] == rows:
        return t
    out = t.new_zeros(rows, *t.shape[1:])
    out[: t.shape[0]] = t
    return out
