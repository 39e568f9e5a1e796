"""Environment variables that are read at every call, so that a change holds from the next call on."""

from __future__ import annotations

import os
from collections.abc import Callable


def reader(*names: str) -> Callable[[], tuple[object, ...]]:
    """Return a function that returns something for each variable that differs where its text does.

    ``os.environ.get`` takes a microsecond of the host for a variable that is not set, since it raises and catches two
    exceptions; the mapping of encoded texts under it a twentieth.
    """
    texts = getattr(os.environ, "_data", None)
    if not isinstance(texts, dict):  # another Python's
        return lambda: tuple([os.environ.get(name) for name in names])
    get, encoded = texts.get, [os.environ.encodekey(name) for name in names]
    return lambda: tuple([get(name) for name in encoded])


environment_state = reader("FUSEDMOE_DISABLE", "FUSEDMOE_DEBUG")
"""Tells whether any of the functions below would now say something else."""


def disabled_by_environment() -> str:
    """Return the patterns of rule names that are switched off, separated by commas."""
    return os.environ.get("FUSEDMOE_DISABLE", "")


def debugging() -> bool:
    """Whether inputs are checked that only a wait for the device can tell."""
    return os.environ.get("FUSEDMOE_DEBUG") == "1"
