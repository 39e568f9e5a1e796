"""What a measurement was made on, and with which versions."""

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
    "sgl-deep-gemm",
    "transformers",
)


def machine(device: torch.device | None = None) -> str:
    """Return the GPU's name, or the processor's: of a device, or of what there is."""
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of what the results depend on, where it is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
    return found
