"""Scale alone: rows times a runtime input, and both gradients."""

import pytest
import torch
from oracles import exact_copies, scale
from rounding import ROUNDOFF, relative_error

import fusedmoe as fm


@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 4), (0, 4)])
def test_values_and_gradients_are_those_of_the_formula(shape):
    x, s = exact_copies(torch.randn(shape), torch.randn(shape[0]))
    y, expected = fm.Scale("probs")(x, probs=s), scale(x, s)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    dx, ds = torch.autograd.grad(y, (x, s), dy)
    expected_dx, expected_ds = torch.autograd.grad(expected, (x, s), dy)
    assert torch.equal(dx, expected_dx)
    torch.testing.assert_close(ds, expected_ds, rtol=1e-13, atol=1e-14)


def test_gradcheck():
    x, s = exact_copies(torch.randn(3, 4), torch.randn(3))
    op = fm.Scale("probs")
    assert torch.autograd.gradcheck(lambda x, s: op(x, probs=s), (x, s))


def test_the_runtime_input_has_the_given_name():
    x, s = torch.randn(2, 3), torch.tensor([2.0, -3.0])
    assert torch.equal(fm.Scale("loudness")(x, loudness=s), x * s[:, None])
    with pytest.raises(fm.InputError, match="loudness"):
        fm.Scale("loudness")(x, probs=s)


@pytest.mark.parametrize("s_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", ROUNDOFF, ids=str)
def test_each_gradient_has_the_dtype_of_its_value_and_its_accuracy(x_dtype, s_dtype):
    x = torch.randn(32, 64).to(x_dtype).requires_grad_()
    s = torch.randn(32).to(s_dtype).requires_grad_()
    dy = torch.randn(32, 64).to(x_dtype)
    y = fm.Scale("s")(x, s=s)
    dx, ds = torch.autograd.grad(y, (x, s), dy)
    assert (y.dtype, dx.dtype, ds.dtype) == (x_dtype, x_dtype, s_dtype)
    exact_x, exact_s = exact_copies(x, s)
    expected = scale(exact_x, exact_s)
    expected_dx, expected_ds = torch.autograd.grad(expected, (exact_x, exact_s), dy.double())
    assert relative_error(y, expected) < ROUNDOFF[x_dtype] + 1e-15
    assert relative_error(dx, expected_dx) < ROUNDOFF[x_dtype] + 1e-15
    computed_in = torch.promote_types(torch.promote_types(x_dtype, s_dtype), torch.float32)
    assert relative_error(ds, expected_ds) < ROUNDOFF[s_dtype] + 8 * ROUNDOFF[computed_in]


def test_only_what_is_wanted_gets_a_gradient():
    x, s = torch.randn(3, 4), torch.randn(3, requires_grad=True)
    fm.Scale("s")(x, s=s).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(s.grad, x.sum(1))


def test_rows_with_nan_keep_it_to_themselves():
    x, s = exact_copies(torch.randn(3, 4), torch.tensor([1.0, float("nan"), 2.0]))
    y = fm.Scale("s")(x, s=s)
    y.sum().backward()
    assert y.isnan().all(1).tolist() == x.grad.isnan().all(1).tolist() == [False, True, False]
    assert s.grad.isfinite().all()
