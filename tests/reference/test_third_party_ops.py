"""Ops that state only what they compute: their gradients come from autograd, alone and in chains."""

import pytest
import torch
import torch.nn.functional as F
from kit.compare import assert_close, assert_same_function
from kit.layers import H, leaf
from kit.oracles import grouped_linear
from kit.splits import SPLITS
from torch import nn

import fusedmoe as fm


class Softplus(fm.Op):
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


def norm_of(x):
    return (x.square().sum(1, keepdim=True) + 1).sqrt()


def test_compute_alone_is_enough_also_in_a_chain():
    x, layer = leaf(5, H), fm.GroupedLinear(3, H, H, dtype=torch.float64)
    assert_same_function(Softplus()(x), F.softplus(x), (x,))
    y = fm.Sequential(Softplus(), layer, Softplus(), fm.SwiGLU())(x, splits=SPLITS)
    gate, up = F.softplus(grouped_linear(F.softplus(x), layer.weight, None, SPLITS)).chunk(2, 1)
    assert_same_function(y, F.silu(gate) * up, (x, layer.weight))


@pytest.mark.parametrize("shift", [True, False])
def test_parameters_and_several_runtime_inputs(shift):
    op, x, probs, temperature = Affine(H, shift), leaf(5, H), leaf(5), torch.tensor(1.7).double().requires_grad_()
    named = {"temperature": temperature, "probs": probs}
    values = {"x": x, **named, **dict(op.named_parameters())}

    def expected():
        y = torch.sin(x * op.slope / temperature) * probs[:, None] + (op.shift if shift else 0)
        return y[:, ::2] + y[:, 1::2]

    assert_same_function(op(x, **named), expected(), values.values())
    layer = fm.GroupedLinear(3, H // 2, H, dtype=torch.float64)
    y = fm.Sequential(op, layer)(x, splits=SPLITS, **named)
    assert_same_function(y, grouped_linear(expected(), layer.weight, None, SPLITS), [*values.values(), layer.weight])
    # only what is wanted gets a gradient
    for names in (*([name] for name in values), ["x", "slope"]):
        for name, value in values.items():
            value.grad = None
            value.requires_grad_(name in names)
        op(x, **named).square().sum().backward()
        assert [name for name, value in values.items() if value.grad is not None] == names
        assert all(values[name].grad.any() for name in names)


def test_an_op_alone_returns_the_values_that_it_provides():
    x = leaf(3, 4)
    y, provided = Normalise()(x)
    norm = norm_of(x)
    assert [*provided] == ["norm"]
    torch.testing.assert_close(provided["norm"], norm[:, 0])
    # a gradient through both results, and through either
    for use_y, use_norm in [(1, 1), (1, 0), (0, 1)]:
        got = use_y * y.square().sum() + use_norm * provided["norm"].sum()
        want = use_y * (x / norm).square().sum() + use_norm * norm.sum()
        assert_close(*(torch.autograd.grad(loss, x, retain_graph=True) for loss in (got, want)))


@pytest.mark.parametrize("between", [[], [nn.Tanh()]], ids=["one chain", "two chains"])
@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_provided_value_carries_its_gradient(between, times):
    seq, x = fm.Sequential(Normalise(), *between, *[Power() for _ in range(times)]), leaf(5, H)
    inner = torch.tanh(x / norm_of(x)) if between else x / norm_of(x)
    assert_same_function(seq(x), inner * norm_of(x) ** (1.5 * times), (x,))


def test_a_given_value_used_twice_gets_the_sum_of_its_gradients():
    x, norm = leaf(4, 3), (torch.rand(4, dtype=torch.float64) + 0.5).requires_grad_()
    expected = torch.tanh(x * norm[:, None] ** 1.5) * norm[:, None] ** 1.5
    assert_same_function(fm.Sequential(Power(), nn.Tanh(), Power())(x, norm=norm), expected, (x, norm))


def test_an_op_that_passes_rows_on_and_provides_values_needs_backward_ops():
    class Norms(Normalise):
        passes_forward = True

        def infer(self, x):
            return fm.TensorSpec((x.shape[0],), x.dtype)

    with pytest.raises(NotImplementedError, match="Norms"):
        fm.Sequential(Norms(), fm.Scale("norm"))(leaf(4, 6))


def test_half_precision_and_integers_pass_through_autograd():
    class Pick(fm.Op):
        runtime_inputs = ("column",)

        def infer(self, x, column):
            return fm.TensorSpec((x.shape[0], column.shape[0]), x.dtype)

        def compute(self, x, column):
            return x[:, column]

    x = leaf(3, 4, dtype=torch.bfloat16)
    y = Pick()(x, column=torch.tensor([2, 2, 0]))
    y.sum().backward()
    assert y.dtype is x.grad.dtype is torch.bfloat16
    assert x.grad.tolist() == [[1.0, 0.0, 2.0, 0.0]] * 3
