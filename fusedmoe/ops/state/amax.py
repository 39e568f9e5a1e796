"""The state of delayed scaling: an amax history for each role of an op, saved in the op's ``state_dict``.

An op without a history adds no keys. A checkpoint without these keys still loads; the histories then start empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.base.errors import InputError
from fusedmoe.base.recompute import backward_pass, had_gradients
from fusedmoe.numerics.formats import Quantizer
from fusedmoe.numerics.formats.delayed import AmaxHistory

_NAME = "_amax_histories"  # attribute of the op: per role the history, or its tensors from a checkpoint
_PARTS = ("amax", "reference")
KEY = "amax_history."
"""Prefix of the keys in ``state_dict``: ``amax_history.input.amax`` and ``amax_history.input.reference``."""

_only_looking: ContextVar[bool] = ContextVar("fusedmoe.amax_state.only_looking", default=False)

looking = _only_looking.get  # returns whether the current call leaves the histories unchanged


@contextmanager
def only_looking() -> Iterator[None]:
    """Leave the histories unchanged in calls inside the block, such as those of ``explain()``."""
    token = _only_looking.set(True)
    try:
        yield
    finally:
        _only_looking.reset(token)


_refusal: ContextVar[str] = ContextVar("fusedmoe.amax_state.refusal", default="")


@contextmanager
def refused(why: str) -> Iterator[None]:
    """Raise `InputError` with this text for delayed scaling inside the block."""
    token = _refusal.set(why)
    try:
        yield
    finally:
        _refusal.reset(token)


def history(op: nn.Module, role: str, quantizer: Quantizer, experts: int, device: torch.device) -> AmaxHistory:
    """Return an op's history for a role: the existing one, one restored from a checkpoint, or a new one."""
    histories: dict[str, Any] = op.__dict__.setdefault(_NAME, {})
    found = histories.get(role)
    if isinstance(found, AmaxHistory) and found.fits(quantizer, experts, device):
        return found
    new = AmaxHistory(quantizer, experts, device)
    if found is not None and found.reference.shape == new.reference.shape:
        # the existing history has another format, length or device, or comes from a checkpoint
        new.restore(found.amax, found.reference)
        new.begun = getattr(found, "begun", True)
    if type(new.amax) is Tensor:  # one of fake tensors is of no use to later calls
        histories[role] = new
    return new


class Step:
    """A call that quantizes a tensor with delayed scaling.

    A call that activation checkpointing recomputes uses the factor of the original call. Any other training call adds
    its amax to the history.

    - ``history`` (AmaxHistory): the amax of earlier steps.
    - ``encode`` (Tensor): (E,) fp32: the factor to multiply the tensor by. The end of the step changes it in place.
    - ``again`` (bool): whether activation checkpointing recomputes this call.
    - ``counts`` (bool): whether `end` adds an amax to the history.
    """

    def __init__(self, history: AmaxHistory, role: str, training: bool) -> None:
        if why := _refusal.get():
            raise InputError(why)
        self.again = training and role != "grad" and backward_pass() != -1 and had_gradients()
        self.encode = history.previous if self.again else history.encode
        self.counts = training and not self.again and not looking()
        self.history = history

    def end(self, amax_E: Tensor) -> None:
        """Add the amax of the tensor, (E,) fp32, to the history, if the call counts."""
        if self.counts:
            self.history.update(amax_E)


def by_role(op: nn.Module) -> SimpleNamespace:
    """Return an op's histories by role, each with attributes ``amax`` and ``reference``."""
    return SimpleNamespace(**op.__dict__.get(_NAME, {}))


def save(op: nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Add an op's histories with at least one step to a state_dict."""
    for role, found in op.__dict__.get(_NAME, {}).items():
        for part in _PARTS if getattr(found, "begun", True) else ():
            destination[f"{prefix}{KEY}{role}.{part}"] = getattr(found, part).detach()


def load(op: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Remove an op's histories from a state_dict and load them; a state_dict with a weight but no history clears them.

    Histories of the same shape are loaded in place, since a CUDA graph may use them.
    """
    histories: dict[str, Any] = op.__dict__.get(_NAME, {})
    start = prefix + KEY
    ends = {key[len(start) :] for key in state_dict if key.startswith(start)}
    for role in sorted({end.rpartition(".")[0] for end in ends}):
        if any(f"{role}.{part}" not in ends for part in _PARTS):
            continue  # torch reports the remaining key
        loaded = {part: state_dict.pop(f"{start}{role}.{part}").detach() for part in _PARTS}
        found = histories.get(role)
        if isinstance(found, AmaxHistory) and all(getattr(found, n).shape == t.shape for n, t in loaded.items()):
            found.restore(**loaded)
        else:
            copies = SimpleNamespace(**{part: t.clone() for part, t in loaded.items()})
            op.__dict__.setdefault(_NAME, {})[role] = copies
    if not ends and prefix + "weight" in state_dict:
        for role, found in list(histories.items()):
            if isinstance(found, AmaxHistory):
                found.forget()
            else:
                del histories[role]
