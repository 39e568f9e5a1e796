"""GPU time and host time of calls: L2 flushed, host gaps hidden, variants interleaved.

GPU time is between two CUDA events around one call. Before each, 256 MiB are written, so that nothing of the last call
is left in the L2, and the GPU is set to spin for longer than the host takes to enqueue the call: otherwise the host's
gaps between two launches would be measured. Host time is a figure of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

FLUSH_BYTES = 256 << 20
CEILING_SIZE = 8192
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class GpuTime:
    """Time of one call: on the GPU in milliseconds, of the Python call in microseconds.

    ``host_idle_us`` is with nothing for the GPU to do, ``host_queued_us`` with the GPU busy all along: a call that
    waits for the GPU shows there.
    """

    median_ms: float
    least_ms: float
    host_idle_us: float
    host_queued_us: float


class Timer(Protocol):
    """What the benchmarks measure with."""

    def measure(self, variants: dict[str, Callable[[], object]]) -> dict[str, GpuTime]:
        """Time each variant, A B A B ..."""


class GpuTimer:
    """See the module.

    Parameters
    ----------
    reps
        Timed calls of each variant.
    host_reps
        Calls of each variant for each of the two host times.
    """

    def __init__(self, device: torch.device, reps: int = 30, host_reps: int = 10) -> None:
        self.device, self.reps, self.host_reps = device, reps, host_reps
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._cycles_per_us = self._calibrate()

    def measure(self, variants: dict[str, Callable[[], object]]) -> dict[str, GpuTime]:
        for call in variants.values():
            call()  # what is compiled or allocated once
        idle = {name: self._host_idle_us(call) for name, call in variants.items()}
        queued = {name: self._host_queued_us(call, idle[name]) for name, call in variants.items()}
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(self.reps):
            for name, call in variants.items():
                taken[name].append(self._gpu_ms(call, max(idle[name], queued[name])))
        return {name: GpuTime(statistics.median(ms), min(ms), idle[name], queued[name]) for name, ms in taken.items()}

    def _gpu_ms(self, call: Callable[[], object], host_us: float) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        self._flush.zero_()
        self._spin(100 + 2 * min(host_us, 10_000))  # a call that waits for the GPU takes however long we spin
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def _host_idle_us(self, call: Callable[[], object]) -> float:
        taken = []
        for _ in range(self.host_reps):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e6)
        return statistics.median(taken)

    def _host_queued_us(self, call: Callable[[], object], idle_us: float) -> float:
        torch.cuda.synchronize(self.device)
        self._spin(min(2 * self.host_reps * idle_us, 100_000))
        taken = []
        for _ in range(self.host_reps):
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize(self.device)
        return statistics.median(taken)

    def _spin(self, us: float) -> None:
        torch.cuda._sleep(int(us * self._cycles_per_us))

    def _calibrate(self) -> float:
        """Cycles of `torch.cuda._sleep` a microsecond."""
        cycles, best = 10_000_000, float("inf")
        for _ in range(3):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) * 1e3)
        return cycles / best


@dataclass(frozen=True)
class Ceiling:
    """What this GPU reached in this run: a dense bf16 matrix product, and a copy (bytes read and written)."""

    tflops: float
    copy_tb_s: float


def ceiling(timer: Timer, device: torch.device) -> Ceiling:
    """Measure it: ``8192^3`` with `torch.matmul`, and a copy of 1 GiB."""
    a, b = (torch.randn(CEILING_SIZE, CEILING_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randint(-128, 128, (COPY_BYTES,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    times = timer.measure({"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)})
    return Ceiling(
        tflops=2 * CEILING_SIZE**3 / times["matmul"].median_ms / 1e9,
        copy_tb_s=2 * COPY_BYTES / times["copy"].median_ms / 1e9,
    )
