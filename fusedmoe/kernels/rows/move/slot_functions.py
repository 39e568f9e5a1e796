"""The kernels of `slots.py` as functions of torch tensors. No call waits for the device.

Each ``bind_*`` returns the function for tensors of the same shapes, dtypes and strides as its arguments. Matrices are
bf16 or fp16, (rows, H), with unit stride in H. H and the pitch are multiples of 8, addresses multiples of 16 bytes. All
other tensors are contiguous. `limits` checks these constraints.

Axes: T tokens, K slots per token, R rows, at most T*K, E experts, H columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedmoe.base.lasting import lasting
from fusedmoe.base.target import kernel_arch
from fusedmoe.kernels.build.compiler import load
from fusedmoe.kernels.rows.move.functions import NAMES
from fusedmoe.kernels.sm90.limits import MOST_EXPERTS, MOST_SLOTS_BESIDE

ROOM = (64, 128, 256, 512, MOST_EXPERTS)  # maximum numbers of experts that `Route` is compiled for
QUAD = 4  # counts in 16 bytes


def bind_route(
    index_TK: Tensor, weight_TK: Tensor, num_experts: int, chunk_slots: int | None = None, num_rows: int | None = None
) -> Callable[..., tuple[Tensor, ...]]:
    """Sort slots by expert: return ``(splits, probs, row_of_slot, slot_of_row, token_of_row, offsets)`` of ``(ids,
    weights)``.

    With ``chunk_slots``, the arguments are ``(ids, weights, counts)``, and there is one launch instead of two.

    - ``index_TK``: int32 or int64. An id outside [0, E) is a sentinel. The rows of sentinels come after those of every
      expert.
    - ``weight_TK``: fp32, bf16 or fp16.
    - ``num_experts``: E, at most `limits.MOST_EXPERTS`.
    - ``chunk_slots``: the number of slots of a chunk, if ``counts`` (chunks, E + 1) int32 is given: the slots per chunk
      and expert, then the sentinels, with the pitch `count_pitch`.
    - ``num_rows``: R; None for T*K. The slots after row R - 1 have no row, and are not counted.

    Returns: ``splits`` (E,) int64, rows per expert; ``probs`` (R,), each row's weight, zero for sentinels;
    ``row_of_slot`` (T, K) int64, R for sentinels and for slots without a row; ``slot_of_row`` (R,) int64;
    ``token_of_row`` (R,) int32, within [0, T) also for sentinels; ``offsets`` (E,) int32, the ends of the experts'
    rows.
    """
    from fusedmoe.kernels.rows.move.route import CHUNK, Route  # deferred: imports the CuTe DSL

    shape, slots, chosen = tuple(index_TK.shape), index_TK.numel(), index_TK.shape[1]
    rows = slots if num_rows is None else num_rows
    of_chunk, counted = chunk_slots or CHUNK, chunk_slots is not None
    chunks = -(-slots // of_chunk)
    room = next(n for n in ROOM if num_experts <= n)
    dtypes, arch = (NAMES[index_TK.dtype], NAMES[weight_TK.dtype]), kernel_arch(index_TK.device)
    kernel = load(Route(*dtypes, room, chunks > 1, counted, arch=arch))
    count_shape = (chunks, count_pitch(num_experts)) if chunks > 1 else (1, QUAD)

    def run(index_TK: Tensor, weight_TK: Tensor, counts: Tensor | None = None) -> tuple[Tensor, ...]:
        int32 = index_TK if index_TK.dtype is torch.int32 else index_TK.new_empty(0, dtype=torch.int32)
        if counts is None:
            counts = int32.new_empty(count_shape)[:, : num_experts + 1]
        row_of_slot, slot_of_row = (index_TK.new_empty(n, dtype=torch.int64) for n in (slots, rows))
        token_of_row, offsets = int32.new_empty(rows), int32.new_empty(num_experts)
        probs, splits = weight_TK.new_empty(rows), index_TK.new_empty(num_experts, dtype=torch.int64)
        kernel(
            index_TK.view(-1), weight_TK.view(-1), counts, row_of_slot, slot_of_row, token_of_row, probs, splits,
            offsets, chosen, of_chunk,
        )  # fmt: skip
        return splits, probs, row_of_slot.view(shape), slot_of_row, token_of_row, offsets

    return run


def count_pitch(num_experts: int) -> int:
    """Return the pitch of the counts of this many experts and the sentinels: whole loads of 16 bytes."""
    return num_experts // QUAD * QUAD + QUAD


_no_scales: dict[torch.device, Tensor] = {}


def no_scale(rows: int, device: torch.device) -> Tensor:
    """Return a vector (R,) in place of a missing scale, which the kernels do not read.

    All of these share memory. A function keeps its vector, and plans keep a function for each number of rows: if each
    had its own memory, a layer of 32,768 tokens with 8 experts each would keep 1 MiB for each number of tokens.
    """
    found = _no_scales.get(device)
    if found is None or found.shape[0] < rows:
        size = 1 << rows.bit_length()
        found = _no_scales[device] = lasting(lambda: torch.empty(size, dtype=torch.float32, device=device), device)
    return found[:rows]


def bind_gather_rows(
    source_TH: Tensor, row_of_slot_TK: Tensor, scale_R: Tensor | None, num_rows: int | None = None
) -> Callable[..., Tensor]:
    """``rows[r] = scale[r] * source[token of r]``, (R, H), zeros for sentinels. ``num_rows`` is R; None for T*K.

    The arguments are ``(source, row_of_slot, slot_of_row, scale)``.
    """
    from fusedmoe.kernels.rows.move.slots import GatherRows  # deferred: imports the CuTe DSL

    chosen, columns = row_of_slot_TK.shape[1], source_TH.shape[1]
    rows = row_of_slot_TK.numel() if num_rows is None else num_rows
    scale_dtype = None if scale_R is None else NAMES[scale_R.dtype]
    kernel = load(GatherRows(NAMES[source_TH.dtype], scale_dtype, arch=kernel_arch(source_TH.device)))
    nothing = no_scale(rows, source_TH.device) if scale_R is None else None

    def run(source_TH: Tensor, row_of_slot_TK: Tensor, slot_of_row: Tensor, scale_R: Tensor | None = None) -> Tensor:
        rows_RH = source_TH.new_empty(rows, columns)
        scale = nothing if scale_R is None else scale_R
        kernel(source_TH, slot_of_row, row_of_slot_TK.view(-1), scale, rows_RH, chosen)
        return rows_RH

    return run


def bind_sum_slots(
    rows_RH: Tensor,
    row_of_slot_TK: Tensor,
    scale_R: Tensor | None,
    addend_TH: Tensor | None = None,
    beside_sms: int = 0,
) -> Callable[..., Tensor]:
    """``out[t] = addend[t] + sum over k of scale[row] * rows[row of slot (t, k)]``, (T, H), without sentinels.

    The arguments are ``(rows, row_of_slot, scale, addend)``. The sum is rounded once. It replaces the addend, if there
    is one, so that no more memory is needed.

    Without a scale, and with at most `limits.MOST_SLOTS_BESIDE` slots per token, the kernel can leave all SMs except
    ``beside_sms``, an even number, to the next launch, which may begin early.
    """
    (tokens, chosen), columns = row_of_slot_TK.shape, rows_RH.shape[1]
    if beside_sms and scale_R is None and chosen <= MOST_SLOTS_BESIDE:
        return _bind_sum_on_few_sms(rows_RH, row_of_slot_TK, addend_TH is not None, beside_sms)
    kernel, nothing = _sum_slots(rows_RH, chosen, scale_R, adds=addend_TH is not None)

    def run(
        rows_RH: Tensor,
        row_of_slot_TK: Tensor,
        scale_R: Tensor | None = None,
        addend_TH: Tensor | None = None,
        out_TH: Tensor | None = None,
    ) -> Tensor:
        if out_TH is None:
            out_TH = rows_RH.new_empty(tokens, columns) if addend_TH is None else addend_TH
        kernel(rows_RH, row_of_slot_TK.view(-1), nothing if scale_R is None else scale_R, out_TH, out_TH, chosen)
        return out_TH

    return run


def bind_sum_slots_and_part(
    rows_RH: Tensor, row_of_slot_TK: Tensor, scale_R: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]:
    """``out[t] = part[t] + sum over k of scale[row] * rows[row of slot (t, k)]``, (T, H), without sentinels.

    The arguments are ``(rows, row_of_slot, scale, part)``. The sum over k is rounded, and then their sum: it has the
    bits of `bind_sum_slots` and of an addition of ``part``.
    """
    (tokens, chosen), columns = row_of_slot_TK.shape, rows_RH.shape[1]
    kernel, nothing = _sum_slots(rows_RH, chosen, scale_R, adds=True, rounds=True)

    def run(rows_RH: Tensor, row_of_slot_TK: Tensor, scale_R: Tensor | None, part_TH: Tensor) -> Tensor:
        out_TH = rows_RH.new_empty(tokens, columns)
        scale = nothing if scale_R is None else scale_R
        kernel(rows_RH, row_of_slot_TK.view(-1), scale, part_TH, out_TH, chosen)
        return out_TH

    return run


def _slots_at_once(chosen: int) -> int:
    """Return the number of slots of a token that the kernel for this many loads at once."""
    from fusedmoe.kernels.rows.move.slots import SLOTS  # deferred: imports the CuTe DSL

    return next((n for n in SLOTS if chosen <= n), SLOTS[-1])


def _sum_slots(
    rows_RH: Tensor, chosen: int, scale_R: Tensor | None, *, adds: bool, rounds: bool = False
) -> tuple[Callable[..., Any], Tensor | None]:
    """Return the kernel of a sum over slots, and what takes the place of a missing scale."""
    from fusedmoe.kernels.rows.move.slots import SumSlots  # deferred: imports the CuTe DSL

    dtype, scale = NAMES[rows_RH.dtype], None if scale_R is None else NAMES[scale_R.dtype]
    arch = kernel_arch(rows_RH.device)
    kernel = load(SumSlots(dtype, scale, _slots_at_once(chosen), adds=adds, rounds=rounds, arch=arch))
    return kernel, no_scale(rows_RH.shape[0], rows_RH.device) if scale_R is None else None


def _bind_sum_on_few_sms(rows_RH: Tensor, row_of_slot_TK: Tensor, adds: bool, sms: int) -> Callable[..., Tensor]:
    from fusedmoe.kernels.rows.move.sum_on_few_sms import SumOnFewSms  # deferred: imports the CuTe DSL

    (tokens, chosen), columns = row_of_slot_TK.shape, rows_RH.shape[1]
    kernel = load(SumOnFewSms(NAMES[rows_RH.dtype], _slots_at_once(chosen), adds))

    def run(rows_RH: Tensor, row_of_slot_TK: Tensor, scale_R: None = None, addend_TH: Tensor | None = None) -> Tensor:
        out_TH = rows_RH.new_empty(tokens, columns) if addend_TH is None else addend_TH
        kernel(rows_RH, row_of_slot_TK.view(-1), out_TH, out_TH, chosen, sms)
        return out_TH

    return run


def bind_row_dots(
    source_TH: Tensor, rows_RH: Tensor, row_of_slot_TK: Tensor, dtype: torch.dtype
) -> Callable[..., Tensor]:
    """``dots[r] = sum over columns of source[token of r] * rows[r]``, (R,), in fp32, then rounded; zeros for sentinels.

    The arguments are ``(source, rows, row_of_slot, slot_of_row)``.
    """
    from fusedmoe.kernels.rows.move.slots import RowDots  # deferred: imports the CuTe DSL

    chosen, count = row_of_slot_TK.shape[1], rows_RH.shape[0]
    kernel = load(RowDots(NAMES[rows_RH.dtype], NAMES[dtype], arch=kernel_arch(rows_RH.device)))

    def run(source_TH: Tensor, rows_RH: Tensor, row_of_slot_TK: Tensor, slot_of_row: Tensor) -> Tensor:
        dots_R = rows_RH.new_empty(count, dtype=dtype)
        kernel(rows_RH, source_TH, slot_of_row, row_of_slot_TK.view(-1), dots_R, chosen)
        return dots_R

    return run


def bind_slot_values(values_R: Tensor, row_of_slot_TK: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """``out[t, k] = values[row_of_slot[t, k]]``, zeros for sentinels: (T, K); of ``(values, row_of_slot)``."""
    from fusedmoe.kernels.rows.move.slots import SlotValues  # deferred: imports the CuTe DSL

    shape = tuple(row_of_slot_TK.shape)
    kernel = load(SlotValues(NAMES[values_R.dtype], arch=kernel_arch(values_R.device)))

    def run(values_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        out_TK = values_R.new_empty(shape)
        kernel(values_R, row_of_slot_TK.view(-1), out_TK.view(-1))
        return out_TK

    return run
