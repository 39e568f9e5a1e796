"""The cheapest covering of a chain, forward and backward together.

Three facts link the steps of a covering:

- The backward pass reads forward values. A fused forward step can write only some of the values inside its span.
- A step can write some values on demand (`Step.keeps`): those that a fused step can keep or recompute, and the
  quantized forms of a value. Another step may read such a value only if it is written.
- A dequantized value has a cost of its own, once in each direction.

So: for each set of forward values that some covering of the backward chain needs, the cheapest such covering; then, for
each of these sets, the cheapest covering of the forward chain that can keep it. The cheapest sum wins. That is exact.

A backward step may use a value that another step recomputes, also a later one. Then it waits for that step, so nothing
may wait for the step itself. Steps that others wait for get such a value from the forward pass.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from fusedmoe.fusion.candidates import Candidate, DirectionSearch
from fusedmoe.fusion.plan import Attempt, Exemption, Status
from fusedmoe.fusion.values import NONE
from fusedmoe.ops.glue import Dequantize

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

_STATUSES = list(Status)  # the best first


class Chosen(NamedTuple):
    """A candidate of the covering, and those of its `Step.keeps` that it writes."""

    candidate: Candidate
    written: tuple[str, ...] = ()

    @property
    def gives(self) -> tuple[str, ...]:
        """All values that the step writes."""
        return (*self.candidate.step.gives, *self.written)


@dataclass(frozen=True)
class Covering:
    """Some steps in a row, and their cost."""

    cost_us: float = 0.0  # the estimated time
    # the rules' names: among equally cheap coverings, fewer and longer steps win, then the names, so that no order of
    # import decides
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
            names=(*self.names, c.name or "~"),
            steps=(*self.steps, chosen),
        )

    def reading(self, values: Iterable[str], search: DirectionSearch) -> Covering:
        """Return this covering with the dequantization of those of the values that are dequantized ones."""
        new = {v for v in values if v in search.conversions} - self.converted
        if not new:
            return self
        us = sum(search.search.costs.step_us((v, search.conversions[v]), Dequantize.launches) for v in new)
        return replace(self, cost_us=self.cost_us + us, converted=self.converted | new)


class _Search:
    """Common parts of both directions."""

    def __init__(self, line: DirectionSearch) -> None:
        self.line = line
        self.on_demand = {v for c in line.candidates for v in c.step.keeps}
        self._needs = {id(c): line.with_sources(v for v in c.step.needs if v != NONE) for c in line.candidates}
        self._results = line.with_sources(line.results)
        self._at: dict[int, list[Candidate]] = {}
        for c in line.candidates:
            self._at.setdefault(c.start, []).append(c)

    def needs(self, c: Candidate) -> set[str]:
        """Return the values that a candidate reads, the sources of dequantized ones in place of the latter."""
        return self._needs[id(c)]

    def ways(self, position: int, kept: Collection[str] | None = None) -> Iterator[Chosen]:
        """Return every way to cover a position: each candidate with each set of values that it may write on demand.

        ``kept`` are the values that a forward covering has to write for the backward pass.
        """
        for c in self._at.get(position, ()):
            must = [v for v in c.step.keeps if kept is not None and v in kept]
            may = [v for v in c.step.keeps if v not in must and self._is_read_elsewhere(v, c)]
            for count in range(len(may) + 1):
                for some in itertools.combinations(may, count):
                    written = tuple(v for v in c.step.keeps if v in must or v in some)
                    if written or c.step.gives:
                        yield Chosen(c, written)
            if not (must or may or c.step.gives):
                yield Chosen(c, c.step.keeps[:1])

    def _is_read_elsewhere(self, value: str, c: Candidate) -> bool:
        others = (o for o in self.line.candidates if o.end <= c.start or o.start >= c.end)
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
    line: DirectionSearch, kept_anyway: Collection[str], waits: Collection[str]
) -> dict[frozenset[str], Covering]:
    """Return, for each set of forward values that some covering needs kept, the cheapest such covering. ``waits`` are
    the values that glue after the steps waits for.
    """
    search = _Search(line)
    waited_for = {v for c in line.candidates for v in search.needs(c)} | {*waits}
    best: list[dict[_Kept, Covering]] = [{} for _ in range(len(line.places) + 1)]
    best[0][_Kept()] = Covering()
    for position in range(len(line.places)):
        for chosen in search.ways(position):
            c, needs = chosen.candidate, search.needs(chosen.candidate)
            demanded = {v for v in needs if _is_gradient(v) and v in search.on_demand}
            values = {v for v in needs if not _is_gradient(v) and v not in kept_anyway}
            recomputed = {v for v in chosen.gives if not _is_gradient(v)}
            there = recomputed | search.on_demand.intersection(chosen.gives)
            can_wait = not recomputed and waited_for.isdisjoint(chosen.gives)
            for state, so_far in best[position].items():
                if not demanded <= state.there:
                    continue
                missing = values - state.there
                covering = so_far.extended(chosen, line)
                after = _Kept(
                    kept=state.kept if can_wait else state.kept | missing,
                    waiting=state.waiting | missing if can_wait else state.waiting - recomputed,
                    there=state.there | there,
                    converted=covering.converted,
                )
                if after not in best[c.end] or covering.rank < best[c.end][after].rank:
                    best[c.end][after] = covering
    result: dict[frozenset[str], Covering] = {}
    results = {v for v in line.with_sources(line.results) if v in search.on_demand}
    for state, covering in best[-1].items():
        if results <= state.there:
            kept, whole = state.kept | state.waiting, covering.reading(line.results, line)
            if kept not in result or whole.rank < result[kept].rank:
                result[kept] = whole
    return result


def _forward_covering(line: DirectionSearch, kept: frozenset[str]) -> Covering:
    """Return the cheapest covering that writes these values. Plain steps can write all of them, so there is one."""
    search = _Search(line)
    best: list[dict[tuple[frozenset[str], frozenset[str]], Covering]] = [{} for _ in range(len(line.places) + 1)]
    best[0][frozenset(), frozenset()] = Covering()
    for position in range(len(line.places)):
        for chosen in search.ways(position, kept):
            c = chosen.candidate
            if c.cannot_keep(kept):
                continue
            demanded = search.needs(c) & search.on_demand
            for (there, _), so_far in best[position].items():
                if demanded <= there:
                    covering = so_far.extended(chosen, line)
                    state = there | search.on_demand.intersection(chosen.gives), covering.converted
                    if state not in best[c.end] or covering.rank < best[c.end][state].rank:
                        best[c.end][state] = covering
    results = {v for v in line.with_sources(line.results) if v in search.on_demand}
    whole = [covering.reading(line.results, line) for (there, _), covering in best[-1].items() if results <= there]
    return min(whole, key=lambda covering: covering.rank)


def cheapest(
    forward: DirectionSearch, backward: DirectionSearch, kept_anyway: Collection[str], waits: Collection[str]
) -> tuple[Covering, Covering, frozenset[str]]:
    """Return the cheapest coverings of both directions, and the forward values to keep between them.

    ``kept_anyway`` cost nothing to keep: arguments and results. Glue after the backward steps waits for ``waits``.
    """
    options = []
    for kept, b in _backward_coverings(backward, kept_anyway, waits).items():
        f = _forward_covering(forward, kept)
        cost_us = f.cost_us + b.cost_us + forward.search.costs.kept_us(kept)
        rank = cost_us, len(f.names) + len(b.names), (*f.names, *b.names), tuple(sorted(kept))
        options.append((rank, f, b, kept))
    _, f, b, kept = min(options, key=lambda option: option[0])
    return f, b, kept


def cheapest_glue(line: DirectionSearch, read: Collection[str]) -> tuple[Chosen, ...]:
    """Return the cheapest candidate for each piece of glue, which writes on demand the values that are read."""
    every = [Chosen(c, tuple(v for v in c.step.keeps if v in read)) for c in line.candidates]
    ways = [[way for way in every if way.candidate.start == position] for position in range(len(line.places))]
    return tuple(min(some, key=lambda way: Covering().extended(way, line).rank) for some in ways)


def final_attempts(
    line: DirectionSearch, covering: Covering, kept: Collection[str], kept_for: Mapping[str, str]
) -> list[Attempt]:
    """Return the result of every rule at every position, once the covering is chosen.

    A rule ends at a position in one status: of the ways in which its pattern stands there the best, the longest of
    those. Each longer way has an attempt of its own, about its further ops alone.

    ``kept`` are the values to keep, ``kept_for`` the backward step that needs each of them.
    """
    attempts = list(line.attempts)
    able = {(c.name, c.start) for c in line.candidates if not c.cannot_keep(kept)}
    chosen = [step.candidate for step in covering.steps]
    for c in line.candidates:
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
                reason = "by " + ", ".join(
                    dict.fromkeys(o.name or line.places[o.start].label + " in plain PyTorch" for o in others)
                )
        span = range(c.start, c.end)
        attempts.append(
            Attempt(c.name, line.direction, c.start, c.end, len(span), span, status, reason, exemption=exemption)
        )
    ways: dict[tuple[int, str], list[Attempt]] = {}
    for attempt in attempts:
        ways.setdefault((attempt.start, attempt.rule), []).append(attempt)
    return [attempt for key in sorted(ways) for attempt in _best_and_longer(ways[key], line, kept)]


def _best_and_longer(ways: list[Attempt], line: DirectionSearch, kept: Collection[str]) -> list[Attempt]:
    """Return the result of a rule at a position, and that of each longer way in which it stands there, by length."""
    ranked = sorted(ways, key=lambda a: (_STATUSES.index(a.status), -a.end))
    best, longer = ranked[0], {}
    for a in reversed(ranked):
        if a.end > best.end:
            # it declined, and it could not have kept a value between the ops either
            between = (v for p in line.places[best.end - 1 : a.end - 1] for v in p.step.gives)
            fewer = best.status in (Status.FUSED, Status.SHADOWED) and any(v in kept for v in between)
            exemption = a.exemption if a.exemption.value else _exempt(fewer)
            longer[a.end] = replace(a, shared=range(best.end, a.end), exemption=exemption)
    return [best, *(longer[end] for end in sorted(longer))]


def _exempt(takes_fewer: bool) -> Exemption:
    return Exemption.KEEPS if takes_fewer else Exemption.NONE


def nearest_miss(attempts: Iterable[Attempt], position: int) -> Attempt | None:
    """Return the rule that came nearest to taking this place: on this device first, then by how far it got."""
    near = (a for a in attempts if a.start <= position < a.end and (a.matched or a.shared))
    stood = [a for a in near if a.status is not Status.FUSED]
    got = {Status.CONSTRAINT: 3, Status.SHADOWED: 2, Status.UNAVAILABLE: 1, Status.NO_MATCH: 0}

    def nearness(a: Attempt) -> tuple[object, ...]:
        # if a rule is unavailable here, that says more than that it takes no quantized operands: another rule may
        rank = 0.5 if a.exemption is Exemption.QUANTIZED and not a.on_this_device else got[a.status]
        return a.on_this_device, position in a.shared, rank, not a.exemption.value, a.matched, -a.start, a.rule

    return max(stood, key=nearness, default=None)
