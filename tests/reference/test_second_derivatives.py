"""Gradients of gradients (``create_graph=True``), against the same formulas written on their own in plain PyTorch."""

import gc
import logging
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from chains import CHAINS, GPT_OSS, H, chain, meaning, runtime_inputs
from oracles import experts_dense, glu, grouped_linear, squared_relu

import fusedmoe as fm
from fusedmoe.fusion.program.differentiable import SecondOrderError

SPLITS = torch.tensor([2, 0, 3])
ROWS = 6  # one of them belongs to nobody


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def weighted(t):
    """A scalar in which every element of a tensor counts differently, and not linearly."""
    return (t.square() * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view_as(t)).sum()


def second(y, asked, sources, loss=weighted):
    """The gradients of a penalty on the gradients asked for, with those: None is zero."""
    first = torch.autograd.grad(loss(y), asked, create_graph=True)
    penalty = sum(map(weighted, first))
    found = torch.autograd.grad(penalty, sources, allow_unused=True, retain_graph=True)
    return [*first, *[torch.zeros_like(s) if g is None else g for g, s in zip(found, sources, strict=True)]]


def assert_same(got, want, rtol=1e-10, atol=1e-11):
    assert any(t.any() for t in want), "zeros would pass"
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def inputs_of(seq):
    inputs = runtime_inputs(seq, ROWS, SPLITS)
    return {name: t.requires_grad_(t.is_floating_point()) for name, t in inputs.items()}


def sources_of(seq, x, inputs):
    return {"x": x} | {k: t for k, t in inputs.items() if t.requires_grad} | dict(seq.named_parameters())


def test_the_gradient_penalty_that_was_dropped():
    """Asked of the parameters, the penalty's part was missing, without a word: a norm of 0.02 in place of 6."""
    seq, x = chain("mlp", 3), leaf(ROWS, H)
    results = []
    for y in (seq(x, splits=SPLITS), meaning(seq, x, splits=SPLITS)):
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(y.square().mean() + (g.norm() - 1) ** 2, list(seq.parameters())))
    assert_same(*results)


@pytest.mark.parametrize("name", CHAINS)
def test_each_gradient_and_all_of_them(name):
    seq, x = chain(name, 3), leaf(ROWS, H)
    inputs = inputs_of(seq)
    sources = sources_of(seq, x, inputs)
    for asked in ([t] for t in [*sources.values(), None]):
        asked = [*sources.values()] if asked == [None] else asked
        got = second(seq(x, **inputs), asked, [*sources.values()])
        assert_same(got, second(meaning(seq, x, **inputs), asked, [*sources.values()]))


@pytest.mark.parametrize("name", CHAINS)
def test_of_a_constant_gradient(name):
    """Where what arrives is a constant, the gradients still depend on the arguments."""
    seq, x = chain(name, 3), leaf(ROWS, H)
    inputs = inputs_of(seq)
    sources = [*sources_of(seq, x, inputs).values()]
    got = second(seq(x, **inputs), sources, sources, loss=torch.sum)
    assert_same(got, second(meaning(seq, x, **inputs), sources, sources, loss=torch.sum))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")  # not for backward(inputs)
def test_every_way_of_asking():
    seq, x = chain("scaled mlp", 3), leaf(ROWS, H)
    inputs = inputs_of(seq)
    sources = [*sources_of(seq, x, inputs).values()]
    results = []
    for call in (seq, lambda x, **inputs: meaning(seq, x, **inputs)):
        for t in sources:
            t.grad = None
        x_grad = torch.autograd.grad(weighted(call(x, **inputs)), x, create_graph=True)[0]
        (weighted(x_grad)).backward()  # plain
        found = [t.grad for t in sources]
        for t in sources:
            t.grad = None
        weighted(call(x, **inputs)).backward(inputs=[x], create_graph=True)
        assert all(t.grad is None for t in sources if t is not x)
        found += torch.autograd.grad(weighted(x.grad), sources)
        x.grad = None
        weighted(call(x, **inputs)).backward(create_graph=True)
        penalty = sum(weighted(t.grad) for t in sources)
        found += torch.autograd.grad(penalty, sources)
        for t in sources:
            t.grad = None  # they refer to themselves
        results.append(found)
    assert_same(*results)


def test_frozen_parameters_and_parts():
    for wanted in (["x"], ["probs"], ["3.weight"], ["0.bias", "3.bias"], ["x", "0.weight"]):
        seq, x = chain("gpt_oss", 3), leaf(ROWS, H)
        inputs = inputs_of(seq)
        sources = sources_of(seq, x, inputs)
        for name, t in sources.items():
            t.requires_grad_(name in wanted)
        sources = [sources[name] for name in wanted]
        got = second(seq(x, **inputs), sources, sources)
        assert_same(got, second(meaning(seq, x, **inputs), sources, sources))


@pytest.mark.parametrize("name", ["mlp", "gpt_oss", "scale first", "squared relu"])
def test_third_derivatives(name):
    seq, x = chain(name, 3), leaf(ROWS, H)
    inputs = inputs_of(seq)
    sources = [*sources_of(seq, x, inputs).values()]
    results = []
    for y in (seq(x, **inputs), meaning(seq, x, **inputs)):
        (g,) = torch.autograd.grad(weighted(y), x, create_graph=True)
        found = torch.autograd.grad(weighted(g), sources, create_graph=True)
        results.append(torch.autograd.grad(sum(map(weighted, found)), sources))
    assert_same(*results, rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("name", ["layer with bias", "glu first", "gpt_oss"])
def test_gradgradcheck(name):
    seq, x = chain(name, 3), leaf(ROWS, H)
    inputs = inputs_of(seq)
    named = dict(seq.named_parameters())
    floats = {k: t for k, t in inputs.items() if t.requires_grad}

    def run(x, *values):
        values = dict(zip([*floats, *named], values, strict=True))
        given = inputs | {k: values.pop(k) for k in floats}
        return torch.func.functional_call(seq, values, (x,), given)

    assert torch.autograd.gradgradcheck(run, (x, *floats.values(), *named.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_other_dtypes(name, dtype):
    """These have a grouped product of torch's own."""
    seq, x = chain(name, 3, dtype), leaf(ROWS, H, dtype=dtype)
    inputs = {k: t.to(dtype) if t.is_floating_point() else t for k, t in inputs_of(seq).items()}
    sources = [x, *seq.parameters()]
    got = second(seq(x, **inputs), sources, sources)
    seq, x = seq.double(), x.detach().double().requires_grad_()
    inputs = {k: t.detach().double() if t.is_floating_point() else t for k, t in inputs.items()}
    sources = [x, *seq.parameters()]
    for a, b in zip(got, second(meaning(seq, x, **inputs), sources, sources), strict=True):
        assert a.dtype is dtype
        assert (a.double() - b).norm() <= (1e-5 if dtype is torch.float32 else 0.1) * b.norm()
        assert b.any() or not a.any()


ACTIVATIONS = {
    "swiglu": (fm.SwiGLU(), lambda x: glu(x, "swiglu")),
    "gpt_oss": (fm.SwiGLU(**GPT_OSS), lambda x: glu(x, "swiglu", *GPT_OSS.values())),
    "geglu": (fm.GeGLU(), lambda x: glu(x, "geglu_tanh")),
    "geglu erf": (fm.GeGLU("none", alpha=1.3), lambda x: glu(x, "geglu_erf", alpha=1.3) / 1),
    "reglu": (fm.ReGLU(offset=0.5), lambda x: glu(x, "reglu", offset=0.5)),
    "squared relu": (fm.SquaredReLU(), squared_relu),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("alone", [True, False])
def test_activations(name, alone):
    op, formula = ACTIVATIONS[name]
    x = leaf(5, H)
    if alone:
        assert_same(second(op(x), [x], [x]), second(formula(x), [x], [x]))
        return
    layer = fm.GroupedLinear(3, H, 2 * H, dtype=torch.float64)
    y = fm.Sequential(layer, op)(x, splits=SPLITS)
    wanted = [x, layer.weight]
    assert_same(
        second(y, wanted, wanted), second(formula(grouped_linear(x, layer.weight, None, SPLITS)), wanted, wanted)
    )


@pytest.mark.parametrize("bias", [True, False])
def test_dense_layers(bias):
    seq = fm.Sequential(fm.Linear(H, 2 * H, bias=bias), fm.SwiGLU(), fm.Linear(H, 3, bias=bias)).double()
    x = leaf(2, 3, H)
    first, _, last = seq
    expected = F.linear(glu(F.linear(x, first.weight, first.bias), "swiglu"), last.weight, last.bias)
    wanted = [x, *seq.parameters()]
    assert_same(second(seq(x), wanted, wanted), second(expected, wanted, wanted))


def test_a_dense_layer_among_rows_sorted_by_expert():
    seq = fm.Sequential(fm.Linear(H, H), fm.GroupedLinear(3, H, H)).double()
    x = leaf(ROWS, H)
    expected = grouped_linear(F.linear(x, seq[0].weight, seq[0].bias), seq[1].weight, None, SPLITS)
    wanted = [x, *seq.parameters()]
    want = second(expected, wanted, wanted)
    assert_same(second(seq(x, splits=SPLITS), wanted, wanted), want)
    with torch.no_grad():
        x[5] = math.nan
    for a, b in zip(second(seq(x, splits=SPLITS), wanted, wanted), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("weights", ["probs", None])
def test_routed_layers(weights):
    seq = fm.Sequential(
        fm.Dispatch(), fm.GroupedLinear(3, H, H), fm.SquaredReLU(), fm.GroupedLinear(3, H, H), fm.Combine(weights)
    ).double()
    x, weight = leaf(4, H), torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 1], [1, 2], [2, 5], [1, -1]])  # with sentinels
    first, last = seq[1].weight, seq[3].weight
    expected = experts_dense(
        x, index, weight if weights else torch.ones_like(weight), 3, lambda e, t: last[e] @ squared_relu(first[e] @ t)
    )
    wanted = [x, *([weight] if weights else []), first, last]
    y = seq(x, expert_index=index, expert_weight=weight)
    assert_same(second(y, wanted, wanted), second(expected, wanted, wanted))


def test_parts_around_a_foreign_module_and_an_op_with_a_hook():
    first, last = fm.GroupedLinear(3, H, H), fm.GroupedLinear(3, H // 2, H)
    seq = fm.Sequential(first, torch.nn.Sigmoid(), fm.SwiGLU(), last).double()
    seq[2].register_forward_hook(lambda *_: None)
    x = leaf(ROWS, H)
    rows = torch.sigmoid(grouped_linear(x, seq[0].weight, None, SPLITS))
    expected = grouped_linear(glu(rows, "swiglu"), seq[3].weight, None, SPLITS)
    wanted = [x, *seq.parameters()]
    assert_same(second(seq(x, splits=SPLITS), wanted, wanted), second(expected, wanted, wanted))


def test_the_low_rank_update():
    layer = fm.GroupedLoRA(fm.GroupedLinear(3, H, 2 * H, bias=True), rank=2, alpha=3).double()
    torch.nn.init.normal_(layer.lora_B.weight)
    seq = fm.Sequential(layer, fm.SwiGLU())
    base, a, b = layer.base_layer, layer.lora_A.weight, layer.lora_B.weight
    base.requires_grad_()
    x = leaf(ROWS, H)
    rows = grouped_linear(x, base.weight, base.bias, SPLITS)
    rows = rows + 1.5 * grouped_linear(grouped_linear(x, a, None, SPLITS), b, None, SPLITS)
    wanted = [x, a, b, base.weight, base.bias]
    got = second(seq(x, splits=SPLITS), wanted, wanted)
    assert_same(got, second(glu(rows, "swiglu"), wanted, wanted))


# ---- ops of others ------------------------------------------------------------------------------------------------


class Warp(fm.Op):
    """Parameters and runtime inputs, and the backward that every op has."""

    parameter_names = ("slope",)
    runtime_inputs = ("shift",)
    rowwise_inputs = ("shift",)

    def __init__(self, features):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.randn(features, dtype=torch.float64))

    def compute(self, x, slope, shift):
        return torch.sin(x * slope + shift[:, None])


def test_an_op_that_has_only_its_meaning():
    seq = fm.Sequential(fm.GroupedLinear(3, H, H).double(), Warp(H), fm.GroupedLinear(3, H, H).double())
    x, shift = leaf(ROWS, H), leaf(ROWS)
    rows = torch.sin(grouped_linear(x, seq[0].weight, None, SPLITS) * seq[1].slope + shift[:, None])
    wanted = [x, shift, *seq.parameters()]
    want = second(grouped_linear(rows, seq[2].weight, None, SPLITS), wanted, wanted)
    assert_same(second(seq(x, splits=SPLITS, shift=shift), wanted, wanted), want)


def test_one_tensor_in_two_places():
    """What is computed from one argument is not taken for a part of it."""
    op, t = Warp(ROWS), leaf(ROWS)
    op.slope = torch.nn.Parameter(t.detach().clone())
    results = []
    for call in (lambda x, s: op(x, shift=s), lambda x, s: torch.sin(x * op.slope + s[:, None])):
        x = t[:, None] * t[None]
        results.append(second(call(x, x.sum(1)), [t], [t, op.slope]))
    assert_same(*results)


class StraightThrough(fm.BackwardOp):
    needs = ("grad_output", "input")

    def compute(self, grad_output, x):
        return grad_output * x.cos()


class Round(fm.Op):
    """Its derivative is not that of what it computes, on purpose."""

    def compute(self, x):
        return x.round()

    def backward_ops(self):
        return (StraightThrough(self),)


class TorchRound(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def test_a_derivative_of_its_own_holds_for_second_derivatives_too():
    seq = fm.Sequential(fm.Linear(H, H), Round(), fm.Linear(H, H)).double()
    x = leaf(5, H)
    wanted = [x, *seq.parameters()]
    rows = TorchRound.apply(F.linear(x, seq[0].weight, seq[0].bias) * 1)
    got = second(seq(x), wanted, wanted)
    assert_same(got, second(F.linear(rows, seq[2].weight, seq[2].bias), wanted, wanted))


class Hidden(fm.BackwardOp):
    """Computes where autograd does not see it."""

    def compute(self, grad_output, x):
        with torch.no_grad():
            return grad_output * x.cos()


@pytest.mark.parametrize("loss", [torch.sum, weighted])
def test_a_backward_step_that_autograd_does_not_see_is_an_error(loss):
    class Sine(fm.Op):
        def compute(self, x):
            return x.sin()

        def backward_ops(self):
            return (Hidden(self),)

    x = leaf(3, 4)
    torch.testing.assert_close(torch.autograd.grad(Sine()(x).sum(), x)[0], x.cos())
    with pytest.raises(SecondOrderError, match=r"Hidden\(Sine\(\)\): compute: expected plain PyTorch"):
        torch.autograd.grad(loss(Sine()(x)), x, create_graph=True)


# ---- rows that belong to nobody -----------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", CHAINS)
def test_poison_behind_the_last_expert_stays_out(name, poison):
    seq = chain(name, 3)
    x, inputs = torch.randn(ROWS, H, dtype=torch.float64), inputs_of(seq)
    dy = torch.randn_like(seq(x, **inputs))

    def run():
        given = {k: t.detach().clone().requires_grad_(t.is_floating_point()) for k, t in inputs.items()}
        rows, grad = x.clone().requires_grad_(), dy.clone().requires_grad_()
        sources = [grad, *sources_of(seq, rows, given).values()]
        first = torch.autograd.grad(seq(rows, **given), sources[1:], grad, create_graph=True)
        return first, torch.autograd.grad(sum(map(weighted, first)), sources, materialize_grads=True, allow_unused=True)

    healthy = run()
    for t in (x, dy, *[t for t in inputs.values() if t.requires_grad]):
        t.detach()[5:] = poison
    for got, want in zip(run(), healthy, strict=True):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
            assert a.shape[0] != ROWS or not a[5:].any()
    assert healthy[1][0].any()


def test_experts_and_calls_without_rows():
    seq = chain("gpt_oss", 3)
    x, probs = leaf(0, H), leaf(0)
    wanted = [x, probs, *seq.parameters()]
    got = second(seq(x, splits=torch.zeros(3, dtype=torch.int64), probs=probs), wanted, wanted)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in got)
    x, probs = leaf(4, H), leaf(4)
    got = second(seq(x, splits=torch.tensor([0, 4, 0]), probs=probs), [x], [*seq.parameters()])
    for g in got[1:]:
        assert g[1].any()
        assert not g[0].any()
        assert not g[2].any()


# ---- arguments that the backward pass alone does not need ---------------------------------------------------------


def first_frozen():
    seq = chain("mlp", 3)
    seq[0].requires_grad_(False)
    return seq


def test_arguments_that_are_not_kept():
    """Rows whose layer is frozen are not kept for backward; they are there as long as somebody has them."""
    seq, x = first_frozen(), torch.randn(ROWS, H, dtype=torch.float64)
    wanted = [seq[2].weight]
    got = second(seq(x, splits=SPLITS.clone()), wanted, wanted)  # nobody else has the splits
    assert_same(got, second(meaning(seq, x, splits=SPLITS), wanted, wanted))


def test_rows_are_not_kept_alive_and_gone_is_an_error():
    seq, x = first_frozen(), torch.randn(ROWS, H, dtype=torch.float64)
    y = seq(x, splits=SPLITS)
    reference = weakref.ref(x)
    del x
    assert reference() is None
    y.sum().backward(retain_graph=True)
    for ask in (
        lambda: torch.autograd.grad(weighted(y), seq[2].weight, create_graph=True, retain_graph=True),
        lambda: weighted(y).backward(inputs=[seq[2].weight], create_graph=True),
        lambda: weighted(y).backward(create_graph=True),
    ):
        with pytest.raises(SecondOrderError, match=r"0\.input.* was freed"):
            ask()


@pytest.mark.parametrize("kept", ["rows", "base"])
def test_rows_that_autograd_keeps(kept):
    """Python has let go of them, or of a view of them: the reference still finds them, with their graph."""
    seq, z = fm.Sequential(fm.Dispatch(3), fm.GroupedLinear(3, H, H), fm.Combine()).double(), leaf(4, H)
    index, weight = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]]), torch.rand(4, 2, dtype=torch.float64)
    results = []
    for run in (
        lambda x: seq(x, expert_index=index, expert_weight=weight),
        lambda x: experts_dense(x, index, weight, 3, lambda e, t: seq[1].weight[e] @ t),
    ):
        x = z.exp() if kept == "rows" else z.exp().view(2, 2, H)
        y = run(x.view(4, H) if kept == "base" else x) + x.square().sum()  # whose node keeps x
        reference = weakref.ref(x)
        del x
        gc.collect()
        assert reference() is not None
        results.append(second(y, [seq[1].weight], [z, seq[1].weight]))
    assert_same(*results)


def test_rows_changed_in_place_are_an_error_only_where_they_are_needed():
    seq, x, splits = first_frozen(), torch.randn(ROWS, H, dtype=torch.float64), SPLITS.clone()
    y = seq(x, splits=splits)
    x.mul_(0)
    (dw,) = torch.autograd.grad(y.sum(), seq[2].weight, retain_graph=True)
    assert dw.any()
    with pytest.raises(SecondOrderError, match=r"0\.input has been modified by an inplace operation"):
        torch.autograd.grad(weighted(y), seq[2].weight, create_graph=True)


@pytest.mark.parametrize("changed", ["0.weight", "0.bias"])
def test_a_trained_parameter_that_is_not_kept_was_changed_in_place(changed):
    """The backward pass alone does not need it, so that torch does not see the change. The gradients were computed from
    the new values, without a word.
    """
    seq, x = chain("gpt_oss", 3), torch.randn(ROWS, H, dtype=torch.float64)
    parameter = seq.get_parameter(changed)
    y = seq(x, **inputs_of(seq))
    (before,) = torch.autograd.grad(weighted(y), parameter, retain_graph=True)
    with torch.no_grad():
        parameter.add_(1)
    (after,) = torch.autograd.grad(weighted(y), parameter, retain_graph=True)
    assert torch.equal(after, before)
    with pytest.raises(SecondOrderError, match=rf"{changed} has been modified by an inplace operation"):
        torch.autograd.grad(weighted(y), parameter, create_graph=True)


def test_a_leaf_that_is_not_kept_was_changed_in_place():
    seq, x = chain("mlp", 3).requires_grad_(False), leaf(ROWS, H)
    y = seq(x, splits=SPLITS)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(SecondOrderError, match=r"0\.input has been modified by an inplace operation"):
        torch.autograd.grad(weighted(y), x, create_graph=True)


def test_of_a_view_that_is_not_kept():
    """Its second derivatives went to the tensor that it is a view of, and none to the view."""
    seq, base = chain("mlp", 3).requires_grad_(False), leaf(2 * ROWS, H)
    x = base[:ROWS]
    y = seq(x, splits=SPLITS)
    assert_same(second(y, [x], [x, base]), second(meaning(seq, x, splits=SPLITS), [x], [x, base]))


class Reversed(torch.autograd.Function):
    """Returns its input, as the functions of tensor parallelism do, and has a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return -3 * dy


def hooked_view(x):
    view = x.view(ROWS, H)
    view.register_hook(lambda dx: 5 * dx)
    return view


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("through", [Reversed.apply, lambda x: Reversed.apply(x).view(ROWS, H), hooked_view])
def test_a_view_with_a_gradient_of_its_own(through, autocast):
    """Autograd takes it for a view of its input, and made from that again it lost the gradient of its own."""
    dtype = torch.float32 if autocast else torch.float64
    seq, z = chain("mlp", 3).requires_grad_(False).to(dtype), leaf(ROWS, H, dtype=dtype)

    def call(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return seq(x, splits=SPLITS)

    base = z.sin()
    x = through(base)
    want = second(meaning(seq, x, splits=SPLITS), [z], [z])
    scales = [t.detach().abs().max() for t in want]
    got, want = ([t / scale for t, scale in zip(ts, scales, strict=True)] for ts in (second(call(x), [z], [z]), want))
    assert_same(got, want, *([0, 0.05] if autocast else []))
    y = call(through(base))  # nobody has the view itself
    with pytest.raises(SecondOrderError, match=r"0\.input.* was freed"):
        torch.autograd.grad(weighted(y), z, create_graph=True)


def test_splits_changed_after_the_call_do_not_matter():
    seq, x, splits = chain("mlp", 3), leaf(ROWS, H), SPLITS.clone()
    y = seq(x, splits=splits)
    splits.fill_(0)
    wanted = [x, *seq.parameters()]
    assert_same(second(y, wanted, wanted), second(meaning(seq, x, splits=SPLITS), wanted, wanted))


def test_a_routing_changed_after_the_call_is_an_error():
    seq, x = fm.Sequential(fm.Dispatch(3), fm.GroupedLinear(3, H, H), fm.Combine()).double(), leaf(2, H)
    index, weight = torch.tensor([[0, 1], [1, 2]]), torch.rand(2, 2, dtype=torch.float64)
    y = seq(x, expert_index=index, expert_weight=weight)
    index.fill_(0)
    assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0].any()
    with pytest.raises(SecondOrderError, match=r"expert_index has been modified by an inplace operation"):
        torch.autograd.grad(weighted(y), x, create_graph=True)


def test_saved_tensors_changed_in_place_are_torchs_own_error():
    seq, x = chain("mlp", 3), leaf(ROWS, H)
    y = seq(x, splits=SPLITS)
    with torch.no_grad():
        seq[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(weighted(y), x, create_graph=True)


def test_saved_tensor_hooks():
    """Saved tensors that are stored elsewhere in between come back with their graph."""
    seq, z = chain("scaled mlp", 3), leaf(ROWS, H)
    inputs = inputs_of(seq)
    wanted = [z, *sources_of(seq, z, inputs).values()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        y = seq(z.sin(), **inputs)
    assert_same(second(y, wanted, wanted), second(meaning(seq, z.sin(), **inputs), wanted, wanted))


def test_nothing_leaks():
    seq = chain("gpt_oss", 3)
    x, z = leaf(ROWS, H), leaf(ROWS, H)
    inputs = inputs_of(seq)
    alive = []

    def once():
        rows, probs = z.sin(), inputs["probs"].cos()
        y = seq(rows, splits=SPLITS, probs=probs)
        (g,) = torch.autograd.grad(weighted(y), z, create_graph=True)
        weighted(g).backward(inputs=[z])
        alive.extend(map(weakref.ref, (rows, probs, y, g)))

    gc.collect()
    gc.disable()
    try:
        once()
        assert not any(r() is not None for r in alive), "only a garbage collection would free it"
    finally:
        gc.enable()
    assert x.grad is None


# ---- where there are none -----------------------------------------------------------------------------------------

ASK = {
    "grad": lambda y, x: torch.autograd.grad(y.sum(), x, create_graph=True),
    "backward": lambda y, x: y.sum().backward(create_graph=True),
    "backward(inputs)": lambda y, x: y.sum().backward(inputs=[x], create_graph=True),
}


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_tensor", "nvfp4"])
def test_quantized_chains_refuse_at_once(recipe, ask):
    seq, x = chain("mlp", 3, torch.float32), leaf(ROWS, H, dtype=torch.float32)
    with fm.recipe(recipe):
        y = seq(x, splits=SPLITS)
    with pytest.raises(SecondOrderError, match=r"chain 0 to 2: second derivatives .*quantized values"):
        ASK[ask](y, x)


@pytest.mark.parametrize("ask", ASK)
def test_main_grad_refuses_at_once(ask):
    seq, x = fm.Sequential(fm.GroupedLinear(3, H, H, accumulate_into_main_grad=True)), leaf(5, H, dtype=torch.float32)
    seq[0].weight.main_grad = torch.zeros_like(seq[0].weight)
    y = seq(x, splits=SPLITS)
    with pytest.raises(SecondOrderError, match=r"0 has accumulate_into_main_grad=True"):
        ASK[ask](y, x)
    assert not seq[0].weight.main_grad.any()


def test_it_is_said_once(caplog):
    from fusedmoe.base.log import forget_said

    forget_said()
    seq, x = chain("mlp", 3), leaf(ROWS, H)
    with caplog.at_level(logging.INFO, "fusedmoe.fusion"):
        for _ in range(2):
            second(seq(x, splits=SPLITS), [x], [x])
    said = [r for r in caplog.records if "second derivatives" in r.getMessage()]
    assert [r.levelname for r in said] == ["INFO"]
    assert said[0].getMessage().startswith("chain 0 to 2: its backward pass runs unfused")
