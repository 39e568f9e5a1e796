"""Result files: what was measured, on which machine, with which versions, at which commit."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent
PACKAGES = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "quack-kernels",
    "sonic-moe",
    "sgl-deep-gemm",
    "transformers",
)


def machine() -> str:
    """The GPU's name, or the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of what the results depend on, as far as it is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
    return found


def commit() -> str:
    """The commit measured, marked where the checkout differs from it; where there is no git, ``FUSEDMOE_COMMIT``."""
    if told := os.environ.get("FUSEDMOE_COMMIT"):
        return told
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def write(folder: Path, name: str, results: dict[str, Any]) -> Path:
    """Write ``folder/<machine>/<name>.json``."""
    target = folder / re.sub(r"[^a-z0-9]+", "-", machine().lower()).strip("-") / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    head = {"machine": machine(), "commit": commit(), "versions": versions()}
    target.write_text(json.dumps(head | results, indent=1) + "\n")
    return target
