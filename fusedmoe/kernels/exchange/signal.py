"""`Signal`: the control of an exchange whose copies torch makes.

Its phases, in this order in an exchange: `BEGIN`, before this rank writes; `TELL`, after it has written, which waits
for the data of the others too; `END`, after it has read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from fusedmoe.kernels.device.warps import LANES, WarpKernel, fake_vector
from fusedmoe.kernels.exchange.control import complete, current, tell, wait_for_ranks
from fusedmoe.kernels.exchange.layout import BEGIN, DONE, READY, TELL


@dataclass(frozen=True)
class Signal(WarpKernel):
    """One phase of an exchange, by one warp."""

    @property
    def symbol(self) -> str:
        return f"{self.family}_signal"

    def compile(self) -> Any:
        """Compile without a GPU; a function of regions of the ranks (P,) int64, control (`CONTROL_WORDS`,) int32, this
        rank, the phase, and the time-out in nanoseconds.
        """
        return self.compiled_for(
            fake_vector("int64", cute.sym_int()), fake_vector("int32", cute.sym_int()), Int32(0), Int32(0), Int64(0)
        )

    @cute.jit
    def __call__(self, peers, control, rank, phase, patience, stream):
        self.kernel(peers, control, rank, phase, patience).launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, peers, control, rank, phase, patience):
        exchange, ranks = current(control), cute.size(peers)
        if phase == BEGIN:
            wait_for_ranks(control, DONE, exchange - 1, ranks, patience)
        else:
            cute.arch.fence_acq_rel_sys()
            if phase == TELL:
                tell(peers, READY + rank, exchange)
                wait_for_ranks(control, READY, exchange, ranks, patience)
            else:
                complete(control, peers, rank, exchange)
