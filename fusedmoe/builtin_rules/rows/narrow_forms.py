"""The quantized forms of rows and weights from the kernels of `fusedmoe.kernels.rows.quantize.formats`.

A format with blocks of FP8 takes one launch. The others take more: first the largest magnitudes per row, per column of
an expert, or per expert, then factors from them in plain PyTorch, on small tensors, and then the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedmoe.builtin_rules.rows.delayed import bind_end
from fusedmoe.fusion.language.rule import require
from fusedmoe.kernels.rows.quantize import format_functions
from fusedmoe.numerics.formats import Format, Quantizer, ScaleRule
from fusedmoe.numerics.formats.casts import random_bytes
from fusedmoe.numerics.formats.format import column_block
from fusedmoe.numerics.formats.groups import padded_rows
from fusedmoe.numerics.formats.hadamard import TILE
from fusedmoe.numerics.formats.scales import encode_and_scale, tensor_encode
from fusedmoe.ops.state.amax import Step as DelayedStep

LAUNCHES_ON_SCALES = 8
"""The launches, approximately, on values per row or expert, of factors and scales from the values themselves."""
Forms = list[tuple[Tensor, ...]]  # Codes, scale and, if the format has one, tensor scale of each form


def is_narrow(format: Format, of_weights: bool = False) -> bool:
    """Whether these kernels have the format: blocks of 16 or 32 values, in one row or, of weights, square, with scales
    that are not fp32; or one scale per row or tensor.
    """
    across, along = format.block
    if along is None:
        return True
    shaped = along in (16, 32) and (across == 1 or (of_weights and across == along))
    return shaped and format.rule.dtype is not torch.float32


def bind_forms(
    x: Tensor,
    quantizer: Quantizer,
    axes: Sequence[int],
    offsets_E: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
    training: bool = False,
) -> Callable[..., Forms]:
    """Return a function of ``(x, offsets, index)`` that returns the tensors of the forms along these axes.

    They have the bits of `fusedmoe.quantize`. ``x`` is (R, K), or (T, K) with an index, or (B, R, K). For delayed
    scaling, the function also takes ``step=``, which it ends; only if ``training`` may that step count.
    """
    rows, columns = -1 in axes, -2 in axes
    rotated = quantizer.hadamard and columns
    format = quantizer.format
    if quantizer.stochastic_rounding and columns and offsets_E is None and not rotated:
        require(x.shape[-2] % 8 == 0, "%d rows with stochastic rounding: expected a multiple of 8", x.shape[-2])
    kernel = format_functions.bind_quantize_format(
        x, format, offsets_E, index_R, rows=rows, columns=columns, rotated=rotated,
        stochastic=quantizer.stochastic_rounding, amax=quantizer.delayed is not None and training,
    )  # fmt: skip
    factors_of, end = None, None
    if quantizer.delayed is None:
        factors_of = bind_factors(x, format, rows, columns, rotated, offsets_E, index_R)
    else:
        end = bind_end(quantizer)
    dtypes = format.element.dtype, format.rule.dtype

    def run(
        x: Tensor, offsets_E: Tensor | None = None, index_R: Tensor | None = None, step: DelayedStep | None = None
    ) -> Forms:
        amax_E = None
        scales: list[Tensor] = []
        tensor_scales: list[Tensor] = []
        if factors_of is not None:
            factors, scales, tensor_scales = factors_of(x, offsets_E, index_R)
        else:
            assert step is not None, "delayed scaling"
            factors = (step.encode,) * (rows + columns)
            if training:
                amax_E = torch.zeros_like(step.encode)
        random: tuple[Tensor, ...] = ()
        if quantizer.stochastic_rounding:
            random = tuple(random_bytes(shape, x.device) for shape in shapes_of(x, offsets_E, index_R))
        forms = kernel(x, offsets_E, index_R, factors, random, amax_E)
        if step is not None and end is not None:
            scales = [end(step, amax_E)] * len(forms)
        found: Forms = []
        for i, (codes, scale) in enumerate(forms):
            of_form = scales[i] if scale is None else scale.view(dtypes[1])
            found.append((codes.view(dtypes[0]), of_form, *tensor_scales[i : i + 1]))
        return found

    def shapes_of(x: Tensor, offsets_E: Tensor | None, index_R: Tensor | None) -> list[tuple[int, int]]:
        """The shapes of the codes, in the order in which `fusedmoe.quantize` draws for them."""
        num_rows, length = x.shape[0] if index_R is None else index_R.shape[0], x.shape[1]
        padded = num_rows + (-num_rows % TILE if rotated else 0)
        if offsets_E is not None:
            padded = padded_rows(num_rows, offsets_E.shape[0], column_block(format))
        return [(num_rows, length)] * rows + [(length, padded)] * columns

    return run


def bind_weight_forms(
    weight: Tensor, quantizer: Quantizer, axes: Sequence[int], training: bool = False
) -> Callable[..., Forms]:
    """As `bind_forms`, of (weight, step=None), for (E, N, K) or (N, K) with unit stride in K or in N."""
    if weight.stride(-1) == 1:
        run = bind_forms(weight, quantizer, axes, training=training)
        return lambda weight, step=None: run(weight, step=step)
    # the rows of a transposed weight are its columns
    turned = bind_forms(weight.mT, quantizer, [-3 - axis for axis in sorted(axes)], training=training)
    backwards = len(axes) > 1
    return lambda weight, step=None: turned(weight.mT, step=step)[:: -1 if backwards else 1]


Factors = tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]
"""Factors of the values of each form; then the scales, or the tensor scales, of each form."""


def bind_factors(
    x: Tensor,
    format: Format,
    rows: bool,
    columns: bool,
    rotated: bool,
    offsets_E: Tensor | None,
    index_R: Tensor | None,
) -> Callable[..., Factors]:
    """Return the function that computes what a kernel is given for each form."""
    if format.rule in (ScaleRule.RCEIL, ScaleRule.FLOOR):
        return lambda *_: ((), [], [])
    by_row = format.block == (1, None)
    unrotated = rows or (columns and not rotated)
    largest = format_functions.bind_magnitudes(
        x, offsets_E, index_R, of_rows=by_row and rows, of_columns=by_row and columns,
        of_experts=not by_row and unrotated, of_experts_rotated=rotated,
    )  # fmt: skip
    stacked = x.dim() == 3

    def of_blocks(x: Tensor, offsets_E: Tensor | None, index_R: Tensor | None) -> Factors:
        each = [tensor_encode(amax) for amax in largest(x, offsets_E, index_R)]
        encodes = tuple([each[0]] * rows + [each[-1]] * columns)
        return encodes, [], [1 / encode for encode in encodes]

    def of_rows(x: Tensor, offsets_E: Tensor | None, index_R: Tensor | None) -> Factors:
        encodes, scales = [], []
        for i, amax in enumerate(largest(x, offsets_E, index_R)):
            encode, scale = encode_and_scale(amax, format)
            if i == 0 and rows:
                scale = scale.view(x.shape[0], -1, 1) if stacked else scale[:, None]
            else:
                scale = scale[..., None] if stacked else scale.mT.contiguous()
            encodes.append(encode)
            scales.append(scale)
        return tuple(encodes), scales, []

    def of_experts(x: Tensor, offsets_E: Tensor | None, index_R: Tensor | None) -> Factors:
        encode_E, scale_E = encode_and_scale(largest(x, offsets_E, index_R)[0], format)
        forms = rows + columns
        return (encode_E,) * forms, [scale_E] * forms, []

    return of_blocks if format.tensor_scale else of_rows if by_row else of_experts
