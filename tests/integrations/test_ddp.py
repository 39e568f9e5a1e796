"""DistributedDataParallel over two processes is one process with the whole batch."""

import pytest
import torch
from kit import plain_models
from kit.two_ranks import HIDDEN, TOKENS, batches
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedmoe as fm

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

pytestmark = pytest.mark.distributed

E, H, I = 4, HIDDEN, 8  # noqa: E741  (experts, hidden, intermediate)
STEPS = 3
SPLITS = torch.tensor([[5, 0, 9, 8], [0, 20, 0, 4]])  # of each rank: an expert of it has no row, and rank 0 has a tail


def make(kind, dtype=torch.float64):
    torch.manual_seed(0)
    if kind == "Sequential":
        layers = fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(E, I, H)
        return fm.Sequential(*layers).to(dtype)
    model = nn.Sequential(fm.MoE(H, I, E, 2), fm.MoE(H, I, E, 2, shared_intermediate=I)).to(dtype)
    with torch.no_grad():  # the first router reads what `batches` writes
        model[0].router.weight.copy_(torch.eye(E, H))
    return model


def plain(kind, model):
    if kind == "Sequential":
        return plain_models.twin(plain_models.Experts(E, H, I, torch.float64), model)
    layers = plain_models.MoE(H, I, E, 2), plain_models.MoE(H, I, E, 2, shared=I)
    return plain_models.twin(nn.Sequential(*layers), model)


def loss_of(model, kind, x, splits):
    y = model(x, splits=splits) if kind == "Sequential" else model(x)
    return (y - x.roll(1, -1)).square().sum(-1).mean()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # unlike Adam it sees a gradient's scale


def on_a_rank(rank, kind, micro_batches, compiled=False, recipe="bf16", dtype=torch.float64):
    """Losses of this rank, its parameters after training, and rows per expert of the first layer."""
    model = make(kind, dtype)
    wrapped = DistributedDataParallel(model)
    called = torch.compile(wrapped, backend="eager") if compiled else wrapped
    optimizer, losses = optimizer_of(model), []
    given = list(batches(rank, STEPS * micro_batches, dtype))
    for first in range(0, len(given), micro_batches):
        optimizer.zero_grad()
        *early, last = given[first : first + micro_batches]
        with fm.recipe(recipe):
            with wrapped.no_sync():
                for x in early:
                    losses.append(loss_of(called, kind, x, SPLITS[rank]))
                    (losses[-1] / micro_batches).backward()
            losses.append(loss_of(called, kind, last, SPLITS[rank]))
            (losses[-1] / micro_batches).backward()
        optimizer.step()
    load = SPLITS[rank] if kind == "Sequential" else make(kind, dtype)[0](given[0], return_stats=True)[1].load
    return [loss.item() for loss in losses], {n: p.detach() for n, p in model.named_parameters()}, load


def in_one_process(model, kind, micro_batches, recipe="bf16", dtype=torch.float64):
    """The same with both batches."""
    optimizer, losses = optimizer_of(model), []
    given = list(zip(*[batches(rank, STEPS * micro_batches, dtype) for rank in range(2)], strict=True))
    for first in range(0, len(given), micro_batches):
        optimizer.zero_grad()
        for both in given[first : first + micro_batches]:
            with fm.recipe(recipe):
                losses.append([loss_of(model, kind, x, splits) for x, splits in zip(both, SPLITS, strict=True)])
            (sum(losses[-1]) / 2 / micro_batches).backward()
        optimizer.step()
    return [[a.item(), b.item()] for a, b in losses], {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "micro_batches", "compiled"), [
    ("Sequential", 1, False), ("MoE", 1, False), ("MoE", 2, False), ("Sequential", 1, True),
])  # fmt: skip
def test_two_ranks_are_one_with_the_whole_batch(ranks, kind, micro_batches, compiled):
    losses, parameters = in_one_process(plain(kind, make(kind)), kind, micro_batches)
    found = ranks.run(on_a_rank, kind, micro_batches, compiled)
    torch.testing.assert_close([list(both) for both in zip(found[0][0], found[1][0], strict=True)], losses)
    before = make(kind).state_dict()
    for _, got, load in found:
        assert 0 in load.tolist()
        assert got.keys() == parameters.keys()
        torch.testing.assert_close(got, parameters)
    assert not torch.equal(found[0][2] > 0, found[1][2] > 0)
    assert min((p - before[name]).abs().max() for name, p in parameters.items()) > 1e-4
    assert all(torch.equal(p, found[1][1][name]) for name, p in found[0][1].items())


def test_quantized_weights_follow_what_both_ranks_learnt(ranks):
    losses, parameters = in_one_process(make("MoE", torch.float32), "MoE", 1, "mxfp8", torch.float32)
    found = ranks.run(on_a_rank, "MoE", 1, False, "mxfp8", torch.float32)
    assert [list(both) for both in zip(found[0][0], found[1][0], strict=True)] == losses
    torch.testing.assert_close(found[0][1], parameters, rtol=0, atol=0)
    unquantized, _ = in_one_process(make("MoE", torch.float32), "MoE", 1, "bf16", torch.float32)
    assert abs(losses[-1][0] - unquantized[-1][0]) > 1e-6


def without_tokens(rank):
    model = make("MoE")
    x = next(batches(0, 1))[: 0 if rank else TOKENS]
    wrapped = DistributedDataParallel(model)
    y = wrapped(x)
    y.square().sum().backward()
    return y.shape, {name: p.grad for name, p in model.named_parameters()}


def test_a_rank_without_tokens(ranks):
    (_, got), (empty, same) = ranks.run(without_tokens)
    assert tuple(empty) == (0, H)
    model = plain("MoE", make("MoE"))
    model(next(batches(0, 1))).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0
        torch.testing.assert_close(got[name], parameter.grad / 2)
        assert torch.equal(got[name], same[name])
