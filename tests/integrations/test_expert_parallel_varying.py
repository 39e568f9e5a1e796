"""Expert parallelism with numbers of rows that vary, and sums in fp32: two and four processes with gloo."""

import pytest
import torch
from kit.two_ranks import Ranks
from torch import distributed as dist

import fusedmoe as fm

HIDDEN, WIDE, EXPERTS = 16, 24, 8


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("ranks"), request.param)
    started.size = request.param
    yield started
    started.stop()


# ---- the layer ----------------------------------------------------------------------------------------------------


def weights_of_all(dtype):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(shape[-1] ** -0.5).to(dtype)

    return draw(EXPERTS, 2 * WIDE, HIDDEN), draw(EXPERTS, HIDDEN, WIDE)


def inputs_of(case, rank, size, top_k, dtype):
    """Tokens, expert ids (with sentinels), weights and the gradient of the result, of one rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    tokens = {"empty": 0 if rank == 1 else 13, "none": 0}.get(case, 9 + 3 * rank)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    here = EXPERTS // size
    if case == "to one rank":  # no expert twice
        chosen = [torch.randperm(here, generator=generator)[:top_k] for _ in range(tokens)]
        index = torch.stack([torch.cat([ids, ids.new_full((top_k - len(ids),), -1)]) for ids in chosen])
    elif case == "no remote":
        index = rank * here + torch.randint(here, (tokens, top_k), generator=generator)
    else:
        index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)] or
                            [torch.zeros(top_k, dtype=torch.int64)])[:tokens]  # fmt: skip
        index[1:2] = -1
        index[2:3, 0] = EXPERTS
    weight = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64) + 0.1
    dy = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    return x.to(dtype), index, weight.to(torch.promote_types(dtype, torch.float32)), dy.to(dtype)


def experts_of(ep, combines, rank, size, dtype):
    here = EXPERTS // size
    combine = fm.Combine("probs" if combines else None, expert_parallel=ep)
    layer = fm.Sequential(
        fm.Dispatch(EXPERTS, expert_parallel=ep),
        fm.GroupedLinear(here, HIDDEN, 2 * WIDE, bias=False, dtype=dtype),
        fm.SwiGLU(),
        *([] if combines else [fm.Scale("probs")]),
        fm.GroupedLinear(here, WIDE, HIDDEN, bias=False, dtype=dtype),
        combine,
    )
    with torch.no_grad():
        for op, of_all in zip((layer[1], layer[-2]), weights_of_all(dtype), strict=True):
            op.weight.copy_(of_all[rank * here : (rank + 1) * here])
    return layer


def trained(rank, case, top_k, dtype, settings, combines=False):
    """The result and the gradients of x, the routing weight and the experts' weights, of each set of settings."""
    size = dist.get_world_size()
    results = []
    for setting in settings:
        ep = fm.ExpertParallel(**setting)
        layer = experts_of(ep, combines, rank, size, dtype)
        x, index, weight, dy = inputs_of(case, rank, size, top_k, dtype)
        x.requires_grad_()
        weight.requires_grad_()
        y = layer(x, expert_index=index, expert_weight=weight)
        y.backward(dy)
        results.append([y.detach(), x.grad, weight.grad, layer[1].weight.grad, layer[-2].weight.grad])
    return results


def expected(case, size, top_k, dtype):
    """The same in fp64 by plain loops over tokens, of all ranks' tokens: per rank as `trained`."""
    first, second = (w.to(torch.float64).requires_grad_() for w in weights_of_all(dtype))
    inputs = [inputs_of(case, rank, size, top_k, dtype) for rank in range(size)]
    leaves, ys = [], []
    for x, index, weight, _ in inputs:
        x, weight = (t.to(torch.float64).requires_grad_() for t in (x, weight))
        leaves.append((x, weight))
        rows = []
        for t in range(x.shape[0]):
            row = x[t] * 0
            for k, e in enumerate(index[t].tolist()):
                if 0 <= e < EXPERTS:
                    gate, up = (first[e] @ x[t]).chunk(2)
                    row = row + weight[t, k] * (second[e] @ (torch.nn.functional.silu(gate) * up))
            rows.append(row)
        ys.append(torch.stack(rows) if rows else x * 0)
    total = sum((y * dy.to(torch.float64)).sum() for y, (*_, dy) in zip(ys, inputs, strict=True))
    if total.requires_grad:
        total.backward()
    here = EXPERTS // size
    return [
        [
            y.detach(),
            *(t.new_zeros(t.shape) if t.grad is None else t.grad for t in (x, weight)),
            *(w.grad[r * here : (r + 1) * here] for w in (first, second)),
        ]
        for r, (y, (x, weight)) in enumerate(zip(ys, leaves, strict=True))
    ]


def same_bits(a, b):
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def error(got, wanted):
    """The relative error of all tensors together, of all ranks."""
    far = sum((g.to(torch.float64) - w).square().sum() for g, w in zip(got, wanted, strict=True))
    return float((far / sum(w.square().sum() for w in wanted)).sqrt())


# ---- alltoall -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("case", ["usual", "empty", "to one rank", "no remote"])
def test_alltoall(ranks, case, top_k):
    settings = [{"engine": "alltoall"}, {"engine": "allgather"}]
    wanted = expected(case, ranks.size, top_k, torch.float64)
    got = ranks.run(trained, case, top_k, torch.float64, settings)
    for (varying, static), right in zip(got, wanted, strict=True):
        for a, b, c in zip(varying, static, right, strict=True):
            assert same_bits(a, b)
            torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-11)
    assert sum(float(right[0].abs().sum()) for right in wanted) > 1, "the comparison would notice zeros"


def rows_of_experts(rank, top_k):
    """The rows of the local products, and the chosen slots of this rank's experts, of all ranks."""
    size = dist.get_world_size()
    layer = experts_of(fm.ExpertParallel(engine="alltoall"), False, rank, size, torch.float64)
    seen = []
    layer[1].register_forward_hook(lambda module, given, y: seen.append(y.shape[0]))
    x, index, weight, _ = inputs_of("usual", rank, size, top_k, torch.float64)
    layer(x, expert_index=index, expert_weight=weight)
    here = EXPERTS // size
    every = torch.cat([inputs_of("usual", r, size, top_k, torch.float64)[1].flatten() for r in range(size)])
    return seen, int(((every >= rank * here) & (every < (rank + 1) * here)).sum())


@pytest.mark.parametrize("top_k", [1, 3])
def test_alltoall_has_a_row_for_each_slot_that_arrives(ranks, top_k):
    for seen, slots in ranks.run(rows_of_experts, top_k):
        assert seen == [slots]
        assert slots > 0


@pytest.mark.parametrize("combines", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_alltoall_in_less_precision(ranks, dtype, combines):
    settings = [{"engine": "alltoall"}, {"engine": "allgather"}]
    for varying, static in ranks.run(trained, "usual", 2, dtype, settings, combines):
        assert all(same_bits(a, b) for a, b in zip(varying, static, strict=True))


def no_tokens_at_all(rank):
    return [[tuple(t.shape) for t in r] for r in trained(rank, "none", 2, torch.float32, [{"engine": "alltoall"}])]


def test_alltoall_without_tokens(ranks):
    for (shapes,) in ranks.run(no_tokens_at_all):
        assert shapes[:3] == [(0, HIDDEN), (0, HIDDEN), (0, 2)]


def explained(rank):
    """explain() on rank 0 alone: a collective would never end."""
    if rank:
        return None
    ep = fm.ExpertParallel(engine="alltoall")
    layer = experts_of(ep, False, rank, dist.get_world_size(), torch.float32)
    x, index, weight, _ = inputs_of("usual", rank, dist.get_world_size(), 2, torch.float32)
    inputs = {"expert_index": index, "expert_weight": weight}
    return [str(layer.explain(x, **inputs)), str(layer.explain(x, arch=90, **inputs))]


def test_explain_says_host_sync_and_does_not_communicate(ranks):
    for text in ranks.run(explained)[0]:
        assert text.count("the hosts read the numbers of rows that travel: HOST SYNC") == 1, text


def chosen_engines(rank):
    ep = fm.ExpertParallel()
    layers = [fm.MoE(8, 4, EXPERTS, k, renormalize=False, expert_parallel=ep) for k in (1, dist.get_world_size())]
    x = torch.randn(5 + rank, 8)
    for layer in layers:
        layer(x).sum().backward()
        assert layer.router.weight.grad.abs().sum() > 0
    return [layer.experts.dispatch.expert_parallel.engine.name for layer in layers] + [ep.engine.name]


def test_auto_takes_alltoall_for_few_experts_per_token(ranks):
    assert ranks.run(chosen_engines)[0] == ["alltoall", "allgather", "allgather"]


# ---- combine_dtype ------------------------------------------------------------------------------------------------


def weighted_sums(rank, engine):
    """Dispatch and Combine alone, which round nothing else: the error of each combine_dtype."""
    size = dist.get_world_size()
    x, index, weight, _ = inputs_of("usual", rank, size, 4, torch.bfloat16)
    chosen = torch.where((index >= 0) & (index < EXPERTS), weight, 0).to(torch.float64)
    right = chosen.sum(1, keepdim=True) * x.to(torch.float64)
    errors = []
    for dtype in (torch.float32, None):
        ep = fm.ExpertParallel(engine=engine, combine_dtype=dtype)
        layer = fm.Sequential(fm.Dispatch(EXPERTS, expert_parallel=ep), fm.Combine("probs", expert_parallel=ep))
        y = layer(x, expert_index=index, expert_weight=weight)
        assert y.dtype is torch.bfloat16
        errors.append(error([y], [right]))
    return errors


@pytest.mark.parametrize("engine", ["alltoall", "allgather"])
def test_sums_in_fp32_are_rounded_once(ranks, engine):
    for fine, coarse in ranks.run(weighted_sums, engine):
        assert 0 < fine < 0.95 * coarse < 0.01


@pytest.mark.parametrize("combines", [False, True])
@pytest.mark.parametrize("engine", ["alltoall", "allgather"])
def test_gradients_of_sums_in_fp32(ranks, combines, engine):
    settings = [{"engine": engine, "combine_dtype": dtype} for dtype in (torch.float32, None)]
    for fine, coarse in ranks.run(trained, "usual", 4, torch.bfloat16, settings, combines):
        assert fine[0].dtype is coarse[0].dtype
        assert all(same_bits(a, b) for a, b in zip(fine[1:], coarse[1:], strict=True)), "gradients travel as before"


def test_combine_dtype_is_checked(ranks):
    ranks.run(wrong_combine_dtype)


def wrong_combine_dtype(rank):
    with pytest.raises(fm.InputError, match=r"combine_dtype: expected torch.float32 or None, got torch.float16"):
        fm.ExpertParallel(combine_dtype=torch.float16)
