"""Steps that decline a call: the ops then run unfused in that call, with the same results, and it is logged once."""

import logging

import pytest
import torch
from kit import toy
from kit.toy import dgrad_dglu, experts, gemm_glu, inputs, only_plan, outcome, rows, rule, rules_used

import fusedmoe as fm
from fusedmoe import FusionError
from fusedmoe.call.partition import partition_for
from fusedmoe.ops import BackwardOp, GroupedLinear, Op

REASON = "rows are 9, not a multiple of 128; it runs unfused"


def small_only(x, *_rest):
    fm.require(x.shape[0] <= 9, "%d rows are more than 9", x.shape[0])


def fallbacks(caplog):
    return [r.getMessage() for r in caplog.records if "declined this call" in r.getMessage()]


@pytest.mark.parametrize(
    "rules",
    [
        [gemm_glu(guard=toy.refuse), dgrad_dglu()],
        [gemm_glu(), toy.gemm(), dgrad_dglu(), toy.wgrad(guard=toy.refuse)],
        [make(guard=toy.refuse) for make in (gemm_glu, toy.gemm, dgrad_dglu, toy.wgrad)],
        [gemm_glu(), dgrad_dglu(guard=toy.refuse, recomputes=False), toy.wgrad(guard=toy.refuse)],
    ],
    ids=lambda rules: "+".join(r.name.removeprefix("toy.") for r in rules),
)
def test_declined_steps_give_the_same(rules, caplog):
    chain, x, named = experts(scale=True), rows(), inputs(scale=True)
    expected = outcome(chain, x, **named)
    with fm.register(*rules):
        assert only_plan(chain, x, **named).fused
        toy.assert_same(outcome(chain, x, **named), expected)
        assert fallbacks(caplog)
        with torch.no_grad():
            torch.testing.assert_close(chain(x, **named), expected["y"])


def test_a_guard_decides_anew_at_every_call():
    """9 and 12 rows share a plan; only the second call is declined."""
    calls = []
    chain = experts()
    with fm.register(gemm_glu(guard=small_only, calls=calls), dgrad_dglu(calls=calls)):
        for count, fused in [(9, 1), (12, 0), (8, 1)]:
            calls.clear()
            x = rows(count)
            got = outcome(chain, x, **inputs())
            assert len([name for name, _ in calls if name == "toy.gemm_glu"]) == fused
            with fm.disabled("*"):
                toy.assert_same(got, outcome(chain, x, **inputs()))
    (part,) = partition_for(chain).parts
    assert len(part.chain.table.plans) == 2  # one of them with everything switched off


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_each_fallback_is_said_once_at_warning(caplog, grad):
    chain = experts()
    with fm.register(gemm_glu(guard=toy.refuse)), torch.set_grad_enabled(grad):
        for count in (9, 9, 10, 200):  # not once for every number of rows
            chain(rows(count), **inputs())
    assert fallbacks(caplog) == [f"0.GroupedLinear + 1.SwiGLU: toy.gemm_glu declined this call: {REASON}"]
    (record,) = [r for r in caplog.records if "declined" in r.getMessage()]
    assert (record.levelno, record.name) == (logging.WARNING, "fusedmoe.fusion.program.source")
    assert record.args, "%-style arguments"


def test_strict_raises_also_in_backward_if_the_forward_was_strict():
    chain, x, named = fm.Sequential(fm.SwiGLU(), experts()[2]), rows(), inputs()
    dglu = rule("toy.dglu", {"dact": toy.DSwiGLU}, ("grad_output", "dact.input"), ("grad_input",), direction="backward")
    dglu.build = lambda self, ctx, keep: toy.refuse
    with fm.register(dglu, toy.gemm(guard=small_only)):
        with fm.strict():
            y = chain(x, **named)
            with pytest.raises(FusionError, match=r"^1.GroupedLinear: toy.gemm declined this call: 12 rows"):
                chain(rows(12), **named)
        with fm.strict(False):
            lenient = chain(x, **named)
        with pytest.raises(FusionError, match=r"^0.DSwiGLU: toy.dglu declined this call: rows are 9"):
            y.sum().backward()
        with fm.strict():
            lenient.sum().backward()


class Third(Op):
    """y = x^2 + 1; three readers of one forward value in backward."""

    parameter_names = ("weight",)

    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(width, dtype=torch.float64) + 1)

    def compute(self, x, weight):
        return x * x * weight

    def backward_ops(self):
        return ThirdWeightGrad(self), DThird(self)


class ThirdWeightGrad(BackwardOp):
    gives = ("grad_weight",)

    def compute(self, grad_output, x):
        return (grad_output * x * x).sum(0)


class DThird(BackwardOp):
    needs = ("grad_output", "input", "weight")

    def compute(self, grad_output, x, weight):
        return 2 * grad_output * x * weight


def hiding(self, keep):
    def flat(x, weight, offsets, w):
        h = self.fc.compute(x, weight, None, offsets)
        a = self.act.compute(h)
        inner = {"act.input": h, "third.input": a}
        return (self.third.compute(a, w), *(inner[name] for name in keep))

    return flat


def dthird_dglu(self, keep):
    """Both derivatives from what went into the GLU: what went into the third op is computed again, not kept."""
    return lambda dy, h, w: self.dact.compute(self.dthird.compute(dy, self.dact.op.compute(h), w), h)


# the weight gradient from the op's output: what the plain step reads is not among its needs
FROM_OUTPUT = rule(
    "toy.from_output", {"dw": ThirdWeightGrad}, ("grad_output", "dw.output", "dw.weight"), ("dw.grad_weight",),
    direction="backward", run=lambda self, keep: None, guard=toy.refuse,
)  # fmt: skip
# hides what is between
HIDING = rule(
    "toy.hiding", {"fc": GroupedLinear, "act": fm.SwiGLU, "third": Third}, (*toy.IN, "third.weight"), run=hiding,
    keeps=("act.input", "third.input"),
)  # fmt: skip
DTHIRD_DGLU = rule(
    "toy.dthird_dglu", {"dthird": DThird, "dact": toy.DSwiGLU}, ("grad_output", "dact.input", "dthird.weight"),
    ("grad_input",), direction="backward", run=dthird_dglu,
)  # fmt: skip


def test_stand_ins_recompute_what_nobody_kept(caplog):
    """The fused steps read the GLU's input and the last output: the GLU's output is nowhere when a guard declines."""
    chain = fm.Sequential(experts()[0], fm.SwiGLU(), Third(toy.I))
    x, named = rows(), inputs()
    expected = outcome(chain, x, **named)
    with fm.register(HIDING, FROM_OUTPUT, DTHIRD_DGLU):
        plan = only_plan(chain, x, **named)
        assert rules_used(plan) == ["toy.hiding", "toy.from_output", "toy.dthird_dglu"]
        assert "2.input" not in plan.kept
        toy.assert_same(outcome(chain, x, **named), expected)
    assert fallbacks(caplog)
