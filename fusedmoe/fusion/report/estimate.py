"""The estimated times of a plan, as ``explain()`` reports them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """The estimated time of a call's forward and backward pass under a recipe, and in bf16."""

    machine: str  # the GPU
    us: float  # the time under the recipe, in us, without the quantization of weights
    weights_us: float  # the time to quantize the weights, in us, which is needed after each change of the weights
    bf16_us: float  # the time under the recipe ``"bf16"``, in us

    @property
    def micro_batches(self) -> int | None:
        """The smallest number of calls between two changes of the weights for which the recipe is not slower than bf16;
        None if it is slower for any number.
        """
        saved = self.bf16_us - self.us
        return None if saved <= 0 else max(1, math.ceil(self.weights_us / saved))

    def __str__(self) -> str:
        weights = f", and {_time(self.weights_us)} after each change of the weights" if self.weights_us else ""
        return f"estimated on an {self.machine}: {_time(self.us)}{weights}; under bf16 {_time(self.bf16_us)}"


def _time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.0f} us"
