"""``dispatch_dtype``: tokens and gradients travel to the experts as FP8 codes; ``combine_dtype``: results in fp32.

The oracle is one process with the tokens of all ranks, which rounds tokens and gradients of results itself.
"""

import copy
from functools import partial

import pytest
import torch
from kit.compare import pairwise
from kit.expert_parallel_ranks import (
    E,
    Poisoned,
    compared,
    engine,
    experts,
    in_group,
    on_each,
    outcomes,
    pair,
    randn,
    ranks_of,
    result,
    routes,
)

import fusedmoe as fm

pytestmark = pytest.mark.distributed

HIDDEN, CHOSEN = 192, 3  # a row has one block and a half
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SCALE = torch.tensor([1.0] * 128 + [100.0] * 64)  # another one per block
EVEN, UNEVEN, EMPTY_RANK = (7, 7, 7, 7), (5, 1, 9, 3), (0, 6, 2, 4)


def rounded(t):
    """The definition, written out: the scale of 128 values is the least power of two with which none is over 448."""
    blocks = [block.double() for block in t.split(128, dim=-1)]
    scales = [2 ** (block.abs().amax(-1, keepdim=True) / 448).log2().ceil() for block in blocks]
    found = [(block / scale).to(FP8).double() * scale for block, scale in zip(blocks, scales, strict=True)]
    return torch.cat(found, -1).to(t.dtype)


class Rounded(torch.autograd.Function):
    """Rounds in forward or in backward."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.forward_alone = forward
        return rounded(x) if forward else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.forward_alone else rounded(grad), None


def plain(layer, x, **given):
    return layer(x * SCALE.to(x.dtype), **given)


def rounding(layer, x, **given):
    return Rounded.apply(layer(Rounded.apply(x * SCALE.to(x.dtype), True), **given), False)


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@on_each
def compare(ep, tokens, dtype, weights, within, kind=None):
    """Compare with the oracle; return the effect of rounding on each tensor."""
    tokens = tokens[: ep.ranks]
    make = partial(experts, weights=weights, hidden=HIDDEN, wide=32, bias=False)
    whole, local = pair(ep, make, dtype, std=0.2)
    inputs = routes(tokens, top_k=CHOSEN, of=dtype)
    results = []
    for call in (rounding, plain):
        layer = copy.deepcopy(whole)
        x, dy = (randn(sum(tokens), HIDDEN, seed=seed, dtype=dtype) for seed in (1, 2))
        found = result(layer, x, dy, inputs(slice(0, len(x))), call)
        results.append(found | {name: p.grad for name, p in layer.named_parameters()})

    def call(layer, x, **given):
        return (rounding if layer is whole else plain)(layer, x, **given)

    with engine(ep, kind):
        got, want = outcomes(ep, whole, local, tokens, inputs=inputs, dtype=dtype, hidden=HIDDEN, call=call)
    compared(got, want, within=within)
    return [relative(found, without) for found, without in zip(*(r.values() for r in results), strict=True)]


@pytest.mark.parametrize(("size", "settings", "tokens", "weights"), pairwise(
    (2, 4), ({"engine": "allgather"}, {"max_tokens": 9}, {"engine": "alltoall"}), (EVEN, UNEVEN, EMPTY_RANK),
    (None, "probs"),
), ids=str)  # fmt: skip
def test_tokens_and_gradients_are_rounded(four, size, settings, tokens, weights):
    settings = settings | {"dispatch_dtype": FP8}
    for effects in four.run(compare, size, settings, tokens, torch.float32, weights, 2e-6)[:size]:
        assert all(0.01 < effect < 0.1 for effect in effects), effects  # of the option


@pytest.mark.parametrize(("size", "name"), [(2, "alltoall"), (4, "allgather")])
def test_bf16(four, size, name):
    four.run(compare, size, {"engine": name, "dispatch_dtype": FP8}, UNEVEN, BF16, None, 1e-2)


def test_padding_may_hold_nan(four):
    four.run(compare, 4, {"max_tokens": 9, "dispatch_dtype": FP8}, UNEVEN, torch.float32, None, 2e-6, Poisoned)


@in_group(size=2, settings={"dispatch_dtype": FP8})
def test_other_dtypes_are_refused(ep):
    with pytest.raises(
        fm.InputError, match=r"dispatch_dtype .*: expected tokens in fp32, bf16 or fp16, got torch.float64"
    ):
        experts(ep).double()(randn(3, 16, seed=1), **routes((3,))(slice(0, 3)))


# ---- combine_dtype --------------------------------------------------------------------------------------------------


@on_each
def weighted_sums(ep):
    """Dispatch and Combine alone, which round nothing else: the error with this combine_dtype, and without."""
    x, given = randn(24, HIDDEN, seed=ep.rank, dtype=BF16), routes((24,), top_k=4, of=torch.float32)(slice(0, 24))
    given["expert_weight"] = given["expert_weight"].detach().abs() + 0.1
    index, weight = given["expert_index"], given["expert_weight"]
    exact = torch.where((index >= 0) & (index < E), weight, 0).double().sum(1, keepdim=True) * x.double()
    errors = []
    for of in (ep, ranks_of(ep.ranks, {"engine": ep.engine.name})):
        layer = fm.Sequential(fm.Dispatch(E, expert_parallel=of), fm.Combine("probs", expert_parallel=of))
        y = layer(x, **given)
        assert y.dtype is BF16
        errors.append(relative(y, exact))
    return errors


@pytest.mark.parametrize(("size", "name"), [(2, "allgather"), (4, "alltoall")])
def test_sums_in_fp32_are_rounded_once(four, size, name):
    for fine, coarse in four.run(weighted_sums, size, {"engine": name, "combine_dtype": torch.float32})[:size]:
        assert 0 < fine < 0.95 * coarse < 0.01
