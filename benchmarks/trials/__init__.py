"""Variants of the Hopper products that are not shipped: ``python -m benchmarks --only trials`` measures them.

A variant is a subclass of a shipped kernel, with the same arguments and the same results, bit for bit. A variant that
measures faster replaces the shipped kernel; one that does not is deleted, and docs/kernels.md says so.

The modules of the variants import the CuTe DSL, so they are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from fusedmoe.kernels.kernel import Kernel


def late_stores(kernel: Kernel) -> Kernel | None:
    """A product with cooperative tiles: a weight gradient, or one without an activation."""
    from benchmarks.trials.late_stores import LateStoresK, LateStoresM
    from fusedmoe.kernels.sm90.epilogues import PLAIN
    from fusedmoe.kernels.sm90.ragged_k import RaggedK
    from fusedmoe.kernels.sm90.ragged_m import RaggedM

    if isinstance(kernel, RaggedK) and not kernel.config.pingpong:
        return _as(LateStoresK, kernel)
    if isinstance(kernel, RaggedM) and not kernel.config.pingpong and kernel.epilogue == PLAIN:
        return _as(LateStoresM, kernel)
    return None


def explicit_fences(kernel: Kernel) -> Kernel | None:
    """A weight gradient that is added to its output."""
    from benchmarks.trials.explicit_fences import ExplicitFences
    from fusedmoe.kernels.sm90.ragged_k import RaggedK

    return _as(ExplicitFences, kernel) if isinstance(kernel, RaggedK) and kernel.accumulate else None


def grouped_stores(kernel: Kernel, **options: bool) -> Kernel | None:
    """A product that stores several boxes per step. ``options`` are for derivatives whose variant spills no more."""
    from benchmarks.trials.grouped_stores import GroupedStores
    from fusedmoe.kernels.sm90.ragged_m import RaggedM

    if not isinstance(kernel, RaggedM) or kernel.epilogue.boxes == 1:
        return None
    narrow, in_order = kernel.config.tile_n <= 128, not kernel.gather
    spills_no_more = narrow or (in_order and "ahead" not in options)
    if options and not (kernel.boxes_read and spills_no_more):
        return None
    return _as(GroupedStores, kernel, **options)


def more_buffers(kernel: Kernel, buffers: int) -> Kernel | None:
    """A derivative with tiles of 128 columns, whose shipped kernel has two buffers."""
    from benchmarks.trials.grouped_stores import MoreBuffers
    from fusedmoe.kernels.sm90.ragged_m import RaggedM

    if not isinstance(kernel, RaggedM) or not kernel.boxes_read or kernel.config.tile_n > 128:
        return None
    return _as(MoreBuffers, kernel, buffers=buffers)


def short_ring(kernel: Kernel) -> Kernel | None:
    """Any product."""
    from benchmarks.trials.short_ring import ShortRingK, ShortRingM
    from fusedmoe.kernels.sm90.ragged_k import RaggedK

    return _as(ShortRingK if isinstance(kernel, RaggedK) else ShortRingM, kernel)


def _as(variant: type, kernel: Any, **options: Any) -> Any:
    return variant(**{field.name: getattr(kernel, field.name) for field in fields(kernel)}, **options)


TRIALS: dict[str, Callable[[Kernel], Kernel | None]] = {
    "late stores": late_stores,
    "explicit fences": explicit_fences,
    "short ring": short_ring,
    "grouped stores": grouped_stores,
    "grouped stores, ahead": partial(grouped_stores, ahead=True),
    "grouped stores, in place": partial(grouped_stores, in_place=True),
    "grouped stores, in place, ahead": partial(grouped_stores, in_place=True, ahead=True),
    "three buffers": partial(more_buffers, buffers=3),
    "four buffers": partial(more_buffers, buffers=4),
}
"""By name: the function that returns the variant of a shipped kernel, or None if the kernel has none."""
