"""Checkpoints: ``checkpoint.pt`` and its digest ``checkpoint.pt.sha256``, in the format of ``sha256sum``.

``torch.load(path, weights_only=True)`` reads the checkpoint: it contains tensors, numbers and strings.

Two files cannot be replaced in one atomic step. So the digest file first lists the digests of the old and of the new
content, then ``checkpoint.pt`` is replaced, then the old digest is dropped. After an interruption at any point, the
digest file lists the digest of ``checkpoint.pt``.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from fusedmoe.commands.demo.errors import DemoError, cannot_write
from fusedmoe.commands.demo.files import write_atomically

FORMAT = 1
NAME = "checkpoint.pt"
PREVIOUS_NAME = "checkpoint.previous.pt"

State = dict[str, Any]


def save(folder: Path, state: State) -> None:
    """Write the folder's checkpoint; the previous one stays valid until the new one is synced to disk."""
    path = folder / NAME
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    content = buffer.getbuffer()
    digest = hashlib.sha256(content).hexdigest()
    _write_digests(path, [*_digests(path), digest])
    write_atomically(path, content)
    _write_digests(path, [digest])


def load(folder: Path) -> State:
    """Verify the SHA-256 of the folder's checkpoint and load it, with all tensors on the CPU.

    Raises
    ------
    DemoError
        When the checkpoint is missing or corrupt, or another version of the demo wrote it.
    """
    path = folder / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DemoError(f"no checkpoint at {path}; start without --resume, or name its folder with --output") from error
    except OSError as error:
        raise DemoError(f"cannot read {path}: {error.strerror or error}") from error
    accepted = _digests(path)
    if not accepted:
        raise DemoError(f"{_digest_path(path)} is missing or empty, so {path} cannot be verified; {_start_anew(path)}")
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
    """Rename the checkpoint of an earlier run, so that a new run does not replace it; return its new path, if any."""
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
    return f"delete {path} and start without --resume, or restore it from a copy"


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
