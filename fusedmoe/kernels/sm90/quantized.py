"""Outputs of epilogues in FP8: codes and scales of the results of ragged M products.

A result is rounded to bf16 and then quantized, as if it were written and read again. So its codes and scales are those
of `fusedmoe.formats.quantize`.

**By rows.** A block is 128 columns of one row: four steps of an epilogue. The rounded values stay in registers, two per
word. Four lanes have a row's values, and share the largest magnitude by two shuffles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fusedmoe.kernels.sm90.codes import (
    CODES,
    FINITE_BIAS,
    NEGATIVES,
    biased_magnitudes,
    encode_and_scale,
    fp32_pair,
    max_of_pairs,
    value_of_bits,
)
from fusedmoe.kernels.sm90.config import BLOCK_ROWS, EPILOGUE_COLUMNS, SCALE_BLOCK
from fusedmoe.kernels.sm90.epilogues import Box, Output
from fusedmoe.kernels.sm90.gemm import VALUES
from fusedmoe.kernels.sm90.warps import LANES

STEPS = SCALE_BLOCK // EPILOGUE_COLUMNS  # per block of a scale
WORDS = VALUES // 2  # of a step: pairs of values, of this thread's two rows in turn
BOX_CODES = 2 * EPILOGUE_COLUMNS  # columns of a box: a pair of codes is as wide as a bf16 value
GROUP = 8  # adjacent columns of which four lanes have a pair each
GROUPS = SCALE_BLOCK // GROUP  # of a block
BOX_GROUPS = BOX_CODES // GROUP
PAIRS = GROUP // 2  # of codes
SWIZZLED = 8  # pairs of codes in 16 bytes
BIAS = FINITE_BIAS["bf16"]


@dataclass(frozen=True)
class RowCodes(Output):
    """``result * row_scale``, quantized by rows: codes (R, W), as pairs of two bytes, and scales (R, W / 128)."""

    element: str = "e4m3"  # of the codes, or "e5m2"
    power_of_two: bool = True  # whether scales are powers of two

    @property
    def tensors(self) -> int:
        return 2

    @property
    def suffix(self) -> str:
        return f"_{self.element}" + ("" if self.power_of_two else "_fp32_scales")

    def boxes_of(self, formula, steps):
        return steps * EPILOGUE_COLUMNS // BOX_CODES

    def fake(self, kernel, rows):
        scale = cute.runtime.make_fake_tensor(
            Float32, (rows, cute.sym_int()), (1, cute.sym_int64(divisibility=4)), assumed_align=16
        )
        return [kernel.fake_matrix(rows, cutlass.BFloat16), scale]

    def parameter(self, kernel, *tensors):
        codes, scale = tensors
        return kernel.store_atom(codes, 1), scale

    def target(self, parameter):
        return parameter[0]

    def start(self):
        return []  # words of the steps of a block

    def stores(self, kernel, block, values, column, parameter, state):
        packed = kernel.packed([value * block.scales[v // 2 % 2] for v, value in enumerate(values.result)])
        state.append(cute.recast_tensor(packed, Int32))
        if len(state) == STEPS:
            at = column // STEPS
            groups = None  # of gate and up, all blocks are whole
            if not kernel.paired:
                groups = parameter[0].shape[1] // PAIRS - at * GROUPS
            rows = [self.row_codes(in_row(state, h), block, h, parameter[1], at, groups) for h in range(2)]
            state.clear()
            for box in range(SCALE_BLOCK // BOX_CODES):
                yield in_box(rows, box, at * (SCALE_BLOCK // BOX_CODES) + box)

    @cute.jit
    def row_codes(self, words, block, h: cutlass.Constexpr[int], scale, at, groups):
        """Write the scale of this thread's row ``h``; return the codes of its values, in pairs.

        The last block of a row may have only some ``groups`` of columns. Columns after these are not zeros, but the
        activation of a bias.
        """
        largest, signs = Int32(BIAS << 16 | BIAS), Int32(0)
        for w in cutlass.range_constexpr(cute.size(words)):
            found = biased_magnitudes(words[w], BIAS)
            if const_expr(groups is not None):
                found = cutlass.select_(w < groups, found, Int32(BIAS << 16 | BIAS))
            largest, signs = max_of_pairs(largest, found), signs | found
        if signs & NEGATIVES != 0:  # infinities become NaN, for the conversion to codes
            halves = cute.recast_tensor(words, cutlass.BFloat16)
            loaded = halves.load()
            halves.store(loaded - (loaded - loaded))
        for step in cutlass.range_constexpr(2):
            largest = max_of_pairs(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
        bits = max_of_pairs(largest, largest >> 16) & 0xFFFF
        amax = value_of_bits(bits - BIAS, cutlass.BFloat16)
        encode, stored = encode_and_scale(amax, self.element, self.power_of_two)
        row = block.warp_row + block.lane // 4 + 8 * h
        if block.lane % 4 == 0 and row < block.valid and at < scale.shape[1]:
            scale[block.top + row, at] = stored
        wide = cute.make_rmem_tensor((2 * cute.size(words),), Float32)
        for w in cutlass.range_constexpr(cute.size(words)):
            wide[2 * w], wide[2 * w + 1] = fp32_pair(words[w], cutlass.BFloat16)
        codes = cute.make_rmem_tensor((2 * cute.size(words),), CODES[self.element])
        codes.store((wide.load() * encode).to(CODES[self.element]))
        return cute.recast_tensor(codes, cutlass.BFloat16)


def in_row(steps: list[Any], h: int) -> Any:
    """The words of a thread's row ``h``, of all steps: one per group of 8 columns."""
    chosen = [step[w] for step in steps for w in range(h, WORDS, 2)]
    words = cute.make_rmem_tensor((len(chosen),), Int32)
    for w, word in enumerate(chosen):
        words[w] = word
    return words


def in_box(rows: list[Any], box: int, column: Any) -> Box:
    """A box of pairs of codes, of both rows; ``column`` is its number. A lane has a pair of each group of 8 columns."""
    values = cute.make_rmem_tensor((VALUES,), cutlass.BFloat16)
    for group in range(BOX_GROUPS):
        for h in range(2):
            values[2 * group + h] = rows[h][box * BOX_GROUPS + group]
    return Box(values, 0, column, put=put_groups)


@cute.jit
def put_groups(values, boxes, box, thread):
    """Write a thread's pairs of codes to a box in shared memory.

    Its rows of 64 bytes are swizzled: the bits of a row's number from the second one on are added, as by XOR, to the
    number of each 16 bytes. With the places computed here, 4 registers have all of them. With those of a tensor with
    this layout, 32 do, and 16 of them spill.
    """
    lane = thread % LANES
    row = thread // LANES * 16 + lane // 4
    first = row * EPILOGUE_COLUMNS + row // 2 % 4 * SWIZZLED + lane % 4
    unswizzled = cute.recast_ptr(boxes.iterator) + box * (BLOCK_ROWS * EPILOGUE_COLUMNS)
    for group in cutlass.range_constexpr(BOX_GROUPS):
        for h in cutlass.range_constexpr(2):
            at = (first ^ (group // 2 * SWIZZLED)) + group % 2 * PAIRS + 8 * h * EPILOGUE_COLUMNS
            cute.make_tensor(unswizzled + at, cute.make_layout((1,)))[0] = values[2 * group + h]
