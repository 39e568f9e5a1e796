"""What delayed scaling remembers from step to step, on the op that it belongs to, and in its ``state_dict``.

An op without it has no such keys, and none are expected of a checkpoint: stock checkpoints load, and start anew.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fusedmoe.formats.delayed import AmaxHistory

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fusedmoe.formats import Quantizer

_NAME = "_amax_histories"  # on the op: the history of each role, or what a checkpoint had of it
KEY = "amax_history."
"""What follows an op's prefix in ``state_dict``: ``amax_history.input.amax`` and ``amax_history.input.encode``."""


def history(op: nn.Module, role: str, quantizer: Quantizer, experts: int, device: torch.device) -> AmaxHistory:
    """Return an op's history for a role: that of the step before, that of a checkpoint, or a new one."""
    histories: dict[str, Any] = op.__dict__.setdefault(_NAME, {})
    found = histories.get(role)
    if isinstance(found, AmaxHistory) and found.fits(quantizer, experts, device):
        return found
    new = AmaxHistory(quantizer, experts, device)
    if found is not None and (found.amax.shape, found.encode.shape) == (new.amax.shape, new.encode.shape):
        new.amax.copy_(found.amax)  # it is now on another device, or comes from a checkpoint
        new.encode.copy_(found.encode)
    histories[role] = new
    return new


def by_role(op: nn.Module) -> SimpleNamespace:
    """Return an op's histories, each with attributes ``amax`` and ``encode``."""
    return SimpleNamespace(**op.__dict__.get(_NAME, {}))


def save(op: nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Add an op's histories to a state_dict."""
    for role, found in op.__dict__.get(_NAME, {}).items():
        destination[f"{prefix}{KEY}{role}.amax"] = found.amax.detach()
        destination[f"{prefix}{KEY}{role}.encode"] = found.encode.detach()


def load(op: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Take an op's histories out of a state_dict."""
    start = prefix + KEY
    ends = {key[len(start) :] for key in state_dict if key.startswith(start)}
    for role in sorted(end.removesuffix(".amax") for end in ends if end.endswith(".amax")):
        if f"{role}.encode" not in ends:
            continue  # torch reports the key that is left
        tensors = {name: state_dict.pop(f"{prefix}{KEY}{role}.{name}").detach().clone() for name in ("amax", "encode")}
        op.__dict__.setdefault(_NAME, {})[role] = SimpleNamespace(**tensors)
