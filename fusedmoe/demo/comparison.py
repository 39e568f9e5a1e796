"""What runs under several recipes came to: read from the files that they left; as a table, a figure and JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fusedmoe.demo import checkpoint, report
from fusedmoe.demo.history import History
from fusedmoe.demo.options import Job
from fusedmoe.recipes import BF16

FIGURE_NAME = "compare.png"
RESULTS_NAME = "compare.json"
# Okabe and Ito's colours, which readers with any kind of colour vision tell apart; without the yellow, which white
# paper swallows. Dashes and marks tell curves apart where one lies on another.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (3, 2)), (0, (6, 2, 1, 2)), (0, (1, 1.5)))
MARKS = "osD^vPX"


@dataclass(frozen=True)
class Outcome:
    """What a finished run came to.

    Attributes
    ----------
    recipe : str
        Its numeric recipe.
    losses : list of float
        Training loss of each step, in bits a byte.
    evaluations : list of (int, float)
        Steps done, and the bits a byte on the held-out text then; the last is that of the trained model.
    seconds : float
        Spent in training steps.
    bigram_bits : float
        Bits a byte of the byte-bigram model on the held-out text.
    """

    recipe: str
    losses: list[float]
    evaluations: list[tuple[int, float]]
    seconds: float
    bigram_bits: float

    @property
    def bits(self) -> float:
        """Bits a byte on the held-out text, at the end."""
        return self.evaluations[-1][1]


def outcome_of(folder: Path, job: Job) -> Outcome | None:
    """Return what the run of this job in the folder came to; None where it is not finished.

    It is where its numbers are written, and are those of its checkpoint: an earlier run's may still lie there.
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
    """Return the numbers that a run wrote; none where they are missing or not whole, and are to be written again."""
    try:
        results = json.loads((folder / report.RESULTS_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return results if isinstance(results, dict) else {}


def baseline_of(outcomes: list[Outcome]) -> Outcome:
    """Return what the others are compared with: the run without quantization, or the first where there is none."""
    return next((outcome for outcome in outcomes if outcome.recipe == BF16.name), outcomes[0])


def gap_percent(outcome: Outcome, baseline: Outcome) -> float:
    """Return by how much a run ended above (worse than) the baseline, in percent of the baseline's bits a byte."""
    return (outcome.bits / baseline.bits - 1) * 100


def gap_curve(outcome: Outcome, baseline: Outcome) -> list[tuple[int, float]]:
    """Return the gap in percent after each number of steps at which both were evaluated."""
    bits_then = dict(baseline.evaluations)
    return [(step, (bits / bits_then[step] - 1) * 100) for step, bits in outcome.evaluations if step in bits_then]


def _shown_gap(outcome: Outcome, baseline: Outcome) -> str:
    gap = round(gap_percent(outcome, baseline), 2) + 0.0  # no -0.00
    return f"{gap:+.2f} %"


def table(outcomes: list[Outcome]) -> Table:
    """Return the table of the runs, one a row."""
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
    """Write the numbers of all runs, and return where."""
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
        "baseline": baseline.recipe,
        "bigram_bits_per_byte": baseline.bigram_bits,
        "runs": runs,
        "job": common,
    }
    return report.write_json(folder / RESULTS_NAME, results)


def write_figure(folder: Path, outcomes: list[Outcome]) -> Path | None:
    """Draw the losses of all runs over time; return where, or None where matplotlib is missing."""
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
    training.set(title="Training loss, smoothed", ylabel="bits a byte")
    held_out.set(title="Held-out text", ylabel="bits a byte")
    gap.set(title=f"Held-out text, gap to {baseline.recipe}", ylabel="percent", xlabel="step")
    gap.set_xlim(0, max(2, *(1.02 * len(outcome.losses) for outcome in outcomes)))
    for axes in (training, held_out, gap):
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=True)
        axes.legend(handlelength=4, loc="lower right" if axes is gap else "best")  # where the curves have settled
    return report.write_png(folder / FIGURE_NAME, figure)


def _line_style(number: int) -> dict[str, Any]:
    """Return how the curves of a run are drawn; later ones are thinner, and show those below."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "linewidth": max(1.2, 2.4 - 0.3 * number),
    }


def _mark_style(number: int) -> dict[str, Any]:
    return {"marker": MARKS[number % len(MARKS)], "markersize": max(3.0, 8.0 - number)}
