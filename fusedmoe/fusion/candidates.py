"""Every rule at every position of a chain: what it would cost where it takes what it finds, and why it declines where
it does not.

Cost is time by a coarse model: bytes moved over a memory bandwidth, plus launches. Rows count as the next power of two,
which is part of the plan's key: neither the exact number of rows nor what was planned before changes a choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fusedmoe.formats import QuantizedSpec
from fusedmoe.fusion import registry
from fusedmoe.fusion.matcher import Mismatch, match
from fusedmoe.fusion.names import NONE, primal
from fusedmoe.fusion.plan import Attempt, Status
from fusedmoe.fusion.rule import Declined, FusionRule, PlanContext, RuleError, Step, expect_none
from fusedmoe.ops.op import SpecLike, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from fusedmoe.fusion.graph import Place
    from fusedmoe.fusion.plain import Plain
    from fusedmoe.fusion.registry import Unavailable
    from fusedmoe.fusion.rule import Direction

# an H100's, rounded: only their ratio matters, and it only has to rank coverings of the same chain
_BYTES_PER_US = 3.0e6
_US_PER_LAUNCH = 3.0


@dataclass(frozen=True)
class Candidate:
    """A covering of the places [start, end): a rule's step, or one plain step."""

    start: int
    end: int
    rule: type[FusionRule] | None
    step: Step  # values by the chain's names, but for `keep_names`
    cost_us: float
    keep_names: tuple[str, ...] = ()  # step.keeps as the rule calls them
    keep_cost_us: Mapping[str, float] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()  # values made and used up within the span, unless kept

    @property
    def name(self) -> str:
        return self.rule.name if self.rule is not None else ""


class Costs:
    """The cost model: bytes and launches as microseconds, the rows scaled to a number, or to the next power of two."""

    def __init__(
        self,
        specs: Mapping[str, SpecLike | None],
        parameters: Collection[str],
        rows: int,
        nominal_rows: int | None = None,
    ) -> None:
        self._specs, self._parameters = specs, parameters
        self._scale = (nominal_rows or 1 << rows.bit_length()) / rows if rows else 1.0

    def nbytes(self, value: str) -> int:
        spec = self._specs.get(value, self._specs.get(primal(value)))
        if isinstance(spec, QuantizedSpec):
            return spec.nbytes
        return 0 if spec is None else TensorSpec(tuple(spec.shape), spec.dtype).nbytes

    def moved(self, values: Iterable[str]) -> float:
        return sum(self.nbytes(v) * (1.0 if v in self._parameters else self._scale) for v in values)

    def step_us(self, values: Iterable[str], launches: int, extra_bytes: int = 0) -> float:
        return (self.moved(values) + extra_bytes) / _BYTES_PER_US + launches * _US_PER_LAUNCH


class DirectionSearch:
    """The places of one direction, the rules tried on them, and what came of it."""

    def __init__(
        self,
        direction: Direction,
        places: Sequence[Place],
        used_after: Collection[str],
        glue: Sequence[Plain],
        costs: Costs,
        context: Mapping[str, Any],
        disabled: tuple[str, ...],
        assume_installed: bool,
    ) -> None:
        self.direction, self.places, self.costs = direction, tuple(places), costs
        self._used_after, self.glue, self._context = set(used_after), glue, context
        self.attempts: list[Attempt] = []
        self.candidates = [self._plain(i, p) for i, p in enumerate(self.places)]
        for rule in registry.rules():
            if rule.direction == direction:
                unavailable = registry.why_unavailable(
                    rule, context["device"], context["arch"], disabled, assume_installed
                )
                for start in range(len(self.places)):
                    self._try(rule, unavailable, start)

    def _plain(self, i: int, place: Place) -> Candidate:
        s = place.step
        step = Step(s.run, s.needs, s.gives, zeroes_tail=s.zeroes_tail, launches=s.launches)
        return Candidate(i, i + 1, None, step, self.costs.step_us((*s.needs, *s.gives), s.launches))

    def _note(
        self,
        rule: type[FusionRule],
        start: int,
        end: int,
        matched: int,
        about: range,
        status: Status,
        reason: str,
        here: bool,
        **more: Any,
    ) -> None:
        self.attempts.append(
            Attempt(rule.name, self.direction, start, end, matched, about, status, reason, here, **more)
        )

    def _try(self, rule: type[FusionRule], unavailable: Unavailable | None, start: int) -> None:
        found = match(rule.slots, [p.item for p in self.places], start)
        if isinstance(found, Mismatch):
            end = min(start + found.matched + 1, len(self.places))
            about = range(start, start + found.stood)
            self._note(rule, start, end, found.matched, about, Status.NO_MATCH, str(found), here=unavailable is None)
            return
        for m in found:
            matched, about = sum(b is not None for b in m.bindings.values()), range(start, m.end)
            note = partial(self._note, rule, start, m.end, matched, about)
            if no_kernel := None if rule.takes_quantized else self._quantized_operands(start, m.end):
                here = unavailable is None  # said also where it is not: no device has the kernel
                note(Status.CONSTRAINT, no_kernel, here=here, excused=True, no_kernel=True)
                continue
            if unavailable is not None:
                note(Status.UNAVAILABLE, unavailable.reason, here=False, cause=unavailable.cause)
                return
            bound = rule(m.bindings)
            ctx = self._ctx(rule, m.bindings, start, m.end)
            try:
                expect_none(rule.name, "check", bound.check(ctx))  # type: ignore[func-returns-value]
            except Declined as why:
                note(Status.CONSTRAINT, str(why), here=True)
                continue
            step: object = bound.build(ctx)
            if not isinstance(step, Step):
                where = self._where(rule, start, m.end)
                raise RuleError(f"{where}: build() returned {step!r}: expected a Step")
            self.candidates.append(self._candidate(rule, step, ctx, start, m.end))

    def _quantized_operands(self, start: int, end: int) -> str | None:
        """Why a rule for plain tensors does not take these places."""
        specs = self._context["_specs"]
        needed = [specs.get(value) for place in self.places[start:end] for value in place.step.needs]
        formats = {str(spec.format) for spec in needed if isinstance(spec, QuantizedSpec)}
        return f"no fused kernel for {' and '.join(sorted(formats))} operands yet" if formats else None

    def _ctx(self, rule: type[FusionRule], bindings: Mapping[str, object], start: int, end: int) -> PlanContext:
        by_slot = {}
        absent = {slot for slot, bound in bindings.items() if bound is None}
        position = start
        for slot, bound in bindings.items():
            if bound is not None:
                by_slot[slot] = self.places[position]
                position += 1

        def resolve(value: str) -> str:
            found = self._resolve(value, by_slot, absent, start, end)
            if found is None:
                raise RuleError(f"{self._where(rule, start, end)}: {value!r} names no value of these ops")
            return found

        def used_outside(value: str) -> bool:
            return value in self._used_outside(start, end)

        return PlanContext(**self._context, _resolve=resolve, _used_outside=used_outside)

    def _used_outside(self, start: int, end: int) -> set[str]:
        """Return what is read by other places than these, by glue, or after the chain."""
        outside = [p for i, p in enumerate(self.places) if not start <= i < end]
        return self._used_after | {v for p in outside for v in p.step.needs} | {v for g in self.glue for v in g.needs}

    def _where(self, rule: type[FusionRule], start: int, end: int) -> str:
        return f"rule {rule.name!r} on {', '.join(p.label for p in self.places[start:end])}"

    def _resolve(
        self, value: str, by_slot: Mapping[str, Place], absent: Collection[str], start: int, end: int
    ) -> str | None:
        slot, dot, name = value.partition(".")
        if dot and slot in absent:
            return NONE
        first, last = self.places[start], self.places[end - 1]
        if dot and slot in by_slot:
            place = by_slot[slot]
            if name in place.names:
                return place.names[name]
            value = name
        ends = (
            {"input": first, "output": last}
            if self.direction == "forward"
            else {"grad_output": first, "grad_input": last}
        )
        if value in ends:
            return ends[value].names[value]
        for place in self.places[start:end]:
            if value in place.node.op.runtime_inputs:
                return place.names[value]
        return None

    def _candidate(self, rule: type[FusionRule], step: Step, ctx: PlanContext, start: int, end: int) -> Candidate:
        def resolved(values: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(ctx._resolve(v) for v in values)

        where = self._where(rule, start, end)
        needs, gives, keeps = resolved(step.needs), resolved(step.gives), resolved(step.keeps)
        span = self.places[start:end]
        made = [v for p in span for v in p.step.gives]
        used = self._used_outside(start, end)
        if missing := [v for v in made if v in used and v not in gives]:
            raise RuleError(f"{where}: its step gives {list(gives)}, but {missing} of what it covers is used elsewhere")
        if hidden := [v for v in needs if v in made]:
            raise RuleError(f"{where}: its step needs {hidden}, which is made within the span that it covers")
        unread = {p.names["columns"] for p in span if "columns" in p.names}  # perhaps: then none of them makes it
        if foreign := [v for v in keeps if v not in made and v not in unread]:
            raise RuleError(f"{where}: its step keeps {foreign}, which is not made within the span that it covers")
        if unknown := [v for v in gives if v not in made and (self.direction == "forward" or v.startswith("grad("))]:
            raise RuleError(f"{where}: its step gives {unknown}, which is not made by what it covers")
        return Candidate(
            start,
            end,
            rule,
            replace(step, needs=needs, gives=gives, keeps=keeps),
            self.costs.step_us((*needs, *gives), step.launches, step.extra_bytes),
            step.keeps,
            {v: self.costs.step_us((v,), 0) for v in keeps},
            frozenset(made) - set(gives),
        )
