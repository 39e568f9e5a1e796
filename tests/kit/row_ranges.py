"""Rows of tokens of some ranks, and the blocks of row tiles that products compute in turn."""

from itertools import pairwise
from typing import NamedTuple

import torch

from fusedmoe.kernels.rows.move import functions as row_functions
from kit.hopper import DEVICE

BF16 = torch.bfloat16
RANK, RANKS = 1, 3


def routed(tokens, slots, experts, seed):
    """Offsets and tokens of rows, with some rows of no expert; the experts' rows are in token order."""
    generator = torch.Generator().manual_seed(seed)
    # expert 1 gets most rows, expert 2 none
    wanted = torch.where(
        torch.rand(tokens, slots, generator=generator) < 0.5,
        1,
        torch.randint(0, experts + 1, (tokens, slots), generator=generator),
    )
    wanted[wanted == 2] = experts
    order = wanted.flatten().sort(stable=True)
    offsets = torch.searchsorted(order.values, torch.arange(experts), right=True)
    return offsets.to(torch.int32), (order.indices // slots).to(torch.int32)


def plain_ranges(
    offsets, token_of_row, rank, ranks, tokens, divided=None, zero_tail=True, tile=128, paddings=False, *, arrivals=0,
    leaving=False,
):  # fmt: skip
    """The result of `bind_row_ranges`, one tile at a time; a range without rows is that from 0 to 0."""
    experts, each = len(offsets), tokens // ranks
    blocks = torch.zeros(ranks, 2 * (experts + 1) + 2, dtype=torch.int32)
    blocks[1:, -1] = -arrivals
    steps = [(int(token) // each - rank) % ranks for token in token_of_row]
    ends = [0, *offsets.tolist(), *([len(token_of_row)] if zero_tail else [])]
    for e, (start, stop) in enumerate(pairwise(ends)):
        of_tile = {row: max(steps[row : min(row + tile, stop)]) for row in range(start, stop, tile)}
        if e >= (experts if divided is None else divided):
            of_tile = dict.fromkeys(of_tile, ranks - 1)
        for step in set(of_tile.values()):
            rows = [row for row in of_tile if of_tile[row] == step]
            assert rows == [*range(rows[0], rows[-1] + 1, tile)], "the tiles of a class follow each other"
            blocks[step, e], blocks[step, experts + 1 + e] = rows[0], min(rows[-1] + tile, stop)
    blocks = (blocks.flip(0) if leaving else blocks).flatten()
    if not paddings:
        return blocks
    padding = -offsets.diff(prepend=offsets.new_zeros(1)) % 128
    return torch.cat([blocks, torch.zeros(1, dtype=torch.int32), padding.cumsum(0).to(torch.int32)])


def plain_blocks(offsets, token_of_row, arrivals, zero_tail=True, own=None, half=0, tile=128):
    """The result of `bind_expert_blocks`, one tile at a time if own rows come first, or one half of the tokens."""
    experts, own_first = len(offsets), own is not None and not half
    each = row_functions.experts_of_block(experts, own_first, half > 0)
    steps = -(-experts // each)
    count = 1 + 2 * steps if own_first else 2 * steps if half else steps
    blocks = torch.zeros(count, 2 * (experts + 1) + 2, dtype=torch.int32)
    blocks[:, -1] = -arrivals
    ends = [0, *offsets.tolist(), *([len(token_of_row)] if zero_tail else [])]
    if own_first:
        blocks[::2, -1] = 0
        is_own = token_of_row // own[1] == own[0]
    if half:
        is_early = (token_of_row < half) != (own[0] * own[1] < half)
    for e, (start, stop) in enumerate(pairwise(ends)):
        ranges = {e // each if e < experts else -1: [start, stop]}
        if own is not None and e < experts:
            place, ranges = 2 * (e // each) + 1, {}
            for row in range(start, stop, tile):
                end = min(row + tile, stop)
                if half:
                    to = e // each + (0 if bool(is_early[row:end].any()) else steps)
                else:
                    of_own = bool(is_own[row:end].all())
                    if not of_own and 0 in ranges:
                        place = 2 * (e // each) + 2
                    to = 0 if of_own else place
                found = ranges.setdefault(to, [row, row])
                assert found[1] == row, "the tiles of a block follow each other"
                found[1] = end
        for place, (first, end) in ranges.items():
            blocks[place, e], blocks[place, experts + 1 + e] = first, end
    return blocks.flatten()


def step_of_rows(blocks, offsets, rows, own_first):
    """The step of each row, -1 for none, and the expert of its range. Every range begins with a whole tile."""
    starts = [0, *offsets.tolist()]
    found = torch.full((len(blocks), len(starts), rows), -1)
    for place, of_block in enumerate(blocks[:, :-2].unflatten(1, (2, -1))):
        for e, (first, end) in enumerate(of_block.T.tolist()):
            assert first >= end or (first - starts[e]) % 128 == 0
            found[place, e, first:end] = (place + 1) // 2 if own_first else place
    assert ((found >= 0).sum((0, 1)) <= 1).all(), "no row is in two ranges"
    return found.amax((0, 1)), (found >= 0).any(0)


def check_blocks(offsets, token_of_row, zero_tail=True, own=None, half=0):
    """Compare the kernel with `plain_blocks`. Return the rows of each block."""
    given, own_first = (offsets.to(DEVICE), token_of_row.to(DEVICE)), own is not None and not half
    got = row_functions.bind_expert_blocks(*given, zero_tail, own, half)(*given, 5).cpu()
    want = plain_blocks(offsets, token_of_row, 5, zero_tail, own, half)
    assert len(got) == len(want)
    got, want = (t.view(-1, 2 * (len(offsets) + 1) + 2) for t in (got, want))
    assert torch.equal(got[:, -2:], want[:, -2:])
    steps = [step_of_rows(t, offsets, len(token_of_row), own_first) for t in (got, want)]
    assert all(map(torch.equal, *steps))
    if half:  # `PushSums` reads where the rows of an expert end
        assert torch.equal(got[:, len(offsets) + 1 : 2 * len(offsets) + 1].amax(0), offsets)
    return want[:, :-2].unflatten(1, (2, -1)).diff(dim=1).sum((1, 2)).tolist()


def check_ranges(offsets, token_of_row, *settings, arrivals, leaving):
    """Compare the kernel with `plain_ranges`."""
    given = offsets.to(DEVICE), token_of_row.to(DEVICE)
    got = row_functions.bind_row_ranges(*given, *settings)(*given, arrivals, leaving).cpu()
    want = plain_ranges(offsets, token_of_row, *settings, arrivals=arrivals, leaving=leaving)
    assert len(got) == len(want)
    ranks, end = settings[1], settings[1] * (2 * (len(offsets) + 1) + 2)
    assert torch.equal(got[end:], want[end:])
    got, want = (t[:end].view(ranks, -1) for t in (got, want))
    ranges = got[:, :-2].unflatten(1, (2, -1))
    ranges.masked_fill_(ranges[:, :1] == ranges[:, 1:], 0)
    assert torch.equal(got, want)


class Problem(NamedTuple):
    """Operands of products of the rows of three ranks, on the second of them."""

    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    scale: torch.Tensor
    offsets: torch.Tensor
    blocks: torch.Tensor  # (P, 2 (E + 1) + 2)
    rank_of_x: torch.Tensor  # of each row of x
    index: torch.Tensor | None


def tiles_of(blocks, tile=128):
    """The row tiles of each block (P, 2 (E + 1) + 2)."""
    return (-(-blocks[:, :-2].unflatten(1, (2, -1)).diff(dim=1) // tile)).sum((1, 2))


def problem_by_ranges(gather, arrivals=0, leaving=False):
    torch.manual_seed(0)
    tokens, experts, hidden, features = 600, 3, 72, 64
    offsets, token_of_row = (t.to(DEVICE) for t in routed(tokens, 2, experts, seed=1))
    bound = row_functions.bind_row_ranges(offsets, token_of_row, RANK, RANKS, tokens)
    blocks = bound(offsets, token_of_row, arrivals, leaving).view(RANKS, -1)
    assert (tiles_of(blocks) > 0).all(), "rows in every block"
    x = torch.randn(tokens if gather else len(token_of_row), hidden).to(DEVICE, BF16)
    gate_up = torch.randn(experts, 2 * features, hidden).to(DEVICE, BF16)
    down = torch.randn(experts, hidden, features).to(DEVICE, BF16)
    scale = torch.rand(len(token_of_row)).to(DEVICE)
    token_of_x = torch.arange(tokens, device=DEVICE) if gather else token_of_row
    index = token_of_row if gather else None
    return Problem(x, gate_up, down, scale, offsets, blocks, token_of_x // (tokens // RANKS), index)
