"""Detects calls under torch's estimators: FLOP counters, and tensors without values (FakeTensor, meta).

These calls run unfused, since an estimator sees torch operators but no kernel launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

FLOP_FORMULAS: dict[Any, Callable[..., int]] = {}
"""The operators of this package, each with a function from its arguments to its number of floating-point operations."""


def has_values(t: Tensor) -> bool:
    """Whether a tensor has memory, so that its values can be read."""
    return (type(t) is Tensor or not isinstance(t, FakeTensor)) and not t.is_meta


def counts_flops() -> bool:
    """Whether a ``torch.utils.flop_counter.FlopCounterMode`` is active; adds `FLOP_FORMULAS` to the active counters.

    The formulas are not registered with torch: its ``flop_counter`` module is slow to import with Triton, and a counter
    copies the registered formulas when it is created.
    """
    found = False
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if isinstance(registry, dict):
            found = True
            for operator, formula in FLOP_FORMULAS.items():
                registry.setdefault(operator, formula)
    return found
