"""Accumulation of weight gradients in ``weight.main_grad``, the convention of Megatron-LM and Transformer Engine.

Megatron's data-parallel wrapper gives each parameter a ``main_grad``, a view of one flat buffer, and the attribute
``grad_added_to_main_grad``. Its hook on the parameter's gradient adds ``weight.grad`` to ``main_grad`` unless the
attribute is True, drops ``weight.grad``, and starts the reduction. Autograd runs this hook reliably, and on the main
backward thread, only if the parameter gets a gradient. So the backward pass returns a placeholder.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from fusedmoe.base.errors import InputError


class _HasWeight(Protocol):
    weight: nn.Parameter


def main_grad_of(op: _HasWeight) -> Tensor:
    """Return the ``main_grad`` of the op's weight.

    Raises `InputError`: ``main_grad`` is no tensor, or has the wrong shape, dtype or device.
    """
    weight = op.weight
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, Tensor):
        raise InputError(
            f"{op!r}: weight.main_grad: expected a tensor, since accumulate_into_main_grad=True, "
            f"got {type(main_grad).__name__}; "
            f"set it before the backward pass: weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)"
        )
    expected = tuple(weight.shape), torch.promote_types(weight.dtype, torch.float32), weight.device
    got = tuple(main_grad.shape), main_grad.dtype, main_grad.device
    if got != expected:
        text = "shape {}, {}, on {}".format
        raise InputError(f"{op!r}: weight.main_grad: expected {text(*expected)}, got {text(*got)}")
    return main_grad


def main_grad_bytes(op: _HasWeight) -> int:
    """Return the bytes that an addition to ``main_grad`` moves, less those of the gradient; 0 without a weight."""
    weight: nn.Parameter | None = op.weight
    if weight is None:
        return 0
    element = torch.promote_types(weight.dtype, torch.float32).itemsize
    return (2 * element - weight.element_size()) * weight.numel()


def grad_instead(op: _HasWeight) -> Tensor | None:
    """Set ``grad_added_to_main_grad`` and return the placeholder for autograd; None if the weight lacks it."""
    weight = op.weight
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # autograd stores a fresh dense tensor in .grad without a copy, so no kernel runs
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)
