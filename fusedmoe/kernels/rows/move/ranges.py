"""The kernel that divides rows into blocks that a product takes one after the other.

`RowRanges` by experts: block s has the rows of ``of_block`` experts, from ``s * of_block`` on. The last block has the
rows of no expert too. If own rows come first, block 0 has the tiles whose rows are all of this rank's tokens. Each
``of_block`` experts have two more blocks: one with the tiles before those, which may end with own rows, and one with
the tiles after them, which may begin with own rows. Without a whole own tile, the two meet where the own rows begin.
In halves, the first half of the blocks has the tiles with a token of the half of the tokens that has no own ones, and
the second half of the blocks has the others: so the rows of the other half are all there before the own half's.

`RowRanges` by the ranks of the tokens, for products that begin with some rows of each expert: P ranks have N tokens
each, rank q the tokens from q N to before (q + 1) N. The rows of an expert are in
token order, and so in the order of their ranks. The *step* of rank q is ``(q - rank) % P``: 0 for the own rank, 1 for
the next one. A row tile is in the *class* of the largest step among the ranks of its rows: its rows are there when
those of all ranks up to this step are.

In row order, steps increase up to the own rank, where they begin at 0, and then increase again. So the tiles of a class
follow each other. With ``b(q)`` the first row of a token from q N on, ``count`` the number of the expert's rows, both
from its first row, and t the rows of a tile, the class of rank q has the tiles from T(q) to before T(q + 1):

- ``T(0) = 0``, ``T(P) = ceil(count / t)``;
- for q up to the own rank: ``T(q) = floor(b(q) / t)``, the first tile with a row of the ranks from q to before the own
  one; ``ceil(b(rank) / t)`` if they have no row;
- for q after it: ``T(q) = floor(b(q) / t)``, the first tile with a row of the ranks from q on, or ``ceil(count / t)``
  if they have no row, but at least ``T(rank)``.

Only the first ``divided`` experts are divided. All rows of the others, and the rows of no expert, the *tail*, are in
the class of the last step: a product that takes one class after the other reads the weights of such an expert once.
Without ``zero_tail``, no class has the tail, and no product writes it.

A block of the result has the ranges of one class, and two more elements: a *counter*, zero at first, to which a product
adds when results are in memory, and a *word*, which tells a product that rows have arrived. The blocks are in the order
of the steps, in which rows arrive, or in the reverse order, in which they *leave*: a rank's rows are in the blocks up
to its own, in either order.

After the blocks by ranks, the vector may have E + 1 more elements, the *paddings*. Element e is the number of padding
rows before the rows of expert e, if each expert's rows begin at a multiple of 128. Results by columns need them.

A warp has one expert, and its lane q searches b(q): there are at most 32 ranks.

Axes: R rows sorted by expert, E experts, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fusedmoe.kernels.device.warps import LANES, WarpKernel, fake_vector, inclusive_sum
from fusedmoe.kernels.sm90.tiles.config import SCALE_BLOCK

WARPS = 4  # per CTA


@dataclass(frozen=True)
class RowRanges(WarpKernel):
    """Ranges of the experts' rows, in whole tiles, one for each class."""

    tile: int = 128  # rows

    @property
    def symbol(self) -> str:
        return f"sm90_row_ranges_{self.tile}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of offsets (E,), tokens of rows (R,), and P blocks of 2 (E + 1) + 2
        elements as one vector, with or without paddings, all int32, ``rank``, P, N, ``divided``, the word of each step
        but 0, and whether the blocks are in the order in which rows leave, ``zero_tail``, and 0. By experts: ``rank``,
        the number of blocks, N, whether own rows come first, the word of each block (then that of the first of two
        blocks), in halves the first token of the second half, else 0, ``zero_tail`` and ``of_block``.
        """
        rows, experts, entries = cute.sym_int(), cute.sym_int(), cute.sym_int()
        vectors = [fake_vector("int32", size) for size in (experts, rows, entries)]
        return self.compiled_for(*vectors, *[Int32(0)] * 8)

    @cute.jit
    def __call__(self, offsets, tokens, blocks, rank, ranks, each, divided, word, leaving, zero_tail, of_block, stream):
        grid = (cute.ceil_div(cute.size(offsets) + 1, WARPS), 1, 1)
        self.kernel(offsets, tokens, blocks, rank, ranks, each, divided, word, leaving, zero_tail, of_block).launch(
            grid=grid, block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, offsets, tokens, blocks, rank, ranks, each, divided, word, leaving, zero_tail, of_block):
        lane = cute.arch.lane_idx()
        cta, _, _ = cute.arch.block_idx()
        expert = cta * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        experts = cute.size(offsets)
        if expert <= experts:
            start, stop = Int32(0), cute.size(tokens)
            if expert > 0:
                start = offsets[expert - 1]
            if expert < experts:
                stop = offsets[expert]
            elif zero_tail == 0:
                stop = start
            place, first, end = lane, start, start
            waits = Boolean(True)  # whether the block has a word to wait for
            if of_block > 0:
                # ``ranks`` blocks, in halves if ``leaving`` is not 0; own rows come first if ``divided`` is not 0
                if expert == experts:
                    if lane == ranks - 1:
                        end = stop
                elif leaving != 0:
                    own_is_low = Boolean(rank * each < leaving)
                    first, end = self.in_halves(
                        tokens, start, stop, leaving, own_is_low, expert // of_block, ranks // 2, lane
                    )  # fmt: skip
                elif divided == 0:
                    if lane == expert // of_block:
                        end = stop
                else:
                    first, end = self.own_first(tokens, start, stop, rank * each, each, expert // of_block, lane)
                waits = Boolean((divided == 0) | (lane % 2 == 1))
            else:
                step = (lane + ranks - rank) % ranks
                if expert < cutlass.min(divided, experts):
                    first, end = self.of_class(tokens, start, stop, rank, ranks, each, lane)
                elif step == ranks - 1:
                    end = stop
                place, waits = step, step > 0
                if leaving != 0:
                    place = ranks - 1 - step
            if lane < ranks:
                block = place * (2 * (experts + 1) + 2)
                blocks[block + expert] = first
                blocks[block + experts + 1 + expert] = end
                if expert == experts:
                    blocks[block + 2 * (experts + 1)] = 0
                    blocks[block + 2 * (experts + 1) + 1] = cutlass.select_(waits, word, Int32(0))
            paddings = ranks * (2 * (experts + 1) + 2)
            if paddings < cute.size(blocks):
                padding = self.padding_before(offsets, expert, lane)
                if lane == 0:
                    blocks[paddings + expert] = padding

    @cute.jit
    def padding_before(self, offsets, expert, lane):
        """The rows with which the experts before this one are padded."""
        padding = Int32(0)
        for chunk in cutlass.range(0, expert, LANES, unroll=1):
            count = Int32(0)
            if chunk + lane < expert:
                count = offsets[chunk + lane]
                if chunk + lane > 0:
                    count -= offsets[chunk + lane - 1]
            added = (SCALE_BLOCK - count % SCALE_BLOCK) % SCALE_BLOCK
            padding += cute.arch.shuffle_sync(inclusive_sum(added, lane), LANES - 1)
        return padding

    @cute.jit
    def own_first(self, tokens, start, stop, token, each, step, lane):
        """The first row and the end of an expert's tiles in a block, by experts. Own rows, of ``each`` tokens from
        ``token`` on, come first.
        """
        count = stop - start
        bound = self.rows_before(tokens, start, stop, token + lane % 2 * each) - start
        own, after = cute.arch.shuffle_sync(bound, 0), cute.arch.shuffle_sync(bound, 1)
        low = cutlass.min(cute.ceil_div(own, self.tile) * self.tile, count)
        high = count
        if after < count:
            high = cutlass.max(after // self.tile * self.tile, low)
        first, end = Int32(0), Int32(0)
        if lane == 0:
            first, end = low, high
        elif lane == 2 * step + 1:
            end = low
        elif lane == 2 * step + 2:
            first, end = high, count
        return start + first, start + end

    @cute.jit
    def in_halves(self, tokens, start, stop, token, own_is_low, step, steps, lane):
        """The first row and the end of an expert's tiles in a block, by experts and halves. The second half of the
        tokens begins with ``token``; the half without own rows comes first, with a tile that has rows of both.
        """
        count = stop - start
        bound = self.rows_before(tokens, start, stop, token) - start
        border = cutlass.min(cute.ceil_div(bound, self.tile) * self.tile, count)
        if own_is_low and bound < count:
            border = bound // self.tile * self.tile
        place = step + cutlass.select_(own_is_low, steps, Int32(0))  # of the first half of the tokens
        first, end = Int32(0), Int32(0)
        if lane == place:
            end = border
        elif lane == 2 * step + steps - place:
            first, end = border, count
        return start + first, start + end

    @cute.jit
    def of_class(self, tokens, start, stop, rank, ranks, each, lane):
        """The first row and the end of a divided expert's tiles in the class of rank ``lane``, see the module's
        docstring.
        """
        count = stop - start
        tiles = cute.ceil_div(count, self.tile)
        bound = self.rows_before(tokens, start, stop, lane * each) - start
        own = cute.arch.shuffle_sync(bound, rank)
        tile = bound // self.tile
        if lane <= rank:
            if bound == own:
                tile = cute.ceil_div(own, self.tile)
        else:
            if bound == count:
                tile = tiles
            tile = cutlass.max(tile, cute.ceil_div(own, self.tile))
        next_tile = cute.arch.shuffle_sync(tile, lane + 1)
        if lane >= ranks - 1:
            next_tile = tiles
        first, end = (cutlass.min(start + t * self.tile, stop) for t in (tile, next_tile))
        return first, end

    @cute.jit
    def rows_before(self, tokens, start, stop, bound):
        """The first row of an expert whose token is not before ``bound``; ``stop`` if there is none."""
        low, high = start, stop
        while low < high:
            middle = (low + high) // 2
            if tokens[middle] < bound:
                low = middle + 1
            else:
                high = middle
        return low
