"""How a chain behaves under autograd and autocast: it is one function, but nobody should be able to tell."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from kit.compare import assert_bitwise, assert_close
from kit.layers import H, chain, leaf, outcome, wanted_of
from kit.oracles import meaning
from kit.splits import ROWS, SPLITS

import fusedmoe as fm


@pytest.fixture
def seq():
    return chain("gpt_oss")  # two layers with biases, a GLU and a Scale


@pytest.fixture
def x():
    return leaf(ROWS, H)


@pytest.fixture
def probs():
    return (torch.rand(ROWS, dtype=torch.float64) + 0.5).requires_grad_()


def call(seq, x, probs, splits=SPLITS):
    return seq(x, splits=splits, probs=probs)


def loss(seq, x, probs):
    return call(seq, x, probs).square().sum()


def everything(seq, x, probs):
    return {"x": x, "probs": probs} | dict(seq.named_parameters())


def expected_gradients(seq, x, probs):
    exact, x, probs = copy.deepcopy(seq).requires_grad_(), *(t.detach().clone().requires_grad_() for t in (x, probs))
    sources = everything(exact, x, probs)
    y = meaning(exact, x, splits=SPLITS, probs=probs)
    return dict(zip(sources, torch.autograd.grad(y.square().sum(), [*sources.values()]), strict=True))


NAMES = ["x", "probs", "0.weight", "0.bias", "3.weight", "3.bias"]
SUBSETS = [*([name] for name in NAMES), ["x", "3.weight"], [n for n in NAMES if "weight" not in n], NAMES[1:], NAMES]


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_gradients_of_some_alone(seq, x, probs, names):
    sources, expected = everything(seq, x, probs), expected_gradients(seq, x, probs)
    assert [*sources] == NAMES
    want = [expected[name] for name in names]
    assert_close(torch.autograd.grad(loss(seq, x, probs), [sources[name] for name in names]), want)
    for asked in ("of backward", "that require one"):  # and the others get none
        for name, t in sources.items():
            t.grad = None
            t.requires_grad_(asked == "of backward" or name in names)
        loss(seq, x, probs).backward(inputs=[sources[name] for name in names] if asked == "of backward" else None)
        assert_close([sources[name].grad for name in names], want)
        assert all(t.grad is None for name, t in sources.items() if name not in names)


def test_a_retained_graph_gives_the_same_again(seq, x, probs):
    total, sources = loss(seq, x, probs), [*everything(seq, x, probs).values()]
    first = torch.autograd.grad(total, sources, retain_graph=True)
    torch.autograd.grad(total, [probs], retain_graph=True)  # another question to the same graph in between
    assert_bitwise(torch.autograd.grad(total, sources), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, sources)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_saved_tensors_are_freed_after_their_last_use(retain_graph):
    alive, references = [], []

    class LastStep(fm.ops.op.BackwardOp):
        def compute(self, grad_output, x):
            alive.extend(r() is not None for r in references)
            return grad_output * x

    class First(fm.SquaredReLU):
        def compute(self, x):
            return x.square() / 2

        def backward_ops(self):
            return (LastStep(self),)

    def pack(t):
        if t is not x:
            references.append(weakref.ref(t))
        return t

    x = leaf(5, 16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fm.Sequential(First(), fm.SwiGLU(), fm.SquaredReLU())(x)
    y.sum().backward(retain_graph=retain_graph)
    assert alive == [retain_graph] * 2


def test_gradients_accumulate_and_are_the_callers_to_change(seq, x, probs):
    for _ in range(2):
        loss(seq, x, probs).backward()
    once = expected_gradients(seq, x, probs)
    assert_close({k: t.grad for k, t in everything(seq, x, probs).items()}, {k: 2 * t for k, t in once.items()})
    # each is its own memory: scaling one in place must not change another, nor what came in
    y, sources = call(seq, x, probs), [*everything(seq, x, probs).values()]
    dy = torch.randn_like(y)
    before, grads = dy.clone(), torch.autograd.grad(y, sources, dy, retain_graph=True)
    copies = [g.clone() for g in grads]
    for g in grads:
        g.fill_(7)
    assert torch.equal(dy, before)
    assert_bitwise(torch.autograd.grad(y, sources, dy), copies)


@pytest.mark.parametrize("changed", ["x", "probs", "0.weight", "3.weight", "0.bias", "3.bias"])
def test_changing_what_backward_needs_is_an_error(seq, x, probs, changed):
    expected, y = expected_gradients(seq, x, probs), call(seq, x, probs)
    with torch.no_grad():
        everything(seq, x, probs)[changed].add_(1)
    if "bias" in changed:  # which it does not need
        assert_close(torch.autograd.grad(y.square().sum(), x)[0], expected["x"])
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_result_and_the_splits_may_be_changed_afterwards(seq, x, probs):
    # as torch's own layers allow it, which do not need their output
    (want,) = torch.autograd.grad(call(seq, x, probs).mul(3).sum(), x)
    splits = SPLITS.clone()
    y = call(seq, x, probs, splits).mul_(3)
    splits.fill_(0)
    assert_bitwise(torch.autograd.grad(y.sum(), x), [want])


@pytest.mark.parametrize("name", ["grad", "vmap", "jacrev", "jacfwd"])
@pytest.mark.parametrize("recorded", [True, False])
def test_transforms_of_torch_func_are_refused(name, recorded):
    seq = fm.Sequential(fm.GroupedLinear(2, 8, 8, bias=False), fm.SquaredReLU())
    x, splits = torch.randn(3, 4, 8), torch.tensor([2, 2])
    x = x if name == "vmap" else x[0]
    seq(x[0] if name == "vmap" else x, splits=splits)
    seq.requires_grad_(recorded)
    with pytest.raises(fm.InputError, match=r"torch\.func"), torch.set_grad_enabled(recorded or name != "vmap"):
        getattr(torch.func, name)(lambda x: seq(x, splits=splits).sum())(x)


# --- subclasses ----------------------------------------------------------------------------------------------------


class Cubed(fm.SwiGLU):
    def phi(self, g):
        return g**3


class Halved(fm.SwiGLU):
    def halves(self, x):
        return x.chunk(2, -1)[::-1]

    def clamped(self, gate, up):
        return gate.sigmoid(), up


class Two(fm.ops.op.BackwardOp):
    def compute(self, grad_output, x):
        return 2 * torch.ones_like(x)


class Own(Cubed):
    def backward_ops(self):
        return (Two(self),)


@pytest.mark.parametrize(
    ("op", "function"),
    [
        (Halved(), lambda x: F.silu(x.chunk(2, -1)[1].sigmoid()) * x.chunk(2, -1)[0]),
        (Cubed(), lambda x: x.chunk(2, -1)[0] ** 3 * x.chunk(2, -1)[1]),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_subclass_that_computes_something_else_has_the_gradient_of_that(op, function):
    x = leaf(9, 8)
    got = torch.autograd.grad(fm.Sequential(op)(x).square().sum(), x)
    assert_close(got, torch.autograd.grad(function(x).square().sum(), x))


def test_a_backward_step_of_its_own_is_used():
    x = leaf(3, 8)
    fm.Sequential(Own())(x).sum().backward()
    assert x.grad.eq(2).all()


# --- autocast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_under_autocast_a_chain_is_the_cast_chain(inside, dtype):
    seq, x, probs = chain("gpt_oss", dtype=torch.float32), leaf(ROWS, H, dtype=torch.float32), torch.rand(ROWS)
    low, low_x, dy = copy.deepcopy(seq).to(dtype), x.detach().to(dtype).requires_grad_(), torch.randn(ROWS, H).to(dtype)
    want = outcome(low, low_x, dy, splits=SPLITS, probs=probs.requires_grad_())
    with torch.autocast("cpu", dtype):
        y = call(seq, x, probs)
        if inside:
            y.backward(dy)
        assert torch.is_autocast_enabled("cpu"), "still on after a call"
        assert (x @ x.T).dtype is dtype
    if not inside:
        y.backward(dy)
    assert_bitwise(y.detach(), want["y"])
    gradients = {k: t.grad for k, t in wanted_of(seq, x, {"probs": probs}).items()}
    assert_bitwise(gradients, {k: t.float() for k, t in want.items() if k != "y"})  # in the parameters' dtype


def test_a_lower_dtype_comes_in():
    # after another module that autocast ran in bf16
    seq, x = chain("mlp", dtype=torch.float32), leaf(ROWS, H, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = seq(x, splits=SPLITS)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, seq[0].weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_fp64_is_left_alone():
    seq, x = chain("mlp"), torch.randn(ROWS, H, dtype=torch.float64)
    expected = seq(x, splits=SPLITS)
    with torch.autocast("cpu", torch.bfloat16):
        assert_bitwise(seq(x, splits=SPLITS), expected)


def test_foreign_modules_between_chains_are_autocast_too():
    seq = fm.Sequential(fm.GroupedLinear(3, H, H), torch.nn.Linear(H, H), fm.GroupedLinear(3, H, H))
    with torch.autocast("cpu", torch.bfloat16):
        y = seq(torch.randn(5, H), splits=SPLITS)
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.any() for p in seq.parameters())
