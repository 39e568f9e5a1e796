"""The options of a subcommand, as the fields of a dataclass."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any

from fusedmoe.base.errors import InputError


def option(default: Any, text: str, metavar: str | None = None, **how: Any) -> Any:
    """Return a field with the help of an option, and more arguments of `add_argument`; ``group`` is a title."""
    return dataclasses.field(
        default=default, metadata={"help": text, **({"metavar": metavar} if metavar else {}), **how}
    )


def add_arguments(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add an option for each field: a flag if its default is False, an integer by its annotation, else a text."""
    groups: dict[str, Any] = {"": parser}
    for item in dataclasses.fields(options):
        how = dict(item.metadata)
        group = how.pop("group", "")
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        if item.default is False:
            how["action"] = "store_true"
        elif str(item.type).startswith("int"):
            how["type"] = int
        groups[group].add_argument(item.name if "nargs" in how else flag(item.name), default=item.default, **how)


def flag(name: str) -> str:
    """Return the command-line option of a field."""
    return "--" + name.replace("_", "-")


def required_sizes(options: object, names: Iterable[str]) -> dict[str, int]:
    """Return the named options; raise `InputError` if one is missing or below 1."""
    sizes: dict[str, int] = {}
    for name in names:
        size = getattr(options, name)
        if size is None:
            raise InputError(f"{flag(name)}: missing")
        if size < 1:
            raise InputError(f"{flag(name)} {size}: must be 1 or more")
        sizes[name] = size
    return sizes
