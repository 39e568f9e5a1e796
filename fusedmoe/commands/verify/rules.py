"""A whole verification: the rules of an architecture, its cases, and the outcomes by rule, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedmoe.base import machine as installed
from fusedmoe.builtin_rules import BUILTIN
from fusedmoe.commands.verify.cases import BETWEEN_RANKS, Case, Sizes, cases_for
from fusedmoe.commands.verify.checks import REPEATS, Found, Outcome, run_case
from fusedmoe.commands.verify.machine import Gpu, NoGpuError
from fusedmoe.fusion.language.registry import what_is_missing, why_unavailable
from fusedmoe.kernels.build import compiler
from fusedmoe.kernels.sm100 import package

SIZES = Sizes()
HEAD = ("rule", "cases", "error", "bound", "repeats", "graph", "streams", "passed")


@dataclass(frozen=True)
class RuleResult:
    """The outcomes of the cases that a rule ran in."""

    rule: str
    cases: int
    error: float  # the largest relative error for its bound; NaN without cases
    bound: float
    repeats: tuple[int, int]  # those that had the same bits, and all
    graph: bool | None  # whether CUDA graphs had the same bits; None if no case had one
    streams: bool | None  # whether calls on two streams had the same bits; None if no case had them
    problems: tuple[str, ...]  # of cases that failed with the rule, each after the name of the case
    note: str  # the reason why no case covers the rule; empty otherwise
    passed: bool  # whether no case failed, and a case covered the rule or none can


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: of each built-in rule of the architecture, and of all cases."""

    rules: tuple[RuleResult, ...]
    outcomes: tuple[Outcome, ...]
    passed: bool  # whether all rules passed, and all cases


def verify(
    machine: Gpu,
    cases: Sequence[Case] | None = None,
    sizes: Sizes = SIZES,
    repeats: int = REPEATS,
    advance: Callable[[str], None] = lambda name: None,
    compile_ahead: Callable[[Sequence[Case], Sizes, torch.device], None] | None = None,
) -> Verification:
    """Check the built-in rules of a machine's architecture. The rules for Blackwell need no stamp meanwhile.

    ``compile_ahead`` is called once with the cases that are left, the sizes and the device, after a case that has
    compiled a kernel. It may compile those of the others. `NoGpuError` is raised if no built-in rule is for the
    architecture, or a requirement is missing.
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


def _rules_of(machine: Gpu) -> list[str]:
    """Return the names of the built-in rules for the architecture."""
    rules = [rule for rule in BUILTIN if why_unavailable(rule, machine.device, machine.arch, (), True) is None]
    if not rules:
        raise NoGpuError(f"fusedmoe has no kernels for this GPU, {machine.name} (sm_{machine.arch})")
    if missing := list(filter(None, map(what_is_missing, rules))):
        raise NoGpuError(f"the kernels for sm_{machine.arch} cannot run here: {missing[0]}")
    return [rule.name for rule in rules]


def _result(rule: str, outcomes: Sequence[Outcome]) -> RuleResult:
    ran = [outcome for outcome in outcomes if rule in outcome.rules]
    failed = [outcome for outcome in ran if rule in outcome.blamed]
    # the figures of a case that failed with other rules only are not this rule's
    found = [outcome.found for outcome in ran if outcome.passed or outcome in failed]
    errors = [f for f in found if not math.isnan(f.bound)]
    worst = max(errors, key=lambda f: f.error / f.bound, default=Found())
    between_ranks = rule in BETWEEN_RANKS
    note = "" if ran else "runs beside exchanges between ranks: not checked" if between_ranks else "no case ran it"
    return RuleResult(
        rule,
        len(ran),
        worst.error,
        worst.bound,
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


# ---- the table and JSON --------------------------------------------------------------------------------------------


def table(verification: Verification) -> str:
    """Return one line for each rule; see docs/verify.md."""
    return aligned([HEAD, *map(_row, verification.rules)])


def problems(verification: Verification) -> list[str]:
    """Return the failures of cases and the notes about rules, each as a line."""
    lines = []
    for outcome in verification.outcomes:
        blamed = f" ({', '.join(outcome.blamed)})" if outcome.blamed else ""
        lines += [f"FAILED {outcome.case.name}: {problem}{blamed}" for problem in outcome.found.problems]
    return lines + [f"{result.rule}: {result.note}" for result in verification.rules if result.note]


def as_data(verification: Verification, machine: Gpu) -> dict[str, Any]:
    """Return the verification as values that JSON has; NaN and infinity are None and the text ``"inf"``."""
    return {
        **installed_on(machine),
        "versions": installed.versions() | package.versions(),
        "passed": verification.passed,
        "rules": [_plain(dataclasses.asdict(result)) for result in verification.rules],
        "cases": [_case(outcome) for outcome in verification.outcomes],
    }


def _case(outcome: Outcome) -> Any:
    found: dict[str, Any] = {"name": outcome.case.name, **dataclasses.asdict(outcome.case)}
    found |= {"passed": outcome.passed, "rules": outcome.rules, "blamed": outcome.blamed}
    return _plain(found | dataclasses.asdict(outcome.found))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    return value


def _row(result: RuleResult) -> tuple[str, ...]:
    equal, repeats = result.repeats
    return (
        result.rule,
        str(result.cases),
        *("-" if math.isnan(x) else format(x, form) for x, form in ((result.error, ".2g"), (result.bound, "g"))),
        f"{equal}/{repeats}" if repeats else "-",
        _answer(result.graph),
        _answer(result.streams),
        _answer(result.passed) if result.cases or not result.passed else "not checked",
    )


def _answer(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Return a table: the names to the left, figures to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    head, *others = rows
    lines = []
    for first, *figures in (head, tuple("-" * width for width in widths), *others):
        cells = [f"{cell:>{width}}" for cell, width in zip(figures, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return "\n".join(lines)


def installed_on(machine: Gpu) -> dict[str, str]:
    """Return the GPU, its architecture and its driver, as values that JSON has."""
    return {"gpu": machine.name, "architecture": f"sm_{machine.arch}", "driver": machine.driver}
