"""Environment variables that are read at every call, so that a change holds from the next call on."""

from __future__ import annotations

import os
from collections.abc import Callable


def reader(name: str) -> Callable[[], str]:
    """Return a function that returns the variable's text now, empty where it is not set.

    ``os.environ.get`` takes a microsecond of the host for a variable that is not set, since it raises and catches two
    exceptions; the mapping of encoded texts under it a twentieth.
    """
    environ = os.environ
    texts = getattr(environ, "_data", None)
    if not isinstance(texts, dict):  # another Python's
        return lambda: os.environ.get(name, "")
    encoded = environ.encodekey(name)

    def read() -> str:
        text = texts.get(encoded)
        return "" if text is None else environ.decodevalue(text)

    return read
