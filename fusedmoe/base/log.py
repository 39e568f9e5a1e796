"""Log messages that appear once per process."""

from __future__ import annotations

import logging

_said: set[tuple[object, ...]] = set()


def say_once(
    logger: logging.Logger, level: int, message: str, *values: object, key: tuple[object, ...] | None = None
) -> None:
    """Log a message unless this process has logged it before with the same values or, if given, the same ``key``."""
    said = (logger.name, message, *(map(str, values) if key is None else key))
    if said not in _said and logger.isEnabledFor(level):
        _said.add(said)
        logger.log(level, message, *values)


def forget_said() -> None:
    """Allow every message to be logged again."""
    _said.clear()
