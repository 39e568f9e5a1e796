"""Wrong rules are refused by name: by their answers, by the values of their steps, and by the results at a call."""

import pytest
import torch
from kit import toy
from kit.toy import IN, experts, inputs, only_plan, outcome, rows, rule
from torch import nn

import fusedmoe as fm
from fusedmoe import RuleError
from fusedmoe.kernels.torch.grouped_gemm import grouped_mm, grouped_mm_dgrad
from fusedmoe.ops import BackwardOp, Dgrad, DSwiGLU, GroupedLinear, Op, SwiGLU

FC_ACT = {"fc": GroupedLinear, "act": SwiGLU}
DIN = ("grad_output", "dgrad.weight", "offsets", "dact.input")


def refused(wrong, text, chain=None, x=None, **named):
    with fm.register(wrong), pytest.raises(RuleError, match=text):
        (chain or experts())(rows() if x is None else x, **(named or inputs())).sum().backward()


# ---- the values of a step: it covers exactly the ops that it replaces ----------------------------------------------


@pytest.mark.parametrize(
    ("needs", "gives", "keeps", "text"),
    [
        (IN, (), (), r"its step gives \[\], not \['2.input'\], which is read outside of the span"),
        ((*IN, "act.input"), ("output",), (), r"its step needs \['1.input'\], which is made within the span"),
        (IN, ("output", "input"), (), r"its step gives \['0.input'\], which is not made within the span"),
        (IN, ("output",), ("fc.input",), r"its step keeps \['0.input'\], which is not made within the span"),
        *[
            ((*IN, value), ("output",), (), f"'{value}' names no value of these ops")
            for value in ("fc.wieght", "gate.input", "probs", "grad_output", "input:source")
        ],
        (IN, ("output",), ("act.middle",), "'act.middle' names no value of these ops"),
        (DIN, ("dgrad.input",), (), r"its step gives \['2.input'\], not \['grad\(1.input\)'\], which is read"),
        ((*DIN, "dgrad.grad_input"), ("grad_input",), (), r"its step needs \['grad\(2.input\)'\], which is made"),
        (DIN, ("grad_input", "dgrad.grad_weight"), (), r"its step gives \['grad\(2.weight\)'\], which is not"),
        ((*DIN, "dact.gate"), ("grad_input",), (), "'dact.gate' names no value of these ops"),
    ],
    ids=str,
)
def test_a_wrong_step(needs, gives, keeps, text):
    backward = needs[: len(DIN)] == DIN
    slots = {"dgrad": Dgrad, "dact": DSwiGLU} if backward else FC_ACT
    where = "2.Dgrad, 1.DSwiGLU" if backward else "0.GroupedLinear, 1.SwiGLU"
    wrong = rule("toy.wrong", slots, needs, gives, keeps=keeps, direction="backward" if backward else "forward")
    refused(wrong, rf"^rule 'toy.wrong' on {where}: {text}")
    with fm.register(wrong), fm.disabled("toy.wrong"):
        assert experts()(rows(), **inputs()).shape == (9, toy.H)


def test_a_value_that_another_op_reads_too_must_be_given():
    """What Dispatch provides is read by Combine: a rule over Dispatch and the first layer must give it."""
    needs = ("input", "dispatch.expert_index", "dispatch.expert_weight", "fc.weight")
    wrong = rule(
        "toy.wrong",
        {"dispatch": fm.Dispatch, "fc": GroupedLinear},
        needs,
        ("output", "dispatch.splits", "dispatch.probs"),
    )
    chain = fm.Sequential(fm.Dispatch(), *experts(), fm.Combine())
    named = {"expert_index": torch.zeros(4, 2, dtype=torch.int64), "expert_weight": torch.ones(4, 2)}
    refused(wrong, r"'toy.wrong'.*row_of_slot.*which is read outside", chain, rows(4), **named)


def test_ctx_dtype_of_an_unknown_value_names_the_rule():
    wrong = rule("toy.curious", {"act": SwiGLU}, check=lambda self, ctx: ctx.dtype("act.wieght"))
    refused(wrong, "rule 'toy.curious' on 1.SwiGLU: 'act.wieght' names no")


@pytest.mark.parametrize("scale", [False, True])
def test_the_values_of_an_absent_slot_are_none(scale):
    seen = []

    def run(self, keep):
        def flat(x, factor):
            seen.append(factor is not None)
            y = self.act.compute(x)
            return y if factor is None else y * factor[:, None]

        return flat

    module, x, named = experts(scale=scale), rows(), inputs(scale=scale)
    want = module(x, **named)
    # the Scale calls its factor probs
    act_scale = rule("toy.act_scale", {"act": SwiGLU, "scale": fm.Scale | None}, ("input", "scale.factor"), run=run)
    with fm.register(act_scale), torch.no_grad():
        assert torch.equal(module(x, **named), want)
        assert only_plan(module, x, **named).fused[0].needs == ("1.input", "probs")[: 1 + scale]
    assert seen == [scale]


def test_a_rule_may_give_more_than_is_used():
    def run(self, keep):
        return lambda x, weight, offsets: (self.act.compute(h := grouped_mm(x, weight, offsets)), h)

    chain, x, named = experts(), rows(), inputs()
    expected = outcome(chain, x, **named)
    with fm.register(rule("toy.generous", FC_ACT, IN, ("output", "act.input"), run=run)):
        assert only_plan(chain, x, **named).steps[0].rule == "toy.generous"
        toy.assert_same(outcome(chain, x, **named), expected)


@pytest.mark.parametrize(
    "needs", [("input", "fc.weight", "offsets"), ("fc.input", "fc.weight", "fc.offsets")], ids=["bare", "of slots"]
)
@pytest.mark.parametrize("output", ["output", "fc.output"])
def test_the_ends_of_a_span_have_two_names_each(needs, output):
    named = rule("toy.named", {"fc": GroupedLinear}, needs, (output,), run=lambda self, keep: grouped_mm)
    with fm.register(named), torch.no_grad():
        (step, *_) = only_plan(experts(), rows(), **inputs()).steps
    assert (step.rule, step.needs, step.gives) == ("toy.named", ("0.input", "0.weight", "offsets"), ("1.input",))


# ---- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "answer", "text"),
    [
        *[  # ``return False`` counted as yes
            (method, answer, rf"{method}\(\) returned {answer!r}: expected None; decline through fm.req")
            for method, answer in (("available", False), ("installed", "no"), ("supports", 0), ("supports", True))
        ],
        *[("offer", answer, r"0.GroupedLinear: offer\(\) returned .*: expected a Step") for answer in (None, "a step")],
        *[("build", answer, rf"build\(\) returned {answer}: expected a function") for answer in (None, False)],
        *[  # a step ran after its guard had returned False
            ("bind", answer, rf"bind returned {answer}: expected a function; decline through")
            for answer in (None, False, 0)
        ],
    ],
)
def test_a_wrong_answer(method, answer, text):
    wrong = rule("toy.answers", {"fc": GroupedLinear}, IN)
    wrong.build = lambda self, ctx, keep: lambda *_: answer
    if method != "bind":
        setattr(wrong, method, lambda *_: answer)
    refused(wrong, rf"rule 'toy.answers'.*{text}")


@pytest.mark.parametrize("method", ["offer", "build"])
def test_a_bug_in_a_rule_is_a_bug(method):
    broken = rule("toy.broken", {"act": SwiGLU}, ("input",))
    setattr(broken, method, lambda self, *_: {}["oops"])
    with fm.register(broken), pytest.raises(KeyError, match="oops"):
        experts()(rows(), **inputs())


# ---- results, at the first call of each kind ------------------------------------------------------------------------


def changed_gemm(change):
    """A grouped linear layer, whose result is changed afterwards."""
    slots = {"fc": GroupedLinear}
    return rule("toy.changed", slots, IN, run=lambda self, keep: lambda *tensors: change(grouped_mm(*tensors)))


EXPECTED = r"expected Tensor of shape \(9, 8\) and dtype float64 on cpu"


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda y: y[:3], r"Tensor of shape \(3, 8\) and dtype float64 on cpu"),  # such rows reached the caller
        (lambda y: y[:, :4], r"Tensor of shape \(9, 4\)"),
        (lambda y: y[None], r"Tensor of shape \(1, 9, 8\)"),
        (lambda y: y.float(), r"Tensor of shape \(9, 8\) and dtype float32"),
        (lambda y: y.to("meta"), r"Tensor of shape \(9, 8\) and dtype float64 on meta"),
        (lambda y: None, "None"),
        (lambda y: [[1.0]], r"\[1.0\]"),
    ],
    ids=["rows", "features", "axes", "dtype", "device", "nothing", "a list"],
)
def test_the_result_of_a_forward_rule(change, got):
    chain = experts()
    with fm.register(changed_gemm(change)), torch.no_grad():
        for _ in range(2):  # at each call: one that failed is not remembered as one that was checked
            with pytest.raises(
                RuleError, match=rf"^rule 'toy.changed' on 0.GroupedLinear: 1.input: {EXPECTED}, got {got}"
            ):
                chain(rows(), **inputs())


@pytest.mark.parametrize("change", [lambda y: (y, y), lambda y: (), lambda y: [y, y, y]], ids=["two", "none", "three"])
def test_another_number_of_results(change):
    refused(changed_gemm(change), r"rule 'toy.changed' on 0.GroupedLinear: returned \d tensors, expected 1")


def test_it_is_checked_for_each_kind_of_call():
    """A rule that is wrong for some numbers of rows is found at the first call with that many."""
    chain = experts()
    with fm.register(changed_gemm(lambda y: y[:8])), torch.no_grad():
        chain(rows(8), splits=torch.tensor([3, 0, 4]))
        with pytest.raises(RuleError, match=rf"1\.input: {EXPECTED}"):
            chain(rows(9), **inputs())


def test_a_value_kept_for_backward():
    def run(self, keep):
        return lambda *tensors: (self.act.compute(h := grouped_mm(*tensors)), *(h.float() for _ in keep))

    text = r"rule 'toy.keeps' on 0.GroupedLinear \+ 1.SwiGLU: 1.input: expected .* float64 on cpu, got .* float32"
    refused(rule("toy.keeps", FC_ACT, IN, run=run, keeps=("act.input",)), text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda g: g[:3], rf"grad\(1.input\): {EXPECTED}, got Tensor of shape \(3, 8\)"),
        (lambda g: g.float(), rf"grad\(1.input\): {EXPECTED}, got Tensor of shape .* dtype float32"),
        (lambda g: g.mT, rf"grad\(1.input\): {EXPECTED}, got Tensor of shape \(8, 9\)"),
        (None, r"2\.input: expected .* got .* float16"),  # the recomputed value
    ],
)
def test_the_results_of_a_backward_rule(change, text):
    def run(self, keep):
        def flat(dy, weight, offsets, h):
            gradient = self.dact.compute(grouped_mm_dgrad(dy, weight, offsets), h)
            return gradient if change is None else change(gradient), *(self.dact.op.compute(h).half() for _ in keep)

        return flat

    slots = {"dgrad": Dgrad, "dact": DSwiGLU}
    keeps = ("dgrad.input",) if change is None else ()
    wrong = rule("toy.changed", slots, DIN, ("grad_input",), run=run, direction="backward", keeps=keeps)
    refused(wrong, rf"rule 'toy.changed' on 2.Dgrad \+ 1.DSwiGLU: {text}")


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda g: None, "None"),  # the weight had no gradient, without an error
        (lambda g: g.float(), r"Tensor of shape \(3, 8, (4|8)\) and dtype float32"),
        (lambda g: g[:, :2], r"Tensor of shape \(3, 2, (4|8)\)"),
    ],
    ids=["none", "dtype", "shape"],
)
def test_a_weight_gradient(backend, change, got):
    torch._dynamo.reset()
    text = rf"rule 'toy.wgrad' on \d.Wgrad: grad\(\d.weight\): expected Tensor of shape \(3, 8, (4|8)\) .*, got {got}"
    chain = experts()
    refused(toy.wgrad(change=change), text, chain if backend is None else torch.compile(chain, backend=backend))


def test_under_torch_compile_the_forward_is_checked():
    torch._dynamo.reset()
    text = r"rule 'toy.changed' on 0.GroupedLinear: 1.input: expected Tensor of shape"
    with fm.register(changed_gemm(lambda y: y[:3])), torch.no_grad(), pytest.raises(Exception, match=text):
        torch.compile(experts(), backend="eager")(rows(), **inputs())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_rule_that_is_defined_again_under_its_name_is_another_one_when_compiled(backend):
    """As in a notebook: the first definition ran in graphs that were made for the second."""
    chain, x, named = experts(), rows(), inputs()
    want = chain(x, **named)
    for factor in (1000.0, 1.0):
        torch._dynamo.reset()
        with fm.register(changed_gemm(lambda y, factor=factor: factor * y)), torch.no_grad():
            got = torch.compile(chain, backend=backend)(x, **named)
    torch.testing.assert_close(got, want)


class Halves(Op):
    """Gives fewer features than infer() says, which is inherited."""

    def compute(self, x):
        return x[:, ::2].contiguous()


class WrongBackward(BackwardOp):
    def compute(self, grad_output, x):
        return grad_output[:3]


class Wrong(Op):
    def compute(self, x):
        return 2 * x

    def backward_ops(self):
        return (WrongBackward(self),)


def test_the_results_of_ops():
    of_op = rf"{EXPECTED}, as infer\(\) of the op says, got Tensor of shape \(9, 4\)"
    with pytest.raises(RuleError, match=f"^0.Halves: 0.output: {of_op}"):
        fm.Sequential(Halves())(rows())
    with pytest.raises(RuleError, match=r"op.Halves: op.output: expected Tensor of shape"):
        Halves()(rows())
    y = fm.Sequential(nn.Identity(), Wrong())(rows())
    with pytest.raises(
        RuleError, match=rf"1.WrongBackward: grad\(1.input\): {EXPECTED}.* got Tensor of shape \(3, 8\)"
    ):
        y.sum().backward()
