"""``sm90.grouped_gemm``: a grouped linear layer, its bias and a row scale in one launch.

``sm90.gathered_gemm``: the same for rows of another value, which the kernel reads through their index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.requirements import (
    OnSm90,
    Run,
    ThroughIndex,
    check_common,
    converts,
    decline,
    guard_index,
    guard_operands,
)
from fusedmoe.fusion.language.rule import Bind, FusionRule, PlanContext, Step
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.scale import Scale

if TYPE_CHECKING:
    from torch import Tensor


class GroupedGemm(OnSm90, FusionRule, name="sm90.grouped_gemm", direction="forward"):
    """``y[r] = (x[r] @ weight[e].T + bias[e]) * scale[r]``.

    The step cannot keep the scale's input. So a scale whose factor requires a gradient is a step of its own.
    """

    fc: GroupedLinear
    scale: Scale | None

    def offer(self, ctx: PlanContext) -> Step:
        fc, launches = self.fc, 1
        check_common(ctx, "input", "fc.weight", in_features=fc.in_features, out_features=fc.out_features)
        if self.scale is not None:
            decline(limits.why_not_row_scale(ctx.dtype("scale.factor")))
            launches += converts(ctx.dtype("scale.factor"))
        needs = ("input", "fc.weight", "fc.bias", "offsets", "scale.factor")
        return Step(needs=needs, gives=("output",), zeroes_tail=True, launches=launches)

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        options = ctx.options

        def bind(
            x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, factor: Tensor | None, *index: Tensor
        ) -> Run:
            guard_operands(x, weight, bias)
            guard_index(x, index)
            return products.bind_grouped_gemm(x, weight, bias, factor, options, *index)

        return bind


class GatheredGemm(ThroughIndex, GroupedGemm, name="sm90.gathered_gemm", direction="forward"):
    """`sm90.grouped_gemm` with ``x[index[r]]`` in place of ``x[r]``."""

    gathers = "input"
