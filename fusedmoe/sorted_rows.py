"""Where the rows of a `Sequential` are sorted by expert, across its parts, and how modules are called on such rows.

The ops of one chain share the offsets of their rows (`fusedmoe.fusion.graph`). This is the same across what splits a
chain: a module that is no op, or an op with hooks. Every part knows which of its rows belong to no expert, as long as
no module has changed the number of rows.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fusedmoe.kernels.torch.rows import without_tail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


class Boundary(NamedTuple):
    """The rows between two modules.

    Attributes
    ----------
    rows : int
        Which set of rows; it changes where a module says so (``changes_rows``: `Dispatch`, `Combine`).
    taker : str or None
        The first op that takes the offsets of this set, where ``splits`` as known here counts its rows; None where the
        rows are not sorted by expert.
    """

    rows: int
    taker: str | None


def boundaries(modules: Sequence[tuple[str, nn.Module]], taker: str | None = None) -> list[Boundary]:
    """Return the rows in front of each module, and those that come out of the last.

    Parameters
    ----------
    modules
        With their labels.
    taker
        Who has sorted the rows that go into the first one, if it is somebody outside.
    """
    provider = ""  # the caller
    # of each set: the op, and whose splits count its rows
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
    """Whether a module says that the rows that come out of it are others: attribute ``changes_rows``."""
    return getattr(module, "changes_rows", False) is True


def sorts_rows(module: nn.Module) -> bool:
    """Whether a module takes ``splits`` for the rows that go into it: a grouped op, or a `Sequential` of such."""
    inputs = getattr(module, "runtime_inputs", ())
    return "offsets" in inputs or ("splits" in inputs and not hasattr(module, "compute") and not changes_rows(module))


class ModuleCall(NamedTuple):
    """How a `Sequential` calls a module that is in none of its chains.

    Attributes
    ----------
    takes, provides : tuple of str
        Runtime inputs that it takes, and values that it returns beside its rows.
    sorted_rows : bool
        The rows that go in are sorted by expert.
    new_rows : bool
        The rows that come out are others.
    sorts_rows : bool
        It takes ``splits`` itself.
    offered_splits : bool
        It takes ``splits`` only if its rows are sorted (`Linear`, `Quantize`, a `Sequential` of such).
    masks_input, masks_output : bool
        Zero the rows that belong to no expert before the call, and after it.
    gives_rows : str
        The module and the op after it, for the error where no tensor comes out; empty where no op comes after it.
    """

    takes: tuple[str, ...]
    provides: tuple[str, ...]
    sorted_rows: bool = False
    new_rows: bool = False
    sorts_rows: bool = False
    offered_splits: bool = False
    masks_input: bool = False
    masks_output: bool = False
    gives_rows: str = ""


def module_call(
    module: nn.Module,
    takes: tuple[str, ...],
    provides: tuple[str, ...],
    around: Sequence[Boundary],
    first: bool,
    gives_rows: str,
) -> ModuleCall:
    """Return how to call a module with these rows before and after it; ``first``: no other part comes before it."""
    before, after = around
    sorted_rows = before.taker is not None
    return ModuleCall(
        takes,
        provides,
        sorted_rows=sorted_rows,
        new_rows=before.rows != after.rows,
        sorts_rows=sorts_rows(module),
        offered_splits=sorted_rows and "splits" not in takes and accepts_splits(module),
        masks_input=sorted_rows and first,  # rows that come from another part have zeros there
        masks_output=after.taker is not None,
        gives_rows=gives_rows,
    )


def accepts_splits(module: nn.Module, forward_does: bool = False) -> bool:
    """Whether a module takes ``splits`` if they are given.

    Its ``forward`` must take them too, which may be a replaced one; with ``forward_does`` it is known to.
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
    """Call a module on rows and what it takes of the values by name, to which it adds those that it provides.

    ``counted`` says whether ``splits`` counts the rows ``x``; it is returned for the rows that come out. Gradients of
    rows that belong to no expert become zeros where those rows do.
    """
    if call.masks_input and counted:
        x = _without_tail(x, named)
    inputs = {name: named[name] for name in call.takes}
    if call.offered_splits and counted:
        inputs["splits"] = named["splits"]
    y = module(x, **inputs)
    if call.provides:
        y, provided = y
        named.update(provided)
    counted = counted or call.sorts_rows
    if call.new_rows or not call.sorted_rows:
        counted = True
    elif counted:
        counted = _are_rows(x) and _are_rows(y) and x.shape[0] == y.shape[0]
    return _without_tail(y, named) if call.masks_output and counted else y, counted


def why_no_rows(y: Any, call: ModuleCall) -> str | None:
    """Return what is wrong with the output of a module that an op comes after; None if it is a tensor."""
    if not call.gives_rows or isinstance(y, Tensor):
        return None
    return f"Sequential: {call.gives_rows}, got {type(y).__name__}; wrap the module in one that returns the rows alone"


def _are_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


def _without_tail(x: Any, named: dict[str, Tensor]) -> Any:
    splits = named["splits"]
    return without_tail(x, splits) if _are_rows(x) and x.device == splits.device else x
