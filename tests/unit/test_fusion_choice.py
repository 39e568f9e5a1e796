"""The choice is the cheapest there is: against every covering of both directions, on random candidates.

The chain here is made up: forward values v0 (the rows) to vn; place i makes v(i+1) of v(i). Its backward has, for each
op from the last to the first, a leaf (a weight gradient, which nothing waits for) and a step that hands the gradient
on; each reads some forward values. Rules are random spans with random costs; forward ones keep some values inside,
backward ones read others than plain steps do, and recompute some, always or on demand. Some places may be left out, if
nothing reads what they make: rules after them may read what they read, and steps there read no forward value.
"""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.fusion.graph.values import Gathered, grad
from fusedmoe.fusion.language.rule import Step
from fusedmoe.fusion.search.candidates import Candidate
from fusedmoe.fusion.search.choice import Chosen, cheapest

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
        forward.append(
            candidate(start, end, draw(cost), [read], [values[end]], keeps=keeps, inside=inside)
        )  # fmt: skip

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


def cheapest_of(forward, backward, anyway):
    """The steps of both directions and the values to keep."""
    f, b, kept = cheapest(forward, backward, anyway, ())
    assert (f.cost_us, b.cost_us) == (pytest.approx(cost(f.steps)), pytest.approx(cost(b.steps)))
    return f.steps, b.steps, kept


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_it_is_the_cheapest_that_runs(problem):
    forward, backward, anyway, incoming = problem
    f, b, kept = cheapest_of(forward, backward, anyway)
    for steps in (f, b):
        assert [s.candidate.start for s in steps] == [0, *[s.candidate.end for s in steps[:-1]]]
    assert writes(f, kept)
    assert runs(f, {"v0"})
    assert runs(b, {*anyway, *kept, incoming})
    assert cost(f) + cost(b) + KEPT_US * len(kept) == pytest.approx(brute_force(*problem))
