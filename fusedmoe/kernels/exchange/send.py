"""`Send`: the begin of a gather. It copies this rank's rows to its region, and tells the other ranks.

With ids, the first CTAs then wait for the ids and weights of all ranks, which are small, and gather them: a rank that
knows them can sort the rows while these travel. The other CTAs end after their copies. So this kernel ends although
another kernel keeps most of the SMs until other ranks come, such as the all-gather of a later layer's weights by FSDP.

FP8 codes travel with their scales in one row, as `functions.pack` has them: the bytes of the codes, then the scales. So
`Pull` copies such rows like all others, and reads no scale of a row that it leaves out.

Axes: P ranks, N rows per rank, T rows of this rank (at most N), K chosen experts per row, H columns, B scales per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fusedmoe.kernels.device.warps import ELEMENTS, LANES, VECTOR, WarpKernel, fake_matrix, fake_vector
from fusedmoe.kernels.exchange.control import current, is_last, tell, wait_for_ranks
from fusedmoe.kernels.exchange.layout import DONE, READY

WARPS = 16  # per CTA
LOADS = 8  # of 16 bytes per lane, at once
SLOTS = 4  # whose ids and weights a thread loads from other ranks at once
TICKET = 0
SCALE_ROWS = 8  # of which a warp copies four scales each at once, whichever axis has unit stride


@dataclass(frozen=True)
class Send(WarpKernel):
    """Rows, and optionally ids and weights, to the region of this rank."""

    dtype: str  # of the rows: "bf16" or "fp16"; "bf16" also for pairs of codes
    index: str | None = None  # dtype of the ids: "int32" or "int64"; None for rows alone
    weight: str = "fp32"  # dtype of the weights: "fp32", "bf16" or "fp16"
    scaled: bool = False  # whether the rows are codes, whose scales travel after them

    @property
    def symbol(self) -> str:
        ids = "" if self.index is None else f"_{self.index}_{self.weight}"
        return f"{self.family}_send_{'codes' if self.scaled else self.dtype}{ids}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (T, H), result (P*N, H), ids (T*K,), weights (T*K,), gathered ids
        (P*N*K,) int32, gathered weights (P*N*K,), scales (T, B) fp32 with any strides, or a vector if there are none,
        regions of the ranks (P,) int64, control (`CONTROL_WORDS`,) int32, this rank, N, K, experts of a rank, first
        bytes of ids, weights and rows in a region, the time-out in nanoseconds, CTAs that gather, and CTAs. With
        scales, the result has more columns than the rows.
        """
        slots, every, columns = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=VECTOR)
        wide, scale = columns, fake_vector("fp32", cute.sym_int())
        if self.scaled:
            wide, strides = cute.sym_int(divisibility=VECTOR), (cute.sym_int64(), cute.sym_int64())
            scale = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), strides)
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), columns), fake_matrix(self.dtype, cute.sym_int(), wide),
            fake_vector(self.index or "int32", slots), fake_vector(self.weight, slots),
            fake_vector("int32", every), fake_vector(self.weight, every), scale,
            fake_vector("int64", cute.sym_int()), fake_vector("int32", cute.sym_int()),
            *[Int32(0)] * 4, *[Int64(0)] * 4, *[Int32(1)] * 2,
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, x, out, index, weight, out_index, out_weight, scale, peers, control,
        rank, rows, chosen, here, at_index, at_weight, at_rows, patience, gatherers, ctas, stream,
    ):  # fmt: skip
        self.kernel(
            x, out, index, weight, out_index, out_weight, scale, peers, control,
            rank, rows, chosen, here, at_index, at_weight, at_rows, patience, gatherers,
        ).launch(grid=(ctas, 1, 1), block=(WARPS * LANES, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, x, out, index, weight, out_index, out_weight, scale, peers, control,
        rank, rows, chosen, here, at_index, at_weight, at_rows, patience, gatherers,
    ):  # fmt: skip
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ranks, exchange = cute.size(peers), current(control)
        if warp == 0:
            wait_for_ranks(control, DONE, exchange - 1, ranks, patience)
        cute.arch.sync_threads()
        own = peers[rank]
        if const_expr(self.index is not None):
            number, step = cta * (WARPS * LANES) + thread, ctas * (WARPS * LANES)
            to_index = self.at(Int32, own + at_index, rows * chosen)
            to_weight = self.at(ELEMENTS[self.weight], own + at_weight, rows * chosen)
            for slot in cutlass.range(number, rows * chosen, step, unroll=1):
                expert = Int32(-1)  # also of rows after this rank's own
                if slot < cute.size(index):
                    given = Int64(index[slot])
                    if given >= 0 and given < Int64(here * ranks):
                        expert = Int32(given)
                    to_weight[slot] = weight[slot]
                    out_weight[rank * rows * chosen + slot] = weight[slot]
                to_index[slot] = expert
                out_index[rank * rows * chosen + slot] = expert - rank * here
        self.copy_rows(x, out, own + at_rows, rank * rows, cta * WARPS + warp, ctas * WARPS)
        if const_expr(self.scaled):
            self.copy_scales(x, scale, out, own + at_rows, rank * rows, cta * WARPS + warp, ctas * WARPS)
        if is_last(control, TICKET, ctas):
            tell(peers, READY + rank, exchange)
        if const_expr(self.index is not None):
            if cta < gatherers:
                if warp == 0:
                    wait_for_ranks(control, READY, exchange, ranks, patience)
                cute.arch.sync_threads()
                workers = cutlass.min(ctas, gatherers) * (WARPS * LANES)
                self.gather(
                    out_index, out_weight, peers, rank, rows * chosen, here, at_index, at_weight, number, workers
                )

    def at(self, element, address, size):
        """A vector in memory."""
        pointer = cute.make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout((size,)))

    @cute.jit
    def copy_rows(self, x, out, region, first, worker, workers):
        """Copy the rows to the region and to their place in the result."""
        columns = cute.assume(x.shape[1], divby=VECTOR)
        pitch = cute.assume(out.shape[1], divby=VECTOR) if const_expr(self.scaled) else columns
        pointer = cute.make_ptr(x.element_type, region, cute.AddressSpace.gmem, assumed_align=16)
        sent = cute.make_tensor(pointer, cute.make_layout((x.shape[0], columns), stride=(pitch, 1)))
        lane, vectors = cute.arch.lane_idx(), columns // VECTOR
        blocks = cute.ceil_div(vectors, LANES * LOADS)
        for unit in cutlass.range(worker, x.shape[0] * blocks, workers, unroll=1):
            row = unit // blocks
            begin = (unit - row * blocks) * (LANES * LOADS) + lane
            loaded = [cute.make_rmem_tensor((VECTOR,), x.element_type) for _ in range(LOADS)]
            for i in cutlass.range_constexpr(LOADS):
                # lanes past the last vector load that vector again: in a branch, the warp would wait for each load
                vector = cutlass.min(begin + i * LANES, vectors - 1)
                cute.autovec_copy(cute.local_tile(x[row, None], (VECTOR,), (vector,)), loaded[i])
            for i in cutlass.range_constexpr(LOADS):
                vector = begin + i * LANES
                if vector < vectors:
                    cute.autovec_copy(loaded[i], cute.local_tile(sent[row, None], (VECTOR,), (vector,)))
                    cute.autovec_copy(loaded[i], cute.local_tile(out[first + row, None], (VECTOR,), (vector,)))

    @cute.jit
    def copy_scales(self, x, scale, out, region, first, worker, workers):
        """Copy the scales of the rows to their places after the codes."""
        pitch, blocks = out.shape[1] // 2, scale.shape[1]  # of 32 bits
        layout = cute.make_layout((x.shape[0], blocks), stride=(pitch, 1))
        kept = out.iterator.toint() + Int64(first) * Int64(pitch) * 4
        to_region, to_result = (
            cute.make_tensor(
                cute.make_ptr(Float32, rows + Int64(2) * Int64(x.shape[1]), cute.AddressSpace.gmem, assumed_align=4),
                layout,
            )
            for rows in (region, kept)
        )
        lane, groups = cute.arch.lane_idx(), cute.ceil_div(blocks, LANES // SCALE_ROWS)
        for unit in cutlass.range(worker, cute.ceil_div(x.shape[0], SCALE_ROWS) * groups, workers, unroll=1):
            of_rows = unit // groups
            row = of_rows * SCALE_ROWS + lane % SCALE_ROWS
            block = (unit - of_rows * groups) * (LANES // SCALE_ROWS) + lane // SCALE_ROWS
            if row < x.shape[0] and block < blocks:
                value = scale[row, block]
                to_region[row, block] = value
                to_result[row, block] = value

    @cute.jit
    def gather(self, out_index, out_weight, peers, rank, slots, here, at_index, at_weight, worker, workers):
        """Read the ids and weights of the other ranks."""
        ranks = cute.size(peers)
        total = (ranks - 1) * slots
        for first in cutlass.range(worker, total, workers * SLOTS, unroll=1):
            loaded = []
            for i in cutlass.range_constexpr(SLOTS):
                # threads past the last slot load that slot again, see `copy_rows`
                place = cutlass.min(first + i * workers, total - 1)
                source = (rank + 1 + place // slots) % ranks
                slot = place % slots
                from_index = self.at(Int32, peers[source] + at_index, slots)
                from_weight = self.at(ELEMENTS[self.weight], peers[source] + at_weight, slots)
                loaded.append((source * slots + slot, from_index[slot], from_weight[slot]))
            for i in cutlass.range_constexpr(SLOTS):
                slot, expert, weight = loaded[i]
                if first + i * workers < total:
                    out_index[slot] = expert - rank * here
                    out_weight[slot] = weight
