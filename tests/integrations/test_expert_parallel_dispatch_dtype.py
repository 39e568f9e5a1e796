"""``dispatch_dtype``: tokens and gradients travel to the experts as FP8 codes, on two and four processes with gloo.

The oracle is one process with the tokens of all ranks, which rounds tokens and gradients of results itself.
"""

from functools import partial

import pytest
import torch
from kit.expert_parallel_ranks import bounds, randn, shard_of, summed_gradients
from kit.two_ranks import Ranks
from torch import nn

import fusedmoe as fm

HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 192, 32, 8, 3  # a row has one block and a half
FP8 = torch.float8_e4m3fn
TOKENS = {"even": (7, 7, 7, 7), "uneven": (5, 1, 9, 3), "none on one rank": (0, 6, 2, 4)}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("dispatch_dtype"), request.param)
    yield started
    started.stop()


def rounded(t):
    """The definition, written out: the scale of 128 values is the least power of two with which none is over 448."""
    blocks = [block.double() for block in t.split(128, dim=-1)]
    scales = [2 ** (block.abs().amax(-1, keepdim=True) / 448).log2().ceil() for block in blocks]
    found = [(block / scale).to(FP8).double() * scale for block, scale in zip(blocks, scales, strict=True)]
    return torch.cat(found, -1).to(t.dtype)


class Rounded(torch.autograd.Function):
    """Rounds in forward."""

    @staticmethod
    def forward(ctx, x):
        return rounded(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class RoundedGradient(torch.autograd.Function):
    """Rounds in backward."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return rounded(grad)


class Experts(nn.Module):
    def __init__(self, ep, dtype, weights, rounds=False):
        super().__init__()
        here = EXPERTS if ep is None else EXPERTS // ep.ranks
        scaled = [fm.Scale("probs")] if weights is None else []
        self.rounds = rounds
        self.chain = fm.Sequential(
            fm.Dispatch(EXPERTS, expert_parallel=ep),
            fm.GroupedLinear(here, HIDDEN, 2 * INTERMEDIATE, bias=False, dtype=dtype),
            fm.SwiGLU(),
            *scaled,
            fm.GroupedLinear(here, INTERMEDIATE, HIDDEN, bias=False, dtype=dtype),
            fm.Combine(weights, expert_parallel=ep),
        )

    def forward(self, x, **given):
        if not self.rounds:
            return self.chain(x, **given)
        return RoundedGradient.apply(self.chain(Rounded.apply(x), **given))


def outcomes(layer, x, dy, index, weight):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = layer(x, expert_index=index, expert_weight=weight)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad}


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def compare(rank, tokens, engine, most, dtype, weights):
    """Relative errors by name: against the oracle, and of the oracle against one process that rounds nothing."""
    ep = fm.ExpertParallel(engine=engine, max_tokens=most, dispatch_dtype=FP8)
    tokens = tokens[: ep.ranks]
    total, here = sum(tokens), bounds(ep, tokens)
    local, oracle, exact = (
        Experts(ep, dtype, weights),
        Experts(None, dtype, weights, True),
        Experts(None, dtype, weights),
    )
    for i, (p, theirs, third) in enumerate(
        zip(local.parameters(), oracle.parameters(), exact.parameters(), strict=True)
    ):
        for whole in (theirs, third):
            whole.data.copy_(randn(*whole.shape, seed=i, dtype=dtype) * 0.2)
        p.data.copy_(shard_of(ep, theirs.data, p))
    x, dy = (randn(total, HIDDEN, seed=seed, dtype=dtype) for seed in (10, 11))
    x[:, 128:] *= 100  # another scale per block
    generator = torch.Generator().manual_seed(12)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(total)])
    index[1] = -1
    weight = torch.rand(total, CHOSEN, generator=generator).to(dtype) + 0.1
    want, unrounded = outcomes(oracle, x, dy, index, weight), outcomes(exact, x, dy, index, weight)
    got = outcomes(local, x[here], dy[here], index[here], weight[here])
    of_weights = summed_gradients(ep, oracle, local)
    mine, theirs, third = (dict(made.named_parameters()) for made in (local, oracle, exact))
    errors, effects = {}, {}
    for name, t in got.items():
        if tokens[rank]:
            errors[name], effects[name] = relative(t, want[name][here]), relative(want[name], unrounded[name])
    for name, t in of_weights.items():
        expected = shard_of(ep, theirs[name].grad, mine[name])
        assert expected.abs().sum() > 0
        errors[name], effects[name] = relative(t, expected), relative(theirs[name].grad, third[name].grad)
    return errors, effects


@pytest.mark.parametrize("engine", ["allgather", "alltoall"])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_tokens_and_gradients_are_rounded(ranks, tokens, engine):
    for most in (None, 9) if engine == "allgather" else (None,):
        for weights in (None, "probs"):
            for errors, effects in ranks.run(compare, tokens, engine, most, torch.float32, weights):
                assert max(errors.values()) < 2e-6, errors
                assert all(0.01 < effect < 0.1 for effect in effects.values()), effects  # of the option


@pytest.mark.parametrize("engine", ["allgather", "alltoall"])
def test_bf16(ranks, engine):
    for errors, effects in ranks.run(compare, TOKENS["uneven"], engine, None, torch.bfloat16, None):
        assert max(errors.values()) < 1e-2, errors
        assert min(effects.values()) > 1e-2


def poisoned(rank):
    """The rows of the other ranks after their tokens hold NaN."""
    ep = fm.ExpertParallel(engine="allgather", max_tokens=9, dispatch_dtype=FP8)
    start = ep.engine.start_gather

    def filled(tensors, rows, wanted=None, lend=False, told=None):
        given = []
        for t in tensors:
            out = torch.full((rows, *t.shape[1:]), 0xFF, dtype=torch.uint8 if t.element_size() == 1 else t.dtype)
            if t.is_floating_point():
                out = out.view(t.dtype) if t.element_size() == 1 else out.fill_(torch.nan)
            else:
                out.fill_(-1)
            out[: t.shape[0]] = t
            given.append(out)
        return start(given, rows, wanted, lend, told)

    ep.engine.start_gather = filled
    layer = Experts(ep, torch.float32, None)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2 + rank, HIDDEN, generator=generator)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(2 + rank)])
    found = outcomes(layer, x, torch.ones(2 + rank, HIDDEN), index, torch.ones(2 + rank, CHOSEN))
    tensors = [*found.values(), *(p.grad for p in layer.parameters())]
    return all(bool(t.isfinite().all()) for t in tensors), float(found["y"].norm())


def test_padding_may_hold_nan(ranks):
    for finite, norm in ranks.run(poisoned):
        assert finite
        assert norm > 0


def explained(rank, dtype):
    plain, fp8 = (fm.ExpertParallel(engine="allgather", max_tokens=9, dispatch_dtype=d) for d in (None, FP8))
    texts = []
    for ep in (plain, fp8):
        layer = fm.MoE(HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN, expert_parallel=ep, dtype=dtype)
        x = torch.empty(9, HIDDEN, dtype=dtype, requires_grad=True)
        plan = layer.explain(x)
        received = {label.rpartition(".")[2]: n for step in plan.plans[0].steps for label, n in step.received}
        texts.append((str(plan), received, repr(ep)))
    return texts


def test_explain_counts_the_bytes_of_codes_and_scales(ranks):
    size = len(ranks.run(partial(explained, dtype=torch.bfloat16)))
    for (plain, all_bytes, _), (text, few_bytes, shown) in ranks.run(explained, torch.bfloat16):
        rows = (size - 1) * 9
        saved = rows * (2 * HIDDEN - HIDDEN - 2 * 4)  # two scales per row
        assert all_bytes["GatherTokens"] - few_bytes["GatherTokens"] == saved
        assert all_bytes["DReturnTokens"] - few_bytes["DReturnTokens"] == saved
        assert all_bytes["ReturnTokens"] == few_bytes["ReturnTokens"] == rows * 2 * HIDDEN
        assert "rows travel to the experts as float8_e4m3fn" in " ".join(text.split())
        assert "float8" not in plain
        assert "dispatch_dtype=float8_e4m3fn" in shown


def test_a_recipe_quantizes_rounded_rows_to_the_same_values():
    x = randn(200, HIDDEN, seed=1, dtype=torch.bfloat16) * randn(200, 1, seed=2, dtype=torch.bfloat16).exp()
    once = fm.quantize(x, "fp8_block").dequantize()
    assert torch.equal(once, rounded(x))
    assert torch.equal(fm.quantize(once, "fp8_block").dequantize(), once)


def refused(rank):
    with pytest.raises(fm.InputError, match=r"dispatch_dtype: expected torch.float8_e4m3fn or None, got torch.int8"):
        fm.ExpertParallel(dispatch_dtype=torch.int8)
    layer = Experts(fm.ExpertParallel(engine="allgather", dispatch_dtype=FP8), torch.float64, None)
    given = {"expert_index": torch.zeros(3, 1, dtype=torch.int64), "expert_weight": torch.ones(3, 1)}
    with pytest.raises(
        fm.InputError, match=r"dispatch_dtype .*: expected tokens in fp32, bf16 or fp16, got torch.float64"
    ):
        layer(torch.zeros(3, HIDDEN, dtype=torch.float64), **given)
    return True


def test_other_dtypes_are_refused(ranks):
    assert all(ranks.run(refused))
