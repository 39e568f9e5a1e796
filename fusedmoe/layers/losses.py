"""Router losses as other projects define them; `MoEStats` has those of this project.

Axes: T tokens, E experts, K chosen experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fusedmoe.base.autocast import without_autocast
from fusedmoe.base.checks import FLOATS, POSITIVE_INTEGER, TENSOR
from fusedmoe.base.errors import InputError


def transformers_load_balancing_loss(
    router_logits: Iterable[Tensor], top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """``E * sum over e of f[e] * p[e]``: the ``load_balancing_loss_func`` of Hugging Face transformers.

    ``f[e]`` is the number of rows that expert e gets, divided by the number of tokens, and ``p[e]`` is its mean
    probability. Both are means over the tokens of all layers together. The loss is K for an even load.

    For one layer whose router has ``score="softmax"``, this is K times `MoEStats.load_balancing_loss`. For several
    layers it is not K times the sum or the mean of their losses, since an imbalance in one layer may offset that in
    another.

    Returns 0-d, fp32 (fp64 for fp64 logits), on the device of the first layer. Gradients flow through p. The loss is
    zero if all tokens are padding.

    Raises `InputError`: ``router_logits`` is empty, the logits are not floats, or the shapes do not match.

    Parameters
    ----------
    router_logits
        (T, E) per layer: ``[stats.logits for stats in ...]`` of `MoEStats`, or the ``router_logits`` of a transformers
        model. The K largest logits determine the chosen experts.
    top_k
        K.
    attention_mask
        Any shape with T elements: 1 for a token, 0 for padding. None counts every token.
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
            f"{name}: expected router_logits of shape (tokens, experts) and a top_k of at most the number of experts, "
            f"got {tuple(first.shape)} and {top_k}"
        )
    exact = torch.promote_types(first.dtype, torch.float32)
    counts_T1 = torch.ones(len(first), 1, dtype=exact, device=first.device)
    if attention_mask is not None:
        TENSOR(f"{name}: attention_mask", attention_mask)
        if attention_mask.numel() != len(first):
            raise InputError(
                f"{name}: attention_mask: expected {len(first)} elements, one per token, got shape "
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
