"""`Pull`: the end of a gather. A few SMs copy the rows of the other ranks that have an expert here, rank after rank.

It begins with the next rank, so that at any time every rank reads another one's memory. After the rows of a rank, each
warp adds 1 to a word of this rank's memory: a product beside it may then read them (sm90/gemm/scheduler.py). A row is
copied only if one of its ids is that of an expert of this rank.

The copies go through shared memory, as in `SumOnFewSms`: a lane copies and stores its own columns, and most of an SM's
shared memory is under way. NVLink delivers less than 1 MiB in the 2 us of a read, so a few SMs suffice.

Axes: P ranks, N rows per rank, K chosen experts per row, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.gather import CHUNK_BYTES, vector
from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, fake_matrix, fake_vector
from fusedmoe.kernels.exchange.control import complete, current, is_last, wait_for
from fusedmoe.kernels.exchange.layout import PULL_WARPS as WARPS
from fusedmoe.kernels.exchange.layout import READY

CTAS = 2  # of a cluster, since products run in clusters of two: these cannot use a single free SM
VECTORS = 8  # per lane and step: a step of a warp is 2,048 columns of a row
STAGES = 7  # steps of a warp under way
BLOCK_BYTES = LANES * CHUNK_BYTES  # of a row that a warp copies at once
TICKET = 1


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
        K, experts of a rank, the number of the second rank's word and the distance to the next rank's (0: there are no
        words), first byte of the rows in a region, the time-out in nanoseconds, and CTAs, an even number.
        """
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), cute.sym_int(divisibility=VECTOR)),
            fake_vector("int32", cute.sym_int()), fake_vector("int32", cute.sym_int()),
            fake_vector("int64", cute.sym_int()), fake_vector("int32", cute.sym_int()),
            *[Int32(0)] * 6, *[Int64(0)] * 2, Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, out, index, words, peers, control, rank, rows, chosen, here, word, pitch, at_rows, patience, ctas, stream
    ):
        self.kernel(
            out, index, words, peers, control, rank, rows, chosen, here, word, pitch, at_rows, patience
        ).launch(
            grid=(ctas, 1, 1), block=(WARPS * LANES, 1, 1), cluster=(CTAS, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(self, out, index, words, peers, control, rank, rows, chosen, here, word, pitch, at_rows, patience):
        cute.arch.griddepcontrol_launch_dependents()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        layout = cute.make_layout((VECTOR, LANES, VECTORS, STAGES, WARPS))
        staged = SmemAllocator().allocate_tensor(out.element_type, layout, 16)[None, lane, None, None, warp]
        ranks, exchange = cute.size(peers), current(control)
        for step in cutlass.range(1, ranks, unroll=1):
            source = (rank + step) % ranks
            if lane == 0:
                wait_for(control, READY + source, exchange, patience)
            cute.arch.sync_warp()
            wanted = cute.make_tensor(index.iterator + source * rows * chosen, cute.make_layout((rows * chosen,)))
            self.copy_rows(
                out, wanted, peers[source] + at_rows, source * rows, rows, chosen, here,
                cta * WARPS + warp, ctas * WARPS, staged,
            )  # fmt: skip
            cute.arch.sync_warp()
            if pitch > 0 and lane == 0:
                cute.arch.fence_acq_rel_gpu()
                cute.arch.red(
                    words.iterator + (word + (step - 1) * pitch), Int32(1), op="add", dtype="s32", sem="release",
                    scope="gpu",
                )  # fmt: skip
        if is_last(control, TICKET, ctas):
            complete(control, peers, rank, exchange)

    @cute.jit
    def copy_rows(self, out, index, region, first, rows, chosen, here, worker, workers, staged):
        """Copy the wanted rows of a rank to the result, from row ``first`` on: every ``workers``-th one."""
        lane, vectors = cute.arch.lane_idx(), out.shape[1] // VECTOR
        blocks = cute.ceil_div(vectors, LANES * VECTORS)
        steps = cute.ceil_div(rows - worker, workers) * blocks
        row, block = worker, Int32(0)  # of the step that is fetched
        at_row, at_block = worker, Int32(0)  # of the step that is stored
        to, at, wants = Int32(0), Int32(0), Int32(0)  # the stages of both; a bit per step under way
        expert = self.expert_of_lane(index, rows, chosen, row, lane)
        for step in cutlass.range(1 - STAGES, steps, unroll=1):
            wanted = cute.arch.vote_ballot_sync(Boolean(expert >= 0 and expert < here)) != 0
            wants = (wants << 1) | cutlass.select_(wanted, Int32(1), Int32(0))
            self.fetch(region, vectors, row, block, lane, wanted, staged[None, None, to])
            cute.arch.cp_async_commit_group()
            to = cutlass.select_(to == STAGES - 1, Int32(0), to + 1)
            block += 1
            if block == blocks:
                block = Int32(0)
                row += workers
            expert = self.expert_of_lane(index, rows, chosen, row, lane)  # arrives while the next step is stored
            if step >= 0:
                cute.arch.cp_async_wait_group(STAGES - 1)
                if (wants >> (STAGES - 1)) & 1 != 0:
                    self.store(out, vectors, first + at_row, at_block, lane, staged[None, None, at])
                at = cutlass.select_(at == STAGES - 1, Int32(0), at + 1)
                at_block += 1
                if at_block == blocks:
                    at_block = Int32(0)
                    at_row += workers
        cute.arch.cp_async_wait_group(0)  # the stages may be written again

    @cute.jit
    def expert_of_lane(self, index, rows, chosen, row, lane):
        """Lane i's: id number i of a row, or -1. Nothing here may wait for it."""
        expert = Int32(-1)
        if row < rows and lane < chosen:
            expert = index[row * chosen + lane]
        return expert

    @cute.jit
    def fetch(self, region, vectors, row, block, lane, wanted, stage):
        """Start the copies of a step; zeros in place of columns past the last, and of a row that nobody wants."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), Int32, num_bits_per_copy=128)
        valid = cute.make_rmem_tensor((1, 1), Boolean)
        begin = block * (LANES * VECTORS) + lane
        source = region + (Int64(row) * Int64(vectors) + Int64(begin)) * CHUNK_BYTES
        to = stage[None, 0].iterator.toint()
        for v in cutlass.range_constexpr(VECTORS):
            valid[0] = wanted and begin + v * LANES < vectors
            cute.copy(
                atom, vector(source + v * BLOCK_BYTES, cute.AddressSpace.gmem),
                vector(to + v * BLOCK_BYTES, cute.AddressSpace.smem), pred=valid,
            )  # fmt: skip

    @cute.jit
    def store(self, out, vectors, row, block, lane, stage):
        """Store a step."""
        begin = block * (LANES * VECTORS) + lane
        loaded = [cute.make_rmem_tensor((VECTOR,), out.element_type) for _ in range(VECTORS)]
        for v in cutlass.range_constexpr(VECTORS):
            cute.autovec_copy(stage[None, v], loaded[v])
        for v in cutlass.range_constexpr(VECTORS):
            if begin + v * LANES < vectors:
                cute.autovec_copy(loaded[v], cute.local_tile(out[row, None], (VECTOR,), (begin + v * LANES,)))
