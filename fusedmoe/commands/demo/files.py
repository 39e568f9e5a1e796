"""Atomic file writes."""

from __future__ import annotations

import os
from pathlib import Path

from fusedmoe.commands.demo.errors import cannot_write


def make_folder(path: Path) -> None:
    """Create the folder and its parents; raise a :class:`DemoError` on failure."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Replace the file atomically: the old content stays until the new content is complete and synced to disk.

    Raises
    ------
    DemoError
        When the folder is not writable or the disk is full; ``path`` is unchanged and no partial file remains.
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
    """Sync the rename to disk."""
    if os.name != "posix":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
