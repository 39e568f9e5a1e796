"""The packed forms of rows in NVFP4: the kernel of `fusedmoe.kernels.sm100.quantize_nvfp4`, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedmoe.builtin_rules.sm90.narrow_forms import LAUNCHES_ON_SCALES, bind_factors
from fusedmoe.formats.groups import PACKED_ROWS, padded_rows
from fusedmoe.kernels.sm100 import quantize_functions

if TYPE_CHECKING:
    from fusedmoe.builtin_rules.sm90.narrow_forms import Forms
    from fusedmoe.formats import Quantizer


def launches_of(quantizer: Quantizer, forms: int = 2) -> int:
    """Return the launches of one quantization, approximately."""
    return LAUNCHES_ON_SCALES + forms * quantizer.stochastic_rounding


def bind_packed_forms(
    x: Tensor,
    quantizer: Quantizer,
    offsets_E: Tensor,
    index_R: Tensor | None = None,
    *,
    rows: bool,
    columns: bool,
    halves: bool = False,
) -> Callable[..., Forms]:
    """Return a function of ``(x, offsets, index)`` that returns codes, scale and tensor scale of each packed form.

    Rounded to nearest, they have the bits of `fusedmoe.formats.packed.quantize_packed`. The arguments are those of
    `fusedmoe.kernels.sm100.quantize_functions.bind_quantize_packed_nvfp4`.
    """
    rotated, stochastic = quantizer.hadamard and columns, quantizer.stochastic_rounding
    num_rows, length = x.shape[0] if index_R is None else index_R.shape[0], x.shape[1]
    packed = padded_rows(num_rows, offsets_E.shape[0], PACKED_ROWS)
    shapes = [(packed, length)] * rows + [(length, packed)] * columns
    factors_of = bind_factors(x, quantizer.format, rows, columns, rotated, offsets_E, index_R)
    kernel = quantize_functions.bind_quantize_packed_nvfp4(
        x, offsets_E, index_R, rows=rows, columns=columns, halves=halves, rotated=rotated, stochastic=stochastic
    )

    def run(x: Tensor, offsets_E: Tensor, index_R: Tensor | None = None) -> Forms:
        factors, _, tensor_scales = factors_of(x, offsets_E, index_R)
        random: tuple[Tensor, ...] = ()
        if stochastic:
            random = tuple(torch.randint(0, 256, shape, dtype=torch.uint8, device=x.device) for shape in shapes)
        forms = kernel(x, offsets_E, factors, random, index_R)
        return [(*form, tensor_scale) for form, tensor_scale in zip(forms, tensor_scales, strict=True)]

    return run
