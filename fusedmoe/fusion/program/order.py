"""The order of a program's steps, and which of them run beside each other.

A *light* step ends in a launch that a few SMs are enough for. A step that *carries* takes the other SMs meanwhile. The
steps of a `Pair` follow each other, the light one first: its last launch and the carrier run side by side. Neither
reads what the other writes. All values of the light step live until the carrier has been launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from fusedmoe.fusion.graph.steps import AnyStep, Fused
from fusedmoe.fusion.language.rule import RuleError

FILL = 0.8  # part of the carrier's time that the light launch may take
FEWEST_SMS, MOST_SMS = 16, 56
MORE_LIVE = 1.08  # bytes that may live at once, as a part of those in the order without the pair


class Pair(NamedTuple):
    """A light step, the step that carries it, and the SMs of the light step's last launch."""

    light: Fused
    carrier: Fused
    sms: int


Unit = tuple[AnyStep, ...]  # a step alone, or the two steps of a pair


def in_order(steps: Iterable[AnyStep], there: Collection[str], pairs: Sequence[Pair] = ()) -> list[Unit]:
    """Return the steps in an order in which every value exists when it is needed.

    The first step whose values exist comes next. A pair comes as early as the steps that it needs allow, since the
    values of a light step are large.
    """
    steps, exist = list(steps), set(there)
    paired: dict[int, Unit] = {id(step): pair[:2] for pair in pairs for step in pair[:2]}
    units: dict[int, Unit] = {}  # by the first step

    def add(step: AnyStep) -> None:
        unit = paired.get(id(step), (step,))
        units.setdefault(id(unit[0]), unit)

    for light, carrier, _ in pairs:
        for step in needed_steps(steps, (*light.all_needs, *carrier.all_needs), there):
            if id(step) not in paired:
                add(step)
        add(light)
    for step in steps:
        add(step)
    waiting, order = list(units.values()), []
    while waiting:
        unit = next((u for u in waiting if exist.issuperset(_needs(u))), None)
        if unit is None:
            missing = {u[0].label: sorted(_needs(u) - exist) for u in waiting}
            raise RuleError(f"no step gives the values that these steps need: {missing}")
        waiting.remove(unit)
        exist.update(v for step in unit for v in step.gives)
        order.append(unit)
    return order


def needed_steps(steps: Sequence[AnyStep], wanted: Collection[str], given: Collection[str] = ()) -> list[AnyStep]:
    """Return the steps, in order, that compute the wanted values from the given ones."""
    makers = {v: step for step in steps for v in step.gives if v not in given}
    needed: set[int] = set()
    todo = list(wanted)
    while todo:
        step = makers.get(todo.pop())
        if step is not None and id(step) not in needed:
            needed.add(id(step))
            todo.extend(step.all_needs)
    return [s for s in steps if id(s) in needed]


def pairs_of(
    steps: Sequence[AnyStep], given: Collection[str], results: Collection[str], nbytes: Callable[[str], float]
) -> list[Pair]:
    """Return the pairs that save time with little memory.

    The carrier with the most time is best: it gives up the smallest part of it. Of equal ones, that with which the
    fewest bytes are live at once.

    - ``steps``, ``given``, ``results``: as for a program.
    - ``nbytes``: the bytes of a value that the program may release, 0 for any other value.
    """
    pairs: list[Pair] = []
    fused = [s for s in steps if isinstance(s, Fused)]
    for light in fused:
        least = _most_live(in_order(steps, given, pairs), given, results, nbytes)
        best: tuple[float, float] | None = None
        chosen = None
        for carrier in fused:
            pair = _pair(light, carrier)
            if pair is None or any(s in (p.light, p.carrier) for p in pairs for s in pair[:2]):
                continue
            if _depends(light, carrier, steps, given) or _depends(carrier, light, steps, given):
                continue
            try:
                live = _most_live(in_order(steps, given, [*pairs, pair]), given, results, nbytes)
            except RuleError:  # with the other pairs, each waits for the other
                continue
            rank = -carrier.carries_us, live
            if live <= MORE_LIVE * least and (best is None or rank < best):
                best, chosen = rank, pair
        if chosen is not None:
            pairs.append(chosen)
    return pairs


def _pair(light: Fused, carrier: Fused) -> Pair | None:
    """Return the pair of these steps, if the light one is shorter on few SMs."""
    if not light.light_us or not carrier.carries_us:
        return None
    sms = max(2 * math.ceil(light.light_us / (FILL * carrier.carries_us) / 2), FEWEST_SMS)
    return Pair(light, carrier, sms) if sms <= MOST_SMS else None


def _depends(step: AnyStep, on: AnyStep, steps: Sequence[AnyStep], given: Collection[str]) -> bool:
    return any(s is on for s in needed_steps(steps, step.all_needs, given))


def _needs(unit: Unit) -> set[str]:
    return {v for step in unit for v in step.all_needs}


def _most_live(
    order: Sequence[Unit], given: Collection[str], results: Collection[str], nbytes: Callable[[str], float]
) -> float:
    """Return the most bytes of values that exist at once."""
    last = {v: i for i, unit in enumerate(order) for v in (*_needs(unit), *(v for s in unit for v in s.gives))}
    live = {v for v in given if v in last or v in results}
    most = 0.0
    for i, unit in enumerate(order):
        live.update(v for s in unit for v in s.gives)
        most = max(most, sum(map(nbytes, live)))
        live = {v for v in live if v in results or last[v] > i}
    return most
