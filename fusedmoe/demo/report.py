"""What is left of a run: the figure and the numbers as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fusedmoe.demo.files import write_atomically
from fusedmoe.demo.history import History
from fusedmoe.extras import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_NAME = "training.png"
RESULTS_NAME = "results.json"
MISSING_MATPLOTLIB = f"no figure: matplotlib is not installed; {install_command('demo')}"
COLUMNS = 200  # of the load map: each is the mean of so many of the steps as fit


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
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and leaves pyplot's state alone
    return figure


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

    shares = load_map(torch.stack(history.loads))
    layers, experts = history.loads[0].shape
    image = load_axes.imshow(
        shares.T.tolist(),
        aspect="auto",
        interpolation="nearest",
        cmap="coolwarm",
        vmin=0.0,
        vmax=2.0,
        extent=(0, len(history.loads), layers * experts, 0),
    )
    for layer in range(1, layers):
        load_axes.axhline(layer * experts, color="black", linewidth=0.8)
    load_axes.set_yticks([(layer + 0.5) * experts for layer in range(layers)], [f"layer {i}" for i in range(layers)])
    load_axes.set(title=f"Load of the {experts} experts of each layer", xlabel="step")
    figure.colorbar(image, ax=load_axes, label="rows / balanced share", extend="max")
    return write_png(folder / FIGURE_NAME, figure)


def smoothed(values: list[float], weight: float = 0.95) -> list[float]:
    """Return the running mean of the values, exponentially weighted, without a bias towards zero at the start."""
    means, mean, total = [], 0.0, 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        total = weight * total + 1 - weight
        means.append(mean / total)
    return means


def load_map(loads: torch.Tensor) -> torch.Tensor:
    """Return rows as multiples of a balanced share, (columns, layers * experts) from (steps, layers, experts)."""
    pieces = loads.double().tensor_split(min(COLUMNS, len(loads)))
    load = torch.stack([piece.sum(dim=0) for piece in pieces])
    return (load / load.mean(dim=-1, keepdim=True)).flatten(1)
