"""Common arguments of the launches of grouped products: activation, schedule, tile counter, and placeholders."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fusedmoe.base.lasting import lasting, unread
from fusedmoe.kernels.sm90.tiles.choice import Problem, band

if TYPE_CHECKING:
    from fusedmoe.kernels.options import KernelOptions, Schedule
    from fusedmoe.kernels.sm90.tiles.config import TileConfig
    from fusedmoe.numerics.activations import Activation


class CompiledIn(NamedTuple):
    """The parts of an activation that are compiled in."""

    kind: str
    clamped: bool
    interleaved: bool


def compiled_in(activation: Activation | None) -> CompiledIn | None:
    """Return the parts of an activation that are compiled in."""
    if activation is None:
        return None
    clamped = activation.limit is not None and math.isfinite(activation.limit)
    return CompiledIn(activation.kind, activation.gated and clamped, activation.gated and activation.interleaved)


def constants(activation: Activation | None) -> tuple[float, float, float]:
    """Return the constants of an activation, which are run-time numbers: limit, alpha and offset."""
    if activation is None:
        return 0.0, 1.0, 0.0
    return activation.limit or 0.0, activation.alpha, activation.offset


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return the number of SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def sms_for(device: torch.device, options: KernelOptions) -> int:
    """Return the number of SMs that kernels may use."""
    return max(sm_count(device) - max(options.sm_margin, options.exchange_sms), 2)


def sms_for_tiles(device: torch.device, options: KernelOptions) -> int:
    """Return the number of SMs for which tiles are chosen."""
    return sms_for(device, replace(options, exchange_sms=0))


def ctas_for(sms: int, config: TileConfig) -> int:
    """Return the number of CTAs: one per SM, in whole clusters."""
    return sms // config.ctas * config.ctas


def scheduling(problem: Problem, config: TileConfig, sms: int) -> tuple[int, int]:
    """Return the scheduler's numbers: the band of row tiles, and CTAs."""
    return band(problem, config), ctas_for(sms, config)


class TileCounters:
    """The tile counters of a GPU. Each kernel leaves its counter zero, so no launch has to zero one.

    Launches on one stream follow each other, so a stream has one counter. A CUDA graph may be replayed on any stream,
    so each captured launch has its own.
    """

    SIZE = 1 << 16

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table = lasting(lambda: torch.zeros(self.SIZE, dtype=torch.int32, device=device), device)
        self._of_stream: dict[int, tuple[Tensor, int]] = {}
        self._numbers = iter(range(self.SIZE))

    def get(self) -> tuple[Tensor, int]:
        """Return a counter for a launch now, and whether its schedule can be dynamic: not if all counters are taken."""
        if torch.cuda.is_current_stream_capturing():
            return self._new()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        found = self._of_stream.get(stream)
        if found is None:
            found = self._of_stream[stream] = self._new()
        return found

    def _new(self) -> tuple[Tensor, int]:
        number = next(self._numbers, None)
        return (no_counter(self._device), 0) if number is None else (self._table[number : number + 1], 1)


_tile_counters: dict[torch.device, TileCounters] = {}


def tile_counters(device: torch.device) -> TileCounters | None:
    """Return the tile counters of a GPU. None if there are none yet and a CUDA graph is being captured: it would own
    their memory.
    """
    found = _tile_counters.get(device)
    if found is None and not torch.cuda.is_current_stream_capturing():
        found = _tile_counters.setdefault(device, TileCounters(device))
    return found


def tile_counter(device: torch.device, schedule: Schedule) -> tuple[Tensor, int]:
    """Return the tile counter of a launch now, and whether the launch is dynamic: only if there is a counter for it."""
    counters = tile_counters(device) if schedule == "dynamic" else None
    return (no_counter(device), 0) if counters is None else counters.get()


def schedule_of(device: torch.device, beside: bool, schedule: Schedule) -> tuple[bool, Schedule]:
    """Return whether a product may begin ``beside`` the launch before it, and its schedule.

    Such a product has only some of the SMs at first, so it draws its tiles. Without tile counters, it begins in its
    turn. The launch before it uses no counter, and begins after all earlier ones have ended. So the product has the
    counter of the stream to itself.
    """
    if beside and tile_counters(device) is not None:
        return True, "dynamic"
    return False, schedule


def no_counter(device: torch.device) -> Tensor:
    """Return a tensor in place of a tile counter, which a static schedule does not read."""
    return unread(device, torch.int32, 1)


def placeholders(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return tensors in place of a missing bias and row scale, which the kernel does not read."""
    return unread(device, dtype, 1, 8), unread(device, torch.float32, 1)
