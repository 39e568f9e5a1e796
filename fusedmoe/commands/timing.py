"""Timing of calls, with interleaved variants: CUDA events on a GPU, wall time on a CPU.

GPU time is the time between two CUDA events around one call. Before each call,

- 256 MiB are written, to flush the L2 cache, and
- the GPU spins for longer than the host needs to enqueue the call, so that gaps between launches are not measured.

Host time is measured separately.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class CallTime:
    """Time of one call: on the device in milliseconds, and of the Python call in microseconds."""

    median_ms: float
    least_ms: float
    host_idle_us: float  # while the GPU is idle; on a CPU this and the next equal the median
    host_queued_us: float  # while the GPU is busy, which reveals calls that synchronise
    quartiles_ms: tuple[float, float] = (math.nan, math.nan)  # the first and the third


def call_time(ms: list[float], host_idle_us: float, host_queued_us: float) -> CallTime:
    """Return the time of calls that took these times."""
    low, median, high = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else ms * 3
    return CallTime(median, min(ms), host_idle_us, host_queued_us, (low, high))


Calls: TypeAlias = "dict[str, Callable[[], object]]"


class Timer(Protocol):
    """A timer of the benchmarks."""

    def measure(self, variants: Calls) -> dict[str, CallTime]:
        """Time the variants, interleaved: A B A B ..."""


def _interleaved(variants: Calls, reps: int, ms: Callable[[str], float]) -> dict[str, list[float]]:
    """Return the times of each variant, ``ms(name)`` at a time."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(reps):
        for name in variants:
            taken[name].append(ms(name))
    return taken


class CpuTimer:
    """Wall time of calls on a CPU: one warm-up call and ``reps`` timed calls per variant."""

    def __init__(self, reps: int = 10) -> None:
        self.reps = reps

    def measure(self, variants: Calls) -> dict[str, CallTime]:
        for call in variants.values():
            call()
        taken = _interleaved(variants, self.reps, lambda name: _host_us(variants[name]) / 1e3)
        return {name: call_time(ms, *[statistics.median(ms) * 1e3] * 2) for name, ms in taken.items()}


class GpuTimer:
    """Time of calls on a GPU, ``reps`` per variant, and ``host_reps`` for each of the two host times."""

    def __init__(self, device: torch.device, reps: int = 30, host_reps: int = 10) -> None:
        self.device, self.reps, self.host_reps = device, reps, host_reps
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._cycles_per_us = self._calibrate()

    def measure(self, variants: Calls) -> dict[str, CallTime]:
        for call in variants.values():
            call()  # compiles and allocates
        idle = {name: self._host_idle_us(call) for name, call in variants.items()}
        queued = {name: self._host_queued_us(call, idle[name]) for name, call in variants.items()}
        most = {name: max(idle[name], queued[name]) for name in variants}
        taken = _interleaved(variants, self.reps, lambda name: self._gpu_ms(variants[name], most[name]))
        return {name: call_time(ms, idle[name], queued[name]) for name, ms in taken.items()}

    def _gpu_ms(self, call: Callable[[], object], host_us: float) -> float:
        torch.cuda.synchronize(self.device)
        self._flush.zero_()
        self._spin(100 + 2 * min(host_us, 10_000))  # bounded: the host time of a call that synchronises includes it
        return _event_ms(call)

    def _host_idle_us(self, call: Callable[[], object]) -> float:
        taken = []
        for _ in range(self.host_reps):
            torch.cuda.synchronize(self.device)
            taken.append(_host_us(call))
        return statistics.median(taken)

    def _host_queued_us(self, call: Callable[[], object], idle_us: float) -> float:
        torch.cuda.synchronize(self.device)
        self._spin(min(2 * self.host_reps * idle_us, 100_000))
        taken = [_host_us(call) for _ in range(self.host_reps)]
        torch.cuda.synchronize(self.device)
        return statistics.median(taken)

    def _spin(self, us: float) -> None:
        torch.cuda._sleep(int(us * self._cycles_per_us))

    def _calibrate(self) -> float:
        """Return the cycles of `torch.cuda._sleep` per microsecond."""
        cycles = 10_000_000
        return cycles / min(_event_ms(lambda: torch.cuda._sleep(cycles)) * 1e3 for _ in range(3))


def _host_us(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _event_ms(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def times_of(timer: Timer, calls: dict[str, Callable[[], Any]], notes: dict[str, str | None]) -> dict[str, CallTime]:
    """Time the calls together. If that raises, time each call alone, and turn exceptions into notes."""
    if not calls:
        return {}
    try:
        return timer.measure(calls)
    except Exception:  # noqa: BLE001 the loop below finds the call that raises
        times: dict[str, CallTime] = {}
    for name, call in calls.items():
        try:
            times |= timer.measure({name: call})
        except Exception as raised:  # noqa: BLE001 reported as a note
            notes[name] = why_not(raised)
    return times


def memory_of(call: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """Return the bytes that a call's result keeps alive, excluding the result itself, and the peak during the call."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    results = result if isinstance(result, tuple) else (result,)
    kept = torch.cuda.memory_allocated(device) - before - sum(t.nbytes for t in results)
    return kept, torch.cuda.max_memory_allocated(device) - before


def why_not(raised: Exception) -> str:
    """Return an exception as a one-line note."""
    lines = str(raised).strip().splitlines() or [""]
    return f"{type(raised).__name__}: {lines[0]}"[:160].rstrip(": ")
