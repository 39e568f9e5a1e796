"""Log messages that appear once per process."""

from __future__ import annotations

import logging

_said: set[tuple[object, ...]] = set()


def say_once(
    logger: logging.Logger, level: int, message: str, *values: object, key: tuple[object, ...] | None = None
) -> None:
    """Log a message unless this process logged the same message, or one with the same key, before."""
    said = (logger.name, message, *(map(str, values) if key is None else key))
    if said not in _said and logger.isEnabledFor(level):
        _said.add(said)
        logger.log(level, message, *values)


def forget_said() -> None:
    """Let every message be logged again."""
    _said.clear()
