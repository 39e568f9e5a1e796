"""``sm90.grouped_wgrad``: the gradient of a grouped linear layer's weight, in one launch.

``sm90.gathered_wgrad_x`` and ``sm90.gathered_wgrad_dy``: the same, where the kernel reads one of the operands through
its index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.products.weight_gradient import of_rows
from fusedmoe.builtin_rules.requirements import (
    FLOPS_PER_US,
    OnSm90,
    Run,
    ThroughIndex,
    check_common,
    guard_gradient,
    guard_index,
    guard_matrix,
    is_readable,
    on_readable,
)
from fusedmoe.fusion.language.rule import Bind, FusionRule, PlanContext, Step
from fusedmoe.ops.grouped_linear import Wgrad, WgradIntoMainGrad

if TYPE_CHECKING:
    from torch import Tensor

    from fusedmoe.kernels.sm90.products import WgradOperand


class GroupedWgrad(OnSm90, FusionRule, name="sm90.grouped_wgrad", direction="backward"):
    """``dW[e] = dy[rows of e].T @ x[rows of e]``.

    For `WgradIntoMainGrad`, the kernel adds it, unrounded, to the weight's fp32 ``main_grad``. For `Wgrad`, it adds it
    to the weight's ``grad`` if there is one; see `fusedmoe.ops.state.grad_sums`.
    """

    wgrad: Wgrad | WgradIntoMainGrad

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.wgrad.op
        operands = "grad_output", "wgrad.input", "wgrad.weight"
        check_common(ctx, *operands, in_features=fc.in_features, out_features=fc.out_features)
        flops = 2 * ctx.spec("grad_output").shape[0] * fc.in_features * fc.out_features
        return Step(
            needs=("grad_output", "wgrad.input", "offsets"), gives=("wgrad.grad_weight",),
            carries_us=flops / FLOPS_PER_US,
        )  # fmt: skip

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        dtype, options = ctx.dtype("wgrad.weight"), ctx.options

        # the function's name of the operand that it reads through an index
        operands: dict[str, WgradOperand | None] = {
            "": None, "wgrad.input": "x", "grad_output": "grad_output",
        }  # fmt: skip
        gathered = operands[self.gathers]

        def bind(dy: Tensor, x: Tensor, offsets: Tensor, *index: Tensor) -> Run:
            guard_gradient(dy)
            guard_index(dy if gathered == "grad_output" else x, index)
            guard_matrix("x", x)
            # a copy of dy would be the launch before the product, which must wait for it
            beside = ctx.beside_sms > 0 and is_readable(dy)
            product = of_rows(self.wgrad, dtype, options, gathered, beside, dy, x, offsets, *index)

            def run(dy: Tensor, x: Tensor, offsets: Tensor, *index: Tensor) -> Tensor | None:
                return product(product.main_grad(), dy, x, offsets, *index)

            return on_readable(dy, run)

        return bind


class GatheredWgradX(ThroughIndex, GroupedWgrad, name="sm90.gathered_wgrad_x", direction="backward"):
    """`sm90.grouped_wgrad` with ``x[index[r]]`` in place of ``x[r]``."""

    gathers = "wgrad.input"


class GatheredWgradDy(ThroughIndex, GroupedWgrad, name="sm90.gathered_wgrad_dy", direction="backward"):
    """`sm90.grouped_wgrad` with ``dy[index[r]]`` in place of ``dy[r]``."""

    gathers = "grad_output"
