"""``sm90.grouped_dgrad``: the gradient of a grouped linear layer's rows, in one launch.

``sm90.gathered_dgrad``: the same for incoming gradients that the kernel reads through their index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.requirements import (
    OnSm90,
    Run,
    ThroughIndex,
    check_common,
    guard_gradient,
    guard_index,
    guard_matrix,
    on_readable,
)
from fusedmoe.fusion.language.rule import Bind, FusionRule, PlanContext, Step
from fusedmoe.kernels.sm90 import products
from fusedmoe.ops.grouped_linear import Dgrad

if TYPE_CHECKING:
    from torch import Tensor


class GroupedDgrad(OnSm90, FusionRule, name="sm90.grouped_dgrad", direction="backward"):
    """``dx[r] = dy[r] @ weight[e]``: the kernel of `sm90.grouped_gemm` reads the transposed weight."""

    dgrad: Dgrad

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.dgrad.op
        operands = "grad_output", "dgrad.weight"
        check_common(ctx, *operands, in_features=fc.in_features, out_features=fc.out_features)
        return Step(needs=(*operands, "offsets"), gives=("grad_input",), zeroes_tail=True)

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        options = ctx.options

        def bind(dy: Tensor, weight: Tensor, offsets: Tensor, *index: Tensor) -> Run:
            guard_gradient(dy)
            guard_index(dy, index)
            guard_matrix("the weight", weight, transposed=True)
            product = products.bind_grouped_gemm(dy, weight.mT, None, None, options, *index)

            def run(dy: Tensor, weight: Tensor, offsets: Tensor, *index: Tensor) -> Tensor:
                return product(dy, weight.mT, None, offsets, None, *index)

            return on_readable(dy, run)

        return bind


class GatheredDgrad(ThroughIndex, GroupedDgrad, name="sm90.gathered_dgrad", direction="backward"):
    """`sm90.grouped_dgrad` with ``dy[index[r]]`` in place of ``dy[r]``."""

    gathers = "grad_output"
