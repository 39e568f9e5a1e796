"""``sm100.grouped_gemm``: a grouped linear layer with MXFP8 operands, and its bias.

``sm100.grouped_dgrad``: the gradient of the layer's rows, by the same kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.builtin_rules.sm100.backend import (
    OfPacked,
    check_bf16,
    check_layer,
    check_packed,
    guard_bias,
    guard_rows,
    is_halved,
)
from fusedmoe.formats.packed import deinterleave, interleave
from fusedmoe.fusion.rule import Bind, FusionRule, PlanContext, Step
from fusedmoe.kernels.sm100 import grouped
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class PackedGemm(OfPacked, FusionRule, name="sm100.grouped_gemm", direction="forward"):
    """``y[r] = x[r] @ weight[e].T + bias[e]`` of codes and scales, in bf16. Two more launches remove the padding rows.

    Before a gated activation, gate and up alternate in the packed weight. One more launch then reorders y.
    """

    fc: GroupedLinear

    def supports(self, ctx: PlanContext) -> None:
        check_packed(ctx, "input", "fc.weight")

    def offer(self, ctx: PlanContext) -> Step:
        check_layer(ctx, self.fc, bias="fc.bias")
        check_bf16(ctx, "input", "fc.weight")
        halves = is_halved(ctx, "fc.weight:packed")
        needs = ("input:packed", "fc.weight:packed", "fc.bias", "padded_offsets", "place_of_row")
        moved = (2 + 2 * halves) * _bytes(ctx, "output")
        return Step(needs=needs, gives=("output",), zeroes_tail=True, launches=3 + halves, extra_bytes=moved)

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        halves = is_halved(ctx, "fc.weight:packed")

        def run_halves(
            x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, *rows: Tensor
        ) -> Tensor:
            bias = None if bias is None else interleave(bias).contiguous()
            return deinterleave(_product(x, x_scale, weight, weight_scale, bias, *rows)).contiguous()

        def bind(
            x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, *rows: Tensor
        ) -> Callable[..., Tensor]:
            guard_rows(x, weight.shape[1])
            guard_bias(bias)
            return run_halves if halves else _product

        return bind


class PackedDgrad(OfPacked, FusionRule, name="sm100.grouped_dgrad", direction="backward"):
    """``dx[r] = dy[r] @ weight[e]`` of codes and scales, in bf16. Two more launches remove the padding rows."""

    dgrad: Dgrad

    def supports(self, ctx: PlanContext) -> None:
        check_packed(ctx, "grad_output", "dgrad.weight")

    def offer(self, ctx: PlanContext) -> Step:
        check_layer(ctx, self.dgrad.op)
        check_bf16(ctx, "grad_output", "dgrad.weight")
        needs = ("grad_output:packed", "dgrad.weight:packed_columns", "padded_offsets", "place_of_row")
        moved = 2 * _bytes(ctx, "grad_input")
        return Step(needs=needs, gives=("grad_input",), zeroes_tail=True, launches=3, extra_bytes=moved)

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        def run(dy: Tensor, dy_scale: Tensor, weight: Tensor, weight_scale: Tensor, *rows: Tensor) -> Tensor:
            return _product(dy, dy_scale, weight, weight_scale, None, *rows)

        def bind(
            dy: Tensor, dy_scale: Tensor, weight: Tensor, weight_scale: Tensor, *rows: Tensor
        ) -> Callable[..., Tensor]:
            guard_rows(dy, weight.shape[1])
            return run

        return bind


def _product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    place_of_row: Tensor,
) -> Tensor:
    return grouped.gemm((x, x_scale), (weight, weight_scale), bias, ends).index_select(0, place_of_row)


def _bytes(ctx: PlanContext, rows: str) -> int:
    spec = ctx.spec(rows)
    return int(spec.shape[0]) * int(spec.shape[1]) * spec.dtype.itemsize
