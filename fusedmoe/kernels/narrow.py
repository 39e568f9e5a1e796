"""Narrow formats with blocks of 16 or 32 values, or with given factors, as the kernels that write codes take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Narrow"]


@dataclass(frozen=True)
class Narrow:
    """Codes and scales; `fusedmoe.numerics.formats.ScaleRule` has the rules for the scales.

    Attributes
    ----------
    element : "e4m3", "e5m2" or "e2m1"
        Type of the codes; two codes of E2M1 are a byte.
    rule : "rceil", "floor", "two level", "given" or "given by expert"
        The rule for a block's scale. "given" has no blocks: each row by rows, and each column of an expert by columns,
        has a factor that is known before. "given by expert" has one such factor per expert.
    block : int
        Values per block: 16 or 32. By columns, each expert's rows are padded to a multiple of it: of 16 for "given",
        and of 128 for "given by expert".
    square : bool
        Whether a block has as many rows as columns.
    """

    element: Literal["e4m3", "e5m2", "e2m1"]
    rule: Literal["rceil", "floor", "two level", "given", "given by expert"]
    block: Literal[16, 32, 128]
    square: bool = False

    @property
    def given(self) -> bool:
        """Whether factors are known before, so that there are no blocks."""
        return self.rule in ("given", "given by expert")
