"""Rules for `Dispatch`, `Combine` and their backward ops, one per op. They sort rows by expert and sum them per token.

Plain PyTorch needs a dozen launches to sort, and several passes over the rows for each gather.
"""

from __future__ import annotations

from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.requirements import decline
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.sm90 import limits
from fusedmoe.ops.dispatch import Combine, CombineWeightGrad, DCombine, DDispatch, Dispatch, DispatchWeightGrad
from fusedmoe.ops.op import TensorSpec

ROUTING = "a routing index or weight"
SM_BYTES_PER_US = 80e3  # of a sum over slots, per SM
SHORTEST_US = 1500.0  # on one SM: a shorter sum takes less than 40 us on the whole GPU, and runs alone


def _check_rows(ctx: PlanContext, rows: str) -> None:
    spec = ctx.spec(rows)
    decline(limits.why_not_dtypes({"x": spec.dtype}))
    decline(limits.why_not_width("features", spec.shape[-1]))


def require_row_dtype(combine: Combine) -> None:
    """Decline sums that are not rounded to the dtype of the rows."""
    require(
        combine.output_dtype is None, "the sums are %s (combine_dtype), not of the rows' dtype", combine.output_dtype
    )


def _guard_token_gradient(dy: Tensor, slot_of_row: Tensor) -> None:
    guards.some_rows(slot_of_row.numel())  # also with tokens, if each has no expert
    guards.gradient(dy)


def sum_us(ctx: PlanContext, row_of_slot: str, *values: str) -> float:
    """`Step.light_us` of a sum over slots that reads and writes these values."""
    if ctx.spec(row_of_slot).shape[1] > limits.MOST_SLOTS_BESIDE:
        return 0.0
    specs = map(ctx.spec, values)
    us = sum(TensorSpec(tuple(s.shape), s.dtype).nbytes for s in specs) / SM_BYTES_PER_US
    return us if us >= SHORTEST_US else 0.0


def bind_sum(rows: Tensor, row_of_slot: Tensor, addend: Tensor | None, beside_sms: int) -> Run:
    """Bind a sum over slots without a scale; beside the next step, unless the rows are a copy of this call."""
    sms = beside_sms if guards.is_readable(rows) else 0  # the memory of a copy is free when the call returns
    return guards.on_readable(rows, slot_functions.bind_sum_slots(rows, row_of_slot, None, addend, sms))


class DispatchRule(FusionRule, name="dispatch", direction="forward"):
    """A stable counting sort of the slots, in one or two launches; ``rows[r] = x[token of r]``, in one more.

    The rows are written only if a step reads them in order. The second launch of the sort is needed for more than 2048
    slots. The cost assumes it, since no rule knows the number of rows.
    """

    dispatch: Dispatch

    def offer(self, ctx: PlanContext) -> Step:
        _check_rows(ctx, "input")
        decline(limits.why_not_routing(ctx.dtype("dispatch.expert_index"), self.dispatch.num_experts or 0))
        decline(limits.why_not_row_scale(ctx.dtype("dispatch.expert_weight")))
        given = ("local_rows",) if "local_rows" in self.dispatch.runtime_inputs else ()
        return Step(
            needs=("input", *(f"dispatch.{name}" for name in ("expert_index", "expert_weight", *given))),
            gives=tuple(f"dispatch.{name}" for name in (*self.dispatch.provides, "offsets")),
            keeps=("output",),
            zeroes_tail=True,
            launches=2,
        )

    def bind(self, ctx: PlanContext, x: Tensor, index: Tensor, weight: Tensor, local_rows: Tensor | None = None) -> Run:
        experts = self.dispatch.num_experts
        assert experts is not None
        guards.some_rows(index.numel())
        guards.contiguous("expert_index or expert_weight", index, weight)
        rows = self.dispatch.rows(index, local_rows)
        route = slot_functions.bind_route(index, weight, experts, num_rows=rows)
        if not ctx.keep:
            return lambda x, index, weight, local_rows=None: route(index, weight)
        guards.matrix("x", x)
        gather = slot_functions.bind_gather_rows(x, index, None, rows)

        def run(x: Tensor, index: Tensor, weight: Tensor, local_rows: Tensor | None = None) -> tuple[Tensor, ...]:
            provided = route(index, weight)
            _, _, row_of_slot, slot_of_row, *_ = provided
            return *provided, gather(x, row_of_slot, slot_of_row)

        return run


class CombineRule(FusionRule, name="combine", direction="forward"):
    """``y[t] = sum over k of w[row] * rows[row]``, in one launch."""

    combine: Combine

    def offer(self, ctx: PlanContext) -> Step:
        require_row_dtype(self.combine)
        _check_rows(ctx, "input")
        if self.combine.weights is not None:
            decline(limits.why_not_row_scale(ctx.dtype(f"combine.{self.combine.weights}")))
        needs = ("input", "combine.row_of_slot", *(f"combine.{name}" for name in self.combine.applies))
        return Step(needs=needs, gives=("output",), zeroes_tail=True)

    def bind(self, ctx: PlanContext, rows: Tensor, row_of_slot: Tensor, weight: Tensor | None = None) -> Run:
        guards.some_rows(row_of_slot.numel())
        guards.matrix("x", rows)
        guards.contiguous(ROUTING, row_of_slot, weight)
        return slot_functions.bind_sum_slots(rows, row_of_slot, weight)


class DCombineRule(FusionRule, name="dcombine", direction="backward"):
    """``drows[r] = w[r] * dy[token of r]``, in one launch."""

    dcombine: DCombine

    def offer(self, ctx: PlanContext) -> Step:
        require_row_dtype(self.dcombine.op)
        _check_rows(ctx, "grad_output")
        if self.dcombine.op.weights is not None:
            decline(limits.why_not_row_scale(ctx.dtype(f"dcombine.{self.dcombine.op.weights}")))
        needs = ("grad_output", *(f"dcombine.{name}" for name in self.dcombine.op.runtime_inputs))
        return Step(needs=needs, gives=("grad_input",), zeroes_tail=True)

    def bind(
        self, ctx: PlanContext, dy: Tensor, row_of_slot: Tensor, slot_of_row: Tensor, weight: Tensor | None = None
    ) -> Run:
        _guard_token_gradient(dy, slot_of_row)
        guards.contiguous(ROUTING, row_of_slot, slot_of_row, weight)
        return guards.on_readable(dy, slot_functions.bind_gather_rows(dy, row_of_slot, weight, slot_of_row.shape[0]))


class CombineWeightGradRule(FusionRule, name="combine_weight_grad", direction="backward"):
    """``dw[r] = sum over features of rows[r] * dy[token of r]``, in one launch."""

    weight_grad: CombineWeightGrad

    def offer(self, ctx: PlanContext) -> Step:
        require_row_dtype(self.weight_grad.op)
        _check_rows(ctx, "grad_output")
        _check_rows(ctx, "weight_grad.input")
        decline(limits.why_not_row_scale(ctx.dtype(f"weight_grad.{self.weight_grad.op.weights}")))
        needs = ("grad_output", "weight_grad.input", "weight_grad.row_of_slot", "weight_grad.slot_of_row")
        return Step(needs=needs, gives=(f"weight_grad.{self.weight_grad.gives[0]}",), zeroes_tail=True)

    def bind(self, ctx: PlanContext, dy: Tensor, rows: Tensor, row_of_slot: Tensor, slot_of_row: Tensor) -> Run:
        _guard_token_gradient(dy, slot_of_row)
        guards.matrix("x", rows)
        guards.contiguous(ROUTING, row_of_slot, slot_of_row)
        dtype = ctx.dtype(f"weight_grad.{self.weight_grad.op.weights}")
        return guards.on_readable(dy, slot_functions.bind_row_dots(dy, rows, row_of_slot, dtype))


class DDispatchRule(FusionRule, name="ddispatch", direction="backward"):
    """``dx[t] = sum over k of drows[row_of_slot[t, k]]``, in one launch."""

    ddispatch: DDispatch

    def offer(self, ctx: PlanContext) -> Step:
        _check_rows(ctx, "grad_output")
        return Step(
            needs=("grad_output", "ddispatch.row_of_slot"), gives=("grad_input",), zeroes_tail=True,
            light_us=sum_us(ctx, "ddispatch.row_of_slot", "grad_output", "grad_input"),
        )  # fmt: skip

    def bind(self, ctx: PlanContext, grad: Tensor, row_of_slot: Tensor) -> Run:
        guards.gradient(grad)
        guards.contiguous(ROUTING, row_of_slot)
        return bind_sum(grad, row_of_slot, None, ctx.beside_sms)


class DispatchWeightGradRule(FusionRule, name="dispatch_weight_grad", direction="backward"):
    """``dexpert_weight[t, k] = dprobs[row_of_slot[t, k]]``, in one launch."""

    weight_grad: DispatchWeightGrad

    def offer(self, ctx: PlanContext) -> Step:
        decline(limits.why_not_row_scale(ctx.dtype("weight_grad.grad_probs")))
        needs = ("weight_grad.grad_probs", "weight_grad.row_of_slot")
        return Step(needs=needs, gives=("weight_grad.grad_expert_weight",), zeroes_tail=True)

    def bind(self, ctx: PlanContext, grad: Tensor, row_of_slot: Tensor) -> Run:
        guards.gradient(grad)
        guards.contiguous(ROUTING, row_of_slot)
        return guards.on_readable(grad, slot_functions.bind_slot_values(grad, row_of_slot))
