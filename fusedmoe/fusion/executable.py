"""A plan that runs: the forward program, and a backward program for each set of gradients that a call asks for."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fusedmoe.formats import QuantizedSpec
from fusedmoe.fusion import registry
from fusedmoe.fusion.candidates import Costs
from fusedmoe.fusion.choice import nearest_miss
from fusedmoe.fusion.differentiable import (
    GradientProgram,
    SecondOrderError,
    argument_names,
    gradient_program,
    why_not,
)
from fusedmoe.fusion.graph import Graph, Place
from fusedmoe.fusion.names import NONE, columns, primal
from fusedmoe.fusion.plain import Plain
from fusedmoe.fusion.plan import Attempt, PlanData, PlannedStep, Status, missed_text
from fusedmoe.fusion.program import AnyStep, Fused, Program, Runs, Values, needed_steps
from fusedmoe.fusion.results import Specs
from fusedmoe.fusion.rule import FusionError
from fusedmoe.fusion.signature import Signature, signature
from fusedmoe.log import say_once
from fusedmoe.ops.op import TensorSpec
from fusedmoe.ops.quantize import Quantize, QuantizeGrad, WeightQuantization

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from fusedmoe.formats import Quantizer
    from fusedmoe.fusion.rule import Direction
    from fusedmoe.kernels.options import KernelOptions
    from fusedmoe.ops.op import SpecLike
    from fusedmoe.recipes import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Environment:
    """Everything besides the ops and their arguments that a plan depends on."""

    device: torch.device
    arch: int | None
    deterministic: bool
    recipe: Recipe
    disabled: tuple[str, ...]
    options: KernelOptions
    asked: bool = False  # whether the device is one that `explain` was asked about, and need not be there
    estimated: bool = False  # whether the call is one that an estimator of torch watches; see `fusedmoe.estimating`


@dataclass(frozen=True)
class PlannedSpan:
    """A step of the plan and the places that it covers."""

    direction: Direction
    position: int
    step: AnyStep
    places: tuple[Place, ...]
    extra_bytes: int
    nearest_miss: Attempt | None

    def host_sync(self, specs: Mapping[str, SpecLike | None], device: torch.device) -> bool:
        """Whether it reads a tensor on the host."""
        if isinstance(self.step, Fused):
            return False
        (place,) = self.places
        rows = specs[place.names["input"]]
        assert rows is not None
        return place.item.host_sync(rows, device)

    def planned(self, specs: Mapping[str, SpecLike | None], costs: Costs, device: torch.device) -> PlannedStep:
        """Return the step as data."""
        step = self.step
        return PlannedStep(
            self.direction,
            tuple(p.label for p in self.places),
            step.rule if isinstance(step, Fused) else None,
            tuple(v for v in step.needs if v != NONE),
            step.gives,
            int(costs.moved((*step.needs, *step.gives))) + self.extra_bytes,
            step.launches,
            self.host_sync(specs, device),
            self.nearest_miss,
            self.path(specs, device),
            tuple((q.label, str(q.quantizer)) for q in filter(None, map(_quantized, self.places))),
        )

    def path(self, specs: Mapping[str, SpecLike | None], device: torch.device) -> str:
        """How plain PyTorch multiplies quantized operands in it."""
        if isinstance(self.step, Fused):
            return ""
        (place,) = self.places
        return place.item.path([specs.get(v, specs.get(primal(v))) for v in place.step.needs], device)


def with_plain_gradients(specs: Mapping[str, SpecLike | None], places: Iterable[Place]) -> dict[str, SpecLike | None]:
    """Return the specs with those of the gradients of quantized values which are not quantized themselves.

    Parameters
    ----------
    specs
        Of every value of the forward pass and of every quantized gradient.
    places
        Of the backward pass; others do no harm.
    """
    found = dict(specs)
    for value in (v for place in places for v in place.names.values()):
        of = specs.get(primal(value))
        if value not in specs and isinstance(of, QuantizedSpec):
            found[value] = TensorSpec(of.shape, of.dtype)
    return found


def with_layouts(
    specs: Mapping[str, SpecLike | None], graph: Graph, places: Iterable[Place]
) -> dict[str, SpecLike | None]:
    """Return the specs with what only the steps that quantize know: how codes and scales lie in memory.

    Parameters
    ----------
    specs
        Of every value and of every quantized gradient.
    graph, places
        The chain, and its places of both directions.
    """
    found = dict(specs)
    for step in graph.weights.values():
        for value in step.gives:
            if isinstance(spec := specs.get(value), QuantizedSpec):
                found[value] = spec._replace(stacked=len(spec.shape) == 3)
    for quantized in filter(None, map(_quantized, places)):
        offsets = specs[quantized.offsets]
        experts = None if offsets is None else offsets.shape[0]
        for value in quantized.forms:
            if isinstance(spec := specs.get(value), QuantizedSpec):
                rotated = quantized.quantizer.hadamard and spec.axis == -2
                found[value] = spec._replace(experts=experts, rotated=rotated)
    return found


class _Quantized(NamedTuple):
    """What the step of a place quantizes: rows or their gradient."""

    label: str  # as in `PlannedStep.quantizes`
    quantizer: Quantizer
    forms: tuple[str, str]  # the values by rows and by columns
    offsets: str


def _quantized(place: Place) -> _Quantized | None:
    """Return what the step of a place quantizes, if it quantizes."""
    item = place.item
    if isinstance(item, Quantize):
        quantizer, role, rows = item.quantizer, "input", "output"
    elif isinstance(item, QuantizeGrad):
        quantizer, role, rows = item.op.grad_quantizer, "grad", "grad_input"
    else:
        return None
    assert quantizer is not None, "otherwise there is no step"
    value = place.names[rows]
    return _Quantized(_in_role(place.node.label, role), quantizer, (value, columns(value)), place.names["offsets"])


def _in_role(label: str, role: str) -> str:
    """``0:weight`` of the op with that label, which a recipe has inserted, and of an op ``0`` that was written out."""
    return label if label.endswith(f":{role}") else f"{label}:{role}"


class _Backward(NamedTuple):
    """The backward program for some set of gradients: it is given what was saved, and the gradients that arrive."""

    program: Program
    incoming: tuple[int, ...]  # of the outputs, those whose gradient it takes


@dataclass(frozen=True, eq=False)
class Plan:
    """A chosen covering, ready to run.

    Attributes
    ----------
    graph : Graph
        The chain in plain PyTorch.
    program : Program
        The forward steps, from the graph's arguments to `outputs` and `saved`.
    outputs, saved : tuple of str
        What the forward pass returns, and what it keeps for backward.
    backward_steps : tuple of step
        In the order preferred.
    incoming, gradients : dict of str to str
        The gradient of each output, and of each argument that gets one.
    wanted : frozenset of str
        The arguments that it was planned to give gradients of.
    covered : tuple of PlannedSpan
        The steps with what they cover, for `data`.
    weights : tuple of Plain
        What quantizes weights.
    attempts : tuple of Attempt
        Every rule tried.
    unsaved : tuple of (int, bool)
        The arguments that it does not keep for backward and that second derivatives need, by place; whether each is
        small beside the rows.
    quantized : dict of str to QuantizedSpec
        Every value and gradient that is quantized, for the rows that it was planned with.
    """

    graph: Graph
    program: Program
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    backward_steps: tuple[AnyStep, ...]
    incoming: Mapping[str, str]
    gradients: Mapping[str, str]
    wanted: frozenset[str]
    covered: tuple[PlannedSpan, ...]
    weights: tuple[Plain, ...]
    attempts: tuple[Attempt, ...]
    environment: Environment
    dtype: torch.dtype
    quantized: Mapping[str, QuantizedSpec]
    _backward: dict[tuple[bool, ...], _Backward] = field(default_factory=dict)

    @functools.cached_property
    def keeps_quantized(self) -> bool:
        """Whether what it keeps for backward may hold a `QuantizedTensor`."""
        return not self.quantized.keys().isdisjoint(self.saved)

    def on_meta(self, arguments: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the outputs as meta tensors: their shapes follow from the arguments'."""
        specs = self.graph.infer(dict(zip(self.graph.arguments, arguments, strict=True)))
        outputs = [specs[value] for value in self.graph.outputs]
        return tuple([torch.empty(s.shape, dtype=s.dtype, device="meta") for s in outputs if s is not None])

    def backward(self, wanted: tuple[bool, ...]) -> _Backward:
        """Return the backward program that gives a gradient, or None, for each argument: those wanted."""
        backward = self._backward.get(wanted)
        if backward is None:
            backward = self._backward[wanted] = self._backward_program(wanted)
        return backward

    def _backward_program(self, wanted: tuple[bool, ...]) -> _Backward:
        asked = [self.gradients.get(a, NONE) if w else NONE for a, w in zip(self.graph.arguments, wanted, strict=True)]
        incoming = [(i, self.incoming[v]) for i, v in enumerate(self.graph.outputs) if v in self.incoming]
        given = (*self.saved, *(v for _, v in incoming))
        program = Program(needed_steps(self.backward_steps, asked, given), given, [asked])
        return _Backward(program, tuple(i for i, _ in incoming))

    @functools.cached_property
    def unsaved(self) -> frozenset[int]:
        """The arguments, by place, that second derivatives take and that are not in `saved`."""
        if not self.wanted or self.no_second_derivatives:
            return frozenset()
        taken = argument_names(self.graph, self.saved)
        return frozenset(i for i, a in enumerate(self.graph.arguments) if a in taken and a not in self.saved)

    @functools.cached_property
    def no_second_derivatives(self) -> str:
        """Why the gradients have no derivatives; an empty text if they have."""
        return why_not(self.graph)

    @property
    def missed(self) -> tuple[tuple[str, Attempt], ...]:
        """The ops that run unfused although this device has a kernel for them, each with what came nearest."""
        unfused = ((c.places[0].label, c.position, c.nearest_miss) for c in self.covered if isinstance(c.step, Plain))
        return tuple((label, m) for label, at, m in unfused if m is not None and m.missed and m.stands_on(at))

    @functools.cached_property
    def missed_or_unavailable(self) -> tuple[tuple[str, Attempt], ...]:
        """The ops of `missed`, and those that a rule stands on which is UNAVAILABLE; not one for other devices, where
        the device is one that was asked about.
        """
        missed = dict(self.missed)
        for covered in self.covered:
            label, at = covered.places[0].label, covered.position
            if isinstance(covered.step, Plain) and label not in missed:
                stood = [a for a in self.attempts if self._unavailable(a) and a.direction == covered.direction]
                if nearest := nearest_miss([a for a in stood if a.stands_on(at)], at):
                    missed[label] = nearest
        order = [covered.places[0].label for covered in self.covered]
        return tuple(sorted(missed.items(), key=lambda item: order.index(item[0])))

    def _unavailable(self, attempt: Attempt) -> bool:
        return attempt.status is Status.UNAVAILABLE and not (self.environment.asked and attempt.cause == "device")

    def raise_if_missed(self, unavailable: bool = False) -> None:
        """Raise what ``fm.strict()`` promises."""
        if missed := self.missed_or_unavailable if unavailable else self.missed:
            raise FusionError(
                missed_text(missed, "this device has a kernel" if not unavailable else "there is a kernel")
            )

    def data(self, arguments: Mapping[str, SpecLike | None]) -> PlanData:
        """Return the plan as data, its bytes for these arguments."""
        places = [place for c in self.covered for place in c.places]
        specs = self._quantized_gradients(self.graph.infer(arguments))
        specs = with_layouts(with_plain_gradients(specs, places), self.graph, places)
        costs = Costs(specs, self.graph.parameters, rows=0)
        of_weights = {*self.graph.parameters, *(v for s in self.weights for v in s.gives)}
        kept = [v for v in self.saved if v not in of_weights]
        held = [q.offsets for q in filter(None, map(_quantized, places)) if not set(kept).isdisjoint(q.forms)]
        kept += [v for v in dict.fromkeys(held) if v not in (*kept, NONE)]  # a `QuantizedTensor` holds them too
        device, arch = self.environment.device, self.environment.arch
        weights = tuple(self._planned_weight(s, costs) for s in self.weights)
        return PlanData(
            (*weights, *(c.planned(specs, costs, device) for c in self.covered)),
            self.attempts,
            tuple(kept),
            sum(costs.nbytes(v) for v in kept),
            f"sm_{arch}" if self.environment.asked else str(device) + (f" (sm_{arch})" if arch else ""),
            str(self.dtype).removeprefix("torch."),
            self.environment.recipe.name,
            self.environment.options,
            self.program.source,
            self.backward(tuple([a in self.wanted for a in self.graph.arguments])).program.source,
            sum(costs.nbytes(v) for s in self.weights for v in s.gives),
            missed=self.missed_or_unavailable,
            rows=_rows(specs[self.graph.arguments[0]]),
            **self._asked(),
        )

    def _asked(self) -> dict[str, Any]:
        """Return what `PlanData` says of a device that was asked about."""
        if not self.environment.asked:
            return {}
        rules = {rule.name: rule for rule in registry.rules()}
        fused = sorted({c.step.rule for c in self.covered if isinstance(c.step, Fused)})
        assumed = dict.fromkeys(registry.what_is_missing(rules[name]) for name in fused if name in rules)
        return {"asked_arch": self.environment.arch, "assumed": tuple(text for text in assumed if text is not None)}

    def _planned_weight(self, step: Plain, costs: Costs) -> PlannedStep:
        """Return a step that quantizes a weight, as data."""
        (weight,) = step.needs
        run = self.graph.weights[weight].run
        assert isinstance(run, WeightQuantization)
        return PlannedStep(
            "forward",
            (step.label,),
            None,
            step.needs,
            step.gives,
            int(costs.moved((*step.needs, *step.gives))),
            step.launches,
            quantizes=((_in_role(step.label.rpartition(".")[0], "weight"), str(run.quantizer)),),
        )

    def _quantized_gradients(self, specs: dict[str, SpecLike | None]) -> dict[str, SpecLike | None]:
        """Add the specs of quantized gradients, for the rows of these."""
        for value, spec in self.quantized.items():
            rows = specs.get(primal(value))
            if value not in specs and rows is not None:
                specs[value] = spec._replace(shape=tuple(rows.shape))
        return specs


def _rows(x: SpecLike | None) -> int:
    return 0 if x is None else math.prod(map(int, x.shape[:-1]))


class BoundPlan:
    """A plan for calls of one kind, which bring tensors with the same signature, and what runs its steps for those.

    Parameters
    ----------
    plan
        The plan.
    strict
        Whether ``fm.strict()`` holds, in the backward pass too.
    specs
        Of every value of the forward pass, which the first run checks results by; None: it checks none.
    tensors
        The signature; without it such a call has no second derivatives.

    Attributes
    ----------
    unsaved, held
        The arguments, by place, that second derivatives take and that the plan does not keep; those of them that have
        to be held, each with whether it is kept alive.
    trained
        Those that are not held, by place: parameters that want a gradient, which autograd knows.
    run, runs
        ``run([*arguments], *runs)`` returns the outputs, and the values that backward needs. There is no method for it,
        since calling one takes the host a microsecond.
    refused
        Why such a call can be explained and not run; None where it can be run.
    """

    refused: str | None = None

    def __init__(self, plan: Plan, strict: bool, specs: Specs | None = None, tensors: Signature = ()) -> None:
        self.plan, self.tensors = plan, tensors
        self._strict = strict
        self._specs = specs if plan.wanted else None  # for the first backward pass
        self.unsaved = frozenset(i for i in plan.unsaved if i < len(tensors) and tensors[i] is not None)
        self.trained = tuple(i for i in sorted(self.unsaved) if self._is_trained(i))
        self.held = tuple(self._held(i) for i in sorted(self.unsaved.difference(self.trained)))
        self.run, self.runs = plan.program.run, plan.program.runs(strict, specs)
        self._backward: dict[tuple[bool, ...], tuple[Signature, Runs]] = {}
        self._differentiable: dict[tuple[bool, ...], GradientProgram] = {}

    def _is_trained(self, i: int) -> bool:
        kind = self.tensors[i]
        assert kind is not None
        return kind[0] is torch.nn.Parameter and bool(kind[3])

    def _held(self, i: int) -> tuple[int, bool]:
        kind, rows = self.tensors[i], self.tensors[0]
        assert kind is not None
        assert rows is not None
        is_input = 0 < i <= len(self.plan.graph.inputs)
        small = 2 * kind[1].numel() <= rows[1].numel() or not kind[2].is_floating_point
        return i, (is_input and small) or kind[0] is torch.nn.Parameter

    def check_second_derivatives(self) -> None:
        """Raise unless the gradients have derivatives; say once that for their sake the backward pass runs unfused."""
        plan = self.plan
        first, last = (plan.graph.nodes[i].label.partition(":")[0] for i in (0, -1))  # of a recipe's op, the layer's
        chain = f"chain {first}" if first == last else f"chain {first} to {last}"
        if why := plan.no_second_derivatives:
            raise SecondOrderError(f"{chain}: second derivatives (create_graph=True): {why}")
        fused = [c.step.label for c in plan.covered if c.direction == "backward" and isinstance(c.step, Fused)]
        message = "its backward pass runs unfused, for second derivatives (create_graph=True)"
        if fused and self._strict:
            raise FusionError(f"strict: {chain}: {message}, although this device has a kernel for {', '.join(fused)}")
        say_once(logger, logging.WARNING if fused else logging.INFO, "%s: %s", chain, message)

    def differentiable(self, wanted: tuple[bool, ...]) -> GradientProgram:
        """Return what gives gradients that autograd can differentiate: those wanted."""
        program = self._differentiable.get(wanted)
        if program is None:
            specs = [None if kind is None else TensorSpec(tuple(kind[1]), kind[2]) for kind in self.tensors]
            program = self._differentiable[wanted] = gradient_program(self.plan.graph, specs, wanted, self.plan.saved)
        return program

    def backward(
        self, saved: Sequence[Tensor | None], grads: Sequence[Tensor | None], wanted: tuple[bool, ...]
    ) -> Values:
        """Run the backward steps that these gradients want; return a gradient, or None, for each argument."""
        program, incoming = self.plan.backward(wanted)
        given = [*saved, *[grads[i] for i in incoming]]
        del saved, grads
        tensors = signature(given)
        last = self._backward.get(wanted)
        if last is None or last[0] != tensors:
            last = self._backward[wanted] = tensors, program.runs(self._strict, self._specs)
        (results,) = program.run(given, *last[1])
        return results
