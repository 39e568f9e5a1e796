"""A chain as values and steps in plain PyTorch, forward and backward: what the planner covers with rules.

Values are named ``<label>.<name>``: ``"fc1.input"`` is what goes into the op labelled fc1, and also what the op before
gave; ``"<last>.output"`` is the chain's result; ``"fc1.weight"`` a parameter, ``"dispatch.splits"`` a value that an op
provides, ``"splits"`` a runtime input of the chain, ``"grad(fc1.input)"`` a gradient.

A value, a parameter or a gradient that is quantized has up to three forms, of which those are made that a step reads:
by rows under its own name, by columns (``"fc1.input:columns"``), and what it stands for (``"fc1.input:dequantized"``).
Each step says along which axis it sums over an operand (``contracts``), and gets that form; a step that sums over
nothing gets what the value stands for.

An op that only passes its rows on in one direction, as `Quantize` does in backward, has no place there: what goes in
and what comes out is one value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from fusedmoe.checks import check_names
from fusedmoe.errors import InputError
from fusedmoe.formats import QuantizedSpec
from fusedmoe.fusion.forms import dequantize, set_forms, weight_quantizations, with_forms
from fusedmoe.fusion.names import NONE, columns, dequantized, grad, primal, quantized
from fusedmoe.fusion.plain import Plain
from fusedmoe.fusion.rule import RuleError
from fusedmoe.kernels.torch.rows import zero_tail_
from fusedmoe.ops import random_state
from fusedmoe.ops.derived import CHECKED, DERIVED, OFFSETS
from fusedmoe.ops.op import BackwardOp, Node, Op, TensorSpec
from fusedmoe.ops.quantize import Quantize, QuantizeGrad

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from fusedmoe.ops.op import SpecLike


@dataclass(frozen=True)
class Place:
    """An op, or one step of its backward, at its position in the chain.

    Attributes
    ----------
    node : Node
        The op and its label.
    item : Op or BackwardOp
        The op itself, or the step of its backward.
    names : dict of str to str
        The op's own names of values -> the chain's, in the forms that it reads.
    step : Plain
        What it runs.
    values, keys : dict of str to str
        The op's own names -> the chain's, whatever the form, and -> the value whose gradient is the one of that name:
        these differ around an op that passes its rows, or its gradient, on.
    """

    node: Node
    item: Op | BackwardOp
    names: Mapping[str, str]
    step: Plain
    values: Mapping[str, str]
    keys: Mapping[str, str]

    @property
    def label(self) -> str:
        """``fc1.GroupedLinear``, ``fc1.Dgrad``."""
        return self.step.label

    def value(self, name: str) -> str:
        """Return the chain's name of a value that the op knows as ``name``."""
        if name not in self.names:
            raise RuleError(
                f"{self.label}: {name!r} is no value of {self.node.op!r}; it has {', '.join(sorted(self.names))}"
            )
        return self.names[name]


class Backward(NamedTuple):
    """The backward chain for some set of wanted gradients.

    Attributes
    ----------
    places : tuple of Place
        The steps that any wanted gradient needs, from the last op to the first.
    glue : tuple of Plain
        What adds up gradients that several ops contribute to, and what dequantizes.
    incoming : dict of str to str
        For each output of the chain that has a gradient: the name under which its incoming gradient is known.
    gradients : dict of str to str
        For each argument that gets a gradient: its name.
    specs : dict of str to QuantizedSpec
        Of the gradients that are quantized, in each form.
    """

    places: tuple[Place, ...]
    glue: tuple[Plain, ...]
    incoming: Mapping[str, str]
    gradients: Mapping[str, str]
    specs: Mapping[str, QuantizedSpec]

    @property
    def needs(self) -> set[str]:
        """Every value that a step reads."""
        return {v for step in (*(p.step for p in self.places), *self.glue) for v in step.needs}


NO_BACKWARD = Backward((), (), {}, {}, {})


class Forward(NamedTuple):
    """The forward chain, in which every quantized value has the forms that are read.

    Attributes
    ----------
    places : tuple of Place
        The ops in order.
    weights, glue : tuple of Plain
        What quantizes weights, and what dequantizes.
    """

    places: tuple[Place, ...]
    weights: tuple[Plain, ...]
    glue: tuple[Plain, ...]


class Graph:
    """The forward chain of some nodes, and, per set of wanted gradients, its backward chain.

    Parameters
    ----------
    nodes
        The ops with their labels, in order.
    exports
        Names that ops of this chain provide and that something after the chain wants.
    inputs
        The runtime inputs that the caller gives, in the caller's order; others that ops want come after them.
    sorted_rows
        The sets of rows, numbered from 0, that are sorted by expert although no op here takes their offsets: each with
        the op outside that does. The chain derives their offsets from ``splits`` too.
    provided
        The runtime inputs that come from ops before the chain: their values need no check.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        exports: Collection[str] = (),
        inputs: Collection[str] = (),
        sorted_rows: Mapping[int, str] = MappingProxyType({}),
        provided: Collection[str] = (),
    ) -> None:
        self.nodes = tuple(nodes)
        self.main = (*(f"{node.label}.input" for node in nodes), f"{nodes[-1].label}.output")
        self.inputs = list(inputs)  # runtime inputs that the caller gives
        self.parameters = tuple(f"{n.label}.{p}" for n in nodes for p in n.op.parameter_names)
        self.derived: dict[str, Plain] = {}
        self._derived_infer: dict[str, Callable[..., TensorSpec]] = {}
        # what a bare name means here: the latest provider's value, else the caller's
        scope = {name: name for name in inputs}
        self._rows_of: dict[str, int] = {}  # which set of rows (they change at Dispatch and Combine) a value belongs to
        self._split_rows: dict[int, str] = {}  # the offsets that say where the rows of that set end
        self._sorted_rows = sorted_rows
        self._provided = frozenset(provided)
        self._takes_offsets = {**sorted_rows, **first_takers_of_offsets(nodes)}
        self._quantized: set[str] = set()  # values that a Quantize gives, weights among them
        quantizations = weight_quantizations(nodes)
        self.quantized_layers = tuple(run.layer for _, run, _ in quantizations.values())
        self.weights = {  # what quantizes weights, by the weight
            weight: Plain(label, run, (weight,), (quantized(weight), columns(quantized(weight))), launches=launches)
            for weight, (label, run, launches) in quantizations.items()
        }
        self._quantized.update(map(quantized, self.weights))
        places = []
        rows = 0
        # where rows, or their gradient, pass an op as they are, they go by the name of the op behind it
        values = _names_past(self.main, [node.op.passes_forward for node in nodes])
        keys = _names_past(self.main, [node.op.passes_backward for node in nodes])
        if rows in sorted_rows:
            self._derive("offsets", scope, values[0], rows, sorted_rows[rows])
        for i, node in enumerate(nodes):
            self._rows_of[self.main[i]] = rows
            ends = {"input": values[i], "output": values[i + 1]}
            places.append(self._forward_place(node, ends, {"input": keys[i], "output": keys[i + 1]}, scope, rows))
            if isinstance(node.op, Quantize) and not node.op.passes_forward:
                self._quantized.add(ends["output"])
            rows += node.op.changes_rows
            for name in node.op.provides:
                scope[name] = f"{node.label}.{name}"
            if "splits" in node.op.provides or (node.op.changes_rows and rows in sorted_rows):
                taker = sorted_rows.get(rows, f"{node.label}.{type(node.op).__name__}")
                self._derive("offsets", scope, ends["output"], rows, taker)
        self._rows_of[self.main[-1]] = rows
        self.places = tuple(places)
        self.forward = tuple(place for place in places if not place.node.op.passes_forward)
        self.exports = {name: scope[name] for name in exports}
        self.outputs = (self._form(values[-1], None), *self.exports.values())
        self._output_keys = (keys[-1], *self.exports.values())
        self.arguments = (values[0], *self.inputs, *self.parameters)
        self._argument_keys = {values[0]: keys[0]}
        self.random_states = tuple(v for p in self.forward for v in _random_states(p))
        # what gives a value again
        steps = (*map(drawn_again, self.forward), *self.weights.values(), *map(dequantize, self._quantized))
        self.producers = {value: step for step in steps for value in step.gives} | self.derived
        _reject_double_weights(self.forward)

    @property
    def takers(self) -> dict[str, list[str]]:
        """Each runtime input that the caller gives, with the ops that take it."""
        outside = [*self._sorted_rows.values()]
        return {name: [p.label for p in self.forward if name in p.values.values()] or outside for name in self.inputs}

    def _forward_place(
        self, node: Node, ends: Mapping[str, str], keys: Mapping[str, str], scope: dict[str, str], rows: int
    ) -> Place:
        label, op = node
        kind = f"{label}.{type(op).__name__}"
        check_names(kind, "runtime_inputs", [n for n in op.runtime_inputs if n not in DERIVED], op.parameter_names)
        check_names(kind, "provides", op.provides, op.parameter_names)
        values = {**ends, **{p: f"{label}.{p}" for p in op.parameter_names}}
        keys = {**keys, **{p: f"{label}.{p}" for p in op.parameter_names}}
        for p in op.parameter_names:
            if values[p] in self.weights:
                values[p] = quantized(values[p])
        for name in op.runtime_inputs:
            if name in DERIVED:
                values[name] = self._derive(name, scope, ends["input"], rows, kind)
                values[DERIVED[name].source] = scope[DERIVED[name].source]
            elif name in CHECKED and name not in self._provided and scope.get(name, name) == name:  # of the caller
                values[name] = self._derive(CHECKED[name].name, scope, ends["input"], rows, kind)
                values[f"{name} of the caller"] = name
            else:
                values[name] = self._take(name, scope)
                if name in op.rowwise_inputs:
                    self._rows_of.setdefault(values[name], rows)
        for name in op.optional_inputs:  # offsets, where these rows have any
            taker = self._takes_offsets.get(rows)
            values[name] = NONE if taker is None else self._derive(name, scope, ends["input"], rows, taker)
        needs = ("input", *op.parameter_names, *op.runtime_inputs, *op.optional_inputs)
        output = ends["output"]
        gives = (output, *(f"{label}.{p}" for p in op.provides))
        if isinstance(op, Quantize):
            gives = (output, columns(output))
            values["columns"] = columns(output)
        values |= {p: f"{label}.{p}" for p in op.provides}
        if op.draws_random:
            values |= {p: f"{label}.{p}" for p in random_state.NAMES}
        values |= {alias: values[name] for alias, name in op.aliases.items()}
        names = self._formed(values, op.contracts)
        step = Plain(kind, op.compute, tuple(names[n] for n in needs), gives, op.zeroes_tail, op.launches)
        return Place(node, op, names, step, values, values | keys)

    def _form(self, value: str, axis: int | None) -> str:
        """Return the form of a value that a step reads which sums over this axis of it."""
        if value not in self._quantized or axis == -1:
            return value
        return dequantized(value) if axis is None else columns(value)

    def _formed(self, values: Mapping[str, str], contracts: Mapping[str, int]) -> dict[str, str]:
        outside = {name: value for name, value in values.items() if name not in ("output", "columns")}
        return {**values, **{name: self._form(value, contracts.get(name)) for name, value in outside.items()}}

    def _take(self, name: str, scope: dict[str, str]) -> str:
        if name not in scope:
            scope[name] = name
            self.inputs.append(name)
        return scope[name]

    def _derive(self, name: str, scope: dict[str, str], rows_value: str, rows: int, taker: str) -> str:
        derived = DERIVED[name]
        source = self._take(derived.source, scope)
        value = source.removesuffix(derived.source) + name
        if value not in self.derived:
            run = partial(_for_taker, derived.compute, taker)
            self.derived[value] = Plain(value, run, (source, rows_value), (value,))
            self._derived_infer[value] = derived.infer
            if name == OFFSETS.name:
                self._split_rows.setdefault(rows, value)
        return value

    def tail_offsets(self, value: str) -> str | None:
        """Return the offsets that say where the experts' rows of this value end; None for a value that has no such
        rows.
        """
        rows = self._rows_of.get(value)
        return None if rows is None else self._split_rows.get(rows)

    def zero_tail(self, value: str, renamed: str) -> Plain | None:
        """Return the glue that zeroes the tail rows of a value, or of its gradient, under a new name; None if it has
        none.
        """
        offsets = self.tail_offsets(primal(value))
        if offsets is None:
            return None
        return Plain(
            f"zero_tail({value})", lambda t, o: zero_tail_(t.clone(), o), (value, offsets), (renamed,), launches=4
        )

    def infer(self, arguments: Mapping[str, SpecLike | None]) -> dict[str, SpecLike | None]:
        """Check a call's arguments, op by op, and return the spec of every value of the forward pass.

        Raises
        ------
        InputError
            With the op, the argument, what was expected and what came.
        """
        specs: dict[str, Any] = {**arguments, NONE: None}
        for weight, step in self.weights.items():
            try:
                set_forms(specs, quantized(weight), step.run.infer(specs[weight]))  # type: ignore[attr-defined]
            except InputError as error:
                raise InputError(f"{step.label}: {error}") from None
        for place in self.forward:
            try:
                for value in place.step.needs:
                    if value in self.derived and value not in specs:
                        source, rows = self.derived[value].needs
                        specs[value] = self._derived_infer[value](specs[source], specs[rows])
                out = place.item.infer(*[specs[v] for v in place.step.needs])  # type: ignore[union-attr]
            except InputError as error:
                raise InputError(f"{place.label}: {error}") from None
            if isinstance(out, QuantizedSpec):
                set_forms(specs, place.values["output"], out)
                continue
            for value, spec in zip(place.step.gives, (out,) if isinstance(out, TensorSpec) else out, strict=True):
                specs[value] = spec
            specs.update(dict.fromkeys(_random_states(place)))  # which have the size that the generators give them
        for place in self.places:  # the names that gradients go by
            specs.setdefault(place.keys["input"], specs[place.values["input"]])
            specs.setdefault(place.keys["output"], specs[place.values["output"]])
        for value, step in self.derived.items():  # offsets that only the tail masks want
            if value not in specs:
                specs[value] = self._derived_infer[value](*[specs[v] for v in step.needs])
        return specs

    def chosen(self, backward: Backward) -> Forward:
        """Return the forward chain with the forms of quantized values that it reads, or this backward chain does."""
        training = backward is not NO_BACKWARD
        needs = {*self.outputs, *(v for p in self.forward for v in p.step.needs)}
        glue = tuple(map(dequantize, sorted(v for v in self._quantized if dequantized(v) in needs)))
        needs |= {v for step in glue for v in step.needs} | backward.needs
        places = tuple(
            replace(place, step=with_forms(place.step, needs, training))
            if isinstance(place.item, Quantize)
            else _with_states(place)
            if training
            else place
            for place in self.forward
        )
        return Forward(places, tuple(with_forms(step, needs, training) for step in self.weights.values()), glue)

    def backward(self, wanted: Collection[str], specs: Mapping[str, SpecLike | None]) -> Backward:
        """Return the backward chain for the gradients of these arguments."""
        differentiable = self._differentiable(wanted, specs)
        contributions: dict[str, list[str]] = {}

        def contribute(key: str) -> str:
            names = contributions.setdefault(grad(key), [])
            names.append(f"{grad(key)}#{len(names)}")
            return names[-1]

        outputs = zip(self.outputs, self._output_keys, strict=True)
        incoming = {value: contribute(key) for value, key in outputs if key in differentiable}
        chosen: list[tuple[Place, BackwardOp, tuple[str, ...]]] = []
        sources: dict[str, str] = {}  # of each quantized gradient: the gradient that it was quantized from
        for place in reversed(self.places):
            for item in place.item.backward_ops():  # type: ignore[union-attr]
                gives = tuple(n for n in item.gives if _key(place, n) in differentiable)
                arriving = [grad(_key(place, n)) for n in item.needs if n.startswith("grad_")]
                if not gives or not any(g in contributions for g in arriving):
                    continue
                kept = item if len(gives) == len(item.gives) else item.only(gives)
                chosen.append((place, kept, tuple(contribute(_key(place, n)) for n in kept.gives)))
                if isinstance(item, QuantizeGrad):
                    sources[grad(place.keys["input"])] = grad(place.keys["output"])
        single = {names[0]: g for g, names in contributions.items() if len(names) == 1}
        sums = tuple(
            Plain(f"sum of {g}", _add, tuple(names), (g,), zeroes_tail=False)
            for g, names in contributions.items()
            if len(names) > 1
        )

        def gradient(name: str, item: BackwardOp, key: str) -> str:
            """The form of a gradient that an item reads under this name."""
            g = grad(key)
            if g not in contributions:
                return NONE
            if g not in sources:
                return g
            if name in item.unquantized:
                return sources[g]
            return {-1: g, -2: columns(g), None: dequantized(g)}[item.contracts.get(name)]

        places = []
        for place, item, gives in chosen:
            names = self._formed(place.values, item.contracts)
            names |= {f"grad_{n}": gradient(f"grad_{n}", item, key) for n, key in place.keys.items()}
            if place.values["input"] in self._quantized:  # for a rule that computes it again
                names.setdefault("columns", columns(place.values["input"]))
            missing = [n for n in item.needs if n not in names]
            needs = tuple(place.value(n) if n in missing else names[n] for n in item.needs)
            renamed = tuple(single.get(g, g) for g in gives)
            names |= dict(zip(item.gives, renamed, strict=True))
            if isinstance(item, QuantizeGrad):
                renamed = (*renamed, columns(renamed[0]))
                names["grad_columns"] = renamed[1]
            label = f"{place.node.label}.{type(item).__name__}"
            step = Plain(label, item.compute, needs, renamed, item.zeroes_tail, item.launches)
            places.append(Place(place.node, item, names, step, place.values, place.keys))
        arguments = {a: grad(self._argument_keys.get(a, a)) for a in self.arguments if a in wanted}
        gradients = {a: g for a, g in arguments.items() if g in contributions}
        gradients = {a: dequantized(g) if g in sources else g for a, g in gradients.items()}
        incoming = {v: single.get(g, g) for v, g in incoming.items()}
        return self._with_forms_read(Backward(tuple(places), sums, incoming, gradients, {}), sources.keys(), specs)

    def _with_forms_read(
        self, backward: Backward, quantized_grads: Collection[str], specs: Mapping[str, SpecLike | None]
    ) -> Backward:
        """Add what dequantizes gradients and kept values, and give every quantized gradient the forms that are read."""
        if not quantized_grads and not self._quantized:
            return backward
        needs = {*backward.needs, *backward.gradients.values()}
        sources = sorted(v for v in {*quantized_grads, *self._quantized} if dequantized(v) in needs)
        glue = tuple(map(dequantize, sources))
        needs |= {v for step in glue for v in step.needs}
        places = []
        of_grads: dict[str, QuantizedSpec] = {}
        for place in backward.places:
            if isinstance(place.item, QuantizeGrad):
                if needs.isdisjoint(place.step.gives):
                    continue
                spec = specs[place.keys["input"]]
                assert spec is not None
                set_forms(of_grads, place.step.gives[0], place.item.infer(spec))
                place = replace(place, step=with_forms(place.step, needs, training=True))
            places.append(place)
        return backward._replace(places=tuple(places), glue=(*backward.glue, *glue), specs=of_grads)

    def _differentiable(self, wanted: Collection[str], specs: Mapping[str, SpecLike | None]) -> set[str]:
        """Return the values through which a wanted gradient flows, the wanted arguments among them."""
        found = {self._argument_keys.get(a, a) for a in wanted}
        for place in self.places:
            for item in place.item.backward_ops():  # type: ignore[union-attr]
                if any(_key(place, n) in found for n in item.gives):
                    through = [_key(place, n) for n in item.needs if n.startswith("grad_")]
                    found.update(v for v in through if (spec := specs[v]) is not None and spec.dtype.is_floating_point)
        return found


def _random_states(place: Place) -> tuple[str, ...]:
    return tuple(place.values[name] for name in random_state.NAMES if name in place.values)


def _with_states(place: Place) -> Place:
    """Return the place of an op in a forward pass that has a backward pass. An op that says that it draws gives the
    states that it draws from; another one that is not ours is watched once, whether it draws.
    """
    op, step = place.item, place.step
    assert isinstance(op, Op)
    if states := _random_states(place):
        run = partial(random_state.compute_noting_states, op)
        return replace(place, step=replace(step, run=run, gives=(*step.gives, *states)))
    if not type(op).__module__.startswith("fusedmoe."):
        return replace(place, step=replace(step, first=partial(random_state.compute_watched, op)))
    return place


def drawn_again(place: Place) -> Plain:
    """Return the step that computes an op again, with the numbers that it drew the first time."""
    op, step = place.item, place.step
    assert isinstance(op, Op)
    states = _random_states(place)
    return replace(step, run=partial(random_state.compute_again, op), needs=(*step.needs, *states)) if states else step


def _names_past(main: Sequence[str], passes: Sequence[bool]) -> list[str]:
    names = list(main)
    for i in reversed(range(len(passes))):
        if passes[i]:
            names[i] = names[i + 1]
    return names


def _key(place: Place, gradient: str) -> str:
    """The value whose gradient an op's backward calls ``grad_<name>``."""
    name = gradient.removeprefix("grad_")
    return place.keys[name] if name in place.keys else place.value(name)


def first_takers_of_offsets(nodes: Sequence[Node]) -> dict[int, str]:
    """Return, for each set of rows that is sorted by expert, the op whose error it is where the splits are wrong."""
    takers: dict[int, str] = {}
    rows = 0
    for label, op in nodes:
        if "offsets" in op.runtime_inputs:
            takers.setdefault(rows, f"{label}.{type(op).__name__}")
        rows += op.changes_rows
        if "splits" in op.provides:
            takers.setdefault(rows, f"{label}.{type(op).__name__}")
    return takers


def _for_taker(
    compute: Callable[..., Tensor],
    taker: str,
    source: Tensor,
    rows: Tensor,
    kernel: Callable[[Tensor, int], Tensor] | None = None,
) -> Tensor:
    try:
        return compute(source, rows, kernel)
    except InputError as error:
        raise InputError(f"{taker}: {error}") from None


def _add(*terms: Tensor) -> Tensor:
    total = terms[0] + terms[1]
    for term in terms[2:]:
        total = total + term
    return total


def _reject_double_weights(places: Sequence[Place]) -> None:
    applied: dict[str, str] = {}
    for place in places:
        for name in place.node.op.applies:
            value = place.values[name]
            if value in applied:
                raise InputError(
                    f"{name!r} would be applied twice, by {applied[value]} and by {place.label}; "
                    f"drop the Scale, or use Combine(weights=None)"
                )
            applied[value] = place.label
