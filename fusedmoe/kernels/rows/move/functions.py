"""The kernels of `offsets.py` as functions of torch tensors. No call waits for the device or reads ``splits`` on the
host.

Axes: R rows sorted by expert, E experts, N columns, S slices of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedmoe.base.lasting import unread
from fusedmoe.base.target import kernel_arch
from fusedmoe.kernels.build.compiler import load

NAMES = {
    torch.int32: "int32", torch.int64: "int64",
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
}  # fmt: skip

WARP_COLUMNS = 256  # columns per warp: 16 bytes per lane
TARGET_WARPS = 132 * 48  # two waves on 132 SMs: the second balances the load
LEAST_SLICE_ROWS = 32  # a slice reads 2 bytes per column and row, far more than the 4 per column that it writes
SLICE_UNIT = 8  # rows that a warp loads at once
MOST_RANKS = 32  # by which rows are divided: a lane has one of them


def offsets_from_splits(splits_E: Tensor, num_rows: int) -> Tensor:
    """Ends of the experts' rows: ``offsets[e] = min(sum(max(splits[: e + 1], 0)), num_rows)``, in one launch.

    - ``splits_E``: rows per expert, int32 or int64, shape (E,), contiguous, on a CUDA device. No value overflows.
    - ``num_rows``: R, the number of rows, below 2**31.

    Returns: int32, shape (E,), non-decreasing, within [0, R].
    """
    return bind_offsets_from_splits(splits_E, num_rows)(splits_E)


def bind_offsets_from_splits(splits_E: Tensor, num_rows: int) -> Callable[..., Tensor]:
    """Return `offsets_from_splits` of splits of the same shape and dtype as these; it ignores further arguments."""
    experts = splits_E.shape[0]
    kernel = None
    if num_rows and experts:
        from fusedmoe.kernels.rows.move.offsets import Offsets  # deferred: imports the CuTe DSL

        kernel = load(Offsets(NAMES[splits_E.dtype], arch=kernel_arch(splits_E.device)))
    # its ``new_empty`` takes a third less time than one that changes the dtype
    int32 = unread(splits_E.device, torch.int32, 0)

    def run(splits_E: Tensor, *_: Any) -> Tensor:
        offsets_E = int32.new_empty(experts)
        if kernel is None:
            return offsets_E.zero_()
        kernel(splits_E, offsets_E, num_rows)
        return offsets_E

    return run


def bind_row_ranges(
    offsets_E: Tensor,
    token_of_row: Tensor,
    rank: int,
    ranks: int,
    tokens: int,
    divided: int | None = None,
    zero_tail: bool = True,
    tile: int = 128,
    paddings: bool = False,
) -> Callable[..., Tensor]:
    """Return a function of ``(offsets, token_of_row, arrivals=0, leaving=False)``: the experts' rows in P blocks, by
    the ranks of their tokens.

    Its result is an int32 vector of P * (2 (E + 1) + 2) elements, and with ``paddings`` of E + 1 more. A block has E +
    1 first rows, E + 1 ends, a counter, which is 0, and a word. Block i has the row tiles whose rows are all of the
    ranks from ``rank`` to ``(rank + i) % P``, except those of the blocks before it. The rows of no expert are one more
    expert.

    - ``rank``, ``ranks``: the own rank, and P: 2 to 32.
    - ``tokens``: P * N. Rank q has the tokens from q * N to before (q + 1) * N.
    - ``divided``: only the experts before this number are divided; None: every expert. The rows of the others, and
      those of no expert, are in the last block.
    - ``zero_tail``: whether a block has the rows of no expert.
    - ``tile``: the rows of a row tile.
    - ``paddings``: for a product with results by columns, see `RowRanges`; not if rows leave.
    - ``leaving``: the blocks are in the reverse order. Blocks 0 to i then have all rows of rank ``(rank - 1 - i) % P``.
    - ``arrivals``: how often 1 is added to a word until the rows of its rank are there. The word of block 0 is 0, all
      others are ``-arrivals``. Consecutive blocks are an argument of a product. Before a block, it waits until no word
      of its argument is negative up to that block's.

    Raises `ValueError`: there are fewer than 2 or more than 32 ranks, or ``rank`` is none of them.
    """
    if not (2 <= ranks <= MOST_RANKS and 0 <= rank < ranks):
        raise ValueError(f"rank {rank} of {ranks} ranks: expected one of 2 to {MOST_RANKS} ranks")
    from fusedmoe.kernels.rows.move.ranges import RowRanges  # deferred: imports the CuTe DSL

    experts = offsets_E.shape[0]
    size, each, of_experts = ranks * (2 * (experts + 1) + 2), tokens // ranks, experts if divided is None else divided
    size += (experts + 1) * paddings
    kernel = load(RowRanges(tile))

    def run(offsets_E: Tensor, token_of_row: Tensor, arrivals: int = 0, leaving: bool = False) -> Tensor:
        assert not (paddings and leaving), "the scheduler takes the last block for that with the tail"
        blocks = offsets_E.new_empty(size)
        kernel(offsets_E, token_of_row, blocks, rank, ranks, each, of_experts, -arrivals, leaving, zero_tail, 0)
        return blocks

    return run


def experts_of_block(experts: int, own_first: bool = False, halves: bool = False) -> int:
    """Return how many experts each block of `bind_expert_blocks` has: as few as possible."""
    return -(-experts // ((MOST_RANKS - 1) // 2 if own_first else MOST_RANKS // 2 if halves else MOST_RANKS))


def bind_expert_blocks(
    offsets_E: Tensor,
    token_of_row: Tensor,
    zero_tail: bool = True,
    own: tuple[int, int] | None = None,
    half: int = 0,
) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Return a function of ``(offsets, token_of_row, arrivals)``: the experts' rows in blocks, as of `bind_row_ranges`,
    but by experts. Block s has the rows of ``n = experts_of_block(E)`` experts, from ``s * n`` on. The last one has
    those of no expert too, with ``zero_tail``. The word of each block is ``-arrivals``.

    - ``own``: the rank and N, for own rows that come first; None if they do not. Then block 0 has the row tiles whose
      rows are all of the rank's tokens, and its word is 0. Blocks 2 s + 1 and 2 s + 2 have the tiles before and after
      these, of ``experts_of_block(E, own_first=True)`` experts; the second word of the two is 0.
    - ``half``: the first token of the second half of the tokens, for a product that computes one half after the other;
      0 for one that does not. Then ``own`` is given, but its rows do not come first: the half without the rank's own
      tokens does. Blocks 0 to S - 1 have the row tiles with a token of that half, of
      ``n = experts_of_block(E, halves=True)`` experts each, and blocks S to 2 S - 1 the others.

    Raises `ValueError`: halves without ``own``.
    """
    if half and own is None:
        raise ValueError("halves of the tokens: expected a rank and its number of tokens, got None")
    from fusedmoe.kernels.rows.move.ranges import RowRanges  # deferred: imports the CuTe DSL

    own_first, experts = own is not None and not half, offsets_E.shape[0]
    each = experts_of_block(experts, own_first, half > 0)
    steps, kernel = -(-experts // each), load(RowRanges())
    blocks = 1 + 2 * steps if own_first else 2 * steps if half else steps
    rank, of_rank = own or (0, 0)

    def run(offsets_E: Tensor, token_of_row: Tensor, arrivals: int) -> Tensor:
        found = offsets_E.new_empty(blocks * (2 * (experts + 1) + 2))
        kernel(offsets_E, token_of_row, found, rank, blocks, of_rank, own_first, -arrivals, half, zero_tail, each)
        return found

    return run


def column_sums(grad_RN: Tensor, offsets_E: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``sums[e] = sum of grad over the rows of e``, in fp32, rounded once; the same bits at every call. Two launches.

    - ``grad_RN``: rows sorted by expert, bf16 or fp16, shape (R, N), with unit stride in N. N and the pitch are
      multiples of 8, the address a multiple of 16 bytes. Rows from ``offsets[-1]`` on are not read.
    - ``offsets_E``: ends of the experts' rows, int32, shape (E,), contiguous, non-decreasing, within [0, R].
    - ``dtype``: dtype of the sums: bf16, fp16 or fp32; by default that of ``grad``.

    Returns: shape (E, N); zeros for an expert without rows.
    """
    return bind_column_sums(grad_RN, offsets_E, dtype)(grad_RN, offsets_E)


def bind_column_sums(
    grad_RN: Tensor, offsets_E: Tensor, dtype: torch.dtype | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `column_sums` of ``(grad, offsets)`` for tensors of the same shapes, dtypes and strides as these."""
    num_rows, columns = grad_RN.shape
    experts, device = offsets_E.shape[0], grad_RN.device
    dtype = grad_RN.dtype if dtype is None else dtype
    if not (num_rows and columns and experts):
        return lambda grad_RN, offsets_E: grad_RN.new_zeros(experts, columns, dtype=dtype)
    from fusedmoe.kernels.rows.move.offsets import ColumnSums  # deferred: imports the CuTe DSL

    slice_rows = rows_per_slice(num_rows, columns)
    # the partial sum of an expert's rows in slice s is row s + expert; see offsets.py
    partial_rows = -(-num_rows // slice_rows) + experts
    kernel = load(ColumnSums(NAMES[grad_RN.dtype], NAMES[dtype], arch=kernel_arch(device)))

    def run(grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
        partial_PN = torch.empty((partial_rows, columns), dtype=torch.float32, device=device)
        sums_EN = torch.empty((experts, columns), dtype=dtype, device=device)
        kernel(grad_RN, offsets_E, partial_PN, sums_EN, slice_rows)
        return sums_EN

    return run


def bind_zero_tail(rows_RN: Tensor, offsets_E: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of ``(rows, offsets)`` that writes zeros to the rows from ``offsets[-1]`` on, in place, and
    returns the rows. The tensors are as for `column_sums`.
    """
    if not (rows_RN.numel() and offsets_E.numel()):
        return lambda rows_RN, offsets_E: rows_RN.zero_()
    from fusedmoe.kernels.rows.move.offsets import ZeroTail  # deferred: imports the CuTe DSL

    kernel = load(ZeroTail(NAMES[rows_RN.dtype], arch=kernel_arch(rows_RN.device)))

    def run(rows_RN: Tensor, offsets_E: Tensor) -> Tensor:
        kernel(rows_RN, offsets_E)
        return rows_RN

    return run


def bind_sum_partials(count: int, columns: int) -> Callable[[Tensor], Tensor]:
    """Return the sum over the first axis of an fp32 tensor (count, columns), in one launch, or none if there is nothing
    to add. The number of columns is a multiple of 8.
    """
    if count == 1 or not columns:
        return lambda partial: partial[0]
    from fusedmoe.kernels.rows.move.parts import SumParts  # deferred: imports the CuTe DSL

    kernel = load(SumParts("fp32", 1))

    def run(partial: Tensor) -> Tensor:
        total = partial.new_empty(1, columns)
        kernel(partial.unsqueeze(1), total)
        return total[0]

    return run


def rows_per_slice(num_rows: int, columns: int) -> int:
    """Length of a slice of rows: short enough that the warps fill a GPU twice, but at least `LEAST_SLICE_ROWS`.

    It depends on the shape alone, not on the GPU, so the sums of a shape have the same bits everywhere.
    """
    blocks = -(-columns // WARP_COLUMNS)
    rows = max(LEAST_SLICE_ROWS, -(-num_rows * blocks // TARGET_WARPS))
    return -(-rows // SLICE_UNIT) * SLICE_UNIT
