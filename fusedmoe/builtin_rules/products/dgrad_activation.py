"""``sm90.grouped_dgrad_activation``: the gradient of a grouped linear layer's rows, through the row scale and the
activation before the layer, in one launch. A second launch sums the row scale's gradient over column tiles.

``sm90.gathered_dgrad_activation``: the same for incoming gradients that the kernel reads through their index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.requirements import (
    OnSm90,
    Run,
    ThroughIndex,
    activation_of,
    check_common,
    converts,
    decline,
    guard_gradient,
    guard_index,
    guard_matrix,
    on_readable,
)
from fusedmoe.fusion.language.rule import Bind, FusionRule, PlanContext, Step
from fusedmoe.kernels.sm90 import limits, products
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

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.dgrad.op
        operands = "grad_output", "dgrad.weight", "dact.input"
        check_common(ctx, *operands, in_features=fc.in_features, out_features=fc.out_features)
        gives, launches = ["grad_input"], 1
        if self.dscale is not None:
            factor = ctx.dtype("dscale.factor")
            decline(limits.why_not_row_scale(factor))
            launches += converts(factor)
            if self.scale_grad is not None:
                gives.append(f"scale_grad.{self.scale_grad.gives[0]}")
                launches += 1 + converts(factor)
        return Step(
            needs=("grad_output", "dgrad.weight", "offsets", "dact.input", "dscale.factor"),
            gives=tuple(gives),
            keeps=("dgrad.input",),
            zeroes_tail=True,
            launches=launches,
        )

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        activation, options = activation_of(self.dact.op), ctx.options
        recomputes, scale_grad = bool(keep), self.scale_grad is not None

        def bind(
            dy: Tensor, weight: Tensor, offsets: Tensor, preactivation: Tensor, factor: Tensor | None, *index: Tensor
        ) -> Run:
            guard_gradient(dy)
            guard_index(dy, index)
            guard_matrix("the preactivation", preactivation)
            guard_matrix("the weight", weight, transposed=True)
            product = products.bind_grouped_gemm_activation_backward(
                dy, weight, preactivation, factor, activation, recomputes, scale_grad, options, *index
            )

            def run(
                dy: Tensor,
                weight: Tensor,
                offsets: Tensor,
                preactivation: Tensor,
                factor: Tensor | None,
                *index: Tensor,
            ) -> tuple[Tensor | None, ...]:
                grad_preactivation, x, grad_factor = product(dy, weight, offsets, preactivation, factor, *index)
                results: list[Tensor | None] = [grad_preactivation]
                if grad_factor is not None and factor is not None:
                    results.append(grad_factor.to(factor.dtype))
                if recomputes:
                    results.append(x)
                return tuple(results)

            return on_readable(dy, run)

        return bind


class GatheredDgradActivation(
    ThroughIndex, GroupedDgradActivation, name="sm90.gathered_dgrad_activation", direction="backward"
):
    """`sm90.grouped_dgrad_activation` with ``dy[index[r]]`` in place of ``dy[r]``."""

    gathers = "grad_output"
