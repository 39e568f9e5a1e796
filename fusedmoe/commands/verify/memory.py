"""Memory whose content is NaN until it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["poisoned_memory"]

_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
ALL_BITS = 255
"""The byte that fills new memory: NaN in every floating-point format of torch that has one, -1 in integers."""


class _Poison(TorchDispatchMode):
    """Fills what these operators return. Modes of torch functions are not active in a backward pass, this one is."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call: Callable[..., Any] = func
        result = call(*args, **(kwargs or {}))
        if func.namespace == "aten" and func.overloadpacket.__name__ in _ALLOCATES and isinstance(result, Tensor):
            as_bytes = torch.empty(0, dtype=torch.uint8, device=result.device)
            as_bytes.set_(result.untyped_storage()).fill_(ALL_BITS)
        return result


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every tensor that Python code allocates uninitialized inside the block, also in the backward pass."""
    with _Poison():  # type: ignore[no-untyped-call]
        yield
