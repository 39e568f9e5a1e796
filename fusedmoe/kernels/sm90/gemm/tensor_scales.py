"""FP8 codes with one scale per expert: operands of products of both kinds.

    acc[r, n] = (sum over k of a[r, k] * b[n, k]) * a_scale[e] * b_scale[e]

Tensor cores still sum only 128 elements of K, and promotion adds these sums to accumulators in fp32. All values of a
tile have the same factor: the product of both scales. A thread reads the scales from memory once per tile, so stages
have none, and promotion takes one instruction per value: a multiplication and an addition at once. If promotion only
adds and the tile is multiplied at its end, ptxas waits for each wgmma before the next, and spills registers.

By columns, each expert's rows are padded to a multiple of 128, as for block_scales_k.py.

Run: tests/unit/test_kernels_compile.py, tests/gpu/test_hopper_products.py; ``python -m benchmarks --only fp8``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from fusedmoe.kernels.sm90.gemm.scaled import WAVE_VALUES, Scaled


@dataclass(frozen=True)
class TensorScaled(Scaled):
    """FP8 codes with one scale per expert."""

    suffix = "_tensor_scales"

    def fake_scales(self, experts: Any, *extents: Any) -> list[Any]:
        return [cute.runtime.make_fake_tensor(Float32, (experts,), (1,)) for _ in range(2)]

    def factor_source(self, kernel, scales, tile, group, thread, env):
        """``env.scales`` has the scales of A and of B: (E,) fp32 each."""
        return [scale[tile.expert] for scale in env.scales]

    def factors(self, source, i, j, stage):
        a, b = source
        return a * b

    def from_stage(self, factors) -> list[Any]:
        return []

    def promote(self, acc, first, wave, factors) -> None:
        for v in range(WAVE_VALUES):
            acc[first + v] = acc[first + v] + wave[v] * factors
