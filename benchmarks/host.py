"""Host overhead of the framework: a planned `Sequential` against the same calls by hand, and the time of planning.

Few rows and small layers minimise the computation itself. "By hand" calls the ops' `compute` methods in order, with
autograd's backward pass. "By hand, lean" is the shortest plain PyTorch equivalent, without zeroed tail rows, checked
splits, or fp32 inside the activation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedmoe as fm
from fusedmoe.numerics.expert_rows import offsets_from_splits

EXPERTS, HIDDEN, INTERMEDIATE, ROWS = 8, 32, 16, 64


VARIANTS = ("planned", "by hand", "by hand, lean")


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


@dataclass(frozen=True)
class HostReport:
    """Host times of each pass (inference, forward, forward + backward) by variant; planning time in milliseconds."""

    passes: dict[str, dict[str, HostTime]]
    planning_ms: float

    def overhead_us(self, title: str) -> tuple[float, float]:
        """Return the planned call's time minus that by hand: of the minima, and of the medians."""
        planned, by_hand = self.passes[title]["planned"], self.passes[title]["by hand"]
        return planned.least_us - by_hand.least_us, planned.median_us - by_hand.median_us


def _experts(device: torch.device, dtype: torch.dtype) -> fm.Sequential:
    return fm.Sequential(
        fm.GroupedLinear(EXPERTS, HIDDEN, 2 * INTERMEDIATE, device=device, dtype=dtype),
        fm.SwiGLU(),
        fm.GroupedLinear(EXPERTS, INTERMEDIATE, HIDDEN, device=device, dtype=dtype),
    )


def measure(device: torch.device, rounds: int = 300) -> HostReport:
    """Measure on a device; a GPU is idle at the start of each round."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    seq = _experts(device, dtype)
    first, glu, second = seq
    x = torch.randn(ROWS, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    splits = torch.full((EXPERTS,), ROWS // EXPERTS, device=device)
    grad = torch.randn(ROWS, HIDDEN, device=device, dtype=dtype)

    def planned() -> Tensor:
        return seq(x, splits=splits)

    def by_hand() -> Tensor:
        offsets = offsets_from_splits(splits, ROWS)
        h = glu.compute(first.compute(x, first.weight, None, offsets))
        return second.compute(h, second.weight, None, offsets)

    def by_hand_lean() -> Tensor:
        offsets = splits.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(x, first.weight.mT, offs=offsets).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, second.weight.mT, offs=offsets)

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    variants = dict(zip(VARIANTS, (planned, by_hand, by_hand_lean), strict=True))
    steps = {name: lambda call=call: call().backward(grad) for name, call in variants.items()}
    with torch.no_grad():
        inference = host_times(variants, rounds, settle=settle)
    passes = {
        "inference": inference,
        "forward": host_times(variants, rounds, settle=settle),
        "forward + backward": host_times(steps, rounds, settle=settle),
    }
    return HostReport(passes, _planning_ms(device, dtype, x, splits))


def _planning_ms(device: torch.device, dtype: torch.dtype, x: Tensor, splits: Tensor) -> float:
    """Return the first call of a new chain minus the second: the median over 20 chains."""
    taken = []
    for _ in range(20):
        seq = _experts(device, dtype)
        start = time.perf_counter()
        seq(x, splits=splits)
        middle = time.perf_counter()
        seq(x, splits=splits)
        taken.append(2 * middle - start - time.perf_counter())
    return statistics.median(taken) * 1e3
