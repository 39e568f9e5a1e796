"""The machine and the package versions of a measurement."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "quack-kernels",
    "sonic-moe",
    "liger-kernel",
    "sgl-deep-gemm",
    "transformers",
)


def machine(device: torch.device | None = None) -> str:
    """Return the name of a device's GPU or CPU; by default the GPU, if any."""
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the installed packages that affect the results."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
    return found
