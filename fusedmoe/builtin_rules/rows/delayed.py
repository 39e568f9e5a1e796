"""The end of a step of delayed scaling, in one launch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fusedmoe.kernels.rows.quantize import format_functions
from fusedmoe.numerics.formats import Quantizer, ScaleRule
from fusedmoe.ops.state.amax import Step

LAUNCHES_PER_STEP = 2
"""The launches of a training step on values per expert: one fills the amax with zeros, before the kernel of the codes
writes it, and one ends the step.
"""


def bind_end(quantizer: Quantizer) -> Callable[[Step, Tensor | None], Tensor]:
    """Return a function of a step and the amax of its values, (E,) fp32 or None, which ends the step.

    It returns the scale of the step's codes, ``1 / encode``, (E,) fp32. The history changes if the step counts.
    """
    delayed, format = quantizer.delayed, quantizer.format
    assert delayed is not None
    update = format_functions.bind_update_amax_history(
        format.element.max / 2.0**delayed.margin,
        format.amax_epsilon,
        power_of_two=format.rule is ScaleRule.POWER_OF_TWO,
        most_recent=delayed.most_recent,
    )

    def end(step: Step, amax_E: Tensor | None) -> Tensor:
        if amax_E is None or not step.counts:
            return 1 / step.encode
        history = step.history
        history.begun = True
        return update(history.amax, amax_E, history.reference, history.encode, history.previous)

    return end
