"""Loss scaling for fp16, when ranks have other experts."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from fusedmoe.base.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FRAMES = 12  # between `GradScaler.step` and a hook of the optimizer: at most 3, and those of schedulers
_DECIDING = ("unscale_", "_unscale_grads_", "_maybe_opt_step")  # a scaler for several ranks replaces one of them


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for models with shards: if one rank finds Inf or NaN, all ranks skip the step.

    ``found_inf = max over ranks of (any gradient of the rank is not finite)``. DDP makes the gradients of other
    parameters equal on all ranks. A shard's gradient is on its rank alone, so `torch.amp.GradScaler` would skip the
    step on this rank only, and reduce its scale there. `unscale_` and `step` are collectives, of one value. The
    parameters can be plain and DTensors, such as those of FSDP2, in one optimizer.

    Raises `InputError`: an optimizer of shards steps with a `torch.amp.GradScaler`.

    Parameters
    ----------
    device
        The device type of the parameters.
    group
        The data-parallel ranks, as for `average_gradients`.
    options
        Keyword arguments of `torch.amp.GradScaler`.

    Examples
    --------
    >>> scaler = fm.expert_parallel.GradScaler()
    >>> scaler.scale(loss).backward()
    >>> scaler.unscale_(optimizer)
    >>> fm.expert_parallel.clip_grad_norm_(model, 1.0)
    >>> scaler.step(optimizer)
    >>> scaler.update()
    """

    def __init__(self, device: str = "cuda", *, group: Any = None, **options: Any) -> None:
        super().__init__(device, **options)
        self._group: ProcessGroup | None = getattr(group, "get_group", lambda: group)()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        alike: dict[Any, list[Any]] = {}  # torch takes no DTensors together with other tensors
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
        total = found_inf.clone()  # also on a rank without gradients
        for parameters in alike.values():
            part: Any = SimpleNamespace(param_groups=[{"params": parameters}])
            for found in super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16).values():
                torch.maximum(total, found.to(total.device), out=total)
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self._group)
        return {total.device: total}


def check_scaler(optimizer: torch.optim.Optimizer, marker: str) -> None:
    """Raise if a `torch.amp.GradScaler` that decides on each rank alone is stepping an optimizer of shards.

    - ``optimizer``: the optimizer, in a hook before its step.
    - ``marker``: an attribute of the shards.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return
        scaler = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
            of_torch, own = torch.amp.GradScaler, type(scaler)
            alone = all(getattr(own, name, None) is getattr(of_torch, name, None) for name in _DECIDING)
            if alone and any(marker in p.__dict__ for group in optimizer.param_groups for p in group["params"]):
                raise InputError(
                    f"{type(scaler).__name__}: expected fm.expert_parallel.GradScaler for an optimizer of experts that "
                    "are spread over ranks, got a scaler with which each rank decides alone whether to skip a step"
                )
            return
        frame = frame.f_back
