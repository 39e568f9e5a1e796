"""``sm90.fp8_grouped_gemm``: a grouped linear layer with FP8 operands, its bias and a row scale, in one launch.

``sm90.fp8_grouped_dgrad``: the gradient of the layer's rows, by the same kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.products.fp8 import (
    OnFp8,
    by_expert,
    check_operands,
    check_values,
    guard_codes,
    on_readable_scales,
)
from fusedmoe.builtin_rules.requirements import Run, converts, decline
from fusedmoe.fusion.language.rule import Bind, FusionRule, PlanContext, Step, require
from fusedmoe.kernels.sm90 import limits, scaled_products
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear
from fusedmoe.ops.scale import Scale

if TYPE_CHECKING:
    from torch import Tensor


class Fp8GroupedGemm(OnFp8, FusionRule, name="sm90.fp8_grouped_gemm", direction="forward"):
    """``y[r] = (x[r] @ weight[e].T + bias[e]) * scale[r]`` of codes and scales, in bf16."""

    fc: GroupedLinear
    scale: Scale | None

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "input", "fc.weight")

    def offer(self, ctx: PlanContext) -> Step:
        fc, launches = self.fc, 1
        check_values(ctx, "input", "fc.weight", in_features=fc.in_features, out_features=fc.out_features)
        if self.scale is not None:
            decline(limits.why_not_row_scale(ctx.dtype("scale.factor")))
            launches += converts(ctx.dtype("scale.factor"))
        needs = ("input", "fc.weight", "fc.bias", "offsets", "scale.factor")
        return Step(needs=needs, gives=("output",), zeroes_tail=True, launches=launches)

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        options, tensor_scales = ctx.options, by_expert(ctx, "input")

        def bind(
            x: Tensor,
            x_scale: Tensor,
            weight: Tensor,
            weight_scale: Tensor,
            bias: Tensor | None,
            offsets: Tensor,
            factor: Tensor | None,
        ) -> Run:
            guard_codes(x, weight)
            require(bias is None or bias.is_contiguous(), "the bias is not contiguous")
            run = scaled_products.bind_block_scaled_gemm(x, weight, bias, factor, options, by_expert=tensor_scales)
            return on_readable_scales(run, x_scale, weight_scale)

        return bind


class Fp8GroupedDgrad(OnFp8, FusionRule, name="sm90.fp8_grouped_dgrad", direction="backward"):
    """``dx[r] = dy[r] @ weight[e]`` of codes and scales, in bf16. It reads the weight by columns."""

    dgrad: Dgrad

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "grad_output", "dgrad.weight", gradient=True)

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.dgrad.op
        operands = "grad_output", "dgrad.weight"
        check_values(ctx, *operands, in_features=fc.in_features, out_features=fc.out_features)
        return Step(needs=(*operands, "offsets"), gives=("grad_input",), zeroes_tail=True)

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        options, tensor_scales = ctx.options, by_expert(ctx, "grad_output")

        def bind(dy: Tensor, dy_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor) -> Run:
            guard_codes(dy, weight)
            product = scaled_products.bind_block_scaled_gemm(dy, weight, None, None, options, by_expert=tensor_scales)

            def run(dy: Tensor, dy_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor) -> Tensor:
                return product(dy, dy_scale, weight, weight_scale, None, offsets, None)

            return on_readable_scales(run, dy_scale, weight_scale)

        return bind
