"""Ops that state only what they compute: their gradients come from autograd, alone and in chains."""

import pytest
import torch
from chains import H
from oracles import grouped_linear
from torch import nn

import fusedmoe as fm

SPLITS = torch.tensor([2, 0, 3])


class Softplus(fm.Op):
    """The least that an op can be."""

    def compute(self, x):
        return torch.log1p(torch.exp(x))


class Affine(fm.Op):
    """Two parameters, of which one may be absent, and two runtime inputs; the features are halved."""

    parameter_names = ("slope", "shift")
    runtime_inputs = ("temperature", "probs")
    rowwise_inputs = ("probs",)

    def __init__(self, features, shift=True):
        super().__init__()
        self.slope = nn.Parameter(torch.randn(features, dtype=torch.float64))
        self.shift = nn.Parameter(torch.randn(features, dtype=torch.float64)) if shift else None

    def infer(self, x, slope, shift, temperature, probs):
        if tuple(probs.shape) != (x.shape[0],):
            raise self.reject("probs", f"shape ({x.shape[0]},)", probs.shape)
        return fm.TensorSpec((x.shape[0], x.shape[1] // 2), x.dtype)

    def compute(self, x, slope, shift, temperature, probs):
        y = torch.sin(x * slope / temperature) * probs[:, None]
        return (y if shift is None else y + shift).unflatten(1, (-1, 2)).sum(2)


class Normalise(fm.Op):
    """Provides the norm that it divided by, for a later op to undo."""

    provides = ("norm",)

    def infer(self, x):
        return fm.TensorSpec(tuple(x.shape), x.dtype), fm.TensorSpec((x.shape[0],), x.dtype)

    def compute(self, x):
        norm = (x.square().sum(1) + 1).sqrt()
        return x / norm[:, None], norm


class Power(fm.Op):
    """Uses a value and may stand twice in a chain."""

    runtime_inputs = ("norm",)

    def compute(self, x, norm):
        return x * norm[:, None] ** 1.5


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same_gradients(y, expected, wanted):
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    dy = torch.randn_like(y)
    for got, want in zip(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        assert want.any()
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_compute_alone_is_enough():
    x = leaf(3, 4)
    assert torch.autograd.gradcheck(Softplus(), (x,))
    assert_same_gradients(Softplus()(x), nn.functional.softplus(x), (x,))


def test_it_runs_in_a_chain_with_other_ops():
    layer = fm.GroupedLinear(3, H, H, dtype=torch.float64)
    seq = fm.Sequential(Softplus(), layer, Softplus(), fm.SwiGLU())
    x = leaf(5, H)
    inner = nn.functional.softplus(grouped_linear(nn.functional.softplus(x), layer.weight, None, SPLITS))
    expected = nn.functional.silu(inner[:, : H // 2]) * inner[:, H // 2 :]
    assert_same_gradients(seq(x, splits=SPLITS), expected, (x, layer.weight))


def test_the_tail_is_zeroed_behind_an_op_that_makes_something_of_zeros():
    seq = fm.Sequential(fm.GroupedLinear(3, H, H, dtype=torch.float64), Softplus())
    x = leaf(7, H)
    with torch.no_grad():
        x[5:] = float("nan")
    y = seq(x, splits=SPLITS)
    assert (y[:5] > 0).all()
    assert torch.equal(y[5:], torch.zeros_like(y[5:]))
    y.backward(torch.full_like(y, 1.0).index_fill_(0, torch.tensor([5, 6]), float("nan")))
    assert torch.equal(x.grad[5:], torch.zeros_like(x.grad[5:]))
    assert seq[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("shift", [True, False])
def test_parameters_and_several_runtime_inputs(shift):
    op = Affine(H, shift)
    x, probs = leaf(5, H), leaf(5)
    temperature = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    wanted = [x, temperature, probs, op.slope, *([op.shift] if shift else [])]

    def expected():
        y = torch.sin(x * op.slope / temperature) * probs[:, None] + (op.shift if shift else 0)
        return y[:, ::2] + y[:, 1::2]

    assert_same_gradients(op(x, temperature=temperature, probs=probs), expected(), wanted)
    layer = fm.GroupedLinear(3, H // 2, H, dtype=torch.float64)
    seq = fm.Sequential(op, layer)
    y = seq(x, splits=SPLITS, temperature=temperature, probs=probs)
    assert_same_gradients(y, grouped_linear(expected(), layer.weight, None, SPLITS), [*wanted, layer.weight])


@pytest.mark.parametrize("names", [("x",), ("temperature",), ("probs",), ("slope",), ("shift",), ("x", "shift")])
def test_only_what_is_wanted_gets_a_gradient(names):
    op = Affine(H).requires_grad_(False)
    values = {
        "x": torch.randn(5, H, dtype=torch.float64),
        "temperature": torch.tensor(1.7, dtype=torch.float64),
        "probs": torch.rand(5, dtype=torch.float64),
        "slope": op.slope,
        "shift": op.shift,
    }
    for name in names:
        values[name].requires_grad_()
    op(values["x"], temperature=values["temperature"], probs=values["probs"]).square().sum().backward()
    for name, value in values.items():
        if name in names:
            assert value.grad.any()
        else:
            assert value.grad is None


def test_gradcheck_with_parameters():
    op = Affine(4)
    temperature = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)

    def run(x, temperature, probs, slope, shift):
        return torch.func.functional_call(
            op, {"slope": slope, "shift": shift}, (x,), {"temperature": temperature, "probs": probs}
        )

    assert torch.autograd.gradcheck(run, (leaf(3, 4), temperature, leaf(3), op.slope, op.shift))


def test_it_may_reject_its_arguments():
    with pytest.raises(fm.InputError, match=r"Affine.*probs: expected shape \(5,\), got \(4,\)"):
        Affine(H)(torch.randn(5, H, dtype=torch.float64), temperature=torch.tensor(1.0), probs=torch.rand(4))


def test_an_op_alone_returns_what_it_provides():
    x = leaf(3, 4)
    y, provided = Normalise()(x)
    norm = (x.square().sum(1) + 1).sqrt()
    assert list(provided) == ["norm"]
    torch.testing.assert_close(provided["norm"], norm)
    # a gradient through both results, and through either
    for use_y, use_norm in [(1, 1), (1, 0), (0, 1)]:
        got = use_y * y.square().sum() + use_norm * provided["norm"].sum()
        want = use_y * (x / norm[:, None]).square().sum() + use_norm * norm.sum()
        (dx,) = torch.autograd.grad(got, x, retain_graph=True)
        (expected,) = torch.autograd.grad(want, x, retain_graph=True)
        torch.testing.assert_close(dx, expected)


@pytest.mark.parametrize("between", [[], [nn.Tanh()]], ids=["one chain", "two chains"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_provided_value_carries_its_gradient(between, times):
    seq = fm.Sequential(Normalise(), *between, *[Power() for _ in range(times)])
    x = leaf(5, H)
    norm = (x.square().sum(1, keepdim=True) + 1).sqrt()
    inner = torch.tanh(x / norm) if between else x / norm
    assert_same_gradients(seq(x), inner * norm ** (1.5 * times), (x,))


class Sine(fm.Op):
    def compute(self, x):
        return torch.sin(x)


class TorchSine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


@pytest.mark.parametrize("sine", [Sine, TorchSine], ids=["one chain", "two chains"])
def test_a_given_value_used_twice_gets_the_sum_of_its_gradients(sine):
    x, norm = leaf(4, 3), (torch.rand(4, dtype=torch.float64) + 0.5).requires_grad_()
    expected = torch.sin(x * norm[:, None] ** 1.5) * norm[:, None] ** 1.5
    assert_same_gradients(fm.Sequential(Power(), sine(), Power())(x, norm=norm), expected, (x, norm))


def test_a_provided_value_that_nobody_uses():
    x = leaf(3, 4)
    y = fm.Sequential(Normalise(), Softplus())(x)
    assert_same_gradients(y, nn.functional.softplus(x / (x.square().sum(1, keepdim=True) + 1).sqrt()), (x,))


def test_half_precision_and_integers_pass_through_autograd():
    class Pick(fm.Op):
        runtime_inputs = ("column",)

        def infer(self, x, column):
            return fm.TensorSpec((x.shape[0], column.shape[0]), x.dtype)

        def compute(self, x, column):
            return x[:, column]

    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    y = Pick()(x, column=torch.tensor([2, 2, 0]))
    y.sum().backward()
    assert y.dtype is x.grad.dtype is torch.bfloat16
    assert x.grad.tolist() == [[1.0, 0.0, 2.0, 0.0]] * 3
