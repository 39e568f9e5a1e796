"""The parameters of experts that are spread over ranks: the check of the setting, and the initial values.

Axes: E experts of all ranks, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.base.checks import instance
from fusedmoe.expert_parallel import ExpertParallel

EXPERT_PARALLEL = instance(ExpertParallel, "an ExpertParallel").or_none()
"""The check of the setting ``expert_parallel`` of an op or a layer."""


@torch.no_grad()
def uniform_(parameter: Tensor, bound: float, expert_parallel: ExpertParallel | None) -> None:
    """Fill a parameter (E / P, ...) with values from U(-bound, bound): those of this rank's experts; see `drawn`."""
    if expert_parallel is None:
        nn.init.uniform_(parameter, -bound, bound)
        return
    if parameter.is_meta:
        return
    local, (first, *starts) = _local(parameter)
    within = tuple(slice(start, start + size) for start, size in zip(starts, local.shape[1:], strict=True))
    for expert, values in drawn(parameter, bound, expert_parallel, parameter.dtype):
        if first <= expert < first + local.shape[0]:
            local[expert - first].copy_(values[within])


def drawn(
    like: Tensor, bound: float, expert_parallel: ExpertParallel | None, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each of this rank's experts, from 0, with its values from U(-bound, bound).

    The values of all E experts are drawn, one expert at a time. So ranks with equal generators get different experts,
    and their generators are equal afterwards. On a CPU, the E experts are those that one process would draw at once.

    - ``like``: a tensor (E / P, ...), for shape and device.
    """
    here = like.shape[0]
    ranks, rank = (1, 0) if expert_parallel is None else (expert_parallel.ranks, expert_parallel.rank)
    values = torch.empty(like.shape[1:], dtype=dtype, device=like.device)
    for expert in range(ranks * here):
        values.uniform_(-bound, bound)
        if expert // here == rank:
            yield expert % here, values


def _local(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the part of a parameter that this process holds, with its start in each dimension."""
    sharded: Any = parameter
    if not hasattr(sharded, "to_local"):
        return parameter, (0,) * parameter.dim()
    # imported with FSDP2 already, whose parameters are DTensors
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, starts = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return sharded.to_local(), tuple(starts)
