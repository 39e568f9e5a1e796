"""The kernels that ``fusedmoe compile`` builds ahead of time."""

from __future__ import annotations

from fusedmoe.errors import InputError
from fusedmoe.kernels.kernel import Kernel

ARCHES = ("sm_90a",)


def shipped(arch: str) -> tuple[Kernel, ...]:
    """Return the kernels that are built ahead of time for an architecture, such as ``sm_90a``.

    Raises
    ------
    fusedmoe.InputError
        fusedmoe has no kernels for the architecture.
    """
    if arch not in ARCHES:
        raise InputError(f"arch {arch!r}: expected one of {', '.join(ARCHES)}")
    from fusedmoe.kernels.sm90 import shipped as sm90  # deferred: imports the CuTe DSL

    return sm90.shipped()
