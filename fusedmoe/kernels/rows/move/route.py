"""The kernel that sorts slots by expert.

A *slot* (t, k) is the k-th expert of token t, number ``t * K + k``. The T*K slots become rows. A slot whose id is
outside [0, E) is a sentinel; the rows of sentinels come after those of every expert. No result is written by atomics.

There may be fewer rows, R. Then the slots after row R - 1 have none: their row is R, as that of sentinels. The rows of
the experts end at R at the latest.

`Route`: a stable counting sort of the slots, in one launch for up to `CHUNK` slots, else in two. A CTA has one chunk.
The first of two launches writes the number of slots per chunk and expert. A router's kernel may have counted the slots
already: then there is one launch, with the router's chunks.

The launch that places the slots:

1. All threads add up the counts of the chunks, of all and of those before the CTA's own. So a CTA knows where its rows
   begin without waiting for another CTA.
2. Each warp ranks its slots among those with the same expert, 32 at a time in order. One ballot per bit of the id finds
   the lanes with the same expert.
3. Prefix sums over the warps, for each expert, and over the experts.
4. The slots are sorted in shared memory. So adjacent threads then write adjacent rows of an expert.

Axes: T tokens, K slots per token, R rows, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.warps import ELEMENTS, LANES, WarpKernel, fake_vector, inclusive_sum

WARPS = 32  # per CTA: one lane each, where the counts of the warps are added up
THREADS = WARPS * LANES  # at least the maximum number of experts
STEPS = 2  # of 32 slots per warp
CHUNK = THREADS * STEPS
QUAD = 4  # counts per load
IN_FLIGHT = 5  # loads of counts per thread: all of 128 chunks of 128 experts


@dataclass(frozen=True)
class Route(WarpKernel):
    """The row of each slot; the slot, the token and the weight of each row; the rows per expert, and their ends."""

    index: str  # dtype of the expert ids: "int32" or "int64"
    weight: str  # dtype of the weights: "fp32", "bf16" or "fp16"
    experts: int  # maximum; a multiple of 32, at most `THREADS`
    chunked: bool  # whether there is more than one chunk
    counted: bool = False  # whether the counts are given

    @property
    def symbol(self) -> str:
        chunked, counted = "_chunked" if self.chunked else "", "_counted" if self.counted else ""
        return f"{self.family}_route_{self.index}_{self.weight}_{self.experts}{chunked}{counted}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of ids (T*K,), weights (T*K,), counts (chunks, E + 1) int32 of the pitch
        `slot_functions.count_pitch`, rows of slots (T*K,) int64, slots of rows (R,) int64, tokens of rows (R,) int32,
        probs (R,), splits (E,) int64, offsets (E,) int32, K, and the slots of a chunk, at most `CHUNK`.
        """
        slots, rows, experts = cute.sym_int(), cute.sym_int(), cute.sym_int()
        strides = (cute.sym_int64(divisibility=QUAD), 1)
        counts = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), strides, assumed_align=16)
        return self.compiled_for(
            fake_vector(self.index, slots), fake_vector(self.weight, slots), counts, fake_vector("int64", slots),
            fake_vector("int64", rows), fake_vector("int32", rows), fake_vector(self.weight, rows),
            fake_vector("int64", experts), fake_vector("int32", experts), Int32(1), Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, index, weight, counts, row_of_slot, slot_of_row, token_of_row, probs, splits, offsets,
        chosen, chunk_slots, stream,
    ):  # fmt: skip
        grid, block = (cute.ceil_div(cute.size(index), chunk_slots), 1, 1), (THREADS, 1, 1)
        if const_expr(self.chunked and not self.counted):
            self.count(index, counts, cute.size(splits), chunk_slots).launch(grid=grid, block=block, stream=stream)
        self.place(
            index, weight, counts, row_of_slot, slot_of_row, token_of_row, probs, splits, offsets, chosen, chunk_slots
        ).launch(grid=grid, block=block, stream=stream)

    @cute.jit
    def load(self, t, chunk, chunk_slots, warp, lane):
        """A warp's values of a vector of the slots. They are loaded at once, from addresses that exist in any case."""
        values = cute.make_rmem_tensor((STEPS,), t.element_type)
        for i in cutlass.range_constexpr(STEPS):
            slot = chunk * chunk_slots + (warp * STEPS + i) * LANES + lane
            values[i] = t[cutlass.min(slot, cute.size(t) - 1)]
        return values

    @cute.jit
    def keys_of(self, ids, chunk, chunk_slots, warp, lane, slots, experts):
        """The experts of a warp's slots, E for a sentinel, -1 after the chunk's last slot."""
        keys = cute.make_rmem_tensor((STEPS,), Int32)
        keys.fill(-1)
        here = cutlass.min(chunk_slots, slots - chunk * chunk_slots)
        for i in cutlass.range_constexpr(STEPS):
            if (warp * STEPS + i) * LANES + lane < here:
                chosen = Int64(ids[i])
                keys[i] = experts
                if chosen >= 0 and chosen < Int64(experts):
                    keys[i] = Int32(chosen)
        return keys

    @cute.kernel
    def count(self, index, counts, experts, chunk_slots):
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        chunk, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        s_count = smem.allocate_tensor(Int32, cute.make_layout((self.experts + 1,)), 16)
        ids = self.load(index, chunk, chunk_slots, warp, lane)
        keys = self.keys_of(ids, chunk, chunk_slots, warp, lane, cute.size(index), experts)
        for bucket in cutlass.range(thread, experts + 1, THREADS, unroll=1):
            s_count[bucket] = 0
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(STEPS):
            if keys[i] >= 0:  # integers: the same sum in every order
                cute.arch.atomic_add(s_count.iterator + keys[i], Int32(1), scope="cta")
        cute.arch.sync_threads()
        for bucket in cutlass.range(thread, experts + 1, THREADS, unroll=1):
            counts[chunk, bucket] = s_count[bucket]

    @cute.kernel
    def place(
        self, index, weight, counts, row_of_slot, slot_of_row, token_of_row, probs, splits, offsets, chosen, chunk_slots
    ):
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        chunk, _, _ = cute.arch.block_idx()
        experts, slots, rows = cute.size(splits), cute.size(index), cute.size(slot_of_row)
        smem = SmemAllocator()
        buckets = self.experts + 1  # an odd number: the counts of a bucket are in different banks
        s_zero = smem.allocate_tensor(Int32, cute.make_layout((buckets * WARPS // 2,)), 16)
        s_rank = cute.make_tensor(cute.recast_ptr(s_zero.iterator, dtype=Int16), cute.make_layout((buckets, WARPS)))
        s_total = smem.allocate_tensor(Int32, cute.make_layout((self.experts + QUAD,)), 16)
        s_start = smem.allocate_tensor(Int32, cute.make_layout((self.experts + QUAD,)), 16)
        s_first = smem.allocate_tensor(Int32, cute.make_layout((buckets,)), 16)
        s_scan = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 2)), 16)
        s_slot = smem.allocate_tensor(Int32, cute.make_layout((CHUNK,)), 16)
        s_row = smem.allocate_tensor(Int32, cute.make_layout((CHUNK,)), 16)
        s_prob = smem.allocate_tensor(ELEMENTS[self.weight], cute.make_layout((CHUNK,)), 16)

        ids = self.load(index, chunk, chunk_slots, warp, lane)
        weights = self.load(weight, chunk, chunk_slots, warp, lane)
        loaded = [cute.make_rmem_tensor((QUAD,), Int32) for _ in range(IN_FLIGHT)]
        if const_expr(self.chunked):
            self.load_counts(loaded, counts, thread, 0, experts)
        for i in cutlass.range(thread, cute.size(s_zero), THREADS, unroll=1):
            s_zero[i] = 0
        if const_expr(self.chunked):
            for bucket in cutlass.range(thread, self.experts + QUAD, THREADS, unroll=1):
                s_total[bucket] = 0
                s_start[bucket] = 0
        cute.arch.sync_threads()
        if const_expr(self.chunked):
            self.add_counts(loaded, counts, s_total, s_start, chunk, thread, experts)
        keys = self.keys_of(ids, chunk, chunk_slots, warp, lane, slots, experts)
        ranks = self.ranks_of(keys, s_rank, warp, lane)
        cute.arch.sync_threads()

        # per expert: the slots of the chunk before each warp's
        for bucket in cutlass.range(warp, experts + 1, WARPS, unroll=2):
            of_warp = Int32(s_rank[bucket, lane])
            end = inclusive_sum(of_warp, lane)
            s_rank[bucket, lane] = Int16(end - of_warp)
            if lane == WARPS - 1:
                s_first[bucket] = end
        cute.arch.sync_threads()
        self.scan_experts(s_total, s_start, s_first, s_scan, splits, offsets, rows, chunk, thread, warp, lane, experts)

        zero = Float32(0.0).to(weights.element_type)
        for i in cutlass.range_constexpr(STEPS):
            if keys[i] >= 0:
                slot = chunk * chunk_slots + (warp * STEPS + i) * LANES + lane
                before = Int32(s_rank[keys[i], warp]) + ranks[i]
                position, row = s_first[keys[i]] + before, s_start[keys[i]] + before
                s_slot[position] = slot
                s_row[position] = row
                s_prob[position] = cutlass.select_(keys[i] < experts, weights[i], zero)
                row_of_slot[slot] = Int64(cutlass.select_(keys[i] < experts, cutlass.min(row, rows), rows))
        cute.arch.sync_threads()

        for i in cutlass.range_constexpr(STEPS):
            position = i * THREADS + thread
            if position < cutlass.min(chunk_slots, slots - chunk * chunk_slots):
                slot, row = s_slot[position], s_row[position]
                if row < rows:
                    slot_of_row[row] = Int64(slot)
                    token_of_row[row] = slot // chosen
                    probs[row] = s_prob[position]

    @cute.jit
    def load_counts(self, loaded, counts, thread, first, experts):
        """Load the thread's counts of some experts, of `IN_FLIGHT` chunks from number ``first`` on."""
        vectors = (experts + QUAD) // QUAD
        row = thread // vectors
        for i in cutlass.range_constexpr(IN_FLIGHT):
            of_chunk = cutlass.min(first + row + i * (THREADS // vectors), cute.size(counts, mode=[0]) - 1)
            cute.autovec_copy(cute.local_tile(counts[of_chunk, None], (QUAD,), (thread - row * vectors,)), loaded[i])

    @cute.jit
    def add_counts(self, loaded, counts, s_total, s_start, chunk, thread, experts):
        """Add counts, of which ``loaded`` has the first, to ``s_total``, and those of earlier chunks to ``s_start``."""
        vectors = (experts + QUAD) // QUAD
        row = thread // vectors
        vector = thread - row * vectors
        rows = THREADS // vectors  # of counts that the threads read at once
        chunks = cute.size(counts, mode=[0])
        total = cute.make_rmem_tensor((QUAD,), Int32)
        earlier = cute.make_rmem_tensor((QUAD,), Int32)
        total.fill(0)
        earlier.fill(0)
        for first in cutlass.range(0, chunks, rows * IN_FLIGHT, unroll=1):
            for i in cutlass.range_constexpr(IN_FLIGHT):
                of_chunk = first + row + i * rows
                for j in cutlass.range_constexpr(QUAD):
                    total[j] = total[j] + cutlass.select_(of_chunk < chunks, loaded[i][j], Int32(0))
                    earlier[j] = earlier[j] + cutlass.select_(of_chunk < chunk, loaded[i][j], Int32(0))
            if first + rows * IN_FLIGHT < chunks:
                self.load_counts(loaded, counts, thread, first + rows * IN_FLIGHT, experts)
        if row < rows:
            for j in cutlass.range_constexpr(QUAD):  # integers: the same sum in every order
                cute.arch.atomic_add(s_total.iterator + (vector * QUAD + j), total[j], scope="cta")
                cute.arch.atomic_add(s_start.iterator + (vector * QUAD + j), earlier[j], scope="cta")

    @cute.jit
    def ranks_of(self, keys, s_rank, warp, lane):
        """Each slot's rank among those of its warp with the same expert, whose number is then in ``s_rank``."""
        ranks = cute.make_rmem_tensor((STEPS,), Int32)
        ranks.fill(0)
        lower_lanes = (Int32(1) << lane) - Int32(1)
        for i in cutlass.range_constexpr(STEPS):
            same = cute.arch.vote_ballot_sync(keys[i] >= 0)
            for bit in cutlass.range_constexpr(self.experts.bit_length()):
                is_set = ((keys[i] >> bit) & 1) != 0
                lanes = cute.arch.vote_ballot_sync(is_set)
                same = same & cutlass.select_(is_set, lanes, ~lanes)
            lower = cute.arch.popc(same & lower_lanes)
            if keys[i] >= 0:
                ranks[i] = Int32(s_rank[keys[i], warp]) + lower
            cute.arch.sync_warp()
            if keys[i] >= 0 and lower == 0:
                s_rank[keys[i], warp] = Int16(ranks[i] + cute.arch.popc(same))
            cute.arch.sync_warp()
        return ranks

    @cute.jit
    def scan_experts(
        self, s_total, s_start, s_first, s_scan, splits, offsets, rows, chunk, thread, warp, lane, experts
    ):
        """Turn each expert's slots in the chunk, ``s_first``, into the first position in the chunk. Add the first row
        of the expert to ``s_start``, which has its slots in earlier chunks. The sentinels follow the last expert.
        """
        total, here = Int32(0), Int32(0)
        if thread < experts:
            here = s_first[thread]
            total = s_total[thread] if const_expr(self.chunked) else here
        end, end_here = inclusive_sum(total, lane), inclusive_sum(here, lane)
        if lane == LANES - 1:
            s_scan[warp, 0] = end
            s_scan[warp, 1] = end_here
        cute.arch.sync_threads()
        if warp * LANES < experts:
            lower, lower_here = Int32(0), Int32(0)
            if lane < warp:
                lower, lower_here = s_scan[lane, 0], s_scan[lane, 1]
            end += cute.arch.warp_redux_sync(lower, "add")
            end_here += cute.arch.warp_redux_sync(lower_here, "add")
            if thread < experts:
                earlier = s_start[thread] if const_expr(self.chunked) else Int32(0)
                s_first[thread] = end_here - here
                s_start[thread] = end - total + earlier
                if chunk == 0:
                    offsets[thread] = cutlass.min(end, rows)
                    splits[thread] = Int64(cutlass.min(end, rows) - cutlass.min(end - total, rows))
                if thread == experts - 1:
                    earlier = s_start[experts] if const_expr(self.chunked) else Int32(0)
                    s_first[experts] = end_here
                    s_start[experts] = end + earlier
        cute.arch.sync_threads()
