"""Progress of a long command on stderr: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

LINES = 25  # at most, without a terminal

Advance: TypeAlias = "Callable[[str], None]"  # reports one completed item by name


@contextlib.contextmanager
def counted(total: int, unit: str, console: Console | None = None) -> Iterator[Advance]:
    """Show ``done/total`` while the block runs; lines printed meanwhile stay above the bar.

    - ``total``: number of items.
    - ``unit``: plural name of the items, such as ``"kernels"``.
    - ``console``: the output; stderr by default.

    It yields a function, to be called with the name of each completed item.
    """
    from rich.console import Console

    console = console or Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        with _bar(total, unit, console) as advance:
            yield advance
    else:
        yield _lines(total, unit, console)


@contextlib.contextmanager
def _bar(total: int, unit: str, console: Console) -> Iterator[Advance]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    name = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn(), name)
    # redirecting stdout would also change output that goes into a file or a pipe
    with Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty(), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def _lines(total: int, unit: str, console: Console) -> Advance:
    done, begin = 0, time.perf_counter()
    every = -(-total // LINES)

    def advance(name: str) -> None:
        nonlocal done
        done += 1
        if done % every == 0 or done == total:
            seconds = time.perf_counter() - begin
            print(f"{done}/{total} {unit}, {seconds:.0f} s, {name}", file=console.file, flush=True)

    return advance
