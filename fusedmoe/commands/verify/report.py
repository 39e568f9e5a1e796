"""A verification as a table and as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from fusedmoe.base import machine as installed
from fusedmoe.kernels.sm100 import package

if TYPE_CHECKING:
    from fusedmoe.commands.verify.checks import Outcome
    from fusedmoe.commands.verify.machine import Machine
    from fusedmoe.commands.verify.rules import RuleResult, Verification

__all__ = ["as_data", "problems", "table"]

HEAD = ("rule", "cases", "error", "bound", "repeats", "graph", "streams", "us fused", "us unfused", "passed")


def table(verification: Verification) -> str:
    """Return one line for each rule; see docs/verify.md."""
    rows = [HEAD, *map(_row, verification.rules)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join("  ".join(_aligned(cells, widths)).rstrip() for cells in rows)


def problems(verification: Verification) -> list[str]:
    """Return the failures of cases and the notes about rules, each as a line."""
    lines = []
    for outcome in verification.outcomes:
        blamed = f" ({', '.join(outcome.blamed)})" if outcome.blamed else ""
        lines += [f"FAILED {outcome.case.name}: {problem}{blamed}" for problem in outcome.found.problems]
    return lines + [f"{result.rule}: {result.note}" for result in verification.rules if result.note]


def as_data(verification: Verification, machine: Machine) -> dict[str, Any]:
    """Return the verification as values that JSON has; NaN and infinity are None and the text ``"inf"``."""
    return {
        "gpu": machine.name,
        "architecture": f"sm_{machine.arch}",
        "driver": machine.driver,
        "versions": installed.versions() | package.versions(),
        "passed": verification.passed,
        "rules": [_plain(dataclasses.asdict(result)) for result in verification.rules],
        "cases": [_case(outcome) for outcome in verification.outcomes],
    }


def _case(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {"name": outcome.case.name, **dataclasses.asdict(outcome.case)}
    found |= {"passed": outcome.passed, "rules": outcome.rules, "blamed": outcome.blamed, "us": outcome.us}
    plain: dict[str, Any] = _plain(found | dataclasses.asdict(outcome.found))
    return plain


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
        _number(result.error, ".2g"),
        _number(result.bound, "g"),
        f"{equal}/{repeats}" if repeats else "-",
        _answer(result.graph),
        _answer(result.streams),
        _number(result.us_fused, ",.0f"),
        _number(result.us_unfused, ",.0f"),
        _answer(result.passed) if result.cases or not result.passed else "not checked",
    )


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _answer(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def _aligned(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    """Return the cells with their widths: the names to the left, figures to the right."""
    pairs = list(zip(cells, widths, strict=True))
    return [f"{cell:<{width}}" for cell, width in pairs[:1]] + [f"{cell:>{width}}" for cell, width in pairs[1:]]
