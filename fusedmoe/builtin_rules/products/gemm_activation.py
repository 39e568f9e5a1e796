"""``sm90.grouped_gemm_activation``: a grouped linear layer with the activation and the row scale in its epilogue.

``sm90.gathered_gemm_activation``: the same for rows of another value, which the kernel reads through their index.
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
    guard_index,
    guard_operands,
)
from fusedmoe.fusion.language.rule import Bind, FusionRule, PlanContext, Step
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.ops.glu import GeGLU, ReGLU, SwiGLU
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.scale import Scale
from fusedmoe.ops.squared_relu import SquaredReLU

if TYPE_CHECKING:
    from torch import Tensor


class GroupedGemmActivation(OnSm90, FusionRule, name="sm90.grouped_gemm_activation", direction="forward"):
    """``y[r] = act(x[r] @ weight[e].T + bias[e]) * scale[r]``. The preactivation is written only if backward needs it.

    The activation's result before the scale is never written: `sm90.grouped_dgrad_activation` recomputes it for the
    scale's gradient.
    """

    fc: GroupedLinear
    act: SwiGLU | GeGLU | ReGLU | SquaredReLU
    scale: Scale | None

    def offer(self, ctx: PlanContext) -> Step:
        fc, launches = self.fc, 1
        check_common(ctx, "input", "fc.weight", in_features=fc.in_features)
        if activation_of(self.act).gated:
            decline(limits.why_not_width("half of out_features", fc.out_features // 2))
        else:
            decline(limits.why_not_width("out_features", fc.out_features))
        if self.scale is not None:
            decline(limits.why_not_row_scale(ctx.dtype("scale.factor")))
            launches += converts(ctx.dtype("scale.factor"))
        needs = ("input", "fc.weight", "fc.bias", "offsets", "scale.factor")
        return Step(needs=needs, gives=("output",), keeps=("act.input",), zeroes_tail=True, launches=launches)

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        activation, options = activation_of(self.act), ctx.options

        def bind(
            x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, factor: Tensor | None, *index: Tensor
        ) -> Run:
            guard_operands(x, weight, bias)
            guard_index(x, index)
            return products.bind_grouped_gemm_activation(
                x, weight, bias, factor, activation, bool(keep), options, *index
            )

        return bind


class GatheredGemmActivation(
    ThroughIndex, GroupedGemmActivation, name="sm90.gathered_gemm_activation", direction="forward"
):
    """`sm90.grouped_gemm_activation` with ``x[index[r]]`` in place of ``x[r]``."""

    gathers = "input"
