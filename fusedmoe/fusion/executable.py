"""A plan that runs: the forward program, and a backward program for each set of gradients that a call asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from fusedmoe.fusion.candidates import Costs
from fusedmoe.fusion.graph import Graph, Place, Plain
from fusedmoe.fusion.names import NONE
from fusedmoe.fusion.plan import Attempt, PlanData, PlannedStep
from fusedmoe.fusion.program import AnyStep, Fused, Program, needed_steps, reader
from fusedmoe.fusion.rule import FusionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fusedmoe.fusion.rule import Direction
    from fusedmoe.kernels.options import KernelOptions
    from fusedmoe.ops.op import SpecLike
    from fusedmoe.recipes import Recipe


@dataclass(frozen=True)
class Environment:
    """Everything besides the ops and their arguments that a plan depends on."""

    device: torch.device
    arch: int | None
    deterministic: bool
    recipe: Recipe
    disabled: tuple[str, ...]
    options: KernelOptions


@dataclass(frozen=True)
class Covered:
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
        )


Read = Callable[[Sequence["Tensor | None"]], tuple["Tensor | None", ...]]


class _Forward(NamedTuple):
    """The forward program: its first slots are the arguments."""

    run: Callable[[list[Tensor | None], bool], None]
    further: tuple[None, ...]  # slots behind the arguments
    outputs: Read
    saved: Read


class _Backward(NamedTuple):
    """The backward program for some set of gradients: its first slots are None, what was saved, and the incoming."""

    run: Callable[[list[Tensor | None], bool], None]
    incoming: Read  # of the outputs' gradients, those that there are
    further: tuple[None, ...]
    results: Read  # an argument's gradient each, or None


@dataclass(frozen=True, eq=False)
class Plan:
    """A chosen covering, ready to run.

    Attributes
    ----------
    graph : Graph
        The chain in plain PyTorch.
    program : Program
        The forward steps; its first slots are the graph's arguments.
    outputs, saved : tuple of str
        What the forward pass returns, and what it keeps for backward.
    backward_steps : tuple of step
        In the order preferred.
    incoming, gradients : dict of str to str
        The gradient of each output, and of each argument that gets one.
    wanted : frozenset of str
        The arguments that it was planned to give gradients of.
    covered : tuple of Covered
        The steps with what they cover, for `data`.
    attempts : tuple of Attempt
        Every rule tried.
    """

    graph: Graph
    program: Program
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    backward_steps: tuple[AnyStep, ...]
    incoming: Mapping[str, str]
    gradients: Mapping[str, str]
    wanted: frozenset[str]
    covered: tuple[Covered, ...]
    attempts: tuple[Attempt, ...]
    environment: Environment
    dtype: torch.dtype
    _backward: dict[tuple[bool, ...], _Backward] = field(default_factory=dict)

    def on_meta(self, arguments: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the outputs as meta tensors: their shapes follow from the arguments'."""
        specs = self.graph.infer(dict(zip(self.graph.arguments, arguments, strict=True)))
        outputs = [specs[value] for value in self.graph.outputs]
        return tuple([torch.empty(s.shape, dtype=s.dtype, device="meta") for s in outputs if s is not None])

    def forward(
        self, arguments: Sequence[Tensor | None], strict: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Run the forward steps; return the outputs, and the values that backward needs."""
        run, further, outputs, saved = self._forward
        values = [*arguments, *further]
        run(values, strict)
        return outputs(values), saved(values)  # type: ignore[return-value]

    def backward(
        self, saved: Sequence[Tensor | None], grads: Sequence[Tensor | None], wanted: tuple[bool, ...], strict: bool
    ) -> tuple[Tensor | None, ...]:
        """Run the backward steps that these gradients want; return a gradient, or None, for each argument."""
        program = self._backward.get(wanted)
        if program is None:
            program = self._backward[wanted] = self._backward_program(wanted)
        run, incoming, further, results = program
        values = [None, *saved, *incoming(grads), *further]
        del saved, grads
        run(values, strict)
        return results(values)

    @cached_property
    def _forward(self) -> _Forward:
        slots, arguments = self.program.slots, self.graph.arguments
        assert [slots[v] for v in arguments] == list(range(len(arguments)))
        return _Forward(
            self.program.run,
            (None,) * (len(slots) - len(arguments)),
            reader([slots[v] for v in self.outputs]),
            reader([slots[v] for v in self.saved]),
        )

    def _backward_program(self, wanted: tuple[bool, ...]) -> _Backward:
        asked = [self.gradients.get(a, NONE) if w else NONE for a, w in zip(self.graph.arguments, wanted, strict=True)]
        incoming = [(i, self.incoming[v]) for i, v in enumerate(self.graph.outputs) if v in self.incoming]
        given = (*self.saved, *(v for _, v in incoming))
        slots = {value: i for i, value in enumerate(dict.fromkeys((NONE, *given, *asked)))}
        program = Program(needed_steps(self.backward_steps, asked, given), given, asked, slots)
        assert [slots[v] for v in (NONE, *given)] == list(range(1 + len(given)))
        return _Backward(
            program.run,
            reader([i for i, _ in incoming]),
            (None,) * (len(slots) - 1 - len(given)),
            reader([slots[v] for v in asked]),
        )

    @property
    def missed(self) -> tuple[tuple[str, Attempt], ...]:
        """The ops that run unfused although this device has a kernel for them, each with what came nearest."""
        unfused = ((c.places[0].label, c.position, c.nearest_miss) for c in self.covered if isinstance(c.step, Plain))
        return tuple((label, m) for label, at, m in unfused if m is not None and m.missed and m.stands_on(at))

    def raise_if_missed(self) -> None:
        """Raise what ``fm.strict()`` promises."""
        if self.missed:
            lines = "\n".join(f"  {label}: {miss}" for label, miss in self.missed)
            raise FusionError(f"strict: these ops run unfused although this device has a kernel for them:\n{lines}")

    def data(self, arguments: Mapping[str, SpecLike | None]) -> PlanData:
        """Return the plan as data, its bytes for these arguments."""
        specs = self.graph.infer(arguments)
        costs = Costs(specs, self.graph.parameters, rows=0)
        kept = tuple(v for v in self.saved if v not in self.graph.parameters)
        device, arch = self.environment.device, self.environment.arch
        return PlanData(
            tuple(c.planned(specs, costs, device) for c in self.covered),
            self.attempts,
            kept,
            sum(costs.nbytes(v) for v in kept),
            str(device) + (f" (sm_{arch})" if arch else ""),
            str(self.dtype).removeprefix("torch."),
            self.environment.recipe.name,
            self.environment.options,
        )
