"""The kernels for Blackwell that are built ahead of time: those of common models. NVIDIA's are not among them."""

from __future__ import annotations

from dataclasses import replace

from fusedmoe.kernels.build.kernel import Kernel
from fusedmoe.kernels.rows.move.offsets import ZeroTail
from fusedmoe.kernels.rows.quantize.formats import Magnitudes, QuantizeFormat
from fusedmoe.kernels.sm90.shipped import activations, moving_rows
from fusedmoe.kernels.sm100.quantize import QuantizePacked, QuantizePackedWeight
from fusedmoe.kernels.sm100.quantize_nvfp4 import QuantizePackedFormat
from fusedmoe.numerics.formats import nvfp4

FORMS = ((True, True), (True, False), (False, True))  # codes by rows, by columns


def shipped(arch: str) -> tuple[Kernel, ...]:
    """Return the kernels for an architecture, ``sm_100a`` or ``sm_103a``, the most used ones first."""
    quantize = [QuantizePacked("bf16", False, *form, gathered) for gathered in (False, True) for form in FORMS]
    halves = QuantizePacked("bf16", True, True, True)  # of the gradient before a gated activation
    weights = [QuantizePackedWeight("bf16", halves, *form) for halves in (True, False) for form in FORMS]
    every = *quantize, halves, *weights, *moving_rows(), *activations(False, True), ZeroTail("bf16"), *_nvfp4()
    return tuple(replace(kernel, arch=arch) for kernel in every)


def _nvfp4() -> tuple[QuantizeFormat | Magnitudes, ...]:
    """Return the kernels that quantize to NVFP4 as its recipe does by default: for training, and for inference."""
    kernels: list[QuantizeFormat | Magnitudes] = []
    for gathered in (False, True):
        for columns, stochastic in ((True, False), (True, True), (False, False)):
            how = True, gathered, columns
            kernels.append(QuantizePackedFormat("bf16", *how, nvfp4(), True, columns, stochastic))
            kernels.append(Magnitudes("bf16", *how, False, False, True, columns))
    square = nvfp4(across=16)
    kernels += [QuantizeFormat("bf16", False, False, False, square, *form) for form in FORMS]
    kernels.append(Magnitudes("bf16", False, False, False, False, False, True, False))
    return tuple(dict.fromkeys(kernels))
