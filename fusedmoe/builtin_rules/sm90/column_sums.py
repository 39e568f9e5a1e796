"""``sm90.column_sums``: the gradient of a grouped linear layer's bias, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.sm90.backend import (
    OnHopper,
    Run,
    check_common,
    functions,
    guard_gradient,
    readable,
    unreadable,
)
from fusedmoe.fusion.rule import FusionRule, PlanContext, Step
from fusedmoe.ops.grouped_linear import BiasGrad

if TYPE_CHECKING:
    from torch import Tensor


class ColumnSums(OnHopper, FusionRule, name="sm90.column_sums", direction="backward"):
    """``db[e] = sum of dy over the rows of e``, accumulated in fp32, without atomics."""

    bias_grad: BiasGrad

    def check(self, ctx: PlanContext) -> None:
        check_common(ctx, "grad_output", "bias_grad.bias", out_features=self.bias_grad.op.out_features)

    def build(self, ctx: PlanContext) -> Step:
        dtype = ctx.dtype("bias_grad.bias")

        def bind(dy: Tensor, offsets: Tensor) -> Run:
            guard_gradient(dy)
            sums = functions().bind_column_sums(dy, offsets, dtype)
            copies = unreadable(dy)

            def run(dy: Tensor, offsets: Tensor) -> Tensor:
                return sums(readable(dy) if copies else dy, offsets)  # type: ignore[no-any-return]

            return run

        return Step(None, ("grad_output", "offsets"), gives=("bias_grad.grad_bias",), bind=bind)
