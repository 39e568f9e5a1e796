"""The kernels that apply activations to rows: against fp64, between NaN."""

import pytest
import torch
from kit.activation_rows import ACTIVATIONS, assert_result_close, check_activation, in_fp64
from kit.hopper import DEVICE, needs_hopper
from kit.hopper_products import BF16, FP16, FP32, kernels_of

from fusedmoe.kernels.rows.activation.functions import bind_activation_backward
from fusedmoe.numerics.activations import Activation

pytestmark = needs_hopper

# rows and features of the result: less than a warp's vectors, more, and more than a warp loads at once
SHAPES = ((1, 8), (3, 24), (70, 264), (33, 768), (5, 2056))


# each activation with a scale in fp32, and with another dtype or scale
ROWS = [*((a, BF16, FP32) for a in ACTIVATIONS)]
ROWS += [(a, (FP16, BF16)[i % 2], (None, BF16, FP16)[i % 3]) for i, a in enumerate(ACTIVATIONS)]


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    build_ahead(lambda: kernels_of([lambda row=row: check_activation(*row, (1, 8)) for row in ROWS]))


@pytest.mark.parametrize(("activation", "dtype", "scale"), ROWS, ids=str)
def test_results_and_gradients(activation, dtype, scale):
    for number, shape in enumerate(SHAPES):
        check_activation(activation, dtype, scale, shape, 24 * (number % 2), alone=activation in ACTIVATIONS[:2])


@pytest.mark.parametrize("activation", [Activation("swiglu", limit=2.0), Activation("reglu", limit=2.0)], ids=str)
def test_the_bounds_of_a_clamp_are_inside(activation):
    """Values at a limit have the derivative of those inside; beyond it, they have none."""
    p = torch.tensor([[2.0, 2.125, 0.5, 0.5] + [0.5] * 4 + [0.5, 0.5, 2.0, -2.125] + [0.5] * 4], device=DEVICE).to(BF16)
    dy = torch.ones(1, 8, device=DEVICE, dtype=BF16)
    dp, *_ = bind_activation_backward(dy, p, None, activation, False, False)(dy, p, None)
    assert_result_close(dp, in_fp64(activation, p, None, dy)[1])
    assert dp[0, 0] != 0 == dp[0, 1]
    assert dp[0, 10] != 0 == dp[0, 11]
