"""``sm90.fp8_grouped_gemm_activation``: a grouped linear layer with FP8 operands, with the activation, the row scale,
and the quantization of the result in its epilogue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fusedmoe.builtin_rules.products.fp8 import (
    BY_EXPERT,
    ROWS,
    OnFp8,
    by_expert,
    check_blocks,
    check_operands,
    check_values,
    fp8_of,
    guard_codes,
    on_readable_scales,
)
from fusedmoe.builtin_rules.requirements import Run, activation_of, converts, decline
from fusedmoe.builtin_rules.rows.delayed import LAUNCHES_PER_STEP, bind_end
from fusedmoe.fusion.language.rule import Bind, FusionRule, PlanContext, Step, require
from fusedmoe.kernels.fp8 import Fp8, Fp8ByExpert
from fusedmoe.kernels.sm90 import limits, products, scaled_products
from fusedmoe.ops.glu import GeGLU, ReGLU, SwiGLU
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.quantize import Quantize
from fusedmoe.ops.scale import Scale
from fusedmoe.ops.squared_relu import SquaredReLU

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = "output:columns"


class Fp8GroupedGemmActivation(OnFp8, FusionRule, name="sm90.fp8_grouped_gemm_activation", direction="forward"):
    """``y[r] = act(p[r]) * scale[r]``, ``p[r] = x[r] @ weight[e].T + bias[e]`` rounded to bf16. The preactivation p is
    written only if backward needs it.

    With a `Quantize`, y is rounded to bf16 and written as codes and scales by rows. Its form by columns is that of
    another step: `sm90.fp8_grouped_dgrad_activation` recomputes it. With delayed scaling, its form by columns has the
    same codes, and one more launch transposes them.
    """

    fc: GroupedLinear
    act: SwiGLU | GeGLU | ReGLU | SquaredReLU
    scale: Scale | None
    quantize: Quantize | None

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "input", "fc.weight")
        if self.quantize is not None:
            quantizer = self.quantize.quantizer
            assert quantizer is not None, "otherwise there is no step"
            current = quantizer.format.block == BY_EXPERT and quantizer.delayed is None
            require(not current, "the scale of an expert depends on all its rows: expected delayed scaling")
            check_blocks(quantizer.format, ROWS if quantizer.delayed is None else BY_EXPERT)

    def offer(self, ctx: PlanContext) -> Step:
        fc, launches = self.fc, 1
        check_values(ctx, "input", "fc.weight", in_features=fc.in_features, out_features=fc.out_features)
        activation = activation_of(self.act)
        require(not activation.interleaved, "interleaved gate and up: expected a weight with the rows [gate | up]")
        if activation.gated:
            half = "half of out_features", fc.out_features // 2
            decline(limits.why_not_width_of_codes(*half) if by_expert(ctx, "input") else limits.why_not_blocks(*half))
        if self.scale is not None:
            decline(limits.why_not_row_scale(ctx.dtype("scale.factor")))
            launches += converts(ctx.dtype("scale.factor"))
        keeps: tuple[str, ...] = ("act.input",)
        if self.quantize is not None:
            quantizer = self.quantize.quantizer
            assert quantizer is not None, "otherwise there is no step"
            if quantizer.delayed is not None:
                keeps = (*keeps, COLUMNS)
                launches += LAUNCHES_PER_STEP + 1  # and the codes by columns
            else:
                epsilon = quantizer.format.amax_epsilon
                require(not epsilon, "amax_epsilon %s: the epilogue has no lower bound on amax", epsilon)
        needs = ("input", "fc.weight", "fc.bias", "offsets", "scale.factor")
        output = "output" if self.quantize is None else "output:rows"
        return Step(needs=needs, gives=(output,), keeps=keeps, zeroes_tail=True, launches=launches)

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        activation, options, tensor_scales = activation_of(self.act), ctx.options, by_expert(ctx, "input")
        quantizer = None if self.quantize is None else self.quantize.quantizer
        delayed = quantizer is not None and quantizer.delayed is not None
        quantized: Fp8 | Fp8ByExpert | None = None
        if quantizer is not None:
            quantized = Fp8ByExpert(fp8_of(quantizer.format).element) if delayed else fp8_of(quantizer.format)
        keeps_input, columns = "act.input" in keep, COLUMNS in keep

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
            run = scaled_products.bind_block_scaled_gemm_activation(
                x, weight, bias, factor, activation, keeps_input, quantized, options, by_expert=tensor_scales
            )
            if delayed:
                run = self.with_step(run, x, offsets, columns, ctx.training)
            return on_readable_scales(run, x_scale, weight_scale)

        return bind

    def with_step(self, product: Run, x: Tensor, offsets: Tensor, columns: bool, training: bool) -> Run:
        """Return a function of the same tensors as ``product`` that also updates the history of delayed scaling and, if
        ``columns``, transposes the codes.
        """
        quantize = self.quantize
        assert quantize is not None
        assert quantize.quantizer is not None
        transpose = None
        if columns:
            width = self.fc.out_features // (2 if activation_of(self.act).gated else 1)
            codes = x.new_empty(x.shape[0], width, dtype=quantize.quantizer.format.element.dtype)
            transpose = products.bind_transpose_rows(codes, offsets)
        end = bind_end(quantize.quantizer)

        def run(
            x: Tensor,
            x_scale: Tensor,
            weight: Tensor,
            weight_scale: Tensor,
            bias: Tensor | None,
            offsets: Tensor,
            factor: Tensor | None,
        ) -> tuple[Tensor, ...]:
            step = quantize.delayed_step(x, offsets, training)
            assert step is not None, "delayed scaling"
            amax = torch.zeros_like(step.encode)
            codes, *p = product(x, x_scale, weight, weight_scale, bias, offsets, factor, step.encode, amax)
            scale = end(step, amax)
            by_columns = () if transpose is None else (transpose(codes, offsets), scale)
            return (codes, scale, *p, *by_columns)

        return run
