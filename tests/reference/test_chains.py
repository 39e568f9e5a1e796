"""Chains in a Sequential: values and gradients, for any splits and any routing."""

import copy

import pytest
import torch
from hypothesis import example, given
from kit.compare import assert_accurate, assert_close, assert_same_function, with_gradients
from kit.layers import CHAINS, ROUTED, H, chain, leaf, outcome, runtime_inputs, wanted_of
from kit.oracles import meaning
from kit.rounding import ROUNDOFF
from kit.splits import routings, splits_and_rows


@pytest.mark.parametrize("name", CHAINS)
@example((torch.tensor([0, 0, 0]), 0))
@given(splits_and_rows())
def test_any_splits(name, drawn):
    splits, rows = drawn
    seq, x, total = chain(name, len(splits)), leaf(rows, H), int(splits.sum())
    inputs = runtime_inputs(seq, rows, splits)
    y, wanted = seq(x, **inputs), wanted_of(seq, x, inputs).values()
    assert not y[total:].any()
    assert_same_function(y[:total], meaning(seq, x, **inputs)[:total], wanted, zeros=True)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_accuracy_against_fp64_of_the_same_operands(name, dtype):
    seq, x = chain(name, 4, dtype), leaf(56, H, dtype=dtype)
    inputs = runtime_inputs(seq, 56, torch.tensor([20, 0, 31, 1]), dtype)
    found = outcome(seq, x, dy := torch.randn_like(seq(x, **inputs)), **inputs)
    assert all(t.dtype is dtype for t in found.values())
    exact, exact_x = copy.deepcopy(seq).double(), x.detach().double().requires_grad_()
    inputs = {k: t.detach().double().requires_grad_() if t.requires_grad else t for k, t in inputs.items()}
    want = outcome(exact, exact_x, dy.double(), call=lambda x, **inputs: meaning(exact, x, **inputs), **inputs)
    # one rounding after each op, forward and backward; their errors add like those of independent draws
    assert_accurate(found, want, ROUNDOFF[dtype] * (3 if dtype.itemsize == 2 else 16))


def routing_of(index, dtype=torch.float64):
    return {"expert_index": index, "expert_weight": (torch.rand(index.shape, dtype=dtype) + 0.5).requires_grad_()}


@pytest.mark.parametrize("kind", ROUTED)
@given(routings())
def test_any_routing(kind, drawn):
    index, experts = drawn
    seq, x, routing = chain(kind, experts), leaf(len(index), H), routing_of(index)
    if kind == "no weights":
        routing["expert_weight"].requires_grad_(False)
    y, expected = seq(x, **routing), meaning(seq, x, **routing)
    wanted, dy = wanted_of(seq, x, routing).values(), torch.randn_like(y)
    if not expected.requires_grad:  # no slot has an expert
        assert not any(t.any() for t in with_gradients(y, wanted, dy))
        return
    assert_close(
        with_gradients(y, wanted, dy), with_gradients(expected, wanted, dy), zeros=True
    )  # SquaredReLU of one row
