"""AdamW with float32 master weights, and the learning-rate schedule."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
WARM_UP_SHARE = 0.05
FINAL_SHARE = 0.05


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step (from 0): linear warm-up, then cosine decay to a twentieth of the peak."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class MasterAdamW:
    """AdamW on float32 master weights, with gradient clipping.

    A bfloat16 weight has an 8-bit significand. Updates below 1/512 of the weight, as most are, would be lost to
    rounding. Updates go to a float32 copy, which is then rounded into the model. A float32 weight is its own master.

    Parameters
    ----------
    model : Module
        The model; its parameters are updated in place.
    weight_decay : float
        Weight decay of matrices; vectors (the norms) have none.
    """

    def __init__(self, model: nn.Module, weight_decay: float) -> None:
        self._weights = list(model.parameters())
        self._masters = [
            weight if weight.dtype == torch.float32 else weight.detach().float().requires_grad_()
            for weight in self._weights
        ]
        matrices = [master for master in self._masters if master.ndim >= 2]
        vectors = [master for master in self._masters if master.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=True)

    def step(self, learning_rate: float) -> torch.Tensor:
        """Update the model from its gradients, free them, and return their norm before clipping, a 0-d tensor."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            if master is not weight:
                master.grad = None if weight.grad is None else weight.grad.float()
        norm = nn.utils.clip_grad_norm_(self._masters, CLIP_NORM)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._round_into_weights()
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.grad = master.grad = None
        return norm

    def state(self) -> dict[str, Any]:
        """Return the moments, and the masters that are separate from the model's weights."""
        masters = [master.detach() for weight, master in self._separate_pairs()]
        return {"adamw": self._adamw.state_dict(), "masters": masters}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self._adamw.load_state_dict(copy.deepcopy(state["adamw"]))  # load_state_dict keeps the given tensors
        with torch.no_grad():
            for (_, master), saved in zip(self._separate_pairs(), state["masters"], strict=True):
                master.copy_(saved)

    def _separate_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = zip(self._weights, self._masters, strict=True)
        return [(weight, master) for weight, master in pairs if master is not weight]

    @torch.no_grad()
    def _round_into_weights(self) -> None:
        pairs = self._separate_pairs()
        if pairs:
            torch._foreach_copy_([weight for weight, _ in pairs], [master for _, master in pairs])
