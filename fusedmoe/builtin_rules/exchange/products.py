"""Rules that compute while rows travel between the ranks of `ExpertParallel`.

- `sm90.gemm_activation_of_arriving_tokens`: the first layer begins with the row tiles of this rank's own tokens.
- `sm90.fp8_gemm_activation_of_arriving_tokens`: the same for tokens that travel as FP8 codes (``dispatch_dtype``). The
  codes are the operand of the product: a kernel writes them in the order of the experts, as they arrive.
- `sm90.gemm_of_leaving_rows`: the second layer begins with the tiles of other ranks' tokens, whose sums then leave.
- `sm90.dgrad_activation_of_arriving_gradients`: as the first, for the gradient of the second layer's rows.
- `sm90.gather_gradients_as_codes`: those gradients as FP8 codes (``dispatch_dtype``), without a product.
- `sm90.wgrad_beside_exchange`: the gradient of the tokens leaves beside the weight gradient of the first layer.

A product then computes the rows in parts, by the ranks of their tokens, in whole tiles: it has the same tiles as
otherwise, so that the results have the same bits (kernels/rows/move/ranges.py). A step makes the same exchanges as the
plain steps, in the same order. So it does not matter if the ranks choose different steps.

With an engine whose exchanges are kernels (``by_kernels``), a product begins beside the kernel of an exchange, on the
SMs that this leaves, and gets the others when it ends. It follows arriving rows rank by rank. With another engine, the
product is launched once for this rank's rows, and once for the others when they are there. It then leaves some SMs to
the kernels of the exchange, except in the first rule: the expert ids, by which rows are sorted, have arrived, so these
kernels have their SMs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.exchange.beside import (
    DERIVATIVE_TFLOPS,
    FP8_TFLOPS,
    TFLOPS,
    Ranges,
    beside_exchange,
    bind_returns,
    experts_beside,
    is_quick,
    us_of_step,
)
from fusedmoe.builtin_rules.products.fp8 import (
    BY_EXPERT,
    MULTIPLIES_ROWS,
    ROWS,
    OnFp8,
    are_readable,
    by_expert,
    check_blocks,
    check_operand,
    check_operands,
    guard_codes,
    of_codes,
)
from fusedmoe.builtin_rules.products.weight_gradient import WeightGradient, of_rows
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
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.rows.move.functions import MOST_RANKS
from fusedmoe.kernels.rows.quantize import block_functions, format_functions
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.products import has_strides
from fusedmoe.numerics.formats import QuantizedSpec
from fusedmoe.ops.dispatch import Combine, DCombine, DDispatch, Dispatch, DispatchWeightGrad
from fusedmoe.ops.exchange.fixed import DGatherTokens, DReturnTokens, GatherTokens, ReturnTokens
from fusedmoe.ops.glu import FusedActivation, FusedDerivative
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear, Wgrad, WgradIntoMainGrad
from fusedmoe.ops.op import SpecLike, TensorSpec
from fusedmoe.ops.quantize import Quantize
from fusedmoe.ops.scale import DScale, Scale, ScaleGrad


def _nbytes(*specs: SpecLike) -> int:
    plain = [s if isinstance(s, QuantizedSpec) else TensorSpec(tuple(map(int, s.shape)), s.dtype) for s in specs]
    return sum(s.nbytes for s in plain)


def _require_ranks(op: GatherTokens | ReturnTokens) -> None:
    if op.expert_parallel.ranks == 1:
        raise NothingToDo("one rank exchanges nothing")


def _require_few_ranks(expert_parallel: ExpertParallel) -> None:
    ranks = expert_parallel.ranks
    require(ranks <= MOST_RANKS, "%d ranks: the kernel that divides rows by ranks has at most %d", ranks, MOST_RANKS)


def _require_returnable(ctx: PlanContext, expert_parallel: ExpertParallel, row_of_slot: str, scaled: bool) -> None:
    """Decline sums that the kernels of an engine do not return."""
    if expert_parallel.engine.by_kernels:
        chosen = ctx.spec(row_of_slot).shape[1]
        require(not scaled, "combine applies the routing weights, and engine 'symmetric' returns sums without weights")
        require(
            chosen <= limits.MOST_SLOTS_BESIDE,
            "%d experts per token, with engine 'symmetric' at most %d",
            chosen,
            limits.MOST_SLOTS_BESIDE,
        )


def _require_own_dtype(expert_parallel: ExpertParallel) -> None:
    wire = expert_parallel.dispatch_dtype
    require(wire is None, "rows arrive as codes of %s (dispatch_dtype), which the product does not read", wire)


class GemmActivationOfArrivingTokens(
    OnSm90, FusionRule, name="sm90.gemm_activation_of_arriving_tokens", direction="forward"
):
    """The first layer with its activation, for the tokens of all ranks: this rank's own while the others arrive."""

    gather: GatherTokens
    dispatch: Dispatch
    fc: GroupedLinear
    act: FusedActivation
    scale: Scale | None

    def offer(self, ctx: PlanContext) -> Step:
        _require_ranks(self.gather)
        _require_few_ranks(self.gather.expert_parallel)
        _require_own_dtype(self.gather.expert_parallel)
        counted = "local_rows" in self.dispatch.runtime_inputs
        require(not counted, "the host counts the rows of dispatch (overflow='rerun')")
        fc, launches = self.fc, 12
        check_common(ctx, "input", "fc.weight", in_features=fc.in_features)
        gated = activation_of(self.act).gated
        decline(limits.why_not_width("the activation's features", fc.out_features // (2 if gated else 1)))
        decline(limits.why_not_routing(ctx.dtype("dispatch.expert_index"), fc.num_groups))
        decline(limits.why_not_row_scale(ctx.dtype("dispatch.expert_weight")))
        if self.scale is not None:
            require(ctx.same("scale.factor", "dispatch.probs"), "the row scale is not that of dispatch")
            launches += check_row_scale(ctx, "scale.factor")
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
            extra_bytes=_nbytes(tokens) + int(ThroughIndex.gather_cost * _nbytes(rows)),
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
        ranges = Ranges(ep, offsets, rows, total, beside)
        factors = factor.view(-1)[:room] if scaled else None
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
            tokens = arriving.wait(2) if quick else arriving.unfinished(2)
            parts = offsets if quick else ranges.arriving(offsets, token_of_row, arriving, 2)
            result = product(tokens, weight, bias, parts, probs if scaled else None, token_of_row)
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
        _require_ranks(self.gather)
        if expert_parallel.dispatch_dtype is None:
            raise NothingToDo("tokens travel in their own dtype (dispatch_dtype), and are quantized after that")
        if expert_parallel.engine.by_kernels:
            _require_few_ranks(expert_parallel)
        counted = "local_rows" in self.dispatch.runtime_inputs
        require(not counted, "the host counts the rows of dispatch (overflow='rerun')")
        fc = self.fc
        self.check(ctx, "input", "fc.weight", in_features=fc.in_features, out_features=fc.out_features)
        activation = activation_of(self.act)
        require(not activation.interleaved, "interleaved gate and up: expected a weight with the rows [gate | up]")
        if activation.gated:
            decline(limits.why_not_blocks("half of out_features", fc.out_features // 2))
        decline(limits.why_not_routing(ctx.dtype("dispatch.expert_index"), fc.num_groups))
        decline(limits.why_not_row_scale(ctx.dtype("dispatch.expert_weight")))
        launches = 12
        if self.scale is not None:
            require(ctx.same("scale.factor", "dispatch.probs"), "the row scale is not that of dispatch")
            launches += check_row_scale(ctx, "scale.factor")
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
            extra_bytes=2 * _nbytes(ctx.spec("gather.output")) + 3 * _nbytes(rows),
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
        row_bytes = x.shape[1] + 4 * -(-x.shape[1] // 128)
        beside = experts_beside(ep, total, row_bytes, chosen, experts, row_flops, FP8_TFLOPS)
        quick = not ep.engine.by_kernels or is_quick(ep, us_of_step(ep, total, chosen, row_flops, FP8_TFLOPS))
        ranges = None if quick else Ranges(ep, offsets, token_of_row, total, beside)
        codes = x.new_empty(total, x.shape[1], dtype=FORMAT.element.dtype)
        scale = x.new_empty(total, -(-x.shape[1] // 128), dtype=torch.float32)
        slots = index.new_empty(index.shape, dtype=torch.int64)
        scatter = exchange_functions.bind_scatter(codes, scale, slots, ep.rank, ep.ranks, room)
        rows = codes.new_empty(room, x.shape[1], dtype=codes.dtype), block_functions.scale_like(x, room, x.shape[1])
        result = None if self.of_result is None or self.of_result.quantizer is None else self.of_result.quantizer.format
        operands = Codes(*rows), Codes(weight, weight_scale)
        product = of_codes(
            products.bind_grouped_gemm_activation(
                *operands, bias, factor.view(-1)[:room] if scaled else None, activation_of(self.act),
                "act.input" in keep, ctx.options, quantized=result, ranges=not quick,
            ),
            *operands,
        )  # fmt: skip
        dequantize = format_functions.bind_dequantize(codes, scale, FORMAT)
        by_columns = None
        if "quantize.output:columns" in keep:
            by_columns = block_functions.bind_quantize_rows(
                tokens, FORMAT, offsets, token_of_row, rows=False, columns=True
            )

        def run(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
            weight, weight_scale, bias = given[count:]
            of_rank = None
            if quantize is not None:
                ((codes, scale),) = quantize(x)
                of_rank = [scale.contiguous(), codes]
            of_gather = dict(zip(gather.runtime_inputs, given[:count], strict=True))
            arriving = gather.start(x, **of_gather, tokens=of_rank)
            index, expert_weight = gather.counted(arriving.wait(0)), arriving.wait(1)
            provided = route(index, expert_weight)
            _, probs, row_of_slot, _, token_of_row, offsets = provided
            row_of_slot = row_of_slot.view(index.shape)
            parts: Any
            if ranges is None:
                scale, codes = arriving.wait(2), arriving.wait(3)
                rows, parts = scatter(codes, scale, row_of_slot), offsets
            else:
                scale, codes = arriving.unfinished(2), arriving.unfinished(3)
                rows, parts = ranges.scattered(offsets, token_of_row, row_of_slot, arriving, 2, scatter)
            results = product(*rows, weight, weight_scale, bias, parts, probs if scaled else None)
            y, p = (results[:-1], results[-1:]) if "act.input" in keep else (results, ())
            kept = []
            if by_columns is not None or "gather.output" in keep:
                tokens = dequantize(codes, scale)
                kept += [tokens] if "gather.output" in keep else []
                kept += [] if by_columns is None else by_columns(tokens, offsets, token_of_row)[0]
            return index, expert_weight, *gather.empty(x), *provided, *y, *kept, *p

        return run


class _GemmOfLeavingRows(FusionRule, name="gemm_of_leaving_rows", direction="forward"):
    """The second layer, the sum per token, and the sum over ranks: first for the tokens of other ranks."""

    fc: GroupedLinear
    combine: Combine
    back: ReturnTokens
    check = staticmethod(check_common)  # `OnFp8` has another
    operands: ClassVar[int]  # the tensors of the product's operands and its bias
    tflops: ClassVar[int] = TFLOPS

    def offer(self, ctx: PlanContext) -> Step:
        _require_ranks(self.back)
        _require_few_ranks(self.back.expert_parallel)
        require_row_dtype(self.combine)
        fc, weights = self.fc, self.combine.applies
        self.check(ctx, "input", "fc.weight", in_features=fc.in_features, out_features=fc.out_features)
        for name in weights:
            decline(limits.why_not_row_scale(ctx.dtype(f"combine.{name}")))
        rows, parts = ctx.spec("combine.input"), ctx.spec("combine.output")
        names = ("row_of_slot", "token_of_row", *weights)
        require(all(ctx.exists(f"combine.{name}") for name in names), "the rows are not those of a dispatch")
        _require_returnable(ctx, self.back.expert_parallel, "combine.row_of_slot", bool(weights))
        return Step(
            needs=(
                "input", "fc.weight", "fc.bias", "offsets", "back.expert_index", "back.rank_experts",
                *(f"combine.{name}" for name in names),
            ),
            gives=("output",),
            keeps=("combine.input",),
            zeroes_tail=True,
            launches=8,
            extra_bytes=2 * _nbytes(rows) + 2 * _nbytes(parts),
        )  # fmt: skip

    def _bind(
        self, ctx: PlanContext, product: Callable[[KernelOptions, bool], Run], weight: Tensor, offsets: Tensor,
        expert_index: Tensor, row_of_slot: Tensor, token_of_row: Tensor, probs: Tensor | None = None,
    ) -> Run:  # fmt: skip
        """Return the step. ``product(options, ranges)`` is a function of the operands, the bias, the offsets or parts,
        two Nones, and the rows to write; see `products.bind_grouped_gemm`.
        """
        expert_parallel, options, keep = self.back.expert_parallel, ctx.options, ctx.keep
        guards.contiguous("a routing index", row_of_slot, token_of_row)
        (tokens, chosen), (experts, features, _), dtype = row_of_slot.shape, weight.shape, ctx.dtype("fc.output")
        row_bytes, row_flops = features * dtype.itemsize, 2 * weight[0].numel()
        divided = experts_beside(expert_parallel, tokens, row_bytes, chosen, experts, row_flops, self.tflops)
        ranges = Ranges(expert_parallel, offsets, token_of_row, tokens, divided)
        beside = beside_exchange(options, expert_parallel)
        us = us_of_step(expert_parallel, tokens, chosen, row_flops, self.tflops)
        quick, by_kernels = is_quick(expert_parallel, us), expert_parallel.engine.by_kernels
        of_others, of_own = (product(of_part, not quick) for of_part in (options, beside))
        count = token_of_row.shape[0]
        like = weight.new_empty(count, features, dtype=dtype)
        returns = bind_returns(expert_parallel, like, row_of_slot, probs, None, expert_index.shape[0])
        groups, operands = returns.groups(us), self.operands

        def run(*tensors: Any) -> Any:
            given, (offsets, _, _, row_of_slot, token_of_row, *factor) = tensors[:operands], tensors[operands:]
            probs = factor[0] if factor else None
            rows = token_of_row.new_empty(count, features, dtype=dtype)
            leaving = returns.begin(rows, row_of_slot, probs)
            if quick:
                of_own(*given, offsets, None, None, rows)
                leaving.leave(returns.steps)
            else:
                *others, own = ranges.leaving(offsets, token_of_row, groups, by_kernels)
                for part, steps in zip(others, groups, strict=True):
                    of_others(*given, [part], None, None, rows)
                    leaving.leave(steps)
                of_own(*given, [own], None, None, rows)
            y, _ = leaving.finish()
            return (y, rows) if keep else y

        return run


class GemmOfLeavingRows(OnSm90, _GemmOfLeavingRows, name="sm90.gemm_of_leaving_rows", direction="forward"):
    """The second layer in bf16."""

    operands = 3

    def bind(
        self, ctx: PlanContext, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, expert_index: Tensor,
        rank_experts: Tensor, *of_rows: Tensor,
    ) -> Run:  # fmt: skip
        guards.operands(x, weight, bias)

        def product(options: KernelOptions, ranges: bool) -> Run:
            return products.bind_grouped_gemm(x, weight, bias, None, options, ranges=ranges)

        return self._bind(ctx, product, weight, offsets, expert_index, *of_rows)


class Fp8GemmOfLeavingRows(OnFp8, _GemmOfLeavingRows, name="sm90.fp8_gemm_of_leaving_rows", direction="forward"):
    """The second layer of codes and scales; its results leave in bf16."""

    operands = 5
    tflops = FP8_TFLOPS

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "input", "fc.weight")

    def bind(
        self, ctx: PlanContext, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
        offsets: Tensor, expert_index: Tensor, rank_experts: Tensor, *of_rows: Tensor,
    ) -> Run:  # fmt: skip
        guard_codes(x, weight)
        guards.contiguous("the bias", bias)
        operands = Codes(x, x_scale), Codes(weight, weight_scale)

        def product(options: KernelOptions, ranges: bool) -> Run:
            return of_codes(products.bind_grouped_gemm(*operands, bias, None, options, ranges=ranges), *operands)

        return self._bind(ctx, product, weight, offsets, expert_index, *of_rows)


class GradientsAsCodes(OnSm90, FusionRule, name="sm90.gather_gradients_as_codes", direction="backward"):
    """The gradients of the results of all ranks, which travel as FP8 codes and scales."""

    back: DReturnTokens

    def offer(self, ctx: PlanContext) -> Step:
        _require_ranks(self.back.op)
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
            launches=5,
            extra_bytes=_nbytes(ctx.spec("grad_output")) + _nbytes(ctx.spec("grad_input")),  # codes
        )

    def bind(self, ctx: PlanContext, dy: Tensor, gathered_index: Tensor, rank_experts: Tensor) -> Run:
        guards.gradient(dy)
        back, total = self.back, gathered_index.shape[0]
        quantize = guards.on_readable(dy, block_functions.bind_quantize_rows(dy, FORMAT))
        codes = dy.new_empty(total, dy.shape[1], dtype=FORMAT.element.dtype)
        scale = dy.new_empty(total, -(-dy.shape[1] // 128), dtype=torch.float32)
        dequantize = format_functions.bind_dequantize(codes, scale, FORMAT)

        def run(dy: Tensor, gathered_index: Tensor, rank_experts: Tensor) -> Tensor:
            ((codes, scale),) = quantize(dy)
            scale, codes = back.start(dy, gathered_index, rank_experts, [scale.contiguous(), codes]).wait_all()
            return dequantize(codes, scale)

        return run


class DgradActivationOfArrivingGradients(
    OnSm90, FusionRule, name="sm90.dgrad_activation_of_arriving_gradients", direction="backward"
):
    """The gradients of the second layer and of the activation: of this rank's tokens while others arrive."""

    dback: DReturnTokens
    dcombine: DCombine
    wgrad: Wgrad | WgradIntoMainGrad
    dgrad: Dgrad
    scale_grad: ScaleGrad | None
    dscale: DScale | None
    dact: FusedDerivative

    def offer(self, ctx: PlanContext) -> Step:
        _require_ranks(self.dback.op)
        _require_few_ranks(self.dback.op.expert_parallel)
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
            extra_bytes=_nbytes(tokens) + int(2 * ThroughIndex.gather_cost * _nbytes(rows)) + _nbytes(y),
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
        ranges = Ranges(expert_parallel, offsets, token_of_row, tokens, divided)
        beside = beside_exchange(options, expert_parallel)
        quick = is_quick(expert_parallel, us_of_step(expert_parallel, tokens, chosen, row_flops, DERIVATIVE_TFLOPS))
        product = products.bind_grouped_gemm_activation_backward(
            like, weight, preactivation, factor, activation, True, scale_grad, beside, token_of_row, ranges=not quick
        )
        y = dy.new_empty(preactivation.shape[0], weight.shape[2])
        wgrad = of_rows(self.wgrad, dtype, options, "grad_output", False, like, y, offsets, token_of_row)

        def run(*tensors: Any) -> tuple[Tensor | None, ...]:
            dy, gathered_index, rank_experts, token_of_row, weight, offsets, preactivation, factor = tensors
            main_grad = wgrad.main_grad()
            arriving = dback.start(dy.contiguous(), gathered_index, rank_experts)
            gathered = arriving.wait(0) if quick else arriving.unfinished(0)
            parts = offsets if quick else ranges.arriving(offsets, token_of_row, arriving, 0)
            grad, y, grad_factor = product(gathered, weight, parts, preactivation, factor, token_of_row)
            assert y is not None
            grad_weight = wgrad(main_grad, gathered, y, offsets, token_of_row)
            if grad_factor is None or factor is None:
                return grad, grad_weight, y
            return grad, grad_weight, grad_factor.to(factor.dtype), y

        return run


class _WgradBesideExchange(FusionRule, name="wgrad_beside_exchange", direction="backward"):
    """The gradients of the first layer: that of the tokens leaves for their ranks while that of the weight is computed.

    ``drows = dy @ weight[e]``, ``dpart[t] = sum over k of drows[row_of_slot[t, k]]``, which leaves; meanwhile ``dW[e] =
    dy[rows of e].T @ x[rows of e]``; then ``dx[t] = sum over ranks of dpart[t]``.
    """

    wgrad: Wgrad | WgradIntoMainGrad
    dgrad: Dgrad
    weight_grad: DispatchWeightGrad
    ddispatch: DDispatch
    dgather: DGatherTokens
    gather_cost: ClassVar[float] = 1.0

    def _offer(self, ctx: PlanContext, needs: tuple[str, ...]) -> Step:
        """Return the step of a rule that needs these values, and those of the exchange."""
        _require_ranks(self.dgather.op)
        if left_out := {"grad_input", "grad_expert_weight"}.difference(self.dgather.gives):
            raise NothingToDo(f"the exchange leaves out {', '.join(sorted(left_out))}, which nothing asks for")
        decline(limits.why_not_row_scale(ctx.dtype("weight_grad.grad_probs")))
        _require_returnable(ctx, self.dgather.op.expert_parallel, "ddispatch.row_of_slot", False)
        rows, tokens = ctx.spec("dgrad.grad_input"), ctx.spec("ddispatch.grad_input")
        return Step(
            needs=(
                *needs, "offsets", "ddispatch.row_of_slot", "weight_grad.grad_probs", "dgather.expert_index",
            ),
            gives=("wgrad.grad_weight", "grad_input", "dgather.grad_expert_weight"),
            zeroes_tail=True,
            launches=4,
            # grad_output again, the rows' gradients written and read, and the parts
            extra_bytes=_nbytes(ctx.spec("dgrad.grad_output")) + 2 * _nbytes(rows, tokens),
            gather_cost=self.gather_cost,
        )  # fmt: skip

    def _bind(
        self, like: Tensor, row_of_slot: Tensor, grad_probs: Tensor, expert_index: Tensor, operands: int,
        dgrad: Run, wgrad: WeightGradient, of_wgrad: Callable[..., tuple[Any, ...]],
    ) -> Run:  # fmt: skip
        """Return the step. Of its first tensors, ``operands``, and the offsets, ``dgrad`` returns the gradients of
        rows, like ``like``, and ``of_wgrad`` the operands of ``wgrad``.
        """
        guards.gradient(grad_probs)
        guards.contiguous("a routing index", row_of_slot)
        returns = bind_returns(
            self.dgather.op.expert_parallel, like, row_of_slot, None, grad_probs, expert_index.shape[0]
        )

        def run(*tensors: Any) -> tuple[Tensor | None, ...]:
            given, (offsets, row_of_slot, grad_probs, _) = tensors[:operands], tensors[operands:]
            main_grad = wgrad.main_grad()
            rows = dgrad(*given, offsets)
            leaving = returns.begin(rows, row_of_slot, None, grad_probs)
            leaving.leave(returns.steps)
            grad_weight = wgrad(main_grad, *of_wgrad(*given, offsets))
            return grad_weight, *leaving.finish()

        return run


class WgradBesideExchange(OnSm90, _WgradBesideExchange, name="sm90.wgrad_beside_exchange", direction="backward"):
    """The gradients of the first layer in bf16."""

    gathers = "wgrad.input"
    gather_cost = ThroughIndex.gather_cost

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.wgrad.op
        operands = "grad_output", "wgrad.input", "dgrad.weight"
        check_common(ctx, *operands, in_features=fc.in_features, out_features=fc.out_features)
        decline(limits.why_not_row_index(ctx.dtype("wgrad.input:index")))
        return self._offer(ctx, ("grad_output", "dgrad.weight", "wgrad.input:source", "wgrad.input:index"))

    def bind(
        self, ctx: PlanContext, dy: Tensor, weight: Tensor, x: Tensor, index: Tensor, offsets: Tensor,
        row_of_slot: Tensor, grad_probs: Tensor, expert_index: Tensor,
    ) -> Run:  # fmt: skip
        expert_parallel = self.dgather.op.expert_parallel
        guards.gradient(dy)
        guards.index(x, (index,))
        guards.matrix("x", x)
        guards.matrix("the weight", weight, transposed=True)
        product = products.bind_grouped_gemm(dy, weight.mT, None, None, ctx.options)
        rows, beside = dy.new_empty(dy.shape[0], weight.shape[2]), beside_exchange(ctx.options, expert_parallel)
        begins_beside = expert_parallel.engine.by_kernels
        wgrad = of_rows(self.wgrad, ctx.dtype("dgrad.weight"), beside, "x", begins_beside, dy, x, offsets, index)

        def dgrad(dy: Tensor, weight: Tensor, x: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
            return product(dy, weight.mT, None, offsets, None)

        def of_wgrad(dy: Tensor, weight: Tensor, x: Tensor, index: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
            return dy, x, offsets, index

        run = self._bind(rows, row_of_slot, grad_probs, expert_index, 4, dgrad, wgrad, of_wgrad)
        return guards.on_readable(dy, run)


class Fp8WgradBesideExchange(OnFp8, _WgradBesideExchange, name="sm90.fp8_wgrad_beside_exchange", direction="backward"):
    """The gradients of the first layer of codes and scales; those of the tokens leave in bf16."""

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "dgrad.grad_output", "dgrad.weight", gradient=True)
        block = BY_EXPERT if by_expert(ctx, "grad_output") else ROWS
        for name in ("grad_output", "wgrad.input"):
            spec = check_operand(ctx, name, block, MULTIPLIES_ROWS, gradient=name == "grad_output")
            require(not spec.rotated, "%s is rotated: expected hadamard=False", name)

    def offer(self, ctx: PlanContext) -> Step:
        self.check(ctx, in_features=self.wgrad.op.in_features, out_features=self.wgrad.op.out_features)
        return self._offer(ctx, ("dgrad.grad_output", "dgrad.weight", "grad_output", "wgrad.input"))

    def bind(
        self, ctx: PlanContext, dy: Tensor, dy_scale: Tensor, weight: Tensor, weight_scale: Tensor,
        dy_columns: Tensor, dy_columns_scale: Tensor, x: Tensor, x_scale: Tensor, offsets: Tensor,
        row_of_slot: Tensor, grad_probs: Tensor, expert_index: Tensor,
    ) -> Run:  # fmt: skip
        expert_parallel = self.dgather.op.expert_parallel
        guard_codes(dy, weight)
        # copies would be launches between the exchange and the product beside it
        require(are_readable(dy_columns, x), "codes by columns whose pitch is no multiple of 16 bytes")
        require(has_strides(dy_columns_scale) and has_strides(x_scale), "scales by columns with gaps")
        rows, of_weight = Codes(dy, dy_scale), Codes(weight, weight_scale)
        product = of_codes(products.bind_grouped_gemm(rows, of_weight, None, None, ctx.options), rows, of_weight)
        columns = Codes(dy_columns, dy_columns_scale), Codes(x, x_scale)
        like = dy.new_empty(dy.shape[0], weight.shape[1], dtype=torch.bfloat16)
        wgrad = of_rows(
            self.wgrad, ctx.dtype("grad_output"), beside_exchange(ctx.options, expert_parallel), None,
            expert_parallel.engine.by_kernels, *columns, offsets,
            adds_to_sum=not self.wgrad.transposed or dy_columns.dtype is x.dtype,
        )  # fmt: skip

        def dgrad(*tensors: Tensor) -> Any:
            *operands, _, _, _, _, offsets = tensors
            return product(*operands, None, offsets, None)

        def of_wgrad(*tensors: Tensor) -> tuple[Any, ...]:
            *_, dy, dy_scale, x, x_scale, offsets = tensors
            return Codes(dy, dy_scale), Codes(x, x_scale), offsets

        return self._bind(like, row_of_slot, grad_probs, expert_index, 8, dgrad, wgrad, of_wgrad)
