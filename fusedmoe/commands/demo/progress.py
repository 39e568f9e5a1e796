"""Progress of the training: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

from collections import deque

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from fusedmoe.commands.demo.history import History

LINES = 24  # in total, without a terminal
LOAD_STEPS = 20  # the load is that of the last LOAD_STEPS steps, the rate that of as many updates
LOSS_SMOOTHING = 0.9
BARS = 8  # maximum number of experts whose loads fit into the line, one character each
LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "12345678"


class Progress:
    """Receives the results of steps and evaluations; a subclass shows the steps, this class prints the evaluations."""

    def __init__(self, console: Console, first_step: int, steps: int, tokens_per_step: int) -> None:
        self._console = console
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._times: deque[tuple[int, float]] = deque(maxlen=LOAD_STEPS)
        self._read = 0
        self._loss = 0.0
        self._loss_weight = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def update(self, step: int, seconds: float, history: History) -> None:
        """Show the completed steps, the seconds spent in them, and the latest results."""
        raise NotImplementedError

    def evaluated(self, step: int, bits: float) -> None:
        """Print the bits per byte on the held-out text after a step."""
        self._console.print(f"step {step:{len(str(self._steps))}}/{self._steps}  held-out {bits:.3f} bits/byte")

    def _loss_and_rate(self, step: int, seconds: float, history: History) -> tuple[float, float]:
        """Return the smoothed training loss in bits per byte, and the tokens per second."""
        self._times.append((step, seconds))
        for loss in history.losses[max(self._read, len(history.losses) - 100) :]:
            self._loss = LOSS_SMOOTHING * self._loss + (1 - LOSS_SMOOTHING) * loss
            self._loss_weight = LOSS_SMOOTHING * self._loss_weight + 1 - LOSS_SMOOTHING
        self._read = len(history.losses)
        first_step, first_seconds = self._times[0] if len(self._times) > 1 else (0, 0.0)
        rate = self._tokens_per_step * (step - first_step) / max(seconds - first_seconds, 1e-9)
        return self._loss / self._loss_weight, rate


def progress_on(console: Console, first_step: int, steps: int, tokens_per_step: int) -> Progress:
    """Return a bar if the console is a terminal that can redraw a line, else lines."""
    shown = Bar if console.is_terminal and not console.is_dumb_terminal else Lines
    return shown(console, first_step, steps, tokens_per_step)


def load_shares(history: History) -> torch.Tensor:
    """Return the rows per expert over the recent steps and all layers, divided by their mean: (experts,)."""
    load = torch.stack(history.loads[-LOAD_STEPS:]).double().sum(dim=(0, 1))
    return load / load.sum() * len(load)


def load_bars(shares: torch.Tensor, levels: str) -> str:
    """Draw one character per expert: the middle level is the mean load, the highest level twice the mean or more."""
    tops = (shares / 2 * (len(levels) - 1)).round().clamp(0, len(levels) - 1)
    return "".join(levels[int(top)] for top in tops)


class Lines(Progress):
    """Occasional lines: for pipes, files and logs."""

    def __init__(self, console: Console, first_step: int, steps: int, tokens_per_step: int) -> None:
        super().__init__(console, first_step, steps, tokens_per_step)
        self._every = max(1, steps // LINES)
        self._next = first_step + 1

    def update(self, step: int, seconds: float, history: History) -> None:
        """Print a line about every ``steps // LINES`` steps."""
        loss, rate = self._loss_and_rate(step, seconds, history)
        if step < self._next:
            return
        self._next = step - step % self._every + self._every
        width = len(str(self._steps))
        self._console.print(
            f"step {step:{width}}/{self._steps}  loss {loss:.2f} bits/byte  "
            f"{rate:,.0f} tokens/s  busiest expert {load_shares(history).max():.2f}x its share"
        )


class Bar(Progress):
    """One line that redraws itself: for terminals."""

    def __init__(self, console: Console, first_step: int, steps: int, tokens_per_step: int) -> None:
        super().__init__(console, first_step, steps, tokens_per_step)
        self._levels = LEVELS if "utf" in console.encoding else ASCII_LEVELS
        self._bar = RichProgress(
            BarColumn(bar_width=10),  # all columns together fit into 80 characters
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("training", total=steps, completed=first_step, figures="")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, step: int, seconds: float, history: History) -> None:
        """Redraw the bar."""
        loss, rate = self._loss_and_rate(step, seconds, history)
        shares = load_shares(history)
        load = f"load {load_bars(shares, self._levels)}" if len(shares) <= BARS else f"busiest {shares.max():.2f}x"
        figures = f"loss {loss:.2f} bits/byte {rate:,.0f} tokens/s {load}"
        self._bar.update(self._task, completed=step, figures=figures)
