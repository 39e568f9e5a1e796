"""The packed forms of rows and weights in NVFP4.

Of rows, `fusedmoe.kernels.sm100.quantize_nvfp4` writes them. Of weights, the kernels of
`fusedmoe.builtin_rules.rows.narrow_forms` write codes and scales, which plain PyTorch puts in the packed layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedmoe.builtin_rules.rows.narrow_forms import LAUNCHES_ON_SCALES, Forms, bind_factors, bind_weight_forms
from fusedmoe.kernels.sm100 import quantize_functions
from fusedmoe.numerics.formats import Quantizer
from fusedmoe.numerics.formats.casts import random_bytes
from fusedmoe.numerics.formats.groups import PACKED_ROWS, padded_rows
from fusedmoe.numerics.formats.packed import PACKED_FEATURES, interleave
from fusedmoe.numerics.formats.swizzle import swizzle


def launches_of(quantizer: Quantizer, forms: int = 2) -> int:
    """Return the launches of one quantization, approximately."""
    return LAUNCHES_ON_SCALES + forms * quantizer.stochastic_rounding


def extra_bytes(quantizer: Quantizer, values: int, forms: int = 2) -> int:
    """Return the bytes that move besides values, read once, and their codes: a second read, and random bytes."""
    return values * (2 + 2 * forms * quantizer.stochastic_rounding)


def bind_packed_forms(
    x: Tensor,
    quantizer: Quantizer,
    offsets_E: Tensor,
    index_R: Tensor | None = None,
    *,
    rows: bool,
    columns: bool,
    halves: bool = False,
    packed: bool = False,
) -> Callable[..., Forms]:
    """Return a function of ``(x, offsets, index)`` that returns codes, scale and tensor scale of each packed form.

    Rounded to nearest, they have the bits of `fusedmoe.numerics.formats.packed.quantize_packed`. With ``packed``, ``x``
    has packed rows, and ``offsets`` their ends. The other arguments are those of
    `fusedmoe.kernels.sm100.quantize_functions.bind_quantize_packed_nvfp4`.
    """
    if not (rows or columns):
        return lambda *_: []
    rotated, stochastic = quantizer.hadamard and columns, quantizer.stochastic_rounding
    num_rows, length = x.shape[0] if index_R is None else index_R.shape[0], x.shape[1]
    places = num_rows if packed else padded_rows(num_rows, offsets_E.shape[0], PACKED_ROWS)
    shapes = [(places, length)] * rows + [(length, places)] * columns
    factors_of = bind_factors(x, quantizer.format, rows, columns, rotated, offsets_E, index_R)
    kernel = quantize_functions.bind_quantize_packed_nvfp4(
        x, offsets_E, index_R, rows=rows, columns=columns, halves=halves, rotated=rotated,
        stochastic=stochastic, packed=packed,
    )  # fmt: skip

    def run(x: Tensor, offsets_E: Tensor, index_R: Tensor | None = None) -> Forms:
        factors, _, tensor_scales = factors_of(x, offsets_E, index_R)
        random: tuple[Tensor, ...] = ()
        if stochastic:
            random = tuple(random_bytes(shape, x.device) for shape in shapes)
        forms = kernel(x, offsets_E, factors, random, index_R)
        return [(*form, tensor_scale) for form, tensor_scale in zip(forms, tensor_scales, strict=True)]

    return run


LAUNCHES_TO_PACK_WEIGHT = 8  # the launches, approximately, that put codes and scales of a weight in the packed layout


def bind_packed_weight_forms(
    weight_ENK: Tensor, quantizer: Quantizer, axes: Sequence[int], halves: bool
) -> Callable[[Tensor], Forms]:
    """Return a function of a weight that returns codes, scale and tensor scale of its packed forms along these axes.

    They have the bits of `fusedmoe.numerics.formats.packed.quantize_packed`.
    """
    quantize = bind_weight_forms(weight_ENK, quantizer, axes)
    across, _ = quantizer.format.block
    assert across is not None, "NVFP4 has blocks"

    def packed(axis: int, codes: Tensor, scale: Tensor, tensor_scale: Tensor) -> tuple[Tensor, ...]:
        scale = scale.view(torch.uint8)
        if halves:
            # copied in words: by rows, N is the second axis; by columns, it is the last, with 16 codes in a word
            of_codes, of_scale, word = PACKED_FEATURES, PACKED_FEATURES // across, torch.int64
            if axis == -2:
                of_codes, of_scale, word = PACKED_FEATURES // 16, 1, torch.int16  # a word has the scales of 32 values
            codes = interleave(codes.view(torch.int64), -3 - axis, of_codes).view(torch.uint8)
            scale = interleave(scale.view(word), -3 - axis, of_scale).view(torch.uint8)
        if across > 1:
            scale = scale.repeat_interleave(across, -2)  # the tensor cores read a scale for each line
        blocked = swizzle(scale).flatten().view(quantizer.format.rule.dtype)
        return codes.contiguous(), blocked, tensor_scale

    def run(weight: Tensor) -> Forms:
        return [packed(axis, *form) for axis, form in zip(axes, quantize(weight), strict=True)]

    return run
