"""A case is one computation by several peers. Each peer is prepared and checked against fp64; then all are timed.

A missing package or an exception becomes a note in the peer's row and does not end the run.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.ceiling import Ceiling
from benchmarks.problem import Problem
from fusedmoe.commands.timing import CallTime, Timer, memory_of, times_of, why_not

OURS = "fusedmoe"
WRONG = 0.008  # limit of the relative error, in norm; bf16 rounding in two products gives about 0.005

_PER_EXPERT = ("grad_weight", "grad_bias")  # outputs with first axis E; the others have first axis R


def unchanged(name: str, t: Tensor) -> Tensor:
    return t


@dataclass(frozen=True)
class Candidate:
    """A peer's implementation of a case.

    Attributes
    ----------
    call
        The timed call, on operands prepared in the peer's layout.
    names
        Names of its outputs, as in the reference.
    canonical
        Converts one expert's part of the named output to the reference's layout; not timed.
    note
        A remark for the comparison with the others.
    """

    call: Callable[[], Any]
    names: tuple[str, ...] = ("output",)
    canonical: Callable[[str, Tensor], Tensor] = unchanged
    note: str | None = None


class Peer(Protocol):
    """A participant: its `name`, and one method per case.

    The method is named after the case's key. It takes a `Problem` and returns a `Candidate`, or None if the peer does
    not take part for this problem. The method imports the peer's package.
    """

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Case:
    """A computation: name of the peers' method, title, FLOPs, reference, and whether autograd records the call.

    ``keeps`` reports the memory that the call keeps for a backward pass.
    """

    key: str
    title: str
    flops: Callable[[Problem], float]
    reference: Callable[[Problem, int], dict[str, Tensor]]
    grad: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a table.

    ``note`` is the reason for missing figures, or a remark on the figures. ``ours_is`` is the peer's time divided by
    ours.
    """

    case: str
    peer: str
    note: str | None = None
    error: float | None = None
    ms: float | None = None
    least_ms: float | None = None
    tflops: float | None = None
    ceiling_percent: float | None = None
    ours_is: float | None = None
    host_idle_us: float | None = None
    host_queued_us: float | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None


def run_case(
    case: Case, problem: Problem, peers: Iterable[Peer], timer: Timer, ceiling: Ceiling | None = None
) -> list[Row]:
    """Prepare, check and time every peer that has the case."""
    notes: dict[str, str | None] = {}
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    memory: dict[str, tuple[int, int]] = {}
    with torch.set_grad_enabled(case.grad):
        for peer in peers:
            prepare = getattr(peer, case.key, None)
            if prepare is None:
                continue
            try:
                candidate = prepare(problem)
                if candidate is None:
                    continue
                errors[peer.name] = error = worst_error(case, problem, candidate)
                if case.keeps and problem.device.type == "cuda":
                    memory[peer.name] = memory_of(candidate.call, problem.device)
            except Exception as raised:  # noqa: BLE001 reported in the peer's row
                notes[peer.name] = why_not(raised)
                continue
            wrong = not error < WRONG
            notes[peer.name] = f"wrong: relative error {error:.2g}" if wrong else candidate.note
            if not wrong:
                calls[peer.name] = candidate.call
        times = times_of(timer, calls, notes)
    return _rows(case, problem, notes, errors, memory, times, ceiling)


def worst_error(case: Case, problem: Problem, candidate: Candidate) -> float:
    """Return the largest relative error of an output, in norm over the sampled experts; inf if not finite."""
    outputs = candidate.call()
    named = dict(zip(candidate.names, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
    differences, sizes = dict.fromkeys(named, 0.0), dict.fromkeys(named, 0.0)
    for expert in problem.sample():
        expected = case.reference(problem, expert)
        if missing := set(expected) - set(named):
            raise ValueError(f"{', '.join(sorted(missing))}: not returned")
        for name, wanted in expected.items():
            part = expert if name.startswith(_PER_EXPERT) else problem.rows_of(expert)
            got = candidate.canonical(name, named[name][part].detach()).double()
            if got.shape != wanted.shape:
                raise ValueError(f"{name}: expected {tuple(wanted.shape)} for one expert, got {tuple(got.shape)}")
            differences[name] += (got - wanted).square().sum().item()
            sizes[name] += wanted.square().sum().item()
    worst = max(math.sqrt(differences[name] / size) for name, size in sizes.items() if size)
    return worst if math.isfinite(worst) else math.inf


def geometric_mean(values: Iterable[float]) -> float:
    """``exp(mean(log(v)))``"""
    logs = [math.log(v) for v in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def mean_speedups(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Return mean, minimum and count of `Row.ours_is` over the shapes, by case and peer; the mean is geometric."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.ours_is is not None and row.peer != OURS:
            found.setdefault(row.case, {}).setdefault(row.peer, []).append(row.ours_is)
    return {
        case: {peer: {"mean": geometric_mean(v), "least": min(v), "shapes": len(v)} for peer, v in peers.items()}
        for case, peers in found.items()
    }


def release(device: torch.device) -> None:
    """Free the unreferenced memory of the GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _rows(
    case: Case,
    problem: Problem,
    notes: dict[str, str | None],
    errors: dict[str, float],
    memory: dict[str, tuple[int, int]],
    times: dict[str, CallTime],
    ceiling: Ceiling | None,
) -> list[Row]:
    flops, ours = case.flops(problem), times.get(OURS)
    rows = []
    for name, note in notes.items():
        figures: dict[str, Any] = {"error": errors.get(name)}
        if name in memory:
            figures |= dict(zip(("kept_bytes", "peak_bytes"), memory[name], strict=True))
        if time := times.get(name):
            tflops = flops / time.median_ms / 1e9
            figures |= {
                "ms": time.median_ms,
                "least_ms": time.least_ms,
                "tflops": tflops,
                "ceiling_percent": 100 * tflops / ceiling.tflops if ceiling else None,
                "ours_is": time.median_ms / ours.median_ms if ours else None,
                "host_idle_us": time.host_idle_us,
                "host_queued_us": time.host_queued_us,
            }
        rows.append(Row(case.title, name, note, **figures))
    return rows
