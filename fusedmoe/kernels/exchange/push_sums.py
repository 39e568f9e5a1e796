"""`PushSums`: the begin of a return. A few SMs sum the rows of each token of other ranks, and store the sums in the
memory of the token's rank.

``part[r][t] = sum over k of rows[row of slot (r * N + t, k)]``, as `SumSlots` sums, is stored as row ``this rank * N +
t`` of the parts in the region of rank r. It begins with the rank before this one, which a gather reads last: so at any
time every rank writes to another one's memory. Values of rows may return too, as of `Push`.

Most slots of another rank's tokens have no row here. So a *step* of a warp is one row, of up to 2,048 columns, and not
all slots of a token as in `SumOnFewSms`; a token without rows takes one too. The sum stays in registers.

A product runs beside this kernel:

- ``counts``: the launch before it, which computes the rows and leaves these SMs free. It computes them in blocks of row
  tiles, in the same order (rows/move/ranges.py), and counts the tiles of each block whose results are in memory
  (sm90/gemm/ragged_m.py). This kernel waits for all tiles of a block, and of those before it, before it sums the rows
  of its rank. It begins when all CTAs of the product have begun. So it waits only for a kernel that has its SMs.
  Without free SMs, it begins later. The launches before the product have ended, so everything except the rows and the
  counters is there. This kernel ends after the product, and lets no other one begin before that: later launches see the
  results of both.
- Else the launch after it may begin when all of its CTAs have begun. The rows are there.

Axes: P ranks, N rows per rank, K slots per token, R rows, H columns, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, fake_matrix, fake_vector
from fusedmoe.kernels.exchange import copies
from fusedmoe.kernels.exchange.control import current, is_last, wait_for_count, wait_for_ranks, word_of
from fusedmoe.kernels.exchange.copies import STAGES, VECTORS
from fusedmoe.kernels.exchange.layout import DONE, READY
from fusedmoe.kernels.rows.move.sum_on_few_sms import in_fp32

TICKET = 2  # and those after it: one per rank
TILE_COUNT = 2  # that the product adds for a tile


class Step(NamedTuple):
    """A row of a token, and a block of its columns, that a warp copies."""

    token: Int32
    block: Int32
    left: Int32  # the slots whose rows are left, this one included: a mask
    slots: Int32  # those with a row
    row: Int32  # lane i's: that of slot i
    after: Int32  # the same of the warp's next token


@dataclass(frozen=True)
class PushSums(WarpKernel):
    """Sums that are stored in the memory of other ranks."""

    dtype: str  # "bf16" or "fp16"
    counts: bool = False  # whether it follows the tiles of the product before it
    values: str | None = None  # dtype of values per row that return too: "fp32", "bf16" or "fp16"; None for none

    @property
    def beside(self) -> bool:
        """Whether it begins while the launch before it runs."""
        return self.counts

    @property
    def symbol(self) -> str:
        values = f"_{self.values}" if self.values else ""
        return f"{self.family}_push_sums_{self.dtype}{values}{'_counts' if self.counts else ''}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (R, H), contiguous, values (R,), rows of slots (P*N*K,) int64, P
        blocks of 2 (E + 1) + 2 elements of int32 as one vector, in the order in which rows leave, regions of the ranks
        (P,) int64, control (`CONTROL_WORDS`,) int32, this rank, N, K, rows of a tile of the product, its column tiles,
        first bytes of the parts and of the values in a region, the time-out in nanoseconds, and CTAs, an even number.
        Blocks and tiles are not used unless it counts.
        """
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), cute.sym_int(divisibility=VECTOR)),
            fake_vector(self.values or "fp32", cute.sym_int()), fake_vector("int64", cute.sym_int()),
            fake_vector("int32", cute.sym_int()), fake_vector("int64", cute.sym_int()),
            fake_vector("int32", cute.sym_int()), *[Int32(0)] * 5, *[Int64(0)] * 3, Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, rows, values, row_of_slot, blocks, peers, control, rank, count, chosen, tile_m, tiles_n, at_parts,
        at_values, patience, ctas, stream,
    ):  # fmt: skip
        self.kernel(
            rows, values, row_of_slot, blocks, peers, control, rank, count, chosen, tile_m, tiles_n, at_parts,
            at_values, patience,
        ).launch(**copies.launch(ctas, stream), use_pdl=self.counts)  # fmt: skip

    @cute.kernel
    def kernel(
        self, rows, values, row_of_slot, blocks, peers, control, rank, count, chosen, tile_m, tiles_n, at_parts,
        at_values, patience,
    ):  # fmt: skip
        if const_expr(not self.counts):
            cute.arch.griddepcontrol_launch_dependents()
        ctas, _, _ = cute.arch.grid_dim()
        worker, workers = copies.worker()
        staged, _ = copies.allocate(rows.element_type)
        ranks, exchange = cute.size(peers), current(control)
        columns, size = cute.assume(rows.shape[1], divby=VECTOR), cute.size(blocks) // ranks
        wait_for_ranks(control, DONE, exchange - 1, ranks, patience)
        for step in cutlass.range(0 if const_expr(self.values is not None) else 1, ranks, unroll=1):
            to = (rank - step + ranks) % ranks
            slots = cute.make_tensor(
                row_of_slot.iterator + to * count * chosen, cute.make_layout((count * chosen,))
            )  # fmt: skip
            if step > 0:
                if const_expr(self.counts):
                    self.wait(control, blocks, (step - 1) * size, size, tile_m, tiles_n, rank, exchange, patience)
                place = peers[to] + at_parts + Int64(rank * count) * Int64(columns) * 2
                pointer = cute.make_ptr(rows.element_type, place, cute.AddressSpace.gmem, assumed_align=16)
                part = cute.make_tensor(pointer, cute.make_layout((count, columns), stride=(columns, 1)))
                self.sum_tokens(rows, slots, part, chosen, worker, workers, staged)
                cute.arch.cp_async_wait_group(0)  # the stages may be written again
            if const_expr(self.values is not None):
                place = peers[to] + at_values + Int64(rank * count * chosen) * (values.element_type.width // 8)
                pointer = cute.make_ptr(values.element_type, place, cute.AddressSpace.gmem, assumed_align=2)
                copies.put_values(values, slots, cute.make_tensor(pointer, slots.layout))
            last = is_last(control, TICKET + step, ctas)  # `and` would evaluate the call twice
            if last and cute.arch.lane_idx() == 0:
                cute.arch.store(word_of(peers[to], READY + rank), exchange, sem="release", scope="sys")
        if const_expr(self.counts):
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def wait(self, control, blocks, first, size, tile_m, tiles_n, rank, exchange, patience):
        """Wait for the tiles of a block of ranges, which begins at element ``first``."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            ranges, tiles = size // 2 - 1, Int32(0)
            for i in cutlass.range(cute.arch.lane_idx(), ranges, LANES, unroll=1):
                tiles += cute.ceil_div(blocks[first + ranges + i] - blocks[first + i], tile_m)
            tiles = cute.arch.warp_redux_sync(tiles, "add")
            if cute.arch.lane_idx() == 0:
                counter = blocks.iterator + (first + size - 2)
                wait_for_count(control, counter, TILE_COUNT * tiles * tiles_n, rank, exchange, patience)
        cute.arch.sync_threads()

    @cute.jit
    def sum_tokens(self, rows, row_of_slot, out, chosen, token, stride, staged):
        """Sum a warp's share of the tokens: from ``token`` on, every ``stride``-th one."""
        lane, tokens, vectors = cute.arch.lane_idx(), out.shape[0], out.shape[1] // VECTOR
        blocks = cute.ceil_div(vectors, LANES * VECTORS)
        row = row_of_lane(row_of_slot, chosen, token, tokens)
        slots = slots_with_rows(row, rows.shape[0])
        ahead = Step(token, Int32(0), slots, slots, row, row_of_lane(row_of_slot, chosen, token + stride, tokens))
        lasts = Int32(0)  # a bit per step: whether it is the last one of a block of columns
        to, at, block = Int32(0), Int32(0), Int32(0)
        totals = cute.make_rmem_tensor((VECTOR * VECTORS,), Float32)
        totals.fill(0.0)
        for _ in cutlass.range(STAGES - 1, unroll=1):
            lasts = fetch(rows, vectors, ahead, lasts, staged[None, None, to])
            ahead = advance(rows, row_of_slot, chosen, ahead, blocks, tokens, stride)
            to = next_stage(to)
        while token < tokens:
            lasts = fetch(rows, vectors, ahead, lasts, staged[None, None, to])
            ahead = advance(rows, row_of_slot, chosen, ahead, blocks, tokens, stride)
            to = next_stage(to)
            cute.arch.cp_async_wait_group(STAGES - 1)
            for v in cutlass.range_constexpr(VECTORS):
                loaded = cute.make_rmem_tensor((VECTOR,), out.element_type)
                cute.autovec_copy(staged[None, v, at], loaded)
                values = in_fp32(loaded, self.dtype)
                for c in cutlass.range_constexpr(VECTOR):
                    totals[v * VECTOR + c] += values[c]
            at = next_stage(at)
            if (lasts >> (STAGES - 1)) & 1 != 0:
                store(totals, out, token, block * (LANES * VECTORS) + lane, vectors)
                totals.fill(0.0)
                block += 1
                if block == blocks:
                    block = Int32(0)
                    token += stride


@cute.jit
def row_of_lane(row_of_slot, chosen, token, tokens):
    """Lane i's: the row of slot i, or -1."""
    row, lane = Int32(-1), cute.arch.lane_idx()
    if token < tokens and lane < chosen:
        row = Int32(row_of_slot[token * chosen + lane])
    return row


def slots_with_rows(row, rows):
    """The slots that have one of the rows, as a mask."""
    return cute.arch.vote_ballot_sync((row >= 0) & (row < rows))


def next_stage(stage):
    """The stage of the step after that of a stage."""
    return cutlass.select_(stage == STAGES - 1, Int32(0), stage + 1)


@cute.jit
def fetch(rows, vectors, step, lasts, stage):
    """Start the copies of a step; zeros in place of a missing row. Return the bits with that of this step."""
    slot = cute.arch.popc((step.left - 1) & ~step.left)  # the lowest bit
    row = cute.arch.shuffle_sync(step.row, slot & (LANES - 1))
    copies.fetch(rows.iterator.toint(), vectors, row, step.block, cute.arch.lane_idx(), step.left != 0, stage)
    cute.arch.cp_async_commit_group()
    return lasts << 1 | cutlass.select_(step.left & (step.left - 1) == 0, Int32(1), Int32(0))


@cute.jit
def advance(rows, row_of_slot, chosen, step, blocks, tokens, stride):
    """The step after a step: of the next row, block of columns, or token."""
    token, block, left, slots, row, after = step
    left = left & (left - 1)
    if left == 0:
        block, left = block + 1, slots
        if block == blocks:
            block, row = Int32(0), after
            token += stride
            slots = slots_with_rows(row, rows.shape[0])
            left = slots
            after = row_of_lane(row_of_slot, chosen, token + stride, tokens)  # arrives while rows are copied
    return Step(token, block, left, slots, row, after)


@cute.jit
def store(totals, out, token, first, vectors):
    """Store the sum of a block of columns; ``first``: the lane's first vector."""
    for v in cutlass.range_constexpr(VECTORS):
        if first + v * LANES < vectors:
            sums = cute.make_rmem_tensor((VECTOR,), Float32)
            for c in cutlass.range_constexpr(VECTOR):
                sums[c] = totals[v * VECTOR + c]
            result = cute.make_rmem_tensor((VECTOR,), out.element_type)
            result.store(sums.load().to(out.element_type))
            cute.autovec_copy(result, cute.local_tile(out[token, None], (VECTOR,), (first + v * LANES,)))
