"""Common parts of the rules for products of FP8 operands: with 1x128 blocks of rows and 128x128 blocks of weights, or
with one scale per expert.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.requirements import OnSm90, check_bf16, decline, quantized_spec
from fusedmoe.fusion.language.rule import PlanContext, Run, require
from fusedmoe.kernels.sm90 import limits
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.products import has_strides, with_strides
from fusedmoe.numerics.formats import E4M3, Format, QuantizedSpec

Block = tuple[int | None, int | None]
ROWS: Block = (1, 128)
WEIGHTS: Block = (128, 128)
BY_EXPERT: Block = (None, None)
MULTIPLIES_ROWS = "multiplies rows in"


class OnFp8(OnSm90):
    """Base of a rule whose product multiplies FP8 codes. It precedes `FusionRule` in the bases."""

    quantized_only: ClassVar[bool] = True
    multiplies_codes: ClassVar[bool] = True

    @staticmethod
    def check(ctx: PlanContext, *operands: str, **widths: int) -> None:
        """Decline products of quantized values that are not bf16, and widths that codes cannot have."""
        check_bf16(ctx, "FP8", *operands)
        for name, width in widths.items():
            decline(limits.why_not_width_of_codes(name, width))


def check_blocks(format: Format, block: Block, what: str = "quantizes to") -> None:
    """Decline a format that no kernel writes or, if ``what`` says so, reads."""
    decline(limits.why_not_fp8_blocks(format, block, what))


def check_operands(ctx: PlanContext, rows: str, weight: str, *, gradient: bool = False) -> None:
    """Decline a product whose operands are not both in FP8: rows in 1x128 blocks, in E4M3 or, for a gradient, E5M2;
    and a weight in 128x128 blocks, in E4M3; or both with one scale per expert.
    """
    blocks = (BY_EXPERT, BY_EXPERT) if by_expert(ctx, rows) else (ROWS, WEIGHTS)
    for name, block, what in ((rows, blocks[0], MULTIPLIES_ROWS), (weight, blocks[1], "multiplies a weight in")):
        check_operand(ctx, name, block, what, gradient=gradient and name == rows)


def check_operand(ctx: PlanContext, name: str, block: Block, what: str, *, gradient: bool = False) -> QuantizedSpec:
    """Return an operand's spec. Decline one not in E4M3 or, for a gradient, E5M2, or with other blocks."""
    spec = quantized_spec(ctx, name, "FP8 operands")
    check_blocks(spec.format, block, what)
    require(spec.format.element == E4M3 or gradient, "%s is %s: expected e4m3", name, spec.format.element)
    require(spec.stacked or spec.experts is not None, "%s was quantized without experts", name)
    return spec


def by_expert(ctx: PlanContext, operand: str) -> bool:
    """Whether an operand has one scale per expert, instead of one per block."""
    spec = ctx.spec(operand)
    return isinstance(spec, QuantizedSpec) and spec.format.block == BY_EXPERT


def guard_codes(*codes: Tensor) -> None:
    """Decline codes that TMA cannot read. Leave a call without rows to plain PyTorch."""
    guards.some_rows(codes[0].shape[0])
    for t in codes:
        require(are_readable(t), "codes have strides %s: expected rows of a multiple of 16 bytes", tuple(t.stride()))


def are_readable(*codes: Tensor) -> bool:
    """Whether TMA can read each of these codes."""
    return all(
        t.stride(-1) == 1 and t.stride(-2) % 16 == 0 and t.stride(-2) >= t.shape[-1] and t.data_ptr() % 16 == 0
        for t in codes
    )


def on_readable_codes(run: Run, a: Tensor, b: Tensor) -> Run:
    """Return ``run``, whose arguments begin with codes and scales of two operands by columns. If TMA cannot read codes
    like these, as plain PyTorch makes them, return a function that runs it on copies.
    """
    if are_readable(a, b):
        return run
    return lambda a, a_scale, b, *others: run(_copied(a), a_scale, _copied(b), *others)


def _copied(codes: Tensor) -> Tensor:
    return codes if are_readable(codes) else codes.clone(memory_format=torch.contiguous_format)


def readable_scale(scale: Tensor) -> Tensor:
    """Return scales, or a copy of them if the kernels cannot read their strides, as plain PyTorch makes them."""
    return scale if has_strides(scale) else with_strides(scale)


def of_codes(product: Run, a: Codes, b: Codes) -> Run:
    """Return a function of the codes and scales of two operands, and other tensors, that runs a product of both
    operands. If the kernels cannot read scales like these, as plain PyTorch makes them, it runs on copies.
    """
    if has_strides(a.scale) and has_strides(b.scale):
        return lambda a, a_scale, b, b_scale, *others: product(Codes(a, a_scale), Codes(b, b_scale), *others)
    return lambda a, a_scale, b, b_scale, *others: product(
        Codes(a, with_strides(a_scale)), Codes(b, with_strides(b_scale)), *others
    )
