"""What a plan and its bound steps depend on of the tensors that a call brings, cheap enough to ask at every call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT_BYTES = 16

Signature = tuple[tuple[Any, ...] | None, ...]

_IN_MEMORY = (Tensor, torch.nn.Parameter)


def signature(tensors: Sequence[Tensor | None]) -> Signature:
    """Return the type, shape, dtype, device and strides of each, whether it wants a gradient, and, of a plain tensor,
    whether it begins at a multiple of 16 bytes.
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
    except RuntimeError:  # a sparse one has no strides, one inside a transform of torch.func no address
        return tuple([None if t is None else (type(t), t.shape, t.dtype, t.requires_grad, t.device) for t in tensors])
