"""A soak as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusedmoe.base import machine as installed
from fusedmoe.commands.verify.soak.watch import line_of

if TYPE_CHECKING:
    from fusedmoe.commands.verify.machine import Machine
    from fusedmoe.commands.verify.soak.watch import Soaked

__all__ = ["as_data", "problems", "table"]

HEAD = ("family", "kernels", "calls", "beside load", "differing", "hung or died", "seconds")


def table(soaked: Soaked) -> str:
    """Return one line for each family; see docs/verify.md."""
    rows = [HEAD, *(_row(family) for family in _families(soaked))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def problems(soaked: Soaked) -> list[str]:
    """Return the failures and the kernels that were not reached, each as a line."""
    return [*map(line_of, soaked.wrong), *(f"FAILED {line}" for line in soaked.not_reached())]


def as_data(soaked: Soaked, machine: Machine) -> dict[str, Any]:
    """Return the soak as values that JSON has."""
    return {
        "gpu": machine.name,
        "architecture": f"sm_{machine.arch}",
        "driver": machine.driver,
        "versions": installed.versions(),
        "passed": soaked.passed,
        "calls per family": soaked.wanted,
        "families": _families(soaked),
        "problems": problems(soaked),
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


def _row(family: dict[str, Any]) -> tuple[str, ...]:
    name, *counts, seconds = family.values()
    return (name, *(f"{count:,}" for count in counts), f"{seconds:.1f}")
