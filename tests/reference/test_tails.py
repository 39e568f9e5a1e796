"""Rows past ``splits.sum()``: never read, zeros in outputs and in the gradients of inputs."""

import math

import pytest
import torch
from chains import CHAINS, H, chain, runtime_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import splits_and_rows

import fusedmoe as fm

POISONS = (math.nan, math.inf, -math.inf)


def run(seq, x, inputs, dy):
    x = x.clone().requires_grad_()
    inputs = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in inputs.items()}
    rowwise = {"x": x} | {k: t for k, t in inputs.items() if t.requires_grad}
    parameters = dict(seq.named_parameters())
    y = seq(x, **inputs)
    grads = torch.autograd.grad(y, [*rowwise.values(), *parameters.values()], dy)
    named = dict(zip([*rowwise, *parameters], grads, strict=True))
    return {"y": y.detach()} | {k: named[k] for k in rowwise}, {k: named[k] for k in parameters}


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=10)  # each makes two calls of a new chain, and so two plans
@given(splits_and_rows(), st.integers(1, 4), st.sampled_from(POISONS))
def test_poison_behind_the_last_expert_changes_nothing(name, dtype, drawn, more, poison):
    splits, rows = drawn
    rows += more
    total = int(splits.sum())
    seq = chain(name, len(splits), dtype)
    x, inputs = torch.randn(rows, H).to(dtype), runtime_inputs(seq, rows, splits, dtype)
    dy = torch.randn(rows, seq(x, **inputs).shape[1]).to(dtype)
    healthy_rows, healthy_parameters = run(seq, x, inputs, dy)

    for t in (x, dy, *[t for t in inputs.values() if t.is_floating_point()]):
        t[total:] = poison
    by_row, of_parameters = run(seq, x, inputs, dy)
    for key, value in by_row.items():
        assert torch.equal(value[total:], torch.zeros_like(value[total:])), key
        assert torch.equal(value, healthy_rows[key]), key
        assert value.isfinite().all(), key
    for key, value in of_parameters.items():
        assert torch.equal(value, healthy_parameters[key]), key
        assert value.isfinite().all(), key
        assert not value[splits == 0].any(), key


def test_all_rows_may_be_tail():
    seq = chain("gpt_oss", 3)
    x = torch.full((4, H), math.nan, dtype=torch.float64, requires_grad=True)
    probs = torch.full((4,), math.nan, dtype=torch.float64, requires_grad=True)
    y = seq(x, splits=torch.zeros(3, dtype=torch.int64), probs=probs)
    assert torch.equal(y, torch.zeros(4, H, dtype=torch.float64))
    y.backward(torch.full_like(y, math.nan))
    for t in (x, probs, *seq.parameters()):
        assert torch.equal(t.grad, torch.zeros_like(t))


@pytest.mark.parametrize("requires", ["x", "probs"])
def test_tails_of_a_gradient_that_alone_is_wanted(requires):
    seq = chain("scaled mlp", 2).requires_grad_(False)
    splits = torch.tensor([1, 2])
    values = {"x": torch.randn(5, H, dtype=torch.float64), "probs": torch.rand(5, dtype=torch.float64)}
    for t in values.values():
        t[3:] = math.nan
    values[requires].requires_grad_()
    dy = torch.ones(5, H, dtype=torch.float64)
    dy[3:] = math.nan
    seq(values["x"], splits=splits, probs=values["probs"]).backward(dy)
    grad = values[requires].grad
    assert not grad[3:].any()
    assert grad[:3].isfinite().all()
    assert grad[:3].any()


def test_a_foreign_module_between_two_chains():
    # each chain zeroes its own tail; what the module makes of zeros comes after the splits of the next
    seq = fm.Sequential(fm.GroupedLinear(2, 4, 4), torch.nn.Sigmoid(), fm.GroupedLinear(2, 4, 4)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    x[3:] = math.nan
    x.requires_grad_()
    y = seq(x, splits=torch.tensor([2, 1]))
    dy = torch.ones_like(y)
    dy[3:] = math.nan
    y.backward(dy)
    assert not y[3:].any()
    assert not x.grad[3:].any()
    assert all(t.isfinite().all() for t in (y, x.grad, *[p.grad for p in seq.parameters()]))


def test_an_inplace_tail_never_reaches_the_callers_tensors():
    seq = fm.Sequential(fm.SwiGLU(), fm.GroupedLinear(2, 2, 4))
    x, dy = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4)
    x_before, dy_before = x.detach().clone(), dy.clone()
    seq(x, splits=torch.tensor([1, 1])).backward(dy)
    fm.Sequential(fm.GroupedLinear(2, 4, 4), fm.SwiGLU())(x, splits=torch.tensor([1, 1]))
    assert torch.equal(x.detach(), x_before)
    assert torch.equal(dy, dy_before)
