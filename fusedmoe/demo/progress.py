"""What a person sees while it trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from fusedmoe.demo.history import History

LINES = 24  # in all, where there is no terminal
LOAD_STEPS = 20  # the load and the rate shown are those of so many steps
LOSS_SMOOTHING = 0.9
BARS = 8  # a character for each expert as long as they fit into the line; beyond, the busiest one
LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "12345678"


class Progress(Protocol):
    """Told of every step whose results were read, and of every evaluation."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, step: int, seconds: float, history: History) -> None:
        """Steps done, seconds spent in them, and the record up to here."""

    def evaluated(self, step: int, bits: float) -> None:
        """Bits a byte on the held-out text after a step."""


def progress_on(console: Console, first_step: int, steps: int, tokens_per_step: int) -> Progress:
    """Return a bar where the console is a terminal that can redraw a line, lines elsewhere."""
    shown = Bar if console.is_terminal and not console.is_dumb_terminal else Lines
    return shown(console, first_step, steps, tokens_per_step)


class _Figures:
    """The numbers that both kinds show."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._times: deque[tuple[int, float]] = deque(maxlen=LOAD_STEPS)
        self._read = 0
        self._loss = 0.0
        self._loss_weight = 0.0

    def add(self, step: int, seconds: float, history: History) -> None:
        self._times.append((step, seconds))
        for loss in history.losses[max(self._read, len(history.losses) - 100) :]:
            self._loss = LOSS_SMOOTHING * self._loss + (1 - LOSS_SMOOTHING) * loss
            self._loss_weight = LOSS_SMOOTHING * self._loss_weight + 1 - LOSS_SMOOTHING
        self._read = len(history.losses)

    @property
    def loss(self) -> float:
        """The smoothed training loss in bits a byte."""
        return self._loss / self._loss_weight

    @property
    def tokens_per_second(self) -> float:
        (step, seconds), (last_step, last_seconds) = self._times[0], self._times[-1]
        if last_step == step:  # nothing to compare with yet
            return self._tokens_per_step * last_step / max(last_seconds, 1e-9)
        return self._tokens_per_step * (last_step - step) / max(last_seconds - seconds, 1e-9)


def load_shares(history: History) -> torch.Tensor:
    """Return each expert's part of the recent rows over all layers, as a multiple of the balanced one: (experts,)."""
    load = torch.stack(history.loads[-LOAD_STEPS:]).double().sum(dim=(0, 1))
    return load / load.sum() * len(load)


def load_bars(shares: torch.Tensor, levels: str) -> str:
    """Draw one character an expert: the middle level is a balanced load, the highest twice that or more."""
    tops = (shares / 2 * (len(levels) - 1)).round().clamp(0, len(levels) - 1)
    return "".join(levels[int(top)] for top in tops)


def evaluation_line(step: int, steps: int, bits: float) -> str:
    """Say what an evaluation found."""
    return f"step {step:{len(str(steps))}}/{steps}  held-out {bits:.3f} bits/byte"


class Lines:
    """A line now and then: for pipes, files and logs."""

    def __init__(self, console: Console, first_step: int, steps: int, tokens_per_step: int) -> None:
        self._console = console
        self._steps = steps
        self._figures = _Figures(tokens_per_step)
        self._every = max(1, steps // LINES)
        self._next = first_step + 1

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def update(self, step: int, seconds: float, history: History) -> None:
        self._figures.add(step, seconds, history)
        if step < self._next:
            return
        self._next = step - step % self._every + self._every
        width = len(str(self._steps))
        figures = self._figures
        self._console.print(
            f"step {step:{width}}/{self._steps}  loss {figures.loss:.2f} bits/byte  "
            f"{figures.tokens_per_second:,.0f} tokens/s  busiest expert {load_shares(history).max():.2f}x its share"
        )

    def evaluated(self, step: int, bits: float) -> None:
        self._console.print(evaluation_line(step, self._steps, bits))


class Bar:
    """One line that redraws itself: for terminals."""

    def __init__(self, console: Console, first_step: int, steps: int, tokens_per_step: int) -> None:
        self._figures = _Figures(tokens_per_step)
        self._levels = LEVELS if "utf" in console.encoding else ASCII_LEVELS
        self._console = console
        self._steps = steps
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, step: int, seconds: float, history: History) -> None:
        self._figures.add(step, seconds, history)
        shares = load_shares(history)
        load = f"load {load_bars(shares, self._levels)}" if len(shares) <= BARS else f"busiest {shares.max():.2f}x"
        figures = f"loss {self._figures.loss:.2f} bits/byte {self._figures.tokens_per_second:,.0f} tokens/s {load}"
        self._bar.update(self._task, completed=step, figures=figures)

    def evaluated(self, step: int, bits: float) -> None:
        self._console.print(evaluation_line(step, self._steps, bits))
