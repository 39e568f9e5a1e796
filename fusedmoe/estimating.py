"""Calls that an estimator of torch watches: tensors without values (FakeTensor, meta), and FLOP counters.

Such a call runs unfused, since an estimator sees the operators of torch and no launch of a kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from collections.abc import Callable

FLOP_FORMULAS: dict[Any, Callable[..., int]] = {}
"""Operators of this package, each with its number of floating-point operations for arguments like these."""


def has_values(t: Tensor) -> bool:
    """Whether there is memory behind a tensor, whose values may be read."""
    return (type(t) is Tensor or not isinstance(t, FakeTensor)) and not t.is_meta


def counts_flops() -> bool:
    """Whether a ``torch.utils.flop_counter.FlopCounterMode`` is active; each that is gets `FLOP_FORMULAS`.

    torch's table of formulas is copied when a counter is made, and torch's module is slow to import where there is
    Triton. So the formulas are given to the counter rather than registered.
    """
    found = False
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if isinstance(registry, dict):
            found = True
            for operator, formula in FLOP_FORMULAS.items():
                registry.setdefault(operator, formula)
    return found
