"""A plan's steps as a straight-line program over numbered slots, and the loop that runs it.

Nothing here decides anything from what a tensor contains: the same arguments' shapes, dtypes and strides run the same
steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fusedmoe.fusion.graph import Plain
from fusedmoe.fusion.log import say_once
from fusedmoe.fusion.names import NONE
from fusedmoe.fusion.rule import Declined, FusionError, NothingToDo, RuleError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fused:
    """A fused step with its values resolved to the chain's names, and the plain steps that stand in where it declines
    at a call.
    """

    label: str
    rule: str
    run: Callable[..., Any]
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    guard: Callable[..., None] | None
    zeroes_tail: bool
    launches: int
    fallback: tuple[Plain, ...] = ()

    @property
    def all_needs(self) -> tuple[str, ...]:
        """What has to be there: for the step itself, and for its stand-ins."""
        made = {value for step in self.fallback for value in step.gives}
        return (*self.needs, *dict.fromkeys(v for step in self.fallback for v in step.needs if v not in made))


AnyStep = Plain | Fused


def all_needs(step: AnyStep) -> tuple[str, ...]:
    """Return the values that have to be there for a step to run whatever its guard says."""
    return step.all_needs if isinstance(step, Fused) and step.guard is not None else step.needs


def _with_stand_ins(steps: Iterable[AnyStep]) -> Iterable[AnyStep]:
    for step in steps:
        yield step
        if isinstance(step, Fused) and step.guard is not None:
            yield from step.fallback


class _Instruction(NamedTuple):
    """A step over slots. A named tuple, because unpacking one is the fastest way to read it."""

    run: Callable[..., Any]
    read: Callable[[Sequence[Tensor | None]], tuple[Tensor | None, ...]]
    gives: tuple[int, ...]
    frees: tuple[int, ...]
    guard: Callable[..., None] | None
    step: AnyStep
    stand_ins: tuple[_Instruction, ...]


def reader(slots: Sequence[int]) -> Callable[[Sequence[Tensor | None]], tuple[Tensor | None, ...]]:
    """Return a function that reads these slots, quickly: some run before every step."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda values: tuple([values[i] for i in slots])


class Program:
    """Steps in an order in which everything is there when it is needed.

    Parameters
    ----------
    steps
        In the order preferred; a step waits for values that a later one gives.
    given
        Values there at the start.
    results
        Values wanted at the end; everything else is released after its last use.
    slots
        Numbers of values, shared by the programs of a plan; extended here.
    """

    def __init__(
        self, steps: Iterable[AnyStep], given: Collection[str], results: Collection[str], slots: dict[str, int]
    ) -> None:
        self.steps = tuple(_scheduled(steps, {*given, NONE}))
        self.slots = slots
        keep = {*results, NONE}
        last_use: dict[str, int] = {}
        for i, step in enumerate(self.steps):
            for value in (*all_needs(step), *(v for s in _with_stand_ins([step]) for v in s.gives)):
                last_use[value] = i
        ends: dict[int, list[str]] = {}
        for value, i in last_use.items():
            if value not in keep:
                ends.setdefault(i, []).append(value)
        self._instructions = tuple(self._compile(s, ends.get(i, ())) for i, s in enumerate(self.steps))

    def _slot(self, value: str) -> int:
        return self.slots.setdefault(value, len(self.slots))

    def _compile(self, step: AnyStep, frees: Sequence[str]) -> _Instruction:
        guard, stand_ins = (step.guard, step.fallback) if isinstance(step, Fused) else (None, ())
        return _Instruction(
            step.run,
            reader([self._slot(v) for v in step.needs]),
            tuple(self._slot(v) for v in step.gives),
            tuple(self._slot(v) for v in frees),
            guard,
            step,
            tuple(self._compile(s, ()) for s in stand_ins) if guard is not None else (),
        )

    def run(self, values: list[Tensor | None], strict: bool) -> None:
        """Run the steps over ``values``, which is indexed by slot and as long as there are slots."""
        for run, read, gives, frees, guard, step, stand_ins in self._instructions:
            arguments = read(values)
            accepted = True
            if guard is not None:
                try:
                    guard(*arguments)
                except Declined as reason:
                    _report(step, reason, strict)
                    accepted = False
            if accepted:
                out = run(*arguments)
                if len(gives) == 1 and isinstance(out, Tensor):
                    values[gives[0]] = out
                else:
                    _store(out, step, gives, values)
            else:
                for stand_in in stand_ins:
                    _store(stand_in.run(*stand_in.read(values)), stand_in.step, stand_in.gives, values)
            for slot in frees:
                values[slot] = None


def _store(out: object, step: AnyStep, gives: tuple[int, ...], values: list[Tensor | None]) -> None:
    tensors = out if isinstance(out, (tuple, list)) else (out,)
    if len(tensors) != len(gives):
        who = f"rule {step.rule!r} on {step.label}" if isinstance(step, Fused) else step.label
        raise RuleError(f"{who}: returned {len(tensors)} tensors where {len(gives)} were announced: {step.gives}")
    for slot, tensor in zip(gives, tensors, strict=True):
        values[slot] = tensor


def _report(step: AnyStep, reason: Declined, strict: bool) -> None:
    """Say that a fused step's guard has declined the call, or raise that."""
    if isinstance(reason, NothingToDo) or not isinstance(step, Fused):
        return
    if strict:
        raise FusionError(f"{step.label}: {step.rule} declined this call: {reason}") from None
    message = "%s: %s declined this call: %s; it runs unfused"
    # once a reason, not once a number of rows
    say_once(
        logger, logging.WARNING, message, step.label, step.rule, reason, key=(step.label, step.rule, reason.message)
    )


def _scheduled(steps: Iterable[AnyStep], there: set[str]) -> Iterable[AnyStep]:
    waiting = list(steps)
    while waiting:
        step = next((s for s in waiting if there.issuperset(all_needs(s))), None)
        if step is None:
            missing = {s.label: sorted(set(all_needs(s)) - there) for s in waiting}
            raise RuleError(f"steps that wait for values nobody gives: {missing}")
        waiting.remove(step)
        there.update(step.gives)
        yield step


def needed_steps(steps: Sequence[AnyStep], wanted: Collection[str], given: Collection[str] = ()) -> list[AnyStep]:
    """Return those steps, in order, that the wanted values depend on, where these are given."""
    makers: Mapping[str, AnyStep] = {v: step for step in steps for v in step.gives if v not in given}
    needed: set[int] = set()
    todo = list(wanted)
    while todo:
        step = makers.get(todo.pop())
        if step is not None and id(step) not in needed:
            needed.add(id(step))
            todo.extend(all_needs(step))
    return [s for s in steps if id(s) in needed]
