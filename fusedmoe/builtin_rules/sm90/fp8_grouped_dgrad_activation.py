"""``sm90.fp8_grouped_dgrad_activation``: the gradient of a grouped linear layer's rows, through the row scale and the
activation before the layer, with FP8 operands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.sm90.backend import Run, activation_of, converts, decline, guard_matrix
from fusedmoe.builtin_rules.sm90.fp8 import (
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
from fusedmoe.formats import QuantizedSpec
from fusedmoe.fusion.rule import Bind, FusionRule, PlanContext, Step, require
from fusedmoe.kernels.sm90 import block_scaled_functions, functions, limits
from fusedmoe.ops.glu import DGeGLU, DReGLU, DSwiGLU
from fusedmoe.ops.grouped_linear import Dgrad
from fusedmoe.ops.scale import DScale, ScaleGrad
from fusedmoe.ops.squared_relu import DSquaredReLU

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = "dgrad.input:columns"


def _columns(ctx: PlanContext) -> QuantizedSpec | None:
    """Return the spec of the layer's input by columns; None if the input is not quantized, or has one scale per expert:
    then the forward pass makes both forms, since delayed scaling knows their scales only there.
    """
    spec = ctx.spec(COLUMNS) if ctx.exists(COLUMNS) and not by_expert(ctx, COLUMNS) else None
    return spec if isinstance(spec, QuantizedSpec) else None


class Fp8GroupedDgradActivation(OnFp8, FusionRule, name="sm90.fp8_grouped_dgrad_activation", direction="backward"):
    """``d = dy @ weight[e]``, ``dp = act'(p) * d * scale``, ``dscale[r] = sum over features of d * act(p)``, of codes
    and scales, in bf16.

    The layer's input, ``act(p) * scale``, is recomputed for the layer's weight gradient: by columns in FP8, by one more
    launch, or unquantized. The preactivation p is then the only value between the two layers that is kept.
    """

    dgrad: Dgrad
    scale_grad: ScaleGrad | None
    dscale: DScale | None
    dact: DSwiGLU | DGeGLU | DReGLU | DSquaredReLU

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "grad_output", "dgrad.weight", gradient=True)
        columns = _columns(ctx)
        if columns is not None:
            check_blocks(columns.format, ROWS)
            require(not columns.rotated, "%s is rotated: expected hadamard=False", COLUMNS)

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.dgrad.op
        operands = "grad_output", "dgrad.weight"
        check_values(ctx, *operands, "dact.input", in_features=fc.in_features, out_features=fc.out_features)
        gives, launches = ["grad_input"], 1
        if self.dscale is not None:
            factor = ctx.dtype("dscale.factor")
            decline(limits.why_not_row_scale(factor))
            launches += converts(factor)
            if self.scale_grad is not None:
                gives.append(f"scale_grad.{self.scale_grad.gives[0]}")
                launches += 1 + converts(factor)
        columns = () if _columns(ctx) is None else (COLUMNS,)
        return Step(
            needs=(*operands, "offsets", "dact.input", "dscale.factor"),
            gives=tuple(gives),
            keeps=(*columns, "dact.output" if self.dscale is None else "dscale.output"),
            zeroes_tail=True,
            launches=launches,
        )

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        activation, options, scale_grad = activation_of(self.dact.op), ctx.options, self.scale_grad is not None
        columns, tensor_scales = _columns(ctx) if COLUMNS in keep else None, by_expert(ctx, "grad_output")
        format = None if columns is None else fp8_of(columns.format)
        keeps_output = any(name != COLUMNS for name in keep)

        def bind(
            dy: Tensor,
            dy_scale: Tensor,
            weight: Tensor,
            weight_scale: Tensor,
            offsets: Tensor,
            preactivation: Tensor,
            factor: Tensor | None,
        ) -> Run:
            guard_codes(dy, weight)
            guard_matrix("the preactivation", preactivation)
            product = block_scaled_functions.bind_block_scaled_gemm_activation_backward(
                dy, weight, preactivation, factor, activation, bool(keep), scale_grad, options,
                by_expert=tensor_scales,
            )  # fmt: skip
            quantize = None
            if format is not None:
                like = preactivation.new_empty(preactivation.shape[0], weight.shape[1])
                quantize = functions.bind_quantize_rows(like, format, offsets, rows=False, columns=True)

            def run(
                dy: Tensor,
                dy_scale: Tensor,
                weight: Tensor,
                weight_scale: Tensor,
                offsets: Tensor,
                preactivation: Tensor,
                factor: Tensor | None,
            ) -> tuple[Tensor | None, ...]:
                grad_preactivation, x, grad_factor = product(
                    dy, dy_scale, weight, weight_scale, offsets, preactivation, factor
                )
                results: list[Tensor | None] = [grad_preactivation]
                if grad_factor is not None and factor is not None:
                    results.append(grad_factor.to(factor.dtype))
                if quantize is not None:
                    results += quantize(x, offsets)[0]
                if keeps_output:
                    results.append(x)
                return tuple(results)

            return on_readable_scales(run, dy_scale, weight_scale)

        return bind
