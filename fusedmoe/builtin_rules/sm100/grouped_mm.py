"""``sm100.grouped_mm``: a grouped linear layer in bf16, by torch's ``grouped_mm``.

``sm100.grouped_mm_dgrad``: the gradient of the layer's rows, by the same product.

torch's product does not write the rows after the last expert's. A kernel of this package writes their zeros, and reads
and writes nothing else. Plain PyTorch takes a pass over all rows instead, since it does not know on the host where the
last expert's rows end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.requirements import OnSm100, decline, name_of
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.sm90 import limits
from fusedmoe.kernels.torch import grouped_gemm
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear
from fusedmoe.ops.op import Op


class GroupedMm(OnSm100, FusionRule, name="sm100.grouped_mm", direction="forward"):
    """``y[r] = x[r] @ weight[e].T + bias[e]``. A bias is added in plain PyTorch, in passes that the cost does not
    count, as it does not count those of the op.
    """

    fc: GroupedLinear

    def offer(self, ctx: PlanContext) -> Step:
        _check(ctx, self.fc, "input", "fc.weight")
        needs = ("input", "fc.weight", "fc.bias", "offsets")
        return Step(needs=needs, gives=("output",), zeroes_tail=True, launches=2)

    def bind(self, ctx: PlanContext, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Run:
        product = _bind(x, weight.mT, offsets)

        def run(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
            y = product(x, weight.mT, offsets)
            return y if bias is None else grouped_gemm.grouped_bias(y, bias, offsets)

        return run


class GroupedMmDgrad(OnSm100, FusionRule, name="sm100.grouped_mm_dgrad", direction="backward"):
    """``dx[r] = dy[r] @ weight[e]``."""

    dgrad: Dgrad

    def offer(self, ctx: PlanContext) -> Step:
        _check(ctx, self.dgrad.op, "grad_output", "dgrad.weight")
        needs = ("grad_output", "dgrad.weight", "offsets")
        return Step(needs=needs, gives=("grad_input",), zeroes_tail=True, launches=2)

    def bind(self, ctx: PlanContext, dy: Tensor, weight: Tensor, offsets: Tensor) -> Run:
        return _bind(dy, weight, offsets)


def _check(ctx: PlanContext, fc: Op, *operands: str) -> None:
    """Decline operands that torch's product does not take without the host."""
    for name in operands:
        dtype = ctx.dtype(name)
        require(dtype is torch.bfloat16, "%s is %s, not bfloat16", name, name_of(dtype))
    for name in ("in_features", "out_features"):
        decline(limits.why_not_width(name, getattr(fc, name)))
    require(not ctx.options.sm_margin, "sm_margin %d: torch's product takes all SMs", ctx.options.sm_margin)


def _bind(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Run:
    """Return the product of rows (R, K), matrices (E, K, N) and offsets, with zeros after the last expert's rows."""
    guards.some_rows(rows.shape[0])
    guards.plain("the rows", rows)
    guards.plain("the weight", matrices)
    like = rows.new_empty(rows.shape[0], matrices.shape[2])
    zero_tail = row_functions.bind_zero_tail(like, offsets)
    return lambda rows, matrices, offsets: zero_tail(
        grouped_gemm.grouped_mm_without_tail(rows, matrices, offsets), offsets
    )
