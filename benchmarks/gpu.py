"""The sections that need a GPU. After each shape, tables are printed and files are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import activations, kernels, mlp, recipes, table
from benchmarks.cases import Peer, Row, mean_speedups, release
from benchmarks.ceiling import Ceiling
from benchmarks.peers.deepgemm import DeepGemm
from benchmarks.peers.ours import Ours
from benchmarks.peers.plain import TorchEager
from benchmarks.problem import Problem
from benchmarks.results import write
from benchmarks.shapes import Shape, aligned_splits, splits
from fusedmoe.commands.timing import Timer


@dataclass(frozen=True)
class Settings:
    """The options of a run."""

    sections: tuple[str, ...]
    shapes: tuple[Shape, ...]
    routing: str
    device: torch.device
    results: Path
    tune_peers: bool = False
    reps: int = 30


def run(settings: Settings, timer: Timer, top: Ceiling) -> list[Path]:
    """Measure, with results relative to the ceiling ``top``; return the written files."""
    started = time.perf_counter()
    rows: dict[str, list[Row]] = {section: [] for section in settings.sections}
    shapes: dict[str, list[dict[str, Any]]] = {section: [] for section in settings.sections}
    written: dict[str, Path] = {}
    for shape in settings.shapes:
        problem = Problem(shape, splits(shape.rows, shape.experts, settings.routing), settings.device)
        print("\n" + table.header(problem, settings.routing), flush=True)
        for section in settings.sections:
            report = measure_shape(section, problem, settings, timer, top)
            rows[section] += report.rows
            shapes[section].append(_shape_results(problem, report))
            written[section] = _write(section, settings, top, shapes[section], rows[section])
        del problem
        torch.compiler.reset()  # each shape is compiled, and torch limits the recompilations
        release(settings.device)
    for section, found in rows.items():
        print(f"\n{section}, geometric means over the shapes")
        print("\n".join(f"  {line}" for line in table.means(mean_speedups(found))) or "  (nothing to compare)")
    print(f"\ntook {time.perf_counter() - started:.0f} s", flush=True)
    return list(written.values())


@dataclass(frozen=True)
class ShapeReport:
    """A section's rows for one shape, and further fields of the result file."""

    rows: list[Row]
    more: dict[str, Any]


def measure_shape(section: str, problem: Problem, settings: Settings, timer: Timer, top: Ceiling | None) -> ShapeReport:
    """Measure and print one section on one shape."""
    if section == "kernels":
        return _kernels(problem, settings, timer, top)
    if section == "mlp":
        return _mlp(problem, settings, timer, top)
    if section == "recipes":
        found = recipes.measure(problem, timer)
        print("\n".join(recipes.lines(found)), flush=True)
        return ShapeReport([], {"recipes": found})
    if section == "activations":
        with activations.products_of_torch():
            return ShapeReport(_shown(kernels.measure(problem, activations.CASES, activations.peers(), timer, top)), {})
    return ShapeReport(_aligned(problem, (Ours(), TorchEager(), DeepGemm()), timer, top), {})


SECTIONS = ("kernels", "mlp", "activations", "recipes", "deepgemm")


def _kernels(problem: Problem, settings: Settings, timer: Timer, top: Ceiling | None) -> ShapeReport:
    taking_part = kernels.peers(settings.tune_peers)
    rows = _shown(kernels.measure(problem, kernels.CASES, taking_part, timer, top))
    problem.forget("preactivation", "activated", "grad_preactivation", "row_scale")
    return ShapeReport(rows + _aligned(problem, taking_part, timer, top), {})


def _aligned(problem: Problem, taking_part: Iterable[Peer], timer: Timer, top: Ceiling | None) -> list[Row]:
    equal = aligned_splits(problem.rows, problem.experts)
    if not int(equal.sum()):
        return []
    aligned = Problem(problem.shape, equal, problem.device, problem.dtype)
    return _shown(kernels.measure(aligned, kernels.ALIGNED_CASES, taking_part, timer, top))


def _mlp(problem: Problem, settings: Settings, timer: Timer, top: Ceiling | None) -> ShapeReport:
    measured = kernels.measure(problem, mlp.CASES, mlp.peers(settings.tune_peers), timer, top)
    forward_and_step = _shown(measured, prefix="expert MLP, ")
    rows = mlp.with_backward(forward_and_step, problem, top)
    _show(rows[len(forward_and_step) :], prefix="expert MLP, ")
    return ShapeReport(rows, {"plan": _attempt(lambda: mlp.plan(problem))})


def _shown(measured: Iterator[list[Row]], prefix: str = "") -> list[Row]:
    rows: list[Row] = []
    for of_case in measured:
        _show(of_case, prefix)
        rows += of_case
    return rows


def _show(rows: list[Row], prefix: str = "") -> None:
    for line in table.lines(rows, prefix):
        print(line, flush=True)


def _attempt(tell: Callable[[], str]) -> str:
    try:
        return tell()
    except Exception as raised:  # noqa: BLE001 a failing plan must not discard the measurements
        return f"{type(raised).__name__}: {raised}"


def _shape_results(problem: Problem, report: ShapeReport) -> dict[str, Any]:
    counts = problem.splits_cpu
    spread = {"least": int(counts.min()), "most": int(counts.max()), "empty": int((counts == 0).sum())}
    return asdict(problem.shape) | {
        "rows_in_all": problem.rows,
        "rows_an_expert": spread,
        **report.more,
        "rows": [asdict(row) for row in report.rows],
    }


def _write(section: str, settings: Settings, top: Ceiling, shapes: list[dict[str, Any]], rows: list[Row]) -> Path:
    name = section if settings.routing == "uniform" else f"{section}-{settings.routing}"
    if settings.tune_peers:
        name += "-tuned-peers"
    return write(
        settings.results,
        name,
        {
            "routing": settings.routing,
            "reps": settings.reps,
            "peers_tuned": settings.tune_peers,
            "ceiling": asdict(top),
            "geometric_mean_speedups": mean_speedups(rows),
            "shapes": shapes,
        },
    )
