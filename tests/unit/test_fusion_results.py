"""The results of a rule's step, or of an op, are checked once for each kind of call, with an error that names it."""

import pytest
import torch
from kit.toy import bound, experts, inputs, rows
from torch import nn

import fusedmoe as fm
from fusedmoe import RuleError
from fusedmoe.fusion.language.rule import FusionRule
from fusedmoe.kernels.torch.grouped_gemm import grouped_mm, grouped_mm_dgrad
from fusedmoe.ops import BackwardOp, Dgrad, DSwiGLU, GroupedLinear, Op, SwiGLU, Wgrad


def forward_rule(change):
    """A grouped linear layer, whose result is changed afterwards."""

    class Gemm(FusionRule, name="toy.changed", direction="forward"):
        fc: GroupedLinear

        def offer(self, ctx):
            return fm.Step(needs=("input", "fc.weight", "offsets"), gives=("output",))

        def build(self, ctx, keep):
            return bound(lambda x, weight, offsets: change(grouped_mm(x, weight, offsets)))

    return Gemm


EXPECTED = r"Tensor of shape \(9, 8\) and dtype float64 on cpu"
CHANGES = {
    "rows": (lambda y: y[:3], r"got Tensor of shape \(3, 8\) and dtype float64 on cpu"),
    "features": (lambda y: y[:, :4], r"got Tensor of shape \(9, 4\) and dtype float64 on cpu"),
    "axes": (lambda y: y[None], r"got Tensor of shape \(1, 9, 8\) and dtype float64 on cpu"),
    "dtype": (lambda y: y.float(), r"got Tensor of shape \(9, 8\) and dtype float32 on cpu"),
    "device": (lambda y: y.to("meta"), r"got Tensor of shape \(9, 8\) and dtype float64 on meta"),
    "nothing": (lambda y: None, "got None"),
    "a list": (lambda y: [[1.0]], r"got \[1.0\]"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_result_of_a_forward_rule(change):
    """Formerly 3 of 9 rows in another dtype reached the caller."""
    function, message = CHANGES[change]
    text = rf"^rule 'toy.changed' on 0.GroupedLinear: 1.input: expected {EXPECTED}, {message}"
    chain = experts()
    with fm.register(forward_rule(function)), torch.no_grad():
        for _ in range(2):  # at each call: one that failed is not remembered as one that was checked
            with pytest.raises(RuleError, match=text):
                chain(rows(), **inputs())


def test_it_is_checked_for_each_kind_of_call_and_once():
    """A rule that is wrong for some numbers of rows is found at the first call with that many."""
    calls = []

    def change(y):
        calls.append(len(y))
        return y[:8]

    chain = experts()
    with fm.register(forward_rule(change)), torch.no_grad():
        chain(rows(8), splits=torch.tensor([3, 0, 4]))
        with pytest.raises(RuleError, match=r"1\.input: expected Tensor of shape \(9, 8\)"):
            chain(rows(9), **inputs())


def test_a_value_kept_for_backward_is_checked():
    class Keeps(FusionRule, name="toy.keeps", direction="forward"):
        fc: GroupedLinear
        act: SwiGLU

        def offer(self, ctx):
            return fm.Step(needs=("input", "fc.weight", "offsets"), gives=("output",), keeps=("act.input",))

        def build(self, ctx, keep):
            def run(x, weight, offsets):
                h = grouped_mm(x, weight, offsets)
                return (self.act.compute(h), *(h.float() for _ in keep))

            return bound(run)

    with fm.register(Keeps):
        text = r"rule 'toy.keeps' on 0.GroupedLinear \+ 1.SwiGLU: 1.input: expected .* float64 on cpu, got .* float32"
        with pytest.raises(RuleError, match=text):
            experts()(rows(), **inputs())


@pytest.mark.parametrize(("change", "got"), [
    (lambda g: g[:3], r"got Tensor of shape \(3, 8\)"),
    (lambda g: g.float(), "got Tensor of shape .* dtype float32"),
    (lambda g: g.mT, r"got Tensor of shape \(8, 9\)"),
])  # fmt: skip
def test_the_result_of_a_backward_rule(change, got):
    class Changed(FusionRule, name="toy.changed", direction="backward"):
        dgrad: Dgrad
        dact: DSwiGLU

        def offer(self, ctx):
            return fm.Step(needs=("grad_output", "dgrad.weight", "offsets", "dact.input"), gives=("grad_input",))

        def build(self, ctx, keep):
            def run(dy, weight, offsets, h):
                return change(self.dact.compute(grouped_mm_dgrad(dy, weight, offsets), h))

            return bound(run)

    text = rf"rule 'toy.changed' on 2.Dgrad \+ 1.DSwiGLU: grad\(1.input\): expected {EXPECTED}, {got}"
    with fm.register(Changed):
        y = experts()(rows(), **inputs())
        with pytest.raises(RuleError, match=text):
            y.sum().backward()


def test_a_recomputed_value_of_a_backward_rule():
    class Recomputes(FusionRule, name="toy.recomputes", direction="backward"):
        dgrad: Dgrad
        dact: DSwiGLU

        def offer(self, ctx):
            needs = ("grad_output", "dgrad.weight", "offsets", "dact.input")
            return fm.Step(needs=needs, gives=("grad_input",), keeps=("dgrad.input",))

        def build(self, ctx, keep):
            def run(dy, weight, offsets, h):
                y = self.dact.op.compute(h)
                return self.dact.compute(grouped_mm_dgrad(dy, weight, offsets), h), *(y.half() for _ in keep)

            return bound(run)

    with fm.register(Recomputes):
        y = experts()(rows(), **inputs())
        with pytest.raises(RuleError, match=r"rule 'toy.recomputes' on .*: 2\.input: expected .* got .* float16"):
            y.sum().backward()


def weight_gradient_rule(change):
    class Gradient(FusionRule, name="toy.changed", direction="backward"):
        wgrad: Wgrad

        def offer(self, ctx):
            return fm.Step(needs=("grad_output", "wgrad.input", "offsets"), gives=("wgrad.grad_weight",))

        def build(self, ctx, keep):
            return bound(lambda dy, x, offsets: change(self.wgrad.compute(dy, x, offsets)))

    return Gradient


def test_no_gradient_where_one_arrives():
    """Formerly the weight had no gradient, without an error."""
    text = r"rule 'toy.changed' on 2.Wgrad: grad\(2.weight\): expected Tensor of shape \(3, 8, 4\) .* got None"
    with fm.register(weight_gradient_rule(lambda g: None)):
        y = experts()(rows(), **inputs())
        with pytest.raises(RuleError, match=text):
            y.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("change", "got"), [
    (lambda g: None, "got None"),
    (lambda g: g.float(), r"got Tensor of shape \(3, 8, (4|8)\) and dtype float32"),
    (lambda g: g[:, :2], r"got Tensor of shape \(3, 2, (4|8)\)"),
], ids=["none", "dtype", "shape"])  # fmt: skip
def test_under_torch_compile_the_gradients_are_checked(backend, change, got):
    torch._dynamo.reset()
    text = rf"rule 'toy.changed' on \d.Wgrad: grad\(\d.weight\): expected Tensor of shape \(3, 8, (4|8)\) .*, {got}"
    with fm.register(weight_gradient_rule(change)):
        y = torch.compile(experts(), backend=backend)(rows(), **inputs())
        with pytest.raises(RuleError, match=text):
            y.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_rule_that_is_defined_again_under_its_name_is_another_one_when_compiled(backend):
    """As in a notebook. Formerly the first definition ran in graphs that were made for the second."""
    chain, x, named = experts(), rows(), inputs()
    want = chain(x, **named)
    for factor in (1000.0, 1.0):
        torch._dynamo.reset()
        with fm.register(forward_rule(lambda y, factor=factor: factor * y)), torch.no_grad():
            got = torch.compile(chain, backend=backend)(x, **named)
    torch.testing.assert_close(got, want)


def test_under_torch_compile_the_forward_is_checked():
    torch._dynamo.reset()
    chain = experts()
    text = r"rule 'toy.changed' on 0.GroupedLinear: 1.input: expected Tensor of shape"
    with fm.register(forward_rule(lambda y: y[:3])), torch.no_grad(), pytest.raises(Exception, match=text):
        torch.compile(chain, backend="eager")(rows(), **inputs())


# ---- ops -----------------------------------------------------------------------------------------------------------


class Halves(Op):
    """Gives fewer features than infer() says, which is inherited."""

    def compute(self, x):
        return x[:, ::2].contiguous()


def test_an_op_whose_compute_disagrees_with_its_infer():
    expected = (
        r"Tensor of shape \(9, 8\) and dtype float64 on cpu, as infer\(\) of the op says, got Tensor of shape \(9, 4\)"
    )
    with pytest.raises(RuleError, match=f"^0.Halves: 0.output: expected {expected}"):
        fm.Sequential(Halves())(rows())
    with pytest.raises(RuleError, match=r"op.Halves: op.output: expected Tensor of shape"):
        Halves()(rows())


class WrongBackward(BackwardOp):
    def compute(self, grad_output, x):
        return grad_output[:3]


class Wrong(Op):
    def compute(self, x):
        return 2 * x

    def backward_ops(self):
        return (WrongBackward(self),)


def test_a_backward_op_that_gives_another_shape():
    y = fm.Sequential(nn.Identity(), Wrong())(rows())
    with pytest.raises(
        RuleError,
        match=r"1.WrongBackward: grad\(1.input\): expected Tensor of shape \(9, 8\) .* got Tensor of shape \(3, 8\)",
    ):
        y.sum().backward()


# ---- what else a rule may get wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [False, True, "no", 0])
@pytest.mark.parametrize("method", ["available", "installed", "supports"])
def test_an_answer_in_place_of_require(method, answer):
    """Formerly ``return False`` counted as yes."""

    class Answers(FusionRule, name="toy.answers", direction="forward"):
        fc: GroupedLinear

        def offer(self, ctx):
            pytest.fail("asked for a step")

    setattr(Answers, method, classmethod(lambda *_: answer))
    text = rf"rule 'toy.answers': {method}\(\) returned {answer!r}: expected None; decline through fm.require"
    with fm.register(Answers), pytest.raises(RuleError, match=text):
        experts()(rows(), **inputs())


class Answers(FusionRule, name="toy.answers", direction="forward"):
    """A grouped linear layer whose rule returns something else than it should."""

    fc: GroupedLinear

    def offer(self, ctx):
        return fm.Step(needs=("input", "fc.weight", "offsets"), gives=("output",))


@pytest.mark.parametrize("answer", [None, False, True, "a step", lambda x: x])
def test_an_offer_of_no_step(monkeypatch, answer):
    monkeypatch.setattr(Answers, "offer", lambda self, ctx: answer)
    text = r"rule 'toy.answers' on 0.GroupedLinear: offer\(\) returned .*: expected a Step"
    with fm.register(Answers), pytest.raises(RuleError, match=text):
        experts()(rows(), **inputs())


@pytest.mark.parametrize("answer", [None, False])
def test_a_build_that_returns_no_function(monkeypatch, answer):
    monkeypatch.setattr(Answers, "build", lambda self, ctx, keep: answer)
    text = rf"rule 'toy.answers' on 0.GroupedLinear: build\(\) returned {answer}: expected a function"
    with fm.register(Answers), pytest.raises(RuleError, match=text):
        experts()(rows(), **inputs())


@pytest.mark.parametrize("answer", [None, False, True, 0])
def test_a_bind_that_returns_no_function(monkeypatch, answer):
    """Formerly a step ran after its guard had returned False."""
    monkeypatch.setattr(Answers, "build", lambda self, ctx, keep: lambda *_: answer)
    text = rf"rule 'toy.answers' on 0.GroupedLinear: bind returned {answer}: expected a function; decline through"
    with fm.register(Answers), pytest.raises(RuleError, match=text):
        experts()(rows(), **inputs())
