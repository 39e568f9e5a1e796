"""`PushSums`: the begin of a return, beside the product that computes the rows. A few SMs sum the rows of each token of
other ranks, and store the sums in the memory of the token's rank.

``part[r][t] = sum over k of rows[row of slot (r * N + t, k)]``, as `SumSlots` sums, is stored as row ``this rank * N +
t`` of the parts in the region of rank r. It begins with the rank before this one, which a gather reads last: so at any
time every rank writes to another one's memory.

The launch before it is the product, which leaves these SMs free. It computes the rows in blocks of row tiles, in the
same order (rows/move/ranges.py). It counts the tiles of each block whose results are in memory (sm90/gemm/ragged_m.py).
This kernel waits for all tiles of a block, and of those before it, before it sums the rows of its rank. It begins when
all CTAs of the product have begun. So it waits only for a kernel that has its SMs. Without free SMs, it begins later.

The launches before the product have ended, so everything except the rows and the counters is there. This kernel ends
after the product, and lets no other one begin before that: later launches see the results of both.

Axes: P ranks, N rows per rank, K slots per token, R rows, H columns, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fusedmoe.kernels.device.warps import LANES, VECTOR, fake_matrix, fake_vector
from fusedmoe.kernels.exchange.control import current, is_last, wait_for_count, wait_for_ranks, word_of
from fusedmoe.kernels.exchange.layout import DONE, READY
from fusedmoe.kernels.rows.move.sum_on_few_sms import CTAS, WARPS, SumOnFewSms

TICKET = 2  # and those after it: one per rank
TILE_COUNT = 2  # that the product adds for a tile


@dataclass(frozen=True)
class PushSums(SumOnFewSms):
    """Sums that are stored in the memory of other ranks, as soon as their rows are there."""

    beside: ClassVar[bool] = True  # it begins while the launch before it runs

    @property
    def symbol(self) -> str:
        return f"{self.family}_push_sums_by_{self.slots}_{self.dtype}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (R, H), rows of slots (P*N*K,) int64, P blocks of 2 (E + 1) + 2
        elements of int32 as one vector, in the order in which rows leave, regions of the ranks (P,) int64, control
        (`CONTROL_WORDS`,) int32, this rank, N, K, rows of a tile of the product, its column tiles, first byte of the
        parts in a region, the time-out in nanoseconds, and CTAs, an even number.
        """
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), cute.sym_int(divisibility=VECTOR)),
            fake_vector("int64", cute.sym_int()), fake_vector("int32", cute.sym_int()),
            fake_vector("int64", cute.sym_int()), fake_vector("int32", cute.sym_int()), *[Int32(0)] * 5,
            *[Int64(0)] * 2, Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, rows, row_of_slot, blocks, peers, control, rank, count, chosen, tile_m, tiles_n, at_parts, patience, ctas,
        stream,
    ):  # fmt: skip
        self.kernel(
            rows, row_of_slot, blocks, peers, control, rank, count, chosen, tile_m, tiles_n, at_parts, patience
        ).launch(
            grid=(ctas, 1, 1), block=(WARPS * LANES, 1, 1), cluster=(CTAS, 1, 1), min_blocks_per_mp=1, stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, rows, row_of_slot, blocks, peers, control, rank, count, chosen, tile_m, tiles_n, at_parts, patience
    ):
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        staged = self.allocate(rows, warp)
        ranks, exchange = cute.size(peers), current(control)
        columns, size = cute.assume(rows.shape[1], divby=VECTOR), cute.size(blocks) // ranks
        wait_for_ranks(control, DONE, exchange - 1, ranks, patience)
        for step in cutlass.range(1, ranks, unroll=1):
            to = (rank - step + ranks) % ranks
            if warp == 0:
                first = (step - 1) * size
                tiles = self.row_tiles(blocks, first, size // 2 - 1, tile_m) * tiles_n
                if cute.arch.lane_idx() == 0:
                    counter = blocks.iterator + (first + size - 2)
                    wait_for_count(control, counter, TILE_COUNT * tiles, rank, exchange, patience)
            cute.arch.sync_threads()
            slots = cute.make_tensor(
                row_of_slot.iterator + to * count * chosen, cute.make_layout((count * chosen,))
            )  # fmt: skip
            place = peers[to] + at_parts + Int64(rank * count) * Int64(columns) * 2
            pointer = cute.make_ptr(rows.element_type, place, cute.AddressSpace.gmem, assumed_align=16)
            part = cute.make_tensor(pointer, cute.make_layout((count, columns), stride=(columns, 1)))
            self.sum_tokens(rows, slots, part, part, chosen, cta * WARPS + warp, ctas * WARPS, staged)
            cute.arch.cp_async_wait_group(0)  # the stages may be written again
            last = is_last(control, TICKET + step, ctas)  # `and` would evaluate the call twice
            if last and cute.arch.lane_idx() == 0:
                cute.arch.store(word_of(peers[to], READY + rank), exchange, sem="release", scope="sys")
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def row_tiles(self, blocks, first, ranges, tile_m):
        """The row tiles of a block's ranges, for a warp."""
        tiles = Int32(0)
        for i in cutlass.range(cute.arch.lane_idx(), ranges, LANES, unroll=1):
            tiles += cute.ceil_div(blocks[first + ranges + i] - blocks[first + i], tile_m)
        return cute.arch.warp_redux_sync(tiles, "add")
