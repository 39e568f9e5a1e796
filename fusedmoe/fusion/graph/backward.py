"""The backward chain of a graph, for some set of wanted gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fusedmoe.base.errors import InputError
from fusedmoe.fusion.graph.forward import Graph
from fusedmoe.fusion.graph.places import Place, glue_place, packs_of
from fusedmoe.fusion.graph.steps import Plain
from fusedmoe.fusion.graph.values import NONE, Form, columns, dequantized, form_specs, forms_of, grad
from fusedmoe.numerics.formats import QuantizedSpec
from fusedmoe.numerics.formats.packed import Packed
from fusedmoe.ops.glue import SumGradients
from fusedmoe.ops.op import BackwardOp, SpecLike, TensorSpec


class Backward(NamedTuple):
    """The backward chain."""

    places: tuple[Place, ...] = ()  # the steps that a wanted gradient needs, from the last op to the first
    sums: tuple[Place, ...] = ()  # the glue that adds up gradients to which several ops contribute
    # the name of the incoming gradient of each output that has one
    incoming: Mapping[str, str] = {}
    gradients: Mapping[str, str] = {}  # the name of the gradient of each argument that gets one
    forms: Mapping[str, Form] = {}  # the forms of gradients that are quantized
    specs: Mapping[str, SpecLike | None] = {}


NO_BACKWARD = Backward()


def backward_chain(graph: Graph, wanted: Collection[str], specs: Mapping[str, SpecLike | None]) -> Backward:
    """Return the backward chain for the gradients of the wanted arguments, given the specs of the forward pass.

    Raises `InputError`: a weight that is stored quantized is wanted: it has no gradient.
    """
    for label, op in graph.nodes:
        for name in op.stored_weight:
            if f"{label}.{name}" in wanted:
                what = "requires_grad=False, since a weight that is stored quantized has no gradient"
                raise InputError(f"{label}.{op.reject(name, what, True)}")
    return _Builder(graph, wanted, specs).backward() if wanted else NO_BACKWARD


class _Step(NamedTuple):
    """A backward op that a wanted gradient needs, with the contributions to gradients that it gives."""

    place: Place
    item: BackwardOp
    gives: tuple[str, ...]


class _Builder:
    def __init__(self, graph: Graph, wanted: Collection[str], specs: Mapping[str, SpecLike | None]) -> None:
        self._graph, self._wanted, self._specs = graph, wanted, specs
        self._contributions: dict[str, list[str]] = {}  # to each gradient
        # of each quantized gradient: the gradient before quantization, and whether steps read it if they sum over rows
        self._sources: dict[str, tuple[str, bool]] = {}

    def backward(self) -> Backward:
        differentiable = self._differentiable()
        outputs = zip(self._graph.outputs, self._graph.gradient_of_outputs, strict=True)
        incoming = {value: self._contribute(key) for value, key in outputs if key in differentiable}
        steps = self._steps(differentiable)
        alone = {names[0]: g for g, names in self._contributions.items() if len(names) == 1}
        sums = tuple(
            glue_place(
                SumGradients(len(names)), f"sum of {g}", {f"term{i}": n for i, n in enumerate(names)} | {"output": g}
            )
            for g, names in self._contributions.items()
            if len(names) > 1
        )
        keys = {a: grad(key) for a, key in self._graph.gradient_of_arguments.items() if a in self._wanted}
        gradients = {a: self._in_form(g, None) for a, g in keys.items() if g in self._contributions}
        places = self._with_columns_again([self._place(step, alone) for step in steps])
        read = {*gradients.values(), *(v for place in (*places, *sums) for v in place.step.needs)}
        places = [p for p in places if p.item.quantizes is None or self._is_read(p.step.gives[0], read)]
        forms: dict[str, Form] = {}
        gradient_specs: dict[str, SpecLike | None] = {}
        for place in places:
            if (quantizer := place.item.quantizes) is not None:
                forms |= forms_of(place.makes, quantizer, place.names["offsets"])
                gradient_specs |= form_specs(place.step.gives[0], self._quantized_spec(place), quantizer, place.packs)
        incoming = {value: alone.get(g, g) for value, g in incoming.items()}
        return Backward(tuple(places), sums, incoming, gradients, forms, gradient_specs)

    def _differentiable(self) -> set[str]:
        """Return the values whose gradients a wanted gradient depends on, including the wanted arguments."""
        found = {self._graph.gradient_of_arguments[a] for a in self._wanted}
        for place in self._graph.places:
            for item in reversed(place.op.backward_ops()):
                if any(place.gradient(n) in found for n in item.gives):
                    through = [place.gradient(n) for n in item.needs if n.startswith("grad_")]
                    found.update(v for v in through if self._is_float(v))
        return found

    def _is_float(self, value: str) -> bool:
        spec = self._specs[value]
        return spec is not None and spec.dtype.is_floating_point

    def _contribute(self, key: str) -> str:
        """Return the name of one more contribution to the gradient of a value."""
        names = self._contributions.setdefault(grad(key), [])
        names.append(f"{grad(key)}#{len(names)}")
        return names[-1]

    def _steps(self, differentiable: Collection[str]) -> list[_Step]:
        """Return the steps that a wanted gradient needs and that get an incoming gradient."""
        steps = []
        for place in reversed(self._graph.places):
            for item in place.op.backward_ops():
                gives = tuple(n for n in item.gives if place.gradient(n) in differentiable)
                needs = [n for n in item.needs if n.startswith("grad_")]
                arriving = [n for n in needs if grad(place.gradient(n)) in self._contributions]
                if not gives or not arriving:
                    continue
                kept = (item if len(gives) == len(item.gives) else item.only(gives)).given(arriving)
                steps.append(_Step(place, kept, tuple(self._contribute(place.gradient(n)) for n in kept.gives)))
                if item.quantizes is not None:
                    source = grad(place.gradient_of["output"]), item.quantizes.wgrad != "quantized"
                    self._sources[grad(place.gradient_of["input"])] = source
        return steps

    def _place(self, step: _Step, alone: Mapping[str, str]) -> Place:
        """Return the place of a step; a contribution that is ``alone`` is the gradient itself."""
        place, item, _ = step
        names = self._graph.formed(place.values, item.contracts)
        names |= {f"grad_{n}": self._gradient(f"grad_{n}", item, key) for n, key in place.gradient_of.items()}
        needs = tuple(names[n] if n in names else place.value(n) for n in item.needs)
        gives = tuple(alone.get(g, g) for g in step.gives)
        names |= dict(zip(item.gives, gives, strict=True))
        if item.quantizes is not None:
            gives = (*gives, columns(gives[0]))
        assert place.node is not None
        plain = Plain(
            label=f"{place.node.label}.{type(item).__name__}", run=item.compute, needs=needs, gives=gives,
            zeroes_tail=item.zeroes_tail, launches=item.launches,
        )  # fmt: skip
        packs: dict[str, Packed] = {}
        if item.quantizes is not None:
            packs = packs_of(item, gives[0], names["offsets"], self._graph.halved(place.values["input"]))
        return Place(
            item=item, names=names, step=plain, node=place.node, values=place.values, gradient_of=place.gradient_of,
            packs=packs,
        )  # fmt: skip

    def _with_columns_again(self, places: Sequence[Place]) -> list[Place]:
        """Return the places, each after the step that quantizes the columns that it reads again. Only rows of another
        value have such a step, if that value takes fewer bytes than their codes.
        """
        gathered = {v: g for place in self._graph.forward for v, g in place.gathers.items()}
        makers: dict[str, Place] = {}
        for place in self._graph.forward:
            rows, made = (place.values[name] for name in ("input", "output"))
            item = place.op.columns_again()
            if item is not None and rows in gathered and self._nbytes(gathered[rows].source) < self._nbytes(made):
                again = self._place(_Step(place, item, (columns(made),)), {})
                makers[columns(made)] = replace(again, again=True)
        found = []
        for place in places:
            found += [makers.pop(v) for v in place.step.needs if v in makers]
            found.append(place)
        return found

    def _nbytes(self, value: str) -> int:
        spec = self._specs[value]
        assert spec is not None
        return spec.nbytes if isinstance(spec, QuantizedSpec) else TensorSpec(tuple(spec.shape), spec.dtype).nbytes

    def _gradient(self, name: str, item: BackwardOp, key: str) -> str:
        """Return the gradient of a value, in the form that the item reads under this name."""
        g = grad(key)
        if g not in self._contributions:
            return NONE
        axis = item.contracts.get(name)
        if g in self._sources:
            source, by_columns = self._sources[g]
            if name in item.unquantized or (axis == -2 and by_columns):
                return self._in_form(source, None)
        return self._in_form(g, axis)

    def _in_form(self, gradient: str, axis: int | None) -> str:
        if gradient not in self._sources:
            return gradient
        return {-1: gradient, -2: columns(gradient), None: dequantized(gradient)}[axis]

    def _is_read(self, gradient: str, read: Collection[str]) -> bool:
        return not {gradient, columns(gradient), dequantized(gradient)}.isdisjoint(read)

    def _quantized_spec(self, place: Place) -> QuantizedSpec:
        spec = self._specs[place.gradient_of["input"]]
        assert spec is not None
        assert isinstance(place.item, BackwardOp)
        return place.item.infer(spec, self._specs[place.names["offsets"]])
