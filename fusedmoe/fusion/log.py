"""What the planner says, through `logging`, and the switch ``FUSEDMOE_LOG``."""

from __future__ import annotations

import logging
import os
import sys

_said: set[tuple[object, ...]] = set()


def say_once(
    logger: logging.Logger, level: int, message: str, *values: object, key: tuple[object, ...] | None = None
) -> None:
    """Log a message unless the very same one, or one of the same key, was logged before in this process."""
    said = (logger.name, message, *(map(str, values) if key is None else key))
    if said not in _said and logger.isEnabledFor(level):
        _said.add(said)
        logger.log(level, message, *values)


def forget_said() -> None:
    """Let every message be said again."""
    _said.clear()


def configure(value: str | None = None) -> None:
    """Set logging up as ``FUSEDMOE_LOG`` asks: ``fusion`` shows plans and fallbacks, ``fusion:debug`` also every rule
    tried.

    Several areas are separated by commas. One that is unknown is passed over, with a WARNING. Unset, nothing changes:
    plain `logging` configuration applies.
    """
    value = os.environ.get("FUSEDMOE_LOG", "") if value is None else value
    areas = [part.strip() for part in value.split(",") if part.strip()]
    for area in areas:
        name, _, level = area.partition(":")
        if name != "fusion" or level not in ("", "info", "debug"):
            from fusedmoe.environment import did_you_mean  # which imports this module

            message = "FUSEDMOE_LOG: expected 'fusion' or 'fusion:debug', got %r; it is passed over%s"
            hint = did_you_mean(area, ("fusion", "fusion:debug"))
            say_once(logging.getLogger(__name__), logging.WARNING, message, area, hint)
            continue
        logger = logging.getLogger("fusedmoe.fusion")
        logger.setLevel(logging.DEBUG if level == "debug" else logging.INFO)
        if not any(getattr(h, "_fusedmoe", False) for h in logger.handlers):
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            handler._fusedmoe = True  # type: ignore[attr-defined]
            logger.addHandler(handler)
            logger.propagate = False
