"""The architecture that a call is planned for: that of its device, or the argument of ``explain(..., arch=90)``."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from fusedmoe.base.errors import InputError

ARCHITECTURES = (90, 100, 103)
"""The architectures that `fusedmoe` has kernels for: sm_90 (H100, H200), and sm_100 (B200) and sm_103 (B300).
"""


@functools.cache
def arch_of(device: torch.device) -> int | None:
    """Return the architecture of an NVIDIA GPU, 90 for sm_90; None for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def kernel_arch(device: torch.device) -> str:
    """Return the architecture to compile a kernel for, such as ``sm_90a``; any other device emulates an sm_90 GPU."""
    return f"sm_{arch_of(device) or 90}a"


@dataclass(frozen=True)
class Target:
    """The arguments ``arch`` and ``dtype`` of ``explain``."""

    arch: int  # 90 for sm_90
    dtype: torch.dtype | None = None  # of rows and parameters in the plan, in place of their own


_target: ContextVar[Target | None] = ContextVar("fusedmoe.base.target", default=None)

current = _target.get  # returns the current target; None to plan for the device of the tensors


@contextmanager
def planned_for(arch: object, dtype: object = None) -> Iterator[Target | None]:
    """Plan calls inside the block for this architecture; None keeps the current target.

    Raises `InputError`: ``arch`` is no architecture, or ``dtype`` is no floating-point dtype or is given without
    ``arch``.
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


def checked_arch(arch: object, name: str = "explain: arch") -> int:
    """Return 90 for ``90``, ``"90"``, ``"sm_90"`` or ``"sm_90a"``; raise `InputError` for other forms.

    ``name`` is the name of the argument in the error.
    """
    text = re.fullmatch(r"(?:sm_?)?(\d+)[af]?", arch.lower()) if isinstance(arch, str) else None
    try:
        number = int(text[1]) if text else -1 if isinstance(arch, bool) else operator.index(arch)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 50 <= number < 200:
        raise InputError(f"{name}: expected a number such as 90, for sm_90 (H100, H200), got {arch!r}")
    return number
