"""Checkpoints that do not depend on the number of ranks, by `torch.distributed.checkpoint`.

It writes a DTensor as one tensor, and reads any part of it. So `state_dict` gives each shard as a DTensor of all
experts, sharded in dimension 0.

Axes: E experts, P ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusedmoe.base.checks import MODULE
from fusedmoe.base.log import say_once
from fusedmoe.expert_parallel.group import ExpertParallel
from fusedmoe.expert_parallel.shards import owners, shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


logger = logging.getLogger(__name__)
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # no part of the names in state_dicts


def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return the state for `torch.distributed.checkpoint`, with the experts' parameters as DTensors of all E experts.

    The result is ``{"model": ..., "optimizer": ...}``, the results of ``get_model_state_dict`` and
    ``get_optimizer_state_dict`` of `torch.distributed.checkpoint.state_dict`, in which each shard is a DTensor over the
    ranks that share the experts. Names and sizes are those of a model with all experts on each rank. The state of the
    optimizer is flattened (``StateDictOptions(flatten_optimizer_state_dict=True)``), so that its parameter groups need
    not be those of the optimizer that loads it. The tensors share memory with the model and the optimizer: save or load
    the state before the next step. A collective.

    A value of the optimizer's state for all experts of a rank together, such as the column factor of a bias in
    Adafactor, keeps its size. If it differs between ranks, a warning says that the checkpoint has that of one rank.

    `torch.distributed.checkpoint.load` reads only what the state has. A layer has histories of delayed scaling from its
    first training step on. To load them, run a step under the recipe before this function. The load replaces the
    changes of that step.

    Parameters
    ----------
    model
        A model, also one that DDP or FSDP2 has wrapped, or one without expert parallelism.
    optimizer
        Its optimizer; None for the model alone.

    Examples
    --------
    >>> state = state_dict(model, optimizer)
    >>> torch.distributed.checkpoint.save(state, checkpoint_id=folder)

    >>> state = state_dict(model, optimizer)
    >>> torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    >>> load_state_dict(model, optimizer, state)
    """
    # imports take a second
    from torch.distributed.checkpoint import state_dict as of_torch

    shards(MODULE("state_dict: model", model))  # raises if they are not as they should be
    state: dict[str, Any] = {"model": of_torch.get_model_state_dict(model)}
    if optimizer is not None:
        flat = of_torch.StateDictOptions(flatten_optimizer_state_dict=True)
        state["optimizer"] = of_torch.get_optimizer_state_dict(model, optimizer, options=flat)
    converted, others = _converted(model, state, _Whole())
    if optimizer is not None:
        _warn_of_differences(model, others)
    return converted


def load_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """Load a state of `state_dict`, after `torch.distributed.checkpoint.load`, into the model and its optimizer."""
    # imports take a second
    from torch.distributed.checkpoint import state_dict as of_torch

    MODULE("load_state_dict: model", model)
    local, _ = _converted(model, state, _part)
    of_torch.set_model_state_dict(model, local["model"])
    if optimizer is not None:
        flat = of_torch.StateDictOptions(flatten_optimizer_state_dict=True)
        of_torch.set_optimizer_state_dict(model, optimizer, local["optimizer"], options=flat)


def _names(model: nn.Module) -> dict[str, tuple[nn.Module, ExpertParallel]]:
    """Return the modules with shards, by their names in a state_dict of torch, which leaves out wrappers."""
    left_out = {id(m.module) for m in model.modules() if isinstance(m, DistributedDataParallel)}
    names = {}
    for name, module, ep in owners(model):
        parts, at = [], model
        for part in name.split(".") if name else ():
            at = getattr(at, part)
            if id(at) not in left_out and part not in _WRAPPERS:
                parts.append(part)
        names[".".join(parts)] = module, ep
    return names


def _converted(
    model: nn.Module, state: dict[str, Any], convert: Callable[..., Any]
) -> tuple[dict[str, Any], dict[str, tuple[Tensor, ExpertParallel]]]:
    """Return the state with its shards converted by ``convert(tensor, parameter, ranks, dimension of the experts)``,
    and the tensors of the optimizer's state of shards that have no part for each expert.
    """
    weights, of_optimizer = dict(state["model"]), dict(state.get("optimizer", {}))
    result = {**state, "model": weights, **({"optimizer": of_optimizer} if of_optimizer else {})}
    moments: dict[str, list[str]] = {}  # the keys of the optimizer's state, "state.NAME.MOMENT", by NAME
    for key in of_optimizer:
        kind, _, rest = key.partition(".")
        if kind == "state":
            moments.setdefault(rest.rpartition(".")[0], []).append(key)
    # the moments that have one part for all of dimension 0, which parameters with one expert do not show
    reduced = {
        (_moment(key), of_optimizer[key].dim())
        for name, keys in moments.items()
        for key in keys
        if _is_reduced(of_optimizer[key], weights.get(name))
    }
    others = {}
    for prefix, (module, ep) in _names(model).items():
        start = f"{prefix}." if prefix else ""
        for own, parameter in module.named_parameters(recurse=False):
            name = start + own
            weights[name] = convert(weights[name], parameter, ep, 0)
            for key in moments.get(name, ()):
                value = of_optimizer[key]
                if not isinstance(value, Tensor) or not value.dim():
                    continue  # such as the number of steps
                if _fits(value, parameter) and (_moment(key), value.dim()) not in reduced:
                    of_optimizer[key] = convert(value, parameter, ep, 0)
                if of_optimizer[key] is value:
                    others[key] = value, ep
            if own == "weight":
                for key in [key for key in weights if key.startswith(f"{start}amax_history.")]:
                    weights[key] = convert(weights[key], parameter, ep, weights[key].dim() - 1)  # (steps, E) and (E,)
    return result, others


def _moment(key: str) -> str:
    return key.rpartition(".")[2]


def _is_reduced(value: Any, parameter: Any) -> bool:
    """Whether a value of an optimizer's state has size 1 in dimension 0, unlike its parameter."""
    if not isinstance(value, Tensor) or not isinstance(parameter, Tensor) or value.dim() != parameter.dim():
        return False
    return value.shape[:1] == (1,) and parameter.shape[0] > 1


def _fits(value: Tensor, parameter: Any) -> bool:
    """Whether a value of an optimizer's state can have a part for each expert, by its sizes after the first one.

    They are those of the parameter, such as of a moment, or one of them is absent or some are 1, as in Adafactor. Other
    values belong to the parameter as a whole, such as a number of steps of shape (1,), also with one expert per rank.
    """
    sizes = iter(parameter.shape[1:])
    fits = value.dim() in (parameter.dim(), parameter.dim() - 1) and value.shape != (1,)
    return fits and all(size == 1 or size in sizes for size in value.shape[1:])


def _warn_of_differences(model: nn.Module, others: dict[str, tuple[Tensor, ExpertParallel]]) -> None:
    """Warn of values of the optimizer's state for all experts of a rank that are not the same on all ranks."""
    for group in {ep.group: None for _, _, ep in owners(model)}:
        local = {key: getattr(t, "to_local", lambda t=t: t)() for key, (t, ep) in others.items() if ep.group is group}
        sums = {key: t.double().sum().item() for key, t in local.items()}
        of_ranks: list[Any] = [None] * group.size()
        dist.all_gather_object(of_ranks, sums, group=group)
        for key in sums:
            if any(sums[key] != of_rank.get(key) for of_rank in of_ranks):
                say_once(
                    logger,
                    logging.WARNING,
                    "state_dict: optimizer: %s: expected a part for each expert, or the same value on all ranks, got "
                    "other values on other ranks: the checkpoint has that of one rank",
                    key,
                )


class _Whole:
    """Converts a shard to a DTensor of all experts, and leaves other values unchanged."""

    def __init__(self) -> None:
        self._meshes: dict[tuple[object, ...], DeviceMesh] = {}

    def __call__(self, value: Any, parameter: Any, ep: ExpertParallel, dim: int) -> Any:
        # torch.distributed.checkpoint has imported it already
        from torch.distributed.tensor import DTensor, Shard

        if not isinstance(value, Tensor) or value.dim() <= dim or value.shape[dim] != parameter.shape[0]:
            return value  # such as the number of steps
        sharded: Any = value if isinstance(value, DTensor) else None
        local, placements = (value, ()) if sharded is None else (sharded.to_local(), sharded.placements)
        mesh = self._mesh(ep, None if sharded is None else sharded.device_mesh, local.device.type)
        return _dtensor(local, mesh, (Shard(dim), *placements), value.shape, dim, value.shape[dim] * ep.ranks)

    def _mesh(self, ep: ExpertParallel, inner: DeviceMesh | None, device_type: str) -> DeviceMesh:
        """Return a mesh of the ranks that share the experts, times the mesh over which FSDP2 shards those of a rank."""
        # see above
        from torch.distributed.device_mesh import DeviceMesh

        key = ep.group, inner, device_type
        if key not in self._meshes:
            if inner is None:
                mesh = DeviceMesh.from_group(ep.group, device_type)
            else:
                layouts: list[Any] = [None] * ep.ranks
                dist.all_gather_object(layouts, inner.mesh.tolist(), group=ep.group)
                names = tuple(f"dim{i}" for i in range(inner.ndim + 1))
                groups = [ep.group, *inner.get_all_groups()]
                mesh = DeviceMesh.from_group(groups, device_type, mesh=layouts, mesh_dim_names=names)
            self._meshes[key] = mesh
        return self._meshes[key]


def _part(value: Any, parameter: Any, ep: ExpertParallel, dim: int) -> Any:
    """Return this rank's part of a DTensor of `_Whole`: plain, or a DTensor as the parameter is."""
    inner: DeviceMesh | None = getattr(parameter, "device_mesh", None)
    mesh: DeviceMesh | None = getattr(value, "device_mesh", None)
    if mesh is None or mesh.ndim == (0 if inner is None else inner.ndim):
        return value
    local = value.to_local()
    if inner is None:
        return local
    return _dtensor(local, inner, value.placements[1:], value.shape, dim, value.shape[dim] // ep.ranks)


def _dtensor(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, dim: int, experts: int
) -> Tensor:
    """Return a DTensor whose shape is ``shape``, with ``experts`` as the size of dimension ``dim``."""
    # see above
    from torch.distributed.tensor import DTensor

    sizes = [experts if i == dim else size for i, size in enumerate(shape)]
    strides = torch.empty(sizes, dtype=torch.float32, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(sizes), stride=strides)
