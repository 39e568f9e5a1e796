"""``sm90.grouped_gemm``: a grouped linear layer, its bias and a row scale in one launch.

``sm90.gathered_gemm``: the same for rows of another value, which the kernel reads through their index.
``sm90.fp8_grouped_gemm``: the same with FP8 operands.
"""

from __future__ import annotations

from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.products.fp8 import OnFp8, check_operands, guard_codes, of_codes
from fusedmoe.builtin_rules.requirements import OnSm90, ThroughIndex, check_common, check_row_scale
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.scale import Scale


class _Gemm(FusionRule, name="grouped_gemm", direction="forward"):
    """``y[r] = (x[r] @ weight[e].T + bias[e]) * scale[r]``.

    The step cannot keep the scale's input. So a scale whose factor requires a gradient is a step of its own.
    """

    fc: GroupedLinear
    scale: Scale | None
    check = staticmethod(check_common)  # `OnFp8` has another

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.fc
        self.check(ctx, "input", "fc.weight", in_features=fc.in_features, out_features=fc.out_features)
        launches = 1 + check_row_scale(ctx, "scale.factor")
        needs = ("input", "fc.weight", "fc.bias", "offsets", "scale.factor")
        return Step(needs=needs, gives=("output",), zeroes_tail=True, launches=launches)


class GroupedGemm(OnSm90, _Gemm, name="sm90.grouped_gemm", direction="forward"):
    """``y[r] = (x[r] @ weight[e].T + bias[e]) * scale[r]``."""

    def bind(
        self, ctx: PlanContext, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, factor: Tensor | None,
        *index: Tensor,
    ) -> Run:  # fmt: skip
        guards.operands(x, weight, bias)
        guards.index(x, index)
        return products.bind_grouped_gemm(x, weight, bias, factor, ctx.options, *index)


class GatheredGemm(ThroughIndex, GroupedGemm, name="sm90.gathered_gemm", direction="forward"):
    """`sm90.grouped_gemm` with ``x[index[r]]`` in place of ``x[r]``."""

    gathers = "input"


class Fp8GroupedGemm(OnFp8, _Gemm, name="sm90.fp8_grouped_gemm", direction="forward"):
    """`sm90.grouped_gemm` of codes and scales, in bf16."""

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "input", "fc.weight")

    def bind(
        self, ctx: PlanContext, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
        offsets: Tensor, factor: Tensor | None,
    ) -> Run:  # fmt: skip
        guard_codes(x, weight)
        guards.contiguous("the bias", bias)
        operands = Codes(x, x_scale), Codes(weight, weight_scale)
        return of_codes(products.bind_grouped_gemm(*operands, bias, factor, ctx.options), *operands)
