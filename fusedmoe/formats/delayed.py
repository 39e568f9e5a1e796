"""Delayed scaling: what a tensor is multiplied by follows from its amax in steps before."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.errors import InputError
from fusedmoe.formats.format import Quantizer

_FLT_MAX = torch.finfo(torch.float32).max


class AmaxHistory:
    """The amax of steps before, and what follows from them; for each expert of its own.

    Attributes
    ----------
    amax : Tensor
        (steps, E) fp32: the last steps' amax; zeros before the first.
    encode : Tensor
        (E,) fp32: what tensors are multiplied by; 1 before the first step.
    previous : Tensor
        (E,) fp32: what they were multiplied by in the last step, for who computes that step again.
    """

    def __init__(self, quantizer: Quantizer, experts: int, device: torch.device) -> None:
        assert quantizer.delayed is not None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "delayed scaling: the first step cannot be captured into a CUDA graph, which would start its history "
                "anew with every replay; run a step before"
            )
        self.quantizer = quantizer
        with torch.inference_mode(False):  # what inference begins with, training updates
            self.amax = torch.zeros(quantizer.delayed.history, experts, device=device)
            self.encode = torch.ones(experts, device=device)
            self.previous = torch.ones(experts, device=device)

    def fits(self, quantizer: Quantizer, experts: int, device: torch.device) -> bool:
        """Whether it is the history of such a quantizer, on such a device."""
        return self.quantizer == quantizer and self.encode.shape == (experts,) and self.encode.device == device

    def update(self, amax_E: Tensor) -> None:
        """Add a step, in place: ``encode = max / 2**margin / (largest amax remembered)`` where that is finite."""
        delayed, element = self.quantizer.delayed, self.quantizer.format.element
        assert delayed is not None
        self.previous.copy_(self.encode)
        self.amax.copy_(torch.cat((amax_E[None], self.amax[:-1])))
        amax_E = amax_E if delayed.most_recent else self.amax.amax(0)
        encode_E = (torch.full_like(amax_E, element.max / 2.0**delayed.margin) / amax_E).clamp(max=_FLT_MAX)
        known_E = (amax_E > 0) & amax_E.isfinite()
        self.encode.copy_(torch.where(known_E, encode_E, self.encode))
