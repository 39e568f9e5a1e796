"""A plan's steps as a Python function, written for the plan.

    def program(given, run0, run1, report1, instead1):
        x, splits, _0_weight = given
        given.clear()
        offsets = run0(splits, x)
        del splits
        try:
            _1_output, _1_input = run1(x, _0_weight, None, offsets, None)
        except Declined as reason:
            report1(reason)
            run1 = None
        if run1 is None:
            _1_output, _1_input = instead1(x, _0_weight, offsets)
        return (_1_output,), (offsets, _1_input, x, _0_weight)

A loop over the steps would do, but costs the host as much as the launches that it makes. Nothing here decides anything
from what a tensor contains: the same arguments' shapes, dtypes and strides run the same steps.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import linecache
import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fusedmoe.fusion.names import NONE, primal
from fusedmoe.fusion.plain import Plain
from fusedmoe.fusion.results import Specs, check_results
from fusedmoe.fusion.rule import Declined, FusionError, NothingToDo, RuleError
from fusedmoe.log import say_once

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fused:
    """A fused step with its values resolved to the chain's names, and the plain steps that stand in where it declines
    at a call.
    """

    label: str
    rule: str
    run: Callable[..., Any] | None
    bind: Callable[..., Callable[..., Any]] | None
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    may_decline: bool
    may_give_none: bool
    zeroes_tail: bool
    launches: int
    fallback: tuple[Plain, ...] = ()

    @property
    def all_needs(self) -> tuple[str, ...]:
        """What has to be there: for the step itself, and for its stand-ins."""
        return (*self.needs, *dict.fromkeys(self.fallback_needs))

    @property
    def fallback_needs(self) -> tuple[str, ...]:
        """What has to be there for its stand-ins."""
        made = {value for step in self.fallback for value in step.gives}
        return tuple(dict.fromkeys(v for step in self.fallback for v in step.needs if v not in made and v != NONE))


AnyStep = Plain | Fused


def all_needs(step: AnyStep) -> tuple[str, ...]:
    """Return the values that have to be there for a step to run, also where it declines."""
    return step.all_needs if isinstance(step, Fused) and step.may_decline else step.needs


Values = tuple["Tensor | None", ...]
Runs = list["Callable[..., Any]"]


class Program:
    """Steps in an order in which everything is there when it is needed.

    Parameters
    ----------
    steps
        In the order preferred; a step waits for values that a later one gives.
    given
        Values there at the start, in order.
    results
        Groups of values wanted at the end; everything else is released after its last use.

    Attributes
    ----------
    source : str
        The function's text.
    run : callable
        Takes a list of the given values, which it empties, and those of `runs`; returns a tuple of values for each
        group.
    """

    def __init__(self, steps: Iterable[AnyStep], given: Sequence[str], results: Sequence[Sequence[str]]) -> None:
        self.steps = tuple(_scheduled(steps, {*given, NONE}))
        self.source = _source(self.steps, given, results)
        self._stand_ins: dict[int, Program] = {}
        self.run: Callable[..., tuple[Values, ...]] = _function(self.source)

    def runs(self, strict: bool, specs: Specs | None = None) -> Runs:
        """Return what runs the steps, for calls of one kind: those whose tensors have the same signature. The first of
        them binds each step and, with the specs of the forward pass, checks what it returns.
        """
        runs: Runs = []
        for i, step in enumerate(self.steps):
            runs.append(partial(_run_first, step, runs, len(runs), specs))
            if isinstance(step, Fused) and step.may_decline:
                runs += partial(_report, step, strict), partial(self._instead, i)
        return runs

    def _instead(self, number: int, *tensors: Tensor | None) -> Any:
        """Run plain steps in the place of one that has declined."""
        program = self._stand_ins.get(number)
        if program is None:
            step = self.steps[number]
            assert isinstance(step, Fused)
            program = self._stand_ins[number] = Program(step.fallback, step.fallback_needs, [step.gives])
        (out,) = program.run([*tensors], *program.runs(strict=False))
        return out if len(out) > 1 else out[0]


def _run_first(step: AnyStep, runs: Runs, place: int, specs: Specs | None, *tensors: Tensor | None) -> Any:
    """Run a step for the first time for calls of a kind, and leave in ``runs`` what runs it from then on."""
    who = f"rule {step.rule!r} on {step.label}" if isinstance(step, Fused) else step.label
    if step.bind is not None:
        run = step.bind(*tensors)
        if not callable(run):
            raise RuleError(f"{who}: bind returned {run!r}: expected a function; decline through fm.require")
    else:
        assert step.run is not None
        run = step.run
    first = step.first if isinstance(step, Plain) else None
    out = (first or run)(*tensors)
    results = out if isinstance(out, (tuple, list)) else (out,)
    count = len(results)
    of_op = "" if isinstance(step, Fused) else ", as infer() of the op says"
    if count != len(step.gives):
        raise RuleError(f"{who}: returned {count} tensors where {len(step.gives)} were announced: {step.gives}")
    if specs is not None:
        device = next((t.device for t in tensors if t is not None), None)
        arriving = [t for v, t in zip(step.needs, tensors, strict=True) if primal(v) != v]
        may_be_none = isinstance(step, Plain) or step.may_give_none or any(g is None for g in arriving)
        check_results(who, step.gives, results, specs, device, of_op, may_be_none)
    if count == 1 and isinstance(out, (tuple, list)):
        run, out = partial(_only, run), out[0]
    runs[place] = run
    return out


def _only(run: Callable[..., Any], *tensors: Tensor | None) -> Tensor | None:
    (out,) = run(*tensors)
    return out  # type: ignore[no-any-return]


def _report(step: Fused, strict: bool, reason: Declined) -> None:
    """Say that a fused step has declined the call, or raise that."""
    if isinstance(reason, NothingToDo):
        return
    if strict:
        raise FusionError(f"{step.label}: {step.rule} declined this call: {reason}") from None
    message = "%s: %s declined this call: %s; it runs unfused"
    # once a reason, not once a number of rows
    say_once(
        logger, logging.WARNING, message, step.label, step.rule, reason, key=(step.label, step.rule, reason.message)
    )


def _source(steps: Sequence[AnyStep], given: Sequence[str], results: Sequence[Sequence[str]]) -> str:
    reserved = {f"{word}{i}" for i in range(len(steps)) for word in ("run", "report", "instead")}
    names = _identifiers([*given, *(v for step in steps for v in (*all_needs(step), *step.gives))], reserved)
    keep = {v for group in results for v in group}
    last_use = dict.fromkeys(given, -1)
    for i, step in enumerate(steps):
        last_use |= dict.fromkeys((*all_needs(step), *step.gives), i)

    def listed(values: Iterable[str]) -> str:
        return ", ".join(names[v] for v in values)

    def released(after: int) -> list[str]:
        over = [v for v, i in last_use.items() if i == after and v != NONE and v not in keep]
        return [f"del {listed(over)}"] if over else []

    parameters, lines = ["given"], []
    if given:
        lines += [f"{listed(given)}, = given", "given.clear()", *released(-1)]
    for i, step in enumerate(steps):
        parameters.append(f"run{i}")
        gives = listed(step.gives)
        call = f"{gives} = run{i}({listed(step.needs)})"
        if isinstance(step, Fused) and step.may_decline:
            parameters += f"report{i}", f"instead{i}"
            lines += [
                "try:",
                f"    {call}",
                "except Declined as reason:",
                f"    report{i}(reason)",
                f"    run{i} = None",
            ]
            lines += [f"if run{i} is None:", f"    {gives} = instead{i}({listed(step.fallback_needs)})"]
        else:
            lines.append(call)
        lines += released(i)
    groups = ["(" + "".join(f"{names[v]}, " for v in group) + ")" for group in results]
    lines.append(f"return {', '.join(groups)},")
    return "".join([f"def program({', '.join(parameters)}):\n", *(f"    {line}\n" for line in lines)])


def _identifiers(values: Iterable[str], reserved: Collection[str]) -> dict[str, str]:
    """Return a name in Python for each value: ``grad_2_input`` for ``grad(2.input)``."""
    names, taken = {NONE: "None"}, {"given", "reason", "Declined", *reserved}
    for value in values:
        if value not in names:
            name = re.sub(r"\W+", "_", value, flags=re.ASCII).rstrip("_")
            name = name if name[:1].isalpha() else f"_{name}"
            while name in taken or keyword.iskeyword(name):
                name += "_"
            taken.add(name)
            names[value] = name
    return names


_numbers = itertools.count()


@functools.lru_cache(maxsize=1024)
def _function(source: str) -> Callable[..., Any]:
    """Return the function of a text: the same for the same layer in every block of a model."""
    name = f"<fusedmoe program {next(_numbers)}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # for tracebacks
    namespace: dict[str, Any] = {"Declined": Declined}
    exec(compile(source, name, "exec"), namespace)
    return namespace["program"]  # type: ignore[no-any-return]


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
