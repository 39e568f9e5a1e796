"""`fm.strict()` raises where this device has a kernel for an op that runs unfused, and nowhere else."""

import re

import pytest
import torch
from kit.toy import bound, dgrad_dglu, experts, gemm, gemm_glu, inputs, rows, wgrad

import fusedmoe as fm
from fusedmoe import FusionError
from fusedmoe.fusion.language.rule import FusionRule
from fusedmoe.ops import GroupedLinear, Scale, SwiGLU


class GluOfGpu(FusionRule, name="toy.glu_of_gpu", direction="forward"):
    act: SwiGLU

    @classmethod
    def available(cls, device, arch):
        fm.require(arch == 90, "needs sm_90")


def strictly(chain, x, **named):
    with fm.strict():
        return chain(x, **named)


def test_nothing_to_miss():
    assert strictly(experts(), rows(), **inputs()).shape == (9, 8)


def test_everything_fused():
    with fm.register(gemm_glu(), gemm()), torch.no_grad():
        strictly(experts(), rows(), **inputs())


def test_a_constraint_raises_with_its_message():
    text = (
        r"^strict: these ops run unfused although this device has a kernel for them:\n"
        r"  0.GroupedLinear: toy.gemm_glu: CONSTRAINT: limit 7.0 is not taken, use limit=None\n"
        r"  1.SwiGLU: toy.gemm_glu: CONSTRAINT: limit 7.0 is not taken, use limit=None"
    )
    with fm.register(gemm_glu()), pytest.raises(FusionError, match=text):
        strictly(experts(limit=7.0), rows(), **inputs())


def test_a_partial_match_raises_with_the_nearest_miss():
    text = r"0.GroupedLinear: toy.gemm_glu: NO_MATCH: slot 'act': expected SwiGLU \| GeGLU, got ReGLU"
    with fm.register(gemm_glu()), pytest.raises(FusionError, match=text):
        strictly(experts(act=fm.ReGLU), rows(), **inputs())


def test_the_op_at_which_a_pattern_ends_is_no_miss(caplog):
    """The rule for a layer and its activation ends at the Scale, which it knows nothing of."""
    chain = fm.Sequential(experts()[0], Scale("probs"))
    with fm.register(gemm_glu(), gemm()), torch.no_grad():
        strictly(chain, rows(), **inputs(scale=True))
    assert not caplog.records


def test_the_op_at_which_a_pattern_ends_is_a_miss_if_it_is_a_subclass_of_what_was_expected():
    class MySwiGLU(SwiGLU):
        pass

    chain = fm.Sequential(experts()[0], MySwiGLU())
    text = "1.MySwiGLU: toy.gemm_glu: NO_MATCH: slot 'act': expected SwiGLU | GeGLU, got MySwiGLU, a subclass of SwiGLU"
    with fm.register(gemm_glu(), gemm()), torch.no_grad(), pytest.raises(FusionError, match=re.escape(text)):
        strictly(chain, rows(), **inputs())


def between(*middle):
    """A layer, and its rule, for which two Scales may stand before the activation that has to."""

    class Scaled(FusionRule, name="toy.scaled", direction="forward"):
        fc: GroupedLinear
        first: Scale | None
        second: Scale | None
        act: SwiGLU

        def offer(self, ctx):
            fm.require(self.act.limit is None, "limit %s is not taken", self.act.limit)
            raise AssertionError("no test asks for the step")

    return fm.register(Scaled, gemm()), fm.Sequential(experts()[0], Scale("probs"), *middle)


def test_optional_ops_right_before_the_one_at_which_a_pattern_ends_are_no_miss(caplog):
    """Nobody has a kernel for a Scale between a layer and ReGLU; explain still names what came nearest."""
    rules, chain = between(fm.ReGLU())
    with rules, torch.no_grad():
        strictly(chain, rows(), **inputs(scale=True))
        assert not caplog.records
        step = chain.explain(rows(), **inputs(scale=True)).steps[1]
    assert step.ops == ("1.Scale",)
    assert step.why == "toy.scaled: NO_MATCH: slot 'act': expected SwiGLU, got ReGLU"
    assert 1 not in step.nearest_miss.shared


def test_the_required_op_before_them_is_a_miss():
    rules, chain = between(fm.ReGLU())
    with rules, fm.disabled("toy.gemm"), torch.no_grad(), pytest.raises(FusionError) as raised:
        strictly(chain, rows(), **inputs(scale=True))
    assert re.findall(r"^  (\S+):", str(raised.value), re.MULTILINE) == ["0.GroupedLinear"]


class MySwiGLU(SwiGLU):
    pass


@pytest.mark.parametrize(("act", "why"), [
    (MySwiGLU(), "NO_MATCH: slot 'act': expected SwiGLU, got MySwiGLU, a subclass of SwiGLU"),
    (SwiGLU(limit=7.0), "CONSTRAINT: limit 7.0 is not taken"),
])  # fmt: skip
def test_optional_ops_are_a_miss_where_the_rule_is_for_this_place(act, why):
    rules, chain = between(act)
    with rules, torch.no_grad(), pytest.raises(FusionError) as raised:
        strictly(chain, rows(), **inputs(scale=True))
    assert f"1.Scale: toy.scaled: {why}" in str(raised.value)
    assert f"2.{type(act).__name__}: toy.scaled: {why}" in str(raised.value)


def test_a_leading_optional_op_alone_is_no_miss():
    class ScaledGlu(FusionRule, name="toy.scaled_glu", direction="forward"):
        scale: Scale | None
        act: SwiGLU

    chain = fm.Sequential(Scale("probs"), experts()[0])
    with fm.register(ScaledGlu), torch.no_grad():
        strictly(chain, rows(), **inputs(scale=True))
        assert not any(a.missed for a in chain.explain(rows(), **inputs(scale=True)).plans[0].attempts)


def test_it_raises_at_every_call():
    chain = experts(limit=7.0)
    with fm.register(gemm_glu()):
        for _ in range(2):
            with pytest.raises(FusionError):
                strictly(chain, rows(), **inputs())
            chain(rows(), **inputs())


def test_a_miss_in_the_backward_pass_raises_at_the_forward_call():
    chain = fm.Sequential(fm.GeGLU(), experts()[2])
    text = r"1.Dgrad: toy.dgrad_dglu: NO_MATCH: slot 'dact': expected DSwiGLU, got DGeGLU"
    with fm.register(dgrad_dglu()):
        with pytest.raises(FusionError, match=text):
            strictly(chain, rows(), **inputs())
        with torch.no_grad():
            strictly(chain, rows(), **inputs())


def test_what_the_joint_choice_gives_up_raises():
    with fm.register(gemm_glu(keeps=()), gemm()), pytest.raises(FusionError, match=r"1.SwiGLU: .*cannot keep 1.input"):
        strictly(experts(), rows(), **inputs())


def test_what_a_rule_cannot_keep_raises_for_no_more_ops_than_it_could_take(caplog):
    """The Scale's gradient needs what went into it: the rule runs without the Scale, which costs least."""
    chain = fm.Sequential(*list(experts(scale=True))[:3])
    with fm.register(gemm_glu()):
        strictly(chain, rows(), **inputs(scale=True)).sum().backward()
        assert not caplog.records
        step = chain.explain(rows(), **inputs(scale=True)).steps[1]
    assert (step.ops, step.nearest_miss.missed) == (("2.Scale",), False)
    assert step.why == "toy.gemm_glu: CONSTRAINT: cannot keep 2.input, which 2.ScaleGrad needs"


def test_a_constraint_of_more_ops_raises_for_those():
    class Picky(FusionRule, name="toy.picky", direction="forward"):
        act: SwiGLU
        scale: Scale | None

        def offer(self, ctx):
            fm.require(self.scale is None or ctx.dtype("scale.factor") is torch.float32, "the scale is not fp32")
            return fm.Step(needs=("input", "scale.factor"), gives=("output",))

        def build(self, ctx, keep):
            return bound(lambda x, _: self.act.compute(x))

    chain = fm.Sequential(SwiGLU(), Scale("probs"))
    with fm.register(Picky), torch.no_grad(), pytest.raises(FusionError) as raised:
        strictly(chain, rows(), probs=torch.rand(9, dtype=torch.float64))
    assert str(raised.value).splitlines()[1:] == ["  1.Scale: toy.picky: CONSTRAINT: the scale is not fp32"]


def test_a_rule_of_another_device_does_not_raise():
    with fm.register(GluOfGpu):
        strictly(experts(), rows(), **inputs())


def test_a_partial_match_of_another_device_does_not_raise():
    class PairOfGpu(FusionRule, name="toy.pair_of_gpu", direction="forward"):
        fc: GroupedLinear
        scale: Scale

        @classmethod
        def available(cls, device, arch):
            fm.require(arch == 90, "needs sm_90")

    with fm.register(PairOfGpu):
        strictly(experts(), rows(), **inputs())


def test_a_rule_switched_off_does_not_raise(monkeypatch):
    with fm.register(gemm_glu()):
        with fm.disabled("toy.*"):
            strictly(experts(limit=7.0), rows(), **inputs())
            strictly(experts(act=fm.ReGLU), rows(), **inputs())
        monkeypatch.setenv("FUSEDMOE_DISABLE", "toy.gemm_glu")
        strictly(experts(limit=7.0), rows(), **inputs())


def test_a_rule_that_stands_nowhere_does_not_raise():
    class Elsewhere(FusionRule, name="toy.elsewhere", direction="forward"):
        relu: fm.SquaredReLU

    with fm.register(Elsewhere):
        strictly(experts(), rows(), **inputs())


def test_an_op_that_plain_pytorch_runs_cheaper_does_not_raise():
    with fm.register(gemm(launches=100)):
        strictly(experts(), rows(), **inputs())


def test_foreign_modules_do_not_raise():
    chain = fm.Sequential(torch.nn.Identity(), experts()[0], fm.SwiGLU(), torch.nn.Identity())
    with fm.register(gemm_glu()), torch.no_grad():
        strictly(chain, rows(), **inputs())


def test_explain_does_not_raise():
    with fm.register(gemm_glu(), wgrad()), fm.strict():
        assert "CONSTRAINT" in str(experts(limit=7.0).explain(rows(), **inputs()))
