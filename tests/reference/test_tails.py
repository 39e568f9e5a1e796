"""Rows past ``splits.sum()``: never read, zeros in outputs and in the gradients of inputs."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.compare import assert_bitwise, pairwise
from kit.layers import CHAINS, H, I, chain, drawn, leaf, outcome, poison_tail, runtime_inputs
from kit.splits import ROUTING, splits_and_rows
from torch import nn

import fusedmoe as fm

E, ROWS, TOTAL = 3, 9, 6
SPLITS = torch.tensor([4, 0, 2])


class Affine(fm.Op):
    """An op of a third party: ``y = x * s[r] + 1``, with the gradient that autograd finds."""

    runtime_inputs = rowwise_inputs = ("probs",)

    def compute(self, x, probs):
        return x * probs[:, None] + 1


MORE = {
    "elementwise last": lambda e: [fm.GroupedLinear(e, H, 2 * I), fm.SwiGLU(offset=1.0), Affine()],
    "elementwise first": lambda e: [Affine(), fm.SwiGLU(), fm.GroupedLinear(e, H // 2, H)],
    "dense": lambda e: [fm.GroupedLinear(e, H, H), fm.Linear(H, 2 * I), fm.SwiGLU(), fm.Linear(I, H)],
    "dense first": lambda e: [fm.Linear(H, H), fm.Scale("probs"), fm.GroupedLinear(e, H, H)],
    "quantized": lambda e: [fm.Quantize("fp8_tensor"), fm.SwiGLU(), fm.GroupedLinear(e, H // 2, H)],
}


def prepared(name, splits=SPLITS, rows=ROWS, dtype=torch.float32):
    """A chain, and what its call takes, without poison."""
    seq = chain(name, len(splits), dtype) if name in CHAINS else drawn(fm.Sequential(*MORE[name](E)).to(dtype))
    x, inputs = leaf(rows, H, dtype=dtype), runtime_inputs(seq, rows, splits, dtype)
    return seq, {"x": x, "dy": torch.randn_like(seq(x, **inputs)), **inputs}


def poisoned(given, total=TOTAL, value=math.nan):
    copied = {k: t.detach().clone().requires_grad_(t.requires_grad) for k, t in given.items()}
    poison_tail(total, *[t for t in copied.values() if t.is_floating_point()], value=value)
    return copied


def assert_clean(found, want, total=TOTAL):
    assert_bitwise(found, want, zeros=True)
    for name, t in found.items():
        assert t.isfinite().all(), name
        assert name not in ("y", "x", "probs") or not t[total:].any(), name


@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=10)  # each makes two calls of a new chain, and so two plans
@given(
    splits_and_rows(),
    st.integers(1, 4),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_poison_after_the_last_expert_changes_nothing(name, drawn, more, value, dtype):
    splits, rows = drawn
    total, rows = int(splits.sum()), rows + more
    seq, given = prepared(name, splits, rows, dtype)
    want = outcome(seq, **given)
    want = {k: t.index_fill(0, torch.arange(total, rows), 0) if k in {"y", *given} else t for k, t in want.items()}
    found = outcome(seq, **poisoned(given, total, value))
    assert_clean(found, want, total)
    assert not any(found[name][splits == 0].any() for name, _ in seq.named_parameters())


@pytest.mark.parametrize("requires", ["x", "probs"])
def test_tails_of_a_gradient_that_alone_is_wanted(requires):
    seq, given = prepared("scaled mlp")
    seq.requires_grad_(False)
    given = {k: t.detach().requires_grad_(k == requires) for k, t in given.items()}
    found = outcome(seq, **poisoned(given))
    assert set(found) == {"y", requires}
    assert_clean(found, found)
    assert found[requires][:TOTAL].any()


def test_an_inplace_tail_never_reaches_the_callers_tensors():
    for ops in ([fm.SwiGLU(), fm.GroupedLinear(2, 2, 4)], [fm.GroupedLinear(2, 4, 4), fm.SwiGLU()]):
        seq, x = fm.Sequential(*ops), torch.randn(5, 4, requires_grad=True)
        y = seq(x, splits=torch.tensor([1, 1]))
        dy = torch.randn_like(y)
        x_before, dy_before = x.detach().clone(), dy.clone()
        y.backward(dy)
        assert torch.equal(x.detach(), x_before)
        assert torch.equal(dy, dy_before)


# --- what stands between the ops -----------------------------------------------------------------------------------


def hooked(seq):
    for op in seq:
        op.register_forward_hook(lambda *_: None)
    return seq


def hooked_as_a_whole(seq):
    return fm.Sequential(nn.Identity(), hooked_module(fm.Sequential(*seq)), nn.Identity())


def hooked_module(seq):
    seq.register_forward_hook(lambda *_: None)
    return seq


SEPARATIONS = {
    "a hook on each": hooked,
    "an identity around each": lambda seq: fm.Sequential(
        nn.Identity(), *[m for op in seq for m in (op, nn.Identity())]
    ),
    "an identity after the first": lambda seq: fm.Sequential(seq[0], nn.Identity(), *seq[1:]),
    "a nested one with a hook": hooked_as_a_whole,
}


def values(found):
    """Without names: those of parameters are others in another Sequential."""
    return [*found.values()]


CASES = pairwise([*CHAINS, *MORE], [*SEPARATIONS], [torch.float32, torch.bfloat16], ["bf16", "fp8_tensor", "mxfp8"])
# what a `Quantize` rounded is not rounded again
CASES = [(n, s, d, "bf16" if n == "quantized" else r) for n, s, d, r in CASES]


@pytest.mark.parametrize(("name", "separation", "dtype", "recipe"), CASES, ids=str)
def test_what_stands_between_the_ops_changes_nothing(name, separation, dtype, recipe):
    seq, given = prepared(name, dtype=dtype)
    given = poisoned(given)
    want = values(outcome(seq, **given, recipe=recipe))
    found = values(outcome(SEPARATIONS[separation](seq), **given, recipe=recipe))
    assert_bitwise(found, want)
    assert all(t.isfinite().all() for t in found)
    assert not any(t[TOTAL:].any() for t in found if t.shape[0] == ROWS)


@pytest.mark.parametrize("separation", ["a hook on each", "an identity around each"])
def test_rows_that_the_chain_dispatches(separation):
    """The splits that `Dispatch` provides count the rows after it, and no others."""
    middle = [fm.GroupedLinear(E, H, 2 * I), Affine(), fm.SwiGLU(), fm.GroupedLinear(E, I, H)]
    seq = drawn(fm.Sequential(fm.Linear(H, H), fm.Dispatch(), *middle, fm.Combine(), fm.Linear(H, H)))
    given = {"x": leaf(4, H, dtype=torch.float32), "dy": torch.randn(4, H)}
    given |= {"expert_index": ROUTING, "expert_weight": torch.rand(4, 2).requires_grad_()}
    want = values(outcome(seq, **given))
    assert_bitwise(values(outcome(SEPARATIONS[separation](seq), **given)), want)


class Made(nn.Module):
    """A foreign module of a function."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        vars(self).update(attributes)

    def forward(self, x):
        return self.function(x)


def nan_tail(rows=ROWS, dtype=torch.float32):
    x = torch.randn(rows, H, dtype=dtype)
    x[TOTAL:] = math.nan
    return x


def test_a_foreign_module_between_two_chains():
    # each chain zeroes its own tail; what the module makes of zeros comes after the splits of the next
    seq = fm.Sequential(fm.GroupedLinear(E, H, H), nn.Sigmoid(), fm.GroupedLinear(E, H, H))
    found = outcome(seq, nan_tail().requires_grad_(), nan_tail(), splits=SPLITS)
    assert_clean(found, found)


def test_a_module_that_changes_the_number_of_rows_ends_it():
    """What comes out of it are rows that splits does not count: none of them is zeroed."""
    twice, x = Made(lambda x: x[:TOTAL].repeat(1, 2).view(-1, x.shape[1])), nan_tail()
    seq = fm.Sequential(fm.GroupedLinear(E, H, H), twice, fm.Linear(H, H), nn.Tanh())
    y = seq(x, splits=SPLITS)
    assert y.shape == (2 * TOTAL, H)
    assert torch.equal(y, torch.tanh(seq[2](twice(seq[0](x, splits=SPLITS)))))
    # a grouped op counts the rows again
    seq = fm.Sequential(fm.GroupedLinear(E, H, H), twice, fm.GroupedLinear(E, H, H), Made(lambda x: x + 1), Affine())
    y = seq(x, splits=SPLITS, probs=torch.rand(2 * TOTAL))
    assert y[:TOTAL].any(1).all()
    assert not y[TOTAL:].any()


def test_a_module_may_say_that_its_rows_are_others():
    """As many, in another order."""
    flip = Made(lambda x: x.flip(0), changes_rows=True)
    seq, x = fm.Sequential(fm.GroupedLinear(E, H, H), flip, fm.Linear(H, H), Made(lambda x: x + 1)), nan_tail()
    y = seq(x, splits=SPLITS)
    assert torch.equal(y, seq[2](seq[0](x, splits=SPLITS).flip(0)) + 1)
    assert y[TOTAL:].any(1).all()


def test_a_dense_layer_alone_may_be_told_the_splits():
    """So that a hook on it changes nothing; it takes them only if they are given."""
    op, x, dy = fm.Linear(H, H), nan_tail(), nan_tail()
    found = outcome(op, x.clone().requires_grad_(), dy, splits=SPLITS)
    assert_clean(found, found)
    healthy = outcome(op, x[:TOTAL].clone().requires_grad_(), dy[:TOTAL])
    for name, t in found.items():
        torch.testing.assert_close(t[: len(healthy[name])], healthy[name])
    assert torch.equal(copy.deepcopy(op)(x, splits=SPLITS), found["y"])
    for bad in (torch.tensor([9, 9]), [4, 0, 2]):
        with pytest.raises(fm.InputError, match="splits: expected"):
            op(x, splits=bad)


def test_a_nested_one_without_grouped_ops_takes_splits_where_there_are_any():
    dense = [fm.Linear(H, 2 * I), fm.SwiGLU(), fm.Linear(I, H)]
    inner, last = hooked_module(fm.Sequential(*dense)), fm.GroupedLinear(E, H, H)
    given = {"x": nan_tail().requires_grad_(), "dy": nan_tail(), "splits": SPLITS}
    want = values(outcome(fm.Sequential(*dense, last), **given))
    assert_bitwise(values(outcome(fm.Sequential(inner, last), **given)), want)
    assert inner.runtime_inputs == ()
    assert not inner(given["x"], splits=SPLITS)[TOTAL:].any()
    assert inner(given["x"])[TOTAL:].isnan().all()
    with pytest.raises(fm.InputError, match="splits"):
        fm.Sequential(fm.SwiGLU())(given["x"], splits=SPLITS)
