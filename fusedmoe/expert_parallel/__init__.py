"""Expert parallelism: the ranks that share the experts of a layer, and the engines that move tokens between them.

The functions are for models with such layers: the gradients, their norm, loss scaling, and checkpoints.
"""

from fusedmoe.expert_parallel.checkpoint import load_state_dict, state_dict
from fusedmoe.expert_parallel.group import ExpertParallel
from fusedmoe.expert_parallel.scaler import GradScaler
from fusedmoe.expert_parallel.shards import average_gradients, clip_grad_norm_, shards

__all__ = [
    "ExpertParallel",
    "GradScaler",
    "average_gradients",
    "clip_grad_norm_",
    "load_state_dict",
    "shards",
    "state_dict",
]
