"""`PushSums`: the begin of a return. A few SMs sum the rows of each token of other ranks, and store the sums in the
memory of the token's rank.

``part[r][t] = sum over k of rows[row of slot (r * N + t, k)]``, as `SumSlots` sums, is stored as row ``this rank * N +
t`` of the parts in the region of rank r. Values of rows may return too, as of `Push`.

Most slots of another rank's tokens have no row here. So a *step* of a warp is one row, of up to 2,048 columns, and not
all slots of a token as in `SumOnFewSms`. The sum stays in registers.

A product runs beside this kernel:

- ``counts``: the launch before it, which computes the rows and leaves these SMs free. It computes them in blocks of row
  tiles, in the same order (rows/move/ranges.py), and counts the tiles of each block whose results are in memory
  (sm90/gemm/ragged_m.py). This kernel waits for all tiles of a block, and of those before it, before it sums the rows
  of the block. It begins when all CTAs of the product have begun. So it waits only for a kernel that has its SMs.
  Without free SMs, it begins later. The launches before the product have ended, so everything except the rows and the
  counters is there. This kernel ends after the product, and lets no other one begin before that: later launches see the
  results of both.
- Else the launch after it may begin when all of its CTAs have begun. The rows are there.

The order of the tokens:

- *By ranks*: rank after rank, each of which learns when its sums are there. It begins with the rank before this one,
  which a gather reads last: so at any time every rank writes to another one's memory. A token without rows takes a
  step too.
- ``by_experts``, which counts: the product takes one block of experts after the other. A token comes when the block of
  its last expert here is done (steps.py). So the product has its usual order, and after its last block only the tokens
  of that block are left. A token without rows waits for nothing: its zeros come first. All ranks learn at the end.
- In halves, by experts too: most tokens with several experts here wait for the last blocks. So with many rows, the
  product takes the blocks twice: first for the half of the tokens without this rank's own, then for the other half, of
  which fewer tokens leave.

Axes: P ranks, N rows per rank, K slots per token, R rows, H columns, E experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from fusedmoe.kernels.device.gather import CHUNK_BYTES
from fusedmoe.kernels.device.warps import ELEMENTS, LANES, VECTOR, fake_matrix, fake_vector, lowest_bit
from fusedmoe.kernels.exchange import copies
from fusedmoe.kernels.exchange.control import current, is_last, wait_for_count, wait_for_ranks, word_of
from fusedmoe.kernels.exchange.copies import STAGES, VECTORS
from fusedmoe.kernels.exchange.layout import DONE, LISTED, READY
from fusedmoe.kernels.exchange.steps import AT_ONCE, IN_FLIGHT, SortsTokens, listed_token, token_of
from fusedmoe.kernels.rows.move.sum_on_few_sms import in_fp32

TICKET = 2  # and those after it: one per rank
TILE_COUNT = 2  # that the product adds for a tile
NEVER = 2**31 - 1  # a row that comes after all rows


class Step(NamedTuple):
    """A row of a token, and a block of its columns, that a warp copies."""

    number: Int32  # of the token, among those of the warp
    block: Int32
    left: Int32  # the slots whose rows are left, this one included: a mask
    slots: Int32  # those with a row
    row: Int32  # lane i's: that of slot i
    after: Int32  # the same of the warp's next token


class Tokens(NamedTuple):
    """The tokens of other ranks that a warp takes, in their order."""

    count: Int32
    rank: Int32  # this one
    ranks: Int32
    rows: Int32  # N
    chosen: Int32  # K
    row_of_slot: cute.Tensor
    to: Int32  # by ranks: that of the tokens
    listed: cute.Tensor | None  # by experts: where they are, see steps.py
    ends: Int32 | None  # by experts, in lane s: the end of block s in the list
    counts: Int32 | None  # by experts, in lane s: what the counter of block s has when its rows are there
    counter: cute.Pointer | None  # by experts, in lane s: that of block s


@dataclass(frozen=True)
class PushSums(SortsTokens):
    """Sums that are stored in the memory of other ranks."""

    dtype: str  # "bf16" or "fp16"
    counts: bool = False  # whether it follows the tiles of the product before it
    values: str | None = None  # dtype of values per row that return too: "fp32", "bf16" or "fp16"; None for none
    by_experts: bool = False  # the order of the tokens

    @property
    def beside(self) -> bool:
        """Whether it begins while the launch before it runs."""
        return self.counts

    @property
    def stages(self) -> int:
        """The steps of a warp under way."""
        return IN_FLIGHT if self.by_experts else STAGES

    @property
    def symbol(self) -> str:
        values = f"_{self.values}" if self.values else ""
        order = "_experts" if self.by_experts else ""
        return f"{self.family}_push_sums_{self.dtype}{values}{'_counts' if self.counts else ''}{order}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (R, H), contiguous, values (R,), rows of slots (P*N*K,) int64, some
        blocks of 2 (E + 1) + 2 elements of int32 as one vector, in the order in which the product computes them,
        regions of the ranks (P,) int64, control (`CONTROL_WORDS`,) int32, this rank, N, K, the number of blocks and, by
        experts, the experts of a block and, in halves, the first token of the second half, else 0, rows of a tile of
        the product, its column tiles, first bytes of the parts and of the values in a region, the time-out in
        nanoseconds, and CTAs, an even number. Blocks and tiles are not used unless it counts.
        """
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), cute.sym_int(divisibility=VECTOR)),
            fake_vector(self.values or "fp32", cute.sym_int()), fake_vector("int64", cute.sym_int()),
            fake_vector("int32", cute.sym_int()), fake_vector("int64", cute.sym_int()),
            fake_vector("int32", cute.sym_int()), *[Int32(0)] * 8, *[Int64(0)] * 3, Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, rows, values, row_of_slot, blocks, peers, control, rank, count, chosen, lines, each, half, tile_m,
        tiles_n, at_parts, at_values, patience, ctas, stream,
    ):  # fmt: skip
        self.kernel(
            rows, values, row_of_slot, blocks, peers, control, rank, count, chosen, lines, each, half, tile_m,
            tiles_n, at_parts, at_values, patience,
        ).launch(**copies.launch(ctas, stream), use_pdl=self.counts)  # fmt: skip

    @cute.kernel
    def kernel(
        self, rows, values, row_of_slot, blocks, peers, control, rank, count, chosen, lines, each, half, tile_m,
        tiles_n, at_parts, at_values, patience,
    ):  # fmt: skip
        if const_expr(not self.counts):
            cute.arch.griddepcontrol_launch_dependents()
        shared = copies.allocate(rows.element_type, self.stages, LISTED if self.by_experts else 0)
        exchange = current(control)
        wait_for_ranks(control, DONE, exchange - 1, cute.size(peers), patience)
        if const_expr(self.by_experts):
            self.push_by_experts(
                rows, row_of_slot, blocks, peers, control, rank, count, chosen, lines, each, half, tile_m, tiles_n,
                at_parts, exchange, patience, shared,
            )  # fmt: skip
        else:
            self.push_by_ranks(
                rows, values, row_of_slot, blocks, peers, control, rank, count, chosen, lines, tile_m, tiles_n,
                at_parts, at_values, exchange, patience, shared.staged,
            )  # fmt: skip
        if const_expr(self.counts):
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def push_by_ranks(
        self, rows, values, row_of_slot, blocks, peers, control, rank, count, chosen, lines, tile_m, tiles_n, at_parts,
        at_values, exchange, patience, staged,
    ):  # fmt: skip
        ctas, _, _ = cute.arch.grid_dim()
        worker, workers = copies.worker()
        ranks, size = cute.size(peers), cute.size(blocks) // lines
        mine = (count - worker + workers - 1) // workers  # 0 for a warp whose number is not below N
        for step in cutlass.range(0 if const_expr(self.values is not None) else 1, ranks, unroll=1):
            to = (rank - step + ranks) % ranks
            if step > 0:
                if const_expr(self.counts):
                    self.wait(control, blocks, (step - 1) * size, size, tile_m, tiles_n, rank, exchange, patience)
                tokens = Tokens(mine, rank, ranks, count, chosen, row_of_slot, to, None, None, None, None)
                self.sum_tokens(rows, tokens, peers, control, at_parts, exchange, patience, staged)
                cute.arch.cp_async_wait_group(0)  # the stages may be written again
            if const_expr(self.values is not None):
                slots = cute.make_tensor(
                    row_of_slot.iterator + to * count * chosen, cute.make_layout((count * chosen,))
                )  # fmt: skip
                place = peers[to] + at_values + Int64(rank * count * chosen) * (values.element_type.width // 8)
                pointer = cute.make_ptr(values.element_type, place, cute.AddressSpace.gmem, assumed_align=2)
                copies.put_values(values, slots, cute.make_tensor(pointer, slots.layout))
            last = is_last(control, TICKET + step, ctas)  # `and` would evaluate the call twice
            if last and cute.arch.lane_idx() == 0:
                cute.arch.store(word_of(peers[to], READY + rank), exchange, sem="release", scope="sys")

    @cute.jit
    def push_by_experts(
        self, rows, row_of_slot, blocks, peers, control, rank, count, chosen, lines, each, half, tile_m, tiles_n,
        at_parts, exchange, patience, shared,
    ):  # fmt: skip
        ctas, _, _ = cute.arch.grid_dim()
        lane, ranks = cute.arch.lane_idx(), cute.size(peers)
        size = cute.size(blocks) // lines
        experts, line = size // 2 - 2, cutlass.min(lane, lines - 1) * size
        steps = cutlass.select_(half > 0, lines // 2, lines)  # blocks of experts
        # lane s: the first row after the experts of block s, what its counter has at the end, and the counter
        stop, counts = Int32(NEVER), Int32(0)
        if lane < lines:
            step = lane % steps
            after = experts + cutlass.min((step + 1) * each, experts)
            if lane < steps:
                stop = blocks[line + after]
                if half > 0:  # one of the halves ends there
                    stop = cutlass.max(stop, blocks[line + steps * size + after])
            for expert in cutlass.range(step * each, (step + 1) * each, unroll=1):
                if expert < experts:
                    counts += tiles_of(blocks, line, experts, expert, tile_m)
            if lane == lines - 1:
                counts += tiles_of(blocks, line, experts, experts, tile_m)  # of rows of no expert
        own_is_low = rank * count < half
        given = row_of_slot, cute.size(rows, mode=[0]), stop, steps, half, own_is_low, rank, ranks, count, chosen
        others = (ranks - 1) * count
        self.store_zeros(others, given, peers, at_parts, cute.size(rows, mode=[1]))
        ends = self.sort(shared, others, given)
        tokens = Tokens(
            cute.arch.shuffle_sync(ends, LANES - 1), rank, ranks, count, chosen, row_of_slot, rank, shared.listed, ends,
            TILE_COUNT * counts * tiles_n, blocks.iterator + (line + size - 2),
        )  # fmt: skip
        self.sum_tokens(rows, tokens, peers, control, at_parts, exchange, patience, shared.staged)
        last = is_last(control, TICKET, ctas)
        if last and lane < ranks and lane != rank:
            cute.arch.store(word_of(peers[lane], READY + rank), exchange, sem="release", scope="sys")

    @cute.jit
    def find_steps(self, step, first, workers, others, given):
        """As of `SortsTokens`: the step is the block of the last row: of the experts that end first after it, in the
        half of the token.
        """
        row_of_slot, rows, stop, steps, half, own_is_low, rank, ranks, count, chosen = given
        token = cute.make_rmem_tensor((AT_ONCE,), Int32)
        for i in cutlass.range_constexpr(AT_ONCE):
            # past the last token, that token again: in a branch, the warp would wait for each load
            number = cutlass.min(first + (i * LANES + cute.arch.lane_idx()) * workers, others - 1)
            token[i] = token_of(number, rank, ranks, count)
            step[i] = -1  # the last row
        for k in cutlass.range(chosen, unroll=4):
            for i in cutlass.range_constexpr(AT_ONCE):
                row = Int32(row_of_slot[token[i] * chosen + k])
                step[i] = cutlass.max(step[i], cutlass.select_(row < rows, row, Int32(-1)))
        for i in cutlass.range_constexpr(AT_ONCE):
            block = Int32(0)
            for bit in (16, 8, 4, 2, 1):
                before = cute.arch.shuffle_sync(stop, block + bit - 1) <= step[i]
                block += cutlass.select_(before, Int32(bit), Int32(0))
            is_second = (half > 0) & ((token[i] < half) == own_is_low)
            block += cutlass.select_(is_second, steps, Int32(0))
            is_token = first + (i * LANES + cute.arch.lane_idx()) * workers < others
            step[i] = cutlass.select_(is_token & (step[i] >= 0), block, Int32(-1))

    @cute.jit
    def store_zeros(self, others, given, peers, at_parts, columns):
        """Store the sums of a warp's tokens without rows."""
        *_, rank, ranks, count, _ = given
        worker, workers = copies.worker()
        lane, vectors = cute.arch.lane_idx(), columns // VECTOR
        step = cute.make_rmem_tensor((AT_ONCE,), Int32)
        zeros = cute.make_rmem_tensor((VECTOR * VECTORS,), Float32)
        zeros.fill(0.0)
        for first in cutlass.range(worker, others, workers * LANES * AT_ONCE, unroll=1):
            self.find_steps(step, first, workers, others, given)
            for i in cutlass.range_constexpr(AT_ONCE):
                number = first + i * LANES * workers
                is_token = number + lane * workers < others
                left = cute.arch.vote_ballot_sync(Boolean(is_token & (step[i] < 0)))
                while left != 0:
                    token = token_of(number + lowest_bit(left) * workers, rank, ranks, count)
                    place = place_of(token, rank, count, peers, at_parts, columns)
                    for block in cutlass.range(cute.ceil_div(vectors, LANES * VECTORS), unroll=1):
                        self.store(zeros, place, block * (LANES * VECTORS) + lane, vectors)
                    left = left & (left - 1)

    @cute.jit
    def wait(self, control, blocks, first, size, tile_m, tiles_n, rank, exchange, patience):
        """Wait for the tiles of a block of ranges, which begins at element ``first``."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            experts, tiles = size // 2 - 2, Int32(0)
            for i in cutlass.range(cute.arch.lane_idx(), experts + 1, LANES, unroll=1):
                tiles += tiles_of(blocks, first, experts, i, tile_m)
            tiles = cute.arch.warp_redux_sync(tiles, "add")
            if cute.arch.lane_idx() == 0:
                counter = blocks.iterator + (first + size - 2)
                wait_for_count(control, counter, TILE_COUNT * tiles * tiles_n, rank, exchange, patience)
        cute.arch.sync_threads()

    @cute.jit
    def wait_for_rows(self, tokens, number, there, control, exchange, patience):
        """By experts, wait for the blocks up to that of a token; so many are ``there``. Return how many are then."""
        if const_expr(self.by_experts):
            if number < tokens.count:
                blocks = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(Boolean(tokens.ends <= number)))) + 1
                if blocks > there:
                    lane = cute.arch.lane_idx()
                    if lane >= there and lane < blocks:
                        wait_for_count(control, tokens.counter, tokens.counts, tokens.rank, exchange, patience)
                    cute.arch.sync_warp()
                    there = blocks
        return there

    @cute.jit
    def sum_tokens(self, rows, tokens, peers, control, at_parts, exchange, patience, staged):
        """Sum the rows of a warp's tokens."""
        lane, columns = cute.arch.lane_idx(), cute.size(rows, mode=[1])
        vectors = columns // VECTOR
        blocks = cute.ceil_div(vectors, LANES * VECTORS)
        row = self.row_of_lane(tokens, Int32(0))
        slots = slots_with_rows(row, rows.shape[0])
        ahead = Step(Int32(0), Int32(0), slots, slots, row, self.row_of_lane(tokens, Int32(1)))
        lasts = Int32(0)  # a bit per step: whether it is the last one of a block of columns
        to, at, block, number, there = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        totals = cute.make_rmem_tensor((VECTOR * VECTORS,), Float32)
        totals.fill(0.0)
        for _ in cutlass.range(self.stages - 1, unroll=1):
            there = self.wait_for_rows(tokens, ahead.number, there, control, exchange, patience)
            lasts = fetch(rows, vectors, ahead, lasts, staged[None, None, to])
            ahead = self.advance(rows, tokens, ahead, blocks)
            to = self.next_stage(to)
        while number < tokens.count:
            there = self.wait_for_rows(tokens, ahead.number, there, control, exchange, patience)
            lasts = fetch(rows, vectors, ahead, lasts, staged[None, None, to])
            ahead = self.advance(rows, tokens, ahead, blocks)
            to = self.next_stage(to)
            cute.arch.cp_async_wait_group(self.stages - 1)
            for v in cutlass.range_constexpr(VECTORS):
                loaded = cute.make_rmem_tensor((VECTOR,), rows.element_type)
                cute.autovec_copy(staged[None, v, at], loaded)
                values = in_fp32(loaded, self.dtype)
                for c in cutlass.range_constexpr(VECTOR):
                    totals[v * VECTOR + c] += values[c]
            at = self.next_stage(at)
            if (lasts >> (self.stages - 1)) & 1 != 0:
                token = self.token(tokens, number)
                place = place_of(token, tokens.rank, tokens.rows, peers, at_parts, columns)
                self.store(totals, place, block * (LANES * VECTORS) + lane, vectors)
                totals.fill(0.0)
                block += 1
                if block == blocks:
                    block = Int32(0)
                    number += 1

    @cute.jit
    def token(self, tokens, number):
        """A token of a warp, among those of all ranks."""
        worker, workers = copies.worker()
        if const_expr(self.by_experts):
            return token_of(listed_token(tokens.listed, number), tokens.rank, tokens.ranks, tokens.rows)
        return tokens.to * tokens.rows + worker + number * workers

    @cute.jit
    def row_of_lane(self, tokens, number):
        """Lane i's: the row of slot i, or -1."""
        row, lane = Int32(-1), cute.arch.lane_idx()
        # before the branch, and then not of a number past the list: ptxas 13.0 computed the address in the list from a
        # register that already had the next number, when the read was in the branch
        token = self.token(tokens, cutlass.min(number, cutlass.max(tokens.count - 1, 0)))
        if number < tokens.count and lane < tokens.chosen:
            row = Int32(tokens.row_of_slot[token * tokens.chosen + lane])
        return row

    @cute.jit
    def advance(self, rows, tokens, step, blocks):
        """The step after a step: of the next row, block of columns, or token."""
        number, block, left, slots, row, after = step
        left = left & (left - 1)
        if left == 0:
            block, left = block + 1, slots
            if block == blocks:
                block, row = Int32(0), after
                number += 1
                slots = slots_with_rows(row, rows.shape[0])
                left = slots
                after = self.row_of_lane(tokens, number + 1)  # arrives while rows are copied
        return Step(number, block, left, slots, row, after)

    def next_stage(self, stage):
        """The stage of the step after that of a stage."""
        return cutlass.select_(stage == self.stages - 1, Int32(0), stage + 1)

    @cute.jit
    def store(self, totals, place, first, vectors):
        """Store the sum of a block of columns at an address; ``first``: the lane's first vector."""
        for v in cutlass.range_constexpr(VECTORS):
            if first + v * LANES < vectors:
                sums = cute.make_rmem_tensor((VECTOR,), Float32)
                for c in cutlass.range_constexpr(VECTOR):
                    sums[c] = totals[v * VECTOR + c]
                result = cute.make_rmem_tensor((VECTOR,), ELEMENTS[self.dtype])
                result.store(sums.load().to(ELEMENTS[self.dtype]))
                pointer = cute.make_ptr(
                    ELEMENTS[self.dtype], place + Int64(first + v * LANES) * CHUNK_BYTES, cute.AddressSpace.gmem,
                    assumed_align=CHUNK_BYTES,
                )  # fmt: skip
                cute.autovec_copy(result, cute.make_tensor(pointer, cute.make_layout((VECTOR,))))


def slots_with_rows(row, rows):
    """The slots that have one of the rows, as a mask."""
    return cute.arch.vote_ballot_sync((row >= 0) & (row < rows))


@cute.jit
def tiles_of(blocks, line, experts, expert, tile_m):
    """The row tiles of an expert's range in the block that begins at element ``line``."""
    return cute.ceil_div(blocks[line + experts + 1 + expert] - blocks[line + expert], tile_m)


@cute.jit
def place_of(token, rank, count, peers, at_parts, columns):
    """The address of the sum for a token, in the region of its rank."""
    to = token // count
    return peers[to] + at_parts + Int64(rank * count + token - to * count) * Int64(columns) * 2


@cute.jit
def fetch(rows, vectors, step, lasts, stage):
    """Start the copies of a step; zeros in place of a missing row. Return the bits with that of this step."""
    slot = lowest_bit(step.left)
    row = cute.arch.shuffle_sync(step.row, slot & (LANES - 1))
    copies.fetch(rows.iterator.toint(), vectors, row, step.block, cute.arch.lane_idx(), step.left != 0, stage)
    cute.arch.cp_async_commit_group()
    return lasts << 1 | cutlass.select_(step.left & (step.left - 1) == 0, Int32(1), Int32(0))
