"""The kernels of this folder as functions of torch tensors. No call waits for the device.

Each ``bind_*`` returns the function for tensors of the same shapes, dtypes and strides as its arguments. Matrices are
bf16 or fp16, (rows, H), with unit stride in H; H and the pitch are multiples of 8, addresses multiples of 16 bytes. All
other tensors are contiguous. `why_not` and `aligned` check these constraints.

FP8 codes and their scales travel as one matrix of bytes (rows, W): a row has its H codes, and after them its B scales
in fp32. W is a multiple of `PACKED_BYTES`. `pack` makes such rows, `unpack` returns both parts, and `packs` tells
whether two tensors travel so.

Axes: P ranks, N rows per rank, T rows of this rank (at most N), K chosen experts per row, R rows, H columns, B scales
per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.base.lasting import unread
from fusedmoe.base.target import ARCHITECTURES, arch_of, kernel_arch
from fusedmoe.kernels.build import toolkit
from fusedmoe.kernels.build.compiler import load
from fusedmoe.kernels.exchange.layout import CONTROL_BYTES, LISTED, MOST_RANKS, SCATTER_WARPS
from fusedmoe.kernels.rows.move.functions import NAMES, experts_of_block
from fusedmoe.kernels.rows.quantize.block_functions import Form, scale_like

MOST_CHOSEN = 32  # a lane of a warp each
ALIGNMENT = 256  # bytes: tensors of one exchange begin at multiples
PACKED_BYTES = 32  # of a row with codes and scales, a multiple: GPUs read 32 bytes at once
SEND_CTAS, TOTAL_CTAS = 128, 1188  # three CTAs of `Total` fit an SM of 132
GATHER_CTAS = 32  # of `Send`, that wait for the ids of other ranks
SCATTER_CTAS, SCATTER_SMS = 264, 24  # alone, and beside `Pull`: even numbers
SCATTER_ARRIVALS = SCATTER_SMS * SCATTER_WARPS  # that a word grows by, beside `Pull`


class Region(NamedTuple):
    """The regions of all ranks, as a rank addresses them; see control.py.

    - ``peers``: (P,) int64, the address of each rank's region, on the device.
    - ``control``: (`CONTROL_WORDS`,) int32, the control words of this rank.
    - ``rank``: this rank.
    - ``patience``: nanoseconds that a kernel waits for another rank.
    """

    peers: Tensor
    control: Tensor
    rank: int
    patience: int


def places(sizes: list[int]) -> tuple[list[int], int]:
    """Return the first byte of each tensor of an exchange in a region, and the bytes of all, with the control."""
    offsets, end = [], CONTROL_BYTES
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def why_not_on(device: torch.device) -> str | None:
    """Return the reason why no kernel of this folder runs on a device; None if they do."""
    arch = arch_of(device)
    if arch not in ARCHITECTURES:
        expected = ", ".join(f"sm_{known}" for known in ARCHITECTURES)
        return f"{device} is {'no NVIDIA GPU' if arch is None else f'sm_{arch}'}, expected one of {expected}"
    if missing := toolkit.missing_packages():
        return f"expected the packages {', '.join(missing)}, which are not installed"
    return toolkit.why_unusable()


def why_not(rows: Tensor, ranks: int, chosen: int, weight: torch.dtype = torch.float32) -> str | None:
    """Return the reason why no kernel of this folder takes rows (T, H) of this dtype and width, with K experts and
    weights of this dtype; None if they do, if the rows are `aligned`.
    """
    if rows.dtype not in (torch.bfloat16, torch.float16):
        return f"rows in {rows.dtype}, expected bf16 or fp16"
    if rows.dim() != 2 or rows.shape[1] % 8:
        return f"rows of shape {tuple(rows.shape)}, expected a multiple of 8 columns"
    if chosen > MOST_CHOSEN:
        return f"{chosen} experts per token, expected at most {MOST_CHOSEN}"
    if weight not in (torch.float32, torch.bfloat16, torch.float16):
        return f"weights in {weight}, expected fp32, bf16 or fp16"
    if ranks > MOST_RANKS:
        return f"{ranks} ranks, expected at most {MOST_RANKS}"
    return None


def aligned(rows: Tensor) -> bool:
    """Whether rows (T, H) have the strides and the address that the kernels need."""
    pitch, unit = rows.stride()
    return unit == 1 and pitch * rows.itemsize % 16 == 0 and rows.data_ptr() % 16 == 0


def packs(tensors: Sequence[Tensor]) -> bool:
    """Whether these tensors are scales (T, B) in fp32 and codes (T, H) that travel in one row. That depends only on
    dtypes and widths: on all ranks, it is the same.
    """
    if len(tensors) != 2 or any(t.dim() != 2 for t in tensors):
        return False
    scale, codes = tensors
    return scale.dtype is torch.float32 and codes.itemsize == 1 and codes.shape[1] % 16 == 0 and scale.shape[1] > 0


def packed_width(codes: Tensor, scale: Tensor) -> int:
    """Return the bytes of a row with codes and scales."""
    return -(-(codes.shape[1] + 4 * scale.shape[1]) // PACKED_BYTES) * PACKED_BYTES


def pack(codes_TH: Tensor, scale_TB: Tensor) -> Tensor:
    """Return the rows (T, W) uint8 in which codes and scales travel, by torch."""
    rows = codes_TH.new_empty(codes_TH.shape[0], packed_width(codes_TH, scale_TB), dtype=torch.uint8)
    for to, given in zip(unpack(rows, codes_TH, scale_TB), (codes_TH, scale_TB), strict=True):
        to.copy_(given)
    return rows


def unpack(rows_AW: Tensor, like_codes: Tensor, like_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (A, H) and the scales (A, B) of packed rows: parts of the same memory."""
    columns, blocks = like_codes.shape[1], like_scale.shape[1]
    codes = rows_AW[:, :columns].view(like_codes.dtype)
    return codes, rows_AW[:, columns : columns + 4 * blocks].view(torch.float32)


def _pairs(rows: Tensor) -> Tensor:
    """Return rows of bytes as rows of 16 bits, as the kernels copy them."""
    dtype = _in_pairs(rows.dtype)
    return rows if rows.dtype is dtype else rows.view(dtype)


def _in_pairs(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


def bind_signal(region: Region) -> Callable[[Region, int], None]:
    """Return the function of ``(region, phase)`` that runs one phase of an exchange; see signal.py."""
    from fusedmoe.kernels.exchange.signal import Signal  # deferred: imports the CuTe DSL

    kernel = load(Signal(arch=kernel_arch(region.peers.device)))

    def run(region: Region, phase: int) -> None:
        kernel(region.peers, region.control, region.rank, phase, region.patience)

    return run


def bind_send(
    x_TH: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None, ranks: int, rows: int, here: int,
    scale_TB: Tensor | None = None,
) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:  # fmt: skip
    """Begin a gather: of ``(region, x, index, weight, scale)``, return ``(rows, index, weight)`` of all ranks.

    ``rows`` (P*N, H) has this rank's rows; `bind_pull` adds those of others. ``index`` (P*N, K) int32 has the experts
    of all ranks' rows, of which those of this rank are 0 to ``here`` - 1, and ``weight`` (P*N, K) their weights.
    Without an index, both are None. With scales, x has codes of one byte, and ``rows`` (P*N, W) uint8 are those of
    `pack`.

    - ``index_TK``: int32 or int64. An id outside of [0, P * here) is a sentinel, which stays outside of [0, here).
    - ``weight_TK``: fp32, bf16 or fp16. Rows after the T of their rank have any weights.
    - ``ranks``, ``rows``, ``here``: P, N, and the experts of a rank.
    - ``scale_TB``: fp32, with any strides; see `packs`.
    """
    from fusedmoe.kernels.exchange.send import Send  # deferred: imports the CuTe DSL

    arch, columns, every, scaled = kernel_arch(x_TH.device), x_TH.shape[1], ranks * rows, scale_TB is not None
    dtype, packed = NAMES[_in_pairs(x_TH.dtype)], torch.uint8 if scaled else x_TH.dtype
    no_ids, no_weight = (unread(x_TH.device, d, 1) for d in (torch.int32, torch.float32))
    if scale_TB is not None:
        columns = packed_width(x_TH, scale_TB)
    if index_TK is None or weight_TK is None:
        kernel, chosen, of_ids = load(Send(dtype, scaled=scaled, arch=arch)), 0, []
    else:
        kernel = load(Send(dtype, NAMES[index_TK.dtype], NAMES[weight_TK.dtype], scaled, arch=arch))
        chosen = index_TK.shape[1]
        of_ids = [4 * rows * chosen, weight_TK.itemsize * rows * chosen]
    at = places([*of_ids, 0])[0]
    numbers = rows, chosen, here, *(at if of_ids else (0, 0, *at))

    def run(
        region: Region, x_TH: Tensor, index_TK: Tensor | None = None, weight_TK: Tensor | None = None,
        scale_TB: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        peers, control, rank, patience = region
        out = x_TH.new_empty(every, columns, dtype=packed)
        rows, scale = (_pairs(x_TH), _pairs(out)), no_weight if scale_TB is None else scale_TB
        if index_TK is None or weight_TK is None:
            ids = no_ids, no_weight, no_ids, no_weight
            kernel(*rows, *ids, scale, peers, control, rank, *numbers, patience, GATHER_CTAS, SEND_CTAS)
            return out, None, None
        index = index_TK.new_empty((every, chosen), dtype=torch.int32)
        weight = weight_TK.new_empty(every, chosen)
        kernel(
            *rows, index_TK.view(-1), weight_TK.view(-1), index.view(-1), weight.view(-1), scale, peers, control, rank,
            *numbers, patience, GATHER_CTAS, SEND_CTAS,
        )  # fmt: skip
        return out, index, weight

    return run


def can_list(every: int, ranks: int, sms: int) -> bool:
    """Whether kernels on so many SMs can list the tokens of other ranks, of P*N: each CTA lists its own."""
    return (ranks - 1) * (every // ranks) <= sms * LISTED


def _require_listable(every: int, ranks: int, sms: int) -> None:
    """Raise `ValueError` if `can_list` is false."""
    if not can_list(every, ranks, sms):
        most = sms * LISTED
        raise ValueError(f"{every - every // ranks} rows of other ranks: expected at most {most} on {sms} SMs")


def bind_pull(like: Tensor, every: int, chosen: int, here: int, at_rows: int, sms: int) -> Callable[..., None]:
    """End a gather: of ``(region, rows, ids, words, block)``, read the rows of other ranks that have an expert here.

    ``rows`` (P*N, H), or packed, and ``ids`` (P*N, K) int32 are those of `bind_send`. With ``words``, a matrix of int32
    with one line per step, the last element of a line grows by ``sms * COPY_WARPS`` when the rows of the step are
    there; a product may begin beside the kernel. The steps are blocks of ``block`` experts: step s tells of all rows of
    experts ``s * block`` to before ``(s + 1) * block``, if the steps before it do too. With ``block`` 0, line 0 does
    not change, and line s tells of the rows of rank ``this rank + s``.

    - ``like``: rows of the dtype, on the device.
    - ``every``, ``chosen``, ``here``: P*N, K, and the experts of this rank.
    - ``at_rows``: the first byte of the rows in a region.
    - ``sms``: the SMs of the kernel, an even number.

    The function raises `ValueError` if there are more rows than these SMs take, see `can_list`.
    """
    from fusedmoe.kernels.exchange.pull import Pull  # deferred: imports the CuTe DSL

    kernel = load(Pull(NAMES[_in_pairs(like.dtype)], arch=kernel_arch(like.device)))
    no_words = unread(like.device, torch.int32, 1)

    def run(region: Region, rows_AH: Tensor, ids_AK: Tensor, words: Tensor | None = None, block: int = 0) -> None:
        peers, control, rank, patience = region
        ranks, pitch = peers.shape[0], 0 if words is None else words.shape[1]
        _require_listable(every, ranks, sms)
        steps, word = (-(-here // block), pitch - 1) if block else (ranks - 1, 2 * pitch - 1)
        kernel(
            _pairs(rows_AH), ids_AK.view(-1), no_words if words is None else words.view(-1), peers, control, rank,
            every // ranks, chosen, here, block, steps, word, pitch, at_rows, patience, sms,
        )  # fmt: skip

    return run


def bind_scatter(
    codes_AH: Tensor, scale_AB: Tensor, row_of_slot_AK: Tensor, rank: int, ranks: int, num_rows: int
) -> Callable[..., Form]:
    """Copy codes and scales of the tokens of all ranks to the rows of their slots, for a product in FP8: of
    ``(codes, scale, row_of_slot, out=None, arrived=None, words=None)``, return codes (R, H) and their scale (R, B),
    with the strides of `block_functions.scale_like`.

    Without ``arrived``, all tokens are there. With ``arrived`` alone, the rows of this rank's tokens are written. With
    ``out``, the result of that call, and ``words`` too, those of the other ranks are written beside the kernel of
    `bind_pull`, to which ``arrived`` (P, 1) int32 was given as ``words``. Here, ``words`` is a matrix of int32 with one
    line per step: the last element of line s grows by `SCATTER_ARRIVALS` when the rows of rank ``this rank + s`` are
    written, and a product may begin beside the kernel. Rows that no slot has are not written.

    - ``codes_AH``: one byte each, unit stride in H, the pitch and the address multiples of 16 bytes.
    - ``scale_AB``: fp32, unit stride in B.
    - ``row_of_slot_AK``: (P*N, K) int64, R for a sentinel.
    - ``num_rows``: R.
    """
    from fusedmoe.kernels.exchange.scatter import Scatter  # deferred: imports the CuTe DSL

    (every, chosen), columns, device = row_of_slot_AK.shape, codes_AH.shape[1], codes_AH.device
    kernel, no_words = load(Scatter(arch=kernel_arch(device))), unread(device, torch.int32, 1)
    each, dtype = every // ranks, codes_AH.dtype

    def run(
        codes_AH: Tensor, scale_AB: Tensor, row_of_slot_AK: Tensor, out: Form | None = None,
        arrived: Tensor | None = None, words: Tensor | None = None,
    ) -> Form:  # fmt: skip
        steps, ctas, pitch = (0, ranks if arrived is None else 1), SCATTER_CTAS, 0
        if out is None:
            out = codes_AH.new_empty(num_rows, columns, dtype=dtype), scale_like(scale_AB, num_rows, columns)
        elif words is not None:
            steps, ctas, pitch = (1, ranks), SCATTER_SMS, words.shape[1]
        kernel(
            codes_AH.view(torch.uint8), scale_AB, row_of_slot_AK.view(-1), out[0].view(torch.uint8), out[1],
            no_words if arrived is None else arrived.view(-1), no_words if words is None else words.view(-1), rank,
            each, chosen, *steps, pitch, ctas,
        )  # fmt: skip
        return out

    return run


def bind_push(
    sums_AH: Tensor, row_of_slot_AK: Tensor, values_R: Tensor | None, at_parts: int, at_values: int, sms: int
) -> Callable[..., None]:
    """Begin a return: of ``(region, sums, values, row_of_slot, begin, end)``, copy the sums for the tokens of other
    ranks to their memory; a product may begin beside the kernel.

    Step s is for rank ``this rank - s``; the kernel runs the steps from ``begin`` to before ``end``. Every step from 1
    to P - 1 runs once, and with values also step 0.

    - ``sums_AH``: (P*N, H), contiguous, by the ranks of the tokens.
    - ``values_R``: (R,), values of rows that are stored per slot, zero for a sentinel, or None.
    - ``row_of_slot_AK``: (P*N, K) int64, R for a sentinel.
    - ``at_parts``, ``at_values``: the first byte of the parts (P, N, H), and of the values (P, N, K), in a region.
    - ``sms``: the SMs of the kernel, an even number.
    """
    from fusedmoe.kernels.exchange.push import Push  # deferred: imports the CuTe DSL

    every, chosen = row_of_slot_AK.shape
    values = None if values_R is None else NAMES[values_R.dtype]
    kernel = load(Push(NAMES[sums_AH.dtype], values, arch=kernel_arch(sums_AH.device)))
    no_values = unread(sums_AH.device, torch.float32, 1)

    def run(
        region: Region, sums_AH: Tensor, values_R: Tensor | None, row_of_slot_AK: Tensor, begin: int, end: int
    ) -> None:
        peers, control, rank, patience = region
        kernel(
            sums_AH, no_values if values_R is None else values_R, row_of_slot_AK.view(-1), peers, control, rank,
            every // peers.shape[0], chosen, begin, end, at_parts, at_values, patience, sms,
        )  # fmt: skip

    return run


def bind_push_sums(
    rows_RH: Tensor, row_of_slot_AK: Tensor, values_R: Tensor | None, at_parts: int, at_values: int, sms: int,
    tiles: tuple[int, int] | None = None, experts: int = 0, half: int = 0,
) -> Callable[..., None]:  # fmt: skip
    """Begin a return: of ``(region, rows, row_of_slot, values=None, blocks=None)``, sum the rows over the slots of the
    tokens of other ranks, and store the sums in their memory. It is `bind_push` of the sums.

    With ``tiles``, the launch before it on the stream is the product that computes the rows, of
    `sm90.products.bind_counted_gemm`. The sums for each rank leave when it has counted the tiles up to the block of the
    rank; with ``experts``, each sum leaves when it has counted those up to the block of the token's last expert here.
    Otherwise, a product may begin beside the kernel.

    - ``rows_RH``: (R, H), contiguous.
    - ``row_of_slot_AK``: (P*N, K) int64, by the ranks of the tokens, R for a sentinel. K is at most
      `limits.MOST_SLOTS_BESIDE`.
    - ``values_R``, ``at_parts``, ``at_values``: as of `bind_push`.
    - ``sms``: the SMs of the kernel, an even number, which the product of the rows leaves free.
    - ``tiles``: the rows of a tile of the product, and its column tiles.
    - ``blocks``: P blocks of `bind_row_ranges`, in the order in which rows leave, or those of `bind_expert_blocks`.
    - ``experts``: the experts of this rank if the blocks are those of experts, else 0.
    - ``half``: that of `bind_expert_blocks`.

    Raises `ValueError`: with ``experts``, there are values, or no tiles; the function also if there are more tokens
    than these SMs take, see `can_list`.
    """
    from fusedmoe.kernels.exchange.push_sums import PushSums  # deferred: imports the CuTe DSL

    (every, chosen), device, counts = row_of_slot_AK.shape, rows_RH.device, tiles is not None
    values = None if values_R is None else NAMES[values_R.dtype]
    each = experts_of_block(experts, halves=half > 0)
    lines = -(-experts // each) * (2 if half else 1) if experts else 0
    if experts and (tiles is None or values_R is not None):
        raise ValueError("sums that leave by experts: expected tiles of a product, and no values")
    kernel = load(PushSums(NAMES[rows_RH.dtype], counts, values, bool(experts), arch=kernel_arch(device)))
    no_values, no_blocks = unread(device, torch.float32, 1), unread(device, torch.int32, 1)
    of_tiles = tiles or (0, 0)

    def run(
        region: Region, rows_RH: Tensor, row_of_slot_AK: Tensor, values_R: Tensor | None = None,
        blocks: Tensor | None = None,
    ) -> None:  # fmt: skip
        peers, control, rank, patience = region
        if experts:
            _require_listable(every, peers.shape[0], sms)
        kernel(
            rows_RH, no_values if values_R is None else values_R, row_of_slot_AK.view(-1),
            no_blocks if blocks is None else blocks, peers, control, rank, every // peers.shape[0], chosen,
            lines or peers.shape[0], each, half, *of_tiles, at_parts, at_values, patience, sms,
        )  # fmt: skip

    return run


def bind_total(
    rows_RH: Tensor, tokens: int, chosen: int, values: torch.dtype | None, rows: int, at_parts: int, at_values: int
) -> Callable[[Region, Tensor, Tensor], tuple[Tensor, Tensor | None]]:
    """End a return: of ``(region, rows, row_of_slot)``, the sums over ranks (T, H) of the parts (P, N, H), and (T, K)
    of the values (P, N, K) if they have a dtype.

    The parts of other ranks and all values are in this rank's region. This rank's part is the sum over the slots of its
    tokens, whose rows are ``row_of_slot`` (N, K).

    - ``rows_RH``: rows like those of the calls.
    - ``tokens``, ``chosen``, ``rows``: T, K, at most `limits.MOST_SLOTS_BESIDE`, and N.
    """
    from fusedmoe.kernels.exchange.total import Total  # deferred: imports the CuTe DSL

    columns, device = rows_RH.shape[1], rows_RH.device
    kernel = load(Total(NAMES[rows_RH.dtype], None if values is None else NAMES[values], arch=kernel_arch(device)))
    no_values = unread(device, torch.float32, 1)
    like_values = None if values is None else unread(device, values, 0)

    def run(region: Region, rows_RH: Tensor, row_of_slot_NK: Tensor) -> tuple[Tensor, Tensor | None]:
        peers, control, rank, patience = region
        out = rows_RH.new_empty(tokens, columns)
        of_values = None if like_values is None else like_values.new_empty(tokens, chosen)
        kernel(
            rows_RH, row_of_slot_NK.view(-1), out, no_values if of_values is None else of_values.view(-1), peers,
            control, rank, rows, chosen, at_parts, at_values, patience, TOTAL_CTAS,
        )  # fmt: skip
        return out, of_values

    return run
