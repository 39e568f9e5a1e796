"""In fp16, `Combine` applies the routing weights, and not a `Scale` before the last product.

Both are the same function of exact numbers, ``sum over k of w * (h @ W.T) = sum over k of (w * h) @ W.T``. The `Scale`
costs less memory, since no gradient needs the experts' output. But fp16 has 11 bits only from 6.1e-5 on. Activations
times weights, each near 1e-2, are often smaller, and each has an error of up to 2^-25. This error would go into the
output and into the gradient of W. The gradients that `Combine` multiplies have the factor of the loss scaling.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from fusedmoe.ops import Combine, GroupedLinear, Quantize, Scale
from fusedmoe.ops.grouped_lora import LoRADown, LoRAUp
from fusedmoe.ops.op import Node

_LINEAR = GroupedLinear, LoRADown, LoRAUp, Quantize  # in the rows, if they add no bias


def applied_late(nodes: Sequence[Node], dtype: torch.dtype, absent: Collection[str]) -> tuple[Node, ...]:
    """Return the chain for rows in this dtype: in fp16, a `Combine` without weights applies those of a `Scale` before
    it, if all ops between the two are linear. ``absent`` has the names of the parameters that are None.
    """
    result: list[Node | None] = [*nodes]
    for i, (_, op) in enumerate(nodes if dtype is torch.float16 else ()):
        if type(op) is not Scale:
            continue
        end = next((j for j in range(i + 1, len(nodes)) if not _is_linear(nodes[j], absent)), i)
        label, last = nodes[end]
        if type(last) is Combine and last.weights is None:
            result[i], result[end] = None, Node(label, last.weighted_by(op.name))
    return tuple(node for node in result if node is not None)


def _is_linear(node: Node, absent: Collection[str]) -> bool:
    has_bias = "bias" in node.op.parameter_names and f"{node.label}.bias" not in absent
    return type(node.op) in _LINEAR and not has_bias
