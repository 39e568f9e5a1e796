"""A part of a model by several candidates: checked against fp64, then timed, forward and forward + backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.launches import launches, summary
from fusedmoe.commands.bench.layer import relative_error
from fusedmoe.commands.bench.measure import FORWARD, STEP, WRONG
from fusedmoe.commands.timing import Timer, memory_of, times_of, why_not

LIMIT = WRONG[torch.bfloat16.itemsize]


@dataclass(frozen=True)
class Variant:
    """A candidate.

    Attributes
    ----------
    forward
        Returns the output, recorded by autograd.
    leaves
        The tensors that get gradients, by name.
    grad_output
        The gradient of the output.
    exact
        Returns the output and the gradients of the leaves in fp64, for the choices that the candidate makes.
    """

    forward: Callable[[], Tensor]
    leaves: Mapping[str, Tensor]
    grad_output: Tensor
    exact: Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class PartRow:
    """A candidate's figures in one case; ``note`` is the reason for missing ones. See
    `fusedmoe.commands.bench.measure.Row`.
    """

    case: str
    name: str
    note: str = ""
    ms: float | None = None
    host_us: float | None = None
    peak_bytes: int | None = None
    launches: int | None = None
    errors: dict[str, float] | None = None


def compare(makers: Mapping[str, Callable[[], Variant]], timer: Timer, device: torch.device) -> list[PartRow]:
    """Check and time the variants of bf16 layers, interleaved; an exception becomes the note of its variant."""
    notes: dict[str, str | None] = {}
    variants: dict[str, Variant] = {}
    errors: dict[str, dict[str, float]] = {}
    for name, make in makers.items():
        try:
            variant = make()
            got = (variant.forward().detach(), *_step(variant)())
            results = zip(("output", *variant.leaves), got, variant.exact(), strict=True)
            errors[name] = {what: relative_error(a, b) for what, a, b in results}
        except Exception as raised:  # noqa: BLE001 reported in the candidate's row
            notes[name] = why_not(raised)
            continue
        worst = max(errors[name].values())
        notes[name] = "" if worst < LIMIT else f"wrong: relative error {worst:.2g}"
        if worst < LIMIT:
            variants[name] = variant
    rows = []
    for case in (FORWARD, STEP):
        calls = {name: v.forward if case == FORWARD else _step(v) for name, v in variants.items()}
        told = dict(notes)
        times = times_of(timer, calls, told)
        for name, note in told.items():
            figures: dict[str, Any] = {"errors": errors.get(name)}
            if name in times:
                figures |= {"ms": times[name].median_ms, "host_us": times[name].host_idle_us}
                if device.type == "cuda":
                    figures["peak_bytes"] = memory_of(calls[name], device)[1]
                    figures["launches"] = summary(launches(calls[name], device))["launches"]
            rows.append(PartRow(case, name, note or "", **figures))
    return rows


def lines(rows: Sequence[PartRow]) -> list[str]:
    """Return one line per row."""
    text = []
    for row in rows:
        figures = row.note
        if row.ms is not None:
            errors = ", ".join(f"{name} {error:.1e}" for name, error in (row.errors or {}).items())
            peak = "" if row.peak_bytes is None else f"  peak {row.peak_bytes / 2**20:.0f} MiB"
            count = "" if row.launches is None else f"  {row.launches} launches"
            figures = f"{row.ms:9.3f} ms  host {row.host_us:.0f} us{peak}{count}  {errors}  {row.note}".rstrip()
        text.append(f"  {row.case:20}{row.name:44}{figures}")
    return text


def _step(variant: Variant) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: torch.autograd.grad(variant.forward(), tuple(variant.leaves.values()), variant.grad_output)
