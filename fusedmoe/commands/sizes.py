"""The sizes among the options of a subcommand."""

from __future__ import annotations

from collections.abc import Iterable

from fusedmoe.base.errors import InputError


def required_sizes(options: object, names: Iterable[str]) -> dict[str, int]:
    """Return the named options; raise `InputError` if one is missing or below 1."""
    sizes: dict[str, int] = {}
    for name in names:
        size, flag = getattr(options, name), "--" + name.replace("_", "-")
        if size is None:
            raise InputError(f"{flag}: missing")
        if size < 1:
            raise InputError(f"{flag} {size}: must be 1 or more")
        sizes[name] = size
    return sizes
