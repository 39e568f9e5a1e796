"""Files that are either whole and on the disk, or as they were before."""

from __future__ import annotations

import os
from pathlib import Path

from fusedmoe.demo.errors import cannot_write


def make_folder(path: Path) -> None:
    """Make the folder and its parents; a :class:`DemoError` where that cannot be done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Replace ``path`` by ``content`` in one step: the old content stays until the new one is whole and on the disk.

    Raises
    ------
    DemoError
        Where the folder cannot be written, or the disk is full; ``path`` is as it was, and nothing half-written is
        left.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # in the same folder: a rename across file systems is a copy
    try:
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def _sync_folder(folder: Path) -> None:
    """Put the rename itself on the disk, where the system has a way to (Windows has none)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
