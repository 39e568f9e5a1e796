"""``sm100.quantize``: codes and scales of rows in the packed layout, by rows, by columns, or both.

``sm100.quantize_grad``: the same for gradients. ``sm100.gathered_quantize`` and ``sm100.gathered_quantize_grad``: the
same for rows of another value, which the kernel reads through their index. ``sm100.quantize_weight``: the same for
weights, cached until the weight changes.

MXFP8 takes one launch. NVFP4 takes more: see `nvfp4_forms`.
"""

from __future__ import annotations

from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.requirements import OnSm100, ThroughIndex, name_of
from fusedmoe.builtin_rules.sm100.nvfp4_forms import (
    LAUNCHES_TO_PACK_WEIGHT,
    bind_packed_forms,
    bind_packed_weight_forms,
    extra_bytes,
    launches_of,
)
from fusedmoe.builtin_rules.sm100.packed import MOST_EXPERTS, WIDTH, check_quantizer, is_halved
from fusedmoe.fusion.language.rule import FusionRule, NothingToDo, PlanContext, Run, Step, require
from fusedmoe.kernels.sm100 import quantize_functions
from fusedmoe.numerics.formats import E2M1, Quantizer
from fusedmoe.numerics.formats.packed import PACKED_FEATURES, Packed, PackedTensor
from fusedmoe.ops.glue import QuantizeWeight
from fusedmoe.ops.quantize import Quantize, QuantizeGrad
from fusedmoe.ops.state.amax import Step as DelayedStep


class PackedQuantize(OnSm100, FusionRule, name="sm100.quantize", direction="forward"):
    """Codes and scales of rows in the packed layout, in the forms that are read."""

    quantize: Quantize

    def supports(self, ctx: PlanContext) -> None:
        check_quantizer(self.quantize.quantizer)

    def offer(self, ctx: PlanContext) -> Step:
        return _step(ctx, self.quantize.quantizer, "input", "output")

    def bind(self, ctx: PlanContext, x: Tensor, offsets: Tensor, *index: Tensor) -> Run:
        guards.some_rows(x.numel())
        guards.matrix("x", x)
        guards.index(x, index)
        return _bind_forms(ctx, self.quantize.quantizer, "output", x, offsets, *index)


class PackedQuantizeGradient(OnSm100, FusionRule, name="sm100.quantize_grad", direction="backward"):
    """Codes and scales of a gradient in the packed layout, in the forms that are read."""

    quantize: QuantizeGrad

    def supports(self, ctx: PlanContext) -> None:
        check_quantizer(self.quantize.quantizes)

    def offer(self, ctx: PlanContext) -> Step:
        return _step(ctx, self.quantize.quantizes, "grad_output", "grad_input")

    def bind(self, ctx: PlanContext, dy: Tensor, offsets: Tensor, *index: Tensor) -> Run:
        guards.gradient(dy)
        guards.index(dy, index)
        return guards.on_readable(dy, _bind_forms(ctx, self.quantize.quantizes, "grad_input", dy, offsets, *index))


class GatheredPackedQuantize(ThroughIndex, PackedQuantize, name="sm100.gathered_quantize", direction="forward"):
    """`sm100.quantize` with ``x[index[r]]`` in place of ``x[r]``."""

    gathers = "input"
    gather_cost = 1.0


class GatheredPackedQuantizeGradient(
    ThroughIndex, PackedQuantizeGradient, name="sm100.gathered_quantize_grad", direction="backward"
):
    """`sm100.quantize_grad` with ``dy[index[r]]`` in place of ``dy[r]``."""

    gathers = "grad_output"
    gather_cost = 1.0


class PackedQuantizeWeight(OnSm100, FusionRule, name="sm100.quantize_weight", direction="forward"):
    """Codes and scales of a layer's weight in the packed layout, cached until the weight changes."""

    quantize: QuantizeWeight

    def supports(self, ctx: PlanContext) -> None:
        check_quantizer(self.quantize.run.quantizer)

    def offer(self, ctx: PlanContext) -> Step:
        spec, dtype = ctx.spec("quantize.weight"), name_of(ctx.dtype("quantize.weight"))
        require(self.quantize.packs, "one weight for all rows has no packed layout")
        require(dtype in ("bfloat16", "float16"), "the weight is %s, not bfloat16 or float16", dtype)
        for name, width in zip(("out_features", "in_features"), spec.shape[-2:], strict=True):
            require(width % WIDTH == 0, "%s %d is not a multiple of %d", name, width, WIDTH)
        launches = 1
        if self.quantize.run.quantizer.format.element == E2M1:
            launches = launches_of(self.quantize.run.quantizer) + LAUNCHES_TO_PACK_WEIGHT
        return Step(needs=("quantize.weight",), gives=(), keeps=tuple(_AXES), launches=launches)

    def bind(self, ctx: PlanContext, weight: Tensor) -> Run:
        if not weight.numel():
            raise NothingToDo("an empty weight")
        cached, training, halves = self.quantize.run, ctx.training, is_halved(ctx, "quantize.output:packed")
        axes = tuple(Packed(_AXES[name], halves) for name in ctx.keep)
        if cached.quantizer.format.element == E2M1:
            guards.matrix("the weight", weight, transposed=True)
            kernel: Run = bind_packed_weight_forms(weight, cached.quantizer, [form.axis for form in axes], halves)
        else:
            guards.matrix("the weight", weight)
            rows, columns = Packed(-1, halves) in axes, Packed(-2, halves) in axes
            kernel = quantize_functions.bind_quantize_packed_weight(weight, halves=halves, rows=rows, columns=columns)

        def forms(weight: Tensor, step: DelayedStep | None) -> list[PackedTensor]:
            return [PackedTensor(*form) for form in kernel(weight)]

        by = self.name, forms
        return lambda weight: cached.tensors(weight, axes=axes, training=training, by=by)


_AXES = {"quantize.output:packed": -1, "quantize.output:packed_columns": -2}


def _bind_forms(
    ctx: PlanContext, quantizer: Quantizer | None, made: str, x: Tensor, offsets: Tensor, *index: Tensor
) -> Run:
    """Return a function of tensors like these: the tensors of the forms of the value ``made`` that are read."""
    assert quantizer is not None, "otherwise there is no step"
    rows, columns = (f"{made}:{form}" in ctx.keep for form in ("packed", "packed_columns"))
    halves = is_halved(ctx, f"{made}:packed")
    if quantizer.format.element == E2M1:
        run: Run = bind_packed_forms(x, quantizer, offsets, *index, rows=rows, columns=columns, halves=halves)
    else:
        run = quantize_functions.bind_quantize_packed(x, offsets, *index, rows=rows, columns=columns, halves=halves)
    return lambda x, offsets, *index: tuple(t for form in run(x, offsets, *index) for t in form)


def _step(ctx: PlanContext, quantizer: Quantizer | None, read: str, made: str) -> Step:
    assert quantizer is not None, "otherwise there is no step"
    nvfp4 = quantizer.format.element == E2M1
    spec, dtype = ctx.spec(read), name_of(ctx.dtype(read))
    require(ctx.exists("quantize.offsets"), "rows without experts have no packed layout")
    require(len(spec.shape) == 2, "rows have %d dimensions, not 2", len(spec.shape))
    require(dtype in ("bfloat16", "float16"), "rows are %s, not bfloat16 or float16", dtype)
    multiple = WIDTH if nvfp4 else PACKED_FEATURES * (2 if is_halved(ctx, f"{made}:packed") else 1)
    require(spec.shape[1] % multiple == 0, "%d features are not a multiple of %d", spec.shape[1], multiple)
    experts = ctx.spec("quantize.offsets").shape[0]
    require(experts <= MOST_EXPERTS, "%d experts, over %d", experts, MOST_EXPERTS)
    keeps, needs = (f"{made}:packed", f"{made}:packed_columns"), (read, "quantize.offsets")
    if not nvfp4:
        return Step(needs=needs, gives=(), keeps=keeps, zeroes_tail=True)
    extra = extra_bytes(quantizer, spec.shape[0] * spec.shape[1])
    launches = launches_of(quantizer)
    return Step(needs=needs, gives=(), keeps=keeps, zeroes_tail=True, launches=launches, extra_bytes=extra)
