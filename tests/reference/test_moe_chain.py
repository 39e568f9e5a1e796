"""`MoE` as one chain of router and experts: its plan, its stats, and what users may change in it."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fusedmoe as fm
from fusedmoe.layers.moe import Routing

T, HIDDEN, WIDE, E, K = 7, 8, 6, 5, 2
SCORES = ["softmax", "topk_softmax", "sigmoid"]


def layer_of(dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = fm.MoE(HIDDEN, WIDE, E, K, dtype=dtype, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def tokens(dtype=torch.float64):
    return torch.randn(T, HIDDEN, dtype=dtype, requires_grad=True)


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
    found = torch.autograd.grad(total(y, stats), wanted)
    for got, want in zip(found, torch.autograd.grad(total(expected, other), wanted), strict=True):
        assert want.any()
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def steps(explanation, direction="forward"):
    return [op for step in explanation.steps if step.direction == direction for op in step.ops]


def test_the_plan_shows_the_whole_layer():
    explanation = layer_of(router_bias=True).explain(tokens())
    assert [title for title, _ in explanation.parts] == ["chain router to experts.combine"]
    assert steps(explanation) == [
        "router.Router", "experts.dispatch.Dispatch", "experts.gate_up.GroupedLinear", "experts.activation.SwiGLU",
        "experts.scale.Scale", "experts.down.GroupedLinear", "experts.combine.Combine",
    ]  # fmt: skip
    assert steps(explanation, "backward")[-6:] == [
        "experts.dispatch.DispatchWeightGrad", "experts.dispatch.DDispatch",
        "router.RouterLogitsGrad", "router.RouterBiasGrad", "router.RouterWeightGrad", "router.DRouter",
    ]  # fmt: skip


@pytest.mark.parametrize("score", SCORES)
def test_stats_and_gradients_are_those_of_two_calls(score):
    assert_same(layer_of(score=score, router_bias=True, scale=1.5), tokens())


@pytest.mark.parametrize("part", ["router", "experts"])
def test_a_frozen_part(part):
    layer = layer_of()
    getattr(layer, part).requires_grad_(False)
    assert_same(layer, tokens())
    assert_same(layer, tokens().detach())


def test_the_balance_bias_is_read_at_each_call():
    layer = layer_of(score="sigmoid")
    x = tokens()
    assert_same(layer, x)
    layer.router.balance_bias.copy_(torch.tensor([9.0, 0, 0, 0, 9]))
    _, stats = layer(x, return_stats=True)
    assert stats.load.tolist() == [T, 0, 0, 0, T]
    layer.router.balance_bias = torch.tensor([0.0, 9, 9, 0, 0])
    _, stats = layer(x, return_stats=True)
    assert stats.load.tolist() == [0, T, T, 0, 0]


@pytest.mark.parametrize("settings", [{"score": "sigmoid"}, {"top_k": 3}, {"renormalize": False}, {"scale": 3.0}])
def test_settings_of_the_router_may_change_between_calls(settings):
    layer, x = layer_of(), tokens()
    before = layer(x, return_stats=True)
    for name, value in settings.items():
        setattr(layer.router, name, value)
    assert_same(layer, x)
    assert not torch.equal(layer(x), before[0])


@pytest.mark.parametrize("hooked", ["router", "experts", "experts.dispatch", "experts.down", "experts.combine"])
def test_hooks_run_and_change_no_result(hooked):
    layer, x = layer_of(), tokens()
    expected = layer(x)
    seen = []
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


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.sm_margin, self.schedule = module.sm_margin, module.schedule

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def test_another_router_and_other_experts():
    layer, x = layer_of(), tokens()
    before = layer(x)
    layer.router = Reversed(layer.router)
    assert not torch.equal(layer(x), before)
    assert_same(layer, x)
    assert steps(layer.explain(x))[0] == "dispatch.Dispatch"
    layer.router = layer.router.inner
    layer.experts = Wrapped(layer.experts)
    assert torch.equal(layer(x), before)
    assert_same(layer, x)
    layer.experts = fm.Sequential(fm.Dispatch(E), fm.Combine())
    torch.testing.assert_close(layer(x), x)
    layer.router = fm.Router(HIDDEN, E, K, score="sigmoid", renormalize=False, dtype=torch.float64)
    assert_same(layer, x)


def test_a_router_that_returns_something_else_is_named():
    layer, x = layer_of(), tokens()
    layer.router = nn.Linear(HIDDEN, E, dtype=torch.float64)
    expected = "MoE: router: expected a module that returns a Routing, got Linear, which returns Tensor"
    for call in (layer, layer.explain):
        with pytest.raises(fm.InputError, match=expected):
            call(x)


def test_lora_on_the_experts():
    layer = layer_of()
    layer.experts.down = fm.GroupedLoRA(layer.experts.down, rank=2)
    nn.init.normal_(layer.experts.down.lora_B.weight)
    assert_same(layer, tokens())
    assert "experts.down.lora_A.LoRADown" in steps(layer.explain(tokens()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_share_nothing(copied):
    layer, x = layer_of(), tokens()
    expected = layer(x)
    other = copied(layer)
    assert torch.equal(other(x), expected)
    with torch.no_grad():
        other.router.weight.zero_()
    assert torch.equal(layer(x), expected)
    assert not torch.equal(other(x), expected)
    assert_same(other, x.detach().requires_grad_())


def test_modules_and_state_are_registered_once():
    layer = layer_of(score="sigmoid")
    layer(tokens())
    names = [name for name, _ in layer.named_modules(remove_duplicate=False)]
    assert names == [
        "", "router", "experts", "experts.dispatch", "experts.gate_up", "experts.activation", "experts.scale",
        "experts.down", "experts.combine",
    ]  # fmt: skip
    assert list(layer.state_dict()) == [
        "router.weight", "router.balance_bias", "experts.gate_up.weight", "experts.down.weight",
    ]  # fmt: skip


def test_torch_compile_with_stats():
    layer, x = layer_of(torch.float32, score="sigmoid"), tokens(torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wanted = (x, *layer.parameters())
    for bias in (0, torch.linspace(2, 0, E)):
        layer.router.balance_bias.copy_(layer.router.balance_bias + bias)
        got, want = compiled(x, return_stats=True), layer(x, return_stats=True)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1])
        found = torch.autograd.grad(total(*got), wanted)
        for a, b in zip(found, torch.autograd.grad(total(*want), wanted), strict=True):
            torch.testing.assert_close(a, b)


def test_second_derivatives_with_stats():
    layer, x = layer_of(), tokens()
    (g,) = torch.autograd.grad(total(*layer(x, return_stats=True)), x, create_graph=True)
    (h,) = torch.autograd.grad(total(*in_two_calls(layer, x)), x, create_graph=True)
    wanted = (x, *layer.parameters())
    found = torch.autograd.grad(g.square().sum(), wanted)
    for got, want in zip(found, torch.autograd.grad(h.square().sum(), wanted), strict=True):
        assert want.any()
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_options_of_the_experts_are_those_of_the_layer():
    layer, x = layer_of(), tokens()
    layer.experts.sm_margin = 6
    assert layer.sm_margin == 6
    assert layer.explain(x).plans[0].options.sm_margin == 6
