"""``sm90.fp8_grouped_gemm_activation``: a grouped linear layer with FP8 operands, with the activation, the row scale,
and the quantization of the result in its epilogue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.sm90.backend import Run, activation_of, converts, decline
from fusedmoe.builtin_rules.sm90.fp8 import (
    ROWS,
    OnFp8,
    check_blocks,
    check_operands,
    check_values,
    fp8_of,
    guard_codes,
    on_readable_scales,
)
from fusedmoe.fusion.rule import Bind, FusionRule, PlanContext, Step, require
from fusedmoe.kernels.sm90 import block_scaled_functions, limits
from fusedmoe.ops.glu import GeGLU, ReGLU, SwiGLU
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.quantize import Quantize
from fusedmoe.ops.scale import Scale
from fusedmoe.ops.squared_relu import SquaredReLU

if TYPE_CHECKING:
    from torch import Tensor


class Fp8GroupedGemmActivation(OnFp8, FusionRule, name="sm90.fp8_grouped_gemm_activation", direction="forward"):
    """``y[r] = act(p[r]) * scale[r]``, ``p[r] = x[r] @ weight[e].T + bias[e]`` rounded to bf16. The preactivation p is
    written only if backward needs it.

    With a `Quantize`, y is rounded to bf16 and written as codes and scales by rows. Its form by columns is that of
    another step: `sm90.fp8_grouped_dgrad_activation` recomputes it.
    """

    fc: GroupedLinear
    act: SwiGLU | GeGLU | ReGLU | SquaredReLU
    scale: Scale | None
    quantize: Quantize | None

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "input", "fc.weight")
        if self.quantize is not None:
            assert self.quantize.quantizer is not None, "otherwise there is no step"
            check_blocks(self.quantize.quantizer.format, ROWS)

    def offer(self, ctx: PlanContext) -> Step:
        fc, launches = self.fc, 1
        check_values(ctx, "input", "fc.weight", in_features=fc.in_features, out_features=fc.out_features)
        activation = activation_of(self.act)
        require(not activation.interleaved, "interleaved gate and up: expected a weight with the rows [gate | up]")
        if activation.gated:
            decline(limits.why_not_blocks("half of out_features", fc.out_features // 2))
        if self.scale is not None:
            decline(limits.why_not_row_scale(ctx.dtype("scale.factor")))
            launches += converts(ctx.dtype("scale.factor"))
        if self.quantize is not None:
            assert self.quantize.quantizer is not None, "otherwise there is no step"
            epsilon = self.quantize.quantizer.format.amax_epsilon
            require(not epsilon, "amax_epsilon %s: the epilogue has no lower bound on amax", epsilon)
        needs = ("input", "fc.weight", "fc.bias", "offsets", "scale.factor")
        output = "output" if self.quantize is None else "output:rows"
        return Step(needs=needs, gives=(output,), keeps=("act.input",), zeroes_tail=True, launches=launches)

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        activation, options = activation_of(self.act), ctx.options
        quantizer = None if self.quantize is None else self.quantize.quantizer
        quantized = None if quantizer is None else fp8_of(quantizer.format)

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
            run = block_scaled_functions.bind_block_scaled_gemm_activation(
                x, weight, bias, factor, activation, bool(keep), quantized, options
            )
            return on_readable_scales(run, x_scale, weight_scale)

        return bind
