"""``sm90.column_sums``: the gradient of a grouped linear layer's bias, in two launches."""

from __future__ import annotations

from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.requirements import check_common
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.ops.grouped_linear import BiasGrad


class ColumnSums(FusionRule, name="column_sums", direction="backward"):
    """``db[e] = sum of dy over the rows of e``, accumulated in fp32, without atomics.

    The first launch sums slices of the rows. The second launch adds up these sums.
    """

    bias_grad: BiasGrad

    def offer(self, ctx: PlanContext) -> Step:
        check_common(ctx, "grad_output", "bias_grad.bias", out_features=self.bias_grad.op.out_features)
        return Step(needs=("grad_output", "offsets"), gives=("bias_grad.grad_bias",), launches=2)

    def bind(self, ctx: PlanContext, dy: Tensor, offsets: Tensor) -> Run:
        guards.gradient(dy)
        return guards.on_readable(dy, row_functions.bind_column_sums(dy, offsets, ctx.dtype("bias_grad.bias")))
