"""The gated linear units, each alone: values, derivatives, bounds, what NaN and Inf do, and every dtype."""

import math

import pytest
import torch
from oracles import exact_copies, glu
from rounding import ROUNDOFF, relative_error

import fusedmoe as fm

KINDS = {
    "swiglu": fm.SwiGLU,
    "geglu_tanh": fm.GeGLU,
    "geglu_erf": lambda **options: fm.GeGLU(approximate="none", **options),
    "reglu": fm.ReGLU,
}
OPTIONS = [
    {},
    {"interleaved": True},
    {"limit": 0.75},
    {"alpha": 1.702},
    {"offset": 1.0},
    {"limit": 1.25, "alpha": 1.702, "offset": 1.0, "interleaved": True},
    {"limit": 0.5, "alpha": 0.6, "offset": -0.25},
]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "plain")
GPT_OSS = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}


def gradient(op, x, dy):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(op(x), x, dy)[0]


@every_kind
@every_option
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (8,)])
def test_values_and_gradients_are_those_of_the_formula(kind, options, shape):
    (x,) = exact_copies(1.5 * torch.randn(shape))
    y, expected = KINDS[kind](**options)(x), glu(x, kind, **options)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-14)
    dy = torch.randn_like(expected)
    (dx,) = torch.autograd.grad(y, x, dy)
    (expected_dx,) = torch.autograd.grad(expected, x, dy)
    assert kind == "reglu" or expected_dx.norm() > 0
    torch.testing.assert_close(dx, expected_dx, rtol=1e-12, atol=1e-13)


def away_from(x, *kinks):
    for kink in kinks:
        x = torch.where((x - kink).abs() < 0.02, kink + 0.04, x)
    return x


@every_kind
@every_option
def test_gradcheck(kind, options):
    limit = options.get("limit", 100.0)
    x = away_from(torch.randn(4, 6, dtype=torch.float64), 0.0, limit, -limit).requires_grad_()
    assert torch.autograd.gradcheck(KINDS[kind](**options), (x,))


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def phi_and_slope(kind, g):
    if kind == "swiglu":
        s = sigmoid(g)
        return g * s, s * (1 + g * (1 - s))
    if kind == "geglu_tanh":
        c, k = math.sqrt(2 / math.pi), 0.044715
        t = torch.tanh(c * (g + k * g**3))
        return 0.5 * g * (1 + t), 0.5 * (1 + t) + 0.5 * g * (1 - t**2) * c * (1 + 3 * k * g**2)
    if kind == "geglu_erf":
        cdf = 0.5 * (1 + torch.erf(g / math.sqrt(2)))
        return g * cdf, cdf + g * torch.exp(-(g**2) / 2) / math.sqrt(2 * math.pi)
    return g * (g > 0), (g > 0).double()


@every_kind
def test_derivatives_in_closed_form(kind):
    x, dy = 2 * torch.randn(6, 10, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    g, u = x[:, :5], x[:, 5:]
    phi, slope = phi_and_slope(kind, g)
    expected = torch.cat((dy * u * slope, dy * phi), dim=1)
    torch.testing.assert_close(gradient(KINDS[kind](), x, dy), expected, rtol=1e-12, atol=1e-13)


def test_derivative_of_gpt_oss_in_closed_form():
    x, dy = 6 * torch.randn(50, 8, dtype=torch.float64), torch.randn(50, 4, dtype=torch.float64)
    g, u = x[:, ::2], x[:, 1::2]
    assert (g > 7).any()
    assert (u < -7).any()
    gc, uc = g.minimum(torch.tensor(7.0)), u.maximum(torch.tensor(-7.0)).minimum(torch.tensor(7.0))
    s = sigmoid(1.702 * gc)
    expected = torch.empty_like(x)
    expected[:, ::2] = dy * (uc + 1) * s * (1 + 1.702 * gc * (1 - s)) * (g <= 7)
    expected[:, 1::2] = dy * gc * s * ((u >= -7) & (u <= 7))
    op = fm.SwiGLU(**GPT_OSS, interleaved=True)
    torch.testing.assert_close(gradient(op, x, dy), expected, rtol=1e-12, atol=1e-13)


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_gradient_passes_at_the_bound_itself_and_stops_behind_it(kind, dtype):
    just_over = 7.03125 if dtype is torch.bfloat16 else math.nextafter(7.0, 8.0)
    gate = [7.0, just_over, 3.0, 3.0, 3.0, 3.0, 7.0, -7.0, -just_over]
    up = [2.0, 2.0, 7.0, -7.0, just_over, -just_over, -7.0, 2.0, 2.0]
    gate_passes = [True, False, True, True, True, True, True]
    up_passes = [True, True, True, True, False, False, True]
    x = torch.tensor([gate + up], dtype=dtype)
    assert x[0, 1] > 7  # the dtype can hold it

    dx = gradient(KINDS[kind](**GPT_OSS), x, torch.ones(1, 9, dtype=dtype))
    (exact,) = exact_copies(x)
    (expected,) = torch.autograd.grad(glu(exact, kind, **GPT_OSS).sum(), exact)
    torch.testing.assert_close(dx.double(), expected, rtol=1.01 * ROUNDOFF[dtype] + 1e-12, atol=1e-12)

    # at a gate of -7 a slope may well be zero without a bound
    assert (dx[0, :7] != 0).tolist() == gate_passes
    assert (dx[0, 9:16] != 0).tolist() == up_passes


def test_reglu_has_slope_zero_at_zero():
    x = torch.tensor([[0.0, -0.0, -1.0, 5e-324, 3.0, 3.0, 3.0, 3.0]], dtype=torch.float64)
    dx = gradient(fm.ReGLU(offset=1.0), x, torch.ones(1, 4, dtype=torch.float64))
    assert dx.tolist() == [[0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 5e-324]]


@every_kind
@pytest.mark.parametrize("options", [{}, GPT_OSS], ids=["plain", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_nan_reaches_its_own_results_and_no_others(kind, options, dtype):
    op = KINDS[kind](**options)
    x = torch.rand(3, 8, dtype=dtype) + 0.5
    dy = torch.rand(3, 4, dtype=dtype) + 0.5
    y, dx = op(x), gradient(op, x, dy)

    def changed(before, after):
        same = before == after
        assert after[~same].isnan().all()
        return (~same).nonzero().tolist()

    in_gate = x.clone()
    in_gate[1, 2] = math.nan
    assert changed(y, op(in_gate)) == [[1, 2]]
    # torch's ReLU has slope 1 at NaN: the gradient of the gate is that of a positive one, the gradient of up is NaN
    assert changed(dx, gradient(op, in_gate, dy)) == ([[1, 6]] if kind == "reglu" else [[1, 2], [1, 6]])

    in_up = x.clone()
    in_up[1, 6] = math.nan
    assert changed(y, op(in_up)) == [[1, 2]]
    assert changed(dx, gradient(op, in_up, dy)) == [[1, 2]]  # du does not depend on u

    in_dy = dy.clone()
    in_dy[1, 2] = math.nan
    assert changed(dx, gradient(op, x, in_dy)) == [[1, 2], [1, 6]]


@every_kind
def test_infinities_without_a_limit_come_through(kind):
    x = torch.tensor([[math.inf, 2.0, 1.0, 3.0, math.inf, -math.inf]], dtype=torch.float32)
    if kind == "geglu_erf" and torch.nn.functional.gelu(1.0 * x[:, :3]).isnan().any():
        pytest.skip("this torch's own gelu of infinity is NaN (2.11 on some processors)")
    assert KINDS[kind]()(x).tolist() == [[math.inf, math.inf, -math.inf]]


@every_kind
def test_infinities_are_clamped_like_any_other_value(kind):
    op = KINDS[kind](**GPT_OSS)
    dy = torch.ones(1, 3, dtype=torch.float64)
    infinite = torch.tensor([[math.inf, 2.0, 1.0, 3.0, math.inf, -math.inf]], dtype=torch.float64)
    large = infinite.clamp(-1e6, 1e6)
    assert torch.equal(op(infinite), op(large))
    dx = gradient(op, infinite, dy)
    assert torch.equal(dx, gradient(op, large, dy))
    assert dx[0, [0, 4, 5]].tolist() == [0.0, 0.0, 0.0]
    assert (dx[0, 1:4] != 0).all()


@every_kind
@every_option
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_accuracy_is_that_of_one_rounding(kind, options, dtype):
    x, dy = torch.randn(64, 96).to(dtype), torch.randn(64, 48).to(dtype)
    op = KINDS[kind](**options)
    y, dx = op(x), gradient(op, x, dy)
    assert y.dtype is dx.dtype is dtype
    (exact,) = exact_copies(x)
    expected = glu(exact, kind, **options)
    (expected_dx,) = torch.autograd.grad(expected, exact, dy.double())
    # half-precision results are rounded once; fp32 and fp64 ones at each operation
    bound = ROUNDOFF[dtype] * (1 if dtype.itemsize == 2 else 8)
    assert relative_error(y, expected) < bound
    assert relative_error(dx, expected_dx) < bound


@every_kind
def test_half_precision_keeps_large_products_in_between(kind):
    # u * phi'(g) alone overflows fp16, where the largest number is 65504
    x = torch.tensor([[40000.0, 4.0]], dtype=torch.float16)
    assert KINDS[kind](limit=None)(x).tolist() == [[math.inf]]
    assert KINDS[kind](limit=1e4, offset=-3.5)(x).item() == pytest.approx(5000.0, rel=2**-11)


def test_strided_rows_and_expanded_gradients():
    storage = torch.randn(8, 5, dtype=torch.float64)
    x = storage.T.requires_grad_()
    assert not x.is_contiguous()
    (dx,) = torch.autograd.grad(fm.SwiGLU()(x), x, torch.ones((), dtype=torch.float64).expand(5, 4))
    (expected,) = torch.autograd.grad(glu(x, "swiglu").sum(), x)
    torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-13)
