"""`Pull`: the end of a gather. A few SMs copy the rows of other ranks that have an expert here, step after step.

The steps have an order in which a product can follow them (sm90/gemm/scheduler.py). After its rows of a step, each warp
adds 1 to a word of this rank's memory.

- *By experts*: the experts of this rank are in blocks, of which the product takes one after the other. A token's step
  is the block of its first expert here. So when a step is there, all rows of its block are: a token with an expert in a
  later block came before. The first step is the largest, but has few rows if there are many blocks.
- *By ranks*: step s is for the tokens of the rank after this one by s + 1.

A warp has every W-th token of the other ranks, of W warps. It sorts its tokens by steps, in shared memory. Then the
copies of all steps are one stream: it never waits for the last row of a step before it reads the next one's.

Axes: P ranks, N rows per rank, K chosen experts per row, E experts of this rank, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, fake_matrix, fake_vector, inclusive_sum
from fusedmoe.kernels.exchange import copies
from fusedmoe.kernels.exchange.control import complete, current, is_last, wait_for
from fusedmoe.kernels.exchange.copies import VECTORS
from fusedmoe.kernels.exchange.layout import PULLED, READY

TICKET = 1
STAGES = 4  # rows of a warp under way; more would not be faster, and the lists need memory
AT_ONCE = 4  # tokens of a lane whose steps are found at once


@dataclass(frozen=True)
class Pull(WarpKernel):
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
        ).launch(**copies.launch(ctas, stream))  # fmt: skip

    @cute.kernel
    def kernel(
        self, out, index, words, peers, control, rank, rows, chosen, here, block, steps, word, pitch, at_rows, patience
    ):
        cute.arch.griddepcontrol_launch_dependents()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        staged, listed = copies.allocate(out.element_type, STAGES, PULLED)
        ranks, exchange = cute.size(peers), current(control)
        if lane < ranks and lane != rank:
            wait_for(control, READY + lane, exchange, patience)
        cute.arch.sync_warp()
        ends = self.sort(index, listed, rank, ranks, rows, chosen, here, block, steps)
        self.copy(out, words, peers, listed, ends, staged, rows, steps, word, pitch, at_rows)
        if is_last(control, TICKET, ctas):
            complete(control, peers, rank, exchange)

    @cute.jit
    def sort(self, index, listed, rank, ranks, rows, chosen, here, block, steps):
        """List the rows of a warp's tokens, sorted by steps. Return, in lane s, the end of step s."""
        worker, workers = copies.worker()
        lane, others = cute.arch.lane_idx(), (ranks - 1) * rows
        earlier_lanes = (Int32(1) << lane) - 1
        step, row = (cute.make_rmem_tensor((AT_ONCE,), Int32) for _ in range(2))
        count = Int32(0)  # lane s: of step s
        for first in cutlass.range(worker, others, workers * LANES * AT_ONCE, unroll=1):
            self.find_steps(step, row, index, first, workers, rank, ranks, rows, chosen, here, block)
            for i in cutlass.range_constexpr(AT_ONCE):
                for s in cutlass.range(steps, unroll=4):
                    found = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(step[i] == s)))
                    count += cutlass.select_(lane == s, found, Int32(0))
        ends = inclusive_sum(count, lane)
        begin = ends - count
        for first in cutlass.range(worker, others, workers * LANES * AT_ONCE, unroll=1):
            self.find_steps(step, row, index, first, workers, rank, ranks, rows, chosen, here, block)
            for i in cutlass.range_constexpr(AT_ONCE):
                place, more = Int32(0), Int32(0)
                for s in cutlass.range(steps, unroll=4):
                    of_step = cute.arch.vote_ballot_sync(step[i] == s)
                    place_of_step = cute.arch.shuffle_sync(begin, s) + Int32(cute.arch.popc(of_step & earlier_lanes))
                    place = cutlass.select_(step[i] == s, place_of_step, place)
                    more += cutlass.select_(lane == s, Int32(cute.arch.popc(of_step)), Int32(0))
                begin += more
                if step[i] >= 0:
                    listed[place] = row[i]
        cute.arch.sync_warp()
        return ends

    @cute.jit
    def find_steps(self, step, row, index, first, workers, rank, ranks, rows, chosen, here, block):
        """Find the steps of some tokens of a lane, and their rows of the result; -1 for a token without an expert here.

        Tokens have their numbers among those of the other ranks, beginning with the next rank's. The i-th token is
        ``first + (i * 32 + lane) * workers``.
        """
        others = (ranks - 1) * rows
        after = cute.make_rmem_tensor((AT_ONCE,), Int32)
        for i in cutlass.range_constexpr(AT_ONCE):
            # past the last token, that token again: in a branch, the warp would wait for each load
            token = cutlass.min(first + (i * LANES + cute.arch.lane_idx()) * workers, others - 1)
            after[i] = token // rows
            row[i] = (rank + 1 + after[i]) % ranks * rows + token - after[i] * rows
            step[i] = here  # the first expert
        for k in cutlass.range(chosen, unroll=4):
            for i in cutlass.range_constexpr(AT_ONCE):
                expert = index[row[i] * chosen + k]
                step[i] = cutlass.min(step[i], cutlass.select_(expert >= 0, expert, here))
        for i in cutlass.range_constexpr(AT_ONCE):
            is_token = first + (i * LANES + cute.arch.lane_idx()) * workers < others
            of_rank_or_block = after[i]
            if block > 0:
                of_rank_or_block = step[i] // block
            step[i] = cutlass.select_(is_token & (step[i] < here), of_rank_or_block, Int32(-1))

    @cute.jit
    def copy(self, out, words, peers, listed, ends, staged, rows, steps, word, pitch, at_rows):
        """Copy the rows of a warp's list, and tell of each step."""
        lane, vectors = cute.arch.lane_idx(), out.shape[1] // VECTOR
        to = out.iterator.toint()
        blocks, last = cute.ceil_div(vectors, LANES * VECTORS), cute.arch.shuffle_sync(ends, LANES - 1)
        fetched, block, stage = Int32(0), Int32(0), Int32(0)
        stored, at_block, at_stage = Int32(0), Int32(0), Int32(0)
        told = self.tell(words, ends, steps, word, pitch, Int32(0), stored)
        for step in cutlass.range(1 - STAGES, last * blocks, unroll=1):
            row, wanted = Int32(0), fetched < last
            if wanted:
                row = listed[fetched]
            source = row // rows
            address = peers[source] + at_rows
            copies.fetch(address, vectors, row - source * rows, block, lane, wanted, staged[None, None, stage])
            cute.arch.cp_async_commit_group()
            stage = cutlass.select_(stage == STAGES - 1, Int32(0), stage + 1)
            block += 1
            if block == blocks:
                block = Int32(0)
                fetched += 1
            if step >= 0:
                cute.arch.cp_async_wait_group(STAGES - 1)
                copies.store(to, vectors, listed[stored], at_block, lane, staged[None, None, at_stage])
                at_stage = cutlass.select_(at_stage == STAGES - 1, Int32(0), at_stage + 1)
                at_block += 1
                if at_block == blocks:
                    at_block = Int32(0)
                    stored += 1
                    told = self.tell(words, ends, steps, word, pitch, told, stored)
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def tell(self, words, ends, steps, word, pitch, told, stored):
        """Add 1 to the words of the steps whose rows are all stored; return the number of steps that are told."""
        end = cute.arch.shuffle_sync(ends, told)
        while (told < steps) & (end <= stored):
            cute.arch.sync_warp()
            if pitch > 0 and cute.arch.lane_idx() == 0:
                cute.arch.fence_acq_rel_gpu()
                cute.arch.red(
                    words.iterator + (word + told * pitch), Int32(1), op="add", dtype="s32", sem="release", scope="gpu"
                )  # fmt: skip
            told += 1
            end = cute.arch.shuffle_sync(ends, told & (LANES - 1))
        return told
