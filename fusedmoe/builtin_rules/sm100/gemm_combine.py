"""``sm100.grouped_gemm_combine``: the last grouped linear layer, with MXFP8 or NVFP4 operands, and `Combine`.

``sm100.grouped_dgrad_ddispatch``: the gradient of the first layer's rows, and that of `Dispatch`.

The product writes packed rows, and the sum over slots reads them where they are, so no launch removes the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.requirements import decline
from fusedmoe.builtin_rules.rows.dispatch import require_row_dtype
from fusedmoe.builtin_rules.sm100.packed import OfPacked, guard_rows, packed_factor
from fusedmoe.builtin_rules.sm100.products import products_of
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.sm90 import limits
from fusedmoe.ops.dispatch import Combine, DDispatch, DispatchWeightGrad
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear

LAUNCHES_ON_SLOTS = 2  # of the packed rows of slots


class PackedGemmCombine(OfPacked, FusionRule, name="sm100.grouped_gemm_combine", direction="forward"):
    """``y[t] = sum over k of w[row] * (x[row] @ weight[e].T + bias[e])``, in fp32 of rows rounded to bf16."""

    fc: GroupedLinear
    combine: Combine
    operands = ("input", "fc.weight")
    first_reads_codes: ClassVar[bool] = True

    def offer(self, ctx: PlanContext) -> Step:
        self.check(ctx, self.fc, bias="fc.bias")
        require_row_dtype(self.combine)
        rows = ctx.spec("combine.input")
        decline(limits.why_not_width("features", rows.shape[-1]))
        if self.combine.weights is not None:
            decline(limits.why_not_row_scale(ctx.dtype(f"combine.{self.combine.weights}")))
        require(not ctx.is_read_outside("combine.input"), "the rows before Combine are read in order too")
        weights = tuple(f"combine.{name}" for name in self.combine.applies)
        needs = ("input:packed", "fc.weight:packed", "fc.bias", "padded_offsets", "place_of_row", "combine.row_of_slot")
        return Step(
            needs=(*needs, *weights), gives=("output",), zeroes_tail=True,
            launches=2 + LAUNCHES_ON_SLOTS + 2 * len(weights), extra_bytes=2 * rows.shape[0] * rows.shape[1] * 2,
        )  # fmt: skip

    def bind(self, ctx: PlanContext, *tensors: Tensor | None) -> Run:
        products = products_of(ctx, "input")
        (codes, *_), (codes_ENK, *_), (bias, _, _, row_of_slot, *weights) = products.split(tensors)
        guard_rows(codes.shape[0], self.fc.in_features, codes_ENK.shape[1])
        guards.contiguous("the bias", bias)
        total = _bind_total(codes, codes_ENK, row_of_slot, *weights)

        def run(*tensors: Tensor | None) -> Tensor:
            x, weight, (bias, ends, place_of_row, row_of_slot, *weights) = products.split(tensors)
            y = products.kernels.gemm(x, weight, bias, ends)
            return total(y, place_of_row, row_of_slot, *weights)

        return run


class PackedDgradDDispatch(OfPacked, FusionRule, name="sm100.grouped_dgrad_ddispatch", direction="backward"):
    """``dx[t] = sum over k of dy[row] @ weight[e]``, and ``dexpert_weight[t, k] = dprobs[row]``. The rows are rounded
    to bf16 before the sum, which is in fp32.
    """

    dgrad: Dgrad
    weight_grad: DispatchWeightGrad | None
    ddispatch: DDispatch
    operands = ("grad_output", "dgrad.weight")
    first_reads_codes: ClassVar[bool] = True

    def offer(self, ctx: PlanContext) -> Step:
        self.check(ctx, self.dgrad.op)
        rows = ctx.spec("ddispatch.grad_output")
        decline(limits.why_not_width("features", rows.shape[-1]))
        require(not ctx.is_read_outside("ddispatch.grad_output"), "the gradients of rows are read in order too")
        needs: tuple[str, ...] = ("grad_output:packed", "dgrad.weight:packed_columns", "padded_offsets", "place_of_row",
                                  "ddispatch.row_of_slot")  # fmt: skip
        gives: tuple[str, ...] = ("grad_input",)
        if self.weight_grad is not None:
            decline(limits.why_not_row_scale(ctx.dtype("weight_grad.grad_probs")))
            needs, gives = (*needs, "weight_grad.grad_probs"), (*gives, "weight_grad.grad_expert_weight")
        return Step(
            needs=needs, gives=gives, zeroes_tail=True, launches=1 + LAUNCHES_ON_SLOTS + len(gives),
            extra_bytes=2 * rows.shape[0] * rows.shape[1] * 2,
        )  # fmt: skip

    def bind(self, ctx: PlanContext, *tensors: Tensor) -> Run:
        products = products_of(ctx, "grad_output")
        (codes, *_), (codes_ENK, *_), (_, _, row_of_slot, *grads) = products.split(tensors)
        guard_rows(codes.shape[0], self.dgrad.op.out_features, codes_ENK.shape[1])
        guards.contiguous("the gradient of the row scales", *grads)
        total = _bind_total(codes, codes_ENK, row_of_slot)
        of_slots = [slot_functions.bind_slot_values(grad, row_of_slot) for grad in grads]

        def run(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            dy, weight, (ends, place_of_row, row_of_slot, *grads) = products.split(tensors)
            dx = total(products.kernels.gemm(dy, weight, None, ends), place_of_row, row_of_slot)
            if not grads:
                return dx
            return dx, *(values(grad, row_of_slot) for values, grad in zip(of_slots, grads, strict=True))

        return run


def _bind_total(codes: Tensor, codes_ENK: Tensor, row_of_slot: Tensor, *weights: Tensor) -> Callable[..., Tensor]:
    """Return a function of ``(rows, place_of_row, row_of_slot, *weights)``: the sum over slots of packed rows.

    The rows are those of a product of these codes. The last of them is zeros: slots without an expert read it.
    """
    guards.some_rows(row_of_slot.numel())
    guards.contiguous("row_of_slot", row_of_slot)
    places, features = codes.shape[0], codes_ENK.shape[1]
    like = codes.new_empty(places + 1, features, dtype=torch.bfloat16)
    factor = codes.new_empty(places + 1, dtype=torch.float32) if weights else None
    kernel = slot_functions.bind_sum_slots(like, row_of_slot, factor)

    def run(rows: Tensor, place_of_row: Tensor, row_of_slot: Tensor, *weights: Tensor) -> Tensor:
        place_of_slot = F.pad(place_of_row, (0, 1), value=places)[row_of_slot]
        factors = packed_factor(weights[0], place_of_row, places, with_zero=True) if weights else None
        return kernel(rows, place_of_slot, factors)

    return run
