"""Delayed scaling: the scale of a tensor follows from its amax in earlier steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedmoe.base.errors import InputError
from fusedmoe.base.lasting import is_capturing, lasting
from fusedmoe.numerics.formats.scales import fp32_encode

if TYPE_CHECKING:
    from fusedmoe.numerics.formats.format import Quantizer


class AmaxHistory:
    """The amax of earlier steps and the scales that follow from them, per expert.

    - ``amax`` (Tensor): (steps, E) fp32: the amax of the last steps, newest first; zeros before the first step.
    - ``reference`` (Tensor): (E,) fp32: the amax that determines the scale; 0 before the first step.
    - ``encode`` (Tensor): (E,) fp32: the factor that tensors are multiplied by, ``max / 2**margin / reference`` rounded
      by the format's rule; 1 before the first step.
    - ``previous`` (Tensor): (E,) fp32: the factor of the last step, for recomputation of that step.
    - ``begun`` (bool): whether a step has been added.
    """

    def __init__(self, quantizer: Quantizer, experts: int, device: torch.device) -> None:
        assert quantizer.delayed is not None
        if is_capturing(device):
            raise InputError(
                "delayed scaling: the first step cannot be captured into a CUDA graph, since every replay would start "
                "its history anew; run a step before the capture"
            )
        self.quantizer = quantizer
        self.begun = False
        steps = quantizer.delayed.history

        def make() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            def filled(value: float, *shape: int) -> Tensor:
                return torch.full(shape, value, dtype=torch.float32, device=device)

            return filled(0.0, steps, experts), filled(0.0, experts), filled(1.0, experts), filled(1.0, experts)

        self.amax, self.reference, self.encode, self.previous = lasting(make, device)

    def fits(self, quantizer: Quantizer, experts: int, device: torch.device) -> bool:
        """Whether this is a history of the given quantizer, number of experts and device."""
        return self.quantizer == quantizer and self.encode.shape == (experts,) and self.encode.device == device

    def update(self, amax_E: Tensor) -> None:
        """Add a step, in place; an amax that is 0 or not finite leaves the scale unchanged."""
        delayed = self.quantizer.delayed
        assert delayed is not None
        self.begun = True
        self.previous.copy_(self.encode)
        self.amax.copy_(torch.cat((amax_E[None], self.amax[:-1])))
        amax_E = amax_E if delayed.most_recent else self.amax.amax(0)
        self.reference.copy_(torch.where((amax_E > 0) & amax_E.isfinite(), amax_E, self.reference))
        self._scale()

    def restore(self, amax: Tensor, reference: Tensor) -> None:
        """Copy the values of another history, in place; it has as many experts, and may differ in format and length."""
        steps = min(len(amax), len(self.amax))
        restored = torch.zeros_like(self.amax)
        restored[:steps].copy_(amax[:steps])
        self.amax.copy_(restored)
        self.reference.copy_(reference)
        self._scale()
        self.begun = True

    def forget(self) -> None:
        """Reset to the state before the first step, in place."""
        self.restore(torch.zeros_like(self.amax), torch.zeros_like(self.reference))
        self.begun = False

    def _scale(self) -> None:
        delayed = self.quantizer.delayed
        assert delayed is not None
        encode_E = fp32_encode(self.reference, self.quantizer.format, delayed.margin)
        self.encode.copy_(torch.where(self.reference > 0, encode_E, 1.0))  # fp32_encode would raise 0 to an epsilon
