"""Weight gradients that a kernel adds to ``weight.grad``, in place of autograd.

Autograd adds the gradient of each micro-batch to ``weight.grad`` in a pass of its own, which reads two tensors of the
weight's size and writes one. A kernel can add a gradient where it stores it:

- Before the backward steps of a call, `find` looks for weights whose ``grad`` kernels may add to. `offered` offers
  these tensors to the steps.
- A step calls `take`. Its kernel rounds the gradient to the dtype of the weight and adds it to the tensor, as autograd
  does. The step returns the tensor as the gradient of the weight.
- `without_sums` gives autograd None in place of it.

A step that does not call `take` returns the gradient alone, and autograd adds it.

A graph of `torch.compile` has a tensor for each gradient. There, `hand_over` removes the tensor from the weight, and
autograd makes the gradient, which is the sum, ``weight.grad`` again. This is right only if the graph passes the
gradient on to autograd as it is. So a graph offers the sums of its own inputs alone, see `is_input`, and no two calls
of its backward operator are equal, since torch would replace both by one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.ops.op import Op

ALIGNMENT = 16  # bytes, for kernels
DIMS, LAST_AXES = 3, {1, 2}  # of a weight; those that ``.mT`` exchanges


class Sum(NamedTuple):
    """The sum of a weight's gradients so far."""

    variable: Tensor  # the weight, or the tensor of which it is ``.mT``
    grad: Tensor  # `variable.grad`, or ``.mT`` of it


class _Thread(threading.local):
    def __init__(self) -> None:
        self.sums: dict[Op, Sum] = {}


_thread = _Thread()


# ---- the weights whose gradients may be added to --------------------------------------------------------------------


def find(weights: Iterable[tuple[Op, Any, Tensor | None]], in_graph: bool) -> dict[Op, Sum]:
    """Return the sums that kernels may add to in this backward pass.

    - ``weights``: each op of a call that has a weight; autograd's node for the gradient of the weight, or None; and the
      tensor that was passed, if it is ``.mT`` of a parameter. ``in_graph``: the node is that of the parameter.
    - ``in_graph``: whether the backward pass is part of a compiled graph.
    """
    found: dict[Op, Sum] = {}
    known = set()  # a second layer with the same weight gives autograd a gradient of its own
    for op, node, view in weights:
        transposed: bool = op.transposed_grad  # type: ignore[assignment]
        if transposed and not in_graph:
            node = None if view is not None and _is_watched(view) else _node_of_source(node)
        variable: Any = getattr(node, "variable", None)  # of a leaf's node
        if variable is None or id(variable) in known:
            continue
        known.add(id(variable))
        if _may_be_added_to(variable, node) and (_may_be_replaced if in_graph else _has_no_hook)(variable):
            grad = variable.grad
            assert grad is not None
            found[op] = Sum(variable, grad.mT if transposed else grad)
    return found


def is_input(weight: Tensor, transposed: bool) -> bool:
    """Whether the weight of a call that is being traced is an input of the graph.

    Backends may drop a view, or a function that changes only gradients, from a graph. The tensor that arrives in a call
    then does not show that its gradient is changed. In the trace, autograd's nodes do.
    """
    node: Any = weight.grad_fn
    if transposed:  # twice: by the caller, and for the operator
        node = _node_of_source(_node_of_source(node))
    return type(node).__name__ == "Error"  # the node of an input, which raises if autograd reaches it


def node_of(weight: Tensor) -> Any:
    """Return autograd's node for the gradient of a weight that is a parameter; None for another tensor."""
    if not weight.is_leaf or not weight.requires_grad:
        return None
    with torch.enable_grad():
        of_view: Any = weight.view_as(weight).grad_fn
    return None if of_view is None else of_view.next_functions[0][0]  # None while another graph is traced


def _node_of_source(node: Any) -> Any:
    """Return the node of the tensor of which a tensor is ``.mT``; None if it is none."""
    if type(node).__name__ != "TransposeBackward0":
        return None
    # a negative axis is saved as an unsigned number
    axes = {axis if axis < DIMS else axis - 2**64 + DIMS for axis in (node._saved_dim0, node._saved_dim1)}
    return node.next_functions[0][0] if axes == LAST_AXES else None


def _is_watched(view: Tensor) -> bool:
    return bool(view._backward_hooks) or view.retains_grad


def _may_be_added_to(variable: Tensor, node: Any) -> bool:
    """Whether autograd would add to a variable's gradient in place, and no other code sees the gradient alone."""
    grad = variable.grad
    if type(grad) is not Tensor or grad.requires_grad or not variable.requires_grad or variable._backward_hooks:
        return False
    if grad.dtype is not variable.dtype or not grad.is_contiguous() or not variable.is_contiguous():
        return False
    if grad.data_ptr() % ALIGNMENT or grad.is_inference() or torch.is_anomaly_enabled():
        return False
    if grad.is_cuda and not _is_in_order(grad.device):
        return False
    try:  # under torch.autograd.grad, the engine does not execute the node
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def _is_in_order(device: torch.device) -> bool:
    """Whether all work on a gradient is on one stream. Autograd orders streams only for gradients that it gets."""
    on_default = torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    return on_default or torch.cuda.is_current_stream_capturing()


def _has_no_hook(variable: Tensor) -> bool:
    """Whether no hook waits for autograd to add a gradient."""
    return not variable._post_accumulate_grad_hooks


def _may_be_replaced(variable: Tensor) -> bool:
    """Whether ``variable.grad`` may become another tensor."""
    if _references(variable) != _UNHELD:  # autograd would copy it, and the holder would keep the old one
        return False
    grad = variable.grad
    assert grad is not None
    if grad._base is not None or grad.untyped_storage().nbytes() != grad.nbytes:  # part of another framework's buffer
        return False
    if grad.is_cuda and torch.cuda.is_current_stream_capturing():  # a replay would not replace it
        return False
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")  # whose graph adds to `grad`
    return compiled_autograd is None or not compiled_autograd.in_compiled_autograd_region


def _references(variable: Tensor) -> tuple[int, int]:
    """Return the references to ``variable.grad`` in Python and in C++: objects and views raise the one or the other."""
    grad = variable.grad
    assert grad is not None
    return sys.getrefcount(grad), grad._use_count()  # type: ignore[attr-defined]


def _references_of_unheld() -> tuple[int, int]:
    variable = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    variable.grad = torch.zeros_like(variable)
    return _references(variable)


_UNHELD = _references_of_unheld()


# ---- the steps ------------------------------------------------------------------------------------------------------


@contextmanager
def offered(sums: dict[Op, Sum]) -> Iterator[None]:
    """Offer sums to the steps that run in this block."""
    before, _thread.sums = _thread.sums, dict(sums)
    try:
        yield
    except BaseException:
        _count_changes(total for op, total in sums.items() if op not in _thread.sums)
        raise
    finally:
        _thread.sums = before


def take(op: Op, dtype: torch.dtype) -> Tensor | None:
    """Return the tensor (E, N, K) to which a step must add the gradient of this op's weight, and which it then returns
    as the gradient; None if there is none of this dtype. A second step of the same op gets None.
    """
    found = _thread.sums.pop(op, None)
    return None if found is None or found.grad.dtype is not dtype else found.grad


# ---- the results of the steps ---------------------------------------------------------------------------------------


def without_sums(sums: dict[Op, Sum], gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients that autograd adds."""
    added = _among(sums, gradients)
    if not added:
        return gradients
    _count_changes(added)
    return tuple([None if any(g is total.grad for total in added) else g for g in gradients])


def hand_over(sums: dict[Op, Sum], gradients: Sequence[Tensor | None]) -> None:
    """Remove ``grad`` of the weights whose gradients are sums that contain it."""
    added = _among(sums, gradients)
    _count_changes(added)
    for total in added:
        total.variable.grad = None


def _among(sums: dict[Op, Sum], gradients: Sequence[Tensor | None]) -> list[Sum]:
    """Return the sums to which kernels have added."""
    return [total for total in sums.values() if any(g is total.grad for g in gradients)]


def _count_changes(sums: Iterable[Sum]) -> None:
    for total in sums:
        torch.autograd.graph.increment_version(total.grad)  # kernels do not
