"""Describes a plan as data, for ``explain()`` and the log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fusedmoe.fusion.graph.places import Place
from fusedmoe.fusion.graph.steps import Fused
from fusedmoe.fusion.graph.values import NONE, by_rows, grad, packed, spec_of
from fusedmoe.fusion.language import registry
from fusedmoe.fusion.program.plan import Plan, PlannedSpan
from fusedmoe.fusion.report.data import PlanData, PlannedStep
from fusedmoe.fusion.search.candidates import Costs
from fusedmoe.numerics.formats import QuantizedSpec
from fusedmoe.numerics.formats.groups import PACKED_ROWS, padded_rows
from fusedmoe.ops.glue import Derive, QuantizeWeight, StoredWeight
from fusedmoe.ops.op import BackwardOp, SpecLike, TensorSpec


def describe(plan: Plan, arguments: Mapping[str, SpecLike | None]) -> PlanData:
    """Return a plan as data, with bytes for these arguments."""
    specs: dict[str, SpecLike | None] = {NONE: None, **plan.infer([*arguments.values()])}
    graph, environment = plan.graph, plan.environment
    costs = Costs(specs, graph.parameters, rows=0)
    of_weights = {v for place in graph.weights.values() for v in place.makes}
    kept = [v for v in plan.saved if v not in (*graph.parameters, *of_weights)]
    weights = [span for span in plan.glue if isinstance(span.places[0].item, QuantizeWeight)]
    steps = [_planned(span, specs, costs, environment.device) for span in (*weights, *plan.spans)]
    others = [span for span in plan.glue if span not in weights and not _is_parameters(span)]
    glue = [_planned(span, specs, costs, environment.device) for span in others]
    arch, rows = environment.arch, specs[graph.arguments[0]]
    backward = plan.backward(tuple([a in plan.wanted for a in graph.arguments])).program
    return PlanData(
        steps=tuple(steps),
        attempts=plan.attempts,
        kept=tuple(kept),
        kept_bytes=sum(costs.nbytes(v) for v in kept),
        device=f"sm_{arch}" if environment.asked else str(environment.device) + (f" (sm_{arch})" if arch else ""),
        dtype=str(plan.dtype).removeprefix("torch."),
        recipe=environment.recipe.name,
        options=environment.options,
        forward_source=plan.program.source,
        backward_source=backward.source,
        weight_bytes=sum(costs.nbytes(v) for span in weights for v in span.step.gives),
        missed=plan.missed_or_unavailable,
        rows=0 if rows is None else math.prod(map(int, rows.shape[:-1])),
        glue=tuple(glue),
        gathered=tuple((rows, *gathered) for rows, gathered in plan.gathered.items()),
        beside=tuple((light.rule, carrier.rule, sms) for light, carrier, sms in backward.pairs),
        arch=arch,
        packed_rows=next((found for span in plan.spans for v in span.moves if (found := _packed_rows(v, specs))), None),
        kept_padding_bytes=_padding_bytes(kept, specs, costs),
        exchange=next((_settings(op) for _, op in graph.nodes if op.travels), ""),
        **_asked(plan),
    )


def _is_parameters(span: PlannedSpan) -> bool:
    """Whether a step only gives the parameters of a stored weight another name."""
    return span.direction == "forward" and isinstance(span.places[0].item, StoredWeight)


def _asked(plan: Plan) -> dict[str, Any]:
    """Return the fields of `PlanData` that only a plan of ``explain(..., arch=)`` has."""
    if not plan.environment.asked:
        return {}
    rules = {rule.name: rule for rule in registry.rules()}
    fused = sorted({span.step.rule for span in (*plan.spans, *plan.glue) if isinstance(span.step, Fused)})
    assumed = dict.fromkeys(registry.what_is_missing(rules[name]) for name in fused if name in rules)
    return {"asked_arch": plan.environment.arch, "assumed": tuple(text for text in assumed if text is not None)}


def _planned(
    span: PlannedSpan, specs: Mapping[str, SpecLike | None], costs: Costs, device: torch.device
) -> PlannedStep:
    step, fused = span.step, isinstance(span.step, Fused)
    (place, *_) = span.places
    rows = specs.get(place.names.get("input", NONE))
    of_op = place.node is not None and not fused
    return PlannedStep(
        direction=span.direction,
        ops=tuple(p.label for p in span.places),
        rule=step.rule if isinstance(step, Fused) else None,
        needs=tuple(v for v in step.needs if v != NONE),
        gives=step.gives,
        bytes_moved=int(costs.moved(_read_and_written(span))) + span.extra_bytes + sum(map(_added_bytes, span.places)),
        launches=step.launches,
        host_sync=of_op and rows is not None and place.item.host_sync(rows, device),  # type: ignore[union-attr]
        nearest_miss=span.nearest_miss,
        path=place.item.path([spec_of(specs, v) for v in step.needs], device) if of_op else "",  # type: ignore[union-attr]
        quantizes=tuple(q for q in map(_quantizes, span.places) if q is not None),
        flops=sum(_flops(place, specs) for place in span.places),
        of_codes=isinstance(step, Fused) and step.multiplies_codes,
        padding_bytes=_padding_bytes(span.moves, specs, costs),
        received=tuple((place.label, n) for place in span.places if (n := _received(place, specs)) is not None),
    )


def _read_and_written(span: PlannedSpan) -> list[str]:
    """Return the values whose bytes a step moves. Glue that derives a value reads the number of rows alone."""
    rows = {place.names["rows"] for place in span.places if isinstance(place.item, Derive)}
    return [v for v in span.moves if v not in rows]


def _packed_rows(value: str, specs: Mapping[str, SpecLike | None]) -> tuple[int, int] | None:
    """Return the number of rows of a value in the packed layout, without and with their padding; None of another."""
    spec = spec_of(specs, value)
    if isinstance(spec, QuantizedSpec):
        if not spec.packed or spec.experts is None:
            return None
        return int(spec.shape[0]), int(padded_rows(spec.shape[0], spec.experts, PACKED_ROWS))
    if spec is None or by_rows(value) == value or value != packed(by_rows(value)):
        return None
    rows = spec_of(specs, by_rows(value))
    assert rows is not None, "it is packed"
    return int(rows.shape[0]), int(spec.shape[0])


def _padding_bytes(values: Iterable[str], specs: Mapping[str, SpecLike | None], costs: Costs) -> int:
    """Return the bytes of the padding rows of values, some of which are in the packed layout."""
    found = ((costs.nbytes(v), _packed_rows(v, specs)) for v in values)
    return sum(nbytes * (rows[1] - rows[0]) // rows[1] for nbytes, rows in found if rows is not None and rows[1])


def _added_bytes(place: Place) -> int:
    return place.item.added_bytes if isinstance(place.item, BackwardOp) else 0


def _settings(op: Any) -> str:
    """Return the settings of an op that exchanges rows with other ranks."""
    return op.expert_parallel.settings()  # type: ignore[no-any-return]


def _received(place: Place, specs: Mapping[str, SpecLike | None]) -> int | None:
    """Return the bytes that an op or a backward op receives from other ranks; None for one that exchanges nothing."""
    if not (travels := getattr(place.item, "travels", ())):
        return None
    ranks: int = place.op.expert_parallel.ranks  # type: ignore[union-attr, assignment]
    nbytes = 0
    for name in travels:
        spec = spec_of(specs, place.value(name) if not name.startswith("grad_") else grad(place.gradient(name)))
        if spec is not None:
            shape, codes = tuple(map(int, spec.shape)), place.item.travels_as.get(name)  # type: ignore[union-attr]
            nbytes += (
                TensorSpec(shape, spec.dtype) if codes is None else QuantizedSpec(shape, spec.dtype, codes, -1)
            ).nbytes
    return nbytes * (ranks - 1) // ranks


def _flops(place: Place, specs: Mapping[str, SpecLike | None]) -> float:
    """Return the FLOPs of an op or a backward op."""
    rows = spec_of(specs, place.step.needs[0]) if place.node is not None and place.step.needs else None
    return 0.0 if rows is None else place.item.flops(rows)  # type: ignore[union-attr]


def _quantizes(place: Place) -> tuple[str, str] | None:
    """Return ``label:role`` of a place that quantizes, and the quantizer in words; None for any other place.

    The label of an op that a recipe inserts ends in the role already.
    """
    quantizer = place.item.quantizes
    if quantizer is None:
        return None
    glue, backward = place.node is None, place.step.gives[0].startswith("grad(")
    label = place.label.rpartition(".")[0] if place.node is None else place.node.label
    role = "weight" if glue else "grad" if backward else "input"
    return (label if label.endswith(f":{role}") else f"{label}:{role}"), str(quantizer)
