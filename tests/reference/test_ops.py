"""Ops and chains: values and gradients against the formula in fp64 of the same operands."""

import math

import pytest
import torch
from hypothesis import example, given
from kit.compare import assert_accurate, assert_bitwise, assert_same_function, pairwise
from kit.layers import CHAINS, ROUTED, H, chain, drawn, leaf, outcome, poison_tail, runtime_inputs, wanted_of
from kit.oracles import exact_copies, exact_outcome, grouped_linear, meaning, scale
from kit.rounding import ROUNDOFF, error_bound
from kit.splits import routings, splits_and_rows

import fusedmoe as fm
from fusedmoe.numerics.recipes import NVFP4

BF16 = torch.bfloat16
KINDS = [fm.SwiGLU, fm.GeGLU, lambda **options: fm.GeGLU(approximate="none", **options), fm.ReGLU]
OPTIONS = [
    {},
    {"interleaved": True},
    {"limit": 0.75},
    {"alpha": 1.702},
    {"offset": 1.0},
    {"limit": 1.25, "alpha": 1.702, "offset": 1.0, "interleaved": True},
    {"limit": 0.5, "alpha": 0.6, "offset": -0.25},
]
ACTIVATIONS = [*(make(**options) for make in KINDS for options in OPTIONS), fm.SquaredReLU()]
CLAMPED = [*(make(limit=7.0, alpha=1.702, offset=1.0) for make in KINDS), fm.SquaredReLU()]


@pytest.mark.parametrize(
    ("op", "shape", "dtype"), pairwise(ACTIVATIONS, [(64, 96), (4, 16, 96), (96,)], [*ROUNDOFF]), ids=str
)
def test_activations(op, shape, dtype):
    x = leaf(*shape, dtype=dtype)
    found = outcome(op, x, dy := torch.randn_like(op(x)))
    assert all(t.dtype is dtype for t in found.values())
    # half-precision results are rounded once; fp32 and fp64 ones at each of at most eight operations
    assert_accurate(found, exact_outcome(op, x, dy), ROUNDOFF[dtype] * (1 if dtype.itemsize == 2 else 8) + 1e-15)


@pytest.mark.parametrize("op", CLAMPED, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float64], ids=str)
def test_activations_at_their_bounds_at_zero_and_of_nan(op, dtype):
    """The gradient passes at the bound itself and stops after it. A NaN reaches its own results and no others."""
    over = 7.03125 if dtype is BF16 else math.nextafter(7.0, 8.0)
    gate = [7.0, over, 3.0, 3.0, 3.0, 3.0, 7.0, -7.0, -over, 0.0, -0.0, math.nan, 3.0]
    up = [2.0, 2.0, 7.0, -7.0, over, -over, -7.0, 2.0, 2.0, 3.0, 3.0, 3.0, math.nan]
    x = torch.tensor([gate + up], dtype=dtype).requires_grad_()
    assert x[0, 1] > 7  # the dtype can hold it
    found = outcome(op, x, dy := torch.ones_like(op(x)))
    for name, want in exact_outcome(op, x, dy).items():
        tolerance = {"rtol": 1.01 * ROUNDOFF[dtype] + 1e-12, "atol": 1e-12}
        torch.testing.assert_close(found[name].double(), want, **tolerance, equal_nan=True)
        assert want.isnan().any()


@pytest.mark.parametrize("make", KINDS)
def test_half_precision_keeps_large_products_in_between(make):
    # u * phi'(g) alone overflows fp16, where the largest number is 65504
    x = torch.tensor([[40000.0, 4.0]], dtype=torch.float16)
    assert make(limit=1e4, offset=-3.5)(x).item() == pytest.approx(5000.0, rel=2**-11)


@pytest.mark.parametrize("s_dtype", [torch.float32, torch.float64, BF16])
@pytest.mark.parametrize("x_dtype", ROUNDOFF, ids=str)
def test_each_gradient_of_scale_has_the_dtype_of_its_value_and_its_accuracy(x_dtype, s_dtype):
    x, s, dy = leaf(32, 2, 32, dtype=x_dtype), leaf(32, dtype=s_dtype), torch.randn(32, 2, 32).to(x_dtype)
    found = outcome(fm.Scale("s"), x, dy, s=s)
    assert [t.dtype for t in found.values()] == [x_dtype, x_dtype, s_dtype]
    exact_x, exact_s = exact_copies(x, s)
    want = outcome(fm.Scale("s"), exact_x, dy.double(), call=scale, s=exact_s)
    sums = error_bound(torch.promote_types(torch.promote_types(x_dtype, s_dtype), torch.float32), 64, roundings=0)
    for name, bound in (("y", ROUNDOFF[x_dtype]), ("x", ROUNDOFF[x_dtype]), ("s", ROUNDOFF[s_dtype] + sums)):
        assert_accurate(found[name], want[name], bound + 1e-15)


# --- linear layers -------------------------------------------------------------------------------------------------

SPLITS = torch.tensor([17, 0, 40, 1, 6])
LAYERS = {
    "grouped": lambda bias: (fm.GroupedLinear(5, 96, 64, bias=bias), (64,), {"splits": SPLITS}),
    "narrow": lambda bias: (fm.GroupedLinear(5, 3, 5, bias=bias), (64,), {"splits": SPLITS}),  # not F.grouped_mm's
    "dense": lambda bias: (fm.Linear(96, 64, bias=bias), (4, 16), {}),
}


@pytest.mark.parametrize(("name", "bias", "dtype"), pairwise([*LAYERS], [False, True], [*ROUNDOFF]), ids=str)
def test_linear_layers(name, bias, dtype):
    op, shape, named = LAYERS[name](bias)
    x, dy = leaf(*shape, op.in_features, dtype=dtype), torch.randn(*shape, op.out_features).to(dtype)
    found = outcome(drawn(op, 1.0).to(dtype), x, dy, **named)
    assert all(t.dtype is dtype for t in found.values())
    # fp32 sums and one rounding, two with a bias
    assert_accurate(found, exact_outcome(op, x, dy, **named), error_bound(dtype, 96, roundings=1 + bias))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_splits_of_any_integer_dtype(dtype):
    counts = [100, 27, 100, 73]  # their sum fits neither int8 nor uint8
    op, x = fm.GroupedLinear(4, 2, 2, dtype=torch.float64), torch.randn(301, 2, dtype=torch.float64)
    expected = grouped_linear(x, op.weight, None, torch.tensor(counts))
    torch.testing.assert_close(op(x, splits=torch.tensor(counts, dtype=dtype)), expected, rtol=1e-13, atol=1e-14)


def test_the_bias_gradient_is_summed_in_fp32():
    # one row of 256 and 255 of 1: a bf16 sum would stay at 256
    op, dy = fm.GroupedLinear(2, 1, 1, bias=True, dtype=BF16), torch.ones(512, 1, dtype=BF16)
    dy[[0, 256]] = 256
    op(torch.zeros(512, 1, dtype=BF16), splits=torch.tensor([256, 256])).backward(dy)
    assert op.bias.grad.tolist() == [[512.0], [512.0]]  # 511 rounds to 512


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", NVFP4(stochastic_rounding=False)])
def test_rows_of_no_expert_count_in_no_gradient_of_a_dense_layer(recipe, accumulate):
    fc = fm.Linear(32, 32, accumulate_into_main_grad=accumulate)
    seq = fm.Sequential(fm.GroupedLinear(2, 32, 32), fc, fm.GroupedLinear(2, 32, 32))
    x, dy = leaf(10, 32, dtype=torch.float32), torch.randn(10, 32)

    def results(poison):
        poison_tail(6, x, dy, value=poison)
        seq.zero_grad()
        x.grad, fc.weight.main_grad = None, torch.zeros(32, 32)
        with fm.recipe(recipe):
            y = seq(x, splits=torch.tensor([2, 4]))
            y.backward(dy)
        dw = fc.weight.main_grad if accumulate else fc.weight.grad
        return [y.detach(), x.grad, dw, *[p.grad for p in seq.parameters() if p is not fc.weight]]

    assert_bitwise(results(math.nan), results(0.5))


# --- chains --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHAINS)
@example((torch.tensor([0, 0, 0]), 0))
@given(splits_and_rows())
def test_any_splits(name, drawn):
    splits, rows = drawn
    seq, x, total = chain(name, len(splits)), leaf(rows, H), int(splits.sum())
    inputs = runtime_inputs(seq, rows, splits)
    y, wanted = seq(x, **inputs), wanted_of(seq, x, inputs).values()
    assert not y[total:].any()
    assert_same_function(y[:total], meaning(seq, x, **inputs)[:total], wanted, zeros=True)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_accuracy_of_chains(name, dtype):
    seq, x = chain(name, 4, dtype), leaf(56, H, dtype=dtype)
    inputs = runtime_inputs(seq, 56, torch.tensor([20, 0, 31, 1]), dtype)
    found = outcome(seq, x, dy := torch.randn_like(seq(x, **inputs)), **inputs)
    assert all(t.dtype is dtype for t in found.values())
    # one rounding after each op, forward and backward; their errors add like those of independent draws
    assert_accurate(found, exact_outcome(seq, x, dy, **inputs), ROUNDOFF[dtype] * (3 if dtype.itemsize == 2 else 16))


@pytest.mark.parametrize("kind", ROUTED)
@given(routings())
def test_any_routing(kind, drawn):
    index, experts = drawn
    seq, x = chain(kind, experts), leaf(len(index), H)
    weight = (torch.rand(index.shape, dtype=torch.float64) + 0.5).requires_grad_(kind != "no weights")
    routing = {"expert_index": index, "expert_weight": weight}
    wanted = wanted_of(seq, x, routing).values()
    assert_same_function(seq(x, **routing), meaning(seq, x, **routing), wanted, zeros=True)  # SquaredReLU of one row
