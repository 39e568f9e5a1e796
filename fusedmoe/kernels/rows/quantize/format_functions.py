"""The kernels of `formats.py` and `dequantize.py` as functions of torch tensors. No call waits for the device
or reads splits on the host.

Codes and scales have the shapes that `fusedmoe.numerics.formats.quantize` gives them, and the same bits.

Axes: B matrices, R rows, T tokens, K columns, E experts, P padded rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedmoe.base.lasting import unread
from fusedmoe.base.target import kernel_arch
from fusedmoe.kernels.build.compiler import load
from fusedmoe.kernels.rows.move.functions import NAMES
from fusedmoe.numerics.expert_rows import padded_rows
from fusedmoe.numerics.formats.format import E2M1, Format, ScaleRule, column_block

TILE = 128
_EXPONENT = ~0x7FFFFF  # the bits of fp32 without those of the mantissa
PADDING = 16  # rows to a multiple of which `Magnitudes` pads those of an expert
Form = tuple[Tensor, Tensor | None]  # codes as bytes; and scales as bytes, None for given factors


def bind_magnitudes(
    x: Tensor,
    offsets_E: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
    of_rows: bool = False,
    of_columns: bool = False,
    of_experts: bool = False,
    of_experts_rotated: bool = False,
) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function of ``(x, offsets, index)``: the largest finite magnitudes in fp32, in two launches.

    It serves tensors of the same shapes, dtypes and strides as these, which `bind_quantize_format` describes. Its
    results are those that are asked for, in this order: (R,) or (B R,) per row; (E, K) or (B, K) per column of an
    expert; (E,) or (B,) per expert; and the same of values that are rotated in tiles of 16 rows. Values without an
    expert do not count. Without offsets, rows have one expert.
    """
    matrices, (lines, columns) = x.shape[0] if x.dim() == 3 else 1, x.shape[-2:]
    rows = lines if index_R is None else index_R.shape[0]
    experts = matrices if offsets_E is None else offsets_E.shape[0]
    tiles = _tiles(rows, offsets_E, PADDING)
    wanted = (of_rows, of_columns, of_experts, of_experts_rotated)
    all_sizes = (matrices * rows, experts * columns, experts, experts)
    sizes = tuple(size if want else 0 for size, want in zip(all_sizes, wanted, strict=True))
    none = unread(x.device, torch.int32, 4)
    kernel = None
    if x.numel() and rows:
        from fusedmoe.kernels.rows.quantize.formats import Magnitudes  # deferred: imports the CuTe DSL

        how = offsets_E is not None, index_R is not None, of_experts_rotated
        kernel = load(Magnitudes(NAMES[x.dtype], *how, *wanted, arch=kernel_arch(x.device)))

    def run(x: Tensor, offsets_E: Tensor | None = None, index_R: Tensor | None = None) -> tuple[Tensor, ...]:
        maxima = x.new_zeros(sum(sizes), dtype=torch.int32).split(sizes)
        maxima = (maxima[0], maxima[1].view(-1, columns) if columns else maxima[1], *maxima[2:])
        if kernel is not None:
            index = none if index_R is None else index_R
            offsets = none if offsets_E is None else offsets_E
            others = none, none[None], none, none  # an empty tensor has no address
            results = (m if want else n for m, n, want in zip(maxima, others, wanted, strict=True))
            kernel(x if x.dim() == 3 else x[None], index, offsets, *results, tiles, rows)
        return tuple(m.view(torch.float32) for m, want in zip(maxima, wanted, strict=True) if want)

    return run


def bind_quantize_format(
    x: Tensor,
    format: Format,
    offsets_E: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
    rows: bool = True,
    columns: bool = False,
    rotated: bool = False,
    stochastic: bool = False,
    amax: bool = False,
) -> Callable[..., tuple[Form, ...]]:
    """Return a function of ``(x, offsets, index, factors, random, amax)`` that quantizes rows or weights in one launch.

    It serves tensors of the same shapes, dtypes and strides as these. It returns codes and scales, both as bytes: those
    by rows if ``rows``, and then those by columns if ``columns``:

    - by rows: codes (R, K), scale (R, ceil(K / block)), or with the axis B before;
    - by columns: codes (K, P), scale (K, ceil(P / block)), or with the axis B before. With offsets, each expert's rows
      begin at a multiple of the block, and P is `padded_rows` of R. Without, P is R, rounded up to a multiple of 16 if
      ``rotated``. The pitch of the codes is rounded up to 16 bytes.

    - ``x``: bf16 or fp16, shape (R, K), or (B, R, K) for weights, K a multiple of 16, unit stride in K, the other
      strides multiples of 8, the address a multiple of 16 bytes.
    - ``format``: blocks of 16 or 32 values with scales that are not fp32, or one scale per row or expert, whose factors
      are given. Square blocks are for weights.
    - ``offsets_E``: for rows sorted by expert: the end of each expert's rows, int32, shape (E,), contiguous,
      non-decreasing, within [0, R]. Rows from ``offsets[-1]`` on are not read; their codes are zeros.
    - ``index_R``: int32, shape (R,), contiguous: row r of the result is ``x[index[r]]``, and ``x`` has any number of
      rows. It is read only for rows that belong to an expert.
    - ``rotated``: rotate tiles of 16 rows before quantizing by columns, as `fusedmoe.numerics.formats.hadamard` does.
    - ``stochastic``: round E2M1 by random bits.
    - ``amax``: find the largest magnitude of each expert too.

    ``factors`` of a call has one tensor for each form, in fp32, contiguous: for the rule TWO_LEVEL the factor of each
    expert's scales, (E,) or (B,); with one scale per expert its factor; with one per row the factor of each row, (R,)
    or (B R,), and of each column of an expert, (E, K) or (B, K). ``random`` has the random bytes of each form if
    ``stochastic``: (R, K) and (K, P). ``amax`` is (E,) or (B,) fp32, zeros before: the largest finite magnitudes are
    written to it.
    """
    matrices, (lines, length) = x.shape[0] if x.dim() == 3 else 1, x.shape[-2:]
    num_rows = lines if index_R is None else index_R.shape[0]
    packed = 2 if format.element == E2M1 else 1
    block, given, across = column_block(format), format.block[1] is None, format.block[0] or 1
    padded = num_rows + (-num_rows % PADDING if rotated else 0)
    if offsets_E is not None:
        padded = padded_rows(num_rows, offsets_E.shape[0], block)
    tiles = _tiles(num_rows, offsets_E, block)
    none = unread(x.device, torch.int32, 4)
    no_bytes, no_factor = none.view(torch.uint8), none.view(torch.float32)
    kernel = None
    if x.numel() and num_rows:
        from fusedmoe.kernels.rows.quantize.formats import QuantizeFormat  # deferred: imports the CuTe DSL

        how = offsets_E is not None, index_R is not None, rotated and columns
        arch = kernel_arch(x.device)
        kernel = load(QuantizeFormat(NAMES[x.dtype], *how, format, rows, columns, stochastic, amax, arch=arch))

    def run(
        x: Tensor,
        offsets_E: Tensor | None = None,
        index_R: Tensor | None = None,
        factors: tuple[Tensor, ...] = (),
        random: tuple[Tensor, ...] = (),
        amax: Tensor | None = None,
    ) -> tuple[Form, ...]:
        forms, passed = [], []
        own = x.new_empty(0, dtype=torch.uint8)
        for i, (lines, length_) in enumerate(((num_rows, length),) * rows + ((length, padded),) * columns):
            by_columns = columns and i == rows
            width = -(-length_ // packed)
            codes = own.new_empty(matrices, lines, -(-width // 16) * 16 if by_columns else width)
            scale = None
            if not given:
                scale = own.new_empty(matrices, -(-lines // across), -(-length_ // block))
            factor = factors[i] if factors else no_factor
            if by_columns and factor.dim() == 1:
                factor = factor[:, None]
            drawn = random[i] if random else no_bytes[None]
            passed.append((codes, no_bytes[None, None] if scale is None else scale, factor, drawn))
            forms.append((codes[..., :width], scale))
        if kernel is not None:
            no_form = (no_bytes[None, None], no_bytes[None, None], no_factor, no_bytes[None])
            first = passed[0] if rows else no_form
            last = passed[-1] if columns else (*no_form[:2], no_factor[None], no_form[3])
            if not rows and across > 1 and factors:
                first = (*no_form[:2], factors[0], no_form[3])
            index = none if index_R is None else index_R
            offsets = none if offsets_E is None else offsets_E
            maxima = none if amax is None else amax.view(torch.int32)
            kernel(x if x.dim() == 3 else x[None], index, offsets, *first, *last, maxima, tiles, num_rows)
        if x.dim() == 3:
            return tuple(forms)
        return tuple((codes[0], None if scale is None else scale[0]) for codes, scale in forms)

    return run


def _tiles(rows: int, offsets_E: Tensor | None, block: int) -> int:
    """Return the number of tiles of 128 rows, or padded rows and those without an expert."""
    padded = rows if offsets_E is None else padded_rows(rows, offsets_E.shape[0], block) + block
    return -(-padded // TILE)


SCALES = {ScaleRule.TWO_LEVEL: "e4m3", ScaleRule.POWER_OF_TWO: "fp32", ScaleRule.FP32: "fp32"}
"""The dtypes of the scales of blocks; e8m0 by the other rules."""


def bind_dequantize(
    codes: Tensor, scale: Tensor | None, format: Format, *, transposed: bool = False
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return a function of ``(codes, scale)``: codes times scales in bf16, in one launch.

    It serves tensors of the same shapes, dtypes and strides as these. The result has the layout of the codes, or their
    last two axes exchanged if ``transposed``. The bits are those of `fusedmoe.numerics.formats.QuantizedTensor.split`,
    which leaves out the factors of rows, columns and experts.

    - ``codes``: (M, L), or (B, M, L) without gaps between the matrices, and not ``transposed``. M and L are multiples
      of 16. The lines begin at multiples of 16 codes.
    - ``scale``: as of the `QuantizedTensor`, with unit stride along L; it is not read without blocks. With square
      blocks, M is a multiple of the block.
    """
    packed = 2 if format.element == E2M1 else 1
    lines, length = codes.shape[-2], codes.shape[-1] * packed
    stack = codes.shape[:-2]
    matrices = stack.numel()
    across, along = format.block
    of_scale = "" if along is None else SCALES.get(format.rule, "e8m0")
    shape = (length, lines) if transposed else (matrices * lines, length)
    no_scale = unread(codes.device, torch.int32, 4).view(torch.uint8)[None]
    kernel = None
    if codes.numel():
        from fusedmoe.kernels.rows.quantize.dequantize import (  # deferred: imports the CuTe DSL
            Dequantize,
            DequantizeTransposed,
        )

        kind = DequantizeTransposed if transposed else Dequantize
        kernel = load(kind(format.element.name, of_scale, along or 16, across or 1))

    def run(codes: Tensor, scale: Tensor | None) -> Tensor:
        out = codes.new_empty(shape, dtype=torch.bfloat16)
        if kernel is not None:
            held = codes.view(torch.uint8)
            scales = no_scale if scale is None or not of_scale else scale
            if of_scale != "fp32":
                scales = scales.view(torch.uint8)
            kernel(held.flatten(0, -2) if stack else held, scales.flatten(0, -2) if stack else scales, out)
        return out.view(*stack, lines, length) if stack else out

    return run


def bind_transpose_rows(codes: Tensor, offsets_E: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of ``(codes, offsets)``: FP8 codes by columns of those by rows, in one launch.

    It serves tensors of the same shapes, dtypes and strides as these. The result is (K, P): the transpose of the codes
    (R, K), with each expert's rows followed by zeros up to a multiple of 128. Codes without an expert are not read. K
    and the pitch of the codes are multiples of 16.
    """
    (rows, columns), dtype = codes.shape, codes.dtype
    padded, tiles = padded_rows(rows, offsets_E.shape[0], TILE), _tiles(rows, offsets_E, TILE)
    kernel = None
    if codes.numel():
        from fusedmoe.kernels.rows.quantize.transpose_rows import TransposeRows  # deferred: imports the CuTe DSL

        kernel = load(TransposeRows())

    def run(codes: Tensor, offsets_E: Tensor) -> Tensor:
        out = codes.new_empty(columns, padded, dtype=torch.uint8)
        if kernel is not None:
            kernel(codes.view(torch.uint8), out, offsets_E, tiles, rows)
        return out.view(dtype)

    return run


def bind_update_amax_history(
    most: float, least: float, *, power_of_two: bool, most_recent: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a function of ``(history, amax, reference, encode, previous)`` that ends a step of delayed scaling.

    It is one launch. It changes all but ``amax`` in place, to the bits of
    `fusedmoe.numerics.formats.delayed.AmaxHistory.update`, and returns the scale of the step's codes: ``1 / encode``
    before the change, (E,).

    - ``most``: the factor of a reference of 1, before it is rounded: the largest code divided by ``2**margin``.
    - ``least``: lower bound on the reference.
    - ``power_of_two``: round factors down to powers of two.
    - ``most_recent``: the reference is the amax of this step. Otherwise it is the largest of the history.

    ``history`` of a call is (S, E), the others (E,); all are fp32 and contiguous.
    """
    from fusedmoe.kernels.rows.quantize.amax_history import UpdateAmaxHistory  # deferred: imports the CuTe DSL

    kernel = load(UpdateAmaxHistory())
    numbers = most, least, _EXPONENT if power_of_two else -1, int(most_recent)

    def run(history: Tensor, amax: Tensor, reference: Tensor, encode: Tensor, previous: Tensor) -> Tensor:
        scale = torch.empty_like(encode)
        kernel(history, amax, reference, encode, previous, scale, *numbers)
        return scale

    return run
