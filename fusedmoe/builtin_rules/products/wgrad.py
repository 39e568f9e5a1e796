"""``sm90.grouped_wgrad``: the gradient of a grouped linear layer's weight, in one launch.

``sm90.gathered_wgrad_x`` and ``sm90.gathered_wgrad_dy``: the same, where the kernel reads one of the operands through
its index. ``sm90.fp8_grouped_wgrad``: the same with FP8 operands.
"""

from __future__ import annotations

from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.products.fp8 import (
    BY_EXPERT,
    MULTIPLIES_ROWS,
    ROWS,
    OnFp8,
    are_readable,
    by_expert,
    check_operand,
    of_codes,
    on_readable_codes,
)
from fusedmoe.builtin_rules.products.weight_gradient import of_rows
from fusedmoe.builtin_rules.requirements import OnSm90, ThroughIndex, check_common
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.products import WgradOperand, has_strides
from fusedmoe.ops.grouped_linear import Wgrad, WgradIntoMainGrad

OPERANDS = ("grad_output", "wgrad.input")
FLOPS_PER_US = 620e6  # on the whole GPU
FP8_FLOPS_PER_US = 800e6
# the kernel's name of the operand that it reads through an index
_GATHERED: dict[str, WgradOperand | None] = {"": None, "wgrad.input": "x", "grad_output": "grad_output"}


class GroupedWgrad(OnSm90, FusionRule, name="sm90.grouped_wgrad", direction="backward"):
    """``dW[e] = dy[rows of e].T @ x[rows of e]``.

    For `WgradIntoMainGrad`, the kernel adds it, unrounded, to the weight's fp32 ``main_grad``. For `Wgrad`, it adds it
    to the weight's ``grad`` if there is one; see `fusedmoe.ops.state.grad_sums`.
    """

    wgrad: Wgrad | WgradIntoMainGrad

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.wgrad.op
        check_common(ctx, *OPERANDS, "wgrad.weight", in_features=fc.in_features, out_features=fc.out_features)
        return _step(ctx, self.wgrad, FLOPS_PER_US)

    def bind(self, ctx: PlanContext, dy: Tensor, x: Tensor, offsets: Tensor, *index: Tensor) -> Run:
        gathered = _GATHERED[self.gathers]
        guards.gradient(dy)
        guards.index(dy if gathered == "grad_output" else x, index)
        guards.matrix("x", x)
        # a copy of dy would be the launch before the product, which must wait for it
        beside, dtype = ctx.beside_sms > 0 and guards.is_readable(dy), ctx.dtype("wgrad.weight")
        product = of_rows(self.wgrad, dtype, ctx.options, gathered, beside, dy, x, offsets, *index)
        return guards.on_readable(dy, lambda *operands: product(product.main_grad(), *operands))


class GatheredWgradX(ThroughIndex, GroupedWgrad, name="sm90.gathered_wgrad_x", direction="backward"):
    """`sm90.grouped_wgrad` with ``x[index[r]]`` in place of ``x[r]``."""

    gathers = "wgrad.input"


class GatheredWgradDy(ThroughIndex, GroupedWgrad, name="sm90.gathered_wgrad_dy", direction="backward"):
    """`sm90.grouped_wgrad` with ``dy[index[r]]`` in place of ``dy[r]``."""

    gathers = "grad_output"


class Fp8GroupedWgrad(OnFp8, FusionRule, name="sm90.fp8_grouped_wgrad", direction="backward"):
    """`sm90.grouped_wgrad` of codes and scales by columns. dW has the dtype that dy had before quantization."""

    wgrad: Wgrad | WgradIntoMainGrad

    def supports(self, ctx: PlanContext) -> None:
        block = BY_EXPERT if by_expert(ctx, OPERANDS[0]) else ROWS
        for name in OPERANDS:
            spec = check_operand(ctx, name, block, MULTIPLIES_ROWS, gradient=name == OPERANDS[0])
            require(not spec.rotated, "%s is rotated: expected hadamard=False", name)

    def offer(self, ctx: PlanContext) -> Step:
        self.check(ctx, in_features=self.wgrad.op.in_features, out_features=self.wgrad.op.out_features)
        return _step(ctx, self.wgrad, FP8_FLOPS_PER_US)

    def bind(self, ctx: PlanContext, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offsets: Tensor) -> Run:
        guards.some_rows(dy.shape[1])  # with padding
        # copies would be the launches before the product, which must wait for them
        beside = ctx.beside_sms > 0 and are_readable(dy, x) and has_strides(dy_scale) and has_strides(x_scale)
        operands = Codes(dy, dy_scale), Codes(x, x_scale)
        product = of_rows(
            self.wgrad, ctx.dtype("grad_output"), ctx.options, None, beside, *operands, offsets,
            adds_to_sum=not self.wgrad.transposed or dy.dtype is x.dtype,
        )  # fmt: skip
        run: Run = lambda *operands: product(product.main_grad(), *operands)  # noqa: E731
        return on_readable_codes(of_codes(run, *operands), dy, x)


def _step(ctx: PlanContext, wgrad: Wgrad | WgradIntoMainGrad, flops_per_us: float) -> Step:
    flops = 2 * ctx.spec("grad_output").shape[0] * wgrad.op.in_features * wgrad.op.out_features
    return Step(needs=(*OPERANDS, "offsets"), gives=("wgrad.grad_weight",), carries_us=flops / flops_per_us)
