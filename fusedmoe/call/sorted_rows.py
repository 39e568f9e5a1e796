"""Rows that are sorted by expert, across the parts of a `Sequential`, and calls of modules on such rows.

The ops of one chain share the offsets of their rows; see `fusedmoe.fusion.graph.forward`. This file extends the sharing
across a module that splits the chain: one that is no op, or an op with hooks. Rows that belong to no expert are known
in every part, until a module changes the number of rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fusedmoe.numerics.expert_rows import without_tail


class Boundary(NamedTuple):
    """The rows between two modules."""

    rows: int  # the number of the set of rows. A module with ``changes_rows`` (`Dispatch`, `Combine`) begins a new set
    # the first op that takes the offsets of this set, if the current ``splits`` count its rows; None if the rows are
    # not sorted by expert
    taker: str | None


def boundaries(modules: Sequence[tuple[str, nn.Module]], taker: str | None = None) -> list[Boundary]:
    """Return the rows before each module, and those after the last.

    - ``modules``: the modules with their labels.
    - ``taker``: the caller's name, if the input rows of the first module are sorted.
    """
    provider = ""  # of the splits: the caller
    # for each set: the first taker, and the provider of the splits that count its rows
    takers: list[tuple[str, str] | None] = [None if taker is None else (taker, provider)]
    places = []
    for label, module in modules:
        kind = f"{label}.{type(module).__name__}"
        places.append((len(takers) - 1, provider))
        if sorts_rows(module) and takers[-1] is None:
            takers[-1] = kind, provider
        if changes_rows(module):
            takers.append(None)
        if "splits" in getattr(module, "provides", ()):
            provider = label
            takers[-1] = takers[-1] or (kind, provider)
    places.append((len(takers) - 1, provider))
    found = []
    for rows, known in places:
        of_set = takers[rows]
        found.append(Boundary(rows, of_set[0] if of_set is not None and of_set[1] == known else None))
    return found


def changes_rows(module: nn.Module) -> bool:
    """Whether a module declares, by its attribute ``changes_rows``, that its output has other rows than its input."""
    return getattr(module, "changes_rows", False) is True


def sorts_rows(module: nn.Module) -> bool:
    """Whether a module takes ``splits`` for its input rows: a grouped op, or a `Sequential` of such ops."""
    inputs = getattr(module, "runtime_inputs", ())
    return "offsets" in inputs or ("splits" in inputs and not hasattr(module, "compute") and not changes_rows(module))


class ModuleCall(NamedTuple):
    """How a `Sequential` calls a module that is in none of its chains."""

    takes: tuple[str, ...]  # the runtime inputs that the module takes
    returns_values: bool  # it is an op that returns values besides its rows
    read: tuple[str, ...]  # those of these values that are read
    sorted_rows: bool = False  # its input rows are sorted by expert
    new_rows: bool = False  # its output has other rows than its input
    sorts_rows: bool = False  # it requires ``splits``
    offered_splits: bool = False  # its rows are sorted, and it accepts ``splits`` (`Linear`, `Quantize`)
    masks_input: bool = False  # rows that belong to no expert become zeros before the call
    masks_output: bool = False  # they become zeros after the call
    gives_rows: str = ""  # the error's text for an output that is no tensor; empty if no op comes after the module


def module_call(
    module: nn.Module,
    takes: tuple[str, ...],
    read: tuple[str, ...],
    around: Sequence[Boundary],
    first: bool,
    gives_rows: str,
) -> ModuleCall:
    """Return how to call a module with these rows before and after it. ``first``: the module is the first part."""
    before, after = around
    sorted_rows = before.taker is not None
    return ModuleCall(
        takes,
        bool(getattr(module, "provides", ())),
        read,
        sorted_rows=sorted_rows,
        new_rows=before.rows != after.rows,
        sorts_rows=sorts_rows(module),
        offered_splits=sorted_rows and "splits" not in takes and accepts_splits(module),
        masks_input=sorted_rows and first,  # other parts return zeros in rows that belong to no expert
        masks_output=after.taker is not None,
        gives_rows=gives_rows,
    )


def accepts_splits(module: nn.Module, forward_does: bool = False) -> bool:
    """Whether a module accepts ``splits`` without requiring them.

    Its ``forward``, which may have been replaced, must accept them too; ``forward_does`` skips this check.
    """
    if "offsets" not in getattr(module, "optional_inputs", ()) or "offsets" in getattr(module, "runtime_inputs", ()):
        return False
    if forward_does:
        return True
    try:
        inspect.signature(module.forward).bind(None, splits=None)
    except TypeError:
        return False
    return True


def call_module(module: Any, x: Any, named: dict[str, Tensor], call: ModuleCall, counted: bool) -> tuple[Any, bool]:
    """Call a module; return its output rows, and whether ``splits`` counts them. Add provided values to ``named``.

    ``counted`` is whether ``splits`` counts the input rows ``x``. Where rows that belong to no expert become zeros,
    their gradients do too.
    """
    if call.masks_input and counted:
        x = _without_tail(x, named)
    inputs = {name: named[name] for name in call.takes}
    if call.offered_splits and counted:
        inputs["splits"] = named["splits"]
    y = module(x, **inputs)
    if call.returns_values:
        y, values = module.values_from(x, y, call.read)
        named.update(values)
    counted = counted or call.sorts_rows
    if call.new_rows or not call.sorted_rows:
        counted = True
    elif counted:
        counted = _are_rows(x) and _are_rows(y) and x.shape[0] == y.shape[0]
    return _without_tail(y, named) if call.masks_output and counted else y, counted


def why_no_rows(y: Any, call: ModuleCall) -> str | None:
    """Return the message for a module that returned no tensor to the op after it; None without such an error."""
    if not call.gives_rows or isinstance(y, Tensor):
        return None
    return f"Sequential: {call.gives_rows}, got {type(y).__name__}; wrap the module in one that returns the rows alone"


def _are_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


def _without_tail(x: Any, named: dict[str, Tensor]) -> Any:
    splits = named["splits"]
    return without_tail(x, splits) if _are_rows(x) and x.device == splits.device else x
