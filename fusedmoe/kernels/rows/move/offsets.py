"""Kernels that compute the ends of the experts' rows, the sum of each expert's rows, and zeros after the last expert's.

`Offsets`: ``offsets[e] = min(sum(max(splits[: e + 1], 0)), rows)``, one CTA, no barrier. A warp has a chunk of 32
experts, one per lane. It adds up the splits of the earlier chunks itself; those loads do not wait for one another.
Every split is clamped to [0, rows] and added in 64 bits, so that no value overflows.

`ColumnSums`: ``sums[e] = sum of grad over the rows of e`` in fp32, without atomics, in two launches.

1. Rows are cut into slices of equal length, regardless of the experts, so a skewed routing costs no more than an even
   one. A warp has one slice and 256 columns, 16 bytes per lane. It loads `IN_FLIGHT` rows before it adds the first. It
   writes one partial sum for each *piece*: the rows of one expert in its slice. From each piece to the next, over all
   slices, the slice or the expert increases, and neither decreases. So ``slice + expert``, below S + E, is a unique
   number of the piece, and the launches need no table.
2. A CTA adds up the partial sums of one expert, for 128 columns: first each warp some of them, then the warps' sums.
   The expert's pieces are in the slices from its first row's to its last row's. ``offsets`` alone determines the order.

`ZeroTail`: zeros in the rows after the last expert's. A fixed number of CTAs divides these rows. Without such rows,
they only read where the last expert's rows end.

Rows after the last expert are never read.

Axes: R rows sorted by expert, E experts, N columns, S slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, fake_matrix, fake_vector, inclusive_sum

OFFSETS_WARPS = 16  # one pass for up to 512 experts
SUM_WARPS = 8  # per CTA, in both launches
IN_FLIGHT = 8  # rows of 512 bytes: 96 KiB per SM, with its 24 warps
CHUNKS_IN_FLIGHT = 4  # of 32 experts
PARTIAL_VECTOR = 4  # columns per lane in the second launch: 16 bytes of fp32
PARTIALS_IN_FLIGHT = 4
PARTIAL_COLUMNS = LANES * PARTIAL_VECTOR
TAIL_CTAS = 264  # two per SM, or nearly
TAIL_WARPS = 8


@dataclass(frozen=True)
class Offsets(WarpKernel):
    """Ends of the experts' rows."""

    dtype: str = "int64"  # of the splits: "int32" or "int64"

    @property
    def symbol(self) -> str:
        return f"{self.family}_offsets_{self.dtype}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of splits (E,), offsets (E,) int32 and the number of rows."""
        experts = cute.sym_int()
        return self.compiled_for(fake_vector(self.dtype, experts), fake_vector("int32", experts), Int32(0))

    @cute.jit
    def __call__(self, splits, offsets, rows, stream):
        self.kernel(splits, offsets, rows).launch(grid=(1, 1, 1), block=(OFFSETS_WARPS * LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, splits, offsets, rows):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        experts = cute.size(splits)
        added, before = Int32(0), Int64(0)  # chunks that are added up; this lane's part of their sum
        for chunk in cutlass.range(warp, cute.ceil_div(experts, LANES), OFFSETS_WARPS, unroll=1):
            expert = chunk * LANES + lane
            split = Int64(0)
            if expert < experts:
                split = self.clamped(splits[expert], rows)
            while added < chunk:
                loaded = cute.make_rmem_tensor((CHUNKS_IN_FLIGHT,), splits.element_type)
                loaded.fill(0)
                for i in cutlass.range_constexpr(CHUNKS_IN_FLIGHT):
                    if added + i < chunk:
                        loaded[i] = splits[(added + i) * LANES + lane]
                for i in cutlass.range_constexpr(CHUNKS_IN_FLIGHT):
                    before += self.clamped(loaded[i], rows)
                added = cutlass.min(added + CHUNKS_IN_FLIGHT, chunk)
            end = cute.arch.warp_reduction_sum(before) + inclusive_sum(split, lane)
            if expert < experts:
                offsets[expert] = Int32(cutlass.min(end, Int64(rows)))

    def clamped(self, split: Any, rows: Int32) -> Int64:
        return cutlass.min(cutlass.max(Int64(split), Int64(0)), Int64(rows))


@dataclass(frozen=True)
class ColumnSums(WarpKernel):
    """Sums of the rows of each expert."""

    dtype: str  # of the rows: "bf16" or "fp16"
    out: str  # of the sums: "bf16", "fp16" or "fp32"

    @property
    def symbol(self) -> str:
        return f"{self.family}_column_sums_{self.dtype}_{self.out}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of grad (R, N), offsets (E,) int32, partial sums (S + E, N) fp32, sums
        (E, N), and the length of a slice, which cuts R into at most S.
        """
        rows, experts, columns = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, rows, columns), fake_vector("int32", experts),
            fake_matrix("fp32", cute.sym_int(), columns), fake_matrix(self.out, experts, columns), Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(self, grad, offsets, partial, sums, slice_rows, stream):
        experts, columns = sums.shape
        blocks = cute.ceil_div(columns, LANES * VECTOR)
        units = cute.ceil_div(grad.shape[0], slice_rows) * blocks
        block = (SUM_WARPS * LANES, 1, 1)
        self.add_slices(grad, offsets, partial, slice_rows, blocks, units).launch(
            grid=(cute.ceil_div(units, SUM_WARPS), 1, 1), block=block, stream=stream
        )
        self.add_partials(offsets, partial, sums, slice_rows).launch(
            grid=(cute.ceil_div(columns, PARTIAL_COLUMNS) * experts, 1, 1), block=block, stream=stream
        )

    # -- first launch: rows to partial sums

    @cute.kernel
    def add_slices(self, grad, offsets, partial, slice_rows, blocks, units):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bidx, _, _ = cute.arch.block_idx()
        unit = bidx * SUM_WARPS + warp
        if unit < units:
            # adjacent warps read adjacent columns of the same rows
            slice_ = unit // blocks
            vector = (unit - slice_ * blocks) * LANES + lane
            row = slice_ * slice_rows
            experts = cute.size(offsets)
            end = cutlass.min(row + cutlass.min(slice_rows, grad.shape[0] - row), offsets[experts - 1])
            expert = self.experts_before(offsets, row, lane)
            if vector * VECTOR < grad.shape[1]:
                while row < end:
                    stop = cutlass.min(offsets[expert], end)
                    if row < stop:
                        self.add_piece(grad, partial, row, stop, slice_ + expert, vector)
                        row = stop
                    expert += 1

    @cute.jit
    def experts_before(self, offsets, row, lane):
        """Number of experts that end at or before this row, which belongs to the next expert."""
        experts = cute.size(offsets)
        count = Int32(0)
        for chunk in cutlass.range(0, experts, LANES * CHUNKS_IN_FLIGHT, unroll=1):
            ends = cute.make_rmem_tensor((CHUNKS_IN_FLIGHT,), Int32)
            ends.fill(row + 1)
            for i in cutlass.range_constexpr(CHUNKS_IN_FLIGHT):
                if chunk + i * LANES + lane < experts:
                    ends[i] = offsets[chunk + i * LANES + lane]
            for i in cutlass.range_constexpr(CHUNKS_IN_FLIGHT):
                count += Int32(ends[i] <= row)
        return cute.arch.warp_reduction_sum(count)

    @cute.jit
    def add_piece(self, grad, partial, row, stop, number, vector):
        """Write the sum of one expert's rows in one slice, from ``row`` to ``stop``."""
        total = cute.make_rmem_tensor((VECTOR,), Float32)
        total.fill(0.0)
        while stop - row >= IN_FLIGHT:
            self.add_rows(total, grad, row, stop, vector, True)
            row += IN_FLIGHT
        if row < stop:
            self.add_rows(total, grad, row, stop, vector, False)
        cute.autovec_copy(total, cute.local_tile(partial[number, None], (VECTOR,), (vector,)))

    @cute.jit
    def add_rows(self, total, grad, row, stop, vector, whole: cutlass.Constexpr[bool]):
        """Add `IN_FLIGHT` rows; unless ``whole``, only those before ``stop``."""
        loaded = [cute.make_rmem_tensor((VECTOR,), grad.element_type) for _ in range(IN_FLIGHT)]
        at = cute.local_tile(grad[row, None], (VECTOR,), (vector,)).iterator
        for i in cutlass.range_constexpr(IN_FLIGHT):
            here = cute.make_tensor(at, cute.make_layout((VECTOR,)))
            at += grad.stride[0]
            if const_expr(whole):
                cute.autovec_copy(here, loaded[i], l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE)
            else:
                loaded[i].fill(0.0)
                if i < stop - row:
                    cute.autovec_copy(here, loaded[i], l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE)
        for i in cutlass.range_constexpr(IN_FLIGHT):
            total.store(total.load() + loaded[i].load().to(Float32))

    # -- second launch: partial sums to sums

    @cute.kernel
    def add_partials(self, offsets, partial, sums, slice_rows):
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bidx, _, _ = cute.arch.block_idx()
        experts, columns = sums.shape
        block = bidx // experts
        expert = bidx - block * experts
        smem = SmemAllocator()
        s_total = smem.allocate_tensor(Float32, cute.make_layout((PARTIAL_COLUMNS, SUM_WARPS)), 16)

        first, end = Int32(0), offsets[expert]
        if expert > 0:
            first = offsets[expert - 1]
        total = cute.make_rmem_tensor((PARTIAL_VECTOR,), Float32)
        total.fill(0.0)
        vector = block * LANES + lane
        if first < end and vector * PARTIAL_VECTOR < columns:
            stop = (end - 1) // slice_rows + 1 + expert
            number = first // slice_rows + expert + warp
            while number < stop:
                loaded = [cute.make_rmem_tensor((PARTIAL_VECTOR,), Float32) for _ in range(PARTIALS_IN_FLIGHT)]
                at = cute.local_tile(partial[number, None], (PARTIAL_VECTOR,), (vector,)).iterator
                for i in cutlass.range_constexpr(PARTIALS_IN_FLIGHT):
                    loaded[i].fill(0.0)
                    if number + i * SUM_WARPS < stop:
                        cute.autovec_copy(cute.make_tensor(at, cute.make_layout((PARTIAL_VECTOR,))), loaded[i])
                    at += SUM_WARPS * partial.stride[0]
                for i in cutlass.range_constexpr(PARTIALS_IN_FLIGHT):
                    total.store(total.load() + loaded[i].load())
                number += PARTIALS_IN_FLIGHT * SUM_WARPS
        cute.autovec_copy(total, cute.local_tile(s_total[None, warp], (PARTIAL_VECTOR,), (lane,)))
        cute.arch.sync_threads()
        column = block * PARTIAL_COLUMNS + thread
        if thread < PARTIAL_COLUMNS and column < columns:
            value = Float32(0.0)
            for w in cutlass.range_constexpr(SUM_WARPS):
                value += s_total[thread, w]
            sums[expert, column] = value.to(sums.element_type)


@dataclass(frozen=True)
class ZeroTail(WarpKernel):
    """Zeros in the rows after the last expert's."""

    dtype: str  # of the rows: "bf16" or "fp16"

    @property
    def symbol(self) -> str:
        return f"{self.family}_zero_tail_{self.dtype}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (R, N) and offsets (E,) int32."""
        rows = fake_matrix(self.dtype, cute.sym_int(), cute.sym_int(divisibility=VECTOR))
        return self.compiled_for(rows, fake_vector("int32", cute.sym_int()))

    @cute.jit
    def __call__(self, rows, offsets, stream):
        self.kernel(rows, offsets).launch(grid=(TAIL_CTAS, 1, 1), block=(TAIL_WARPS * LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, rows, offsets):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        zeros = cute.make_rmem_tensor((VECTOR,), rows.element_type)
        zeros.fill(0.0)
        first = offsets[cute.size(offsets) - 1] + block
        for row in cutlass.range(first, rows.shape[0], TAIL_CTAS, unroll=1):
            for vector in cutlass.range(thread, rows.shape[1] // VECTOR, TAIL_WARPS * LANES, unroll=1):
                cute.autovec_copy(zeros, cute.local_tile(rows[row, None], (VECTOR,), (vector,)))
