"""Wall time of Python calls: interleaved variants, over many short rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class HostTime:
    """Host time of one call in microseconds: median and minimum over the rounds."""

    median_us: float
    least_us: float


def host_times(
    variants: dict[str, Callable[[], object]],
    rounds: int = 300,
    calls: int = 10,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, HostTime]:
    """Time the variants interleaved, A B A B ..., so that other work of the machine affects all of them equally.

    Parameters
    ----------
    variants
        Functions by name.
    rounds, calls
        Number of rounds, and calls per variant and round.
    settle
        Called before each variant, untimed, to synchronise the device.
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
