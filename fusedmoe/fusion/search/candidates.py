"""The candidates of one direction: every plain step, and every match that a rule accepts.

The cost of a candidate is a coarse estimate of time: bytes moved, divided by a memory bandwidth, plus launches. The
estimate is for the next power of two above the number of rows, which is part of the plan's key. So neither the exact
number of rows nor earlier plans change a choice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fusedmoe.fusion.graph.places import Place
from fusedmoe.fusion.graph.values import NONE, Gathered, by_rows, dequantized, spec_of
from fusedmoe.fusion.language import registry
from fusedmoe.fusion.language.matcher import Mismatch, match
from fusedmoe.fusion.language.registry import Unavailable
from fusedmoe.fusion.language.rule import (
    Declined,
    Direction,
    FusionRule,
    NothingToDo,
    PlanContext,
    RuleError,
    Step,
    expect_none,
)
from fusedmoe.fusion.report.data import Attempt, Exemption, Status
from fusedmoe.numerics.formats import QuantizedSpec
from fusedmoe.ops.derived import PACKED
from fusedmoe.ops.glue import Dequantize, Glue
from fusedmoe.ops.op import SpecLike, TensorSpec

# Values of an H100, rounded. Only their ratio matters, since they only rank coverings of the same chain.
_BYTES_PER_US = 3.0e6
_US_PER_LAUNCH = 3.0
_PASSES = 16
"""The passes over the values in which plain PyTorch quantizes to NVFP4, approximately: most of them are in fp32."""
_KEPT = 3.0
"""The cost of a byte kept for the backward pass, in bytes moved. Recomputation in an epilogue is cheaper, and so is a
launch that reads two bytes of each value to make one."""


_ESTIMATED = registry.Unavailable(
    "tensors without memory (meta, FakeTensor), FLOP counters and exported programs run no kernels", "device"
)


_OF_PACKED_ROWS = [derived.name for derived in PACKED]


@dataclass(frozen=True, kw_only=True)
class _Resolver:
    """Returns the chain's name of a value that a rule names as in `Step`.

    A chosen rule may keep it with its `PlanContext`. So it refers to the places that the rule covers, not to the search
    with all candidates, which refers to it.
    """

    where: str  # the rule and the places that it covers, for messages
    direction: Direction
    places: Sequence[Place]
    by_slot: Mapping[str, Place]
    absent: Collection[str]  # the optional slots without a place
    gathered: Mapping[str, Gathered]

    def __call__(self, value: str) -> str:
        found = self._find(value)
        if found is None:
            raise RuleError(f"{self.where}: {value!r} names no value of these ops")
        return found

    def _find(self, value: str) -> str | None:
        rows, _, part = value.rpartition(":")
        if part in ("source", "index"):
            found = self.gathered.get(self._find(rows) or NONE)
            return None if found is None else found.source if part == "source" else found.row_index
        slot, dot, name = value.partition(".")
        if dot and slot in self.absent:
            return NONE
        if dot and slot in self.by_slot:
            place = self.by_slot[slot]
            if name.partition(":")[0] in place.names:
                return place.value(name)
            value = name
        first, last = self.places[0], self.places[-1]
        ends = (
            {"input": first, "output": last}
            if self.direction == "forward"
            else {"grad_output": first, "grad_input": last}
        )
        if (own := value.partition(":")[0]) in ends:
            return ends[own].value(value)
        for place in self.places:
            if place.node is None or value not in place.names:
                continue
            if value in place.op.runtime_inputs or value in _OF_PACKED_ROWS:
                return place.names[value]
        return None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A step that covers the places [start, end)."""

    start: int
    end: int
    step: Step  # the values, by the chain's names
    cost_us: float  # the estimated time without `Step.keeps`
    rule: FusionRule | None = None  # the rule, bound to the ops; None for a plain step
    ctx: PlanContext | None = None
    keep_names: tuple[str, ...] = ()  # `Step.keeps` by the rule's names
    keep_us: Mapping[str, float] = field(default_factory=dict)  # the estimated time to write each of `Step.keeps`
    # the values whose bytes the step reads: `Step.needs`, with the rows themselves in place of their source
    reads: tuple[str, ...]
    # those of `Step.keeps` that are rows of another value, each with that value. A launch reads it to write the rows
    keep_reads: Mapping[str, str] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()  # values of the covered places that the step does not give
    # nothing runs: other steps read the values of the place through their index, or the forward pass keeps them
    skips: bool = False

    @property
    def name(self) -> str:
        """The rule's name; empty for a plain step."""
        return self.rule.name if self.rule is not None else ""

    def cannot_keep(self, kept: Collection[str]) -> list[str]:
        """Return those of the values to keep that are made inside this step and that it cannot write."""
        return sorted(v for v in kept if v in self.inside and v not in self.step.keeps)


class Costs:
    """The cost model, for values with these specs. The size of ``fixed`` values does not depend on the number of rows.
    The specs have ``rows`` rows, and costs are for ``nominal_rows``, by default the next power of two above.
    """

    def __init__(
        self, specs: Mapping[str, SpecLike | None], fixed: Collection[str], rows: int, nominal_rows: int | None = None
    ) -> None:
        self._specs, self._fixed = specs, fixed
        self._nbytes: dict[str, int] = {}
        self._scale = (nominal_rows or 1 << rows.bit_length()) / rows if rows else 1.0

    def nbytes(self, value: str) -> int:
        """Return the bytes of a value in memory, for the rows of the specs."""
        nbytes = self._nbytes.get(value)
        if nbytes is None:
            nbytes = self._nbytes[value] = self._nbytes_of(spec_of(self._specs, value))
        return nbytes

    @staticmethod
    def _nbytes_of(spec: SpecLike | None) -> int:
        if isinstance(spec, QuantizedSpec):
            return spec.nbytes
        return 0 if spec is None else TensorSpec(tuple(spec.shape), spec.dtype).nbytes

    def moved(self, values: Iterable[str]) -> float:
        """Return the bytes of some values, for the nominal rows."""
        return sum(self.nbytes(v) * (1.0 if v in self._fixed else self._scale) for v in values)

    def step_us(self, values: Iterable[str], launches: int, extra_bytes: int = 0) -> float:
        """Return the time of a step that moves these values once."""
        return (self.moved(values) + extra_bytes) / _BYTES_PER_US + launches * _US_PER_LAUNCH

    def kept_us(self, values: Iterable[str]) -> float:
        """Return the cost of keeping these values for the backward pass, as a time."""
        return _KEPT * self.moved(values) / _BYTES_PER_US


@dataclass(frozen=True, kw_only=True)
class Search:
    """The inputs that all searches of a plan share: the cost model, the rules' context, the disabled rules."""

    costs: Costs
    context: Mapping[str, Any]
    specs: Mapping[str, SpecLike | None]
    disabled: tuple[str, ...]
    estimated: bool  # no rule applies, as in `Environment`
    assume_installed: bool
    gathered: Mapping[str, Gathered]  # the values that are rows of another value
    derived: Mapping[str, Place]  # the glue of each derived value


class DirectionSearch:
    """The candidates for the places of one direction, and the result of every rule at every position.

    The places are ops or backward ops in order, or pieces of glue, which are matched one by one. ``results`` are the
    values read after the last place. ``conversions[dequantized(v)] = v`` for each value that may be dequantized.
    """

    def __init__(
        self,
        direction: Direction,
        places: Sequence[Place],
        results: Collection[str],
        conversions: Mapping[str, str],
        search: Search,
    ) -> None:
        self.direction, self.places, self.search = direction, tuple(places), search
        self._items = [place.item for place in self.places]
        self.results, self.conversions = tuple(results), conversions
        exchanges = any(getattr(item, "travels", ()) for item in self._items)  # rows, with other ranks
        self.attempts: list[Attempt] = []
        self._formats_of: dict[tuple[int, int], list[str]] = {}
        self._read_outside_of: dict[tuple[int, int], frozenset[str]] = {}
        self.candidates = [self._plain(i, p) for i, p in enumerate(self.places) if not p.again]
        self.candidates += [
            self._skip(i, p) for i, p in enumerate(self.places) if p.again or search.gathered.keys() >= {*p.step.gives}
        ]
        of_glue = bool(places) and isinstance(self.places[0].item, Glue)
        for rule in registry.rules():
            if rule.direction == direction and issubclass(rule.slots[0].types[0], Glue) is of_glue:
                device, arch = search.context["device"], search.context["arch"]
                unavailable: Unavailable | None = _ESTIMATED
                if not search.estimated:
                    unavailable = registry.why_unavailable(rule, device, arch, search.disabled, search.assume_installed)
                # a rule beside an exchange between ranks is not near to the ops of a chain that exchanges nothing
                far = _exchanges(rule) and not exchanges
                for start in range(len(self.places)):
                    self._try(rule, unavailable, start, far)

    def _plain(self, i: int, place: Place) -> Candidate:
        s, costs = place.step, self.search.costs
        gives, optional = (s.gives, (*place.packs,)) if place.item.quantizes is None else ((), place.makes)
        return Candidate(
            start=i,
            end=i + 1,
            step=Step(needs=s.needs, gives=gives, keeps=optional, zeroes_tail=s.zeroes_tail, launches=s.launches),
            cost_us=costs.step_us((*s.needs, *gives), s.launches) + self._emulation_us(place) + self._passes_us(place),
            keep_us={v: costs.step_us((v,), 0) for v in optional},
            reads=s.needs,
        )

    def _emulation_us(self, place: Place) -> float:
        """Return the time in which a product in plain PyTorch dequantizes its operands: each is written and read."""
        specs, needs = self.search.specs, place.step.needs
        values = [dequantized(by_rows(v)) for v in needs if isinstance(specs.get(v), QuantizedSpec)]
        if not values or isinstance(place.item, Glue):
            return 0.0
        if place.item.path([spec_of(specs, v) for v in needs], self.search.context["device"]) != "emulated":
            return 0.0
        return self.search.costs.step_us(values * 2, Dequantize.launches * len(values))

    def _passes_us(self, place: Place) -> float:
        """Return the time in which plain PyTorch quantizes values to a format with two levels of scales."""
        quantizer = place.item.quantizes
        if quantizer is None or not quantizer.format.tensor_scale or not place.step.gives:
            return 0.0
        return self.search.costs.step_us([dequantized(place.step.gives[0])] * _PASSES, 0)

    def _skip(self, i: int, place: Place) -> Candidate:
        """Return the candidate that leaves out a place whose values are rows of others, or may be kept."""
        inside = frozenset(place.makes)
        return Candidate(
            start=i, end=i + 1, step=Step(needs=(), gives=()), cost_us=0.0, reads=(), inside=inside, skips=True
        )

    def _try(self, rule: type[FusionRule], unavailable: Unavailable | None, start: int, far: bool) -> None:
        """Add the results of a rule at a position. A mismatch of a rule that is ``far`` is near to none of the ops."""
        here = unavailable is None
        found = match(rule.slots, self._items, start)
        if isinstance(found, Mismatch):
            # a rule for codes is not near to ops of unquantized values either
            far |= rule.quantized_only and not self._formats(start, start + max(found.matched, 1))
            matched, count = (0, 0) if far else (found.matched, found.shared)
            end, shared = min(start + found.matched + 1, len(self.places)), range(start, start + count)
            self.attempts.append(
                Attempt(rule.name, self.direction, start, end, matched, shared, Status.NO_MATCH, str(found), here)
            )
            return
        for m in found:
            formats = self._formats(start, m.end)
            if rule.quantized_only and not formats:
                continue
            bound = rule(m.bindings)
            ctx = self._ctx(bound, m.bindings, start, m.end)
            if rule.gathers and ctx._resolve(rule.gathers) not in self.search.gathered:
                expected, nothing = f"{rule.gathers}: expected rows of another value", range(start, start)
                self.attempts.append(
                    Attempt(rule.name, self.direction, start, m.end, 0, nothing, Status.NO_MATCH, expected, here)
                )
                continue
            matched, shared = sum(b is not None for b in m.bindings.values()), range(start, m.end)
            attempt = partial(Attempt, rule.name, self.direction, start, m.end, matched, shared)
            if no_kernel := _unsupported(bound, ctx, formats):
                # reported even if the rule is unavailable: no device has the kernel
                reason, exemption = no_kernel
                declined = attempt(Status.CONSTRAINT, reason, on_this_device=here, exemption=exemption)
                if rule.first_reads_codes:
                    declined = replace(declined, matched=1, shared=shared[:1])
                self.attempts.append(declined)
                continue
            if unavailable is not None:
                reason, cause = unavailable
                self.attempts.append(attempt(Status.UNAVAILABLE, reason, on_this_device=False, cause=cause))
                return
            try:
                step: object = bound.offer(ctx)
            except Declined as why:
                exemption = Exemption.NOTHING if isinstance(why, NothingToDo) else Exemption.NONE
                self.attempts.append(attempt(Status.CONSTRAINT, str(why), exemption=exemption))
                continue
            if not isinstance(step, Step):
                raise RuleError(f"{self.where(bound, start, m.end)}: offer() returned {step!r}: expected a Step")
            self.candidates.append(self._candidate(bound, step, ctx, start, m.end))

    def _formats(self, start: int, end: int) -> list[str]:
        """Return the formats of the quantized operands of these places."""
        formats = self._formats_of.get((start, end))
        if formats is None:
            needed = [self.search.specs.get(value) for place in self.places[start:end] for value in place.step.needs]
            formats = sorted({str(spec.format) for spec in needed if isinstance(spec, QuantizedSpec)})
            self._formats_of[start, end] = formats
        return formats

    def _ctx(self, rule: FusionRule, bindings: Mapping[str, object], start: int, end: int) -> PlanContext:
        bound = [slot for slot, item in bindings.items() if item is not None]
        covered = self.places[start:end]
        resolve = _Resolver(
            where=self.where(rule, start, end),
            direction=self.direction,
            places=covered,
            by_slot=dict(zip(bound, covered, strict=True)),
            absent=bindings.keys() - bound,
            gathered=self.search.gathered,
        )
        made = {v for p in covered for v in p.makes}
        read = self._read_outside(start, end) & made
        return PlanContext(**self.search.context, _specs=self.search.specs, _resolve=resolve, _read_outside=read)

    def where(self, rule: FusionRule, start: int, end: int) -> str:
        """Name a rule and the places that it covers, for messages."""
        return f"rule {rule.name!r} on {', '.join(p.label for p in self.places[start:end])}"

    def _candidate(self, rule: FusionRule, step: Step, ctx: PlanContext, start: int, end: int) -> Candidate:
        def resolved(values: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(ctx._resolve(v) for v in values)

        where, costs = self.where(rule, start, end), self.search.costs
        needs, gives, keeps = resolved(step.needs), resolved(step.gives), resolved(step.keeps)
        made = [v for p in self.places[start:end] for v in p.makes]
        # one form of a quantized value is enough: where another form is read, the covering has another step
        forms = [p.makes for p in self.places[start:end] if p.item.quantizes is not None]
        optional = {v for some in forms if not {*some}.isdisjoint({*gives, *keeps}) for v in some}
        read = self._read_outside(start, end) - optional
        if missing := [v for v in made if v in read and v not in gives and v not in keeps]:
            raise RuleError(f"{where}: its step gives {list(gives)}, not {missing}, which is read outside of the span")
        if hidden := [v for v in needs if v in made]:
            raise RuleError(f"{where}: its step needs {hidden}, which is made within the span that it covers")
        recomputes = self.direction == "backward"  # forward values
        if foreign := [v for v in keeps if v not in made and not (recomputes and not v.startswith("grad("))]:
            raise RuleError(f"{where}: its step keeps {foreign}, which is not made within the span that it covers")
        derived = {v for v, glue in self.search.derived.items() if not {*made}.isdisjoint(glue.step.needs)}
        possible = derived.union(made)
        if unknown := [v for v in gives if v not in possible and not (recomputes and not v.startswith("grad("))]:
            raise RuleError(f"{where}: its step gives {unknown}, which is not made within the span that it covers")
        through_index = [ctx._resolve(v.removesuffix(":source")) for v in step.needs if v.endswith(":source")]
        sources = [v for v, name in zip(needs, step.needs, strict=True) if name.endswith(":source")]
        keep_reads = {v: g.source for v, g in self.search.gathered.items() if v in keeps and g.source in needs}
        others = [p for p in self.places[start:end] if keep_reads.keys().isdisjoint(p.step.gives)]
        to_write = {*keep_reads.values()}.difference(*[p.step.needs for p in others])
        reads = (*through_index, *(v for v in needs if v not in sources and v not in to_write))
        us = costs.step_us((*reads, *gives), step.launches, step.extra_bytes)
        return Candidate(
            start=start,
            end=end,
            step=replace(step, needs=needs, gives=gives, keeps=keeps),
            cost_us=us + (step.gather_cost - 1) * costs.step_us(through_index, 0),
            rule=rule,
            ctx=ctx,
            keep_names=step.keeps,
            keep_us={v: costs.step_us((v, keep_reads.get(v, NONE)), v in keep_reads) for v in keeps},
            reads=reads,
            keep_reads=keep_reads,
            inside=frozenset(made) - set(gives),
        )

    def _read_outside(self, start: int, end: int) -> frozenset[str]:
        """Return the values that the plain steps of other places read, and the results."""
        read = self._read_outside_of.get((start, end))
        if read is None:
            outside = (p for i, p in enumerate(self.places) if not start <= i < end)
            read = frozenset(self.with_sources({*self.results, *(v for p in outside for v in p.step.needs)}))
            self._read_outside_of[start, end] = read
        return read

    def with_sources(self, values: Iterable[str]) -> set[str]:
        """Return the values, with the source of each dequantized value in place of that value."""
        return {self.conversions.get(v, v) for v in values}


def _exchanges(rule: type[FusionRule]) -> bool:
    """Return whether a slot of the rule takes an op that exchanges rows with other ranks."""
    return any(getattr(of, "travels", ()) for slot in rule.slots for of in slot.types)


def _unsupported(rule: FusionRule, ctx: PlanContext, formats: Sequence[str]) -> tuple[str, Exemption] | None:
    """Return why the rule has no kernel for the formats of these operands or results; None if it has one."""
    if formats and not (rule.takes_quantized or rule.quantized_only):
        return f"takes no {' and '.join(formats)} operands", Exemption.UNQUANTIZED
    try:
        answer: object = rule.supports(ctx)  # type: ignore[func-returns-value]
    except Declined as why:
        return str(why), Exemption.QUANTIZED
    expect_none(rule.name, "supports", answer)
    return None
