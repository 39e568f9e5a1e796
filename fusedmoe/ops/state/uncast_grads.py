"""Gradients of weights that autocast has cast, in the dtype of the parameter.

Autograd casts such a gradient back to the dtype of the parameter, in a pass of its own that reads and writes a tensor
of the weight's size. A kernel can write this dtype, without rounding to the weight's:

- Before the backward steps of a call, `find` looks for such weights, and `offered` offers them to the steps.
- A step calls `take`, has its kernel write the dtype of the parameter, and returns the result of `Uncast.give`.
- `handed_over` gives the gradient to the node of the cast, and None to autograd, which would round the gradient.

A step that does not call `take` returns the gradient in the weight's dtype, and autograd casts it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusedmoe.base.autocast import CastWeight
from fusedmoe.ops.op import Op


class Uncast:
    """The gradient of one weight.

    - ``dtype``: that of the parameter.
    - ``gradient``: in this dtype; None until a step gives it.
    """

    def __init__(self, node: Any) -> None:
        self._node = node
        self.dtype: torch.dtype = node.dtype
        self.gradient: Tensor | None = None

    def give(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Give the gradient. Return a tensor without memory that stands for it, in the weight's ``dtype``: the step
        returns it.
        """
        self.gradient = gradient
        self._returned = gradient.new_empty((), dtype=dtype).expand(gradient.shape)
        return self._returned

    def is_returned(self, result: Tensor | None) -> bool:
        """Whether the result of a step stands for the gradient."""
        return self.gradient is not None and result is self._returned

    def hand_over(self) -> None:
        """Give the gradient to the node of the cast, which autograd runs after this backward pass."""
        self._node.unrounded, self.gradient = self.gradient, None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.uncast: dict[Op, Uncast] = {}


_thread = _Thread()


def find(weights: Iterable[tuple[Op, Any, Tensor | None]]) -> dict[Op, Uncast]:
    """Return the weights that autocast has cast, of those whose gradients this backward pass computes.

    ``weights``: as for `grad_sums.find`.
    """
    found: dict[Op, Uncast] = {}
    of_cast: object = CastWeight._backward_cls
    for op, node, _ in weights:
        if type(node) is of_cast:
            node.unrounded = None  # of a backward pass that ended with an error
            if _is_executed(node):
                found[op] = Uncast(node)
    return found


def _is_executed(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


@contextmanager
def offered(uncast: dict[Op, Uncast]) -> Iterator[None]:
    """Offer weights to the steps that run in this block."""
    before, _thread.uncast = _thread.uncast, dict(uncast)
    try:
        yield
    finally:
        _thread.uncast = before


def dtype_of(op: Op) -> torch.dtype | None:
    """Return the dtype of the parameter, if `take` would return the weight of this op."""
    found = _thread.uncast.get(op)
    return None if found is None else found.dtype


def take(op: Op) -> Uncast | None:
    """Return the weight of this op if the step may give its gradient in the dtype of the parameter; once."""
    return _thread.uncast.pop(op, None)


def given(uncast: dict[Op, Uncast], gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the results of the steps, with the gradients that some of them stand for."""
    return tuple(next((u.gradient for u in uncast.values() if u.is_returned(g)), g) for g in gradients)


def handed_over(uncast: dict[Op, Uncast], gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Give the gradients to the nodes of their casts, and return those that autograd gets."""
    left = tuple(None if any(g is u.gradient for u in uncast.values()) else g for g in gradients)
    for u in uncast.values():
        u.hand_over()
    return left
