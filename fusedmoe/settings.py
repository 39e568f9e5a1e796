"""What is set around a call: recipe, switched-off rules, strictness. Each holds inside its ``with`` block only."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fusedmoe.recipes import BF16, Recipe, resolve
from fusedmoe.recompute import backward_pass

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class Settings:
    """The settings that hold here.

    Attributes
    ----------
    recipe, disabled, strict, strict_unavailable
        What `fm.recipe`, `fm.disabled` and `fm.strict` set.
    set_in : dict of str to int
        Those that were set in a backward pass, and in which: by what is computed again there.
    """

    recipe: Recipe = BF16
    disabled: tuple[str, ...] = ()
    strict: bool = False
    strict_unavailable: bool = False
    set_in: Mapping[str, int] = field(default_factory=dict, compare=False)

    def within(self, backward_pass: int) -> dict[str, Any]:
        """Return what was set in this backward pass."""
        return {name: getattr(self, name) for name, where in self.set_in.items() if where == backward_pass}


_settings: ContextVar[Settings] = ContextVar("fusedmoe.settings", default=Settings())  # noqa: B039  (frozen)


current = _settings.get
"""Returns the settings that hold at this point."""


class _Thread(threading.local):
    """The settings of a thread as a text: `torch.compile` can guard on it, but not on a context variable."""

    def __init__(self) -> None:  # in each thread: Dynamo does not see that an attribute of a class gets hidden
        self.key = ""


thread = _Thread()
_keys: dict[Settings, str] = {Settings(): ""}


def _key(settings: Settings) -> str:
    return _keys.setdefault(settings, f"settings {len(_keys)}")


def patterns(text: str) -> tuple[str, ...]:
    """``"sm90.*, my.rule" -> ("sm90.*", "my.rule")``."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


@contextmanager
def _changed(**changes: Any) -> Iterator[None]:
    now, within = _settings.get(), backward_pass()
    set_in = now.set_in if within == -1 else {**now.set_in, **dict.fromkeys(changes, within)}
    changed = replace(now, set_in=set_in, **changes)
    token, thread.key = _settings.set(changed), _key(changed)
    try:
        yield
    finally:
        _settings.reset(token)
        thread.key = _key(now)


@contextmanager
def recipe(recipe: object) -> Iterator[Recipe]:
    """Run what is called inside under this recipe: a name (``"mxfp8"``), a `Recipe`, or one of Transformer Engine's
    recipes; the innermost holds, but for layers with a recipe of their own.

    The backward pass of a call uses the recipe of its forward, wherever ``backward()`` is called. What activation
    checkpointing computes again uses that of the chain's last call with gradients, or, under ``use_reentrant=True``, of
    its last call without.
    """
    resolved = resolve(recipe)
    with _changed(recipe=resolved):
        yield resolved


@contextmanager
def disabled(*patterns: str) -> Iterator[None]:
    """Switch the fusion rules off whose names match any of these patterns (``fm.disabled("sm90.*")``): to bisect.

    The pattern is that of `fnmatch`. ``fm.disabled()`` switches nothing off; nested blocks add up.
    """
    with _changed(disabled=(*current().disabled, *patterns)):
        yield


@contextmanager
def strict(enabled: bool = True, *, unavailable: bool = False) -> Iterator[None]:
    """Raise `FusionError`, with the nearest miss, where an op that this device has fused kernels for runs unfused.

    That is: a rule available on this device stood on the op and ended in CONSTRAINT or NO_MATCH, or its kernel declined
    at the call. An op that no rule has a kernel for, on any device, is no miss: a product of quantized operands.

    Parameters
    ----------
    enabled
        False: raise nothing inside.
    unavailable
        Also raise where a rule stood on the op and ended in UNAVAILABLE: the device is another one, a package is
        missing, or the rule is switched off. Without a GPU, ``explain(..., arch=90).raise_if_missed()`` checks the same
        for one.
    """
    with _changed(strict=enabled, strict_unavailable=enabled and unavailable):
        yield
