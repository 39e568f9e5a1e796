"""The settings of a call: recipe, disabled rules, strictness. Each is in force inside its ``with`` block.

The end of a block
------------------
A block must end even if none of its code runs, for two reasons:

- Python may raise ``KeyboardInterrupt`` before the first and after the last instruction of ``__enter__`` and of
  ``__exit__``.
- Blocks may end out of order: in generators, and in copied contexts.

So a context variable holds the innermost `_Entry`, which has a weak reference to the function that ends it. Only the
``with`` statement holds a strong reference, which Python drops however the statement is left. An entry is in force
while its function exists and was not called.

`torch.compile` cannot guard on a context variable. It guards on ``thread.key``, a thread-local text that names the
settings.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar, overload

import torch

from fusedmoe.base.checks import FLAG, instance
from fusedmoe.base.environment import disabled_by_environment
from fusedmoe.base.errors import InputError
from fusedmoe.base.recompute import backward_pass, had_gradients
from fusedmoe.numerics.recipes import BF16, Recipe, resolve
from fusedmoe.ops.state.amax import looking

_T = TypeVar("_T")
_F = TypeVar("_F", bound="Callable[..., Any]")


@dataclass(frozen=True)
class Settings:
    """The arguments of `fm.recipe`, `fm.disabled` and `fm.strict` that are in force."""

    recipe: Recipe = BF16
    disabled: tuple[str, ...] = ()
    strict: bool = False
    strict_unavailable: bool = False
    # the settings that a recomputed function has set in a backward pass, each with the number of that pass
    set_in: Mapping[str, int] = field(default_factory=dict, compare=False)

    def within(self, backward_pass: int) -> dict[str, Any]:
        """Return the settings that were set in this backward pass."""
        return {name: getattr(self, name) for name, where in self.set_in.items() if where == backward_pass}

    def all_disabled(self) -> tuple[str, ...]:
        """Return `disabled` and the patterns of the environment variable."""
        return (*self.disabled, *patterns(disabled_by_environment()))


class _Thread(threading.local):
    """The settings of a thread as a text, on which `torch.compile` can guard."""

    def __init__(self) -> None:  # runs in each thread; Dynamo would not notice that a class attribute gets overridden
        self.key = ""


class _Entry:
    """One entry into a block: ``outer`` is the entry around it, ``end`` returns the function that ends it (None once
    it has ended), ``known`` has the last settings outside the block and inside it.
    """

    __slots__ = ("_changes", "_within", "end", "known", "outer")

    def __init__(self, changes: Mapping[str, Any]) -> None:
        self._changes, self._within = changes, backward_pass()
        self.known: tuple[Settings, Settings] | None = None
        self.outer: _Entry | None = None
        self.end: Callable[[], object] = _ended

    def settings(self, outside: Settings) -> Settings:
        """Return the settings inside the block, for these outside it."""
        known = self.known  # read once: other threads may write it
        if known is None or known[0] is not outside:
            known = self.known = outside, self._changed(outside)
        return known[1]

    def _changed(self, outside: Settings) -> Settings:
        changes = dict(self._changes)
        if "disabled" in changes:
            changes["disabled"] = (*outside.disabled, *changes["disabled"])
        if self._within != -1:
            return replace(outside, **changes, set_in={**outside.set_in, **dict.fromkeys(changes, self._within)})
        changed = replace(outside, **changes)
        return changed if changed.set_in else _known.setdefault(changed, changed)


def _ended() -> None:
    """Replaces the weak reference of an entry that has ended."""


_innermost: ContextVar[_Entry | None] = ContextVar("fusedmoe.call.settings", default=None)
_default = Settings()
_known: dict[Settings, Settings] = {_default: _default}  # equal settings are one object: a call compares them
_keys: dict[Settings, str] = {_default: ""}
thread = _Thread()


def current(_innermost: Callable[[], _Entry | None] = _innermost.get) -> Settings:
    """Return the settings that are in force."""
    entry = _innermost()
    if entry is None:
        return _default
    known = entry.known
    outer: _Entry | None = entry
    while outer is not None and outer.end() is not None:
        outer = outer.outer
    return known[1] if outer is None and known is not None else _of(entry)  # outer is None if no entry has ended


def _of(entry: _Entry | None) -> Settings:
    entry = _open(entry)
    if entry is None:
        return _default
    outer = entry.outer
    return entry.settings(_default if outer is None else _of(outer))


def _open(entry: _Entry | None) -> _Entry | None:
    """Return the innermost entry that has not ended, from this one outwards."""
    while entry is not None and entry.end() is None:
        entry = entry.outer
    return entry


class OfCalls:
    """The settings of the last calls of a chain, and those of the next one.

    A recomputation in a backward pass may run after the ``with`` block of the original call has ended. On a GPU it runs
    in another thread, where that block is not in force. So it uses the settings of the original call, changed by the
    blocks that the recomputed function itself opens. The original call is the last call of the chain with gradients, or
    without gradients if the recomputed function first ran without them.
    """

    def __init__(self) -> None:
        self._last: dict[bool, Settings] = {}  # of the last calls with gradients (True) and without (False)

    def of_call(self) -> Settings:
        """Return the settings of a call: the current ones, except when a backward pass recomputes a call."""
        now, within = current(), backward_pass()
        grad = torch.is_grad_enabled()
        if within == -1:
            if not looking():
                self._last[grad] = now
            return now
        first_had_gradients = had_gradients()
        before = self._last.get(grad and first_had_gradients)
        if before is not None:
            now = replace(before, **now.within(within))
            if grad and not first_had_gradients:  # also the original call of a checkpoint nested in this one
                self._last[True] = now
        return now


def follow_context() -> None:
    """Set ``thread.key`` to the name of the settings in force; blocks of other contexts may have changed it."""
    now = current()
    thread.key = _keys.setdefault(now, f"settings {len(_keys)}")


def _leave(entry: _Entry, *_: object) -> None:
    reference, entry.end = entry.end, _ended  # after an interrupt, this frame holds the reference and its callback
    if _innermost.get() is entry:
        _innermost.set(_open(entry.outer))
    follow_context()
    del reference


def _abandoned(_: object) -> None:
    """Clean up after an entry that was interrupted before its block began, or as the block ended."""
    follow_context()


class _End:
    """``__exit__`` of a block: one function per entry, to which the ``with`` statement holds the only reference."""

    @overload
    def __get__(self, block: None, kind: type) -> _End: ...
    @overload
    def __get__(self, block: _Block[Any], kind: type) -> Callable[..., None]: ...
    def __get__(self, block: _Block[Any] | None, kind: type) -> Callable[..., None]:
        if block is None:
            return self
        return block._end or block._prepared()

    def __call__(self, block: _Block[Any], *error: object) -> None:
        """Leave a block that was entered without a ``with`` statement, as `contextlib.ExitStack` does."""
        end, block._end = block._end, None
        if end is not None:
            end(*error)


class _Block(ContextDecorator, Generic[_T]):
    """A block, or the calls of a decorated function, with other settings. The ``with`` statement gives ``value``."""

    __exit__ = _End()

    def __init__(self, value: _T, **changes: Any) -> None:
        self._value, self._changes = value, changes
        self._entry: _Entry | None = None  # for the next `__enter__`
        self._end: Callable[..., None] | None = None  # if no `with` statement holds it

    def __call__(self, function: _F) -> _F:
        """Decorate a function: each call runs inside the block.

        Raises `InputError`: the function is a generator or a coroutine, whose body runs after the decorated call has
        returned.
        """
        kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
        if any(is_kind(function) for is_kind in kinds):
            raise InputError(
                "fm.recipe, fm.disabled, fm.strict: function: expected one whose body runs when it is called, got "
                f"{function!r}, a generator or a coroutine; use a `with` statement inside of it"
            )
        return super().__call__(function)

    def _recreate_cm(self) -> _Block[_T]:
        return _Block(self._value, **self._changes)

    def _prepared(self) -> Callable[..., None]:
        entry = _Entry(self._changes)
        end = partial(_leave, entry)
        entry.end = weakref.ref(end, _abandoned)
        self._entry = entry
        return end

    def __enter__(self) -> _T:
        entry, self._entry = self._entry, None
        if entry is None or entry.end() is None:
            if self._end is not None:
                raise RuntimeError("this block was already entered; call fm.recipe, fm.disabled or fm.strict again")
            self._end = self._prepared()
            entry, self._entry = self._entry, None
        assert entry is not None
        entry.outer = _open(_innermost.get())
        _innermost.set(entry)
        follow_context()
        return self._value


def patterns(text: str) -> tuple[str, ...]:
    """Return the patterns in a text: ``"sm90.*, my.rule" -> ("sm90.*", "my.rule")``."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def recipe(recipe: object) -> _Block[Recipe]:
    """Run calls inside the block under this recipe: a name (``"mxfp8"``), a `Recipe`, or one of Transformer Engine.

    The innermost recipe is in force, except for layers with a recipe of their own. The backward pass of a call uses the
    recipe of its forward pass, wherever ``backward()`` is called. Recomputation under activation checkpointing uses the
    recipe of the chain's last call with gradients, or under ``use_reentrant=True`` of its last call without.
    """
    resolved = resolve(recipe)
    return _Block(resolved, recipe=resolved)


_PATTERN = instance(str, "names of rules")


def disabled(*patterns: str) -> _Block[None]:
    """Disable the fusion rules whose names match any of these patterns (``fm.disabled("sm90.*")``), for bisection.

    The patterns are those of `fnmatch`. ``fm.disabled()`` disables nothing; nested blocks accumulate. A pattern without
    a match is no error, since rules may be registered later. The first plan under such a pattern logs a warning.
    """
    for pattern in patterns:
        _PATTERN("disabled: patterns", pattern)
    return _Block(None, disabled=patterns)


def strict(enabled: bool = True, *, unavailable: bool = False) -> _Block[None]:
    """Raise `FusionError`, with the nearest miss, if an op runs unfused although this device has a fused kernel for it.

    That is: a rule that is available on this device matched the op and ended in CONSTRAINT or NO_MATCH, or its kernel
    declined the call. An op without a fused kernel on any device, such as a product of quantized operands, is no miss.

    Parameters
    ----------
    enabled
        False: do not raise inside the block.
    unavailable
        Also raise if a rule matched the op and ended in UNAVAILABLE: it is for another device, a package is missing, or
        the rule is disabled. On a machine without a GPU, use ``explain(..., arch=90).raise_if_missed()``.
    """
    enabled, unavailable = FLAG("strict: enabled", enabled), FLAG("strict: unavailable", unavailable)
    return _Block(None, strict=enabled, strict_unavailable=enabled and unavailable)
