"""Router against the published formulas, token by token, and in chains against its own formulas under autograd."""

import math

import pytest
import torch
from kit.compare import assert_accurate, assert_bitwise, assert_close, assert_same_function, pairwise, with_gradients
from kit.layers import drawn, leaf
from kit.rounding import ROUNDOFF, error_bound
from torch import nn

import fusedmoe as fm
from fusedmoe.layers.moe import Routing

T, HIDDEN, WIDE, E, K = 20, 6, 5, 8, 3
SCORES = ["softmax", "topk_softmax", "sigmoid"]
every_score = pytest.mark.parametrize("score", SCORES)
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def router(dtype=F32, **options):
    return drawn(fm.Router(HIDDEN, E, dtype=dtype, **{"top_k": 2} | options), 1.0)


def best(values, count):
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def best_groups(scores, groups, kept, rank):
    size = len(scores) // groups
    chosen = best([rank(scores[g * size : (g + 1) * size]) for g in range(groups)], kept)
    return [i for i in range(len(scores)) if i // size in chosen]


def mixtral(logits, k, renormalize=True):
    """Softmax over all experts in fp32, the k best of them, their weights made to sum to one: Mixtral, and Qwen3-MoE
    with norm_topk_prob.
    """
    top = max(logits)
    exp = [math.exp(z - top) for z in logits]
    probs = [v / sum(exp) for v in exp]
    ids = best(probs, k)
    total = sum(probs[i] for i in ids) if renormalize else 1.0
    return {i: probs[i] / total for i in ids}


def gpt_oss(logits, k):
    """The k best logits, softmax over those."""
    ids = best(logits, k)
    exp = {i: math.exp(logits[i] - logits[ids[0]]) for i in ids}
    return {i: v / sum(exp.values()) for i, v in exp.items()}


def deepseek_v3(logits, k, bias, groups, kept, scale, renormalize=True):
    """Sigmoid scores; groups ranked by the sum of their two best corrected scores, experts by their corrected score;
    weights are the scores without the correction, made to sum to one, times routed_scaling_factor.
    """
    scores = [1 / (1 + math.exp(-z)) for z in logits]
    corrected = [s + b for s, b in zip(scores, bias, strict=True)]
    allowed = best_groups(corrected, groups, kept, lambda part: sum(sorted(part)[-2:]))
    ids = [allowed[i] for i in best([corrected[i] for i in allowed], k)]
    total = sum(scores[i] for i in ids) if renormalize else 1.0
    return {i: scale * scores[i] / total for i in ids}


def deepseek_v2(logits, k, groups, kept, scale):
    """Softmax scores; groups ranked by their best one (group_limited_greedy); not renormalised."""
    probs = mixtral(logits, len(logits), renormalize=False)
    allowed = best_groups([probs[i] for i in range(len(logits))], groups, kept, max)
    return {i: scale * probs[i] for i in sorted(allowed, key=lambda i: -probs[i])[:k]}


def logits_of(r, x):
    logits = x.double() @ r.weight.detach().double().T
    return logits if r.bias is None else logits + r.bias.detach().double()


def assert_routes_like(r, x, formula):
    routing = r(x)
    assert routing.expert_index.shape == routing.expert_weight.shape == (len(x), r.top_k)
    assert routing.expert_index.dtype is torch.int64
    for t, logits in enumerate(logits_of(r, x).tolist()):
        expected, ids = formula(logits), routing.expert_index[t].tolist()
        assert len(set(ids)) == r.top_k
        assert set(ids) == set(expected)
        assert routing.expert_weight[t].tolist() == pytest.approx([expected[i] for i in ids], rel=1e-5)
    return routing


@pytest.mark.parametrize(("renormalize", "k", "bias"), pairwise([True, False], [1, 2, E], [False, True]))
def test_softmax_is_mixtrals_and_qwen3s(renormalize, k, bias):
    r = router(top_k=k, renormalize=renormalize, bias=bias)
    routing = assert_routes_like(r, torch.randn(T, HIDDEN), lambda z: mixtral(z, k, renormalize))
    torch.testing.assert_close(routing.probs, torch.softmax(routing.logits, dim=-1))


@pytest.mark.parametrize("k", [1, 3])
def test_topk_softmax_is_gpt_oss(k):
    r = router(top_k=k, score="topk_softmax", bias=True)
    assert_routes_like(r, torch.randn(T, HIDDEN), lambda z: gpt_oss(z, k))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (2, 1), (8, 3)])
def test_sigmoid_is_deepseek_v3s(groups, kept, renormalize):
    r = router(top_k=3, score="sigmoid", scale=2.5, num_groups=groups, top_groups=kept, renormalize=renormalize)
    x = torch.randn(T, HIDDEN)
    plain = r(x).expert_index.sort().values
    r.balance_bias.copy_(torch.randn(E) / 2)
    bias = r.balance_bias.tolist()
    routing = assert_routes_like(r, x, lambda z: deepseek_v3(z, 3, bias, groups, kept, 2.5, renormalize))
    assert not torch.equal(routing.expert_index.sort().values, plain), "the correction chose nothing"
    scores = torch.sigmoid(routing.logits)
    torch.testing.assert_close(routing.probs, scores / scores.sum(1, keepdim=True))


@pytest.mark.parametrize(("groups", "kept"), [(4, 2), (2, 1)])
def test_groups_with_softmax_are_deepseek_v2s(groups, kept):
    r = router(top_k=3, renormalize=False, scale=16.0, num_groups=groups, top_groups=kept)
    assert_routes_like(r, torch.randn(T, HIDDEN), lambda z: deepseek_v2(z, 3, groups, kept, 16.0))


def test_corrections():
    # a corrected score below zero still counts, where masking the others with zeros would prefer them
    r = router(score="sigmoid", num_groups=2, top_groups=1)
    r.balance_bias.copy_(torch.tensor([-3.0] * 4 + [-9.0] * 4))
    assert (r(torch.randn(T, HIDDEN)).expert_index < 4).all()
    # a softmax choice may be corrected too
    r = router(balance_bias=True)
    r.balance_bias[5] = 10
    routing = r(torch.randn(T, HIDDEN))
    assert (routing.expert_index == 5).any(1).all()
    probs = torch.softmax(routing.logits, dim=-1).gather(1, routing.expert_index)
    torch.testing.assert_close(routing.expert_weight, probs / probs.sum(1, keepdim=True))
    # it gets no gradient
    assert not r.balance_bias.requires_grad
    assert r.balance_bias.dtype is F32
    assert "balance_bias" in r.state_dict()
    routing.expert_weight.square().sum().backward()
    assert r.balance_bias.grad is None
    assert r.weight.grad.any()


@every_score
@pytest.mark.parametrize("autocast", [False, True])
def test_logits_of_bf16_tokens_are_fp32(score, autocast):
    r, x = router(BF16, score=score, bias=True), torch.randn(T, HIDDEN).bfloat16()
    with torch.autocast("cpu", BF16, enabled=autocast):
        routing = r(x)
    assert {t.dtype for t in routing[1:]} == {F32}
    torch.testing.assert_close(routing.logits.double(), logits_of(r, x), rtol=1e-5, atol=1e-5)
    # bf16 logits would have been further away than that
    assert (routing.logits.bfloat16() - routing.logits).abs().max() > 1e-3
    routing.expert_weight.square().sum().backward()
    assert r.weight.grad.dtype is BF16


@every_score
def test_extreme_logits_stay_finite(score):
    r = router(score=score)
    with torch.no_grad():
        r.weight.mul_(1e4)
    routing = r(torch.randn(T, HIDDEN))
    assert all(t.isfinite().all() for t in routing)
    routing.expert_weight.sum().backward()
    assert r.weight.grad.isfinite().all()


# --- losses and load -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("default", [F32, BF16], ids=str)  # in which the division of two integers keeps 8 bits
@every_score
def test_losses_are_those_of_the_papers(score, default):
    r, x = router(F64, score=score, top_k=3), torch.randn(T, HIDDEN, dtype=F64)
    routing = r(x)
    torch.set_default_dtype(default)
    try:
        stats = r.stats(routing)
    finally:
        torch.set_default_dtype(F32)
    counts = [0] * E
    for e in routing.expert_index.flatten().tolist():
        counts[e] += 1
    logits = logits_of(r, x)
    scores = torch.sigmoid(logits) if score == "sigmoid" else torch.exp(logits)
    mean_prob = (scores / scores.sum(1, keepdim=True)).mean(0).tolist()
    balance = E * sum(c / (T * 3) * p for c, p in zip(counts, mean_prob, strict=True))
    z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / T
    assert stats.load.tolist() == counts
    assert stats.load.dtype is torch.int64
    for loss, want in ((stats.load_balancing_loss, balance), (stats.z_loss, z)):
        assert loss.item() == pytest.approx(want, rel=1e-12)
        assert loss.dtype is F64
        assert loss.dim() == 0


def test_update_bias_takes_steps_of_the_sign():
    r = router(score="sigmoid")
    r.update_bias(torch.tensor([0, 4, 8, 4, 4, 4, 4, 4]), rate=0.25)
    assert r.balance_bias.tolist() == [0.25, 0, -0.25, 0, 0, 0, 0, 0]


# --- in a chain ----------------------------------------------------------------------------------------------------

OPTIONS = {
    "softmax": {},
    "not renormalised": {"renormalize": False},
    "topk_softmax": {"score": "topk_softmax"},
    "sigmoid": {"score": "sigmoid"},
    "sigmoid, not renormalised": {"score": "sigmoid", "renormalize": False},
    "groups": {"num_groups": 4, "top_groups": 2},
    "deepseek": {"score": "sigmoid", "num_groups": 4, "top_groups": 2},
    "corrected": {"balance_bias": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


class Observe(fm.Op):
    """Passes the rows on, and adds a number made of the router's other values."""

    def __init__(self, *names):
        super().__init__()
        self.runtime_inputs = names

    def compute(self, x, *values):
        total = sum((value * torch.linspace(1, 2, value.numel()).view_as(value).to(value)).sum() for value in values)
        return x + total.to(x.dtype)


def router_of(dtype=F64, **options):
    r = router(dtype, top_k=K, scale=1.7, bias=True, **options)
    if r.balance_bias is not None:
        r.balance_bias.uniform_(-0.2, 0.2)
    return r


def experts_of(dtype=F64):
    return fm.Dispatch(), fm.GroupedLinear(E, HIDDEN, WIDE, dtype=dtype), fm.Combine()


def routing_of(router, x):
    """The result of the router without a chain."""
    with torch.autocast("cpu", enabled=False):
        index, weight, logits = router.compute(x, router.weight, router.bias, router.balance_bias)
        return Routing(index, weight, logits, router._probs(router.scores(logits)))


def alone(router, rest, x):
    """The same layer with the router without a chain."""
    routing, rest = routing_of(router, x), fm.Sequential(*rest)
    values = {"expert_index": routing.expert_index, "expert_weight": routing.expert_weight}
    values |= {"probs_sum": routing.probs.sum(0), "z_sum": routing.logits.logsumexp(1).square().sum()}
    values["router_logits"] = routing.logits
    return rest(x, **{name: values[name] for name in rest.runtime_inputs})


OBSERVED = [(), ("router_logits",), ("probs_sum",), ("z_sum",), ("router_logits", "probs_sum", "z_sum")]


@pytest.mark.parametrize("hooked", [False, True])
@every_option
def test_values_and_gradients_are_those_of_autograd(options, hooked):
    router, seen, x = router_of(**options), [], leaf(T, HIDDEN)
    if hooked:  # it is called as a module
        router.register_forward_hook(lambda module, args, routing: seen.append(type(routing)))
    for observed in OBSERVED:
        for rest in [(*experts_of(), Observe(*observed)), (Observe(*observed),)] if observed else [experts_of()]:
            chain = fm.Sequential(router, *rest)
            y, expected = chain(x), alone(router, rest, x)
            assert torch.equal(y, expected)
            assert_same_function(y, expected, (x, *chain.parameters()), rtol=1e-12)
    assert set(seen) == ({Routing} if hooked else set())


def results_and_gradients(route, router, x, read):
    results = route(x)
    torch.manual_seed(2)
    losses = [(getattr(results, name) * torch.randn_like(getattr(results, name))).sum() for name in read]
    wanted = [t for t in (x, *router.parameters()) if t.requires_grad]
    return results, torch.autograd.grad(sum(losses), wanted)


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in OPTIONS), ("deepseek", True)])
def test_called_alone(name, compiled):
    router, x = router_of(**OPTIONS[name]), leaf(T, HIDDEN)
    route = torch.compile(router, fullgraph=True, backend="aot_eager") if compiled else router
    for read in (("expert_weight",), ("logits",), ("probs",), ("expert_weight", "logits", "probs")):
        results, grads = results_and_gradients(route, router, x, read)
        expected, expected_grads = results_and_gradients(lambda x: routing_of(router, x), router, x, read)
        assert type(results) is Routing
        assert_bitwise(results, expected)
        assert [t.requires_grad for t in results] == [t.requires_grad for t in expected]
        assert_close(grads, expected_grads, rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "frozen", "autocast"), pairwise([F32, BF16], ["nothing", "parameters", "x"], [False, True]), ids=str
)
def test_gradients_alone_have_the_dtypes_of_their_tensors(dtype, frozen, autocast):
    router = router_of(F32).requires_grad_(frozen != "parameters")
    x = torch.randn(T, HIDDEN).to(dtype).requires_grad_(frozen != "x")
    with torch.autocast("cpu", BF16, enabled=autocast):
        _, grads = results_and_gradients(router, router, x, ("expert_weight", "probs"))
    _, expected = results_and_gradients(lambda x: routing_of(router, x), router, x, ("expert_weight", "probs"))
    assert len(grads) == {"nothing": 3, "parameters": 1, "x": 2}[frozen]
    assert [t.dtype for t in grads] == [t.dtype for t in expected]
    bound = 4 * ROUNDOFF[dtype] if dtype is BF16 else 2 * error_bound(F32, HIDDEN, T, roundings=0)  # of both
    assert_accurate(grads, [t.double() for t in expected], bound)


@every_score
@pytest.mark.parametrize("in_a_chain", [False, True])
def test_second_derivatives(score, in_a_chain):
    router, x = router_of(score=score), leaf(3, HIDDEN)
    chain = fm.Sequential(router, *experts_of(), Observe("router_logits", "probs_sum", "z_sum"))

    def run(x, weight, bias):
        if not in_a_chain:
            return torch.func.functional_call(router, {"weight": weight, "bias": bias}, (x,))[1:]
        return torch.func.functional_call(chain, {"0.weight": weight, "0.bias": bias}, (x,))

    assert torch.autograd.gradgradcheck(run, (x, router.weight, router.bias), fast_mode=True)


@pytest.mark.parametrize("frozen", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_frozen_parts(frozen):
    router, experts = router_of(), experts_of()
    router.requires_grad_(not frozen[0])
    experts[1].requires_grad_(not frozen[1])
    x, chain = leaf(T, HIDDEN).requires_grad_(not frozen[2]), fm.Sequential(router, *experts)
    backward = [op for step in chain.explain(x).plans[0].steps if step.direction == "backward" for op in step.ops]
    assert ("0.RouterWeightGrad" in backward) == (not frozen[0])
    assert ("0.DRouter" in backward) == (not frozen[2])
    assert ("0.RouterLogitsGrad" in backward) == (not (frozen[0] and frozen[2]))
    wanted = [t for t in (x, router.weight, router.bias, experts[1].weight) if t.requires_grad]
    if wanted:
        assert_same_function(chain(x), alone(router, experts, x), wanted, rtol=1e-12)


def test_rows_that_use_no_weight_still_reach_the_tokens():
    router, x = router_of(), leaf(T, HIDDEN)
    y, dx = with_gradients(fm.Sequential(router, fm.Dispatch(E), fm.Combine(None))(x), [x])
    assert_close([y, dx], [K * x, torch.full_like(x, K)])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_autocast_does_not_round_what_the_router_reads(dtype):
    router, experts, x = router_of(F32), experts_of(F32), leaf(T, HIDDEN, dtype=dtype)
    chain = fm.Sequential(router, *experts)
    with torch.autocast("cpu", BF16):
        expected = alone(router, experts, x)
        y = chain(x)
    assert_bitwise(y, expected)
    assert y.dtype is BF16
    wanted, dy = (x, *chain.parameters()), torch.randn_like(y)
    found = with_gradients(y, wanted, dy)
    assert [t.dtype for t in found[1:]] == [t.dtype for t in wanted]
    assert_accurate(found, [t.double() for t in with_gradients(expected, wanted, dy)], 2 * ROUNDOFF[BF16])


def test_a_module_before_the_router_gives_fp32_rows_under_autocast():
    norm, chain, x = nn.LayerNorm(HIDDEN), fm.Sequential(router_of(F32), *experts_of(F32)), torch.randn(T, HIDDEN)
    with torch.autocast("cpu", BF16):
        found = fm.Sequential(norm, *chain)(x.bfloat16())
        assert torch.equal(found, alone(chain[0], chain[1:], norm(x.bfloat16())))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_no_tokens(score):
    chain, x = fm.Sequential(router_of(score=score), *experts_of(), Observe("z_sum")), leaf(0, HIDDEN)
    y, dx, dw = with_gradients(chain(x), [x, chain[0].weight])
    assert (y.shape, dx.shape) == ((0, WIDE), (0, HIDDEN))
    assert not dw.any()
    stats = chain[0].stats(chain[0](x))
    assert stats.load_balancing_loss.item() == stats.z_loss.item() == 0
    assert stats.load.tolist() == [0] * E


@every_option
def test_nan(options):
    router, x = router_of(F32, **options).requires_grad_(False), torch.randn(T, HIDDEN)

    def valid(routing):
        assert ((routing.expert_index >= 0) & (routing.expert_index < E)).all()
        assert all(len(set(ids)) == K for ids in routing.expert_index.tolist())
        return routing

    clean = router(x)
    poisoned, others = x.clone(), torch.arange(T) != 4
    poisoned[4, 0] = torch.nan
    routing = valid(router(poisoned))
    assert routing.expert_weight[4].isnan().all()
    assert torch.equal(routing.expert_index[others], clean.expert_index[others])
    assert torch.equal(routing.expert_weight[others], clean.expert_weight[others])
    # a logit of NaN ranks highest
    router.bias[5] = torch.nan
    routing = valid(router(x))
    assert routing.expert_weight.isnan().any(1).all()
    if router.score != "softmax":  # whose scores are then all NaN
        assert (routing.expert_index == 5).any(1).all()


def test_two_layers_in_one_sequential_and_refusals():
    first, second = (
        fm.Sequential(router_of(F32, score=score), fm.Dispatch(), fm.GroupedLinear(E, HIDDEN, HIDDEN), fm.Combine())
        for score in ("softmax", "sigmoid")
    )
    x, chain = torch.randn(T, HIDDEN), fm.Sequential(router_of(F32), *experts_of(F32))
    assert torch.equal(fm.Sequential(*first, *second)(x), second(first(x)))
    for call, word in [
        # groups of experts are something else
        (lambda: fm.Sequential(fm.Dispatch(), fm.Combine(), router_of(F32, num_groups=2))(x), "no grouped op"),
        (lambda: chain(torch.randn(T, 5)), r"0\.Router.*x: expected shape"),
        (lambda: chain(x, expert_index=torch.zeros(T, K, dtype=torch.int64)), r"'expert_index' .*0\.Router"),
    ]:
        with pytest.raises(fm.InputError, match=word):
            call()
