"""``sm100.grouped_gemm_activation_quantize``: a grouped linear layer with MXFP8 or NVFP4 operands, with the activation
and the row scale in its epilogue, and the quantization of the result by rows and by columns.

The epilogue quantizes to MXFP8. For NVFP4, it writes the result in bf16, which another kernel quantizes.
"""

from __future__ import annotations

from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.sm100.packed import (
    OfPacked,
    check_activation,
    check_quantizer,
    guard_rows,
    ones_of_rows,
    packed_factor,
)
from fusedmoe.builtin_rules.sm100.products import products_of
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.numerics.formats.packed import interleave
from fusedmoe.ops.glu import SquaredReLU, SwiGLU
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.quantize import Quantize
from fusedmoe.ops.scale import Scale

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
    operands = ("input", "fc.weight")

    def supports(self, ctx: PlanContext) -> None:
        super().supports(ctx)
        check_quantizer(self.quantize.quantizer, ctx, "input")

    def offer(self, ctx: PlanContext) -> Step:
        self.check(ctx, self.fc, bias="fc.bias")
        activation = check_activation(self.act)
        if activation.gated:
            require(self.fc.out_features % 256 == 0, "half of out_features, %d, is not a multiple of 128",
                    self.fc.out_features // 2)  # fmt: skip
        else:
            require(not ctx.exists("fc.bias"), "the kernel of the squared ReLU has no bias")
        needs = ("input:packed", "fc.weight:packed", "fc.bias", "padded_offsets", "scale.factor", "place_of_row")
        products, quantizer = products_of(ctx, "input"), self.quantize.quantizer
        values = ctx.spec("input").shape[0] * self.fc.out_features // (2 if activation.gated else 1)
        launches = 1 + 2 * (self.scale is not None) + products.launches(quantizer)
        extra = products.extra_bytes(quantizer, values)
        return Step(needs=needs, gives=(), keeps=KEEPS, zeroes_tail=True, launches=launches, extra_bytes=extra)

    def bind(self, ctx: PlanContext, *tensors: Tensor | None) -> Run:
        activation, products, quantizer = check_activation(self.act), products_of(ctx, "input"), self.quantize.quantizer
        assert quantizer is not None, "otherwise there is no step"
        keep = ctx.keep
        axes = [axis for name, axis in _AXES.items() if name in keep]
        (codes, *_), (codes_ENK, *_), (bias, ends, *_) = products.split(tensors)
        features = codes_ENK.shape[1]
        guard_rows(codes.shape[0], self.fc.in_features, features)
        guards.contiguous("the bias", bias)
        width = features // (2 if activation.gated else 1)
        product = products.bind_activation(codes, width, ends, quantizer, axes, activation)

        def run(*tensors: Tensor | None) -> tuple[Tensor, ...]:
            x, weight, (bias, ends, factor, place_of_row) = products.split(tensors)
            num_packed = x[0].shape[0]
            factors = packed_factor(factor, place_of_row, num_packed)
            if bias is not None:
                if factors is None:  # else padding rows would have the activation of the bias
                    factors = ones_of_rows(place_of_row, num_packed)
                bias = interleave(bias).contiguous()
            p, forms = product(x, weight, bias, ends, factors)
            found = {PREACTIVATION: (p,), **{name: forms.get(axis, ()) for name, axis in _AXES.items()}}
            return tuple(t for name in keep for t in found[name])

        return run


_AXES = {ROWS: -1, COLUMNS: -2}
