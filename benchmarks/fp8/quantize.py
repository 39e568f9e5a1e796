"""The kernels that quantize to FP8 with blocks of 128: time, and bytes read and written per second.

Axes: R rows sorted by expert, T tokens, K columns, P padded rows, E experts. Rows that are read through an index count
as R rows read, although some of them come from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.ceiling import Ceiling
from benchmarks.problem import ROW_SCALE, Problem
from fusedmoe.commands.bench.layer import relative_error
from fusedmoe.commands.timing import Timer, times_of, why_not
from fusedmoe.kernels.rows.quantize import block_functions
from fusedmoe.numerics.formats import fp8_block

BLOCK = 128
ROWS, WEIGHT = fp8_block(), fp8_block(across=BLOCK)
WRONG = 0.06  # limit of the relative error, in norm; rounding to E4M3 gives about 0.026
SAMPLED_ROWS = 256

Form = tuple[Tensor, Tensor]  # codes and scales
FORMS = {"rows": (True, False), "columns": (False, True), "rows and columns": (True, True)}
GATHERED, WEIGHTS = "gathered ", "weights, rows and columns"


@dataclass(frozen=True)
class QuantizeRow:
    """A kernel's figures; ``note`` is the reason for missing ones. ``of_copy`` is the speed relative to a copy."""

    kernel: str
    shape: tuple[int, ...]
    note: str = ""
    error: float | None = None
    ms: float | None = None
    least_ms: float | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    tb_s: float | None = None
    of_copy: float | None = None


class _Case(NamedTuple):
    kernel: str
    shape: tuple[int, ...]
    call: Callable[[], tuple[Form, ...]]
    read_bytes: int
    error: Callable[[tuple[Form, ...]], float]


def measure(problem: Problem, timer: Timer, top: Ceiling) -> list[dict[str, Any]]:
    """Measure every kernel on the rows and weights of a problem, interleaved; return the entries of the result file."""
    cases, rows, errors, written = [], {}, {}, {}
    notes: dict[str, str | None] = {}
    for name, make in _makers(problem):
        try:
            case = make()
            forms = case.call()
            errors[name], written[name] = case.error(forms), sum(t.nbytes for form in forms for t in form)
        except Exception as raised:  # noqa: BLE001 reported in the kernel's row
            rows[name] = QuantizeRow(name, (), why_not(raised))
            continue
        wrong = not errors[name] < WRONG
        rows[name] = QuantizeRow(
            case.kernel, case.shape, f"wrong: relative error {errors[name]:.2g}" if wrong else "", errors[name]
        )
        if not wrong:
            cases.append((name, case))
            notes[name] = None
    times = times_of(timer, {name: case.call for name, case in cases}, notes)
    for name, case in cases:
        if (time := times.get(name)) is None:
            rows[name] = QuantizeRow(case.kernel, case.shape, notes[name] or "", errors[name])
            continue
        tb_s = (case.read_bytes + written[name]) / time.median_ms / 1e9
        rows[name] = QuantizeRow(
            case.kernel, case.shape, "", errors[name], time.median_ms, time.least_ms, case.read_bytes, written[name],
            tb_s, tb_s / top.copy_tb_s,
        )  # fmt: skip
    return [asdict(row) for row in rows.values()]


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table."""
    text = [f"  {'kernel':34}{'shape':>20}{'ms':>9}{'GB':>8}{'TB/s':>8}{'of copy':>9}{'error':>10}"]
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        figures = ""
        if row["ms"] is not None:
            moved = (row["read_bytes"] + row["written_bytes"]) / 1e9
            figures = f"{row['ms']:9.3f}{moved:8.2f}{row['tb_s']:8.2f}{row['of_copy']:9.2f}{row['error']:10.1e}"
        text.append(f"  {row['kernel']:34}{shape:>20}{figures}  {row['note']}".rstrip())
    return text


def dequantized(form: Form, across: int = 1) -> Tensor:
    """Return codes (..., M, L) times the scales of their blocks (..., M / across, L / 128), fp32."""
    codes, scale = form
    factors = scale.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]
    if across > 1:
        factors = factors.repeat_interleave(across, -2)[..., : codes.shape[-2], :]
    return codes.float() * factors


def _makers(problem: Problem) -> Iterator[tuple[str, Callable[[], _Case]]]:
    for columns in (problem.hidden, 2 * problem.intermediate):
        for form in FORMS:
            yield f"{form}, {columns}", lambda form=form, columns=columns: _of_rows(problem, form, columns, False)  # type: ignore[misc]
    for form in ("rows", "rows and columns"):
        yield GATHERED + form, lambda form=form: _of_rows(problem, form, problem.hidden, True)  # type: ignore[misc]
    yield f"{WEIGHTS} 1", lambda: _of_weight(problem.weight1)
    yield f"{WEIGHTS} 2", lambda: _of_weight(problem.weight2)


def _of_rows(problem: Problem, form: str, columns: int, gathered: bool) -> _Case:
    rows, device = problem.rows, problem.device
    by_rows, by_columns = FORMS[form]
    seeded = torch.Generator(device).manual_seed(11)
    index = None
    sources = rows
    if gathered:
        sources = problem.shape.tokens
        index = torch.randint(sources, (rows,), device=device, dtype=torch.int32, generator=seeded)
    x = torch.randn(sources, columns, generator=seeded, device=device, dtype=problem.dtype).mul_(ROW_SCALE)
    offsets = problem.offsets
    run = block_functions.bind_quantize_rows(x, ROWS, offsets, index, rows=by_rows, columns=by_columns)

    def error(forms: tuple[Form, ...]) -> float:
        found = 0.0
        if by_rows:
            codes, scale = forms[0]
            expected = x[:SAMPLED_ROWS] if index is None else x[index[:SAMPLED_ROWS]]
            found = relative_error(dequantized((codes[:SAMPLED_ROWS], scale[:SAMPLED_ROWS])), expected.double())
        if by_columns:
            codes, scale = forms[-1]
            first = problem.rows_of(next(e for e in range(problem.experts) if problem.splits_cpu[e]))
            expected = x[first] if index is None else x[index[first]]
            taken = codes[:, : first.stop], scale[:, : -(-first.stop // BLOCK)]
            found = max(found, relative_error(dequantized(taken), expected.mT.double()))
        return found

    read = rows * columns * x.itemsize + (0 if index is None else index.nbytes)
    name = (GATHERED if gathered else "") + form
    return _Case(name, (rows, columns), lambda: run(x, offsets, index), read, error)


def _of_weight(weight: Tensor) -> _Case:
    run = block_functions.bind_quantize_weight(weight, WEIGHT, rows=True, columns=True)

    def error(forms: tuple[Form, ...]) -> float:
        expected = weight[0].double()
        by_rows, by_columns = (dequantized((codes[0], scale[0]), BLOCK) for codes, scale in forms)
        return max(relative_error(by_rows, expected), relative_error(by_columns, expected.mT))

    return _Case(WEIGHTS, tuple(weight.shape), lambda: run(weight), weight.nbytes, error)
