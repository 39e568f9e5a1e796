"""Kernels that copy tokens to the rows of their experts, and return rows to token order: slots and rows as in route.py.

`GatherRows`: ``rows[r] = scale[r] * source[token of r]``, zeros for sentinels. A warp has one token and 1,024 columns.
It reads them once and writes them to each of the token's rows. Other warps clear rows of sentinels: each searches 32.

`SumSlots`: ``out[t] = sum over k of scale[row] * rows[row of slot (t, k)]`` in fp32, in the order of k, and then an
optional addend of the token, before which the sum may be rounded. A warp has one token and 256 columns, or 512 if a
token has at most two slots. Each lane issues its loads of up to 8 slots, and waits for at most one of them before it
issues the last. The row numbers are loaded at once, one per lane; otherwise each row would wait for the previous one.

`SlotValues`: ``out[t, k] = values[row of slot (t, k)]``, zeros for sentinels.

`RowDots`: ``dots[r] = sum over columns of rows[r] * source[token of r]`` in fp32, zeros for sentinels. A warp has
one row.

Rows of sentinels are never read. A slot without a row, of which there are some if R < T*K, has row R as a sentinel.

Axes: T tokens, K slots per token, R rows, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, fake_matrix, fake_vector, lowest_bit

WARPS = 8  # per CTA
VECTORS = 4  # that a lane loads at once, when rows are gathered or multiplied
BLOCK = LANES * VECTOR  # columns that a warp reads at once
LOADS = 4  # per lane, when rows of fewer slots are summed; with 8 loads, 4 or 2 slots take a quarter longer
SLOTS = (2, 4, 8)  # of a token, summed at once


def _launch(units: Any, stream: Any) -> dict[str, Any]:
    """Launch arguments for one warp per unit of work."""
    return {"grid": (cute.ceil_div(units, WARPS), 1, 1), "block": (WARPS * LANES, 1, 1), "stream": stream}


def _unit() -> tuple[Any, Any]:
    """Return the warp's unit of work, and the lane."""
    block, _, _ = cute.arch.block_idx()
    return block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()


@dataclass(frozen=True)
class GatherRows(WarpKernel):
    """Rows of tokens, sorted by expert, optionally scaled."""

    dtype: str  # "bf16" or "fp16"
    scale: str | None  # dtype of the scale: "fp32", "bf16" or "fp16"; None for none

    @property
    def symbol(self) -> str:
        return f"{self.family}_gather_rows_{self.dtype}" + (f"_scaled_{self.scale}" if self.scale else "")

    def compile(self) -> Any:
        """Compile without a GPU; a function of source (T, H), slots of rows (R,) int64, rows of slots (T*K,) int64,
        scale (R,), rows (R, H) and K.
        """
        rows, columns = cute.sym_int(), cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), columns), fake_vector("int64", rows),
            fake_vector("int64", cute.sym_int()), fake_vector(self.scale or "fp32", rows),
            fake_matrix(self.dtype, rows, columns), Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(self, source, slot_of_row, row_of_slot, scale, rows, chosen, stream):
        blocks = cute.ceil_div(rows.shape[1], BLOCK * VECTORS)
        of_tokens = source.shape[0] * blocks
        units = of_tokens + cute.ceil_div(rows.shape[0], LANES)
        self.kernel(source, slot_of_row, row_of_slot, scale, rows, chosen, blocks, of_tokens).launch(
            **_launch(units, stream)
        )

    @cute.kernel
    def kernel(self, source, slot_of_row, row_of_slot, scale, rows, chosen, blocks, of_tokens):
        unit, lane = _unit()
        if unit < of_tokens:
            token = unit // blocks
            self.copy_token(source, row_of_slot, scale, rows, chosen, token, unit - token * blocks, lane)
        else:
            self.clear_sentinels(slot_of_row, row_of_slot, rows, (unit - of_tokens) * LANES, lane)

    @cute.jit
    def copy_token(self, source, row_of_slot, scale, rows, chosen, token, block, lane):
        """Write a block of columns of one token to all its rows."""
        loaded = [cute.make_rmem_tensor((VECTOR,), source.element_type) for _ in range(VECTORS)]
        for i in cutlass.range_constexpr(VECTORS):
            # lanes past the last vector load that vector again: in a branch, the warp would wait for each load
            vector = cutlass.min((block * VECTORS + i) * LANES + lane, rows.shape[1] // VECTOR - 1)
            cute.autovec_copy(cute.local_tile(source[token, None], (VECTOR,), (vector,)), loaded[i])
        for first in cutlass.range(0, chosen, LANES, unroll=1):
            row_of_lane, factor_of_lane = rows.shape[0], Float32(0.0)
            if first + lane < chosen:
                row_of_lane = Int32(row_of_slot[token * chosen + first + lane])
            if const_expr(self.scale is not None):
                if row_of_lane < rows.shape[0]:
                    factor_of_lane = Float32(scale[row_of_lane])
            for k in cutlass.range(cutlass.min(chosen - first, LANES), unroll=4):
                row = cute.arch.shuffle_sync(row_of_lane, k)
                factor = cute.arch.shuffle_sync(factor_of_lane, k)
                if row < rows.shape[0]:
                    for i in cutlass.range_constexpr(VECTORS):
                        vector = (block * VECTORS + i) * LANES + lane
                        if vector * VECTOR < rows.shape[1]:
                            result = loaded[i]
                            if const_expr(self.scale is not None):
                                result = cute.make_rmem_tensor((VECTOR,), source.element_type)
                                result.store((loaded[i].load().to(Float32) * factor).to(source.element_type))
                            cute.autovec_copy(result, cute.local_tile(rows[row, None], (VECTOR,), (vector,)))

    @cute.jit
    def clear_sentinels(self, slot_of_row, row_of_slot, rows, first, lane):
        """Write zeros to those of 32 rows that belong to no expert."""
        unused = Boolean(False)
        if first + lane < rows.shape[0]:
            unused = Int32(row_of_slot[Int32(slot_of_row[first + lane])]) != first + lane
        left = cute.arch.vote_ballot_sync(unused)
        zeros = cute.make_rmem_tensor((VECTOR,), rows.element_type)
        zeros.fill(0.0)
        while left != 0:
            row = first + Int32(lowest_bit(left))
            left = left & (left - 1)
            for vector in cutlass.range(lane, rows.shape[1] // VECTOR, LANES, unroll=4):
                cute.autovec_copy(zeros, cute.local_tile(rows[row, None], (VECTOR,), (vector,)))


@dataclass(frozen=True)
class SumSlots(WarpKernel):
    """Sums over each token's rows, optionally scaled."""

    dtype: str  # "bf16" or "fp16"
    scale: str | None  # dtype of the scale: "fp32", "bf16" or "fp16"; None for none
    slots: int = SLOTS[-1]  # of a token, summed at once: one of `SLOTS`
    adds: bool = False  # whether there is an addend per token
    rounds: bool = False  # whether the sum is rounded before the addend is added

    @property
    def symbol(self) -> str:
        scaled, adds = f"_scaled_{self.scale}" if self.scale else "", "_adds" if self.adds else ""
        rounded = "_rounded" if self.rounds else ""
        return f"{self.family}_sum_slots_by_{self.slots}_{self.dtype}{scaled}{adds}{rounded}"

    @property
    def vectors(self) -> int:
        """Vectors per lane."""
        return max(LOADS // self.slots, 1)

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (R, H), rows of slots (T*K,) int64, scale (R,), addend (T, H), out
        (T, H), which may be the addend, and K.
        """
        rows, slots, tokens = (cute.sym_int() for _ in range(3))
        columns = cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, rows, columns), fake_vector("int64", slots),
            fake_vector(self.scale or "fp32", rows), fake_matrix(self.dtype, tokens, columns),
            fake_matrix(self.dtype, tokens, columns), Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(self, rows, row_of_slot, scale, addend, out, chosen, stream):
        blocks = cute.ceil_div(out.shape[1], BLOCK * self.vectors)
        units = out.shape[0] * blocks
        self.kernel(rows, row_of_slot, scale, addend, out, chosen, blocks, units).launch(**_launch(units, stream))

    @cute.kernel
    def kernel(self, rows, row_of_slot, scale, addend, out, chosen, blocks, units):
        unit, lane = _unit()
        if unit < units:
            token = unit // blocks
            first_vector = (unit - token * blocks) * self.vectors * LANES + lane
            end = out.shape[1] // VECTOR
            totals = [cute.make_rmem_tensor((VECTOR,), Float32) for _ in range(self.vectors)]
            added = [cute.make_rmem_tensor((VECTOR,), out.element_type) for _ in range(self.vectors)]
            for v in cutlass.range_constexpr(self.vectors):
                totals[v].fill(0.0)
                if const_expr(self.adds):
                    added[v].fill(0.0)
                    if first_vector + v * LANES < end:
                        at = cute.local_tile(addend[token, None], (VECTOR,), (first_vector + v * LANES,))
                        cute.autovec_copy(at, added[v])  # and used at the end: the warp would wait for it here
            for first in cutlass.range(0, chosen, self.slots, unroll=1):
                row_of_lane, factor_of_lane = rows.shape[0], Float32(0.0)
                if lane < self.slots and first + lane < chosen:
                    row_of_lane = Int32(row_of_slot[token * chosen + first + lane])
                if const_expr(self.scale is not None):
                    if row_of_lane < rows.shape[0]:
                        factor_of_lane = Float32(scale[row_of_lane])
                loaded = [cute.make_rmem_tensor((VECTOR,), rows.element_type) for _ in range(self.slots * self.vectors)]
                for i in cutlass.range_constexpr(self.slots):
                    row = cute.arch.shuffle_sync(row_of_lane, i)
                    for v in cutlass.range_constexpr(self.vectors):
                        to, vector = loaded[i * self.vectors + v], first_vector + v * LANES
                        to.fill(0.0)
                        if vector < end and row < rows.shape[0]:
                            cute.autovec_copy(cute.local_tile(rows[row, None], (VECTOR,), (vector,)), to)
                for i in cutlass.range_constexpr(self.slots):
                    factor = Float32(1.0)
                    if const_expr(self.scale is not None):
                        factor = cute.arch.shuffle_sync(factor_of_lane, i)
                    for v in cutlass.range_constexpr(self.vectors):
                        values = loaded[i * self.vectors + v].load().to(Float32)
                        totals[v].store(totals[v].load() + values * factor)
            for v in cutlass.range_constexpr(self.vectors):
                if first_vector + v * LANES < end:
                    result = cute.make_rmem_tensor((VECTOR,), out.element_type)
                    if const_expr(self.rounds):
                        totals[v].store(totals[v].load().to(out.element_type).to(Float32))
                    if const_expr(self.adds):
                        totals[v].store(totals[v].load() + added[v].load().to(Float32))
                    result.store(totals[v].load().to(out.element_type))
                    cute.autovec_copy(result, cute.local_tile(out[token, None], (VECTOR,), (first_vector + v * LANES,)))


@dataclass(frozen=True)
class RowDots(WarpKernel):
    """Dot products of rows with their tokens' rows: the gradient of the weights that `SumSlots` scales by."""

    dtype: str  # "bf16" or "fp16"
    out: str  # dtype of the results: "fp32", "bf16" or "fp16"

    @property
    def symbol(self) -> str:
        return f"{self.family}_row_dots_{self.dtype}_{self.out}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (R, H), source (T, H), slots of rows (R,) int64, rows of slots
        (T*K,) int64, dots (R,) and K.
        """
        rows, columns = cute.sym_int(), cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, rows, columns), fake_matrix(self.dtype, cute.sym_int(), columns),
            fake_vector("int64", rows), fake_vector("int64", cute.sym_int()), fake_vector(self.out, rows), Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(self, rows, source, slot_of_row, row_of_slot, dots, chosen, stream):
        self.kernel(rows, source, slot_of_row, row_of_slot, dots, chosen).launch(**_launch(rows.shape[0], stream))

    @cute.kernel
    def kernel(self, rows, source, slot_of_row, row_of_slot, dots, chosen):
        row, lane = _unit()
        if row < rows.shape[0]:
            slot = Int32(slot_of_row[row])
            token = slot // chosen
            total = cute.make_rmem_tensor((VECTOR,), Float32)
            total.fill(0.0)
            if Int32(row_of_slot[slot]) == row:
                for block in cutlass.range(0, cute.ceil_div(rows.shape[1], BLOCK), VECTORS, unroll=1):
                    a = [cute.make_rmem_tensor((VECTOR,), rows.element_type) for _ in range(VECTORS)]
                    b = [cute.make_rmem_tensor((VECTOR,), rows.element_type) for _ in range(VECTORS)]
                    for i in cutlass.range_constexpr(VECTORS):
                        vector = (block + i) * LANES + lane
                        a[i].fill(0.0)
                        b[i].fill(0.0)
                        if vector * VECTOR < rows.shape[1]:
                            cute.autovec_copy(cute.local_tile(rows[row, None], (VECTOR,), (vector,)), a[i])
                            cute.autovec_copy(cute.local_tile(source[token, None], (VECTOR,), (vector,)), b[i])
                    for i in cutlass.range_constexpr(VECTORS):
                        total.store(total.load() + a[i].load().to(Float32) * b[i].load().to(Float32))
            of_lane = Float32(0.0)
            for i in cutlass.range_constexpr(VECTOR):
                of_lane += total[i]
            dot = cute.arch.warp_reduction_sum(of_lane)
            if lane == 0:
                dots[row] = dot.to(dots.element_type)


@dataclass(frozen=True)
class SlotValues(WarpKernel):
    """The value of each slot's row, zero for sentinels: turns the gradient of `probs` into that of the weights."""

    dtype: str  # "fp32", "bf16" or "fp16"

    @property
    def symbol(self) -> str:
        return f"{self.family}_slot_values_{self.dtype}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of values (R,), rows of slots (T*K,) int64 and out (T*K,)."""
        slots = cute.sym_int()
        return self.compiled_for(
            fake_vector(self.dtype, cute.sym_int()), fake_vector("int64", slots), fake_vector(self.dtype, slots)
        )

    @cute.jit
    def __call__(self, values, row_of_slot, out, stream):
        self.kernel(values, row_of_slot, out).launch(**_launch(cute.ceil_div(cute.size(out), LANES), stream))

    @cute.kernel
    def kernel(self, values, row_of_slot, out):
        unit, lane = _unit()
        slot = unit * LANES + lane
        if slot < cute.size(out):
            row = Int32(row_of_slot[slot])
            value = Float32(0.0).to(values.element_type)
            if row < cute.size(values):
                value = values[row]
            out[slot] = value
