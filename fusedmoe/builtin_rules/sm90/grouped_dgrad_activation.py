"""``sm90.grouped_dgrad_activation``: the gradient of a grouped linear layer's rows, through the row scale and the
activation before the layer. One launch, and one more that sums the row scale's gradient over column tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.sm90.backend import (
    OnSm90,
    Run,
    activation_of,
    check_common,
    converts,
    decline,
    guard_gradient,
    guard_matrix,
    on_readable,
)
from fusedmoe.fusion.rule import FusionRule, PlanContext, Step
from fusedmoe.kernels.sm90 import functions, limits
from fusedmoe.ops.glu import DGeGLU, DReGLU, DSwiGLU
from fusedmoe.ops.grouped_linear import Dgrad
from fusedmoe.ops.scale import DScale, ScaleGrad
from fusedmoe.ops.squared_relu import DSquaredReLU

if TYPE_CHECKING:
    from torch import Tensor


class GroupedDgradActivation(OnSm90, FusionRule, name="sm90.grouped_dgrad_activation", direction="backward"):
    """``d = dy @ weight[e]``, ``dp = act'(p) * d * scale``, ``dscale[r] = sum over features of d * act(p)``.

    If the layer's weight gradient is wanted, the step also recomputes the layer's input, ``act(p) * scale``. The
    preactivation p is then the only value between the two layers that is kept.
    """

    dgrad: Dgrad
    scale_grad: ScaleGrad | None
    dscale: DScale | None
    dact: DSwiGLU | DGeGLU | DReGLU | DSquaredReLU

    def check(self, ctx: PlanContext) -> None:
        fc = self.dgrad.op
        operands = "grad_output", "dgrad.weight", "dact.input"
        check_common(ctx, *operands, in_features=fc.in_features, out_features=fc.out_features)
        if self.dscale is not None:
            decline(limits.why_not_row_scale(ctx.dtype("dscale.factor")))

    def build(self, ctx: PlanContext) -> Step:
        activation, options = activation_of(self.dact.op), ctx.options
        recomputes, scale_grad = ctx.wants("dgrad.input"), self.scale_grad
        launches, gives = 1, ["grad_input"]
        if recomputes:
            gives.append("dgrad.input")
        if self.dscale is not None:
            launches += converts(ctx.dtype("dscale.factor"))
        if scale_grad is not None:
            gives.append(f"scale_grad.{scale_grad.gives[0]}")
            launches += 1 + converts(ctx.dtype("dscale.factor"))

        def bind(dy: Tensor, weight: Tensor, offsets: Tensor, preactivation: Tensor, factor: Tensor | None) -> Run:
            guard_gradient(dy)
            guard_matrix("the preactivation", preactivation)
            guard_matrix("the weight", weight, transposed=True)
            product = functions.bind_grouped_gemm_activation_backward(
                dy, weight, preactivation, factor, activation, recomputes, scale_grad is not None, options
            )

            def run(
                dy: Tensor, weight: Tensor, offsets: Tensor, preactivation: Tensor, factor: Tensor | None
            ) -> tuple[Tensor | None, ...]:
                grad_preactivation, output, grad_factor = product(dy, weight, offsets, preactivation, factor)
                results: list[Tensor | None] = [grad_preactivation]
                if recomputes:
                    results.append(output)
                if grad_factor is not None and factor is not None:
                    results.append(grad_factor.to(factor.dtype))
                return tuple(results)

            return on_readable(dy, run)

        needs = ("grad_output", "dgrad.weight", "offsets", "dact.input", "dscale.factor")
        return Step(None, needs, tuple(gives), bind=bind, zeroes_tail=True, launches=launches)
