"""The steps of a plan as a Python function, written for the plan.

    def program(given, run0, run1, report1, fallback1):
        _0_input, splits, _0_weight, _0_bias, = given
        given.clear()
        offsets = run0(splits, _0_input)
        del splits
        try:
            _1_output, _1_input = run1(_0_input, _0_weight, _0_bias, offsets, None)
        except Declined as reason:
            report1(reason)
            run1 = None
        if run1 is None:
            _1_output, _1_input = fallback1(_0_input, _0_weight, _0_bias, offsets)
        del _0_bias
        return (_1_output, ), (_1_input, _0_input, offsets, _0_weight, ),

A loop over the steps would cost the host almost a fifth more per call. The function decides nothing from the
contents of a tensor: the same shapes, dtypes and strides of the arguments run the same steps.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import linecache
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fusedmoe.base.log import say_once
from fusedmoe.fusion.graph.steps import AnyStep, Fused, Plain, on_tensors
from fusedmoe.fusion.graph.values import NONE, Form, primal, tensors_of
from fusedmoe.fusion.language.rule import Declined, FusionError, NothingToDo, RuleError
from fusedmoe.fusion.program.order import Pair, in_order
from fusedmoe.fusion.program.results import Specs, check_results

logger = logging.getLogger(__name__)

Values = tuple["Tensor | None", ...]
Runs = list["Callable[..., Any]"]


class Program:
    """Steps in an order in which every value exists when it is needed.

    Arguments:
    - ``steps``: in the preferred order; a step waits for values that a later step gives.
    - ``given``, ``results``: the values that exist at the start, and groups of values wanted at the end. The program
      releases all others after their last use. The attributes of the same names list the tensors of these values, all
      offsets once.
    - ``forms``: the tensors of quantized values.
    - ``pairs``: those that hold where both steps are among ``steps``.

    Its attributes:
    - ``source`` (str): the function's text.
    - ``run`` (callable): takes a list of the given tensors, which it empties, and the functions of `runs`. Returns a
      tuple of tensors per group of results.
    """

    def __init__(
        self,
        steps: Iterable[AnyStep],
        given: Sequence[str],
        results: Sequence[Sequence[str]],
        forms: Mapping[str, Form],
        pairs: Sequence[Pair] = (),
    ) -> None:
        steps = list(steps)
        ids = set(map(id, steps))
        self.pairs = tuple(p for p in pairs if id(p.light) in ids and id(p.carrier) in ids)
        units = in_order(steps, {*given, NONE}, self.pairs)
        self.steps = tuple(step for unit in units for step in unit)
        self._beside = {id(step): pair.sms for pair in self.pairs for step in pair[:2]}
        self.given = distinct_tensors(given, forms)
        self.results = tuple(distinct_tensors(group, forms) for group in results)
        self._forms = forms
        lights = set(map(id, (pair.light for pair in self.pairs)))
        names = [_Names(step, forms, light=id(step) in lights) for step in self.steps]
        self.source = _source(names, self.given, self.results)
        self._fallbacks: dict[int, Program] = {}
        self.run: Callable[..., tuple[Values, ...]] = _function(self.source)

    def runs(self, strict: bool, specs: Specs | None = None, *, check: bool = True) -> Runs:
        """Return the functions of the steps, for calls of one kind: tensors with the same signature.

        The first call binds each step and, with ``check``, compares its results with ``specs``. Without specs, nothing
        is checked, and no value may be quantized.
        """
        runs: Runs = []
        for i, step in enumerate(self.steps):
            runs.append(partial(self._run_first, step, runs, len(runs), specs, check))
            if isinstance(step, Fused):
                runs += partial(_report, step, strict), partial(self._fall_back, i, specs)
        return runs

    def _run_first(
        self, step: AnyStep, runs: Runs, place: int, specs: Specs | None, check: bool, *tensors: Tensor | None
    ) -> Any:
        """Run a step in the first call of a kind, and put its function for later calls into ``runs``."""
        who = f"rule {step.rule!r} on {step.label}" if isinstance(step, Fused) else step.label
        gives = tensors_of(step.gives, self._forms)
        if isinstance(step, Fused):
            run: Callable[..., Any] = step.binder(self._beside.get(id(step), 0))(*tensors)
            if not callable(run):
                raise RuleError(f"{who}: bind returned {run!r}: expected a function; decline through fm.require")
            out = run(*tensors)
        else:
            run = on_tensors(step, self._forms, specs)
            first = run if step.first is None else on_tensors(replace(step, run=step.first), self._forms, specs)
            out = first(*tensors)
        results = out if isinstance(out, (tuple, list)) else (out,)
        count = len(results)
        if count != len(gives):
            raise RuleError(f"{who}: returned {count} tensors, expected {len(gives)}: {gives}")
        if specs is not None and check:
            device = next((t.device for t in tensors if t is not None), None)
            arriving = [t for v, t in zip(_Names(step, self._forms).needs, tensors, strict=True) if primal(v) != v]
            may_be_none = isinstance(step, Plain) or step.may_give_none or any(g is None for g in arriving)
            of_op = "" if isinstance(step, Fused) else ", as infer() of the op says"
            check_results(who, gives, results, specs, device, of_op, may_be_none)
        if count == 1 and isinstance(out, (tuple, list)):
            run, out = partial(_only, run), out[0]
        runs[place] = run
        return out

    def _fall_back(self, number: int, specs: Specs | None, *tensors: Tensor | None) -> Any:
        """Run plain steps in place of a fused step that has declined the call."""
        program = self._fallbacks.get(number)
        if program is None:
            step = self.steps[number]
            assert isinstance(step, Fused)
            results = tensors_of(step.gives, self._forms)  # without offsets
            program = Program(step.fallback, step.fallback_needs, [results], self._forms)
            self._fallbacks[number] = program
        (out,) = program.run([*tensors], *program.runs(False, specs))
        return out if len(out) > 1 else out[0]


def distinct_tensors(values: Iterable[str], forms: Mapping[str, Form]) -> tuple[str, ...]:
    """Return the tensors of some values, then the offsets of quantized ones that are not among them."""
    names: list[str] = []
    values = tuple(values)
    for value in values:
        names += tensors_of([value], forms)
    offsets = dict.fromkeys(form.offsets for form in (forms.get(v) for v in values) if form is not None)
    return (*names, *(v for v in offsets if v != NONE and v not in names))


class _Names:
    """A step's values as the tensors that its function takes and returns."""

    def __init__(self, step: AnyStep, forms: Mapping[str, Form], *, light: bool = False) -> None:
        self.light = light  # the next step carries it
        self.declines = isinstance(step, Fused)
        self.needs = tensors_of(step.needs, forms, offsets=not self.declines)  # a plain step assembles operands
        self.gives = tensors_of(step.gives, forms)
        self.fallback_needs = distinct_tensors(step.fallback_needs, forms) if isinstance(step, Fused) else ()


def _only(run: Callable[..., Any], *tensors: Tensor | None) -> Tensor | None:
    (out,) = run(*tensors)
    return out  # type: ignore[no-any-return]


def _report(step: Fused, strict: bool, reason: Declined) -> None:
    """Log that a fused step declined the call; raise it under ``fm.strict()``."""
    if isinstance(reason, NothingToDo):
        return
    if strict:
        raise FusionError(f"{step.label}: {step.rule} declined this call: {reason}") from None
    message = "%s: %s declined this call: %s; it runs unfused"
    # once per reason, for any values in it: they may differ in every call
    say_once(
        logger, logging.WARNING, message, step.label, step.rule, reason, key=(step.label, step.rule, reason.message)
    )


def _source(steps: Sequence[_Names], given: Sequence[str], results: Sequence[Sequence[str]]) -> str:
    reserved = {f"{word}{i}" for i in range(len(steps)) for word in ("run", "report", "fallback")}
    names = _identifiers([*given, *(v for s in steps for v in (*s.needs, *s.fallback_needs, *s.gives))], reserved)
    keep = {v for group in results for v in group}
    last_use = dict.fromkeys(given, -1)
    for i, step in enumerate(steps):
        # the carrier of a light step must not get the memory of a value that the light step still reads
        last_use |= dict.fromkeys((*step.needs, *step.fallback_needs, *step.gives), i + step.light)

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
        if step.light:
            lines.append("# its last launch runs beside the next step")
        call = f"{gives} = run{i}({listed(step.needs)})"
        if step.declines:
            parameters += f"report{i}", f"fallback{i}"
            lines += [
                "try:",
                f"    {call}",
                "except Declined as reason:",
                f"    report{i}(reason)",
                f"    run{i} = None",
            ]
            lines += [f"if run{i} is None:", f"    {gives} = fallback{i}({listed(step.fallback_needs)})"]
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
    """Return the function of a text. Equal layers of a model share one function."""
    name = f"<fusedmoe program {next(_numbers)}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # for tracebacks
    namespace: dict[str, Any] = {"Declined": Declined}
    exec(compile(source, name, "exec"), namespace)
    return namespace["program"]  # type: ignore[no-any-return]
