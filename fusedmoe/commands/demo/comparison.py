"""Comparison of runs under several recipes, from the files that the runs wrote: a table, a figure and JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from fusedmoe.base.machine import machine, versions
from fusedmoe.commands.demo import checkpoint, report
from fusedmoe.commands.demo.history import History
from fusedmoe.commands.demo.options import Job
from fusedmoe.numerics.recipes import BF16

FIGURE_NAME = "compare.png"
RESULTS_NAME = "compare.json"
# The colour-blind-safe palette of Okabe and Ito, without yellow, which is hard to see on white. Dashes and marks
# distinguish overlapping curves.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (3, 2)), (0, (6, 2, 1, 2)), (0, (1, 1.5)))
MARKS = "osD^vPX"


@dataclass(frozen=True)
class Outcome:
    """The results of a finished run."""

    recipe: str  # name of the numeric recipe
    losses: list[float]  # training loss per step, in bits per byte
    # completed steps, and the bits per byte on the held-out text; the last entry is the trained model's
    evaluations: list[tuple[int, float]]
    seconds: float  # time spent in training steps
    bigram_bits: float  # bits per byte of the byte-bigram model on the held-out text

    @property
    def bits(self) -> float:
        """Bits per byte of the trained model on the held-out text."""
        return self.evaluations[-1][1]


def outcome_of(folder: Path, job: Job) -> Outcome | None:
    """Return the outcome of this job's run in the folder; None if it is not finished.

    A run is finished if its results file agrees with its checkpoint: an earlier run may have left a results file.
    """
    results = _results_in(folder)
    if results.get("job") != dataclasses.asdict(job):
        return None
    state = checkpoint.load(folder)
    history = History.from_state(state["history"])
    evaluations = [(int(step), float(bits)) for step, bits in results["evaluations"]]
    if state["step"] != job.steps or evaluations[: len(history.evaluations)] != history.evaluations:
        return None
    return Outcome(
        job.recipe, history.losses, evaluations, results["training_seconds"], results["bigram_bits_per_byte"]
    )


def _results_in(folder: Path) -> dict[str, Any]:
    """Return the results that a run wrote; an empty dict if the file is missing or incomplete."""
    try:
        results = json.loads((folder / report.RESULTS_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return results if isinstance(results, dict) else {}


def baseline_of(outcomes: list[Outcome]) -> Outcome:
    """Return the run without quantization, or else the first run."""
    return next((outcome for outcome in outcomes if outcome.recipe == BF16.name), outcomes[0])


def gap_percent(outcome: Outcome, baseline: Outcome) -> float:
    """Return ``(bits / baseline bits - 1) * 100`` at the end of the runs; positive is worse."""
    return (outcome.bits / baseline.bits - 1) * 100


def gap_curve(outcome: Outcome, baseline: Outcome) -> list[tuple[int, float]]:
    """Return the gap in percent at each step at which both runs were evaluated."""
    base_bits = dict(baseline.evaluations)
    return [(step, (bits / base_bits[step] - 1) * 100) for step, bits in outcome.evaluations if step in base_bits]


def _shown_gap(outcome: Outcome, baseline: Outcome) -> str:
    gap = round(gap_percent(outcome, baseline), 2) + 0.0  # no -0.00
    return f"{gap:+.2f} %"


def table(outcomes: list[Outcome]) -> Table:
    """Return a table with one row per run."""
    baseline = baseline_of(outcomes)
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False)
    shown.add_column("recipe")
    for heading in ("held-out bits/byte", f"gap to {baseline.recipe}", "training"):
        shown.add_column(heading, justify="right")
    for outcome in outcomes:
        gap = _shown_gap(outcome, baseline)
        shown.add_row(outcome.recipe, f"{outcome.bits:.4f}", gap, f"{outcome.seconds:,.1f} s")
    return shown


def write_results(folder: Path, outcomes: list[Outcome], job: Job) -> Path:
    """Write the results of all runs and return the path."""
    baseline = baseline_of(outcomes)
    common = dataclasses.asdict(job)
    del common["recipe"]
    runs = [
        {
            "recipe": outcome.recipe,
            "held_out_bits_per_byte": outcome.bits,
            "gap_percent": gap_percent(outcome, baseline),
            "training_seconds": outcome.seconds,
            "evaluations": outcome.evaluations,
        }
        for outcome in outcomes
    ]
    results = {
        "machine": machine(torch.device(job.device)),
        "versions": versions(),
        "baseline": baseline.recipe,
        "bigram_bits_per_byte": baseline.bigram_bits,
        "runs": runs,
        "job": common,
    }
    return report.write_json(folder / RESULTS_NAME, results)


def write_figure(folder: Path, outcomes: list[Outcome]) -> Path | None:
    """Draw the losses of all runs over time; return the path, or None if matplotlib is missing."""
    figure = report.empty_figure(9, 11)
    if figure is None:
        return None
    baseline = baseline_of(outcomes)
    training, held_out, gap = figure.subplots(3, 1, sharex=True)
    for number, outcome in enumerate(outcomes):
        line, marks = _line_style(number), _mark_style(number)
        steps = range(1, len(outcome.losses) + 1)
        training.plot(steps, report.smoothed(outcome.losses), label=outcome.recipe, **line)
        label = f"{outcome.recipe} ({outcome.bits:.3f} at the end)"
        held_out.plot(*zip(*outcome.evaluations, strict=True), label=label, **line, **marks)
        label = f"{outcome.recipe} ({_shown_gap(outcome, baseline)} at the end)"
        gap.plot(*zip(*gap_curve(outcome, baseline), strict=True), label=label, **line, **marks)
    report.draw_bigram(held_out, baseline.bigram_bits)
    training.set(title="Training loss, smoothed", ylabel="bits per byte")
    held_out.set(title="Held-out text", ylabel="bits per byte")
    gap.set(title=f"Held-out text, gap to {baseline.recipe}", ylabel="percent", xlabel="step")
    gap.set_xlim(0, max(2, *(1.02 * len(outcome.losses) for outcome in outcomes)))
    for axes in (training, held_out, gap):
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=True)
        axes.legend(handlelength=4, loc="lower right" if axes is gap else "best")
    return report.write_png(folder / FIGURE_NAME, figure)


def _line_style(number: int) -> dict[str, Any]:
    """Return the line style of a run; later lines are thinner, so that they do not hide earlier ones."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "linewidth": max(1.2, 2.4 - 0.3 * number),
    }


def _mark_style(number: int) -> dict[str, Any]:
    return {"marker": MARKS[number % len(MARKS)], "markersize": max(3.0, 8.0 - number)}
