"""Linear alone: one group, any leading dimensions."""

import pytest
import torch
import torch.nn.functional as F
from oracles import exact_copies
from rounding import ROUNDOFF, relative_error

import fusedmoe as fm
from fusedmoe.numerics.recipes import NVFP4


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (2, 1, 3, 4), (0, 4), (2, 0, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_leading_dimensions(shape, bias):
    op = fm.Linear(4, 3, bias=bias, dtype=torch.float64)
    (x,) = exact_copies(torch.randn(shape))
    y, expected = op(x), F.linear(x, op.weight, op.bias)
    assert y.shape == (*shape[:-1], 3)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-14)
    dy = torch.randn_like(expected)
    wanted = (x, *op.parameters())
    found = torch.autograd.grad(y, wanted, dy)
    for got, want in zip(found, torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(bias):
    op = fm.Linear(3, 2, bias=bias, dtype=torch.float64)
    (x,) = exact_copies(torch.randn(2, 2, 3))
    names = [name for name, _ in op.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(op, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *op.parameters()))


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_accuracy_against_fp64_of_the_same_operands(dtype):
    op = fm.Linear(96, 64).to(dtype)
    x, dy = torch.randn(4, 16, 96).to(dtype).requires_grad_(), torch.randn(4, 16, 64).to(dtype)
    y = op(x)
    found = [y, *torch.autograd.grad(y, (x, op.weight, op.bias), dy)]
    exact = exact_copies(x, op.weight, op.bias)
    expected = F.linear(*exact)
    bound = ROUNDOFF[dtype] * (2 if dtype.itemsize == 2 else 32)
    for got, want in zip(found, [expected, *torch.autograd.grad(expected, exact, dy.double())], strict=True):
        assert got.dtype is dtype
        assert relative_error(got, want) < bound


def test_strided_rows_weight_and_gradient():
    op = fm.Linear(4, 3, bias=True, dtype=torch.float64)
    op.weight = torch.nn.Parameter(op.weight.detach().T.contiguous().T)
    x = torch.randn(4, 6, 2, dtype=torch.float64).permute(2, 1, 0).requires_grad_()
    dy = torch.randn(2, 1, 3, dtype=torch.float64).expand(2, 6, 3)
    wanted = (x, op.weight, op.bias)
    found = torch.autograd.grad(op(x), wanted, dy)
    for got, want in zip(found, torch.autograd.grad(F.linear(*wanted), wanted, dy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


TAIL_CHAINS = {
    "before the experts": lambda **o: (fm.Linear(32, 32, **o), fm.SquaredReLU(), fm.GroupedLinear(2, 32, 32)),
    "after them": lambda **o: (fm.GroupedLinear(2, 32, 32), fm.SquaredReLU(), fm.Linear(32, 32, **o)),
    "between them": lambda **o: (fm.GroupedLinear(2, 32, 32), fm.Linear(32, 32, **o), fm.GroupedLinear(2, 32, 32)),
}


@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", NVFP4(stochastic_rounding=False)], ids=str)
@pytest.mark.parametrize("ops", TAIL_CHAINS.values(), ids=TAIL_CHAINS)
def test_rows_of_no_expert_count_in_no_gradient(ops, recipe, accumulate):
    chain = fm.Sequential(*ops(accumulate_into_main_grad=accumulate))
    (fc,) = (op for op in chain if isinstance(op, fm.Linear))
    rows, upstream = torch.randn(10, 32), torch.randn(10, 32)

    def outcome(poison):
        x, dy = rows.clone(), upstream.clone()
        x[6:] = dy[6:] = poison
        x.requires_grad_()
        chain.zero_grad()
        fc.weight.main_grad = torch.zeros(32, 32)
        with fm.recipe(recipe):
            y = chain(x, splits=torch.tensor([2, 4]))
        y.backward(dy)
        dw = fc.weight.main_grad if accumulate else fc.weight.grad
        others = [p.grad for p in chain.parameters() if p is not fc.weight]
        return [y.detach(), x.grad, dw, *others]

    healthy = outcome(0.5)
    for poison in (float("nan"), float("inf")):
        for got, want in zip(outcome(poison), healthy, strict=True):
            assert want.any()
            assert torch.equal(got, want)


def test_without_experts_every_row_counts():
    op, x = fm.Sequential(fm.Linear(4, 3), fm.SquaredReLU()), torch.randn(5, 4)
    x[3:] = float("nan")
    op(x).sum().backward()
    assert all(p.grad.isnan().any() for p in op.parameters())
