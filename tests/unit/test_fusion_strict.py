"""`fm.strict()` raises where this device has a kernel for an op that runs unfused, and nowhere else."""

import re

import pytest
import torch
from kit.toy import dgrad_dglu, experts, gemm, gemm_glu, inputs, needs_sm90, rows, rule, wgrad

import fusedmoe as fm
from fusedmoe import FusionError
from fusedmoe.ops import GroupedLinear, Scale, SwiGLU


class MySwiGLU(SwiGLU):
    pass


def scaled_check(self, ctx):
    fm.require(self.act.limit is None, "limit %s is not taken", self.act.limit)
    raise AssertionError("no test asks for the step")


def picky_check(self, ctx):
    fm.require(self.scale is None or ctx.dtype("scale.factor") is torch.float32, "the scale is not fp32")


# two Scales may stand before the activation that has to
SCALED = rule(
    "toy.scaled", {"fc": GroupedLinear, "first": Scale | None, "second": Scale | None, "act": SwiGLU},
    check=scaled_check,
)  # fmt: skip
LEADING = rule("toy.leading", {"scale": Scale | None, "act": SwiGLU}, check=scaled_check)
PICKY = rule(
    "toy.picky", {"act": SwiGLU, "scale": Scale | None}, ("input", "scale.factor"), check=picky_check,
    run=lambda self, keep: lambda x, _: self.act.compute(x),
)  # fmt: skip
OF_GPU = rule("toy.of_gpu", {"act": SwiGLU}, available=needs_sm90)
PAIR_OF_GPU = rule("toy.pair_of_gpu", {"fc": GroupedLinear, "scale": Scale}, available=needs_sm90)
ELSEWHERE = rule("toy.elsewhere", {"relu": fm.SquaredReLU})


def layer():
    return experts()[0]


def strictly(rules, chain, grad):
    named = {name: t for name, t in inputs(scale=True).items() if name in chain.runtime_inputs}
    with fm.register(*rules), fm.strict(), torch.set_grad_enabled(grad):
        return chain(rows(), **named)


def chained(*ops):
    return lambda: fm.Sequential(layer(), *ops)


@pytest.mark.parametrize(
    ("rules", "make", "grad"),
    [
        ([], experts, True),
        ([gemm_glu(), gemm()], experts, False),
        # the op at which a pattern ends is no miss, nor are optional ops right before it, nor a leading one alone
        ([gemm_glu(), gemm()], chained(Scale("probs")), False),
        ([SCALED, gemm()], chained(Scale("probs"), fm.ReGLU()), False),
        ([LEADING], lambda: fm.Sequential(Scale("probs"), layer()), False),
        # a rule that cannot keep a value raises for no more ops than it could take
        ([gemm_glu()], lambda: fm.Sequential(*list(experts(scale=True))[:3]), True),
        ([OF_GPU], experts, True),
        ([PAIR_OF_GPU], experts, True),
        ([ELSEWHERE], experts, True),
        ([gemm_glu()], lambda: fm.Sequential(torch.nn.Identity(), layer(), SwiGLU(), torch.nn.Identity()), False),
        ([dgrad_dglu()], lambda: fm.Sequential(fm.GeGLU(), experts()[2]), False),
    ],
)
def test_nothing_is_missed(rules, make, grad, caplog):
    strictly(rules, make(), grad)
    assert not caplog.records


@pytest.mark.parametrize(
    ("rules", "make", "grad", "missed"),
    [
        (
            [gemm_glu()], lambda: experts(limit=7.0), True,
            ["0.GroupedLinear: toy.gemm_glu: CONSTRAINT: limit 7.0", "1.SwiGLU: toy.gemm_glu: CONSTRAINT: limit 7.0"],
        ),
        ([gemm_glu()], lambda: experts(act=fm.ReGLU), True, ["0.GroupedLinear: toy.gemm_glu: NO_MATCH: slot 'act'"]),
        # the op at which a pattern ends is a miss if it is a subclass of what was expected
        ([gemm_glu(), gemm()], chained(MySwiGLU()), False, ["1.MySwiGLU: toy.gemm_glu: NO_MATCH: .* a subclass of"]),
        ([SCALED], chained(Scale("probs"), fm.ReGLU()), False, ["0.GroupedLinear: toy.scaled"]),
        # optional ops are a miss where the rule is for this place
        (
            [SCALED, gemm()], chained(Scale("probs"), MySwiGLU()), False,
            ["1.Scale: toy.scaled: NO_MATCH", "2.MySwiGLU: toy.scaled: NO_MATCH"],
        ),
        # a miss in the backward pass, at the forward call
        ([dgrad_dglu()], lambda: fm.Sequential(fm.GeGLU(), experts()[2]), True, ["1.Dgrad: toy.dgrad_dglu: NO_MATCH"]),
        # given up by the joint choice
        ([gemm_glu(keeps=()), gemm()], experts, True, ["1.SwiGLU: .*cannot keep 1.input"]),
        # a constraint of more ops raises for those
        ([PICKY], lambda: fm.Sequential(SwiGLU(), Scale("probs")), False, ["1.Scale: .*: the scale is not fp32"]),
    ],
)  # fmt: skip
def test_misses_are_named(rules, make, grad, missed):
    chain = make()
    for _ in range(2):  # at every call
        with pytest.raises(FusionError) as raised:
            strictly(rules, chain, grad)
    first, *lines = str(raised.value).splitlines()
    assert first == "strict: these ops run unfused although this device has a kernel for them:"
    lines = [line for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert len(lines) >= len(missed)
    for line, expected in zip(lines, missed, strict=False):
        assert re.match(f"  {expected}", line), line


def test_rules_that_are_switched_off_and_explanations_do_not_raise(monkeypatch):
    chain = experts(limit=7.0)
    with fm.register(gemm_glu(), wgrad()), fm.strict():
        assert "CONSTRAINT" in str(chain.explain(rows(), **inputs()))
        with fm.disabled("toy.*"):
            chain(rows(), **inputs())
        monkeypatch.setenv("FUSEDMOE_DISABLE", "toy.gemm_glu")
        with fm.disabled("toy.wgrad"):
            chain(rows(), **inputs())
