"""``sm90.fp8_grouped_dgrad_activation``: the gradient of a grouped linear layer's rows, through the row scale and the
activation before the layer, with FP8 operands; with the quantization of the result in its epilogue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from fusedmoe.builtin_rules.products.fp8 import (
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
from fusedmoe.builtin_rules.requirements import Run, activation_of, converts, decline, guard_matrix
from fusedmoe.fusion.language.rule import Bind, FusionRule, PlanContext, Step, require
from fusedmoe.kernels.sm90 import limits, products, scaled_products
from fusedmoe.numerics.formats import E4M3, QuantizedSpec, ScaleRule
from fusedmoe.ops.glu import DGeGLU, DReGLU, DSwiGLU
from fusedmoe.ops.grouped_linear import Dgrad
from fusedmoe.ops.quantize import QuantizeGrad
from fusedmoe.ops.scale import DScale, ScaleGrad
from fusedmoe.ops.squared_relu import DSquaredReLU

if TYPE_CHECKING:
    from fusedmoe.numerics.formats import Format

COLUMNS = "dgrad.input:columns"
FORMS = ("grad_input:rows", "grad_input:columns", COLUMNS)

_Results = tuple[tuple[Tensor | None, ...], Tensor | None, tuple[Tensor | None, ...]]
"""The values that the step gives, except the row scale's gradient; that gradient; and the values that it keeps."""
_Product = Callable[..., _Results]
_Derivative = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], _Product]
"""Binds to ``(dy, weight, offsets, preactivation, factor)`` a function of all tensors of the step."""


def _columns(ctx: PlanContext) -> QuantizedSpec | None:
    """Return the spec of the layer's input by columns; None if the input is not quantized, or has one scale per expert:
    then the forward pass makes both forms, since delayed scaling knows their scales only there.
    """
    spec = ctx.spec(COLUMNS) if ctx.exists(COLUMNS) and not by_expert(ctx, COLUMNS) else None
    return spec if isinstance(spec, QuantizedSpec) else None


def _check_epilogue(name: str, format: Format) -> None:
    """Decline a format that the epilogue does not write."""
    require(format.rule is ScaleRule.POWER_OF_TWO, "%s has scales of any size: the epilogue has powers of two", name)
    require(not format.amax_epsilon, "amax_epsilon %s: the epilogue has no lower bound on amax", format.amax_epsilon)


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
    dact: DSwiGLU | DGeGLU | DReGLU | DSquaredReLU
    quantize: QuantizeGrad | None

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "grad_output", "dgrad.weight", gradient=True)
        columns = _columns(ctx)
        if columns is not None:
            check_blocks(columns.format, ROWS)
            require(not columns.rotated, "%s is rotated: expected hadamard=False", COLUMNS)
        if self.quantize is not None:
            quantizer = self.quantize.quantizes
            assert quantizer is not None, "otherwise there is no step"
            check_blocks(quantizer.format, ROWS)
            require(not quantizer.hadamard, "the gradient of the preactivation is rotated: expected hadamard=False")

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.dgrad.op
        operands = "grad_output", "dgrad.weight"
        check_values(ctx, *operands, "dact.input", in_features=fc.in_features, out_features=fc.out_features)
        gives: list[str] = []
        keeps: tuple[str, ...]
        launches = 1
        if self.dscale is not None:
            factor = ctx.dtype("dscale.factor")
            decline(limits.why_not_row_scale(factor))
            launches += converts(factor)
            if self.scale_grad is not None:
                gives.append(f"scale_grad.{self.scale_grad.gives[0]}")
                launches += 1 + converts(factor)
        columns = _columns(ctx)
        if self.quantize is None:
            gives.insert(0, "grad_input")
            recomputed = "dact.output" if self.dscale is None else "dscale.output"
            keeps = (recomputed,) if columns is None else (COLUMNS, recomputed)
        else:
            self._check_codes(ctx, columns)
            keeps = FORMS if columns is not None else FORMS[:2]
        return Step(
            needs=(*operands, "offsets", "dact.input", "dscale.factor"),
            gives=tuple(gives),
            keeps=keeps,
            zeroes_tail=True,
            launches=launches,
        )

    def _check_codes(self, ctx: PlanContext, columns: QuantizedSpec | None) -> None:
        """Decline what the epilogue does not quantize."""
        assert self.quantize is not None
        assert self.quantize.quantizes is not None, "otherwise there is no step"
        unquantized = ctx.is_read_outside("quantize.grad_output")
        require(not unquantized, "the gradient of the preactivation is read unquantized too: the epilogue writes codes")
        interleaved = activation_of(self.dact.op).interleaved
        require(not interleaved, "interleaved gate and up: expected a weight with the rows [gate | up]")
        decline(limits.why_not_blocks("in_features", self.dgrad.op.in_features))
        _check_epilogue("the gradient of the preactivation", self.quantize.quantizes.format)
        if columns is not None:
            _check_epilogue(COLUMNS, columns.format)
            require(columns.format.element == E4M3, "%s is %s: expected e4m3", COLUMNS, columns.format.element)

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        derivative = self._values(ctx, keep) if self.quantize is None else self._codes(ctx, keep)

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
            product = derivative(dy, weight, offsets, preactivation, factor)
            dtype = None if factor is None else factor.dtype

            def run(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
                given, grad_factor, kept = product(*tensors)
                if grad_factor is not None and dtype is not None:
                    given = *given, grad_factor.to(dtype)
                return *given, *kept

            return on_readable_scales(run, dy_scale, weight_scale)

        return bind

    def _codes(self, ctx: PlanContext, keep: tuple[str, ...]) -> _Derivative:
        """Return the derivative that writes codes: it gives nothing else, and keeps the forms."""
        assert self.quantize is not None
        assert self.quantize.quantizes is not None, "otherwise there is no step"
        activation, options, scale_grad = activation_of(self.dact.op), ctx.options, self.scale_grad is not None
        quantized = fp8_of(self.quantize.quantizes.format)
        by_rows, by_columns, again = (name in keep for name in FORMS)

        def bind(dy: Tensor, weight: Tensor, offsets: Tensor, preactivation: Tensor, factor: Tensor | None) -> _Product:
            product = scaled_products.bind_block_scaled_gemm_activation_backward_codes(
                dy, weight, preactivation, factor, activation, quantized, (by_rows, by_columns, again), scale_grad,
                options,
            )  # fmt: skip

            def run(*tensors: Tensor | None) -> _Results:
                forms, grad_factor = product(*tensors)
                return (), grad_factor, tuple(t for form in forms for t in form)

            return run

        return bind

    def _values(self, ctx: PlanContext, keep: tuple[str, ...]) -> _Derivative:
        """Return the derivative that gives bf16, and keeps the layer's input by columns or unquantized."""
        activation, options, scale_grad = activation_of(self.dact.op), ctx.options, self.scale_grad is not None
        columns, tensor_scales = _columns(ctx) if COLUMNS in keep else None, by_expert(ctx, "grad_output")
        format = None if columns is None else fp8_of(columns.format)
        keeps_output = any(name != COLUMNS for name in keep)

        def bind(dy: Tensor, weight: Tensor, offsets: Tensor, preactivation: Tensor, factor: Tensor | None) -> _Product:
            product = scaled_products.bind_block_scaled_gemm_activation_backward(
                dy, weight, preactivation, factor, activation, bool(keep), scale_grad, options,
                by_expert=tensor_scales,
            )  # fmt: skip
            quantize = None
            if format is not None:
                like = preactivation.new_empty(preactivation.shape[0], weight.shape[1])
                quantize = products.bind_quantize_rows(like, format, offsets, rows=False, columns=True)

            def run(
                dy: Tensor, dy_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, *others: Tensor
            ) -> _Results:
                grad_preactivation, x, grad_factor = product(dy, dy_scale, weight, weight_scale, offsets, *others)
                kept = () if quantize is None else quantize(x, offsets)[0]
                return (grad_preactivation,), grad_factor, (*kept, x) if keeps_output else kept

            return run

        return bind
