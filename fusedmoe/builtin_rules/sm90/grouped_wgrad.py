"""``sm90.grouped_wgrad``: the gradient of a grouped linear layer's weight, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fusedmoe.builtin_rules.sm90.backend import (
    OnSm90,
    Run,
    check_common,
    decline,
    guard_gradient,
    guard_matrix,
    on_readable,
)
from fusedmoe.fusion.rule import Bind, FusionRule, PlanContext, Step, require
from fusedmoe.kernels.sm90 import functions, limits
from fusedmoe.ops.grouped_linear import Wgrad, WgradIntoMainGrad

if TYPE_CHECKING:
    from torch import Tensor


class GroupedWgrad(OnSm90, FusionRule, name="sm90.grouped_wgrad", direction="backward"):
    """``dW[e] = dy[rows of e].T @ x[rows of e]``.

    For `WgradIntoMainGrad`, the kernel adds it, unrounded, to the weight's fp32 ``main_grad``.
    """

    wgrad: Wgrad | WgradIntoMainGrad

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.wgrad.op
        operands = "grad_output", "wgrad.input", "wgrad.weight"
        check_common(ctx, *operands, in_features=fc.in_features, out_features=fc.out_features)
        return Step(needs=("grad_output", "wgrad.input", "offsets"), gives=("wgrad.grad_weight",))

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        accumulating = self.wgrad if isinstance(self.wgrad, WgradIntoMainGrad) else None
        dtype, options = torch.float32 if accumulating else ctx.dtype("wgrad.weight"), ctx.options

        def bind(dy: Tensor, x: Tensor, offsets: Tensor) -> Run:
            guard_gradient(dy)
            guard_matrix("x", x)
            product = functions.bind_grouped_wgrad(dy, x, offsets, dtype, accumulating is not None, options)

            def run(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor | None:
                if accumulating is None:
                    return product(dy, x, offsets, None)
                main_grad = accumulating.main_grad()  # may be a different tensor in each call
                require(main_grad.is_contiguous(), "main_grad is not contiguous")
                decline(limits.why_not_address("main_grad", main_grad.data_ptr()))
                product(dy, x, offsets, main_grad)
                return accumulating.added()

            return on_readable(dy, run)

        return bind
