"""``sm100.grouped_wgrad``: the gradient of a grouped linear layer's weight with MXFP8 or NVFP4 operands."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.sm100.packed import OfPacked, guard_rows, is_halved
from fusedmoe.builtin_rules.sm100.products import NVFP4, products_of
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step
from fusedmoe.numerics.formats.packed import PACKED_FEATURES, deinterleave
from fusedmoe.ops.grouped_linear import Wgrad, WgradIntoMainGrad

DY = "grad_output:packed_columns"


class PackedWgrad(OfPacked, FusionRule, name="sm100.grouped_wgrad", direction="backward"):
    """``dW[e] = dy[rows of e].T @ x[rows of e]`` of codes and scales by columns, in bf16.

    Where gate and up alternate in dy, another launch reorders the rows of dW. For `WgradIntoMainGrad`, the kernel adds
    dW, unrounded, to the weight's fp32 ``main_grad``, or the other launch does.
    """

    wgrad: Wgrad | WgradIntoMainGrad
    operands = ("grad_output", "wgrad.input")

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.wgrad.op
        self.check(ctx, fc)
        halves = is_halved(ctx, DY)
        extra = 2 * 2 * fc.num_groups * fc.in_features * fc.out_features if halves else 0
        return Step(
            needs=(DY, "wgrad.input:packed_columns", "padded_offsets"),
            gives=("wgrad.grad_weight",),
            launches=1 + halves,
            extra_bytes=extra,
        )

    def bind(self, ctx: PlanContext, dy: Tensor, *others: Tensor) -> Run:
        accumulating = self.wgrad if isinstance(self.wgrad, WgradIntoMainGrad) else None
        fc, halves = self.wgrad.op, is_halved(ctx, DY)
        shape, products = (fc.num_groups, fc.out_features, fc.in_features), products_of(ctx, "grad_output")
        guard_rows(dy.shape[1] * 2 if products is NVFP4 else dy.shape[0], shape[1], shape[2])

        def run(*tensors: Tensor) -> Tensor | None:
            dy, x, (ends,) = products.split(tensors)
            main_grad = None
            if accumulating is not None:
                main_grad = guards.main_grad(accumulating.main_grad())  # may be a different tensor in each call
            if main_grad is not None and not halves:
                products.kernels.wgrad(dy, x, ends, main_grad, accumulate=True)
                return accumulating.added()  # type: ignore[union-attr]
            out = ends.new_empty(shape, dtype=torch.bfloat16 if main_grad is None else torch.float32)
            products.kernels.wgrad(dy, x, ends, out)
            if main_grad is None:
                return deinterleave(out, 1).contiguous() if halves else out
            _blocks(main_grad).add_(out.view(shape[0], -1, 2, PACKED_FEATURES, shape[2]).transpose(1, 2))
            return accumulating.added()  # type: ignore[union-attr]

        return run


def _blocks(grad_ENK: Tensor) -> Tensor:
    """View a gradient (E, N, K) with the rows [gate | up] as (E, 2, blocks, 32, K)."""
    experts, features, width = grad_ENK.shape
    return grad_ENK.view(experts, 2, features // (2 * PACKED_FEATURES), PACKED_FEATURES, width)
