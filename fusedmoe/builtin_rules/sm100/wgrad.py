"""``sm100.grouped_wgrad``: the gradient of a grouped linear layer's weight with MXFP8 or NVFP4 operands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fusedmoe.builtin_rules.sm100.packed import OfPacked, check_bf16, check_layer, check_packed, guard_rows, is_halved
from fusedmoe.builtin_rules.sm100.products import NVFP4, products_of
from fusedmoe.fusion.language.rule import Bind, FusionRule, PlanContext, Step, require
from fusedmoe.numerics.formats.packed import PACKED_FEATURES, deinterleave
from fusedmoe.ops.grouped_linear import Wgrad, WgradIntoMainGrad

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

OPERANDS = ("grad_output", "wgrad.input")
DY = "grad_output:packed_columns"


class PackedWgrad(OfPacked, FusionRule, name="sm100.grouped_wgrad", direction="backward"):
    """``dW[e] = dy[rows of e].T @ x[rows of e]`` of codes and scales by columns, in bf16.

    Where gate and up alternate in dy, another launch reorders the rows of dW. For `WgradIntoMainGrad`, the kernel adds
    dW, unrounded, to the weight's fp32 ``main_grad``, or the other launch does.
    """

    wgrad: Wgrad | WgradIntoMainGrad

    def supports(self, ctx: PlanContext) -> None:
        check_packed(ctx, *OPERANDS)

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.wgrad.op
        check_layer(ctx, fc)
        check_bf16(ctx, *OPERANDS)
        halves = is_halved(ctx, DY)
        extra = 2 * 2 * fc.num_groups * fc.in_features * fc.out_features if halves else 0
        return Step(
            needs=(DY, "wgrad.input:packed_columns", "padded_offsets"),
            gives=("wgrad.grad_weight",),
            launches=1 + halves,
            extra_bytes=extra,
        )

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        accumulating = self.wgrad if isinstance(self.wgrad, WgradIntoMainGrad) else None
        fc, halves = self.wgrad.op, is_halved(ctx, DY)
        shape, products = (fc.num_groups, fc.out_features, fc.in_features), products_of(ctx, "grad_output")

        def run(*tensors: Tensor) -> Tensor | None:
            dy, x, (ends,) = products.split(tensors)
            main_grad = None
            if accumulating is not None:
                main_grad = accumulating.main_grad()  # may be a different tensor in each call
                require(main_grad.is_contiguous(), "main_grad is not contiguous")
                require(main_grad.data_ptr() % 16 == 0, "main_grad does not begin at a multiple of 16 bytes")
            if main_grad is not None and not halves:
                products.kernels.wgrad(dy, x, ends, main_grad, accumulate=True)
                return accumulating.added()  # type: ignore[union-attr]
            out = ends.new_empty(shape, dtype=torch.bfloat16 if main_grad is None else torch.float32)
            products.kernels.wgrad(dy, x, ends, out)
            if main_grad is None:
                return deinterleave(out, 1).contiguous() if halves else out
            _blocks(main_grad).add_(out.view(shape[0], -1, 2, PACKED_FEATURES, shape[2]).transpose(1, 2))
            return accumulating.added()  # type: ignore[union-attr]

        def bind(dy: Tensor, *others: Tensor) -> Callable[..., Tensor | None]:
            rows = dy.shape[1] * 2 if products is NVFP4 else dy.shape[0]
            guard_rows(rows, shape[1], shape[2])
            return run

        return bind


def _blocks(grad_ENK: Tensor) -> Tensor:
    """View a gradient (E, N, K) with the rows [gate | up] as (E, 2, blocks, 32, K)."""
    experts, features, width = grad_ENK.shape
    return grad_ENK.view(experts, 2, features // (2 * PACKED_FEATURES), PACKED_FEATURES, width)
