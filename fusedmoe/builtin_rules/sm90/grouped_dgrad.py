"""``sm90.grouped_dgrad``: the gradient of a grouped linear layer's rows, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.sm90.backend import (
    OnHopper,
    Run,
    check_common,
    functions,
    guard_gradient,
    guard_matrix,
    readable,
    unreadable,
)
from fusedmoe.fusion.rule import FusionRule, PlanContext, Step
from fusedmoe.ops.grouped_linear import Dgrad

if TYPE_CHECKING:
    from torch import Tensor


class GroupedDgrad(OnHopper, FusionRule, name="sm90.grouped_dgrad", direction="backward"):
    """``dx[r] = dy[r] @ weight[e]``: `sm90.grouped_gemm` with the weight read along its other axis."""

    dgrad: Dgrad

    def check(self, ctx: PlanContext) -> None:
        fc = self.dgrad.op
        operands = "grad_output", "dgrad.weight"
        check_common(ctx, *operands, in_features=fc.in_features, out_features=fc.out_features)

    def build(self, ctx: PlanContext) -> Step:
        options = ctx.options

        def bind(dy: Tensor, weight: Tensor, offsets: Tensor) -> Run:
            guard_gradient(dy)
            guard_matrix("the weight", weight, transposed=True)
            product = functions().bind_grouped_gemm(dy, weight.mT, None, None, options)
            copies = unreadable(dy)

            def run(dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
                return product(  # type: ignore[no-any-return]
                    readable(dy) if copies else dy, weight.mT, None, offsets, None
                )

            return run

        needs = ("grad_output", "dgrad.weight", "offsets")
        return Step(None, needs, gives=("grad_input",), bind=bind, zeroes_tail=True)
