"""``sm90.dequantized_gemm``, ``sm90.dequantized_dgrad`` and ``sm90.dequantized_wgrad``: grouped products of operands in
formats that Hopper's tensor cores do not multiply, such as MXFP8 and NVFP4.

A kernel turns the codes and block scales of each operand into bf16, which is exact, and the kernels for bf16 multiply
the results. Scales of experts are factors of the product: they are applied to its fp32 sums, or to a weight gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.requirements import OnSm90, decline, quantized_spec
from fusedmoe.builtin_rules.rows.narrow_forms import is_narrow
from fusedmoe.fusion.language.rule import FusionRule, NothingToDo, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.quantize import format_functions
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.kernels.torch import grouped_gemm
from fusedmoe.kernels.torch.quantized_products import NATIVE, path
from fusedmoe.numerics.formats import E2M1, Format, QuantizedSpec
from fusedmoe.numerics.formats.format import column_block
from fusedmoe.numerics.formats.groups import group_of, of_group, padded_ends
from fusedmoe.ops.grouped_linear import Dgrad, GroupedLinear, Wgrad, WgradIntoMainGrad

LAUNCHES = 3  # without those on values per row or per expert


class _Operand(NamedTuple):
    """Tensors of a quantized operand."""

    codes: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None


class _Pair(NamedTuple):
    """The formats of the two operands of a product."""

    a: Format
    b: Format

    def split(self, tensors: tuple[Tensor | None, ...]) -> tuple[_Operand, _Operand, tuple[Tensor | None, ...]]:
        """Return the operands that a list of tensors begins with, and the rest."""
        first = 3 if self.a.tensor_scale else 2
        last = first + (3 if self.b.tensor_scale else 2)
        return _Operand(*tensors[:first]), _Operand(*tensors[first:last]), tensors[last:]  # type: ignore[arg-type]

    def factor(self, a: _Operand, b: _Operand) -> Tensor | None:
        """The product of the operands' scales per expert, (E,) fp32."""
        of_a, of_b = _of_experts(a, self.a), _of_experts(b, self.b)
        if of_a is None or of_b is None:
            return of_b if of_a is None else of_a
        return of_a * of_b

    @property
    def scaled(self) -> bool:
        """Whether either operand has a scale per expert."""
        return any(format.tensor_scale or format.block[1] is None for format in self)


def _of_experts(operand: _Operand, format: Format) -> Tensor | None:
    return operand.scale if format.block[1] is None else operand.tensor_scale


class _Dequantized(OnSm90):
    """Base of these rules. It precedes `FusionRule` in the bases."""

    quantized_only: ClassVar[bool] = True
    operands: ClassVar[tuple[str, str]]

    def supports(self, ctx: PlanContext) -> None:
        for name in self.operands:
            spec = quantized_spec(ctx, name, "both operands quantized")
            format = spec.format
            expected = "blocks of 16 or 32 values, or one scale per tensor"
            narrow = is_narrow(format, of_weights=spec.stacked) and format.block != (1, None)
            require(narrow, "no kernel dequantizes %s operands yet: expected %s", format, expected)
            sorted_ = spec.stacked or spec.experts is not None
            require(sorted_, "%s was quantized without experts", name)

    def check(self, ctx: PlanContext, **widths: int) -> int:
        """Decline operands that need no kernel, or that the kernels cannot read; return the bytes of the bf16 operands,
        each written and read.
        """
        specs = self.specs(ctx)
        if path(*specs, ctx.device) == NATIVE:
            raise NothingToDo("F.scaled_grouped_mm multiplies the codes")
        moved = 0
        for name, spec in zip(self.operands, specs, strict=True):
            moved += 4 * math.prod(spec.shape)
            require(spec.dtype is torch.bfloat16, "%s is %s: expected bfloat16", name, spec.dtype)
            lines = spec.tensors()[0][0][-2]
            block = spec.format.block[0] or 1
            require(lines % block == 0, "%s has %d lines: expected a multiple of %d", name, lines, block)
        for name, width in widths.items():
            decline(limits.why_not_width_of_codes(name, width))
        return moved

    def specs(self, ctx: PlanContext) -> tuple[QuantizedSpec, QuantizedSpec]:
        """The specs of the operands, after `supports`."""
        a, b = (quantized_spec(ctx, name, "") for name in self.operands)
        return a, b

    def pair(self, ctx: PlanContext) -> _Pair:
        a, b = self.specs(ctx)
        return _Pair(a.format, b.format)


def _bind_values(operand: _Operand, format: Format, transposed: bool = False) -> tuple[Callable[..., Tensor], Tensor]:
    """Return the function of an operand that returns it in bf16, and an empty tensor like its results."""
    guard_codes(operand.codes, format)
    run = format_functions.bind_dequantize(operand.codes, operand.scale, format, transposed=transposed)
    *stack, lines, length = operand.codes.shape
    length *= 2 if format.element == E2M1 else 1
    shape = (length, lines) if transposed else (*stack, lines, length)
    like = operand.codes.new_empty(shape, dtype=torch.bfloat16)
    return lambda operand: run(operand.codes, operand.scale), like


def guard_codes(codes: Tensor, format: Format) -> None:
    """Decline codes whose lines do not begin at multiples of 16 codes. Leave a call without rows to plain PyTorch."""
    guards.some_rows(codes.numel())
    unit = 8 if format.element == E2M1 else 16  # bytes
    *matrices, pitch, last = codes.stride()
    dense = not matrices or matrices[0] == pitch * codes.shape[-2]
    readable = last == 1 and pitch % unit == 0 and dense and codes.data_ptr() % 16 == 0 and codes.shape[-1] % unit == 0
    require(readable, "codes have strides %s: expected lines of a multiple of 16 codes", tuple(codes.stride()))


def _bind_rows_times(pair: _Pair, ctx: PlanContext, tensors: tuple[Tensor | None, ...]) -> Run:
    """Return a function of rows, weights, bias and offsets: the product of rows and weights."""
    rows, weight, (bias, _) = pair.split(tensors)
    (of_rows, rows_like), (of_weight, weight_like) = _bind_values(rows, pair.a), _bind_values(weight, pair.b)
    guards.contiguous("the bias", bias)
    factor_like = rows_like.new_empty(rows_like.shape[0], dtype=torch.float32) if pair.scaled else None
    fused_bias = None if pair.scaled else bias  # the factors are of the product, not of the bias
    product = products.bind_grouped_gemm(rows_like, weight_like, fused_bias, factor_like, ctx.options)

    def run(*tensors: Tensor | None) -> Tensor:
        rows, weight, (bias, offsets_E) = pair.split(tensors)
        assert offsets_E is not None
        factor_R = None
        factor_E = pair.factor(rows, weight)
        if factor_E is not None:
            factor_R = of_group(factor_E, group_of(offsets_E, rows.codes.shape[0]))
        fused = bias if factor_R is None else None
        y = product(of_rows(rows), of_weight(weight), fused, offsets_E, factor_R)
        return y if bias is None or fused is bias else grouped_gemm.grouped_bias(y, bias, offsets_E)

    return run


class DequantizedGemm(_Dequantized, FusionRule, name="sm90.dequantized_gemm", direction="forward"):
    """``y[r] = x[r] @ weight[e].T + bias[e]``."""

    fc: GroupedLinear
    operands = ("input", "fc.weight")

    def offer(self, ctx: PlanContext) -> Step:
        moved = self.check(ctx, in_features=self.fc.in_features, out_features=self.fc.out_features)
        needs = (*self.operands, "fc.bias", "offsets")
        return Step(needs=needs, gives=("output",), zeroes_tail=True, launches=LAUNCHES, extra_bytes=moved)

    def bind(self, ctx: PlanContext, *tensors: Tensor | None) -> Run:
        return _bind_rows_times(self.pair(ctx), ctx, tensors)


class DequantizedDgrad(_Dequantized, FusionRule, name="sm90.dequantized_dgrad", direction="backward"):
    """``dx[r] = dy[r] @ weight[e]``. It reads the weight by columns."""

    dgrad: Dgrad
    operands = ("grad_output", "dgrad.weight")

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.dgrad.op
        moved = self.check(ctx, in_features=fc.in_features, out_features=fc.out_features)
        needs = (*self.operands, "offsets")
        return Step(needs=needs, gives=("grad_input",), zeroes_tail=True, launches=LAUNCHES, extra_bytes=moved)

    def bind(self, ctx: PlanContext, *tensors: Tensor) -> Run:
        run = _bind_rows_times(self.pair(ctx), ctx, (*tensors[:-1], None, tensors[-1]))
        return lambda *tensors: run(*tensors[:-1], None, tensors[-1])


class DequantizedWgrad(_Dequantized, FusionRule, name="sm90.dequantized_wgrad", direction="backward"):
    """``dW[e] = dy[rows of e].T @ x[rows of e]``, over padded rows. Rotated operands are multiplied as they are, as
    `fusedmoe.kernels.torch.quantized_products` does.

    For `WgradIntoMainGrad`, the result is added, unrounded, to the weight's fp32 ``main_grad``.
    """

    wgrad: Wgrad | WgradIntoMainGrad
    operands = ("grad_output", "wgrad.input")

    def offer(self, ctx: PlanContext) -> Step:
        fc = self.wgrad.op
        moved = self.check(ctx, in_features=fc.in_features, out_features=fc.out_features)
        dy, x = self.specs(ctx)
        alike = dy.rotated is x.rotated and column_block(dy.format) == column_block(x.format)
        require(alike, "%s and %s are padded or rotated differently", *self.operands)
        dtype = ctx.dtype("wgrad.weight")
        require(dtype is torch.bfloat16, "the weight is %s: expected bfloat16", dtype)
        needs = (*self.operands, "offsets")
        return Step(needs=needs, gives=("wgrad.grad_weight",), launches=LAUNCHES, extra_bytes=moved)

    def bind(self, ctx: PlanContext, *tensors: Tensor) -> Run:
        accumulating = self.wgrad if isinstance(self.wgrad, WgradIntoMainGrad) else None
        pair = self.pair(ctx)
        block, scaled = column_block(pair.a), pair.scaled
        dy, x, (offsets_E,) = pair.split(tensors)
        assert offsets_E is not None
        of_dy, dy_like = _bind_values(dy, pair.a, transposed=True)
        of_x, x_like = _bind_values(x, pair.b, transposed=True)
        dtype, adds = torch.float32 if accumulating else torch.bfloat16, accumulating is not None and not scaled
        product = products.bind_grouped_wgrad(
            dy_like, x_like, offsets_E, dtype, adds, ctx.options, transposed=self.wgrad.transposed
        )

        def run(*tensors: Tensor) -> Tensor | None:
            dy, x, (offsets_E,) = pair.split(tensors)
            assert offsets_E is not None
            ends_E, factor_E = padded_ends(offsets_E, block), pair.factor(dy, x)
            main_grad = None if accumulating is None else accumulating.main_grad()  # may differ in each call
            if main_grad is not None and factor_E is None:
                guards.main_grad(main_grad)
            grad = product(of_dy(dy), of_x(x), ends_E, main_grad if adds else None)
            if accumulating is None or main_grad is None:
                if factor_E is not None:
                    # .data does not count the change: a gradient that changes after the backward pass makes the layer's
                    # quantized weight invalid
                    torch.mul(grad, factor_E[:, None, None], out=grad.data)
                return grad
            if factor_E is not None:
                main_grad.addcmul_(grad, factor_E[:, None, None])
            return accumulating.added()

        return run
