"""Weight gradients that a kernel adds to ``weight.grad``, in place of autograd.

Autograd adds the gradient of each micro-batch to ``weight.grad`` in a pass of its own, which reads two tensors of the
weight's size and writes one. A kernel can add a gradient where it stores it:

- Before the backward steps of a call, `find` looks for weights whose ``grad`` kernels may add to, and `offered` offers
  these tensors to the steps.
- A step calls `take`. Its kernel rounds the gradient to the dtype of the weight, and adds it to the tensor: the sum has
  the bits of autograd's. The step returns the tensor as the gradient of the weight.
- `without_sums` gives autograd None in place of it. A graph of `torch.compile` has a tensor for each gradient. There,
  `pass_on` removes the tensor from the weight, and autograd makes the gradient, which is the sum, ``weight.grad``
  again, without a copy. If a later node of that graph raises an error, ``weight.grad`` is None.

A step that does not call `take` returns the gradient alone, and autograd adds it.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fusedmoe.ops.op import Op


ALIGNMENT = 16  # bytes, for kernels


class Sum(NamedTuple):
    """The sum of a weight's gradients so far."""

    variable: Tensor  # the weight, or the tensor of which it is ``.mT``
    grad: Tensor  # `variable.grad`, or ``.mT`` of it


class _Thread(threading.local):
    def __init__(self) -> None:
        self.sums: dict[Op, Sum] = {}


_thread = _Thread()


def find(weights: Iterable[tuple[Op, Any]], passed_on: bool) -> dict[Op, Sum]:
    """Return the sums that kernels may add to in this backward pass.

    Parameters
    ----------
    weights
        Each op of a call that has a weight, and autograd's node for the gradient of that weight; None if no gradient is
        required. With ``passed_on``, the node of the parameter, also if the weight is ``.mT`` of it.
    passed_on
        Whether `pass_on` follows, not `without_sums`.
    """
    found: dict[Op, Sum] = {}
    known = set()  # a second layer with the same weight gives autograd a gradient of its own
    for op, node in weights:
        transposed: bool = op.transposed_grad  # type: ignore[assignment]
        if transposed and not passed_on:
            node = node.next_functions[0][0] if type(node).__name__ == "TransposeBackward0" else None
        variable: Any = getattr(node, "variable", None)  # of a leaf's node
        if variable is None or id(variable) in known:
            continue
        known.add(id(variable))
        if _may_be_added_to(variable, node) and (_may_be_replaced if passed_on else _has_no_hook)(variable):
            grad = variable.grad
            assert grad is not None
            found[op] = Sum(variable, grad.mT if transposed else grad)
    return found


def node_of(weight: Tensor) -> Any:
    """Return autograd's node for the gradient of a weight that is a parameter; None for another tensor."""
    if not weight.is_leaf or not weight.requires_grad:
        return None
    with torch.enable_grad():
        of_view: Any = weight.view_as(weight).grad_fn
    return None if of_view is None else of_view.next_functions[0][0]  # None inside of another dispatch of autograd


def _may_be_added_to(variable: Tensor, node: Any) -> bool:
    """Whether autograd would add to a variable's gradient in place, and no other code sees the gradient alone."""
    grad = variable.grad
    if type(grad) is not Tensor or grad.requires_grad or variable._backward_hooks:
        return False
    if grad.dtype is not variable.dtype or not grad.is_contiguous() or not variable.is_contiguous():
        return False
    if grad.data_ptr() % ALIGNMENT or grad.is_inference():
        return False
    try:  # under torch.autograd.grad, the engine does not execute the node
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def _has_no_hook(variable: Tensor) -> bool:
    """Whether no hook waits for autograd to add a gradient."""
    return not variable._post_accumulate_grad_hooks


def _may_be_replaced(variable: Tensor) -> bool:
    """Whether ``variable.grad`` may become another tensor with the same memory."""
    grad = variable.grad
    assert grad is not None
    if grad.untyped_storage().nbytes() != grad.nbytes:  # part of a buffer of another framework
        return False
    if grad.is_cuda and torch.cuda.is_current_stream_capturing():  # a replay would not replace it
        return False
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")  # whose graph adds to `grad`
    return compiled_autograd is None or not compiled_autograd.in_compiled_autograd_region


@contextmanager
def offered(sums: dict[Op, Sum]) -> Iterator[None]:
    """Offer sums to the steps that run in this block."""
    before, _thread.sums = _thread.sums, dict(sums)
    try:
        yield
    finally:
        _thread.sums = before


def take(op: Op, dtype: torch.dtype) -> Tensor | None:
    """Return the tensor (E, N, K) to which a step must add the gradient of this op's weight, and which it then returns
    as the gradient; None if there is none of this dtype. A second step of the same op gets None.
    """
    found = _thread.sums.pop(op, None)
    return None if found is None or found.grad.dtype is not dtype else found.grad


def without_sums(sums: dict[Op, Sum], gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients that autograd adds."""
    added = _added(sums, gradients)
    return tuple([None if any(g is total.grad for total in added) else g for g in gradients]) if added else gradients


def pass_on(sums: dict[Op, Sum], gradients: Sequence[Tensor | None]) -> None:
    """Remove ``grad`` of the weights whose gradients are sums that contain it."""
    for variable, _ in _added(sums, gradients):
        variable.grad = None


def _added(sums: dict[Op, Sum], gradients: Sequence[Tensor | None]) -> list[Sum]:
    """Return the sums to which kernels have added, and count a change of them."""
    added = [total for total in sums.values() if any(g is total.grad for g in gradients)]
    for _, grad in added:
        torch.autograd.graph.increment_version(grad)  # kernels do not
    return added
