"""Errors of the demo that the user can correct."""

from __future__ import annotations

import errno
from pathlib import Path


class DemoError(Exception):
    """An error with a one-line message that names the remedy; the command prints it and exits with ``exit_code``."""

    exit_code = 1


class UsageError(DemoError):
    """Invalid options."""

    exit_code = 2  # argparse's


class InterruptedRunError(DemoError):
    """SIGINT or SIGTERM stopped the run after a step; the exit status is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def cannot_write(path: Path, error: OSError) -> DemoError:
    """Return a :class:`DemoError` with a remedy for an ``OSError`` that writing ``path`` raised."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DemoError(
            f"the disk is full: cannot write {path}; free some space or choose another folder with --output"
        )
    reason = error.strerror or str(error)
    return DemoError(f"cannot write {path}: {reason}; choose a folder that you can write to with --output")
