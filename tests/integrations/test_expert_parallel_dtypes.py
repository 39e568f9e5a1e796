"""``dispatch_dtype``: tokens and gradients travel to the experts as FP8 codes; ``combine_dtype``: results in fp32.

The oracle is one process with the tokens of all ranks, which rounds tokens and gradients of results itself.
"""

import copy
from functools import partial

import pytest
import torch
from kit.compare import assert_bitwise, pairwise
from kit.expert_parallel_ranks import (
    E,
    Poisoned,
    bounds,
    compared,
    engine,
    experts,
    in_group,
    moe,
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


@on_each
def explained(ep):
    texts = []
    for each in (ranks_of(ep.ranks, 9), ep):
        plan = moe(each, hidden=HIDDEN, dtype=BF16).explain(torch.empty(9, HIDDEN, dtype=BF16, requires_grad=True))
        received = {label.rpartition(".")[2]: n for step in plan.plans[0].steps for label, n in step.received}
        texts.append((" ".join(str(plan).split()), received, repr(each)))
    return texts


def test_explain_counts_the_bytes_of_codes_and_scales(four):
    rows = (4 - 1) * 9
    saved = rows * (2 * HIDDEN - HIDDEN - 2 * 4)  # two scales per row
    for (without, all_bytes, _), (text, few_bytes, shown) in four.run(
        explained, 4, {"max_tokens": 9, "dispatch_dtype": FP8}
    ):
        assert all_bytes["GatherTokens"] - few_bytes["GatherTokens"] == saved
        assert all_bytes["DReturnTokens"] - few_bytes["DReturnTokens"] == saved
        assert all_bytes["ReturnTokens"] == few_bytes["ReturnTokens"] == rows * 2 * HIDDEN
        assert "rows travel to the experts as float8_e4m3fn" in text
        assert "float8" not in without
        assert "dispatch_dtype=float8_e4m3fn" in shown


def test_a_recipe_quantizes_rounded_rows_to_the_same_values():
    x = randn(200, HIDDEN, seed=1, dtype=BF16) * randn(200, 1, seed=2, dtype=BF16).exp()
    once = fm.quantize(x, "fp8_block").dequantize()
    assert torch.equal(once, rounded(x))
    assert torch.equal(fm.quantize(once, "fp8_block").dequantize(), once)


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


@pytest.mark.parametrize(("size", "settings", "weights"), [
    (2, {"engine": "allgather", "combine_dtype": torch.float32}, "probs"),
    (4, {"engine": "alltoall", "combine_dtype": torch.float32}, None),
])  # fmt: skip
@in_group()
def test_gradients_of_sums_in_fp32(ep, weights):
    """With this combine_dtype, and without: gradients travel as before."""
    tokens, results = UNEVEN[: ep.ranks], []
    here = bounds(ep, tokens)
    x, dy = (randn(sum(tokens), 16, seed=seed, dtype=BF16)[here] for seed in (1, 2))
    for of in (ep, ranks_of(ep.ranks, {"engine": ep.engine.name})):
        _, local = pair(of, partial(experts, weights=weights, bias=False), BF16)
        found = result(local, x, dy, routes(tokens, of=torch.float32)(here))
        assert found.pop("y").dtype is BF16
        results.append(found | {name: p.grad for name, p in local.named_parameters()})
    assert_bitwise(*results, zeros=True)
