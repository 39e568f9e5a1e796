"""Rules that compute while rows arrive from the other ranks of `ExpertParallel`.

- `sm90.gemm_activation_of_arriving_tokens`: the first layer, in an order in which rows arrive.
- `sm90.dgrad_activation_of_arriving_gradients`: the same for the gradient of the second layer's rows.

See `beside.py`, and `arriving_codes.py` for rows that travel as FP8 codes.
"""

from typing import Any

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.exchange.beside import (
    DERIVATIVE_TFLOPS,
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
from fusedmoe.builtin_rules.products.weight_gradient import of_rows
from fusedmoe.builtin_rules.requirements import (
    OnSm90,
    ThroughIndex,
    activation_of,
    check_common,
    check_dscale,
    check_row_scale,
    decline,
)
from fusedmoe.builtin_rules.rows.dispatch import require_row_dtype
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.ops.dispatch import DCombine, Dispatch
from fusedmoe.ops.exchange.fixed import DReturnTokens, GatherTokens
from fusedmoe.ops.glu import FusedActivation, FusedDerivative
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear, Wgrad, WgradIntoMainGrad
from fusedmoe.ops.scale import DScale, Scale, ScaleGrad


def _require_own_dtype(expert_parallel: ExpertParallel) -> None:
    wire = expert_parallel.dispatch_dtype
    require(wire is None, "rows arrive as codes of %s (dispatch_dtype), which the product does not read", wire)


def check_routing(ctx: PlanContext, fc: GroupedLinear, scale: Scale | None) -> int:
    """Decline a routing by which no kernel sorts or scales rows; return the launches that convert the row scale."""
    decline(limits.why_not_routing(ctx.dtype("dispatch.expert_index"), fc.num_groups))
    decline(limits.why_not_row_scale(ctx.dtype("dispatch.expert_weight")))
    if scale is None:
        return 0
    require(ctx.same("scale.factor", "dispatch.probs"), "the row scale is not that of dispatch")
    return check_row_scale(ctx, "scale.factor")


def as_fp32(factor: Tensor | None) -> Tensor | None:
    """Return a row scale as products read it.

    A step converts it before rows arrive. The product begins beside the copies of these rows only if no other kernel is
    between the two.
    """
    return None if factor is None else factor.float()


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
        launches = 12 + check_routing(ctx, fc, self.scale)
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
            factors = as_fp32(probs) if scaled else None
            tokens = arriving.wait(2) if quick else arriving.unfinished(2)
            parts = offsets if quick else ranges.arriving(offsets, token_of_row, arriving, 2)
            result = product(tokens, weight, bias, parts, factors, token_of_row)
            y, *p = result if keeps_p else (result,)
            kept = {"gather.output": tokens, "act.input": p[0] if p else None}
            return index, expert_weight, *gather.empty(x), *provided, y, *(kept[name] for name in keep)

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
            main_grad, factors = wgrad.main_grad(), as_fp32(factor)
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
