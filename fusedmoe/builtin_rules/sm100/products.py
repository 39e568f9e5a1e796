"""The products of packed operands by format: the functions of the kernels, and how their results become codes.

MXFP8: the epilogue of a product writes codes by rows and by columns. NVFP4: it writes bf16, and another kernel
quantizes these packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.builtin_rules.sm100.nvfp4_forms import bind_packed_forms, extra_bytes, launches_of
from fusedmoe.fusion.language.rule import PlanContext
from fusedmoe.kernels.sm100 import grouped, grouped_nvfp4
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.formats import E2M1, QuantizedSpec, Quantizer

ByAxis = dict[int, tuple[Tensor, ...]]  # forms of a result: by rows, -1, and by columns, -2
Optional = Tensor | None


class Products:
    """Products of MXFP8 operands."""

    size = 2  # tensors of a form
    kernels: Any = grouped

    def split(self, tensors: Sequence[Tensor | None]) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return the two forms that a list of tensors begins with, and the rest."""
        n = self.size
        return tuple(tensors[:n]), tuple(tensors[n : 2 * n]), tuple(tensors[2 * n :])

    def launches(self, quantizer: Quantizer | None) -> int:
        """Return the launches that quantize a result after the product's own."""
        return 0

    def extra_bytes(self, quantizer: Quantizer | None, values: int) -> int:
        """Return the bytes that move between the product and the codes of these values."""
        return 0

    def bind_activation(
        self, x: Tensor, features: int, ends: Tensor, quantizer: Quantizer, axes: Sequence[int], activation: Activation
    ) -> Callable[..., tuple[Tensor, ByAxis]]:
        """Return a function of ``(x, weight, bias, ends, factor)``: the preactivation, and forms of the activation.

        - ``x``, ``ends``: codes and ends like those of its calls.
        - ``features``: the width of the activation.
        - ``quantizer``, ``axes``: what the activation is quantized by, and the forms that are read.
        """

        def run(x: Any, weight: Any, bias: Optional, ends: Tensor, factor: Optional) -> tuple[Tensor, ByAxis]:
            p, rows, columns = grouped.gemm_activation_quantize(x, weight, bias, ends, factor, activation)
            return p, {-1: rows, -2: columns}

        return run

    def bind_derivative(
        self, p: Tensor, ends: Tensor, quantizer: Quantizer, axes: Sequence[int], activation: Activation
    ) -> Callable[..., tuple[ByAxis, Optional]]:
        """Return a function of ``(dy, weight, p, ends, factor)``: forms of the gradient of the preactivation p, and the
        gradient of the factor. The parameters are those of `bind_activation`.
        """

        def run(dy: Any, weight: Any, p: Tensor, ends: Tensor, factor: Optional) -> tuple[ByAxis, Optional]:
            rows, columns, dfactor = grouped.gemm_derivative_quantize(dy, weight, p, ends, factor, activation)
            return {-1: rows, -2: columns}, dfactor

        return run


class NVFP4Products(Products):
    """Products of NVFP4 operands."""

    size = 3
    kernels = grouped_nvfp4

    def launches(self, quantizer: Quantizer | None) -> int:
        return 0 if quantizer is None else launches_of(quantizer)

    def extra_bytes(self, quantizer: Quantizer | None, values: int) -> int:
        in_bf16 = 2 * 2 * values  # written, and read once
        return 0 if quantizer is None else in_bf16 + extra_bytes(quantizer, values)

    def bind_activation(
        self, x: Tensor, features: int, ends: Tensor, quantizer: Quantizer, axes: Sequence[int], activation: Activation
    ) -> Callable[..., tuple[Tensor, ByAxis]]:
        like = x.new_empty(x.shape[0], features, dtype=torch.bfloat16)
        quantize = _bind_forms(like, ends, quantizer, axes)

        def run(x: Any, weight: Any, bias: Optional, ends: Tensor, factor: Optional) -> tuple[Tensor, ByAxis]:
            p, y = grouped_nvfp4.gemm_activation(x, weight, bias, ends, factor, activation)
            return p, quantize(y, ends)

        return run

    def bind_derivative(
        self, p: Tensor, ends: Tensor, quantizer: Quantizer, axes: Sequence[int], activation: Activation
    ) -> Callable[..., tuple[ByAxis, Optional]]:
        quantize = _bind_forms(p, ends, quantizer, axes)

        def run(dy: Any, weight: Any, p: Tensor, ends: Tensor, factor: Optional) -> tuple[ByAxis, Optional]:
            dp, dfactor = grouped_nvfp4.gemm_derivative(dy, weight, p, ends, factor, activation)
            return quantize(dp, ends), dfactor

        return run


def _bind_forms(
    like: Tensor, ends: Tensor, quantizer: Quantizer, axes: Sequence[int]
) -> Callable[[Tensor, Tensor], ByAxis]:
    """Return the function that quantizes packed rows, whose experts end at ``ends``."""
    run = bind_packed_forms(like, quantizer, ends, rows=-1 in axes, columns=-2 in axes, packed=True)
    order = sorted(axes, reverse=True)
    return lambda rows, ends: dict(zip(order, run(rows, ends), strict=True))


MXFP8, NVFP4 = Products(), NVFP4Products()


def products_of(ctx: PlanContext, operand: str) -> Products:
    """Return the products for the format of a quantized operand."""
    spec = ctx.spec(operand)
    return NVFP4 if isinstance(spec, QuantizedSpec) and spec.format.element == E2M1 else MXFP8
