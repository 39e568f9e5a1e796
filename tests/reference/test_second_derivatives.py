"""Gradients of gradients (``create_graph=True``), against the same formulas written on their own in plain PyTorch."""

import copy
import gc
import math
import weakref

import pytest
import torch
from kit.compare import assert_bitwise, assert_close, pairwise
from kit.layers import CHAINS, ROUTED, H, chain, drawn, leaf, poison_tail, runtime_inputs, wanted_of
from kit.oracles import grouped_linear, meaning
from kit.splits import ROUTING, ROWS, SPLITS

import fusedmoe as fm
from fusedmoe.fusion.program.differentiable import SecondOrderError

RTOL, ATOL = 1e-10, 1e-11


def weighted(t):
    """A scalar in which every element of a tensor counts differently, and not linearly."""
    return (t.square() * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view_as(t)).sum()


def second(y, asked, sources, loss=weighted):
    """The gradients of a penalty on the gradients asked for, with those: None is zero."""
    return second_of(torch.autograd.grad(loss(y), asked, create_graph=True), sources)


def second_of(first, sources):
    penalty = sum(map(weighted, first))
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    return [*first, *torch.autograd.grad(penalty, sources, **options)]


def assert_second(y, expected, asked, sources=None, loss=weighted, rtol=RTOL, atol=ATOL):
    sources = [*asked] if sources is None else [*sources]
    got, want = (second(t, [*asked], sources, loss) for t in (y, expected))
    assert_close(got, want, rtol=rtol, atol=atol)


def prepared(name, dtype=torch.float64):
    """A chain, its rows, its inputs, and all that wants a gradient."""
    seq, x = chain(name, dtype=dtype), leaf(ROWS, H, dtype=dtype)
    inputs = runtime_inputs(seq, ROWS, SPLITS, dtype)
    return seq, x, inputs, wanted_of(seq, x, inputs)


@pytest.mark.parametrize("name", CHAINS)
def test_each_gradient_and_all_of_them(name):
    seq, x, inputs, wanted = prepared(name)
    wanted = [*wanted.values()]
    for asked in [*([t] for t in wanted), wanted]:
        assert_second(seq(x, **inputs), meaning(seq, x, **inputs), asked, wanted)
    # where a constant arrives, the gradients still depend on the arguments
    assert_second(seq(x, **inputs), meaning(seq, x, **inputs), wanted, loss=torch.sum)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")  # not for backward(inputs)
def test_every_way_of_asking():
    seq, x, inputs, wanted = prepared("scaled mlp")
    sources, results = [*wanted.values()], []

    def cleared(found):
        for t in sources:
            t.grad = None  # they refer to themselves
        return found

    for call in (seq, lambda x, **inputs: meaning(seq, x, **inputs)):
        weighted(torch.autograd.grad(weighted(call(x, **inputs)), x, create_graph=True)[0]).backward()  # plain
        found = cleared([t.grad for t in sources])
        weighted(call(x, **inputs)).backward(inputs=[x], create_graph=True)
        assert all(t.grad is None for t in sources if t is not x)
        found += cleared(torch.autograd.grad(weighted(x.grad), sources))
        weighted(call(x, **inputs)).backward(create_graph=True)
        found += cleared(torch.autograd.grad(sum(weighted(t.grad) for t in sources), sources))
        results.append(found)
    assert_close(*results, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt_oss"])
def test_other_dtypes(name, dtype):
    """These have a grouped product of torch's own."""
    seq, x, inputs, _ = prepared(name, dtype)
    sources = [x, *seq.parameters()]
    got = second(seq(x, **inputs), sources, sources)
    exact, x = copy.deepcopy(seq).double(), x.detach().double().requires_grad_()
    inputs = {k: t.detach().double() if t.is_floating_point() else t for k, t in inputs.items()}
    sources = [x, *exact.parameters()]
    want = second(meaning(exact, x, **inputs), sources, sources)
    for a, b in zip(got, want, strict=True):
        assert a.dtype is dtype
        assert (a.double() - b).norm() <= (1e-5 if dtype is torch.float32 else 0.1) * b.norm()
        assert b.any() or not a.any()


ACTIVATIONS = [fm.GeGLU("none", alpha=1.3), fm.ReGLU(offset=0.5)]  # the others are in `CHAINS`


@pytest.mark.parametrize("op", ACTIVATIONS, ids=str)
def test_activations_and_dense_layers(op):
    seq, x = fm.Sequential(fm.Linear(H, 2 * H), op, fm.Linear(H, 3, bias=False)).double(), leaf(2, 3, H)
    assert_second(seq(x), meaning(seq, x), [x, *seq.parameters()])


@pytest.mark.parametrize("name", ROUTED)
def test_routed_layers(name):
    seq, x, weight = chain(name), leaf(4, H), leaf(4, 2).requires_grad_(name != "no weights")
    given = {"expert_index": ROUTING, "expert_weight": weight}
    assert_second(seq(x, **given), meaning(seq, x, **given), wanted_of(seq, x, given).values())


def test_parts_around_a_foreign_module_and_an_op_with_a_hook():
    first, last = fm.GroupedLinear(3, H, H), fm.GroupedLinear(3, H // 2, H)
    seq, x = fm.Sequential(first, torch.nn.Sigmoid(), fm.SwiGLU(), last).double(), leaf(ROWS, H)
    seq[2].register_forward_hook(lambda *_: None)
    expected = meaning(seq[2:], torch.sigmoid(meaning([first], x, SPLITS)), SPLITS)
    assert_second(seq(x, splits=SPLITS), expected, [x, *seq.parameters()])


def test_the_low_rank_update():
    layer, x = drawn(fm.GroupedLoRA(fm.GroupedLinear(3, H, 2 * H, bias=True), rank=2, alpha=3).double()), leaf(ROWS, H)
    seq = fm.Sequential(layer.requires_grad_(), fm.SwiGLU())
    assert_second(seq(x, splits=SPLITS), meaning(seq, x, SPLITS), [x, *seq.parameters()])


# --- ops of others -------------------------------------------------------------------------------------------------


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
    seq = fm.Sequential(fm.GroupedLinear(3, H, H), Warp(H), fm.GroupedLinear(3, H, H)).double()
    x, shift = leaf(ROWS, H), leaf(ROWS)
    rows = torch.sin(grouped_linear(x, seq[0].weight, None, SPLITS) * seq[1].slope + shift[:, None])
    expected = grouped_linear(rows, seq[2].weight, None, SPLITS)
    assert_second(seq(x, splits=SPLITS, shift=shift), expected, [x, shift, *seq.parameters()])


def test_one_tensor_in_two_places():
    """A value that is computed from one argument is not taken for a part of it."""
    op, t = Warp(ROWS), leaf(ROWS)
    op.slope = torch.nn.Parameter(t.detach().clone())
    x = t[:, None] * t[None]
    expected = torch.sin(x * op.slope + x.sum(1)[:, None])
    assert_second(op(x, shift=x.sum(1)), expected, [t], [t, op.slope])


class StraightThrough(fm.BackwardOp):
    needs = ("grad_output", "input")

    def compute(self, grad_output, x):
        return grad_output * x.cos()


class Round(fm.Op):
    """Its derivative is not that of its function, on purpose."""

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
    seq, x = fm.Sequential(fm.Linear(H, H), Round(), fm.Linear(H, H)).double(), leaf(5, H)
    expected = meaning(seq[2:], TorchRound.apply(meaning(seq[:1], x) * 1))
    assert_second(seq(x), expected, [x, *seq.parameters()])


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


# --- rows that belong to nobody ------------------------------------------------------------------------------------

TAILS = CHAINS | {"dense first": lambda e: [fm.Linear(H, H), fm.GroupedLinear(e, H, H)]}


@pytest.mark.parametrize(("name", "poison"), pairwise([*TAILS], [math.nan, math.inf]))
def test_poison_after_the_last_expert_stays_out(name, poison):
    seq, x = drawn(fm.Sequential(*TAILS[name](3)).double()), leaf(ROWS, H)
    inputs = runtime_inputs(seq, ROWS, SPLITS)
    dy = torch.randn_like(seq(x, **inputs)).requires_grad_()
    wanted = [dy, *wanted_of(seq, x, inputs).values()]

    def run():
        first = torch.autograd.grad(seq(x, **inputs), wanted[1:], dy, create_graph=True)
        return second_of(first, wanted)

    healthy = run()
    poison_tail(5, x, dy, *[t for t in inputs.values() if t.requires_grad], value=poison)
    found = run()
    assert_bitwise(found, healthy, zeros=True)
    assert not any(t[5:].any() for t in found if t.shape[0] == ROWS)
    assert healthy[len(wanted) - 1].any()


# --- arguments that the backward pass alone does not need ----------------------------------------------------------


def first_frozen():
    seq = chain("mlp")
    seq[0].requires_grad_(False)
    return seq


def test_arguments_that_are_not_kept():
    """Rows whose layer is frozen are not kept for backward; they are there as long as somebody has them."""
    seq, x = first_frozen(), leaf(ROWS, H).detach()
    y = seq(x, splits=SPLITS.clone())  # nobody else has the splits
    assert_second(y, meaning(seq, x, SPLITS), [seq[2].weight])
    # nor do splits that were changed after the call matter
    seq, x, splits = chain("mlp"), leaf(ROWS, H), SPLITS.clone()
    y = seq(x, splits=splits)
    splits.fill_(0)
    assert_second(y, meaning(seq, x, SPLITS), [x, *seq.parameters()])


def test_rows_are_not_kept_alive_and_gone_is_an_error():
    seq, x = first_frozen(), leaf(ROWS, H).detach()
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


def routed_layer():
    seq = fm.Sequential(fm.Dispatch(3), fm.GroupedLinear(3, H, H), fm.Combine()).double()
    index, weight = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]]), torch.rand(4, 2, dtype=torch.float64)
    return seq, {"expert_index": index, "expert_weight": weight}


@pytest.mark.parametrize("kept", ["rows", "base"])
def test_rows_that_autograd_keeps(kept):
    """Python has let go of them, or of a view of them: the reference still finds them, with their graph."""
    (seq, given), z, results = routed_layer(), leaf(4, H), []
    for run in (lambda x: seq(x, **given), lambda x: meaning(seq, x, **given)):
        x = z.exp() if kept == "rows" else z.exp().view(2, 2, H)
        y = run(x.view(4, H) if kept == "base" else x) + x.square().sum()  # whose node keeps x
        reference = weakref.ref(x)
        del x
        gc.collect()
        assert reference() is not None
        results.append(second(y, [seq[1].weight], [z, seq[1].weight]))
    assert_close(*results, rtol=RTOL, atol=ATOL)


def rows_of_a_frozen_layer():
    seq, x = first_frozen(), leaf(ROWS, H).detach()
    return seq(x, splits=SPLITS), x, seq[2].weight, r"0\.input"


def a_parameter(name):
    """The gradients were computed from the new values, without a word."""
    seq, x, inputs, _ = prepared("gpt_oss")
    parameter = seq.get_parameter(name)
    return seq(x.detach(), **inputs), parameter, parameter, name


def a_leaf():
    seq, x = chain("mlp").requires_grad_(False), leaf(ROWS, H)
    return seq(x, splits=SPLITS), x, x, r"0\.input"


def a_routing():
    (seq, given), x = routed_layer(), leaf(4, H)
    return seq(x, **given), given["expert_index"], x, "expert_index"


@pytest.mark.parametrize(
    "case", [rows_of_a_frozen_layer, lambda: a_parameter("0.weight"), lambda: a_parameter("0.bias"), a_leaf, a_routing]
)
def test_rows_changed_in_place_are_an_error_only_where_they_are_needed(case):
    """The backward pass alone does not need them, so that torch does not see the change."""
    y, changed, asked, name = case()
    (before,) = torch.autograd.grad(weighted(y), asked, retain_graph=True)
    with torch.no_grad():
        changed.zero_()
    assert_bitwise(torch.autograd.grad(weighted(y), asked, retain_graph=True), [before])
    with pytest.raises(SecondOrderError, match=f"{name} has been modified by an inplace operation"):
        torch.autograd.grad(weighted(y), asked, create_graph=True)


def test_of_a_view_that_is_not_kept():
    """Its second derivatives went to the tensor that it is a view of, and none to the view."""
    seq, base = chain("mlp").requires_grad_(False), leaf(2 * ROWS, H)
    x = base[:ROWS]
    assert_second(seq(x, splits=SPLITS), meaning(seq, x, SPLITS), [x], [x, base])


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
    seq, z = chain("mlp", dtype=dtype).requires_grad_(False), leaf(ROWS, H, dtype=dtype)

    def call(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return seq(x, splits=SPLITS)

    base = z.sin()
    x = through(base)
    want = second(meaning(seq, x, SPLITS), [z], [z])
    got = second(call(x), [z], [z])
    scales = [t.detach().abs().max() for t in want]
    got, want = ([t / s for t, s in zip(ts, scales, strict=True)] for ts in (got, want))
    assert_close(got, want, **({"rtol": 0, "atol": 0.05} if autocast else {"rtol": RTOL, "atol": ATOL}))
    y = call(through(base))  # nobody has the view itself
    with pytest.raises(SecondOrderError, match=r"0\.input.* was freed"):
        torch.autograd.grad(weighted(y), z, create_graph=True)


def test_saved_tensor_hooks():
    """Saved tensors that are stored elsewhere in between come back with their graph."""
    seq, z, inputs, wanted = prepared("scaled mlp")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        y = seq(z.sin(), **inputs)
    assert_second(y, meaning(seq, z.sin(), **inputs), wanted.values())


def test_nothing_leaks():
    seq, z, inputs, _ = prepared("gpt_oss")
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


# --- chains that have none -----------------------------------------------------------------------------------------

ASK = {
    "grad": lambda y, x: torch.autograd.grad(y.sum(), x, create_graph=True),
    "backward": lambda y, x: y.sum().backward(create_graph=True),
    "backward(inputs)": lambda y, x: y.sum().backward(inputs=[x], create_graph=True),
}


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("recipe", ["mxfp8:wgrad=bf16", "fp8_tensor", "nvfp4", "main_grad"])
def test_quantized_chains_and_main_grad_refuse_at_once(recipe, ask):
    seq, x, inputs, _ = prepared("mlp", torch.float32)
    if recipe == "main_grad":
        seq[0].accumulate_into_main_grad = True
        seq[0].weight.main_grad = torch.zeros_like(seq[0].weight)
    with fm.recipe("bf16" if recipe == "main_grad" else recipe):
        y = seq(x, **inputs)
    with pytest.raises(SecondOrderError, match="accumulate_into_main_grad" if recipe == "main_grad" else "quantized"):
        ASK[ask](y, x)
    assert recipe != "main_grad" or not seq[0].weight.main_grad.any()
