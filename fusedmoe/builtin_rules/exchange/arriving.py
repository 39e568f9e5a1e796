"""Rules that compute while rows arrive from the other ranks of `ExpertParallel`.

- `sm90.gemm_activation_of_arriving_tokens`: the first layer, in an order in which rows arrive.
- `sm90.fp8_gemm_activation_of_arriving_tokens`: the same for tokens that travel as FP8 codes (``dispatch_dtype``). The
  codes are the operand of the product: a kernel writes them in the order of the experts, as they arrive.
- `sm90.dgrad_activation_of_arriving_gradients`: as the first, for the gradient of the second layer's rows.
- `sm90.gather_gradients_as_codes`: those gradients as FP8 codes (``dispatch_dtype``), without a product.

See `beside.py`.
"""

from typing import Any

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.exchange.beside import (
    DERIVATIVE_TFLOPS,
    FP8_TFLOPS,
    TFLOPS,
    Ranges,
    beside_exchange,
    experts_beside,
    is_quick,
    nbytes,
    own_rows_first,
    require_few_ranks,
    require_ranks,
    us_of_step,
)
from fusedmoe.builtin_rules.products.fp8 import (
    ROWS,
    OnFp8,
    are_readable,
    check_blocks,
    check_operands,
    of_codes,
)
from fusedmoe.builtin_rules.products.weight_gradient import of_rows
from fusedmoe.builtin_rules.requirements import (
    OnSm90,
    ThroughIndex,
    activation_of,
    check_bf16,
    check_common,
    check_dscale,
    check_row_scale,
    decline,
)
from fusedmoe.builtin_rules.rows.dispatch import require_row_dtype
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.expert_parallel.wire import FORMAT
from fusedmoe.fusion.language.rule import FusionRule, NothingToDo, PlanContext, Run, Step, require
from fusedmoe.kernels.exchange import functions as exchange_functions
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.rows.quantize import block_functions, format_functions
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.tiles.config import SCALE_BLOCK
from fusedmoe.ops.dispatch import DCombine, Dispatch
from fusedmoe.ops.exchange.fixed import DReturnTokens, GatherTokens
from fusedmoe.ops.glu import FusedActivation, FusedDerivative
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear, Wgrad, WgradIntoMainGrad
from fusedmoe.ops.quantize import Quantize
from fusedmoe.ops.scale import DScale, Scale, ScaleGrad


def _require_own_dtype(expert_parallel: ExpertParallel) -> None:
    wire = expert_parallel.dispatch_dtype
    require(wire is None, "rows arrive as codes of %s (dispatch_dtype), which the product does not read", wire)


def _check_routing(ctx: PlanContext, fc: GroupedLinear, scale: Scale | None) -> int:
    """Decline a routing by which no kernel sorts or scales rows; return the launches that convert the row scale."""
    decline(limits.why_not_routing(ctx.dtype("dispatch.expert_index"), fc.num_groups))
    decline(limits.why_not_row_scale(ctx.dtype("dispatch.expert_weight")))
    if scale is None:
        return 0
    require(ctx.same("scale.factor", "dispatch.probs"), "the row scale is not that of dispatch")
    return check_row_scale(ctx, "scale.factor")


def _fp32(factor: Tensor | None) -> Tensor | None:
    """Return a row scale as products read it.

    A step converts it before rows arrive. The product begins beside the copies of these rows only if no other kernel is
    between the two.
    """
    return None if factor is None else factor.float()


def _sent(expert_parallel: ExpertParallel, scale: Tensor) -> Tensor:
    """Return scales as an engine sends them: a kernel takes any strides, a collective none."""
    return scale if expert_parallel.engine.by_kernels else scale.contiguous()


def _codes_like(x: Tensor, rows: int) -> Codes:
    """Return codes and scales as those of this many rows like ``x`` that have travelled."""
    blocks = -(-x.shape[1] // SCALE_BLOCK)
    return Codes(
        x.new_empty(rows, x.shape[1], dtype=FORMAT.element.dtype), x.new_empty(rows, blocks, dtype=torch.float32)
    )


class GemmActivationOfArrivingTokens(
    OnSm90, FusionRule, name="sm90.gemm_activation_of_arriving_tokens", direction="forward"
):
    """The first layer with its activation, for the tokens of all ranks, while those of the others arrive."""

    gather: GatherTokens
    dispatch: Dispatch
    fc: GroupedLinear
    act: FusedActivation
    scale: Scale | None

    def offer(self, ctx: PlanContext) -> Step:
        require_ranks(self.gather)
        require_few_ranks(self.gather.expert_parallel)
        _require_own_dtype(self.gather.expert_parallel)
        counted = "local_rows" in self.dispatch.runtime_inputs
        require(not counted, "the host counts the rows of dispatch (overflow='rerun')")
        fc = self.fc
        check_common(ctx, "input", "fc.weight", in_features=fc.in_features)
        gated = activation_of(self.act).gated
        decline(limits.why_not_width("the activation's features", fc.out_features // (2 if gated else 1)))
        launches = 12 + _check_routing(ctx, fc, self.scale)
        tokens, rows = ctx.spec("gather.output"), ctx.spec("dispatch.output")
        return Step(
            needs=("input", *(f"gather.{name}" for name in self.gather.runtime_inputs), "fc.weight", "fc.bias"),
            gives=(
                *(f"gather.{name}" for name in self.gather.provides),
                *(f"dispatch.{name}" for name in (*self.dispatch.provides, "offsets")), "output",
            ),
            keeps=("gather.output", "act.input"),
            zeroes_tail=True,
            launches=launches,
            extra_bytes=nbytes(tokens) + int(ThroughIndex.gather_cost * nbytes(rows)),
        )  # fmt: skip

    def bind(self, ctx: PlanContext, x: Tensor, *given: Any) -> Run:
        gather, dispatch, keep = self.gather, self.dispatch, ctx.keep
        count, scaled, experts = len(gather.runtime_inputs), self.scale is not None, self.fc.num_groups
        keeps_p = "act.input" in keep
        weight, bias = given[count:]
        guards.matrix("the weight", weight, transposed=True)
        guards.contiguous("the bias", bias)
        like = (x.new_empty(s.shape, dtype=s.dtype) for s in gather.infer(x, *given[:count]))
        tokens, index, factor, *_ = like
        guards.some_rows(index.numel())
        room, total = dispatch.rows(index), index.shape[0]
        rows = index.view(-1)[:room]  # like the tokens of rows
        route = slot_functions.bind_route(index, factor, experts, num_rows=room)
        row_bytes, row_flops, chosen = x.shape[1] * x.itemsize, 2 * weight[0].numel(), index.shape[1]
        ep = gather.expert_parallel
        beside = experts_beside(ep, total, row_bytes, chosen, experts, row_flops, TFLOPS)
        # memory for E offsets, which may be more than there are rows
        offsets = rows.new_empty(experts)
        own_first = own_rows_first(ep, total, chosen, experts)
        ranges = Ranges(ep, offsets, rows, total, beside, ctx.options.zero_tail, own_first)
        factors = factor.new_empty(room, dtype=torch.float32) if scaled else None
        quick = is_quick(ep, us_of_step(ep, total, chosen, row_flops, TFLOPS))
        product = products.bind_grouped_gemm_activation(
            tokens, weight, bias, factors, activation_of(self.act), keeps_p, ctx.options, rows, ranges=not quick
        )

        def run(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
            weight, bias = given[count:]
            arriving = gather.start(x, *given[:count])
            index, expert_weight = gather.counted(arriving.wait(0)), arriving.wait(1)
            provided = route(index, expert_weight)
            _, probs, _, _, token_of_row, offsets = provided
            factors = _fp32(probs) if scaled else None
            tokens = arriving.wait(2) if quick else arriving.unfinished(2)
            parts = offsets if quick else ranges.arriving(offsets, token_of_row, arriving, 2)
            result = product(tokens, weight, bias, parts, factors, token_of_row)
            y, *p = result if keeps_p else (result,)
            kept = {"gather.output": tokens, "act.input": p[0] if p else None}
            return index, expert_weight, *gather.empty(x), *provided, y, *(kept[name] for name in keep)

        return run


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
        require(quantizer.format == FORMAT, "the product reads %s, and tokens travel as %s", quantizer.format, FORMAT)
        require(not quantizer.hadamard, "no kernel rotates rows before it quantizes them yet: expected hadamard=False")
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
        launches = 12 + _check_routing(ctx, fc, self.scale)
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
        beside = experts_beside(ep, total, row_bytes, chosen, experts, row_flops, FP8_TFLOPS)
        quick = not ep.engine.by_kernels or is_quick(ep, us_of_step(ep, total, chosen, row_flops, FP8_TFLOPS))
        ranges = None if quick else Ranges(ep, offsets, token_of_row, total, beside, ctx.options.zero_tail)
        codes, scale = _codes_like(x, total)
        slots = index.new_empty(index.shape, dtype=torch.int64)
        scatter = exchange_functions.bind_scatter(codes, scale, slots, ep.rank, ep.ranks, room)
        rows = codes.new_empty(room, x.shape[1], dtype=codes.dtype), block_functions.scale_like(x, room, x.shape[1])
        result = None if self.of_result is None or self.of_result.quantizer is None else self.of_result.quantizer.format
        operands = Codes(*rows), Codes(weight, weight_scale)
        factors = factor.new_empty(room, dtype=torch.float32) if scaled else None
        product = of_codes(
            products.bind_grouped_gemm_activation(
                *operands, bias, factors, activation_of(self.act), "act.input" in keep, ctx.options, quantized=result,
                ranges=not quick,
            ),
            *operands,
        )  # fmt: skip
        dequantize = format_functions.bind_dequantize(codes, scale, FORMAT)
        by_columns = None
        if "quantize.output:columns" in keep:
            by_columns = block_functions.bind_quantize_rows(
                tokens, FORMAT, offsets, token_of_row, rows=False, columns=True, zero_tail=ctx.options.zero_tail
            )

        def run(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
            weight, weight_scale, bias = given[count:]
            of_rank = None
            if quantize is not None:
                ((codes, scale),) = quantize(x)
                of_rank = [_sent(ep, scale), codes]
            of_gather = dict(zip(gather.runtime_inputs, given[:count], strict=True))
            arriving = gather.start(x, **of_gather, tokens=of_rank)
            index, expert_weight = gather.counted(arriving.wait(0)), arriving.wait(1)
            provided = route(index, expert_weight)
            _, probs, row_of_slot, _, token_of_row, offsets = provided
            factors = _fp32(probs) if scaled else None
            row_of_slot = row_of_slot.view(index.shape)
            parts: Any
            if ranges is None:
                scale, codes = arriving.wait(2), arriving.wait(3)
                rows, parts = scatter(codes, scale, row_of_slot), offsets
            else:
                scale, codes = arriving.unfinished(2), arriving.unfinished(3)
                rows, parts = ranges.scattered(offsets, token_of_row, row_of_slot, arriving, 2, scatter)
            results = product(*rows, weight, weight_scale, bias, parts, factors)
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


class DgradActivationOfArrivingGradients(
    OnSm90, FusionRule, name="sm90.dgrad_activation_of_arriving_gradients", direction="backward"
):
    """The gradients of the second layer and of the activation, while those of the results arrive."""

    dback: DReturnTokens
    dcombine: DCombine
    wgrad: Wgrad | WgradIntoMainGrad
    dgrad: Dgrad
    scale_grad: ScaleGrad | None
    dscale: DScale | None
    dact: FusedDerivative

    def offer(self, ctx: PlanContext) -> Step:
        require_ranks(self.dback.op)
        require_few_ranks(self.dback.op.expert_parallel)
        _require_own_dtype(self.dback.op.expert_parallel)
        require_row_dtype(self.dcombine.op)
        fc = self.dgrad.op
        operands = "grad_output", "dgrad.weight", "dact.input"
        check_common(ctx, *operands, in_features=fc.in_features, out_features=fc.out_features)
        require(self.dcombine.op.weights is None, "combine applies the routing weights")
        require(ctx.exists("dcombine.token_of_row"), "the rows are not those of a dispatch")
        of_scale, launches = check_dscale(ctx, self.scale_grad)
        tokens, rows, y = ctx.spec("dcombine.grad_output"), ctx.spec("dgrad.grad_output"), ctx.spec("dgrad.input")
        return Step(
            needs=(
                "grad_output", "dback.gathered_index", "dback.rank_experts", "dcombine.token_of_row", "dgrad.weight",
                "offsets", "dact.input", "dscale.factor",
            ),
            # the recomputed input of the layer too, though no other step reads it: the forward pass then need not keep
            # it for the plain steps
            gives=("grad_input", "wgrad.grad_weight", *of_scale, "dgrad.input"),
            zeroes_tail=True,
            launches=6 + launches,
            # the gathered gradients, read twice through an index, and the recomputed input of the layer
            extra_bytes=nbytes(tokens) + int(2 * ThroughIndex.gather_cost * nbytes(rows)) + nbytes(y),
        )  # fmt: skip

    def bind(
        self, ctx: PlanContext, dy: Tensor, gathered_index: Tensor, rank_experts: Tensor, token_of_row: Tensor,
        weight: Tensor, offsets: Tensor, preactivation: Tensor, factor: Tensor | None,
    ) -> Run:  # fmt: skip
        activation, options = activation_of(self.dact.op), ctx.options
        dtype, scale_grad = ctx.dtype("dgrad.weight"), self.scale_grad is not None
        dback, expert_parallel = self.dback, self.dback.op.expert_parallel
        tokens = gathered_index.shape[0]
        guards.some_rows(token_of_row.shape[0])
        guards.contiguous("a routing index", token_of_row)
        guards.matrix("the preactivation", preactivation)
        guards.matrix("the weight", weight, transposed=True)
        like = dy.new_empty(tokens, dy.shape[1])
        chosen, row_bytes, row_flops = gathered_index.shape[1], dy.shape[1] * dy.itemsize, 2 * weight[0].numel()
        divided = experts_beside(
            expert_parallel, tokens, row_bytes, chosen, weight.shape[0], row_flops, DERIVATIVE_TFLOPS
        )
        own_first = own_rows_first(expert_parallel, tokens, chosen, weight.shape[0])
        ranges = Ranges(expert_parallel, offsets, token_of_row, tokens, divided, options.zero_tail, own_first)
        beside = beside_exchange(options, expert_parallel)
        quick = is_quick(expert_parallel, us_of_step(expert_parallel, tokens, chosen, row_flops, DERIVATIVE_TFLOPS))
        factors = None if factor is None else torch.empty_like(factor, dtype=torch.float32)
        product = products.bind_grouped_gemm_activation_backward(
            like, weight, preactivation, factors, activation, True, scale_grad, beside, token_of_row, ranges=not quick
        )
        y = dy.new_empty(preactivation.shape[0], weight.shape[2])
        wgrad = of_rows(self.wgrad, dtype, options, "grad_output", False, like, y, offsets, token_of_row)

        def run(*tensors: Any) -> tuple[Tensor | None, ...]:
            dy, gathered_index, rank_experts, token_of_row, weight, offsets, preactivation, factor = tensors
            main_grad, factors = wgrad.main_grad(), _fp32(factor)
            arriving = dback.start(dy.contiguous(), gathered_index, rank_experts)
            gathered = arriving.wait(0) if quick else arriving.unfinished(0)
            parts = offsets if quick else ranges.arriving(offsets, token_of_row, arriving, 0)
            grad, y, grad_factor = product(gathered, weight, parts, preactivation, factors, token_of_row)
            assert y is not None
            grad_weight = wgrad(main_grad, gathered, y, offsets, token_of_row)
            if grad_factor is None or factor is None:
                return grad, grad_weight, y
            return grad, grad_weight, grad_factor.to(factor.dtype), y

        return run
