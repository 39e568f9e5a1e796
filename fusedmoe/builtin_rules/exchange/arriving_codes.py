"""Rules for rows that arrive from the other ranks of `ExpertParallel` as FP8 codes and scales (``dispatch_dtype``).

- `sm90.fp8_gemm_activation_of_arriving_tokens`: the first layer. The codes are the operand of the product. With engine
  "symmetric", a kernel writes them in the order of the experts as they arrive, and the product follows it.
- `sm90.fp8_dgrad_activation_of_arriving_gradients`: the same for the second layer's input gradient, with engine
  "symmetric".
- `sm90.gather_gradients_as_codes`: those gradients, without a product.

See `beside.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.exchange.arriving import as_fp32, check_routing
from fusedmoe.builtin_rules.exchange.beside import (
    FP8_DERIVATIVE_TFLOPS,
    FP8_TFLOPS,
    SM_GB_S,
    Ranges,
    experts_beside,
    is_quick,
    nbytes,
    require_few_ranks,
    require_ranks,
    us_of_step,
)
from fusedmoe.builtin_rules.products.dgrad_activation import (
    COLUMNS,
    FORMS,
    check_result_blocks,
    check_written_codes,
    recomputed_columns,
)
from fusedmoe.builtin_rules.products.fp8 import (
    MULTIPLIES_ROWS,
    ROWS,
    OnFp8,
    are_readable,
    check_blocks,
    check_operand,
    check_operands,
    readable_scale,
)
from fusedmoe.builtin_rules.products.weight_gradient import of_rows
from fusedmoe.builtin_rules.requirements import OnSm90, activation_of, check_bf16, check_dscale, decline
from fusedmoe.builtin_rules.rows.dispatch import require_row_dtype
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.expert_parallel.engine import Pending
from fusedmoe.expert_parallel.wire import FORMAT
from fusedmoe.fusion.language.rule import FusionRule, NothingToDo, PlanContext, Run, Step, require
from fusedmoe.kernels.exchange import functions as exchange_functions
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.rows.quantize import block_functions, format_functions
from fusedmoe.kernels.rows.quantize.block_functions import Form
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.kernels.sm90.launch import Codes, Part
from fusedmoe.kernels.sm90.tiles.config import SCALE_BLOCK
from fusedmoe.numerics.expert_rows import padded_rows
from fusedmoe.numerics.formats import Quantizer
from fusedmoe.ops.dispatch import DCombine, Dispatch
from fusedmoe.ops.exchange.fixed import DReturnTokens, GatherTokens
from fusedmoe.ops.glu import FusedActivation, FusedDerivative
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear, Wgrad, WgradIntoMainGrad
from fusedmoe.ops.quantize import Quantize, QuantizeGrad
from fusedmoe.ops.scale import DScale, Scale, ScaleGrad

DERIVATIVE_TILE = 256  # rows of a tile of `bind_grouped_gemm_activation_backward_codes`
LEAST_TILES = 1  # of an expert's own rows, on average, if that product follows the ranks


def _sent(expert_parallel: ExpertParallel, scale: Tensor) -> Tensor:
    """Return scales as an engine sends them: a kernel takes any strides, a collective none."""
    return scale if expert_parallel.engine.by_kernels else scale.contiguous()


def _codes_like(x: Tensor, rows: int) -> Codes:
    """Return codes and scales as those of this many rows like ``x`` that have travelled."""
    blocks = -(-x.shape[1] // SCALE_BLOCK)
    return Codes(
        x.new_empty(rows, x.shape[1], dtype=FORMAT.element.dtype), x.new_empty(rows, blocks, dtype=torch.float32)
    )


def _arrived(
    arriving: Pending, number: int, ranges: Ranges | None, scatter: Callable[..., Form], offsets: Tensor,
    token_of_row: Tensor, row_of_slot: Tensor,
) -> tuple[Tensor, Tensor, Codes, Tensor | list[Part]]:  # fmt: skip
    """Return the codes and scales of tokens, those of the rows, and the offsets of a product; or, with ``ranges``, the
    parts of a product that follows them. The tokens are then there after the product.

    - ``number``: as for `Ranges.scattered`.
    """
    if ranges is None:
        scale, codes = arriving.wait(number), arriving.wait(number + 1)
        return codes, scale, Codes(*scatter(codes, scale, row_of_slot)), offsets
    scale, codes = arriving.unfinished(number), arriving.unfinished(number + 1)
    rows, parts = ranges.scattered(offsets, token_of_row, row_of_slot, arriving, number, scatter)
    return codes, scale, Codes(*rows), parts


def _check_wire(quantizer: Quantizer, what: str) -> None:
    """Decline rows that the product reads in another format than that in which they travel."""
    format = quantizer.format
    require(format.rule is FORMAT.rule, "%s have scales of any size, and travel with powers of two", what)
    require(not format.amax_epsilon, "%s have amax_epsilon %s, and travel without it", what, format.amax_epsilon)
    require(format == FORMAT, "the product reads %s as %s, and they travel as %s", what, format, FORMAT)
    require(not quantizer.hadamard, "no kernel rotates rows before it quantizes them yet: expected hadamard=False")


def has_own_tiles(expert_parallel: ExpertParallel, tokens: int, chosen: int, experts: int) -> bool:
    """Whether an expert has a whole tile of own rows, on average: else the derivative has nothing to begin with."""
    return tokens * chosen / (expert_parallel.ranks**2 * experts) >= LEAST_TILES * DERIVATIVE_TILE


def us_of_copies(expert_parallel: ExpertParallel, tokens: int, row_bytes: int, chosen: int) -> float:
    """Return the time in which `Scatter`, beside a product, copies the rows of one rank's tokens."""
    ranks = expert_parallel.ranks
    read, written = min(1.0, chosen / ranks), chosen / ranks  # per token
    return tokens / ranks * (read + written) * row_bytes / (exchange_functions.SCATTER_SMS * SM_GB_S) / 1e3


class Fp8GemmActivationOfArrivingTokens(
    OnFp8, FusionRule, name="sm90.fp8_gemm_activation_of_arriving_tokens", direction="forward"
):
    """The first layer with its activation, in FP8, for the tokens of all ranks, which travel as codes and scales. These
    are the operand of the product: nothing quantizes the rows again, except for their form by columns.
    """

    gather: GatherTokens
    dispatch: Dispatch
    quantize: Quantize
    fc: GroupedLinear
    act: FusedActivation
    scale: Scale | None
    of_result: Quantize | None

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "fc.input", "fc.weight")
        quantizer = self.quantize.quantizer
        assert quantizer is not None, "otherwise there is no step"
        _check_wire(quantizer, "tokens")
        if self.of_result is not None and self.of_result.quantizer is not None:
            check_blocks(self.of_result.quantizer.format, ROWS)

    def offer(self, ctx: PlanContext) -> Step:
        expert_parallel = self.gather.expert_parallel
        require_ranks(self.gather)
        if expert_parallel.dispatch_dtype is None:
            raise NothingToDo("tokens travel in their own dtype (dispatch_dtype), and are quantized after that")
        if expert_parallel.engine.by_kernels:
            require_few_ranks(expert_parallel)
        counted = "local_rows" in self.dispatch.runtime_inputs
        require(not counted, "the host counts the rows of dispatch (overflow='rerun')")
        fc = self.fc
        self.check(ctx, "input", "fc.weight", in_features=fc.in_features, out_features=fc.out_features)
        activation = activation_of(self.act)
        require(not activation.interleaved, "interleaved gate and up: expected a weight with the rows [gate | up]")
        if activation.gated:
            decline(limits.why_not_blocks("half of out_features", fc.out_features // 2))
        launches = 12 + check_routing(ctx, fc, self.scale)
        quantizer = None if self.of_result is None else self.of_result.quantizer
        if quantizer is not None:
            epsilon = quantizer.format.amax_epsilon
            require(not epsilon, "amax_epsilon %s: the epilogue has no lower bound on amax", epsilon)
        rows = ctx.spec("fc.input")
        return Step(
            needs=("input", *(f"gather.{name}" for name in self.gather.runtime_inputs), "fc.weight", "fc.bias"),
            gives=(
                *(f"gather.{name}" for name in self.gather.provides),
                *(f"dispatch.{name}" for name in (*self.dispatch.provides, "offsets")),
                "output" if quantizer is None else "output:rows",
            ),
            keeps=("gather.output", "quantize.output:columns", "act.input"),
            zeroes_tail=True,
            launches=launches,
            extra_bytes=2 * nbytes(ctx.spec("gather.output")) + 3 * nbytes(rows),
        )  # fmt: skip

    def bind(self, ctx: PlanContext, x: Tensor, *given: Any) -> Run:
        gather, dispatch, keep = self.gather, self.dispatch, ctx.keep
        count, scaled, experts = len(gather.runtime_inputs), self.scale is not None, self.fc.num_groups
        weight, weight_scale, bias = given[count:]
        require(are_readable(weight), "codes have strides %s: expected rows of a multiple of 16 bytes", weight.stride())
        guards.contiguous("the bias", bias)
        quantize = None
        if x.numel():
            guards.matrix("x", x)
            quantize = block_functions.bind_quantize_rows(x, FORMAT)
        like = (x.new_empty(s.shape, dtype=s.dtype) for s in gather.infer(x, *given[:count]))
        tokens, index, factor, *_ = like
        guards.some_rows(index.numel())
        room, total, chosen = dispatch.rows(index), *index.shape
        token_of_row, offsets = index.view(-1)[:room], index.new_empty(experts)
        route = slot_functions.bind_route(index, factor, experts, num_rows=room)
        ep, row_flops = gather.expert_parallel, 2 * weight[0].numel()
        row_bytes = sum(t.nbytes for t in _codes_like(x, 1))
        more_us = us_of_copies(ep, total, row_bytes, chosen)
        beside = experts_beside(ep, total, row_bytes, chosen, experts, row_flops, FP8_TFLOPS, more_us)
        quick = not ep.engine.by_kernels or is_quick(ep, us_of_step(ep, total, chosen, row_flops, FP8_TFLOPS))
        ranges = None if quick else Ranges(ep, offsets, token_of_row, total, beside, ctx.options.zero_tail)
        codes, scale = _codes_like(x, total)
        slots = index.new_empty(index.shape, dtype=torch.int64)
        scatter = exchange_functions.bind_scatter(codes, scale, slots, ep.rank, ep.ranks, room)
        rows = codes.new_empty(room, x.shape[1], dtype=codes.dtype), block_functions.scale_like(x, room, x.shape[1])
        result = None if self.of_result is None or self.of_result.quantizer is None else self.of_result.quantizer.format
        of_weight = Codes(weight, readable_scale(weight_scale))
        factors = factor.new_empty(room, dtype=torch.float32) if scaled else None
        product = products.bind_grouped_gemm_activation(
            Codes(*rows), of_weight, bias, factors, activation_of(self.act), "act.input" in keep, ctx.options,
            quantized=result, ranges=not quick,
        )  # fmt: skip
        dequantize = format_functions.bind_dequantize(codes, scale, FORMAT)
        by_columns = None
        if "quantize.output:columns" in keep:
            by_columns = block_functions.bind_quantize_rows(
                tokens, FORMAT, offsets, token_of_row, rows=False, columns=True, zero_tail=ctx.options.zero_tail
            )

        def run(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
            weight, weight_scale, bias = given[count:]
            of_weight = Codes(weight, readable_scale(weight_scale))  # no launch may come before the product
            of_rank = None
            if quantize is not None:
                ((codes, scale),) = quantize(x)
                of_rank = [_sent(ep, scale), codes]
            of_gather = dict(zip(gather.runtime_inputs, given[:count], strict=True))
            arriving = gather.start(x, **of_gather, tokens=of_rank)
            index, expert_weight = gather.counted(arriving.wait(0)), arriving.wait(1)
            provided = route(index, expert_weight)
            _, probs, row_of_slot, _, token_of_row, offsets = provided
            factors = as_fp32(probs) if scaled else None
            row_of_slot = row_of_slot.view(index.shape)
            codes, scale, rows, parts = _arrived(arriving, 2, ranges, scatter, offsets, token_of_row, row_of_slot)
            results = product(rows, of_weight, bias, parts, factors)
            y, p = (results[:-1], results[-1:]) if "act.input" in keep else (results, ())
            kept = []
            if by_columns is not None or "gather.output" in keep:
                tokens = dequantize(codes, scale)
                kept += [tokens] if "gather.output" in keep else []
                kept += [] if by_columns is None else by_columns(tokens, offsets, token_of_row)[0]
            return index, expert_weight, *gather.empty(x), *provided, *y, *kept, *p

        return run


class GradientsAsCodes(OnSm90, FusionRule, name="sm90.gather_gradients_as_codes", direction="backward"):
    """The gradients of the results of all ranks, which travel as FP8 codes and scales."""

    back: DReturnTokens

    def offer(self, ctx: PlanContext) -> Step:
        require_ranks(self.back.op)
        expert_parallel = self.back.op.expert_parallel
        if expert_parallel.dispatch_dtype is None:
            raise NothingToDo("gradients travel in their own dtype (dispatch_dtype)")
        require(expert_parallel.combine_dtype is None, "the gradients are fp32 (combine_dtype)")
        check_bf16(ctx, "FP8", "grad_output")
        decline(limits.why_not_width_of_codes("features", ctx.spec("grad_output").shape[1]))
        return Step(
            needs=("grad_output", "back.gathered_index", "back.rank_experts"),
            gives=("grad_input",),
            zeroes_tail=True,
            launches=5,  # no extra bytes: the plain step moves more, and its estimate has none
        )

    def bind(self, ctx: PlanContext, dy: Tensor, gathered_index: Tensor, rank_experts: Tensor) -> Run:
        guards.gradient(dy)
        back, total = self.back, gathered_index.shape[0]
        quantize = guards.on_readable(dy, block_functions.bind_quantize_rows(dy, FORMAT))
        codes, scale = _codes_like(dy, total)
        dequantize = format_functions.bind_dequantize(codes, scale, FORMAT)

        def run(dy: Tensor, gathered_index: Tensor, rank_experts: Tensor) -> Tensor:
            ((codes, scale),) = quantize(dy)
            scale = _sent(back.op.expert_parallel, scale)
            scale, codes = back.start(dy, gathered_index, rank_experts, [scale, codes]).wait_all()
            return dequantize(codes, scale)

        return run


class Fp8DgradActivationOfArrivingGradients(
    OnFp8, FusionRule, name="sm90.fp8_dgrad_activation_of_arriving_gradients", direction="backward"
):
    """The gradients of the second layer and of the activation in FP8, while codes of the results' gradients arrive. The
    codes are the operand of the product, which follows the rows of each rank. The weight gradient comes after it:
    its operand is quantized again by columns, from these codes.
    """

    dback: DReturnTokens
    dcombine: DCombine
    quantize: QuantizeGrad
    wgrad: Wgrad | WgradIntoMainGrad
    dgrad: Dgrad
    scale_grad: ScaleGrad | None
    dscale: DScale | None
    dact: FusedDerivative
    of_result: QuantizeGrad

    @property
    def _quantizer(self) -> Quantizer:
        """That of the gradient of the preactivation."""
        assert self.of_result.quantizes is not None, "otherwise there is no step"
        return self.of_result.quantizes

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "dgrad.grad_output", "dgrad.weight", gradient=True)
        quantizer = self.quantize.quantizes
        assert quantizer is not None, "otherwise there is no step"
        _check_wire(quantizer, "gradients")
        for name in ("wgrad.grad_output", "wgrad.input"):
            spec = check_operand(ctx, name, ROWS, MULTIPLIES_ROWS)
            require(not spec.rotated, "%s is rotated: expected hadamard=False", name)
        check_result_blocks(recomputed_columns(ctx), self._quantizer)

    def offer(self, ctx: PlanContext) -> Step:
        expert_parallel, fc, columns = self.dback.op.expert_parallel, self.dgrad.op, recomputed_columns(ctx)
        require_ranks(self.dback.op)
        if expert_parallel.dispatch_dtype is None:
            raise NothingToDo("gradients travel in their own dtype (dispatch_dtype), and are quantized after that")
        if not expert_parallel.engine.by_kernels:
            raise NothingToDo("only with engine 'symmetric' does a product follow rows in FP8")
        require_few_ranks(expert_parallel)
        require(expert_parallel.combine_dtype is None, "the gradients are fp32 (combine_dtype)")
        require_row_dtype(self.dcombine.op)
        require(self.dcombine.op.weights is None, "combine applies the routing weights")
        names = ("row_of_slot", "token_of_row")
        require(all(ctx.exists(f"dcombine.{name}") for name in names), "the rows are not those of a dispatch")
        operands = "grad_output", "dgrad.weight", "dact.input"
        self.check(ctx, *operands, in_features=fc.in_features, out_features=fc.out_features)
        require(columns is not None, "the layer's input is not quantized by columns in backward")
        unquantized = ctx.is_read_outside("of_result.grad_output")
        check_written_codes(fc, self.dact, self._quantizer, columns, unquantized)
        of_scale, launches = check_dscale(ctx, self.scale_grad)
        tokens, rows = ctx.spec("dcombine.grad_output"), ctx.spec("dgrad.grad_output")
        return Step(
            needs=(
                "grad_output", "dback.gathered_index", "dback.rank_experts",
                *(f"dcombine.{name}" for name in names), "dgrad.weight", "offsets", "dact.input", "dscale.factor",
            ),
            # the recomputed input of the layer too: see `DgradActivationOfArrivingGradients`
            gives=("wgrad.grad_weight", *of_scale, COLUMNS),
            keeps=FORMS[:2],
            zeroes_tail=True,
            launches=7 + launches,
            # the gathered codes, and both forms of their rows; not the copies of codes, which run beside the product
            extra_bytes=nbytes(tokens) + 3 * nbytes(rows),
        )  # fmt: skip

    def bind(
        self, ctx: PlanContext, dy: Tensor, gathered_index: Tensor, rank_experts: Tensor, row_of_slot: Tensor,
        token_of_row: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, preactivation: Tensor,
        factor: Tensor | None,
    ) -> Run:  # fmt: skip
        guards.some_rows(token_of_row.shape[0])
        guards.contiguous("a routing index", token_of_row, row_of_slot)
        guards.matrix("the preactivation", preactivation)
        guards.plain("the gradient", dy)
        require(are_readable(weight), "codes have strides %s: expected rows of a multiple of 16 bytes", weight.stride())
        dback, ep, zero_tail = self.dback, self.dback.op.expert_parallel, ctx.options.zero_tail
        quantize = guards.on_readable(dy, block_functions.bind_quantize_rows(dy, FORMAT)) if dy.numel() else None
        (every, chosen), (experts, features, hidden), room = gathered_index.shape, weight.shape, len(token_of_row)
        row_flops, row_bytes = 2 * weight[0].numel(), sum(t.nbytes for t in _codes_like(dy, 1))
        more_us = us_of_copies(ep, every, row_bytes, chosen)
        divided = experts_beside(ep, every, row_bytes, chosen, experts, row_flops, FP8_DERIVATIVE_TFLOPS, more_us)
        quick = is_quick(ep, us_of_step(ep, every, chosen, row_flops, FP8_DERIVATIVE_TFLOPS))
        quick |= not has_own_tiles(ep, every, chosen, experts)
        ranges = None
        if not quick:
            ranges = Ranges(
                ep, offsets, token_of_row, every, divided, zero_tail, tile=DERIVATIVE_TILE, paddings=True
            )  # fmt: skip
        codes, scale = _codes_like(dy, every)
        scatter = exchange_functions.bind_scatter(codes, scale, row_of_slot, ep.rank, ep.ranks, room)
        rows = codes.new_empty(room, hidden, dtype=codes.dtype), block_functions.scale_like(dy, room, hidden)
        by_rows, by_columns = (name in ctx.keep for name in FORMS[:2])
        of_weight, of_scale = Codes(weight, readable_scale(weight_scale)), self.scale_grad is not None
        factors = None if factor is None else torch.empty_like(factor, dtype=torch.float32)
        product = products.bind_grouped_gemm_activation_backward_codes(
            Codes(*rows), of_weight, preactivation, factors, activation_of(self.dact.op), self._quantizer.format,
            (by_rows, by_columns, True), of_scale, ctx.options, ranges=not quick,
        )  # fmt: skip
        quantize_columns = block_functions.bind_quantize_columns_of_codes(codes, scale, offsets, token_of_row)
        padded = padded_rows(room, experts, SCALE_BLOCK)
        like = (
            Codes(codes.new_empty(width, padded), block_functions.scale_like(dy, width, padded))
            for width in (hidden, features)
        )
        wgrad = of_rows(self.wgrad, ctx.dtype("wgrad.grad_output"), ctx.options, None, False, *like, offsets)

        def run(*tensors: Any) -> tuple[Tensor | None, ...]:
            dy, gathered_index, rank_experts, row_of_slot, token_of_row, weight, weight_scale, *others = tensors
            offsets, preactivation, factor = others
            main_grad, factors, of_rank = wgrad.main_grad(), as_fp32(factor), None
            of_weight = Codes(weight, readable_scale(weight_scale))  # no launch may come before the product
            if quantize is not None:
                ((codes, scale),) = quantize(dy)
                of_rank = [scale, codes]
            arriving = dback.start(dy, gathered_index, rank_experts, of_rank)
            codes, scale, rows, parts = _arrived(arriving, 0, ranges, scatter, offsets, token_of_row, row_of_slot)
            forms, grad_factor = product(rows, of_weight, parts, preactivation, factors)
            *of_grad, again = forms
            columns = quantize_columns(codes, scale, offsets, token_of_row)
            grad_weight = wgrad(main_grad, Codes(*columns), Codes(*again), offsets)
            of_factor = () if grad_factor is None or factor is None else (grad_factor.to(factor.dtype),)
            return grad_weight, *of_factor, *again, *(t for form in of_grad for t in form)

        return run
