"""Rules that compute while sums leave for the other ranks of `ExpertParallel`.

- `sm90.gemm_of_leaving_rows`: the second layer, in an order in which the sums of other ranks' tokens can leave.
- `sm90.wgrad_beside_exchange`: the gradient of the tokens leaves beside the weight gradient of the first layer.

Both also have a rule for FP8 codes and scales. See `beside.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.exchange.beside import (
    FP8_TFLOPS,
    LEAST_SMS,
    TFLOPS,
    Ranges,
    ReturnsOfProduct,
    beside_exchange,
    bind_returns,
    experts_beside,
    in_halves,
    is_quick,
    nbytes,
    reads_weights,
    require_few_ranks,
    require_ranks,
    sms_of_leaving,
    us_of_step,
    us_of_weight,
)
from fusedmoe.builtin_rules.products.fp8 import (
    BY_EXPERT,
    MULTIPLIES_ROWS,
    ROWS,
    OnFp8,
    are_readable,
    by_expert,
    check_operand,
    check_operands,
    guard_codes,
    of_codes,
)
from fusedmoe.builtin_rules.products.weight_gradient import WeightGradient, of_rows
from fusedmoe.builtin_rules.requirements import (
    OnSm90,
    ThroughIndex,
    check_common,
    decline,
)
from fusedmoe.builtin_rules.rows.dispatch import require_row_dtype
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.fusion.language.rule import FusionRule, NothingToDo, PlanContext, Run, Step, require
from fusedmoe.kernels.exchange.functions import can_list
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.products import has_strides
from fusedmoe.ops.dispatch import Combine, DDispatch, DispatchWeightGrad
from fusedmoe.ops.exchange.fixed import DGatherTokens, ReturnTokens
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear, Wgrad, WgradIntoMainGrad


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


class _GemmOfLeavingRows(FusionRule, name="gemm_of_leaving_rows", direction="forward"):
    """The second layer, the sum per token, and the sum over ranks, in an order in which sums can leave."""

    fc: GroupedLinear
    combine: Combine
    back: ReturnTokens
    check = staticmethod(check_common)  # `OnFp8` has another
    operands: ClassVar[int]  # the tensors of the product's operands and its bias
    tflops: ClassVar[int] = TFLOPS

    def offer(self, ctx: PlanContext) -> Step:
        require_ranks(self.back)
        require_few_ranks(self.back.expert_parallel)
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
                "input", "fc.weight", "fc.bias", "offsets", "back.expert_index",
                *(f"combine.{name}" for name in names),
            ),
            gives=("output",),
            keeps=("combine.input",),
            zeroes_tail=True,
            launches=8,
            extra_bytes=2 * nbytes(rows) + 2 * nbytes(parts),
        )  # fmt: skip

    def _bind(
        self, ctx: PlanContext, product: Callable[[KernelOptions, bool], Run],
        counted: Callable[[KernelOptions], tuple[Run, tuple[int, int]]], weight: Tensor, offsets: Tensor,
        expert_index: Tensor, row_of_slot: Tensor, token_of_row: Tensor, probs: Tensor | None = None,
    ) -> Run:  # fmt: skip
        """Return the step. ``product(options, ranges)`` is a function of the operands, the bias, the offsets or parts,
        two Nones, and the rows to write; see `products.bind_grouped_gemm`. ``counted(options)`` is the result of
        `products.bind_counted_gemm`, with a function of the operands, the bias, the blocks and the rows.
        """
        expert_parallel, options, keep = self.back.expert_parallel, ctx.options, ctx.keep
        guards.contiguous("a routing index", row_of_slot, token_of_row)
        (tokens, chosen), (experts, features, _), dtype = row_of_slot.shape, weight.shape, ctx.dtype("fc.output")
        row_bytes, row_flops = features * dtype.itemsize, 2 * weight[0].numel()
        divided = experts_beside(expert_parallel, tokens, row_bytes, chosen, experts, row_flops, self.tflops)
        halves = in_halves(expert_parallel, tokens, chosen, experts)
        ranges = Ranges(expert_parallel, offsets, token_of_row, tokens, divided, options.zero_tail, halves=halves)
        step_us = us_of_step(expert_parallel, tokens, chosen, row_flops, self.tflops)
        by_kernels, product_us = expert_parallel.engine.by_kernels, expert_parallel.ranks * step_us
        followed = 0  # the experts whose blocks the sums follow
        if by_kernels and ranges.by_experts and can_list(tokens, expert_parallel.ranks, LEAST_SMS):
            followed, product_us = experts, max(product_us, experts * us_of_weight(row_flops))
        # one launch for the rows of all ranks, before the sums leave
        at_once = is_quick(expert_parallel, step_us) or (
            by_kernels
            and not followed
            and reads_weights(expert_parallel, tokens, chosen, experts, row_flops, self.tflops)
        )
        count, operands = token_of_row.shape[0], self.operands
        like = weight.new_empty(count, features, dtype=dtype)
        if by_kernels and not at_once and count:  # without rows, there is no product to follow
            sms = sms_of_leaving(
                expert_parallel, tokens, row_bytes, chosen, product_us, followed, ranges.half > 0 and followed > 0
            )  # fmt: skip
            sums = ReturnsOfProduct(
                expert_parallel, like, row_of_slot, expert_index.shape[0], ranges, counted, options, sms, followed
            )  # fmt: skip

            def run_counted(*tensors: Any) -> Any:
                given, (offsets, _, row_of_slot, token_of_row) = tensors[:operands], tensors[operands:]
                rows = token_of_row.new_empty(count, features, dtype=dtype)
                y = sums.run(given, rows, row_of_slot, offsets, token_of_row)
                return (y, rows) if keep else y

            return run_counted
        beside = beside_exchange(options, expert_parallel)
        of_others, of_own = (product(of_part, not at_once) for of_part in (options, beside))
        returns = bind_returns(
            expert_parallel, like, row_of_slot, probs, None, expert_index.shape[0], beside=not at_once
        )  # fmt: skip

        def run(*tensors: Any) -> Any:
            given, (offsets, _, row_of_slot, token_of_row, *factor) = tensors[:operands], tensors[operands:]
            probs = factor[0] if factor else None
            rows = token_of_row.new_empty(count, features, dtype=dtype)
            leaving = returns.begin(rows, row_of_slot, probs)
            if at_once:
                of_own(*given, offsets, None, None, rows)
                leaving.leave()
            else:
                others, own = ranges.before_own(offsets, token_of_row)
                of_others(*given, [others], None, None, rows)
                leaving.leave()
                of_own(*given, [own], None, None, rows)
            y, _ = leaving.finish()
            return (y, rows) if keep else y

        return run


class GemmOfLeavingRows(OnSm90, _GemmOfLeavingRows, name="sm90.gemm_of_leaving_rows", direction="forward"):
    """The second layer in bf16."""

    operands = 3

    def bind(
        self, ctx: PlanContext, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, expert_index: Tensor,
        *of_rows: Tensor,
    ) -> Run:  # fmt: skip
        guards.operands(x, weight, bias)

        def product(options: KernelOptions, ranges: bool) -> Run:
            return products.bind_grouped_gemm(x, weight, bias, None, options, ranges=ranges)

        def counted(options: KernelOptions) -> tuple[Run, tuple[int, int]]:
            return products.bind_counted_gemm(x, weight, bias, options)

        return self._bind(ctx, product, counted, weight, offsets, expert_index, *of_rows)


class Fp8GemmOfLeavingRows(OnFp8, _GemmOfLeavingRows, name="sm90.fp8_gemm_of_leaving_rows", direction="forward"):
    """The second layer of codes and scales; its results leave in bf16."""

    operands = 5
    tflops = FP8_TFLOPS

    def supports(self, ctx: PlanContext) -> None:
        check_operands(ctx, "input", "fc.weight")

    def bind(
        self, ctx: PlanContext, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
        offsets: Tensor, expert_index: Tensor, *of_rows: Tensor,
    ) -> Run:  # fmt: skip
        guard_codes(x, weight)
        guards.contiguous("the bias", bias)
        operands = Codes(x, x_scale), Codes(weight, weight_scale)

        def product(options: KernelOptions, ranges: bool) -> Run:
            return of_codes(products.bind_grouped_gemm(*operands, bias, None, options, ranges=ranges), *operands)

        def counted(options: KernelOptions) -> tuple[Run, tuple[int, int]]:
            run, tiles = products.bind_counted_gemm(*operands, bias, options)
            return of_codes(run, *operands), tiles

        return self._bind(ctx, product, counted, weight, offsets, expert_index, *of_rows)


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
        require_ranks(self.dgather.op)
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
            extra_bytes=nbytes(ctx.spec("dgrad.grad_output")) + 2 * nbytes(rows, tokens),
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
            self.dgather.op.expert_parallel, like, row_of_slot, None, grad_probs, expert_index.shape[0], beside=True
        )

        def run(*tensors: Any) -> tuple[Tensor | None, ...]:
            given, (offsets, row_of_slot, grad_probs, _) = tensors[:operands], tensors[operands:]
            main_grad = wgrad.main_grad()
            rows = dgrad(*given, offsets)
            leaving = returns.begin(rows, row_of_slot, None, grad_probs)
            leaving.leave()
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
