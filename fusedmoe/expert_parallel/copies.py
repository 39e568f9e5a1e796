"""Detects experts that something has copied from one rank to the others that share the experts.

Wrappers and functions that take shards for replicas do so: FSDP1, `replicate`, `ZeroRedundancyOptimizer`, loading with
``broadcast_from_rank0``. They have no common trace, except the values: all ranks then have the same ones. So the ranks
compare a few values of each shard in the calls 1, 2, 4, 8, ... of a layer. The number of a call is the same on all
ranks, as each call is a collective. The host does not wait for a GPU: it reads the result in the next of these calls.

Ranks may start with equal experts, as copies of a dense MLP, if `fm.load_experts` wrote them. Training makes them
different.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from fusedmoe.errors import InputError
from fusedmoe.estimating import has_values
from fusedmoe.expert_parallel.engine import writes_no_weight
from fusedmoe.expert_parallel.shards import owners
from fusedmoe.recompute import backward_pass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

_FEW = 8  # values in each dimension of an expert's parameter that the ranks compare
_GIVEN = "_experts_given"  # attribute of an op: how often `fm.load_experts` has written its parameters


def note_given(op: nn.Module) -> None:
    """Record that the user chose the op's experts of all ranks, which may be equal."""
    op.__dict__[_GIVEN] = op.__dict__.get(_GIVEN, 0) + 1


class _Before(NamedTuple):
    """The last comparison of a parameter that `fm.load_experts` wrote."""

    given: int
    equal: Tensor  # whether all ranks had the same values
    sample: Tensor


@dataclass
class _History:
    """The comparisons of the shards of a layer."""

    calls: int = 0
    before: dict[str, _Before] = field(default_factory=dict)
    # of the last comparison on a GPU: names, flags, and the event after which the host can read them
    unread: tuple[list[str], Tensor, torch.cuda.Event] | None = None


class Copies:
    """The check of the shards in a module that exchanges tokens with other ranks.

    Parameters
    ----------
    root
        The module that is called. Its first op with shards has the history, so that the number of a call is the same on
        ranks with other hooks, where another module of the layer is called.
    """

    def __init__(self, root: nn.Module) -> None:
        # the module has its partition, which has this object
        self._owners = [(name, ref(module), ep.group) for name, module, ep in owners(root) if ep.ranks > 1]

    def check(self, x: Tensor) -> None:
        """Compare the shards with those of the other ranks, if it is their turn; ``x`` are the rows of the call.

        Raises
        ------
        InputError
            All ranks have the same values. Every rank raises the error in the same call.
        """
        first: Any = self._owners[0][1]() if self._owners else None
        if first is None or backward_pass() != -1:  # a recomputation is no call of its own
            return
        history = first._of_process.copies
        if history is None:
            history = first._of_process.copies = _History()
        history.calls += 1
        if history.calls & (history.calls - 1) or not has_values(x):
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if history.unread is not None:
            names, flags, copied = history.unread
            copied.synchronize()
            history.unread = None
            _raise_if_copied(names, flags)
        with torch.no_grad(), _disable_current_modes():
            self._compare(x.device, history)

    def _compare(self, device: torch.device, history: _History) -> None:
        samples: dict[ProcessGroup, list[tuple[str, int, Tensor]]] = {}
        for name, given, parameter, group in self._parameters():
            plain = type(parameter) in (Tensor, nn.Parameter) and parameter.device == device
            if plain and _has_backend(group, device):
                samples.setdefault(group, []).append((name, given, _sample(parameter)))
        names, flags = [], []
        for group, entries in samples.items():
            together = torch.cat([sample for _, _, sample in entries])
            extremes = torch.cat((together, -together))
            with writes_no_weight(group, device):
                dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
            most, minus_least = extremes.chunk(2)
            equal_values = (most == -minus_least).split([len(sample) for _, _, sample in entries])
            for (name, given, sample), values in zip(entries, equal_values, strict=True):
                equal = values.all()
                copied = equal & (sample != sample[0]).any()  # constants, such as zeros, are initial values
                if given:
                    before = history.before.get(name)
                    history.before[name] = _Before(given, equal, sample)
                    if before is None or before.given != given:
                        continue
                    copied &= ~before.equal | (sample != before.sample).any()
                names.append(name)
                flags.append(copied)
        if not flags:
            return
        found = torch.stack(flags)
        if found.is_cuda:
            on_host = torch.empty_like(found, device="cpu", pin_memory=True)
            on_host.copy_(found, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            history.unread = names, on_host, event
        else:
            _raise_if_copied(names, found)

    def _parameters(self) -> Iterator[tuple[str, int, Any, ProcessGroup]]:
        """Yield name, number of `fm.load_experts`, value and ranks of each shard. FSDP1 leaves views of parameters."""
        for prefix, module, group in self._owners:
            op: Any = module()
            for own in () if op is None else op.parameter_names:
                name = f"{prefix}.{own}" if prefix else own
                yield name, op.__dict__.get(_GIVEN, 0), getattr(op, own, None), group


def _has_backend(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a group has collectives of tensors on the device, which the engine ``"symmetric"`` does not need."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def _sample(parameter: Tensor) -> Tensor:
    """Return the first few values of each dimension, except the first one, of the experts."""
    corner = (slice(None), *[slice(_FEW)] * (parameter.dim() - 1))
    return parameter.detach()[corner].double().flatten()


def _raise_if_copied(names: list[str], flags: Tensor) -> None:
    copied = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
    if copied:
        raise InputError(
            f"{copied[0]}: expected other experts on each rank that shares them, got the same values on all of these "
            "ranks. A wrapper, an optimizer or a function that takes shards for replicas may have copied them "
            "(FullyShardedDataParallel, replicate, ZeroRedundancyOptimizer, broadcast_from_rank0=True): exclude "
            "fm.expert_parallel.shards(model) from it, and load experts by fm.expert_parallel.load_state_dict. Or "
            "the ranks drew them from equal seeds: reset_parameters of the layer draws other values on each rank. If "
            "the experts are meant to start equal, write them by fm.load_experts"
        )
