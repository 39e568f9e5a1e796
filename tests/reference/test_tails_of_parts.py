"""Modules and hooks that do nothing, between the ops of a `Sequential`, change no bit of its results: the parts share
its splits, so that rows that belong to no expert are never read, and come out as zeros.
"""

import copy
import math

import pytest
import torch
from chains import CHAINS, H, I, chain, runtime_inputs
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


def nothing(*_):
    return None


def hooked(*positions):
    def separate(seq):
        for i in positions or range(len(seq)):
            if i < len(seq):
                seq[i].register_forward_hook(nothing)
        return seq

    return separate


def with_identities(seq):
    return fm.Sequential(nn.Identity(), *[m for op in seq for m in (op, nn.Identity())])


def hooked_as_a_whole(seq):
    inner = fm.Sequential(*seq)
    inner.register_forward_hook(nothing)
    return fm.Sequential(nn.Identity(), inner, nn.Identity())


SEPARATIONS = {
    "a hook on each": hooked(),
    "a hook on the first": hooked(0),
    "a hook on the second": hooked(1),
    "a hook on the third": hooked(2),
    "an identity around each": with_identities,
    "an identity first": lambda seq: fm.Sequential(nn.Identity(), *seq),
    "an identity last": lambda seq: fm.Sequential(*seq, nn.Identity()),
    "a nested one with a hook": hooked_as_a_whole,
}


def make(name, dtype):
    if name in CHAINS:
        return chain(name, E, dtype)
    seq = fm.Sequential(*MORE[name](E)).to(dtype)
    for parameter in seq.parameters():
        nn.init.normal_(parameter, std=0.5)
    return seq


def outcome(seq, x, inputs, dy, call=None):
    """The result and every gradient, of parameters in their order."""
    seq.zero_grad()
    x = x.clone().requires_grad_()
    inputs = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in inputs.items()}
    y = (call or seq)(x, **inputs)
    y.backward(dy)
    gradients = [x.grad, *[t.grad for t in inputs.values() if t.requires_grad], *[p.grad for p in seq.parameters()]]
    return [y.detach(), *gradients]


def poisoned(seq, dtype):
    x, dy = torch.randn(ROWS, H).to(dtype), torch.randn(ROWS, H).to(dtype)
    inputs = runtime_inputs(seq, ROWS, SPLITS, dtype)
    dy = dy[:, : seq(x, **inputs).shape[1]].clone()
    for t in (x, dy, *[t for t in inputs.values() if t.is_floating_point()]):
        t[TOTAL:] = math.nan
    return x, inputs, dy


def assert_bitwise_same(got, expected):
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), i
        assert b.isfinite().all(), i
        assert b.any(), i
    assert not any(t[TOTAL:].any() for t in got if t.shape[0] == ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("separation", SEPARATIONS)
@pytest.mark.parametrize("name", [*CHAINS, *MORE])
def test_what_stands_between_the_ops_changes_nothing(name, separation, dtype):
    torch.manual_seed(0)
    seq = make(name, dtype)
    x, inputs, dy = poisoned(seq, dtype)
    expected = outcome(seq, x, inputs, dy)
    assert_bitwise_same(outcome(SEPARATIONS[separation](seq), x, inputs, dy), expected)


@pytest.mark.parametrize("recipe", ["fp8_tensor", "mxfp8"])
@pytest.mark.parametrize("separation", ["a hook on each", "a hook on the second", "an identity around each"])
@pytest.mark.parametrize("name", ["scaled mlp", "dense", "dense first"])
def test_under_a_recipe_experts_share_no_scale(name, separation, recipe):
    torch.manual_seed(0)
    seq = make(name, torch.float32)
    x, inputs, dy = poisoned(seq, torch.float32)
    with fm.recipe(recipe):
        expected = outcome(seq, x, inputs, dy)
        assert_bitwise_same(outcome(SEPARATIONS[separation](seq), x, inputs, dy), expected)


@pytest.mark.parametrize("separation", ["a hook on each", "an identity around each"])
def test_rows_that_the_chain_dispatches(separation):
    """The splits that `Dispatch` provides count the rows after it, and no others."""
    torch.manual_seed(0)
    middle = [fm.GroupedLinear(E, H, 2 * I), Affine(), fm.SwiGLU(), fm.GroupedLinear(E, I, H)]
    seq = fm.Sequential(fm.Linear(H, H), fm.Dispatch(), *middle, fm.Combine(), fm.Linear(H, H))
    for parameter in seq.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, dy = torch.randn(6, H), torch.randn(6, H)
    weight = torch.rand(6, 2)
    index = torch.tensor([[0, 2], [2, E], [2, 0], [0, 0], [-1, 2], [2, E]])  # three sentinels
    inputs = {"expert_index": index, "expert_weight": weight}
    expected = outcome(seq, x, inputs, dy)
    got = outcome(SEPARATIONS[separation](seq), x, inputs, dy)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
        assert b.any()


class NoTail(nn.Module):
    """Drops the rows after those of the experts."""

    def forward(self, x):
        return x[:TOTAL]


def test_a_module_that_changes_the_number_of_rows_ends_it():
    """What comes out of it are rows that splits does not count: none of them is zeroed."""
    seq = fm.Sequential(fm.GroupedLinear(E, H, H), NoTail(), Tokens(), fm.Linear(H, H), nn.Tanh()).double()
    x = torch.randn(ROWS, H, dtype=torch.float64)
    x[TOTAL:] = math.nan
    y = seq(x, splits=SPLITS)
    expected = torch.tanh(seq[3](seq[0](x, splits=SPLITS)[:TOTAL].repeat(1, 2).view(-1, H)))
    assert y.shape == (2 * TOTAL, H)
    assert torch.equal(y, expected)


class Tokens(nn.Module):
    """Two rows for each."""

    def forward(self, x):
        return x.repeat(1, 2).view(-1, x.shape[1])


def test_a_grouped_op_counts_the_rows_again():
    seq = fm.Sequential(fm.GroupedLinear(E, H, H), NoTail(), fm.GroupedLinear(E, H, H), More(), Affine())
    x, probs = torch.randn(ROWS, H), torch.rand(TOTAL)
    x[TOTAL:] = math.nan
    y = seq(x, splits=SPLITS, probs=probs)
    assert y.shape == (TOTAL, H)
    assert y.any(1).all()
    few = torch.tensor([2, 0, 1])
    y = seq(x, splits=few, probs=torch.rand(TOTAL))
    assert y[:3].any(1).all()
    assert not y[3:].any()


class More(nn.Module):
    def forward(self, x):
        return x + 1


class Sorted(nn.Module):
    """As many rows, in another order: it says so."""

    changes_rows = True

    def forward(self, x):
        return x.flip(0)


def test_a_module_may_say_that_its_rows_are_others():
    seq = fm.Sequential(fm.GroupedLinear(E, H, H), Sorted(), fm.Linear(H, H), More())
    x = torch.randn(ROWS, H)
    x[TOTAL:] = math.nan
    y = seq(x, splits=SPLITS)
    expected = seq[2](seq[0](x, splits=SPLITS).flip(0)) + 1
    assert torch.equal(y, expected)
    assert y[TOTAL:].any(1).all()


def test_a_dense_layer_alone_may_be_told_the_splits():
    """So that a hook on it changes nothing; it takes them only if they are given."""
    op = fm.Linear(H, H)
    x = torch.randn(ROWS, H)
    x[TOTAL:] = math.nan
    dy = torch.randn(ROWS, H)
    dy[TOTAL:] = math.nan
    y, *gradients = outcome(op, x, {"splits": SPLITS}, dy)
    assert not y[TOTAL:].any()
    healthy = outcome(op, x[:TOTAL], {}, dy[:TOTAL])
    torch.testing.assert_close(y[:TOTAL], healthy[0])
    assert all(g.isfinite().all() and g.any() for g in gradients)
    copied = copy.deepcopy(op)
    assert torch.equal(copied(x, splits=SPLITS), y)
    with pytest.raises(fm.InputError, match=r"splits: expected a sum of at most 9"):
        op(x, splits=torch.tensor([9, 9]))
    with pytest.raises(fm.InputError, match=r"splits: expected a tensor, got list; op\.Linear takes it"):
        op(x, splits=[4, 0, 2])


@pytest.mark.parametrize("bad", [torch.tensor([4, 4, 4]), torch.tensor([-1, 2, 2])], ids=["too many", "negative"])
def test_splits_that_do_not_fit_are_an_error_before_and_behind_a_module(bad):
    for seq in (
        fm.Sequential(nn.Identity(), fm.GroupedLinear(E, H, H)),
        fm.Sequential(fm.SwiGLU(), nn.Identity(), fm.GroupedLinear(E, H // 2, H)),
    ):
        with pytest.raises(fm.InputError, match="GroupedLinear: splits: expected"):
            seq(torch.randn(ROWS, H), splits=bad)


def test_runtime_inputs_stay_in_the_order_of_first_use():
    seq = fm.Sequential(fm.Scale("probs"), nn.Identity(), fm.GroupedLinear(E, H, H))
    assert seq.runtime_inputs == ("probs", "splits")


def test_a_plan_is_explained_with_the_rows_that_it_gets():
    seq = fm.Sequential(fm.GroupedLinear(E, H, H), nn.Identity(), fm.Linear(H, H))
    x = torch.randn(ROWS, H, requires_grad=True)
    assert len(seq.explain(x, splits=SPLITS).plans) == 2


@pytest.mark.parametrize("separation", ["a hook on each", "an identity around each", "a hook on the second"])
@pytest.mark.parametrize("name", ["scaled mlp", "scale last", "dense", "elementwise last"])
def test_compiled(name, separation):
    torch.manual_seed(0)
    seq = make(name, torch.float32)
    x, inputs, dy = poisoned(seq, torch.float32)
    expected = outcome(seq, x, inputs, dy)
    separated = SEPARATIONS[separation](seq)
    torch._dynamo.reset()
    got = outcome(separated, x, inputs, dy, torch.compile(separated, backend="aot_eager"))
    for a, b in zip(got, expected, strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b)
    assert not any(t[TOTAL:].any() for t in got if t.shape[0] == ROWS)


@pytest.mark.parametrize("separation", ["a hook on each", "an identity around each"])
@pytest.mark.parametrize("name", ["scaled mlp", "scale last", "dense"])
def test_exported(name, separation):
    torch.manual_seed(0)
    seq = make(name, torch.float32)
    x, inputs, _ = poisoned(seq, torch.float32)
    expected = seq(x, **inputs)
    separated = SEPARATIONS[separation](seq).requires_grad_(False)
    program = torch.export.export(separated, (x,), inputs)
    got = program.module()(x, **inputs)
    assert not got[TOTAL:].any()
    torch.testing.assert_close(got, expected.detach())


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor"])
def test_a_nested_one_without_grouped_ops_takes_splits_where_there_are_any(recipe):
    torch.manual_seed(0)
    dense = [fm.Linear(H, 2 * I), fm.SwiGLU(), fm.Linear(I, H)]
    seq = fm.Sequential(*dense, fm.GroupedLinear(E, H, H))
    inner = fm.Sequential(*dense)
    inner.register_forward_hook(nothing)
    nested = fm.Sequential(inner, seq[3])
    x, inputs, dy = poisoned(seq, torch.float32)
    with fm.recipe(recipe):
        expected = outcome(seq, x, inputs, dy)
        assert_bitwise_same(outcome(nested, x, inputs, dy), expected)
    assert inner.runtime_inputs == ()
    assert not inner(x, splits=SPLITS)[TOTAL:].any()
    assert inner(x)[TOTAL:].isnan().all()
    with pytest.raises(fm.InputError, match="no op takes the runtime input 'splits'"):
        fm.Sequential(fm.SwiGLU())(x, splits=SPLITS)
