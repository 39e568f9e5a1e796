"""The kernel that divides the rows of each expert at the tiles of some tokens, for products that begin with some rows.

`RowRanges`: the rows of an expert are in token order. Those of the tokens from ``first`` to before ``end`` are its
*own* rows. Its row tiles become three ranges: the tiles with own rows only, those before them, and those after them. A
tile with own rows and others is in one of the latter two. The rows of no expert, the tail, are one more expert in one
of the ranges.

Only some experts have own rows, the first ``divided``. The tiles of the others are all in the range that has the tail:
a product that takes one range after the other reads their weights once.

A warp has one expert. It searches the first own row, and the end of the own rows, with 32 probes at a time.

Axes: R rows sorted by expert, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fusedmoe.kernels.device.warps import LANES, WarpKernel, fake_vector
from fusedmoe.kernels.sm90.tiles.config import RANGES

WARPS = 4  # per CTA
OWN, BEFORE, AFTER = range(RANGES)


@dataclass(frozen=True)
class RowRanges(WarpKernel):
    """Ranges of the experts' rows, in whole tiles."""

    tile: int = 128  # rows

    @property
    def symbol(self) -> str:
        return f"sm90_row_ranges_{self.tile}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of offsets (E,), tokens of rows (R,), ranges (3, 2, E + 1) and one more
        element as one vector, all int32, ``first``, ``end``, ``divided``, and the range that gets the tail.
        """
        rows, experts, entries = cute.sym_int(), cute.sym_int(), cute.sym_int()
        vectors = [fake_vector("int32", size) for size in (experts, rows, entries)]
        return self.compiled_for(*vectors, *[Int32(0)] * 4)

    @cute.jit
    def __call__(self, offsets, tokens, ranges, first, end, divided, tail, stream):
        grid = (cute.ceil_div(cute.size(offsets) + 1, WARPS), 1, 1)
        self.kernel(offsets, tokens, ranges, first, end, divided, tail).launch(
            grid=grid, block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, offsets, tokens, ranges, first, end, divided, tail):
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        expert = block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        experts = cute.size(offsets)
        start, stop = Int32(0), Int32(0)
        if expert <= experts:
            if expert > 0:
                start = offsets[expert - 1]
            stop = cute.size(tokens)
            if expert < experts:
                stop = offsets[expert]
        own, own_end = start, start
        if expert < cutlass.min(divided, experts):
            own = self.rows_before(tokens, start, stop, first, lane)
            own_end = self.rows_before(tokens, start, stop, end, lane)
            own = cutlass.min(start + (own - start + self.tile - 1) // self.tile * self.tile, stop)
            if own_end < stop:
                own_end = start + (own_end - start) // self.tile * self.tile
            own_end = cutlass.max(own, own_end)
        elif tail == OWN:
            own_end = stop
        elif tail == BEFORE:
            own, own_end = stop, stop
        if expert <= experts and lane == 0:
            size = experts + 1
            ranges[2 * OWN * size + expert] = own
            ranges[(2 * OWN + 1) * size + expert] = own_end
            ranges[2 * BEFORE * size + expert] = start
            ranges[(2 * BEFORE + 1) * size + expert] = own
            ranges[2 * AFTER * size + expert] = own_end
            ranges[(2 * AFTER + 1) * size + expert] = stop

    @cute.jit
    def rows_before(self, tokens, start, stop, bound, lane):
        """The first row of an expert whose token is not before ``bound``; ``stop`` if there is none."""
        low, high = start, stop
        while low < high:
            step = (high - low + LANES - 1) // LANES
            probe = low + (lane + 1) * step - 1
            before = Boolean(False)
            if probe < high:
                before = Boolean(tokens[probe] < bound)
            blocks = cute.arch.popc(cute.arch.vote_ballot_sync(before))
            low += blocks * step
            # the next block has the row, unless single rows were probed
            high = low if step == 1 else cutlass.min(high, low + step - 1)
        return low
