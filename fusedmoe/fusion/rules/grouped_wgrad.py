"""``sm90.grouped_wgrad``: the gradient of a grouped linear layer's weight, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.fusion.rule import FusionRule, PlanContext, Step, require
from fusedmoe.fusion.rules.hopper import (
    OnHopper,
    check_common,
    decline,
    functions,
    guard_gradient,
    guard_matrix,
    readable,
)
from fusedmoe.kernels.sm90 import limits
from fusedmoe.ops.grouped_linear import Wgrad, WgradIntoMainGrad

if TYPE_CHECKING:
    from torch import Tensor


class GroupedWgrad(OnHopper, FusionRule, name="sm90.grouped_wgrad", direction="backward"):
    """``dW[e] = dy[rows of e].T @ x[rows of e]``; or added to the weight's ``main_grad`` in fp32, unrounded."""

    wgrad: Wgrad | WgradIntoMainGrad

    def check(self, ctx: PlanContext) -> None:
        fc = self.wgrad.op
        operands = "grad_output", "wgrad.input", "wgrad.weight"
        check_common(ctx, *operands, in_features=fc.in_features, out_features=fc.out_features)

    def build(self, ctx: PlanContext) -> Step:
        wgrad, options = self.wgrad, ctx.options
        accumulating = wgrad if isinstance(wgrad, WgradIntoMainGrad) else None
        dtype = ctx.dtype("wgrad.weight")

        def guard(dy: Tensor, x: Tensor, offsets: Tensor) -> None:
            guard_gradient(dy)
            guard_matrix("x", x)
            if accumulating is not None:
                main_grad = accumulating.main_grad()
                require(main_grad.is_contiguous(), "main_grad is not contiguous")
                decline(limits.why_not_address("main_grad", main_grad.data_ptr()))

        def run(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor | None:
            if accumulating is None:
                return functions().grouped_wgrad(  # type: ignore[no-any-return]
                    readable(dy), x, offsets, dtype=dtype, options=options
                )
            functions().grouped_wgrad(
                readable(dy), x, offsets, out=accumulating.main_grad(), accumulate=True, options=options
            )
            return accumulating.added()

        needs = ("grad_output", "wgrad.input", "offsets")
        return Step(run, needs, gives=("wgrad.grad_weight",), guard=guard)
