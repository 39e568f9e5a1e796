"""Products whose scheduler is at most two tiles ahead, in place of four.

Under a dynamic schedule a cluster draws its tiles when its scheduler writes them into the ring. With a shorter ring it
draws later, so the last tiles go to the clusters that need them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

from fusedmoe.kernels.sm90 import tiles
from fusedmoe.kernels.sm90.gemm import Gemm
from fusedmoe.kernels.sm90.ragged_k import RaggedK
from fusedmoe.kernels.sm90.ragged_m import RaggedM

RING_STAGES = 2


class ShortRing(Gemm):
    """A product with a ring of two tiles."""

    @property
    def symbol(self) -> str:
        return f"{super().symbol}_ring{RING_STAGES}"

    @property
    def sources(self) -> tuple[str, ...]:
        return (__name__, *super().sources)

    def compile(self) -> Any:
        with mock.patch.object(tiles, "RING_STAGES", RING_STAGES):
            return super().compile()


@dataclass(frozen=True)
class ShortRingM(ShortRing, RaggedM):
    """`RaggedM` with a ring of two tiles."""


@dataclass(frozen=True)
class ShortRingK(ShortRing, RaggedK):
    """`RaggedK` with a ring of two tiles."""
