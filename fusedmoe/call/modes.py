"""The modes of a call: eager, in a graph that `torch.compile` traces, or in a program that `torch.export` records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusedmoe.base.inputs import Parameters
from fusedmoe.call.partition import partition_of_call
from fusedmoe.ops.op import Runnable, caller

_T = TypeVar("_T")


def run(
    root: Runnable,
    x: Tensor,
    inputs: dict[str, Tensor],
    parameters: Parameters | None = None,
    provides: tuple[str, ...] = (),
) -> Any:
    """Run a module on rows and named runtime inputs; return its rows, or a tuple of these and the provided values. A
    value that no op provides is left out.

    Each mode returns the whole result. After a graph break, Dynamo would trace a caller that extends the result, with a
    non-leaf tensor as an input.
    """
    if torch.compiler.is_compiling():
        if torch.compiler.is_dynamo_compiling():
            from fusedmoe.call.compile import tracing  # imported here since it imports Dynamo, which takes 7 s

            return tracing.run(root, x, inputs, parameters, provides)
        from fusedmoe.call.compile import export  # imported here since few programs need it

        return export.run(root, x, inputs, parameters, provides)
    options, partition = root._options, partition_of_call(root, x, inputs, parameters, provides)
    y = partition.run(x, inputs, options, parameters)
    return (y, {name: inputs[name] for name in provides if name in inputs}) if provides else y


def run_untraced(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function whose layer exchanges tokens with other ranks: not in a graph of `torch.compile`."""
    if torch.compiler.is_dynamo_compiling():
        from fusedmoe.call.compile import tracing  # imported here since it imports Dynamo, which is loaded by now

        function = partial(tracing.run_untraced, function)
    return function(*args)


def parts_for_compiler(root: Runnable, *around: Any) -> Any:
    """Return the parts of a module for `fusedmoe.call.compile.tracing`."""
    from fusedmoe.call.compile import tracing  # imported here since it imports Dynamo, which is loaded by now

    return tracing.parts_for_compiler(root, *around[-3:])


caller.register(run=run, parts_for_compiler=parts_for_compiler)
