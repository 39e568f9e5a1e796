"""A checkpoint on the disk: ``checkpoint.pt`` and, beside it, ``checkpoint.pt.sha256`` as ``sha256sum`` writes it.

The file is a plain ``torch.save`` of tensors, numbers and strings, so ``torch.load(path, weights_only=True)`` reads it
anywhere.

Two files cannot be replaced in one step, so the digest file first names both the old and the new content, then
``checkpoint.pt`` is replaced, then the old digest is dropped. Wherever that is cut off, the ``checkpoint.pt`` that lies
there is one of those named.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from fusedmoe.demo.errors import DemoError, cannot_write
from fusedmoe.demo.files import write_atomically

FORMAT = 1
NAME = "checkpoint.pt"
PREVIOUS_NAME = "checkpoint.previous.pt"

State = dict[str, Any]


def save(folder: Path, state: State) -> None:
    """Write the state as the folder's checkpoint; the one before stays good until this one is whole and on the disk."""
    path = folder / NAME
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    content = buffer.getbuffer()
    digest = hashlib.sha256(content).hexdigest()
    _write_digests(path, [*_digests(path), digest])
    write_atomically(path, content)
    _write_digests(path, [digest])


def load(folder: Path) -> State:
    """Read the folder's checkpoint, after comparing its SHA-256; all tensors come back on the CPU.

    Raises
    ------
    DemoError
        Where there is none, where it is not what was written, or where another version of the demo wrote it.
    """
    path = folder / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DemoError(
            f"no checkpoint at {path}; start without --resume, or say with --output where it lies"
        ) from error
    except OSError as error:
        raise DemoError(f"cannot read {path}: {error.strerror or error}") from error
    accepted = _digests(path)
    if not accepted:
        raise DemoError(f"{_digest_path(path)} is missing or empty, so {path} cannot be checked; {_start_anew(path)}")
    if hashlib.sha256(content).hexdigest() not in accepted:
        raise DemoError(
            f"{path} is corrupt: its SHA-256 is not the one in {_digest_path(path).name}; {_start_anew(path)}"
        )
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise DemoError(f"{path} is not a checkpoint of this demo; {_start_anew(path)}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise DemoError(f"{path} was written by another version of the demo; {_start_anew(path)}")
    return state


def set_aside(folder: Path) -> Path | None:
    """Rename the checkpoint of an earlier run, so that a new run cannot replace it; return its new path, if any."""
    path, previous = folder / NAME, folder / PREVIOUS_NAME
    if not path.exists():
        return None
    try:
        if _digest_path(path).exists():
            os.replace(_digest_path(path), _digest_path(previous))
        os.replace(path, previous)
    except OSError as error:
        raise cannot_write(previous, error) from error
    return previous


def _start_anew(path: Path) -> str:
    return f"delete {path} and start without --resume, or put a good copy there"


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digests(path: Path) -> list[str]:
    try:
        lines = _digest_path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line.split()[0] for line in lines if line.strip()]


def _write_digests(path: Path, digests: list[str]) -> None:
    lines = "".join(f"{digest}  {path.name}\n" for digest in digests)
    write_atomically(_digest_path(path), lines.encode())
