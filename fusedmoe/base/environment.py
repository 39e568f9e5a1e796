"""Environment variables: reading them, and warnings about unknown names and values."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Callable, Iterable

from fusedmoe.base.log import say_once

logger = logging.getLogger(__name__)

VARIABLES = (
    "FUSEDMOE_LOG",
    "FUSEDMOE_DISABLE",
    "FUSEDMOE_DEBUG",
    "FUSEDMOE_CACHE_DIR",
    "FUSEDMOE_COMMIT",  # of benchmarks and GPU tests
    "FUSEDMOE_UPDATE_SNAPSHOTS",  # of tests
)
_FLAGS = {**dict.fromkeys(("1", "true", "on", "yes"), True), **dict.fromkeys(("", "0", "false", "off", "no"), False)}


def reader(*names: str) -> Callable[[], tuple[object, ...]]:
    """Return a function that returns one value per variable; the value changes whenever the variable does.

    For a variable that is not set, ``os.environ.get`` takes a microsecond, since it raises and catches two exceptions.
    The mapping of encoded strings inside ``os.environ`` takes a twentieth of that.
    """
    texts = getattr(os.environ, "_data", None)
    if not isinstance(texts, dict):  # another implementation of Python
        return lambda: tuple([os.environ.get(name) for name in names])
    get, encoded = texts.get, [os.environ.encodekey(name) for name in names]

    def read() -> tuple[object, ...]:
        return tuple(map(get, encoded))

    return read


environment_state = reader("FUSEDMOE_DISABLE", "FUSEDMOE_DEBUG")
"""Returns a value that changes whenever the result of `disabled_by_environment` or `debugging` may change."""


def disabled_by_environment() -> str:
    """Return the patterns of disabled rules, separated by commas."""
    return os.environ.get("FUSEDMOE_DISABLE", "")


def debugging() -> bool:
    """Whether to run the checks of inputs that wait for the device."""
    text = os.environ.get("FUSEDMOE_DEBUG", "")
    flag = _FLAGS.get(text.strip().lower())
    if flag is None:
        say_once(logger, logging.WARNING, "FUSEDMOE_DEBUG=%s: expected 1 or 0; treated as 0", text)
    return bool(flag)


def configure_logging(value: str | None = None) -> None:
    """Configure logging by ``FUSEDMOE_LOG``; an unset or empty value changes nothing.

    ``fusion`` logs plans and fallbacks, ``fusion:debug`` also every rule that was tried. Commas separate several
    values. An unknown value is ignored with a WARNING.
    """
    value = os.environ.get("FUSEDMOE_LOG", "") if value is None else value
    for area in filter(None, (part.strip() for part in value.split(","))):
        name, _, level = area.partition(":")
        if name != "fusion" or level not in ("", "info", "debug"):
            message = "FUSEDMOE_LOG: expected 'fusion' or 'fusion:debug', got %r, which is ignored%s"
            say_once(logger, logging.WARNING, message, area, did_you_mean(area, ("fusion", "fusion:debug")))
            continue
        of_engine = logging.getLogger("fusedmoe.fusion")
        of_engine.setLevel(logging.DEBUG if level == "debug" else logging.INFO)
        if not any(getattr(h, "_fusedmoe", False) for h in of_engine.handlers):
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            handler._fusedmoe = True  # type: ignore[attr-defined]
            of_engine.addHandler(handler)
            of_engine.propagate = False


def check() -> None:
    """Warn about unknown variables that begin with FUSEDMOE_, and about unknown values."""
    for name in sorted(os.environ):
        if name.startswith("FUSEDMOE_") and name not in VARIABLES:
            hint = did_you_mean(name, VARIABLES, 0.8)  # they share a prefix
            say_once(logger, logging.WARNING, "%s: fusedmoe reads no such environment variable%s", name, hint)
    debugging()
    folder = os.environ.get("FUSEDMOE_CACHE_DIR", "")
    if _FLAGS.get(folder.strip().lower(), True) is False and folder not in ("", "0"):
        message = "FUSEDMOE_CACHE_DIR=%s: used as a directory name; did you mean 0, which disables the cache?"
        say_once(logger, logging.WARNING, message, folder)


def did_you_mean(text: str, known: Iterable[str], least: float = 0.6) -> str:
    """Return a question with the nearest known text, ``"; did you mean 'sm90.*'?"``, or an empty text."""
    close = difflib.get_close_matches(text, list(known), n=1, cutoff=least)
    return f"; did you mean {close[0]!r}?" if close else ""
