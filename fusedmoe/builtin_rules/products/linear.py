"""The rules for dense layers (`Linear`): the grouped kernels, with one group.

Rows with several leading dimensions are flattened. This copies only rows whose strides do not allow a view. All rows
belong to the group, except in the gradients of weight and bias, where the rows without an expert do not count if the
chain has splits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.guards import as_matrix, as_rows_of
from fusedmoe.builtin_rules.requirements import OnSm90, activation_of, check_common, decline
from fusedmoe.fusion.language.rule import FusionRule, NothingToDo, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.kernels.sm90.one_group import bind_offsets
from fusedmoe.ops.glu import FusedActivation, FusedDerivative
from fusedmoe.ops.grouped_linear import Linear, LinearBiasGrad, LinearDgrad, LinearWgrad, LinearWgradIntoMainGrad
from fusedmoe.ops.op import Op
from fusedmoe.ops.state.main_grad import grad_instead, main_grad_of


class LinearGemm(OnSm90, FusionRule, name="sm90.linear", direction="forward"):
    """``y = x @ weight.T + bias``."""

    fc: Linear

    def offer(self, ctx: PlanContext) -> Step:
        _check_layer(ctx, self.fc, "input", "fc.weight")
        return Step(needs=("input", "fc.weight", "fc.bias"), gives=("output",))

    def bind(self, ctx: PlanContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Run:
        rows, weights, biases = as_matrix(x), weight[None], _one(bias)
        guards.operands(rows, weights, biases)
        product = products.bind_grouped_gemm(rows, weights, biases, None, ctx.options)
        offsets = _all_of(rows)
        return lambda x, weight, bias: as_rows_of(x, product(as_matrix(x), weight[None], _one(bias), offsets(), None))


class LinearActivation(OnSm90, FusionRule, name="sm90.linear_activation", direction="forward"):
    """``y = act(x @ weight.T + bias)``. The preactivation is written only if backward needs it."""

    fc: Linear
    act: FusedActivation

    def offer(self, ctx: PlanContext) -> Step:
        _check_layer(ctx, self.fc, "input", "fc.weight")
        if activation_of(self.act).gated:
            decline(limits.why_not_width("half of out_features", self.fc.out_features // 2))
        return Step(needs=("input", "fc.weight", "fc.bias"), gives=("output",), keeps=("act.input",))

    def bind(self, ctx: PlanContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Run:
        rows, weights, biases = as_matrix(x), weight[None], _one(bias)
        guards.operands(rows, weights, biases)
        product = products.bind_grouped_gemm_activation(
            rows, weights, biases, None, activation_of(self.act), bool(ctx.keep), ctx.options
        )
        offsets = _all_of(rows)

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
            results = product(as_matrix(x), weight[None], _one(bias), offsets(), None)
            if isinstance(results, tuple):
                y, preactivation = results
                return as_rows_of(x, y), as_rows_of(x, preactivation)
            return as_rows_of(x, results)

        return run


class LinearInputGradient(OnSm90, FusionRule, name="sm90.linear_dgrad", direction="backward"):
    """``dx = dy @ weight``: the kernel of `sm90.linear` reads the transposed weight."""

    dgrad: LinearDgrad

    def offer(self, ctx: PlanContext) -> Step:
        operands = "grad_output", "dgrad.weight"
        _check_layer(ctx, self.dgrad.op, *operands)
        return Step(needs=operands, gives=("grad_input",))

    def bind(self, ctx: PlanContext, dy: Tensor, weight: Tensor) -> Run:
        rows, weights = as_matrix(dy), weight[None]
        guards.gradient(rows)
        guards.matrix("the weight", weights, transposed=True)
        product = products.bind_grouped_gemm(rows, weights.mT, None, None, ctx.options)
        offsets = _all_of(rows)
        readable = guards.on_readable(rows, lambda rows, weights: product(rows, weights.mT, None, offsets(), None))
        return lambda dy, weight: as_rows_of(dy, readable(as_matrix(dy), weight[None]))


class LinearInputGradientActivation(OnSm90, FusionRule, name="sm90.linear_dgrad_activation", direction="backward"):
    """``dp = act'(p) * (dy @ weight)``. If the layer's weight gradient is wanted, the step also recomputes the layer's
    input, ``act(p)``, so that the preactivation p is the only value between the two layers that is kept.
    """

    dgrad: LinearDgrad
    dact: FusedDerivative

    def offer(self, ctx: PlanContext) -> Step:
        operands = "grad_output", "dgrad.weight", "dact.input"
        _check_layer(ctx, self.dgrad.op, *operands)
        return Step(needs=operands, gives=("grad_input",), keeps=("dgrad.input",))

    def bind(self, ctx: PlanContext, dy: Tensor, weight: Tensor, preactivation: Tensor) -> Run:
        rows, weights, p = as_matrix(dy), weight[None], as_matrix(preactivation)
        guards.gradient(rows)
        guards.matrix("the preactivation", p)
        guards.matrix("the weight", weights, transposed=True)
        product = products.bind_grouped_gemm_activation_backward(
            rows, weights, p, None, activation_of(self.dact.op), bool(ctx.keep), False, ctx.options
        )
        offsets = _all_of(rows)
        readable = guards.on_readable(rows, lambda rows, weights, p: product(rows, weights, offsets(), p, None))

        def run(dy: Tensor, weight: Tensor, preactivation: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            grad, x, _ = readable(as_matrix(dy), weight[None], as_matrix(preactivation))
            return as_rows_of(dy, grad) if x is None else (as_rows_of(dy, grad), as_rows_of(dy, x))

        return run


class LinearWeightGradient(OnSm90, FusionRule, name="sm90.linear_wgrad", direction="backward"):
    """``dW = dy.T @ x``. For `LinearWgradIntoMainGrad`, the kernel adds it, unrounded, to the fp32 ``main_grad``."""

    wgrad: LinearWgrad | LinearWgradIntoMainGrad

    def offer(self, ctx: PlanContext) -> Step:
        _check_layer(ctx, self.wgrad.op, "grad_output", "wgrad.input", "wgrad.weight")
        return Step(needs=("grad_output", "wgrad.input", "wgrad.offsets"), gives=("wgrad.grad_weight",))

    def bind(self, ctx: PlanContext, dy: Tensor, x: Tensor, offsets: Tensor | None) -> Run:
        fc, accumulates = self.wgrad.op, isinstance(self.wgrad, LinearWgradIntoMainGrad)
        dtype = torch.float32 if accumulates else ctx.dtype("wgrad.weight")
        rows, inputs = as_matrix(dy), as_matrix(x)
        guards.gradient(rows)
        guards.matrix("x", inputs)
        ends = _counted_in(dy, offsets)
        product = products.bind_grouped_wgrad(rows, inputs, ends(offsets), dtype, accumulates, ctx.options)

        def run(rows: Tensor, inputs: Tensor, offsets: Tensor | None) -> Tensor | None:
            if not accumulates:
                return product(rows, inputs, ends(offsets), None)[0]
            main_grad = guards.main_grad(main_grad_of(fc))  # may be a different tensor in each call
            product(rows, inputs, ends(offsets), main_grad[None])
            return grad_instead(fc)

        readable = guards.on_readable(rows, run)
        return lambda dy, x, offsets: readable(as_matrix(dy), as_matrix(x), offsets)


class LinearColumnSums(FusionRule, name="linear_column_sums", direction="backward"):
    """``db = sum of dy over the rows``, as `sm90.column_sums`."""

    bias_grad: LinearBiasGrad

    def offer(self, ctx: PlanContext) -> Step:
        _check_layer(ctx, self.bias_grad.op, "grad_output", "bias_grad.bias")
        return Step(needs=("grad_output", "bias_grad.offsets"), gives=("bias_grad.grad_bias",), launches=2)

    def bind(self, ctx: PlanContext, dy: Tensor, offsets: Tensor | None) -> Run:
        rows = as_matrix(dy)
        guards.gradient(rows)
        ends = _counted_in(dy, offsets)
        sums = guards.on_readable(
            rows, row_functions.bind_column_sums(rows, ends(offsets), ctx.dtype("bias_grad.bias"))
        )
        return lambda dy, offsets: sums(as_matrix(dy), ends(offsets))[0]


def _check_layer(ctx: PlanContext, fc: Op, *operands: str) -> None:
    """Decline operands and widths that the kernels cannot read. A gate, with one feature, is no product to speed up."""
    widths = {name: getattr(fc, name) for name in ("in_features", "out_features")}
    for name, width in widths.items():
        if width < limits.UNIT:
            raise NothingToDo("%s is %d, a product for plain PyTorch", name, width)
    check_common(ctx, *operands, **widths)


def _one(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias[None]


def _all_of(rows: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the offsets of one group with all rows."""
    return bind_offsets(rows.shape[0], rows.device)


def _counted_in(dy: Tensor, offsets: Tensor | None) -> Callable[[Tensor | None], Tensor]:
    """Return a function of the chain's offsets: those of one group with all experts' rows; without splits, all rows."""
    if offsets is None:
        of_all_rows = _all_of(as_matrix(dy))
        return lambda _: of_all_rows()
    require(dy.dim() == 2, "the chain has splits, and rows with %d dimensions, not 2", dy.dim())
    return _last


def _last(offsets: Tensor | None) -> Tensor:
    assert offsets is not None
    return offsets[-1:]
