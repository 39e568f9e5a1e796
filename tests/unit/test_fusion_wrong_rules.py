"""Wrong rules are refused by name: by their answers, by the values of their steps, and by the results at a call."""

import pytest
import torch
from kit import toy
from kit.toy import IN, experts, inputs, rows, rule
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
            for value in ("fc.wieght", "gate.input", "grad_output", "input:source")
        ],
        (DIN, ("dgrad.input",), (), r"its step gives \['2.input'\], not \['grad\(1.input\)'\], which is read"),
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
        (lambda y: y.float(), r"Tensor of shape \(9, 8\) and dtype float32"),
        (lambda y: y.to("meta"), r"Tensor of shape \(9, 8\) and dtype float64 on meta"),
        (lambda y: None, "None"),
    ],
    ids=["rows", "dtype", "device", "nothing"],
)
def test_the_result_of_a_forward_rule(change, got):
    chain = experts()
    with fm.register(changed_gemm(change)), torch.no_grad():
        for _ in range(2):  # at each call: one that failed is not remembered as one that was checked
            with pytest.raises(
                RuleError, match=rf"^rule 'toy.changed' on 0.GroupedLinear: 1.input: {EXPECTED}, got {got}"
            ):
                chain(rows(), **inputs())


def test_another_number_of_results():
    refused(changed_gemm(lambda y: (y, y)), r"rule 'toy.changed' on 0.GroupedLinear: returned 2 tensors, expected 1")


def test_a_value_kept_for_backward():
    def run(self, keep):
        return lambda *tensors: (self.act.compute(h := grouped_mm(*tensors)), *(h.float() for _ in keep))

    text = r"rule 'toy.keeps' on 0.GroupedLinear \+ 1.SwiGLU: 1.input: expected .* float64 on cpu, got .* float32"
    refused(rule("toy.keeps", FC_ACT, IN, run=run, keeps=("act.input",)), text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
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


@pytest.mark.parametrize(
    ("backend", "change", "got"),
    [
        (None, lambda g: g[:, :2], r"Tensor of shape \(3, 2, (4|8)\)"),
        ("aot_eager", lambda g: None, "None"),  # the weight had no gradient, without an error
    ],
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
