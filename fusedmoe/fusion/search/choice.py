"""The cheapest covering of a chain, forward and backward together.

Three facts link the steps of a covering:

- The backward pass reads forward values. A fused forward step can write only some of the values inside its span.
- A step can write some values on demand (`Step.keeps`): those that a fused step can keep or recompute, and the
  quantized forms of a value. Another step may read such a value only if it is written. The same holds for the rows of a
  place that is left out, since other steps read them through their index.
- A dequantized value has a cost of its own, once in each direction.

The search first finds, for each set of forward values that some covering of the backward chain needs, the cheapest
such covering. For each of these sets, it then finds the cheapest covering of the forward chain that can keep the set.
The cheapest sum wins. This search is exact, if the places that may be left out read no recomputed value.

A backward step may use a value that another step recomputes, even a later one. It then waits for that step, so nothing
may wait for it in turn. A step that others wait for gets the value from the forward pass instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fusedmoe.fusion.graph.values import NONE
from fusedmoe.fusion.report.data import Attempt, Exemption, Status
from fusedmoe.fusion.search.candidates import Candidate, DirectionSearch
from fusedmoe.ops.glue import Dequantize

_STATUSES = list(Status)  # the best first


class Chosen(NamedTuple):
    """A candidate of the covering, and those of its `Step.keeps` that it writes."""

    candidate: Candidate
    written: tuple[str, ...] = ()

    @property
    def gives(self) -> tuple[str, ...]:
        """All values that the step writes."""
        return (*self.candidate.step.gives, *self.written)

    @property
    def moves(self) -> tuple[str, ...]:
        """The values whose bytes the step reads or writes."""
        return (*self.candidate.reads, *self._read_to_write, *self.gives)

    @property
    def launches(self) -> int:
        """Kernels launched."""
        return self.candidate.step.launches + len(self._read_to_write)

    @property
    def _read_to_write(self) -> list[str]:
        return [source for v, source in self.candidate.keep_reads.items() if v in self.written]


@dataclass(frozen=True)
class Covering:
    """Some steps in a row, and their cost."""

    cost_us: float = 0.0  # the estimated time
    # the rules' names: ties go to fewer and longer steps, then to the names, so that the order of imports has no effect
    names: tuple[str, ...] = ()
    steps: tuple[Chosen, ...] = ()  # in order of position
    converted: frozenset[str] = frozenset()  # the dequantized values that the steps read

    @property
    def rank(self) -> tuple[float, int, tuple[str, ...]]:
        """The order of coverings, the best first."""
        return self.cost_us, len(self.names), self.names

    def extended(self, chosen: Chosen, search: DirectionSearch) -> Covering:
        """Return this covering with one more step."""
        c = chosen.candidate
        written_us = sum(c.keep_us[v] for v in chosen.written)
        covering = self.reading(c.step.needs, search)
        return replace(
            covering,
            cost_us=covering.cost_us + c.cost_us + written_us,
            names=(*self.names, c.name or ("" if c.skips else "~")),
            steps=(*self.steps, chosen),
        )

    def reading(self, values: Iterable[str], search: DirectionSearch) -> Covering:
        """Return this covering with the cost of those of the values that are dequantized."""
        new = {v for v in values if v in search.conversions} - self.converted
        if not new:
            return self
        us = sum(search.search.costs.step_us((v, search.conversions[v]), Dequantize.launches) for v in new)
        return replace(self, cost_us=self.cost_us + us, converted=self.converted | new)


class _Ways:
    """The ways to cover each position of one direction."""

    def __init__(self, search: DirectionSearch) -> None:
        self.search = search
        self.on_demand = {v for c in search.candidates for v in (c.inside if c.skips else c.step.keeps)}
        # a step that covers several places may not give what other steps read through an index
        through_index = {v for gathered in search.search.gathered.values() for v in gathered}
        self.on_demand |= {v for c in search.candidates for v in c.inside if v in through_index}
        self._needs = {id(c): search.with_sources(v for v in c.step.needs if v != NONE) for c in search.candidates}
        self._results = search.with_sources(search.results)
        self._starting: dict[int, list[Candidate]] = {}
        for c in search.candidates:
            self._starting.setdefault(c.start, []).append(c)

    def needs(self, c: Candidate) -> set[str]:
        """Return the values that a candidate reads, with the source of each dequantized value in its place."""
        return self._needs[id(c)]

    def at(self, position: int, kept: Collection[str] | None = None) -> Iterator[Chosen]:
        """Return every way to cover a position: each candidate with each set of values that it may write on demand.

        ``kept`` are the values that a forward covering must write for the backward pass.
        """
        for c in self._starting.get(position, ()):
            must = [v for v in c.step.keeps if kept is not None and v in kept]
            may = [v for v in c.step.keeps if v not in must and self._is_read_elsewhere(v, c)]
            for count in range(len(may) + 1):
                for some in itertools.combinations(may, count):
                    written = tuple(v for v in c.step.keeps if v in must or v in some)
                    if written or c.step.gives or c.skips:
                        yield Chosen(c, written)
            if not (must or may or c.step.gives or c.skips):
                yield Chosen(c, c.step.keeps[:1])

    def _is_read_elsewhere(self, value: str, c: Candidate) -> bool:
        others = (o for o in self.search.candidates if o.end <= c.start or o.start >= c.end)
        return value in self._results or any(value in self.needs(o) for o in others)


class _Kept(NamedTuple):
    """The state of a search over backward coverings."""

    kept: frozenset[str] = frozenset()  # forward values to keep
    waiting: frozenset[str] = frozenset()  # forward values that are kept unless a later step recomputes them
    there: frozenset[str] = frozenset()  # forward values recomputed so far, and gradients written on demand
    converted: frozenset[str] = frozenset()  # as of `Covering`


def _is_gradient(value: str) -> bool:
    return value.startswith("grad(")


def _backward_coverings(
    search: DirectionSearch, kept_anyway: Collection[str], waits: Collection[str]
) -> dict[frozenset[str], Covering]:
    """Return, for each set of forward values that some covering needs, the cheapest such covering. ``waits`` are the
    values that the glue after the steps reads.
    """
    ways = _Ways(search)
    waited_for = {v for c in search.candidates for v in ways.needs(c)} | {*waits}
    best: list[dict[_Kept, Covering]] = [{} for _ in range(len(search.places) + 1)]
    best[0][_Kept()] = Covering()
    for position in range(len(search.places)):
        for chosen in ways.at(position):
            c, needs = chosen.candidate, ways.needs(chosen.candidate)
            demanded = {v for v in needs if _is_gradient(v) and v in ways.on_demand}
            values = {v for v in needs if not _is_gradient(v) and v not in kept_anyway}
            recomputed = {v for v in chosen.gives if not _is_gradient(v)}
            there = recomputed | ways.on_demand.intersection(chosen.gives)
            can_wait = not recomputed and waited_for.isdisjoint(chosen.gives)
            for state, so_far in best[position].items():
                if not demanded <= state.there:
                    continue
                missing = values - state.there
                covering = so_far.extended(chosen, search)
                after = _Kept(
                    kept=state.kept if can_wait else state.kept | missing,
                    waiting=state.waiting | missing if can_wait else state.waiting - recomputed,
                    there=state.there | there,
                    converted=covering.converted,
                )
                if after not in best[c.end] or covering.rank < best[c.end][after].rank:
                    best[c.end][after] = covering
    result: dict[frozenset[str], Covering] = {}
    results = {v for v in search.with_sources(search.results) if v in ways.on_demand}
    for state, covering in best[-1].items():
        if results <= state.there:
            kept, whole = state.kept | state.waiting, covering.reading(search.results, search)
            if kept not in result or whole.rank < result[kept].rank:
                result[kept] = whole
    return result


def _forward_covering(search: DirectionSearch, kept: frozenset[str]) -> Covering:
    """Return the cheapest covering that writes these values. One exists, since plain steps can write all values."""
    ways = _Ways(search)
    best: list[dict[tuple[frozenset[str], frozenset[str]], Covering]] = [{} for _ in range(len(search.places) + 1)]
    best[0][frozenset(), frozenset()] = Covering()
    for position in range(len(search.places)):
        for chosen in ways.at(position, kept):
            c = chosen.candidate
            if c.cannot_keep(kept):
                continue
            demanded = ways.needs(c) & ways.on_demand
            for (there, _), so_far in best[position].items():
                if demanded <= there:
                    covering = so_far.extended(chosen, search)
                    state = there | ways.on_demand.intersection(chosen.gives), covering.converted
                    if state not in best[c.end] or covering.rank < best[c.end][state].rank:
                        best[c.end][state] = covering
    results = {v for v in search.with_sources(search.results) if v in ways.on_demand}
    whole = [covering.reading(search.results, search) for (there, _), covering in best[-1].items() if results <= there]
    return min(whole, key=lambda covering: covering.rank)


def cheapest(
    forward: DirectionSearch, backward: DirectionSearch, kept_anyway: Collection[str], waits: Collection[str]
) -> tuple[Covering, Covering, frozenset[str]]:
    """Return the cheapest coverings of both directions, and the forward values to keep between them.

    ``kept_anyway``, such as arguments and results, cost nothing to keep. Glue after the backward steps reads ``waits``.
    """
    options = []
    for kept, b in _backward_coverings(backward, kept_anyway, waits).items():
        f = _forward_covering(forward, kept)
        cost_us = f.cost_us + b.cost_us + forward.search.costs.kept_us(kept)
        rank = cost_us, len(f.names) + len(b.names), (*f.names, *b.names), tuple(sorted(kept))
        options.append((rank, f, b, kept))
    _, f, b, kept = min(options, key=lambda option: option[0])
    return f, b, kept


def cheapest_glue(search: DirectionSearch, read: Collection[str]) -> tuple[Chosen, ...]:
    """Return the cheapest candidate for each piece of glue, with the values of ``read`` that it writes on demand."""
    every = [Chosen(c, tuple(v for v in c.step.keeps if v in read)) for c in search.candidates]
    wanted = [{*place.makes}.intersection(read) for place in search.places]  # which not every candidate can write
    ways = [
        [way for way in every if way.candidate.start == position and forms <= {*way.gives}]
        for position, forms in enumerate(wanted)
    ]
    return tuple(min(some, key=lambda way: Covering().extended(way, search).rank) for some in ways)


def final_attempts(
    search: DirectionSearch, covering: Covering, kept: Collection[str], kept_for: Mapping[str, str]
) -> list[Attempt]:
    """Return the result of every rule at every position, for the chosen covering; `Attempt` has the details.

    ``kept`` are the values to keep, and ``kept_for`` has the backward step that needs each of them.
    """
    attempts = list(search.attempts)
    able = {(c.name, c.start) for c in search.candidates if not c.cannot_keep(kept)}
    chosen = [step.candidate for step in covering.steps]
    for c in search.candidates:
        if c.rule is None:
            continue
        status, reason, exemption = Status.FUSED, "", Exemption.NONE
        if c not in chosen:
            impossible = c.cannot_keep(kept)
            if impossible:
                status, exemption = Status.CONSTRAINT, _exempt((c.name, c.start) in able)
                reason = f"cannot keep {', '.join(impossible)}, which {kept_for[impossible[0]]} needs"
            else:
                status = Status.SHADOWED
                others = [o for o in chosen if o.start < c.end and c.start < o.end]
                reason = "by " + ", ".join(dict.fromkeys(_name(o, search) for o in others))
        span = range(c.start, c.end)
        attempts.append(
            Attempt(c.name, search.direction, c.start, c.end, len(span), span, status, reason, exemption=exemption)
        )
    ways: dict[tuple[int, str], list[Attempt]] = {}
    for attempt in attempts:
        ways.setdefault((attempt.start, attempt.rule), []).append(attempt)
    return [attempt for key in sorted(ways) for attempt in _best_and_longer(ways[key], search, kept)]


def _best_and_longer(ways: list[Attempt], search: DirectionSearch, kept: Collection[str]) -> list[Attempt]:
    """Return the result of a rule at a position, then the results of its longer matches there, by length."""
    if len(ways) == 1:
        return ways
    ranked = sorted(ways, key=lambda a: (_STATUSES.index(a.status), -a.end))
    best, longer = ranked[0], {}
    for a in reversed(ranked):
        if a.end > best.end:
            # this longer match declined; otherwise, it could not have kept a value between its ops
            between = (v for p in search.places[best.end - 1 : a.end - 1] for v in p.step.gives)
            fewer = best.status in (Status.FUSED, Status.SHADOWED) and any(v in kept for v in between)
            exemption = a.exemption if a.exemption.value else _exempt(fewer)
            longer[a.end] = replace(a, shared=range(best.end, a.end), exemption=exemption)
    return [best, *(longer[end] for end in sorted(longer))]


def _name(c: Candidate, search: DirectionSearch) -> str:
    """Name a chosen step, in the reason why a rule is SHADOWED."""
    if c.skips and search.places[c.start].again:
        return "the forward pass, which keeps the result"
    if c.skips:
        return "the steps that read its rows through their index"
    return c.name or f"{search.places[c.start].label} in plain PyTorch"


def _exempt(takes_fewer: bool) -> Exemption:
    return Exemption.KEEPS if takes_fewer else Exemption.NONE


def nearest_miss(attempts: Iterable[Attempt], position: int) -> Attempt | None:
    """Return the rule that came nearest to covering this place: rules for this device come first."""
    near = (a for a in attempts if a.start <= position < a.end and (a.matched or a.shared))
    misses = [a for a in near if a.status is not Status.FUSED]
    got = {Status.CONSTRAINT: 3, Status.SHADOWED: 2, Status.UNAVAILABLE: 1, Status.NO_MATCH: 0}

    def nearness(a: Attempt) -> tuple[object, ...]:
        # an UNAVAILABLE rule says more than one that takes no quantized operands on any device
        rank = 0.5 if a.exemption.is_of_formats and not a.on_this_device else got[a.status]
        # the reasons of these name no remedy
        remedy = a.exemption is not Exemption.UNQUANTIZED, a.cause != "device"
        return a.on_this_device, position in a.shared, rank, not a.exemption.value, *remedy, a.matched, -a.start, a.rule

    return max(misses, key=nearness, default=None)
