"""Plans of small chains under toy rules: the same results as without, and one status for every rule at every place."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import toy
from kit.toy import (
    assert_same,
    bound,
    dgrad_dglu,
    experts,
    gemm,
    gemm_glu,
    glu_scale,
    inputs,
    only_plan,
    outcome,
    rows,
    rules_used,
    status,
    wgrad,
)

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.fusion.language.rule import FusionRule, Step
from fusedmoe.ops import BackwardOp, GroupedLinear, Op, SwiGLU

FORWARD = [gemm(), gemm_glu(), glu_scale()]
BACKWARD = [dgrad_dglu(), wgrad()]


def both_ways(rules, chain, x, **named):
    """Check that a fused call gives what an unfused one gives; return its plan."""
    expected = outcome(chain, x, **named)
    with fm.register(*rules):
        plan = only_plan(chain, x, **named)
        assert_same(outcome(chain, x, **named), expected)
    return plan


@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
@pytest.mark.parametrize(
    "rules",
    [r for n in range(1, 6) for r in itertools.combinations(FORWARD + BACKWARD, n) if n in (1, 2, 5)],
    ids=lambda rules: "+".join(r.name.removeprefix("toy.") for r in rules),
)
def test_fused_and_unfused_steps_mix_freely(rules, scale):
    plan = both_ways(rules, experts(scale=scale), rows(), **inputs(scale=scale))
    assert plan.fused


@pytest.mark.parametrize("frozen", [False, True], ids=["wanted", "frozen"])
def test_a_backward_step_recomputes_only_what_another_reads(frozen):
    """FC2's input is recomputed for its weight gradient alone."""
    calls, chain = [], experts()
    chain[2].weight.requires_grad_(not frozen)
    plan = both_ways([gemm_glu(), dgrad_dglu(calls=calls)], chain, rows(), **inputs())
    assert "toy.dgrad_dglu" in rules_used(plan)
    assert "2.input" not in plan.kept
    assert calls == [("toy.dgrad_dglu", () if frozen else ("dgrad.input",))]


@pytest.mark.parametrize(
    "frozen", [["x"], ["0"], ["2"], ["x", "0"], ["0", "2"], ["x", "2"]], ids=lambda names: "-".join(names)
)
def test_with_frozen_parts(frozen):
    chain, x = experts(), rows(requires_grad="x" not in frozen)
    for name in frozen:
        if name != "x":
            chain[int(name)].requires_grad_(False)
    both_ways(FORWARD + BACKWARD, chain, x, **inputs())


def test_without_gradients():
    chain, x, named = experts(), rows(), inputs()
    with torch.no_grad():
        plan = both_ways([gemm_glu(), gemm(), *BACKWARD], chain, x, **named)
    assert rules_used(plan) == ["toy.gemm_glu", "toy.gemm"]
    assert plan.kept == ()


def test_everything_together():
    """Forward in two steps; backward in four, the GLU's input being all that is kept besides what the caller has."""
    plan = both_ways([gemm_glu(), gemm(), *BACKWARD], experts(scale=True), rows(), **inputs(scale=True))
    assert [(s.direction, s.ops, s.rule) for s in plan.steps if s.rule] == [
        ("forward", ("0.GroupedLinear", "1.SwiGLU", "2.Scale"), "toy.gemm_glu"),
        ("forward", ("3.GroupedLinear",), "toy.gemm"),
        ("backward", ("3.Wgrad",), "toy.wgrad"),
        ("backward", ("3.Dgrad", "2.ScaleGrad", "2.DScale", "1.DSwiGLU"), "toy.dgrad_dglu"),
        ("backward", ("0.Wgrad",), "toy.wgrad"),
    ]
    assert [s.ops for s in plan.unfused] == [("0.Dgrad",)]
    assert set(plan.kept) == {"0.input", "1.input", "probs", "offsets"}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), scale=st.booleans(), frozen=st.sets(st.sampled_from(["x", "probs", "0", "-1"])))
def test_whatever_is_chosen_computes_the_same(data, scale, frozen):
    """Random rule sets: which there are, what they cost, what they keep and recompute, which calls they decline."""
    makers = {
        gemm: {},
        gemm_glu: {"keeps": st.sampled_from([(), ("act.input",)])},
        glu_scale: {},
        dgrad_dglu: {"recomputes": st.booleans()},
        wgrad: {},
    }
    rules = []
    for i, make in enumerate(data.draw(st.lists(st.sampled_from(list(makers)), max_size=7))):
        options = {"launches": st.integers(0, 9), **makers[make]}
        if make is not glu_scale:
            options["guard"] = st.sampled_from([None, toy.refuse])
        rules.append(make(f"toy.rule{i}", **data.draw(st.fixed_dictionaries(options))))
    chain, named = experts(scale=scale), inputs(scale=scale)
    for name in frozen & {"0", "-1"}:
        chain[int(name)].requires_grad_(False)
    if scale and "probs" in frozen:
        named["probs"] = named["probs"].detach()
    both_ways(rules, chain, rows(requires_grad="x" not in frozen), **named)


def test_an_optional_slot_between_others_is_bound_where_it_is_there():
    for scale, ops in [(False, 2), (True, 3)]:
        with torch.no_grad():
            plan = both_ways([gemm_glu()], experts(scale=scale), rows(), **inputs(scale=scale))
        assert len(plan.fused[0].ops) == ops
        assert status(plan, "toy.gemm_glu", 0)[0] is Status.FUSED


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_registration_order_never_decides(order):
    """Two ways to cover the same: the cheapest is taken, whatever came first."""
    rules = [gemm_glu("toy.a", launches=9), gemm_glu("toy.b", launches=1), gemm_glu("toy.c", launches=5)]
    with fm.register(*(rules[i] for i in order)):
        plan = only_plan(experts(), rows(), **inputs())
    assert rules_used(plan) == ["toy.b"]
    assert status(plan, "toy.a", 0) == (Status.SHADOWED, "by toy.b")
    assert status(plan, "toy.c", 0) == (Status.SHADOWED, "by toy.b")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_tie_goes_to_the_name_that_comes_first(order):
    rules = [gemm_glu("toy.a"), gemm_glu("toy.b")]
    with fm.register(*(rules[i] for i in order)):
        assert rules_used(only_plan(experts(), rows(), **inputs())) == ["toy.a"]


@pytest.mark.parametrize("names", [("toy.a", "toy.z"), ("toy.z", "toy.a")])
def test_a_tie_goes_to_fewer_longer_steps(names):
    class Both(FusionRule, name=names[0], direction="forward"):
        first: fm.SquaredReLU
        second: fm.SquaredReLU

        def offer(self, ctx):
            # the same cost as two single steps: the value between them counts as moved
            return Step(needs=("input",), gives=("output",), launches=2, extra_bytes=2 * 16 * ROW_BYTES)

        def build(self, ctx, keep):
            return bound(lambda x: self.second.compute(self.first.compute(x)))

    class One(FusionRule, name=names[1], direction="forward"):
        only: fm.SquaredReLU

        def offer(self, ctx):
            return Step(needs=("input",), gives=("output",))

        def build(self, ctx, keep):
            return bound(self.only.compute)

    ROW_BYTES = toy.H * 8
    chain = fm.Sequential(fm.SquaredReLU(), fm.SquaredReLU())
    with fm.register(Both, One), torch.no_grad():
        assert rules_used(only_plan(chain, rows(8))) == [names[0]]


def test_a_rule_dearer_than_plain_pytorch_is_shadowed_by_it():
    plan = both_ways([gemm(launches=100)], experts(), rows(), **inputs())
    assert rules_used(plan) == []
    assert status(plan, "toy.gemm", 0) == (Status.SHADOWED, "by 0.GroupedLinear in plain PyTorch")
    assert "toy.gemm: SHADOWED: by 0.GroupedLinear in plain PyTorch" in str(plan)


def test_extra_bytes_count():
    with fm.register(gemm("toy.a", extra_bytes=10**9), gemm("toy.b", launches=3)):
        assert rules_used(only_plan(experts(), rows(), **inputs())) == ["toy.b", "toy.b"]


def test_a_rule_shadowed_by_two_steps_names_both():
    class Dear(FusionRule, name="toy.dear", direction="forward"):
        fc: GroupedLinear
        act: SwiGLU
        last: GroupedLinear

        def offer(self, ctx):
            return Step(needs=("input", "fc.weight", "last.weight", "offsets"), gives=("output",), launches=50)

    with fm.register(gemm_glu(), gemm(), Dear), torch.no_grad():
        plan = only_plan(experts(), rows(), **inputs())
    assert status(plan, "toy.dear", 0) == (Status.SHADOWED, "by toy.gemm_glu, toy.gemm")


def test_constraint_has_the_message_with_its_values():
    plan = both_ways([gemm_glu()], experts(limit=7.0), rows(), **inputs())
    assert rules_used(plan) == []
    assert status(plan, "toy.gemm_glu", 0) == (Status.CONSTRAINT, "limit 7.0 is not taken, use limit=None")
    for step in plan.steps[:2]:
        assert step.why == "toy.gemm_glu: CONSTRAINT: limit 7.0 is not taken, use limit=None"


def test_a_shorter_variant_is_taken_where_the_longer_declines():
    class Picky(FusionRule, name="toy.picky", direction="forward"):
        act: SwiGLU
        scale: fm.Scale | None

        def offer(self, ctx):
            fm.require(self.scale is None, "no Scale")
            return Step(needs=("input",), gives=("output",))

        def build(self, ctx, keep):
            return bound(self.act.compute)

    plan = both_ways([Picky], experts(scale=True), rows(), **inputs(scale=True))
    assert [s.ops for s in plan.fused] == [("1.SwiGLU",)]
    assert status(plan, "toy.picky", 1) == (Status.FUSED, "")


def test_no_match_has_slot_expected_and_got():
    plan = both_ways([gemm_glu()], experts(act=fm.ReGLU), rows(), **inputs())
    assert rules_used(plan) == []
    reason = "slot 'act': expected SwiGLU | GeGLU, got ReGLU"
    assert status(plan, "toy.gemm_glu", 0) == (Status.NO_MATCH, reason)
    assert status(plan, "toy.gemm_glu", 2) == (
        Status.NO_MATCH, "slot 'act': expected SwiGLU | GeGLU, got the end of the chain",
    )  # fmt: skip


def test_a_subclass_is_not_fused():
    class Louder(SwiGLU):
        def compute(self, x):
            return 2 * super().compute(x)

    plan = both_ways([gemm_glu()], experts(act=Louder), rows(), **inputs())
    assert rules_used(plan) == []
    assert "got Louder, a subclass of SwiGLU, which may compute something else" in status(plan, "toy.gemm_glu", 0)[1]


def test_unavailable_on_this_device():
    class OnGpu(FusionRule, name="toy.on_gpu", direction="forward"):
        act: SwiGLU

        @classmethod
        def available(cls, device, arch):
            fm.require(arch == 90, "needs sm_90, this device is %s", device)

        def offer(self, ctx):
            raise AssertionError("asked although it is not available")

    plan = both_ways([OnGpu], experts(), rows(), **inputs())
    assert status(plan, "toy.on_gpu", 1) == (Status.UNAVAILABLE, "needs sm_90, this device is cpu")
    assert not any(a.on_this_device for a in plan.attempts)


def test_unavailable_by_a_pattern(monkeypatch):
    chain, x, named = experts(), rows(), inputs()
    expected = outcome(chain, x, **named)
    with fm.register(*FORWARD, *BACKWARD):
        with fm.disabled("toy.gemm*"):
            plan = only_plan(chain, x, **named)
            assert status(plan, "toy.gemm_glu", 0) == (Status.UNAVAILABLE, "switched off by 'toy.gemm*'")
            assert rules_used(plan, "forward") == ["toy.glu_scale"]
        monkeypatch.setenv("FUSEDMOE_DISABLE", "*.wgrad, toy.d*")
        plan = only_plan(chain, x, **named)
        assert status(plan, "toy.wgrad") == (Status.UNAVAILABLE, "switched off by '*.wgrad'")
        assert rules_used(plan, "backward") == []
        assert_same(outcome(chain, x, **named), expected)


def test_every_rule_has_one_status_at_every_place():
    with fm.register(*FORWARD, *BACKWARD):
        plan = only_plan(experts(scale=True), rows(), **inputs(scale=True))
    for direction, rules in [("forward", FORWARD), ("backward", BACKWARD)]:
        places = sum(len(s.ops) for s in plan.steps if s.direction == direction)
        attempts = [(a.rule, a.start) for a in plan.attempts if a.direction == direction]
        assert sorted(attempts) == sorted((r.name, i) for r in rules for i in range(places))


def ways(plan, rule, start):
    """(ops covered, ops that it is about, status) of every way in which a rule stands at a position."""
    found = [a for a in plan.attempts if (a.rule, a.start, a.direction) == (rule, start, "forward")]
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


def test_each_longer_way_has_its_own_reason():
    class Picky(FusionRule, name="toy.picky", direction="forward"):
        act: SwiGLU
        one: fm.Scale | None
        two: fm.Scale | None

        def offer(self, ctx):
            fm.require(self.two is None, "two Scales")
            fm.require(self.one is None, "one Scale")
            return Step(needs=("input",), gives=("output",))

        def build(self, ctx, keep):
            return bound(self.act.compute)

    chain = fm.Sequential(SwiGLU(), fm.Scale("p"), fm.Scale("q"), SwiGLU())
    x, p, q = rows(requires_grad=False), torch.rand(9), torch.rand(9)
    with fm.register(Picky):
        plan = only_plan(chain, x, p=p, q=q)
    assert ways(plan, "toy.picky", 0) == [
        (1, (0,), Status.FUSED), (2, (1,), Status.CONSTRAINT), (3, (1, 2), Status.CONSTRAINT),
    ]  # fmt: skip
    assert ways(plan, "toy.picky", 3) == [(1, (3,), Status.FUSED)]
    assert [a.reason for a in plan.attempts if a.start == 0] == ["", "one Scale", "two Scales"]


def test_a_longer_way_that_costs_more_is_shadowed_and_says_so():
    class Slow(FusionRule, name="toy.slow", direction="forward"):
        act: SwiGLU
        scale: fm.Scale | None

        def offer(self, ctx):
            return Step(needs=("input", "scale.factor"), gives=("output",), launches=1 if self.scale is None else 100)

        def build(self, ctx, keep):
            return bound(lambda x, *p: self.scale.compute(self.act.compute(x), *p) if p else self.act.compute(x))

    plan = only_plan_of(Slow, fm.Sequential(SwiGLU(), fm.Scale("p")), rows(requires_grad=False), p=torch.rand(9))
    assert ways(plan, "toy.slow", 0) == [(1, (0,), Status.FUSED), (2, (1,), Status.SHADOWED)]
    assert plan.steps[1].why == "toy.slow: SHADOWED: by toy.slow, 1.Scale in plain PyTorch"


def test_all_ways_declined_is_one_constraint_on_all_ops():
    plan = both_ways([gemm_glu()], experts(scale=True, limit=7.0), rows(), **inputs(scale=True))
    assert ways(plan, "toy.gemm_glu", 0) == [(3, (0, 1, 2), Status.CONSTRAINT)]


def only_plan_of(rule, chain, x, **named):
    with fm.register(rule):
        return only_plan(chain, x, **named)


def test_a_bug_in_offer_or_build_is_a_bug():
    for method in ("offer", "build"):

        class Broken(FusionRule, name="toy.broken", direction="forward"):
            act: SwiGLU

            def offer(self, ctx):
                return Step(needs=("input",), gives=("output",))

        setattr(Broken, method, lambda self, *_: {}["oops"])
        with fm.register(Broken), pytest.raises(KeyError, match="oops"):
            experts()(rows(), **inputs())


def test_a_forward_step_that_cannot_keep_what_backward_needs_is_rejected():
    """It costs one launch more to do without the fused forward step than without the fused backward step."""
    rules = [gemm_glu(keeps=()), dgrad_dglu()]
    plan = both_ways(rules, experts(), rows(), **inputs())
    assert rules_used(plan) == ["toy.dgrad_dglu"]
    assert status(plan, "toy.gemm_glu", 0) == (
        Status.CONSTRAINT, "cannot keep 1.input, which 2.Dgrad + 1.DSwiGLU needs",
    )  # fmt: skip
    with torch.no_grad():  # nothing has to be kept
        plan = both_ways(rules, experts(), rows(), **inputs())
    assert rules_used(plan) == ["toy.gemm_glu"]


def test_a_value_that_nobody_can_recompute_has_to_be_kept():
    """Every backward step of the GLU reads its input, so that the forward step that hides it is never taken."""
    plan = both_ways([gemm_glu(keeps=())], experts(), rows(), **inputs())
    assert rules_used(plan) == []
    assert status(plan, "toy.gemm_glu", 0) == (Status.CONSTRAINT, "cannot keep 1.input, which 1.DSwiGLU needs")


def test_what_backward_recomputes_is_not_kept():
    chain, x, named = experts(), rows(), inputs()
    with_it = both_ways([gemm_glu(), dgrad_dglu()], chain, x, **named)
    assert "2.input" not in with_it.kept
    assert rules_used(with_it) == ["toy.gemm_glu", "toy.dgrad_dglu"]
    without = both_ways([gemm_glu(), dgrad_dglu(recomputes=False)], chain, x, **named)
    assert "2.input" in without.kept  # which gemm_glu gives anyway


def test_only_what_backward_wants_is_kept():
    calls = []
    chain, x, named = experts(), rows(), inputs()
    with fm.register(gemm_glu(calls=calls)):
        chain(x, **named)
        with torch.no_grad():
            chain(x, **named)
        chain[0].requires_grad_(False)
        chain(x.detach(), **named)
    assert calls == [("toy.gemm_glu", ("act.input",)), ("toy.gemm_glu", ()), ("toy.gemm_glu", ())]


def test_frozen_weights_have_no_wgrad_step_and_a_frozen_input_no_dgrad():
    def backward(*frozen, x=True):
        chain = experts()
        for i in frozen:
            chain[i].requires_grad_(False)
        plan = only_plan(chain, rows(requires_grad=x), **inputs())
        return [op for s in plan.steps if s.direction == "backward" for op in s.ops]

    assert backward() == ["2.Wgrad", "2.Dgrad", "1.DSwiGLU", "0.Wgrad", "0.Dgrad"]
    assert backward(0) == ["2.Wgrad", "2.Dgrad", "1.DSwiGLU", "0.Dgrad"]
    assert backward(2) == ["2.Dgrad", "1.DSwiGLU", "0.Wgrad", "0.Dgrad"]
    assert backward(x=False) == ["2.Wgrad", "2.Dgrad", "1.DSwiGLU", "0.Wgrad"]
    assert backward(0, x=False) == ["2.Wgrad"]
    assert backward(0, 2, x=False) == []


def test_a_gradient_asked_for_alone_runs_only_its_steps():
    calls = []
    chain, x, named = experts(), rows(), inputs()
    expected = outcome(chain, x, **named)
    weights = torch.linspace(-1, 1, 9 * toy.H, dtype=torch.float64).view(9, toy.H)
    with fm.register(gemm_glu(), dgrad_dglu(calls=calls), wgrad()):
        y = chain(x, **named)
        (only,) = torch.autograd.grad(y, [chain[2].weight], weights, retain_graph=True)
        assert calls == [("toy.dgrad_dglu", ("dgrad.input",))]  # it recomputes what the weight gradient needs
        (dx,) = torch.autograd.grad(y, [x], weights)
    torch.testing.assert_close(only, expected["2.weight"])
    torch.testing.assert_close(dx, expected["x"])


def test_retain_graph_and_a_second_backward():
    chain, x, named = experts(), rows(), inputs()
    with fm.register(*FORWARD, *BACKWARD):
        y = chain(x, **named).square().sum()
        first = torch.autograd.grad(y, [x], retain_graph=True)
        second = torch.autograd.grad(y, [x])
    assert torch.equal(first[0], second[0])
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


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


class RecomputesBehind(FusionRule, name="toy.recomputes_behind", direction="backward"):
    """The GLU's derivative; gives the GLU's output, which the op after it reads in backward: before this step runs."""

    dact: toy.DSwiGLU

    def offer(self, ctx):
        return Step(needs=("grad_output", "dact.input"), gives=("grad_input", "dact.output"))

    def build(self, ctx, keep):
        return bound(lambda dy, h: (self.dact.compute(dy, h), self.dact.op.compute(h)))


@pytest.mark.parametrize("guard", [None, toy.refuse], ids=["", "guard"])
def test_what_is_recomputed_too_late_is_kept(guard):
    """The step that recomputes the GLU's output waits for the step that reads it."""
    up, act, down = experts()
    chain = fm.Sequential(up, act, Offset(), down)
    plan = both_ways([RecomputesBehind, dgrad_dglu(guard=guard)], chain, rows(), **inputs())
    assert rules_used(plan) == ["toy.recomputes_behind"]
    assert "2.input" in plan.kept
    plan = both_ways([RecomputesBehind, gemm_glu()], chain, rows(), **inputs())
    assert rules_used(plan) == ["toy.gemm_glu", "toy.recomputes_behind"]


def test_a_chain_of_linear_layers_without_splits():
    class Dense(FusionRule, name="toy.dense", direction="forward"):
        fc: fm.Linear
        act: fm.SquaredReLU

        def offer(self, ctx):
            return Step(needs=("input", "fc.weight", "fc.bias"), gives=("output",), keeps=("act.input",))

        def build(self, ctx, keep):
            def run(x, weight, bias):
                h = self.fc.compute(x, weight, bias)
                return (self.act.compute(h), *(h for _ in keep))

            return bound(run)

    for bias in (True, False):
        chain = fm.Sequential(fm.Linear(toy.H, 6, bias=bias), fm.SquaredReLU(), fm.Linear(6, 2)).double()
        plan = both_ways([Dense], chain, torch.randn(2, 5, toy.H, dtype=torch.float64, requires_grad=True))
        assert rules_used(plan) == ["toy.dense"]


def test_dispatch_and_combine_around_fused_experts():
    chain = fm.Sequential(fm.Dispatch(), *experts(), fm.Combine())
    named = {
        "expert_index": torch.tensor([[0, 2], [2, 3], [2, 0], [0, 0], [-1, 2]]),
        "expert_weight": torch.rand(5, 2, dtype=torch.float64, requires_grad=True),
    }
    plan = both_ways([gemm_glu(), gemm(), *BACKWARD], chain, rows(5), **named)
    assert rules_used(plan) == ["toy.gemm_glu", "toy.gemm", "toy.wgrad", "toy.dgrad_dglu", "toy.wgrad"]
