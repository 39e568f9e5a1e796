"""Ops that draw random numbers: a repeated computation draws the same numbers again."""

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from kit.compare import assert_close
from kit.layers import H, leaf
from kit.oracles import grouped_linear
from kit.splits import ROWS, SPLITS
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedmoe as fm


class Dropout(fm.Op):
    draws_random = True

    def compute(self, x):
        return F.dropout(x, 0.5)


class OwnMask(fm.BackwardOp):
    """Draws the mask again, by itself."""

    needs = ("grad_output", "random_state")

    def compute(self, grad_output, state):
        now = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            return grad_output * F.dropout(torch.ones_like(grad_output), 0.5)
        finally:
            torch.set_rng_state(now)


class OwnDropout(Dropout):
    def backward_ops(self):
        return (OwnMask(self),)


class Noisy(fm.Op):
    """Parameters, a runtime input, a provided value; and it does not draw linearly."""

    draws_random = True
    parameter_names = ("slope",)
    runtime_inputs = ("shift",)
    rowwise_inputs = ("shift",)
    provides = ("noise",)

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.randn(H, dtype=torch.float64))

    def infer(self, x, slope, shift):
        return fm.TensorSpec(tuple(x.shape), x.dtype), fm.TensorSpec((x.shape[0],), x.dtype)

    def compute(self, x, slope, shift):
        noise = torch.rand_like(shift)
        return torch.sin(x * slope * torch.randn_like(x) + (shift * noise)[:, None]), noise


class Taking(fm.Op):
    runtime_inputs = ("noise",)

    def compute(self, x, noise):
        return x * noise[:, None]


def with_dropout(op=None):
    seq = fm.Sequential(fm.GroupedLinear(3, H, H), op or Dropout(), fm.GroupedLinear(3, H, H)).double()
    return seq, partial(seq, splits=SPLITS), leaf(ROWS, H)


def meaning(seq, x):
    hidden = F.dropout(grouped_linear(x, seq[0].weight, None, SPLITS), 0.5)
    return grouped_linear(hidden, seq[2].weight, None, SPLITS)


def assert_draws_like(call, want, wanted, order=1):
    """Output, gradients and a number drawn afterwards, from one state; somebody draws before the backward pass."""
    state, found = torch.get_rng_state(), []
    for function in (call, want):
        torch.set_rng_state(state)
        y = function()
        after = torch.rand(1, dtype=torch.float64)
        if order == 2:
            first = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
            torch.rand(3)
            found.append([y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), wanted), after])
        else:
            for t in wanted:
                t.grad = None
            y.square().sum().backward()
            found.append([y, *[t.grad for t in wanted], after])
    assert all(t.any() for t in found[1])
    assert_close(*found)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("op", [Dropout, OwnDropout])
def test_dropout_has_the_gradient_of_its_own_mask(op, order):
    """The backward pass drew a new mask: the gradient was that of another function."""
    seq, call, x = with_dropout(op())
    assert_draws_like(lambda: call(x), lambda: meaning(seq, x), [x, *seq.parameters()], order)


@pytest.mark.parametrize("order", [1, 2])
def test_everything_that_is_computed_again(order):
    op, x, shift = Noisy(), leaf(ROWS, H), leaf(ROWS)
    seq = fm.Sequential(op, Taking(), fm.SquaredReLU())

    def plain():
        noise = torch.rand_like(shift)
        rows = torch.sin(x * op.slope * torch.randn_like(x) + (shift * noise)[:, None]) * noise[:, None]
        return rows.clamp(min=0).square()

    assert_draws_like(lambda: seq(x, shift=shift), plain, [x, shift, op.slope], order)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_draws_again(use_reentrant):
    seq, call, x = with_dropout()
    again = partial(checkpoint, use_reentrant=use_reentrant)
    want = partial(again, partial(meaning, seq), x)
    assert_draws_like(lambda: again(call, x), want, [x, *seq.parameters()])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
def test_a_compiled_module_runs_it_uncompiled():
    """As an operator of a graph it could be computed again, or once for two calls, without the state."""
    seq, call, x = with_dropout()
    compiled = torch.compile(lambda x: call(x) + call(x), backend="aot_eager")
    assert_draws_like(lambda: compiled(x), lambda: call(x) + call(x), [x, *seq.parameters()])


# --- ops that do not say that they draw ----------------------------------------------------------------------------


class Undeclared(fm.Op):
    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def compute(self, x):
        return F.dropout(x, self.p, self.training)


@torch.library.custom_op("fusedmoe_tests::untagged_dropout", mutates_args=())
def untagged_dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5)


class Untagged(fm.Op):
    def compute(self, x):
        return untagged_dropout(x)


SAID = r"compute: draws random numbers.*draws_random"


@pytest.mark.parametrize(
    ("op", "x"),
    [
        (Undeclared(), torch.zeros(8, 4)),
        (Undeclared(0.001), torch.ones(2, 2)),
        (Untagged(), torch.ones(64, 64)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_undeclared_draw_is_found_whatever_the_second_draw_gives(op, x):
    """A second draw that happened to give the same output let the op pass for good, and later gradients were wrong."""
    x = x.double().requires_grad_()
    for seed in range(8):
        torch.manual_seed(seed)
        with pytest.raises(fm.InputError, match=SAID):
            fm.Sequential(op)(x)
    with FlopCounterMode(display=False), pytest.raises(fm.InputError, match=SAID):
        fm.Sequential(op)(x)


def test_it_may_draw_where_nothing_is_computed_again():
    seq, call, x = with_dropout(Undeclared())
    with pytest.raises(fm.InputError, match=SAID):
        call(x)
    with torch.no_grad():
        assert call(x).any()
    seq.eval()
    call(x).sum().backward()
    seq.train()
    with pytest.raises(fm.InputError, match=SAID):
        call(x)


def test_another_thread_that_draws_is_no_error():
    """Not even where the op has an operator that might draw, and does not."""

    class Disturbed(fm.Op):
        def compute(self, x):
            thread = threading.Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
            return torch.native_dropout(x.sin(), 0.5, False)[0]

    x, state = leaf(3, 4), torch.get_rng_state()
    torch.testing.assert_close(torch.autograd.grad(fm.Sequential(Disturbed())(x).sum(), x)[0], x.cos())
    assert not torch.equal(torch.get_rng_state(), state)


# --- the state -----------------------------------------------------------------------------------------------------


def test_the_state_is_kept_for_training_alone_and_explained(monkeypatch):
    seq, call, x = with_dropout()
    (plan,) = seq.explain(x, splits=SPLITS).plans
    assert "1.random_state" in plan.kept

    def never(*_):
        raise AssertionError("the state was asked for")

    monkeypatch.setattr("fusedmoe.ops.state.random._states", never)
    with torch.no_grad():
        assert not seq.explain(x, splits=SPLITS).plans[0].kept
        assert call(x).any()
    with pytest.raises(AssertionError, match="was asked for"):
        call(x)
