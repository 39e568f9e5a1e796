"""Prepare, check and time each candidate of a layer; format the results as a table and as plain data."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fusedmoe.base.progress import Advance
from fusedmoe.call import settings
from fusedmoe.commands.bench.layer import OURS, PEERS, Candidate, Leaves, Peer, Reference, Work, our_layer
from fusedmoe.commands.timing import CallTime, Timer, memory_of, times_of, why_not

INFERENCE, FORWARD, STEP = "inference", "forward", "forward + backward"
CASES = {INFERENCE: 1, FORWARD: 1, STEP: 3}  # FLOPs relative to one forward pass
WRONG = {2: 0.03, 4: 1e-3}  # limit of the relative error, by the bytes of a number
WRONG_QUANTIZED = 0.5  # limit under a quantized recipe: loose, since recipes differ in accuracy


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    case: str  # `INFERENCE`, without autograd; `FORWARD`, with autograd recording; or `STEP`
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


@dataclass
class Prepared:
    """The candidates of a layer that passed the check, and their figures apart from times, by name."""

    candidates: dict[str, Candidate] = field(default_factory=dict)
    notes: dict[str, str | None] = field(default_factory=dict)  # the reason why a peer is no candidate, or a remark
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # the relative error of y and each gradient
    rerouted: dict[str, int] = field(default_factory=dict)  # tokens with other experts than by the logits in fp64
    memory: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)  # kept and peak bytes by case and name


def measure(work: Work, timer: Timer, peers: Iterable[Peer] = PEERS, advance: Advance = lambda name: None) -> list[Row]:
    """Measure all peers that run on the device; an exception becomes the peer's note."""
    return timed(work, timer, prepare(work, peers, advance), advance)


def prepare(work: Work, peers: Iterable[Peer] = PEERS, advance: Advance = lambda name: None) -> Prepared:
    """Prepare the peers that run on the device; check them, and measure their memory."""
    found, exact = Prepared(), Reference(work, work.index)
    for peer in peers:
        if work.device.type not in peer.devices:
            continue
        try:
            candidate = peer.prepare(work)
            found.errors[peer.name], found.rerouted[peer.name] = check(work, candidate, exact)
            if work.device.type == "cuda":
                for case in CASES:
                    call = call_of(case, candidate, work)
                    call()  # so that compiling and tuning are left out
                    found.memory[case, peer.name] = memory_of(call, work.device)
        except Exception as raised:  # noqa: BLE001 reported in the peer's row
            found.notes[peer.name] = why_not(raised)
            gc.collect()
            if work.device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        finally:
            advance(peer.name)
        quantized, error = peer.name == OURS and bool(candidate.note), max(found.errors[peer.name].values())
        if error < (WRONG_QUANTIZED if quantized else WRONG[min(work.dtype.itemsize, 4)]):
            found.candidates[peer.name] = candidate
            found.notes[peer.name] = candidate.note
        else:
            found.notes[peer.name] = f"wrong: relative error {error:.2g}"
    return found


def timed(work: Work, timer: Timer, prepared: Prepared, advance: Advance = lambda name: None) -> list[Row]:
    """Time the candidates, interleaved, in each case."""
    rows = []
    for case, factor in CASES.items():
        calls = {name: call_of(case, candidate, work) for name, candidate in prepared.candidates.items()}
        told = dict(prepared.notes)
        times = times_of(timer, calls, told)
        advance(case)
        flops = factor * work.sizes.forward_flops
        for name, note in told.items():
            error = max(prepared.errors[name].values()) if name in prepared.errors else None
            figures = {"error": error, **_figures(times, name, flops, work.device.type == "cuda")}
            if name in times and (case, name) in prepared.memory:
                kept, peak = prepared.memory[case, name]
                figures |= {"peak_bytes": peak, "kept_bytes": kept if case == FORWARD else None}
            rows.append(Row(case, name, note or "", **figures))
    return rows


def check(work: Work, candidate: Candidate, exact: Reference) -> tuple[dict[str, float], int]:
    """Return the relative errors of a candidate by name, and the number of tokens with other experts than the work's.

    Logits of another precision choose other experts for tokens whose logits nearly tie. Such a choice is counted; it is
    not an error. y is computed with and without autograd. ``exact`` is the reference for the choice of the work.
    """
    index = candidate.chosen()
    rerouted = int((index.sort(dim=-1).values != work.index.sort(dim=-1).values).any(dim=-1).sum())
    reference = Reference(work, index) if rerouted else exact
    y = candidate.forward()
    errors = reference.errors(candidate, y.detach(), Leaves(*torch.autograd.grad(y, candidate.leaves, work.dy)))
    del y
    inference = reference.errors(candidate, call_of(INFERENCE, candidate, work)())
    return errors | {"y": max(errors["y"], inference["y"])}, rerouted


def plan(work: Work) -> str:
    """Return the number of fused steps in our layer's plan, and the reasons why other steps are not fused."""
    with settings.recipe(work.recipe):
        explanation = our_layer(work).explain(work.x.detach().requires_grad_())
    parts = []
    for direction in ("forward", "backward"):
        steps = [step for step in explanation.steps if step.direction == direction]
        parts.append(f"{direction} {sum(step.rule is not None for step in steps)} of {len(steps)} steps fused")
    unfused = [step for step in explanation.steps if step.rule is None]
    misses = [step.nearest_miss.reason for step in unfused if step.nearest_miss is not None]
    why = f" ({'; '.join(dict.fromkeys(misses))})" if misses else ""
    return ", ".join(parts) + why


COLUMNS = ("ms", "quartiles", "ours is", "TFLOP/s", "host us", "kept MiB", "peak MiB", "error")


def lines(rows: Iterable[Row]) -> list[str]:
    """Return the lines of the table, grouped by case."""
    shown = list(rows)
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
    return text


def _cells(row: Row) -> tuple[str, ...]:
    if row.ms is None:
        return ("",) * len(COLUMNS)
    low, high = row.quartiles_ms or (math.nan, math.nan)
    mib = [None if size is None else size / 2**20 for size in (row.kept_bytes, row.peak_bytes)]
    figures = (None if row.name == OURS else row.ours_is, row.tflops, row.host_us, *mib, row.error)
    forms = ("{:.2f}x", "{:.3g}", "{:.0f}", "{:.0f}", "{:.0f}", "{:.1e}")
    texts = ["" if x is None else form.format(x) for x, form in zip(figures, forms, strict=True)]
    return (f"{row.ms:.3f}", f"{low:.3f} to {high:.3f}", *texts)


def as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain dictionaries; errors that are not finite become None."""
    finite = [row.error if row.error is not None and math.isfinite(row.error) else None for row in rows]
    return [asdict(row) | {"error": error} for row, error in zip(rows, finite, strict=True)]


def call_of(case: str, candidate: Candidate, work: Work) -> Callable[[], Any]:
    """Return the timed call of a case: y, or the gradients."""
    if case == INFERENCE:
        return torch.no_grad()(candidate.inference or candidate.forward)
    if case == FORWARD:
        return candidate.forward
    return lambda: torch.autograd.grad(candidate.forward(), candidate.leaves, work.dy)


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
