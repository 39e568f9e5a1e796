"""The kernels that a call launches, from torch's profiler: their number, and where the time of the GPU goes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

AHEAD_CYCLES = 60_000_000  # about 30 ms: the host enqueues the whole call, so that gaps are those of the GPU

# The first pattern in a kernel's name, or in the result of `short`, gives its group. "router" also has the
# places of the rows. The two products of a router's backward pass are in "products": their kernels are the experts'.
_OUR_ROUTER = r"(?<![A-Za-z])(Route|Choose|Promoted|Parts|SumParts)|operandsPromoted"
GROUPS = (
    ("router", re.compile(_OUR_ROUTER + r"|sgemm|Router|[Ll]ogits|Scores|[Tt]op_?[Kk]|[Ss]oft_?[Mm]ax")),
    ("products", re.compile(r"Ragged[MK]|[Gg]emm|nvjet|cutlass::|[Xx]mma")),
    ("sums over slots", re.compile(r"SumSlots|SumOnFewSms|RowDots|SlotValues|gather_and_sum")),
    ("gathers", re.compile(r"[Gg]ather|[Ii]ndex|[Ss]catter")),
)
OTHER = "other"
_OURS = re.compile(r"kernel_cutlass_([a-z_]+)_([A-Z][A-Za-z]*?)(?:operands([A-Za-z]+?))?(?=arch|dtype|_|$)")
_NAME_LENGTH = 80


@dataclass(frozen=True)
class Launch:
    """A kernel, copy or fill on the GPU, in the order of their starts."""

    name: str
    start_us: float
    us: float


def launches(call: Callable[[], Any], device: torch.device) -> list[Launch]:
    """Profile one call, which has run before."""
    call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        torch.cuda._sleep(AHEAD_CYCLES)
        call()
        torch.cuda.synchronize(device)
    found = [
        Launch(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation and "spin_kernel" not in event.name
    ]
    return sorted(found, key=lambda launch: launch.start_us)


def group_of(name: str) -> str:
    """Return the group of a kernel."""
    return next((group for group, pattern in GROUPS if pattern.search(name)), OTHER)


def by_group(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of kernels' times by group; ``times`` has names and times."""
    groups = dict.fromkeys((*(group for group, _ in GROUPS), OTHER), 0.0)
    for name, us in times:
        groups[group_of(name)] += us
    return groups


def short(name: str) -> str:
    """Return the class and method of a kernel of ours, after its operands if they are not plain, or the beginning of
    another kernel's name.
    """
    if found := _OURS.search(name):
        operands = "" if found[3] in (None, "Plain") else found[3]
        return f"{operands}{found[2]}.{found[1]}"
    return name[:_NAME_LENGTH]


def summary(found: Iterable[Launch]) -> dict[str, Any]:
    """Return the number of launches, the busy and idle microseconds, and the time by group and by kernel.

    The GPU is busy while any kernel runs, and idle in the gaps between the first start and the last end. Kernels that
    run at the same time count fully in their groups.
    """
    found = list(found)
    kernels: dict[str, dict[str, Any]] = {}
    busy_us, end_us = 0.0, -float("inf")
    for launch in found:
        kernel = kernels.setdefault(launch.name, {"name": short(launch.name), "count": 0, "us": 0.0})
        kernel |= {"count": kernel["count"] + 1, "us": kernel["us"] + launch.us}
        last = launch.start_us + launch.us
        busy_us += max(0.0, last - max(end_us, launch.start_us))
        end_us = max(end_us, last)
    span_us = end_us - found[0].start_us if found else 0.0
    return {
        "launches": len(found),
        "busy_us": busy_us,
        "idle_us": span_us - busy_us,
        "groups_us": by_group((launch.name, launch.us) for launch in found),
        "kernels": sorted(kernels.values(), key=lambda kernel: -kernel["us"]),
    }
