"""The kernels of `blocks.py` as functions of torch tensors. No call waits for the device or reads splits on the host.

Codes and scales have the shapes that `fusedmoe.numerics.formats.quantize` gives them, and the same bits. Scales are
stored so that a product can load those of 128 rows of a block of columns at once: see `scale_like`.

Axes: R rows, T tokens, K columns, E experts, P padded rows, N rows of a weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedmoe.base.lasting import unread
from fusedmoe.kernels.build.compiler import load
from fusedmoe.kernels.rows.move.functions import NAMES
from fusedmoe.numerics.expert_rows import padded_rows
from fusedmoe.numerics.formats import Format, ScaleRule

BLOCK = 128
TOKEN_READERS = 2  # rows per token from which on tokens are quantized once, and their codes are copied
Form = tuple[Tensor, Tensor]  # codes and scales


def bind_quantize_rows(
    x_RK: Tensor,
    format: Format,
    offsets_E: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
    rows: bool = True,
    columns: bool = False,
    zero_tail: bool = True,
) -> Callable[..., tuple[Form, ...]]:
    """Return a function of ``(x, offsets, index)`` that quantizes rows with 1x128 blocks, in one launch.

    Row codes of gathered rows take two launches if several rows read each token: see gather_codes.py.

    It serves tensors of the same shapes, dtypes and strides as these. It returns (codes, scale) of the row codes if
    ``rows``, and then those of the column codes if ``columns``:

    - row codes (R, K), scale (R, ceil(K / 128)) with strides (1, R4): R4 is R, rounded up to a multiple of 4;
    - column codes (K, P), scale (K, P / 128) with strides (1, K4). P is `padded_rows` of R: each
      expert's rows begin at a multiple of 128. Without offsets P is R, the pitch of the codes is R, rounded up to a
      multiple of 16, and the scale is (K, ceil(R / 128)).

    - ``x_RK``: bf16 or fp16, shape (R, K), K a multiple of 16, unit stride in K, the pitch a multiple of 8, the address
      a multiple of 16 bytes.
    - ``format``: FP8 with fp32 scales. Its blocks are not read.
    - ``offsets_E``: for rows sorted by expert: the end of each expert's rows, int32, shape (E,), contiguous,
      non-decreasing, within [0, R]. Rows from ``offsets[-1]`` on are not read; their codes are zeros, or undefined
      without ``zero_tail``.
    - ``index_R``: int32, shape (R,), contiguous: row r of the result is ``x[index[r]]``, and ``x`` has any number of
      rows. It is read only for rows that belong to an expert.
    """
    if index_R is not None and not columns and index_R.shape[0] >= TOKEN_READERS * x_RK.shape[0] > 0:
        if offsets_E is not None and not format.amax_epsilon:
            return _bind_quantize_tokens(x_RK, format, index_R, zero_tail)
    columns_of_x = x_RK.shape[1]
    num_rows = x_RK.shape[0] if index_R is None else index_R.shape[0]
    padded = num_rows if offsets_E is None else padded_rows(num_rows, offsets_E.shape[0], BLOCK)
    code = format.element.dtype
    epsilon = format.amax_epsilon
    tiles = -(-num_rows // BLOCK)
    if columns and offsets_E is not None:
        tiles = padded // BLOCK + rows  # the rows without an expert may need one more tile than fits the column codes
    none = unread(x_RK.device, torch.int32, 1)
    kernel = None
    if num_rows and columns_of_x:
        from fusedmoe.kernels.rows.quantize.blocks import QuantizeRows  # deferred: imports the CuTe DSL

        how = offsets_E is not None, index_R is not None
        powers = format.rule is ScaleRule.POWER_OF_TWO
        kernel = load(QuantizeRows(NAMES[x_RK.dtype], format.element.name, rows, columns, powers, *how))

    def run(x_RK: Tensor, offsets_E: Tensor | None = None, index_R: Tensor | None = None) -> tuple[Form, ...]:
        forms = []
        if rows:
            codes = x_RK.new_empty(num_rows, columns_of_x, dtype=torch.uint8)
            forms.append((codes, scale_like(x_RK, num_rows, columns_of_x)))
        if columns:
            pitch = -(-padded // 16) * 16
            codes = x_RK.new_empty(columns_of_x, pitch, dtype=torch.uint8)
            forms.append((codes if pitch == padded else codes[:, :padded], scale_like(x_RK, columns_of_x, padded)))
        if kernel is not None:
            offsets = none if offsets_E is None else offsets_E
            index = none if index_R is None else index_R
            kernel(x_RK, index, offsets, *forms[0], *forms[-1], tiles, num_rows, zero_tail, epsilon)
        return tuple((codes.view(code), scale) for codes, scale in forms)

    return run


def bind_quantize_columns_of_codes(
    codes_TK: Tensor, scale_TB: Tensor, offsets_E: Tensor, index_R: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Form]:
    """Return a function of ``(codes, scale, offsets, index)``. It dequantizes tokens to bf16, and returns the column
    codes and scale that `bind_quantize_rows` gives of them with ``zero_tail=False``. It is one launch.

    - ``codes_TK``: E4M3 in the format `fp8_block()`, unit stride in K, the pitch and the address multiples of 16 bytes.
    - ``scale_TB``: (T, ceil(K / 128)) fp32, powers of two.
    - ``offsets_E``, ``index_R``: as for `bind_quantize_rows`.
    """
    (num_rows,), width = index_R.shape, codes_TK.shape[1]
    padded, code = padded_rows(num_rows, offsets_E.shape[0], BLOCK), codes_TK.dtype
    kernel = None
    if num_rows and width:
        from fusedmoe.kernels.rows.quantize.blocks import QuantizeColumnsOfCodes  # deferred: imports the CuTe DSL

        kernel = load(QuantizeColumnsOfCodes())

    def run(codes_TK: Tensor, scale_TB: Tensor, offsets_E: Tensor, index_R: Tensor) -> Form:
        codes = codes_TK.new_empty(width, padded, dtype=torch.uint8)
        scale = scale_like(scale_TB, width, padded)
        if kernel is not None:
            kernel(codes_TK.view(torch.uint8), scale_TB, index_R, offsets_E, codes, scale, padded // BLOCK)
        return codes.view(code), scale

    return run


def _bind_quantize_tokens(
    x_TK: Tensor, format: Format, index_R: Tensor, zero_tail: bool
) -> Callable[..., tuple[Form, ...]]:
    """Return `bind_quantize_rows` for row codes of gathered rows, in two launches: each token is quantized once."""
    from fusedmoe.kernels.rows.quantize.gather_codes import GatherCodes  # deferred: imports the CuTe DSL

    quantize = bind_quantize_rows(x_TK, format)
    num_rows, columns = index_R.shape[0], x_TK.shape[1]
    kernel = load(GatherCodes())

    def run(x_TK: Tensor, offsets_E: Tensor, index_R: Tensor) -> tuple[Form, ...]:
        ((codes, scale),) = quantize(x_TK)
        gathered = codes.new_empty(num_rows, columns), scale_like(x_TK, num_rows, columns)
        kernel(
            codes.view(torch.uint8), scale, index_R, offsets_E, gathered[0].view(torch.uint8), gathered[1], zero_tail
        )  # fmt: skip
        return (gathered,)

    return run


def bind_quantize_weight(
    weight: Tensor, format: Format, *, rows: bool = True, columns: bool = False
) -> Callable[[Tensor], tuple[Form, ...]]:
    """Return a function of a weight that quantizes it with 128x128 blocks, in one launch.

    It serves weights of the same shape, dtype and strides as this one. It returns (codes, scale) by rows if ``rows``,
    and then those by columns if ``columns``, which are the same codes, transposed:

    - by rows: codes (E, N, K), scale (E, N', K') with strides (K' N4, 1, N4);
    - by columns: codes (E, K, N), scale (E, K', N') with strides (N' K4, 1, K4).

    N' and K' are the numbers of blocks of 128, and N4 and K4 these numbers, rounded up to multiples of 4. Without the
    axis E, no result has it.

    - ``weight``: bf16 or fp16, shape (E, N, K) or (N, K), unit stride in N or K, the other strides multiples of 8, the
      address a multiple of 16 bytes. N and K are multiples of 16.
    - ``format``: FP8 with fp32 scales. Its blocks are not read.
    """
    from fusedmoe.kernels.rows.quantize.blocks import QuantizeWeight  # deferred: imports the CuTe DSL

    stacked = weight.dim() == 3
    transposed = weight.stride(-1) != 1  # a block is square: the rows of a transposed weight are its columns
    along, across = (columns, rows) if transposed else (rows, columns)
    code, epsilon = format.element.dtype, format.amax_epsilon
    (experts, lines, length) = _stacked(weight, transposed).shape
    kernel = None
    if weight.numel():
        powers = format.rule is ScaleRule.POWER_OF_TWO
        kernel = load(QuantizeWeight(NAMES[weight.dtype], format.element.name, along, across, powers))

    def form(weight: Tensor, lines: int, length: int) -> Form:
        codes = weight.new_empty(experts, lines, length, dtype=torch.uint8)
        return codes, scale_like(weight, -(-lines // BLOCK), length, experts)

    def run(weight: Tensor) -> tuple[Form, ...]:
        forms = [form(weight, lines, length)] if along else []
        if across:
            forms.append(form(weight, length, lines))
        if kernel is not None:
            kernel(_stacked(weight, transposed), *forms[0], *forms[-1], epsilon)
        found = ((codes.view(code), scale) for codes, scale in (forms[::-1] if transposed else forms))
        return tuple(found) if stacked else tuple((codes[0], scale[0]) for codes, scale in found)

    return run


def bind_transpose_codes(codes: Tensor, scale: Tensor) -> Callable[[Tensor, Tensor], Form]:
    """Return a function of codes (E, N, K) with 128x128 blocks, and of their scale, that transposes both in one launch.

    It serves tensors of the same shapes and strides as these. It returns codes (E, K, N), contiguous, and scale
    (E, K', N') with strides (N' K4, 1, K4), as `bind_quantize_weight` does.

    - ``codes``: one byte each, contiguous, the address a multiple of 16 bytes. N and K are multiples of 16.
    - ``scale``: fp32, shape (E, N', K').
    """
    experts, lines, length = codes.shape
    kernel = None
    if codes.numel():
        from fusedmoe.kernels.rows.quantize.transpose_codes import TransposeCodes  # deferred: imports the CuTe DSL

        kernel = load(TransposeCodes())

    def run(codes: Tensor, scale: Tensor) -> Form:
        transposed = codes.new_empty(experts, length, lines, dtype=torch.uint8)
        scale_t = scale_like(scale, -(-length // BLOCK), lines, experts)
        if kernel is not None:
            kernel(codes.view(torch.uint8), scale, transposed, scale_t)
        return transposed.view(codes.dtype), scale_t

    return run


def _stacked(weight: Tensor, transposed: bool) -> Tensor:
    """Return (E, lines, length) with unit stride in the last axis."""
    stacked = weight if weight.dim() == 3 else weight[None]
    return stacked.mT if transposed else stacked


def scale_like(x: Tensor, lines: int, length: int, *experts: int) -> Tensor:
    """Return an empty scale (..., lines, ceil(length / 128)) in fp32, with unit stride along ``lines``; with a number
    of ``experts``, one for each.

    The pitch of a block, and the pitch of a matrix, are multiples of 4 elements, which is 16 bytes.
    """
    pitch, blocks = -(-lines // 4) * 4, -(-length // BLOCK)
    strides = *[blocks * pitch for _ in experts], 1, pitch
    stored = x.new_empty_strided((*experts, pitch, blocks), strides, dtype=torch.float32)
    return stored if pitch == lines else stored[..., :lines, :]
