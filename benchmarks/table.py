"""Rows as text."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.cases import OURS, Row
from benchmarks.problem import Problem

COLUMNS = ("", "ms", "TFLOP/s", "% ceiling", "ours is", "host idle us", "queued us", "error", "kept MiB")
_FIRST, _REST = 18, 13


def header(problem: Problem, routing: str) -> str:
    """Return a line with the shape, and the fewest and the most rows per expert."""
    shape, splits = problem.shape, problem.splits_cpu
    return (
        f"{shape.name}: {problem.rows} rows, hidden {shape.hidden}, intermediate {shape.intermediate}, "
        f"{shape.experts} experts of {int(splits.min())} to {int(splits.max())} rows ({routing}), {shape.activation}"
    )


def lines(rows: Iterable[Row], prefix: str = "") -> list[str]:
    """Return one line per row, below a title per case; ``prefix`` precedes the title."""
    case, text = None, []
    for row in rows:
        if row.case != case:
            case = row.case
            text += [f"  {prefix}{case}", "    " + _line(COLUMNS)]
        text.append("    " + _line(_cells(row)) + (f"  {row.note}" if row.note else ""))
    return text


def means(found: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Return the geometric means of `cases.mean_speedups` as lines."""
    return [
        f"{case}: {OURS} is {v['mean']:.2f}x {peer} (least {v['least']:.2f}x, {v['shapes']:.0f} shapes)"
        for case, peers in found.items()
        for peer, v in peers.items()
    ]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.peer,
        _number(row.ms, ".3f"),
        _number(row.tflops, ".0f"),
        _number(row.ceiling_percent, ".0f"),
        _number(row.ours_is, ".2f", "x") if row.peer != OURS else "",
        _number(row.host_idle_us, ".0f"),
        _number(row.host_queued_us, ".0f"),
        _number(row.error, ".1e"),
        _number(None if row.kept_bytes is None else row.kept_bytes / 2**20, ".0f"),
    )


def _line(cells: tuple[str, ...]) -> str:
    first, *rest = cells
    return (first.ljust(_FIRST) + "".join(cell.rjust(_REST) for cell in rest)).rstrip()


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit
