"""Outputs of epilogues in FP8: codes and scales of the results of ragged M products.

A result is rounded to bf16 and then quantized, as if it were written and read again. So its codes and scales are those
of `fusedmoe.numerics.formats.quantize`.

**By rows.** A block is 128 columns of one row: four steps of an epilogue. The rounded values stay in registers, two per
word. Four lanes have a row's values, and share the largest magnitude by two shuffles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fusedmoe.kernels.device.codes import (
    CODES,
    MAGNITUDES,
    encode_and_scale,
    encoded,
    fp32_pair,
    larger,
    nan_of_infinities,
    pair_of,
    value_of_bits,
)
from fusedmoe.kernels.device.predicated import store_if
from fusedmoe.kernels.sm90.epilogue.outputs import Box, Output
from fusedmoe.kernels.sm90.gemm.common import VALUES
from fusedmoe.kernels.sm90.tiles.config import EPILOGUE_COLUMNS, SCALE_BLOCK

STEPS = SCALE_BLOCK // EPILOGUE_COLUMNS  # per block of a scale
WORDS = VALUES // 2  # of a step: pairs of values, of this thread's two rows in turn
BOX_CODES = 2 * EPILOGUE_COLUMNS  # columns of a box: a pair of codes is as wide as a bf16 value
GROUP = 8  # adjacent columns of which four lanes have a pair each
GROUPS = SCALE_BLOCK // GROUP  # of a block
BOX_GROUPS = BOX_CODES // GROUP
PAIRS = GROUP // 2  # of codes


@dataclass(frozen=True)
class RowCodes(Output):
    """``result * row_scale``, quantized by rows: codes (R, W), as pairs of two bytes, and scales (R, W / 128)."""

    element: str = "e4m3"  # of the codes, or "e5m2"
    power_of_two: bool = True  # whether scales are powers of two

    @property
    def tensors(self) -> int:
        return 2

    @property
    def name(self) -> str:
        return f"_{self.element}" + ("" if self.power_of_two else "_fp32_scales")

    def boxes_of(self, formula, steps):
        return steps * EPILOGUE_COLUMNS // BOX_CODES

    def column_bytes(self, formula):
        return 1 / formula.accumulators

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
        words = [nan_of_infinities(words[w]) for w in range(cute.size(words))]  # for the conversion to codes
        largest = Int32(0)
        for w in cutlass.range_constexpr(len(words)):
            found = words[w] & MAGNITUDES
            if const_expr(groups is not None):
                found = cutlass.select_(w < groups, found, Int32(0))
            largest = larger(largest, found)
        for step in cutlass.range_constexpr(2):
            largest = larger(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
        amax = value_of_bits(larger(largest, largest >> 16) & 0xFFFF, cutlass.BFloat16)
        encode, stored = encode_and_scale(amax, self.element, self.power_of_two)
        row = block.warp_row + block.lane // 4 + 8 * h
        place = scale.iterator.toint() + 4 * (Int64(block.top + row) + at * scale.stride[1])
        wanted = (block.lane % 4 == 0) & (row < block.valid) & (at < scale.shape[1])
        store_if(wanted, place, [stored.bitcast(Int32)])
        if const_expr(self.power_of_two):
            codes = encoded(words, [pair_of(encode)] * len(words), self.element)
        else:
            wide = cute.make_rmem_tensor((2 * len(words),), Float32)
            for w in cutlass.range_constexpr(len(words)):
                wide[2 * w], wide[2 * w + 1] = fp32_pair(words[w], cutlass.BFloat16)
            in_fp8 = cute.make_rmem_tensor((2 * len(words),), CODES[self.element])
            in_fp8.store((wide.load() * encode).to(CODES[self.element]))
            codes = cute.recast_tensor(in_fp8, Int32)
        return cute.recast_tensor(codes, cutlass.BFloat16)


def in_row(steps: list[Any], h: int) -> Any:
    """The words of a thread's row ``h``, of all steps: one per group of 8 columns."""
    chosen = [step[w] for step in steps for w in range(h, WORDS, 2)]
    words = cute.make_rmem_tensor((len(chosen),), Int32)
    for w, word in enumerate(chosen):
        words[w] = word
    return words


def in_box(rows: list[Any], box: int, column: Any) -> Box:
    """A box of pairs of codes, of both rows; ``column`` is its number. A lane has a pair of each group of 8 columns.

    ``stmatrix`` takes two adjacent values of each lane. These are pairs of codes of two groups, so in shared memory 16
    bytes have the pairs of two groups in turn.
    """
    values = cute.make_rmem_tensor((VALUES,), cutlass.BFloat16)
    for group in range(BOX_GROUPS):
        for h in range(2):
            values[group // 2 * 4 + 2 * h + group % 2] = rows[h][box * BOX_GROUPS + group]
    return Box(values, 0, column, arranged=one_group_after_the_other)


def one_group_after_the_other(words: list[Any]) -> list[Any]:
    """The pairs of two groups, which alternate in ``words``."""
    return [
        cute.arch.prmt(words[2 * half], words[2 * half + 1], selected)
        for selected in (0x5410, 0x7632)
        for half in range(2)
    ]
