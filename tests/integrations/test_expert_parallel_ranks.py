"""Layers whose experts are spread over ranks, against one process with the tokens of all ranks, in fp64.

Each rank makes the tokens of all ranks and the layer of one process, and compares its own part.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import distributed as dist
from torch import nn

import fusedmoe as fm

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from two_ranks import Ranks

HIDDEN, INTERMEDIATE, EXPERTS = 8, 6, 8
FP64 = torch.float64

TOKENS = {
    "even": (6, 6, 6, 6),
    "uneven": (5, 9, 1, 4),
    "an empty rank": (5, 0, 7, 3),
    "empty ranks": (0, 0, 0, 0),
    "one token": (0, 1, 0, 0),
}

LAYERS = {
    "softmax": {},
    "one expert per token": {"top_k": 1, "renormalize": False},
    "many experts per token": {"top_k": 5},
    "sigmoid": {"score": "sigmoid", "balance_bias": True},
    "topk_softmax": {"score": "topk_softmax", "router_bias": True},
    "groups": {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
    "not renormalized": {"renormalize": False},
    "biases": {"bias": True, "score": "topk_softmax", "router_bias": True},
    "clamped": {"activation": fm.SwiGLU(limit=0.3, alpha=1.702, offset=1.0)},
    "squared_relu": {"activation": "squared_relu"},
    "geglu": {"activation": "geglu"},
    "shared expert": {"shared_intermediate": 5, "shared_gate": True},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("two"), 2)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("four"), 4)
    yield started
    started.stop()


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request):
    return request.getfixturevalue("two" if request.param == 2 else "four")


# ---- layers ---------------------------------------------------------------------------------------------------------


def make(expert_parallel=None, **settings):
    torch.manual_seed(0)
    settings = {"top_k": 2, "activation": "swiglu", **settings}
    settings["activation"] = copy.copy(settings["activation"])
    return fm.MoE(HIDDEN, INTERMEDIATE, EXPERTS, dtype=FP64, expert_parallel=expert_parallel, **settings)


def shard_of(t, ep):
    """This rank's part of a tensor of all experts."""
    here = EXPERTS // ep.ranks
    return t[ep.rank * here : (ep.rank + 1) * here]


def is_shard(name):
    return "experts.gate_up" in name or "experts.down" in name


def spread(one, ep, **settings):
    """A layer with the parameters of ``one``, of which each rank has its experts."""
    layer = make(ep, **settings)
    state = {name: shard_of(t, ep) if is_shard(name) else t for name, t in one.state_dict().items()}
    layer.load_state_dict(state)
    return layer


def data(tokens, requires_grad=True):
    """The tokens of each rank, and the gradients of their results."""
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(count, HIDDEN, generator=generator, dtype=FP64) for count in tokens]
    grads = [torch.randn(count, HIDDEN, generator=generator, dtype=FP64) for count in tokens]
    return [x.requires_grad_(requires_grad) for x in xs], grads


def check_gradients(layer, one, ep):
    """Those of the shards are parts of those of one process; the others are summed over the ranks."""
    compared = 0
    of_one = dict(one.named_parameters())
    for name, parameter in layer.named_parameters():
        want, got = of_one[name].grad, parameter.grad
        if is_shard(name):
            want = shard_of(want, ep)
        else:
            got = ep.sum_over_ranks(torch.zeros_like(parameter) if got is None else got)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
        compared += float(want.abs().sum()) > 0
    return compared


def check(rank, tokens, settings, most, engine="allgather"):
    """Compare output and gradients; return the number of parameters with gradients other than zero."""
    ep = fm.ExpertParallel(engine=engine, max_tokens=most)
    one = make(**settings)
    if one.router.balance_bias is not None:
        one.router.balance_bias.copy_(torch.linspace(-0.1, 0.1, EXPERTS))
    layer = spread(one, ep, **settings)
    tokens = tokens[: ep.ranks]
    xs, grads = data(tokens)
    every = torch.cat(xs).detach().requires_grad_()
    want = one(every)
    want.backward(torch.cat(grads))
    first = sum(tokens[:rank])
    mine = slice(first, first + tokens[rank])
    for x in (xs[rank], xs[rank].detach().view(-1, 1, HIDDEN).requires_grad_()):
        layer.zero_grad()
        y = layer(x)
        assert y.shape == x.shape
        y.backward(grads[rank].view_as(x))
        torch.testing.assert_close(y.view(-1, HIDDEN), want[mine], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(x.grad.view(-1, HIDDEN), every.grad[mine], rtol=1e-10, atol=1e-12)
    if not sum(tokens):
        return None
    return check_gradients(layer, one, ep), len(dict(one.named_parameters()))


@pytest.mark.parametrize("most", [None, 10], ids=["agreed", "max_tokens"])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_numbers_of_tokens(ranks, tokens, most):
    for found in ranks.run(check, tokens, {}, most):
        assert found is None or found[0] > 0


@pytest.mark.parametrize("settings", LAYERS.values(), ids=LAYERS)
def test_layers(ranks, settings):
    compared = ranks.run(check, TOKENS["uneven"], settings, None)
    assert all(got > 0 for got, _ in compared)
    assert max(got for got, _ in compared) == compared[0][1], "each parameter has a gradient on some rank"


# ---- the same ops in a Sequential ----------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def chain(ep, early, foreign):
    here = EXPERTS if ep is None else EXPERTS // ep.ranks
    weights = {"expert_parallel": ep}
    return fm.Sequential(
        fm.Dispatch(EXPERTS, **weights),
        fm.GroupedLinear(here, HIDDEN, 2 * INTERMEDIATE, dtype=FP64),
        *([Doubled()] if foreign else []),
        fm.SwiGLU(),
        *([fm.Scale("probs")] if early else []),
        fm.GroupedLinear(here, INTERMEDIATE, HIDDEN, dtype=FP64),
        fm.Combine(None if early else "probs", **weights),
    )


def check_chain(rank, tokens, early, foreign, hooked, chosen):
    ep = fm.ExpertParallel()
    torch.manual_seed(0)
    one = chain(None, early, foreign)
    spread_out = chain(ep, early, foreign)
    spread_out.load_state_dict({name: shard_of(t, ep) for name, t in one.state_dict().items()})
    seen = []
    if hooked is not None:
        spread_out[hooked].register_forward_hook(lambda module, args, result: seen.append(type(module).__name__))
    tokens = tokens[: ep.ranks]
    xs, grads = data(tokens)
    generator = torch.Generator().manual_seed(1)
    # also ids of no expert, whose weights do not count
    index = torch.randint(-3, EXPERTS + 3, (sum(tokens), 3), generator=generator)
    if chosen is not None:
        index = index.clamp(chosen, chosen)
    weight = torch.rand(index.shape, generator=generator, dtype=FP64)
    every, weights = torch.cat(xs).detach().requires_grad_(), weight.clone().requires_grad_()
    want = one(every, expert_index=index, expert_weight=weights)
    want.backward(torch.cat(grads))
    first = sum(tokens[:rank])
    mine = slice(first, first + tokens[rank])
    own = weight[mine].clone().requires_grad_()
    y = spread_out(xs[rank], expert_index=index[mine], expert_weight=own)
    y.backward(grads[rank])
    for got, expected in ((y, want[mine]), (xs[rank].grad, every.grad[mine]), (own.grad, weights.grad[mine])):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    for got, expected in zip(spread_out.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got.grad, shard_of(expected.grad, ep), rtol=1e-10, atol=1e-12)
    return weights.grad.abs().sum().item(), seen


@pytest.mark.parametrize("foreign", [False, True], ids=["", "a foreign module"])
@pytest.mark.parametrize("early", [True, False], ids=["scale", "combine"])
def test_ops_in_a_sequential(ranks, early, foreign):
    for total, _ in ranks.run(check_chain, TOKENS["an empty rank"], early, foreign, None, None):
        assert total > 0


@pytest.mark.parametrize("chosen", [0, EXPERTS - 1, -1], ids=["first rank", "last rank", "no expert"])
def test_all_tokens_to_one_rank(ranks, chosen):
    for total, _ in ranks.run(check_chain, TOKENS["uneven"], True, False, None, chosen):
        assert (total > 0) == (chosen >= 0)


@pytest.mark.parametrize("hooked", [0, -1], ids=["dispatch", "combine"])
def test_hooks(two, hooked):
    for total, seen in two.run(check_chain, TOKENS["uneven"], True, False, hooked, None):
        assert total > 0
        assert seen == [["Dispatch", "Combine"][hooked]]


# ---- the rest of a training step -----------------------------------------------------------------------------------


def check_layers_in_a_row(rank, tokens, checkpointed, reentrant):
    """Several layers with one `ExpertParallel`, recomputed or not."""
    from torch.utils.checkpoint import checkpoint

    ep = fm.ExpertParallel()
    ones = [make(), make(score="sigmoid"), make(bias=True)]
    settings = [{}, {"score": "sigmoid"}, {"bias": True}]
    layers = [spread(one, ep, **s) for one, s in zip(ones, settings, strict=True)]

    def run(layers, x):
        for layer in layers:
            again = checkpointed and layer.expert_parallel is not None
            x = x + (checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x))
        return x

    tokens = tokens[: ep.ranks]
    xs, grads = data(tokens)
    every = torch.cat(xs).detach().requires_grad_()
    want = run(ones, every)
    want.backward(torch.cat(grads))
    y = run(layers, xs[rank])
    y.backward(grads[rank])
    first = sum(tokens[:rank])
    mine = slice(first, first + tokens[rank])
    torch.testing.assert_close(y, want[mine], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(xs[rank].grad, every.grad[mine], rtol=1e-9, atol=1e-11)
    return [check_gradients(layer, one, ep) for layer, one in zip(layers, ones, strict=True)]


@pytest.mark.parametrize("checkpointed", ["no", "reentrant", "not reentrant"])
def test_layers_in_a_row(two, checkpointed):
    for counts in two.run(check_layers_in_a_row, TOKENS["uneven"], checkpointed != "no", checkpointed == "reentrant"):
        assert min(counts) > 0


def check_without_gradients(rank):
    ep = fm.ExpertParallel()
    one = make()
    layer = spread(one, ep)
    xs, _ = data((4, 6), requires_grad=False)
    want = one(torch.cat(xs))[4 * rank : 4 + 6 * rank]
    with torch.no_grad():
        found = [layer(xs[rank])]
    found.append(layer(xs[rank]))  # the experts alone want gradients
    found.append(copy.deepcopy(layer)(xs[rank]))
    for y in found:
        torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-12)
    found[1].sum().backward()
    return layer.experts.down.weight.grad.abs().sum().item(), found[0].requires_grad


def test_without_gradients_of_the_tokens(two):
    for total, wants in two.run(check_without_gradients):
        assert total > 0
        assert not wants


def check_statistics(rank):
    """Losses and load are those of the rank's own tokens; the load of all ranks updates the bias of one process."""
    ep = fm.ExpertParallel()
    settings = {"score": "sigmoid", "balance_bias": True}
    one = make(**settings)
    layer = spread(one, ep, **settings)
    alone = make(**settings)
    xs, _ = data((9, 4))
    for _ in range(3):
        _, of_all = one(torch.cat(xs).detach(), return_stats=True)
        y, stats = layer(xs[rank], return_stats=True)
        _, own = alone(xs[rank].detach(), return_stats=True)
        assert torch.equal(stats.load, own.load)
        (y.sum() + stats.load_balancing_loss).backward()
        (own.load_balancing_loss).backward()
        torch.testing.assert_close(stats.load_balancing_loss, own.load_balancing_loss)
        load = ep.sum_over_ranks(stats.load)
        assert torch.equal(load, of_all.load)
        for router in (layer.router, alone.router):
            router.update_bias(load)
        one.router.update_bias(of_all.load)
        assert torch.equal(layer.router.balance_bias, one.router.balance_bias)
    return layer.router.balance_bias.abs().sum().item(), alone.router.weight.grad.abs().sum().item()


def test_statistics(two):
    for bias, grad in two.run(check_statistics):
        assert bias > 0
        assert grad > 0


def check_lora(rank):
    ep = fm.ExpertParallel()
    one = make()
    layer = spread(one, ep)
    adapters = []
    for made in (one, layer):
        made.requires_grad_(False)
        torch.manual_seed(5)
        adapted = fm.GroupedLoRA(made.experts.gate_up, rank=2)
        made.experts.gate_up = adapted
        adapters.append(adapted)
    torch.manual_seed(6)
    for (_, whole), (_, part) in zip(*(_trained_parameters(a) for a in adapters), strict=True):
        whole.data.normal_()
        part.data.copy_(shard_of(whole.data, ep))
    xs, grads = data((5, 8))
    want = one(torch.cat(xs).detach())
    want.backward(torch.cat(grads))
    y = layer(xs[rank])
    y.backward(grads[rank])
    torch.testing.assert_close(y, want[5 * rank : 5 + 8 * rank], rtol=1e-10, atol=1e-12)
    total = 0.0
    for (_, whole), (name, part) in zip(*(_trained_parameters(a) for a in adapters), strict=True):
        torch.testing.assert_close(part.grad, shard_of(whole.grad, ep), rtol=1e-10, atol=1e-12, msg=name)
        total += part.grad.abs().sum().item()
    return total


def _trained_parameters(module):
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def test_lora(two):
    assert all(total > 0 for total in two.run(check_lora))


def check_recipe(rank, recipe):
    """Rows and weights of a rank are quantized as those of one process: the output has the same bits."""
    ep = fm.ExpertParallel()
    torch.manual_seed(0)
    one = fm.MoE(64, 128, EXPERTS, 2)
    torch.manual_seed(0)
    layer = fm.MoE(64, 128, EXPERTS, 2, expert_parallel=ep)
    layer.load_state_dict({n: shard_of(t, ep) if is_shard(n) else t for n, t in one.state_dict().items()})
    xs = [torch.randn(count, 64, generator=torch.Generator().manual_seed(count)) for count in (30, 21)]
    with nullcontext() if recipe is None else fm.recipe(recipe):
        every = torch.cat(xs).requires_grad_()
        want = one(every)
        x = xs[rank].clone().requires_grad_()
        y = layer(x)
        generator = torch.Generator().manual_seed(9)
        grad = torch.randn(want.shape, generator=generator)
        mine = slice(30 * rank, 30 + 21 * rank)
        want.backward(grad)
        y.backward(grad[mine])
    weights = layer.experts.gate_up.weight, one.experts.gate_up.weight
    difference = [
        ((got - expected).norm() / expected.norm()).item()
        for got, expected in (
            (y, want[mine]), (x.grad, every.grad[mine]), (weights[0].grad, shard_of(weights[1].grad, ep)),
        )
    ]  # fmt: skip
    return difference, y.norm().item()


@pytest.mark.parametrize("recipe", [None, "fp8_block", "mxfp8", "fp8_row"])
def test_recipes(two, recipe):
    for difference, norm in two.run(check_recipe, recipe):
        assert norm > 0
        assert max(difference) < 1e-6


def check_bf16(rank):
    """The error of two ranks against that of one process, from fp64."""
    ep = fm.ExpertParallel()
    exact = make()
    one, layer = make().bfloat16(), spread(exact, ep).bfloat16()
    exact = copy.deepcopy(one).double()
    xs, _ = data((40, 33))
    xs = [x.detach().bfloat16() for x in xs]
    mine = slice(40 * rank, 40 + 33 * rank)
    want = exact(torch.cat(xs).double())[mine]
    return [((y.double() - want).norm() / want.norm()).item() for y in (one(torch.cat(xs))[mine], layer(xs[rank]))]


def test_error_of_bf16(two):
    for of_one, of_two in two.run(check_bf16):
        assert 0 < of_two < 1.5 * of_one


def check_padding(rank):
    """Rows after a rank's own tokens are never read, whatever they are."""
    ep = fm.ExpertParallel(max_tokens=20)
    gather = ep.engine.start_gather

    def poisoned(tensors, rows):
        pending = gather(tensors, rows)
        for t in pending.wait_all():
            for of_rank, count in enumerate((3, 11)):
                if t.is_floating_point():
                    t[of_rank * rows + count : (of_rank + 1) * rows] = torch.nan
        return pending

    ep.engine.start_gather = poisoned
    one = make()
    layer = spread(one, ep)
    xs, grads = data((3, 11))
    every = torch.cat(xs).detach().requires_grad_()
    want = one(every)
    want.backward(torch.cat(grads))
    y = layer(xs[rank])
    y.backward(grads[rank])
    mine = slice(3 * rank, 3 + 11 * rank)
    torch.testing.assert_close(y, want[mine], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(xs[rank].grad, every.grad[mine], rtol=1e-10, atol=1e-12)
    return check_gradients(layer, one, ep)


def test_padding_is_not_read(two):
    assert all(count > 0 for count in two.run(check_padding))


def exchanges(rank, seed):
    """The exchanges of some layers with random numbers of tokens, in order."""
    ep = fm.ExpertParallel(engine="allgather")
    found = []
    gather, exchange = ep.engine.start_gather, ep.engine.start_exchange

    def noted_gather(tensors, rows):
        found.append(("gather", rows, [tuple(t.shape[1:]) for t in tensors]))
        return gather(tensors, rows)

    def noted_exchange(tensors):
        found.append(("exchange", [tuple(t.shape) for t in tensors]))
        return exchange(tensors)

    ep.engine.start_gather, ep.engine.start_exchange = noted_gather, noted_exchange
    layers = [spread(make(), ep) for _ in range(2)]
    mine = torch.Generator().manual_seed(seed + rank)
    for _ in range(6):
        count = int(torch.randint(0, 300, (1,), generator=mine))
        x = torch.randn(count, HIDDEN, generator=mine, dtype=FP64, requires_grad=True)
        layers[1](layers[0](x)).sum().backward()
    return found


def test_every_rank_makes_the_same_exchanges(four):
    """Whatever its number of tokens, which its plans depend on."""
    first, *others = four.run(exchanges, 100)
    assert len(first) == 6 * 2 * 4
    assert all(other == first for other in others)


def second_derivatives(rank):
    layer = make(fm.ExpertParallel())
    x = data((4, 6))[0][rank]
    (first,) = torch.autograd.grad(layer(x).sum(), x)
    assert first.abs().sum() > 0
    with pytest.raises(
        RuntimeError, match=r"dispatch.gather exchanges tensors with other ranks, which autograd cannot"
    ):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    return True


def test_second_derivatives_are_refused(two):
    assert all(two.run(second_derivatives))


def times_quantized(rank, most):
    """The weights that are quantized in each micro-batch, and after another collective."""
    from test_weight_cache_two_ranks import Counted

    ep = fm.ExpertParallel(max_tokens=most)
    layer = fm.MoE(64, 128, EXPERTS, 2, expert_parallel=ep)
    counts = []
    with fm.recipe("mxfp8"), Counted() as quantized:
        for step in range(3):
            if step == 2:  # may write to a weight
                dist.all_reduce(torch.zeros(1))
            before = quantized.count
            layer(torch.randn(7 + rank, 64)).sum().backward()
            counts.append(quantized.count - before)
    return counts


@pytest.mark.parametrize("most", [None, 9], ids=["agreed", "max_tokens"])
def test_exchanges_leave_weights_quantized(two, most):
    for first, second, after in two.run(times_quantized, most):
        assert first > 0
        assert second < first
        assert after > second
