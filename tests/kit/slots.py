"""Routings of tokens as kernels take them, and rows between NaN.

Axes: T tokens, K chosen experts per token, R = T K rows, E experts.
"""

import torch

from fusedmoe.kernels.rows.move.functions import bind_zero_tail, offsets_from_splits
from fusedmoe.kernels.rows.move.slot_functions import bind_gather_rows, bind_row_dots, bind_slot_values, bind_sum_slots
from fusedmoe.numerics.expert_rows import offsets_from_splits as plain_offsets
from fusedmoe.numerics.expert_rows import sort_by_expert
from kit.hopper import DEVICE
from kit.poison import nan_in_new_tensors

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of norms: one rounding
KINDS = ("random", "sentinels", "one expert", "only sentinels", "far out")


def ids(tokens, chosen, experts, kind="random", dtype=torch.int64, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    index = torch.randint(0, experts, (tokens, chosen), device=DEVICE, generator=generator)
    if kind == "sentinels":
        index[torch.rand(index.shape, device=DEVICE, generator=generator) < 0.3] = experts
        index[::7, 0] = -1
    elif kind == "one expert":
        index.fill_(experts - 1)
    elif kind == "only sentinels":
        index.fill_(experts)
    elif kind == "far out":
        index[::3] = torch.iinfo(dtype).max
        index[1::3, -1] = torch.iinfo(dtype).min
    return index.to(dtype)


def routed(tokens, chosen, experts, kind, seed=0, rows=None):
    """The slot of each row, the row of each slot, and the number of rows with an expert."""
    slot_of_row, row_of_slot, splits = sort_by_expert(ids(tokens, chosen, experts, kind, seed=seed), experts, rows)
    return slot_of_row, row_of_slot, int(splits.sum())


def between_nan(rows, columns, dtype, seed=0, used=None):
    """Random rows, NaN after row ``used``, and NaN on all sides."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    around = torch.full((rows + 8, columns + 16), torch.nan, dtype=dtype, device=DEVICE)
    inner = around[4 : 4 + rows, 8 : 8 + columns]
    inner.copy_(torch.randn(rows, columns, device=DEVICE, generator=generator))
    inner[rows if used is None else used :] = torch.nan
    return inner


def assert_rows_close(got, want, size=None):
    """Each row, within one rounding of its norm, or of ``size``, the norm of terms that cancel."""
    assert got.shape == want.shape
    size = want.norm(dim=-1) if size is None else size
    error = (got.double() - want).norm(dim=-1)
    assert (error <= TOLERANCE[got.dtype] * size + 1e-30).all(), (error / size).max()


def splits_like(kind, experts, dtype, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    draw = lambda low, high: torch.randint(low, high, (experts,), device=DEVICE, generator=generator)  # noqa: E731
    splits = {
        "random": lambda: draw(0, 100),
        "zero": lambda: draw(0, 1),
        "negative": lambda: draw(-100, 100),
        "all negative": lambda: draw(-(2**31), 0),
        "past the rows": lambda: draw(0, 10**6),
        "one has all": lambda: torch.zeros_like(draw(0, 1)).index_fill_(0, draw(0, experts)[:1], 3000),
    }[kind]()
    return splits.to(dtype)


def check_offsets(kind, experts, rows, dtype=torch.int64, seed=0):
    splits = splits_like(kind, experts, dtype, seed)
    got = offsets_from_splits(splits, rows)
    assert got.dtype == torch.int32
    assert torch.equal(got, plain_offsets(splits, rows)), (kind, experts, rows)


def check_moves(tokens, chosen, columns, dtype, scale, kind="sentinels", rows=None, out=torch.float32, sms=0, seed=0):
    """Rows of tokens, sums over slots, dots of rows and values of slots; ``rows``: fewer than there are slots."""
    slots, more = tokens * chosen, () if rows is None else (rows,)
    slot_of_row, row_of_slot, used = routed(tokens, chosen, 13, kind, seed, rows)
    count, token_of_row = rows or slots, slot_of_row[:used] // chosen
    source, weight = between_nan(tokens, columns, dtype), None
    ordered = between_nan(count, columns, dtype, seed=1, used=used)
    factors = torch.ones(count, device=DEVICE).double()
    if scale is not None:
        weight = (0.1 + torch.rand(count, device=DEVICE)).to(scale)
        factors = weight.double()
        weight[used:] = torch.nan
    with nan_in_new_tensors():
        gathered = bind_gather_rows(source, row_of_slot, weight, *more)(source, row_of_slot, slot_of_row, weight)
        total = bind_sum_slots(ordered, row_of_slot, weight, None, sms)(ordered, row_of_slot, weight)
        dots = bind_row_dots(source, ordered, row_of_slot, out)(source, ordered, row_of_slot, slot_of_row)
        values = bind_slot_values(dots, row_of_slot)(dots, row_of_slot)
    copied = source.double()[token_of_row]
    assert len(gathered) == count
    assert_rows_close(gathered[:used], copied * factors[:used, None])
    assert not gathered[used:].any()

    padded = torch.zeros(count + 1, columns, device=DEVICE).double()
    padded[:used] = ordered[:used].double() * factors[:used, None]
    assert_rows_close(total, padded[row_of_slot].sum(1), padded.abs()[row_of_slot].sum(1).norm(dim=-1))

    products = copied * ordered[:used].double()
    assert_rows_close(dots[:used, None], products.sum(1)[:, None], products.abs().sum(1))
    assert dots.dtype is out
    assert not dots[used:].any()
    assert torch.equal(values, torch.cat([dots, dots.new_zeros(1)])[row_of_slot])


def check_zeroed_tail(rows, columns, dtype):
    """Other rows keep their bits, and so does the memory between rows."""
    for used in {0, 1, rows // 3, rows - 1, rows}:
        room = torch.full((rows, columns + 8), torch.nan, device=DEVICE, dtype=dtype)
        part, before = room[:, :columns], torch.randn(used, columns, device=DEVICE).to(dtype)
        part[:used] = before
        offsets = torch.tensor([used // 2, used], dtype=torch.int32, device=DEVICE)
        bind_zero_tail(part, offsets)(part, offsets)
        assert torch.equal(part[:used], before)
        assert not part[used:].any()
        assert room[:, columns:].isnan().all()
