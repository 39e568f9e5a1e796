"""The kernels that apply activations to rows: against fp64, between NaN."""

import pytest
import torch
from kit.hopper import needs_hopper
from kit.poison import nan_in_new_tensors

import fusedmoe as fm
from fusedmoe.kernels.rows.activation.functions import bind_activation, bind_activation_backward
from fusedmoe.numerics.activations import Activation

pytestmark = needs_hopper

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 4e-3, FP16: 6e-4, FP32: 2e-5}  # of norms
CLAMPED = {"limit": 2.0, "alpha": 1.702, "offset": 1.0}
ACTIVATIONS = (
    Activation("swiglu"), Activation("swiglu", interleaved=True), Activation("swiglu", **CLAMPED),
    Activation("swiglu", **CLAMPED, interleaved=True), Activation("geglu_tanh"), Activation("geglu_erf", **CLAMPED),
    Activation("reglu"), Activation("reglu", limit=1.5, offset=0.5), Activation("squared_relu"),
)  # fmt: skip
CLAMPS = Activation("swiglu", limit=2.0), Activation("reglu", limit=2.0)
SHAPES = ((1, 8), (3, 24), (70, 264), (33, 768), (5, 2056))
"""Rows and features of the result: less than a warp's vectors, more, and more than a warp loads at once."""


def op_of(activation):
    settings = activation.limit, activation.alpha, activation.offset, activation.interleaved
    ops = {
        "swiglu": lambda: fm.SwiGLU(*settings), "geglu_tanh": lambda: fm.GeGLU("tanh", *settings),
        "geglu_erf": lambda: fm.GeGLU("none", *settings), "reglu": lambda: fm.ReGLU(*settings),
        "squared_relu": fm.SquaredReLU,
    }  # fmt: skip
    return ops[activation.kind]()


def rows_of(activation, rows, features, dtype, device, pitch=0):
    """The preactivation and the gradient of the result; rows may be ``pitch`` further apart, with NaN between them."""
    columns = 2 * features if activation.gated else features

    def values(width):
        t = torch.full((rows, width + pitch), torch.nan, device=device, dtype=dtype)
        t[:, :width] = torch.randn(rows, width, device=device)
        return t[:, :width]

    return values(columns), values(features)


def reference(p, scale, dy, op):
    """The results and the gradients in fp64."""
    p, dy = p.double().requires_grad_(), dy.double()
    factor = None if scale is None else scale.double().requires_grad_()
    y = op(p)
    if factor is not None:
        y = y * factor[:, None]
    grads = torch.autograd.grad(y, [p] if factor is None else [p, factor], dy)
    return y.detach(), *grads


def close(got, want, tolerance=None):
    assert got.shape == want.shape
    assert (got.double() - want).norm() <= (tolerance or TOLERANCE[got.dtype]) * want.norm()
    assert want.norm() > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [None, FP32, BF16, FP16], ids=["", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_results_and_gradients(device, activation, dtype, scale, shape):
    rows, features = shape
    p, dy = rows_of(activation, rows, features, dtype, device)
    factor = None if scale is None else (torch.rand(rows, device=device) + 0.5).to(scale)
    with nan_in_new_tensors():
        y = bind_activation(p, factor, activation)(p, factor)
        of = p, factor, activation, factor is not None, True
        dp, dfactor, again = bind_activation_backward(dy, *of)(dy, p, factor)
    want_y, want_dp, *want_dfactor = reference(p, factor, dy, op_of(activation))
    close(y, want_y)
    close(dp, want_dp)
    close(again, want_y)
    if factor is None:
        assert dfactor is None
    else:
        assert dfactor.dtype is scale
        close(dfactor, want_dfactor[0])


@pytest.mark.parametrize("activation", ACTIVATIONS[:2], ids=str)
def test_rows_further_apart(device, activation):
    """And results that are not wanted, which are not written."""
    p, dy = rows_of(activation, 37, 264, BF16, device, pitch=24)
    factor = torch.rand(37, device=device) + 0.5
    operands = p, dy, factor
    before = [t.clone() for t in operands]
    y = bind_activation(p, None, activation)(p, None)
    dp, dfactor, again = bind_activation_backward(dy, p, factor, activation, False, False)(dy, p, factor)
    assert all(map(torch.equal, operands, before))
    assert dfactor is again is None
    want_y, _ = reference(p, None, dy, op_of(activation))
    _, want_dp, _ = reference(p, factor, dy, op_of(activation))
    close(y, want_y)
    close(dp, want_dp)


def test_a_row_of_nan_spoils_no_other(device):
    activation = Activation("swiglu", **CLAMPED)
    p, dy = rows_of(activation, 9, 40, BF16, device)
    factor = torch.rand(9, device=device)

    def results():
        y = bind_activation(p, factor, activation)(p, factor)
        return y, *bind_activation_backward(dy, p, factor, activation, True, True)(dy, p, factor)

    want = results()
    p[4], factor[6] = torch.nan, torch.nan
    spoilt = torch.tensor([4, 6], device=device)
    for before, after in zip(want, results(), strict=True):
        kept = torch.ones(9, dtype=torch.bool, device=device)
        kept[spoilt] = False
        assert torch.equal(before[kept], after[kept])
        assert after[4].isnan().all()


@pytest.mark.parametrize("activation", CLAMPS, ids=str)
def test_the_bounds_of_a_clamp_are_inside(device, activation):
    """Values at a limit have the derivative of those inside; beyond it, they have none."""
    p = torch.tensor([[2.0, 2.125, 0.5, 0.5] + [0.5] * 4 + [0.5, 0.5, 2.0, -2.125] + [0.5] * 4], device=device).to(BF16)
    dy = torch.ones(1, 8, device=device, dtype=BF16)
    dp, *_ = bind_activation_backward(dy, p, None, activation, False, False)(dy, p, None)
    close(dp, reference(p, None, dy, op_of(activation))[1])
    assert dp[0, 0] != 0 == dp[0, 1]
    assert dp[0, 10] != 0 == dp[0, 11]


def test_the_same_bits_at_every_call(device):
    activation = Activation("geglu_tanh")
    p, dy = rows_of(activation, 300, 1032, BF16, device)
    factor = torch.rand(300, device=device)
    backward = bind_activation_backward(dy, p, factor, activation, True, True)
    first = backward(dy, p, factor)
    for _ in range(5):
        assert all(map(torch.equal, first, backward(dy, p, factor)))
