"""A rewrite covers exactly the ops that it replaces: a rule whose step does not is refused by name."""

import pytest
import torch
from kit import toy
from kit.toy import experts, gemm, gemm_glu, inputs, only_plan, outcome, rows

import fusedmoe as fm
from fusedmoe.fusion.language.rule import FusionRule, RuleError, Step
from fusedmoe.ops import Dgrad, DSwiGLU, GroupedLinear, SwiGLU


def never(*_args, **_keywords):
    raise AssertionError("a wrong rule is refused before it runs")


def forward(needs, gives, keeps=(), run=never):
    class Wrong(FusionRule, name="toy.wrong", direction="forward"):
        fc: GroupedLinear
        act: SwiGLU

        def offer(self, ctx):
            return Step(needs=needs, gives=gives, keeps=keeps)

        def build(self, ctx, keep):
            return toy.bound(run)

    return Wrong


def backward(needs, gives, run=never):
    class Wrong(FusionRule, name="toy.wrong", direction="backward"):
        dgrad: Dgrad
        dact: DSwiGLU

        def offer(self, ctx):
            return Step(needs=needs, gives=gives)

        def build(self, ctx, keep):
            return toy.bound(run)

    return Wrong


IN = ("input", "fc.weight", "offsets")
DIN = ("grad_output", "dgrad.weight", "offsets", "dact.input")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (forward(IN, ()), r"its step gives \[\], not \['2.input'\], which is read outside of the span"),
        (forward((*IN, "act.input"), ("output",)), r"its step needs \['1.input'\], which is made within the span"),
        (forward(IN, ("output", "input")), r"its step gives \['0.input'\], which is not made within the span"),
        (forward(IN, ("output",), ("fc.input",)), r"its step keeps \['0.input'\], which is not made within the span"),
        (forward((*IN, "fc.wieght"), ("output",)), r"'fc.wieght' names no value of these ops"),
        (forward((*IN, "gate.input"), ("output",)), r"'gate.input' names no value of these ops"),
        (forward((*IN, "probs"), ("output",)), r"'probs' names no value of these ops"),
        (forward((*IN, "grad_output"), ("output",)), r"'grad_output' names no value of these ops"),
        (forward(IN, ("output",), ("act.middle",)), r"'act.middle' names no value of these ops"),
        (forward((*IN, "input:source"), ("output",)), r"'input:source' names no value of these ops"),
        (backward(DIN, ("dgrad.input",)), r"its step gives \['2.input'\], not \['grad\(1.input\)'\], which is read"),
        (backward((*DIN, "dgrad.grad_input"), ("grad_input",)), r"its step needs \['grad\(2.input\)'\], which is made"),
        (backward(DIN, ("grad_input", "dgrad.grad_weight")), r"its step gives \['grad\(2.weight\)'\], which is not"),
        (backward((*DIN, "dact.gate"), ("grad_input",)), r"'dact.gate' names no value of these ops"),
    ],
    ids=[
        "forgets", "needs an inner value", "gives a foreign value", "keeps a foreign value", "unknown value",
        "unknown slot", "not an input of the span", "a gradient in forward", "unknown keep", "no rows of another value",
        "forgets a gradient",
        "needs an inner gradient", "gives a foreign gradient", "unknown backward value",
    ],
)  # fmt: skip
def test_a_wrong_step_is_refused_by_name(rule, text):
    where = "0.GroupedLinear, 1.SwiGLU" if rule.direction == "forward" else "2.Dgrad, 1.DSwiGLU"
    with fm.register(rule), pytest.raises(RuleError, match=rf"^rule 'toy.wrong' on {where}: {text}"):
        experts()(rows(), **inputs())


def test_a_value_that_another_op_reads_too_must_be_given():
    """What Dispatch provides is read by Combine: a rule over Dispatch and the first layer must give it."""

    class Forgets(FusionRule, name="toy.forgets", direction="forward"):
        dispatch: fm.Dispatch
        fc: GroupedLinear

        def offer(self, ctx):
            needs = ("input", "dispatch.expert_index", "dispatch.expert_weight", "fc.weight")
            return Step(needs=needs, gives=("output", "dispatch.splits", "dispatch.probs"))

    chain = fm.Sequential(fm.Dispatch(), *experts(), fm.Combine())
    named = {"expert_index": torch.zeros(4, 2, dtype=torch.int64), "expert_weight": torch.ones(4, 2)}
    with fm.register(Forgets), pytest.raises(RuleError, match=r"'toy.forgets'.*row_of_slot.*which is read outside"):
        chain(rows(4), **named)


@pytest.mark.parametrize("scale", [False, True])
def test_the_values_of_an_absent_slot_are_none(scale):
    seen = []

    class ActScale(FusionRule, name="toy.act_scale", direction="forward"):
        act: SwiGLU
        scale: fm.Scale | None

        def offer(self, ctx):
            return Step(needs=("input", "scale.factor"), gives=("output",))  # the Scale calls it probs

        def build(self, ctx, keep):
            def run(x, factor):
                seen.append(factor)
                y = self.act.compute(x)
                return y if factor is None else y * factor[:, None]

            return toy.bound(run)

    module, x, named = experts(scale=scale), rows(), inputs(scale=scale)
    want = module(x, **named)
    with fm.register(ActScale), torch.no_grad():
        assert torch.equal(module(x, **named), want)
        assert only_plan(module, x, **named).fused[0].needs == ("1.input", "probs")[: 1 + scale]
    assert [f is not None for f in seen] == [scale]


def test_a_rule_that_refines_another_keeps_its_pattern():
    class Parent(FusionRule, name="toy.parent", direction="forward"):
        act: SwiGLU

        def offer(self, ctx):
            return Step(needs=("input",), gives=("output",))

        def build(self, ctx, keep):
            return toy.bound(self.act.compute)

    class Picky(Parent, name="toy.picky", direction="forward"):
        def offer(self, ctx):
            fm.require(self.act.limit is not None, "no limit")
            return super().offer(ctx)

    assert Picky.slots == Parent.slots
    with fm.register(Picky), torch.no_grad():
        assert only_plan(experts(), rows(), **inputs()).fused == ()
        assert only_plan(experts(limit=7.0), rows(), **inputs()).fused[0].rule == "toy.picky"


@pytest.mark.parametrize("out", [lambda y: (y, y), lambda y: (), lambda y: [y, y, y]])
def test_a_step_that_returns_another_number_of_tensors(out):
    def run(x, weight, offsets):
        return out(torch.zeros(9, 4, dtype=torch.float64))

    with (
        fm.register(forward(IN, ("output",), run=run)),
        torch.no_grad(),
        pytest.raises(
            RuleError,
            match=r"rule 'toy.wrong' on 0.GroupedLinear \+ 1.SwiGLU: returned \d tensors, expected 1",
        ),
    ):
        experts()(rows(), **inputs())


def test_a_wrong_rule_that_does_not_match_harms_nobody():
    with fm.register(forward(IN, ())):
        assert experts(act=fm.ReGLU)(rows(), **inputs()).shape == (9, toy.H)


def test_a_wrong_rule_can_be_switched_off():
    with fm.register(forward(IN, ())), fm.disabled("toy.wrong"):
        assert experts()(rows(), **inputs()).shape == (9, toy.H)


def test_a_rule_may_give_more_than_is_used():
    class Generous(FusionRule, name="toy.generous", direction="forward"):
        fc: GroupedLinear
        act: SwiGLU

        def offer(self, ctx):
            return Step(needs=IN, gives=("output", "act.input"))

        def build(self, ctx, keep):
            def run(x, weight, offsets):
                h = self.fc.compute(x, weight, None, offsets)
                return self.act.compute(h), h

            return toy.bound(run)

    chain, x, named = experts(), rows(), inputs()
    expected = outcome(chain, x, **named)
    with fm.register(Generous):
        assert only_plan(chain, x, **named).steps[0].rule == "toy.generous"
        toy.assert_same(outcome(chain, x, **named), expected)


def test_the_ends_of_a_span_have_two_names_each():
    """`input` and `fc.input` are one value, as are `output` and `act.output`, a bare runtime input and the slot's."""
    chain, x, named = experts(), rows(), inputs()
    with fm.register(gemm_glu(keeps=("fc.output",))), torch.no_grad():
        plan = only_plan(chain, x, **named)
    assert plan.steps[0].needs == ("0.input", "0.weight", "offsets")

    class Slotted(FusionRule, name="toy.slotted", direction="forward"):
        fc: GroupedLinear

        def offer(self, ctx):
            return Step(needs=("fc.input", "fc.weight", "fc.offsets"), gives=("fc.output",))

        def build(self, ctx, keep):
            return gemm().build(self, ctx, keep)

    with fm.register(Slotted), torch.no_grad():
        again = only_plan(chain, x, **named)
    assert again.steps[0].rule == "toy.slotted"
    assert again.steps[0].needs == plan.steps[0].needs
