"""A chain as values and steps in plain PyTorch, forward and backward: what the planner covers with rules.

Values are named ``<label>.<name>``: ``"fc1.input"`` is what goes into the op labelled fc1, and also what the op before
gave; ``"<last>.output"`` is the chain's result; ``"fc1.weight"`` a parameter, ``"dispatch.splits"`` a value that an op
provides, ``"splits"`` a runtime input of the chain, ``"grad(fc1.input)"`` a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fusedmoe.errors import InputError
from fusedmoe.fusion.names import NONE, grad, primal
from fusedmoe.fusion.rule import RuleError
from fusedmoe.kernels.torch.rows import zero_tail_
from fusedmoe.ops.derived import DERIVED
from fusedmoe.ops.op import BackwardOp, Node, Op, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from fusedmoe.ops.op import SpecLike


@dataclass(frozen=True)
class Plain:
    """One step in plain PyTorch: an op, a backward op, or glue between them (derived values, gradient sums, tail
    masks).
    """

    label: str
    run: Callable[..., Any]
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    zeroes_tail: bool = True
    launches: int = 1
    bind: Callable[..., Callable[..., Any]] | None = None  # as in `fusedmoe.fusion.rule.Step`


@dataclass(frozen=True)
class Place:
    """An op, or one step of its backward, at its position in the chain."""

    node: Node
    item: Op | BackwardOp
    names: Mapping[str, str]  # the op's own names of values -> the chain's
    step: Plain

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
    """

    def __init__(self, nodes: Sequence[Node], exports: Collection[str] = (), inputs: Collection[str] = ()) -> None:
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
        places = []
        rows = 0
        for i, node in enumerate(nodes):
            self._rows_of[self.main[i]] = rows
            place = self._forward_place(i, node, scope, rows)
            places.append(place)
            rows += node.op.changes_rows
            for name in node.op.provides:
                scope[name] = f"{node.label}.{name}"
            if "splits" in node.op.provides:
                self._derive("offsets", scope, self.main[i + 1], rows, f"{node.label}.{type(node.op).__name__}")
        self._rows_of[self.main[-1]] = rows
        self.forward = tuple(places)
        self.exports = {name: scope[name] for name in exports}
        self.outputs = (self.main[-1], *self.exports.values())
        self.arguments = (self.main[0], *self.inputs, *self.parameters)
        self.producers = {value: place.step for place in self.forward for value in place.step.gives} | self.derived
        _reject_double_weights(self.forward)

    @property
    def takers(self) -> dict[str, list[str]]:
        """Each runtime input that the caller gives, with the ops that take it."""
        return {name: [p.label for p in self.forward if name in p.names.values()] for name in self.inputs}

    def _forward_place(self, i: int, node: Node, scope: dict[str, str], rows: int) -> Place:
        label, op = node
        names = {"input": self.main[i], "output": self.main[i + 1]}
        names |= {p: f"{label}.{p}" for p in op.parameter_names}
        for name in op.runtime_inputs:
            if name in DERIVED:
                names[name] = self._derive(name, scope, self.main[i], rows, f"{label}.{type(op).__name__}")
                names[DERIVED[name].source] = scope[DERIVED[name].source]
            else:
                names[name] = self._take(name, scope)
                if name in op.rowwise_inputs:
                    self._rows_of.setdefault(names[name], rows)
        needs = ("input", *op.parameter_names, *op.runtime_inputs)
        step = Plain(
            f"{label}.{type(op).__name__}",
            op.compute,
            tuple(names[n] for n in needs),
            (self.main[i + 1], *(f"{label}.{p}" for p in op.provides)),
            op.zeroes_tail,
            op.launches,
        )
        names |= {p: f"{label}.{p}" for p in op.provides}
        names |= {alias: names[name] for alias, name in op.aliases.items()}
        return Place(node, op, names, step)

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
            if name == "offsets":
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
        specs: dict[str, Any] = dict(arguments)
        for place in self.forward:
            try:
                for value in place.step.needs:
                    if value in self.derived and value not in specs:
                        source, rows = self.derived[value].needs
                        specs[value] = self._derived_infer[value](specs[source], specs[rows])
                out = place.item.infer(*[specs[v] for v in place.step.needs])  # type: ignore[union-attr]
            except InputError as error:
                raise InputError(f"{place.label}: {error}") from None
            for value, spec in zip(place.step.gives, (out,) if isinstance(out, TensorSpec) else out, strict=True):
                specs[value] = spec
        for value, step in self.derived.items():  # offsets that only the tail masks want
            if value not in specs:
                specs[value] = self._derived_infer[value](*[specs[v] for v in step.needs])
        return specs

    def backward(
        self, wanted: Collection[str], specs: Mapping[str, SpecLike | None]
    ) -> tuple[tuple[Place, ...], tuple[Plain, ...], dict[str, str]]:
        """Return the backward chain for the gradients of these arguments.

        Returns
        -------
        places : tuple of Place
            The steps that any wanted gradient needs, from the last op to the first.
        sums : tuple of Plain
            Glue that adds up gradients which several ops contribute to.
        incoming : dict of str to str
            For each output of the chain that has a gradient: the name under which its incoming gradient is known.
        """
        differentiable = self._differentiable(wanted, specs)
        contributions: dict[str, list[str]] = {}

        def contribute(value: str) -> str:
            names = contributions.setdefault(grad(value), [])
            names.append(f"{grad(value)}#{len(names)}")
            return names[-1]

        incoming = {value: contribute(value) for value in self.outputs if value in differentiable}
        chosen: list[tuple[Place, BackwardOp, tuple[str, ...]]] = []
        for place in reversed(self.forward):
            for item in place.item.backward_ops():  # type: ignore[union-attr]
                gives = tuple(n for n in item.gives if place.value(n.removeprefix("grad_")) in differentiable)
                arriving = [grad(place.value(n.removeprefix("grad_"))) for n in item.needs if n.startswith("grad_")]
                if not gives or not any(g in contributions for g in arriving):
                    continue
                kept = item if len(gives) == len(item.gives) else item.only(gives)
                chosen.append(
                    (place, kept, tuple(contribute(place.value(n.removeprefix("grad_"))) for n in kept.gives))
                )
        single = {names[0]: g for g, names in contributions.items() if len(names) == 1}
        sums = tuple(
            Plain(f"sum of {g}", _add, tuple(names), (g,), zeroes_tail=False)
            for g, names in contributions.items()
            if len(names) > 1
        )
        places = []
        for place, item, gives in chosen:
            names = dict(place.names) | {f"grad_{n}": grad(v) for n, v in place.names.items()}
            needs = tuple(
                NONE if n.startswith("grad_") and names[n] not in contributions else names.get(n) or place.value(n)
                for n in item.needs
            )
            label = f"{place.node.label}.{type(item).__name__}"
            renamed = tuple(single.get(g, g) for g in gives)
            names |= dict(zip(item.gives, renamed, strict=True))
            step = Plain(label, item.compute, needs, renamed, item.zeroes_tail, item.launches)
            places.append(Place(place.node, item, names, step))
        return tuple(places), sums, {v: single.get(g, g) for v, g in incoming.items()}

    def _differentiable(self, wanted: Collection[str], specs: Mapping[str, SpecLike | None]) -> set[str]:
        """Return the values through which a wanted gradient flows, the wanted arguments among them."""
        found = set(wanted)
        for place in self.forward:
            for item in place.item.backward_ops():  # type: ignore[union-attr]
                if any(place.value(n.removeprefix("grad_")) in found for n in item.gives):
                    through = [place.value(n.removeprefix("grad_")) for n in item.needs if n.startswith("grad_")]
                    found.update(v for v in through if (spec := specs[v]) is not None and spec.dtype.is_floating_point)
        return found


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
            value = place.names[name]
            if value in applied:
                raise InputError(
                    f"{name!r} would be applied twice, by {applied[value]} and by {place.label}; "
                    f"drop the Scale, or use Combine(weights=None)"
                )
            applied[value] = place.label
