"""Whether a forward pass runs inside of a backward pass: activation checkpointing computes an earlier one again."""

from __future__ import annotations

from typing import Any

import torch


def backward_pass() -> int:
    """Return the backward pass that runs here, by autograd's number; -1 outside of any."""
    return torch._C._current_graph_task_id()


def had_gradients() -> bool:
    """Return whether what a backward pass computes again had gradients the first time.

    ``use_reentrant=True`` calls without gradients first, and again in the backward of an autograd function, whose name
    has "Checkpoint" in it: in PyTorch, Megatron-LM, DeepSpeed and Transformer Engine. ``use_reentrant=False`` computes
    again in whatever function asks for what it saved.
    """
    node: Any = torch._C._current_autograd_node()
    return node is None or "Checkpoint" not in node.name()


def checkpointing() -> bool:
    """Return whether activation checkpointing calls the forward pass that runs within this backward pass.

    A compiled graph that computes its own values again in its backward pass is no such call. ``use_reentrant=False``
    computes again under hooks that catch what the forward pass saves.
    """
    return not had_gradients() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
