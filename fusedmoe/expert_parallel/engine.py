"""The interface of the engines, which move rows between the ranks of a group.

Axes: P ranks, N rows per rank (the same number on every rank), T rows of this rank (at most N), H columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup


class Engine:
    """Two exchanges of rows with static shapes. Each is a collective: every rank calls it, in the same order.

    Attributes
    ----------
    name : str
        The engine's name, as `ExpertParallel` takes it.
    """

    name: ClassVar[str] = ""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.ranks = group.size()

    def gather(self, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Return the rows of all ranks, in rank order: (P*N, ...) for each tensor (T, ...).

        Parameters
        ----------
        tensors
            (T, ...) each, contiguous, on one device.
        rows
            N. The rows of a rank after its own T have any values.
        """
        raise NotImplementedError

    def exchange(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the rows that each rank has for this one, P times (N, ...), from (P*N, ...) with N rows for each rank.

        The results may be views of the arguments.
        """
        raise NotImplementedError

    def buffer_bytes(self) -> int:
        """Return the bytes of the buffers that outlive a call."""
        return 0


def as_bytes(t: Tensor) -> Tensor:
    """Return a contiguous tensor (N, ...) as bytes (N, B), which every backend can send."""
    width = t.numel() // t.shape[0] * t.element_size() if t.shape[0] else 0
    return t.reshape(-1).view(torch.uint8).view(t.shape[0], width)
