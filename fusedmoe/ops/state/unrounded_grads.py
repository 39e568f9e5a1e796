"""Gradients of weights that autocast has cast, in the dtype of the parameter.

Autograd rounds such a gradient to the dtype of autocast, and casts it back in a pass of its own, which reads and writes
a tensor of the weight's size. A kernel can write the dtype of the parameter, unrounded:

- Before the backward steps of a call, `find` looks for weights that autocast has cast, and `offered` offers their
  gradients to the steps.
- A step calls `take`, has its kernel write the dtype of the parameter, and returns the result of `Unrounded.give`.
- `without_given` stores the gradient at the node of the cast, and gives autograd None in place of it.

A step that does not call `take` returns the rounded gradient, and autograd casts it.
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


class Unrounded:
    """The gradient of one weight.

    - ``dtype``: that of the parameter.
    - ``gradient``: in this dtype; None until a step gives it.
    - ``placeholder``: the result of the step that gave it.
    """

    def __init__(self, node: Any) -> None:
        self.node = node  # of the cast
        self.dtype: torch.dtype = node.dtype
        self.gradient: Tensor | None = None
        self.placeholder: Tensor | None = None

    def give(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Give the gradient. Return a placeholder, one element of this dtype that is expanded: the step returns it,
        since its result must have the dtype of the cast weight.
        """
        self.gradient = gradient
        self.placeholder = gradient.new_empty((), dtype=dtype).expand(gradient.shape)
        return self.placeholder


class _Thread(threading.local):
    def __init__(self) -> None:
        self.offered: dict[Op, Unrounded] = {}


_thread = _Thread()


# ---- the weights ----------------------------------------------------------------------------------------------------


def find(weights: Iterable[tuple[Op, Any, Tensor | None]]) -> dict[Op, Unrounded]:
    """Return the gradients that steps may give, of the weights whose gradients this backward pass computes.

    ``weights``: as for `grad_sums.find`.
    """
    found: dict[Op, Unrounded] = {}
    of_cast: object = CastWeight._backward_cls
    for op, node, _ in weights:
        if type(node) is of_cast and _is_executed(node) and _is_reached(node.next_functions[0][0]):
            found[op] = Unrounded(node)
    return found


def _is_executed(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def _is_reached(node: Any) -> bool:
    """Whether the engine passes a gradient to the node of a parameter. If not, the caller of ``torch.autograd.grad``
    asks for the gradient of the cast weight, and the engine ends there.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf, under torch.autograd.grad
        return True


# ---- the steps ------------------------------------------------------------------------------------------------------


@contextmanager
def offered(found: dict[Op, Unrounded]) -> Iterator[None]:
    """Offer gradients to the steps that run in this block."""
    before, _thread.offered = _thread.offered, dict(found)
    try:
        yield
    finally:
        _thread.offered = before


def dtype_of(op: Op) -> torch.dtype | None:
    """Return the dtype of the parameter, if `take` would return the gradient of this op's weight."""
    found = _thread.offered.get(op)
    return None if found is None else found.dtype


def take(op: Op) -> Unrounded | None:
    """Return the gradient of this op's weight for a step to give; None if autograd casts it. A second step of the same
    op gets None.
    """
    return _thread.offered.pop(op, None)


# ---- the results of the steps ---------------------------------------------------------------------------------------


def with_given(found: dict[Op, Unrounded], results: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the results of the steps, with the gradients that they gave in place of the placeholders.

    Raises `RuntimeError`: a placeholder is no result: a step has changed it, and the gradient would be lost.
    """
    given = {id(u.placeholder): u.gradient for u in found.values() if u.gradient is not None}
    if not given.keys() <= {id(r) for r in results}:
        raise RuntimeError("a step changed the placeholder of a weight gradient, which has no values")
    return tuple([given.get(id(r), r) for r in results])


def without_given(found: dict[Op, Unrounded], gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the gradients that autograd gets: None in place of those that steps gave. Those are stored at the nodes of
    their casts, which autograd runs later in this backward pass.
    """
    given = {id(u.gradient) for u in found.values() if u.gradient is not None}
    for u in found.values():
        if u.gradient is not None:
            # other backward passes over the same graph may run before the node does
            u.node.unrounded[torch._C._current_graph_task_id()] = u.gradient
    return tuple([None if id(g) in given else g for g in gradients])
