"""``sm90.activation`` and ``sm90.dactivation``: an activation and the row scale after it, and their derivatives, in one
launch each.

In the epilogue of a product, they move no bytes of their own. These rules are for products that have no such epilogue:
in plain PyTorch, an activation takes several launches and passes over rows in fp32.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.guards import as_matrix, as_rows_of
from fusedmoe.builtin_rules.requirements import activation_of, check_common, decline
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.activation import functions as activation_functions
from fusedmoe.kernels.sm90 import limits
from fusedmoe.ops.glu import GLU, FusedActivation, FusedDerivative, SquaredReLU
from fusedmoe.ops.scale import DScale, Scale, ScaleGrad

MOST_ELEMENTS = 2**33  # elements of the preactivation are fewer: the kernel counts vectors of 8 in 32 bits


class ActivationRule(FusionRule, name="activation", direction="forward"):
    """``y[r] = act(x[r]) * scale[r]``, rounded once."""

    act: FusedActivation
    scale: Scale | None
    apart: ClassVar[bool] = True

    def offer(self, ctx: PlanContext) -> Step:
        _check(ctx, self.act, "input")
        if self.scale is not None:
            _check_scale(ctx, "scale.factor", "input")
        return Step(needs=("input", "scale.factor"), gives=("output",))

    def bind(self, ctx: PlanContext, x: Tensor, factor: Tensor | None) -> Run:
        _guard(x, factor)
        rows, scale = as_matrix(x), _contiguous(factor)
        guards.matrix("x", rows)
        run = activation_functions.bind_activation(rows, scale, activation_of(self.act))
        if x.dim() == 2 and scale is factor:
            return run
        return lambda x, factor: as_rows_of(x, run(as_matrix(x), _contiguous(factor)))


class DActivationRule(FusionRule, name="dactivation", direction="backward"):
    """``dx = act'(x) * dy * scale``, ``dscale[r] = sum over features of dy * act(x)``.

    If another step of the backward pass reads ``act(x) * scale``, this step can recompute it. Then x is the only value
    that is kept.
    """

    scale_grad: ScaleGrad | None
    dscale: DScale | None
    dact: FusedDerivative
    apart: ClassVar[bool] = True

    def offer(self, ctx: PlanContext) -> Step:
        _check(ctx, self.dact.op, "grad_output", "dact.input")
        gives = ["grad_input"]
        if self.dscale is not None:
            _check_scale(ctx, "dscale.factor", "dact.input")
        if self.scale_grad is not None:
            gives.append(f"scale_grad.{self.scale_grad.gives[0]}")
        last = "dact" if self.dscale is None else "dscale"
        needs = "grad_output", "dact.input", "dscale.factor"
        return Step(needs=needs, gives=tuple(gives), keeps=(f"{last}.output",))

    def bind(self, ctx: PlanContext, dy: Tensor, x: Tensor, factor: Tensor | None) -> Run:
        guards.gradient(dy)
        _guard(x, factor)
        rows, grads = as_matrix(x), as_matrix(dy)
        guards.matrix("the preactivation", rows)
        activation, of_scale = activation_of(self.dact.op), self.scale_grad is not None
        product = activation_functions.bind_activation_backward(
            grads, rows, _contiguous(factor), activation, of_scale, bool(ctx.keep)
        )

        def run(grads: Tensor, x: Tensor, factor: Tensor | None) -> tuple[Tensor | None, ...]:
            dx, dfactor, y = product(grads, as_matrix(x), _contiguous(factor))
            given = (as_rows_of(x, dx), dfactor) if of_scale else (as_rows_of(x, dx),)
            return given if y is None else (*given, as_rows_of(x, y))

        readable = guards.on_readable(grads, run)
        return lambda dy, x, factor: readable(as_matrix(dy), x, factor)


def _check(ctx: PlanContext, op: GLU | SquaredReLU, *rows: str) -> None:
    """Decline rows that the kernels cannot read. The last of ``rows`` is the preactivation."""
    check_common(ctx, *rows)
    *outer, features = ctx.spec(rows[-1]).shape
    require(outer, "rows have shape %s: expected (rows, features)", (features,))
    if activation_of(op).gated:
        decline(limits.why_not_width("half of the features", features // 2))
    else:
        decline(limits.why_not_width("features", features))


def _check_scale(ctx: PlanContext, factor: str, rows: str) -> None:
    """Decline a row scale that the kernels cannot read."""
    decline(limits.why_not_row_scale(ctx.dtype(factor)))
    shape = ctx.spec(rows).shape
    require(len(shape) == 2, "rows with a scale have shape %s: expected (rows, features)", tuple(shape))


def _guard(x: Tensor, factor: Tensor | None) -> None:
    """Leave a call without rows to plain PyTorch. Decline rows with another number of dimensions than those that the
    plan was made for, and too many of them.
    """
    guards.some_rows(x.numel())
    require(x.dim() >= 2, "rows have %d dimensions, not 2", x.dim())
    require(factor is None or x.dim() == 2, "rows with a scale have %d dimensions, not 2", x.dim())
    require(x.numel() < MOST_ELEMENTS, "%d elements: expected fewer than 2^33", x.numel())


def _contiguous(factor: Tensor | None) -> Tensor | None:
    return None if factor is None else factor.contiguous()
