"""Rules for the steps between ops: derived values, weight quantization, dequantization, sums of gradients, tails."""

import torch
from kit.toy import E, H, I, assert_same, inputs, only_plan, outcome, rows, rule

import fusedmoe as fm
from fusedmoe.ops import Scale, SwiGLU
from fusedmoe.ops.glue import Dequantize, ZeroTail


def glue(plan):
    return {step.ops[0]: step.rule for step in plan.glue}


def rule_for(kind, name, needs, gives=("glue.output",), direction="forward", calls=None):
    """A rule that computes one kind of glue as the glue itself does."""

    def run(self, keep):
        def flat(*tensors):
            if calls is not None:
                calls.append(name)
            return self.glue.compute(*tensors)

        return flat

    options = {"direction": direction, "takes_quantized": True, "zeroes_tail": True}
    return rule(name, {"glue": kind}, needs, gives, run=run, **options)


def test_a_rule_that_gives_splits_can_give_their_offsets(caplog):
    ran = []

    def gives(self):
        return ("output", *(f"dispatch.{name}" for name in self.dispatch.provides), "dispatch.offsets")

    def run(self, keep):
        def flat(x, index, weight):
            ran.append(len(x))
            values = self.dispatch.compute(x, index, weight)
            return *values, values[1].cumsum(0).to(torch.int32)

        return flat

    sorts = rule(
        "toy.sorts", {"dispatch": fm.Dispatch}, ("input", "dispatch.expert_index", "dispatch.expert_weight"), gives,
        run=run, guard=lambda x, *_: fm.require(x.shape[0] > 2, "%d tokens", x.shape[0]),
    )  # fmt: skip
    chain = fm.Sequential(fm.Dispatch(), fm.GroupedLinear(E, H, H), fm.Combine())
    for tokens in (6, 2):  # the rule declines the second call
        x = torch.randn(tokens, H, requires_grad=True)
        named = {"expert_index": torch.randint(0, E, (tokens, 2)), "expert_weight": torch.rand(tokens, 2)}
        expected = outcome(chain, x, **named)
        assert glue(only_plan(chain, x, **named)) == {"0.offsets": None}
        with fm.register(sorts):
            assert_same(outcome(chain, x, **named), expected)
            assert glue(only_plan(chain, x, **named)) == {}
    assert ran == [6]
    assert "toy.sorts declined this call: 2 tokens" in caplog.text


def test_a_rule_dequantizes():
    chain = fm.Sequential(fm.Quantize("mxfp8"), SwiGLU())
    x = torch.randn(6, 64, requires_grad=True)
    expected = outcome(chain, x)

    dequantizes = rule("toy.dequantize", {"glue": Dequantize}, ("glue.input",), ("glue.output",), takes_quantized=True)

    def build(self, ctx, keep):
        spec = ctx.spec("glue.input")

        def run(codes, scale):
            return spec._replace(shape=tuple(codes.shape)).tensor((codes, scale), None).dequantize()

        return lambda *tensors: run

    dequantizes.build = build
    with fm.register(dequantizes):
        assert [step.rule for step in only_plan(chain, x).glue] == ["toy.dequantize", None]  # forward, backward
        assert_same(outcome(chain, x), expected)


def test_a_rule_zeroes_tails():
    chain = fm.Sequential(Scale("probs"), fm.GroupedLinear(E, H, 2 * I, dtype=torch.float64), Scale("probs2"))
    x = rows()
    named = inputs(scale=True) | {"probs2": torch.rand(len(x), dtype=torch.float64)}
    plain = glue(only_plan(chain, x, **named))
    masks = [label for label in plain if label.startswith("zero_tail")]
    expected = outcome(chain, x, **named)
    rule = rule_for(ZeroTail, "toy.zero_tail", ("glue.input", "glue.offsets"), direction="backward")
    with fm.register(rule):
        found = glue(only_plan(chain, x, **named))
        assert masks
        assert {found[label] for label in masks if "grad(" in label} == {"toy.zero_tail"}
        assert_same(outcome(chain, x, **named), expected)
