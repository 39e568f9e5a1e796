"""Makes a plan of a chain for one kind of arguments.

1. `candidates`: the candidates for each position, and a status for every rule at every position.
2. `choice`: the cheapest covering of both directions together.
3. This module: the steps of that covering, the glue between them, and the values kept for the backward pass.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from fusedmoe.base.environment import did_you_mean
from fusedmoe.base.log import say_once
from fusedmoe.fusion.graph.backward import Backward, backward_chain
from fusedmoe.fusion.graph.forward import Graph, dequantize
from fusedmoe.fusion.graph.places import Place, packing, training_place, with_forms
from fusedmoe.fusion.graph.steps import AnyStep, Fused, Plain
from fusedmoe.fusion.graph.values import NONE, Gathered, by_rows, dequantized
from fusedmoe.fusion.language import registry
from fusedmoe.fusion.language.rule import Bind, Direction, FusionRule, PlanContext, RuleError
from fusedmoe.fusion.program.order import Pair, needed_steps, pairs_of
from fusedmoe.fusion.program.plan import Environment, Plan, PlannedSpan
from fusedmoe.fusion.program.source import Program
from fusedmoe.fusion.report.data import Attempt, Status
from fusedmoe.fusion.report.describe import describe
from fusedmoe.fusion.search.candidates import Costs, DirectionSearch, Search
from fusedmoe.fusion.search.choice import Chosen, Covering, cheapest, cheapest_glue, final_attempts, nearest_miss
from fusedmoe.ops.glue import Glue, StoredWeight
from fusedmoe.ops.op import BackwardOp, SpecLike

logger = logging.getLogger(__name__)


def make_plan(
    graph: Graph,
    arguments: Mapping[str, SpecLike | None],
    wanted: Collection[str],
    environment: Environment,
    nominal_rows: int | None = None,
    name: str = "",
    *,
    keep_weights: bool = True,
) -> Plan:
    """Plan a chain that the recipe has rewritten.

    - ``graph``, ``arguments``: the chain, and the spec of each of its arguments (None for an absent parameter).
    - ``wanted``: the arguments that want a gradient; empty for inference.
    - ``environment``: everything else that the choice depends on.
    - ``nominal_rows``: the number of rows that costs are for; by default the next power of two above the actual number.
    - ``name``: the name of the chain in log lines; by default its layers.
    - ``keep_weights``: whether the backward pass gets the quantized weights of the forward pass. If not, it quantizes
      them again.
    """
    _warn_of_patterns(environment.disabled)
    plan = _Planner(graph, arguments, wanted, environment, nominal_rows, keep_weights).plan()
    if not environment.asked:
        _log(plan, arguments, name or _layers(graph))
    return plan


class _Direction(NamedTuple):
    """The steps of one direction of a plan."""

    spans: list[PlannedSpan]  # the steps that cover ops
    glue: list[PlannedSpan]
    steps: list[AnyStep]  # all of them, in the preferred order
    results: Mapping[str, str]  # the names of the results, after the tails are zeroed


class _Planner:
    """Makes one plan."""

    def __init__(
        self,
        graph: Graph,
        arguments: Mapping[str, SpecLike | None],
        wanted: Collection[str],
        environment: Environment,
        nominal_rows: int | None,
        keep_weights: bool,
    ) -> None:
        self._graph, self._wanted, self._environment = graph, wanted, environment
        self._keep_weights, self._training = keep_weights, bool(wanted)
        specs = graph.infer(arguments)
        rows = specs[graph.arguments[0]]
        assert rows is not None
        self._dtype = rows.dtype
        self._of_backward: Backward = backward_chain(graph, wanted, specs)
        self._places = tuple(map(training_place, graph.forward)) if wanted else graph.forward
        specs |= self._of_backward.specs
        self._of_weights = {v for place in graph.weights.values() for v in place.makes}
        self._kept_anyway = {*graph.arguments, *graph.outputs, *graph.derived, *self._of_weights}
        fixed = {*graph.parameters, *self._of_weights}
        summed = _values(place.step.needs for place in self._of_backward.sums)  # these are read in order
        gathered = {v: g for p in (*self._places, *self._of_backward.places) for v, g in p.gathers.items()}
        self._gathered = {v: g for v, g in gathered.items() if v not in summed}
        self._conversions = {dequantized(v): v for v in self._of_backward.forms if v == by_rows(v)}
        backward = (*self._of_backward.places, *map(dequantize, self._conversions.values()))
        self._producers = graph.producers | {v: place.step for place in backward for v in place.step.gives}
        packs = (*self._places, *self._of_backward.places, *graph.weights.values())
        self._producers |= {v: packing(place, v, self._training) for place in packs for v in place.packs}
        self._search = Search(
            costs=Costs(specs, fixed, math.prod(rows.shape[:-1]), nominal_rows),
            context={
                "device": environment.device,
                "arch": environment.arch,
                "deterministic": environment.deterministic,
                "training": self._training,
                "recipe": environment.recipe,
                "options": environment.options,
            },
            specs=specs,
            disabled=environment.disabled,
            estimated=environment.estimated,
            assume_installed=environment.asked,
            gathered=self._gathered,
            derived=graph.derived,
        )

    def plan(self) -> Plan:
        graph, of_backward = self._graph, self._of_backward
        forward, backward = self._searches()
        sums_read = _values(place.step.needs for place in of_backward.sums)
        chosen_forward, chosen_backward, kept = cheapest(forward, backward, self._kept_anyway, sums_read)
        self._zero_tails = self._read_with_tail((*chosen_forward.steps, *chosen_backward.steps))
        given = _values(chosen.gives for chosen in chosen_forward.steps)
        derived = [place for value, place in graph.derived.items() if value not in given]
        glue = self._glue("forward", [*derived, *_dequantizations(forward, chosen_forward)])
        glue_backward = self._glue("backward", [*of_backward.sums, *_dequantizations(backward, chosen_backward)])
        read = _read(chosen_forward, glue)
        read_backward = _read(chosen_backward, glue_backward)
        stored = [place for place in graph.weights.values() if isinstance(place.item, StoredWeight)]
        weights = self._glue("forward", [p for p in graph.weights.values() if p not in stored], read | read_backward)
        weights += self._glue("forward", _reading(stored, read), read)
        # these take as much memory as the parameters: a backward pass makes each right before the step that reads it
        weights_backward = self._glue("backward", _reading(reversed(stored), read_backward), read_backward)

        results = {v: v for v in graph.outputs}
        made = self._made(forward, chosen_forward, [*glue, *weights], [], results, graph.arguments)
        exist = {*graph.arguments, *_values(s.gives for s in made.steps)}
        there = exist.union(of_backward.incoming.values())
        glue_backward += weights_backward
        made_backward = self._made(backward, chosen_backward, [], glue_backward, of_backward.gradients, there)
        backward_steps = made_backward.steps
        if not self._keep_weights:
            read = _values(s.all_needs for s in backward_steps)
            backward_steps = [*(s for s in _steps(weights) if not read.isdisjoint(s.gives)), *backward_steps]
            exist -= self._of_weights
        # a dequantized value is computed again: its codes take less memory
        keepable = (kept | self._kept_anyway) - _values(s.gives for s in _steps(glue_backward))
        saved = self._saved(backward_steps, keepable, exist)

        outputs = tuple(made.results.values())
        forms = {**graph.forms, **of_backward.forms}
        steps = needed_steps(made.steps, (*outputs, *saved))
        program = Program(steps, graph.arguments, [outputs, saved], forms)
        run = set(map(id, (*program.steps, *backward_steps)))
        written = _values(s.gives for s in (*program.steps, *backward_steps))
        needed_by = {v: s.label for s in reversed(_steps(made_backward.spans)) for v in s.all_needs}
        gradients = [*made_backward.results.values()]
        given = {NONE, *saved, *of_backward.incoming.values()}
        released = lambda v: 0 if v in self._kept_anyway else self._search.costs.nbytes(v)  # noqa: E731
        pairs: list[Pair] = []
        if not self._environment.deterministic:  # torch then fills new tensors: launches between the steps of a pair
            pairs = pairs_of(needed_steps(backward_steps, gradients, given), given, gradients, released)
        attempts = [
            *final_attempts(forward, chosen_forward, kept, needed_by),
            *final_attempts(backward, chosen_backward, (), {}),
        ]
        return Plan(
            graph=graph,
            program=program,
            outputs=outputs,
            saved=saved,
            backward_steps=tuple(backward_steps),
            pairs=tuple(pairs),
            of_backward=of_backward._replace(gradients=made_backward.results),
            wanted=frozenset(self._wanted),
            spans=tuple(_with_nearest_miss([*made.spans, *made_backward.spans], attempts)),
            glue=tuple(span for span in (*made.glue, *made_backward.glue) if id(span.step) in run),
            attempts=tuple(attempts),
            gathered={v: g for v, g in self._gathered.items() if v not in written},
            environment=self._environment,
            dtype=self._dtype,
        )

    def _searches(self) -> tuple[DirectionSearch, DirectionSearch]:
        """Return the candidates of both directions."""
        graph, of_backward, search = self._graph, self._of_backward, self._search
        values = {dequantized(v): v for v in graph.quantizers}
        wanted = of_backward.gradients.values()
        return (
            DirectionSearch("forward", self._places, graph.outputs, values, search),
            DirectionSearch("backward", of_backward.places, wanted, values | self._conversions, search),
        )

    def _made(
        self,
        search: DirectionSearch,
        covering: Covering,
        before: list[PlannedSpan],
        after: list[PlannedSpan],
        results: Mapping[str, str],
        exist: Collection[str],
    ) -> _Direction:
        """Return the steps of a covering and its glue; the values that ``exist`` were made before."""
        there = {*exist, *_values(s.gives for s in _steps(before, after)), *_values(c.gives for c in covering.steps)}
        spans = [self._span(search, chosen, there) for chosen in covering.steps if not chosen.candidate.skips]
        steps = _steps(before, spans, after)
        masks, renamed = self._masks(search.direction, steps, results)
        return _Direction(spans, [*before, *masks, *after], [*steps, *_steps(masks)], renamed)

    def _span(self, search: DirectionSearch, chosen: Chosen, there: Collection[str]) -> PlannedSpan:
        c = chosen.candidate
        places = search.places[c.start : c.end]
        step, extra_bytes = self._step(search, chosen, there), c.step.extra_bytes
        moves = (*step.needs, *step.gives) if c.rule is None else chosen.moves
        return PlannedSpan(search.direction, c.start, step, places, moves, extra_bytes)

    def _glue(self, direction: Direction, places: Sequence[Place], read: Collection[str] = ()) -> list[PlannedSpan]:
        """Return the steps of glue, each by the cheapest rule or in plain PyTorch; ``read``: forms that are read."""
        if not places:
            return []
        search = DirectionSearch(direction, places, (), {}, self._search)
        spans = [self._span(search, chosen, chosen.candidate.step.needs) for chosen in cheapest_glue(search, read)]
        return _with_nearest_miss(spans, search.attempts)

    def _step(self, search: DirectionSearch, chosen: Chosen, there: Collection[str]) -> AnyStep:
        """Return the runnable step of a candidate; its fallback can read the values in ``there``."""
        c = chosen.candidate
        places = search.places[c.start : c.end]
        if c.rule is None:
            (place,) = places
            return with_forms(place, chosen.written, self._training)
        keep = tuple(name for name, v in zip(c.keep_names, c.step.keeps, strict=True) if v in chosen.written)
        assert c.ctx is not None
        glue = any(isinstance(place.item, Glue) for place in places)
        zero_tail = glue or not self._zero_tails.isdisjoint(chosen.gives)
        ctx = replace(c.ctx, options=replace(c.ctx.options, zero_tail=zero_tail))
        where = search.where(c.rule, c.start, c.end)
        return Fused(
            label=" + ".join(p.label for p in places),
            rule=c.name,
            binder=_binder(c.rule, ctx, keep, where),
            needs=c.step.needs,
            gives=chosen.gives,
            may_give_none=any(isinstance(p.item, BackwardOp) and p.item.may_give_none for p in places),
            zeroes_tail=c.step.zeroes_tail,
            launches=chosen.launches,
            light_us=c.step.light_us,
            carries_us=c.step.carries_us,
            multiplies_codes=c.rule.multiplies_codes,
            apart=c.rule.apart,
            fallback=self._fallback(places, chosen.gives, {*there, *c.step.needs}, c.step.needs),
        )

    def _fallback(
        self, places: Sequence[Place], gives: Collection[str], there: Collection[str], needs: Collection[str]
    ) -> tuple[Plain, ...]:
        """Return plain steps that give the values of a fused step, and that make the values they read that are not
        in ``there``. Rows that the fused step reads through their index are not kept for them either.
        """
        own = {v: self._whole(p) for p in places for v in p.step.gives}
        own |= {v: packing(p, v, self._training) for p in places for v in p.packs}
        gathers = {v: _gather(v, g) for v, g in self._gathered.items() if v not in own and {*g} <= {*there}}
        own |= {v: step for v, step in gathers.items() if {*step.needs} <= {*needs}}
        ordered: list[Plain] = []
        for value in gives:  # again: a value that the fused step recomputes is not kept
            self._add_maker(value, own, gathers, there, ordered, again=True)
        return tuple(ordered)

    def _add_maker(
        self,
        value: str,
        own: Mapping[str, Plain],
        gathers: Mapping[str, Plain],
        there: Collection[str],
        ordered: list[Plain],
        *,
        again: bool = False,
    ) -> None:
        """Add the step that makes a value, after the steps that it needs; none for a value in ``there``, unless the
        step is one of ``own`` or ``again``.
        """
        step = own.get(value)
        if step is None and (again or value not in there):
            step = gathers.get(value, self._producers.get(value))
        if step is None or step in ordered:
            return
        for need in step.needs:
            self._add_maker(need, own, gathers, there, ordered)
        ordered.append(step)

    def _whole(self, place: Place) -> Plain:
        """Return a plain step with every form that its item can give."""
        return place.step if place.item.quantizes is None else with_forms(place, place.step.gives, self._training)

    def _read_with_tail(self, chosen: Sequence[Chosen]) -> frozenset[str]:
        """Return the values whose rows after the last expert's must be zeros: results of the chain, values that a step
        reads with these rows, and those from which such a value is computed row by row.
        """
        graph, of_backward = self._graph, self._of_backward
        places = (*self._places, *of_backward.places, *of_backward.sums)
        left = [*graph.outputs, *of_backward.gradients.values()]
        left += [v for place in places if place.item.reads_tail for v in place.step.needs]
        left += [v for c in chosen if (rule := c.candidate.rule) and rule.reads_tail for v in c.candidate.step.needs]
        made = self._producers | {v: place.step for place in of_backward.sums for v in place.step.gives}
        codes = {dequantized(v): v for v in (*graph.quantizers, *of_backward.forms)}
        found: set[str] = set()
        while left:
            value = left.pop()
            if value in codes:
                left.append(codes[value])
            elif value not in found and graph.tail_offsets(value) is not None:
                found.add(value)
                step = made.get(value)
                left += step.needs if step is not None and not step.zeroes_tail else ()
        return frozenset(found)

    def _masks(
        self, direction: Direction, steps: Sequence[AnyStep], results: Mapping[str, str]
    ) -> tuple[list[PlannedSpan], dict[str, str]]:
        """Return the glue that zeroes the tail of each result whose step does not, and the results' new names."""
        zeroed = {v for s in steps if s.zeroes_tail for v in s.gives}
        masks, renamed = [], {}
        for key, value in results.items():
            mask = None if value in zeroed else self._graph.zero_tail(value, f"zeroed {value}")
            if mask is not None:
                masks.append(mask)
            renamed[key] = value if mask is None else mask.step.gives[0]
        return self._glue(direction, masks), renamed

    def _saved(self, steps: Sequence[AnyStep], kept: Collection[str], materialized: Collection[str]) -> tuple[str, ...]:
        """Return the values that the forward pass hands to these backward steps.

        These are: values that no backward step gives; values chosen to be kept although a later step gives them; values
        that only fallbacks read, if they exist; and the offsets of quantized values. Generator states are saved for
        second derivatives, which recompute ops.
        """
        graph = self._graph
        given = {NONE, *self._of_backward.incoming.values(), *_values(s.gives for s in steps)}
        saved = dict.fromkeys(
            v
            for s in steps
            for v in s.all_needs
            if v not in given or v in kept or (v in materialized and v not in s.needs)
        )
        if self._training:
            saved |= dict.fromkeys(v for v in graph.random_states if v in materialized)
        offsets = [graph.forms[v].offsets for v in saved if v in graph.forms]
        return (*saved, *dict.fromkeys(v for v in offsets if v != NONE and v not in saved))


def _binder(rule: FusionRule, ctx: PlanContext, keep: tuple[str, ...], where: str) -> Callable[[int], Bind]:
    """Return the function that builds a chosen step, for its `PlanContext.beside_sms`. It is built for 0 at once."""

    def build(beside_sms: int) -> Bind:
        bind: object = rule.build(replace(ctx, beside_sms=beside_sms), keep)
        if not callable(bind):
            raise RuleError(f"{where}: build() returned {bind!r}: expected a function of the tensors of needs")
        return bind

    alone = build(0)
    return lambda beside_sms: build(beside_sms) if beside_sms else alone


def _gather(rows: str, gathered: Gathered) -> Plain:
    """Return the plain step that makes rows of another value."""
    return Plain(label=f"gather {rows}", run=operator.getitem, needs=gathered, gives=(rows,), zeroes_tail=False)


def _values(groups: Iterable[Iterable[str]]) -> set[str]:
    return {v for group in groups for v in group}


def _steps(*groups: Iterable[PlannedSpan]) -> list[AnyStep]:
    return [span.step for group in groups for span in group]


def _read(covering: Covering, glue: Iterable[PlannedSpan]) -> set[str]:
    """Return the values that a covering and its glue read."""
    return _values(s.needs for s in (*(chosen.candidate.step for chosen in covering.steps), *_steps(glue)))


def _reading(places: Iterable[Place], read: Collection[str]) -> list[Place]:
    """Return the places that give a value that is read."""
    return [place for place in places if any(v in read for v in place.makes)]


def _dequantizations(search: DirectionSearch, covering: Covering) -> list[Place]:
    """Return the glue that dequantizes values for a covering."""
    return [dequantize(v) for v in sorted(search.with_sources(covering.converted))]


def _with_nearest_miss(spans: Iterable[PlannedSpan], attempts: Sequence[Attempt]) -> list[PlannedSpan]:
    """Return the spans, each plain step with its nearest miss, and each step apart with that of the longer rules."""
    some = [a for a in attempts if a.matched or a.shared]  # the others are near to no op

    def miss(span: PlannedSpan) -> Attempt | None:
        near = [a for a in some if a.direction == span.direction]
        if isinstance(span.step, Fused):
            end = span.position + len(span.places)
            longer = [a for a in near if a.start < span.position or a.end > end]
            declined = [a for a in longer if a.status is Status.CONSTRAINT and a.on_this_device]
            near = [a for a in declined if span.step.apart and span.position in a.shared]
        return nearest_miss(near, span.position)

    return [replace(span, nearest_miss=miss(span)) for span in spans]


def _warn_of_patterns(disabled: Collection[str]) -> None:
    """Warn about patterns that match no rule."""
    if not disabled:
        return
    names = [rule.name for rule in registry.rules()]
    for pattern in disabled:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        families = sorted({f"{name.partition('.')[0]}.*" for name in names})
        hint = did_you_mean(pattern.lower(), [*families, *names])
        message = "FUSEDMOE_DISABLE or fm.disabled: no rule has a name that matches %r, so it switches nothing off%s"
        say_once(logger, logging.WARNING, message, pattern, hint)


def _layers(graph: Graph) -> str:
    """``0.GroupedLinear (8 x 64 -> 32), 2.GroupedLinear (8 x 16 -> 64)``; all ops if no op has features."""
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
    data = describe(plan, arguments)
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
    """``fc1.GroupedLinear`` -> ``GroupedLinear``: a fallback that several layers share is logged once."""
    return label.rpartition(".")[2]
