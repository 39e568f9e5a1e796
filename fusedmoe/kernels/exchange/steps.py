"""`SortsTokens`: the order in which the warps of a CTA copy the rows of tokens of other ranks, step after step.

Each of W warps finds the steps of every W-th token of the other ranks: the n-th token of warp w has the number
``w + n W`` among those of the other ranks, beginning with the next one. The warps of a CTA sort their tokens by steps
into one list in shared memory, of which each then takes every `COPY_WARPS`-th token. So the warps of a CTA have equal
numbers of tokens of a step, or differ by one: a step is complete when the slowest warp has copied its share. The copies
of all steps are one stream: a warp does not wait for the last row of a step before it reads the next one's. A kernel
finds the step of a token in its ``find_steps``.

Axes: P ranks, N rows per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32

from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, inclusive_sum
from fusedmoe.kernels.exchange import copies
from fusedmoe.kernels.exchange.copies import VECTORS
from fusedmoe.kernels.exchange.layout import COPY_WARPS, LISTED

IN_FLIGHT = 5  # stages of a warp: fewer than of other copies, since the list needs memory too
AT_ONCE = 4  # tokens of a lane whose steps are found at once
STEP_BITS = 5
COPY_BARRIER = 1  # of the CTA: 0 is that of all of its warps
assert LISTED <= 1 << 15, "a list has numbers of 16 bits"
assert LISTED <= COPY_WARPS * LANES * VECTOR * VECTORS * IN_FLIGHT, "a lane keeps steps in its memory for rows"


def token_of(number: Any, rank: Int32, ranks: Int32, rows: Int32) -> Int32:
    """The token with a number among those of the other ranks, counted among those of all ranks."""
    token = (rank + 1) * rows + number
    return token - cutlass.select_(token >= ranks * rows, ranks * rows, Int32(0))


@cute.jit
def sync_copying_warps():
    """Wait for the copying warps of the CTA."""
    cute.arch.barrier(barrier_id=COPY_BARRIER, number_of_threads=COPY_WARPS * LANES)


@cute.jit
def steps_at(kept, place):
    """Where a lane keeps the steps of some tokens: half a vector, see `copies.Shared`."""
    of_vector = VECTOR // AT_ONCE
    return cute.local_tile(
        kept, (AT_ONCE, 1, 1), (place % of_vector, place // of_vector % VECTORS, place // of_vector // VECTORS)
    )[None, 0, 0]


@cute.jit
def listed_token(listed, place):
    """The number, among the tokens of other ranks, of a token that a warp takes from the list of its CTA."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    found = Int32(listed[place])
    warp = found & (COPY_WARPS - 1)
    return cta * COPY_WARPS + warp + (found - warp) * ctas  # W is COPY_WARPS * ctas


@dataclass(frozen=True)
class SortsTokens(WarpKernel):
    """A kernel whose CTAs sort their tokens by steps."""

    @cute.jit
    def sort(self, shared, others, given):
        """List a CTA's tokens that have a step, of ``others``, sorted by steps. Return, in lane s, the end of step s
        among the tokens of the list that this warp takes. The `COPY_WARPS` copying warps call this together.

        ``given``: more arguments of `find_steps`.
        """
        worker, workers = copies.worker()
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        stride = workers * (LANES * AT_ONCE)
        step, found = cute.make_rmem_tensor((AT_ONCE,), Int32), cute.make_rmem_tensor((AT_ONCE,), Int16)
        kept = cute.recast_tensor(shared.staged, Int16)  # a lane's steps, in its memory for rows
        count, place = Int32(0), Int32(0)  # lane s: of step s
        for first in cutlass.range(worker, others, stride, unroll=1):
            self.find_steps(step, first, workers, others, given)
            for i in cutlass.range_constexpr(AT_ONCE):
                count += Int32(cute.arch.popc(self.of_step(self.votes(step[i]), lane)))
            found.store(step.load().to(Int16))
            cute.autovec_copy(found, steps_at(kept, place))
            place += 1
        shared.counts[lane, warp] = count
        sync_copying_warps()
        begin, total = Int32(0), Int32(0)
        for w in cutlass.range_constexpr(COPY_WARPS):
            of_other = shared.counts[lane, w]
            begin += cutlass.select_(w < warp, of_other, Int32(0))
            total += of_other
        ends = inclusive_sum(total, lane)
        begin += ends - total
        number, place = lane, Int32(0)
        for _ in cutlass.range(worker, others, stride, unroll=1):
            cute.autovec_copy(steps_at(kept, place), found)
            step.store(found.load().to(Int32))
            for i in cutlass.range_constexpr(AT_ONCE):
                votes = self.votes(step[i])
                earlier = self.of_step(votes, step[i]) & ((Int32(1) << lane) - 1)
                at = cute.arch.shuffle_sync(begin, step[i] & (LANES - 1)) + Int32(cute.arch.popc(earlier))
                if step[i] >= 0:
                    shared.list[at] = (number * COPY_WARPS + warp).to(Int16)
                begin += Int32(cute.arch.popc(self.of_step(votes, lane)))
                number += LANES
            place += 1
        sync_copying_warps()
        return (ends - warp + COPY_WARPS - 1) // COPY_WARPS

    def votes(self, step):
        """The lanes with a step, and those whose step has each bit."""
        bits = [cute.arch.vote_ballot_sync(Boolean((step >> j) & 1 != 0)) for j in range(STEP_BITS)]
        return [cute.arch.vote_ballot_sync(step >= 0), *bits]

    def of_step(self, votes, step):
        """The lanes with this step, given their `votes`."""
        found, *bits = votes
        for j, lanes in enumerate(bits):
            found = found & cutlass.select_((step >> j) & 1 != 0, lanes, ~lanes)
        return found

    def find_steps(self, step, first, workers, others, given):
        """Find the steps of some tokens of a lane; -1 for a token that is not listed. The i-th token has the number
        ``first + (i * 32 + lane) * workers`` among ``others``.
        """
        raise NotImplementedError
