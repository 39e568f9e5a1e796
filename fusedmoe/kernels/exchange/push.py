"""`Push`: the begin of a return. A few SMs copy this rank's sums for other ranks to their memory, rank after rank.

Row ``r * N + t`` of the sums, of token t of rank r, becomes row ``this rank * N + t`` of the parts in the region of
rank r. It begins with the rank before this one, which a gather reads last: so at any time every rank writes to another
one's memory.

Values of rows may return too, such as the gradients of routing weights: ``values[row of slot (t, k)]``, zero for a
sentinel, also for this rank's own tokens.

Axes: P ranks, N rows per rank, K slots per token, R rows, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, fake_matrix, fake_vector
from fusedmoe.kernels.exchange import copies
from fusedmoe.kernels.exchange.control import current, is_last, wait_for_ranks, word_of
from fusedmoe.kernels.exchange.layout import DONE, READY

TICKET = 2  # and those after it: one per rank


@dataclass(frozen=True)
class Push(WarpKernel):
    """Copies of sums to the memory of other ranks."""

    dtype: str  # "bf16" or "fp16"
    values: str | None = None  # dtype of values per row that return too: "fp32", "bf16" or "fp16"; None for none

    @property
    def symbol(self) -> str:
        values = f"_{self.values}" if self.values else ""
        return f"{self.family}_push_{self.dtype}{values}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of sums (P*N, H), values (R,), rows of slots (P*N*K,) int64, regions of the
        ranks (P,) int64, control (`CONTROL_WORDS`,) int32, this rank, N, K, the first step and the one after the last
        (step s is that to rank ``this rank - s``), first bytes of the parts and of the values in a region, the time-out
        in nanoseconds, and CTAs, an even number.
        """
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), cute.sym_int(divisibility=VECTOR)),
            fake_vector(self.values or "fp32", cute.sym_int()), fake_vector("int64", cute.sym_int()),
            fake_vector("int64", cute.sym_int()), fake_vector("int32", cute.sym_int()), *[Int32(0)] * 5,
            *[Int64(0)] * 3, Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, sums, values, row_of_slot, peers, control, rank, count, chosen, begin, end, at_parts, at_values, patience,
        ctas, stream,
    ):  # fmt: skip
        self.kernel(
            sums, values, row_of_slot, peers, control, rank, count, chosen, begin, end, at_parts, at_values, patience
        ).launch(**copies.launch(ctas, stream))

    @cute.kernel
    def kernel(
        self, sums, values, row_of_slot, peers, control, rank, count, chosen, begin, end, at_parts, at_values, patience
    ):
        cute.arch.griddepcontrol_launch_dependents()
        ctas, _, _ = cute.arch.grid_dim()
        worker, workers = copies.worker()
        staged, *_ = copies.allocate(sums.element_type)
        ranks, exchange, columns = cute.size(peers), current(control), sums.shape[1]
        wait_for_ranks(control, DONE, exchange - 1, ranks, patience)
        for step in cutlass.range(begin, end, unroll=1):
            to = (rank - step + ranks) % ranks
            if step > 0:
                source = sums.iterator.toint() + Int64(to * count) * Int64(columns) * 2
                place = peers[to] + at_parts + Int64(rank * count) * Int64(columns) * 2
                for first in cutlass.range(worker, count, workers * LANES, unroll=1):
                    left = (count - first + workers - 1) // workers  # rows
                    every = cutlass.select_(left >= LANES, Int32(-1), (Int32(1) << left) - 1)
                    copies.copy_rows(source, place, columns, staged, first, workers, every)
            if const_expr(self.values is not None):
                place = peers[to] + at_values + Int64(rank * count * chosen) * (values.element_type.width // 8)
                pointer = cute.make_ptr(values.element_type, place, cute.AddressSpace.gmem, assumed_align=2)
                out = cute.make_tensor(pointer, cute.make_layout((count * chosen,)))
                slots = cute.make_tensor(row_of_slot.iterator + to * count * chosen, out.layout)
                copies.put_values(values, slots, out)
            last = is_last(control, TICKET + step, ctas)  # `and` would evaluate the call twice
            if last and cute.arch.lane_idx() == 0:
                cute.arch.store(word_of(peers[to], READY + rank), exchange, sem="release", scope="sys")
