"""A module under `torch.compile`: each chain is one operator, forward and backward. Imported only for compilation.

Dynamo traces `run`, which gathers the arguments of the chains, and never the planner. The graph has a handle for each
chain (`fusedmoe.call.compile.handles`): a text that identifies its computation, recipe, disabled rules and options. If
any of these changes, a guard fails and Dynamo traces again. `fusedmoe.call.compile.operators` has the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fusedmoe.call.compile.operators  # noqa: F401 (registers the operators that a graph calls)
from fusedmoe.base.autocast import autocast_dtype, cast_arguments, casts_rows
from fusedmoe.base.errors import InputError
from fusedmoe.base.inputs import Parameters
from fusedmoe.call import settings
from fusedmoe.call.batches import BatchedPart
from fusedmoe.call.chain import Chain
from fusedmoe.call.compile.handles import encode, handle_of, is_transposed
from fusedmoe.call.partition import partition_for
from fusedmoe.call.parts import ChainPart, ModulePart
from fusedmoe.call.sorted_rows import ModuleCall, call_module, why_no_rows
from fusedmoe.fusion.language import registry
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.ops.op import Op, Runnable, caller, constant_in_graphs

Path = tuple[str, ...]


class TracedChain(NamedTuple):
    """A chain as Dynamo reads it: only texts, if an operator can run it."""

    handle: str | None  # None for a chain that no operator can run
    inputs: tuple[str, ...]  # as in `Chain`
    # for each parameter the path to its op, its name in the op, and its name in the chain
    parameters: tuple[tuple[Path, str, str], ...]
    exports: tuple[str, ...]  # as in `Chain`
    returns_rows: bool  # as in `Chain`
    casts: tuple[bool, ...]  # as in `Chain`
    transposed: tuple[bool, ...]  # whether the operator takes each parameter as ``.mT``
    chain: Chain | None  # the chain itself, if it has no handle


class TracedPart(NamedTuple):
    """A part that is a chain, as Dynamo reads it; see `ChainPart`."""

    chain: TracedChain
    apart: TracedChain
    sorts_rows: bool


class TracedModule(NamedTuple):
    """A module among the ops, as Dynamo reads it."""

    path: Path
    call: ModuleCall


# ---- traced by Dynamo ---------------------------------------------------------------------------------------------


def run(
    root: Runnable, x: Tensor, inputs: dict[str, Tensor], parameters: Parameters | None, provides: tuple[str, ...]
) -> Any:
    """Run a module in a graph that is being traced."""
    _prepare_tracing()
    root._describe_for_compiler()
    options = root._options
    parts = root._parts_for_compiler(
        _described(root), settings.thread.key, registry.generation(), options.sm_margin, options.schedule,
        torch.are_deterministic_algorithms_enabled(), provides, _given(x, inputs), _casts_rows(x),
    )  # fmt: skip
    if isinstance(parts, str):
        _refuse(parts)
    if parts is None:
        return run_untraced(caller.run, root, x, inputs, parameters, provides)
    counted = True
    for part in parts:
        if isinstance(part, TracedModule):
            x, counted = call_module(_at(root, part.path), x, inputs, part.call, counted)
            if wrong := why_no_rows(x, part.call):
                _refuse(wrong)
        else:
            chain = part.chain if counted else part.apart
            own = [getattr(_at(root, path), name) for path, name, _ in chain.parameters]
            if parameters is not None:
                keys = [key for _, _, key in chain.parameters]
                own = [parameters.get(key) if t is None else t for t, key in zip(own, keys, strict=True)]
            if chain.handle is None:
                results = _run_uncompiled(chain.chain, x, inputs, options, parameters)
            else:
                given = [
                    t.mT if transposed and t is not None else t
                    for t, transposed in zip(own, chain.transposed, strict=True)
                ]
                results = _run_operator(chain, [x, *[inputs[name] for name in chain.inputs], *given])
                if not chain.returns_rows:
                    results = [x, *results]
            x = results[0]
            for i, name in enumerate(chain.exports):
                inputs[name] = results[1 + i]
            counted = counted or part.sorts_rows
    return (x, {name: inputs[name] for name in provides if name in inputs}) if provides else x


@constant_in_graphs
def _prepare_tracing() -> None:
    """Load the rules, which Dynamo could not trace, and update the name of the settings: both become guards."""
    registry.generation()
    settings.follow_context()


def _described(module: Any) -> Any:
    """Return the texts that the partition of a module depends on. Dynamo guards on each text that it reads."""
    if isinstance(module, Op):
        # the description is missing after a graph break here (a bare nn.GRU), if another Sequential's graph came before
        return module._of_process.description or module.describe()
    return tuple(
        [
            (name, _described(child) if isinstance(child, Op) or module._opens(child) else "")
            for name, child in module._chained()
        ]
    )


def _at(root: nn.Module, path: Path) -> Any:
    module: Any = root
    for name in path:
        module = module._modules[name]
    return module


def _run_operator(chain: TracedChain, arguments: list[Tensor | None]) -> list[Tensor]:
    x = arguments[0]
    assert x is not None
    if (dtype := autocast_dtype(x.device)) is not None:
        arguments = cast_arguments(arguments, dtype, chain.casts)
    kinds = encode(arguments, torch.is_grad_enabled())
    return torch.ops.fusedmoe.run_chain(chain.handle, kinds, [a for a in arguments if a is not None])  # type: ignore[no-any-return]


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="a chain with side effects (draws_random, accumulate_into_main_grad, delayed scaling) is not traced"
)
def _run_uncompiled(
    chain: Chain, x: Tensor, named: dict[str, Tensor], options: KernelOptions, parameters: Parameters | None
) -> list[Tensor]:
    """Run a chain eagerly: a graph break."""
    named = dict(named)
    y = chain.run(x, named, options, parameters)
    return [y, *[named[name] for name in chain.exports]]


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="a layer that exchanges tokens with other ranks (expert_parallel) is not traced"
)
def run_untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function eagerly: a graph break."""
    return function(*args)


def _refuse(message: str) -> None:
    """Raise an `InputError` after a graph break.

    If it were raised while Dynamo traces, Dynamo would raise its own error instead, or from then on trace only the
    functions that the module calls. Where no graph break is allowed, Dynamo's error contains the message.
    """
    torch._dynamo.graph_break(msg=message)
    raise InputError(message)


def _given(x: object, inputs: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return the names of ``x`` and of the given inputs, each with its type if it is no tensor."""
    came = [(name, "" if isinstance(t, Tensor) else type(t).__name__) for name, t in inputs.items() if t is not None]
    return (("x", "" if isinstance(x, Tensor) else type(x).__name__), *came)


def _casts_rows(x: object) -> bool | None:
    return casts_rows(x) if isinstance(x, Tensor) else None


# ---- constants for Dynamo -----------------------------------------------------------------------------------------


# after a graph break, Dynamo calls this function instead of taking its result as a constant, and must not trace it
@torch.compiler.disable  # type: ignore[untyped-decorator]
def parts_for_compiler(
    root: Runnable, provides: tuple[str, ...], given: tuple[tuple[str, str], ...], casts: bool | None
) -> tuple[TracedPart | TracedModule, ...] | str | None:
    """Return the parts of a module for `run`, or the message for an invalid call; None if it is not traced."""
    names = [name for name, _ in given[1:]]
    try:
        partition = partition_for(root, names, provides, casts)
        partition.check_names(names)
        for name, wrong_type in given:
            if wrong_type:
                raise InputError(f"{partition.who}: {name}: expected a tensor, got {wrong_type}")
        if partition.exchanges:
            return None
        return tuple(
            TracedModule(_path(root, part.label), part.call)
            if isinstance(part, ModulePart)
            else _traced_part(root, part)
            for part in partition.parts
            if not isinstance(part, BatchedPart)  # it exchanges
        )
    except InputError as error:
        return str(error)


def _path(root: Runnable, label: str) -> Path:
    return () if isinstance(root, Op) else tuple(label.split("."))


def _traced_part(root: Runnable, part: ChainPart) -> TracedPart:
    paths = [_path(root, node.label) for node in part.chain.nodes]
    chain = _traced_chain(part.chain, paths, root._options)
    apart = chain if part.apart is None else _traced_chain(part.apart, paths, root._options)
    return TracedPart(chain, apart, part.sorts_rows)


def _traced_chain(chain: Chain, paths: Sequence[Path], options: KernelOptions) -> TracedChain:
    parameters = tuple(
        (path, name, f"{node.label}.{name}")
        for node, path in zip(chain.nodes, paths, strict=True)
        for name in node.op.parameter_names
    )
    transposed = tuple(is_transposed(node.op, name) for node in chain.nodes for name in node.op.parameter_names)
    handle = handle_of(chain, options)
    return TracedChain(
        handle, chain.inputs, parameters, chain.exports, chain.returns_rows, chain.casts, transposed,
        None if handle else chain,
    )  # fmt: skip
