"""The `ExpertParallel` of a framework's mesh, which all layers of a model share."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

from fusedmoe.expert_parallel import ExpertParallel


def ranks_of(mesh: Any, **settings: Hashable) -> ExpertParallel:
    """Return the `ExpertParallel` of a `DeviceMesh` of one dimension: the same object for equal settings.

    An object has buffers, and may have a process group of its own. Every rank of the mesh calls this.
    """
    made = _made.setdefault(mesh, {})
    key = tuple(settings.items())
    if key not in made:
        made[key] = ExpertParallel(mesh, **settings)  # type: ignore[arg-type]
    return made[key]


_made: WeakKeyDictionary[Any, dict[Hashable, ExpertParallel]] = WeakKeyDictionary()
