"""GroupedLinear and Linear alone, against a loop of ``F.linear`` over the experts and against ``F.grouped_mm``."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from kit.compare import assert_accurate, assert_bitwise, assert_same_function, pairwise, with_gradients
from kit.layers import drawn, leaf, outcome, poison_tail
from kit.oracles import exact_copies, grouped_linear
from kit.rounding import ROUNDOFF, error_bound
from kit.splits import splits_and_rows

import fusedmoe as fm
from fusedmoe.numerics.recipes import NVFP4


def layer(experts, k, n, bias=False, dtype=torch.float64):
    return drawn(fm.GroupedLinear(experts, k, n, bias=bias, dtype=torch.float64), 1.0).to(dtype)


# widths of 8 go through F.grouped_mm where the dtype does, widths of 3 and 5 through the loop
@example((torch.tensor([0, 0, 0]), 0))
@given(splits_and_rows())
@pytest.mark.parametrize(
    ("dtype", "bias", "width"), pairwise([torch.float64, torch.float32], [False, True], [(8, 16), (3, 5)]), ids=str
)
def test_any_splits(dtype, bias, width, drawn):
    splits, rows = drawn
    op, x, dy = layer(len(splits), *width, bias, dtype), leaf(rows, width[0], dtype=dtype), leaf(rows, width[1])
    y, dy = op(x, splits=splits), dy.detach().to(dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
    wanted, expected = [x, *op.parameters()], grouped_linear(x, op.weight, op.bias, splits)
    assert_same_function(y, expected, wanted, dy, zeros=True, **tolerance)
    # zeros that are zeros, not small
    y, dx, *of_parameters = with_gradients(op(x, splits=splits), wanted, dy)
    total = int(splits.sum())
    assert not y[total:].any()
    assert not dx[total:].any()
    assert not any(t[splits == 0].any() for t in of_parameters)
    assert not total or all(t.any() for t in of_parameters)


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_accuracy_against_fp64_of_the_same_operands(dtype, bias):
    splits = torch.tensor([17, 0, 40, 1, 6])
    op, x, dy = layer(5, 96, 64, bias, dtype), leaf(64, 96, dtype=dtype), torch.randn(64, 64).to(dtype)
    found = with_gradients(op(x, splits=splits), [x, *op.parameters()], dy)
    assert all(t.dtype is dtype for t in found)
    exact_x, weight, *rest = exact_copies(x, *op.parameters())
    expected = grouped_linear(exact_x, weight, rest[0] if bias else None, splits)
    want = with_gradients(expected, [exact_x, weight, *rest], dy.double())
    # fp32 sums and one rounding, two with a bias
    assert_accurate(found, want, error_bound(dtype, 96, roundings=1 + bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_own_grouped_mm_has_the_same_bits(dtype):
    splits = torch.tensor([5, 0, 9, 2])
    offsets = splits.cumsum(0).to(torch.int32)
    op, x, dy = layer(4, 32, 16, dtype=dtype), leaf(16, 32, dtype=dtype), torch.randn(16, 16).to(dtype)
    w = op.weight.detach()
    want = [
        F.grouped_mm(x.detach(), w.mT, offs=offsets),
        F.grouped_mm(dy, w, offs=offsets),
        F.grouped_mm(dy.mT, x.detach(), offs=offsets),
    ]
    assert_bitwise(with_gradients(op(x, splits=splits), [x, op.weight], dy), want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_splits_of_any_integer_dtype(dtype):
    counts = [100, 27, 100, 73]  # their sum fits neither int8 nor uint8
    op, x = layer(4, 2, 2), torch.randn(301, 2, dtype=torch.float64)
    expected = grouped_linear(x, op.weight, None, torch.tensor(counts))
    torch.testing.assert_close(op(x, splits=torch.tensor(counts, dtype=dtype)), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_nan_stays_with_its_expert(dtype):
    op, x, dy = layer(3, 8, 8, bias=True, dtype=dtype), torch.randn(8, 8).to(dtype), torch.randn(8, 8).to(dtype)
    x[4, 1] = dy[6, 2] = float("nan")
    y, dx, dw, db = outcome(op, x.requires_grad_(), dy, splits=torch.tensor([3, 3, 2])).values()
    rows = torch.arange(8)
    assert torch.equal(y.isnan().any(1), rows == 4)
    assert torch.equal(dx.isnan().any(1), rows == 6)
    assert dw.isnan().flatten(1).any(1).tolist() == [False, True, True]
    assert db.isnan().any(1).tolist() == [False, False, True]


def test_the_bias_gradient_is_summed_in_fp32():
    # one row of 256 and 255 of 1: a bf16 sum would stay at 256
    op = layer(2, 1, 1, bias=True, dtype=torch.bfloat16)
    dy = torch.ones(512, 1, dtype=torch.bfloat16)
    dy[[0, 256]] = 256
    op(torch.zeros(512, 1, dtype=torch.bfloat16), splits=torch.tensor([256, 256])).backward(dy)
    assert op.bias.grad.tolist() == [[512.0], [512.0]]  # 511 rounds to 512


# --- Linear --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (2, 1, 3, 4), (0, 4), (2, 0, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_leading_dimensions(shape, bias):
    op, x = fm.Linear(4, 3, bias=bias, dtype=torch.float64), leaf(*shape)
    y, wanted = op(x), [x, *op.parameters()]
    assert y.shape == (*shape[:-1], 3)
    assert_same_function(y, F.linear(x, op.weight, op.bias), wanted, rtol=1e-12, atol=1e-13, zeros=not x.numel())


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_accuracy_of_linear(dtype):
    op, x, dy = fm.Linear(96, 64).to(dtype), leaf(4, 16, 96, dtype=dtype), torch.randn(4, 16, 64).to(dtype)
    found = with_gradients(op(x), [x, *op.parameters()], dy)
    assert all(t.dtype is dtype for t in found)
    exact = exact_copies(x, *op.parameters())
    assert_accurate(found, with_gradients(F.linear(*exact), exact, dy.double()), error_bound(dtype, 96, roundings=2))


TAIL_CHAINS = {
    "before the experts": lambda **o: (fm.Linear(32, 32, **o), fm.SquaredReLU(), fm.GroupedLinear(2, 32, 32)),
    "after them": lambda **o: (fm.GroupedLinear(2, 32, 32), fm.SquaredReLU(), fm.Linear(32, 32, **o)),
    "between them": lambda **o: (fm.GroupedLinear(2, 32, 32), fm.Linear(32, 32, **o), fm.GroupedLinear(2, 32, 32)),
}


@pytest.mark.parametrize(
    ("ops", "recipe", "accumulate"),
    pairwise([*TAIL_CHAINS], ["bf16", "mxfp8", NVFP4(stochastic_rounding=False)], [False, True]),
    ids=str,
)
def test_rows_of_no_expert_count_in_no_gradient(ops, recipe, accumulate):
    chain = fm.Sequential(*TAIL_CHAINS[ops](accumulate_into_main_grad=accumulate))
    (fc,) = (op for op in chain if isinstance(op, fm.Linear))
    x, dy = leaf(10, 32, dtype=torch.float32), torch.randn(10, 32)

    def results(poison):
        poison_tail(6, x, dy, value=poison)
        chain.zero_grad()
        x.grad, fc.weight.main_grad = None, torch.zeros(32, 32)
        with fm.recipe(recipe):
            y = chain(x, splits=torch.tensor([2, 4]))
            y.backward(dy)
        dw = fc.weight.main_grad if accumulate else fc.weight.grad
        return [y.detach(), x.grad, dw, *[p.grad for p in chain.parameters() if p is not fc.weight]]

    healthy = results(0.5)
    for poison in (float("nan"), float("inf")):
        assert_bitwise(results(poison), healthy)


def test_without_experts_every_row_counts():
    op, x = fm.Sequential(fm.Linear(4, 3), fm.SquaredReLU()), torch.randn(5, 4)
    x[3:] = float("nan")
    op(x).sum().backward()
    assert all(p.grad.isnan().any() for p in op.parameters())
