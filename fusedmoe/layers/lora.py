"""LoRA on stacked experts: a frozen grouped linear layer with a trained low-rank update.

Axes: R rows, E experts (groups), K features in, N features out, Q the rank.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from fusedmoe.base.checks import FINITE, PARAMETER_DTYPE, POSITIVE_INTEGER
from fusedmoe.base.errors import InputError
from fusedmoe.layers.sequential import Sequential
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.grouped_lora import LoRADown, LoRAUp
from fusedmoe.ops.op import exact


class GroupedLoRA(Sequential):
    """``y[r] = x[r] @ weight[e].T + bias[e] + alpha / rank * (x[r] @ A[e].T) @ B[e].T`` for each row r of expert e.

    The `GroupedLinear` is frozen, and the low-rank update is trained. B is initialised with zeros, so that the update
    starts as zero.

    Called like the layer: with rows (R, K) and ``splits=``. It is a `Sequential` of ``lora_A``, ``base_layer`` and
    ``lora_B``. The layer keeps its fused kernels, except fusion with the activation after it, since the update comes
    between the two. Its weight gradient is computed only if the weight requires one. A recipe quantizes only the layer,
    not A, B and the rows that they are multiplied by.

    ``state_dict`` has ``base_layer.weight``, ``base_layer.bias``, ``lora_A.weight`` and ``lora_B.weight``. A checkpoint
    of the bare layer loads with ``strict=False``, since it has no A and B.

    Parameters
    ----------
    layer
        The layer. It becomes part of this module, without a copy, and its weight and bias are frozen.
    rank
        Q. With bf16, a multiple of 8 lets the update run on a GPU without a host synchronisation.
    alpha
        The update is scaled by ``alpha / rank``; by 1 if None.
    dtype
        Dtype of A and B, by default that of the layer's weight, or torch's default dtype if the layer has a
        ``weight_format``. Products cast A and B to the dtype of the rows, as autocast does. So fp32 with bf16 rows
        keeps full precision for the optimizer and changes no product.

    Attributes
    ----------
    base_layer : GroupedLinear
        The layer. ``base_layer.requires_grad_()`` trains it too.
    lora_A : LoRADown
        ``lora_A.weight`` (E, Q, K).
    lora_B : LoRAUp
        ``lora_B.weight`` (E, N, Q).

    Examples
    --------
    >>> experts = Sequential(
    ...     GroupedLoRA(GroupedLinear(8, 64, 2 * 32), rank=8, alpha=16), SwiGLU(),
    ...     GroupedLoRA(GroupedLinear(8, 32, 64), rank=8, alpha=16),
    ... )
    """

    lora_A: LoRADown  # noqa: N815  (the names of peft)
    base_layer: GroupedLinear
    lora_B: LoRAUp  # noqa: N815

    def __init__(
        self, layer: GroupedLinear, rank: int, alpha: float | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        if type(layer) is not GroupedLinear:
            raise InputError(f"GroupedLoRA: layer: expected a GroupedLinear, got {layer!r}")
        PARAMETER_DTYPE("GroupedLoRA: dtype", dtype)
        rank = POSITIVE_INTEGER("GroupedLoRA: rank", rank)
        scale = 1.0 if alpha is None else FINITE("GroupedLoRA: alpha", alpha) / rank
        own = layer.weight.dtype if layer.weight_format is None else None
        kind: dict[str, Any] = {"device": layer.weight.device, "dtype": own if dtype is None else dtype}
        kind["expert_parallel"] = layer.expert_parallel
        super().__init__(
            OrderedDict(
                lora_A=LoRADown(layer.num_groups, layer.in_features, rank, **kind),
                base_layer=layer.requires_grad_(False),
                lora_B=LoRAUp(layer.num_groups, rank, layer.out_features, scale, **kind),
            )
        )

    def reset_lora(self) -> None:
        """Draw a new A, and set B to zeros."""
        self.lora_A.reset_parameters()
        self.lora_B.reset_parameters()

    @torch.no_grad()
    def merged(self) -> GroupedLinear:
        """Return a new layer with the weight ``weight[e] + alpha / rank * B[e] @ A[e]``, rounded once.

        A weight with a ``weight_format`` is dequantized for it: the new layer's weight has the dtype of A.
        """
        base, scale = self.base_layer, self.lora_B.scale
        weight = base.weight.clone() if base.weight_format is None else base.dequantized(self.lora_A.weight.dtype)
        # one expert at a time, to hold only one in fp32
        for e, (a, b) in enumerate(zip(self.lora_A.weight, self.lora_B.weight, strict=True)):
            into = exact(weight[e])
            weight[e] = torch.addmm(into, b.to(into.dtype), a.to(into.dtype), alpha=scale)
        layer = GroupedLinear(
            base.num_groups,
            base.in_features,
            base.out_features,
            bias=base.bias is not None,
            device="meta",
            accumulate_into_main_grad=base.accumulate_into_main_grad,
            recipe=base.recipe,
            expert_parallel=base.expert_parallel,
        )
        layer.weight = nn.Parameter(weight)
        layer.bias = None if base.bias is None else nn.Parameter(base.bias.clone())
        return layer.train(self.training)

    def __getitem__(self, idx: int | slice) -> Any:
        if isinstance(idx, slice):  # the constructor of a GroupedLoRA takes no modules
            return Sequential(OrderedDict([*self._modules.items()]))[idx]
        return super().__getitem__(idx)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):  # a checkpoint of the bare layer
            if prefix + name in state_dict:
                state_dict[f"{prefix}base_layer.{name}"] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)
