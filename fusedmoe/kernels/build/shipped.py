"""The kernels that ``fusedmoe compile`` builds ahead of time."""

from __future__ import annotations

from fusedmoe.base.errors import InputError
from fusedmoe.kernels.build.kernel import Kernel

ARCHES = ("sm_90a", "sm_100a", "sm_103a")

BLACKWELL = "NVIDIA's grouped products are not built ahead of time: cudnn-frontend compiles each at its first use"


def shipped(arch: str) -> tuple[Kernel, ...]:
    """Return the kernels that are built ahead of time for an architecture, such as ``sm_90a``.

    Raises `fusedmoe.InputError`: fusedmoe has no kernels for the architecture.
    """
    if arch not in ARCHES:
        raise InputError(f"arch {arch!r}: expected one of {', '.join(ARCHES)}")
    from fusedmoe.kernels.sm90 import shipped as sm90  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm100 import shipped as sm100

    return sm90.shipped() if arch == "sm_90a" else sm100.shipped(arch)


def not_shipped(arch: str) -> str:
    """Return what is not built ahead of time although the architecture runs it, in a line; empty if nothing is."""
    return "" if arch == "sm_90a" else BLACKWELL
