"""`Push`: the begin of a return. A few SMs sum the rows of each token of other ranks, and store the sums in the memory
of the token's rank.

``part[r][t] = sum over k of rows[row of slot (r * N + t, k)]``, as `SumOnFewSms` sums, is stored as row
``this rank * N + t`` of the parts in the region of rank r. It begins with the rank before this one, which a gather
reads last: so at any time every rank writes to another one's memory.

Values of rows may return too, such as the gradients of routing weights: ``values[row of slot (t, k)]``, zero for a
sentinel, also for this rank's own tokens.

Axes: P ranks, N rows per rank, K slots per token, R rows, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fusedmoe.kernels.device.warps import LANES, VECTOR, fake_matrix, fake_vector
from fusedmoe.kernels.exchange.control import current, is_last, wait_for_ranks, word_of
from fusedmoe.kernels.exchange.layout import DONE, READY
from fusedmoe.kernels.rows.move.sum_on_few_sms import CTAS, WARPS, SumOnFewSms

TICKET = 2  # and those after it: one per rank


@dataclass(frozen=True)
class Push(SumOnFewSms):
    """Sums that are stored in the memory of other ranks."""

    values: str | None = None  # dtype of values per row that return too: "fp32", "bf16" or "fp16"; None for none

    @property
    def symbol(self) -> str:
        values = f"_{self.values}" if self.values else ""
        return f"{self.family}_push_by_{self.slots}_{self.dtype}{values}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (R, H), rows of slots (P*N*K,) int64, values (R,), regions of the
        ranks (P,) int64, control (`CONTROL_WORDS`,) int32, this rank, N, K, the first step and the one after the last
        (step s is that to rank ``this rank - s``), first bytes of the parts and of the values in a region, the time-out
        in nanoseconds, and CTAs, an even number.
        """
        rows = cute.sym_int()
        return self.compiled_for(
            fake_matrix(self.dtype, rows, cute.sym_int(divisibility=VECTOR)), fake_vector("int64", cute.sym_int()),
            fake_vector(self.values or "fp32", rows), fake_vector("int64", cute.sym_int()),
            fake_vector("int32", cute.sym_int()), *[Int32(0)] * 5, *[Int64(0)] * 3, Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, rows, row_of_slot, values, peers, control, rank, count, chosen, begin, end, at_parts, at_values, patience,
        ctas, stream,
    ):  # fmt: skip
        self.kernel(
            rows, row_of_slot, values, peers, control, rank, count, chosen, begin, end, at_parts, at_values, patience
        ).launch(
            grid=(ctas, 1, 1), block=(WARPS * LANES, 1, 1), cluster=(CTAS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, rows, row_of_slot, values, peers, control, rank, count, chosen, begin, end, at_parts, at_values, patience
    ):
        cute.arch.griddepcontrol_launch_dependents()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        staged = self.allocate(rows, warp)
        ranks, exchange = cute.size(peers), current(control)
        columns = cute.assume(rows.shape[1], divby=VECTOR)
        wait_for_ranks(control, DONE, exchange - 1, ranks, patience)
        for step in cutlass.range(begin, end, unroll=1):
            to = (rank - step + ranks) % ranks
            slots = cute.make_tensor(
                row_of_slot.iterator + to * count * chosen, cute.make_layout((count * chosen,))
            )  # fmt: skip
            if step > 0:
                place = peers[to] + at_parts + Int64(rank) * Int64(count) * Int64(columns) * 2
                pointer = cute.make_ptr(rows.element_type, place, cute.AddressSpace.gmem, assumed_align=16)
                part = cute.make_tensor(pointer, cute.make_layout((count, columns), stride=(columns, 1)))
                self.sum_tokens(rows, slots, part, part, chosen, cta * WARPS + warp, ctas * WARPS, staged)
            if const_expr(self.values is not None):
                place = peers[to] + at_values + Int64(rank * count * chosen) * (values.element_type.width // 8)
                pointer = cute.make_ptr(values.element_type, place, cute.AddressSpace.gmem, assumed_align=4)
                self.put_values(values, slots, cute.make_tensor(pointer, cute.make_layout((count * chosen,))))
            last = is_last(control, TICKET + step, ctas)  # `and` would evaluate the call twice
            if last and cute.arch.lane_idx() == 0:
                cute.arch.store(word_of(peers[to], READY + rank), exchange, sem="release", scope="sys")

    @cute.jit
    def put_values(self, values, slots, out):
        """Store the value of each slot's row."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        for slot in cutlass.range(
            cta * (WARPS * LANES) + thread, cute.size(slots), ctas * (WARPS * LANES), unroll=2
        ):  # fmt: skip
            row = Int32(slots[slot])
            value = Float32(0.0).to(values.element_type)
            if row < cute.size(values):
                value = values[row]
            out[slot] = value
