"""Variants of the Hopper products that are not shipped: ``python -m benchmarks --only trials`` measures them.

A variant is a subclass of a shipped kernel, with the same arguments and the same results, bit for bit. A variant that
measures faster replaces the shipped kernel; one that does not is deleted, and docs/kernels.md says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from fusedmoe.kernels.kernel import Kernel


def late_stores(kernel: Kernel) -> Kernel | None:
    """The weight gradient with cooperative tiles whose result is stored during the next tile's main loop."""
    from benchmarks.trials.late_stores import LateStores  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm90.ragged_k import RaggedK

    return LateStores(**_fields(kernel)) if type(kernel) is RaggedK and not kernel.config.pingpong else None


def _fields(kernel: Any) -> dict[str, Any]:
    return {field.name: getattr(kernel, field.name) for field in fields(kernel)}


TRIALS: dict[str, Callable[[Kernel], Kernel | None]] = {"late stores": late_stores}
"""By name: the function that returns the variant of a shipped kernel, or None if the kernel has none."""
