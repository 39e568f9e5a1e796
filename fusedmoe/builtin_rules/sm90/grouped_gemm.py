"""``sm90.grouped_gemm``: a grouped linear layer, its bias and a row scale in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.sm90.backend import OnSm90, Run, check_common, converts, decline, guard_operands
from fusedmoe.fusion.rule import FusionRule, PlanContext, Step
from fusedmoe.kernels.sm90 import functions, limits
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.scale import Scale

if TYPE_CHECKING:
    from torch import Tensor


class GroupedGemm(OnSm90, FusionRule, name="sm90.grouped_gemm", direction="forward"):
    """``y[r] = (x[r] @ weight[e].T + bias[e]) * scale[r]``.

    The step keeps nothing. A scale whose gradient needs the scale's input therefore runs by itself.
    """

    fc: GroupedLinear
    scale: Scale | None

    def check(self, ctx: PlanContext) -> None:
        fc = self.fc
        check_common(ctx, "input", "fc.weight", in_features=fc.in_features, out_features=fc.out_features)
        if self.scale is not None:
            decline(limits.why_not_row_scale(ctx.dtype("scale.factor")))

    def build(self, ctx: PlanContext) -> Step:
        options = ctx.options
        launches = 1 if self.scale is None else 1 + converts(ctx.dtype("scale.factor"))

        def bind(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, factor: Tensor | None) -> Run:
            guard_operands(x, weight, bias)
            return functions.bind_grouped_gemm(x, weight, bias, factor, options)

        needs = ("input", "fc.weight", "fc.bias", "offsets", "scale.factor")
        return Step(None, needs, gives=("output",), bind=bind, zeroes_tail=True, launches=launches)
