"""``sm100.grouped_dgrad_activation_quantize``: the gradient of a grouped linear layer's rows, with MXFP8 or NVFP4
operands, through the row scale and the activation before the layer; and the quantization of the result.

The epilogue quantizes to MXFP8. For NVFP4, it writes the result in bf16, which another kernel quantizes.
"""

from __future__ import annotations

import math

from torch import Tensor

from fusedmoe.builtin_rules.sm100.packed import OfPacked, check_activation, check_quantizer, guard_rows, packed_factor
from fusedmoe.builtin_rules.sm100.products import products_of
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.ops.glu import DSquaredReLU, DSwiGLU
from fusedmoe.ops.grouped_linear import Dgrad
from fusedmoe.ops.quantize import QuantizeGrad
from fusedmoe.ops.scale import DScale, ScaleGrad

ROWS, COLUMNS = KEEPS = ("grad_input:packed", "grad_input:packed_columns")


class PackedDgradActivationQuantize(
    OfPacked, FusionRule, name="sm100.grouped_dgrad_activation_quantize", direction="backward"
):
    """``d = dy @ weight[e]``, ``dp = act'(p) * d * scale``, as codes and scales by rows and by columns;
    ``dscale[r] = sum over features of d * act(p)``. The kernel adds up dscale with atomics, so its bits may differ from
    run to run.
    """

    dgrad: Dgrad
    scale_grad: ScaleGrad | None
    dscale: DScale | None
    dact: DSwiGLU | DSquaredReLU
    quantize: QuantizeGrad
    operands = ("grad_output", "dgrad.weight")

    def supports(self, ctx: PlanContext) -> None:
        super().supports(ctx)
        check_quantizer(self.quantize.quantizes, ctx, "grad_output")

    def offer(self, ctx: PlanContext) -> Step:
        self.check(ctx, self.dgrad.op, "dact.input")
        check_activation(self.dact.op)
        unquantized = ctx.is_read_outside("quantize.grad_output")
        require(not unquantized, "the gradient of the preactivation is read unquantized too: the epilogue writes codes")
        gives: tuple[str, ...] = ()
        if self.scale_grad is not None:
            require(
                not ctx.deterministic, "the gradient of the row scale is a sum by atomics, which is not deterministic"
            )
            gives = (f"scale_grad.{self.scale_grad.gives[0]}",)
        needs = ("grad_output:packed", "dgrad.weight:packed_columns", "padded_offsets", "dact.input:packed",
                 "dscale.factor", "place_of_row")  # fmt: skip
        launches = 1 + 2 * (self.dscale is not None) + 2 * (self.scale_grad is not None)
        products, values = products_of(ctx, "grad_output"), math.prod(ctx.spec("dact.input").shape)
        launches += products.launches(self.quantize.quantizes)
        extra = products.extra_bytes(self.quantize.quantizes, values)
        return Step(needs=needs, gives=gives, keeps=KEEPS, zeroes_tail=True, launches=launches, extra_bytes=extra)

    def bind(self, ctx: PlanContext, *tensors: Tensor | None) -> Run:
        activation, quantizer = check_activation(self.dact.op), self.quantize.quantizes
        products = products_of(ctx, "grad_output")
        assert quantizer is not None, "otherwise there is no step"
        gives_scale = self.scale_grad is not None
        keep = ctx.keep
        axes = [axis for name, axis in _AXES.items() if name in keep]
        (codes, *_), _, (ends, p, *_) = products.split(tensors)
        guard_rows(codes.shape[0], self.dgrad.op.out_features, p.shape[1])
        product = products.bind_derivative(p, ends, quantizer, axes, activation)

        def run(*tensors: Tensor | None) -> tuple[Tensor, ...]:
            dy, weight, (ends, p, factor, place_of_row) = products.split(tensors)
            factors = packed_factor(factor, place_of_row, p.shape[0])
            forms, dfactor = product(dy, weight, p, ends, factors)
            kept = tuple(t for name in keep for t in forms[_AXES[name]])
            if not gives_scale:
                return kept
            assert dfactor is not None
            return (dfactor.index_select(0, place_of_row).to(factor.dtype), *kept)

        return run


_AXES = {ROWS: -1, COLUMNS: -2}
