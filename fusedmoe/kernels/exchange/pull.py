"""`Pull`: the end of a gather. A few SMs copy the rows of other ranks that have an expert here, step after step.

The steps have an order in which a product can follow them (sm90/gemm/scheduler.py): each has a word in this rank's
memory. A warp that has stored its rows of a step arrives at a barrier of the CTA. One more warp waits for all copying
warps, and adds their number to the word. A copying warp would wait at this release for all of its copies under way.

- *By experts*: the experts of this rank are in blocks, of which the product takes one after the other. A token's step
  is the block of its first expert here. So when a step is there, all rows of its block are: a token that also has an
  expert in an earlier block came with that block. The first step is the largest, but has few rows if there are many
  blocks.
- *By ranks*: the first step is for the tokens of the next rank, and so on.

The warps of a CTA sort its tokens by steps first (steps.py).

Axes: P ranks, N rows per rank, K chosen experts per row, E experts of this rank, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from fusedmoe.kernels.device.gather import CHUNK_BYTES
from fusedmoe.kernels.device.warps import LANES, VECTOR, fake_matrix, fake_vector
from fusedmoe.kernels.exchange import copies
from fusedmoe.kernels.exchange.control import complete, current, is_last, wait_for
from fusedmoe.kernels.exchange.copies import VECTORS
from fusedmoe.kernels.exchange.layout import COPY_WARPS, LISTED, MOST_RANKS, READY
from fusedmoe.kernels.exchange.steps import AT_ONCE, IN_FLIGHT, SortsTokens, listed_token, token_of

TICKET = 1
WIDE = CHUNK_BYTES // 4  # ids that a lane reads at once
WARPS = COPY_WARPS + 1


@dataclass(frozen=True)
class Pull(SortsTokens):
    """Copies of rows of the other ranks."""

    dtype: str  # "bf16" or "fp16"

    @property
    def symbol(self) -> str:
        return f"{self.family}_pull_{self.dtype}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of result (P*N, H), ids of this rank's experts (P*N*K,) int32, words (a
        vector of int32, of any size), regions of the ranks (P,) int64, control (`CONTROL_WORDS`,) int32, this rank, N,
        K, E, experts of a block (0: steps are by ranks), the number of steps, at most 32, that of the first step's word
        and the distance to the next one's (0: there are no words), first byte of the rows in a region, the time-out in
        nanoseconds, and CTAs, an even number.
        """
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), cute.sym_int(divisibility=VECTOR)),
            fake_vector("int32", cute.sym_int()), fake_vector("int32", cute.sym_int()),
            fake_vector("int64", cute.sym_int()), fake_vector("int32", cute.sym_int()),
            *[Int32(0)] * 8, *[Int64(0)] * 2, Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, out, index, words, peers, control, rank, rows, chosen, here, block, steps, word, pitch, at_rows, patience,
        ctas, stream,
    ):  # fmt: skip
        self.kernel(
            out, index, words, peers, control, rank, rows, chosen, here, block, steps, word, pitch, at_rows, patience
        ).launch(**copies.launch(ctas, stream, WARPS))  # fmt: skip

    @cute.kernel
    def kernel(
        self, out, index, words, peers, control, rank, rows, chosen, here, block, steps, word, pitch, at_rows, patience
    ):
        cute.arch.griddepcontrol_launch_dependents()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        shared = copies.allocate(out.element_type, IN_FLIGHT, LISTED, MOST_RANKS)
        barriers = shared.barriers
        ranks, exchange = cute.size(peers), current(control)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == COPY_WARPS:
            cute.arch.mbarrier_init(barriers + lane, COPY_WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == COPY_WARPS:
            if pitch > 0:
                self.tell_product(words, barriers, steps, word, pitch)
        else:
            ends = self.sort(shared, (ranks - 1) * rows, (index, rank, ranks, rows, chosen, here, block))
            if block > 0:
                if lane < ranks and lane != rank:
                    wait_for(control, READY + lane, exchange, patience)
                cute.arch.sync_warp()
            self.copy(
                out, peers, control, shared, ends, rank, rows, block, steps, at_rows, exchange, patience
            )  # fmt: skip
        if is_last(control, TICKET, ctas):
            complete(control, peers, rank, exchange)

    @cute.jit
    def find_steps(self, step, first, workers, others, given):
        """As of `SortsTokens`: a token without an expert here is not listed."""
        index, rank, ranks, rows, chosen, here, block = given
        after, row = (cute.make_rmem_tensor((AT_ONCE,), Int32) for _ in range(2))
        for i in cutlass.range_constexpr(AT_ONCE):
            # past the last token, that token again: in a branch, the warp would wait for each load
            token = cutlass.min(first + (i * LANES + cute.arch.lane_idx()) * workers, others - 1)
            after[i] = token // rows
            row[i] = token_of(token, rank, ranks, rows)
            step[i] = here  # the first expert
        if (chosen % WIDE == 0) & (index.iterator.toint() % CHUNK_BYTES == 0):
            ids = cute.make_rmem_tensor((WIDE,), Int32)
            for k in cutlass.range(0, chosen, WIDE, unroll=2):
                for i in cutlass.range_constexpr(AT_ONCE):
                    address = (index.iterator + (row[i] * chosen + k)).toint()
                    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=CHUNK_BYTES)
                    cute.autovec_copy(cute.make_tensor(pointer, ids.layout), ids)
                    for j in cutlass.range_constexpr(WIDE):
                        step[i] = cutlass.min(step[i], cutlass.select_(ids[j] >= 0, ids[j], here))
        else:
            for k in cutlass.range(chosen, unroll=4):
                for i in cutlass.range_constexpr(AT_ONCE):
                    expert = index[row[i] * chosen + k]
                    step[i] = cutlass.min(step[i], cutlass.select_(expert >= 0, expert, here))
        for i in cutlass.range_constexpr(AT_ONCE):
            is_token = first + (i * LANES + cute.arch.lane_idx()) * workers < others
            found = after[i]
            if block > 0:
                found = step[i] // block
            step[i] = cutlass.select_(is_token & (step[i] < here), found, Int32(-1))

    @cute.jit
    def copy(self, out, peers, control, shared, ends, rank, rows, block, steps, at_rows, exchange, patience):
        """Copy the rows of the listed tokens that a warp takes, and arrive at the barrier of each step."""
        staged, listed, barriers = shared.staged, shared.listed, shared.barriers
        lane, vectors, ranks = cute.arch.lane_idx(), out.shape[1] // VECTOR, cute.size(peers)
        to = out.iterator.toint()
        parts, last = cute.ceil_div(vectors, LANES * VECTORS), cute.arch.shuffle_sync(ends, LANES - 1)
        fetched, part, stage, there = Int32(0), Int32(0), Int32(0), rank
        stored, part_stored, stage_stored, told = Int32(0), Int32(0), Int32(0), Int32(0)
        for step in cutlass.range(1 - IN_FLIGHT, last * parts, unroll=1):
            wanted, token = fetched < last, Int32(0)
            if wanted:
                token = listed_token(listed, fetched)
            after = token // rows
            source = (rank + 1 + after) % ranks
            if block == 0 and wanted and source != there:
                if lane == 0:
                    wait_for(control, READY + source, exchange, patience)
                cute.arch.sync_warp()
                there = source
            address = peers[source] + at_rows
            copies.fetch(address, vectors, token - after * rows, part, lane, wanted, staged[None, None, stage])
            cute.arch.cp_async_commit_group()
            stage = cutlass.select_(stage == IN_FLIGHT - 1, Int32(0), stage + 1)
            part += 1
            if part == parts:
                part = Int32(0)
                fetched += 1
            if step >= 0:
                cute.arch.cp_async_wait_group(IN_FLIGHT - 1)
                row = token_of(listed_token(listed, stored), rank, ranks, rows)
                copies.store(to, vectors, row, part_stored, lane, staged[None, None, stage_stored])
                stage_stored = cutlass.select_(stage_stored == IN_FLIGHT - 1, Int32(0), stage_stored + 1)
                part_stored += 1
                if part_stored == parts:
                    part_stored = Int32(0)
                    stored += 1
            if part_stored == 0 and step >= -1:  # all stages are under way
                told = self.arrive(barriers, ends, steps, told, stored)
        cute.arch.cp_async_wait_group(0)
        self.arrive(barriers, ends, steps, told, stored)  # at those of a warp without tokens

    @cute.jit
    def arrive(self, barriers, ends, steps, told, stored):
        """Arrive at the barriers of the steps whose rows are all stored, a lane at each; return their number."""
        lane = cute.arch.lane_idx()
        done = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(Boolean((lane < steps) & (ends <= stored)))))
        if done > told:
            cute.arch.sync_warp()  # the stores of all lanes come before
            if lane >= told and lane < done:
                cute.arch.mbarrier_arrive(barriers + lane)
        return done

    @cute.jit
    def tell_product(self, words, barriers, steps, word, pitch):
        """Add to the word of each step when all warps of the CTA have stored its rows."""
        for step in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(barriers + step, 0)
            if cute.arch.lane_idx() == 0:
                cute.arch.red(
                    words.iterator + (word + step * pitch), Int32(COPY_WARPS), op="add", dtype="s32", sem="release",
                    scope="gpu",
                )  # fmt: skip
