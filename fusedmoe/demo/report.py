"""What is left of a run: the figure and the numbers as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedmoe.demo.files import write_atomically
from fusedmoe.demo.history import History
from fusedmoe.extras import install_command
from fusedmoe.plotting import new_figure, plot_expert_load

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_NAME = "training.png"
RESULTS_NAME = "results.json"
MISSING_MATPLOTLIB = f"no figure: matplotlib is not installed; {install_command('demo')}"


def write_results(folder: Path, results: dict[str, Any]) -> Path:
    """Write the numbers of the run, and return where."""
    return write_json(folder / RESULTS_NAME, results)


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Write something as JSON, and return where."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def empty_figure(width: float, height: float) -> Figure | None:
    """Return a figure of so many inches, or None where matplotlib is missing."""
    try:
        return new_figure(width, height)
    except ImportError:
        return None


def write_png(path: Path, figure: Figure) -> Path:
    """Write a figure, and return where."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getbuffer())
    return path


def draw_bigram(axes: Axes, bits: float) -> None:
    """Draw the line of the byte-bigram model: the bar to stay below."""
    axes.axhline(bits, color="tab:gray", linestyle="--", label=f"byte bigram, held-out ({bits:.2f})")


def write_figure(folder: Path, history: History, bigram_bits: float) -> Path | None:
    """Draw the loss and the load of every expert over time; return where, or None where matplotlib is missing."""
    figure = empty_figure(9, 7)
    if figure is None:
        return None
    loss_axes, load_axes = figure.subplots(2, 1)

    steps = range(1, len(history.losses) + 1)
    loss_axes.plot(steps, history.losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    loss_axes.plot(steps, smoothed(history.losses), color="tab:blue", label="training")
    if history.evaluations:
        loss_axes.plot(*zip(*history.evaluations, strict=True), "o-", color="tab:orange", label="held-out")
    draw_bigram(loss_axes, bigram_bits)
    loss_axes.set(title="Loss", xlabel="step", ylabel="bits a byte", xlim=(0, max(2, len(history.losses))))
    loss_axes.legend()

    plot_expert_load(history.loads, axes=load_axes)
    return write_png(folder / FIGURE_NAME, figure)


def smoothed(values: list[float], weight: float = 0.95) -> list[float]:
    """Return the running mean of the values, exponentially weighted, without a bias towards zero at the start."""
    means, mean, total = [], 0.0, 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        total = weight * total + 1 - weight
        means.append(mean / total)
    return means
