"""The state of an op or a `Sequential` that belongs to this process: pickles and copies do not include it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class ProcessState:
    """The state of a module in this process."""

    # the partition of most calls, and those of other kinds of calls; see `fusedmoe.call.partition.partition_for`
    partition: Any = None
    other_partitions: dict[Hashable, Any] = field(default_factory=dict)
    place: str = ""  # the module's name in a model, if it is known; else, for an op, its label in a `Sequential`
    attributes: tuple[Hashable, ...] | None = None  # the last result of `Op.attributes`; None after a change
    # the result of `Op.describe`, which every change of an attribute updates; None before the first call
    description: str | None = None
    number: int | None = None  # the op's number, if its attributes alone do not identify what it computes
    quantized_weight: Any = (
        None  # an op's entry in `fusedmoe.ops.state.weight_cache`; None again when a parameter is set
    )
    captured: bool = False  # whether a CUDA graph has captured the op's weight


class HasProcessState:
    """A module with a `ProcessState`. An unpickled or copied module gets a new one."""

    _of_process: ProcessState

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        module = super().__new__(cls)
        module.__dict__["_of_process"] = ProcessState()
        return module

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[misc]
        return {name: value for name, value in state.items() if name != "_of_process"}
