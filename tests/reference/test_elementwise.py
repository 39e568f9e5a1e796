"""The gated linear units, SquaredReLU and Scale, each alone: values, derivatives, bounds, NaN and Inf, every dtype."""

import math

import pytest
import torch
from kit.compare import assert_accurate, assert_close, assert_same_function, pairwise, with_gradients
from kit.layers import leaf
from kit.oracles import exact_copies, glu, scale, squared_relu
from kit.rounding import ROUNDOFF, error_bound

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
GPT_OSS = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}


def gradient(op, x, dy):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(op(x), x, dy)[0]


@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "plain")
def test_the_formula(kind, options):
    op = KINDS[kind](**options)
    for shape in [(5, 8), (2, 3, 8), (8,)]:
        x = (1.5 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
        assert_same_function(op(x), glu(x, kind, **options), [x], rtol=1e-12, atol=1e-13)
    # a finite difference must not step over a kink
    x = torch.randn(4, 6, dtype=torch.float64)
    for kink in (0.0, options.get("limit", 100.0), -options.get("limit", 100.0)):
        x = torch.where((x - kink).abs() < 0.02, kink + 0.04, x)
    assert torch.autograd.gradcheck(op, (x.requires_grad_(),))


@pytest.mark.parametrize(("kind", "options", "dtype"), pairwise([*KINDS], OPTIONS, [*ROUNDOFF]), ids=str)
def test_accuracy_is_that_of_one_rounding(kind, options, dtype):
    x, dy = leaf(64, 96, dtype=dtype), torch.randn(64, 48).to(dtype)
    found = with_gradients(KINDS[kind](**options)(x), [x], dy)
    assert all(t.dtype is dtype for t in found)
    (exact,) = exact_copies(x)
    # half-precision results are rounded once; fp32 and fp64 ones at each of at most eight operations
    bound = ROUNDOFF[dtype] * (1 if dtype.itemsize == 2 else 8)
    assert_accurate(found, with_gradients(glu(exact, kind, **options), [exact], dy.double()), bound)


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_gradient_passes_at_the_bound_itself_and_stops_after_it(kind, dtype):
    just_over = 7.03125 if dtype is torch.bfloat16 else math.nextafter(7.0, 8.0)
    gate = [7.0, just_over, 3.0, 3.0, 3.0, 3.0, 7.0, -7.0, -just_over]
    up = [2.0, 2.0, 7.0, -7.0, just_over, -just_over, -7.0, 2.0, 2.0]
    x = torch.tensor([gate + up], dtype=dtype)
    assert x[0, 1] > 7  # the dtype can hold it
    dx = gradient(KINDS[kind](**GPT_OSS), x, torch.ones(1, 9, dtype=dtype))
    (exact,) = exact_copies(x)
    (expected,) = torch.autograd.grad(glu(exact, kind, **GPT_OSS).sum(), exact)
    torch.testing.assert_close(dx.double(), expected, rtol=1.01 * ROUNDOFF[dtype] + 1e-12, atol=1e-12)
    # at a gate of -7 a slope may well be zero without a bound
    assert (dx[0, :7] != 0).tolist() == [True, False, True, True, True, True, True]
    assert (dx[0, 9:16] != 0).tolist() == [True, True, True, True, False, False, True]


def test_reglu_has_slope_zero_at_zero():
    x = torch.tensor([[0.0, -0.0, -1.0, 5e-324, 3.0, 3.0, 3.0, 3.0]], dtype=torch.float64)
    dx = gradient(fm.ReGLU(offset=1.0), x, torch.ones(1, 4, dtype=torch.float64))
    assert dx.tolist() == [[0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 5e-324]]


@pytest.mark.parametrize(
    ("kind", "options", "dtype"), pairwise([*KINDS], [{}, GPT_OSS], [torch.float64, torch.bfloat16]), ids=str
)
def test_a_nan_reaches_its_own_results_and_no_others(kind, options, dtype):
    op = KINDS[kind](**options)
    x, dy = torch.rand(3, 8, dtype=dtype) + 0.5, torch.rand(3, 4, dtype=dtype) + 0.5
    y, dx = op(x), gradient(op, x, dy)

    def changed(before, after):
        same = before == after
        assert after[~same].isnan().all()
        return (~same).nonzero().tolist()

    def nan_at(t, *place):
        t = t.clone()
        t[place] = math.nan
        return t

    assert changed(y, op(nan_at(x, 1, 2))) == changed(y, op(nan_at(x, 1, 6))) == [[1, 2]]
    # torch's ReLU has slope 1 at NaN: the gradient of the gate is that of a positive one, the gradient of up is NaN
    assert changed(dx, gradient(op, nan_at(x, 1, 2), dy)) == ([[1, 6]] if kind == "reglu" else [[1, 2], [1, 6]])
    assert changed(dx, gradient(op, nan_at(x, 1, 6), dy)) == [[1, 2]]  # du does not depend on u
    assert changed(dx, gradient(op, x, nan_at(dy, 1, 2))) == [[1, 2], [1, 6]]


@every_kind
def test_half_precision_keeps_large_products_in_between(kind):
    # u * phi'(g) alone overflows fp16, where the largest number is 65504
    x = torch.tensor([[40000.0, 4.0]], dtype=torch.float16)
    assert KINDS[kind](limit=None)(x).tolist() == [[math.inf]]
    assert KINDS[kind](limit=1e4, offset=-3.5)(x).item() == pytest.approx(5000.0, rel=2**-11)


# --- SquaredReLU ---------------------------------------------------------------------------------------------------


def test_squared_relu():
    for shape in [(5, 7), (2, 3, 4), (6,)]:
        x = leaf(*shape)
        assert_same_function(fm.SquaredReLU()(x), squared_relu(x), [x], rtol=1e-15, atol=0)
    # its slope is continuous at zero
    x = torch.tensor([[-1.0, 0.0, 0.3, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fm.SquaredReLU(), (x,))
    x = torch.tensor([[0.0, -0.0, math.nan, math.inf, -math.inf, 3.0]], requires_grad=True)
    y, dx = with_gradients(fm.SquaredReLU()(x), [x])
    torch.testing.assert_close(y, torch.tensor([[0.0, 0.0, math.nan, math.inf, 0.0, 9.0]]), equal_nan=True)
    torch.testing.assert_close(dx, torch.tensor([[0.0, 0.0, math.nan, math.inf, 0.0, 6.0]]), equal_nan=True)


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_accuracy_of_squared_relu(dtype):
    x, dy = leaf(64, 48, dtype=dtype), torch.randn(64, 48).to(dtype)
    found = with_gradients(fm.SquaredReLU()(x), [x], dy)
    assert all(t.dtype is dtype for t in found)
    (exact,) = exact_copies(x)
    # fp64 is compared with itself
    assert_accurate(found, with_gradients(squared_relu(exact), [exact], dy.double()), ROUNDOFF[dtype] + 1e-15)


# --- Scale ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 4), (0, 4)])
def test_scale(shape):
    op, x, s = fm.Scale("loudness"), leaf(*shape), leaf(shape[0])
    assert_same_function(op(x, loudness=s), scale(x, s), [x, s], rtol=1e-13, atol=1e-14, zeros=not shape[0])
    assert torch.autograd.gradcheck(lambda x, s: op(x, loudness=s), (x, s))
    with pytest.raises(fm.InputError, match="loudness"):
        op(x, probs=s)


@pytest.mark.parametrize("s_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", ROUNDOFF, ids=str)
def test_each_gradient_of_scale_has_the_dtype_of_its_value_and_its_accuracy(x_dtype, s_dtype):
    x, s, dy = leaf(32, 64, dtype=x_dtype), leaf(32, dtype=s_dtype), torch.randn(32, 64).to(x_dtype)
    found = with_gradients(fm.Scale("s")(x, s=s), [x, s], dy)
    assert [t.dtype for t in found] == [x_dtype, x_dtype, s_dtype]
    exact = exact_copies(x, s)
    want = with_gradients(scale(*exact), exact, dy.double())
    assert_accurate(found[:2], want[:2], ROUNDOFF[x_dtype] + 1e-15)
    sums = error_bound(torch.promote_types(torch.promote_types(x_dtype, s_dtype), torch.float32), 64, roundings=0)
    assert_accurate(found[2], want[2], ROUNDOFF[s_dtype] + sums)


def test_a_scale_of_nan_stays_in_its_row():
    x, s = exact_copies(torch.randn(3, 4), torch.tensor([1.0, math.nan, 2.0]))
    y, dx, ds = with_gradients(fm.Scale("s")(x, s=s), [x, s])
    assert y.isnan().all(1).tolist() == dx.isnan().all(1).tolist() == [False, True, False]
    assert_close(ds, x.sum(1))
