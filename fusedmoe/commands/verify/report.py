"""A verification, and a soak, as a table and as JSON."""

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
    from fusedmoe.commands.verify.soak.watch import Soaked

__all__ = ["as_data", "problems", "soak_as_data", "soak_table", "table"]

HEAD = ("rule", "cases", "error", "bound", "repeats", "graph", "streams", "passed")


def table(verification: Verification) -> str:
    """Return one line for each rule; see docs/verify.md."""
    return _aligned([HEAD, *map(_row, verification.rules)])


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
        **_installed(machine),
        "versions": installed.versions() | package.versions(),
        "passed": verification.passed,
        "rules": [_plain(dataclasses.asdict(result)) for result in verification.rules],
        "cases": [_case(outcome) for outcome in verification.outcomes],
    }


def _case(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {"name": outcome.case.name, **dataclasses.asdict(outcome.case)}
    found |= {"passed": outcome.passed, "rules": outcome.rules, "blamed": outcome.blamed}
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
        _answer(result.passed) if result.cases or not result.passed else "not checked",
    )


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _answer(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def _aligned(rows: list[tuple[str, ...]]) -> str:
    """Return a table: the names to the left, figures to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    head, *others = rows
    lines = []
    for first, *figures in (head, tuple("-" * width for width in widths), *others):
        cells = [f"{cell:>{width}}" for cell, width in zip(figures, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return "\n".join(lines)


def _installed(machine: Machine) -> dict[str, str]:
    return {"gpu": machine.name, "architecture": f"sm_{machine.arch}", "driver": machine.driver}


# ---- a soak --------------------------------------------------------------------------------------------------------


def soak_table(soaked: Soaked) -> str:
    """Return one line for each family; see docs/verify.md."""
    head = ("family", "kernels", "calls", "beside load", "differing", "hung or died", "seconds")
    rows = []
    for name, *counts, seconds in (family.values() for family in _families(soaked)):
        rows.append((name, *(f"{count:,}" for count in counts), f"{seconds:.1f}"))
    return _aligned([head, *rows])


def soak_as_data(soaked: Soaked, machine: Machine) -> dict[str, Any]:
    """Return the soak as values that JSON has."""
    return {
        **_installed(machine),
        "versions": installed.versions(),
        "passed": soaked.passed,
        "calls per family": soaked.wanted,
        "families": _families(soaked),
        "problems": soaked.problems(),
    }


def _families(soaked: Soaked) -> list[dict[str, Any]]:
    return [
        {
            "family": family,
            "kernels": len(symbols),
            "calls": sum(soaked.calls[symbol] for symbol in symbols),
            "beside_load": sum(soaked.beside_load[symbol] for symbol in symbols),
            "differing": sum(soaked.differing[symbol] for symbol in symbols),
            "ended": len(soaked.ended.intersection(symbols)),
            "seconds": round(sum(soaked.seconds[symbol] for symbol in symbols), 1),
        }
        for family, symbols in soaked.families.items()
    ]
