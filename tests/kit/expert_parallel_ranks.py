"""Layers on the ranks of a group, compared with one process that has all experts and the tokens of all ranks.

The functions run in the processes of `two_ranks.Ranks`. A group of P ranks has the first P of them; in the others, the
functions do nothing. Each rank computes the result of the one process by itself. It compares after its last collective,
since a rank that raises an error leaves the others waiting.

Axes: T tokens of this rank, A tokens of all ranks, E experts of all ranks, H hidden, I intermediate.
"""

import inspect
from contextlib import contextmanager
from functools import lru_cache, wraps

import torch
from torch import distributed as dist
from torch import nn

import fusedmoe as fm
from fusedmoe.expert_parallel.allgather import AllGather
from kit.two_ranks import in_ranks

E, H, I, K = 8, 16, 8, 2  # noqa: E741


@lru_cache
def _group(size):
    """The group of the first processes; the others have one too, since torch names groups after their number."""
    if size == dist.get_world_size():
        return dist.group.WORLD
    parts = range(size), range(size, dist.get_world_size())
    return [dist.new_group(part) for part in parts][dist.get_rank() >= size]


@lru_cache
def _single_groups():
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())]


def alone(**settings):
    """The `ExpertParallel` of this process alone."""
    return fm.ExpertParallel(_single_groups()[dist.get_rank()], **settings)


def one_expert_often(ep, x):
    """A chain whose tokens choose expert 0 more often than a rank has experts, its inputs, and the slots per token."""
    chosen = E // ep.ranks + 1
    chain = fm.Sequential(fm.Dispatch(E, expert_parallel=ep), fm.Combine(None, expert_parallel=ep))
    index, weight = torch.zeros(len(x), chosen, dtype=torch.int8), torch.ones(len(x), chosen)
    return chain, {"expert_index": index, "expert_weight": weight}, chosen


@lru_cache
def _ranks_of(size, settings):
    return fm.ExpertParallel(_group(size), **dict(settings))


def ranks_of(size, settings=None):
    """The `ExpertParallel` of the first ``size`` processes, one per settings; a number is ``max_tokens``."""
    given = settings if isinstance(settings, dict) else {"max_tokens": settings}
    return _ranks_of(size, tuple(({"engine": "allgather"} | given).items()))


def on_each(function):
    """``function(ep, ...)`` as ``function(rank, size, settings, ...)``, which `Ranks.run` calls."""

    @wraps(function)
    def called(rank, size, settings, *args, **kwargs):
        _single_groups()
        _group(size)
        return function(ranks_of(size, settings), *args, **kwargs) if rank < size else None

    names = ["rank", "size", "settings", *list(inspect.signature(function).parameters)[1:]]
    called.__signature__ = inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    )
    return called


def in_group(pool="four", **fixed):
    """Make a test of ``function(ep, ...)``: it runs on a group of the pool's first processes, see `in_ranks`. ``size``
    and ``settings`` of the group are parameters of the test, or fixed.
    """
    return lambda function: in_ranks(pool, **fixed)(on_each(function))


# ---- layers ---------------------------------------------------------------------------------------------------------


def moe(ep, **options):
    return fm.MoE(**{"hidden": H, "intermediate": I, "num_experts": E, "top_k": K, **options}, expert_parallel=ep)


class Doubled(nn.Module):
    """Not an op: it splits the chain."""

    def forward(self, x):
        return 2 * x


class Squashed(nn.Module):
    """Not zero for zero rows."""

    def forward(self, x):
        return torch.cos(x)


def experts(ep, weights=None, foreign=(), hidden=H, wide=I, bias=None):
    """The experts alone, with other modules at some places; ``weights`` of `Combine`, else of a `Scale`."""
    here = E if ep is None else E // ep.ranks
    bias = weights is not None if bias is None else bias
    ops = [
        fm.Dispatch(E, expert_parallel=ep),
        fm.GroupedLinear(here, hidden, 2 * wide, bias=bias, expert_parallel=ep),
        fm.SwiGLU(),
        *([fm.Scale("probs")] if weights is None else []),
        fm.GroupedLinear(here, wide, hidden, bias=bias, expert_parallel=ep),
        fm.Combine(weights, expert_parallel=ep),
    ]
    for place in sorted((place % len(ops) for place in foreign), reverse=True):
        ops.insert(place, Squashed() if place % 2 else Doubled())
    return fm.Sequential(*ops)


def routes(tokens, sentinels=True, dtype=torch.int64, wants=True, kind="usual", top_k=K, of=torch.float64):
    """Runtime inputs for `outcomes`: chosen experts, of which some may be none, and their weights. Tokens choose any
    experts, only those of rank 0, or only those of their own rank.
    """
    total, ranks = sum(tokens), len(tokens)
    generator = torch.Generator().manual_seed(3)
    among = E if kind == "usual" else E // ranks  # no expert twice
    lists = [torch.randperm(among, generator=generator)[:top_k] for _ in range(total)]
    index = torch.stack([*lists, torch.zeros(top_k, dtype=torch.int64)])[:total]
    if kind == "no remote":
        index += among * torch.arange(ranks).repeat_interleave(torch.tensor(tokens))[:, None]
    index, weight = index.to(dtype), randn(total, top_k, seed=4, dtype=of)
    if sentinels:
        index[::3, 0], index[1::4], index[2::4, -1] = -1, E, 100  # some tokens have none

    def inputs(rows):
        return {"expert_index": index[rows], "expert_weight": weight[rows].clone().requires_grad_(wants)}

    return inputs


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


def compared(got, want, within=None, **tolerances):
    """Compare tensors by name: by element or, ``within`` a relative error, by norm."""
    assert got.keys() == want.keys()
    for name, theirs in want.items():
        if within is None:
            torch.testing.assert_close(got[name], theirs, msg=lambda text, name=name: f"{name}: {text}", **tolerances)
        else:
            assert got[name].dtype is theirs.dtype, name
            assert (got[name] - theirs).norm() <= within * theirs.norm(), name


def result(layer, x, dy, given=None, call=None, x_grad=True):
    """Output, and the gradients of x and of the runtime inputs, by name; ``call(layer, x, **given)`` returns rows that
    may have more dimensions than one.
    """
    x, given = x.clone().requires_grad_(x_grad), given or {}
    y = call(layer, x, **given) if call else layer(x, **given)
    (y * dy.view_as(y)).sum().backward()
    found = {"y": y.detach().view(x.shape)} | ({"x": x.grad} if x_grad else {})
    return found | {name: t.grad for name, t in given.items() if t.requires_grad}


def outcomes(ep, whole, local, tokens, *, inputs=None, dtype=torch.float64, zeros=(), hidden=H, **how):
    """Run both layers forward and backward; return y, dx and all gradients of this rank, and those of one process.

    Parameters
    ----------
    tokens
        The number of tokens of each rank.
    inputs
        ``inputs(rows)`` returns the runtime inputs of these of all tokens.
    zeros
        Names whose tensors may be zero. Without tokens, all are.
    how
        See `result`.
    """
    here, total = bounds(ep, tokens), sum(tokens)
    x_AH, dy_AH = (randn(total, hidden, seed=seed, dtype=dtype) for seed in (1, 2))
    want, got = (
        result(layer, x_AH[rows], dy_AH[rows], inputs(rows) if inputs else {}, **how)
        for layer, rows in ((whole, slice(0, total)), (local, here))
    )
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    for name, t in (want | gradients).items():
        assert not total or name in zeros or t.abs().sum() > 0, f"{name}: zeros would pass"
    want = {name: t[here] for name, t in want.items()}
    got |= summed_gradients(ep, whole, local)
    mine = dict(local.named_parameters())
    return got, want | {name: shard_of(ep, t, mine[name]) for name, t in gradients.items()}


def check(ep, make, tokens, *, within=None, dtype=torch.float64, **options):
    """Compare ``make(ep)`` on the ranks with ``make(None)`` in one process; return the layer of this rank."""
    whole, local = pair(ep, make, dtype)
    compared(*outcomes(ep, whole, local, tokens, dtype=dtype, **options), within=within)
    return local


# ---- engines that tests look into -----------------------------------------------------------------------------------


class Recording(AllGather):
    """Writes down each exchange, with the shapes that travel."""

    def __init__(self, group):
        super().__init__(group)
        self.log = []

    def start_gather(self, tensors, rows, wanted=None):
        self.log.append(("gather", rows, [(tuple(t.shape[1:]), t.dtype) for t in tensors]))
        return super().start_gather(tensors, rows, wanted)

    def start_exchange(self, tensors):
        self.log.append(("exchange", [(tuple(t.shape), t.dtype) for t in tensors]))
        return super().start_exchange(tensors)


class Poisoned(AllGather):
    """Fills the rows of a rank after its own tokens with NaN, as the interface allows."""

    def start_gather(self, tensors, rows, wanted=None):
        given = []
        for t in tensors:
            out = t.new_zeros(rows, *t.shape[1:])
            if t.is_floating_point():
                out.view(torch.uint8).fill_(0xFF)  # in every format
            out[: t.shape[0]] = t
            given.append(out)
        return super().start_gather(given, rows, wanted)


class Selective(AllGather):
    """Fills the gathered rows that the caller does not want with NaN, as the interface allows."""

    def __init__(self, group):
        super().__init__(group)
        self.unwanted = 0

    def start_gather(self, tensors, rows, wanted=None):
        pending = super().start_gather(tensors, rows, wanted)
        if wanted is not None:
            last = pending.wait_all()[-1]
            unwanted = ~((wanted.ids >= 0) & (wanted.ids < wanted.experts)).any(1)
            self.unwanted += int(unwanted.sum())
            last[unwanted] = torch.nan
        return pending


@contextmanager
def engine(ep, kind):
    """Give the ranks another engine for a while, unless it is None."""
    before = ep.engine
    ep.engine = kind(ep.group) if kind else before
    try:
        yield ep.engine
    finally:
        ep.engine = before
