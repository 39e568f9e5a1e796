"""The parameters of experts that are spread over ranks: their names, the averages and the norm of their gradients.

Axes: P ranks that share the experts, W data-parallel ranks, W / P replicas of each expert.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fusedmoe.base.checks import MODULE, number
from fusedmoe.base.errors import InputError
from fusedmoe.expert_parallel.group import ExpertParallel
from fusedmoe.expert_parallel.scaler import check_scaler
from fusedmoe.expert_parallel.subgroup import group_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_HOOK = "_averages_over_ranks"  # attribute of a shard: the handle of its hook
_IS_SHARD = "_is_shard"  # attribute of a shard that an optimizer may have
_AVERAGES = "_averages_of_shards"  # attribute of a module with shards, after `average_gradients`: its `_Averages`
_CHECKED = "_leaves_shards_alone"  # attribute of a DDP module


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertParallel]]:
    """Yield the modules with parameters that are shards, with their names and their ranks."""
    for name, module in model.named_modules():
        ep: ExpertParallel | None = module.__dict__.get("_sharded_over")
        if ep is not None:
            yield name, module, ep


def _shards(model: nn.Module) -> dict[str, tuple[nn.Parameter, ExpertParallel]]:
    found = {}
    for prefix, module, ep in owners(model):
        for name, parameter in module.named_parameters(prefix, recurse=False):
            _check_mesh(name, parameter, ep)
            found[name] = parameter, ep
    return found


def check_shard(module: nn.Module, name: str) -> None:
    """Raise if a module's parameter, which has just been set, is a DTensor over ranks that have other experts."""
    ep: ExpertParallel | None = module.__dict__.get("_sharded_over")
    parameter: Any = module._parameters[name]
    if ep is None or not hasattr(parameter, "device_mesh"):
        return
    if _IS_SHARD in parameter.__dict__ and _AVERAGES not in module.__dict__:
        return  # FSDP2 sets the same parameter in each pass
    _check_mesh(f"{module!r}: {name}", parameter, ep)
    if _AVERAGES in module.__dict__ and ep.ranks > 1:
        raise InputError(
            f"{module!r}: {name}: expected a plain parameter after average_gradients, whose hooks average its "
            "gradient, got a DTensor: do not call average_gradients, see FSDPModule.set_gradient_divide_factor"
        )
    _mark(parameter, ep.ranks)


def _mark(parameter: nn.Parameter, ranks: int) -> None:
    """Mark a shard, so that an optimizer that has it is checked in its steps."""
    if ranks > 1:
        parameter.__dict__[_IS_SHARD] = True
        _watch_optimizers()


def _check_mesh(name: str, parameter: Any, ep: ExpertParallel) -> None:
    """Raise if FSDP2 has sharded a parameter over ranks that have other experts."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return
    over = mesh.mesh.flatten().tolist()
    if len({*over}.intersection(dist.get_process_group_ranks(ep.group))) > 1:
        raise InputError(
            f"{name}: expected a plain parameter, or one that is sharded over ranks with the same experts, got one "
            f"that is sharded over ranks {over}: fully_shard the experts over their replicas, or pass ignored_params"
        )


def check_ddp() -> None:
    """Raise if the DDP module whose ``forward`` runs averages shards: it has overwritten them with those of rank 0."""
    ddp: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None or _CHECKED in ddp.__dict__:
        return
    averaged = {id(parameter) for parameter in getattr(ddp, "_module_parameters", ())}
    for name, (parameter, ep) in _shards(ddp.module).items():
        if id(parameter) in averaged and ep.ranks > 1:
            raise InputError(
                f"DistributedDataParallel: {name}: expected to be left alone, since each rank has other experts, got "
                "an average over ranks: call fm.expert_parallel.average_gradients(model) before "
                "DistributedDataParallel(model)"
            )
    ddp.__dict__[_CHECKED] = True


def shards(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of which each rank has its own part, by their names: those of `ExpertParallel` experts.

    All other parameters of a model are the same on every rank.
    """
    MODULE("shards: model", model)
    return {name: parameter for name, (parameter, _) in _shards(model).items()}


def average_gradients(model: nn.Module, group: Any = None) -> None:
    """Average the gradients of the shards over data-parallel ranks, as DDP averages those of all other parameters.

    The backward pass sums a shard's gradient over the tokens of the P ranks that share the experts. Hooks on the shards
    divide it by W, the number of data-parallel ranks, and sum it over the W / P replicas of the shard. DDP gets the
    order to ignore the shards. Call the function before ``DistributedDataParallel(model)``, on every rank.

    Every backward pass averages the gradient that it adds, also inside ``no_sync()``, so that gradients can be
    accumulated in any way. ``weight.main_grad`` is not changed: its owner reduces it. Parameters that are made or
    unfrozen later, as by ``load_state_dict(assign=True)``, ``requires_grad_`` or LoRA on a layer of the model, get
    their hooks in the next call of their layer. So do those of a copy of the model.

    Raises `InputError`: a shard has no memory or is a DTensor, or the group does not fit.

    Parameters
    ----------
    model
        The model to wrap. Its shards are plain tensors with memory, and those to train require gradients.
    group
        The data-parallel ranks: the process group that DDP gets, or a `DeviceMesh` of one dimension; None for the
        default group. It contains every group of P ranks as a whole.
    """
    who = "average_gradients"
    found = _shards(MODULE(f"{who}: model", model))
    for name, (parameter, _) in found.items():
        if parameter.is_meta or hasattr(parameter, "to_local"):
            got = (
                "one on the meta device"
                if parameter.is_meta
                else "a DTensor: see FSDPModule.set_gradient_divide_factor"
            )
            raise InputError(f"{who}: {name}: expected a plain parameter with memory, got {got}")
    ranks: Any = dist.group.WORLD if group is None else getattr(group, "get_group", lambda: group)()
    averages: dict[ProcessGroup, _Averages] = {}
    for _, module, ep in owners(model):
        if ep.group not in averages:
            averages[ep.group] = _Averages(ranks.size(), _replicas(ep, ranks))
        module.__dict__[_AVERAGES] = averages[ep.group]
        for parameter in module.parameters(recurse=False):
            if (before := parameter.__dict__.pop(_HOOK, None)) is not None:
                before.remove()
            averages[ep.group].add_hook(parameter)
    names = [*found, *(f"_orig_mod.{name}" for name in found)]  # also for DDP(torch.compile(model))
    ignored = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if not torch.compiler.is_compiling():  # Dynamo cannot look at the frames of the callers
        check_scaler(optimizer, _IS_SHARD)


def _replicas(ep: ExpertParallel, group: ProcessGroup) -> ProcessGroup | None:
    """Return the group of the ranks of ``group`` that have the experts of this rank; None if there are no others."""
    members = dist.get_process_group_ranks(group)
    numbers: list[int] = [0] * len(members)
    dist.all_gather_object(numbers, ep.rank, group=group)
    counts = Counter(numbers)
    if not {*dist.get_process_group_ranks(ep.group)} <= {*members} or len({*counts.values()}) > 1:
        raise InputError(
            f"average_gradients: group: expected all data-parallel ranks, with each group of {ep.ranks} ranks that "
            f"share experts as a whole, got ranks {members}"
        )
    if len(members) == ep.ranks:
        return None
    same = [member for member, number in zip(members, numbers, strict=True) if number == ep.rank]
    return group_of(same, group)


class Averaged:
    """The modules inside a module whose parameters are shards: those that `average_gradients` was called for."""

    def __init__(self, root: nn.Module) -> None:
        found = [*owners(root)]
        self.modules = [ref(module) for _, module, _ in found]  # weak: the module has its partition, which has this
        # modules that were added later, such as those of LoRA, join the others
        averages = {ep.group: module.__dict__[_AVERAGES] for _, module, ep in found if _AVERAGES in module.__dict__}
        for _, module, ep in found:
            if ep.group in averages:
                module.__dict__.setdefault(_AVERAGES, averages[ep.group])
            for parameter in module.parameters(recurse=False):
                _mark(parameter, ep.ranks)

    def add_hooks(self) -> None:
        """Add hooks to the parameters that have none, since they were made or unfrozen after `average_gradients`."""
        for reference in self.modules:
            module: Any = reference()
            averages: _Averages | None = None if module is None else module.__dict__.get(_AVERAGES)
            if averages is not None:
                for parameter in module._parameters.values():
                    if parameter is not None and _HOOK not in parameter.__dict__:
                        averages.add_hook(parameter)


class _Averages:
    """Adds the hooks of shards: the divisor of their gradients, and the ranks that have the same shards."""

    def __init__(self, divisor: int, group: ProcessGroup | None) -> None:
        self._divisor, self._group = divisor, group

    def add_hook(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad and parameter.is_leaf:  # functional_call may pass a tensor that has a gradient hook
            average = _Average(parameter, self._divisor, self._group)
            setattr(parameter, _HOOK, parameter.register_hook(average))
            _mark(parameter, self._divisor)

    def __deepcopy__(self, memo: object) -> _Averages:
        return self  # the group is one of the process


class _Average:
    """A hook on a parameter: the gradient divided by a number, and summed over the ranks of a group."""

    def __init__(self, parameter: nn.Parameter, divisor: int, group: ProcessGroup | None) -> None:
        self._parameter = ref(parameter)  # which has the hook
        self._divisor = divisor
        self._group = group

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None or getattr(self._parameter(), "grad_added_to_main_grad", False):
            return None  # the gradient is in `main_grad`, and this is at most a placeholder
        average = grad / self._divisor
        if self._group is not None:
            dist.all_reduce(average, group=self._group)
        return average


_MAX_NORM = number("a number, 0 or more; math.inf computes the norm alone", lambda value: value >= 0, infinite=True)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients of a model so that their norm over all ranks is at most ``max_norm``; return the norm before.

    ``torch.nn.utils.clip_grad_norm_`` for a model with shards: it adds the squared norms of shards over the ranks that
    share the experts, and gives every rank the same norm. A collective. Parameters can be DTensors, such as those of
    FSDP2. The gradient of a weight with ``accumulate_into_main_grad`` is its ``main_grad``.

    Parameters
    ----------
    model
        The model, with gradients that are averaged over data-parallel ranks already.
    max_norm
        The largest Euclidean norm of all gradients together; ``math.inf`` to compute the norm alone.
    """
    MODULE("clip_grad_norm_: model", model)
    _MAX_NORM("clip_grad_norm_: max_norm", max_norm)
    ranks = {id(parameter): ep.group for parameter, ep in _shards(model).values()}
    parameters = list(model.parameters())
    in_main = {id(m.weight) for m in model.modules() if getattr(m, "accumulate_into_main_grad", False)}
    alike: dict[tuple[Any, ...], list[Any]] = {}  # gradients in lists that torch takes: no DTensors of several meshes
    for parameter in parameters:
        grad: Any = getattr(parameter, "main_grad", None) if id(parameter) in in_main else parameter.grad
        if grad is not None:
            mesh = getattr(parameter, "device_mesh", None)
            alike.setdefault((ranks.get(id(parameter)), mesh), []).append(grad)
    # every rank has the same groups, and the same dtype and device, also without gradients
    dtype = torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
    zero = torch.zeros((), dtype=dtype, device=parameters[0].device if parameters else None)
    squares: dict[ProcessGroup | None, Tensor] = {group: zero.clone() for group in (None, *ranks.values())}
    for (group, _), some in alike.items():
        norm: Any = torch.nn.utils.get_total_norm(some)
        squares[group] += (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).to(zero).square()
    for group, square in squares.items():
        if group is not None:
            dist.all_reduce(square, group=group)
    total = sum(squares.values(), start=zero).sqrt()
    for some in () if math.isinf(max_norm) else alike.values():
        with_grad: Any = [SimpleNamespace(grad=grad) for grad in some]
        torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, total)
    return total
