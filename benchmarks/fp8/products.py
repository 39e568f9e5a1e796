"""Each product of an expert MLP on dispatched rows, in FP8 with scales of blocks and in bf16, alternating in one timer.

The operands in FP8 are quantized beforehand, except where the title of a product says ``quantize``: there, the epilogue
quantizes what the next products read. The errors are relative to fp64 of the unquantized operands, so those of FP8
include the rounding of the operands.

Some products are also measured in FP8 with one scale per expert, as delayed scaling has them. There the gradient is in
E5M2, and ``quantize`` writes codes and finds the largest magnitude of each expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Candidate, Case, worst_error
from benchmarks.fp8.quantize import BLOCK, ROWS, WEIGHT, Form, dequantized
from benchmarks.kernels import ALIGNED_CASES, CASES
from benchmarks.peers.ours import Ours
from benchmarks.problem import Problem
from fusedmoe.commands.timing import Timer, times_of, why_not
from fusedmoe.kernels.options import DEFAULT
from fusedmoe.kernels.rows.quantize import block_functions
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.numerics.formats import E5M2, Format, amax_by_expert, fp8_tensor, quantize

FP8, BF16, BY_EXPERT = "fp8", "bf16", "fp8 by expert"
# limits of the relative error, in norm; two operands in E4M3 give about 0.037, and one of them in E5M2 0.058
WRONG = {FP8: 0.08, BF16: 0.008, BY_EXPERT: 0.08}
IN_E4M3, IN_E5M2 = fp8_tensor(), fp8_tensor(E5M2)  # of rows and weights, and of gradients


class Operands:
    """The operands of a problem in FP8; each is quantized on first access."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def x(self) -> tuple[Form, ...]:
        return self.rows(self.problem.x)

    @cached_property
    def activated(self) -> tuple[Form, ...]:
        return self.rows(self.problem.activated)

    @cached_property
    def grad_y(self) -> tuple[Form, ...]:
        return self.rows(self.problem.grad_y)

    @cached_property
    def grad_preactivation(self) -> tuple[Form, ...]:
        return self.rows(self.problem.grad_preactivation)

    @cached_property
    def weight1(self) -> tuple[Form, ...]:
        return self._weight(self.problem.weight1)

    @cached_property
    def weight2(self) -> tuple[Form, ...]:
        return self._weight(self.problem.weight2)

    def rows(self, t: Tensor) -> tuple[Form, ...]:
        """Return rows quantized by rows and by columns."""
        offsets = self.problem.offsets
        return block_functions.bind_quantize_rows(t, ROWS, offsets, rows=True, columns=True)(t, offsets)

    def rows_by_expert(self, t: Tensor, format: Format = IN_E4M3) -> Form:
        """Return rows quantized by rows, with one scale per expert."""
        form = quantize(t, format, offsets=self.problem.offsets)
        return form.data, form.scale

    @staticmethod
    def weight_by_expert(t: Tensor, axis: int) -> Form:
        """Return a weight quantized along an axis, with one scale per expert."""
        form = quantize(t, IN_E4M3, axis)
        return form.data, form.scale

    @staticmethod
    def _weight(t: Tensor) -> tuple[Form, ...]:
        return block_functions.bind_quantize_weight(t, WEIGHT, rows=True, columns=True)(t)


@dataclass(frozen=True)
class InFp8:
    """A product in FP8: the timed ``call``, and ``checked``, which returns the outputs that the reference has."""

    call: Callable[[], Any]
    checked: Candidate


@dataclass(frozen=True)
class Product:
    """A product, by the key of its `Case` in `benchmarks.kernels`."""

    key: str
    title: str
    in_fp8: Callable[[Operands], InFp8]
    by_expert: Callable[[Operands], InFp8] | None = None

    @property
    def case(self) -> Case:
        return next(case for case in (*CASES, *ALIGNED_CASES) if case.key == self.key)


@dataclass(frozen=True)
class ProductRow:
    """A product's figures in one format; ``note`` is the reason for missing ones."""

    product: str
    format: str
    note: str = ""
    error: float | None = None
    ms: float | None = None
    least_ms: float | None = None
    tflops: float | None = None
    speedup: float | None = None  # time in bf16 divided by this one
    host_idle_us: float | None = None


def measure(problem: Problem, timer: Timer, by_expert: bool = False) -> list[dict[str, Any]]:
    """Measure and print every product; return the entries of the result file. ``by_expert`` adds those with one scale
    per expert.
    """
    operands, found = Operands(problem), []
    print(f"  {'product':44}{'bf16, ms':>10}{'TFLOP/s':>9}{'fp8, ms':>10}{'TFLOP/s':>9}{'speedup':>9}{'errors':>20}")
    for product in PRODUCTS:
        rows = _measured(product, problem, operands, timer, by_expert)
        print("  " + _line(rows), flush=True)
        found += [asdict(row) for row in rows]
    return found


@torch.no_grad()
def _measured(
    product: Product, problem: Problem, operands: Operands, timer: Timer, by_expert: bool
) -> list[ProductRow]:
    case = product.case
    notes: dict[str, str | None] = {}
    errors: dict[str, float] = {}
    calls: dict[str, Callable[[], Any]] = {}
    ways = {BF16: None, FP8: product.in_fp8}
    if by_expert and product.by_expert is not None:
        ways[BY_EXPERT] = product.by_expert
    for name, make in ways.items():
        try:
            if make is not None:
                in_fp8 = make(operands)
                call, checked = in_fp8.call, in_fp8.checked
            else:
                checked = getattr(Ours(), product.key)(problem)
                call = checked.call
            errors[name] = worst_error(case, problem, checked)
        except Exception as raised:  # noqa: BLE001 reported in the product's row
            notes[name] = why_not(raised)
            continue
        wrong = not errors[name] < WRONG[name]
        notes[name] = f"wrong: relative error {errors[name]:.2g}" if wrong else None
        if not wrong:
            calls[name] = call
    times = times_of(timer, calls, notes)
    rows = []
    for name, note in notes.items():
        figures: dict[str, Any] = {"error": errors.get(name)}
        if time := times.get(name):
            figures |= {
                "ms": time.median_ms,
                "least_ms": time.least_ms,
                "tflops": case.flops(problem) / time.median_ms / 1e9,
                "speedup": times[BF16].median_ms / time.median_ms if BF16 in times else None,
                "host_idle_us": time.host_idle_us,
            }
        rows.append(ProductRow(product.title, name, note or "", **figures))
    return rows


def _line(rows: list[ProductRow]) -> str:
    cells = [f"{rows[0].product:44}"]
    for row in rows[:2]:
        cells.append("" if row.ms is None else f"{row.ms:10.3f}{row.tflops:9.0f}")
    speedup = rows[1].speedup
    cells.append("" if speedup is None else f"{speedup:9.2f}")
    cells.append("  " + ", ".join("-" if row.error is None else f"{row.error:.1e}" for row in rows))
    cells += [f"  {row.format}: {row.ms:.3f} ms, speedup {row.speedup or 0:.2f}" for row in rows[2:] if row.ms]
    return "".join([*cells, *(f"  {row.format}: {row.note}" for row in rows if row.note)])


# ---- the products --------------------------------------------------------------------------------------------------


def _fc1(o: Operands) -> InFp8:
    return _gemm(o, o.x[0], o.weight1[0])


def _fc2(o: Operands) -> InFp8:
    return _gemm(o, o.activated[0], o.weight2[0])


def _fc1_dgrad(o: Operands) -> InFp8:
    return _gemm(o, o.grad_preactivation[0], o.weight1[1])


def _gemm(o: Operands, rows: Form, weight: Form) -> InFp8:
    operands, offsets = (Codes(*rows), Codes(*weight)), o.problem.offsets
    run = products.bind_grouped_gemm(*operands, None, None, DEFAULT)

    def call() -> Tensor:
        return run(*operands, None, offsets, None)

    return InFp8(call, Candidate(call))


def _fc1_activation(o: Operands, quantized: bool) -> InFp8:
    operands, offsets, activation = (Codes(*o.x[0]), Codes(*o.weight1[0])), o.problem.offsets, o.problem.activation
    run = products.bind_grouped_gemm_activation(
        *operands, None, None, activation, True, DEFAULT, quantized=ROWS if quantized else None
    )

    def call() -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = run(*operands, None, offsets, None)
        return found

    def values() -> tuple[Tensor, Tensor]:
        *activated, p = call()
        return dequantized((activated[0], activated[1])) if quantized else activated[0], p

    return InFp8(call, Candidate(values, ("output", "preactivation")))


def _fc2_dgrad_activation(o: Operands) -> InFp8:
    problem = o.problem
    operands, p, scale = (Codes(*o.grad_y[0]), Codes(*o.weight2[1])), problem.preactivation, problem.row_scale
    run = products.bind_grouped_gemm_activation_backward(*operands, p, scale, problem.activation, True, True, DEFAULT)

    def call() -> tuple[Tensor | None, ...]:
        return run(*operands, problem.offsets, p, scale)

    return InFp8(call, Candidate(call, ("grad_preactivation", "output", "grad_row_scale")))


def _fc2_dgrad_activation_quantized(o: Operands) -> InFp8:
    problem = o.problem
    operands, p, scale = (Codes(*o.grad_y[0]), Codes(*o.weight2[1])), problem.preactivation, problem.row_scale
    run = products.bind_grouped_gemm_activation_backward_codes(
        *operands, p, scale, problem.activation, ROWS, (True, True, True), True, DEFAULT
    )

    def call() -> tuple[tuple[Form, ...], Tensor | None]:
        return run(*operands, problem.offsets, p, scale)

    def values() -> tuple[Tensor | None, ...]:
        (by_rows, _, again), grad_scale = call()
        return dequantized(by_rows), _rows_of_columns(again, problem), grad_scale

    return InFp8(call, Candidate(values, ("grad_preactivation", "output", "grad_row_scale")))


def _rows_of_columns(form: Form, problem: Problem) -> Tensor:
    """Return the values of a form by columns as rows, without padding; zeros for rows without an expert."""
    padded, first, place = dequantized(form).mT, 0, 0
    rows = padded.new_zeros(problem.rows, padded.shape[1])
    for end in problem.offsets.tolist():
        rows[first:end] = padded[place : place + end - first]
        place += -(-(end - first) // BLOCK) * BLOCK
        first = end
    return rows


def _wgrad1(o: Operands) -> InFp8:
    return _wgrad(o, o.grad_preactivation[1], o.x[1], "grad_weight1")


def _wgrad2(o: Operands) -> InFp8:
    return _wgrad(o, o.grad_y[1], o.activated[1], "grad_weight2")


def _wgrad(o: Operands, grad: Form, rows: Form, name: str) -> InFp8:
    operands = Codes(*grad), Codes(*rows), o.problem.offsets
    run = products.bind_grouped_wgrad(*operands, o.problem.dtype, False, DEFAULT)

    def call() -> Tensor:
        return run(*operands)

    return InFp8(call, Candidate(call, (name,)))


# ---- with one scale per expert -------------------------------------------------------------------------------------


def _fc1_by_expert(o: Operands) -> InFp8:
    return _gemm(o, o.rows_by_expert(o.problem.x), o.weight_by_expert(o.problem.weight1, -1))


def _fc1_activation_by_expert(o: Operands) -> InFp8:
    problem, offsets = o.problem, o.problem.offsets
    operands = Codes(*o.rows_by_expert(problem.x)), Codes(*o.weight_by_expert(problem.weight1, -1))
    bind, kind = products.bind_grouped_gemm_activation, IN_E4M3
    in_bf16 = bind(*operands, None, None, problem.activation, False, DEFAULT)
    amax = amax_by_expert(in_bf16(*operands, None, offsets, None)[0], offsets)
    encode = IN_E4M3.element.max / amax  # as if the step before had the same rows
    run = bind(*operands, None, None, problem.activation, True, DEFAULT, quantized=kind)

    def call() -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = run(*operands, None, offsets, None, encode, amax)
        return found

    def values() -> tuple[Tensor, Tensor]:
        codes, p = call()
        of_row = (1 / encode)[problem.expert_of_row]
        return codes.float() * of_row[:, None], p

    return InFp8(call, Candidate(values, ("output", "preactivation")))


def _fc2_dgrad_activation_by_expert(o: Operands) -> InFp8:
    problem, p, scale = o.problem, o.problem.preactivation, o.problem.row_scale
    operands = Codes(*o.rows_by_expert(problem.grad_y, IN_E5M2)), Codes(*o.weight_by_expert(problem.weight2, -2))
    run = products.bind_grouped_gemm_activation_backward(*operands, p, scale, problem.activation, True, True, DEFAULT)

    def call() -> tuple[Tensor | None, ...]:
        return run(*operands, problem.offsets, p, scale)

    return InFp8(call, Candidate(call, ("grad_preactivation", "output", "grad_row_scale")))


PRODUCTS = (
    Product("fc1", "FC1", _fc1, _fc1_by_expert),
    Product("fc2_plain", "FC2", _fc2),
    Product("fc1_activation", "FC1 + SwiGLU", lambda o: _fc1_activation(o, False)),
    Product("fc1_activation", "FC1 + SwiGLU + quantize", lambda o: _fc1_activation(o, True), _fc1_activation_by_expert),
    Product(
        "fc2_dgrad_activation_scaled", "FC2 dgrad + dSwiGLU", _fc2_dgrad_activation, _fc2_dgrad_activation_by_expert
    ),
    Product("fc2_dgrad_activation_scaled", "FC2 dgrad + dSwiGLU + quantize", _fc2_dgrad_activation_quantized),
    Product("fc1_dgrad", "FC1 dgrad", _fc1_dgrad),
    Product("wgrad1", "FC1 wgrad", _wgrad1),
    Product("wgrad2", "FC2 wgrad", _wgrad2),
)
