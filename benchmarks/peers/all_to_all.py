"""Expert parallelism as it is written by hand: an all-to-all of rows sorted by expert, with splits that the host reads.

A token travels once for each expert that it chooses. Rows arrive sorted by rank, and are sorted by expert.

Axes: N tokens of this rank, K chosen experts per token, P ranks, E experts, H features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

import fusedmoe as fm
from fusedmoe.commands.bench.layer import grouped_mlp

Experts = Callable[[Tensor, Tensor], Tensor]  # of rows sorted by expert, and rows per expert


class _AllToAll(torch.autograd.Function):
    """Send ``sent[r]`` rows to each rank r, and get ``received[r]``; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.splits = sent, received
        return exchanged(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.splits
        return exchanged(grad.contiguous(), received, sent), None, None


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Return the rows that the other ranks have for this one, in rank order."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows, [*received], [*sent])
    return out


class _Permuted(torch.autograd.Function):
    """``copies`` copies of each row, in another order. The gradient of `index_select` would add rows by atomics."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return rows.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        grad = grad.index_select(0, _inverse(order))
        return (grad if ctx.copies == 1 else grad.view(-1, ctx.copies, grad.shape[1]).sum(1)), None, None


def by_hand(x_NH: Tensor, index_NK: Tensor, weight_NK: Tensor, num_experts: int, experts: Experts) -> Tensor:
    """Return the weighted sums (N, H) of the results of each token's experts."""
    ranks, top_k = dist.get_world_size(), index_NK.shape[1]
    expert = index_NK.flatten()
    order = expert.argsort(stable=True)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=x_NH.device)
    counts_E.scatter_add_(0, expert, torch.ones_like(expert))
    arriving_E = torch.empty_like(counts_E)  # by rank, and then by expert of this rank
    dist.all_to_all_single(arriving_E, counts_E)
    both = torch.stack([counts_E, arriving_E]).view(2, ranks, -1)
    sent, received = both.sum(-1).tolist()  # the host waits for the device

    rows = _AllToAll.apply(_Permuted.apply(x_NH, order, top_k), sent, received)
    here = num_experts // ranks
    number = torch.arange(here, device=x_NH.device).repeat(ranks)
    by_expert = number.repeat_interleave(arriving_E, output_size=sum(received)).argsort(stable=True)
    rows = experts(_Permuted.apply(rows, by_expert, 1), both[1].sum(0))
    rows = _AllToAll.apply(_Permuted.apply(rows, _inverse(by_expert), 1), received, sent)

    rows = rows * weight_NK.flatten().index_select(0, order)[:, None].to(rows.dtype)
    return _Permuted.apply(rows, _inverse(order), 1).view(-1, top_k, rows.shape[1]).sum(1)


def _inverse(order: Tensor) -> Tensor:
    """Return the place of each number in a permutation."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


def unfused(weight1: Tensor, weight2: Tensor) -> Experts:
    """Return experts in plain torch: `F.grouped_mm`, and SwiGLU."""

    def experts(rows: Tensor, splits: Tensor) -> Tensor:
        return grouped_mlp(rows, weight1, weight2, splits.cumsum(0, dtype=torch.int32), "swiglu")

    return experts


def fused(weight1: Tensor, weight2: Tensor) -> Experts:
    """Return the experts of this package; the weights must be parameters."""
    here, hidden, intermediate = weight2.shape
    first = fm.GroupedLinear(here, hidden, 2 * intermediate, device="meta", dtype=weight1.dtype)
    second = fm.GroupedLinear(here, intermediate, hidden, device="meta", dtype=weight2.dtype)
    first.weight, second.weight = weight1, weight2
    chain = fm.Sequential(first, fm.SwiGLU(), second)
    return lambda rows, splits: chain(rows, splits=splits)
