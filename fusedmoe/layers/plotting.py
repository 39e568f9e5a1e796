"""`plot_expert_load`: a plot of the rows per expert. matplotlib is imported when a figure is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor

from fusedmoe.base.checks import said
from fusedmoe.base.errors import InputError
from fusedmoe.base.extras import install_command
from fusedmoe.layers.moe import MoEStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Loads: TypeAlias = "Tensor | MoEStats | Sequence[Loads]"  # a list or tuple

COLUMNS = 200  # the most columns of a plot over steps; with more steps, a column shows the sum of several


def plot_expert_load(loads: Loads, *, axes: Axes | None = None) -> Figure:
    """Plot the load of experts relative to a balanced share: ``E * load[e] / sum(load)``.

    A balanced expert is white, one with few rows blue, and one with twice its share or more red. The loads of one step
    are plotted with one row per layer. Those of several steps are plotted with one column per step, or per several
    steps, and the experts of all layers below each other.

    Parameters
    ----------
    loads
        Rows per expert: a `MoEStats`, a tensor (E,), (layers, E) or (steps, layers, E), or nested lists of these, such
        as one list of stats per step with one entry per layer. All layers must have the same number of experts. The
        values are read on the host, which waits for a GPU.
    axes
        The matplotlib axes to draw in. None creates a figure.

    Returns
    -------
    matplotlib.figure.Figure
        Save it with ``figure.savefig("load.png")``. It needs no display.

    Raises
    ------
    InputError
        The loads have the wrong shape, are negative or not finite.
    ImportError
        matplotlib is not installed; the extra ``demo`` includes it.
    """
    load_SLE = _stacked(loads)
    if axes is not None and not hasattr(axes, "set_yticks"):
        raise InputError(f"plot_expert_load: axes: expected the Axes of matplotlib or None, got {said(axes)}")
    if axes is None:
        axes = new_figure(9, 4).subplots()
    steps, layers, experts = load_SLE.shape
    shares = load_SLE.double()
    names = [f"layer {i}" for i in range(layers)]
    if steps == 1:
        picture, extent = _shares(shares)[0], (0, experts, layers, 0)
        axes.set_yticks([layer + 0.5 for layer in range(layers)], names)
        axes.set(title="Expert load", xlabel="expert")
    else:
        pieces = shares.tensor_split(min(COLUMNS, steps))
        picture = _shares(torch.stack([piece.sum(dim=0) for piece in pieces])).flatten(1).T
        extent = (0, steps, layers * experts, 0)
        axes.set_yticks([(layer + 0.5) * experts for layer in range(layers)], names)
        axes.set(title=f"Load of the {experts} experts of each layer", xlabel="step")
        for layer in range(1, layers):
            axes.axhline(layer * experts, color="black", linewidth=0.8)
    image = axes.imshow(
        picture.tolist(), aspect="auto", interpolation="nearest", cmap="coolwarm", vmin=0.0, vmax=2.0, extent=extent
    )
    figure = cast("Figure", axes.figure)
    figure.colorbar(image, ax=axes, label="rows / balanced share", extend="max")
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches, which needs no display and does not change the state of pyplot.

    Raises `ImportError`: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: {install_command('demo')}") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _stacked(loads: Loads) -> Tensor:
    """Return loads as one tensor (steps, layers, E) on the CPU."""
    load = _tensor(loads)
    if not 1 <= load.dim() <= 3 or not load.numel():
        raise InputError(
            "plot_expert_load: loads: expected shape (experts,), (layers, experts) or (steps, layers, experts), got "
            f"{tuple(load.shape)}"
        )
    if load.is_complex() or not bool((load >= 0).logical_and(load.isfinite()).all()):
        raise InputError(f"plot_expert_load: loads: expected finite numbers of rows, 0 or more, got {said(load)}")
    return load.reshape((1,) * (3 - load.dim()) + tuple(load.shape))


def _tensor(loads: Loads) -> Tensor:
    if isinstance(loads, MoEStats):
        loads = loads.load
    if isinstance(loads, Tensor):
        return loads.detach().cpu()
    parts = [_tensor(part) for part in loads] if isinstance(loads, list | tuple) else []
    if not parts:
        got = f"an empty {type(loads).__name__}" if isinstance(loads, list | tuple) else type(loads).__name__
        raise InputError(f"plot_expert_load: loads: expected a MoEStats, a tensor or a list of these, got {got}")
    if len({part.shape for part in parts}) > 1:
        shapes = sorted({tuple(part.shape) for part in parts})
        raise InputError(f"plot_expert_load: loads: expected equal shapes, got {', '.join(map(str, shapes))}")
    return torch.stack(parts)


def _shares(load: Tensor) -> Tensor:
    """Return rows relative to a balanced share; zeros for a layer without rows."""
    return load / load.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(load.dtype).tiny)
