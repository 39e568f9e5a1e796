"""Checkpoints of `fusedmoe.integrations.megatron.FusedGroupedMLP`, in the formats of Megatron-Core's experts.

`FusedGroupedMLP` has one parameter per layer for all experts of a rank. Its distributed checkpoints have the keys and
shapes of ``SequentialMLP``, its ``state_dict()`` has the names of ``TEGroupedMLP``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedmoe.base.errors import InputError

LAYERS = ("linear_fc1", "linear_fc2")


def sharded_state_dict(
    experts: Any, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """Implement `FusedGroupedMLP.sharded_state_dict`."""
    # here, since importing this module must not import Megatron
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

    separate = bool((metadata or {}).get("singleton_local_shards", False))
    replica = (0, 0, experts.dp_group.rank())
    ranks, rank, local = experts.ep_group.size(), experts.ep_group.rank(), experts.num_local_experts
    first = rank * local
    found: dict[str, Any] = {}
    for layer in LAYERS:
        halves = 2 if layer == "linear_fc1" and experts.config.gated_linear_unit else 1
        shards = _Shards(separate, halves, tuple(sharded_offsets), rank, ranks, first)
        for name, parameter in getattr(experts, layer).named_parameters():
            found[f"{prefix}{layer}.{name}"] = ShardedTensorFactory(
                f"{prefix}experts.{layer}.{name}", parameter, shards.build, shards.merge, replica
            )
        for expert in range(first, first + local):
            of_expert = f"{expert}." if separate else ""
            offsets = sharded_offsets if separate else (*sharded_offsets, (len(sharded_offsets), expert, ranks * local))
            found[f"{prefix}{layer}._extra_state{expert - first}"] = make_sharded_object_for_checkpoint(
                None, f"{prefix}experts.{of_expert}{layer}._extra_state", offsets, replica
            )
    return found


@dataclass(frozen=True)
class _Shards:
    """Converts a parameter of all experts of this rank to the shards of ``SequentialMLP`` and back."""

    separate: bool  # each expert has its own keys
    halves: int  # 2 if gate and up are separate shards, else 1
    offsets: tuple[Any, ...]
    rank: int
    ranks: int
    first_expert: int

    @torch.no_grad()
    def build(self, key: str, parameter: Tensor, replica_id: Any, flattened_range: slice | None = None) -> Any:
        """Return the shards of a parameter, or of its optimizer state, which has another key."""
        if flattened_range is not None:
            raise InputError(
                f"FusedGroupedMLP: {key}: expected a whole tensor to save or load, got a range of a flattened one"
            )
        axis = len(self.offsets)
        if not self.separate:
            parts = parameter.chunk(self.halves, dim=1)
            of_rank = axis, self.rank, self.ranks
            return [
                self._shard(key, part, replica_id, of_rank, (axis + 1, i, self.halves)) for i, part in enumerate(parts)
            ]
        before, layer, name = key.rsplit(".", 2)
        suffixes = ("_w", "_v") if self.halves == 2 else ("",)
        return [
            [
                self._shard(f"{before}.{expert}.{layer}.{name}{suffix}", part, replica_id)
                for suffix, part in zip(suffixes, of_expert.chunk(self.halves), strict=True)
            ]
            for expert, of_expert in enumerate(parameter, self.first_expert)
        ]

    @torch.no_grad()
    def merge(self, parts: Any) -> Tensor:
        """Invert `build`."""
        return torch.stack([torch.cat(halves) for halves in parts]) if self.separate else torch.cat(parts, dim=1)

    def _shard(self, key: str, tensor: Tensor, replica_id: Any, *offsets: tuple[int, int, int]) -> Any:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        more = {"replica_id": replica_id, "prepend_axis_num": len(self.offsets)}
        return ShardedTensor.from_rank_offsets(key, tensor.contiguous(), *self.offsets, *offsets, **more)


def split_by_expert(module: Any, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    """``linear_fc1.weight`` -> ``linear_fc1.weight0``, ``linear_fc1.weight1``, ..., as views."""
    for layer in LAYERS:
        for name, _ in getattr(module, layer).named_parameters():
            packed = state_dict.pop(f"{prefix}{layer}.{name}", None)
            if packed is not None:
                state_dict.update({f"{prefix}{layer}.{name}{i}": part for i, part in enumerate(packed)})


def stack_experts(module: Any, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """``linear_fc1.weight0``, ``linear_fc1.weight1``, ... -> ``linear_fc1.weight``, which may also be present."""
    for layer in LAYERS:
        for name, _parameter in getattr(module, layer).named_parameters():
            keys = [f"{prefix}{layer}.{name}{i}" for i in range(module.num_local_experts)]
            if all(key in state_dict for key in keys):
                state_dict[f"{prefix}{layer}.{name}"] = torch.stack([state_dict.pop(key) for key in keys])
        for key in [key for key in state_dict if key.startswith(f"{prefix}{layer}._extra_state")]:
            del state_dict[key]  # the quantization state of Transformer Engine
