"""A chain: the ops between two foreign modules. It finds the plan for a call, and runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedmoe import settings
from fusedmoe.autocast import autocast_dtype, without_autocast
from fusedmoe.autograd import run_plan
from fusedmoe.errors import InputError
from fusedmoe.fusion import registry
from fusedmoe.fusion.executable import Environment, Plan
from fusedmoe.fusion.graph import Graph
from fusedmoe.fusion.planner import make_plan
from fusedmoe.kernels.device import arch
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.ops.op import Node, Op

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from fusedmoe.fusion.plan import PlanData
    from fusedmoe.recipes import Recipe
    from fusedmoe.settings import Settings

_REMEMBERED_CALLS = 4096  # of each chain


class Chain:
    """Ops in a row, with their labels; planned once for each kind of call.

    Parameters
    ----------
    nodes
        The ops and their labels.
    exports
        Values that the ops provide and that something after the chain wants.
    """

    def __init__(self, nodes: Sequence[Node], exports: Collection[str] = ()) -> None:
        self.nodes = tuple(nodes)
        self.exports = tuple(exports)
        graph = Graph(self.nodes, self.exports)
        self.inputs = tuple(graph.inputs)
        self._names = graph.arguments
        self._ops = tuple(node.op for node in self.nodes)
        self.takers = graph.takers  # each runtime input, with the ops that take it
        self._parameters = [(node.op, name) for node in self.nodes for name in node.op.parameter_names]
        self._circumstances: dict[tuple[Any, ...], int] = {}  # numbered, since a number is quicker to look up by
        self._last: tuple[tuple[Any, ...], int] = ((), -1)  # those of the last call, and their number
        self._plans: dict[tuple[Any, ...], Plan] = {}  # by what a plan depends on
        self._calls: dict[tuple[Any, ...], Plan] = {}  # by exact shapes too: calls that were checked

    def run(self, x: Tensor, given: Mapping[str, Tensor], options: KernelOptions = DEFAULT) -> tuple[Tensor, ...]:
        """Run the chain on rows and runtime inputs; return its result and its exports."""
        if torch.compiler.is_compiling():
            from fusedmoe.uncompiled import run_chain

            return run_chain(self, x, given, options)  # type: ignore[no-any-return]
        now = settings.current()
        if (autocast := autocast_dtype(x.device)) is not None:
            arguments = self._arguments(x, given, autocast)
            with without_autocast(x.device):
                return self._run(arguments, now, options)
        return self._run(self._arguments(x, given), now, options)

    def explain(self, x: Tensor, given: Mapping[str, Tensor], options: KernelOptions = DEFAULT) -> PlanData:
        """Return the plan for this call, as data."""
        arguments = self._arguments(x, given, autocast_dtype(x.device))
        plan = self._plan(arguments, settings.current(), options)
        return plan.data(dict(zip(plan.graph.arguments, arguments, strict=True)))

    def _run(self, arguments: list[Tensor | None], now: Settings, options: KernelOptions) -> tuple[Tensor, ...]:
        plan = self._plan(arguments, now, options)
        if now.strict:
            plan.raise_if_missed()
        if arguments[0].is_meta:  # type: ignore[union-attr]
            return plan.on_meta(arguments)
        return run_plan(plan, arguments, now.strict)

    def _arguments(
        self, x: Tensor, given: Mapping[str, Tensor], autocast: torch.dtype | None = None
    ) -> list[Tensor | None]:
        """Return rows, runtime inputs and parameters as they are now, rows and parameters cast as autocast wants."""
        if not x.dim():
            raise InputError(f"{self.nodes[0].label}.{type(self.nodes[0].op).__name__}: x: expected rows, got a scalar")
        parameters: list[Tensor | None] = [
            op._parameters[name] if name in op._parameters else getattr(op, name) for op, name in self._parameters
        ]
        if autocast is not None:
            x = _cast(x, autocast)
            parameters = [None if p is None else _cast(p, autocast) for p in parameters]
        return [x, *[given[name] for name in self.inputs], *parameters]

    def _plan(self, arguments: list[Tensor | None], now: Settings, options: KernelOptions) -> Plan:
        """Return the plan for these arguments, whose shapes fit the ops."""
        circumstances = (
            *[op.attributes() for op in self._ops],
            now.recipe,
            now.disabled,
            settings.disabled_by_environment(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            registry.generation(),
            options,
        )
        last, number = self._last
        if circumstances != last:  # quick where nothing has changed: each is the same object
            number = self._circumstances.setdefault(circumstances, len(self._circumstances))
            self._last = circumstances, number
        call = (number, *[None if a is None else (a.shape, a.dtype, a.requires_grad, a.device) for a in arguments])
        plan = self._calls.get(call)
        if plan is None:
            plan = self._plan_of_kind(call, arguments, now, options)
            plan.graph.infer(dict(zip(plan.graph.arguments, arguments, strict=True)))
            if len(self._calls) >= _REMEMBERED_CALLS:
                self._calls.clear()
            self._calls[call] = plan
        return plan

    def _plan_of_kind(
        self, call: tuple[Any, ...], arguments: list[Tensor | None], now: Settings, options: KernelOptions
    ) -> Plan:
        """Return the plan for calls that differ from this one in their number of rows, up to the next power of two."""
        number, x, *others = call
        width = x[0][-1]
        rows = x[0].numel() // width if width else 0
        kinds = [None if o is None else (o[0][1:], *o[1:]) for o in others]
        key = (number, rows.bit_length(), width, x[1:], *kinds)
        plan = self._plans.get(key)
        if plan is None:
            disabled = (*now.disabled, *settings.patterns(settings.disabled_by_environment()))
            plan = self._plans[key] = self._make(arguments, now.recipe, disabled, options)
        return plan

    def _make(
        self, arguments: list[Tensor | None], recipe: Recipe, disabled: tuple[str, ...], options: KernelOptions
    ) -> Plan:
        x = arguments[0]
        assert x is not None
        for name, argument in zip(self._names, arguments, strict=True):
            if argument is not None and argument.device != x.device:
                takes = f"; {', '.join(self.takers[name])} takes it" if name in self.inputs else ""
                raise InputError(f"{name}: expected on {x.device}, where the rows are, got on {argument.device}{takes}")
        environment = Environment(
            x.device, arch(x.device), torch.are_deterministic_algorithms_enabled(), recipe, disabled, options
        )
        graph = self._rewritten(recipe)
        named = dict(zip(graph.arguments, arguments, strict=True))
        grad = torch.is_grad_enabled()
        wanted = {name for name, a in named.items() if grad and a is not None and a.requires_grad}
        return make_plan(graph, named, wanted, environment)

    def _rewritten(self, recipe: Recipe) -> Graph:
        """Return the chain as the recipe wants it, with the same arguments in the same order."""
        nodes = recipe.rewrite(self.nodes)
        must = f"recipe {recipe.name!r}: rewrite() must"
        if [n for n in nodes if n in self.nodes] != list(self.nodes):
            raise InputError(f"{must} keep the chain's own ops, in their order")
        labels = [node.label for node in nodes]
        for label, op in nodes:
            if labels.count(label) > 1:
                raise InputError(f"{must} give each inserted op a label of its own, got {label!r} twice")
            if op.parameter_names and Node(label, op) not in self.nodes:
                raise InputError(f"{must} insert ops with no parameters, got {label}.{type(op).__name__}")
        graph = Graph(nodes, self.exports, self.inputs)
        if more := graph.inputs[len(self.inputs) :]:
            raise InputError(
                f"{must} insert ops that take what the chain has, got one that takes {', '.join(map(repr, more))}"
            )
        return graph


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast what autocast casts: floats, but not fp64."""
    return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t


def run_alone(op: Op, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Run one op as a chain of one."""
    if not isinstance(x, Tensor):
        raise InputError(f"{op!r}: x: expected a tensor, got {type(x).__name__}")
    chain: Chain | None = op.__dict__.get("_alone")
    if chain is None:
        chain = op.__dict__["_alone"] = Chain([Node("op", op.placed(()))], op.provides)
    if inputs.keys() != set(chain.inputs) or not all(isinstance(t, Tensor) for t in inputs.values()):
        check_inputs(repr(op), chain.takers, inputs)
    y, *provided = chain.run(x, inputs)
    return (y, dict(zip(op.provides, provided, strict=True))) if op.provides else y


def check_inputs(
    who: str,
    wanted: Mapping[str, Sequence[str]],
    given: Mapping[str, Tensor],
    provided: Mapping[str, str] | None = None,
) -> None:
    """Raise unless exactly the wanted runtime inputs are given, as tensors.

    Parameters
    ----------
    who
        What was called, for the message.
    wanted
        Each runtime input, with the ops that take it.
    given
        What came by keyword.
    provided
        Values that an op provides, with its label: not to be given too.
    """
    for name in given:
        if name not in wanted:
            if provided and name in provided:
                raise InputError(f"{who}: {name!r} is given, but {provided[name]} provides it")
            takes = ", ".join(f"{n!r} (for {', '.join(ops)})" for n, ops in wanted.items()) or "none"
            raise InputError(f"{who}: no op takes the runtime input {name!r}; the inputs that ops take: {takes}")
    for name, ops in wanted.items():
        if given.get(name) is None:
            raise InputError(f"{who}: the runtime input {name!r} is missing, which {', '.join(ops)} takes")
        if not isinstance(given[name], Tensor):
            raise InputError(
                f"{who}: {name}: expected a tensor, got {type(given[name]).__name__}; {', '.join(ops)} takes it"
            )
