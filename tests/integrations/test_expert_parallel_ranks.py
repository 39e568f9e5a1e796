"""Expert parallelism on CPUs: the ranks of a group, together, are one process with all tokens and all experts."""

import copy
from functools import partial

import pytest
import torch
from kit.expert_parallel_ranks import (
    RANKS,
    E,
    H,
    I,
    K,
    Poisoned,
    Recording,
    Selective,
    bounds,
    check,
    compared,
    engine,
    moe,
    on_each,
    outcomes,
    pair,
    randn,
    shard_of,
    summed_gradients,
)
from test_weight_cache_two_ranks import Counted
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.layers.moe import Routing
from fusedmoe.numerics import recipes
from fusedmoe.numerics.formats import Delayed

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

pytestmark = pytest.mark.distributed

EVEN, UNEVEN, EMPTY_RANK, ALL_EMPTY = (6, 6, 6, 6), (5, 1, 9, 3), (0, 7, 0, 4), (0, 0, 0, 0)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four processes of one gloo group."""
    from kit.two_ranks import Ranks

    started = Ranks(tmp_path_factory.mktemp("ranks"), RANKS)
    try:
        yield started
    finally:
        started.stop()


both_sizes = pytest.mark.parametrize("size", [2, 4])
slow = pytest.mark.slow

# ---- tokens and routers ---------------------------------------------------------------------------------------------


@on_each
def layer(ep, tokens, options=(), **others):
    check(ep, lambda ep: moe(ep, **dict(options)), tokens[: ep.ranks], **others)


@both_sizes
@pytest.mark.parametrize("max_tokens", [None, 9])
@pytest.mark.parametrize("tokens", [EVEN, UNEVEN, EMPTY_RANK, ALL_EMPTY], ids=str)
def test_numbers_of_tokens(four, size, max_tokens, tokens):
    four.run(layer, size, max_tokens, tokens)


CLAMPED = {"limit": 1.5, "alpha": 1.702, "offset": 1.0}
LAYERS = {
    "softmax of the chosen": {"score": "topk_softmax", "router_bias": True},
    "not renormalized, scaled": {"renormalize": False, "scale": 2.5},
    "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "groups, sigmoid": {"score": "sigmoid", "num_groups": 4, "top_groups": 2},
    "groups, softmax": {"num_groups": 4, "top_groups": 2, "renormalize": False},
    "balance bias, softmax": {"balance_bias": True},
    "biases": {"bias": True, "router_bias": True},
    "clamped": {"activation": fm.SwiGLU(**CLAMPED), "bias": True, "score": "topk_softmax", "router_bias": True},
    "squared_relu": {"activation": "squared_relu"},
    "geglu": {"activation": "geglu"},
    "reglu": {"activation": "reglu", "bias": True},
    "shared": {"shared_intermediate": 6},
    "shared, gated": {"shared_intermediate": 6, "shared_gate": True, "bias": True},
    "one expert per token": {"top_k": 1, "renormalize": False},
    "all experts": {"top_k": E},
}


@both_sizes
@pytest.mark.parametrize("name", LAYERS)
def test_kinds_of_layers(four, size, name):
    four.run(layer, size, None, UNEVEN, LAYERS[name])


def test_a_group_of_one_rank(four):
    for max_tokens in (None, 9):
        four.run(layer, 1, max_tokens, UNEVEN, LAYERS["shared, gated"])


@on_each
def to_the_experts_of_one_rank(ep, favoured):
    whole, local = pair(ep, partial(moe, balance_bias=True))
    here = E // ep.ranks
    for routed in (whole, local):
        routed.router.balance_bias[favoured * here : favoured * here + here] += 5  # so the K of each token are there
    tokens = UNEVEN[: ep.ranks]
    index = whole.router(randn(sum(tokens), H, seed=1)).expert_index
    assert (index // here == favoured).all()
    compared(*outcomes(ep, whole, local, tokens))


@both_sizes
@pytest.mark.parametrize("favoured", [0, 1])
def test_all_tokens_go_to_the_experts_of_one_rank(four, size, favoured):
    four.run(to_the_experts_of_one_rank, size, None, favoured)


# ---- ops by themselves ----------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """Not an op: it splits the chain."""

    def forward(self, x):
        return 2 * x


class Squashed(nn.Module):
    """Not zero for zero rows."""

    def forward(self, x):
        return torch.cos(x)


def experts(ep, weights, foreign=()):
    here = E if ep is None else E // ep.ranks
    scaled = [fm.Scale("probs")] if weights is None else []
    ops = [
        fm.Dispatch(E, expert_parallel=ep),
        fm.GroupedLinear(here, H, 2 * I, bias=weights is not None),
        fm.SwiGLU(),
        *scaled,
        fm.GroupedLinear(here, I, H, bias=weights is not None),
        fm.Combine(weights, expert_parallel=ep),
    ]
    for place in sorted(foreign, reverse=True):
        ops.insert(place, Squashed() if place % 2 else Doubled())
    return fm.Sequential(*ops)


def routes(tokens, sentinels, dtype=torch.int64, wants=True):
    """Runtime inputs for `outcomes`: chosen experts, of which some may be none, and their weights."""
    total = sum(tokens)
    generator = torch.Generator().manual_seed(3)
    index = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(total)] or [torch.zeros(K)])
    index, weight = index[:total].to(dtype), randn(total, K, seed=4)
    if sentinels:
        index[::3, 0], index[1::4], index[2::4, 1] = -1, E, 100  # some tokens have none

    def inputs(rows):
        return {"expert_index": index[rows], "expert_weight": weight[rows].clone().requires_grad_(wants)}

    return inputs


@on_each
def sequential(ep, tokens, weights, sentinels, foreign=(), hooked=(), index_dtype=torch.int64, **others):
    tokens = tokens[: ep.ranks]
    calls = []

    def make(ep):
        made = experts(ep, weights, foreign)
        for place in hooked:
            made[place].register_forward_hook(lambda module, given, out: calls.append(type(module).__name__))
        return made

    check(ep, make, tokens, inputs=routes(tokens, sentinels, index_dtype), **others)
    assert len(calls) == 2 * len(hooked)


@both_sizes
@pytest.mark.parametrize("max_tokens", [None, 9])
@pytest.mark.parametrize("sentinels", [False, True])
@pytest.mark.parametrize("weights", [None, "probs"])
def test_ops(four, size, max_tokens, sentinels, weights):
    four.run(sequential, size, max_tokens, UNEVEN, weights, sentinels)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_types_of_expert_ids(four, dtype):
    sentinels = dtype is not torch.uint8
    four.run(sequential, 2, None, UNEVEN, None, sentinels, index_dtype=dtype)


@pytest.mark.parametrize("max_tokens", [None, 9])
@pytest.mark.parametrize("weights", [None, "probs"])
@pytest.mark.parametrize("foreign", [(0,), (1,), (2,), (3,), (-1,), (1, 3)], ids=str)
def test_other_modules_in_the_chain(four, max_tokens, weights, foreign):
    last = 6 + (weights is None)
    places = tuple(place % last for place in foreign)
    four.run(sequential, 2, max_tokens, UNEVEN, weights, True, places)


@pytest.mark.parametrize("max_tokens", [None, 9])
@pytest.mark.parametrize("weights", [None, "probs"])
@pytest.mark.parametrize("hooked", [(0,), (-1,), (0, -1), (1,), (0, 1, 2, 3, 4, -1)], ids=str)
def test_hooks_on_ops(four, max_tokens, weights, hooked):
    four.run(sequential, 2, max_tokens, UNEVEN, weights, True, hooked=hooked)


@on_each
def hooked_layer(ep, names, tokens, kind):
    calls = []

    def make(ep):
        made = moe(ep, bias=kind == "biases")
        for name in names:
            made.get_submodule(name).register_forward_hook(lambda module, given, out: calls.append(None))
        return made

    check(ep, make, tokens[: ep.ranks])
    assert len(calls) == 2 * len(names)


@pytest.mark.parametrize("names", [
    ("router",), ("experts",), ("experts.dispatch",), ("experts.combine",), ("experts.dispatch", "experts.combine"),
    ("router", "experts.down"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("max_tokens", [None, 9])
def test_hooks_in_a_layer(four, names, max_tokens):
    four.run(hooked_layer, 2, max_tokens, names, UNEVEN, "biases")
    four.run(hooked_layer, 2, max_tokens, names, EMPTY_RANK, "none")


@on_each
def under_a_global_hook(ep):
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, out: calls.append(type(module)))
    try:
        check(ep, partial(moe, bias=True), UNEVEN[: ep.ranks])
    finally:
        handle.remove()
    assert calls.count(fm.Dispatch) == calls.count(fm.Combine) == 2


@pytest.mark.parametrize("max_tokens", [None, 9])
def test_a_global_hook(four, max_tokens):
    four.run(under_a_global_hook, 2, max_tokens)


class OwnRouter(nn.Module):
    """Not a `Router`: the experts are a chain of their own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(E, H))

    def forward(self, x):
        logits = x @ self.weight.T
        weight, index = logits.sigmoid().topk(K, -1)
        return Routing(index, weight, logits, logits.softmax(-1))


@on_each
def with_its_own_router(ep):
    def make(ep):
        made = moe(ep)
        made.router = OwnRouter()
        return made

    check(ep, make, UNEVEN[: ep.ranks])


def test_another_router(four):
    four.run(with_its_own_router, 2, None)
    four.run(with_its_own_router, 4, 9)


# ---- what may be around a call --------------------------------------------------------------------------------------


@on_each
def without_gradients(ep, how):
    whole, local = pair(ep, moe)
    tokens = UNEVEN[: ep.ranks]
    x = randn(sum(tokens), H, seed=1)
    with torch.no_grad() if how == "no_grad" else torch.inference_mode():
        y, want = local(x[bounds(ep, tokens)]), whole(x)[bounds(ep, tokens)]
    compared({"y": y}, {"y": want})
    assert want.abs().min() > 0


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_without_gradients(four, how):
    four.run(without_gradients, 2, None, how)
    four.run(without_gradients, 4, 9, how)


@on_each
def x_without_a_gradient(ep):
    tokens = UNEVEN[: ep.ranks]
    with engine(ep, Recording) as recorded:
        check(ep, moe, tokens, x_grad=False)
    rows = ep.ranks * (ep.max_tokens or max(tokens))
    assert recorded.log[-1] == ("exchange", [((rows, K), torch.float64)])  # the gradient of the routing weights alone


def test_tokens_that_want_no_gradient(four):
    four.run(x_without_a_gradient, 2, None)
    four.run(x_without_a_gradient, 4, 9)


@on_each
def router_without_a_gradient(ep):

    for weights in (None, "probs"):
        with engine(ep, Recording) as recorded:
            check(ep, partial(experts, weights=weights), UNEVEN[: ep.ranks], inputs=routes(UNEVEN, False, wants=False))
        (sizes,) = recorded.log[-1][1:]
        assert [shape[1:] for shape, _ in sizes] == [(H,)]


def test_routing_weights_that_want_no_gradient(four):
    four.run(router_without_a_gradient, 2, None)


@on_each
def unread_weights(ep):
    """Neither `Scale` nor `Combine` reads the routing weights."""

    def make(ep):
        return fm.Sequential(*[op for op in experts(ep, None) if not isinstance(op, fm.Scale)])

    with engine(ep, Recording) as recorded:
        whole, local = pair(ep, make)
        given = routes(UNEVEN, False)(slice(0, 3))
        results = []
        for made in (whole, local):
            x = randn(3, H, seed=1).requires_grad_()
            weight = given["expert_weight"].detach().clone().requires_grad_()
            made(x, expert_index=given["expert_index"], expert_weight=weight).square().sum().backward()
            results.append({"x": x.grad, "weight": weight.grad})
    want, got = results
    assert want["weight"] is None
    compared(got, want)
    assert recorded.log[-1][0] == "exchange"


def test_routing_weights_that_nothing_reads(four):
    four.run(unread_weights, 2, None)


@on_each
def experts_alone(ep, frozen):
    """Gradients that only one of the two kinds of weights wants."""

    def make(ep):
        made = moe(ep)
        for name in frozen:
            made.get_submodule(name).requires_grad_(False)
        return made

    check(ep, make, UNEVEN[: ep.ranks], x_grad=False)


@pytest.mark.parametrize("frozen", [("router",), ("experts",), ("router", "experts.gate_up")], ids=str)
def test_frozen_parameters(four, frozen):
    four.run(experts_alone, 2, None, frozen)


def in_sequences(layer, x):
    """Tokens of shape (sequences, length, H)."""
    y = layer(x.unflatten(0, (-1, 3)))
    assert y.dim() == 3
    return y


@on_each
def sequences(ep):
    check(ep, partial(moe, shared_intermediate=6), (6, 3, 0, 9)[: ep.ranks], call=in_sequences)


def test_tokens_in_sequences(four):
    four.run(sequences, 4, None)


@on_each
def strided(ep):
    """Neither tokens nor gradients are contiguous."""

    def call(layer, x):
        return layer(x.repeat_interleave(2, 1)[:, ::2]).T.contiguous().T

    check(ep, moe, UNEVEN[: ep.ranks], call=call)


def test_tensors_that_are_not_contiguous(four):
    four.run(strided, 2, None)


@on_each
def statistics(ep, options, tokens):
    """Losses and load are those of a rank's own tokens; their gradients too."""
    whole, local = pair(ep, partial(moe, **options))
    tokens = tokens[: ep.ranks]
    x_AH, dy_AH = randn(sum(tokens), H, seed=1), randn(sum(tokens), H, seed=2)

    def loss_of(stats, rank):
        return (1 + rank) * stats.load_balancing_loss + 0.5 * stats.z_loss

    x = x_AH.clone().requires_grad_()
    loss = (whole(x) * dy_AH).sum()
    of_ranks = [whole.router.stats(whole.router(part)) for part in x.split(tokens)]
    (loss + sum(loss_of(stats, rank) for rank, stats in enumerate(of_ranks))).backward()
    want = {"x": x.grad[bounds(ep, tokens)]} | of_ranks[ep.rank]._asdict()
    mine = x_AH[bounds(ep, tokens)].clone().requires_grad_()
    y, stats = local(mine, return_stats=True)
    ((y * dy_AH[bounds(ep, tokens)]).sum() + loss_of(stats, ep.rank)).backward()
    got = {"x": mine.grad} | stats._asdict() | summed_gradients(ep, whole, local)
    assert int(stats.load.sum()) == mine.shape[0] * K
    total = ep.sum_over_ranks(stats.load)
    theirs = dict(whole.named_parameters())
    want |= {name: shard_of(ep, theirs[name].grad, p) for name, p in local.named_parameters()}
    compared(got, want)
    assert torch.equal(total, whole(x_AH, return_stats=True)[1].load)


@both_sizes
@pytest.mark.parametrize(
    "options", [{}, {"score": "sigmoid"}, {"score": "topk_softmax", "shared_intermediate": 4}], ids=str
)
def test_statistics(four, size, options):
    four.run(statistics, size, None, options, UNEVEN)
    four.run(statistics, size, 9, options, EMPTY_RANK)


@on_each
def only_the_losses(ep):
    """The loss of rank 0 reads the statistics alone, and that of the others not: all exchange gradients alike."""
    whole, local = pair(ep, moe)
    tokens = UNEVEN[: ep.ranks]
    x_AH, dy_AH = randn(sum(tokens), H, seed=1), randn(sum(tokens), H, seed=2)
    here, alone = bounds(ep, tokens), tokens[0]
    (whole(x_AH)[alone:] * dy_AH[alone:]).sum().backward()
    stats = whole.router.stats(whole.router(x_AH[:alone]))
    (stats.load_balancing_loss + stats.z_loss).backward()
    y, stats = local(x_AH[here], return_stats=True)
    ((y * dy_AH[here]).sum() if ep.rank else stats.load_balancing_loss + stats.z_loss).backward()
    got, theirs = summed_gradients(ep, whole, local), dict(whole.named_parameters())
    compared(got, {name: shard_of(ep, theirs[name].grad, t) for name, t in got.items()})


def test_a_loss_of_the_statistics_alone(four):
    four.run(only_the_losses, 2, None)


class Model(nn.Module):
    """Layers one after the other, and two beside each other."""

    def __init__(self, ep, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(moe(ep, shared_intermediate=4 if i == 1 else None) for i in range(layers))
        self.beside = moe(ep, bias=True, top_k=3)

    def forward(self, x):
        for made in self.layers:
            x = x + torch.tanh(made(x))
        return self.layers[0](x) + self.beside(x)  # the first layer again


@on_each
def several_layers(ep, tokens):
    check(ep, Model, tokens[: ep.ranks])


def in_one_chain(ep):
    """The ops of two layers in one Sequential."""
    here = E if ep is None else E // ep.ranks
    ops = []
    for _ in range(2):
        ops += [
            fm.Router(H, E, K), fm.Dispatch(E, expert_parallel=ep), fm.GroupedLinear(here, H, 2 * I), fm.SwiGLU(),
            fm.Scale("probs"), fm.GroupedLinear(here, I, H), fm.Combine(None, expert_parallel=ep),
        ]  # fmt: skip
    return fm.Sequential(*ops)


@on_each
def two_layers_in_one_chain(ep, tokens):
    check(ep, in_one_chain, tokens[: ep.ranks])


@pytest.mark.parametrize(("size", "max_tokens"), [(2, None), (4, 9), pytest.param(4, None, marks=slow)])
@pytest.mark.parametrize("tokens", [UNEVEN, EMPTY_RANK], ids=str)
def test_several_layers(four, size, max_tokens, tokens):
    four.run(several_layers, size, max_tokens, tokens)
    four.run(two_layers_in_one_chain, size, max_tokens, tokens)


@on_each
def poisoned(ep, make, tokens, **options):
    with engine(ep, Poisoned):
        check(ep, make, tokens[: ep.ranks], **options)


@on_each
def without_unwanted_rows(ep, make, tokens, **options):
    with engine(ep, Selective) as used:
        check(ep, make, tokens[: ep.ranks], **options)
    return used.unwanted


@both_sizes
def test_rows_that_a_rank_does_not_want_are_not_read(four, size):
    for make in (moe, partial(moe, bias=True), partial(moe, score="sigmoid", shared_intermediate=4)):
        for tokens, most in ((UNEVEN, 12), (EMPTY_RANK, None)):
            counts = four.run(without_unwanted_rows, size, most, make, tokens)[:size]
            assert min(counts) > 0


@on_each
def poisoned_ops(ep, tokens, weights, hooked):
    def make(ep):
        made = experts(ep, weights)
        for place in hooked:
            made[place].register_forward_hook(lambda module, given, out: None)
        return made

    with engine(ep, Poisoned):
        check(ep, make, tokens[: ep.ranks], inputs=routes(tokens[: ep.ranks], True))


@both_sizes
def test_padding_rows_may_hold_anything(four, size):
    for make in (moe, partial(moe, bias=True), partial(moe, score="sigmoid", shared_intermediate=4)):
        four.run(poisoned, size, 12, make, UNEVEN)
        four.run(poisoned, size, None, make, EMPTY_RANK)
    for weights in (None, "probs"):
        for hooked in ((), (0,), (-1,), (1, 2)):
            four.run(poisoned_ops, size, 12, UNEVEN, weights, hooked)


@on_each
def nan_in_a_token(ep):
    """NaN stays in its token: other tokens of its rank and of other ranks do not see it."""
    whole, local = pair(ep, moe)
    tokens = UNEVEN[: ep.ranks]
    x_AH = randn(sum(tokens), H, seed=1)
    bad = 2
    x_AH[bad] = float("nan")
    want, got = whole(x_AH)[bounds(ep, tokens)], local(x_AH[bounds(ep, tokens)])
    compared({"y": got}, {"y": want}, equal_nan=True)
    assert got.isnan().any(1).sum() == (ep.rank == 0)


def test_nan_stays_in_its_token(four):
    four.run(nan_in_a_token, 2, None)


@on_each
def checkpointed(ep, reentrant, make, tokens):
    call = lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)  # noqa: E731
    with engine(ep, Recording) as recorded:
        check(ep, make, tokens[: ep.ranks], call=call)
    return recorded.log


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("size", "max_tokens"), [(2, None), (4, 9), *[pytest.param(*c, marks=slow) for c in [(2, 9), (4, None)]]]
)
def test_activation_checkpointing(four, size, reentrant, max_tokens):
    for make in (moe, partial(Model, layers=2)):
        logs = four.run(checkpointed, size, max_tokens, reentrant, make, EMPTY_RANK)
        assert all(log == logs[0] for log in logs[:size])
        gathers = [entry[0] for entry in logs[0]].count("gather")
        assert gathers % 3 == 0  # tokens, tokens again, gradients
        assert gathers > 0


@on_each
def retained(ep):
    def call(layer, x):
        y = layer(x)
        y.sum().backward(retain_graph=True)
        return y

    check(ep, moe, UNEVEN[: ep.ranks], call=call)


def test_two_backward_passes_of_one_call(four):
    four.run(retained, 2, None)


@on_each
def autocast(ep):
    def call(layer, x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).float()

    whole, local = pair(ep, moe, torch.float32)
    got, want = outcomes(ep, whole, local, UNEVEN[: ep.ranks], call=call, dtype=torch.float32)
    for name, theirs in want.items():
        assert (got[name] - theirs).norm() <= 0.02 * theirs.norm(), name


def test_autocast(four):
    four.run(autocast, 2, None)
    four.run(autocast, 4, 9)


# ---- other features -------------------------------------------------------------------------------------------------


@on_each
def second_derivatives(ep):
    layer, x = moe(ep).double(), randn(3, H, seed=1).requires_grad_()
    (first,) = torch.autograd.grad(layer(x).sum(), x)
    assert first.abs().sum() > 0
    with pytest.raises(
        RuntimeError, match=r"dispatch.gather exchanges tensors with other ranks, which autograd cannot"
    ):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_second_derivatives_are_refused(four):
    four.run(second_derivatives, 2, None)


@on_each
def errors_in_bf16(ep):
    """The error of each tensor against fp64: of the ranks, and of one process."""
    tokens = UNEVEN[: ep.ranks]
    whole, local = pair(ep, partial(moe, shared_intermediate=4), torch.bfloat16)
    exact, _ = pair(ep, partial(moe, shared_intermediate=4))
    exact.load_state_dict(whole.state_dict())
    got, want = outcomes(ep, whole, local, tokens, dtype=torch.bfloat16)
    x_AH = randn(sum(tokens), H, seed=1, dtype=torch.bfloat16).double()
    x, dy_AH = x_AH.requires_grad_(), randn(sum(tokens), H, seed=2, dtype=torch.bfloat16).double()
    y = exact(x)
    (y * dy_AH).sum().backward()
    here, theirs = bounds(ep, tokens), dict(exact.named_parameters())
    truth = {"y": y.detach()[here], "x": x.grad[here]}
    truth |= {name: shard_of(ep, theirs[name].grad, p) for name, p in local.named_parameters()}
    return {
        name: [((t[name].double() - true).norm() / true.norm()).item() for t in (got, want)]
        for name, true in truth.items()
    }


@both_sizes
def test_bf16_is_as_exact_as_one_process(four, size):
    """Another rounding for each rank's part of a sum, and for each rank's part of a replicated parameter's gradient."""
    for of_rank in four.run(errors_in_bf16, size, None)[:size]:
        for name, (ranks, one) in of_rank.items():
            assert 0 < one < 0.02, name
            assert ranks < 1.5 * one + 2**-8, name


@on_each
def trained(ep, make, steps=6):
    """Train with SGD and loss-free balancing; return the bias of each router, and compare with one process."""
    whole, local = pair(ep, make)
    before = copy.deepcopy([routed.router.balance_bias for routed in local])
    optimizers = [torch.optim.SGD(made.parameters(), lr=1e-3) for made in (whole, local)]
    for step in range(steps):
        tokens = tuple((3 * step + 5 * rank) % 11 for rank in range(ep.ranks))
        x_AH = randn(sum(tokens), H, seed=step)
        for made, optimizer, rows in zip(
            (whole, local), optimizers, (slice(0, sum(tokens)), bounds(ep, tokens)), strict=True
        ):
            x, loads = x_AH[rows], []
            for routed in made:
                y, stats = routed(x, return_stats=True)
                loads.append(stats.load)
                x = x + torch.tanh(y)
            (x - x_AH[rows].roll(1, -1)).square().sum().backward()
            if made is local:
                theirs = dict(whole.named_parameters())
                for name, p in local.named_parameters():
                    if p.shape == theirs[name].shape:
                        p.grad = ep.sum_over_ranks(p.grad)
                loads = [ep.sum_over_ranks(load) for load in loads]
            optimizer.step()
            optimizer.zero_grad()
            for routed, load in zip(made, loads, strict=True):
                routed.router.update_bias(load, rate=0.05)
    theirs = whole.state_dict()
    compared(local.state_dict(), {name: shard_of(ep, theirs[name], t) for name, t in local.state_dict().items()})
    return [routed.router.balance_bias for routed in local], before


def two_layers(ep):
    return nn.ModuleList([moe(ep, score="sigmoid"), moe(ep, balance_bias=True, shared_intermediate=4)])


@pytest.mark.parametrize(("size", "max_tokens"), [(2, None), (4, 11)])
def test_training_with_loss_free_balancing(four, size, max_tokens):
    (first, before), *others = four.run(trained, size, max_tokens, two_layers)[:size]
    for other, _ in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    assert all((after - bias).abs().max() >= 0.05 for after, bias in zip(first, before, strict=True))


@on_each
def copied(ep):
    def make(ep):
        made = moe(ep)
        made(randn(2, H, seed=0).float())  # it has plans
        again = copy.deepcopy(made)
        assert again.expert_parallel is made.expert_parallel
        return again

    check(ep, make, UNEVEN[: ep.ranks])


def test_a_copy_of_a_layer(four):
    four.run(copied, 2, None)
    four.run(copied, 4, 9)


def adapted(ep):
    made = moe(ep, shared_intermediate=4)
    made.requires_grad_(False)
    made.experts.gate_up = fm.GroupedLoRA(made.experts.gate_up, rank=4, alpha=8)
    made.experts.down = fm.GroupedLoRA(made.experts.down, rank=4, alpha=8)
    return made


@on_each
def lora(ep, tokens, x_grad):
    local = check(ep, adapted, tokens[: ep.ranks], x_grad=x_grad)
    trained = {name for name, p in local.named_parameters() if p.grad is not None}
    assert len(trained) == 4
    assert all("lora" in name for name in trained)


@both_sizes
@pytest.mark.parametrize("x_grad", [True, False])
def test_lora(four, size, x_grad):
    four.run(lora, size, None, UNEVEN, x_grad)
    four.run(lora, size, 9, EMPTY_RANK, x_grad)


# ---- recipes --------------------------------------------------------------------------------------------------------


RECIPES = {
    "fp8_block": recipes.FP8Block(),
    "mxfp8": recipes.MXFP8(),
    "fp8_row": recipes.FP8Row(),
    "fp8_tensor": recipes.FP8Tensor(),
    "nvfp4": recipes.NVFP4(stochastic_rounding=False),
}


@on_each
def quantized(ep, recipe, dtype, weights, sentinels):
    """The experts alone, with given routes: each expert sees the same rows in the same order as in one process."""
    tokens = UNEVEN[: ep.ranks]
    given = routes(tokens, sentinels)
    whole, local = pair(ep, partial(experts, weights=weights), dtype)
    with fm.recipe(recipe):
        got, want = outcomes(ep, whole, local, tokens, inputs=given, dtype=dtype)
    with fm.recipe("bf16"):
        plain, _ = outcomes(ep, *pair(ep, partial(experts, weights=weights), dtype), tokens, inputs=given, dtype=dtype)
    for name, t in want.items():
        if name in ("y", "x"):
            error = 2**-7 if dtype is torch.bfloat16 else 1e-6  # of sums over a token's experts
            assert (got[name] - t).norm() <= error * t.norm(), name
        else:
            assert torch.equal(got[name], t), name
            assert not name.endswith(".weight") or not torch.equal(plain[name], t), f"{name}: the recipe has no effect"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_quantize_what_one_process_quantizes(four, size, recipe, dtype):
    four.run(quantized, size, None, RECIPES[recipe], dtype, None, True)
    four.run(quantized, size, 9, RECIPES[recipe], dtype, "probs", False)


@on_each
def times_quantized(ep):
    """How often weights are quantized: in micro-batches with tokens of their own, and after another collective."""
    local = moe(ep)
    counts = []
    with fm.recipe("mxfp8"), Counted() as quantized:
        for step in range(4):
            if step == 3:
                dist.all_reduce(torch.ones(1), group=ep.group)
            x = torch.randn(3 + step + ep.rank, H, requires_grad=True)
            y, stats = checkpoint(local, x, True, use_reentrant=False)
            (y.sum() + stats.z_loss).backward()
            ep.sum_over_ranks(stats.load)
            counts.append(quantized.count)
    return counts


@pytest.mark.parametrize("max_tokens", [None, 12])
def test_exchanges_leave_weights_quantized(four, max_tokens):
    """Other collectives may write to a weight, and have it quantized again."""
    for size in (2, 4):
        for counts in four.run(times_quantized, size, max_tokens)[:size]:
            once = counts[0]
            assert once > 0
            assert counts == [once, once, once, 2 * once]


@on_each
def layer_under_a_recipe(ep, recipe, tokens):
    """Rows of a shared expert are quantized among the tokens of a rank: only its own weights see this."""
    with fm.recipe(recipe):
        whole, local = pair(ep, partial(moe, shared_intermediate=32), torch.float32)
        got, want = outcomes(ep, whole, local, tokens[: ep.ranks], dtype=torch.float32)
    for name, t in want.items():
        bound = 0.1 if name.startswith("shared") else 1e-3  # a router's weight rounds otherwise, and with it some codes
        assert (got[name] - t).norm() <= bound * t.norm(), name


@both_sizes
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_a_layer_under_a_recipe(four, size, recipe):
    four.run(layer_under_a_recipe, size, None, recipe, UNEVEN)
    four.run(layer_under_a_recipe, size, 9, recipe, EMPTY_RANK)


@on_each
def delayed(ep, recomputed):
    """The scales of each expert are those of one process in every step, and so is the state that is saved."""
    whole, local = pair(ep, partial(experts, weights=None), torch.float32)

    def call(layer, x, **given):
        if not recomputed:
            return layer(x, **given)
        return checkpoint(layer, x, use_reentrant=False, **given)

    with fm.recipe(recipes.FP8Tensor(delayed=Delayed(history=3))):
        for step in range(4):
            tokens = tuple((step + 2) * (rank + 1) % 7 for rank in range(ep.ranks))
            got, want = outcomes(
                ep, whole, local, tokens, inputs=routes(tokens, False), dtype=torch.float32, call=call, zeros=["x", "y"]
            )
            for name, t in want.items():
                if name not in ("y", "x"):
                    assert torch.equal(got[name], t), f"step {step}: {name}"
    mine, theirs = local.state_dict(), whole.state_dict()
    assert sum("amax_history" in name for name in mine) >= 8
    assert mine.keys() == theirs.keys()
    for name, t in theirs.items():
        axis = -1 if "amax_history" in name else 0  # of the experts
        assert torch.equal(mine[name], t.tensor_split(ep.ranks, axis)[ep.rank]), name


@pytest.mark.parametrize("recomputed", [False, True])
def test_delayed_scaling(four, recomputed):
    four.run(delayed, 2, None, recomputed)
    four.run(delayed, 4, 9, recomputed)


# ---- the order of collectives ---------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Layers of several kinds, some of them recomputed, some without gradients."""

    def __init__(self, ep):
        super().__init__()
        options = [
            {}, {"bias": True}, {"score": "sigmoid", "top_k": 3}, {"shared_intermediate": 4}, {"activation": "geglu"},
            {"score": "topk_softmax"},
        ]  # fmt: skip
        self.layers = nn.ModuleList(moe(ep, **options[i % len(options)]) for i in range(6))
        self.hooked = moe(ep)
        self.hooked.experts.dispatch.register_forward_hook(lambda module, given, out: None)

    def forward(self, x):
        losses = 0
        for i, made in enumerate(self.layers):
            if i % 3 == 0:
                y = checkpoint(made, x, use_reentrant=bool(i % 6))
            elif i % 3 == 1:
                y, stats = made(x, return_stats=True)
                losses = losses + stats.load_balancing_loss
            else:
                y = made(x)
            x = x + torch.tanh(y)
        with torch.no_grad():
            kept = self.layers[0](x)
        # branches: autograd decides which of them runs backward first
        return self.hooked(x) + self.layers[1](x) * self.layers[2](kept), losses


@on_each
def log_of_exchanges(ep, seed, steps):
    """Which exchanges this rank began, with the sizes that travel, over steps with numbers of tokens of its own."""
    torch.manual_seed(0)
    model = Mixed(ep)
    generator = torch.Generator().manual_seed(100 * seed + ep.rank)
    agreed = ep.most_tokens
    with engine(ep, Recording) as recorded:

        def most_tokens(tokens):
            recorded.log.append("agree")
            return agreed(tokens)

        ep.most_tokens = most_tokens
        try:
            for step in range(steps):
                # plans differ with the power of two of T
                tokens = 2 ** int(torch.randint(0, 8, (), generator=generator)) - 1
                x = torch.randn(tokens, H, generator=generator).requires_grad_()
                recorded.log.append(f"step {step}")
                y, losses = model(x)
                recorded.log.append("backward")
                (y.square().sum() + losses).backward()
        finally:
            del ep.most_tokens
    return recorded.log


@pytest.mark.parametrize(("size", "max_tokens"), [(2, 127), (4, None)])
@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=slow)])
def test_all_ranks_exchange_in_the_same_order(four, size, max_tokens, steps):
    first, *others = four.run(log_of_exchanges, size, max_tokens, steps, steps)[:size]
    assert all(other == first for other in others)
    assert len([entry for entry in first if entry[0] == "exchange"]) >= steps * 2 * 7
    assert ("agree" in first) is (max_tokens is None)
