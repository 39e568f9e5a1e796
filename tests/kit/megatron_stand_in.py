"""What `fusedmoe.integrations.megatron` uses of Megatron-Core 0.16 and later, by the same names and with the same
meaning: two activations, process groups, and the description of a tensor's part in a distributed checkpoint.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F


def squared_relu(x):
    return F.relu(x).square()


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


@dataclass
class ShardedTensor:
    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: Any
    prepend_axis_num: int

    @classmethod
    def from_rank_offsets(cls, key, data, *rank_offsets, replica_id=0, prepend_axis_num=0):
        """(axis, i, n): along this axis of the global tensor, `data` is the i-th of n parts."""
        shape, offset = [1] * prepend_axis_num + list(data.shape), [0] * (prepend_axis_num + data.dim())
        for axis, part, parts in rank_offsets:
            assert 0 <= part < parts
            offset[axis], shape[axis] = part * shape[axis], parts * shape[axis]
        return cls(key, data, tuple(shape), tuple(offset), replica_id, prepend_axis_num)


@dataclass
class ShardedTensorFactory:
    key: str
    data: torch.Tensor
    build_fn: Any
    merge_fn: Any
    replica_id: Any = 0
    flattened_range: slice | None = None

    def build(self):
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


@dataclass
class ShardedObject:
    key: str
    data: Any
    offsets: Any
    replica_id: Any


def make_sharded_object_for_checkpoint(obj, key, sharded_offsets=(), replica_id=None):
    return ShardedObject(key, obj, sharded_offsets, replica_id)


@dataclass
class Group:
    """A process group, as far as it says how many ranks there are and which one this is."""

    ranks: int = 1
    of: int = 0

    def size(self):
        return self.ranks

    def rank(self):
        return self.of


@dataclass
class ProcessGroupCollection:
    ep: Any = field(default_factory=Group)
    expt_tp: Any = field(default_factory=Group)
    expt_dp: Any = field(default_factory=Group)

    @classmethod
    def use_mpu_process_groups(cls):
        return cls()


def init_method(std):
    return lambda tensor: torch.nn.init.normal_(tensor, 0, std)


def transformer_config(**settings):
    """The fields of Megatron's TransformerConfig that experts read, with its defaults."""
    defaults = {
        "activation_func": F.gelu,
        "activation_func_clamp_value": None,
        "activation_func_fp8_input_store": False,
        "add_bias_linear": True,
        "expert_model_parallel_size": 1,
        "fine_grained_activation_offloading": False,
        "fp4": None,
        "fp8": None,
        "gated_linear_unit": False,
        "glu_linear_offset": 0.0,
        "gradient_accumulation_fusion": False,
        "init_method": init_method(0.02),
        "moe_apply_probs_on_input": False,
        "moe_latent_size": None,
        "moe_router_dtype": None,
        "moe_router_topk": 2,
        "offload_modules": [],
        "output_layer_init_method": init_method(0.02),
        "params_dtype": torch.float32,
        "perform_initialization": True,
        "recompute_granularity": None,
        "recompute_modules": None,
        "use_cpu_initialization": False,
        "use_te_activation_func": False,
    }
    return SimpleNamespace(**defaults | settings)


MODULES = {
    "megatron.core.activations": {"squared_relu": squared_relu, "quick_gelu": quick_gelu},
    "megatron.core.fusions.fused_bias_geglu": {"quick_gelu": quick_gelu},
    "megatron.core.dist_checkpointing.mapping": {
        "ShardedTensor": ShardedTensor,
        "ShardedTensorFactory": ShardedTensorFactory,
    },
    "megatron.core.transformer.utils": {"make_sharded_object_for_checkpoint": make_sharded_object_for_checkpoint},
    "megatron.core.process_groups_config": {"ProcessGroupCollection": ProcessGroupCollection},
}
