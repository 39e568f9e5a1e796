"""``sm90.fp8_grouped_wgrad``: the gradient of a grouped linear layer's weight with FP8 operands, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.products.fp8 import (
    BY_EXPERT,
    FP8_FLOPS_PER_US,
    MULTIPLIES_ROWS,
    ROWS,
    OnFp8,
    are_readable,
    by_expert,
    check_operand,
    on_readable_codes,
    on_readable_scales,
)
from fusedmoe.builtin_rules.products.weight_gradient import weight_gradient
from fusedmoe.builtin_rules.requirements import Run, decline
from fusedmoe.fusion.language.rule import Bind, FusionRule, NothingToDo, PlanContext, Step, require
from fusedmoe.kernels.sm90 import limits, scaled_wgrad
from fusedmoe.kernels.sm90.scaled_products import has_strides
from fusedmoe.ops.grouped_linear import Wgrad, WgradIntoMainGrad

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fusedmoe.builtin_rules.products.weight_gradient import Product

OPERANDS = ("grad_output", "wgrad.input")


class Fp8GroupedWgrad(OnFp8, FusionRule, name="sm90.fp8_grouped_wgrad", direction="backward"):
    """``dW[e] = dy[rows of e].T @ x[rows of e]`` of codes and scales by columns. dW has the dtype that dy had before
    quantization.

    For `WgradIntoMainGrad`, the kernel adds it, unrounded, to the weight's fp32 ``main_grad``. For `Wgrad`, it adds it
    to the weight's ``grad`` if there is one; see `fusedmoe.ops.state.grad_sums`.
    """

    wgrad: Wgrad | WgradIntoMainGrad

    def supports(self, ctx: PlanContext) -> None:
        block = BY_EXPERT if by_expert(ctx, OPERANDS[0]) else ROWS
        for name in OPERANDS:
            spec = check_operand(ctx, name, block, MULTIPLIES_ROWS, gradient=name == OPERANDS[0])
            require(not spec.rotated, "%s is rotated: expected hadamard=False", name)

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.wgrad.op
        for name, width in (("in_features", fc.in_features), ("out_features", fc.out_features)):
            decline(limits.why_not_width_of_codes(name, width))
        flops = 2 * ctx.spec("grad_output").shape[0] * fc.in_features * fc.out_features
        return Step(
            needs=(*OPERANDS, "offsets"), gives=("wgrad.grad_weight",), carries_us=flops / FP8_FLOPS_PER_US
        )  # fmt: skip

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        options, tensor_scales, dtype = ctx.options, by_expert(ctx, OPERANDS[0]), ctx.dtype("grad_output")

        def bind(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offsets: Tensor) -> Run:
            rows = dy.shape[1]  # with padding
            if not rows:
                raise NothingToDo("no rows")
            # copies would be the launches before the product, which must wait for them
            beside = ctx.beside_sms > 0 and are_readable(dy, x) and has_strides(dy_scale) and has_strides(x_scale)

            def bind_product(dtype: torch.dtype, adds: bool, *operands: Tensor) -> Product:
                dy, _, x, _, offsets = operands
                product = scaled_wgrad.bind_block_scaled_wgrad(
                    dy, x, offsets, rows, dtype, adds, options, beside, by_expert=tensor_scales,
                    transposed=self.wgrad.transposed,
                )  # fmt: skip
                return lambda out, *operands: product(*operands, out)

            product = weight_gradient(
                self.wgrad, dtype, bind_product, dy, dy_scale, x, x_scale, offsets,
                adds_to_sum=not self.wgrad.transposed or dy.dtype is x.dtype,
            )  # fmt: skip

            def run(*operands: Tensor) -> Tensor | None:
                return product(product.main_grad(), *operands)

            return on_readable_codes(on_readable_scales(run, dy_scale, x_scale), dy, x)

        return bind
