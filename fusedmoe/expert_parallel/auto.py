"""``engine="auto"``: whether all ranks of a group can run the engine ``"symmetric"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import distributed as dist

from fusedmoe.expert_parallel import symmetric
from fusedmoe.expert_parallel.agreement import host_id
from fusedmoe.expert_parallel.engine import writes_no_weight
from fusedmoe.expert_parallel.subgroup import group_of_hosts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Place(NamedTuple):
    """The place where a rank runs.

    - ``host``: of ranks that can share memory, the same text.
    - ``gpu``: the id of the current CUDA device.
    - ``reason``: the reason why this rank cannot run ``"symmetric"``; None if it can.
    """

    host: str
    gpu: str
    reason: str | None


def why_not(group: ProcessGroup) -> str | None:
    """Return the reason why the ranks of a group do not take ``"symmetric"``, the same on all ranks; None if they do.

    A collective if the group has NCCL, which only ranks with a GPU have.
    """
    ranks, most = group.size(), symmetric.Symmetric.most_ranks
    if not has_nccl(group):
        return "the group has no NCCL"
    if ranks == 1:
        return "one rank"
    if ranks > most:
        return f"{ranks} ranks, expected at most {most}"
    return _of_places(_gathered(group))


def _gathered(group: ProcessGroup) -> list[Place]:
    """Return the places of all ranks.

    The hosts exchange them: ranks that have not called `torch.cuda.set_device` share a GPU, where NCCL raises an error.
    """
    hosts = group_of_hosts(group)
    places = [Place("", "", None)] * group.size()
    with writes_no_weight(hosts, torch.device("cpu")):
        dist.all_gather_object(places, place_of_this_rank(), hosts)
    return places


def _of_places(places: list[Place]) -> str | None:
    """Return the reason why ranks at these places do not take ``"symmetric"``; None if they do."""
    for rank, place in enumerate(places):
        if place.reason is not None:
            return f"rank {rank}: {place.reason}"
    hosts, gpus = len({place.host for place in places}), len({place.gpu for place in places})
    if hosts > 1:
        return f"{hosts} hosts or containers"
    return f"ranks share GPUs: {gpus} for {len(places)} ranks" if gpus < len(places) else None


def has_nccl(group: ProcessGroup) -> bool:
    """Whether CUDA tensors of the group travel by NCCL."""
    try:
        return bool(group._get_backend(torch.device("cuda")).name() == "nccl")
    except RuntimeError:  # no backend for such tensors
        return False


def place_of_this_rank() -> Place:
    """Return the place of this rank."""
    reason = symmetric.why_not_here()
    return Place(host_id(), "" if reason else gpu(), reason)


def gpu() -> str:
    """Return the id of the current CUDA device, whatever number this process gives it."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
