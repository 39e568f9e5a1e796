"""The properties of a call's tensors that a plan and its bound steps depend on. Every call reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.ops.op import TensorSpec

ALIGNMENT_BYTES = 16

Signature = tuple[tuple[Any, ...] | None, ...]
TYPE, SHAPE, DTYPE, REQUIRES_GRAD = range(4)  # positions in the properties of a tensor

_IN_MEMORY = (Tensor, torch.nn.Parameter)


def signature(tensors: Sequence[Tensor | None]) -> Signature:
    """Return type, shape, dtype, ``requires_grad``, device and strides of each tensor, and whether a plain tensor
    begins at a multiple of 16 bytes.
    """
    try:
        return tuple(
            [
                None
                if t is None
                else (
                    type(t), t.shape, t.dtype, t.requires_grad, t.device, t.stride(),
                    type(t) in _IN_MEMORY and t.data_ptr() % ALIGNMENT_BYTES == 0,
                )
                for t in tensors
            ]
        )  # fmt: skip
    except RuntimeError:
        # a sparse tensor has no strides, a nested one no shape; in a transform of torch.func, none has an address
        return tuple(
            [
                None if t is None else (type(t), None if t.is_nested else t.shape, t.dtype, t.requires_grad, t.device)
                for t in tensors
            ]
        )


NOMINAL_ROWS = 32768  # the number of rows that a plan for any number of rows assumes


def argument_spec(t: Tensor | None) -> TensorSpec | None:
    """Return shape and dtype. A symbolic size becomes the number that it had in the traced call."""
    return None if t is None else TensorSpec(tuple(map(_size, t.shape)), t.dtype)


def _size(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return NOMINAL_ROWS if hint is None else int(hint)
