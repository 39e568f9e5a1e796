"""The product of a weight's gradient, with the tensor that its kernel writes or adds to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusedmoe.builtin_rules import guards
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.launch import Operand
from fusedmoe.ops.grouped_linear import Wgrad, WgradIntoMainGrad

WeightGradient: TypeAlias = "_IntoMainGrad | _IntoGrad"
Product: TypeAlias = Callable[..., Tensor]  # of (out, *operands), which returns `out` or a new tensor
BindProduct: TypeAlias = Callable[..., Product]  # of (dtype, whether the kernel adds to `out`, *operands)


class _IntoMainGrad:
    """A weight gradient that is added, unrounded, to the fp32 ``main_grad`` of the weight."""

    def __init__(self, wgrad: WgradIntoMainGrad, bind: BindProduct, operands: tuple[Any, ...]) -> None:
        self._wgrad, self._product = wgrad, bind(torch.float32, True, *operands)

    def main_grad(self) -> Tensor | None:
        """Return ``main_grad``, which may be a different tensor in each call. Decline one that the kernel cannot add
        to. A step calls this before its first launch.
        """
        return guards.main_grad(self._wgrad.main_grad())

    def __call__(self, main_grad: Tensor | None, *operands: Any) -> Tensor | None:
        """Return the gradient for autograd."""
        self._product(main_grad, *operands)
        return self._wgrad.added()


class _IntoGrad:
    """A weight gradient that is a new tensor, in the dtype of the parameter if autocast has cast the weight, or that is
    rounded and added to the sum of `Wgrad.sum_so_far`.
    """

    def __init__(
        self, wgrad: Wgrad, dtype: torch.dtype, bind: BindProduct, operands: tuple[Any, ...], adds_to_sum: bool
    ) -> None:
        self._wgrad, self._dtype, self._bind, self._adds_to_sum = wgrad, dtype, bind, adds_to_sum
        self._products: dict[tuple[torch.dtype, bool], Product] = {}  # most kinds of calls have one
        self._product(wgrad.unrounded_dtype() or dtype, False, operands)

    def _product(self, dtype: torch.dtype, adds: bool, operands: tuple[Any, ...]) -> Product:
        product = self._products.get((dtype, adds))
        if product is None:
            product = self._products[dtype, adds] = self._bind(dtype, adds, *operands)
        return product

    def main_grad(self) -> Tensor | None:
        """Return None."""
        return None

    def __call__(self, main_grad: Tensor | None, *operands: Any) -> Tensor | None:
        """Return the gradient for autograd."""
        so_far = self._wgrad.sum_so_far(self._dtype) if self._adds_to_sum else None
        if so_far is not None:
            self._product(self._dtype, True, operands)(so_far, *operands)
            return so_far
        unrounded = self._wgrad.unrounded()
        if unrounded is None:
            return self._product(self._dtype, False, operands)(None, *operands)
        return unrounded.give(self._product(unrounded.dtype, False, operands)(None, *operands), self._dtype)


def weight_gradient(
    wgrad: Wgrad | WgradIntoMainGrad, dtype: torch.dtype, bind: BindProduct, *operands: Any, adds_to_sum: bool = True
) -> WeightGradient:
    """Return ``dW[e] = dy[rows of e].T @ x[rows of e]``, bound to operands like these.

    - ``dtype``: the dtype of dW for autograd.
    - ``bind``: ``bind(dtype, adds, *operands)`` returns the product ``(out, *operands)``. With ``adds``, the product
      adds to ``out``, which is None otherwise.
    - ``operands``: the tensors of the call.
    - ``adds_to_sum``: whether there is a kernel that adds to the sum.
    """
    if isinstance(wgrad, WgradIntoMainGrad):
        return _IntoMainGrad(wgrad, bind, operands)
    return _IntoGrad(wgrad, dtype, bind, operands, adds_to_sum)


def of_rows(
    wgrad: Wgrad | WgradIntoMainGrad,
    dtype: torch.dtype,
    options: KernelOptions,
    gathered: products.WgradOperand | None,
    beside: bool,
    *operands: Any,
    adds_to_sum: bool = True,
) -> WeightGradient:
    """Return `weight_gradient` for operands ``(dy, x, offsets, *index)``; see `products.bind_grouped_wgrad`."""

    def bind(dtype: torch.dtype, adds: bool, dy: Operand, x: Operand, offsets: Tensor, *index: Tensor) -> Product:
        gather = index[0] if index else None
        product = products.bind_grouped_wgrad(
            dy, x, offsets, dtype, adds, options, gather, gathered, beside, transposed=wgrad.transposed
        )
        return lambda out, dy, x, offsets, *index: product(dy, x, offsets, out, *index)

    return weight_gradient(wgrad, dtype, bind, *operands, adds_to_sum=adds_to_sum)
