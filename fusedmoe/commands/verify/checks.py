"""Runs a case: errors, rows after the last expert, repeats, a CUDA graph, and two streams."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import fusedmoe as fm
from fusedmoe.commands.verify import rounding
from fusedmoe.commands.verify.calls import Call, make_call
from fusedmoe.commands.verify.cases import ATOMIC, BOUNDS, REPEAT_BOUND, ROW_BOUND, Case, Sizes
from fusedmoe.commands.verify.machine import poisoned_memory

if TYPE_CHECKING:
    from fusedmoe.commands.verify.machine import Gpu, Results

OF_ROWS = ("y", "x", "probs")
"""The results with one row per row of the input."""
REPEATS = 20


@dataclass(frozen=True)
class Found:
    """The findings of the checks of a case."""

    error: float = math.nan  # the largest relative error against plain PyTorch for its bound
    bound: float = math.nan
    result: str = ""  # the result with this error
    rounding_error: float | None = None  # against the arithmetic with the kernels' rounding points, where it exists
    rounding_bound: float | None = None
    repeats: tuple[int, int] = (0, 0)  # those that had the bits of the first call, and all
    graph: bool | None = None  # whether the replay of a CUDA graph had these bits; None without this check
    streams: bool | None = None  # whether calls on two streams had these bits; None without this check
    problems: tuple[str, ...] = ()  # the checks that failed, in words


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case."""

    case: Case
    rules: tuple[str, ...]  # of its plan, those of steps between ops included
    found: Found
    blamed: tuple[str, ...] = ()  # with problems: the rules without which there are none; all rules if there are none

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.found.problems


def run_case(case: Case, sizes: Sizes, machine: Gpu, repeats: int = REPEATS) -> Outcome:
    """Run a case and, if it fails, find the rules that it fails with. An exception of a call is a problem."""
    rules: tuple[str, ...] = ()
    try:
        call = make_call(case, sizes, machine.device)
        with _without(case.disabled):
            explanation = call.explain()
        steps = [step for plan in explanation.plans for step in (*plan.steps, *plan.glue)]
        rules = tuple(dict.fromkeys(step.rule for step in steps if step.rule is not None))
        captures = not any(step.host_sync for step in steps)
    except Exception as error:  # noqa: BLE001  reported as the problem of the case
        return Outcome(case, rules, Found(problems=(_said(error),)))
    if not rules:
        return Outcome(case, rules, Found(problems=("no rule ran",)))

    def look(disabled: tuple[str, ...]) -> Found:
        return _look(call, machine, repeats, (*case.disabled, *disabled), rules, captures)

    found = look(())
    blamed = tuple(rule for rule in rules if not look((rule,)).problems) if found.problems else ()
    return Outcome(case, rules, found, blamed or rules if found.problems else ())


def _look(
    call: Call, machine: Gpu, repeats: int, disabled: tuple[str, ...], rules: Collection[str], captures: bool
) -> Found:
    try:
        with _without(("*",)):
            call.forget_quantized_weights()
            expected = call.results()
        with _without(disabled):
            left = [rule for rule in rules if rule not in disabled]
            return _compared(call, machine, repeats, expected, left, captures)
    except Exception as error:  # noqa: BLE001  reported as the problem of the case
        return Found(problems=(_said(error),))
    finally:
        call.forget_quantized_weights()


def _compared(
    call: Call, machine: Gpu, repeats: int, expected: Results, rules: Collection[str], captures: bool
) -> Found:
    """Return the findings of fused calls."""
    call.forget_quantized_weights()
    with poisoned_memory():
        first = call.results()
    found = _errors(call, first, expected, rules)
    problems = [*found.problems, *_tails(call, first)]
    inexact = {name for rule in rules for name in ATOMIC.get(rule, ())}
    if inexact and call.case.module == "moe":  # the router's gradients follow from those of the weights
        inexact |= {name for name in first if name == "x" or name.startswith("router")}

    def same(results: Results) -> bool:
        return _same(results, first, inexact)

    equal = 0
    for _ in range(repeats):
        call.forget_quantized_weights()
        equal += same(call.results())
    if equal < repeats:
        problems.append(f"{repeats - equal} of {repeats} repeats differ")
    graph = streams = None
    if captures and not (call.has_state or call.draws):
        graph = same(machine.replayed(call.results))
        problems += [] if graph else ["the replay of a CUDA graph differs"]
    if not (call.has_state or call.draws or call.shares_memory):
        streams = all(map(same, machine.on_two_streams(call.results)))
        problems += [] if streams else ["calls on two streams differ"]
    return replace(found, repeats=(equal, repeats), graph=graph, streams=streams, problems=tuple(problems))


# ---- comparisons ----------------------------------------------------------------------------------------------------


def _errors(call: Call, got: Results, expected: Results, rules: Collection[str]) -> Found:
    bounds = BOUNDS[call.case.recipe]
    if got.keys() != expected.keys():
        return Found(problems=(f"expected {', '.join(expected)}, got {', '.join(got)}",))
    result, error, problems = _largest(call, got, expected, bounds.unfused, "plain PyTorch")
    if bounds.rounding is None or not rounding.applies(call, rules):
        return Found(error, bounds.unfused, result, problems=problems)
    _, rounded, more = _largest(call, got, rounding.results(call), bounds.rounding, "the rounding of the kernels")
    return Found(error, bounds.unfused, result, rounded, bounds.rounding, problems=(*problems, *more))


def _largest(
    call: Call, got: Results, expected: Results, bound: float, reference: str
) -> tuple[str, float, tuple[str, ...]]:
    """Return the result with the largest error, that error, and the problems."""
    zeros = [name for name, want in expected.items() if not _rows(call, name, want).any()]
    problems = [f"{name}: the expected result is zeros, so zeros would pass" for name in zeros]
    errors = {name: _error(call, name, got[name], want) for name, want in expected.items() if name not in zeros}
    worst = max(errors, key=lambda name: errors[name])
    for name, error in errors.items():
        if not error <= bound:
            problems.append(f"{name}: relative error {error:.2g} against {reference}, bound {bound:g}")
        elif name in ("y", "x") and (rows := _wrong_rows(call, got[name], expected[name])):
            problems.append(f"{name}: {rows} rows have a relative error above {ROW_BOUND:g} against {reference}")
    return worst, errors[worst], tuple(problems)


def _error(call: Call, name: str, got: Tensor, want: Tensor) -> float:
    """Return the largest relative error of an expert's part, or of the whole if the result has no such parts."""
    if got.shape != want.shape:
        return math.inf
    return max(_relative(*pair) for pair in zip(_parts(call, name, got), _parts(call, name, want), strict=True))


def _relative(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    scale = float(want.norm())
    difference = float((got - want).norm())
    if not math.isfinite(difference):
        return math.inf
    return difference / scale if scale else math.inf if difference else 0.0


def _wrong_rows(call: Call, got: Tensor, want: Tensor) -> int:
    """Return the number of rows with an error above the bound, which the norm of all rows may hide."""
    got, want = got[call.used].double(), want[call.used].double()
    return int(((got - want).norm(dim=1) > ROW_BOUND * want.norm(dim=1)).sum())


def _parts(call: Call, name: str, result: Tensor) -> list[Tensor]:
    if name in ("y", "x") and call.ends:
        return [result[start:end] for start, end in pairwise((0, *call.ends)) if start < end]
    if call.ends and name != "probs" and result.shape[0] == call.num_experts:
        return list(result)
    return [_rows(call, name, result)]


def _rows(call: Call, name: str, result: Tensor) -> Tensor:
    """Return the rows of a result that belong to an expert; all of a result that has no such rows."""
    return result[call.used] if name in OF_ROWS else result


def _tails(call: Call, got: Results) -> list[str]:
    """Return a problem for each result whose rows without an expert are not zeros."""
    names = [name for name in OF_ROWS if name in got and bool((got[name][~call.used] != 0).any())]
    return [f"{name}: the rows without an expert are not zeros" for name in names]


def _same(got: Results, first: Results, inexact: Collection[str]) -> bool:
    """Whether results have the bits of the first ones; those that are ``inexact`` need only be close."""
    if got.keys() != first.keys():
        return False
    exact = all(torch.equal(got[name], want) for name, want in first.items() if name not in inexact)
    return exact and all(_relative(got[name], first[name]) <= REPEAT_BOUND for name in inexact & first.keys())


def _without(patterns: tuple[str, ...]) -> AbstractContextManager[object]:
    return fm.disabled(*patterns) if patterns else contextlib.nullcontext()


def _said(error: BaseException) -> str:
    """Return an error in a line. The first error of a chain comes first: a capture that has failed ends in a second
    one, which does not say why.
    """
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return said if before is None else f"{_said(before)}; then {said}"
