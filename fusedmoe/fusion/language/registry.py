"""The set of fusion rules: those that `register` adds, built-in rules included, and those of entry points."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from fusedmoe.base import changes
from fusedmoe.base.log import say_once
from fusedmoe.fusion.language.rule import Declined, FusionRule, RuleError, expect_none
from fusedmoe.fusion.report.data import Cause

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "fusedmoe.fusions"


class BrokenEntryPoint(NamedTuple):
    """An entry point that failed to load, with its error."""

    package: str
    name: str
    value: str
    error: str


class _Registry:
    def __init__(self) -> None:
        self.by_name: dict[str, type[FusionRule]] = {}
        self.generation = 0  # part of every plan's key
        self.loaded = False
        self.broken: tuple[BrokenEntryPoint, ...] = ()

    def add(self, rules: Iterable[object]) -> tuple[type[FusionRule], ...]:
        """Add all of the rules, or none if one of them is invalid. Return those that are new."""
        new: dict[str, type[FusionRule]] = {}
        for rule in rules:
            if not (isinstance(rule, type) and issubclass(rule, FusionRule)):
                raise RuleError(f"expected a subclass of FusionRule, got {rule!r}")
            taken = self.by_name.get(rule.name) or new.get(rule.name)
            if taken is None:
                new[rule.name] = rule
            elif taken is not rule:
                raise RuleError(
                    f"a rule named {rule.name!r} is registered already: {taken.__module__}.{taken.__qualname__}"
                )
        self.by_name |= new
        self.generation += 1
        changes.note()
        return tuple(new.values())

    def load(self) -> None:
        """Add the rules of entry points. This happens once, when the rules are first read.

        An entry point that fails is skipped: one WARNING names its package, and `broken` records it.
        """
        self.loaded = True  # set first, since an entry point may read the rules
        try:
            self.broken = tuple(filter(None, map(self._load_entry, entry_points(group=ENTRY_POINT_GROUP))))
        except BaseException:
            self.loaded = False
            raise

    def _load_entry(self, entry: EntryPoint) -> BrokenEntryPoint | None:
        """Add the rules of an entry point. Return its failure, or None."""
        try:
            found = entry.load()
            self.add(found if isinstance(found, (list, tuple)) else [found])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # third-party code may also raise SystemExit
            broken = BrokenEntryPoint(_package(entry), entry.name, entry.value, _in_one_line(error))
            logger.warning(
                "the fusion rules of package %s are not used: its entry point %s (%s) failed to load: %s", *broken
            )
            logger.debug("entry point %s of package %s", entry.name, broken.package, exc_info=error)
            return broken
        return None


def _package(entry: EntryPoint) -> str:
    try:
        return (entry.dist.name if entry.dist else None) or "(unknown)"
    except (KeyError, OSError):  # the metadata of a damaged installation is missing or has no name
        return "(unknown)"


def _in_one_line(error: BaseException) -> str:
    """Return the error as tracebacks end with it, in one line, even if its ``__str__`` fails."""
    return " ".join("".join(traceback.format_exception_only(error)).split())


_registry = _Registry()


class Registration:
    """The rules that one call of `register` added. `remove`, or the end of a ``with`` block, removes them."""

    def __init__(self, rules: tuple[type[FusionRule], ...]) -> None:
        self._rules = rules

    def remove(self) -> None:
        """Remove the rules that the call of `register` added; a rule registered before it stays."""
        for rule in self._rules:
            _registry.by_name.pop(rule.name, None)
        self._rules = ()
        _registry.generation += 1
        changes.note()

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def register(*rules: type[FusionRule]) -> Registration:
    """Add fusion rules, permanently or, as a context manager, for a block.

    An installed package need not call this: its entry points in the group ``fusedmoe.fusions`` name rule classes, or
    lists of them.

    Raises `RuleError`: an argument is not a subclass of `FusionRule`, or another rule has the same name.
    """
    return Registration(_registry.add(rules))


def rules() -> tuple[type[FusionRule], ...]:
    """Return all rules, sorted by name, so that the order of imports has no effect."""
    if not _registry.loaded:
        _registry.load()
    return tuple(_registry.by_name[name] for name in sorted(_registry.by_name))


def broken_entry_points() -> tuple[BrokenEntryPoint, ...]:
    """Return the entry points that failed to load."""
    rules()
    return _registry.broken


def generation() -> int:
    """Return a number that every change of the set of rules increases."""
    if not _registry.loaded:
        _registry.load()
    return _registry.generation


class Unavailable(NamedTuple):
    """The reason why a rule cannot run, and the kind of cause."""

    reason: str
    cause: Cause


def why_unavailable(
    rule: type[FusionRule],
    device: torch.device,
    arch: int | None,
    disabled: tuple[str, ...],
    assume_installed: bool = False,
) -> Unavailable | None:
    """Return the reason why a rule cannot run on a device, such as a pattern that switches it off; None if it can.

    With ``assume_installed``, the packages and other requirements of the rule on this machine are not checked.
    """
    for pattern in disabled:
        if fnmatchcase(rule.name, pattern):
            return Unavailable(f"switched off by {pattern!r}", "switch")
    found = _asked(rule, "available", "device", device, arch)
    return found if found is not None or assume_installed else _asked(rule, "installed", "machine")


def what_is_missing(rule: type[FusionRule]) -> str | None:
    """Return the requirement of a rule, besides the device, that this machine lacks; None if all are met."""
    missing = _asked(rule, "installed", "machine")
    return None if missing is None else missing.reason


def _asked(rule: type[FusionRule], method: str, cause: Cause, *values: object) -> Unavailable | None:
    """Call a method of a rule that may decline. If it fails, the rule is unavailable, and one WARNING names it."""
    try:
        expect_none(rule.name, method, getattr(rule, method)(*values))
    except Declined as why:
        return Unavailable(str(why), cause)
    except (RuleError, KeyboardInterrupt):
        raise
    except BaseException as error:  # third-party code may also raise SystemExit
        reason = f"{method}() failed: {_in_one_line(error)}"
        say_once(logger, logging.WARNING, "rule %r is not used: its %s", rule.name, reason, key=(rule.name, method))
        logger.debug("%s() of rule %r", method, rule.name, exc_info=error)
        return Unavailable(reason, "machine")
    return None
