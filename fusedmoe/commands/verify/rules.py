"""A whole verification: the rules of an architecture, its cases, and the outcomes by rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from fusedmoe.builtin_rules import BUILTIN
from fusedmoe.commands.verify.cases import BETWEEN_RANKS, Case, Sizes, cases_for
from fusedmoe.commands.verify.checks import REPEATS, Outcome, run_case
from fusedmoe.commands.verify.machine import Machine, NoGpuError
from fusedmoe.fusion.language.registry import what_is_missing, why_unavailable
from fusedmoe.kernels.build import compiler
from fusedmoe.kernels.sm100 import package

__all__ = ["RuleResult", "Verification", "verify"]


SIZES = Sizes()


@dataclass(frozen=True)
class RuleResult:
    """The outcomes of the cases that a rule ran in.

    Attributes
    ----------
    rule
        The name.
    cases
        The number of cases.
    error, bound
        The largest relative error for its bound, and that bound; NaN without cases.
    repeats
        The repeats that had the same bits, and all repeats.
    graph, streams
        Whether CUDA graphs and calls on two streams had the same bits; None if no case had them.
    problems
        The problems of cases that failed with the rule, each after the name of the case.
    note
        The reason why no case covers the rule; empty otherwise.
    passed
        Whether no case failed, and a case covered the rule or none can.
    """

    rule: str
    cases: int
    error: float
    bound: float
    repeats: tuple[int, int]
    graph: bool | None
    streams: bool | None
    problems: tuple[str, ...]
    note: str
    passed: bool


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes
    ----------
    rules
        One result for each built-in rule of the architecture.
    outcomes
        The outcomes of all cases.
    passed
        Whether all rules passed, and all cases.
    """

    rules: tuple[RuleResult, ...]
    outcomes: tuple[Outcome, ...]
    passed: bool


def verify(
    machine: Machine,
    cases: Sequence[Case] | None = None,
    sizes: Sizes = SIZES,
    repeats: int = REPEATS,
    advance: Callable[[str], None] = lambda name: None,
    compile_ahead: Callable[[Sequence[Case], Sizes, torch.device], None] | None = None,
) -> Verification:
    """Check the built-in rules of a machine's architecture. The rules for Blackwell need no stamp meanwhile.

    Parameters
    ----------
    machine
        The GPU.
    cases
        The cases; by default all for the architecture.
    sizes, repeats
        The widths of the layers, and the repeats of a case.
    advance
        Called with the name of each completed case.
    compile_ahead
        Called once with the cases that are left, the sizes and the device, after a case that has compiled a kernel. It
        may compile those of the others.

    Raises
    ------
    NoGpuError
        No built-in rule is for the architecture, or a requirement is missing.
    """
    cases = cases_for(machine.arch) if cases is None else cases
    with package.being_verified():
        rules = _rules_of(machine)
        outcomes = []
        for case in cases:
            compiled = compiler.stats().compiled
            outcomes.append(run_case(case, sizes, machine, repeats))
            advance(case.name)
            if compile_ahead is not None and compiler.stats().compiled > compiled:
                compile_ahead(cases[len(outcomes) :], sizes, machine.device)
                compile_ahead = None
    results = tuple(_result(rule, outcomes) for rule in rules)
    passed = all(result.passed for result in results) and all(outcome.passed for outcome in outcomes)
    return Verification(results, tuple(outcomes), passed)


def _rules_of(machine: Machine) -> list[str]:
    """Return the names of the built-in rules for the architecture."""
    rules = [rule for rule in BUILTIN if why_unavailable(rule, machine.device, machine.arch, (), True) is None]
    if not rules:
        raise NoGpuError(f"fusedmoe has no kernels for this GPU, {machine.name} (sm_{machine.arch})")
    missing = list(filter(None, map(what_is_missing, rules)))
    if missing:
        raise NoGpuError(f"the kernels for sm_{machine.arch} cannot run here: {missing[0]}")
    return [rule.name for rule in rules]


def _result(rule: str, outcomes: Sequence[Outcome]) -> RuleResult:
    ran = [outcome for outcome in outcomes if rule in outcome.rules]
    failed = [outcome for outcome in ran if rule in outcome.blamed]
    # the figures of a case that failed with other rules only are not this rule's
    found = [outcome.found for outcome in ran if outcome.passed or outcome in failed]
    errors = [f for f in found if not math.isnan(f.bound)]
    worst = max(errors, key=lambda f: f.error / f.bound, default=None)
    between_ranks = rule in BETWEEN_RANKS
    note = "" if ran else "runs beside exchanges between ranks: not checked" if between_ranks else "no case ran it"
    return RuleResult(
        rule,
        len(ran),
        worst.error if worst else math.nan,
        worst.bound if worst else math.nan,
        (sum(f.repeats[0] for f in found), sum(f.repeats[1] for f in found)),
        _all(f.graph for f in found),
        _all(f.streams for f in found),
        tuple(f"{outcome.case.name}: {problem}" for outcome in failed for problem in outcome.found.problems),
        note,
        not failed and (bool(ran) or between_ranks),
    )


def _all(answers: Iterable[bool | None]) -> bool | None:
    """Return whether all answers are true, except None; None without others."""
    known = [answer for answer in answers if answer is not None]
    return all(known) if known else None
