"""Common parts of the rules for packed operands: checks of operands and layers, rows in the packed layout.

`fusedmoe.kernels.sm100.grouped` has the products. It imports cudnn-frontend only when a product first runs.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.requirements import OnSm100, activation_of, check_bf16, name_of, quantized_spec
from fusedmoe.fusion.language.rule import PlanContext, require
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.formats import QuantizedSpec, Quantizer
from fusedmoe.numerics.formats.packed import can_pack
from fusedmoe.ops.glu import GLU, SquaredReLU
from fusedmoe.ops.op import Op

MOST_EXPERTS = 1024
WIDTH = 128  # features of layers are multiples of it
FORMATS = "mxfp8 in e4m3 with scales of the rule rceil, rounded to nearest and not rotated, or nvfp4"
"""Of what the kernels read and write."""
MOST_ELEMENTS = 2**31  # rows times features are fewer: the kernels count them in 32 bits


class OfPacked(OnSm100):
    """Base of a rule whose ``operands`` are codes in the packed layout. It precedes `FusionRule` in the bases."""

    quantized_only: ClassVar[bool] = True
    multiplies_codes: ClassVar[bool] = True
    operands: ClassVar[tuple[str, str]]

    def supports(self, ctx: PlanContext) -> None:
        """Decline operands that have no packed form."""
        check_packed(ctx, *self.operands)

    def check(self, ctx: PlanContext, fc: Op, *others: str, bias: str = "") -> None:
        """Decline a layer that the kernels do not have, and operands or other values that are not bf16."""
        check_layer(ctx, fc, bias=bias)
        check_bf16(ctx, "packed", *self.operands, *others)


def check_packed(ctx: PlanContext, *operands: str) -> None:
    """Decline quantized operands that have no packed form, or two formats; ``operands`` are names without a form."""
    elements = []
    for name in operands:
        spec = quantized_spec(ctx, name, "MXFP8 or NVFP4 operands")
        packed = ctx.spec(f"{name}:packed") if ctx.exists(f"{name}:packed") else None
        require(
            isinstance(packed, QuantizedSpec) and packed.packed,
            "%s is %s: expected %s", name, spec.format, FORMATS,
        )  # fmt: skip
        elements.append(spec.format.element)
    require(len({*elements}) == 1, "the operands are %s: expected one format", " and ".join(map(str, elements)))


def check_quantizer(quantizer: Quantizer | None, ctx: PlanContext | None = None, operand: str = "") -> None:
    """Decline a quantizer whose values have no packed form, or have another format than an operand."""
    assert quantizer is not None, "otherwise there is no step"
    require(can_pack(quantizer), "quantizes to %s: expected %s", quantizer, FORMATS)
    spec = None if ctx is None else ctx.spec(operand)
    if isinstance(spec, QuantizedSpec):
        require(spec.format.element == quantizer.format.element, "quantizes to %s, from operands in %s", quantizer,
                spec.format)  # fmt: skip


def check_layer(ctx: PlanContext, fc: Op, *, bias: str = "") -> None:
    """Decline features, numbers of experts and options that the kernels do not have."""
    for name in ("in_features", "out_features"):
        width: int = getattr(fc, name)
        require(width % WIDTH == 0, "%s %d is not a multiple of %d", name, width, WIDTH)
    experts: int = fc.num_groups  # type: ignore[assignment]
    require(experts <= MOST_EXPERTS, "%d experts, over %d", experts, MOST_EXPERTS)
    require(not ctx.options.sm_margin, "sm_margin %d: these kernels take all SMs", ctx.options.sm_margin)
    if bias and ctx.exists(bias):
        dtype = name_of(ctx.dtype(bias))
        require(dtype == "bfloat16", "the bias is %s, not bfloat16", dtype)


def check_activation(op: GLU | SquaredReLU) -> Activation:
    """Return the kernels' description of an activation, or decline it."""
    activation = activation_of(op)
    require(not activation.interleaved, "interleaved gate and up: expected a weight with the rows [gate | up]")
    constants = activation.alpha != 1 or activation.offset != 0
    message = "alpha %s and offset %s without a limit: the kernel has them for clamped activations alone"
    require(not constants or activation.limit is not None, message, activation.alpha, activation.offset)
    return activation


def is_halved(ctx: PlanContext, packed: str) -> bool:
    """Whether gate and up alternate in a packed form."""
    spec = ctx.spec(packed)
    return isinstance(spec, QuantizedSpec) and spec.halves


def guard_rows(rows: int, *features: int) -> None:
    """Leave a call without packed rows to plain PyTorch, and decline one with too many."""
    guards.some_rows(rows)
    widest = max(features)
    require(rows * widest < MOST_ELEMENTS, "%d rows of %d features: expected fewer than 2^31 elements", rows, widest)


def packed_factor(
    factor: Tensor | None, place_of_row: Tensor, num_packed: int, with_zero: bool = False
) -> Tensor | None:
    """Return a factor per row (R,) in the packed layout: fp32, (P,), zeros for padding rows.

    ``with_zero``: (P + 1,); the last is that of rows without an expert.
    """
    if factor is None:
        return None
    packed = factor.new_zeros(num_packed + 1, dtype=torch.float32)
    packed.index_copy_(0, place_of_row, factor.to(torch.float32))
    return packed if with_zero else packed[:-1]


def ones_of_rows(place_of_row: Tensor, num_packed: int) -> Tensor:
    """Return 1 for the rows of experts and 0 for padding rows: fp32, (P,)."""
    packed = torch.zeros(num_packed + 1, dtype=torch.float32, device=place_of_row.device)
    return packed.index_fill_(0, place_of_row, 1.0)[:-1]
