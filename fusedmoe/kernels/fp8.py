"""FP8 formats, as the kernels that write codes take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Fp8", "Fp8ByExpert"]


@dataclass(frozen=True)
class Fp8:
    """The codes of blocks with fp32 scales; `fusedmoe.numerics.formats.ScaleRule` has the rules for the scales.

    Attributes
    ----------
    element : "e4m3" or "e5m2"
        Type of the codes.
    power_of_two : bool
        Scales by the rule POWER_OF_TWO, not FP32.
    amax_epsilon : float
        Lower bound on the largest magnitude of a block.
    """

    element: Literal["e4m3", "e5m2"] = "e4m3"
    power_of_two: bool = True
    amax_epsilon: float = 0.0


@dataclass(frozen=True)
class Fp8ByExpert:
    """The codes of values times one factor per expert, which is known before: those of delayed scaling.

    Attributes
    ----------
    element : "e4m3" or "e5m2"
        Type of the codes.
    """

    element: Literal["e4m3", "e5m2"] = "e4m3"
