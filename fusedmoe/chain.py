"""A chain: the ops between two foreign modules. It finds the plan for a call, and runs it."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack

from fusedmoe import changes, settings, target
from fusedmoe.autocast import autocast_dtype, without_autocast
from fusedmoe.autograd import run_call
from fusedmoe.environment import disabled_by_environment, environment_state
from fusedmoe.errors import NO_EXPERT_PARALLELISM, InputError, inside_jit_trace
from fusedmoe.estimating import counts_flops, has_values
from fusedmoe.fusion import registry
from fusedmoe.fusion.executable import BoundPlan, Environment, Plan
from fusedmoe.fusion.graph import Graph
from fusedmoe.fusion.planner import make_plan
from fusedmoe.fusion.results import announced
from fusedmoe.fusion.signature import Signature, signature, spec_of
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.ops.amax_state import looking
from fusedmoe.ops.op import Node, Op
from fusedmoe.quantization import rewritten
from fusedmoe.recompute import backward_pass, had_gradients
from fusedmoe.target import arch_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import TypeAlias

    Parameters: TypeAlias = Mapping[str, Tensor | None]

    from fusedmoe.fusion.plan import PlanData
    from fusedmoe.ops.op import SpecLike, TensorSpec
    from fusedmoe.recipes import Recipe
    from fusedmoe.settings import Settings
    from fusedmoe.target import Target

_REMEMBERED_CALLS = 1024  # of each chain
_REMEMBERED_PLANS = 256


class _Last(NamedTuple):
    """The last call, if nothing but running it is left where the next one is of the same kind."""

    call: BoundPlan
    tensors: Signature
    around: tuple[Any, ...]
    device_type: str


class Chain:
    """Ops in a row, with their labels; planned once for each kind of call.

    Parameters
    ----------
    nodes
        The ops and their labels.
    exports
        Values that the ops provide and that something after the chain wants.
    sorted_rows
        The sets of rows that are sorted by expert, though no op of the chain takes their offsets; see `Graph`.
    provided
        The runtime inputs that come from ops before the chain.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        exports: Collection[str] = (),
        sorted_rows: Mapping[int, str] | None = None,
        provided: Collection[str] = (),
    ) -> None:
        self.nodes = tuple(nodes)
        self.exports = tuple(exports)
        self.sorted_rows = sorted_rows or {}
        self.provided = tuple(provided)
        graph = Graph(self.nodes, self.exports, (), self.sorted_rows, self.provided)
        self.inputs = tuple(graph.inputs)
        self.arguments = graph.arguments
        self._ops = tuple(node.op for node in self.nodes)
        self.takers = graph.takers  # each runtime input, with the ops that take it
        self.parameters = [  # with their names here
            (node.op, name, f"{node.label}.{name}") for node in self.nodes for name in node.op.parameter_names
        ]
        self.name = ""  # in a model, for log lines, once that is known
        self._circumstances: dict[tuple[Any, ...], int] = {}
        self._numbers = count()
        self._plans: dict[tuple[Any, ...], Plan] = {}  # by what a plan depends on
        self._calls: dict[tuple[int, bool, Signature], BoundPlan] = {}  # by exact shapes too: calls that were checked
        self._last: _Last | None = None
        self._settings: dict[bool, Settings] = {}  # of the last call with gradients, and of the last without

    def run(
        self,
        x: Tensor,
        named: dict[str, Tensor],
        options: KernelOptions = DEFAULT,
        parameters: Parameters | None = None,
    ) -> Tensor:
        """Run the chain on rows and runtime inputs by name, add its exports to the latter, and return its result.

        Parameters by label and name, ``"1.weight"``, are for ops that have none.
        """
        if _get_tracing_state() is not None:
            raise inside_jit_trace(f"{self.nodes[0].label}.{type(self.nodes[0].op).__name__}")
        arguments = self.arguments_of(x, named, parameters)
        tensors = signature(arguments)
        around = self._around(self._settings_of_call(), options)
        last = self._last
        if (
            last is not None
            and tensors == last.tensors
            and around == last.around
            and not torch.is_autocast_enabled(last.device_type)
        ):
            results = run_call(last.call, arguments)
        elif (dtype := autocast_dtype(x.device)) is None:
            results = self._run(arguments, tensors, around)
        else:
            cast = self._cast(arguments, dtype)
            with without_autocast(x.device):
                results = self._run(cast, signature(cast), around, arguments)
        if len(results) > 1:
            named.update(zip(self.exports, results[1:], strict=True))
        return results[0]

    def explain(
        self,
        x: Tensor,
        named: Mapping[str, Tensor],
        options: KernelOptions = DEFAULT,
        parameters: Parameters | None = None,
    ) -> PlanData:
        """Return the plan for this call, as data: on the device of the rows, or on the one that is asked about."""
        arguments = self.arguments_of(x, named, parameters)
        if (asked := target.current()) is not None:
            return self._explain_for(asked, arguments, options)
        if (dtype := autocast_dtype(x.device)) is not None:
            arguments = self._cast(arguments, dtype)
        plan = self._call(arguments, signature(arguments), self._around(settings.current(), options)).plan
        return plan.data(dict(zip(plan.graph.arguments, arguments, strict=True)))

    def _explain_for(self, asked: Target, arguments: list[Tensor | None], options: KernelOptions) -> PlanData:
        """Return the plan for a device that need not be there: of shapes and dtypes alone, not remembered."""
        self._check_rows(arguments[0])
        now = settings.current()
        disabled = (*now.disabled, *settings.patterns(disabled_by_environment()))
        x = arguments[0]
        assert x is not None
        dtype = asked.dtype or autocast_dtype(x.device)
        plan = self._make(self._specs(arguments, dtype), arguments, now.recipe, disabled, options, asked)
        data = plan.data(dict(zip(plan.graph.arguments, self._specs(arguments, dtype), strict=True)))
        given = "" if plan.dtype is x.dtype else str(x.dtype).removeprefix("torch.")
        return replace(data, given_dtype=given if asked.dtype else "")

    def _without_memory(self, arguments: list[Tensor | None]) -> tuple[Tensor, ...]:
        """Return tensors like the results, in the mode for tensors without memory that holds here: nothing runs."""
        x = arguments[0]
        self._check_rows(x)
        assert x is not None
        graph = self.rewritten(settings.current().recipe)
        specs = graph.infer(dict(zip(graph.arguments, map(spec_of, arguments), strict=True)))
        grad = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in arguments)
        results = []
        for spec in (specs[value] for value in graph.outputs):
            assert spec is not None
            wants = grad and spec.dtype.is_floating_point
            results.append(torch.empty(spec.shape, dtype=spec.dtype, device=x.device, requires_grad=wants))
        return tuple(results)

    def _specs(self, arguments: Sequence[Tensor | None], dtype: torch.dtype | None) -> list[TensorSpec | None]:
        """Return the specs of arguments, with rows and parameters in this dtype where autocast would cast them."""
        specs = [spec_of(a) for a in arguments]
        if dtype is None:
            return specs
        runtime_inputs = range(1, 1 + len(self.inputs))
        return [
            s._replace(dtype=dtype) if s is not None and autocasts(s.dtype) and i not in runtime_inputs else s
            for i, s in enumerate(specs)
        ]

    def arguments_of(
        self, x: Tensor, named: Mapping[str, Tensor], parameters: Parameters | None
    ) -> list[Tensor | None]:
        """Return rows, runtime inputs and parameters as they are now."""
        own = [op._parameters[name] if name in op._parameters else getattr(op, name) for op, name, _ in self.parameters]
        if parameters:
            own = [parameters.get(key) if t is None else t for t, (_, _, key) in zip(own, self.parameters, strict=True)]
        return [x, *[named[name] for name in self.inputs], *own]

    def _cast(self, arguments: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
        """Return the arguments with rows and parameters as autocast wants them."""
        first_parameter = 1 + len(self.inputs)
        return [autocast_argument(a, dtype, 0 < i < first_parameter) for i, a in enumerate(arguments)]

    def _around(self, now: Settings, options: KernelOptions) -> tuple[Any, ...]:
        """Return what a plan depends on besides the arguments, as it is now; `changes.count` stands for much of it."""
        return (
            now,
            options,
            changes.count,
            environment_state(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            _len_torch_dispatch_stack() and counts_flops(),
        )

    def _settings_of_call(self) -> Settings:
        """Return the settings that hold: for what a backward pass computes again, those of the call before it.

        A backward pass may run behind the ``with`` block that the call was in, and on a GPU runs in another thread,
        where no such block holds; only what is set by the very function that is computed again counts there. The call
        before is the last one that had gradients, or had none, as the first run of that function.
        """
        now, within = settings.current(), backward_pass()
        grad = torch.is_grad_enabled()
        if within == -1:
            if not looking():
                self._settings[grad] = now
            return now
        first_had_gradients = had_gradients()
        before = self._settings.get(grad and first_had_gradients)
        if before is not None:
            now = replace(before, **now.within(within))
            if grad and not first_had_gradients:  # the first call of what is checkpointed within it
                self._settings[True] = now
        return now

    def _run(
        self,
        arguments: list[Tensor | None],
        tensors: Signature,
        around: tuple[Any, ...],
        uncast: list[Tensor | None] | None = None,
    ) -> tuple[Tensor, ...]:
        x = arguments[0]
        assert x is not None
        if target.current() is not None and target.has_no_memory(x):
            return self._without_memory(arguments)
        call = self._call(arguments, tensors, around)
        if call.refused is not None:
            raise InputError(call.refused)
        if around[0].strict and not call.plan.environment.estimated:
            call.plan.raise_if_missed(around[0].strict_unavailable)
        if x.is_meta:
            estimated = around[-1] or call.plan.wanted
            return run_call(call, arguments) if estimated else call.plan.on_meta(arguments)
        self._last = _Last(call, tensors, around, x.device.type)
        return run_call(call, arguments, uncast)

    def _call(self, arguments: list[Tensor | None], tensors: Signature, around: tuple[Any, ...]) -> BoundPlan:
        """Return the plan for these arguments, whose shapes fit the ops, with what runs it."""
        self._check_rows(arguments[0])
        now, options, _, *others = around
        circumstances = (
            *[op.attributes() for op in self._ops], now.recipe, now.disabled, registry.generation(), options, *others,
        )  # fmt: skip
        number = self._circumstances.get(circumstances)
        if number is None:
            if len(self._circumstances) >= _REMEMBERED_PLANS:
                self._forget_plans()
            number = self._circumstances[circumstances] = next(self._numbers)
        key = number, now.strict, tensors
        call = self._calls.get(key)
        if call is None:
            estimated = bool(around[-1]) or not all(a is None or has_values(a) for a in arguments)
            plan = self._plan_of_kind(number, arguments, now, options, estimated)
            specs = plan.graph.infer(dict(zip(plan.graph.arguments, arguments, strict=True)))
            if len(self._calls) >= _REMEMBERED_CALLS:
                self._calls.clear()
            call = self._calls[key] = BoundPlan(plan, now.strict, announced(specs), tensors)
            call.refused = self._why_sharded(arguments)
        return call

    def _why_sharded(self, arguments: list[Tensor | None]) -> str | None:
        """Return the message for the first grouped op whose parameter is a DTensor; None where there is none."""
        distributed = sys.modules.get("torch.distributed.tensor")  # loaded where there is a DTensor at all
        if distributed is None:
            return None
        own = arguments[1 + len(self.inputs) :]
        for (op, name, key), argument in zip(self.parameters, own, strict=True):
            if hasattr(op, "num_groups") and isinstance(argument, distributed.DTensor):
                placements = ", ".join(map(repr, argument.placements))
                expected = f"a plain tensor of all {op.num_groups} experts"
                return (
                    f"{key.rpartition('.')[0]}.{op.reject(name, expected, f'a DTensor, {placements}')}; "
                    f"{NO_EXPERT_PARALLELISM}. Under FSDP2, call the module that was given to fully_shard, which "
                    "gathers its weights"
                )
        return None

    def _check_rows(self, x: Tensor | None) -> None:
        assert x is not None
        if not x.dim():
            raise InputError(f"{self.nodes[0].label}.{type(self.nodes[0].op).__name__}: x: expected rows, got a scalar")

    def _plan_of_kind(
        self,
        number: int,
        arguments: list[Tensor | None],
        now: Settings,
        options: KernelOptions,
        estimated: bool,
    ) -> Plan:
        """Return the plan for calls that differ from this one in their number of rows, up to the next power of two."""
        x, *others = arguments
        assert x is not None
        width = x.shape[-1]
        rows = x.numel() // width if width else 0
        kinds = [None if o is None else (o.shape[1:], o.dtype, o.requires_grad, o.device) for o in others]
        key = (number, estimated, rows.bit_length(), width, x.dtype, x.requires_grad, x.device, *kinds)
        plan = self._plans.get(key)
        if plan is None:
            disabled = (*now.disabled, *settings.patterns(disabled_by_environment()))
            if len(self._plans) >= _REMEMBERED_PLANS:
                self._plans.clear()
            disabled = ("*",) if estimated else disabled
            plan = self._make(arguments, arguments, now.recipe, disabled, options, estimated=estimated)
            self._plans[key] = plan
        return plan

    def _forget_plans(self) -> None:
        """Begin anew: an attribute that changes with every step has made too many."""
        for remembered in (self._circumstances, self._plans, self._calls):
            remembered.clear()

    def _make(
        self,
        specs: Sequence[SpecLike | None],
        arguments: list[Tensor | None],
        recipe: Recipe,
        disabled: tuple[str, ...],
        options: KernelOptions,
        asked: Target | None = None,
        estimated: bool = False,
    ) -> Plan:
        """Plan for arguments of these specs, on their device or, where one is asked about, on that. The device of an
        estimated call need not be there.
        """
        self.check_devices(arguments)
        graph = self.rewritten(recipe)
        given = zip(graph.arguments, arguments, strict=True)
        grad = torch.is_grad_enabled()
        wanted = {name for name, a in given if grad and a is not None and a.requires_grad}
        x = arguments[0]
        assert x is not None
        deterministic = torch.are_deterministic_algorithms_enabled()
        device = x.device if asked is None else torch.device("cuda")
        of_device = asked.arch if asked is not None else None if estimated else arch_of(device)
        environment = Environment(
            device, of_device, deterministic, recipe, disabled, options, asked is not None, estimated
        )
        return make_plan(graph, dict(zip(graph.arguments, specs, strict=True)), wanted, environment, name=self.name)

    def changes_state(self, recipe: Recipe) -> bool:
        """Whether a call changes more than it returns: a ``main_grad``, a random number generator, or what delayed
        scaling remembers.
        """
        if any(op.draws_random or getattr(op, "accumulate_into_main_grad", False) for op in self._ops):
            return True
        graph = self.rewritten(recipe)
        quantizers = [getattr(node.op, name, None) for node in graph.nodes for name in ("quantizer", "grad_quantizer")]
        quantizers += [getattr(step.run, "quantizer", None) for step in graph.weights.values()]
        return any(q is not None and q.delayed is not None for q in quantizers)

    def check_devices(self, arguments: Sequence[Tensor | None]) -> None:
        """Refuse arguments that are not where the rows are."""
        rows = arguments[0]
        assert rows is not None
        for name, argument in zip(self.arguments, arguments, strict=True):
            if argument is not None and argument.device != rows.device:
                takes = f"; {', '.join(self.takers[name])} takes it" if name in self.inputs else ""
                raise InputError(
                    f"{name}: expected on {rows.device}, where the rows are, got on {argument.device}{takes}"
                )

    def rewritten(self, recipe: Recipe) -> Graph:
        """Return the chain as the recipe wants it, with the same arguments in the same order."""
        nodes = rewritten(recipe, self.nodes)
        must = f"recipe {recipe.name!r}: rewrite() must"
        if [n for n in nodes if n in self.nodes] != list(self.nodes):
            raise InputError(f"{must} keep the chain's own ops, in their order")
        labels = [node.label for node in nodes]
        for label, op in nodes:
            if labels.count(label) > 1:
                raise InputError(f"{must} give each inserted op a label of its own, got {label!r} twice")
            if op.parameter_names and Node(label, op) not in self.nodes:
                raise InputError(f"{must} insert ops with no parameters, got {label}.{type(op).__name__}")
        graph = Graph(nodes, self.exports, self.inputs, self.sorted_rows, self.provided)
        if more := graph.inputs[len(self.inputs) :]:
            raise InputError(
                f"{must} insert ops that take what the chain has, got one that takes {', '.join(map(repr, more))}"
            )
        return graph


def autocast_argument(t: Tensor | None, dtype: torch.dtype, runtime_input: bool) -> Tensor | None:
    """Cast what autocast casts: rows and parameters, see `autocasts`."""
    return t if t is None or runtime_input or not autocasts(t.dtype) else t.to(dtype)


def autocasts(dtype: torch.dtype) -> bool:
    """Whether autocast casts tensors of this dtype: floats, except fp64."""
    return dtype.is_floating_point and dtype is not torch.float64


def run_alone(op: Op, x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Run one op as a chain of one."""
    if not isinstance(x, Tensor):
        raise InputError(f"{op!r}: x: expected a tensor, got {type(x).__name__}")
    chain = alone(op)
    if inputs.keys() != set(chain.inputs) or not all(isinstance(t, Tensor) for t in inputs.values()):
        chain = alone_with(op, inputs)
        check_inputs(repr(op), chain.takers, inputs)
    named = dict(inputs)
    y = chain.run(x, named)
    return (y, {name: named[name] for name in op.provides}) if op.provides else y


def alone(op: Op) -> Chain:
    """Return the chain of one op, labelled ``op``."""
    chain: Chain | None = op.__dict__.get("_alone")
    if chain is None:
        chain = op.__dict__["_alone"] = Chain([Node("op", op.placed(()))], op.provides)
    return chain


def alone_with(op: Op, given: Collection[str]) -> Chain:
    """Return the chain of one op that is called with these inputs: among rows sorted by expert, if it is given
    ``splits`` and takes them where there are any.
    """
    chain = alone(op)
    if "splits" not in given or "splits" in chain.inputs or "offsets" not in op.optional_inputs:
        return chain
    found: Chain | None = op.__dict__.get("_alone_sorted")
    if found is None:
        found = Chain(chain.nodes, op.provides, {0: f"op.{type(op).__name__}"})
        op.__dict__["_alone_sorted"] = found
    return found


def check_inputs(
    who: str,
    wanted: Mapping[str, Sequence[str]],
    given: Mapping[str, Tensor],
    provided: Mapping[str, str] | None = None,
) -> None:
    """Raise unless exactly the wanted runtime inputs are given, as tensors; see `check_names`."""
    missing = {name for name in wanted if given.get(name) is None}
    check_names(who, wanted, given.keys() - missing, provided)
    for name, ops in wanted.items():
        if not isinstance(given[name], Tensor):
            raise InputError(
                f"{who}: {name}: expected a tensor, got {type(given[name]).__name__}; {', '.join(ops)} takes it"
            )


def check_names(
    who: str,
    wanted: Mapping[str, Sequence[str]],
    given: Collection[str],
    provided: Mapping[str, str] | None = None,
) -> None:
    """Raise unless exactly the wanted runtime inputs are given.

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
        if name not in given:
            raise InputError(f"{who}: the runtime input {name!r} is missing, which {', '.join(ops)} takes")
