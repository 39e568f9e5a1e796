"""The whole layer against a dense loop over tokens and experts, and as one chain of router and experts."""

import copy

import pytest
import torch
from kit.compare import assert_accurate, assert_close, assert_same_function, pairwise, with_gradients
from kit.layers import GPT_OSS, drawn, leaf
from kit.oracles import meaning
from kit.rounding import ROUNDOFF
from torch import nn

import fusedmoe as fm
from fusedmoe.layers.moe import Routing

T, HIDDEN, WIDE, E, K = 7, 8, 6, 5, 2
SCORES = ["softmax", "topk_softmax", "sigmoid"]
SHARED = {"shared_intermediate": 4, "shared_gate": True}


def layer_of(dtype=torch.float64, **options):
    return drawn(fm.MoE(HIDDEN, WIDE, E, K, dtype=dtype, **options))


def tokens(*shape, dtype=torch.float64):
    return leaf(*(shape or (T,)), HIDDEN, dtype=dtype)


def dense(layer, x):
    """The layer by formula: every token through its experts."""
    rows = x.reshape(-1, HIDDEN)
    routing = layer.router(rows)
    y = meaning(layer.experts, rows, expert_index=routing.expert_index, expert_weight=routing.expert_weight)
    if layer.shared is not None:
        shared = meaning(layer.shared, rows)
        if layer.shared_gate is not None:
            shared = shared / (1 + torch.exp(-(rows @ layer.shared_gate.weight.T)))
        y = y + shared
    return y.reshape(x.shape)


OPTIONS = {
    "plain": {},
    "biases": {"bias": True, "router_bias": True},
    "topk_softmax": {"score": "topk_softmax", "bias": True, "router_bias": True},
    "deepseek": {"score": "sigmoid", "scale": 2.5, "shared_intermediate": 4},
    "not renormalised": {"renormalize": False},
    "shared and gated": SHARED,
}
ACTIVATIONS = ["swiglu", "geglu", "reglu", "squared_relu", fm.SwiGLU(**GPT_OSS)]


@pytest.mark.parametrize(("options", "activation"), pairwise([*OPTIONS], ACTIVATIONS), ids=str)
def test_values_and_gradients_are_those_of_the_dense_loop(options, activation):
    layer, x = layer_of(activation=activation, **OPTIONS[options]), tokens(3, 4)
    assert_same_function(layer(x), dense(layer, x), (x, *layer.parameters()), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy_against_fp64_of_the_same_operands(dtype):
    layer, x = layer_of(dtype, bias=True, shared_intermediate=4), tokens(40, dtype=dtype)
    dy = torch.randn(40, HIDDEN).to(dtype)
    found = with_gradients(layer(x), (x, *layer.parameters()), dy)
    assert all(t.dtype is dtype for t in found)
    exact, exact_x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    assert torch.equal(exact.router(exact_x).expert_index, layer.router(x).expert_index)
    want = with_gradients(dense(exact, exact_x), (exact_x, *exact.parameters()), dy.double())
    assert_accurate(found, want, ROUNDOFF[dtype] * (4 if dtype is torch.bfloat16 else 32))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (), (1, 1, 1), "strided"])
def test_any_leading_dimensions_and_strides(shape):
    layer = layer_of(shared_intermediate=4)
    if shape == "strided":
        x = torch.randn(3, HIDDEN, 4, dtype=torch.float64).mT.requires_grad_()
    else:
        x = leaf(*shape, HIDDEN)
    y, stats = layer(x, return_stats=True)
    assert y.shape == x.shape
    torch.testing.assert_close(y.reshape(-1, HIDDEN), layer(x.reshape(-1, HIDDEN).contiguous()))
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert int(stats.load.sum()) == x.numel() // HIDDEN * K
    assert layer.experts.down.weight.grad.isfinite().all()


def test_autocast():
    layer, x = layer_of(torch.float32, bias=True, **SHARED), tokens(12, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, stats = layer(x, return_stats=True)
        y.float().square().sum().backward()
    assert y.dtype is torch.bfloat16
    assert stats.load_balancing_loss.dtype is stats.z_loss.dtype is torch.float32
    for t in (x, *layer.parameters()):
        assert t.grad.dtype is torch.float32
        assert t.grad.any()
    exact = copy.deepcopy(layer).double()
    expected, exact_stats = exact(x.detach().double(), return_stats=True)
    assert torch.equal(stats.load, exact_stats.load)  # the router did not see bf16
    assert_accurate(y, expected, 6 * ROUNDOFF[torch.bfloat16])


def test_a_bias_after_the_routing_weight_is_refused():
    layer = layer_of()
    layer.experts.down = fm.GroupedLinear(E, WIDE, HIDDEN, bias=True, dtype=torch.float64)
    with pytest.raises(fm.InputError, match=r"experts\.down: expected no bias"):
        layer(tokens())


# --- router and experts are one chain ------------------------------------------------------------------------------


def in_two_calls(layer, x):
    """The layer with its router and its experts called one after the other, and its stats."""
    routing = layer.router(x)
    y = layer.experts(x, expert_index=routing.expert_index, expert_weight=routing.expert_weight)
    return y, layer.router.stats(routing)


def total(y, stats):
    """A loss in which everything has a part of its own."""
    numbers = torch.linspace(-1, 1, stats.logits.numel(), dtype=stats.logits.dtype).view_as(stats.logits)
    return y.square().sum() + 3 * stats.load_balancing_loss + 0.1 * stats.z_loss + (stats.logits * numbers).sum()


def assert_same(layer, x):
    (y, stats), (expected, other) = layer(x, return_stats=True), in_two_calls(layer, x)
    assert torch.equal(y, expected)
    assert torch.equal(layer(x), expected)
    assert torch.equal(stats.load, other.load)
    torch.testing.assert_close(stats, other, rtol=1e-12, atol=1e-12)
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    want = torch.autograd.grad(total(expected, other), wanted)
    assert all(t.any() for t in want)
    assert_close(torch.autograd.grad(total(y, stats), wanted), want, rtol=1e-10)


def steps(explanation, direction="forward"):
    return [op for step in explanation.steps if step.direction == direction for op in step.ops]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("frozen", [None, "router", "experts"])
def test_stats_and_gradients_are_those_of_two_calls(score, frozen):
    layer = layer_of(score=score, router_bias=True, scale=1.5)
    if frozen:
        getattr(layer, frozen).requires_grad_(False)
    assert_same(layer, tokens())
    assert_same(layer, tokens().detach())


@pytest.mark.parametrize("settings", [{"score": "sigmoid"}, {"top_k": 3}, {"renormalize": False}, {"scale": 3.0}])
def test_settings_and_the_balance_bias_may_change_between_calls(settings):
    layer, x = layer_of(), tokens()
    before = layer(x)
    for name, value in settings.items():
        setattr(layer.router, name, value)
    assert_same(layer, x)
    assert not torch.equal(layer(x), before)
    layer = layer_of(score="sigmoid")
    for bias in ([9.0, 0, 0, 0, 9], [0.0, 9, 9, 0, 0]):
        layer(x)
        layer.router.balance_bias = torch.tensor(bias)
        assert layer(x, return_stats=True)[1].load.tolist() == [T if b else 0 for b in bias]


@pytest.mark.parametrize("hooked", ["router", "experts", "experts.dispatch", "experts.down", "experts.combine"])
def test_hooks_run_and_change_no_result(hooked):
    layer, x = layer_of(), tokens()
    expected, seen = layer(x), []
    handle = layer.get_submodule(hooked).register_forward_hook(lambda module, args, out: seen.append(out))
    assert torch.equal(layer(x), expected)
    assert isinstance(seen[0], Routing) is (hooked == "router")
    assert_same(layer, x)
    handle.remove()
    count = len(seen)
    assert torch.equal(layer(x), expected)
    assert len(seen) == count


class Reversed(nn.Module):
    """A router of a user's own."""

    def __init__(self, router):
        super().__init__()
        self.inner = router

    def forward(self, x):
        return self.inner(x.flip(1))

    def stats(self, routing):
        return self.inner.stats(routing)


def test_another_router_and_other_experts():
    layer, x = layer_of(), tokens()
    before = layer(x)
    layer.router = Reversed(layer.router)
    assert not torch.equal(layer(x), before)
    assert_same(layer, x)
    assert steps(layer.explain(x))[0] == "dispatch.Dispatch"
    layer.router = layer.router.inner
    layer.experts = fm.Sequential(fm.Dispatch(E), fm.Combine())
    torch.testing.assert_close(layer(x), x)
    layer.router = nn.Linear(HIDDEN, E, dtype=torch.float64)
    for call in (layer, layer.explain):
        with pytest.raises(fm.InputError, match="router: expected a module that returns a Routing, got Linear"):
            call(x)
