"""``sm100.grouped_gemm_activation_quantize``: a grouped linear layer with MXFP8 operands, with the activation, the row
scale, and the quantization of the result by rows and by columns in its epilogue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.sm100.backend import (
    OfPacked,
    check_activation,
    check_bf16,
    check_layer,
    check_packed,
    check_quantizer,
    guard_bias,
    guard_rows,
    ones_of_rows,
    packed_factor,
)
from fusedmoe.formats.packed import interleave
from fusedmoe.fusion.rule import Bind, FusionRule, PlanContext, Step, require
from fusedmoe.kernels.sm100 import grouped
from fusedmoe.ops.glu import SwiGLU
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.quantize import Quantize
from fusedmoe.ops.scale import Scale
from fusedmoe.ops.squared_relu import SquaredReLU

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PREACTIVATION, ROWS, COLUMNS = KEEPS = ("act.input:packed", "output:packed", "output:packed_columns")


class PackedGemmActivationQuantize(
    OfPacked, FusionRule, name="sm100.grouped_gemm_activation_quantize", direction="forward"
):
    """``y[r] = act(p[r]) * scale[r]``, ``p[r] = x[r] @ weight[e].T + bias[e]``, as codes and scales. The activation is
    applied to p in fp32; the backward pass gets p in bf16. The kernel writes p and both forms of y in every call.
    """

    fc: GroupedLinear
    act: SwiGLU | SquaredReLU
    scale: Scale | None
    quantize: Quantize

    def supports(self, ctx: PlanContext) -> None:
        check_packed(ctx, "input", "fc.weight")
        check_quantizer(self.quantize.quantizer)

    def offer(self, ctx: PlanContext) -> Step:
        check_layer(ctx, self.fc, bias="fc.bias")
        check_bf16(ctx, "input", "fc.weight")
        activation = check_activation(self.act)
        if activation.gated:
            require(self.fc.out_features % 256 == 0, "half of out_features, %d, is not a multiple of 128",
                    self.fc.out_features // 2)  # fmt: skip
        else:
            require(not ctx.exists("fc.bias"), "the kernel of the squared ReLU has no bias")
        needs = ("input:packed", "fc.weight:packed", "fc.bias", "padded_offsets", "scale.factor", "place_of_row")
        return Step(needs=needs, gives=(), keeps=KEEPS, zeroes_tail=True, launches=1 + 2 * (self.scale is not None))

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        activation = check_activation(self.act)

        def run(
            x: Tensor,
            x_scale: Tensor,
            weight: Tensor,
            weight_scale: Tensor,
            bias: Tensor | None,
            ends: Tensor,
            factor: Tensor | None,
            place_of_row: Tensor,
        ) -> tuple[Tensor, ...]:
            num_packed = x.shape[0]
            factors = packed_factor(factor, place_of_row, num_packed)
            if bias is not None:
                if factors is None:  # else padding rows would have the activation of the bias
                    factors = ones_of_rows(place_of_row, num_packed)
                bias = interleave(bias).contiguous()
            p, rows, columns = grouped.gemm_activation_quantize(
                (x, x_scale), (weight, weight_scale), bias, ends, factors, activation
            )
            found: dict[str, tuple[Tensor, ...]] = {PREACTIVATION: (p,), ROWS: rows, COLUMNS: columns}
            return tuple(t for name in keep for t in found[name])

        def bind(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, *others: Tensor
        ) -> Callable[..., tuple[Tensor, ...]]:  # fmt: skip
            guard_rows(x, weight.shape[1])
            guard_bias(bias)
            return run

        return bind
