"""The forward chain as values and steps in plain PyTorch. `backward` has the backward chain, `values` the names.

Each step reads a quantized value in the form that its item needs: ``contracts`` names the axis of an operand that the
item sums over. An item that sums over no axis of a value reads it dequantized.

The input and the output of an op that passes rows on unchanged in one direction are the same value there. Such an op
has no step in that direction, unless it provides values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from fusedmoe.base.checks import check_names
from fusedmoe.base.errors import InputError
from fusedmoe.fusion.graph.places import Place, drawn_again, glue_place, packs_of
from fusedmoe.fusion.graph.scope import Scope
from fusedmoe.fusion.graph.steps import Plain
from fusedmoe.fusion.graph.values import (
    NONE,
    Forms,
    by_rows,
    columns,
    dequantized,
    form_specs,
    forms_of,
    packed,
    primal,
    quantized,
    tensor_specs,
)
from fusedmoe.numerics.formats import QuantizedSpec, Quantizer
from fusedmoe.numerics.formats.groups import PACKED_ROWS, padded_rows
from fusedmoe.numerics.formats.packed import Packed, can_pack
from fusedmoe.ops.derived import DERIVED
from fusedmoe.ops.glue import Dequantize, Derive, QuantizeWeight, StoredWeight, ZeroTail
from fusedmoe.ops.op import Node, SpecLike, TensorSpec
from fusedmoe.ops.state import random


class Graph:
    """The forward chain of some ops.

    Arguments:
    - ``nodes``: the ops with their labels, in order.
    - ``exports``: names that ops of this chain provide for ops after the chain.
    - ``inputs``: the first runtime inputs, in order. Further ones that the ops take come after them.
    - ``sorted_rows``: the sets of rows, numbered from 0, that are sorted by expert for an op outside of the chain, each
      with that op. The chain derives their offsets from ``splits``, although none of its own ops takes them.
    - ``provided``: the runtime inputs that ops before the chain provide: their contents need no check.
    - ``returns_rows``: whether the rows are a result.

    Its attributes:
    - ``places``, ``forward`` (tuple of Place): the places of all ops, and of those that have a step in the forward
      pass.
    - ``derived``, ``weights`` (dict of str to Place): the glue that computes each derived value, and the glue of each
      quantized weight: it quantizes the weight, or gives the forms of one that is stored quantized.
    - ``quantized_layers`` (dict of str to Op): the layer of each weight that a call quantizes.
    - ``arguments``, ``outputs`` (tuple of str): the rows, the runtime inputs and the parameters; the resulting rows and
      the exports.
    - ``quantizers``, ``forms`` (dict): the quantizer of each quantized value and weight, and the tensors of its forms.
    - ``producers`` (dict of str to Plain): the step that recomputes each value, except arguments.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        exports: Collection[str] = (),
        inputs: Collection[str] = (),
        sorted_rows: Mapping[int, str] = MappingProxyType({}),
        provided: Collection[str] = (),
        returns_rows: bool = True,
    ) -> None:
        self.nodes = tuple(nodes)
        self.parameters = tuple(f"{n.label}.{p}" for n in nodes for p in n.op.parameter_names)
        self.quantizers: dict[str, Quantizer] = {}  # of values and weights, by their names by rows
        self.forms: Forms = {}
        self._unquantized: dict[str, str] = {}  # of each value that steps read unquantized if they sum over its rows
        self.weights = {w.names["weight"]: w for w in _weight_quantizations(nodes)}
        items = ((name, place.item) for name, place in self.weights.items())
        self.quantized_layers = {name: item.run.layer for name, item in items if isinstance(item, QuantizeWeight)}
        for place in self.weights.values():
            self._quantize(place, NONE)
        quantizers = [q for node in nodes for q in (node.op.quantizes, node.op.quantizes_weight) if q is not None]
        self._packs = any(map(can_pack, quantizers))  # whether values have packed forms
        self._sorted_rows = sorted_rows
        self._scope = Scope(inputs, provided)
        self._read = {*exports, *(name for node in nodes for name in node.op.runtime_inputs)}
        rows, gradients = _values_along(nodes, "passes_forward"), _values_along(nodes, "passes_backward")
        # the rows before each activation, and the parts of their features
        self._parts = {rows[i]: node.op.parts for i, node in enumerate(nodes) if node.op.parts}
        self.places = self._places_along(rows, gradients)
        self.forward = tuple(place for place in self.places if place.step.gives)
        provided_here = tuple(self._scope.take(name) for name in exports)
        self.outputs = (self.form(rows[-1], None), *provided_here) if returns_rows else provided_here
        self.inputs, self.derived = self._scope.inputs, self._scope.derived
        self.arguments = (rows[0], *self.inputs, *self.parameters)
        # the values that the gradients of outputs and of arguments are named after
        self.gradient_of_outputs = (gradients[-1], *provided_here) if returns_rows else provided_here
        self.gradient_of_arguments = {a: a for a in self.arguments} | {rows[0]: gradients[0]}
        self.random_states = tuple(v for p in self.forward for v in p.random_states)
        glue = (*self.weights.values(), *(dequantize(v) for v in self.quantizers), *self.derived.values())
        steps = (*map(drawn_again, self.forward), *(place.step for place in glue))
        self.producers = {value: step for step in steps for value in step.gives}
        _reject_double_weights(self.forward)

    @property
    def all_quantizers(self) -> list[Quantizer]:
        """The quantizers of values, weights and gradients."""
        gradients = [item.quantizes for node in self.nodes for item in node.op.backward_ops()]
        return [*self.quantizers.values(), *(q for q in gradients if q is not None)]

    @property
    def takers(self) -> dict[str, list[str]]:
        """Each runtime input that the caller gives, with the ops that take it."""
        outside = [*self._sorted_rows.values()]
        return {name: [p.label for p in self.forward if name in p.values.values()] or outside for name in self.inputs}

    def _places_along(self, rows: Sequence[str], gradients: Sequence[str]) -> tuple[Place, ...]:
        """Return the places of all ops, between these rows; ``gradients`` are named after these values."""
        scope, sorted_rows = self._scope, self._sorted_rows
        takers = {**sorted_rows, **first_takers_of_offsets(self.nodes)}
        if 0 in sorted_rows:
            scope.derive("offsets", rows[0], sorted_rows[0])
        places = []
        for i, node in enumerate(self.nodes):
            scope.has_rows(f"{node.label}.input")
            values = {"input": rows[i], "output": rows[i + 1]}
            gradient_of = {"input": gradients[i], "output": gradients[i + 1]}
            place = self._place(node, values, gradient_of, takers.get(scope.rows))
            places.append(place)
            if node.op.quantizes is not None:
                self._quantize(place, place.names["offsets"])
            scope.rows += node.op.changes_rows
            scope.provide(place.provides)
            if "splits" in node.op.provides or (node.op.changes_rows and scope.rows in sorted_rows):
                gathered = place.gathers.get(rows[i + 1])  # a step may read such rows before any step writes them
                counted = rows[i + 1] if gathered is None else gathered.row_index
                offsets = scope.derive("offsets", counted, sorted_rows.get(scope.rows, _kind(node)))
                if self._packs:
                    scope.derive_packed(counted, sorted_rows.get(scope.rows, _kind(node)))
                if "splits" in node.op.provides:  # a step for this op may give the offsets too
                    places[-1] = replace(place, names={"offsets": offsets, **place.names})
        scope.has_rows(f"{self.nodes[-1].label}.output")
        return tuple(places)

    def _place(self, node: Node, values: dict[str, str], gradient_of: dict[str, str], taker: str | None) -> Place:
        """Return the place of an op; ``taker`` is the op that takes the offsets of its rows, if they are sorted."""
        label, op = node
        scope, rows_value, output = self._scope, values["input"], values["output"]
        check_names(
            _kind(node), "runtime_inputs", [n for n in op.runtime_inputs if n not in DERIVED], op.parameter_names
        )
        check_names(_kind(node), "provides", (*op.provides, *op.provides_if_read), op.parameter_names)
        for p in op.parameter_names:
            parameter = f"{label}.{p}"
            gradient_of[p] = parameter
            values[p] = quantized(parameter) if parameter in self.weights else parameter
        for name in op.runtime_inputs:
            if name in DERIVED:
                values[name] = scope.derive(name, rows_value, _kind(node))
                values[DERIVED[name].source] = scope.source(name)
            elif (checked := scope.checked(name, rows_value, _kind(node))) is not None:
                values[name] = checked
                values[f"{name} of the caller"] = name
            else:
                values[name] = scope.take(name)
                if name in op.rowwise_inputs:
                    scope.has_rows(values[name])
        for name in op.optional_inputs:  # offsets, if these rows have them
            values[name] = NONE if taker is None else scope.derive(name, rows_value, taker)
        found = {name: scope.provided_with(name, other) for name, other in op.provided_with.items()}
        values |= {name: value for name, value in found.items() if value is not None}
        all_values = not self._read.isdisjoint(op.provides_if_read)
        provides = {p: f"{label}.{p}" for p in (*op.provides, *(op.provides_if_read if all_values else ()))}
        values |= dict.fromkeys(op.provides_if_read, NONE) | provides
        for stage, like in op.stages.items():
            values[stage], gradient_of[stage] = values[like], f"{label}.{stage}"
        if op.draws_random:
            values |= {p: f"{label}.{p}" for p in random.NAMES}
        if self._packs and values.get("offsets", NONE) != NONE:
            values |= scope.derive_packed(rows_value, _kind(node) if taker is None else taker)
        values |= {alias: values[name] for alias, name in op.aliases.items()}
        names = self.formed(values, op.contracts)
        operands = (p for p in op.parameter_names if p not in op.stored_weight[1:])
        needs = ("input", *operands, *op.runtime_inputs, *op.optional_inputs)
        rows = () if op.passes_forward else (output,) if op.quantizes is None else (output, columns(output))
        compute: Callable[..., Any] = op.compute
        step = Plain(
            label=_kind(node), run=partial(compute, all_values=True) if all_values else compute,
            needs=tuple(names[n] for n in needs), gives=(*rows, *provides.values()),
            zeroes_tail=op.zeroes_tail, launches=op.launches,
        )  # fmt: skip
        offsets, packs = values.get("offsets", NONE), {}
        if op.quantizes is not None:
            packs = packs_of(op, output, offsets, self.halved(output))
        elif self._packs and offsets != NONE and output in step.gives and output in self._parts:
            packs = {packed(output): Packed(-1, self.halved(output))}
        return Place(
            item=op, names=names, step=step, node=node, values=values, gradient_of=values | gradient_of,
            provides=provides, all_values=all_values, packs=packs,
        )  # fmt: skip

    def _quantize(self, place: Place, offsets: str) -> None:
        """Record the quantizer and the forms of the output of a place."""
        assert place.item.quantizes is not None
        self.quantizers[place.step.gives[0]] = place.item.quantizes
        if place.item.quantizes.wgrad != "quantized":
            self._unquantized[place.step.gives[0]] = place.values["input"]
        self.forms |= forms_of(place.makes, place.item.quantizes, offsets)

    def halved(self, value: str) -> bool:
        """Whether the packed layout of a value lets gate and up alternate."""
        return self._parts.get(value) == 2

    def form(self, value: str, axis: int | None) -> str:
        """Return the form of a value for a step that sums over this axis of it, or over none."""
        if value not in self.quantizers or axis == -1:
            return value
        if axis == -2 and value in self._unquantized:
            return self.form(self._unquantized[value], None)
        return dequantized(value) if axis is None else columns(value)

    def formed(self, values: Mapping[str, str], contracts: Mapping[str, int]) -> dict[str, str]:
        """Return the values of an item in the forms that the item reads."""
        formed = {name: self.form(value, contracts.get(name)) for name, value in values.items()}
        return formed | {"output": values["output"]}

    def zero_tail(self, value: str, renamed: str) -> Place | None:
        """Return the glue that zeroes the rows after the last expert's of a value or of its gradient; None if the rows
        are not sorted by expert. The result has the name ``renamed``.
        """
        offsets = self.tail_offsets(value)
        if offsets is None:
            return None
        return glue_place(ZeroTail(), f"zero_tail({value})", {"input": value, "offsets": offsets, "output": renamed})

    def tail_offsets(self, value: str) -> str | None:
        """Return the offsets of the experts' rows in a value, or in its gradient; None if it has no such rows."""
        return self._scope.offsets(primal(value))

    def infer(self, arguments: Mapping[str, SpecLike | None]) -> dict[str, SpecLike | None]:
        """Check a call's arguments, op by op, and return the spec of every value of the forward pass.

        Raises `InputError`: an argument is invalid: the message names the op, the argument, and the expected and actual
        values.
        """
        specs: dict[str, Any] = {**arguments, NONE: None}
        for weight, place in self.weights.items():
            if not isinstance(place.item, QuantizeWeight):
                continue  # one that is stored: its spec depends on the rows
            try:
                found = place.item.run.infer(specs[weight])
            except InputError as error:
                raise InputError(f"{place.label}: {error}") from None
            specs |= form_specs(quantized(weight), found, place.item.run.quantizer, place.packs)
        for place in self.forward:
            try:
                for value in place.step.needs:
                    if value in self.derived:
                        self._infer_derived(value, specs)
                self._infer_stored_weight(place, specs)
                out: Any = place.op.infer(*[specs[v] for v in place.step.needs], **place.keywords)
            except InputError as error:
                raise InputError(f"{place.label}: {error}") from None
            if isinstance(out, QuantizedSpec):
                specs |= form_specs(place.step.gives[0], out, self.quantizers[place.step.gives[0]], place.packs)
                continue
            specs.update(zip(place.step.gives, (out,) if isinstance(out, TensorSpec) else out, strict=True))
            specs.update(dict.fromkeys(place.random_states))  # of a size that only the generators know
            for value in place.packs:
                rows, offsets = specs[by_rows(value)], specs[place.names["offsets"]]
                padded = padded_rows(rows.shape[0], offsets.shape[0], PACKED_ROWS)
                specs[value] = TensorSpec((padded, rows.shape[1]), rows.dtype)
        for place in self.places:  # the values that gradients are named after
            for name in ("input", "output", *place.op.stages):
                specs.setdefault(place.gradient_of[name], specs[place.values[name]])
        for value in self.derived:  # offsets that only tail masks read
            self._infer_derived(value, specs)
        return specs | tensor_specs(specs, self.forms)

    def _infer_stored_weight(self, place: Place, specs: dict[str, Any]) -> None:
        found = self.weights.get(f"{place.node.label}.weight" if place.node is not None else NONE)
        if found is not None and isinstance(found.item, StoredWeight):
            weight, scale = (specs[v] for v in found.step.needs)
            spec = found.item.infer(weight, scale, specs[place.names["input"]].dtype)
            specs |= form_specs(found.step.gives[0], spec, found.item.quantizes, found.packs)

    def _infer_derived(self, value: str, specs: dict[str, Any]) -> None:
        place = self.derived[value]
        assert isinstance(place.item, Derive)
        if value not in specs:
            specs[value] = place.item.derived.infer(*[specs[v] for v in place.step.needs])


def dequantize(value: str) -> Place:
    """Return the glue that dequantizes a value by rows."""
    return glue_place(Dequantize(), f"dequantize {value}", {"input": value, "output": dequantized(value)})


def _kind(node: Node) -> str:
    return f"{node.label}.{type(node.op).__name__}"


def _values_along(nodes: Sequence[Node], passes: str) -> list[str]:
    """Return the value before each op, and after the last. An op that passes rows on has the later one twice."""
    names = [*(f"{node.label}.input" for node in nodes), f"{nodes[-1].label}.output"]
    for i in reversed(range(len(nodes))):
        if getattr(nodes[i].op, passes):
            names[i] = names[i + 1]
    return names


def _weight_quantizations(nodes: Sequence[Node]) -> list[Place]:
    """Return the glue of weights that ops request to be quantized, or that layers store quantized."""
    found: dict[str, Place] = {}
    for i, (label, op) in enumerate(nodes):
        if op.quantizes_weight is None:
            continue
        layer = next((node for node in nodes[i + 1 :] if not node.op.only_quantizes), None)
        if layer is None or "weight" not in layer.op.contracts:
            what = "the end of the chain" if layer is None else _kind(layer)
            raise InputError(f"{label}.{op!r}: weight: expected a linear layer to follow, got {what}")
        weight = f"{layer.label}.weight"
        if weight in found:
            raise InputError(f"{label}.{op!r}: weight: {layer.label}'s weight would be quantized twice")
        names = {"weight": weight, "output": quantized(weight)}
        quantize = op.weight_quantization(layer.op)
        glue = QuantizeWeight(quantize, op.launches * (2 if quantize.quantizer.format.tensor_scale else 1))
        after = next((n.op for n in nodes[nodes.index(layer) + 1 :] if not n.op.passes_forward), None)
        halves = after is not None and after.parts == 2
        found[weight] = glue_place(glue, f"{label}.{type(op).__name__}", names, halves)
    for label, op in nodes:
        if op.weight_format is None:
            continue
        weight, scale = (f"{label}.{name}" for name in op.stored_weight)
        if weight in found:
            raise InputError(f"{found[weight].label}: weight: expected a layer with an unquantized weight, got {op!r}")
        names = {"weight": weight, "scale": scale, "output": quantized(weight)}
        found[weight] = glue_place(StoredWeight(op), f"{label}:weight.StoredWeight", names)
    return [*found.values()]


def first_takers_of_offsets(nodes: Sequence[Node]) -> dict[int, str]:
    """Return, for each set of rows that is sorted by expert, the op to name in an error about the splits."""
    takers: dict[int, str] = {}
    rows = 0
    for node in nodes:
        if "offsets" in node.op.runtime_inputs:
            takers.setdefault(rows, _kind(node))
        rows += node.op.changes_rows
        if "splits" in node.op.provides:
            takers.setdefault(rows, _kind(node))
    return takers


def _reject_double_weights(places: Sequence[Place]) -> None:
    applied: dict[str, str] = {}
    for place in places:
        for name in place.op.applies:
            value = place.values[name]
            if value in applied:
                raise InputError(
                    f"{name!r} would be applied twice, by {applied[value]} and by {place.label}; "
                    f"apply it in one of the two only"
                )
            applied[value] = place.label
