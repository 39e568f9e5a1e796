"""SquaredReLU alone."""

import math

import pytest
import torch
from oracles import exact_copies, squared_relu
from rounding import ROUNDOFF, relative_error

import fusedmoe as fm


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 4), (6,)])
def test_values_and_gradients_are_those_of_the_formula(shape):
    (x,) = exact_copies(torch.randn(shape))
    y, expected = fm.SquaredReLU()(x), squared_relu(x)
    torch.testing.assert_close(y, expected, rtol=1e-15, atol=0)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, torch.where(x > 0, 2 * x * dy, 0), rtol=1e-15, atol=0)


def test_gradcheck():
    # its slope is continuous at zero
    x = torch.tensor([[-1.0, 0.0, 0.3, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fm.SquaredReLU(), (x,))


def test_zero_nan_and_infinities():
    x = torch.tensor([[0.0, -0.0, math.nan, math.inf, -math.inf, 3.0]], requires_grad=True)
    y = fm.SquaredReLU()(x)
    torch.testing.assert_close(y, torch.tensor([[0.0, 0.0, math.nan, math.inf, 0.0, 9.0]]), equal_nan=True)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(dx, torch.tensor([[0.0, 0.0, math.nan, math.inf, 0.0, 6.0]]), equal_nan=True)


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_accuracy_is_that_of_one_rounding(dtype):
    x, dy = torch.randn(64, 48).to(dtype).requires_grad_(), torch.randn(64, 48).to(dtype)
    y = fm.SquaredReLU()(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert y.dtype is dx.dtype is dtype
    (exact,) = exact_copies(x)
    expected = squared_relu(exact)
    (expected_dx,) = torch.autograd.grad(expected, exact, dy.double())
    bound = ROUNDOFF[dtype] + 1e-15  # fp64 is compared with itself
    assert relative_error(y, expected) < bound
    assert relative_error(dx, expected_dx) < bound
