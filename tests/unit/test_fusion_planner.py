"""Plans of small chains under toy rules: the same results as without, and one status for every rule at every place.
The choice is the cheapest there is, compared with every covering of both directions on random candidates.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import toy
from kit.toy import dgrad_dglu, experts, gemm, gemm_glu, inputs, only_plan, rows, rule, rules_used, status

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.fusion.graph.values import Gathered, grad
from fusedmoe.fusion.language.rule import Step
from fusedmoe.fusion.search.candidates import Candidate
from fusedmoe.fusion.search.choice import Chosen, cheapest
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


# ---- the choice -----------------------------------------------------------------------------------------------------
#
# The chain is made up: forward values v0 (the rows) to vn; place i makes v(i+1) of v(i). Its backward has, for each op
# from the last to the first, a leaf (a weight gradient) and a step that hands the gradient on; each reads some forward
# values. Rules are random spans with random costs; forward ones keep some values inside, backward ones read others than
# plain steps do, and recompute some, always or on demand. Some places may be left out, if nothing reads what they make:
# rules after them may read what they read, and steps there read no forward value.

WRITTEN_US, KEPT_US = 0.5, 0.25


def candidate(start, end, cost, needs, gives, *, keeps=(), inside=(), fused=True, skips=False):
    return Candidate(
        start=start,
        end=end,
        rule=SimpleNamespace(name=f"rule{start}-{end}-{cost}") if fused else None,
        step=Step(needs=tuple(needs), gives=tuple(gives), keeps=tuple(keeps)),
        cost_us=float(cost),
        keep_names=tuple(keeps),
        keep_us=dict.fromkeys(keeps, WRITTEN_US),
        reads=tuple(needs),
        inside=frozenset(inside),
        skips=skips,
    )


def left_out(place, value):
    return candidate(place, place + 1, 0, (), (), inside=[value], fused=False, skips=True)


def line(direction, places, candidates, gathered=None):
    costs = SimpleNamespace(kept_us=lambda kept: KEPT_US * len(kept))
    return SimpleNamespace(
        direction=direction, places=[None] * places, candidates=candidates, results=(), conversions={},
        with_sources=set, search=SimpleNamespace(costs=costs, gathered=gathered or {}),
    )  # fmt: skip


def ways_to_read(value, gathered):
    return [value, *([gathered[value].source] if value in gathered else [])]


@st.composite
def problems(draw):
    n = draw(st.integers(1, 4))
    values = [f"v{i}" for i in range(n + 1)]
    subset = st.lists(st.sampled_from(values), unique=True, max_size=3)
    cost = st.integers(1, 9)

    forward = [candidate(i, i + 1, draw(cost), [values[i]], [values[i + 1]], fused=False) for i in range(n)]
    gathered = {values[i + 1]: Gathered(values[i], values[0]) for i in range(n - 1) if draw(st.booleans())}
    forward += [left_out(i, values[i + 1]) for i in range(n - 1) if values[i + 1] in gathered]
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, n - 1))
        end = draw(st.integers(start + 1, n))
        read = draw(st.sampled_from(ways_to_read(values[start], gathered)))
        inside = values[start + 1 : end]
        keeps = draw(st.lists(st.sampled_from(inside), unique=True)) if inside else []
        forward.append(candidate(start, end, draw(cost), [read], [values[end]], keeps=keeps, inside=inside))

    # places of the backward line: leaf of op i, then the step that hands the gradient on
    gives, needs = [], []
    for i in reversed(range(n)):
        gives += [f"grad(w{i})", grad(values[i])]
        needs += [grad(values[i + 1])] * 2
    handing_on = range(1, 2 * n - 1, 2)
    gathered_back = {gives[p]: Gathered(needs[p], values[0]) for p in handing_on if draw(st.booleans())}
    backward = []
    for p in range(2 * n):
        read = [] if gives[p] in gathered_back else draw(subset)
        backward.append(candidate(p, p + 1, draw(cost), [needs[p], *read], [gives[p]], fused=False))
    backward += [left_out(p, gives[p]) for p in handing_on if gives[p] in gathered_back]
    for _ in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, 2 * n - 1))
        end = draw(st.integers(start + 1, 2 * n))
        hands_on = any(g in needs for g in gives[start:end])
        # what only the span itself uses stays inside
        used = {needs[p] for p in range(2 * n) if not start <= p < end} | {g for g in gives if "w" in g} | {grad("v0")}
        given_ = [g for g in gives[start:end] if g in used]
        made = draw(subset) if hands_on else []
        always = draw(st.integers(0, len(made)))
        read = [v for v in draw(subset) if v not in made and gathered_back.keys().isdisjoint(gives[start:end])]
        arriving = draw(st.sampled_from(ways_to_read(needs[start], gathered_back)))
        hidden = [g for g in gives[start:end] if g not in given_]
        backward.append(
            candidate(
                start, end, draw(cost), [arriving, *read], [*given_, *made[:always]], keeps=made[always:], inside=hidden
            )
        )  # fmt: skip
    lines = line("forward", n, forward, gathered), line("backward", 2 * n, backward, gathered_back)
    return *lines, frozenset({"v0", values[-1]}), grad(values[-1])


def coverings(line, start=0):
    """Every covering, with every choice of the values that its steps write on demand."""
    if start == len(line.places):
        yield ()
    for c in line.candidates:
        if c.start == start:
            for rest in coverings(line, c.end):
                for count in range(len(c.step.keeps) + 1):
                    for written in itertools.combinations(c.step.keeps, count):
                        yield (Chosen(c, written), *rest)


def runs(steps, there):
    """Whether some order of these steps finds what each needs."""
    there, waiting = set(there), list(steps)
    while waiting:
        ready = [s for s in waiting if there.issuperset(s.candidate.step.needs)]
        if not ready:
            return False
        for s in ready:
            there.update(s.gives)
        waiting = [s for s in waiting if s not in ready]
    return True


def writes(steps, kept):
    """Whether none of the values is inside of a step that does not write it."""
    return all(v not in s.candidate.inside or v in s.written for s in steps for v in kept)


def brute_force(forward, backward, anyway, incoming):
    """The least cost over every covering of both directions and every set of values to keep."""
    values = [f"v{i}" for i in range(1, len(forward.places))]
    best = float("inf")
    all_forward, all_backward = list(coverings(forward)), list(coverings(backward))
    for size in range(len(values) + 1):
        for kept in itertools.combinations(values, size):
            written = (steps for steps in all_forward if writes(steps, kept) and runs(steps, {"v0"}))
            f = min(map(cost, written), default=float("inf"))
            runnable = (steps for steps in all_backward if runs(steps, {*anyway, *kept, incoming}))
            b = min(map(cost, runnable), default=float("inf"))
            best = min(best, f + b + KEPT_US * size)
    return best


def cost(steps):
    return sum(s.candidate.cost_us + WRITTEN_US * len(s.written) for s in steps)


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_it_is_the_cheapest_that_runs(problem):
    forward, backward, anyway, incoming = problem
    found, back, kept = cheapest(forward, backward, anyway, ())
    assert (found.cost_us, back.cost_us) == (pytest.approx(cost(found.steps)), pytest.approx(cost(back.steps)))
    f, b = found.steps, back.steps
    for steps in (f, b):
        assert [s.candidate.start for s in steps] == [0, *[s.candidate.end for s in steps[:-1]]]
    assert writes(f, kept)
    assert runs(f, {"v0"})
    assert runs(b, {*anyway, *kept, incoming})
    assert cost(f) + cost(b) + KEPT_US * len(kept) == pytest.approx(brute_force(*problem))


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
