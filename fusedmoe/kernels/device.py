"""What kind of device tensors are on."""

from __future__ import annotations

import functools

import torch


@functools.cache
def arch(device: torch.device) -> int | None:
    """Return an NVIDIA GPU's architecture, 90 for sm_90; None for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
