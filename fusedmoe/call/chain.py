"""A chain: consecutive ops that are planned together. It finds the plan of each call, and runs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch._subclasses.fake_tensor import FakeTensor

from fusedmoe.base import target
from fusedmoe.base.autocast import autocast_dtype, cast_arguments, cast_specs, without_autocast
from fusedmoe.base.errors import InputError, inside_jit_trace
from fusedmoe.base.inputs import Parameters, check_rows
from fusedmoe.call import settings
from fusedmoe.call.autograd import run_call
from fusedmoe.call.quantization import rewritten
from fusedmoe.call.routing_weights import applied_late
from fusedmoe.call.still_valid import LastCall, context_of_call
from fusedmoe.fusion.graph.forward import Graph
from fusedmoe.fusion.program.plan import BoundPlan
from fusedmoe.fusion.program.plan_table import CallContext, Conditions, PlanTable, plan_chain, wanted_gradients
from fusedmoe.fusion.program.signature import Signature, argument_spec, signature
from fusedmoe.fusion.report.data import PlanData
from fusedmoe.fusion.report.describe import describe
from fusedmoe.fusion.search.estimate import estimated
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.numerics.recipes import BF16, Recipe
from fusedmoe.ops.op import Node, SpecLike


class Chain:
    """Consecutive ops, planned once for each kind of call.

    Arguments:
    - ``nodes``: the ops and their labels.
    - ``exports``: values that the ops provide for parts after the chain.
    - ``sorted_rows``, ``provided``, ``returns_rows``: as in `Graph`.

    Its attributes:
    - ``inputs`` (tuple of str): the runtime inputs.
    - ``arguments`` (tuple of str): the arguments of a plan, in order: the rows, the runtime inputs and the parameters.
    - ``takers`` (dict of str to list of str): each runtime input, with the ops that take it.
    - ``parameters`` (list of (Op, str, str)): for each parameter its op, its name in the op, and its name in the chain.
    - ``casts`` (tuple of bool): whether autocast casts each of `arguments`. Runtime inputs keep their dtypes; see also
      `Op.autocasts`.
    - ``weights`` (frozenset of int): the positions, among `arguments`, of weights whose gradients kernels may write.
    - ``name`` (str): the chain's name in a model, for log lines; empty if it is not known.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        exports: Collection[str] = (),
        sorted_rows: Mapping[int, str] | None = None,
        provided: Collection[str] = (),
        returns_rows: bool = True,
    ) -> None:
        self.nodes = tuple(nodes)
        self.exports = tuple(exports)
        self.sorted_rows = sorted_rows or {}
        self.provided = tuple(provided)
        self.returns_rows = returns_rows
        graph = Graph(self.nodes, self.exports, (), self.sorted_rows, self.provided, returns_rows)
        self.inputs = tuple(graph.inputs)
        self.arguments = graph.arguments
        self.takers = graph.takers
        self.parameters = [
            (node.op, name, f"{node.label}.{name}") for node in self.nodes for name in node.op.parameter_names
        ]
        self._stored = [name in op.stored_weight for op, name, _ in self.parameters]
        self.casts = (
            any(node.op.autocasts for node in self.nodes),
            *[False] * len(self.inputs),
            *[op.autocasts and not stored for (op, _, _), stored in zip(self.parameters, self._stored, strict=True)],
        )
        self.weights = frozenset(
            i for i, (op, name, _) in enumerate(self.parameters, 1 + len(self.inputs))
            if name == "weight" and getattr(op, "gives_grad", False)
        )  # fmt: skip
        self.name = ""
        self.table = PlanTable(self)
        self._last: LastCall | None = None
        self._settings = settings.OfCalls()

    def run(
        self,
        x: Tensor,
        named: dict[str, Tensor],
        options: KernelOptions = DEFAULT,
        parameters: Parameters | None = None,
    ) -> Tensor:
        """Return the output rows for these rows and named runtime inputs, and add the exports to ``named``.

        The output rows of a chain that does not return them are ``x``.
        """
        if _get_tracing_state() is not None:
            raise inside_jit_trace(f"{self.nodes[0].label}.{type(self.nodes[0].op).__name__}")
        arguments = self.arguments_of(x, named, parameters)
        context = context_of_call(self._settings.of_call(), options)
        tensors = signature(arguments)
        last = self._last
        if last is not None and last.serves(tensors, context):
            results = run_call(last.call, arguments)
        elif (dtype := autocast_dtype(x.device)) is None:
            results = self._run(arguments, tensors, CallContext(*context))
        else:
            cast = cast_arguments(arguments, dtype, self.casts, self.weights)
            with without_autocast(x.device):
                results = self._run(cast, signature(cast), CallContext(*context), arguments)
        if not self.returns_rows:
            results = (x, *results)
        if len(results) > 1:
            named.update(zip(self.exports, results[1:], strict=True))
        return results[0]

    def prepared(
        self, given: list[Tensor | None], options: KernelOptions
    ) -> tuple[BoundPlan, list[Tensor | None], list[Tensor | None]]:
        """Return the plan of a call with arguments like those of `arguments_of`, these as autocast casts them, and
        those before.
        """
        x = given[0]
        assert x is not None
        arguments, dtype = given, autocast_dtype(x.device)
        if dtype is not None:
            arguments = cast_arguments(given, dtype, self.casts)
        with without_autocast(x.device):
            context = CallContext(*context_of_call(self._settings.of_call(), options))
            return self._found(arguments, signature(arguments), context), arguments, given

    def explain(
        self,
        x: Tensor,
        named: Mapping[str, Tensor],
        options: KernelOptions = DEFAULT,
        parameters: Parameters | None = None,
    ) -> PlanData:
        """Return the plan for this call as data, for the target if it is set, else for the device of the rows. A plan
        that quantizes has an estimate, which compares it with the plan under ``"bf16"``.
        """
        arguments = self.arguments_of(x, named, parameters)
        data = self._explain(x, arguments, options)
        if not data.formats or data.unfused or data.arch is None:
            return data
        # a plan for a target is neither kept nor logged
        with settings.recipe(BF16), target.planned_for(None if target.current() else data.arch):
            in_bf16 = self._explain_for_target(x, arguments, options)
        return replace(data, estimate=estimated(data, in_bf16))

    def _explain(self, x: Tensor, arguments: list[Tensor | None], options: KernelOptions) -> PlanData:
        if target.current() is not None:
            return self._explain_for_target(x, arguments, options)
        if (dtype := autocast_dtype(x.device)) is not None:
            arguments = cast_arguments(arguments, dtype, self.casts)
        context = CallContext(*context_of_call(settings.current(), options))
        plan = self.table.find(arguments, signature(arguments), context).plan
        return describe(plan, dict(zip(plan.graph.arguments, arguments, strict=True)))

    def _explain_for_target(self, x: Tensor, arguments: Sequence[Tensor | None], options: KernelOptions) -> PlanData:
        """Return a plan for the target, made from shapes and dtypes alone and not kept in the table."""
        check_rows(x, self.nodes[0])
        now, asked = settings.current(), target.current()
        assert asked is not None
        dtype = asked.dtype or autocast_dtype(x.device)
        specs = [argument_spec(a) for a in arguments]
        if dtype is not None:
            all_others = True, *[False] * len(self.inputs), *[not stored for stored in self._stored]
            specs = cast_specs(specs, dtype, self.casts if asked.dtype is None else all_others)
        deterministic = torch.are_deterministic_algorithms_enabled()
        conditions = Conditions(now.recipe, now.all_disabled(), options, deterministic, target=asked)
        plan = plan_chain(self, arguments, wanted_gradients(arguments), conditions, specs)
        data = describe(plan, dict(zip(plan.graph.arguments, specs, strict=True)))
        given = "" if plan.dtype is x.dtype else str(x.dtype).removeprefix("torch.")
        return replace(data, given_dtype=given if asked.dtype else "")

    def _without_memory(self, arguments: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return tensors like the results, without running a step, in the active mode for tensors without memory."""
        x = arguments[0]
        assert x is not None
        check_rows(x, self.nodes[0])
        own_specs = [argument_spec(a) for a in arguments]
        graph = self.rewritten(settings.current().recipe, own_specs)
        specs = graph.infer(dict(zip(graph.arguments, own_specs, strict=True)))
        grad = any(wanted_gradients(arguments))
        results = []
        for spec in (specs[value] for value in graph.outputs):
            assert spec is not None
            wants = grad and spec.dtype.is_floating_point
            results.append(torch.empty(spec.shape, dtype=spec.dtype, device=x.device, requires_grad=wants))
        return tuple(results)

    def arguments_of(
        self, x: Tensor, named: Mapping[str, Tensor], parameters: Parameters | None
    ) -> list[Tensor | None]:
        """Return the rows, the runtime inputs and the current parameters."""
        own = [op._parameters[name] if name in op._parameters else getattr(op, name) for op, name, _ in self.parameters]
        if parameters:
            own = [parameters.get(key) if t is None else t for t, (_, _, key) in zip(own, self.parameters, strict=True)]
        return [x, *[named[name] for name in self.inputs], *own]

    def _run(
        self,
        arguments: list[Tensor | None],
        tensors: Signature,
        context: CallContext,
        uncast: list[Tensor | None] | None = None,
    ) -> tuple[Tensor, ...]:
        x = arguments[0]
        assert x is not None
        if target.current() is not None and isinstance(x, FakeTensor):
            return self._without_memory(arguments)
        call = self._found(arguments, tensors, context)
        if x.is_meta:
            estimated = context.counts_flops or call.plan.wanted
            return run_call(call, arguments) if estimated else call.plan.on_meta(arguments)
        self._last = LastCall(call, tensors, context, x.device.type)
        return run_call(call, arguments, uncast)

    def _found(self, arguments: list[Tensor | None], tensors: Signature, context: CallContext) -> BoundPlan:
        """Return the plan of a call; raise if the call is refused, or unfused against the settings."""
        call, now = self.table.find(arguments, tensors, context), context.settings
        if call.refused is not None:
            raise InputError(call.refused)
        if now.strict and not call.plan.environment.estimated:
            call.plan.raise_if_missed(now.strict_unavailable)
        return call

    def rewritten(self, recipe: Recipe, specs: Sequence[SpecLike | None] | None = None) -> Graph:
        """Return the graph of the chain as the recipe rewrites it, with the same arguments in the same order.

        ``specs`` are those of the arguments: in fp16, the routing weights are applied late; see
        `fusedmoe.call.routing_weights`.
        """
        own = self.nodes
        if specs is not None and specs[0] is not None:
            absent = {name for name, spec in zip(self.arguments, specs, strict=True) if spec is None}
            own = applied_late(own, specs[0].dtype, absent)
        nodes = rewritten(recipe, own)
        must = f"recipe {recipe.name!r}: rewrite() must"
        if [n for n in nodes if n in own] != list(own):
            raise InputError(f"{must} keep the chain's own ops, in their order")
        labels = [node.label for node in nodes]
        for label, op in nodes:
            if labels.count(label) > 1:
                raise InputError(f"{must} give each inserted op a label of its own, got {label!r} twice")
            if op.parameter_names and Node(label, op) not in own:
                raise InputError(f"{must} insert ops with no parameters, got {label}.{type(op).__name__}")
        graph = Graph(nodes, self.exports, self.inputs, self.sorted_rows, self.provided, self.returns_rows)
        if more := graph.inputs[len(self.inputs) :]:
            raise InputError(
                f"{must} insert only ops that take values of the chain, got one that takes {', '.join(map(repr, more))}"
            )
        return graph
