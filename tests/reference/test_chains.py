"""Chains in a Sequential: values and gradients, for any splits and any routing."""

import pytest
import torch
from hypothesis import example, given
from kit.compare import assert_accurate, assert_same_function
from kit.layers import CHAINS, ROUTED, H, chain, leaf, outcome, runtime_inputs, wanted_of
from kit.oracles import exact_outcome, meaning
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
    # one rounding after each op, forward and backward; their errors add like those of independent draws
    assert_accurate(found, exact_outcome(seq, x, dy, **inputs), ROUNDOFF[dtype] * (3 if dtype.itemsize == 2 else 16))


@pytest.mark.parametrize("kind", ROUTED)
@given(routings())
def test_any_routing(kind, drawn):
    index, experts = drawn
    seq, x = chain(kind, experts), leaf(len(index), H)
    weight = (torch.rand(index.shape, dtype=torch.float64) + 0.5).requires_grad_(kind != "no weights")
    routing = {"expert_index": index, "expert_weight": weight}
    wanted = wanted_of(seq, x, routing).values()
    assert_same_function(seq(x, **routing), meaning(seq, x, **routing), wanted, zeros=True)  # SquaredReLU of one row
