"""``sm90.grouped_gemm_activation``: a grouped linear layer with the activation and the row scale in its epilogue.

``sm90.gathered_gemm_activation``: the same for rows of another value, which the kernel reads through their index.
``sm90.fp8_grouped_gemm_activation``: the same with FP8 operands, with the quantization of the result in its epilogue.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.products.fp8 import (
    BY_EXPERT,
    ROWS,
    OnFp8,
    by_expert,
    check_blocks,
    check_operands,
    guard_codes,
    of_codes,
)
from fusedmoe.builtin_rules.requirements import (
    OnSm90,
    ThroughIndex,
    activation_of,
    check_common,
    check_row_scale,
    decline,
)
from fusedmoe.builtin_rules.rows.delayed import LAUNCHES_PER_STEP, bind_end
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.quantize import format_functions
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.numerics.formats import Quantizer
from fusedmoe.ops.glu import FusedActivation
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.quantize import Quantize
from fusedmoe.ops.scale import Scale

NEEDS = ("input", "fc.weight", "fc.bias", "offsets", "scale.factor")
COLUMNS = "output:columns"


class GroupedGemmActivation(OnSm90, FusionRule, name="sm90.grouped_gemm_activation", direction="forward"):
    """``y[r] = act(x[r] @ weight[e].T + bias[e]) * scale[r]``. The preactivation is written only if backward needs it.

    The activation's result before the scale is never written: `sm90.grouped_dgrad_activation` recomputes it for the
    scale's gradient.
    """

    fc: GroupedLinear
    act: FusedActivation
    scale: Scale | None

    def offer(self, ctx: PlanContext) -> Step:
        check_common(ctx, "input", "fc.weight", in_features=self.fc.in_features)
        if activation_of(self.act).gated:
            decline(limits.why_not_width("half of out_features", self.fc.out_features // 2))
        else:
            decline(limits.why_not_width("out_features", self.fc.out_features))
        launches = 1 + check_row_scale(ctx, "scale.factor")
        return Step(needs=NEEDS, gives=("output",), keeps=("act.input",), zeroes_tail=True, launches=launches)

    def bind(
        self, ctx: PlanContext, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, factor: Tensor | None,
        *index: Tensor,
    ) -> Run:  # fmt: skip
        guards.operands(x, weight, bias)
        guards.index(x, index)
        return products.bind_grouped_gemm_activation(
            x, weight, bias, factor, activation_of(self.act), bool(ctx.keep), ctx.options, *index
        )


class GatheredGemmActivation(
    ThroughIndex, GroupedGemmActivation, name="sm90.gathered_gemm_activation", direction="forward"
):
    """`sm90.grouped_gemm_activation` with ``x[index[r]]`` in place of ``x[r]``."""

    gathers = "input"


class Fp8GroupedGemmActivation(OnFp8, FusionRule, name="sm90.fp8_grouped_gemm_activation", direction="forward"):
    """``y[r] = act(p[r]) * scale[r]``, ``p[r] = x[r] @ weight[e].T + bias[e]`` rounded to bf16. The preactivation p is
    written only if backward needs it.

    With a `Quantize`, y is rounded to bf16 and written as codes and scales by rows. Its form by columns is that of
    another step: `sm90.fp8_grouped_dgrad_activation` recomputes it. With delayed scaling, its form by columns has the
    same codes, and one more launch transposes them.
    """

    fc: GroupedLinear
    act: FusedActivation
    scale: Scale | None
    quantize: Quantize | None

    @property
    def _quantizer(self) -> Quantizer | None:
        return None if self.quantize is None else self.quantize.quantizer

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "input", "fc.weight")
        quantizer = self._quantizer
        if quantizer is not None:
            current = quantizer.format.block == BY_EXPERT and quantizer.delayed is None
            require(not current, "the scale of an expert depends on all its rows: expected delayed scaling")
            check_blocks(quantizer.format, ROWS if quantizer.delayed is None else BY_EXPERT)

    def offer(self, ctx: PlanContext) -> Step:
        fc, quantizer = self.fc, self._quantizer
        self.check(ctx, "input", "fc.weight", in_features=fc.in_features, out_features=fc.out_features)
        activation = activation_of(self.act)
        require(not activation.interleaved, "interleaved gate and up: expected a weight with the rows [gate | up]")
        if activation.gated:
            half = "half of out_features", fc.out_features // 2
            decline(limits.why_not_width_of_codes(*half) if by_expert(ctx, "input") else limits.why_not_blocks(*half))
        launches = 1 + check_row_scale(ctx, "scale.factor")
        keeps: tuple[str, ...] = ("act.input",)
        if quantizer is not None and quantizer.delayed is not None:
            launches += LAUNCHES_PER_STEP + 1  # and the codes by columns
            keeps += (COLUMNS,)
        elif quantizer is not None:
            epsilon = quantizer.format.amax_epsilon
            require(not epsilon, "amax_epsilon %s: the epilogue has no lower bound on amax", epsilon)
        output = "output" if quantizer is None else "output:rows"
        return Step(needs=NEEDS, gives=(output,), keeps=keeps, zeroes_tail=True, launches=launches)

    def bind(
        self, ctx: PlanContext, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
        offsets: Tensor, factor: Tensor | None,
    ) -> Run:  # fmt: skip
        guard_codes(x, weight)
        guards.contiguous("the bias", bias)
        quantizer = self._quantizer
        delayed = quantizer is not None and quantizer.delayed is not None
        quantized = None if quantizer is None else quantizer.format
        operands = Codes(x, x_scale), Codes(weight, weight_scale)
        run = products.bind_grouped_gemm_activation(
            *operands, bias, factor, activation_of(self.act), "act.input" in ctx.keep, ctx.options, quantized=quantized
        )
        return of_codes(self._with_step(ctx, run, x, offsets) if delayed else run, *operands)

    def _with_step(self, ctx: PlanContext, product: Run, x: Tensor, offsets: Tensor) -> Run:
        """Return a function of the same tensors as ``product`` that also updates the history of delayed scaling and, if
        they are read, gives the codes by columns.
        """
        quantize = self.quantize
        assert quantize is not None
        assert quantize.quantizer is not None
        transpose = None
        if COLUMNS in ctx.keep:
            width = self.fc.out_features // (2 if activation_of(self.act).gated else 1)
            codes = x.new_empty(x.shape[0], width, dtype=quantize.quantizer.format.element.dtype)
            transpose = format_functions.bind_transpose_rows(codes, offsets)
        end, training = bind_end(quantize.quantizer), ctx.training

        def run(*tensors: Any) -> tuple[Tensor, ...]:
            x, *_, offsets, _ = tensors
            step = quantize.delayed_step(x.codes, offsets, training)
            assert step is not None, "delayed scaling"
            amax = torch.zeros_like(step.encode)
            codes, *p = product(*tensors, step.encode, amax)
            scale = end(step, amax)
            by_columns = () if transpose is None else (transpose(codes, offsets), scale)
            return (codes, scale, *p, *by_columns)

        return run
