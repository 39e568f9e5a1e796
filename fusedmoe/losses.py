"""Losses of routers as other projects define them. Those of this project are in `MoEStats`.

Axes: T tokens, E experts, K chosen experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fusedmoe.autocast import without_autocast
from fusedmoe.checks import FLOATS, POSITIVE_INTEGER, TENSOR
from fusedmoe.errors import InputError


def transformers_load_balancing_loss(
    router_logits: Iterable[Tensor], top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """``E * sum over e of f[e] * p[e]``: the ``load_balancing_loss_func`` of Hugging Face transformers.

    ``f[e]`` is the number of rows that expert e gets, divided by the number of tokens, and ``p[e]`` is its mean
    probability. Both are means over the tokens of all layers together. Where the load is even, the loss is K.

    For one layer whose router has ``score="softmax"``, this is K times `MoEStats.load_balancing_loss`. For several
    layers it is K times neither the sum nor the mean of their losses: a layer may balance another one here.

    Parameters
    ----------
    router_logits
        (T, E) of each layer: ``[stats.logits for stats in ...]`` of `MoEStats`, or the ``router_logits`` of a model of
        transformers. The experts that count as chosen are the K largest logits.
    top_k
        K.
    attention_mask
        Any shape with T elements: 1 for a token that counts, 0 for padding. None counts every token.

    Returns
    -------
    Tensor
        0-d, fp32 (fp64 for fp64 logits), on the device of the first layer. Gradients flow through p. It is zero where
        no token counts.

    Raises
    ------
    InputError
        There is no layer, the logits are not floats, or the shapes do not fit together.
    """
    name = "transformers_load_balancing_loss"
    iterable = hasattr(router_logits, "__iter__") and not isinstance(router_logits, Tensor)
    layers = list(router_logits) if iterable else []
    if not layers:
        raise InputError(f"{name}: router_logits: expected a sequence of tensors, one for each layer")
    for i, logits_TE in enumerate(layers):
        FLOATS(f"{name}: router_logits[{i}]", TENSOR(f"{name}: router_logits[{i}]", logits_TE).dtype)
    first: Tensor = layers[0]
    POSITIVE_INTEGER(f"{name}: top_k", top_k)
    if first.dim() != 2 or not 1 <= top_k <= first.shape[1]:
        raise InputError(
            f"{name}: expected router_logits of shape (tokens, experts) and a top_k of at most as many experts, got "
            f"{tuple(first.shape)} and {top_k}"
        )
    exact = torch.promote_types(first.dtype, torch.float32)
    counts_T1 = torch.ones(len(first), 1, dtype=exact, device=first.device)
    if attention_mask is not None:
        TENSOR(f"{name}: attention_mask", attention_mask)
        if attention_mask.numel() != len(first):
            raise InputError(
                f"{name}: attention_mask: expected {len(first)} elements, one for each token, got shape "
                f"{tuple(attention_mask.shape)}"
            )
        counts_T1 = attention_mask.reshape(-1, 1).to(counts_T1)
    load_E = prob_E = first.new_zeros(first.shape[1], dtype=exact)
    with without_autocast(first.device):
        for i, logits_TE in enumerate(layers):
            if logits_TE.shape != first.shape:
                raise InputError(
                    f"{name}: router_logits[{i}]: expected shape {tuple(first.shape)}, that of the first layer, got "
                    f"{tuple(logits_TE.shape)}"
                )
            prob_TE = torch.softmax(logits_TE.to(first.device, exact), dim=-1)
            chosen_TE = torch.zeros_like(prob_TE).scatter(1, prob_TE.detach().topk(top_k, dim=-1).indices, 1)
            load_E = load_E + (chosen_TE * counts_T1).sum(0)
            prob_E = prob_E + (prob_TE * counts_T1).sum(0)
        tokens = (counts_T1.sum() * len(layers)).clamp(min=1)
        return first.shape[1] * (load_E / tokens * (prob_E / tokens)).sum()
