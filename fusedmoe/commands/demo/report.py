"""The files that a run writes: the figure, and the results as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedmoe.base.extras import install_command
from fusedmoe.commands.demo.files import write_atomically
from fusedmoe.commands.demo.history import History
from fusedmoe.layers.plotting import new_figure, plot_expert_load

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_NAME = "training.png"
RESULTS_NAME = "results.json"
MISSING_MATPLOTLIB = f"no figure: matplotlib is not installed; {install_command('demo')}"


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Write ``content`` as JSON and return the path."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def empty_figure(width: float, height: float) -> Figure | None:
    """Return a figure of this size in inches, or None if matplotlib is missing."""
    try:
        return new_figure(width, height)
    except ImportError:
        return None


def write_png(path: Path, figure: Figure) -> Path:
    """Write a figure and return the path."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getbuffer())
    return path


def draw_bigram(axes: Axes, bits: float) -> None:
    """Draw the loss of the byte-bigram model as a horizontal line."""
    axes.axhline(bits, color="tab:gray", linestyle="--", label=f"byte bigram, held-out ({bits:.2f})")


def write_figure(folder: Path, history: History, bigram_bits: float) -> Path | None:
    """Draw the loss and each expert's load over time; return the path, or None if matplotlib is missing."""
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
    loss_axes.set(title="Loss", xlabel="step", ylabel="bits per byte", xlim=(0, max(2, len(history.losses))))
    loss_axes.legend()

    plot_expert_load(history.loads, axes=load_axes)
    return write_png(folder / FIGURE_NAME, figure)


def smoothed(values: list[float], weight: float = 0.95) -> list[float]:
    """Return the bias-corrected exponential moving average of the values."""
    means, mean, total = [], 0.0, 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        total = weight * total + 1 - weight
        means.append(mean / total)
    return means
