"""Kernels that sort tokens by expert, and return rows to token order.

A *slot* (t, k) is the k-th expert of token t, number ``t * K + k``. R = T*K slots become R rows. A slot whose id is
outside [0, E) is a sentinel; the rows of sentinels come after those of every expert. No result is written by atomics.

`Route`: a stable counting sort of the slots, in one launch for up to `CHUNK` slots, else in two. A CTA has one chunk. A
warp takes 32 slots at a time, in order. ``match`` finds the lanes with the same expert, and the lowest of them counts
for all. The first of two launches writes the number of slots per chunk and expert. In the second, each CTA adds up the
counts of the chunks before its own, so it knows where its rows begin without waiting for another CTA. A router's kernel
may have counted the slots already: then there is one launch, with the router's chunks.

`GatherRows`: ``rows[r] = scale[r] * source[token of r]``, zeros for sentinels. A warp has one token and 1,024 columns.
It reads them once and writes them to each of the token's rows. Other warps clear rows of sentinels: each searches 32.

`SumSlots`: ``out[t] = sum over k of scale[row] * rows[row of slot (t, k)]`` in fp32, in the order of k, and then an
optional addend of the token. A warp has one token and 256 columns, or 512 if a token has at most two slots. Each lane
issues its loads of up to 8 slots, and waits for at most one of them before it issues the last. The row numbers are
loaded at once, one per lane; otherwise each row would wait for the previous one.

`SlotValues`: ``out[t, k] = values[row of slot (t, k)]``, zeros for sentinels.

`RowDots`: ``dots[r] = sum over columns of rows[r] * source[token of r]`` in fp32, zeros for sentinels. A warp has
one row.

Rows of sentinels are never read. Axes: T tokens, K slots per token, R rows, E experts, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.sm90.warps import LANES, VECTOR, WarpKernel, fake_matrix, fake_vector, inclusive_sum

WARPS = 8  # per CTA
VECTORS = 4  # that a lane loads at once, when rows are gathered or multiplied
BLOCK = LANES * VECTOR  # columns that a warp reads at once
LOADS = 4  # per lane, when rows of fewer slots are summed; with 8 loads, 4 or 2 slots take a quarter longer
SLOTS = (2, 4, 8)  # of a token, summed at once
STEPS = 8  # of 32 slots per warp, when slots are sorted
CHUNK = WARPS * STEPS * LANES
FULL = 0xFFFFFFFF  # mask of all lanes


def _launch(units: Any, stream: Any) -> dict[str, Any]:
    """Launch arguments for one warp per unit of work."""
    return {"grid": (cute.ceil_div(units, WARPS), 1, 1), "block": (WARPS * LANES, 1, 1), "stream": stream}


def _unit() -> tuple[Any, Any]:
    """Return the warp's unit of work, and the lane."""
    block, _, _ = cute.arch.block_idx()
    return block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()


@dataclass(frozen=True)
class Route(WarpKernel):
    """The row of each slot, the slot, the token and the weight of each row, and the rows per expert."""

    index: str  # dtype of the expert ids: "int32" or "int64"
    weight: str  # dtype of the weights: "fp32", "bf16" or "fp16"
    experts: int  # maximum; a multiple of 8
    chunked: bool  # whether there is more than one chunk
    counted: bool = False  # whether the counts are given

    @property
    def symbol(self) -> str:
        counted = "_counted" if self.counted else ""
        return f"sm90_route_{self.index}_{self.weight}_{self.experts}" + ("_chunked" if self.chunked else "") + counted

    def compile(self) -> Any:
        """Compile without a GPU; a function of ids (R,), weights (R,), counts (chunks, experts + 1) int32, rows of
        slots (R,) int64, slots of rows (R,) int64, tokens of rows (R,) int32, probs (R,), splits (E,) int64, K, and
        the slots of a chunk, at most `CHUNK`.
        """
        slots, experts = cute.sym_int(), cute.sym_int()
        counts = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
        weight = fake_vector(self.weight, slots)
        return self.compiled_for(
            fake_vector(self.index, slots), weight, counts, fake_vector("int64", slots), fake_vector("int64", slots),
            fake_vector("int32", slots), weight, fake_vector("int64", experts), Int32(1), Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, index, weight, counts, row_of_slot, slot_of_row, token_of_row, probs, splits, chosen, chunk_slots, stream
    ):
        grid, block = (cute.ceil_div(cute.size(index), chunk_slots), 1, 1), (WARPS * LANES, 1, 1)
        if const_expr(self.chunked and not self.counted):
            self.count(index, counts, cute.size(splits), chunk_slots).launch(grid=grid, block=block, stream=stream)
        self.place(
            index, weight, counts, row_of_slot, slot_of_row, token_of_row, probs, splits, chosen, chunk_slots
        ).launch(grid=grid, block=block, stream=stream)

    @cute.jit
    def load_keys(self, index, chunk, chunk_slots, warp, lane, experts):
        """The experts of a warp's slots, E for a sentinel, -1 after the chunk's last slot; and the first slot."""
        before = warp * (STEPS * LANES)  # slots of the chunk
        first = chunk * chunk_slots + before
        left = cutlass.min(chunk_slots - before, cute.size(index) - first)
        keys = cute.make_rmem_tensor((STEPS,), Int32)
        keys.fill(-1)
        for i in cutlass.range_constexpr(STEPS):
            if i * LANES + lane < left:
                chosen = Int64(index[first + i * LANES + lane])
                keys[i] = experts
                if chosen >= 0 and chosen < Int64(experts):
                    keys[i] = Int32(chosen)
        return keys, first

    @cute.kernel
    def count(self, index, counts, experts, chunk_slots):
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        chunk, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        s_count = smem.allocate_tensor(Int32, cute.make_layout((self.experts + 8,)), 16)
        for bucket in cutlass.range(thread, experts + 1, WARPS * LANES, unroll=1):
            s_count[bucket] = 0
        cute.arch.sync_threads()
        keys, _ = self.load_keys(index, chunk, chunk_slots, warp, lane, experts)
        for i in cutlass.range_constexpr(STEPS):
            same = cute.arch.match_sync(FULL, keys[i])
            lower = cute.arch.popc(same & ((Uint32(1) << Uint32(lane)) - Uint32(1)))
            if keys[i] >= 0 and lower == 0:  # integers: the same sum in every order
                cute.arch.atomic_add(s_count.iterator + keys[i], Int32(cute.arch.popc(same)), scope="cta")
        cute.arch.sync_threads()
        for bucket in cutlass.range(thread, experts + 1, WARPS * LANES, unroll=1):
            counts[chunk, bucket] = s_count[bucket]

    @cute.kernel
    def place(self, index, weight, counts, row_of_slot, slot_of_row, token_of_row, probs, splits, chosen, chunk_slots):
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        chunk, _, _ = cute.arch.block_idx()
        experts, slots = cute.size(splits), cute.size(index)
        smem = SmemAllocator()
        buckets = self.experts + 8
        s_count = smem.allocate_tensor(Int32, cute.make_layout((buckets, WARPS)), 16)
        s_total = smem.allocate_tensor(Int32, cute.make_layout((buckets,)), 16)
        s_start = smem.allocate_tensor(Int32, cute.make_layout((buckets,)), 16)
        for bucket in cutlass.range(thread, experts + 1, WARPS * LANES, unroll=1):
            for w in cutlass.range_constexpr(WARPS):
                s_count[bucket, w] = 0
        cute.arch.sync_threads()

        # each slot's rank among those of its warp that chose the same expert
        keys, first = self.load_keys(index, chunk, chunk_slots, warp, lane, experts)
        ranks = cute.make_rmem_tensor((STEPS,), Int32)
        ranks.fill(0)
        for i in cutlass.range_constexpr(STEPS):
            same = cute.arch.match_sync(FULL, keys[i])
            lower = cute.arch.popc(same & ((Uint32(1) << Uint32(lane)) - Uint32(1)))
            if keys[i] >= 0:
                ranks[i] = s_count[keys[i], warp] + Int32(lower)
            cute.arch.sync_warp()
            if keys[i] >= 0 and lower == 0:
                s_count[keys[i], warp] = ranks[i] + Int32(cute.arch.popc(same))
            cute.arch.sync_warp()
        cute.arch.sync_threads()

        # per expert: the slots before this warp's in this chunk, those in earlier chunks, and all
        for bucket in cutlass.range(thread, experts + 1, WARPS * LANES, unroll=1):
            total = Int32(0)
            for w in cutlass.range_constexpr(WARPS):
                of_warp = s_count[bucket, w]
                s_count[bucket, w] = total
                total += of_warp
            earlier = Int32(0)
            if const_expr(self.chunked):
                total = Int32(0)
                for c in cutlass.range(cute.size(counts, mode=[0]), unroll=8):
                    of_chunk = counts[c, bucket]
                    if c < chunk:
                        earlier += of_chunk
                    total += of_chunk
            s_total[bucket] = total
            s_start[bucket] = earlier
            if chunk == 0 and bucket < experts:
                splits[bucket] = Int64(total)
        cute.arch.sync_threads()

        # first row of each expert, plus its slots in earlier chunks
        if warp == 0:
            carried = Int32(0)
            for chunk_of_experts in cutlass.range(0, experts + 1, LANES, unroll=1):
                bucket = chunk_of_experts + lane
                total = Int32(0)
                if bucket <= experts:
                    total = s_total[bucket]
                end = inclusive_sum(total, lane)
                if bucket <= experts:
                    s_start[bucket] = s_start[bucket] + carried + end - total
                carried += cute.arch.shuffle_sync(end, LANES - 1)
        cute.arch.sync_threads()

        for i in cutlass.range_constexpr(STEPS):
            slot = first + i * LANES + lane
            if keys[i] >= 0:
                row = s_start[keys[i]] + s_count[keys[i], warp] + ranks[i]
                slot_of_row[row] = Int64(slot)
                token_of_row[row] = slot // chosen
                if keys[i] < experts:
                    row_of_slot[slot] = Int64(row)
                    probs[row] = weight[slot]
                else:
                    row_of_slot[slot] = Int64(slots)
                    probs[row] = Float32(0.0).to(probs.element_type)


@dataclass(frozen=True)
class GatherRows(WarpKernel):
    """Rows of tokens, sorted by expert, optionally scaled."""

    dtype: str  # "bf16" or "fp16"
    scale: str | None  # dtype of the scale: "fp32", "bf16" or "fp16"; None for none

    @property
    def symbol(self) -> str:
        return f"sm90_gather_rows_{self.dtype}" + (f"_scaled_{self.scale}" if self.scale else "")

    def compile(self) -> Any:
        """Compile without a GPU; a function of source (T, H), slots of rows (R,) int64, rows of slots (R,) int64,
        scale (R,), rows (R, H) and K.
        """
        rows, columns = cute.sym_int(), cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), columns), fake_vector("int64", rows), fake_vector("int64", rows),
            fake_vector(self.scale or "fp32", rows), fake_matrix(self.dtype, rows, columns), Int32(1),
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
            row = first + Int32(cute.arch.popc((left - 1) & ~left))  # the lowest bit
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

    @property
    def symbol(self) -> str:
        scaled, adds = f"_scaled_{self.scale}" if self.scale else "", "_adds" if self.adds else ""
        return f"sm90_sum_slots_by_{self.slots}_{self.dtype}{scaled}{adds}"

    @property
    def vectors(self) -> int:
        """Vectors per lane."""
        return max(LOADS // self.slots, 1)

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (R, H), rows of slots (R,) int64, scale (R,), addend (T, H), out
        (T, H), which may be the addend, and K.
        """
        rows, tokens, columns = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, rows, columns), fake_vector("int64", rows), fake_vector(self.scale or "fp32", rows),
            fake_matrix(self.dtype, tokens, columns), fake_matrix(self.dtype, tokens, columns), Int32(1),
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
        return f"sm90_row_dots_{self.dtype}_{self.out}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (R, H), source (T, H), slots of rows (R,) int64, rows of slots (R,)
        int64, dots (R,) and K.
        """
        rows, columns = cute.sym_int(), cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, rows, columns), fake_matrix(self.dtype, cute.sym_int(), columns),
            fake_vector("int64", rows), fake_vector("int64", rows), fake_vector(self.out, rows), Int32(1),
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
        return f"sm90_slot_values_{self.dtype}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of values (R,), rows of slots (R,) int64 and out (R,)."""
        slots = cute.sym_int()
        return self.compiled_for(
            fake_vector(self.dtype, slots), fake_vector("int64", slots), fake_vector(self.dtype, slots)
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
