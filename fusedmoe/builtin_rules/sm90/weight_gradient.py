"""The product of a weight's gradient, with the tensor that its kernel writes or adds to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from fusedmoe.builtin_rules.sm90.backend import decline
from fusedmoe.fusion.rule import require
from fusedmoe.kernels.sm90 import functions, limits
from fusedmoe.ops.grouped_linear import Wgrad, WgradIntoMainGrad

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch import Tensor

    from fusedmoe.kernels.options import KernelOptions

    Product: TypeAlias = Callable[..., Tensor]  # of (out, *operands), which returns `out` or a new tensor
    BindProduct: TypeAlias = Callable[..., Product]  # of (dtype, whether the kernel adds to `out`, *operands)


class WeightGradient:
    """``dW[e] = dy[rows of e].T @ x[rows of e]``, bound to operands like these.

    The kernel writes a new tensor, or adds dW to one that exists: unrounded to the fp32 ``main_grad`` of
    `WgradIntoMainGrad`, rounded to the sum of `Wgrad.sum_so_far`.

    Parameters
    ----------
    wgrad
        The step.
    dtype
        The dtype of dW for autograd.
    bind
        ``bind(dtype, adds, *operands)`` returns the product ``(out, *operands)``. With ``adds``, the product adds to
        ``out``, which is None otherwise.
    operands
        The tensors of the call.
    adds_to_sum
        Whether there is a kernel that adds to the sum.
    """

    def __init__(
        self,
        wgrad: Wgrad | WgradIntoMainGrad,
        dtype: torch.dtype,
        bind: BindProduct,
        *operands: Tensor,
        adds_to_sum: bool = True,
    ) -> None:
        self._wgrad, self._dtype, self._bind, self._adds_to_sum = wgrad, dtype, bind, adds_to_sum
        self._writing: Product | None = None
        self._adding: Product | None = None
        if isinstance(wgrad, WgradIntoMainGrad):
            self._adding = bind(torch.float32, True, *operands)
        else:
            self._writing = bind(dtype, False, *operands)

    def main_grad(self) -> Tensor | None:
        """Return ``main_grad``, which may be a different tensor in each call; None for `Wgrad`. Decline one that the
        kernel cannot add to. A step calls this before its first launch.
        """
        if not isinstance(self._wgrad, WgradIntoMainGrad):
            return None
        main_grad = self._wgrad.main_grad()
        require(main_grad.is_contiguous(), "main_grad is not contiguous")
        decline(limits.why_not_address("main_grad", main_grad.data_ptr()))
        return main_grad

    def __call__(self, main_grad: Tensor | None, *operands: Tensor) -> Tensor | None:
        """Return the gradient for autograd."""
        if isinstance(self._wgrad, WgradIntoMainGrad):
            assert self._adding is not None
            self._adding(main_grad, *operands)
            return self._wgrad.added()
        so_far = self._wgrad.sum_so_far(self._dtype) if self._adds_to_sum else None
        if so_far is None:
            assert self._writing is not None
            return self._writing(None, *operands)
        if self._adding is None:  # most calls never add
            self._adding = self._bind(self._dtype, True, *operands)
        self._adding(so_far, *operands)
        return so_far


def of_rows(
    wgrad: Wgrad | WgradIntoMainGrad,
    dtype: torch.dtype,
    options: KernelOptions,
    gathered: functions.WgradOperand | None,
    beside: bool,
    *operands: Tensor,
) -> WeightGradient:
    """Return the gradient for operands ``(dy, x, offsets, *index)``; see `functions.bind_grouped_wgrad`."""

    def bind(dtype: torch.dtype, adds: bool, dy: Tensor, x: Tensor, offsets: Tensor, *index: Tensor) -> Product:
        gather = index[0] if index else None
        product = functions.bind_grouped_wgrad(
            dy, x, offsets, dtype, adds, options, gather, gathered, beside, transposed=wgrad.transposed
        )
        return lambda out, dy, x, offsets, *index: product(dy, x, offsets, out, *index)

    return WeightGradient(wgrad, dtype, bind, *operands)
