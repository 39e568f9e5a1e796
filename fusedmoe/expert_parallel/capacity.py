"""The number of rows of a rank's experts, and the slots that find no row.

Axes: P ranks, N tokens per rank, K chosen experts per token, E experts of all ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.base.errors import InputError
from fusedmoe.base.lasting import lasting

ROWS = 128  # R is a multiple, as the tiles of products are
LAG = 32  # calls after which a GPU's count is read: late enough that the host does not wait, the same on every rank
_SHIFT = 32  # bits of the rows in an entry of `_OnDevice.worst`


def rounded_up(rows: int) -> int:
    """Return the next number of rows that fills tiles."""
    return -(-rows // ROWS) * ROWS


@dataclass(frozen=True)
class RowLimit:
    """The number of rows of the experts of one rank, for the tokens of all ranks."""

    ranks: int  # P
    experts: int  # the experts of a rank, E / P
    # The rows of a rank as a multiple of N*K, those under even routing; None for the largest number that it can need.
    capacity: float | None
    batch_rows: int | None = None  # the most rows at a time; None for all

    def rows(self, tokens: int, chosen: int) -> int:
        """Return R for P*N tokens with K experts each.

        It is P*N*min(K, E/P), if no token chooses an expert twice, or a multiple of 128 that is at least
        ``capacity * N * K`` or ``batch_rows``, if that is less.
        """
        bound = tokens * min(chosen, self.experts)
        if self.batch_rows is not None:
            return torch.sym_min(bound, rounded_up(self.batch_rows))  # type: ignore[no-any-return]
        if self.capacity is None:
            return bound
        share = Fraction(repr(self.capacity)) / self.ranks  # the decimal number, so that 1.1 of 10 is 11
        rows = -(-(share.numerator * tokens * chosen) // share.denominator)
        return torch.sym_min(bound, rounded_up(rows))  # type: ignore[no-any-return]


class _Read(NamedTuple):
    """A copy of `_OnDevice.worst` for the host, and the event after which it is complete."""

    copied: torch.cuda.Event
    worst: Tensor


@dataclass
class _OnDevice:
    """Counts on one device, each (P,) int64."""

    dropped: Tensor  # slots without a row, by rank
    worst: Tensor  # excess * 2**32 + R of the call with the largest excess of rows over R since the last check
    reads: deque[_Read] = field(default_factory=deque)


class Overflow:
    """The slots that found no row, on each rank. All ranks count those of all, so they have the same counts.

    - ``raises``: whether a slot without a row is an error.
    - ``capacity``: for the error's text.
    - ``ranks``: P.
    """

    def __init__(self, raises: bool, capacity: float | None, ranks: int) -> None:
        self.raises, self.capacity, self.ranks = raises, capacity, ranks
        self._devices: dict[torch.device, _OnDevice] = {}

    def count(self, needed_P: Tensor, rows: int) -> None:
        """Count a call in which the ranks need these rows and have ``rows`` each.

        Raises `InputError`: an overflow is an error, and one was read. Every rank raises it in the same call: on a CPU
        in the call that overflows, on a GPU in the call `LAG` calls later.
        """
        here = self._devices.get(needed_P.device)
        if here is None:
            # not inference tensors: later calls, in another mode, change the counts in place
            here = lasting(lambda: _OnDevice(*needed_P.new_zeros(2, self.ranks)), needed_P.device)
            self._devices[needed_P.device] = here
        excess = (needed_P - rows).clamp_(min=0)
        here.dropped += excess
        if not self.raises:
            return
        torch.maximum(here.worst, excess.mul_(1 << _SHIFT).add_(rows), out=here.worst)
        if needed_P.is_cpu:
            self._raise_if_over(here, here.worst)
        elif not torch.cuda.is_current_stream_capturing():
            copy = torch.empty_like(here.worst, device="cpu", pin_memory=True)
            copy.copy_(here.worst, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            here.reads.append(_Read(copied, copy))
            if len(here.reads) > LAG:
                read = here.reads.popleft()
                read.copied.synchronize()
                self._raise_if_over(here, read.worst)

    def check(self) -> None:
        """Raise if an overflow is an error and a call since the last check had one; waits for the device."""
        for here in self._devices.values():
            self._raise_if_over(here, here.worst)

    def dropped(self) -> int:
        """Return the slots of all calls that found no row, of all ranks; waits for the device."""
        return sum(int(here.dropped.sum()) for here in self._devices.values())

    def _raise_if_over(self, here: _OnDevice, worst_P: Tensor) -> None:
        worst = worst_P.tolist()
        most = max(worst)
        if most < 1 << _SHIFT:
            return
        here.worst.zero_()
        here.reads.clear()
        excess, rows = most >> _SHIFT, most & ((1 << _SHIFT) - 1)
        raise InputError(
            f"ExpertParallel: capacity: expected at most {rows} rows on each rank with capacity={self.capacity}, got "
            f"{rows + excess} rows for the experts of rank {worst.index(most)}: {excess} of them were dropped; "
            + ("a token chose an expert twice" if self.capacity is None else "pass a greater one, or another overflow")
        )


def rows_of_ranks(index: Tensor, ranks: int, experts: int) -> Tensor:
    """Return the slots of each rank: (P,) int64, for ids of the experts of all ranks, ``experts`` on each.

    Other ids are sentinels.
    """
    index = index.to(torch.promote_types(index.dtype, torch.int32))  # a narrow type may hold no number of experts
    owner = torch.div(index.reshape(-1, 1), experts, rounding_mode="floor")
    return (owner == torch.arange(ranks, device=index.device, dtype=index.dtype)).sum(0)
