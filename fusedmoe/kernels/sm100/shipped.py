"""The kernels for Blackwell that are built ahead of time: those of common models. NVIDIA's are not among them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fusedmoe.kernels.sm90.shipped import moving_rows
from fusedmoe.kernels.sm100.quantize import QuantizePacked, QuantizePackedWeight

if TYPE_CHECKING:
    from fusedmoe.kernels.kernel import Kernel

FORMS = ((True, True), (True, False), (False, True))  # codes by rows, by columns


def shipped(arch: str) -> tuple[Kernel, ...]:
    """Return the kernels for an architecture, ``sm_100a`` or ``sm_103a``, the most used ones first."""
    quantize = [QuantizePacked("bf16", False, *form, gathered) for gathered in (False, True) for form in FORMS]
    halves = QuantizePacked("bf16", True, True, True)  # of the gradient before a gated activation
    weights = [QuantizePackedWeight("bf16", halves, *form) for halves in (True, False) for form in FORMS]
    return tuple(replace(kernel, arch=arch) for kernel in (*quantize, halves, *weights, *moving_rows()))
