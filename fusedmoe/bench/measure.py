"""Prepare, check and time each candidate of a layer; format the results as a table and as plain data."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fusedmoe import settings
from fusedmoe.bench.layer import OURS, PEERS, Candidate, Leaves, Peer, Reference, Work, our_layer
from fusedmoe.bench.peers import NOT_INSTALLED, why_not
from fusedmoe.bench.timing import CallTime, Timer, memory_of, times_of
from fusedmoe.progress import Advance

FORWARD, STEP = "forward", "forward + backward"
WRONG = {2: 0.03, 4: 1e-3}  # limit of the relative error, by the bytes of a number
WRONG_QUANTIZED = 0.5  # limit under a quantized recipe: loose, since recipes differ in accuracy


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    case: str  # `FORWARD`, with autograd recording, or `STEP`
    name: str  # the peer
    note: str = ""  # the reason for missing figures, or a remark on them
    error: float | None = None  # largest relative error, in norm, of y and the gradients against fp64 on a sample
    ms: float | None = None  # median of the calls, and the first and third quartile
    quartiles_ms: tuple[float, float] | None = None
    ours_is: float | None = None  # this time divided by ours
    tflops: float | None = None  # TFLOP/s of the experts' products
    host_us: float | None = None  # time of the Python call while the GPU is idle
    # GPU memory that the call keeps for backward, and its peak, beyond weights and inputs
    kept_bytes: int | None = None
    peak_bytes: int | None = None


def measure(work: Work, timer: Timer, peers: Iterable[Peer] = PEERS, advance: Advance = lambda name: None) -> list[Row]:
    """Measure all peers that run on the device; a missing package or an exception becomes the peer's note."""
    reference = Reference(work)
    candidates: dict[str, Candidate] = {}
    notes: dict[str, str | None] = {}
    errors: dict[str, float] = {}
    memory: dict[tuple[str, str], tuple[int, int]] = {}
    for peer in peers:
        if work.device.type not in peer.devices:
            continue
        try:
            candidate = peer.prepare(work)
            errors[peer.name] = error = _error(reference, candidate, work)
            if work.device.type == "cuda":
                for case in (FORWARD, STEP):
                    memory[case, peer.name] = memory_of(_call(case, candidate, work), work.device)
        except Exception as raised:  # noqa: BLE001 reported in the peer's row
            notes[peer.name] = why_not(raised, peer.packages)
            _release(work.device)
            continue
        finally:
            advance(peer.name)
        quantized = peer.name == OURS and bool(candidate.note)
        if error < (WRONG_QUANTIZED if quantized else WRONG[min(work.dtype.itemsize, 4)]):
            candidates[peer.name] = candidate
            notes[peer.name] = candidate.note
        else:
            notes[peer.name] = f"wrong: relative error {error:.2g}"
    rows = []
    for case, factor in ((FORWARD, 1), (STEP, 3)):
        calls = {name: _call(case, candidate, work) for name, candidate in candidates.items()}
        told = dict(notes)
        times = times_of(timer, calls, told)
        advance(case)
        flops = factor * work.sizes.forward_flops
        for name, note in told.items():
            figures = {"error": errors.get(name), **_figures(times, name, flops, work.device.type == "cuda")}
            if name in times and (case, name) in memory:
                kept, peak = memory[case, name]
                figures |= {"peak_bytes": peak, "kept_bytes": kept if case == FORWARD else None}
            rows.append(Row(case, name, note or "", **figures))
    return rows


def plan(work: Work) -> str:
    """Return the number of fused steps in our layer's plan, and the reasons why other steps are not fused."""
    with settings.recipe(work.recipe):
        explanation = our_layer(work).explain(work.x.detach().requires_grad_())
    parts = []
    for direction in ("forward", "backward"):
        steps = [step for step in explanation.steps if step.direction == direction]
        parts.append(f"{direction} {sum(step.rule is not None for step in steps)} of {len(steps)} steps fused")
    misses = [step.nearest_miss.reason for step in explanation.steps if step.nearest_miss is not None]
    why = f" ({'; '.join(dict.fromkeys(misses))})" if misses else ""
    return ", ".join(parts) + why


COLUMNS = ("ms", "quartiles", "ours is", "TFLOP/s", "host us", "kept MiB", "peak MiB", "error")


def lines(rows: Iterable[Row]) -> list[str]:
    """Return the lines of the table, grouped by case, followed by the names of peers that are not installed."""
    rows = list(rows)
    shown = [row for row in rows if row.note != NOT_INSTALLED]
    cells = [_cells(row) for row in shown]
    used = [i for i in range(len(COLUMNS)) if any(of_row[i] for of_row in cells)]
    widths = [max(len(text[i]) for text in (COLUMNS, *cells)) + 2 for i in range(len(COLUMNS))]
    name_width = max([len(row.name) for row in shown], default=0) + 2
    text = []
    for case in dict.fromkeys(row.case for row in shown):
        text.append(f"{case:<{name_width + 2}}" + "".join(f"{COLUMNS[i]:>{widths[i]}}" for i in used))
        for row, of_row in zip(shown, cells, strict=True):
            if row.case == case:
                figures = "" if row.ms is None else "".join(f"{of_row[i]:>{widths[i]}}" for i in used) + "  "
                text.append(f"  {row.name:<{name_width}}{figures}{row.note}".rstrip())
        text.append("")
    if absent := list(dict.fromkeys(row.name for row in rows if row.note == NOT_INSTALLED)):
        text.append(f"not installed, so not measured: {', '.join(absent)}")
    return text


def _cells(row: Row) -> tuple[str, ...]:
    if row.ms is None:
        return ("",) * len(COLUMNS)
    low, high = row.quartiles_ms or (math.nan, math.nan)
    return (
        f"{row.ms:.3f}",
        f"{low:.3f} to {high:.3f}",
        "" if row.ours_is is None or row.name == OURS else f"{row.ours_is:.2f}x",
        "" if row.tflops is None else f"{row.tflops:.3g}",
        "" if row.host_us is None else f"{row.host_us:.0f}",
        "" if row.kept_bytes is None else f"{row.kept_bytes / 2**20:.0f}",
        "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}",
        "" if row.error is None else f"{row.error:.1e}",
    )


def as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain dictionaries; errors that are not finite become None."""
    finite = [row.error if row.error is not None and math.isfinite(row.error) else None for row in rows]
    return [asdict(row) | {"error": error} for row, error in zip(rows, finite, strict=True)]


def _call(case: str, candidate: Candidate, work: Work) -> Callable[[], Any]:
    if case == FORWARD:
        return candidate.forward
    return lambda: torch.autograd.grad(candidate.forward(), candidate.leaves, work.dy)


def _error(reference: Reference, candidate: Candidate, work: Work) -> float:
    y: Tensor = candidate.forward()
    grads = torch.autograd.grad(y, candidate.leaves, work.dy)
    return reference.error(candidate, y.detach(), Leaves(*grads))


def _figures(times: dict[str, CallTime], name: str, flops: float, on_gpu: bool) -> dict[str, Any]:
    time, ours = times.get(name), times.get(OURS)
    if time is None:
        return {}
    return {
        "ms": time.median_ms,
        "quartiles_ms": time.quartiles_ms,
        "ours_is": time.median_ms / ours.median_ms if ours else None,
        "tflops": flops / time.median_ms / 1e9,
        "host_us": time.host_idle_us if on_gpu else None,  # on a CPU it equals ms
    }


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
