"""``sm90.grouped_dgrad_activation``: the gradient of a grouped linear layer's rows, through the row scale and the
activation before the layer, in one launch. A second launch sums the row scale's gradient over column tiles.

``sm90.gathered_dgrad_activation``: the same for incoming gradients that the kernel reads through their index.
``sm90.fp8_grouped_dgrad_activation``: the same with FP8 operands, with the quantization of the result in its epilogue.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.products.fp8 import (
    ROWS,
    OnFp8,
    by_expert,
    check_blocks,
    check_operands,
    guard_codes,
    of_codes,
)
from fusedmoe.builtin_rules.requirements import OnSm90, ThroughIndex, activation_of, check_common, check_dscale, decline
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.quantize import block_functions
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.numerics.formats import E4M3, Format, QuantizedSpec, Quantizer, ScaleRule
from fusedmoe.ops.glu import FusedDerivative
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear
from fusedmoe.ops.quantize import QuantizeGrad
from fusedmoe.ops.scale import DScale, ScaleGrad

OPERANDS = ("grad_output", "dgrad.weight")
NEEDS = (*OPERANDS, "offsets", "dact.input", "dscale.factor")
COLUMNS = "dgrad.input:columns"
FORMS = ("grad_input:rows", "grad_input:columns", COLUMNS)


class GroupedDgradActivation(OnSm90, FusionRule, name="sm90.grouped_dgrad_activation", direction="backward"):
    """``d = dy @ weight[e]``, ``dp = act'(p) * d * scale``, ``dscale[r] = sum over features of d * act(p)``.

    If the layer's weight gradient is wanted, the step also recomputes the layer's input, ``act(p) * scale``. The
    preactivation p is then the only value between the two layers that is kept.
    """

    dgrad: Dgrad
    scale_grad: ScaleGrad | None
    dscale: DScale | None
    dact: FusedDerivative

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.dgrad.op
        check_common(ctx, *OPERANDS, "dact.input", in_features=fc.in_features, out_features=fc.out_features)
        of_scale, launches = check_dscale(ctx, self.scale_grad)
        gives = ("grad_input", *of_scale)
        return Step(needs=NEEDS, gives=gives, keeps=("dgrad.input",), zeroes_tail=True, launches=1 + launches)

    def bind(
        self, ctx: PlanContext, dy: Tensor, weight: Tensor, offsets: Tensor, preactivation: Tensor,
        factor: Tensor | None, *index: Tensor,
    ) -> Run:  # fmt: skip
        guards.gradient(dy)
        guards.index(dy, index)
        guards.matrix("the preactivation", preactivation)
        guards.matrix("the weight", weight, transposed=True)
        recomputes, of_scale = bool(ctx.keep), self.scale_grad is not None
        product = products.bind_grouped_gemm_activation_backward(
            dy, weight, preactivation, factor, activation_of(self.dact.op), recomputes, of_scale, ctx.options, *index
        )

        dtype = None if factor is None else factor.dtype

        def run(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
            grad_preactivation, x, grad_factor = product(*tensors)
            given = _given((grad_preactivation,), grad_factor, dtype)
            return (*given, x) if recomputes else given

        return guards.on_readable(dy, run)


class GatheredDgradActivation(
    ThroughIndex, GroupedDgradActivation, name="sm90.gathered_dgrad_activation", direction="backward"
):
    """`sm90.grouped_dgrad_activation` with ``dy[index[r]]`` in place of ``dy[r]``."""

    gathers = "grad_output"


class Fp8GroupedDgradActivation(OnFp8, FusionRule, name="sm90.fp8_grouped_dgrad_activation", direction="backward"):
    """``d = dy @ weight[e]``, ``dp = act'(p) * d * scale``, ``dscale[r] = sum over features of d * act(p)``, of codes
    and scales.

    With a `QuantizeGrad`, dp is rounded to bf16 and written as codes and scales, in the forms that are read; without
    one, in bf16. The layer's input, ``act(p) * scale``, is recomputed for the layer's weight gradient: by columns in
    FP8, or unquantized. With a `QuantizeGrad`, it is by columns in FP8, from the same launch; without one, another
    launch quantizes it. The preactivation p is then the only value between the two layers that is kept.
    """

    dgrad: Dgrad
    scale_grad: ScaleGrad | None
    dscale: DScale | None
    dact: FusedDerivative
    quantize: QuantizeGrad | None

    @property
    def _quantizer(self) -> Quantizer | None:
        return None if self.quantize is None else self.quantize.quantizes

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, *OPERANDS, gradient=True)
        check_result_blocks(recomputed_columns(ctx), self._quantizer)

    def offer(self, ctx: PlanContext) -> Step:
        fc, columns, quantizer = self.dgrad.op, recomputed_columns(ctx), self._quantizer
        self.check(ctx, *OPERANDS, "dact.input", in_features=fc.in_features, out_features=fc.out_features)
        gives, launches = check_dscale(ctx, self.scale_grad)
        if quantizer is None:
            gives = ("grad_input", *gives)
            recomputed = "dact.output" if self.dscale is None else "dscale.output"
            keeps: tuple[str, ...] = (recomputed,) if columns is None else (COLUMNS, recomputed)
        else:
            unquantized = ctx.is_read_outside("quantize.grad_output")
            check_written_codes(fc, self.dact, quantizer, columns, unquantized)
            keeps = FORMS if columns is not None else FORMS[:2]
        return Step(needs=NEEDS, gives=gives, keeps=keeps, zeroes_tail=True, launches=1 + launches)

    def bind(
        self, ctx: PlanContext, dy: Tensor, dy_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor,
        preactivation: Tensor, factor: Tensor | None,
    ) -> Run:  # fmt: skip
        guard_codes(dy, weight)
        guards.matrix("the preactivation", preactivation)
        bind = self._bind_values if self._quantizer is None else self._bind_codes
        dtype = None if factor is None else factor.dtype
        operands = Codes(dy, dy_scale), Codes(weight, weight_scale)
        return of_codes(bind(ctx, *operands, offsets, preactivation, factor, dtype), *operands)

    def _bind_codes(
        self, ctx: PlanContext, dy: Codes, weight: Codes, offsets: Tensor, preactivation: Tensor,
        factor: Tensor | None, dtype: torch.dtype | None,
    ) -> Run:  # fmt: skip
        """Return the function that writes codes: it gives the row scale's gradient alone, and keeps the forms."""
        assert self._quantizer is not None
        by_rows, by_columns, again = (name in ctx.keep for name in FORMS)
        product = products.bind_grouped_gemm_activation_backward_codes(
            dy, weight, preactivation, factor, activation_of(self.dact.op), self._quantizer.format,
            (by_rows, by_columns, again), self.scale_grad is not None, ctx.options,
        )  # fmt: skip

        def run(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
            forms, grad_factor = product(*tensors)
            return *_given((), grad_factor, dtype), *(t for form in forms for t in form)

        return run

    def _bind_values(
        self, ctx: PlanContext, dy: Codes, weight: Codes, offsets: Tensor, preactivation: Tensor,
        factor: Tensor | None, dtype: torch.dtype | None,
    ) -> Run:  # fmt: skip
        """Return the function that gives bf16, and keeps the layer's input by columns or unquantized."""
        product = products.bind_grouped_gemm_activation_backward(
            dy, weight, preactivation, factor, activation_of(self.dact.op), bool(ctx.keep), self.scale_grad is not None,
            ctx.options,
        )  # fmt: skip
        columns, quantize = recomputed_columns(ctx) if COLUMNS in ctx.keep else None, None
        keeps_output = any(name != COLUMNS for name in ctx.keep)
        if columns is not None:
            like = preactivation.new_empty(preactivation.shape[0], weight.codes.shape[1])
            quantize = block_functions.bind_quantize_rows(
                like, columns.format, offsets, rows=False, columns=True, zero_tail=ctx.options.zero_tail
            )  # fmt: skip

        def run(*tensors: Any) -> tuple[Tensor | None, ...]:
            grad_preactivation, x, grad_factor = product(*tensors)
            kept = () if quantize is None else quantize(x, tensors[2])[0]
            given = _given((grad_preactivation,), grad_factor, dtype)
            return (*given, *kept, x) if keeps_output else (*given, *kept)

        return run


def _given(
    given: tuple[Tensor | None, ...], grad_factor: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor | None, ...]:
    """Return values that a step gives, then the gradient of the row scale if there is one."""
    return given if grad_factor is None or dtype is None else (*given, grad_factor.to(dtype))


def recomputed_columns(ctx: PlanContext) -> QuantizedSpec | None:
    """Return the spec of the layer's input by columns; None if the input is not quantized, or has one scale per expert:
    then the forward pass makes both forms, since delayed scaling knows their scales only there.
    """
    spec = ctx.spec(COLUMNS) if ctx.exists(COLUMNS) and not by_expert(ctx, COLUMNS) else None
    return spec if isinstance(spec, QuantizedSpec) else None


def check_result_blocks(columns: QuantizedSpec | None, quantizer: Quantizer | None) -> None:
    """Decline blocks that no kernel writes: those of `recomputed_columns`, and of the gradient of the preactivation."""
    if columns is not None:
        check_blocks(columns.format, ROWS)
        require(not columns.rotated, "%s is rotated: expected hadamard=False", COLUMNS)
    if quantizer is not None:
        check_blocks(quantizer.format, ROWS)
        require(not quantizer.hadamard, "the gradient of the preactivation is rotated: expected hadamard=False")


def check_written_codes(
    fc: GroupedLinear, dact: FusedDerivative, quantizer: Quantizer, columns: QuantizedSpec | None, unquantized: bool
) -> None:
    """Decline results that the epilogue does not quantize; ``unquantized``: whether another step reads the gradient of
    the preactivation in bf16.
    """
    require(not unquantized, "the gradient of the preactivation is read unquantized too: the epilogue writes codes")
    interleaved = activation_of(dact.op).interleaved
    require(not interleaved, "interleaved gate and up: expected a weight with the rows [gate | up]")
    decline(limits.why_not_blocks("in_features", fc.in_features))
    _check_epilogue("the gradient of the preactivation", quantizer.format)
    if columns is not None:
        _check_epilogue(COLUMNS, columns.format)
        require(columns.format.element == E4M3, "%s is %s: expected e4m3", COLUMNS, columns.format.element)


def _check_epilogue(name: str, format: Format) -> None:
    """Decline a format that the epilogue does not write."""
    require(format.rule is ScaleRule.POWER_OF_TWO, "%s has scales of any size: the epilogue has powers of two", name)
    require(not format.amax_epsilon, "amax_epsilon %s: the epilogue has no lower bound on amax", format.amax_epsilon)
