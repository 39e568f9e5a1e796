"""A `Sequential` as `torch.compile` meets it: each chain is one operator, forward and backward. Imported only then.

Dynamo traces `run_sequential`, which gathers what the chains are called with, and never sees the planner. What a chain
is, and what holds around the call (recipe, switched-off rules, options), is written into a text, the *handle*, which is
baked into the graph: equal texts mean the same computation, also in a graph that came from a cache on disk. Where any
of it changes, a guard fails and Dynamo traces anew.

    fusedmoe::run_chain(handle, wanted, tensors) -> results, kept
    fusedmoe::run_chain_backward(plan, sizes, saved, grads) -> gradients

The plan follows from the handle, from which tensors want a gradient, and from dtypes and widths, not from the number of
rows: a graph for any number of rows is a graph with one plan. The fake implementations say what that plan's steps would
return. A chain that keeps quantized values keeps its inputs instead and computes them again in backward.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe import settings
from fusedmoe.autocast import autocast_dtype, cast_arguments, without_autocast
from fusedmoe.chain import Chain, alone_with
from fusedmoe.errors import InputError
from fusedmoe.fusion import registry
from fusedmoe.fusion.differentiable import SecondOrderError
from fusedmoe.fusion.plans import Conditions, PlanTable, plan_chain
from fusedmoe.fusion.rule import RuleError
from fusedmoe.fusion.signature import NOMINAL_ROWS, signature, spec_of
from fusedmoe.fusion.steps import Fused
from fusedmoe.inputs import check_names, check_rows
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.ops.op import Node, Op, TensorSpec, constant_in_graphs
from fusedmoe.partition import ChainPart
from fusedmoe.recompute import backward_pass, checkpointing, had_gradients
from fusedmoe.sorted_rows import ModuleCall, call_module, why_no_rows
from fusedmoe.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from fusedmoe.fusion.executable import BoundPlan, Plan
    from fusedmoe.inputs import Parameters
    from fusedmoe.ops.op import SpecLike
    from fusedmoe.recipes import Recipe
    from fusedmoe.sequential import Sequential
    from fusedmoe.settings import Settings

Path = tuple[str, ...]


class TracedChain(NamedTuple):
    """What Dynamo reads of a chain: only texts."""

    handle: str | None
    inputs: tuple[str, ...]
    parameters: tuple[tuple[Path, str, str], ...]  # where the op is, the parameter's name, and its name in the chain
    exports: tuple[str, ...]
    chain: Chain | None  # where there is no handle


Given = tuple[tuple[str, str], ...]  # as `_given` returns it


class TracedPart(NamedTuple):
    """What Dynamo reads of a part that is a chain: see `ChainPart`."""

    chain: TracedChain
    apart: TracedChain
    sorts_rows: bool


class TracedModule(NamedTuple):
    """What Dynamo reads of a module among the ops."""

    path: Path
    call: ModuleCall


# ---- what Dynamo traces -------------------------------------------------------------------------------------------


def run_sequential(
    root: Sequential, x: Tensor, inputs: dict[str, Tensor], parameters: Parameters | None = None
) -> Tensor:
    """Run a `Sequential` in a graph that is being traced."""
    _prepare_tracing()
    root._describe_for_compiler()
    options = root._options
    parts = root._parts_for_compiler(
        _described(root), settings.thread.key, registry.generation(), options.sm_margin, options.schedule,
        torch.are_deterministic_algorithms_enabled(), _given(x, inputs),
    )  # fmt: skip
    if isinstance(parts, str):
        _refuse(parts)
    named = dict(inputs)
    counted = True
    for part in parts:
        if isinstance(part, TracedModule):
            x, counted = call_module(_at(root, part.path), x, named, part.call, counted)
            if wrong := why_no_rows(x, part.call):
                _refuse(wrong)
        else:
            chain = part.chain if counted else part.apart
            own = [getattr(_at(root, path), name) for path, name, _ in chain.parameters]
            if parameters is not None:
                keys = [key for _, _, key in chain.parameters]
                own = [parameters.get(key) if t is None else t for t, key in zip(own, keys, strict=True)]
            x = _run_chain(chain, x, named, own, options, parameters)
            counted = counted or part.sorts_rows
    return x


def run_op(op: Op, x: Tensor, inputs: dict[str, Tensor]) -> Any:
    """Run an op alone in a graph that is being traced."""
    _prepare_tracing()
    op._describe_for_compiler()
    part = op._chain_for_compiler(
        op._description, settings.thread.key, registry.generation(), torch.are_deterministic_algorithms_enabled(),
        _given(x, inputs),
    )  # fmt: skip
    if isinstance(part, str):
        _refuse(part)
    named = dict(inputs)
    y = _run_chain(part, x, named, [getattr(op, name) for _, name, _ in part.parameters], DEFAULT, None)
    return (y, {name: named[name] for name in op.provides}) if op.provides else y


@constant_in_graphs
def _prepare_tracing() -> None:
    """Load the rules, which Dynamo could not trace, and name the settings that hold here: both become guards."""
    registry.generation()
    settings.follow_context()


def _described(module: Any) -> tuple[Any, ...]:
    """Return what the partition of a `Sequential` depends on, as texts: Dynamo guards on each that it reads."""
    return tuple(
        [
            (name, _text_of(child) if isinstance(child, Op) else _described(child) if _opened(child) else "")
            for name, child in module._modules.items()
        ]
    )


def _text_of(op: Op) -> str:
    """Return the op's description. It is missing after a graph break here (a bare ``nn.GRU``), where a graph that was
    made for another `Sequential` came before.
    """
    return getattr(op, "_description", None) or op.describe()


def _opened(module: nn.Module | None) -> bool:
    from fusedmoe.sequential import opened

    return opened(module)


def _at(root: nn.Module, path: Path) -> Any:
    module: Any = root
    for name in path:
        module = module._modules[name]
    return module


def _run_chain(
    part: TracedChain,
    x: Tensor,
    named: dict[str, Tensor],
    parameters: list[Tensor | None],
    options: KernelOptions,
    given: Parameters | None,
) -> Tensor:
    arguments: list[Tensor | None] = [x, *[named[name] for name in part.inputs], *parameters]
    if (dtype := autocast_dtype(x.device)) is not None:
        arguments = cast_arguments(arguments, dtype, len(part.inputs))
    if part.handle is None:
        results = _run_uncompiled(part.chain, x, named, options, given)
    else:
        grad = torch.is_grad_enabled()
        wanted = "".join(["-" if a is None else "g" if grad and a.requires_grad else "n" for a in arguments])
        results = torch.ops.fusedmoe.run_chain(part.handle, wanted, [a for a in arguments if a is not None])
    for i, name in enumerate(part.exports):
        named[name] = results[1 + i]
    return results[0]  # type: ignore[no-any-return]


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="a chain that changes more than it returns (draws_random, accumulate_into_main_grad, delayed scaling) "
    "is not traced"
)
def _run_uncompiled(
    chain: Chain, x: Tensor, named: dict[str, Tensor], options: KernelOptions, parameters: Parameters | None
) -> tuple[Tensor, ...]:
    """Run a chain eagerly: a graph break."""
    named = dict(named)
    y = chain.run(x, named, options, parameters)
    return (y, *[named[name] for name in chain.exports])


def _refuse(message: str) -> None:
    """Raise an `InputError` after a graph break: one that is raised while Dynamo traces would be Dynamo's, or have it
    trace what the module calls instead of the module from then on. Where no break may be, its error has the message.
    """
    torch._dynamo.graph_break(msg=message)
    raise InputError(message)


def _given(x: object, inputs: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return what came besides tensors, as ``x`` or by name: each name with a type, or with nothing for a tensor."""
    came = [(name, "" if isinstance(t, Tensor) else type(t).__name__) for name, t in inputs.items() if t is not None]
    return (("x", "" if isinstance(x, Tensor) else type(x).__name__), *came)


# ---- what Dynamo takes for constants ------------------------------------------------------------------------------


# behind a graph break these are called rather than taken for constants: they are not to be traced then
@torch.compiler.disable  # type: ignore[untyped-decorator]
def parts_for_compiler(root: Sequential, given: Given) -> tuple[TracedPart | TracedModule, ...] | str:
    """Return what a `Sequential` is made of, for `run_sequential`; or the message where the call is refused."""
    try:
        names = [name for name, _ in given[1:]]
        partition = root._partition_for(names)
        partition.check_names(names)
        _check_tensors("Sequential", given)
        return tuple(
            _traced_part(part, root._options)
            if isinstance(part, ChainPart)
            else TracedModule(tuple(part.label.split(".")), part.call)
            for part in partition.parts
        )
    except InputError as error:
        return str(error)


def _check_tensors(who: str, given: Given) -> None:
    for name, kind in given:
        if kind:
            raise InputError(f"{who}: {name}: expected a tensor, got {kind}")


def _traced_part(part: ChainPart, options: KernelOptions) -> TracedPart:
    paths = [tuple(node.label.split(".")) for node in part.chain.nodes]
    chain = _traced_chain(part.chain, paths, options)
    apart = chain if part.apart is None else _traced_chain(part.apart, paths, options)
    return TracedPart(chain, apart, part.sorts_rows)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chain_for_compiler(op: Op, given: Given) -> TracedChain | str:
    """Return an op alone, for `run_op`; or the message where the call is refused."""
    try:
        names = [name for name, _ in given[1:]]
        chain = alone_with(op, names)
        check_names(repr(op), chain.takers, names)
        _check_tensors(repr(op), given)
        return _traced_chain(chain, [()], DEFAULT)
    except InputError as error:
        return str(error)


def _traced_chain(chain: Chain, paths: Sequence[Path], options: KernelOptions) -> TracedChain:
    parameters = tuple(
        (path, name, f"{node.label}.{name}")
        for node, path in zip(chain.nodes, paths, strict=True)
        for name in node.op.parameter_names
    )
    handle = _handle(chain, options)
    return TracedChain(handle, chain.inputs, parameters, chain.exports, None if handle else chain)


# ---- the operators ------------------------------------------------------------------------------------------------


class _Traced:
    """A chain with what held around the traced call: what a handle stands for."""

    def __init__(self, chain: Chain, made_under: Settings, conditions: Conditions, calls: _Calls) -> None:
        self.chain, self.made_under, self.conditions, self.calls = chain, made_under, conditions, calls
        self.plans: dict[tuple[Any, ...], _TracedPlan] = {}
        self.handles: dict[Settings, str | None] = {}  # of the same chain, under other settings


class _Calls:
    """The settings of the last calls of chains with the same ops: by a tensor of the call and whether it had gradients.

    The tensor is a parameter where there is one. It tells layers apart while its memory stays where it is.
    """

    def __init__(self, parameter: int) -> None:
        self._parameter = parameter  # the position of the first in a call's tensors
        self._last: dict[tuple[int | None, bool], Settings] = {}

    def note(self, tensors: Sequence[Tensor], grad: bool, now: Settings) -> None:
        """Remember that a call runs under these settings."""
        if len(self._last) >= _REMEMBERED_CALLS:
            self._last.clear()
        self._last[self._which(tensors), grad] = self._last[None, grad] = now

    def last(self, tensors: Sequence[Tensor], grad: bool) -> Settings | None:
        """Return the settings of the last call that brought this parameter, else of the last call."""
        found = self._last.get((self._which(tensors), grad))
        return self._last.get((None, grad)) if found is None else found

    def _which(self, tensors: Sequence[Tensor]) -> int | None:
        return tensors[self._parameter].data_ptr() if self._parameter < len(tensors) else None


class _TracedPlan:
    """A plan as an operator runs it: which of its values come out beside the results, and what backward reads."""

    def __init__(
        self, key: str, plan: Plan, wanted: str, dtypes: Mapping[str, torch.dtype], strict: bool, table: PlanTable
    ) -> None:
        self.key, self.plan, self.dtypes, self.strict, self._table = key, plan, dtypes, strict, table
        self.names = plan.graph.arguments
        self.given = tuple(w != "-" for w in wanted)
        self.gradients = tuple(
            w == "g" and a in plan.of_backward.gradients for a, w in zip(self.names, wanted, strict=True)
        )
        self.wanted = tuple(w == "g" for w in wanted)
        self.results = len(plan.outputs)
        self.saved = plan.saved_tensors if any(self.wanted) else ()
        self.kept = tuple(v for v in self.saved if v not in (*self.names, *plan.outputs))
        self.checked = False  # whether the gradients that its rules return were compared with the arguments

    def call(self, arguments: Sequence[Tensor | None]) -> BoundPlan:
        """Return the plan, bound to tensors like these."""
        key = self.key, signature(arguments)
        return self._table.calls.get(key) or self._table.bind(key, self.plan, arguments, self.strict)

    def backward_call(self, sizes: Sequence[int]) -> BoundPlan:
        """Return the plan, bound for the backward pass of a call whose arguments had these sizes."""
        key = self.key, tuple(sizes)
        return self._table.calls.get(key) or self._table.bind(key, self.plan, self.specs(sizes), self.strict)

    def specs(self, sizes: Sequence[int]) -> list[TensorSpec | None]:
        """Return the specs of the arguments, from the number of dimensions and the sizes of each that is given."""
        each = iter(sizes)
        return [
            TensorSpec(tuple([next(each) for _ in range(next(each))]), self.dtypes[name]) if given else None
            for name, given in zip(self.names, self.given, strict=True)
        ]


_REMEMBERED_CALLS = 256
_lock = threading.Lock()
_traced: dict[str, _Traced] = {}
_calls: dict[str, _Calls] = {}  # by the ops
_plans: dict[str, _TracedPlan] = {}


def _handle(chain: Chain, options: KernelOptions) -> str | None:
    """Return the text that says what a chain computes, and under what; None for one that no operator can be."""
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
    said = (ops, chain.exports, chain.sorted_rows, chain.provided, *held)
    handle = f"fusedmoe {__version__} " + " ".join(map(str, said))
    with _lock:
        if handle not in _traced:
            nodes = [Node(node.label, _without_parameters(node.op)) for node in chain.nodes]
            calls = _calls.setdefault(str((ops, chain.sorted_rows)), _Calls(1 + len(chain.inputs)))
            bare = Chain(nodes, chain.exports, chain.sorted_rows, chain.provided)
            _traced[handle] = _Traced(bare, now, conditions, calls)
    return handle


def _changes_state(chain: Chain, recipe: Recipe) -> bool:
    """Whether a call changes more than it returns: a ``main_grad``, the state of a random number generator, or an
    amax history.
    """
    if any(node.op.draws_random or getattr(node.op, "accumulate_into_main_grad", False) for node in chain.nodes):
        return True
    graph = chain.rewritten(recipe)
    gradients = [item.quantizes for node in graph.nodes for item in node.op.backward_ops()]
    return any(q is not None and q.delayed is not None for q in (*graph.quantizers.values(), *gradients))


def _without_parameters(op: Op) -> Op:
    """Return the op without its parameters, so that a graph keeps no weights alive."""
    bare = copy.copy(op)
    bare.__dict__["_parameters"] = dict.fromkeys(op._parameters)
    return bare


def _spread(wanted: str, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    each = iter(tensors)
    return [None if w == "-" else next(each) for w in wanted]


def _plan(handle: str, wanted: str, arguments: Sequence[Tensor | None]) -> _TracedPlan:
    traced = _traced[handle]
    x = arguments[0]
    assert x is not None
    check_rows(x, traced.chain.nodes[0])
    specs = [spec_of(a) for a in arguments]
    # numbers, where the graph is traced for any: all but the number of rows decides what is computed
    kinds = [None if s is None else (s.dtype, tuple(map(int, s.shape[1:]))) for s in specs]
    key = (wanted, x.device, bool(x.shape[0] == 0), *kinds)
    found = traced.plans.get(key)
    if found is None:
        plan = plan_chain(traced.chain, arguments, [w == "g" for w in wanted], traced.conditions)
        strict = traced.made_under.strict
        if strict:
            plan.raise_if_missed(traced.made_under.strict_unavailable)
        dtypes = {name: a.dtype for name, a in zip(plan.graph.arguments, arguments, strict=True) if a is not None}
        text = f"{handle} {key}"
        found = traced.plans[key] = _plans[text] = _TracedPlan(text, plan, wanted, dtypes, strict, traced.chain.table)
    return found


def _under_settings_of_call(handle: str, grad: bool, tensors: Sequence[Tensor]) -> str:
    """Return the handle for the settings that hold around this call.

    `torch.compile` chooses a graph by ``settings.thread.key``. The text names the settings of another context where
    asyncio tasks take turns within their blocks, and where a context was copied to a thread. Without gradients the
    call then runs under its own settings. With gradients it cannot: the graph has a backward pass for other ones.

    Raises
    ------
    InputError
        The graph was made under other settings than those of the call, and has a backward pass.
    """
    traced = _traced[handle]
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
        traced.handles[now] = _handle(traced.chain, traced.conditions.options)
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
    made, called = (
        ", ".join(f"{name} {getattr(s, name)!r}" for name in _differing(made_under, called_under))
        for s in (made_under, called_under)
    )
    return InputError(f"torch.compile chose a graph for {made}; expected one for {called}. {remedy}")


def _differing(a: Settings, b: Settings) -> list[str]:
    return [f.name for f in fields(a) if f.compare and getattr(a, f.name) != getattr(b, f.name)]


def _forward(handle: str, wanted: str, tensors: list[Tensor]) -> list[Tensor]:
    """Return the chain's results, and what backward needs that is none of its arguments."""
    handle = _under_settings_of_call(handle, "g" in wanted, tensors)
    arguments = _spread(wanted, tensors)
    traced = _plan(handle, wanted, arguments)
    call = traced.call(arguments)
    with torch.no_grad(), without_autocast(tensors[0].device):
        outputs, saved = call.run([*arguments], *call.runs)
    by_name = dict(zip(traced.saved, saved, strict=True))
    return _own((*outputs, *[by_name[v] for v in traced.kept]), tensors)


def _own(results: Sequence[Tensor | None], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors as an operator may: contiguous, none sharing memory with an argument or with another."""
    taken = {t.untyped_storage().data_ptr() for t in arguments if t.numel()}
    own = []
    for t in results:
        assert t is not None
        result = t.contiguous()
        if result.numel() and result.untyped_storage().data_ptr() in taken:
            result = result.clone()
        taken.add(result.untyped_storage().data_ptr())
        own.append(result)
    return own


def _forward_fake(handle: str, wanted: str, tensors: list[Tensor]) -> list[Tensor]:
    arguments = _spread(wanted, tensors)
    traced = _plan(handle, wanted, arguments)
    specs = traced.plan.infer(arguments)
    values = (*traced.plan.graph.outputs, *traced.kept)
    return [_empty(specs[v], tensors[0]) for v in values]


def _empty(spec: SpecLike | None, like: Tensor) -> Tensor:
    assert spec is not None
    return like.new_empty(tuple(spec.shape), dtype=spec.dtype)


def _backward(plan: str, sizes: list[int], saved: list[Tensor], grads: list[Tensor], there: str) -> list[Tensor]:
    """Return a gradient for each argument that gets one."""
    traced = _plans[plan]
    each, incoming = iter(saved), iter(grads)
    values: dict[str, Tensor | None] = {v: next(each) for v, h in zip(traced.saved, there, strict=False) if h == "t"}
    arrived = [next(incoming) if h == "t" else None for h in there[len(traced.saved) :]]
    with torch.no_grad(), without_autocast((*saved, *grads)[0].device):
        kept = [values.get(v) for v in traced.saved]
        found = traced.backward_call(sizes).backward(kept, arrived, traced.gradients)
    gradients = [t for t, g in zip(found, traced.gradients, strict=True) if g]
    if not traced.checked:
        _check_gradients(traced, sizes, gradients)
        traced.checked = True
    return _own(gradients, (*saved, *grads))


def _backward_fake(plan: str, sizes: list[int], saved: list[Tensor], grads: list[Tensor], there: str) -> list[Tensor]:
    like = (*saved, *grads)[0]
    return [like.new_empty(shape, dtype=dtype) for _, shape, dtype in _expected_gradients(_plans[plan], sizes)]


def _expected_gradients(traced: _TracedPlan, sizes: list[int]) -> list[tuple[str, list[int], torch.dtype]]:
    """Return name, shape and dtype of each argument that gets a gradient."""
    specs = zip(traced.names, traced.specs(sizes), traced.gradients, strict=True)
    return [(name, [*spec.shape], spec.dtype) for name, spec, has in specs if has and spec is not None]


def _check_gradients(traced: _TracedPlan, sizes: list[int], found: Sequence[Tensor | None]) -> None:
    """Raise `RuleError` where a rule's step returned another gradient than the graph was made for."""
    for (name, shape, dtype), g in zip(_expected_gradients(traced, sizes), found, strict=True):
        if g is None or [*g.shape] != shape or g.dtype != dtype:
            got = "None" if g is None else f"shape {tuple(g.shape)} and dtype {g.dtype}"
            rules = sorted({c.step.rule for c in traced.plan.spans if isinstance(c.step, Fused)})
            raise RuleError(
                f"the gradient of {name}: expected shape {tuple(shape)} and dtype {dtype}, got {got}, from a step of "
                f"{' or '.join(rules) or 'an op'}; a call without torch.compile names the step"
            )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    handle, wanted, tensors = inputs
    arguments = _spread(wanted, tensors)
    traced = _plan(handle, wanted, arguments)
    there: dict[str, Tensor | None] = dict(zip(traced.names, arguments, strict=True))
    there.update(zip((*traced.plan.outputs, *traced.kept), output, strict=True))
    saved = [there[v] for v in traced.saved]
    ctx.save_for_backward(*[t for t in saved if t is not None])
    ctx.traced, ctx.there = traced, "".join(map(_mark, saved))
    ctx.sizes = [n for a in arguments if a is not None for n in (a.dim(), *a.shape)]


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[None, None, list[Tensor | None]]:
    if torch.is_grad_enabled():  # AOTAutograd, which refuses them too, does not trace with gradients of gradients
        raise SecondOrderError(
            "second derivatives (create_graph=True): a compiled graph has none; call the module without torch.compile"
        )
    traced: _TracedPlan = ctx.traced
    arrived = grads[: traced.results]  # nobody differentiates what is kept beside the results
    there = ctx.there + "".join(map(_mark, arrived))
    given = [g for g in arrived if g is not None]
    found = iter(torch.ops.fusedmoe.run_chain_backward(traced.key, ctx.sizes, [*ctx.saved_tensors], given, there))
    return None, None, [next(found) if g else None for g, t in zip(traced.gradients, traced.given, strict=True) if t]


def _mark(t: Tensor | None) -> str:
    return "-" if t is None else "t"


_library = torch.library.Library("fusedmoe", "FRAGMENT")
_library.define("run_chain(str handle, str wanted, Tensor[] tensors) -> Tensor[]")
_library.define("run_chain_backward(str plan, SymInt[] sizes, Tensor[] saved, Tensor[] grads, str there) -> Tensor[]")
_library.impl("run_chain", _forward, "CompositeExplicitAutograd")
_library.impl("run_chain_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fusedmoe::run_chain", _forward_fake, lib=_library)
torch.library.register_fake("fusedmoe::run_chain_backward", _backward_fake, lib=_library)
torch.library.register_autograd("fusedmoe::run_chain", _differentiate, setup_context=_keep_for_backward, lib=_library)
