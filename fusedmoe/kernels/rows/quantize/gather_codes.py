"""A kernel that gathers rows of codes and their scales.

A token that K experts read is K rows. So its codes and scales are computed once, and then copied K times: that moves
half the bytes of K quantizations of a row in bf16.

A warp has `ROWS` rows. It loads 512 bytes of each before it stores the first. Rows without an expert get codes of zero
and scales of one, unless ``zero_tail`` is 0.

Axes: R rows, T tokens, K columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import CacheEvictionPriority

from fusedmoe.kernels.device.warps import LANES, WarpKernel, fake_vector
from fusedmoe.kernels.rows.quantize.blocks import fake_codes, fake_scale

WARPS = 4  # per CTA
ROWS = 8  # per warp
UNIT = 16  # codes per load


@dataclass(frozen=True)
class GatherCodes(WarpKernel):
    """Rows ``index[r]`` of codes and scales."""

    @property
    def symbol(self) -> str:
        return "sm90_gather_codes"

    def compile(self) -> Any:
        """Compile without a GPU; a function of codes (T, K) uint8 and their scale (T, ceil(K / 128)), index (R,) int32,
        offsets (E,) int32, the codes (R, K) and the scale (R, ceil(K / 128)) that are written, and ``zero_tail``.
        """
        return self.compiled_for(
            fake_codes(), fake_scale(), fake_vector("int32", cute.sym_int()), fake_vector("int32", cute.sym_int()),
            fake_codes(), fake_scale(), Int32(0),
        )  # fmt: skip

    @cute.jit
    def __call__(self, codes, scale, index, offsets, to_codes, to_scale, zero_tail, stream):
        self.kernel(codes, scale, index, offsets, to_codes, to_scale, zero_tail).launch(
            grid=(cute.ceil_div(to_codes.shape[0], ROWS * WARPS), 1, 1), block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, codes, scale, index, offsets, to_codes, to_scale, zero_tail):
        number, _, _ = cute.arch.block_idx()
        first = (number * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())) * ROWS
        valid = cutlass.min(offsets[cute.size(offsets) - 1] - first, ROWS)
        if (valid > 0) | (zero_tail != 0):
            self.copy(codes, scale, index, to_codes, to_scale, first, valid)

    @cute.jit
    def copy(self, codes, scale, index, to_codes, to_scale, first, valid):
        """Copy a warp's rows, beginning with row ``first``, of which ``valid`` have an expert."""
        rows, columns = to_codes.shape
        lane = cute.arch.lane_idx()
        row = lane % ROWS
        token = Int32(-1)
        if row < valid:
            token = index[first + row]
        tokens = [cute.arch.shuffle_sync(token, i) for i in range(ROWS)]
        for vector in cutlass.range(lane, columns // UNIT, LANES, unroll=1):
            loaded = [cute.make_rmem_tensor((UNIT,), codes.element_type) for _ in range(ROWS)]
            for i in cutlass.range_constexpr(ROWS):
                loaded[i].fill(0)
                if tokens[i] >= 0:
                    at = cute.local_tile(codes[tokens[i], None], (UNIT,), (vector,))
                    cute.autovec_copy(at, loaded[i], l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE)
            for i in cutlass.range_constexpr(ROWS):
                if first + i < rows:
                    cute.autovec_copy(loaded[i], cute.local_tile(to_codes[first + i, None], (UNIT,), (vector,)))
        if first + row < rows:
            for block in cutlass.range(lane // ROWS, scale.shape[1], LANES // ROWS, unroll=2):
                of_block = Float32(1.0)
                if token >= 0:
                    of_block = scale[token, block]
                to_scale[first + row, block] = of_block
