"""Matches a rule's pattern with the items of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fusedmoe.fusion.language.rule import Slot
from fusedmoe.ops.glue import Glue
from fusedmoe.ops.op import BackwardOp, Op

Item: TypeAlias = Op | BackwardOp | Glue


@dataclass(frozen=True)
class Match:
    """A match: the item in each slot, and the position after the last item."""

    bindings: dict[str, Item | None]
    end: int


@dataclass(frozen=True)
class Mismatch:
    """The farthest partial match: the number of slots bound, and the slot that failed."""

    matched: int
    slot: str
    expected: str
    got: str
    # the number of items, from the first, that the rule clearly has slots for: those up to the last item that a
    # required slot matched. Later items that only optional slots matched do not count. An item of a subclass of the
    # expected class counts, with all items before it
    shared: int

    def __str__(self) -> str:
        return f"slot {self.slot!r}: expected {self.expected}, got {self.got}"


def match(slots: tuple[Slot, ...], items: Sequence[Item], start: int) -> list[Match] | Mismatch:
    """Match a pattern at a position: all matches, longest first, or the farthest mismatch by shared, then matched."""
    first, item = slots[0], items[start] if start < len(items) else None
    if getattr(item, "alone", False) or (
        not first.optional and type(item) not in first.types  # most rules, at most positions
    ):
        return _mismatch(0, 0, first, item)
    found: list[Match] = []
    failed: list[Mismatch] = []
    # a stack, not a nested recursive function: that refers to itself, and would keep the ops of a deleted module
    todo: list[tuple[int, int, int, dict[str, Item | None]]] = [(0, start, 0, {})]
    while todo:
        index, position, shared, bindings = todo.pop()
        if index == len(slots):
            found.append(Match(bindings, position))
            continue
        slot = slots[index]
        item = items[position] if position < len(items) else None
        fits = item is not None and type(item) in slot.types
        if slot.optional:
            todo.append((index + 1, position, shared, {**bindings, slot.name: None}))
        elif not fits:
            failed.append(_mismatch(position - start, shared, slot, item))
        if fits:
            after = position + 1
            todo.append((index + 1, after, shared if slot.optional else after - start, {**bindings, slot.name: item}))
    if found:
        return sorted(found, key=lambda m: -m.end)
    return max(failed, key=lambda m: (m.shared, m.matched))  # without a match, some slot failed


def _mismatch(bound: int, shared: int, slot: Slot, item: Item | None) -> Mismatch:
    if item is None:
        return Mismatch(bound, slot.name, slot.expected, "the end of the chain", shared)
    got = type(item).__name__
    if isinstance(item, slot.types):
        base = next(t.__name__ for t in slot.types if isinstance(item, t))
        got += f", a subclass of {base}, which may compute something else"
        shared = bound + 1
    return Mismatch(bound, slot.name, slot.expected, got, shared)
