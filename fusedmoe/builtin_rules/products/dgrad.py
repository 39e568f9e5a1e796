"""``sm90.grouped_dgrad``: the gradient of a grouped linear layer's rows, in one launch, by the kernels of `gemm`.

``sm90.gathered_dgrad``: the same for incoming gradients that the kernel reads through their index.
``sm90.fp8_grouped_dgrad``: the same with FP8 operands.
"""

from __future__ import annotations

from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.products.fp8 import OnFp8, check_operands, guard_codes, of_codes
from fusedmoe.builtin_rules.requirements import OnSm90, ThroughIndex, check_common
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.ops.grouped_linear import Dgrad

OPERANDS = ("grad_output", "dgrad.weight")


class _Dgrad(FusionRule, name="grouped_dgrad", direction="backward"):
    """``dx[r] = dy[r] @ weight[e]``."""

    dgrad: Dgrad
    check = staticmethod(check_common)  # `OnFp8` has another

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.dgrad.op
        self.check(ctx, *OPERANDS, in_features=fc.in_features, out_features=fc.out_features)
        return Step(needs=(*OPERANDS, "offsets"), gives=("grad_input",), zeroes_tail=True)


class GroupedDgrad(OnSm90, _Dgrad, name="sm90.grouped_dgrad", direction="backward"):
    """``dx[r] = dy[r] @ weight[e]``: the kernel of `sm90.grouped_gemm` reads the transposed weight."""

    def bind(self, ctx: PlanContext, dy: Tensor, weight: Tensor, offsets: Tensor, *index: Tensor) -> Run:
        guards.gradient(dy)
        guards.index(dy, index)
        guards.matrix("the weight", weight, transposed=True)
        product = products.bind_grouped_gemm(dy, weight.mT, None, None, ctx.options, *index)
        return guards.on_readable(
            dy, lambda dy, weight, offsets, *index: product(dy, weight.mT, None, offsets, None, *index)
        )


class GatheredDgrad(ThroughIndex, GroupedDgrad, name="sm90.gathered_dgrad", direction="backward"):
    """`sm90.grouped_dgrad` with ``dy[index[r]]`` in place of ``dy[r]``."""

    gathers = "grad_output"


class Fp8GroupedDgrad(OnFp8, _Dgrad, name="sm90.fp8_grouped_dgrad", direction="backward"):
    """`sm90.grouped_dgrad` of codes and scales, in bf16. It reads the weight by columns."""

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, *OPERANDS, gradient=True)

    def bind(
        self, ctx: PlanContext, dy: Tensor, dy_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor
    ) -> Run:
        guard_codes(dy, weight)
        operands = Codes(dy, dy_scale), Codes(weight, weight_scale)
        product = products.bind_grouped_gemm(*operands, None, None, ctx.options)
        return of_codes(lambda dy, weight, offsets: product(dy, weight, None, offsets, None), *operands)
