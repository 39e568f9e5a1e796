"""FP8 codes of results with one factor per expert, which is known before: delayed scaling.

A result is rounded to bf16 and then quantized, as if it were written and read again. So its codes are those of
`fusedmoe.numerics.formats.quantize` with ``encode``. The largest finite magnitude of each expert's results is found
too, for the scales of later steps: each warp raises the expert's maximum in memory, once per 64 rows of a tile.

No step waits for a scale, as those of quantized.py do: two steps are a box of codes, which is stored at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fusedmoe.kernels.device.codes import (
    CODES,
    FINITE_BIAS,
    NEGATIVES,
    biased_magnitudes,
    fp32_pair,
    half_of,
    max_of_pairs,
    raise_to,
)
from fusedmoe.kernels.sm90.epilogue.outputs import Output
from fusedmoe.kernels.sm90.epilogue.quantized import BOX_CODES, BOX_GROUPS, PAIRS, in_box, in_row
from fusedmoe.kernels.sm90.tiles.config import EPILOGUE_COLUMNS

BIAS = FINITE_BIAS["bf16"]
STEPS = BOX_CODES // EPILOGUE_COLUMNS  # per box
NONE = BIAS << 16 | BIAS  # no magnitudes


@dataclass(frozen=True)
class CodesByExpert(Output):
    """``result * row_scale``, times a factor per expert, as codes (R, W), in pairs of two bytes. The factors (E,) are
    read, and the largest magnitudes (E,), as bits of fp32, are raised.
    """

    element: str = "e4m3"  # of the codes, or "e5m2"

    tensors: ClassVar[int] = 3

    @property
    def name(self) -> str:
        return f"_{self.element}_by_expert"

    def boxes_of(self, formula, steps):
        return steps // STEPS

    def column_bytes(self, formula):
        return 1 / formula.accumulators

    def fake(self, kernel, rows):
        experts, fake = cute.sym_int(), cute.runtime.make_fake_tensor
        vectors = [fake(element, (experts,), (1,)) for element in (Float32, Int32)]
        return [kernel.fake_matrix(rows, cutlass.BFloat16), *vectors]

    def parameter(self, kernel, *tensors):
        codes, factors, largest = tensors
        return kernel.store_atom(codes, 1), factors, largest

    def target(self, parameter):
        return parameter[0]

    def start(self):
        return [[], Int32(NONE)]  # words of the steps of a box, and the largest magnitudes so far

    def stores(self, kernel, block, values, column, parameter, state):
        packed = kernel.packed([value * block.scales[v // 2 % 2] for v, value in enumerate(values.result)])
        words, largest = state
        words.append(cute.recast_tensor(packed, Int32))
        if len(words) < STEPS:
            return
        codes, factors, _ = parameter
        at = column // STEPS
        groups = codes.shape[1] // PAIRS - at * BOX_GROUPS
        encode = factors[cutlass.min(block.tile.expert, factors.shape[0] - 1)]  # the tail has no expert, and zeros
        rows = []
        for h in range(2):
            of_row = in_row(words, h)
            largest = self.larger(of_row, block, h, groups, largest)
            rows.append(self.codes(of_row, encode))
        state[:] = [], largest
        yield in_box(rows, 0, at)

    @cute.jit
    def larger(self, words, block, h: cutlass.Constexpr[int], groups, largest):
        """The largest of biased magnitudes so far and those of this thread's row ``h``.

        Rows after the expert's last are those of another expert, and columns after the first ``groups`` of 8 are not
        zeros, but the activation of a bias.
        """
        if block.warp_row + block.lane // 4 + 8 * h < block.valid:
            for w in cutlass.range_constexpr(cute.size(words)):
                found = biased_magnitudes(words[w], BIAS)
                largest = max_of_pairs(largest, cutlass.select_(w < groups, found, Int32(NONE)))
        return largest

    @cute.jit
    def codes(self, words, encode):
        """The codes of a row's values, in pairs."""
        signs = Int32(0)
        for w in cutlass.range_constexpr(cute.size(words)):
            signs = signs | biased_magnitudes(words[w], BIAS)
        if signs & NEGATIVES != 0:  # infinities become NaN, for the conversion to codes
            halves = cute.recast_tensor(words, cutlass.BFloat16)
            loaded = halves.load()
            halves.store(loaded - (loaded - loaded))
        wide = cute.make_rmem_tensor((2 * cute.size(words),), Float32)
        for w in cutlass.range_constexpr(cute.size(words)):
            wide[2 * w], wide[2 * w + 1] = fp32_pair(words[w], cutlass.BFloat16)
        codes = cute.make_rmem_tensor((2 * cute.size(words),), CODES[self.element])
        codes.store((wide.load() * encode).to(CODES[self.element]))
        return cute.recast_tensor(codes, cutlass.BFloat16)

    def finish(self, kernel, block, env, parameter, state):
        self.raise_expert(parameter[2], block, state[1])

    @cute.jit
    def raise_expert(self, maxima, block, largest):
        """Raise the expert's maximum to the largest magnitude of the warp's rows."""
        for step in cutlass.range_constexpr(5):
            largest = max_of_pairs(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
        if block.lane == 0 and block.live:
            raise_to(maxima.iterator + block.tile.expert, cutlass.max(half_of(largest, 0), half_of(largest, 1)), "bf16")
