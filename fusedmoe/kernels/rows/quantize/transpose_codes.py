"""A kernel that transposes FP8 codes of weights with 128x128 blocks, and their scales: the form by columns.

A product reads codes with unit stride along the axis that it sums over, so an input gradient reads those of a weight by
columns. A square block has the same scale in both forms.

A CTA has a tile of 128 x 128 codes, which is one block. A thread has a *strip* of 8 rows, and 8 columns: 8 loads of 8
bytes, all issued before the first is used. Byte permutations make 8 bytes of each column of them. From there on, the
codes go the way of `quantize`: through shared memory, to stores of 16 bytes.

Axes: E experts, N rows of a weight, K columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.warps import VECTOR, WarpKernel
from fusedmoe.kernels.rows.quantize.blocks import (
    BLOCK,
    CTAS_PER_SM,
    GROUPS,
    SHARED_PERCENT,
    STRIP,
    STRIPS,
    fake_codes,
    fake_scale,
    load_tile,
    on_tiles,
    transposed_bytes,
    write_columns,
)

WORD = 4  # codes per register


@dataclass(frozen=True)
class TransposeCodes(WarpKernel):
    """Codes (E, N, K) and their scales, transposed."""

    @property
    def symbol(self) -> str:
        return "sm90_transpose_codes"

    def compile(self) -> Any:
        """Compile without a GPU; a function of codes (E, N, K) uint8 and their scale (E, ceil(N / 128), ceil(K / 128))
        in fp32 with any strides; and of the results: codes (E, K, N) uint8 and scale (E, ceil(K / 128), ceil(N / 128)).
        """
        shape, strides = (tuple(make() for _ in range(3)) for make in (cute.sym_int, cute.sym_int64))
        scale = cute.runtime.make_fake_tensor(cutlass.Float32, shape, strides)
        codes, codes_t, scale_t = (make(cute.sym_int()) for make in (fake_codes, fake_codes, fake_scale))
        return self.compiled_for(codes, scale, codes_t, scale_t)

    @cute.jit
    def __call__(self, codes, scale, codes_t, scale_t, stream):
        experts, lines, columns = codes.shape
        high, wide = cute.ceil_div(lines, BLOCK), cute.ceil_div(columns, BLOCK)
        self.kernel(codes, scale, codes_t, scale_t, high, wide).launch(
            **on_tiles(experts * high * wide, stream, CTAS_PER_SM, SHARED_PERCENT)
        )

    @cute.kernel
    def kernel(self, codes, scale, codes_t, scale_t, high, wide):
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        row = number // wide  # of blocks, over all experts; adjacent CTAs read adjacent columns
        block = number - row * wide
        expert = row // high
        line = row - expert * high
        first = line * BLOCK
        valid = cutlass.min(codes.shape[1] - first, BLOCK)
        group, strip = thread % GROUPS, thread // GROUPS
        smem = SmemAllocator()
        s_codes = smem.allocate_tensor(Int64, cute.make_layout((STRIPS, BLOCK)), 16)

        rows = load_tile(codes[expert, None, None], None, first, valid, block * GROUPS + group)
        words = [cute.recast_tensor(values, Int32) for values in rows]
        for w in cutlass.range_constexpr(VECTOR // WORD):
            halves = [transposed_bytes([words[i + k][w] for k in range(WORD)]) for i in range(0, STRIP, WORD)]
            for k in cutlass.range_constexpr(WORD):
                chunk = cute.make_rmem_tensor((2,), Int32)
                chunk[0], chunk[1] = halves[0][k], halves[1][k]
                s_codes[strip ^ group, group * VECTOR + w * WORD + k] = cute.recast_tensor(chunk, Int64)[0]
        cute.arch.sync_threads()
        write_columns(s_codes, codes_t[expert, None, None], block, line)
        if thread == 0:
            scale_t[expert, block, line] = scale[expert, line, block]
