"""The places of a chain: each op, backward op and piece of glue, with its step and the names of its values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fusedmoe.fusion.graph.steps import Plain
from fusedmoe.fusion.graph.values import (
    NONE,
    Gathered,
    by_rows,
    columns,
    dequantized,
    packed,
    packed_columns,
    packed_forms,
)
from fusedmoe.fusion.language.rule import RuleError
from fusedmoe.numerics.formats.packed import Packed, can_pack, pack_rows
from fusedmoe.ops.glue import Glue
from fusedmoe.ops.op import BackwardOp, Node, Op
from fusedmoe.ops.state import random


@dataclass(frozen=True, kw_only=True)
class Place:
    """An op, a backward op or glue at its position in the chain."""

    item: Op | BackwardOp | Glue
    names: Mapping[str, str]  # the item's own names of values -> the chain's, in the forms that `step` reads
    step: Plain  # in plain PyTorch; of an item that quantizes, with all quantized forms
    node: Node | None = None  # the op and its label; None for glue
    values: Mapping[str, str] = field(default_factory=dict)  # the op's own names -> the chain's, by rows
    # the op's own names -> the values that gradients are named after: others if an op passes rows on unchanged
    gradient_of: Mapping[str, str] = field(default_factory=dict)
    provides: Mapping[str, str] = field(default_factory=dict)  # the values among `values` that the op provides
    all_values: bool = False  # whether these include those of `Op.provides_if_read`
    # whether a rule's step may make forward values again here. Without such a step, the forward pass keeps them
    again: bool = False
    packs: Mapping[str, Packed] = field(default_factory=dict)  # the packed forms of the output, by their names

    @property
    def label(self) -> str:
        """``fc1.GroupedLinear``, ``fc1.Dgrad``."""
        return self.step.label

    @property
    def makes(self) -> tuple[str, ...]:
        """All values that the item can make: those of `step`, and its packed forms."""
        return (*self.step.gives, *self.packs)

    @property
    def op(self) -> Op:
        """The op."""
        assert self.node is not None
        return self.node.op

    def value(self, name: str) -> str:
        """Return the chain's name of a value that the item calls ``name``, or ``name:columns``, ``name:rows``,
        ``name:dequantized``, ``name:packed``, ``name:packed_columns``.
        """
        own, _, form = name.partition(":")
        if own not in self.names:
            raise RuleError(
                f"{self.label}: {name!r} is not a value of {self.item!r}, which has {', '.join(sorted(self.names))}"
            )
        value = self.names[own]
        return value if not form else _IN_FORM[form](by_rows(value))

    def gradient(self, name: str) -> str:
        """Return the value that the op's gradient ``grad_<name>`` is named after in the chain."""
        name = name.removeprefix("grad_")
        return self.gradient_of[name] if name in self.gradient_of else self.value(name)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the op's ``compute`` and ``infer``."""
        return {"all_values": True} if self.all_values else {}

    @property
    def gathers(self) -> dict[str, Gathered]:
        """The values that the item makes and that are rows of another value."""
        names, gathers = self.names, self.item.gathers
        return {names[v]: Gathered(names[s], names[i]) for v, (s, i) in gathers.items() if i in names}

    @property
    def random_states(self) -> tuple[str, ...]:
        """The generator states of an op with ``draws_random``; none for other ops."""
        return tuple(self.values[name] for name in random.NAMES if name in self.values)


_IN_FORM = {
    "rows": by_rows,
    "columns": columns,
    "dequantized": dequantized,
    "packed": packed,
    "packed_columns": packed_columns,
}


def glue_place(item: Glue, label: str, names: Mapping[str, str], halves: bool = False) -> Place:
    """Return the place of glue whose values have these names in the chain. ``halves``: the result packs gate and up."""
    needs, gives = (tuple(names[n] for n in some) for some in (item.needs, item.gives))
    if item.quantizes is not None:
        gives = (gives[0], columns(gives[0]))
    step = Plain(
        label=label, run=item.compute, needs=needs, gives=gives, zeroes_tail=item.zeroes_tail, launches=item.launches
    )
    packs = packed_forms(gives[0], halves) if _packs(item) else {}
    return Place(item=item, names=names, step=step, packs=packs)


def packs_of(item: Op | BackwardOp, output: str, offsets: str, halves: bool) -> dict[str, Packed]:
    """Return the packed forms of the quantized output of an item, for rows with these offsets."""
    return packed_forms(output, halves) if _packs(item) and offsets != NONE else {}


def _packs(item: Op | BackwardOp | Glue) -> bool:
    return item.packs and item.quantizes is not None and can_pack(item.quantizes)


def with_forms(place: Place, read: Collection[str], training: bool) -> Plain:
    """Return the plain step of a place, which gives those of its forms that are read.

    The step of an item that does not quantize gives the item's own values too.
    """
    step = place.step
    if place.item.quantizes is None:
        return _with_packed(place) if any(v in read for v in place.packs) else step
    gives = tuple(v for v in place.makes if v in read) or step.gives[:1]
    axes = tuple(place.packs.get(v, -1 if v == step.gives[0] else -2) for v in gives)
    return replace(step, run=partial(step.run, axes=axes, training=training), gives=gives)


def _with_packed(place: Place) -> Plain:
    """Return the plain step of an op, which also gives its output in the packed layout."""
    step, ((name, form),) = place.step, place.packs.items()
    at, offsets = step.gives.index(by_rows(name)), step.needs.index(place.names["offsets"])

    def run(*tensors: Any) -> tuple[Any, ...]:
        out = step.run(*tensors)
        results = out if isinstance(out, tuple) else (out,)
        return (*results, pack_rows(results[at], tensors[offsets], form.halves))

    return replace(step, run=run, gives=(*step.gives, name), launches=step.launches + _LAUNCHES_TO_PACK)


def packing(place: Place, name: str, training: bool) -> Plain:
    """Return the step that makes a packed form of a place's output, after the place's own step.

    It reads the place's operands if the place quantizes, and otherwise the output.
    """
    if place.item.quantizes is not None:
        return with_forms(place, (name,), training)
    pack, value = partial(pack_rows, halves=place.packs[name].halves), by_rows(name)
    needs = value, place.names["offsets"]
    return Plain(label=f"pack {value}", run=pack, needs=needs, gives=(name,), launches=_LAUNCHES_TO_PACK)


_LAUNCHES_TO_PACK = 12


def training_place(place: Place) -> Place:
    """Return the place of an op in a forward pass that has a backward pass.

    An op with ``draws_random`` also gives the generator states from before its call. The first run of a third-party op
    checks that it draws no random numbers without declaring so.
    """
    op, step, states = place.op, place.step, place.random_states
    if states:
        run = partial(random.compute_noting_states, op, **place.keywords)
        return replace(place, step=replace(step, run=run, gives=(*step.gives, *states)))
    if not type(op).__module__.startswith("fusedmoe."):
        return replace(place, step=replace(step, first=partial(random.compute_watched, op, **place.keywords)))
    return place


def drawn_again(place: Place) -> Plain:
    """Return the step that recomputes an op, with the same random numbers."""
    step, states = place.step, place.random_states
    if not states:
        return step
    return replace(step, run=partial(random.compute_again, place.op, **place.keywords), needs=(*step.needs, *states))
