"""From a chain and what it is called with to a plan: candidates, the cheapest covering, programs.

1. `candidates`: every rule at every position; each ends in a status, those that take what they found become candidates.
2. `choice`: the cheapest covering of both directions together.
3. here: the steps of that covering, the glue between them (derived values, gradient sums, tail masks), what is kept.
"""

from __future__ import annotations

import logging
import math
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from fusedmoe.environment import did_you_mean
from fusedmoe.formats import QuantizedSpec
from fusedmoe.fusion import registry
from fusedmoe.fusion.candidates import Costs, DirectionSearch
from fusedmoe.fusion.choice import cheapest, final_attempts, nearest_miss
from fusedmoe.fusion.executable import Environment, Plan, PlannedSpan, with_layouts, with_plain_gradients
from fusedmoe.fusion.graph import NO_BACKWARD
from fusedmoe.fusion.names import NONE
from fusedmoe.fusion.offsets import NAME as OFFSETS
from fusedmoe.fusion.offsets import with_kernels
from fusedmoe.fusion.plain import Plain
from fusedmoe.fusion.program import AnyStep, Fused, Program, all_needs, needed_steps
from fusedmoe.fusion.rule import expect_none
from fusedmoe.log import say_once
from fusedmoe.ops.op import BackwardOp

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from fusedmoe.fusion.candidates import Candidate
    from fusedmoe.fusion.graph import Graph, Place
    from fusedmoe.ops.op import SpecLike

logger = logging.getLogger(__name__)


def make_plan(
    graph: Graph,
    arguments: Mapping[str, SpecLike | None],
    wanted: Collection[str],
    environment: Environment,
    nominal_rows: int | None = None,
    name: str = "",
) -> Plan:
    """Plan a chain.

    Parameters
    ----------
    graph
        The chain, as the recipe has rewritten it.
    arguments
        Spec of each of the graph's arguments (None for an absent parameter).
    wanted
        The arguments that want a gradient; empty for inference.
    environment
        What else the choice depends on.
    nominal_rows
        The number of rows that the choice is made for; by default the next power of two above those that there are.
    name
        What log lines call the chain; by default its layers.
    """
    _warn_of_patterns(environment.disabled)
    specs = graph.infer(arguments)
    rows = specs[graph.arguments[0]]
    assert rows is not None
    of_backward = graph.backward(wanted, specs) if wanted else NO_BACKWARD
    of_forward = graph.chosen(of_backward)
    specs |= of_backward.specs
    specs = with_plain_gradients(specs, of_backward.places)
    incoming, gradients = of_backward.incoming, of_backward.gradients

    # without what pads the rows of each expert: it does not grow with them, and the choice must not depend on how many
    # there are; every covering pads alike
    costs = Costs(specs, graph.parameters, math.prod(rows.shape[:-1]), nominal_rows)
    specs = with_layouts(specs, graph, (*of_forward.places, *of_backward.places))
    context = {
        "device": environment.device,
        "arch": environment.arch,
        "deterministic": environment.deterministic,
        "training": bool(wanted),
        "recipe": environment.recipe,
        "options": environment.options,
        "_specs": specs,
    }
    disabled, asked = environment.disabled, environment.asked
    derived = with_kernels(graph.derived.values(), environment.device, environment.arch, disabled, asked)
    glue = (*derived, *of_forward.weights, *of_forward.glue)
    forward = DirectionSearch("forward", of_forward.places, graph.outputs, glue, costs, context, disabled, asked)
    backward = DirectionSearch(
        "backward", of_backward.places, gradients.values(), of_backward.glue, costs, context, disabled, asked
    )
    glued = {v for step in glue for v in step.gives}
    kept_anyway = {*graph.arguments, *graph.outputs, *glued}
    chosen_forward, chosen_backward, kept = cheapest(forward, backward, kept_anyway)

    elsewhere = {*graph.arguments, *glued, *(v for p in of_forward.places for v in p.step.gives)}
    forward_steps = [_step(graph, forward, c, kept, elsewhere) for c in chosen_forward]
    materialized = {*graph.arguments, *glued, *(v for s in forward_steps for v in s.gives)}
    backward_steps = [_step(graph, backward, c, (), materialized) for c in chosen_backward]
    forward_all, outputs = _tails_zeroed(graph, [*glue, *forward_steps], {v: v for v in graph.outputs})
    backward_all, gradients = _tails_zeroed(graph, [*backward_steps, *of_backward.glue], gradients)

    made_again = {v for step in of_backward.glue for v in step.gives}  # dequantized: the codes take less to keep
    saved = _saved(backward_all, incoming.values(), (kept | kept_anyway) - made_again, materialized)
    if wanted:  # second derivatives compute the op again
        saved = (*saved, *(v for v in graph.random_states if v in materialized and v not in saved))
    results = [(*outputs.values(),), saved]
    program = Program(needed_steps(forward_all, (*outputs.values(), *saved)), tuple(graph.arguments), results)

    needed_by = {v: s.label for s in reversed(backward_steps) for v in all_needs(s)}
    attempts = (
        *final_attempts(forward, chosen_forward, kept, needed_by),
        *final_attempts(backward, chosen_backward, (), {}),
    )
    covered = tuple(
        PlannedSpan(
            line.direction,
            c.start,
            step,
            line.places[c.start : c.end],
            c.step.extra_bytes,
            None if c.rule else nearest_miss([a for a in attempts if a.direction == line.direction], c.start),
        )
        for line, covering, steps in (
            (forward, chosen_forward, forward_steps),
            (backward, chosen_backward, backward_steps),
        )
        for c, step in zip(covering, steps, strict=True)
    )
    plan = Plan(
        graph,
        program,
        tuple(outputs.values()),
        saved,
        tuple(backward_all),
        incoming,
        gradients,
        frozenset(wanted),
        covered,
        of_forward.weights,
        attempts,
        environment,
        rows.dtype,
        {value: spec for value, spec in specs.items() if isinstance(spec, QuantizedSpec)},
    )
    if not asked:
        _log(plan, arguments, name or _layers(graph))
    return plan


def _step(graph: Graph, line: DirectionSearch, c: Candidate, kept: Collection[str], there: Collection[str]) -> AnyStep:
    """Return the runnable step of a candidate, which writes those of its keeps that are kept."""
    places = line.places[c.start : c.end]
    if c.rule is None:
        return places[0].step
    s = c.step
    wanted = [(name, v) for name, v in zip(c.keep_names, s.keeps, strict=True) if v in kept]
    gives = (*s.gives, *(v for _, v in wanted))
    run, bind = s.run, s.bind
    if s.keeps:
        keep = tuple(name for name, _ in wanted)
        run, bind = run and partial(run, keep=keep), bind and partial(bind, keep=keep)
    if run is not None and s.guard is not None:
        run = _guarded(run, s.guard, c.name)
    may_decline = bind is not None or s.guard is not None
    stand_ins = _stand_ins(graph, places, gives, {*there, *s.needs}) if may_decline else ()
    label = " + ".join(p.label for p in places)
    may_give_none = any(isinstance(p.item, BackwardOp) and p.item.may_give_none for p in places)
    return Fused(
        label, c.name, run, bind, s.needs, gives, may_decline, may_give_none, s.zeroes_tail, s.launches, stand_ins
    )


def _guarded(run: Callable[..., Any], guard: Callable[..., object], rule: str) -> Callable[..., Any]:
    def guarded(*tensors: Tensor | None) -> Any:
        if (answer := guard(*tensors)) is not None:
            expect_none(rule, "guard", answer)
        return run(*tensors)

    return guarded


def _saved(
    steps: Sequence[AnyStep], incoming: Collection[str], kept: Collection[str], materialized: Collection[str]
) -> tuple[str, ...]:
    """Return what the forward pass hands to these backward steps: values that none of them gives, those chosen to be
    kept although one gives them (too late for another), and what only stand-ins read, if it is there.
    """
    given = {NONE, *incoming, *(v for s in steps for v in s.gives)}
    return tuple(
        dict.fromkeys(
            v
            for s in steps
            for v in all_needs(s)
            if v not in given or v in kept or (v in materialized and v not in s.needs)
        )
    )


def _stand_ins(
    graph: Graph, places: Sequence[Place], gives: Collection[str], there: Collection[str]
) -> tuple[Plain, ...]:
    """Return the plain steps that give what a fused step gives, recomputing forward values that are not there."""
    own = {v: p.step for p in places for v in p.step.gives}
    ordered: list[Plain] = []

    def make(value: str, *, again: bool = False) -> None:
        step = own.get(value)
        if step is None and (again or value not in there):
            step = graph.producers.get(value)
        if step is None or step in ordered:
            return
        for need in step.needs:
            make(need)
        ordered.append(step)

    for value in gives:
        make(value, again=True)  # what the fused step recomputes, it recomputes because nobody keeps it
    return tuple(ordered)


def _tails_zeroed(
    graph: Graph, steps: Sequence[AnyStep], results: Mapping[str, str]
) -> tuple[list[AnyStep], dict[str, str]]:
    """Add a mask behind each result whose maker does not promise zeros in the rows behind the last expert's."""
    made_by = {v: s for s in steps for v in s.gives}
    steps, renamed = list(steps), {}
    for key, value in results.items():
        maker = made_by.get(value)
        mask = None if maker is not None and maker.zeroes_tail else graph.zero_tail(value, f"zeroed {value}")
        if mask is not None:
            steps.append(mask)
        renamed[key] = value if mask is None else mask.gives[0]
    return steps, renamed


def _warn_of_patterns(disabled: Collection[str]) -> None:
    """Warn of patterns that switch no rule off. Entry points have added their rules by now."""
    if not disabled:
        return
    names = [OFFSETS, *(rule.name for rule in registry.rules())]
    for pattern in disabled:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        families = sorted({f"{name.partition('.')[0]}.*" for name in names})
        hint = did_you_mean(pattern.lower(), [*families, *names])
        message = "FUSEDMOE_DISABLE or fm.disabled: no rule has a name that matches %r, which switches nothing off%s"
        say_once(logger, logging.WARNING, message, pattern, hint)


def _layers(graph: Graph) -> str:
    """``0.GroupedLinear (8 x 64 -> 32), 2.GroupedLinear (8 x 16 -> 64)``; without such layers, all ops."""
    layers = []
    for label, op in graph.nodes:
        features = [getattr(op, size, None) for size in ("in_features", "out_features")]
        if None not in features:
            groups = getattr(op, "num_groups", None)
            many = "" if groups is None else f"{groups} x "
            layers.append(f"{label}.{type(op).__name__} ({many}{features[0]} -> {features[1]})")
    return ", ".join(layers or [f"{label}.{type(op).__name__}" for label, op in graph.nodes])


def _log(plan: Plan, arguments: Mapping[str, SpecLike | None], name: str) -> None:
    missed = dict(plan.missed)
    for label, miss in missed.items():
        say_once(
            logger, logging.WARNING, "%s runs unfused on a device that has a kernel for it: %s", _kind(label), miss
        )
    if not logger.isEnabledFor(logging.INFO):
        return
    data = plan.data(arguments)
    message = "new plan: %s, %s, recipe %s, kept for backward %d bytes for %d rows, of %s"
    logger.info(message, data.device, data.dtype, data.recipe, data.kept_bytes, data.rows, name)
    for i, step in enumerate(data.steps, 1):
        logger.info("  %d. %s %s: %s", i, step.direction, " + ".join(step.ops), step.rule or "plain PyTorch")
    for step in data.unfused:
        for op in step.ops:
            if op not in missed:
                say_once(logger, logging.INFO, "%s runs unfused: %s", _kind(op), step.why)
    for attempt in plan.attempts:
        logger.debug("  %s at %s [%d, %d): %s", attempt.rule, attempt.direction, attempt.start, attempt.end, attempt)


def _kind(label: str) -> str:
    """``fc1.GroupedLinear`` -> ``GroupedLinear``: the same fallback in every layer is one fallback."""
    return label.rpartition(".")[2]
