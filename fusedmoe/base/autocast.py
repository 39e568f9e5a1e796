"""Autocast: a chain casts its arguments once, when it is called, and runs its ops without autocast."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fusedmoe.base.specs import TensorSpec

_NOTHING = nullcontext()


@functools.cache
def _kind(device: torch.device) -> str:
    return device.type  # creates a new string in every call


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast uses on a device; None if autocast is off, and for the meta device."""
    kind = device.type if torch.compiler.is_compiling() else _kind(device)
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast is off."""
    if autocast_dtype(device) is None:
        return _NOTHING
    return torch.autocast(device.type, enabled=False)


def cast_arguments(
    arguments: Sequence[Tensor | None], dtype: torch.dtype, casts: Sequence[bool], weights: Collection[int] = ()
) -> list[Tensor | None]:
    """Return the arguments of a chain in this dtype, except those of fp64.

    ``casts`` is whether each one is cast. ``weights`` are the positions of those whose casts are `CastWeight`.
    """
    return [
        (cast_weight(t, dtype) if i in weights else t.to(dtype)) if cast and t is not None and is_cast(t.dtype) else t
        for i, (t, cast) in enumerate(zip(arguments, casts, strict=True))
    ]


class CastWeight(torch.autograd.Function):
    """A weight in the dtype of autocast, as ``weight.to(dtype)``.

    A kernel may write the gradient in the dtype of the parameter. Autograd would round such a gradient to the dtype of
    the cast weight. So it gets None, and the gradient is in ``unrounded`` of this function's node, by the number of the
    backward pass; see `fusedmoe.ops.state.unrounded_grads`.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype, ctx.unrounded = weight.dtype, {}
        ctx.set_materialize_grads(False)
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        unrounded = ctx.unrounded.pop(torch._C._current_graph_task_id(), None)
        if grad is None:
            return unrounded, None
        grad = grad.to(ctx.dtype)  # of another use, such as in the graph of first derivatives (create_graph=True)
        return grad if unrounded is None else grad + unrounded, None


# without the work for functorch, see `fusedmoe.call.autograd`
_cast = super(torch.autograd.Function, CastWeight).apply


def cast_weight(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in the dtype of autocast, by `CastWeight` if it is a plain fp32 tensor that gets a gradient."""
    if (
        t.requires_grad
        and t.dtype is torch.float32
        and dtype is not torch.float32
        and type(t) in (Tensor, torch.nn.Parameter)
        and torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()
    ):
        return _cast(t, dtype)  # type: ignore[no-any-return, no-untyped-call]
    return t.to(dtype)


def cast_specs(
    specs: Sequence[TensorSpec | None], dtype: torch.dtype, casts: Sequence[bool]
) -> list[TensorSpec | None]:
    """Return the specs of the tensors that `cast_arguments` would return."""
    return [
        s._replace(dtype=dtype) if cast and s is not None and is_cast(s.dtype) else s
        for s, cast in zip(specs, casts, strict=True)
    ]


def casts_rows(x: Tensor) -> bool | None:
    """Return whether autocast changes the dtype of rows like x; None if it is off."""
    dtype = autocast_dtype(x.device)
    return None if dtype is None else x.dtype is not dtype and is_cast(x.dtype)


def is_cast(dtype: torch.dtype) -> bool:
    """Whether autocast casts tensors of this dtype."""
    return dtype.is_floating_point and dtype is not torch.float64
