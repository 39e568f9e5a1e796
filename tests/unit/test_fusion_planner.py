"""Plans of small chains under toy rules: the same results as without, and one status for every rule at every place."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import toy
from kit.toy import dgrad_dglu, experts, gemm, gemm_glu, inputs, only_plan, rows, rule, rules_used, status

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.ops import BackwardOp, GroupedLinear, Op, SwiGLU
from fusedmoe.ops.op import AutogradBackward
from fusedmoe.ops.state.random import NAMES

FORWARD = [gemm(), gemm_glu(), toy.glu_scale()]
BACKWARD = [dgrad_dglu(), toy.wgrad()]


def both_ways(rules, chain, x, **named):
    """Check that a fused call gives what an unfused one gives; return its plan."""
    expected = toy.outcome(chain, x, **named)
    with fm.register(*rules):
        plan = only_plan(chain, x, **named)
        toy.assert_same(toy.outcome(chain, x, **named), expected)
    return plan


# ---- results ------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(data=st.data(), scale=st.booleans(), frozen=st.sets(st.sampled_from(["x", "probs", "0", "-1"])))
def test_whatever_is_chosen_computes_the_same(data, scale, frozen):
    """Random rule sets: which there are, what they cost, what they keep and recompute, which calls they decline."""
    makers = {
        gemm: {},
        gemm_glu: {"keeps": st.sampled_from([(), ("act.input",)])},
        toy.glu_scale: {},
        dgrad_dglu: {"recomputes": st.booleans()},
        toy.wgrad: {},
    }
    rules = []
    for i, make in enumerate(data.draw(st.lists(st.sampled_from(list(makers)), max_size=7))):
        options = {"launches": st.integers(0, 9), **makers[make]}
        if make is not toy.glu_scale:
            options["guard"] = st.sampled_from([None, toy.refuse])
        rules.append(make(f"toy.rule{i}", **data.draw(st.fixed_dictionaries(options))))
    chain, named = experts(scale=scale), inputs(scale=scale)
    for name in frozen & {"0", "-1"}:
        chain[int(name)].requires_grad_(False)
    if scale and "probs" in frozen:
        named["probs"] = named["probs"].detach()
    both_ways(rules, chain, rows(requires_grad="x" not in frozen), **named)


# ---- which gradients there are --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frozen", "x", "steps"),
    [
        ([], True, ["2.Wgrad", "2.Dgrad", "1.DSwiGLU", "0.Wgrad", "0.Dgrad"]),
        ([0], True, ["2.Wgrad", "2.Dgrad", "1.DSwiGLU", "0.Dgrad"]),
        ([2], True, ["2.Dgrad", "1.DSwiGLU", "0.Wgrad", "0.Dgrad"]),
        ([], False, ["2.Wgrad", "2.Dgrad", "1.DSwiGLU", "0.Wgrad"]),
        ([0], False, ["2.Wgrad"]),
        ([0, 2], False, []),
    ],
)
def test_frozen_weights_have_no_wgrad_step_and_a_frozen_input_no_dgrad(frozen, x, steps):
    chain = experts()
    for i in frozen:
        chain[i].requires_grad_(False)
    plan = only_plan(chain, rows(requires_grad=x), **inputs())
    assert [op for s in plan.steps if s.direction == "backward" for op in s.ops] == steps


@pytest.mark.parametrize("frozen", [False, True], ids=["wanted", "frozen"])
def test_a_backward_step_recomputes_only_what_another_reads(frozen):
    """FC2's input is recomputed for its weight gradient alone."""
    calls, chain = [], experts()
    chain[2].weight.requires_grad_(not frozen)
    plan = both_ways([gemm_glu(), dgrad_dglu(calls=calls)], chain, rows(), **inputs())
    assert "toy.dgrad_dglu" in rules_used(plan)
    assert "2.input" not in plan.kept
    assert calls == [("toy.dgrad_dglu", () if frozen else ("dgrad.input",))]


def test_a_gradient_asked_for_alone_runs_only_its_steps_and_a_second_time():
    calls = []
    chain, x, named = experts(), rows(), inputs()
    expected = toy.outcome(chain, x, **named)
    weights = torch.linspace(-1, 1, 9 * toy.H, dtype=torch.float64).view(9, toy.H)
    with fm.register(gemm_glu(), dgrad_dglu(calls=calls), toy.wgrad()):
        y = chain(x, **named)
        (only,) = torch.autograd.grad(y, [chain[2].weight], weights, retain_graph=True)
        assert calls == [("toy.dgrad_dglu", ("dgrad.input",))]  # it recomputes what the weight gradient needs
        for retain in (True, False):
            (dx,) = torch.autograd.grad(y, [x], weights, retain_graph=retain)
            torch.testing.assert_close(dx, expected["x"])
    torch.testing.assert_close(only, expected["2.weight"])
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


# ---- values that backward needs -------------------------------------------------------------------------------------


class Offset(Op):
    """y = x + 1, whose derivative reads what came in, although it needs not."""

    def compute(self, x):
        return x + 1

    def backward_ops(self):
        return (DOffset(self),)


class DOffset(BackwardOp):
    def compute(self, grad_output, x):
        assert x is not None
        return grad_output.clone()


@pytest.mark.parametrize("guard", [None, toy.refuse], ids=["", "guard"])
def test_a_value_that_is_recomputed_too_late_is_kept(guard):
    """The derivative gives the GLU's output, which the op after it reads in backward: before this step runs."""
    again = rule(
        "toy.recomputes_late", {"dact": toy.DSwiGLU}, ("grad_output", "dact.input"), ("grad_input", "dact.output"),
        run=lambda self, keep: lambda dy, h: (self.dact.compute(dy, h), self.dact.op.compute(h)), direction="backward",
    )  # fmt: skip
    up, act, down = experts()
    chain = fm.Sequential(up, act, Offset(), down)
    plan = both_ways([again, dgrad_dglu(guard=guard)], chain, rows(), **inputs())
    assert rules_used(plan) == ["toy.recomputes_late"]
    assert "2.input" in plan.kept
    plan = both_ways([again, gemm_glu()], chain, rows(), **inputs())
    assert rules_used(plan) == ["toy.gemm_glu", "toy.recomputes_late"]


# ---- costs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_registration_order_never_decides(order):
    """Two ways to cover the same: the cheapest is taken, whatever came first; of a tie, the first by name."""
    rules = [gemm_glu("toy.a", launches=9), gemm_glu("toy.c"), gemm_glu("toy.b")]
    with fm.register(*(rules[i] for i in order)):
        plan = only_plan(experts(), rows(), **inputs())
    assert rules_used(plan) == ["toy.b"]
    assert {status(plan, name, 0) for name in ("toy.a", "toy.c")} == {(Status.SHADOWED, "by toy.b")}


def test_a_rule_that_costs_more_is_shadowed():
    assert rules_used(both_ways([gemm(launches=100)], experts(), rows(), **inputs())) == []
    with fm.register(gemm("toy.a", extra_bytes=10**9), gemm("toy.b", launches=3)):
        assert rules_used(only_plan(experts(), rows(), **inputs())) == ["toy.b", "toy.b"]
    slots = {"fc": GroupedLinear, "act": SwiGLU, "last": GroupedLinear}
    dear = rule("toy.dear", slots, (*toy.IN, "last.weight"), launches=50)
    with fm.register(gemm_glu(), gemm(), dear), torch.no_grad():
        plan = only_plan(experts(), rows(), **inputs())
    assert status(plan, "toy.dear", 0) == (Status.SHADOWED, "by toy.gemm_glu, toy.gemm")


# ---- reasons ------------------------------------------------------------------------------------------------------


def test_every_rule_has_one_status_at_every_place():
    with fm.register(*FORWARD, *BACKWARD):
        plan = only_plan(experts(scale=True), rows(), **inputs(scale=True))
    for direction, rules in [("forward", FORWARD), ("backward", BACKWARD)]:
        places = sum(len(s.ops) for s in plan.steps if s.direction == direction)
        attempts = [(a.rule, a.start) for a in plan.attempts if a.direction == direction]
        assert sorted(attempts) == sorted((r.name, i) for r in rules for i in range(places))


# ---- rules that stand at a place in several ways --------------------------------------------------------------------


def ways(plan, name, start):
    """(ops covered, ops that it is about, status) of every way in which a rule stands at a position."""
    found = [a for a in plan.attempts if (a.rule, a.start, a.direction) == (name, start, "forward")]
    return [(a.end - a.start, (*a.shared,), a.status) for a in found]


def test_each_longer_way_is_told_besides_of_its_further_ops():
    chain = fm.Sequential(*list(experts(scale=True))[:3])
    x, named = rows(), inputs(scale=True)
    with fm.register(gemm_glu()):
        plan = both_ways([], chain, x, **named)
        assert ways(plan, "toy.gemm_glu", 0) == [(2, (0, 1), Status.FUSED), (3, (2,), Status.CONSTRAINT)]
        assert plan.steps[1].why == "toy.gemm_glu: CONSTRAINT: cannot keep 2.input, which 2.ScaleGrad needs"
        with torch.no_grad():  # the longest is the best
            plan = only_plan(chain, x, **named)
        assert ways(plan, "toy.gemm_glu", 0) == [(3, (0, 1, 2), Status.FUSED)]
        with fm.disabled("toy.*"):
            assert ways(only_plan(chain, x, **named), "toy.gemm_glu", 0) == [(3, (0, 1, 2), Status.UNAVAILABLE)]
    plan = both_ways([gemm_glu()], experts(scale=True, limit=7.0), x, **named)  # all ways are declined
    assert ways(plan, "toy.gemm_glu", 0) == [(3, (0, 1, 2), Status.CONSTRAINT)]


# ---- ops that draw random numbers: a value that is computed again draws the same numbers -----------------------------


class Noise(Op):
    draws_random = True

    def compute(self, x):
        return x * torch.rand_like(x)


class DSquare(BackwardOp):
    def compute(self, grad_output, x):
        return 2 * x * grad_output


class Square(Op):
    def compute(self, x):
        return x.square()

    def backward_ops(self):
        return (DSquare(self),)


STATES = tuple(f"noise.{name}" for name in NAMES)


def noise_square(keeps):
    """Both ops in one step, which hides what is between them."""

    def run(self, keep):
        def flat(x):
            kept = {"noise.random_state": torch.get_rng_state(), "noise.device_random_state": None}
            y = self.noise.compute(x).square()
            return (y, *(kept[name] for name in keep)) if keep else y

        return flat

    return rule("toy.noise_square", {"noise": Noise, "square": Square}, ("input",), run=run, keeps=keeps)


# from what went into the first op; it declines, and its stand-ins need what is between
DSQUARE_DNOISE = rule(
    "toy.dsquare_dnoise", {"square": DSquare, "noise": AutogradBackward}, ("grad_output", "noise.input", *STATES),
    ("grad_input",), run=lambda self, keep: None, guard=toy.refuse, direction="backward",
)  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "used"),
    [
        ([noise_square(())], []),  # it cannot keep what the backward pass needs
        ([noise_square(STATES), DSQUARE_DNOISE], ["toy.noise_square", "toy.dsquare_dnoise"]),
        ([DSQUARE_DNOISE], ["toy.dsquare_dnoise"]),
    ],
)
def test_rules_around_an_op_that_draws(rules, used):
    module, x, state = fm.Sequential(Noise(), Square()), rows(), torch.get_rng_state()
    want = 2 * x.detach() * torch.rand_like(x).square()
    assert want.any()
    for registered in ([], rules):
        with fm.register(*registered):
            torch.set_rng_state(state)
            (dx,) = torch.autograd.grad(module(x).sum(), x)
            torch.testing.assert_close(dx, want)
            plan = only_plan(module, x)
            assert rules_used(plan) == (used if registered else [])
            if len(registered) == 2:
                assert plan.kept == ("0.input", *(f"0.{name}" for name in NAMES))
