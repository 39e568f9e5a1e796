"""`Scatter`: FP8 codes and scales of tokens, to the rows of their slots, rank after rank.

A product in FP8 reads rows in order. Step s is for the tokens of rank ``this rank + s``. A launch of step 0 alone, or
of all steps after all tokens have arrived, begins in its turn. A launch of later steps begins beside `Pull`, on a few
SMs: it follows the words of `Pull`, and after the rows of a rank are written, each warp adds 1 to a word that the
product follows.

A warp has every W-th token of W warps. It tells 32 of its tokens at once which of them have a row here, and loads a
part of `TOKENS` tokens before it stores the first: it would wait a microsecond for each.

Axes: P ranks, N tokens per rank, A = P*N, K slots per token, R rows, H columns, B scales per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from fusedmoe.kernels.device.warps import LANES, MOST_READS, WarpKernel, fake_vector, lowest_bit, trap
from fusedmoe.kernels.exchange.layout import SCATTER_WARPS
from fusedmoe.kernels.rows.quantize.blocks import fake_codes, fake_scale

CTAS = 2  # of a cluster, as of `copies`
TOKENS = 8  # of a warp at once
UNIT = 16  # codes per load


@dataclass(frozen=True)
class Scatter(WarpKernel):
    """Copies of codes and scales to rows in the order of the experts."""

    @property
    def symbol(self) -> str:
        return f"{self.family}_scatter_codes"

    def compile(self) -> Any:
        """Compile without a GPU; a function of codes (A, H) uint8, their scales (A, B) fp32 with unit stride along B,
        rows of slots (A*K,) int64, R for none, the codes (R, H) and the scales (R, B) that are written, the words of
        `Pull` (P,) int32, words that grow (any number, int32), this rank, N, K, the first step and the end of the
        steps, the distance between the words that grow, and CTAs, an even number. The word of step s is the last of
        line s. If the first step is 0, no word is read or grows.
        """
        scale = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
        return self.compiled_for(
            fake_codes(), scale, fake_vector("int64", cute.sym_int()), fake_codes(), fake_scale(),
            fake_vector("int32", cute.sym_int()), fake_vector("int32", cute.sym_int()), *[Int32(0)] * 6, Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, codes, scale, row_of_slot, to_codes, to_scale, arrived, words, rank, each, chosen, begin, end, pitch,
        ctas, stream,
    ):  # fmt: skip
        self.kernel(
            codes, scale, row_of_slot, to_codes, to_scale, arrived, words, rank, each, chosen, begin, end, pitch
        ).launch(
            grid=(ctas, 1, 1), block=(SCATTER_WARPS * LANES, 1, 1), cluster=(CTAS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, codes, scale, row_of_slot, to_codes, to_scale, arrived, words, rank, each, chosen, begin, end, pitch
    ):
        if begin == 0:
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        worker = cta * SCATTER_WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        workers = ctas * SCATTER_WARPS
        ranks = codes.shape[0] // each
        for step in cutlass.range(begin, end, unroll=1):
            source = (rank + step) % ranks
            if begin > 0:
                self.wait(arrived, step)
            for number in cutlass.range(worker, each, workers * LANES, unroll=1):
                first = source * each + number
                wanted = self.wanted(row_of_slot, to_codes.shape[0], chosen, first, workers, (source + 1) * each)
                self.copy(codes, scale, row_of_slot, to_codes, to_scale, chosen, first, workers, wanted)
            cute.arch.sync_warp()
            if begin > 0 and lane == 0:
                cute.arch.fence_acq_rel_gpu()
                cute.arch.red(
                    words.iterator + ((step + 1) * pitch - 1), Int32(1), op="add", dtype="s32", sem="release",
                    scope="gpu",
                )  # fmt: skip
        if begin > 0:
            cute.arch.griddepcontrol_wait()  # kernels after this one depend on both

    @cute.jit
    def wait(self, arrived, step):
        """Wait until the rows of a rank have arrived. After `MOST_READS` the kernel ends with an error."""
        if cute.arch.lane_idx() == 0:
            left, reads = Int32(-1), Int64(0)
            while left < 0:
                left = cute.arch.load(arrived.iterator + step, Int32, sem="acquire", scope="gpu")
                reads += 1
                if reads == MOST_READS:
                    trap()
        cute.arch.sync_warp()

    @cute.jit
    def wanted(self, row_of_slot, rows, chosen, first, workers, end):
        """The lanes whose token has a row here; the token of lane i is ``first + i * workers``."""
        found, token = Int32(0), first + cute.arch.lane_idx() * workers
        if token < end:
            for k in cutlass.range(chosen, unroll=4):
                if row_of_slot[token * chosen + k] < Int64(rows):
                    found = Int32(1)
        return cute.arch.vote_ballot_sync(Boolean(found != 0))

    @cute.jit
    def copy(self, codes, scale, row_of_slot, to_codes, to_scale, chosen, first, workers, wanted):
        """Copy the codes and scales of tokens to the rows of their slots."""
        lane, left, vectors = cute.arch.lane_idx(), wanted, codes.shape[1] // UNIT
        for _ in cutlass.range(cute.ceil_div(cute.arch.popc(wanted), TOKENS), unroll=1):
            tokens, rows, slots = [], [], []
            again = first + lowest_bit(left) * workers
            for _ in cutlass.range_constexpr(TOKENS):
                # after the last wanted token, the first of these again, without slots: it is in the cache
                token = cutlass.select_(left != 0, first + lowest_bit(left) * workers, again)
                row = Int32(row_of_slot[token * chosen + cutlass.min(lane, chosen - 1)])
                has_row = left != 0 and lane < chosen and row < to_codes.shape[0]
                tokens.append(token)
                rows.append(row)
                slots.append(cute.arch.vote_ballot_sync(Boolean(has_row)))
                left = left & (left - 1)
            for block in cutlass.range(cute.ceil_div(vectors, LANES), unroll=1):
                vector = block * LANES + lane
                loaded = [cute.make_rmem_tensor((UNIT,), codes.element_type) for _ in range(TOKENS)]
                for i in cutlass.range_constexpr(TOKENS):
                    at = cute.local_tile(codes[tokens[i], None], (UNIT,), (cutlass.min(vector, vectors - 1),))
                    cute.autovec_copy(at, loaded[i])
                for i in cutlass.range_constexpr(TOKENS):
                    of_token = slots[i]
                    for _ in cutlass.range(cute.arch.popc(slots[i]), unroll=1):
                        row = cute.arch.shuffle_sync(rows[i], lowest_bit(of_token))
                        of_token = of_token & (of_token - 1)
                        if vector < vectors:
                            cute.autovec_copy(loaded[i], cute.local_tile(to_codes[row, None], (UNIT,), (vector,)))
            for group in cutlass.range(cute.ceil_div(scale.shape[1], LANES), unroll=1):
                block = group * LANES + lane
                values = [scale[tokens[i], cutlass.min(block, scale.shape[1] - 1)] for i in range(TOKENS)]
                for i in cutlass.range_constexpr(TOKENS):
                    of_token = slots[i]
                    for _ in cutlass.range(cute.arch.popc(slots[i]), unroll=1):
                        row = cute.arch.shuffle_sync(rows[i], lowest_bit(of_token))
                        of_token = of_token & (of_token - 1)
                        if block < scale.shape[1]:
                            to_scale[row, block] = values[i]
