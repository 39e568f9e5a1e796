"""The whole layer against a dense loop over tokens and experts."""

import pytest
import torch
import torch.nn.functional as F
from oracles import experts_dense, glu, squared_relu
from rounding import ROUNDOFF, relative_error
from torch import nn

import fusedmoe as fm

HIDDEN, WIDE, E, K = 8, 6, 5, 2

ACTIVATIONS = {
    "swiglu": lambda x: glu(x, "swiglu"),
    "geglu": lambda x: glu(x, "geglu_tanh"),
    "reglu": lambda x: glu(x, "reglu"),
    "squared_relu": squared_relu,
}


def layer_of(dtype=torch.float64, **options):
    layer = fm.MoE(HIDDEN, WIDE, E, K, dtype=dtype, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def dense(layer, x, activation, routing):
    """The layer in words: every token through its experts, one at a time."""
    tokens = x.reshape(-1, HIDDEN)
    first, last = layer.experts.gate_up, layer.experts.down

    def expert(e, row):
        wide = F.linear(row, first.weight[e], None if first.bias is None else first.bias[e])
        return F.linear(activation(wide), last.weight[e], None if last.bias is None else last.bias[e])

    y = experts_dense(tokens, routing.expert_index, routing.expert_weight, E, expert)
    if layer.shared is not None:
        shared = F.linear(activation(F.linear(tokens, layer.shared.gate_up.weight)), layer.shared.down.weight)
        if layer.shared_gate is not None:
            shared = shared / (1 + torch.exp(-F.linear(tokens, layer.shared_gate.weight)))
        y = y + shared
    return y.reshape(x.shape)


OPTIONS = {
    "plain": {},
    "biases": {"bias": True, "router_bias": True},
    "topk_softmax": {"score": "topk_softmax", "bias": True, "router_bias": True},
    "deepseek": {"score": "sigmoid", "scale": 2.5, "shared_intermediate": 4},
    "not renormalised": {"renormalize": False},
    "shared and gated": {"shared_intermediate": 7, "shared_gate": True},
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_are_those_of_the_dense_loop(options, activation):
    layer = layer_of(activation=activation, **options)
    x = torch.randn(3, 4, HIDDEN, dtype=torch.float64, requires_grad=True)
    y, expected = layer(x), dense(layer, x, ACTIVATIONS[activation], layer.router(x.reshape(-1, HIDDEN)))
    assert y.shape == x.shape
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-11)
    dy, wanted = torch.randn_like(y), (x, *layer.parameters())
    for got, want in zip(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        assert want.any()
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_an_op_as_the_activation():
    options = {"limit": 0.7, "alpha": 1.702, "offset": 1.0, "interleaved": True}
    layer = layer_of(activation=fm.SwiGLU(**options), bias=True, shared_intermediate=4)
    x = torch.randn(6, HIDDEN, dtype=torch.float64)
    expected = dense(layer, x, lambda wide: glu(wide, "swiglu", **options), layer.router(x))
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_gradcheck_end_to_end(score):
    layer = layer_of(score=score, shared_intermediate=2, shared_gate=True)
    x = torch.randn(4, HIDDEN, dtype=torch.float64, requires_grad=True)
    ranked = layer.router(x).logits.sort(dim=1, descending=True).values
    assert (ranked[:, K - 1] - ranked[:, K]).min() > 1e-3, "a finite difference could change the choice"
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)
    # the gates alone in full: their gradient comes through expert_weight only
    others = [p.detach() for name, p in layer.named_parameters() if name != "router.weight"]
    position = names.index("router.weight")

    def of_router(weight):
        return run(x.detach(), *others[:position], weight, *others[position:])

    assert torch.autograd.gradcheck(of_router, (layer.router.weight,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy_against_fp64_of_the_same_operands(dtype):
    layer = layer_of(dtype, bias=True, shared_intermediate=4)
    x = torch.randn(40, HIDDEN).to(dtype).requires_grad_()
    y = layer(x)
    dy = torch.randn(40, HIDDEN).to(dtype)
    found = [y, *torch.autograd.grad(y, (x, *layer.parameters()), dy)]
    exact = layer_of(bias=True, shared_intermediate=4)
    exact.load_state_dict(layer.state_dict())
    exact_x = x.detach().double().requires_grad_()
    routing = exact.router(exact_x)
    assert torch.equal(routing.expert_index, layer.router(x).expert_index)
    expected = dense(exact, exact_x, ACTIVATIONS["swiglu"], routing)
    wanted = [expected, *torch.autograd.grad(expected, (exact_x, *exact.parameters()), dy.double())]
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype is dtype
        assert relative_error(got, want) < ROUNDOFF[dtype] * (4 if dtype is torch.bfloat16 else 32)


def test_y_alone_or_with_stats():
    layer = layer_of()
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    y = layer(x)
    assert isinstance(y, torch.Tensor)
    again, stats = layer(x, return_stats=True)
    assert torch.equal(y, again)
    assert isinstance(stats, fm.MoEStats)
    assert int(stats.load.sum()) == 6 * K
    assert torch.equal(stats.load, torch.bincount(layer.router(x.view(6, HIDDEN)).expert_index.flatten(), minlength=E))


def test_losses_reach_the_router_and_nothing_else():
    layer = layer_of()
    _, stats = layer(torch.randn(6, HIDDEN, dtype=torch.float64), return_stats=True)
    (stats.load_balancing_loss + stats.z_loss).backward()
    assert layer.router.weight.grad.any()
    for parameter in layer.experts.parameters():
        assert parameter.grad is None or not parameter.grad.any()


def test_a_call_leaves_nothing_on_the_module():
    layer = layer_of(score="sigmoid", shared_intermediate=4, shared_gate=True)
    x = torch.randn(6, HIDDEN, dtype=torch.float64)
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    buffers = [name for name, _ in layer.named_buffers()]
    y, stats = layer(x, return_stats=True)
    (y.sum() + stats.z_loss).backward()
    assert list(layer.state_dict()) == list(state)
    assert [name for name, _ in layer.named_buffers()] == buffers == ["router.balance_bias"]
    assert all(torch.equal(t, state[name]) for name, t in layer.state_dict().items())
    kept = [
        value
        for module in layer.modules()
        for name, value in vars(module).items()
        if isinstance(value, (torch.Tensor, fm.MoEStats))
    ]
    assert kept == []


def test_stock_parameter_names_and_shapes():
    shapes = {
        name: tuple(t.shape) for name, t in layer_of(shared_intermediate=4, shared_gate=True).state_dict().items()
    }
    assert shapes == {
        "router.weight": (E, HIDDEN),
        "experts.gate_up.weight": (E, 2 * WIDE, HIDDEN),
        "experts.down.weight": (E, HIDDEN, WIDE),
        "shared.gate_up.weight": (8, HIDDEN),
        "shared.down.weight": (HIDDEN, 4),
        "shared_gate.weight": (1, HIDDEN),
    }


def test_experts_without_tokens_get_zero_gradients():
    layer = layer_of(router_bias=True, bias=True)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.bias.copy_(torch.tensor([0.0, 3.0, -9.0, 2.0, -9.0]))
    y, stats = layer(torch.randn(6, HIDDEN, dtype=torch.float64), return_stats=True)
    assert stats.load.tolist() == [0, 6, 0, 6, 0]
    y.square().sum().backward()
    for parameter in layer.experts.parameters():
        assert not parameter.grad[[0, 2, 4]].any()
        assert parameter.grad[[1, 3]].flatten(1).any(1).all()


@pytest.mark.parametrize("shape", [(0, HIDDEN), (2, 0, HIDDEN), (HIDDEN,), (1, 1, 1, HIDDEN)])
def test_any_leading_dimensions(shape):
    layer = layer_of(shared_intermediate=4)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y, stats = layer(x, return_stats=True)
    assert y.shape == shape
    torch.testing.assert_close(y.reshape(-1, HIDDEN), layer(x.reshape(-1, HIDDEN)))
    y.sum().backward()
    assert x.grad.shape == shape
    assert int(stats.load.sum()) == x.numel() // HIDDEN * K
    assert layer.experts.down.weight.grad.isfinite().all()


def test_strided_tokens():
    layer = layer_of(shared_intermediate=4)
    x = torch.randn(3, HIDDEN, 4, dtype=torch.float64).mT.requires_grad_()
    y = layer(x)
    torch.testing.assert_close(y, layer(x.detach().contiguous()))
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_autocast():
    layer = layer_of(torch.float32, bias=True, shared_intermediate=4, shared_gate=True)
    x = torch.randn(12, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, stats = layer(x, return_stats=True)
    assert y.dtype is torch.bfloat16
    assert stats.load_balancing_loss.dtype is stats.z_loss.dtype is torch.float32
    exact = layer.double()
    expected, exact_stats = exact(x.double(), return_stats=True)
    assert torch.equal(stats.load, exact_stats.load)  # the router did not see bf16
    assert relative_error(y, expected.detach()) < 6 * ROUNDOFF[torch.bfloat16]


def test_autocast_gradients_arrive_in_fp32():
    layer = layer_of(torch.float32, bias=True, shared_intermediate=4, shared_gate=True)
    x = torch.randn(12, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).float().square().sum().backward()
    for t in (x, *layer.parameters()):
        assert t.grad.dtype is torch.float32
        assert t.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_the_same_each_time(dtype):
    layer = layer_of(dtype, bias=True)
    x, dy = torch.randn(50, HIDDEN).to(dtype).requires_grad_(), torch.randn(50, HIDDEN).to(dtype)

    def run():
        y, stats = layer(x, return_stats=True)
        grads = torch.autograd.grad((y, stats.load_balancing_loss), (x, *layer.parameters()), (dy, torch.tensor(1.0)))
        return (y, *stats, *grads)

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_on_the_meta_device_shapes_follow():
    with torch.device("meta"):
        layer = fm.MoE(16, 8, 4, 2, shared_intermediate=8)
        y, stats = layer(torch.randn(2, 3, 16), return_stats=True)
    assert y.is_meta
    assert y.shape == (2, 3, 16)
    assert stats.load.shape == (4,)


def test_a_bias_behind_the_routing_weight_is_refused():
    layer, x = fm.MoE(8, 4, 3, 2), torch.randn(5, 8)
    layer.experts.down = fm.GroupedLinear(3, 4, 8, bias=True)
    with pytest.raises(fm.InputError, match=r"experts\.down: expected no bias"):
        layer(x)
