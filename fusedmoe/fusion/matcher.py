"""Where a rule's pattern stands on a chain, and how far it got where it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from fusedmoe.fusion.rule import Slot
    from fusedmoe.ops.glue import Glue
    from fusedmoe.ops.op import BackwardOp, Op

    Item: TypeAlias = Op | BackwardOp | Glue


@dataclass(frozen=True)
class Match:
    """A pattern that stands: what each slot is bound to, and the position after its last op."""

    bindings: dict[str, Item | None]
    end: int


@dataclass(frozen=True)
class Mismatch:
    """The farthest that a pattern got: the slots bound before it, the slot that failed, what it wanted, what came.

    Attributes
    ----------
    stood : int
        How many ops, from the first, it still says something about: those up to the last that a required slot was bound
        to. An optional slot takes an op on account of what comes next: where something else
        comes, nothing is said of that op. Where a subclass of what was wanted comes, it is the right place, and all
        ops up to that one count.
    """

    matched: int
    slot: str
    expected: str
    got: str
    stood: int

    def __str__(self) -> str:
        return f"slot {self.slot!r}: expected {self.expected}, got {self.got}"


def match(slots: tuple[Slot, ...], items: Sequence[Item], start: int) -> list[Match] | Mismatch:
    """Match a pattern at a position: every way in which it stands, most slots bound first, or the farthest mismatch: by
    required slots, then by all.
    """
    found: list[Match] = []
    farthest: Mismatch | None = None

    def walk(index: int, position: int, stood: int, bindings: dict[str, Item | None]) -> None:
        nonlocal farthest
        if index == len(slots):
            found.append(Match(bindings, position))
            return
        slot = slots[index]
        item = items[position] if position < len(items) else None
        if item is not None and type(item) in slot.types:
            after = position + 1
            walk(index + 1, after, stood if slot.optional else after - start, {**bindings, slot.name: item})
        if slot.optional:
            walk(index + 1, position, stood, {**bindings, slot.name: None})
        elif item is None or type(item) not in slot.types:
            failed = _mismatch(position - start, stood, slot, item)
            if farthest is None or (failed.stood, failed.matched) > (farthest.stood, farthest.matched):
                farthest = failed

    walk(0, start, 0, {})
    if found:
        return sorted(found, key=lambda m: -m.end)
    assert farthest is not None, "a pattern that does not stand has a slot that failed"
    return farthest


def _mismatch(bound: int, stood: int, slot: Slot, item: Item | None) -> Mismatch:
    if item is None:
        return Mismatch(bound, slot.name, slot.expected, "the end of the chain", stood)
    got = type(item).__name__
    base = next((t.__name__ for t in slot.types if isinstance(item, t)), None)
    if base is not None:
        got += f", a subclass of {base}, which may compute something else"
        stood = bound + 1
    return Mismatch(bound, slot.name, slot.expected, got, stood)
