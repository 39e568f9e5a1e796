"""`Total`: the end of a return. ``y[t] = sum over ranks r of part[r][t]``, in fp32, in the order of the ranks.

The parts of the other ranks are in this rank's region, as row ``r * N + t``. The kernel waits until every rank has
written its own. This rank's part is the sum over slots that `SumSlots` gives, rounded like the others: ``sum over k of
rows[row of slot (t, k)]``. Values, such as gradients of routing weights, are summed over ranks too; those of this rank
are in its region.

A warp has one token and 256 columns at a time. All loads of a lane are under way at once: those of up to 4 rows, of the
parts of up to 4 ranks, and of the numbers of the next rows. It loads neither missing rows nor this rank's own part.
With 4 ranks, a token of 8 slots has 2 rows here, and more than 4 in 3% of the cases.

**Instructions count**: with 640 of them per token and 256 columns, it took 1.6 times as long as its bytes take. So a
lane takes the rows that are there one after the other, not all slots; divides by the number of blocks once; and selects
this rank's part as packed words.

Axes: P ranks, N rows per rank, T rows of this rank (at most N), K slots per token, R rows, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fusedmoe.kernels.device.predicated import WORDS, load_if
from fusedmoe.kernels.device.warps import ELEMENTS, LANES, VECTOR, WarpKernel, fake_matrix, fake_vector, lowest_bit
from fusedmoe.kernels.exchange.control import complete, current, is_last, wait_for
from fusedmoe.kernels.exchange.layout import READY

WARPS = 8  # per CTA
VECTOR_BYTES = 16
AT_ONCE = 4  # rows, and parts, that a lane loads at once
TICKET = 1


@dataclass(frozen=True)
class Total(WarpKernel):
    """Sums over ranks."""

    dtype: str  # of the parts: "bf16" or "fp16"
    values: str | None = None  # dtype of values that are summed too: "fp32", "bf16" or "fp16"; None for none

    @property
    def symbol(self) -> str:
        values = f"_{self.values}" if self.values else ""
        return f"{self.family}_total_{self.dtype}{values}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (R, H), rows of the slots of this rank's tokens (N*K,) int64,
        results (T, H), results of values (T*K,), regions of the ranks (P,) int64, control (`CONTROL_WORDS`,) int32,
        this rank, N, K, first bytes of the parts and of the values in a region, the time-out in nanoseconds, and CTAs.
        """
        columns = cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), columns), fake_vector("int64", cute.sym_int()),
            fake_matrix(self.dtype, cute.sym_int(), columns), fake_vector(self.values or "fp32", cute.sym_int()),
            fake_vector("int64", cute.sym_int()), fake_vector("int32", cute.sym_int()), *[Int32(0)] * 3,
            *[Int64(0)] * 3, Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, own, row_of_slot, out, out_values, peers, control, rank, rows, chosen, at_parts, at_values, patience,
        ctas, stream,
    ):  # fmt: skip
        self.kernel(
            own, row_of_slot, out, out_values, peers, control, rank, rows, chosen, at_parts, at_values, patience
        ).launch(grid=(ctas, 1, 1), block=(WARPS * LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, own, row_of_slot, out, out_values, peers, control, rank, rows, chosen, at_parts, at_values, patience
    ):
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ranks, exchange = cute.size(peers), current(control)
        if warp == 0 and lane < ranks and lane != rank:
            wait_for(control, READY + lane, exchange, patience)
        cute.arch.sync_threads()
        columns = cute.assume(out.shape[1], divby=VECTOR)
        parts = peers[rank] + at_parts
        vectors, tokens = columns // VECTOR, out.shape[0]
        blocks = cute.ceil_div(vectors, LANES)
        unit, step = cta * WARPS + warp, ctas * WARPS
        token, block = unit // blocks, unit % blocks
        tokens_on, blocks_on = step // blocks, step % blocks
        row = self.row_of_lane(row_of_slot, chosen, token, tokens)
        while token < tokens:
            next_block = block + blocks_on
            over = next_block >= blocks
            next_token = token + tokens_on + cutlass.select_(over, Int32(1), Int32(0))
            next_block -= cutlass.select_(over, blocks, Int32(0))
            after = self.row_of_lane(row_of_slot, chosen, next_token, tokens)  # arrives with the rows
            self.sum_token(own, row, out, parts, rows, rank, token, block * LANES + lane, vectors, ranks)
            token, block, row = next_token, next_block, after
        if const_expr(self.values is not None):
            pointer = cute.make_ptr(
                out_values.element_type, peers[rank] + at_values, cute.AddressSpace.gmem, assumed_align=4
            )  # fmt: skip
            given = cute.make_tensor(pointer, cute.make_layout((ranks, rows * chosen), stride=(rows * chosen, 1)))
            for slot in cutlass.range(
                cta * (WARPS * LANES) + thread, cute.size(out_values), ctas * (WARPS * LANES), unroll=1
            ):  # fmt: skip
                total = Float32(given[0, slot])
                for r in cutlass.range(1, ranks, unroll=1):
                    total += Float32(given[r, slot])
                out_values[slot] = total.to(out_values.element_type)
        if is_last(control, TICKET, ctas):
            complete(control, peers, rank, exchange)

    @cute.jit
    def row_of_lane(self, row_of_slot, chosen, token, tokens):
        """Return, in lane i, the row of slot i of a token, or -1."""
        row, lane = Int32(-1), cute.arch.lane_idx()
        if token < tokens and lane < chosen:
            row = Int32(row_of_slot[token * chosen + lane])
        return row

    @cute.jit
    def sum_token(self, own, row, out, parts, rows, rank, token, column, vectors, ranks):
        """Sum 8 columns of a token per lane."""
        inside = column < vectors
        first_part = parts + (Int64(token) * Int64(vectors) + column) * VECTOR_BYTES
        pitch = Int64(rows) * Int64(vectors) * VECTOR_BYTES  # from a rank's part to the next
        loaded = self.load_parts(first_part, pitch, inside, rank, 0, ranks)
        first_row = own.iterator.toint() + Int64(column) * VECTOR_BYTES
        row_bytes = Int32(own.stride[0]) * 2
        left = cute.arch.vote_ballot_sync((row >= 0) & (row < own.shape[0]))  # the slots whose rows are left
        of_rows, left = self.load_rows(first_row, row_bytes, inside, row, left)
        part = cute.make_rmem_tensor((VECTOR,), Float32)
        part.fill(0.0)
        self.add(part, of_rows)
        while left != 0:
            more, left = self.load_rows(first_row, row_bytes, inside, row, left)
            self.add(part, more)
        rounded = cute.make_rmem_tensor((VECTOR,), own.element_type)  # as the other parts are
        rounded.store(part.load().to(own.element_type))
        words = cute.recast_tensor(rounded, Int32)
        total = cute.make_rmem_tensor((VECTOR,), Float32)
        total.fill(0.0)
        self.add_parts(total, loaded, words, rank, 0, ranks)
        for first in cutlass.range(AT_ONCE, ranks, AT_ONCE, unroll=1):
            others = self.load_parts(first_part, pitch, inside, rank, first, ranks)
            self.add_parts(total, others, words, rank, first, ranks)
        if inside:
            result = cute.make_rmem_tensor((VECTOR,), out.element_type)
            result.store(total.load().to(out.element_type))
            cute.autovec_copy(result, cute.local_tile(out[token, None], (VECTOR,), (column,)))

    def load_rows(self, first_row, row_bytes, inside, row, left):
        """Load the next rows, in the order of slots, as words; return them and the slots that are left after them."""
        loaded = []
        for _ in range(AT_ONCE):
            slot = lowest_bit(left)
            address = first_row + Int64(cute.arch.shuffle_sync(row, slot & (LANES - 1))) * Int64(row_bytes)
            loaded.append(load_if(inside & (left != 0), address))
            left = left & (left - 1)
        return loaded, left

    def add(self, total, loaded):
        """Add values in the order of `SumSlots`. Zeros in place of a missing row change no sum that begins with 0."""
        for words in loaded:
            total.store(total.load() + self.values_of(words))

    def load_parts(self, first_part, pitch, inside, rank, first, ranks):
        """Load the parts of some ranks, as words."""
        numbers = [first + i for i in range(AT_ONCE)]
        return [load_if(inside & (r < ranks) & (r != rank), first_part + Int64(r) * pitch) for r in numbers]

    def values_of(self, words):
        """The values of a vector, in fp32."""
        vector = cute.make_rmem_tensor((WORDS,), Int32)
        for w in range(WORDS):
            vector[w] = words[w]
        return cute.recast_tensor(vector, ELEMENTS[self.dtype]).load().to(Float32)

    @cute.jit
    def add_parts(self, total, loaded, own_part, rank, first, ranks):
        """Add the parts of some ranks, given as words; that of this rank is ``own_part``."""
        for i in cutlass.range_constexpr(AT_ONCE):
            if first + i < ranks:
                is_own = first + i == rank
                values = self.values_of([cutlass.select_(is_own, own_part[w], loaded[i][w]) for w in range(WORDS)])
                if first + i == 0:
                    total.store(values)
                else:
                    total.store(total.load() + values)
