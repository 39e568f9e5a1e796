"""The texts by which a graph of `torch.compile` refers to chains and plans.

A *handle* (`handle_of`) describes a chain and its conditions: equal handles mean the same computation, also in a graph
that came from a cache on disk. A *key* is the text of a plan of such a chain (`plan_of`).

The plan follows from the handle, from the tensors that want a gradient, and from dtypes and widths, not from the number
of rows: a graph for any number of rows has one plan.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from fusedmoe.base.errors import InputError
from fusedmoe.base.inputs import check_rows
from fusedmoe.base.recompute import backward_pass, checkpointing, had_gradients
from fusedmoe.call import settings
from fusedmoe.call.chain import Chain
from fusedmoe.call.settings import Settings
from fusedmoe.fusion.language import registry
from fusedmoe.fusion.program.plan import BoundPlan, Plan
from fusedmoe.fusion.program.plan_table import MAX_CALLS, Conditions, plan_chain
from fusedmoe.fusion.program.signature import NOMINAL_ROWS, argument_spec, signature
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.numerics.recipes import Recipe
from fusedmoe.ops.op import Node, Op, SpecLike, TensorSpec
from fusedmoe.version import __version__

# ---- absent arguments, wanted gradients and shapes, as texts and numbers -------------------------------------------

_ABSENT, _PRESENT, WANTS_GRADIENT = "-", "n", "g"


def encode(tensors: Sequence[Tensor | None], grad: bool = False) -> str:
    """Return a letter per tensor: absent, present, or, with ``grad``, present and requiring a gradient."""
    kinds = [_ABSENT if t is None else WANTS_GRADIENT if grad and t.requires_grad else _PRESENT for t in tensors]
    return "".join(kinds)


def decode(kinds: str, present: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the encoded tensors: None where one is absent."""
    each = iter(present)
    return [None if kind == _ABSENT else next(each) for kind in kinds]


def encode_shapes(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the number of dimensions and the sizes of each tensor that is present."""
    return [n for t in tensors if t is not None for n in (t.dim(), *t.shape)]


def _decode_shapes(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    each = iter(sizes)
    return [tuple([next(each) for _ in range(dims)]) for dims in each]


@dataclass
class _CompiledChain:
    """A chain without parameters, and the conditions of its handle."""

    chain: Chain
    made_under: Settings  # the settings and the conditions of planning
    conditions: Conditions
    calls: _LastCalls  # the last calls of chains with these ops
    transposed: frozenset[int]  # the positions of the arguments that operators take as ``.mT``
    # the plans of the chain. None is forgotten, since graphs refer to them
    plans: dict[Hashable, CompiledPlan] = field(default_factory=dict)
    # the handles of the chain under other settings; None if no operator can run it
    handles: dict[Settings, str | None] = field(default_factory=dict)


class _LastCalls:
    """The settings of the last calls of chains with the same ops.

    They are found by the address of a parameter, which identifies a layer, and by whether the call had gradients.
    """

    def __init__(self, parameter: int) -> None:
        self._parameter = parameter  # the position of the first in a call's tensors
        self._last: dict[tuple[int | None, bool], Settings] = {}

    def note(self, tensors: Sequence[Tensor], grad: bool, now: Settings) -> None:
        """Remember that a call runs under these settings."""
        if len(self._last) >= MAX_CALLS:
            self._last.clear()
        self._last[self._which(tensors), grad] = self._last[None, grad] = now

    def last(self, tensors: Sequence[Tensor], grad: bool) -> Settings | None:
        """Return the settings of the last call with this parameter, else of the last call."""
        found = self._last.get((self._which(tensors), grad))
        return self._last.get((None, grad)) if found is None else found

    def _which(self, tensors: Sequence[Tensor]) -> int | None:
        return tensors[self._parameter].data_ptr() if self._parameter < len(tensors) else None


class CompiledPlan:
    """A plan as the operators run it; ``key`` is the text that refers to it."""

    def __init__(
        self, key: str, plan: Plan, kinds: str, specs: Sequence[SpecLike | None], traced: _CompiledChain
    ) -> None:
        self.key, self.plan = key, plan
        self._table, self._strict = traced.chain.table, traced.made_under.strict
        self.names = plan.graph.arguments
        self._dtypes = [None if spec is None else spec.dtype for spec in specs]
        wanted = [kind == WANTS_GRADIENT for kind in kinds]
        has_gradient = plan.of_backward.gradients
        # whether each argument gets a gradient
        self.gradients = tuple(w and a in has_gradient for a, w in zip(self.names, wanted, strict=True))
        self.transposed = {self.names[i] for i in traced.transposed}  # the arguments that operators take as ``.mT``
        self.saved = plan.saved_tensors  # which the backward operator takes
        # the values that the forward operator returns after the results
        self.kept = tuple(v for v in self.saved if v not in (*self.names, *plan.outputs))
        self.numbers = itertools.count(1)  # of traced calls
        self.checked = False  # whether the gradients that rules return were compared with the arguments

    def call(self, arguments: Sequence[Tensor | None]) -> BoundPlan:
        """Return the plan, bound to tensors like these."""
        key = self.key, signature(arguments)
        return self._table.calls.get(key) or self._table.bind(key, self.plan, arguments, self._strict)

    def backward_call(self, sizes: Sequence[int]) -> BoundPlan:
        """Return the plan, bound for the backward pass of a call whose arguments had these sizes."""
        key = self.key, tuple(sizes)
        return self._table.calls.get(key) or self._table.bind(key, self.plan, self.specs(sizes), self._strict)

    def specs(self, sizes: Sequence[int]) -> list[TensorSpec | None]:
        """Return the specs of the arguments, which had these sizes."""
        shapes = iter(_decode_shapes(sizes))
        return [None if dtype is None else TensorSpec(next(shapes), dtype) for dtype in self._dtypes]


_lock = threading.Lock()
_chains: dict[str, _CompiledChain] = {}  # by handle
_plans: dict[str, CompiledPlan] = {}  # by key
_last_calls: dict[str, _LastCalls] = {}  # by ops


def handle_of(chain: Chain, options: KernelOptions) -> str | None:
    """Return the text that stands for a chain and its conditions; None for a chain that no operator can run."""
    now = settings.current()
    if _changes_state(chain, now.recipe):
        return None
    deterministic = torch.are_deterministic_algorithms_enabled()
    conditions = Conditions(
        now.recipe, now.all_disabled(), options, deterministic, nominal_rows=NOMINAL_ROWS, keep_weights=False
    )
    rules = [rule.identity for rule in registry.rules()]
    ops = [f"{node.label}={node.op.describe()}" for node in chain.nodes]
    strict = now.strict, now.strict_unavailable
    held = (repr(now.recipe), strict, conditions.disabled, repr(options), deterministic, rules)
    said = (ops, chain.exports, chain.sorted_rows, chain.provided, chain.returns_rows, *held)
    handle = f"fusedmoe {__version__} " + " ".join(map(str, said))
    with _lock:
        if handle not in _chains:
            nodes = [Node(node.label, _without_parameters(node.op)) for node in chain.nodes]
            bare = Chain(nodes, chain.exports, chain.sorted_rows, chain.provided, chain.returns_rows)
            calls = _last_calls.setdefault(str((ops, chain.sorted_rows)), _LastCalls(1 + len(chain.inputs)))
            _chains[handle] = _CompiledChain(bare, now, conditions, calls, _transposed(chain))
    return handle


def _changes_state(chain: Chain, recipe: Recipe) -> bool:
    """Whether a call changes more than it returns: a ``main_grad``, a random generator, or an amax history."""
    if any(node.op.draws_random or getattr(node.op, "accumulate_into_main_grad", False) for node in chain.nodes):
        return True
    return any(quantizer.delayed is not None for quantizer in chain.rewritten(recipe).all_quantizers)


def is_transposed(op: Op, parameter: str) -> bool:
    """Whether operators take this parameter of an op as ``.mT``: with the layout of its gradient."""
    return parameter == "weight" and getattr(op, "transposed_grad", False)


def _transposed(chain: Chain) -> frozenset[int]:
    parameters = [is_transposed(node.op, name) for node in chain.nodes for name in node.op.parameter_names]
    return frozenset(1 + len(chain.inputs) + i for i, transposed in enumerate(parameters) if transposed)


def arguments_of(handle: str, kinds: str, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the arguments of a chain from the tensors that an operator takes."""
    arguments = decode(kinds, tensors)
    for i in _chains[handle].transposed:
        t = arguments[i]
        arguments[i] = None if t is None else t.mT
    return arguments


def _without_parameters(op: Op) -> Op:
    """Return the op without its parameters, so that a graph keeps no weights alive."""
    bare = copy.copy(op)
    bare.__dict__["_parameters"] = dict.fromkeys(op._parameters)
    return bare


def plan_of(handle: str, kinds: str, arguments: Sequence[Tensor | None]) -> CompiledPlan:
    """Return the plan of a chain for arguments like these, which may be fake."""
    traced = _chains[handle]
    x = arguments[0]
    assert x is not None
    check_rows(x, traced.chain.nodes[0])
    # sizes as numbers, also where they are symbolic: all except the number of rows decide the plan
    specs = [argument_spec(a) for a in arguments]
    key = (kinds, x.device, bool(x.shape[0] == 0), *[None if s is None else (s.dtype, s.shape[1:]) for s in specs])
    found = traced.plans.get(key)
    if found is None:
        plan = plan_chain(traced.chain, arguments, [kind == WANTS_GRADIENT for kind in kinds], traced.conditions)
        if traced.made_under.strict:
            plan.raise_if_missed(traced.made_under.strict_unavailable)
        text = f"{handle} {key}"
        found = traced.plans[key] = _plans[text] = CompiledPlan(text, plan, kinds, specs, traced)
    return found


def plan_of_key(key: str) -> CompiledPlan:
    """Return the plan that a graph refers to by this text."""
    return _plans[key]


# ---- the settings of a call ------------------------------------------------------------------------------------------


def handle_for_call(handle: str, grad: bool, tensors: Sequence[Tensor]) -> str:
    """Return the handle for the settings that are in force around this call.

    `torch.compile` chooses a graph by ``settings.thread.key``. That text names the settings of another context in two
    cases: asyncio tasks take turns within their blocks, or a context was copied to a thread. A call without gradients
    then runs under its own settings. A call with gradients cannot: the graph has a backward pass for other settings.

    Raises `InputError`: the graph was made under other settings than those of the call, and has a backward pass.
    """
    traced = _chains[handle]
    made_under = traced.made_under
    if backward_pass() != -1:
        if checkpointing():
            before = traced.calls.last(tensors, grad and had_gradients())
            if before is not None and before != made_under:
                raise _wrong_graph(made_under, before, _REMEDY_OF_CHECKPOINTING)
        return handle
    now = settings.current()
    traced.calls.note(tensors, grad, now)
    if now == made_under:
        return handle
    settings.follow_context()
    if now not in traced.handles:
        traced.handles[now] = handle_of(traced.chain, traced.conditions.options)
    other = traced.handles[now]
    if grad or other is None:
        raise _wrong_graph(made_under, now, _REMEDY_OF_TASKS)
    return other


_REMEDY_OF_TASKS = (
    "Settings of another asyncio task, or of the context that this one was copied from, are in force in this thread. "
    "Open the block around the compiled call alone, in a function that does not await and in the thread that calls; or "
    "give the layers a recipe of their own (recipe=)."
)
_REMEDY_OF_CHECKPOINTING = (
    "Activation checkpointing computes the call again where its settings are not in force. Compile the function that "
    "checkpoints, rather than what it checkpoints; or give the layers a recipe of their own (recipe=)."
)


def _wrong_graph(made_under: Settings, called_under: Settings, remedy: str) -> InputError:
    names = [f.name for f in fields(made_under) if f.compare]
    differing = [name for name in names if getattr(made_under, name) != getattr(called_under, name)]
    made, called = (", ".join(f"{name} {getattr(s, name)!r}" for name in differing) for s in (made_under, called_under))
    return InputError(f"torch.compile chose a graph for {made}; expected one for {called}. {remedy}")
