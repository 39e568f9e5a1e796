"""``sm90.grouped_gemm_activation``: a grouped linear layer with the activation and the row scale in its epilogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.sm90.backend import (
    OnSm90,
    Run,
    activation_of,
    check_common,
    converts,
    decline,
    guard_operands,
)
from fusedmoe.fusion.rule import FusionRule, PlanContext, Step
from fusedmoe.kernels.sm90 import functions, limits
from fusedmoe.ops.glu import GeGLU, ReGLU, SwiGLU
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.scale import Scale
from fusedmoe.ops.squared_relu import SquaredReLU

if TYPE_CHECKING:
    from torch import Tensor


class GroupedGemmActivation(OnSm90, FusionRule, name="sm90.grouped_gemm_activation", direction="forward"):
    """``y[r] = act(x[r] @ weight[e].T + bias[e]) * scale[r]``; the preactivation is written only if backward needs it.

    The activation's result before the scale is never written: `sm90.grouped_dgrad_activation` recomputes it for the
    scale's gradient.
    """

    fc: GroupedLinear
    act: SwiGLU | GeGLU | ReGLU | SquaredReLU
    scale: Scale | None

    def check(self, ctx: PlanContext) -> None:
        fc = self.fc
        if activation_of(self.act).gated:
            check_common(ctx, "input", "fc.weight", in_features=fc.in_features)
            decline(limits.why_not_width("half of out_features", fc.out_features // 2))
        else:
            check_common(ctx, "input", "fc.weight", in_features=fc.in_features, out_features=fc.out_features)
        if self.scale is not None:
            decline(limits.why_not_row_scale(ctx.dtype("scale.factor")))

    def build(self, ctx: PlanContext) -> Step:
        activation, options = activation_of(self.act), ctx.options
        launches = 1 if self.scale is None else 1 + converts(ctx.dtype("scale.factor"))

        def bind(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            offsets: Tensor,
            factor: Tensor | None,
            *,
            keep: tuple[str, ...] = (),
        ) -> Run:
            guard_operands(x, weight, bias)
            return functions.bind_grouped_gemm_activation(x, weight, bias, factor, activation, bool(keep), options)

        needs = ("input", "fc.weight", "fc.bias", "offsets", "scale.factor")
        return Step(
            None, needs, gives=("output",), keeps=("act.input",), bind=bind, zeroes_tail=True, launches=launches
        )
