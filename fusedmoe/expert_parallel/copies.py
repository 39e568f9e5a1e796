"""Detects experts that something has copied from one rank to the others that share the experts.

Wrappers and functions that take shards for replicas do so: FSDP1, `replicate`, `ZeroRedundancyOptimizer`, loading with
``broadcast_from_rank0``. They have no common trace, except the values: all ranks then have the same ones. So the ranks
compare a few values of each weight in some of their exchanges of tokens: the exchanges 1, 2, 4, 8 and so on of an
`ExpertParallel`, and every `OFTEN`-th one.

An exchange is a collective, so its number is the same on all ranks, whatever hooks their modules have. What the ranks
compare has a fixed size, so ranks that know other weights still agree on the collective: they only find less.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from fusedmoe.base.errors import InputError
from fusedmoe.base.estimating import has_values
from fusedmoe.expert_parallel.engine import writes_no_weight

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OFTEN = 4096
LAG = 16  # exchanges after which the host reads the result of a GPU, which is there by then
_SLOTS = 256  # weights that are compared
_FEW = 8  # values in each dimension of an expert's weight that are compared


class Copies:
    """The comparisons of the ranks of an `ExpertParallel`."""

    def __init__(self) -> None:
        self._ops: list[ref[nn.Module]] = []  # with weights that are shards, in the order of their first calls
        self._exchanges = 0
        # of the last comparison on a GPU: when to read it, the weights' names, flags, and the event after which they
        # are on the host
        self._unread: tuple[int, list[str], Tensor, torch.cuda.Event] | None = None

    def add(self, op: nn.Module) -> None:
        """Compare the weights of an op from now on."""
        if all(known() is not op for known in self._ops):
            self._ops = [known for known in self._ops if known() is not None]
            self._ops.append(ref(op))

    def check(self, group: ProcessGroup, x: Tensor) -> None:
        """Compare the weights with those of the other ranks, if it is the turn of this exchange of the rows ``x``.

        Raises `InputError`: all ranks have the same values. Every rank raises the error in the same exchange.
        """
        if not has_values(x):  # no exchange
            return
        self._exchanges += 1
        number = self._exchanges
        if self._unread is not None and number >= self._unread[0] and not _capturing(x):
            _, names, flags, copied = self._unread
            self._unread = None
            copied.synchronize()
            _raise_if_copied(names, flags)
        its_turn = number & (number - 1) == 0 or number % OFTEN == 0
        if its_turn and self._unread is None and not _capturing(x) and _compares(group, x.device):
            with torch.no_grad(), _disable_current_modes():
                self._compare(group, x.device)

    def _compare(self, group: ProcessGroup, device: torch.device) -> None:
        values = torch.full((2, _SLOTS), math.inf, dtype=torch.float64, device=device)
        names: list[str] = []
        for name, weight in self._weights(device)[:_SLOTS]:
            values[:, len(names)] = _digest(weight)
            names.append(name)
        with writes_no_weight(group, device):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        most, minus_least = values
        flags = (most == -minus_least)[: len(names)]
        if device.type != "cuda":
            _raise_if_copied(names, flags)
            return
        on_host = torch.empty_like(flags, device="cpu", pin_memory=True)
        on_host.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self._unread = self._exchanges + LAG, names, on_host, event

    def _weights(self, device: torch.device) -> list[tuple[str, Tensor]]:
        """Return the weights on the device, with their names. FSDP1 replaces parameters by views of another one."""
        found = []
        for known in self._ops:
            op: Any = known()
            for name in () if op is None else op.parameter_names:
                weight: Any = op._parameters.get(name, op.__dict__.get(name))
                plain = type(weight) in (Tensor, nn.Parameter) and weight.device == device
                if plain and weight.dim() == 3:
                    found.append((f"{op._of_process.place or type(op).__name__}.{name}", weight))
        return found


def _digest(weight: Tensor) -> Tensor:
    """Return a number that other weights have with a negligible probability, and its negative: (2,).

    Both are infinite for a constant, such as zeros, since such initial values may be the same on all ranks.
    """
    sample = weight.detach()[:, :_FEW, :_FEW].double().flatten()
    factors = torch.arange(1, len(sample) + 1, dtype=torch.float64, device=weight.device).cos()
    value = (sample * factors).sum()
    both = torch.stack((value, -value))
    return torch.where((sample == sample[0]).all() | ~value.isfinite(), math.inf, both)


def _compares(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a group has collectives of tensors on the device: ``"fake"`` ones do nothing."""
    try:
        name: str = group._get_backend(device).name()
    except RuntimeError:
        return False
    return name != "fake"


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _raise_if_copied(names: list[str], flags: Tensor) -> None:
    copied = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
    if copied:
        raise InputError(
            f"{copied[0]}: expected each rank to have experts of its own, but all ranks have the same values. A "
            "wrapper, an optimizer or a function that takes shards for replicas may have copied them "
            "(FullyShardedDataParallel, replicate, ZeroRedundancyOptimizer, broadcast_from_rank0=True): exclude "
            "fm.expert_parallel.shards(model) from it, and load experts by fm.expert_parallel.load_state_dict. Or "
            "the ranks drew them from equal seeds: reset_parameters of the layer draws other values on each rank. If "
            "the experts are meant to be equal, as copies of a dense MLP are: ExpertParallel(equal_experts=True)"
        )
