"""Detects forward passes inside a backward pass, which activation checkpointing recomputes."""

from __future__ import annotations

from typing import Any

import torch

backward_pass = torch._C._current_graph_task_id
"""Returns autograd's number of the current backward pass; -1 outside of one."""


def had_gradients() -> bool:
    """Return whether the original call of a recomputed forward pass had gradients enabled.

    ``use_reentrant=True`` disables gradients in the original call. It recomputes in the backward of an autograd
    function whose name contains "Checkpoint": in PyTorch, Megatron-LM, DeepSpeed and Transformer Engine.
    ``use_reentrant=False`` recomputes in the first backward function that unpacks a saved tensor.
    """
    node: Any = torch._C._current_autograd_node()
    return node is None or "Checkpoint" not in node.name()


def checkpointing() -> bool:
    """Return whether activation checkpointing runs the forward pass inside the current backward pass.

    A compiled graph may also recompute its values there, but without hooks on saved tensors, which
    ``use_reentrant=False`` sets.
    """
    return not had_gradients() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
