"""Router against the published formulas, token by token."""

import math

import pytest
import torch
from torch import nn

import fusedmoe as fm

T, HIDDEN, E = 20, 6, 8


def router(dtype=torch.float32, **options):
    options = {"top_k": 2} | options
    r = fm.Router(HIDDEN, E, dtype=dtype, **options)
    for parameter in r.parameters():
        nn.init.normal_(parameter)
    return r


def best(values, count):
    """Indices of the largest, in descending order."""
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def best_groups(scores, groups, kept, rank):
    size = len(scores) // groups
    parts = [scores[g * size : (g + 1) * size] for g in range(groups)]
    chosen = best([rank(p) for p in parts], kept)
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
        expected = formula(logits)
        ids = routing.expert_index[t].tolist()
        assert len(set(ids)) == r.top_k
        assert set(ids) == set(expected)
        weights = [expected[i] for i in ids]
        assert routing.expert_weight[t].tolist() == pytest.approx(weights, rel=1e-5)
    return routing


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("k", [1, 2, E])
@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_is_mixtrals_and_qwen3s(renormalize, k, bias):
    r = router(top_k=k, renormalize=renormalize, bias=bias)
    routing = assert_routes_like(r, torch.randn(T, HIDDEN), lambda z: mixtral(z, k, renormalize))
    torch.testing.assert_close(routing.probs.sum(1), torch.ones(T))
    torch.testing.assert_close(routing.probs, torch.softmax(routing.logits, dim=-1))


@pytest.mark.parametrize("k", [1, 3])
def test_topk_softmax_is_gpt_oss(k):
    r = router(top_k=k, score="topk_softmax", bias=True)
    routing = assert_routes_like(r, torch.randn(T, HIDDEN), lambda z: gpt_oss(z, k))
    torch.testing.assert_close(routing.expert_weight.sum(1), torch.ones(T))


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


def test_a_group_with_negative_scores_beats_one_that_was_left_out():
    # a corrected score below zero still counts, where masking the others with zeros would prefer them
    r = router(score="sigmoid", top_k=2, num_groups=2, top_groups=1)
    r.balance_bias.copy_(torch.tensor([-3.0] * 4 + [-9.0] * 4))
    assert (r(torch.randn(T, HIDDEN)).expert_index < 4).all()


def test_a_softmax_choice_may_be_corrected_too():
    r = router(balance_bias=True, top_k=2)
    r.balance_bias[5] = 10
    routing = r(torch.randn(T, HIDDEN))
    assert (routing.expert_index == 5).any(1).all()
    probs = torch.softmax(routing.logits, dim=-1).gather(1, routing.expert_index)
    torch.testing.assert_close(routing.expert_weight, probs / probs.sum(1, keepdim=True))


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_gradients_reach_tokens_and_weights(score):
    r = router(torch.float64, score=score, top_k=3, bias=True, scale=1.5)
    x = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)

    def run(x, weight, bias):
        routing = torch.func.functional_call(r, {"weight": weight, "bias": bias}, (x,))
        return routing.expert_weight, routing.probs, routing.logits

    assert torch.autograd.gradcheck(run, (x, r.weight, r.bias))


def test_the_correction_gets_no_gradient_and_gives_none():
    r = router(score="sigmoid")
    assert not r.balance_bias.requires_grad
    assert r.balance_bias.dtype is torch.float32
    assert "balance_bias" in r.state_dict()
    r(torch.randn(T, HIDDEN)).expert_weight.square().sum().backward()
    assert r.balance_bias.grad is None
    assert r.weight.grad.any()


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("autocast", [False, True])
def test_logits_of_bf16_tokens_are_fp32(score, autocast):
    r = router(torch.bfloat16, score=score, bias=True)
    x = torch.randn(T, HIDDEN).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routing = r(x)
    assert {t.dtype for t in routing[1:]} == {torch.float32}
    torch.testing.assert_close(routing.logits.double(), logits_of(r, x), rtol=1e-5, atol=1e-5)
    # what bf16 logits would have been is further away than that
    assert (routing.logits.bfloat16() - routing.logits).abs().max() > 1e-3
    routing.expert_weight.square().sum().backward()
    assert r.weight.grad.dtype is torch.bfloat16


def test_fp32_weights_are_not_rounded_by_autocast():
    r = router(bias=True)
    x = torch.randn(T, HIDDEN)
    expected = r(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = r(x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_fp64_tokens_stay_fp64():
    routing = router(torch.float64)(torch.randn(T, HIDDEN, dtype=torch.float64))
    assert {t.dtype for t in routing[1:]} == {torch.float64}


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_extreme_logits_stay_finite(score):
    r = router(score=score)
    with torch.no_grad():
        r.weight.mul_(1e4)
    routing = r(torch.randn(T, HIDDEN))
    assert all(t.isfinite().all() for t in routing)
    routing.expert_weight.sum().backward()
    assert r.weight.grad.isfinite().all()


# --- losses and load


def routing_of(index, logits):
    probs = torch.softmax(logits, dim=-1)
    return fm.layers.moe.Routing(index, probs.gather(1, index.clamp(0, logits.shape[1] - 1)), logits, probs)


def even_routing():
    # token t goes to experts t and t + 1
    index = torch.tensor([[t % E, (t + 1) % E] for t in range(2 * E)])
    return routing_of(index, torch.full((2 * E, E), 0.5))


def test_load_balancing_loss_is_one_where_all_is_even_and_e_where_one_has_all():
    stats = router().stats(even_routing())
    assert stats.load_balancing_loss.item() == pytest.approx(1.0, rel=1e-6)
    assert stats.load.tolist() == [4] * E
    collapsed = torch.full((T, E), -1e4)
    collapsed[:, 3] = 1e4
    stats = router(top_k=1).stats(routing_of(torch.full((T, 1), 3), collapsed))
    assert stats.load_balancing_loss.item() == pytest.approx(E)
    assert stats.load.tolist() == [0, 0, 0, T, 0, 0, 0, 0]


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_losses_are_those_of_the_papers(score):
    r = router(score=score, top_k=3)
    x = torch.randn(T, HIDDEN)
    routing = r(x)
    stats = r.stats(routing)
    counts = [0] * E
    for ids in routing.expert_index.tolist():
        for e in ids:
            counts[e] += 1
    logits = logits_of(r, x)
    scores = torch.sigmoid(logits) if score == "sigmoid" else torch.exp(logits)
    mean_prob = (scores / scores.sum(1, keepdim=True)).mean(0).tolist()
    balance = E * sum(c / (T * 3) * p for c, p in zip(counts, mean_prob, strict=True))
    z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / T
    assert stats.load.tolist() == counts
    assert stats.load.dtype is torch.int64
    assert stats.load_balancing_loss.item() == pytest.approx(balance, rel=1e-5)
    assert stats.z_loss.item() == pytest.approx(z, rel=1e-5)
    assert stats.load_balancing_loss.dtype is stats.z_loss.dtype is torch.float32
    assert stats.load_balancing_loss.dim() == stats.z_loss.dim() == 0


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_default_dtype_does_not_round_the_losses(default):
    """Models are often made under a default of bf16, in which the division of two integers keeps 8 bits."""
    r = router(torch.float64, top_k=3)
    routing = r(torch.randn(T, HIDDEN, dtype=torch.float64))
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        stats = r.stats(routing)
    finally:
        torch.set_default_dtype(before)
    fractions = stats.load.double() / (T * 3)
    balance = E * (fractions * routing.probs.mean(0)).sum().item()
    assert stats.load_balancing_loss.dtype is torch.float64
    assert stats.load_balancing_loss.item() == pytest.approx(balance, rel=1e-12)


@pytest.mark.parametrize("loss", ["load_balancing_loss", "z_loss"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradients_of_the_losses(score, loss):
    r = router(torch.float64, score=score)
    x = torch.randn(6, HIDDEN, dtype=torch.float64, requires_grad=True)

    def run(x, weight):
        routing = torch.func.functional_call(r, {"weight": weight}, (x,))
        return getattr(r.stats(routing), loss)

    assert torch.autograd.gradcheck(run, (x, r.weight))
    run(x, r.weight).backward()
    assert r.weight.grad.any()


def test_minimising_the_load_balancing_loss_evens_the_load():
    r = router(top_k=1)
    x = torch.randn(400, HIDDEN) + 1
    optimizer = torch.optim.SGD(r.parameters(), lr=0.5)

    def busiest():
        return r.stats(r(x)).load.max().item() / (400 / E)

    before = busiest()
    for _ in range(100):
        optimizer.zero_grad()
        r.stats(r(x)).load_balancing_loss.backward()
        optimizer.step()
    assert before > 2
    assert busiest() < 1 + (before - 1) / 2


def test_update_bias_is_one_step_of_the_sign():
    r = router(score="sigmoid")
    r.update_bias(torch.tensor([0, 4, 8, 4, 4, 4, 4, 4]), rate=0.25)
    assert r.balance_bias.tolist() == [0.25, 0, -0.25, 0, 0, 0, 0, 0]


# many softmax scores lie closer together than a step: the load goes on swinging
@pytest.mark.parametrize(("score", "reached"), [("sigmoid", 1.1), ("softmax", 1.4)])
def test_update_bias_evens_the_load(score, reached):
    r = router(score=score, balance_bias=True, top_k=2)
    x = torch.randn(400, HIDDEN) + 0.5

    def busiest():
        return r.stats(r(x)).load.max().item() / (2 * 400 / E)

    before = busiest()
    for _ in range(200):
        r.update_bias(r.stats(r(x)).load, rate=3e-3)
    assert before > 1.5
    assert busiest() < reached


def test_no_tokens():
    r = router(score="sigmoid")
    routing = r(torch.empty(0, HIDDEN))
    assert routing.expert_index.shape == (0, 2)
    stats = r.stats(routing)
    assert stats.load_balancing_loss.item() == stats.z_loss.item() == 0
    assert stats.load.tolist() == [0] * E
