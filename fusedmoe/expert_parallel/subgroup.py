"""Process groups that a part of all ranks makes, without a collective of the others."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_of(ranks: list[int], of: ProcessGroup, backend: str | None = None) -> ProcessGroup:
    """Return the process group of these ranks, which include this one. The first call makes it: a collective of them.

    ``new_group(use_local_synchronization=True)`` puts the number of groups that a process has made into the group's
    name, by which the ranks find each other. Ranks that have made different numbers then wait until the time-out. Here
    ranks and backend are the name, so that there is one group of each.

    Parameters
    ----------
    ranks
        Global ranks in the order of the group, the same list on all of them.
    of
        A group whose time-out the new one has.
    backend
        The backend of the group; None for that of the default group.
    """
    c10d: Any = dist.distributed_c10d  # no public function takes the name of a group
    world, state = dist.group.WORLD, c10d._world
    default_backend, store = state.pg_map[world]
    kind = dist.Backend(backend or default_backend)
    name = hashlib.sha256(f"fusedmoe {kind} {ranks}".encode()).hexdigest()
    for group, other in state.pg_names.items():
        if other == name:
            return group  # type: ignore[no-any-return]
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        kind,
        store,
        name,
        timeout=_timeout(of) or c10d._get_default_timeout(kind),
        device_id=getattr(world, "bound_device_id", None),
    )
    state.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made  # type: ignore[no-any-return]


def group_of_hosts(group: ProcessGroup) -> ProcessGroup:
    """Return a group of the same ranks whose backend has collectives of CPU tensors."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return group_of(dist.get_process_group_ranks(group), group, "gloo")
    return group


def _timeout(group: ProcessGroup) -> timedelta | None:
    """Return the time-out of the collectives of a group; None if torch does not tell it."""
    for device in ("cuda", "cpu"):
        with suppress(RuntimeError, AttributeError):  # no backend for such tensors, or one without options
            return group._get_backend(torch.device(device)).options._timeout
    return None
