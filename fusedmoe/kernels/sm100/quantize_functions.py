"""The kernels of `quantize.py` and `quantize_nvfp4.py` as functions of torch tensors. No call waits for the device or
reads splits on the host.

Axes: R rows, T tokens, K features, E experts, P packed rows, N rows of a weight.
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
from fusedmoe.numerics.formats import nvfp4

PACKING = 256  # rows to a multiple of which those of an expert are packed
TILE = 128
SCALES = 512  # of a tile of 128 lines x 4 blocks

Form = tuple[Tensor, Tensor]  # Codes, and scales in the layout that the tensor cores read


def bind_quantize_packed(
    x: Tensor,
    offsets_E: Tensor,
    index_R: Tensor | None = None,
    *,
    rows: bool = True,
    columns: bool = False,
    halves: bool = False,
) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Form, ...]]:
    """Return a function of ``(x, offsets, index)`` that quantizes rows to MXFP8 for Blackwell, in one launch.

    It serves tensors of the same shapes, dtypes and strides as these. It returns codes and scales: those by rows if
    ``rows``, and then those by columns if ``columns``. They have the bits of `fusedmoe.quantize`, with blocks of 32 and
    the rule RCEIL, of *packed* rows: ``padded.spread(x)`` with ``padded = PaddedRows.of(offsets, R, 256)``. With
    ``ends = padded.ends_E``:

    - by rows: codes (P, K), and the ``swizzle`` of their scale (P, K / 32);
    - by columns, with ``offsets=ends``: codes (P, K), which are not transposed, and the ``swizzle_column_groups`` of
      their scale (K, P / 32) with ``ends // 32``. So the scales of an expert whose packed rows start at s begin at
      ``ceil(K / 128) * 128 * s / 32``.

    Both scales are vectors of ``P / 128 * ceil(K / 128) * 512``. Nothing is written for the packed rows from
    ``ends[-1]`` on.

    - ``x``: bf16 or fp16, shape (R, K), K a multiple of 32, unit stride in K, the other stride a multiple of 8, the
      address a multiple of 16 bytes.
    - ``offsets_E``: the end of each expert's rows, int32, shape (E,), contiguous, non-decreasing, within [0, R]. Rows
      from ``offsets[-1]`` on are not read.
    - ``index_R``: int32, shape (R,), contiguous: row r is ``x[index[r]]``, and ``x`` is (T, K) with any number of rows.
      It is read only for rows that belong to an expert.
    - ``halves``: the features of ``x`` are [gate | up], K a multiple of 64. Those of the result are in blocks of 32:
      gate 0 to 31, up 0 to 31, gate 32 to 63, and so on.
    """
    length = x.shape[1]
    num_rows = x.shape[0] if index_R is None else index_R.shape[0]
    packed = padded_rows(num_rows, offsets_E.shape[0], PACKING)
    tiles = packed // TILE * -(-length // TILE)
    kernel = None
    if tiles:
        from fusedmoe.kernels.sm100.quantize import QuantizePacked  # deferred: imports the CuTe DSL

        how = NAMES[x.dtype], halves, rows, columns
        kernel = load(QuantizePacked(*how, gathered=index_R is not None, arch=kernel_arch(x.device)))

    def run(x: Tensor, offsets_E: Tensor, index_R: Tensor | None = None) -> tuple[Form, ...]:
        shapes = ((packed, length), (tiles, SCALES))
        forms = [tuple(x.new_empty(shape, dtype=torch.uint8) for shape in shapes) for _ in range(rows + columns)]
        if kernel is not None:
            # a form that is not wanted is not written
            kernel(x, offsets_E if index_R is None else index_R, offsets_E, *forms[0], *forms[-1])
        return tuple(
            (codes.view(torch.float8_e4m3fn), scale.view(-1).view(torch.float8_e8m0fnu)) for codes, scale in forms
        )

    return run


def bind_quantize_packed_nvfp4(
    x: Tensor,
    offsets_E: Tensor,
    index_R: Tensor | None = None,
    *,
    rows: bool = True,
    columns: bool = False,
    halves: bool = False,
    rotated: bool = False,
    stochastic: bool = False,
    packed: bool = False,
) -> Callable[..., tuple[Form, ...]]:
    """Return a function of ``(x, offsets, factors, random, index)`` that quantizes rows to NVFP4 in one launch.

    It serves tensors of the same shapes, dtypes and strides as these. It returns codes, two in a byte, and scales:
    those by rows if ``rows``, and then those by columns if ``columns``. They have the bits of `fusedmoe.quantize` of
    *packed* rows, as `bind_quantize_packed` describes them:

    - by rows: codes (P, K / 2), and the ``swizzle`` of their scale (P, K / 16);
    - by columns: codes (K, P / 2), and the ``swizzle_column_groups`` of their scale (K, P / 16) with ``ends // 16``.

    Both scales are vectors of P K / 16. Nothing is written for the packed rows from ``ends[-1]`` on.

    - ``x``, ``offsets_E``, ``index_R``, ``halves``: as of `bind_quantize_packed`; K is a multiple of 128.
    - ``rotated``: rotate tiles of 16 rows before quantizing by columns, as `fusedmoe.numerics.formats.hadamard` does.
    - ``stochastic``: round by random bits.
    - ``packed``: ``x`` has packed rows already, and ``offsets`` are their ends.

    ``factors`` of a call has the factor of each expert's scales for each form, (E,) fp32. ``random`` has the random
    bytes of each form if ``stochastic``: (P, K) and (K, P).
    """
    length = x.shape[1]
    num_rows = x.shape[0] if index_R is None else index_R.shape[0]
    places = num_rows if packed else padded_rows(num_rows, offsets_E.shape[0], PACKING)
    tiles = places // TILE
    none = unread(x.device, torch.int32, 4)
    some_bytes = none.view(torch.uint8)
    kernel = None
    if tiles and length:
        from fusedmoe.kernels.sm100.quantize_nvfp4 import QuantizePackedFormat  # deferred: imports the CuTe DSL

        how = True, index_R is not None, rotated and columns
        dtype, arch = NAMES[x.dtype], kernel_arch(x.device)
        kernel = load(QuantizePackedFormat(dtype, *how, nvfp4(), rows, columns, stochastic, halves=halves, arch=arch))

    def run(
        x: Tensor,
        offsets_E: Tensor,
        factors: tuple[Tensor, ...],
        random: tuple[Tensor, ...] = (),
        index_R: Tensor | None = None,
    ) -> tuple[Form, ...]:
        shapes = [(places, length // 2)] * rows + [(length, places // 2)] * columns
        of_scales = (1, places * length // 16 // SCALES, SCALES)
        forms = [
            (x.new_empty((1, *shape), dtype=torch.uint8), x.new_empty(of_scales, dtype=torch.uint8)) for shape in shapes
        ]
        if kernel is not None:
            drawn = random or (some_bytes[None],) * len(forms)
            # a form that is not wanted is not written
            first = (*forms[0], factors[0], drawn[0])
            last = (*forms[-1], factors[-1][:, None], drawn[-1])
            kernel(x[None], none if index_R is None else index_R, offsets_E, *first, *last, none, tiles, num_rows)
        return tuple((codes[0], scale.view(-1).view(torch.float8_e4m3fn)) for codes, scale in forms)

    return run


def bind_quantize_packed_weight(
    weight_ENK: Tensor, *, rows: bool = True, columns: bool = False, halves: bool = False
) -> Callable[[Tensor], tuple[Form, ...]]:
    """Return a function of a weight that quantizes it to MXFP8 for Blackwell, in one launch.

    It serves weights of the same shape, dtype and strides as this one. It returns codes and scales: those by rows if
    ``rows``, and then those by columns if ``columns``. They have the bits of `fusedmoe.quantize`, with blocks of 32 and
    the rule RCEIL:

    - by rows: codes (E, N, K), and the ``swizzle`` of their scale (E, N, K / 32);
    - by columns: codes (E, K, N), and the ``swizzle`` of their scale (E, K, N / 32).

    Both scales are vectors of E N K / 32.

    - ``weight_ENK``: bf16 or fp16, shape (E, N, K), N and K multiples of 128, unit stride in K, the other strides
      multiples of 8, the address a multiple of 16 bytes.
    - ``halves``: the rows of each expert are [gate | up]. Those of the result are in blocks of 32: gate 0 to 31, up 0
      to 31, gate 32 to 63, and so on.
    """
    experts, lines, features = weight_ENK.shape
    tiles = weight_ENK.numel() // TILE**2
    kernel = None
    if tiles:
        from fusedmoe.kernels.sm100.quantize import QuantizePackedWeight  # deferred: imports the CuTe DSL

        how = NAMES[weight_ENK.dtype], halves, rows, columns
        kernel = load(QuantizePackedWeight(*how, arch=kernel_arch(weight_ENK.device)))

    def run(weight_ENK: Tensor) -> tuple[Form, ...]:
        shapes = [(experts, lines, features)] * rows + [(experts, features, lines)] * columns
        forms = [
            tuple(weight_ENK.new_empty(shape, dtype=torch.uint8) for shape in (codes, (tiles, SCALES)))
            for codes in shapes
        ]
        if kernel is not None:
            # a form that is not wanted is not written
            (row_codes, row_scale), of_columns = forms[0], forms[-1]
            kernel(weight_ENK, row_codes.view(-1, row_codes.shape[-1]), row_scale, *of_columns)
        return tuple(
            (codes.view(torch.float8_e4m3fn), scale.view(-1).view(torch.float8_e8m0fnu)) for codes, scale in forms
        )

    return run
