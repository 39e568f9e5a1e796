"""Wall time of Python calls: variants interleaved, the median of many short rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class HostTime:
    """Host time of one call in microseconds over all rounds: the median, and the least."""

    median_us: float
    least_us: float


def host_times(
    variants: dict[str, Callable[[], object]],
    rounds: int = 300,
    calls: int = 10,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, HostTime]:
    """Time each variant, A B A B ..., so that what else the machine does falls on all of them alike.

    Parameters
    ----------
    variants
        What to call, by name.
    rounds, calls
        How often to go around, and calls a variant each time.
    settle
        Called before each variant's turn, untimed: wait for the device there.
    """
    for call in variants.values():
        for _ in range(calls):
            call()
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            settle()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            taken[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: HostTime(statistics.median(t), min(t)) for name, t in taken.items()}
