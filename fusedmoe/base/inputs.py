"""Checks of the arguments of a call: rows, runtime inputs and parameters."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fusedmoe.base.errors import SPREAD_OVER_RANKS, InputError

Parameters: TypeAlias = Mapping[str, Tensor | None]
"""Parameters by label and name, ``"1.weight"``, for ops that have none of their own."""


def not_a_tensor(who: str, name: str, got: object) -> InputError:
    """Return the error for an argument of ``who`` that is no tensor."""
    return InputError(f"{who}: {name}: expected a tensor, got {type(got).__name__}")


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
            raise InputError(f"{not_a_tensor(who, name, given[name])}; {', '.join(ops)} takes it")


def check_names(
    who: str, wanted: Mapping[str, Sequence[str]], given: Collection[str], provided: Mapping[str, str] | None = None
) -> None:
    """Raise unless exactly the wanted runtime inputs are given.

    - ``who``: the module that was called, for the message.
    - ``wanted``: each runtime input, with the ops that take it.
    - ``given``: the names of the keyword arguments.
    - ``provided``: values that ops provide, each with the op's label. The caller must not give them.
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


def check_parameters(takers: Mapping[str, tuple[nn.Module, str]], given: Parameters) -> None:
    """Raise unless each given parameter is taken by an op that has none of its own.

    ``takers`` has, for each parameter, its op and its name in the op.
    """
    if type(given) is not dict and not isinstance(given, Mapping):
        raise InputError(f"Sequential: parameters: expected a dict of names to tensors, got {type(given).__name__}")
    for key, parameter in given.items():
        if parameter is not None and not isinstance(parameter, Tensor):
            raise InputError(
                f"Sequential: parameters: {key!r}: expected a tensor or None, got {type(parameter).__name__}"
            )
        taker = takers.get(key)
        if taker is None:
            names = ", ".join(map(repr, takers)) or "none"
            raise InputError(f"Sequential: parameters: no op takes {key!r}; those that ops take: {names}")
        op, name = taker
        if op._parameters.get(name) is not None:
            raise InputError(
                f"Sequential: parameters: {key!r} is given, but the op has one; see Sequential.without_parameters, "
                f"or use torch.func.functional_call"
            )


def check_rows(x: Tensor, first: tuple[str, nn.Module]) -> None:
    """Raise if the rows ``x`` are a scalar, sparse or nested; ``first`` has the op that gets them, after its label."""
    label, op = first
    who = f"{label}.{type(op).__name__}"
    check_dense(f"{who}: x", x)
    if not x.dim():
        raise InputError(f"{who}: x: expected rows, got a scalar")


def check_dense(what: str, t: Tensor) -> None:
    """Raise if a tensor is sparse or nested; ``what`` names it."""
    if t.is_nested:
        remedy = "concatenate the sequences to one tensor of rows, (rows, features)"
        raise InputError(f"{what}: expected a dense tensor, got a nested tensor; {remedy}")
    if t.layout is not torch.strided:
        raise InputError(f"{what}: expected a dense tensor, got layout {t.layout}; call .to_dense()")


def check_devices(
    names: Sequence[str], arguments: Sequence[Tensor | None], takers: Mapping[str, Sequence[str]]
) -> None:
    """Raise unless every argument of a chain is on the device of the rows, its first argument."""
    rows = arguments[0]
    assert rows is not None
    for name, argument in zip(names, arguments, strict=True):
        if argument is not None and argument.device != rows.device:
            takes = f"; {', '.join(takers[name])} takes it" if name in takers else ""
            raise InputError(f"{name}: expected on {rows.device}, where the rows are, got on {argument.device}{takes}")


def why_sharded(parameters: Sequence[tuple[Any, str, str]], given: Sequence[Tensor | None]) -> str | None:
    """Return the message for the first parameter of a router or a grouped op that is a DTensor; None if none is.

    ``parameters`` has, for each given parameter, its op, its name in the op, and its name in the chain.
    """
    # loaded if any DTensor exists; without its classes while another thread imports it
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if dtensor is None:
        return None
    for (op, name, key), parameter in zip(parameters, given, strict=True):
        experts = getattr(op, "num_experts", getattr(op, "num_groups", None))  # of a router, or a grouped op
        if experts is not None and isinstance(parameter, dtensor):
            placements = ", ".join(map(repr, parameter.placements))
            expected = f"a plain tensor of all {experts} experts"
            return (
                f"{key.rpartition('.')[0]}.{op.reject(name, expected, f'a DTensor, {placements}')}; "
                f"{SPREAD_OVER_RANKS}. Under FSDP2, call the module that was given to fully_shard, which "
                "gathers its weights"
            )
    return None
