"""How a chain behaves under autograd: it is one function, but nobody should be able to tell."""

import warnings
import weakref

import pytest
import torch
from chains import H, chain, meaning, runtime_inputs
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm

SPLITS = torch.tensor([2, 0, 3])
ROWS = 6  # one of them belongs to nobody


@pytest.fixture
def seq():
    return chain("gpt_oss", 3)  # two layers with biases, a GLU and a Scale


@pytest.fixture
def x():
    return torch.randn(ROWS, H, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def probs():
    return (torch.rand(ROWS, dtype=torch.float64) + 0.5).requires_grad_()


def call(seq, x, probs):
    return seq(x, splits=SPLITS, probs=probs)


def everything(seq, x, probs):
    return {"x": x, "probs": probs} | dict(seq.named_parameters())


def expected_gradients(seq, x, probs):
    sources = everything(seq, x, probs)
    frozen = [t for t in sources.values() if not t.requires_grad]
    for t in frozen:
        t.requires_grad_()
    y = meaning(seq, x, splits=SPLITS, probs=probs)
    grads = torch.autograd.grad(y.square().sum(), list(sources.values()))
    for t in frozen:
        t.requires_grad_(False)
    return dict(zip(sources, grads, strict=True))


NAMES = ["x", "probs", "0.weight", "0.bias", "3.weight", "3.bias"]
SUBSETS = [[name] for name in NAMES] + [
    ["x", "probs"],
    ["0.weight", "3.weight"],
    ["0.bias", "3.bias"],
    ["x", "3.weight"],
    [n for n in NAMES if n != "x"],
    [n for n in NAMES if "weight" not in n],
    NAMES,
]


@pytest.mark.parametrize("wanted", SUBSETS, ids="+".join)
def test_only_what_requires_a_gradient_gets_one(seq, x, probs, wanted):
    sources = everything(seq, x, probs)
    assert list(sources) == NAMES
    for name, t in sources.items():
        t.requires_grad_(name in wanted)
    call(seq, x, probs).square().sum().backward()
    expected = expected_gradients(seq, x, probs)
    for name, t in sources.items():
        if name in wanted:
            torch.testing.assert_close(t.grad, expected[name], rtol=1e-11, atol=1e-12)
        else:
            assert t.grad is None, name


@pytest.mark.parametrize("asked", SUBSETS, ids="+".join)
def test_gradients_of_a_subset(seq, x, probs, asked):
    sources = everything(seq, x, probs)
    expected = expected_gradients(seq, x, probs)
    loss = call(seq, x, probs).square().sum()
    found = torch.autograd.grad(loss, [sources[name] for name in asked])
    for name, got in zip(asked, found, strict=True):
        torch.testing.assert_close(got, expected[name], rtol=1e-11, atol=1e-12)
    assert all(t.grad is None for t in sources.values())


def test_backward_of_some_inputs_leaves_the_others(seq, x, probs):
    call(seq, x, probs).square().sum().backward(inputs=[probs, seq[0].weight])
    expected = expected_gradients(seq, x, probs)
    for name, t in everything(seq, x, probs).items():
        if name in ("probs", "0.weight"):
            torch.testing.assert_close(t.grad, expected[name], rtol=1e-11, atol=1e-12)
        else:
            assert t.grad is None


def test_a_retained_graph_gives_the_same_again(seq, x, probs):
    loss = call(seq, x, probs).square().sum()
    sources = list(everything(seq, x, probs).values())
    first = torch.autograd.grad(loss, sources, retain_graph=True)
    # another question to the same graph in between
    torch.autograd.grad(loss, [probs], retain_graph=True)
    second = torch.autograd.grad(loss, sources)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, sources)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_saved_tensors_are_freed_after_their_last_use(retain_graph):
    alive = []

    class LastStep(fm.ops.op.BackwardOp):
        def compute(self, grad_output, x):
            alive.extend(r() is not None for r in references)
            return grad_output * x

    class First(fm.SquaredReLU):
        def compute(self, x):
            return x.square() / 2

        def backward_ops(self):
            return (LastStep(self),)

    references = []

    def pack(t):
        if t is not x:
            references.append(weakref.ref(t))
        return t

    x = torch.randn(5, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fm.Sequential(First(), fm.SwiGLU(), fm.SquaredReLU())(x)
    y.sum().backward(retain_graph=retain_graph)
    assert len(alive) == 2
    assert all(alive) if retain_graph else not any(alive)


def test_gradients_accumulate(seq, x, probs):
    for _ in range(2):
        call(seq, x, probs).square().sum().backward()
    once = expected_gradients(seq, x, probs)
    for name, t in everything(seq, x, probs).items():
        torch.testing.assert_close(t.grad, 2 * once[name], rtol=1e-11, atol=1e-12)


def test_gradients_are_the_callers_to_change(seq, x, probs):
    # each is its own memory: scaling one in place must not change another, nor what came in
    y = call(seq, x, probs)
    dy = torch.randn_like(y)
    before = dy.clone()
    sources = list(everything(seq, x, probs).values())
    grads = torch.autograd.grad(y, sources, dy, retain_graph=True)
    copies = [g.clone() for g in grads]
    for g in grads:
        g.fill_(7)
    assert torch.equal(dy, before)
    again = torch.autograd.grad(y, sources, dy)
    assert all(torch.equal(a, b) for a, b in zip(copies, again, strict=True))


def test_two_calls_in_one_graph(seq, x, probs):
    y = call(seq, call(seq, x, probs), probs)
    expected = meaning(seq, meaning(seq, x, splits=SPLITS, probs=probs), splits=SPLITS, probs=probs)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    sources = list(everything(seq, x, probs).values())
    wanted = torch.autograd.grad(expected.sum(), sources)
    for got, want in zip(torch.autograd.grad(y.sum(), sources), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(seq, x, probs, mode):
    with_graph = call(seq, x, probs)
    with mode():
        y = call(seq, x, probs)
    assert not y.requires_grad
    assert y.grad_fn is None
    assert torch.equal(y, with_graph)


def test_nothing_wants_a_gradient(seq, x, probs):
    seq.requires_grad_(False)
    assert not call(seq, x.detach(), probs.detach()).requires_grad


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_gives_the_same_bits(seq, x, probs, use_reentrant):
    sources = list(everything(seq, x, probs).values())

    def grads(y):
        for t in sources:
            t.grad = None
        y.square().sum().backward()
        return [y.detach(), *[t.grad for t in sources]]

    plain = grads(call(seq, x, probs))
    recomputed = grads(checkpoint(lambda x, probs: call(seq, x, probs), x, probs, use_reentrant=use_reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_checkpointing_a_part_of_a_routed_layer():
    seq = fm.Sequential(
        fm.Dispatch(), fm.GroupedLinear(3, H, 2 * H), fm.SwiGLU(), fm.GroupedLinear(3, H, H), fm.Combine()
    ).double()
    x = torch.randn(4, H, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 1], [1, 2], [2, 5], [1, -1]])

    def run(x, weight):
        return seq(x, expert_index=index, expert_weight=weight)

    sources = (x, weight, *seq.parameters())
    plain = torch.autograd.grad(run(x, weight).square().sum(), sources)
    again = torch.autograd.grad(checkpoint(run, x, weight, use_reentrant=False).square().sum(), sources)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("changed", ["x", "probs", "0.weight", "3.weight"])
def test_changing_what_backward_needs_is_an_error(seq, x, probs, changed):
    y = call(seq, x, probs)
    with torch.no_grad():
        everything(seq, x, probs)[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("changed", ["0.bias", "3.bias"])
def test_changing_what_backward_does_not_need_is_none(seq, x, probs, changed):
    expected = expected_gradients(seq, x, probs)
    y = call(seq, x, probs)
    with torch.no_grad():
        everything(seq, x, probs)[changed].add_(1)
    y_before = y.detach().clone()
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(y, y_before)
    torch.testing.assert_close(dx, expected["x"], rtol=1e-11, atol=1e-12)


def test_the_result_may_be_changed_in_place(seq, x, probs):
    # as torch's own layers allow it, which do not need their output
    expected = torch.autograd.grad(call(seq, x, probs).mul(3).sum(), x)[0]
    got = torch.autograd.grad(call(seq, x, probs).mul_(3).sum(), x)[0]
    assert torch.equal(got, expected)


def test_splits_changed_after_the_call_do_not_matter(seq, x, probs):
    splits = SPLITS.clone()
    y = seq(x, splits=splits, probs=probs)
    splits.fill_(0)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(dx, expected_gradients(seq, x, probs)["x"], rtol=1e-11, atol=1e-12)


def test_first_gradients_under_create_graph_are_right(seq, x, probs):
    (dx,) = torch.autograd.grad(call(seq, x, probs).square().sum(), x, create_graph=True)
    torch.testing.assert_close(dx, expected_gradients(seq, x, probs)["x"], rtol=1e-11, atol=1e-12)


def test_no_rows(seq):
    x = torch.empty(0, H, dtype=torch.float64, requires_grad=True)
    probs = torch.empty(0, dtype=torch.float64, requires_grad=True)
    y = seq(x, splits=torch.zeros(3, dtype=torch.int64), probs=probs)
    assert y.shape == (0, H)
    y.sum().backward()
    assert x.grad.shape == (0, H)
    assert probs.grad.shape == (0,)
    for parameter in seq.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_tensor_hooks_and_retained_gradients(seq, x, probs):
    inner = x * 1
    inner.retain_grad()
    seen = []
    y = call(seq, inner, probs)
    y.register_hook(seen.append)
    y.square().sum().backward()
    assert torch.equal(seen[0], 2 * y.detach())
    assert torch.equal(inner.grad, x.grad)
    torch.testing.assert_close(x.grad, expected_gradients(seq, x, probs)["x"], rtol=1e-11, atol=1e-12)


def test_anomaly_mode(seq, x, probs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            call(seq, x, probs).square().sum().backward()
    torch.testing.assert_close(x.grad, expected_gradients(seq, x, probs)["x"], rtol=1e-11, atol=1e-12)


def test_inputs_for_splits_of_any_kind_get_no_gradient(seq, x, probs):
    inputs = runtime_inputs(seq, ROWS, SPLITS)
    call(seq, x, inputs["probs"]).sum().backward()
    assert inputs["probs"].grad is None
    assert inputs["splits"].grad is None


@pytest.mark.parametrize("name", ["grad", "vmap", "jacrev", "jacfwd"])
@pytest.mark.parametrize("recorded", [True, False])
def test_transforms_of_torch_func_are_refused(name, recorded):
    seq = fm.Sequential(fm.GroupedLinear(2, 8, 8, bias=False), fm.SquaredReLU())
    x, splits = torch.randn(3, 4, 8), torch.tensor([2, 2])
    x = x if name == "vmap" else x[0]
    seq(x[0] if name == "vmap" else x, splits=splits)
    seq.requires_grad_(recorded)
    expected = (
        r"0.GroupedLinear, 1.SquaredReLU: expected a call outside of the transforms of torch.func .* got one inside"
    )
    with pytest.raises(fm.InputError, match=expected), torch.set_grad_enabled(recorded or name != "vmap"):
        getattr(torch.func, name)(lambda x: seq(x, splits=splits).sum())(x)


def test_a_transform_that_the_steps_can_run_in_works():
    op, x = fm.SwiGLU(), torch.randn(3, 4, 8)
    assert torch.equal(torch.func.vmap(op)(x), op(x))


class _Softplus(fm.SquaredReLU):
    def compute(self, x):
        return torch.nn.functional.softplus(x)


class _Cubed(fm.SwiGLU):
    def phi(self, g):
        return g**3


class _Squared(fm.Scale):
    def compute(self, x, factor):
        return x * factor.square().unsqueeze(-1)


class _Mixin:
    def compute(self, x):
        return torch.tanh(x)


class _Mixed(_Mixin, fm.SquaredReLU):
    pass


class _Halved(fm.SwiGLU):
    def halves(self, x):
        return x.chunk(2, -1)[::-1]

    def clamped(self, gate, up):
        return gate.sigmoid(), up


def test_a_backward_step_of_its_own_is_used():
    class Twice(fm.ops.op.BackwardOp):
        def compute(self, grad_output, x):
            return 2 * torch.ones_like(x)

    class Own(fm.SwiGLU):
        def phi(self, g):
            return g.tanh()

        def backward_ops(self):
            return (Twice(self),)

    x = torch.randn(3, 8, requires_grad=True)
    fm.Sequential(Own())(x).sum().backward()
    assert x.grad.eq(2).all()


@pytest.mark.parametrize(
    ("op", "function"),
    [
        (_Mixed(), lambda x, p: torch.tanh(x)),
        (_Halved(), lambda x, p: torch.nn.functional.silu(x.chunk(2, -1)[1].sigmoid()) * x.chunk(2, -1)[0]),
        (_Softplus(), lambda x, p: torch.nn.functional.softplus(x)),
        (_Cubed(), lambda x, p: x.chunk(2, -1)[0] ** 3 * x.chunk(2, -1)[1]),
        (_Squared("probs"), lambda x, p: x * p.square().unsqueeze(-1)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_subclass_that_computes_something_else_has_the_gradient_of_that(op, function):
    named = {"probs": torch.rand(9).requires_grad_()} if op.runtime_inputs else {}
    x = torch.randn(9, 8, requires_grad=True)
    wanted = [x, *named.values()]
    got = torch.autograd.grad(fm.Sequential(op)(x, **named).square().sum(), wanted)
    want = torch.autograd.grad(function(x, named.get("probs")).square().sum(), wanted)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
