"""Rows of tokens of some ranks, and the ranges of row tiles that several launches of a product compute in turn."""

import torch

from fusedmoe.kernels.rows.move import functions as row_functions
from kit.hopper import DEVICE

BF16 = torch.bfloat16
OWN = 200, 500  # tokens


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


def row_ranges(offsets, token_of_row, *more):
    """The ranges, and a word after them, 0."""
    out = torch.zeros(3 * 2 * (len(offsets) + 1) + 1, dtype=torch.int32, device=DEVICE)
    got = row_functions.bind_row_ranges(offsets, token_of_row, *more)(offsets, token_of_row, out)
    assert got[-1] == 0
    return got


def problem_by_ranges(gather):
    torch.manual_seed(0)
    tokens, experts, hidden, features = 600, 3, 72, 64
    offsets, token_of_row = (t.to(DEVICE) for t in routed(tokens, 2, experts, seed=1))
    ranges = row_ranges(offsets, token_of_row, *OWN, tokens)
    assert (ranges[:-1].view(3, 2, -1).diff(dim=1) > 0).any(2).all(), "rows in every range"
    x = torch.randn(tokens if gather else len(token_of_row), hidden).to(DEVICE, BF16)
    gate_up = torch.randn(experts, 2 * features, hidden).to(DEVICE, BF16)
    down = torch.randn(experts, hidden, features).to(DEVICE, BF16)
    scale = torch.rand(len(token_of_row)).to(DEVICE)
    return x, gate_up, down, scale, offsets, ranges, token_of_row if gather else None
