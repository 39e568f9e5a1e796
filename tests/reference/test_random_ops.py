"""Ops that draw random numbers: whatever computes them again draws the same numbers again."""

import threading

import pytest
import torch
import torch.nn.functional as F
from chains import H
from oracles import grouped_linear
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedmoe as fm

SPLITS = torch.tensor([2, 0, 3])
ROWS = 6


class Dropout(fm.Op):
    draws_random = True

    def compute(self, x):
        return F.dropout(x, 0.5)


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


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def with_dropout(*ops):
    return fm.Sequential(fm.GroupedLinear(3, H, H), *ops, fm.GroupedLinear(3, H, H)).double()


def meaning(seq, x, drop):
    return grouped_linear(drop(grouped_linear(x, seq[0].weight, None, SPLITS)), seq[-1].weight, None, SPLITS)


def results(call, wanted, state):
    """The output and its gradients, of one drawing; and a number drawn afterwards."""
    torch.set_rng_state(state)
    y = call()
    grads = torch.autograd.grad(y.square().sum(), wanted)
    return [y, *grads, torch.rand(1)]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_dropout_has_the_gradient_of_its_own_mask():
    """The backward pass drew a new mask: the gradient was that of another function."""
    seq, x, state = with_dropout(Dropout()), leaf(ROWS, H), torch.get_rng_state()
    wanted = [x, *seq.parameters()]
    got = results(lambda: seq(x, splits=SPLITS), wanted, state)
    assert_same(got, results(lambda: meaning(seq, x, lambda h: F.dropout(h, 0.5)), wanted, state))


@pytest.mark.parametrize("order", [1, 2])
def test_everything_that_is_computed_again(order):
    op = Noisy()
    x, shift, state = leaf(ROWS, H), leaf(ROWS), torch.get_rng_state()
    seq = fm.Sequential(op, Taking(), fm.SquaredReLU())
    wanted = [x, shift, op.slope]

    def plain():
        noise = torch.rand_like(shift)
        rows = torch.sin(x * op.slope * torch.randn_like(x) + (shift * noise)[:, None]) * noise[:, None]
        return rows.clamp(min=0).square()

    if order == 1:
        assert_same(*(results(call, wanted, state) for call in (lambda: seq(x, shift=shift), plain)))
        return
    found = []
    for call in (lambda: seq(x, shift=shift), plain):
        torch.set_rng_state(state)
        first = torch.autograd.grad(call().square().sum(), wanted, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), wanted), torch.rand(1)])
    assert_same(*found)


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


def test_a_backward_of_its_own_may_have_the_state():
    seq, x, state = with_dropout(OwnDropout()), leaf(ROWS, H), torch.get_rng_state()
    wanted = [x, *seq.parameters()]
    got = results(lambda: seq(x, splits=SPLITS), wanted, state)
    assert_same(got, results(lambda: meaning(seq, x, lambda h: F.dropout(h, 0.5)), wanted, state))


@pytest.mark.parametrize("op", [Dropout, OwnDropout])
def test_second_derivatives_draw_again(op):
    seq, x, state = with_dropout(op()), leaf(ROWS, H), torch.get_rng_state()
    wanted, found = [x, *seq.parameters()], []
    for call in (lambda: seq(x, splits=SPLITS), lambda: meaning(seq, x, lambda h: F.dropout(h, 0.5))):
        torch.set_rng_state(state)
        (g,) = torch.autograd.grad(call().square().sum(), x, create_graph=True)
        torch.rand(3)  # somebody draws in between
        found.append([g, *torch.autograd.grad(g.square().sum(), wanted)])
    assert_same(*found)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_draws_again(use_reentrant):
    seq, x, state = with_dropout(Dropout()), leaf(ROWS, H), torch.get_rng_state()
    wanted, found = [x, *seq.parameters()], []
    for call in (lambda x: seq(x, splits=SPLITS), lambda x: meaning(seq, x, lambda h: F.dropout(h, 0.5))):
        torch.set_rng_state(state)
        y = checkpoint(call, x, use_reentrant=use_reentrant)
        torch.rand(3)
        for t in wanted:
            t.grad = None
        y.square().sum().backward()
        found.append([y, *[t.grad for t in wanted]])
    assert_same(*found)


def test_two_calls_draw_twice():
    seq, x = with_dropout(Dropout()), leaf(ROWS, H)
    a, b = seq(x, splits=SPLITS), seq(x, splits=SPLITS)
    assert not torch.equal(a, b)
    (da,), (db,) = (torch.autograd.grad(y.sum(), x) for y in (a, b))
    assert not torch.equal(da, db)


class Undeclared(fm.Op):
    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def compute(self, x):
        return F.dropout(x, self.p, self.training)


def test_one_that_does_not_say_so_is_an_error():
    seq, x = with_dropout(Undeclared()), leaf(ROWS, H)
    with pytest.raises(fm.InputError, match=r"Undeclared\(\): compute: draws random numbers.*draws_random = True"):
        seq(x, splits=SPLITS)
    with torch.no_grad():  # nothing is computed again
        assert seq(x, splits=SPLITS).any()
    seq.eval()
    seq(x, splits=SPLITS).sum().backward()
    seq.train()
    with pytest.raises(fm.InputError, match="draws random numbers"):
        seq(x, splits=SPLITS)


class DropPath(fm.Op):
    def compute(self, x):
        return x * (torch.rand(()) >= 0.1).to(x.dtype) / 0.9


class LoRA(fm.Op):
    """As at the start of training: B is zeros."""

    def compute(self, x):
        return x + F.dropout(x, 0.5) @ x.new_zeros(x.shape[-1], x.shape[-1])


class Compiled(fm.Op):
    draw = staticmethod(torch.compile(lambda x: F.dropout(x, 0.5), backend="aot_eager", fullgraph=True))

    def compute(self, x):
        return x + 0 * self.draw(x)


class KeepsMask(fm.Op):
    """Its backward pass draws nothing; second derivatives compute it again."""

    provides = ("mask",)

    def infer(self, x):
        return (fm.TensorSpec(tuple(x.shape), x.dtype),) * 2

    def compute(self, x):
        mask = F.dropout(torch.ones_like(x), 0.5)
        return x * mask, mask

    def backward_ops(self):
        return (ByMask(self),)


class ByMask(fm.BackwardOp):
    needs = ("grad_output", "mask")

    def compute(self, grad_output, mask):
        return grad_output * mask


@torch.library.custom_op("fusedmoe_tests::untagged_dropout", mutates_args=())
def untagged_dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5)


class Untagged(fm.Op):
    def compute(self, x):
        return untagged_dropout(x)


@pytest.mark.parametrize(
    ("op", "x"),
    [
        (DropPath(), torch.ones(2, 2)),
        (LoRA(), torch.ones(2, 2)),
        (Undeclared(), torch.zeros(8, 4)),
        (Undeclared(0.001), torch.ones(2, 2)),
        (Compiled(), torch.ones(2, 2)),
        (Untagged(), torch.ones(64, 64)),
        (KeepsMask(), torch.ones(2, 2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_undeclared_draw_is_found_whatever_the_second_draw_gives(op, x):
    """A second draw that happened to give the same output let the op pass for good, and later gradients were wrong."""
    x = x.double().requires_grad_()
    for seed in range(8):
        torch.manual_seed(seed)
        with pytest.raises(fm.InputError, match=r"compute: draws random numbers.*draws_random = True"):
            fm.Sequential(op)(x)


def test_an_undeclared_draw_is_found_under_a_flop_counter():
    with FlopCounterMode(display=False), pytest.raises(fm.InputError, match="draws random numbers"):
        fm.Sequential(DropPath())(leaf(2, 2))


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


def test_inference_keeps_no_state(monkeypatch):
    seq, x = with_dropout(Dropout()), leaf(ROWS, H)

    def never(*_):
        raise AssertionError("the state was asked for")

    monkeypatch.setattr("fusedmoe.ops.state.random._states", never)
    with torch.no_grad():
        assert seq(x, splits=SPLITS).any()
    with pytest.raises(AssertionError, match="was asked for"):
        seq(x, splits=SPLITS)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
def test_a_compiled_module_runs_it_uncompiled():
    """As an operator of a graph it could be computed again, or once for two calls, without the state."""
    seq, x, state = with_dropout(Dropout()), leaf(ROWS, H), torch.get_rng_state()
    wanted = [x, *seq.parameters()]
    compiled = torch.compile(lambda x: seq(x, splits=SPLITS) + seq(x, splits=SPLITS), backend="aot_eager")
    want = results(lambda: seq(x, splits=SPLITS) + seq(x, splits=SPLITS), wanted, state)
    assert_same(results(lambda: compiled(x), wanted, state), want)


def test_explain_names_what_is_kept():
    seq, x = with_dropout(Dropout()), leaf(ROWS, H)
    (plan,) = seq.explain(x, splits=SPLITS).plans
    assert "1.random_state" in plan.kept
    assert "1.random_state" in str(plan)
    with torch.no_grad():
        (plan,) = seq.explain(x, splits=SPLITS).plans
    assert not plan.kept


def test_under_a_recipe():
    seq, x, state = with_dropout(Dropout()).float(), torch.randn(ROWS, H, requires_grad=True), torch.get_rng_state()
    with fm.recipe("mxfp8"):
        torch.set_rng_state(state)
        y = seq(x, splits=SPLITS)
        torch.rand(3)
        (dx,) = torch.autograd.grad(y.sum(), x)
    torch.set_rng_state(state)
    mask = F.dropout(torch.ones(ROWS, H), 0.5)
    want = grouped_linear(mask * grouped_linear(x, seq[0].weight, None, SPLITS), seq[2].weight, None, SPLITS)
    (exact,) = torch.autograd.grad(want.sum(), x)
    assert (dx - exact).norm() / exact.norm() < 0.1
