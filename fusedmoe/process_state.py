"""The state of an op or a `Sequential` that belongs to this process: neither a pickle nor a copy takes it along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable

    from typing_extensions import Self


@dataclass
class ProcessState:
    """What this process knows of a module.

    Attributes
    ----------
    partition, sorted_partition : Partition or None
        How the module runs, and how it runs where ``splits`` is given although it need not be; see
        `fusedmoe.partition.partition_for`.
    place : str
        The name in a model, as far as it is known; of an op its label in a `Sequential` at least.
    attributes : tuple or None
        Of an op, the last result of `Op.attributes`; None after a change.
    description : str or None
        Of an op, the result of `Op.describe`, which is kept up to date once it was asked for.
    number : int or None
        Of an op, its number in descriptions, where they need one.
    quantized_weight : object
        Of an op, its entry in `fusedmoe.ops.weight_cache`. It is dropped whenever a parameter is set.
    captured : bool
        Whether a CUDA graph has captured the op's weight.
    """

    partition: Any = None
    sorted_partition: Any = None
    place: str = ""
    attributes: tuple[Hashable, ...] | None = None
    description: str | None = None
    number: int | None = None
    quantized_weight: Any = None
    captured: bool = False


class HasProcessState:
    """A module with a `ProcessState`, which a new object gets also where it is unpickled or copied."""

    _of_process: ProcessState

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        module = super().__new__(cls)
        module.__dict__["_of_process"] = ProcessState()
        return module

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[misc]
        return {name: value for name, value in state.items() if name != "_of_process"}
