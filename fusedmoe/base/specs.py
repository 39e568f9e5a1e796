"""Shape and dtype of tensors, for code that computes no values."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class SpecLike(Protocol):
    """An object with a shape and a dtype: a tensor or a `TensorSpec`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize
