"""`SortsTokens`: the order in which a warp copies the rows of tokens of other ranks, step after step.

A warp has every W-th token of the other ranks, of W warps. It first sorts its tokens by steps, in shared memory, by
their numbers: the n-th token of warp w has the number ``w + n W`` among those of the other ranks, beginning with the
next one. Then the copies of all steps are one stream: a warp does not wait for the last row of a step before it reads
the next one's. A kernel finds the step of a token in its ``find_steps``.

Axes: P ranks, N rows per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32

from fusedmoe.kernels.device.warps import LANES, WarpKernel, inclusive_sum
from fusedmoe.kernels.exchange import copies

IN_FLIGHT = 5  # stages of a warp: fewer than of other copies, since its list needs memory too
AT_ONCE = 4  # tokens of a lane whose steps are found at once
STEP_BITS = 5


def token_of(number: Any, rank: Int32, ranks: Int32, rows: Int32) -> Int32:
    """The token with a number among those of the other ranks, counted among those of all ranks."""
    token = (rank + 1) * rows + number
    return token - cutlass.select_(token >= ranks * rows, ranks * rows, Int32(0))


@dataclass(frozen=True)
class SortsTokens(WarpKernel):
    """A kernel whose warps sort their tokens by steps."""

    @cute.jit
    def sort(self, listed, others, given):
        """List a warp's tokens that have a step, of ``others``, sorted by steps. Return, in lane s, the end of step s.
        ``given``: more arguments of `find_steps`.
        """
        worker, workers = copies.worker()
        lane = cute.arch.lane_idx()
        step = cute.make_rmem_tensor((AT_ONCE,), Int32)
        count = Int32(0)  # lane s: of step s
        for first in cutlass.range(worker, others, workers * LANES * AT_ONCE, unroll=1):
            self.find_steps(step, first, workers, others, given)
            for i in cutlass.range_constexpr(AT_ONCE):
                count += Int32(cute.arch.popc(self.of_step(self.votes(step[i]), lane)))
        ends = inclusive_sum(count, lane)
        begin, number = ends - count, lane
        for first in cutlass.range(worker, others, workers * LANES * AT_ONCE, unroll=1):
            self.find_steps(step, first, workers, others, given)
            for i in cutlass.range_constexpr(AT_ONCE):
                votes = self.votes(step[i])
                earlier = self.of_step(votes, step[i]) & ((Int32(1) << lane) - 1)
                place = cute.arch.shuffle_sync(begin, step[i] & (LANES - 1)) + Int32(cute.arch.popc(earlier))
                if step[i] >= 0:
                    listed[place] = number.to(Int16)
                begin += Int32(cute.arch.popc(self.of_step(votes, lane)))
                number += LANES
        cute.arch.sync_warp()
        return ends

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
