"""`Total`: the end of a return. ``y[t] = sum over ranks r of part[r][t]``, in fp32, in the order of the ranks.

The parts of the other ranks are in this rank's region, as row ``r * N + t``. The kernel waits until every rank has
written its own. This rank's part is the sum over slots that `SumSlots` gives, rounded like the others: ``sum over k of
rows[row of slot (t, k)]``. Values, such as gradients of routing weights, are summed over ranks too; those of this rank
are in its region.

A warp has one token and 256 columns. A lane loads all of its rows, and then the parts of up to 4 ranks at once.

Axes: P ranks, N rows per rank, T rows of this rank (at most N), K slots per token, R rows, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, fake_matrix, fake_vector
from fusedmoe.kernels.exchange.control import complete, current, is_last, wait_for
from fusedmoe.kernels.exchange.layout import MOST_SLOTS as SLOTS
from fusedmoe.kernels.exchange.layout import READY

WARPS = 8  # per CTA
AT_ONCE = 4  # parts that a lane loads at once
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
        pointer = cute.make_ptr(out.element_type, peers[rank] + at_parts, cute.AddressSpace.gmem, assumed_align=16)
        parts = cute.make_tensor(
            pointer, cute.make_layout((ranks, rows, columns), stride=(rows * columns, columns, 1))
        )  # fmt: skip
        vectors = columns // VECTOR
        blocks = cute.ceil_div(vectors, LANES)
        for unit in cutlass.range(cta * WARPS + warp, out.shape[0] * blocks, ctas * WARPS, unroll=1):
            token = unit // blocks
            column = (unit - token * blocks) * LANES + lane
            self.sum_token(own, row_of_slot, chosen, out, parts, rank, token, column, vectors, ranks)
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
    def sum_token(self, own, row_of_slot, chosen, out, parts, rank, token, column, vectors, ranks):
        """Sum 8 columns of a token per lane. All loads of this rank's rows and of 4 parts are under way at once."""
        lane = cute.arch.lane_idx()
        row_of_lane = own.shape[0]
        if lane < chosen:
            row_of_lane = Int32(row_of_slot[token * chosen + lane])
        loaded = self.load_parts(parts, token, column, vectors, 0, ranks)
        rows = [cute.make_rmem_tensor((VECTOR,), own.element_type) for _ in range(SLOTS)]
        for i in cutlass.range_constexpr(SLOTS):
            row = cute.arch.shuffle_sync(row_of_lane, i)
            rows[i].fill(0.0)
            if column < vectors and row < own.shape[0]:
                cute.autovec_copy(cute.local_tile(own[row, None], (VECTOR,), (column,)), rows[i])
        part = cute.make_rmem_tensor((VECTOR,), Float32)
        part.fill(0.0)
        for i in cutlass.range_constexpr(SLOTS):  # in the order of `SumSlots`, and rounded as the other parts
            part.store(part.load() + rows[i].load().to(Float32))
        part.store(part.load().to(own.element_type).to(Float32))
        total = cute.make_rmem_tensor((VECTOR,), Float32)
        total.fill(0.0)
        self.add_parts(total, loaded, part, rank, 0, ranks)
        for first in cutlass.range(AT_ONCE, ranks, AT_ONCE, unroll=1):
            self.add_parts(
                total, self.load_parts(parts, token, column, vectors, first, ranks), part, rank, first, ranks
            )
        if column < vectors:
            result = cute.make_rmem_tensor((VECTOR,), out.element_type)
            result.store(total.load().to(out.element_type))
            cute.autovec_copy(result, cute.local_tile(out[token, None], (VECTOR,), (column,)))

    @cute.jit
    def load_parts(self, parts, token, column, vectors, first, ranks):
        """Load the parts of some ranks. Ranks and columns past the last load the last ones again: in a branch, the warp
        would wait for each.
        """
        loaded = [cute.make_rmem_tensor((VECTOR,), parts.element_type) for _ in range(AT_ONCE)]
        for i in cutlass.range_constexpr(AT_ONCE):
            r, v = cutlass.min(first + i, ranks - 1), cutlass.min(column, vectors - 1)
            cute.autovec_copy(cute.local_tile(parts[r, token, None], (VECTOR,), (v,)), loaded[i])
        return loaded

    @cute.jit
    def add_parts(self, total, loaded, part, rank, first, ranks):
        """Add the parts of some ranks, of which that of this rank is ``part``."""
        for i in cutlass.range_constexpr(AT_ONCE):
            if first + i < ranks:
                values = loaded[i].load().to(Float32)
                if first + i == rank:
                    values = part.load()
                if first + i == 0:
                    total.store(values)
                else:
                    total.store(total.load() + values)
