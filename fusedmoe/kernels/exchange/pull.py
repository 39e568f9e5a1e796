"""`Pull`: the end of a gather. A few SMs copy the rows of other ranks that have an expert here, rank after rank.

It begins with the next rank, so that at any time every rank reads another one's memory. After the rows of a rank, each
warp adds 1 to a word of this rank's memory: a product beside it may then read them (sm90/gemm/scheduler.py). A row is
copied only if one of its ids is that of an expert of this rank.

Axes: P ranks, N rows per rank, K chosen experts per row, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, fake_matrix, fake_vector
from fusedmoe.kernels.exchange import copies
from fusedmoe.kernels.exchange.control import complete, current, is_last, wait_for
from fusedmoe.kernels.exchange.layout import READY

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
        ).launch(**copies.launch(ctas, stream))  # fmt: skip

    @cute.kernel
    def kernel(self, out, index, words, peers, control, rank, rows, chosen, here, word, pitch, at_rows, patience):
        cute.arch.griddepcontrol_launch_dependents()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        worker, workers = copies.worker()
        staged = copies.allocate(out.element_type)
        ranks, exchange, columns = cute.size(peers), current(control), out.shape[1]
        for step in cutlass.range(1, ranks, unroll=1):
            source = (rank + step) % ranks
            if lane == 0:
                wait_for(control, READY + source, exchange, patience)
            cute.arch.sync_warp()
            ids = cute.make_tensor(index.iterator + source * rows * chosen, cute.make_layout((rows * chosen,)))
            to = out.iterator.toint() + Int64(source * rows) * Int64(columns) * 2
            for first in cutlass.range(worker, rows, workers * LANES, unroll=1):
                wanted = self.wanted(ids, chosen, here, first + lane * workers)
                copies.copy_rows(peers[source] + at_rows, to, columns, staged, first, workers, wanted)
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
    def wanted(self, ids, chosen, here, row):
        """The lanes whose row has an expert here."""
        found = Int32(0)
        if row * chosen < cute.size(ids):
            for k in cutlass.range(chosen, unroll=4):
                expert = ids[row * chosen + k]
                if expert >= 0 and expert < here:
                    found = Int32(1)
        return cute.arch.vote_ballot_sync(Boolean(found != 0))
