"""Result files: the measurements with their machine, versions and commit."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from fusedmoe.base.machine import machine, versions

ROOT = Path(__file__).resolve().parent


def commit() -> str:
    """Return all digits of the measured commit, marked if the checkout is dirty; ``FUSEDMOE_COMMIT`` replaces it."""
    if given := os.environ.get("FUSEDMOE_COMMIT"):
        return given
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def path(folder: Path, name: str) -> Path:
    """Return ``folder/<machine>/<name>.json``."""
    return folder / re.sub(r"[^a-z0-9]+", "-", machine().lower()).strip("-") / f"{name}.json"


def write(folder: Path, name: str, results: dict[str, Any]) -> Path:
    """Write ``folder/<machine>/<name>.json``."""
    target = path(folder, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    head = {"machine": machine(), "commit": commit(), "versions": versions()}
    target.write_text(json.dumps(head | results, indent=1) + "\n")
    return target
