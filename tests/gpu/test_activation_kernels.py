"""The kernels that apply activations to rows: against fp64, between NaN."""

import pytest
import torch
from kit.activation_rows import ACTIVATIONS, assert_result_close, check_activation, in_fp64, rows_of
from kit.hopper import DEVICE, needs_hopper
from kit.hopper_products import BF16, FP16, FP32, kernels_of

from fusedmoe.kernels.rows.activation.functions import bind_activation, bind_activation_backward
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


def test_a_row_of_nan_spoils_no_other():
    activation = ACTIVATIONS[2]
    p, dy = rows_of(activation, 9, 40, BF16)
    factor = torch.rand(9, device=DEVICE)

    def results():
        y = bind_activation(p, factor, activation)(p, factor)
        return y, *bind_activation_backward(dy, p, factor, activation, True, True)(dy, p, factor)

    want = results()
    p[4], factor[6] = torch.nan, torch.nan
    spoilt = torch.tensor([4, 6], device=DEVICE)
    for before, after in zip(want, results(), strict=True):
        kept = torch.ones(9, dtype=torch.bool, device=DEVICE)
        kept[spoilt] = False
        assert torch.equal(before[kept], after[kept])
        assert after[4].isnan().all()


@pytest.mark.parametrize("activation", [Activation("swiglu", limit=2.0), Activation("reglu", limit=2.0)], ids=str)
def test_the_bounds_of_a_clamp_are_inside(activation):
    """Values at a limit have the derivative of those inside; beyond it, they have none."""
    p = torch.tensor([[2.0, 2.125, 0.5, 0.5] + [0.5] * 4 + [0.5, 0.5, 2.0, -2.125] + [0.5] * 4], device=DEVICE).to(BF16)
    dy = torch.ones(1, 8, device=DEVICE, dtype=BF16)
    dp, *_ = bind_activation_backward(dy, p, None, activation, False, False)(dy, p, None)
    assert_result_close(dp, in_fp64(activation, p, None, dy)[1])
    assert dp[0, 0] != 0 == dp[0, 1]
    assert dp[0, 10] != 0 == dp[0, 11]


def test_the_same_bits_at_every_call():
    activation = Activation("geglu_tanh")
    p, dy = rows_of(activation, 300, 1032, BF16)
    factor = torch.rand(300, device=DEVICE)
    backward = bind_activation_backward(dy, p, factor, activation, True, True)
    first = backward(dy, p, factor)
    for _ in range(5):
        assert all(map(torch.equal, first, backward(dy, p, factor)))
