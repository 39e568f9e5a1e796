"""``sm100.grouped_gemm``: a grouped linear layer with MXFP8 or NVFP4 operands, and its bias.

``sm100.grouped_dgrad``: the gradient of the layer's rows, by the same kernel.
"""

from __future__ import annotations

from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.sm100.packed import OfPacked, guard_rows, is_halved
from fusedmoe.builtin_rules.sm100.products import products_of
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step
from fusedmoe.numerics.formats.packed import deinterleave, interleave
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear


class PackedGemm(OfPacked, FusionRule, name="sm100.grouped_gemm", direction="forward"):
    """``y[r] = x[r] @ weight[e].T + bias[e]`` of codes and scales, in bf16. Two more launches remove the padding rows.

    Before a gated activation, gate and up alternate in the packed weight. One more launch then reorders y.
    """

    fc: GroupedLinear
    operands = ("input", "fc.weight")

    def offer(self, ctx: PlanContext) -> Step:
        self.check(ctx, self.fc, bias="fc.bias")
        halves = is_halved(ctx, "fc.weight:packed")
        needs = ("input:packed", "fc.weight:packed", "fc.bias", "padded_offsets", "place_of_row")
        moved = (2 + 2 * halves) * _bytes(ctx, "output")
        return Step(needs=needs, gives=("output",), zeroes_tail=True, launches=3 + halves, extra_bytes=moved)

    def bind(self, ctx: PlanContext, *tensors: Tensor | None) -> Run:
        halves, products = is_halved(ctx, "fc.weight:packed"), products_of(ctx, "input")
        (codes, *_), (codes_ENK, *_), (bias, *_) = products.split(tensors)
        guard_rows(codes.shape[0], ctx.spec("input").shape[1], codes_ENK.shape[1])
        guards.contiguous("the bias", bias)

        def run(*tensors: Tensor | None) -> Tensor:
            x, weight, (bias, ends, place_of_row) = products.split(tensors)
            if halves and bias is not None:
                bias = interleave(bias).contiguous()
            y: Tensor = products.kernels.gemm(x, weight, bias, ends).index_select(0, place_of_row)
            return deinterleave(y).contiguous() if halves else y

        return run


class PackedDgrad(OfPacked, FusionRule, name="sm100.grouped_dgrad", direction="backward"):
    """``dx[r] = dy[r] @ weight[e]`` of codes and scales, in bf16. Two more launches remove the padding rows."""

    dgrad: Dgrad
    operands = ("grad_output", "dgrad.weight")

    def offer(self, ctx: PlanContext) -> Step:
        self.check(ctx, self.dgrad.op)
        needs = ("grad_output:packed", "dgrad.weight:packed_columns", "padded_offsets", "place_of_row")
        moved = 2 * _bytes(ctx, "grad_input")
        return Step(needs=needs, gives=("grad_input",), zeroes_tail=True, launches=3, extra_bytes=moved)

    def bind(self, ctx: PlanContext, *tensors: Tensor) -> Run:
        products = products_of(ctx, "grad_output")
        (codes, *_), (codes_ENK, *_), _ = products.split(tensors)
        guard_rows(codes.shape[0], ctx.spec("grad_output").shape[1], codes_ENK.shape[1])

        def run(*tensors: Tensor) -> Tensor:
            dy, weight, (ends, place_of_row) = products.split(tensors)
            dx: Tensor = products.kernels.gemm(dy, weight, None, ends)
            return dx.index_select(0, place_of_row)

        return run


def _bytes(ctx: PlanContext, rows: str) -> int:
    spec = ctx.spec(rows)
    return int(spec.shape[0]) * int(spec.shape[1]) * spec.dtype.itemsize
