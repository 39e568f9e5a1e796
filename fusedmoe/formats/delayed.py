"""Delayed scaling: what a tensor is multiplied by follows from its amax in steps before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedmoe.errors import InputError
from fusedmoe.formats.scales import fp32_encode

if TYPE_CHECKING:
    from fusedmoe.formats.format import Quantizer


class AmaxHistory:
    """The amax of steps before, and what follows from them; for each expert of its own.

    Attributes
    ----------
    amax : Tensor
        (steps, E) fp32: the last steps' amax; zeros before the first.
    reference : Tensor
        (E,) fp32: the amax that scales follow from, the last known one; 0 before the first.
    encode : Tensor
        (E,) fp32: what tensors are multiplied by, ``max / 2**margin / reference`` by the format's rule; 1 before the
        first step.
    previous : Tensor
        (E,) fp32: what they were multiplied by in the last step, for who computes that step again.
    begun : bool
        Whether any step has been added.
    """

    def __init__(self, quantizer: Quantizer, experts: int, device: torch.device) -> None:
        assert quantizer.delayed is not None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "delayed scaling: the first step cannot be captured into a CUDA graph, which would start its history "
                "anew with every replay; run a step before"
            )
        self.quantizer = quantizer
        self.begun = False
        with torch.inference_mode(False):  # what inference begins with, training updates
            self.amax = torch.zeros(quantizer.delayed.history, experts, dtype=torch.float32, device=device)
            self.reference = torch.zeros(experts, dtype=torch.float32, device=device)
            self.encode = torch.ones(experts, dtype=torch.float32, device=device)
            self.previous = torch.ones(experts, dtype=torch.float32, device=device)

    def fits(self, quantizer: Quantizer, experts: int, device: torch.device) -> bool:
        """Whether it is the history of such a quantizer, on such a device."""
        return self.quantizer == quantizer and self.encode.shape == (experts,) and self.encode.device == device

    def update(self, amax_E: Tensor) -> None:
        """Add a step, in place; an amax of 0 leaves the scale as it is, and so does one that is not finite."""
        delayed = self.quantizer.delayed
        assert delayed is not None
        self.begun = True
        self.previous.copy_(self.encode)
        self.amax.copy_(torch.cat((amax_E[None], self.amax[:-1])))
        amax_E = amax_E if delayed.most_recent else self.amax.amax(0)
        self.reference.copy_(torch.where((amax_E > 0) & amax_E.isfinite(), amax_E, self.reference))
        self._scale()

    def restore(self, amax: Tensor, reference: Tensor) -> None:
        """Take over, in place, what another history of as many experts remembers, perhaps one of another format or
        length.
        """
        steps = min(len(amax), len(self.amax))
        restored = torch.zeros_like(self.amax)
        restored[:steps].copy_(amax[:steps])
        self.amax.copy_(restored)
        self.reference.copy_(reference)
        self._scale()
        self.begun = True

    def forget(self) -> None:
        """Begin anew, in place."""
        self.restore(torch.zeros_like(self.amax), torch.zeros_like(self.reference))
        self.begun = False

    def _scale(self) -> None:
        delayed = self.quantizer.delayed
        assert delayed is not None
        encode_E = fp32_encode(self.reference, self.quantizer.format, delayed.margin)
        self.encode.copy_(torch.where(self.reference > 0, encode_E, 1.0))  # an epsilon is no amax
