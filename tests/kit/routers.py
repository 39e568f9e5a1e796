"""Routers of models, their operands, and what their kernels are compared with: fp64."""

import torch
import torch.nn.functional as F

from fusedmoe.kernels.options import DEFAULT
from fusedmoe.kernels.sm90 import router as kernels
from fusedmoe.kernels.sm90.router import Choice
from fusedmoe.numerics.expert_rows import sort_by_expert
from kit.hopper import DEVICE
from kit.hopper_products import BF16, FP16, FP32
from kit.poison import nan_in_new_tensors

# (experts, choice, dtype of x, of the weight, of the bias)
CASES = {
    "qwen3": (128, Choice("softmax", 8), BF16, BF16, None),
    "gpt-oss": (32, Choice("topk_softmax", 4), BF16, BF16, BF16),
    "mixtral, fp16": (8, Choice("softmax", 2), FP16, FP16, None),
    "qwen2, fp32 weight": (60, Choice("softmax", 4, renormalize=False, scale=2.5), BF16, FP32, FP32),
    "deepseek-v3": (256, Choice("sigmoid", 8, True, 2.5, 8, 4, corrected=True), BF16, FP32, None),
    "deepseek-v2": (64, Choice("softmax", 6, False, 1.0, 8, 3), BF16, BF16, None),
    "qwen3-next": (512, Choice("softmax", 10), BF16, BF16, None),
    "llama-4": (16, Choice("sigmoid", 1, renormalize=False), BF16, BF16, FP32),
    "corrected softmax": (128, Choice("softmax", 9, corrected=True), BF16, BF16, BF16),
    "corrected topk": (24, Choice("topk_softmax", 2, corrected=True), BF16, BF16, None),
    "odd": (7, Choice("sigmoid", 7), BF16, BF16, None),
    "odd, fp32 weight": (129, Choice("softmax", 3), BF16, FP32, FP32),
}


def operands(case, tokens, hidden):
    experts, choice, dtype, of_weight, of_bias = case
    generator = torch.Generator(DEVICE).manual_seed(tokens + experts)

    def draw(*shape):
        return torch.randn(shape, device=DEVICE, generator=generator)

    x, weight = draw(tokens, hidden).to(dtype), (draw(experts, hidden) * hidden**-0.5).to(of_weight)
    bias = None if of_bias is None else draw(experts).to(of_bias)
    correction = draw(experts) * 0.1 if choice.corrected else None
    return x, weight, bias, correction


def routed(case, x, weight, bias, correction, sums=True):
    run = kernels.bind_router(x, weight, bias, case[1], sums, DEFAULT)
    with nan_in_new_tensors():
        return run(x, weight, bias, correction)


def exact_logits(x, weight, bias):
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def scores_of(logits, choice):
    return torch.sigmoid(logits) if choice.score == "sigmoid" else torch.softmax(logits, -1)


def values(logits, index, choice):
    """Weights, sum of the probabilities and sum of the squared logsumexp, for these choices."""
    scores = scores_of(logits, choice)
    if choice.score == "topk_softmax":
        weight = torch.softmax(logits.gather(1, index), -1)
    else:
        weight = scores.gather(1, index)
        if choice.renormalize:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    probs = scores / scores.sum(-1, keepdim=True)
    return weight * choice.scale, probs.sum(0), torch.logsumexp(logits, -1).square().sum()


def relative(got, want):
    return float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())


def check_choices(case, tokens):
    """Choices, weights, counts, sums of losses, and the places of slots."""
    experts, choice, *_ = case
    x, weight, bias, correction = operands(case, tokens, 512)
    index, weights, logits, counts, sums = routed(case, x, weight, bias, correction)
    exact = exact_logits(x, weight, bias)
    assert logits.shape == exact.shape
    assert relative(logits, exact) < 1e-6

    # all ids are different, in range, and the best; near the border, other choices are as good
    assert index.dtype is torch.int64
    assert ((index >= 0) & (index < experts)).all()
    assert (torch.diff(index.sort(-1).values, dim=-1) > 0).all()
    grouped = choice.top_groups < choice.num_groups
    by_scores = choice.score != "topk_softmax" and (choice.corrected or (grouped and choice.score == "sigmoid"))
    ranked, rounding = (scores_of(exact, choice), 1e-6) if by_scores else (exact, 1e-5)
    if correction is not None:
        ranked = ranked + correction.double()
    if grouped:
        by_group = ranked.unflatten(1, (choice.num_groups, -1))
        best = by_group.topk(2 if choice.score == "sigmoid" else 1, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter(1, best.topk(choice.top_groups, -1).indices, 1.0) > 0
        ranked = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = torch.zeros_like(ranked).scatter(1, index, 1.0)
    want = torch.zeros_like(ranked).scatter(1, ranked.topk(choice.top_k, -1).indices, 1.0)
    different = (chosen != want).any(-1)
    if grouped:
        assert different.sum() <= tokens / 1000
    elif choice.top_k < experts:
        border = ranked.sort(-1, descending=True).values
        gap = border[:, choice.top_k - 1] - border[:, choice.top_k]
        assert (gap[different] < rounding).all(), (
            f"{int(different.sum())} choices differ, by up to {gap[different].max()}"
        )

    # the largest first
    by_rank = ranked.gather(1, index)
    assert (torch.diff(by_rank[~different], dim=-1) <= rounding).all()

    want_weights, want_probs, want_squares = values(exact, index, choice)
    assert relative(weights, want_weights) < 3e-6
    assert relative(sums[:-1], want_probs) < 3e-6
    assert relative(sums[-1:], want_squares[None]) < 3e-6
    assert torch.equal(counts[:, :-1].sum(0), torch.bincount(index.flatten(), minlength=experts).int())
    assert not counts[:, -1].any()

    place = kernels.bind_route_counted(index, weights, experts)
    with nan_in_new_tensors():
        splits, probs, row_of_slot, slot_of_row, token_of_row, offsets = place(index, weights, counts)
    want_slot, want_row, want_splits = sort_by_expert(index, experts)
    assert torch.equal(splits, want_splits)
    assert torch.equal(offsets, want_splits.cumsum(0).int())
    assert torch.equal(row_of_slot, want_row)
    assert torch.equal(slot_of_row, want_slot)
    assert torch.equal(token_of_row, (want_slot // choice.top_k).int())
    assert torch.equal(probs, weights.flatten()[want_slot])
