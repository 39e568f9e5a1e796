"""Checks of the tensors of a call. A rule declines those that its kernels cannot read, before it binds a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fusedmoe.builtin_rules.requirements import decline
from fusedmoe.fusion.language.rule import NothingToDo, require
from fusedmoe.kernels.sm90 import limits

_R = TypeVar("_R")

_PLAIN = (Tensor, torch.nn.Parameter)


def operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Decline operands with strides that the kernels cannot read. Leave a call without rows to plain PyTorch."""
    some_rows(x.shape[0])
    matrix("x", x)
    matrix("the weight", weight, transposed=True)
    contiguous("the bias", bias)


def some_rows(count: int) -> None:
    """Leave a call without rows to plain PyTorch."""
    if not count:
        raise NothingToDo("no rows")


def contiguous(what: str, *tensors: Tensor | None) -> None:
    """Decline tensors that are not contiguous; None is."""
    require(all(t is None or t.is_contiguous() for t in tensors), f"{what} is not contiguous")


def main_grad(grad: Tensor) -> Tensor:
    """Decline a ``main_grad`` that the kernels cannot add to; return it."""
    contiguous("main_grad", grad)
    decline(limits.why_not_address("main_grad", grad.data_ptr()))
    return grad


def gradient(grad: Tensor) -> None:
    """Decline a tensor subclass. Leave a call without rows to plain PyTorch. `on_readable` handles the strides."""
    some_rows(grad.shape[0])
    plain("the gradient", grad)


def matrix(name: str, t: Tensor, transposed: bool = False) -> None:
    """Decline a tensor subclass, and strides or an address that TMA cannot read."""
    plain(name, t)
    decline(limits.why_not_matrix(name, t.shape, t.stride(), t.data_ptr(), transposed))


def plain(name: str, t: Tensor) -> None:
    """Decline a tensor subclass."""
    require(type(t) in _PLAIN, "%s is a %s, not a plain tensor", name, type(t).__name__)


def index(source: Tensor, indices: tuple[Tensor, ...]) -> None:
    """Decline an index that is not contiguous, and a source whose rows are too far apart for the kernels. Leave a call
    without rows to plain PyTorch. ``indices`` is empty for rows in order.
    """
    for t in indices:
        some_rows(t.shape[0])
        contiguous("the index of the rows", t)
        decline(limits.why_not_gathered(source.stride(0)))


def is_readable(t: Tensor) -> bool:
    """Whether the kernels can read a tensor's strides. Autograd, for example, expands and transposes gradients."""
    if t.dim() == 1:
        return t.is_contiguous()
    return limits.why_not_matrix("", t.shape, t.stride(), t.data_ptr()) is None


def on_readable(t: Tensor, run: Callable[..., _R]) -> Callable[..., _R]:
    """Return ``run``, whose first argument is this tensor, if the kernels can read it. Otherwise, return a function
    that runs it on a copy.
    """
    if is_readable(t):
        return run
    return lambda t, *others: run(t.clone(memory_format=torch.contiguous_format), *others)


def as_matrix(t: Tensor) -> Tensor:
    """Return rows (..., features) as (R, features)."""
    return t if t.dim() == 2 else t.flatten(0, -2)


def as_rows_of(x: Tensor, y: Tensor) -> Tensor:
    """Return (R, features) with the leading dimensions of x."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
