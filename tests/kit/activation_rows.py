"""Rows for the kernels that apply activations, and their results and gradients in fp64."""

import torch

from fusedmoe.kernels.rows.activation.functions import bind_activation, bind_activation_backward
from fusedmoe.numerics.activations import Activation
from kit.hopper import DEVICE
from kit.hopper_products import BF16, FP16, FP32, act
from kit.poison import nan_in_new_tensors

TOLERANCE = {BF16: 4e-3, FP16: 6e-4, FP32: 2e-5}  # of norms
CLAMPED = {"limit": 2.0, "alpha": 1.702, "offset": 1.0}
ACTIVATIONS = (
    Activation("swiglu"), Activation("swiglu", interleaved=True), Activation("swiglu", **CLAMPED),
    Activation("swiglu", **CLAMPED, interleaved=True), Activation("geglu_tanh"), Activation("geglu_erf", **CLAMPED),
    Activation("reglu"), Activation("reglu", limit=1.5, offset=0.5), Activation("squared_relu"),
)  # fmt: skip


def rows_of(activation, rows, features, dtype, pitch=0):
    """The preactivation and the gradient of the result; rows may be ``pitch`` further apart, with NaN between them."""

    def values(width):
        t = torch.full((rows, width + pitch), torch.nan, device=DEVICE, dtype=dtype)
        t[:, :width] = torch.randn(rows, width, device=DEVICE)
        return t[:, :width]

    return values(2 * features if activation.gated else features), values(features)


def in_fp64(activation, p, scale, dy):
    """The results and the gradients."""
    p, factor = p.double().requires_grad_(), torch.ones(len(p), device=DEVICE) if scale is None else scale
    factor = factor.double().requires_grad_()
    y = act(activation, p) * factor[:, None]
    return y.detach(), *torch.autograd.grad(y, [p, factor], dy.double())


def assert_result_close(got, want):
    assert got.shape == want.shape
    assert (got.double() - want).norm() <= TOLERANCE[got.dtype] * want.norm()
    assert want.norm() > 0


def check_activation(activation, dtype=BF16, scale=FP32, shape=(70, 264), pitch=0, alone=False):
    """``alone``: also without the results that are not wanted."""
    p, dy = rows_of(activation, *shape, dtype, pitch)
    factor = None if scale is None else (torch.rand(len(p), device=DEVICE) + 0.5).to(scale)
    before = [t.clone() for t in (p, dy)]
    with nan_in_new_tensors():
        y = bind_activation(p, factor, activation)(p, factor)
        of = p, factor, activation, factor is not None, True
        dp, dfactor, again = bind_activation_backward(dy, *of)(dy, p, factor)
        if alone:
            grad, *unwanted = bind_activation_backward(dy, p, factor, activation, False, False)(dy, p, factor)
    assert all(map(torch.equal, (p, dy), before))
    want_y, want_dp, want_dfactor = in_fp64(activation, p, factor, dy)
    for got, want in ((y, want_y), (again, want_y), (dp, want_dp)):
        assert_result_close(got, want)
    if alone:
        assert unwanted == [None, None]
        assert_result_close(grad, want_dp)
    if factor is None:
        assert dfactor is None
    else:
        assert dfactor.dtype is scale
        assert_result_close(dfactor, want_dfactor)
