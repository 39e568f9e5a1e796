"""What the demo raises for a mistake or a mishap that the user can do something about."""

from __future__ import annotations

import errno
from pathlib import Path


class DemoError(Exception):
    """One line that says what is wrong and what to do; the command prints it and exits with ``exit_code``."""

    exit_code = 1


class UsageError(DemoError):
    """Options that cannot be meant; the exit status is argparse's own."""

    exit_code = 2


class InterruptedRunError(DemoError):
    """The run was asked to stop (Ctrl-C, SIGTERM) and did, after a step; the status is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def cannot_write(path: Path, error: OSError) -> DemoError:
    """Turn what the operating system said about writing ``path`` into a message with its remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DemoError(
            f"the disk is full: cannot write {path}; free some space or choose another folder with --output"
        )
    reason = error.strerror or str(error)
    return DemoError(f"cannot write {path}: {reason}; choose a folder that you can write to with --output")
