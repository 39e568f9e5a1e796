"""The architecture that a call is planned for: that of its device, or the one that ``explain(..., arch=90)`` names."""

from __future__ import annotations

import functools
import operator
import re
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fusedmoe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

ARCHITECTURES = (90,)
"""Those that `fusedmoe` has kernels for: 90 is sm_90, an H100 or H200."""


@functools.cache
def arch_of(device: torch.device) -> int | None:
    """Return the architecture of an NVIDIA GPU, 90 for sm_90; None for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@dataclass(frozen=True)
class Target:
    """What a plan is asked for.

    Attributes
    ----------
    arch : int
        An NVIDIA GPU's architecture: 90 for sm_90.
    dtype : torch.dtype or None
        What rows and parameters are planned in, in place of their own dtype, as under `torch.autocast`.
    """

    arch: int
    dtype: torch.dtype | None = None


_target: ContextVar[Target | None] = ContextVar("fusedmoe.target", default=None)

current = _target.get
"""Returns the target that is asked about at this point; None for the device that tensors are on."""


@contextmanager
def planned_for(arch: object, dtype: object = None) -> Iterator[Target | None]:
    """Have what is explained inside planned for this architecture; with None, for what is asked about already.

    Raises
    ------
    InputError
        ``arch`` names no architecture, or ``dtype`` is not a floating-point dtype or comes without ``arch``.
    """
    if arch is None:
        if dtype is not None:
            raise InputError(f"explain: dtype: expected with arch=, got {dtype} alone; convert the module instead")
        yield current()
        return
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"explain: dtype: expected a floating-point torch.dtype, got {dtype!r}")
    token = _target.set(Target(checked_arch(arch), dtype))
    try:
        yield current()
    finally:
        _target.reset(token)


def has_no_memory(t: torch.Tensor) -> bool:
    """Whether a tensor only has a shape, a dtype and a device."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)


def checked_arch(arch: object, name: str = "explain: arch") -> int:
    """Return an architecture as a number: of ``90``, ``"90"``, ``"sm_90"`` and ``"sm_90a"``.

    ``name`` is what errors call it.

    Raises
    ------
    InputError
        It is none of these.
    """
    text = re.fullmatch(r"(?:sm_?)?(\d+)[af]?", arch.lower()) if isinstance(arch, str) else None
    try:
        number = int(text[1]) if text else -1 if isinstance(arch, bool) else operator.index(arch)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 50 <= number < 200:
        raise InputError(f"{name}: expected a number such as 90, for sm_90 (H100, H200), got {arch!r}")
    return number
