"""Makes the plans of a chain, and keeps the table in which a call finds its plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor

from fusedmoe.base.estimating import has_values
from fusedmoe.base.inputs import check_dense, check_devices, check_rows, why_sharded
from fusedmoe.base.target import Target, arch_of
from fusedmoe.fusion.graph.forward import Graph
from fusedmoe.fusion.language import registry
from fusedmoe.fusion.program.plan import BoundPlan, Environment, Plan
from fusedmoe.fusion.program.signature import Signature, argument_spec
from fusedmoe.fusion.search.planner import make_plan
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.numerics.recipes import Recipe
from fusedmoe.ops.op import Node, Op, SpecLike

MAX_PLANS = 256
MAX_CALLS = 1024


class PlannedChain(Protocol):
    """The properties of a `fusedmoe.call.chain.Chain` that its plans follow from."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    arguments: tuple[str, ...]
    takers: dict[str, list[str]]
    parameters: list[tuple[Op, str, str]]
    name: str

    def rewritten(self, recipe: Recipe, specs: Sequence[SpecLike | None] | None = None) -> Graph:
        """Return the graph of the chain as the recipe rewrites it."""


class PlanSettings(Protocol):
    """The properties of a `fusedmoe.call.settings.Settings` that plans follow from."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def disabled(self) -> tuple[str, ...]: ...

    @property
    def strict(self) -> bool: ...

    @property
    def strict_unavailable(self) -> bool: ...

    def all_disabled(self) -> tuple[str, ...]:
        """Return `disabled` and the patterns of the environment variable."""


class CallContext(NamedTuple):
    """The state around a call that its plan depends on."""

    settings: PlanSettings  # recipe, disabled rules and strictness
    options: KernelOptions  # those of the outermost `Sequential`
    changes: int  # `fusedmoe.base.changes.count`: it changes with the attributes of ops and the set of rules
    variables: tuple[object, ...]  # the environment variables that are read at every call
    grad: bool  # the modes of torch
    deterministic: bool
    counts_flops: bool  # whether a FLOP counter of torch watches the call


class Conditions(NamedTuple):
    """The conditions that a plan is made for, besides the ops and the arguments."""

    recipe: Recipe  # as in `Environment`
    disabled: tuple[str, ...]
    options: KernelOptions
    deterministic: bool
    # no rule applies: for estimators of torch and for exported programs. The device may be absent
    unfused: bool = False
    target: Target | None = None  # the GPU of ``explain(..., arch=)``
    nominal_rows: int | None = None  # as in `make_plan`
    keep_weights: bool = True


def plan_chain(
    chain: PlannedChain,
    arguments: Sequence[Tensor | None],
    wanted: Sequence[bool],
    conditions: Conditions,
    specs: Sequence[SpecLike | None] | None = None,
) -> Plan:
    """Plan a chain for these arguments.

    - ``chain``, ``arguments``: the chain, and the arguments in its order.
    - ``wanted``: whether each argument wants a gradient.
    - ``conditions``: the other conditions.
    - ``specs``: the specs to plan for, if they are not those of the arguments.
    """
    check_devices(chain.arguments, arguments, chain.takers)
    rows, target, unfused = arguments[0], conditions.target, conditions.unfused
    assert rows is not None
    device = rows.device if target is None else torch.device("cuda")
    environment = Environment(
        device,
        target.arch if target is not None else None if unfused else arch_of(device),
        conditions.deterministic,
        conditions.recipe,
        conditions.disabled,
        conditions.options,
        asked=target is not None,
        estimated=unfused,
    )
    specs = [argument_spec(a) for a in arguments] if specs is None else specs
    graph = chain.rewritten(conditions.recipe, specs)
    return make_plan(
        graph,
        dict(zip(graph.arguments, specs, strict=True)),
        {name for name, wants in zip(graph.arguments, wanted, strict=True) if wants},
        environment,
        conditions.nominal_rows,
        chain.name,
        keep_weights=conditions.keep_weights,
    )


def wanted_gradients(arguments: Sequence[Tensor | None]) -> list[bool]:
    """Return whether each argument wants a gradient here."""
    grad = torch.is_grad_enabled()
    return [grad and a is not None and a.requires_grad for a in arguments]


class PlanTable:
    """The plans of a chain, and the calls that are bound to them.

    A call that the previous one does not serve (`fusedmoe.call.still_valid.LastCall`) looks for its `BoundPlan` in this
    order:

    1. `calls`, all earlier calls, by context and signature of tensors. In the key, a number identifies the
       circumstances: the attributes of the ops, the set of rules, and the context except the strictness.
    2. `plans`: the plan of an earlier call that differed only in strictness, or in the number of rows within the same
       power of two. The plan is bound to these tensors, whose shapes are checked against the ops.
    3. A new plan.

    A full dict is cleared. Keys that change with every call fill it, for example an attribute that counts steps.
    `fusedmoe.call.compile.handles` binds its calls here too. It keeps its own plans, since graphs refer to them.
    """

    def __init__(self, chain: PlannedChain) -> None:
        self._chain_ref = ref(chain)  # the chain has the table: a cycle would keep the weights of a deleted module
        self._ops = tuple(node.op for node in chain.nodes)
        self._circumstances: dict[tuple[Any, ...], int] = {}
        self._numbers = count()  # no number is used twice
        self.plans: dict[Hashable, Plan] = {}
        self.calls: dict[Hashable, BoundPlan] = {}

    @property
    def _chain(self) -> PlannedChain:
        chain = self._chain_ref()
        assert chain is not None, "only a chain uses its table"
        return chain

    def find(self, arguments: Sequence[Tensor | None], tensors: Signature, context: CallContext) -> BoundPlan:
        """Return the plan for these arguments, bound to them."""
        rows = arguments[0]
        assert rows is not None
        check_rows(rows, self._chain.nodes[0])
        now, options, _, *others = context
        circumstances = (
            *[op.attributes() for op in self._ops], now.recipe, now.disabled, registry.generation(), options, *others,
        )  # fmt: skip
        number = self._circumstances.get(circumstances)
        if number is None:
            if len(self._circumstances) >= MAX_PLANS:
                for remembered in (self._circumstances, self.plans, self.calls):
                    remembered.clear()
            number = self._circumstances[circumstances] = next(self._numbers)
        key = number, now.strict, tensors
        call = self.calls.get(key)
        if call is None:
            for name, argument in zip(self._chain.arguments, arguments, strict=True):
                if argument is not None:
                    check_dense(name, argument)
            call = self.bind(key, self._plan(number, arguments, context), arguments, now.strict, tensors)
            call.refused = why_sharded(self._chain.parameters, arguments[1 + len(self._chain.inputs) :])
        return call

    def _plan(self, number: int, arguments: Sequence[Tensor | None], context: CallContext) -> Plan:
        rows, *others = arguments
        assert rows is not None
        unfused = bool(context.counts_flops) or not all(a is None or has_values(a) for a in arguments)
        width = rows.shape[-1]
        log2_rows = (rows.numel() // width if width else 0).bit_length()
        kinds = [None if o is None else (o.shape[1:], o.dtype, o.requires_grad, o.device) for o in others]
        key = (number, unfused, log2_rows, width, rows.dtype, rows.requires_grad, rows.device, *kinds)
        plan = self.plans.get(key)
        if plan is None:
            now, options = context.settings, context.options
            conditions = Conditions(now.recipe, now.all_disabled(), options, context.deterministic, unfused)
            if len(self.plans) >= MAX_PLANS:
                self.plans.clear()
            plan = self.plans[key] = plan_chain(self._chain, arguments, wanted_gradients(arguments), conditions)
        return plan

    def bind(
        self, key: Hashable, plan: Plan, arguments: Sequence[SpecLike | None], strict: bool, tensors: Signature = ()
    ) -> BoundPlan:
        """Bind a plan to arguments like these, after a check that their shapes fit the ops."""
        specs = plan.infer(arguments)
        if len(self.calls) >= MAX_CALLS:
            self.calls.clear()
        call = self.calls[key] = BoundPlan(plan, strict, specs, tensors)
        return call
