"""GroupedLinear alone, against a loop of ``F.linear`` over the experts and against ``F.grouped_mm``."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from oracles import exact_copies, grouped_linear
from rounding import ROUNDOFF, relative_error
from strategies import splits_and_rows

import fusedmoe as fm

HALF = [torch.bfloat16, torch.float16]


def layer(experts, k, n, bias=False, dtype=torch.float64):
    op = fm.GroupedLinear(experts, k, n, bias=bias, dtype=torch.float64)
    torch.nn.init.normal_(op.weight)
    if bias:
        torch.nn.init.normal_(op.bias)
    return op.to(dtype)


def gradients(y, dy, *wanted):
    return torch.autograd.grad(y, [t for t in wanted if t is not None], dy)


# widths of 8 go through F.grouped_mm where the dtype does, widths of 3 and 5 through the loop
@given(splits_and_rows())
@pytest.mark.parametrize(("k", "n"), [(8, 16), (3, 5)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_splits(dtype, bias, k, n, drawn):
    splits, rows = drawn
    op = layer(len(splits), k, n, bias, dtype)
    x, dy = torch.randn(rows, k, dtype=dtype, requires_grad=True), torch.randn(rows, n, dtype=dtype)
    y, expected = op(x, splits=splits), grouped_linear(x, op.weight, op.bias, splits)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(y, expected, **tolerance)
    found = gradients(y, dy, x, op.weight, op.bias)
    for got, want in zip(found, gradients(expected, dy, x, op.weight, op.bias), strict=True):
        torch.testing.assert_close(got, want, **tolerance)
    # zeros that are zeros, not small
    total = int(splits.sum())
    assert not y[total:].any()
    assert not found[0][total:].any()
    for parameter_grad in found[1:]:
        assert not parameter_grad[splits == 0].any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("counts", [[2, 0, 1], [0, 3, 0], [0, 0, 0]])
def test_gradcheck(counts, bias):
    op = layer(3, 2, 3, bias)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)  # a row more than the splits have
    names = ["weight", "bias"] if bias else ["weight"]

    def run(x, *parameters):
        parameters = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(op, parameters, (x,), {"splits": torch.tensor(counts)})

    assert torch.autograd.gradcheck(run, (x, *[getattr(op, n) for n in names]))


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_accuracy_against_fp64_of_the_same_operands(dtype, bias):
    splits = torch.tensor([17, 0, 40, 1, 6])
    op = layer(5, 96, 64, bias, dtype)
    x, dy = torch.randn(64, 96).to(dtype).requires_grad_(), torch.randn(64, 64).to(dtype)
    y = op(x, splits=splits)
    found = [y, *gradients(y, dy, x, op.weight, op.bias)]
    exact_x, weight, *rest = exact_copies(x, *op.parameters())
    exact_bias = rest[0] if bias else None
    expected = grouped_linear(exact_x, weight, exact_bias, splits)
    wanted = [expected, *gradients(expected, dy.double(), exact_x, weight, exact_bias)]
    # half precision: fp32 sums, one rounding (two with a bias); otherwise the error of the sum itself
    bound = ROUNDOFF[dtype] * (1 + bias if dtype in HALF else 32)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype is dtype
        assert relative_error(got, want) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_own_grouped_mm_agrees(dtype):
    splits = torch.tensor([5, 0, 9, 2])
    offsets = splits.cumsum(0).to(torch.int32)
    op = layer(4, 32, 16, dtype=dtype)
    x = torch.randn(16, 32).to(dtype).requires_grad_()
    y = op(x, splits=splits)
    assert torch.equal(y, F.grouped_mm(x.detach(), op.weight.detach().mT, offs=offsets))
    dy = torch.randn(16, 16).to(dtype)
    dx, dw = gradients(y, dy, x, op.weight)
    assert torch.equal(dx, F.grouped_mm(dy, op.weight.detach(), offs=offsets))
    assert torch.equal(dw, F.grouped_mm(dy.mT, x.detach(), offs=offsets))


def test_one_expert_is_a_linear_layer():
    op = layer(1, 4, 3, bias=True)
    x = torch.randn(6, 4, dtype=torch.float64)
    y = op(x, splits=torch.tensor([6]))
    torch.testing.assert_close(y, F.linear(x, op.weight[0], op.bias[0]), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_splits_of_any_integer_dtype(dtype):
    counts = [100, 27, 100, 73]  # their sum fits neither int8 nor uint8
    op = layer(4, 2, 2)
    x = torch.randn(301, 2, dtype=torch.float64)
    y = op(x, splits=torch.tensor(counts, dtype=dtype))
    expected = grouped_linear(x, op.weight, None, torch.tensor(counts))
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_nan_stays_with_its_expert(dtype):
    splits = torch.tensor([3, 3, 2])
    op = layer(3, 8, 8, bias=True, dtype=dtype)
    x, dy = torch.randn(8, 8).to(dtype), torch.randn(8, 8).to(dtype)
    x[4, 1] = dy[6, 2] = float("nan")
    x.requires_grad_()
    y = op(x, splits=splits)
    dx, dw, db = gradients(y, dy, x, op.weight, op.bias)
    rows = torch.arange(8)
    assert torch.equal(y.isnan().any(1), rows == 4)
    assert torch.equal(dx.isnan().any(1), rows == 6)
    assert dw.isnan().flatten(1).any(1).tolist() == [False, True, True]
    assert db.isnan().any(1).tolist() == [False, False, True]


def test_no_rows():
    op = layer(3, 4, 5, bias=True)
    x = torch.empty(0, 4, dtype=torch.float64, requires_grad=True)
    y = op(x, splits=torch.zeros(3, dtype=torch.int64))
    assert y.shape == (0, 5)
    y.sum().backward()
    assert x.grad.shape == (0, 4)
    assert op.weight.grad.shape == (3, 5, 4)
    assert not op.weight.grad.any()
    assert op.bias.grad.shape == (3, 5)
    assert not op.bias.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_the_same_each_time(dtype):
    splits = torch.tensor([30, 0, 33, 1])
    op = layer(4, 64, 32, bias=True, dtype=dtype)
    x, dy = torch.randn(64, 64).to(dtype).requires_grad_(), torch.randn(64, 32).to(dtype)

    def run():
        y = op(x, splits=splits)
        return (y, *gradients(y, dy, x, op.weight, op.bias))

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_the_bias_gradient_is_summed_in_fp32():
    # one row of 256 and 255 of 1: a bf16 sum would stay at 256
    op = layer(2, 1, 1, bias=True, dtype=torch.bfloat16)
    dy = torch.ones(512, 1, dtype=torch.bfloat16)
    dy[[0, 256]] = 256
    op(torch.zeros(512, 1, dtype=torch.bfloat16), splits=torch.tensor([256, 256])).backward(dy)
    assert op.bias.grad.tolist() == [[512.0], [512.0]]  # 511 rounds to 512
