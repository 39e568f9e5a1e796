"""The cheapest covering of a chain, forward and backward together.

The two directions are linked by what is kept: a backward step names the forward values that it needs, and a fused
forward step can write only some of those inside its span. So: for each set of forward values that some covering of the
backward chain needs, the cheapest such covering; then, for each of those sets, the cheapest covering of the forward
chain that can keep it. The cheapest sum wins. That is exact.

A backward step may use what another one recomputes, also a later one; but then it waits for it, so that nothing may
wait for the step itself. Steps that others wait for get such a value from the forward pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fusedmoe.fusion.candidates import Candidate, DirectionSearch
from fusedmoe.fusion.names import NONE
from fusedmoe.fusion.plan import Attempt, Status

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

Covering = tuple[Candidate, ...]
_Ranked = tuple[float, int, tuple[str, ...], Covering]

_STATUSES = list(Status)  # the best first


def _rank(covering: _Ranked) -> tuple[float, int, tuple[str, ...]]:
    """Cheaper first; then fewer, longer steps; then by name, so that no order of import ever decides."""
    return covering[:3]


def _extended(so_far: _Ranked, candidate: Candidate, extra_us: float = 0.0) -> _Ranked:
    cost, count, names, steps = so_far
    return cost + candidate.cost_us + extra_us, count + 1, (*names, candidate.name or "~"), (*steps, candidate)


_NOTHING: _Ranked = (0.0, 0, (), ())


def _backward_coverings(line: DirectionSearch, kept_anyway: Collection[str]) -> dict[frozenset[str], _Ranked]:
    """Return, for each set of forward values that some covering needs kept, the cheapest such covering."""
    waited_for = {v for c in line.candidates for v in c.step.needs} | {v for g in line.glue for v in g.needs}
    # by the values to keep, those that a later step may still recompute, and those recomputed so far
    best: list[dict[tuple[frozenset[str], ...], _Ranked]] = [{} for _ in range(len(line.places) + 1)]
    best[0][frozenset(), frozenset(), frozenset()] = _NOTHING
    for position in range(len(line.places)):
        for (kept, open_, there), so_far in best[position].items():
            for c in (c for c in line.candidates if c.start == position):
                values = {v for v in c.step.needs if v not in kept_anyway and not v.startswith("grad(") and v != NONE}
                recomputed = frozenset(v for v in c.step.gives if not v.startswith("grad("))
                can_wait = not recomputed and waited_for.isdisjoint(c.step.gives)
                if can_wait:
                    key = kept, open_ | (values - there), there
                else:
                    key = kept | (values - there), open_ - recomputed, there | recomputed
                ranked = _extended(so_far, c)
                if key not in best[c.end] or _rank(ranked) < _rank(best[c.end][key]):
                    best[c.end][key] = ranked
    result: dict[frozenset[str], _Ranked] = {}
    for (kept, open_, _), ranked in best[-1].items():
        kept |= open_
        if kept not in result or _rank(ranked) < _rank(result[kept]):
            result[kept] = ranked
    return result


def _cannot_keep(candidate: Candidate, kept: Collection[str]) -> list[str]:
    return sorted(v for v in kept if v in candidate.inside and v not in candidate.step.keeps)


def _forward_covering(line: DirectionSearch, kept: frozenset[str]) -> _Ranked:
    """Return the cheapest covering that can keep these values. Plain steps can keep everything, so there is one."""
    best: list[_Ranked | None] = [_NOTHING] + [None] * len(line.places)
    for position in range(len(line.places)):
        so_far = best[position]
        assert so_far is not None, "the plain step before ends here"
        for c in line.candidates:
            if c.start != position or _cannot_keep(c, kept):
                continue
            ranked = _extended(so_far, c, sum(us for v, us in c.keep_cost_us.items() if v in kept))
            there = best[c.end]
            if there is None or _rank(ranked) < _rank(there):
                best[c.end] = ranked
    chosen = best[-1]
    assert chosen is not None
    return chosen


def cheapest(
    forward: DirectionSearch, backward: DirectionSearch, kept_anyway: Collection[str]
) -> tuple[Covering, Covering, frozenset[str]]:
    """Return the cheapest coverings of both directions, and the forward values to keep between them.

    ``kept_anyway`` are values that cost nothing to keep: the caller's arguments, the results.
    """
    options = []
    for kept, b in _backward_coverings(backward, kept_anyway).items():
        f = _forward_covering(forward, kept)
        options.append(((f[0] + b[0], f[1] + b[1], (*f[2], *b[2]), tuple(sorted(kept))), f[3], b[3], kept))
    _, chosen_forward, chosen_backward, kept = min(options, key=lambda option: option[0])
    return chosen_forward, chosen_backward, kept


def final_attempts(
    line: DirectionSearch, covering: Covering, kept: Collection[str], kept_for: Mapping[str, str]
) -> list[Attempt]:
    """Return how every rule ended at every position, once the covering is chosen.

    A rule ends at a position in one status: of the ways in which it stands there the best, the longest of those. Each
    longer way is told besides, of its further ops alone: without it, those would be given another rule's reason.

    ``kept`` are the values to keep, ``kept_for`` the backward step that needs each of them.
    """
    attempts = list(line.attempts)
    able = {(c.name, c.start) for c in line.candidates if not _cannot_keep(c, kept)}
    for c in line.candidates:
        if c.rule is None:
            continue
        status, reason, excused = Status.FUSED, "", False
        if c not in covering:
            impossible = _cannot_keep(c, kept)
            if impossible:
                status, excused = Status.CONSTRAINT, (c.name, c.start) in able
                reason = f"cannot keep {', '.join(impossible)}, which {kept_for[impossible[0]]} needs"
            else:
                status = Status.SHADOWED
                others = [o for o in covering if o.start < c.end and c.start < o.end]
                reason = "by " + ", ".join(
                    dict.fromkeys(o.name or line.places[o.start].label + " in plain PyTorch" for o in others)
                )
        span = range(c.start, c.end)
        attempts.append(
            Attempt(c.name, line.direction, c.start, c.end, len(span), span, status, reason, excused=excused)
        )
    ways: dict[tuple[int, str], list[Attempt]] = {}
    for attempt in attempts:
        ways.setdefault((attempt.start, attempt.rule), []).append(attempt)
    return [attempt for key in sorted(ways) for attempt in _best_and_longer(ways[key], line, kept)]


def _best_and_longer(ways: list[Attempt], line: DirectionSearch, kept: Collection[str]) -> list[Attempt]:
    """Return how a rule ended at a position, and how in each longer way in which it stands there, by length."""
    ranked = sorted(ways, key=lambda a: (_STATUSES.index(a.status), -a.end))
    best, longer = ranked[0], {}
    for a in reversed(ranked):
        if a.end > best.end:
            # declined, and it could not have kept this either
            between = (v for p in line.places[best.end - 1 : a.end - 1] for v in p.step.gives)
            excused = best.status in (Status.FUSED, Status.SHADOWED) and any(v in kept for v in between)
            longer[a.end] = replace(a, about=range(best.end, a.end), excused=a.excused or excused)
    return [best, *(longer[end] for end in sorted(longer))]


def nearest_miss(attempts: Iterable[Attempt], position: int) -> Attempt | None:
    """Return the rule that came nearest to taking this place: on this device first, then by how far it got."""
    near = (a for a in attempts if a.start <= position < a.end and (a.matched or a.about))
    stood = [a for a in near if a.status is not Status.FUSED]
    got = {Status.CONSTRAINT: 3, Status.SHADOWED: 2, Status.UNAVAILABLE: 1, Status.NO_MATCH: 0}

    def nearness(a: Attempt) -> tuple[object, ...]:
        # of a rule that runs nowhere here, the lack of a device says more than the lack of a kernel for quantized
        # operands: another rule may have one
        rank = 0.5 if a.no_kernel and not a.on_this_device else got[a.status]
        return a.on_this_device, a.stands_on(position), rank, not a.excused, a.matched, -a.start, a.rule

    return max(stood, key=nearness, default=None)
