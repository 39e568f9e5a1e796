"""Timing of calls that all ranks of a process group make together. A time is that of the slowest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import distributed as dist

from fusedmoe.commands.timing import CallTime, GpuTimer, Timer, call_time


def slowest(value: float) -> float:
    """Return the largest value of a rank: a collective of the hosts."""
    most = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def timer_of(device: torch.device, reps: int) -> Timer:
    return RanksGpuTimer(device, reps) if device.type == "cuda" else RanksCpuTimer(reps)


class RanksGpuTimer(GpuTimer):
    """`GpuTimer` of the slowest rank: before each timed call, an all-reduce lets all devices begin together."""

    def __init__(self, device: torch.device, reps: int = 30, host_reps: int = 10) -> None:
        super().__init__(device, reps, host_reps)
        self._token = torch.zeros(1, device=device)

    def _gpu_ms(self, call: Callable[[], object], host_us: float) -> float:
        return slowest(super()._gpu_ms(call, host_us))

    def _host_idle_us(self, call: Callable[[], object]) -> float:
        return slowest(super()._host_idle_us(call))

    def _host_queued_us(self, call: Callable[[], object], idle_us: float) -> float:
        return slowest(super()._host_queued_us(call, idle_us))

    def _spin(self, us: float) -> None:
        super()._spin(us)
        dist.all_reduce(self._token)


class RanksCpuTimer:
    """Wall time of calls on CPUs; a barrier before each call lets all ranks begin together."""

    def __init__(self, reps: int = 10) -> None:
        self.reps = reps

    def measure(self, variants: dict[str, Callable[[], object]]) -> dict[str, CallTime]:
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for rep in range(self.reps + 1):  # the first one warms up
            for name, call in variants.items():
                dist.barrier()
                start = time.perf_counter()
                call()
                ms = slowest((time.perf_counter() - start) * 1e3)
                if rep:
                    taken[name].append(ms)
        times = {}
        for name, ms_of in taken.items():
            host_us = statistics.median(ms_of) * 1e3
            times[name] = call_time(ms_of, host_us, host_us)
        return times
