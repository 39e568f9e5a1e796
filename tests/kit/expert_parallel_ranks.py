"""Layers on the ranks of a group, compared with one process that has all experts and the tokens of all ranks.

The functions run in the processes of `two_ranks.Ranks`. A group of P ranks has the first P of them; in the others, the
functions do nothing. Each rank computes the result of the one process by itself. It compares after its last collective,
since a rank that raises an error leaves the others waiting.

Axes: T tokens of this rank, A tokens of all ranks, E experts of all ranks, H hidden, I intermediate.
"""

from contextlib import contextmanager
from functools import lru_cache, wraps

import torch
from torch import distributed as dist

import fusedmoe as fm
from fusedmoe.expert_parallel.allgather import AllGather

E, H, I, K = 8, 16, 8, 2  # noqa: E741
RANKS = 4  # processes; K < P for all of them, K >= P for the first two


@lru_cache
def _group(size):
    return dist.group.WORLD if size == RANKS else dist.new_group(range(size), use_local_synchronization=True)


@lru_cache
def ranks_of(size, max_tokens=None):
    """The `ExpertParallel` of the first ``size`` processes: an object for each way to agree on N."""
    return fm.ExpertParallel(_group(size), "allgather", max_tokens=max_tokens)


def on_each(function):
    """``function(ep, ...)`` as ``function(rank, size, max_tokens, ...)``, which `Ranks.run` calls."""

    @wraps(function)
    def called(rank, size, max_tokens, *args, **kwargs):
        return function(ranks_of(size, max_tokens), *args, **kwargs) if rank < size else None

    return called


# ---- the same layer on one rank, and in one process -----------------------------------------------------------------


def randn(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bounds(ep, tokens):
    """The first and the last of this rank's tokens, of those of all ranks."""
    start = sum(tokens[: ep.rank])
    return slice(start, start + tokens[ep.rank])


def shard_of(ep, theirs, mine):
    """The part of a tensor that a rank has, from the whole, for a tensor like ``mine``: its experts', or all."""
    return theirs if theirs.shape == mine.shape else theirs.tensor_split(ep.ranks)[ep.rank]


def pair(ep, make, dtype=torch.float64, std=0.5):
    """The whole layer, and the layer of this rank with the same values: ``make(None)`` and ``make(ep)``."""
    whole, local = make(None).to(dtype), make(ep).to(dtype)
    for i, (_, t) in enumerate(sorted(whole.state_dict().items())):
        t.copy_(randn(*t.shape, seed=1000 + i, dtype=t.dtype) * (0.1 if t.dim() == 1 else std))
    local.load_state_dict({
        name: shard_of(ep, t, local.state_dict()[name]) for name, t in whole.state_dict().items()
    })  # fmt: skip
    return whole, local


def summed_gradients(ep, whole, local):
    """The gradients of this rank's layer by name; those of parameters that every rank has are summed."""
    theirs = dict(whole.named_parameters())
    found = {}
    for name, p in local.named_parameters():
        assert (p.grad is None) == (theirs[name].grad is None), f"{name}: {p.grad}, one process: {theirs[name].grad}"
        if p.grad is not None:
            found[name] = p.grad if p.shape != theirs[name].shape else ep.sum_over_ranks(p.grad)
    return found


def compared(got, want, **tolerances):
    """Compare tensors by name."""
    assert got.keys() == want.keys()
    for name, theirs in want.items():
        torch.testing.assert_close(got[name], theirs, msg=lambda text, name=name: f"{name}: {text}", **tolerances)


def outcomes(ep, whole, local, tokens, *, inputs=None, x_grad=True, call=None, dtype=torch.float64, zeros=()):
    """Run both layers forward and backward; return y, dx and all gradients of this rank, and those of one process.

    Parameters
    ----------
    tokens
        The number of tokens of each rank.
    inputs
        ``inputs(rows)`` returns the runtime inputs of these of all tokens.
    call
        ``call(layer, x, **inputs)`` returns the rows; they may have more dimensions than one.
    zeros
        Names whose tensors may be zero. Without tokens, all are.
    """
    call = call or (lambda layer, x, **given: layer(x, **given))
    here, total = bounds(ep, tokens), sum(tokens)
    x_AH, dy_AH = randn(total, H, seed=1, dtype=dtype), randn(total, H, seed=2, dtype=dtype)
    results = []
    for layer, rows in ((whole, slice(0, total)), (local, here)):
        x = x_AH[rows].clone().requires_grad_(x_grad)
        given = inputs(rows) if inputs else {}
        y = call(layer, x, **given)
        (y * dy_AH[rows].view_as(y)).sum().backward()
        results.append({"y": y.detach().view(-1, H)} | ({"x": x.grad} if x_grad else {}))
        results[-1] |= {name: t.grad for name, t in given.items() if t.requires_grad}
    want, got = results
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    for name, t in (want | gradients).items():
        assert not total or name in zeros or t.abs().sum() > 0, f"{name}: zeros would pass"
    want = {name: t[here] for name, t in want.items()}
    got |= summed_gradients(ep, whole, local)
    mine = dict(local.named_parameters())
    return got, want | {name: shard_of(ep, t, mine[name]) for name, t in gradients.items()}


def check(ep, make, tokens, *, tolerances=None, dtype=torch.float64, **options):
    """Compare ``make(ep)`` on the ranks with ``make(None)`` in one process; return the layer of this rank."""
    whole, local = pair(ep, make, dtype)
    compared(*outcomes(ep, whole, local, tokens, dtype=dtype, **options), **(tolerances or {}))
    return local


def moe(ep, **options):
    return fm.MoE(**{"hidden": H, "intermediate": I, "num_experts": E, "top_k": K, **options}, expert_parallel=ep)


# ---- engines that tests look into -----------------------------------------------------------------------------------


class Recording(AllGather):
    """Writes down each exchange, with the shapes that travel."""

    def __init__(self, group):
        super().__init__(group)
        self.log = []

    def start_gather(self, tensors, rows, wanted=None, lend=False, told=None):
        self.log.append(("gather", rows, [(tuple(t.shape[1:]), t.dtype) for t in tensors]))
        return super().start_gather(tensors, rows, wanted, lend, told)

    def start_exchange(self, tensors, wanted=None):
        self.log.append(("exchange", [(tuple(t.shape), t.dtype) for t in tensors]))
        return super().start_exchange(tensors, wanted)


class Poisoned(AllGather):
    """Fills the rows of a rank after its own tokens with NaN, as the interface allows."""

    def start_gather(self, tensors, rows, wanted=None, lend=False, told=None):
        given = []
        for t in tensors:
            out = t.new_full((rows, *t.shape[1:]), float("nan") if t.is_floating_point() else 0)
            out[: t.shape[0]] = t
            given.append(out)
        return super().start_gather(given, rows, wanted, lend, told)


class Selective(AllGather):
    """Fills the gathered rows that the caller does not want with NaN, as the interface allows, and finds zeros in those
    that it does not want of an exchange.
    """

    def start_gather(self, tensors, rows, wanted=None, lend=False, told=None):
        pending = super().start_gather(tensors, rows, wanted, lend, told)
        *others, last = pending.wait_all()
        if wanted is not None:
            unwanted = ~wanted.rows(*others)
            self.unwanted += int(unwanted.sum())
            last[unwanted] = torch.nan
        return pending

    def start_exchange(self, tensors, wanted=None):
        pending = super().start_exchange(tensors, wanted)
        if wanted is not None:
            unwanted = ~wanted.rows()
            self.unwanted += int(unwanted.sum())
            for parts in pending.wait_all():
                assert not any(part[here].any() for part, here in zip(parts, unwanted, strict=True))
        return pending

    def __init__(self, group):
        super().__init__(group)
        self.unwanted = 0


@contextmanager
def engine(ep, kind):
    """Give the ranks another engine for a while."""
    before = ep.engine
    ep.engine = kind(ep.group)
    try:
        yield ep.engine
    finally:
        ep.engine = before
