"""Products of FP8 codes with one scale per expert: those of block_scaled.py and block_scaled_k.py without blocks.

    acc[r, n] = (sum over k of a[r, k] * b[n, k]) * a_scale[e] * b_scale[e]

Tensor cores still sum only 128 elements of K, and promotion adds these sums to accumulators in fp32. All values of a
tile have the same factor: the product of both scales. A thread reads the scales from memory once per tile, so stages
have none, and promotion takes one instruction per value: a multiplication and an addition at once. If promotion only
adds and the tile is multiplied at its end, ptxas waits for each wgmma before the next, and spills registers.

By columns, each expert's rows are padded to a multiple of 128, as those of block_scaled_k.py are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from fusedmoe.kernels.sm90.gemm.block_scaled import WAVE_VALUES, BlockScaled, BlockScaledRaggedM
from fusedmoe.kernels.sm90.gemm.block_scaled_k import BlockScaledRaggedK, Scales


class TensorScaled(BlockScaled):
    """A product of FP8 codes with one scale per expert. It precedes the kernel for block scales in the bases."""

    @property
    def symbol(self) -> str:
        return f"{super().symbol}_tensor_scales"  # type: ignore[misc]

    @property
    def scale_bytes(self) -> int:
        return 0

    @property
    def scale_space(self) -> int:
        return 0

    def factor_source(self, scales, tile, group, thread, env):
        """``env.scales`` has the scales of A and of B: (E,) fp32 each."""
        return [scale[tile.expert] for scale in env.scales]

    def factors(self, source, i, j, stage):
        a, b = source
        return a * b

    def from_stage(self, factors):
        return []

    def promote(self, acc, first, wave, factors):
        for v in range(WAVE_VALUES):
            acc[first + v] = acc[first + v] + wave[v] * factors


def fake_scales(experts: Any) -> Any:
    """One scale per expert, for the compiler."""
    return cute.runtime.make_fake_tensor(Float32, (experts,), (1,))


@dataclass(frozen=True)
class TensorScaledRaggedM(TensorScaled, BlockScaledRaggedM):
    """A ragged M kernel of FP8 codes with one scale per expert."""

    @property
    def has_scales(self) -> bool:
        return True

    def fake_scales(self, rows, experts):
        return [fake_scales(experts), fake_scales(experts)]

    def scale_loads(self, tensors):
        """The scales themselves: TMA loads none."""
        return tuple(tensors)

    def scales_of_experts(self, scales):
        return scales

    def shared_scales(self, smem):
        return None

    def scale_copies(self, loads, scales, tile, n):
        return []


class Results(NamedTuple):
    """The result of a weight gradient, and the scales of its operands."""

    out: cute.Tensor  # (N, K, E)
    scales: tuple[cute.Tensor, cute.Tensor]  # of A and of B


@dataclass(frozen=True)
class TensorScaledRaggedK(TensorScaled, BlockScaledRaggedK):
    """A ragged K kernel of FP8 codes with one scale per expert."""

    def fake_scales(self, extent, blocks, experts):
        return fake_scales(experts)

    def results(self, out, a_scale, b_scale):
        return Results(out, (a_scale, b_scale))

    def load_of_scales(self, scales, tile, op, ctas):
        return None

    def shared_scales(self, smem):
        return Scales(None, None)

    def finish(self, acc, tile, consumer, inputs, env):
        return super().finish(acc, tile, consumer, inputs, env.out)
