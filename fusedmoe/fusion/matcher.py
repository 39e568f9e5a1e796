"""Where a rule's pattern stands on a chain, and how far it got where it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fusedmoe.fusion.rule import Slot
    from fusedmoe.ops.op import BackwardOp, Op


@dataclass(frozen=True)
class Match:
    """A pattern that stands: what each slot is bound to, and the position after its last op."""

    bindings: dict[str, Op | BackwardOp | None]
    end: int


@dataclass(frozen=True)
class Mismatch:
    """The farthest that a pattern got: the slots bound before it, the slot that failed, what it wanted, what came, and
    whether that is a subclass of what it wanted.
    """

    matched: int
    slot: str
    expected: str
    got: str
    subclass: bool = False

    def __str__(self) -> str:
        return f"slot {self.slot!r}: expected {self.expected}, got {self.got}"


def match(slots: tuple[Slot, ...], items: Sequence[Op | BackwardOp], start: int) -> list[Match] | Mismatch:
    """Match a pattern at a position: every way in which it stands, most slots bound first, or the farthest mismatch."""
    found: list[Match] = []
    farthest: Mismatch | None = None

    def walk(index: int, position: int, bindings: dict[str, Op | BackwardOp | None]) -> None:
        nonlocal farthest
        if index == len(slots):
            found.append(Match(bindings, position))
            return
        slot = slots[index]
        item = items[position] if position < len(items) else None
        if item is not None and type(item) in slot.types:
            walk(index + 1, position + 1, {**bindings, slot.name: item})
        if slot.optional:
            walk(index + 1, position, {**bindings, slot.name: None})
        elif item is None or type(item) not in slot.types:
            bound = position - start
            if farthest is None or bound > farthest.matched:
                farthest = _mismatch(bound, slot, item)

    walk(0, start, {})
    if found:
        return sorted(found, key=lambda m: -m.end)
    assert farthest is not None, "a pattern that does not stand has a slot that failed"
    return farthest


def _mismatch(bound: int, slot: Slot, item: Op | BackwardOp | None) -> Mismatch:
    if item is None:
        return Mismatch(bound, slot.name, slot.expected, "the end of the chain")
    got = type(item).__name__
    base = next((t.__name__ for t in slot.types if isinstance(item, t)), None)
    if base is not None:
        got += f", a subclass of {base}, which may compute something else"
    return Mismatch(bound, slot.name, slot.expected, got, base is not None)
