"""The progress of long commands: a bar on a terminal, lines elsewhere, always on stderr."""

import io

import pytest
from rich.console import Console

from fusedmoe.base.progress import LINES, counted


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def test_elsewhere_there_are_plain_lines():
    shown = console(terminal=False)
    with counted(99, "kernels", shown) as advance:
        for i in range(99):
            advance(f"kernel {i}")
    lines = shown.file.getvalue().splitlines()
    assert len(lines) <= LINES
    assert lines[0].startswith("4/99 kernels, 0 s, kernel 3")
    assert lines[-1].startswith("99/99 kernels, 0 s, kernel 98")
    assert "\x1b" not in shown.file.getvalue()


def test_a_terminal_gets_a_bar_that_counts_and_that_an_error_ends():
    shown = console(terminal=True)

    def interrupted():
        with counted(3, "kernels", shown) as advance:
            advance("first")
            advance("[second]")  # a name is no markup
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(text in shown.file.getvalue() for text in ("2/3", "kernels", "[second]", "\x1b["))
    with counted(1, "kernels", shown) as advance:  # a second bar beside the first would raise
        advance("again")
