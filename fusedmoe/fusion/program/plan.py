"""A plan that runs: the forward program, and a backward program for each set of wanted gradients."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.base.log import say_once
from fusedmoe.fusion.graph.backward import Backward
from fusedmoe.fusion.graph.forward import Graph
from fusedmoe.fusion.graph.places import Place
from fusedmoe.fusion.graph.steps import AnyStep, Fused, Plain
from fusedmoe.fusion.graph.values import NONE, Gathered, primal, tensor_specs
from fusedmoe.fusion.language.rule import Direction, FusionError
from fusedmoe.fusion.program.differentiable import (
    GradientProgram,
    SecondOrderError,
    argument_names,
    gradient_program,
    why_not,
)
from fusedmoe.fusion.program.order import Pair, needed_steps
from fusedmoe.fusion.program.results import Specs, without_tensors
from fusedmoe.fusion.program.signature import DTYPE, REQUIRES_GRAD, SHAPE, TYPE, Signature, signature
from fusedmoe.fusion.program.source import Program, Runs, Values
from fusedmoe.fusion.report.data import Attempt, Status, missed_text
from fusedmoe.fusion.search.choice import nearest_miss
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.numerics.recipes import Recipe
from fusedmoe.ops.op import Op, SpecLike, TensorSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Environment:
    """Everything besides the ops and their arguments that a plan depends on."""

    device: torch.device
    arch: int | None  # the number of an NVIDIA GPU's architecture
    deterministic: bool  # `torch.are_deterministic_algorithms_enabled`
    recipe: Recipe
    disabled: tuple[str, ...]  # the patterns of rules that are switched off
    options: KernelOptions  # the options of the `Sequential`
    asked: bool = False  # the device of ``explain(..., arch=)``, which may be absent
    estimated: bool = False  # no rule applies: an estimator of torch watches the call, or it is exported


@dataclass(frozen=True)
class PlannedSpan:
    """A step of the plan and the places that it covers."""

    direction: Direction
    position: int  # of the first place
    step: AnyStep
    places: tuple[Place, ...]
    moves: tuple[str, ...]  # the values whose bytes it reads or writes
    extra_bytes: int  # as of `Step`
    nearest_miss: Attempt | None = None  # as of `PlannedStep`


class BackwardProgram(NamedTuple):
    """The backward program for a set of gradients. It takes the saved tensors and the incoming gradients."""

    program: Program
    incoming: tuple[int, ...]  # the outputs whose gradients it takes


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """A chosen covering, ready to run."""

    graph: Graph  # the chain in plain PyTorch
    program: Program  # the forward steps, from the graph's arguments to `outputs` and `saved`
    outputs: tuple[str, ...]
    saved: tuple[str, ...]  # the values that the forward pass keeps for the backward pass
    backward_steps: tuple[AnyStep, ...]  # in the preferred order
    pairs: tuple[Pair, ...]  # of backward steps that run beside each other
    of_backward: Backward
    wanted: frozenset[str]  # the arguments whose gradients were planned
    spans: tuple[PlannedSpan, ...]  # the steps with the ops that they cover
    glue: tuple[PlannedSpan, ...]  # the steps between ops
    attempts: tuple[Attempt, ...]
    gathered: Mapping[str, Gathered]  # the rows of other values that no step writes
    environment: Environment
    dtype: torch.dtype  # of the rows
    _backward: dict[tuple[bool, ...], BackwardProgram] = field(default_factory=dict)

    @property
    def saved_tensors(self) -> tuple[str, ...]:
        """The tensors of `saved`, by their names in the program."""
        return self.program.results[1]

    def infer(self, arguments: Sequence[SpecLike | None]) -> Specs:
        """Return the specs of all values, of both directions and of their tensors, for these arguments."""
        specs = self.graph.infer(dict(zip(self.graph.arguments, arguments, strict=True)))
        gradients: dict[str, SpecLike | None] = {}
        for value, spec in self.of_backward.specs.items():
            rows = specs[primal(value)]
            assert rows is not None
            gradients[value] = spec._replace(shape=tuple(rows.shape))  # type: ignore[union-attr]
        return without_tensors({**specs, **gradients, **tensor_specs(gradients, self.of_backward.forms)})

    def on_meta(self, arguments: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the outputs as meta tensors: their shapes follow from the arguments'."""
        specs = self.graph.infer(dict(zip(self.graph.arguments, arguments, strict=True)))
        outputs = [specs[value] for value in self.graph.outputs]
        return tuple([torch.empty(s.shape, dtype=s.dtype, device="meta") for s in outputs if s is not None])

    def backward(self, wanted: tuple[bool, ...]) -> BackwardProgram:
        """Return the backward program of the wanted gradients. It returns a gradient, or None, for each argument."""
        backward = self._backward.get(wanted)
        if backward is None:
            backward = self._backward[wanted] = self._backward_program(wanted)
        return backward

    def _backward_program(self, wanted: tuple[bool, ...]) -> BackwardProgram:
        arguments, of_backward = self.graph.arguments, self.of_backward
        asked = [of_backward.gradients.get(a, NONE) if w else NONE for a, w in zip(arguments, wanted, strict=True)]
        outputs = [(i, v) for i, v in enumerate(self.graph.outputs) if v in of_backward.incoming]
        given = (*self.saved, *(of_backward.incoming[v] for _, v in outputs))
        steps, forms = needed_steps(self.backward_steps, asked, given), {**self.graph.forms, **of_backward.forms}
        program = Program(steps, given, [asked], forms, self.pairs)
        return BackwardProgram(program, tuple(i for i, _ in outputs))

    @functools.cached_property
    def unsaved(self) -> frozenset[int]:
        """The arguments, by position, that second derivatives take and that are not in `saved`."""
        if not self.wanted or self.no_second_derivatives:
            return frozenset()
        taken = argument_names(self.graph, self.saved)
        return frozenset(i for i, a in enumerate(self.graph.arguments) if a in taken and a not in self.saved)

    @functools.cached_property
    def no_second_derivatives(self) -> str:
        """The reason why the gradients have no derivatives; an empty text if they have."""
        return why_not(self.graph)

    @functools.cached_property
    def summed_weights(self) -> tuple[tuple[Op, str], ...]:
        """Each layer that gives its weight a gradient which kernels may add to ``weight.grad``, or write unrounded, and
        the argument.
        """
        if not any(isinstance(step, Fused) for step in self.backward_steps):
            return ()
        linear = [(n.op, f"{n.label}.weight") for n in self.graph.nodes if getattr(n.op, "gives_grad", False)]
        ops = [op for op, _ in linear]  # one that occurs twice may have two weights
        return tuple((op, name) for op, name in linear if name in self.of_backward.gradients and ops.count(op) == 1)

    @property
    def missed(self) -> tuple[tuple[str, Attempt], ...]:
        """The ops that run unfused although this device has a kernel for them, each with the rule that came nearest."""
        unfused = ((c.places[0].label, c.position, c.nearest_miss) for c in self.spans if isinstance(c.step, Plain))
        return tuple((label, m) for label, at, m in unfused if m is not None and m.missed and at in m.shared)

    @functools.cached_property
    def missed_or_unavailable(self) -> tuple[tuple[str, Attempt], ...]:
        """The ops of `missed`, and those for which a rule is UNAVAILABLE. In a plan of ``explain(..., arch=)``, rules
        for other devices do not count.
        """
        missed = dict(self.missed)
        every = [a for a in self.attempts if self._unavailable(a)]
        for span in self.spans:
            label, at = span.places[0].label, span.position
            if isinstance(span.step, Plain) and label not in missed:
                unavailable = [a for a in every if a.direction == span.direction and at in a.shared]
                if nearest := nearest_miss(unavailable, at):
                    missed[label] = nearest
        order = [span.places[0].label for span in self.spans]
        return tuple(sorted(missed.items(), key=lambda item: order.index(item[0])))

    def _unavailable(self, attempt: Attempt) -> bool:
        return attempt.status is Status.UNAVAILABLE and not (self.environment.asked and attempt.cause == "device")

    def raise_if_missed(self, unavailable: bool = False) -> None:
        """Raise `FusionError` for the ops of `missed`; if ``unavailable``, of `missed_or_unavailable`."""
        if missed := self.missed_or_unavailable if unavailable else self.missed:
            raise FusionError(
                missed_text(missed, "this device has a kernel" if not unavailable else "there is a kernel")
            )


class BoundPlan:
    """A plan bound to one kind of call: tensors with the same signature.

    Arguments:
    - ``plan``, ``strict``: the plan, and whether ``fm.strict()`` holds in both directions.
    - ``specs``: the specs of all values: the first run checks the results of steps against them.
    - ``tensors``: the signature of the arguments. Without it, the call has no second derivatives.

    Its attributes:
    - ``unsaved``: the arguments, by position, that second derivatives take and that the plan does not keep.
    - ``held``: the arguments in `unsaved` that the call holds, each with whether the call keeps it alive.
    - ``trained``: the other arguments in `unsaved`: parameters that require a gradient, which autograd holds.
    - ``quantized_weights``: each layer whose weight a call quantizes, and the weight's position among the arguments.
    - ``summed_weights``: each layer that gives its weight a gradient which kernels may add to ``weight.grad``, or write
      unrounded if autocast has cast the weight; the position of the weight among the arguments, and that among those
      that are not None.
    - ``run``, ``runs``: ``run([*arguments], *runs)`` returns the outputs and the saved tensors. A method around it
      would cost the host a microsecond.
    """

    refused: str | None = None  # the reason why this kind of call can be explained but not run

    def __init__(self, plan: Plan, strict: bool, specs: Specs, tensors: Signature = ()) -> None:
        self.plan, self.tensors = plan, tensors
        self._strict = strict
        self._specs = specs
        layers = plan.graph.quantized_layers.items()
        self.quantized_weights = tuple((layer, plan.graph.arguments.index(name)) for name, layer in layers)
        self.summed_weights = tuple(self._summed_weights())
        self.unsaved = frozenset(i for i in plan.unsaved if i < len(tensors) and tensors[i] is not None)
        self.trained = tuple(i for i in sorted(self.unsaved) if self._is_trained(i))
        self.held = tuple(self._held(i) for i in sorted(self.unsaved.difference(self.trained)))
        self.run, self.runs = plan.program.run, plan.program.runs(strict, specs)
        self._backward: dict[tuple[bool, ...], tuple[Signature, Runs]] = {}
        self._differentiable: dict[tuple[bool, ...], GradientProgram] = {}

    def _summed_weights(self) -> Iterator[tuple[Op, int, int]]:
        arguments, of_call = self.plan.graph.arguments, self.tensors
        for op, name in self.plan.summed_weights:
            i = arguments.index(name)
            if i < len(of_call) and of_call[i] is not None:
                yield op, i, sum(kind is not None for kind in of_call[:i])

    def _is_trained(self, i: int) -> bool:
        kind = self.tensors[i]
        assert kind is not None
        return kind[TYPE] is torch.nn.Parameter and bool(kind[REQUIRES_GRAD])

    def _held(self, i: int) -> tuple[int, bool]:
        kind, rows = self.tensors[i], self.tensors[0]
        assert kind is not None
        assert rows is not None
        is_input = 0 < i <= len(self.plan.graph.inputs)
        small = 2 * kind[SHAPE].numel() <= rows[SHAPE].numel() or not kind[DTYPE].is_floating_point
        return i, (is_input and small) or kind[TYPE] is torch.nn.Parameter

    def check_second_derivatives(self) -> None:
        """Raise unless the gradients have derivatives; log once that the backward pass then runs unfused."""
        plan = self.plan
        first, last = (plan.graph.nodes[i].label.partition(":")[0] for i in (0, -1))  # a recipe's op: its layer
        chain = f"chain {first}" if first == last else f"chain {first} to {last}"
        if why := plan.no_second_derivatives:
            raise SecondOrderError(f"{chain}: second derivatives (create_graph=True): {why}")
        fused = [c.step.label for c in plan.spans if c.direction == "backward" and isinstance(c.step, Fused)]
        message = "its backward pass runs unfused, for second derivatives (create_graph=True)"
        if fused and self._strict:
            raise FusionError(f"strict: {chain}: {message}, although this device has a kernel for {', '.join(fused)}")
        say_once(logger, logging.WARNING if fused else logging.INFO, "%s: %s", chain, message)

    def differentiable(self, wanted: tuple[bool, ...]) -> GradientProgram:
        """Return a program of the wanted gradients that autograd can differentiate."""
        program = self._differentiable.get(wanted)
        if program is None:
            specs = [None if kind is None else TensorSpec(tuple(kind[SHAPE]), kind[DTYPE]) for kind in self.tensors]
            program = self._differentiable[wanted] = gradient_program(self.plan.graph, specs, wanted, self.plan.saved)
        return program

    def backward(self, saved: list[Tensor | None], grads: Sequence[Tensor | None], wanted: tuple[bool, ...]) -> Values:
        """Run the backward steps for the wanted gradients; return a gradient, or None, for each argument.

        The list of saved tensors is emptied, so that each is freed after its last use.
        """
        program, incoming = self.plan.backward(wanted)
        given = saved
        given += [grads[i] for i in incoming]
        del grads
        tensors = signature(given)
        last = self._backward.get(wanted)
        if last is None or last[0] != tensors:
            last = self._backward[wanted] = tensors, program.runs(self._strict, self._specs)
        (results,) = program.run(given, *last[1])
        return results
