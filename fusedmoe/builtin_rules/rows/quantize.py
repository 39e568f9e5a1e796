"""``sm90.quantize``: codes and scales of rows, by rows, by columns, or both.

``sm90.quantize_grad``: the same for gradients. ``sm90.gathered_quantize`` and ``sm90.gathered_quantize_grad``: the same
for rows of another value, which the kernel reads through their index. ``sm90.gathered_quantize_columns``: such rows by
columns in the backward pass, so that the forward pass keeps their source in place of their columns.
``sm90.quantize_weight``: the same for weights, cached until the weight changes.

FP8 with blocks takes one launch: 1x128 blocks of rows and 128x128 blocks of weights with fp32 scales, and MXFP8. NVFP4,
and FP8 with one scale per row or tensor, take more: see `narrow_forms`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.guards import as_matrix
from fusedmoe.builtin_rules.products.fp8 import ROWS, WEIGHTS, Block, check_blocks
from fusedmoe.builtin_rules.requirements import OnSm90, ThroughIndex, decline
from fusedmoe.builtin_rules.rows.delayed import LAUNCHES_PER_STEP
from fusedmoe.builtin_rules.rows.narrow_forms import LAUNCHES_ON_SCALES, bind_forms, bind_weight_forms, is_narrow
from fusedmoe.fusion.language.rule import FusionRule, NothingToDo, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.quantize import block_functions
from fusedmoe.kernels.sm90 import limits
from fusedmoe.numerics.formats import QuantizedTensor, Quantizer
from fusedmoe.ops.glue import QuantizeWeight
from fusedmoe.ops.quantize import Quantize, QuantizeColumns, QuantizeGrad
from fusedmoe.ops.state.amax import Step as DelayedStep

GATHER_COST = (
    1.0  # as in order: both forms of 262144 x 2048 values take 0.61 ms through an index, and 0.60 ms without (H200)
)


def _check_format(quantizer: Quantizer | None, block: Block) -> None:
    """Decline a quantizer that no kernel has; ``block`` is that of FP8 with fp32 scales."""
    assert quantizer is not None, "otherwise there is no step"
    if is_narrow(quantizer.format, of_weights=block == WEIGHTS):
        return
    check_blocks(quantizer.format, block)
    require(not quantizer.hadamard, "no kernel rotates rows before it quantizes them yet: expected hadamard=False")


def _check(ctx: PlanContext, value: str, **widths: int) -> None:
    """Decline values that are not bf16 or fp16, and widths that the codes cannot have."""
    decline(limits.why_not_dtypes({value.rpartition(".")[2]: ctx.dtype(value)}))
    for name, width in widths.items():
        decline(limits.why_not_width_of_codes(name, width))


def _launches(quantizer: Quantizer | None) -> int:
    """Return the number of kernels that one quantization takes in training; without delayed scaling, approximately."""
    assert quantizer is not None, "otherwise there is no step"
    if quantizer.format.block[1] is not None and not quantizer.format.tensor_scale:
        return 1
    on_scales = LAUNCHES_ON_SCALES if quantizer.delayed is None else LAUNCHES_PER_STEP + 1
    return on_scales + 2 * quantizer.stochastic_rounding


def _bind_rows(
    op: Quantize | QuantizeGrad,
    x: Tensor,
    offsets: Tensor | None,
    index: tuple[Tensor, ...],
    rows: bool,
    columns: bool,
    training: bool,
    zero_tail: bool,
) -> Run:
    """Return a function of ``(x, offsets, *index)`` that returns the tensors of each form."""
    quantizer = op.quantizes
    assert quantizer is not None, "otherwise there is no step"
    if is_narrow(quantizer.format):
        axes = [axis for axis, wanted in ((-1, rows), (-2, columns)) if wanted]
        run = bind_forms(x, quantizer, axes, offsets, *index, training=training)
        if quantizer.delayed is None:
            return run
        return lambda x, offsets, *index: run(x, offsets, *index, step=op.delayed_step(x, offsets, training))
    return block_functions.bind_quantize_rows(
        x, quantizer.format, offsets, *index, rows=rows, columns=columns, zero_tail=zero_tail
    )


def _flat(run: Run) -> Run:
    """Return a function of rows with more than one leading axis."""
    return lambda x, *others: run(x.flatten(0, -2), *others)


def _tensors(run: Run) -> Run:
    """Return a function that returns the tensors of all forms, one by one."""
    return lambda *tensors: tuple(t for form in run(*tensors) for t in form)


class QuantizeRows(OnSm90, FusionRule, name="sm90.quantize", direction="forward"):
    """Codes and scales of rows, in the forms that are read. Rows without an expert are not read."""

    quantize: Quantize

    def supports(self, ctx: PlanContext) -> None:
        _check_format(self.quantize.quantizer, ROWS)

    def offer(self, ctx: PlanContext) -> Step:
        _check(ctx, "input", features=ctx.spec("input").shape[-1])
        keeps = ("output:rows", "output:columns")
        launches = _launches(self.quantize.quantizer)
        return Step(needs=("input", "quantize.offsets"), gives=(), keeps=keeps, zeroes_tail=True, launches=launches)

    def bind(self, ctx: PlanContext, x: Tensor, offsets: Tensor | None, *index: Tensor) -> Run:
        guards.some_rows(x.numel())
        flat = as_matrix(x)
        guards.matrix("x", flat)
        guards.index(flat, index)
        rows, columns = (f"output:{form}" in ctx.keep for form in ("rows", "columns"))
        run = _bind_rows(self.quantize, flat, offsets, index, rows, columns, ctx.training, ctx.options.zero_tail)
        return _tensors(run if flat is x else _flat(run))


class GatheredQuantizeRows(ThroughIndex, QuantizeRows, name="sm90.gathered_quantize", direction="forward"):
    """`sm90.quantize` with ``x[index[r]]`` in place of ``x[r]``."""

    gathers = "input"
    gather_cost = GATHER_COST

    def offer(self, ctx: PlanContext) -> Step:
        step, rows, tokens = super().offer(ctx), ctx.spec("input").shape[0], ctx.spec("input:source").shape[0]
        assert self.quantize.quantizer is not None, "otherwise there is no step"
        # of row codes alone: those of tokens, and their copies
        copies = rows >= block_functions.TOKEN_READERS * tokens and not is_narrow(self.quantize.quantizer.format)
        return replace(step, launches=step.launches + copies)


class QuantizeGradient(OnSm90, FusionRule, name="sm90.quantize_grad", direction="backward"):
    """Codes and scales of a gradient, in the forms that are read. Rows without an expert are not read."""

    quantize: QuantizeGrad

    def supports(self, ctx: PlanContext) -> None:
        _check_format(self.quantize.quantizes, ROWS)

    def offer(self, ctx: PlanContext) -> Step:
        _check(ctx, "grad_output", features=ctx.spec("grad_output").shape[-1])
        keeps = ("grad_input:rows", "grad_input:columns")
        needs, launches = ("grad_output", "quantize.offsets"), _launches(self.quantize.quantizes)
        return Step(needs=needs, gives=(), keeps=keeps, zeroes_tail=True, launches=launches)

    def bind(self, ctx: PlanContext, dy: Tensor, offsets: Tensor | None, *index: Tensor) -> Run:
        guards.gradient(dy)
        guards.index(dy, index)
        flat = as_matrix(dy)
        rows, columns = (f"grad_input:{form}" in ctx.keep for form in ("rows", "columns"))
        run = _bind_rows(self.quantize, flat, offsets, index, rows, columns, True, ctx.options.zero_tail)
        run = guards.on_readable(flat, run)
        return _tensors(run if flat is dy else _flat(run))


class GatheredQuantizeGradient(
    ThroughIndex, QuantizeGradient, name="sm90.gathered_quantize_grad", direction="backward"
):
    """`sm90.quantize_grad` with ``dy[index[r]]`` in place of ``dy[r]``."""

    gathers = "grad_output"
    gather_cost = GATHER_COST


class GatheredQuantizeColumns(OnSm90, FusionRule, name="sm90.gathered_quantize_columns", direction="backward"):
    """Codes and scales of ``x[index[r]]`` by columns. Rows without an expert are not read."""

    quantize: QuantizeColumns
    gathers = "quantize.input"
    gather_cost = GATHER_COST

    def supports(self, ctx: PlanContext) -> None:
        quantizer = self.quantize.op.quantizer
        _check_format(quantizer, ROWS)
        require(_launches(quantizer) == 1, "its scales take more launches, which serve both forms in the forward pass")

    def offer(self, ctx: PlanContext) -> Step:
        _check(ctx, "quantize.input", features=ctx.spec("quantize.input").shape[-1])
        decline(limits.why_not_row_index(ctx.dtype("quantize.input:index")))
        needs = ("quantize.input:source", "quantize.offsets", "quantize.input:index")
        return Step(needs=needs, gives=("quantize.columns",), zeroes_tail=True, gather_cost=self.gather_cost)

    def bind(self, ctx: PlanContext, source: Tensor, offsets: Tensor | None, index: Tensor) -> Run:
        guards.index(source, (index,))
        guards.matrix("x", source)
        run = _bind_rows(
            self.quantize.op, source, offsets, (index,), rows=False, columns=True, training=ctx.training,
            zero_tail=ctx.options.zero_tail,
        )  # fmt: skip
        return _tensors(run)


class QuantizeWeights(OnSm90, FusionRule, name="sm90.quantize_weight", direction="forward"):
    """Codes and scales of a layer's weight, in the forms that are read, cached until the weight changes."""

    quantize: QuantizeWeight

    def supports(self, ctx: PlanContext) -> None:
        _check_format(self.quantize.run.quantizer, WEIGHTS)

    def offer(self, ctx: PlanContext) -> Step:
        out_features, in_features = ctx.spec("quantize.weight").shape[-2:]
        _check(ctx, "quantize.weight", in_features=in_features, out_features=out_features)
        keeps, launches = ("quantize.output:rows", "quantize.output:columns"), _launches(self.quantize.run.quantizer)
        return Step(needs=("quantize.weight",), gives=(), keeps=keeps, launches=launches)

    def bind(self, ctx: PlanContext, weight: Tensor) -> Run:
        if not weight.numel():
            raise NothingToDo("an empty weight")
        guards.matrix("the weight", weight, transposed=True)
        cached, training = self.quantize.run, ctx.training
        format = cached.quantizer.format
        axes = tuple(-1 if name.endswith(":rows") else -2 for name in ctx.keep)
        if is_narrow(format, of_weights=True):
            kernel: Run = bind_weight_forms(weight, cached.quantizer, axes, training)
        else:
            quantize = block_functions.bind_quantize_weight(weight, format, rows=-1 in axes, columns=-2 in axes)
            kernel = lambda weight, step: quantize(weight)  # noqa: E731

        def forms(weight: Tensor, step: DelayedStep | None) -> list[QuantizedTensor]:
            each = zip(axes, kernel(weight, step), strict=True)
            shape, dtype = tuple(weight.shape), weight.dtype
            return [
                QuantizedTensor(data, scale, format, axis, shape, dtype, *tensor_scale)
                for axis, (data, scale, *tensor_scale) in each
            ]

        by = self.name, forms
        return lambda weight: cached.tensors(weight, axes=axes, training=training, by=by)
