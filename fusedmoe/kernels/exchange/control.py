"""The words by which the ranks of an exchange tell each other how far they are, and the functions that use them.

Every rank has a *region* of memory that all ranks can address. It begins with `CONTROL_WORDS` words of control, and the
data of the current exchange follow. Exchanges have numbers, which are the same on every rank:

- ``READY + q`` in the region of rank r: the last exchange for which rank q has written its data for rank r.
- ``DONE + q``: the last exchange that rank q has completed. It reads no data of others in it any more, and has used all
  data that were written for it.
- ``NUMBER``: the last exchange that this rank has completed. Its kernels read the number of the current exchange here,
  so that a replayed CUDA graph has new numbers. The last kernel of an exchange writes it.
- ``TICKETS + i``: the CTAs of a kernel that have come to its end. The last one leaves it zero.
- ``REPORT``: the address of two words in the host's memory, or 0. A kernel that has waited too long writes the rank
  that does not come, plus 1, and the number of the exchange there: no device memory can be read after its error.

A rank writes data of an exchange only after every rank has completed the one before it. So one region serves all
exchanges, and no rank waits for another one that is slower by less than an exchange.

A word is written with release semantics at system scope, after the data, and read with acquire semantics. Numbers wrap:
their differences are compared with zero.

Axes: P ranks.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from fusedmoe.kernels.device.warps import trap
from fusedmoe.kernels.exchange.layout import DONE, MOST_RANKS, NUMBER, REPORT, TICKETS


def word_of(region: Int64, number: Any) -> cute.Pointer:
    """The address of a word of a rank's control."""
    return cute.make_ptr(Int32, region + Int64(4) * Int64(number), cute.AddressSpace.gmem, assumed_align=4)


@cute.jit
def current(control: cute.Tensor) -> Int32:
    """The number of the current exchange."""
    return control[NUMBER] + 1


@cute.jit
def give_up(control: cute.Tensor, rank: Int32, exchange: Int32) -> None:
    """Report a rank that does not come, if there is an address for that, and end."""
    word = cute.make_ptr(Int64, (control.iterator + REPORT).toint(), cute.AddressSpace.gmem, assumed_align=8)
    address = word.load()
    if address != 0:
        report = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
        cute.arch.store(report + 1, exchange, sem="relaxed", scope="sys")
        cute.arch.store(report, rank + 1, sem="release", scope="sys")
        cute.arch.fence_acq_rel_sys()
    trap()


@cute.jit
def wait_for(control: cute.Tensor, number: Int32, exchange: Int32, patience: Int64) -> None:
    """Wait until a word of this rank's control has the number of an exchange, or a later one.

    After ``patience`` nanoseconds, the kernel reports the rank that does not come, and ends with an error.
    """
    word = control.iterator + number
    seen = cute.arch.load(word, Int32, sem="acquire", scope="sys")
    if seen - exchange < 0:
        begin = cute.arch.globaltimer()
        while seen - exchange < 0:
            seen = cute.arch.load(word, Int32, sem="acquire", scope="sys")
            if cute.arch.globaltimer() - begin > patience:
                give_up(control, number % MOST_RANKS, exchange)


@cute.jit
def wait_for_count(
    control: cute.Tensor, counter: cute.Pointer, count: Int32, rank: Int32, exchange: Int32, patience: Int64
) -> None:
    """Wait until a counter of this GPU has a number. One thread calls this.

    After ``patience`` nanoseconds, the kernel reports this ``rank``, and ends with an error.
    """
    seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    if seen < count:  # the timer is not read before: ptxas 13 then loads from an address that is not computed yet
        begin = cute.arch.globaltimer()
        while seen < count:
            seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            if cute.arch.globaltimer() - begin > patience:
                give_up(control, rank, exchange)


@cute.jit
def wait_for_ranks(
    control: cute.Tensor, first: cutlass.Constexpr[int], exchange: Int32, ranks: Int32, patience: Int64
) -> None:
    """Let a warp wait until each rank's word has the number of an exchange, or a later one."""
    lane = cute.arch.lane_idx()
    if lane < ranks:
        wait_for(control, first + lane, exchange, patience)
    cute.arch.sync_warp()


@cute.jit
def tell(peers: cute.Tensor, number: Int32, exchange: Int32) -> None:
    """Write the number of an exchange to a word of every rank's control: a warp calls this, after its fence."""
    lane = cute.arch.lane_idx()
    if lane < cute.size(peers):
        cute.arch.store(word_of(peers[lane], number), exchange, sem="release", scope="sys")


@cute.jit
def is_last(control: cute.Tensor, ticket: Int32, ctas: Int32) -> Boolean:
    """Whether a CTA is the last one of a kernel that comes here. All threads of the CTA call this together.

    Then the writes of all CTAs before their calls happen before the later writes of this CTA's first warp, which alone
    gets a true result.
    """
    cute.arch.sync_threads()
    last = Int32(0)
    if cute.arch.warp_idx() == 0:
        if cute.arch.lane_idx() == 0:
            cute.arch.fence_acq_rel_sys()
            word = control.iterator + (TICKETS + ticket)
            if cute.arch.atomic_add(word, Int32(1), sem="acq_rel", scope="gpu") == ctas - 1:
                last = Int32(1)
                control[TICKETS + ticket] = 0
            cute.arch.fence_acq_rel_sys()
        last = cute.arch.shuffle_sync(last, 0)
    return Boolean(last != 0)


@cute.jit
def complete(control: cute.Tensor, peers: cute.Tensor, rank: Int32, exchange: Int32) -> None:
    """Complete an exchange: the first warp of the last CTA calls this."""
    if cute.arch.lane_idx() == 0:
        control[NUMBER] = exchange
    tell(peers, DONE + rank, exchange)
