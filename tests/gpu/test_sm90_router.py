"""The router on Hopper: its kernels against autograd in fp64, between NaN; its place in a layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from kit.hopper import DEVICE, needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors
from test_async import capture

import fusedmoe as fm
from fusedmoe.kernels.options import DEFAULT
from fusedmoe.kernels.rows.move.slot_functions import bind_sum_slots
from fusedmoe.kernels.sm90 import launch
from fusedmoe.kernels.sm90 import router as kernels
from fusedmoe.kernels.sm90.router import Choice, LogitsGrads
from fusedmoe.numerics.expert_rows import sort_by_expert

pytestmark = needs_hopper

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

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
CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def operands(case, tokens, hidden, device):
    experts, choice, dtype, of_weight, of_bias = case
    generator = torch.Generator(device).manual_seed(tokens + experts)

    def draw(*shape):
        return torch.randn(shape, device=device, generator=generator)

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


@pytest.mark.parametrize("tokens", [1, 33, 5000])
@CASE
def test_choices_weights_counts_and_sums(device, case, tokens):
    experts, choice, *_ = case
    x, weight, bias, correction = operands(case, tokens, 512, device)
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


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "gpt-oss"])
def test_logits_are_as_accurate_as_in_fp32(device, name):
    case = CASES[name]
    x, weight, bias, correction = operands(case, 4096, 4096, device)
    exact = exact_logits(x, weight, bias)
    plain = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    logits = routed(case, x, weight, bias, correction, sums=False).logits
    ours, theirs = relative(logits, exact), relative(plain, exact)
    assert ours <= 2 * theirs, (ours, theirs)


def incoming(case, tokens, logits, index, others, device):
    generator = torch.Generator(device).manual_seed(1)
    experts, choice = case[:2]
    shapes = (tokens, choice.top_k), (tokens, experts), (experts,), ()
    return [
        torch.randn(shape, device=device, generator=generator) if i == 0 or others else None
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("others", [False, True], ids=["weights alone", "all gradients"])
@pytest.mark.parametrize("tokens", [1, 33, 5000])
@CASE
def test_gradients(device, case, tokens, others):
    experts, choice, dtype, of_weight, _ = case
    if dtype is FP16:
        pytest.skip("forward only")
    x, weight, bias, correction = operands(case, tokens, 512, device)
    index, weights, logits, counts, _ = routed(case, x, weight, bias, correction)
    row_of_slot = kernels.bind_route_counted(index, weights, experts)(index, weights, counts)[2]
    g, *rest = incoming(case, tokens, logits, index, others, device)
    rows = torch.empty(g.numel(), device=device)
    rows[row_of_slot.flatten()] = g.flatten()

    leaf = logits.double().requires_grad_()
    w, probs, squares = values(leaf, index, choice)
    loss = (w * g).sum()
    if others:
        loss = loss + (leaf * rest[0]).sum() + (probs * rest[1]).sum() + squares * rest[2]
    (want,) = torch.autograd.grad(loss, leaf)

    blocks = kernels.blocks_for(of_weight)
    groups = kernels.weight_groups(tokens, experts, 512, of_weight)
    results = []
    for of_rows in (False, True):
        grads = LogitsGrads(rows if of_rows else g, row_of_slot if of_rows else None, *rest)
        run = kernels.bind_logits_grad(logits, grads, choice, blocks, groups, True, not of_rows, weight)
        with nan_in_new_tensors():
            results.append(run(logits, index, grads, weight))
    (parts, ends, sums, whole, tall), again = results
    assert torch.equal(parts, again.parts)
    assert torch.equal(tall, again.weight)
    assert torch.equal(sums, again.sums)
    assert ends[-1] == tokens
    # a sum of terms that cancel: its size is that of the terms
    size = want.norm() + (0 if choice.top_k > 1 or choice.score == "sigmoid" else g.double().norm())
    assert (whole.double() - want).norm() < 1e-5 * size
    wide = parts.unflatten(1, (len(blocks), -1))
    assert not wide[..., experts:].any()
    split = wide[..., :experts].double()
    split = split[:, 1:] if of_weight is FP32 else split
    assert relative(split.sum(1), whole) < (1e-7 if of_weight is FP32 else 2**-15)
    assert relative(sums, whole.double().sum(0)) < 1e-5 or sums.norm() < 1e-4 * whole.norm()

    with nan_in_new_tensors():
        dx = kernels.bind_router_dgrad(parts, weight, DEFAULT)(parts, ends, tall)
        dw = kernels.bind_router_wgrad(parts, x, experts, groups, of_weight, DEFAULT)(parts, ends, x)
    plain_dx, plain_dw = (whole @ weight.float()).to(dtype), (whole.T @ x.float()).to(of_weight)
    for got, plain, exact in (
        (dx, plain_dx, whole.double() @ weight.double()),
        (dw, plain_dw, whole.double().T @ x.double()),
    ):
        assert got.dtype is plain.dtype
        assert relative(got, exact) <= 1.5 * max(relative(plain, exact), 3e-7)


def test_only_the_gradients_of_losses(device):
    """No gradient of the weights arrives, as for a router whose experts are frozen and whose rows are not read."""
    case = CASES["qwen3"]
    x, weight, bias, correction = operands(case, 300, 256, device)
    index, _, logits, *_ = routed(case, x, weight, bias, correction)
    z = torch.ones((), device=device)
    grads = LogitsGrads(None, None, None, None, z)
    whole = kernels.bind_logits_grad(logits, grads, case[1], (), 1, False, True, None)(logits, index, grads).whole
    leaf = logits.double().requires_grad_()
    (want,) = torch.autograd.grad(torch.logsumexp(leaf, -1).square().sum(), leaf)
    assert relative(whole, want) < 1e-5


@pytest.mark.parametrize("blocks", [(0, 1), (0, 0, 1, 2)], ids=str)
def test_infinite_gradients_stay_infinite_in_parts(device, blocks):
    case = CASES["qwen3"]
    experts = case[0]
    x, weight, bias, correction = operands(case, 40, 256, device)
    index, _, logits, *_ = routed(case, x, weight, bias, correction)
    direct = torch.ones_like(logits)
    direct[3, 5], direct[20, 6], direct[31, 0], direct[39, 1] = torch.inf, -torch.inf, torch.nan, 3.4e38
    grads = LogitsGrads(None, None, direct, None, None)
    of_parts = weight if blocks == (0, 1) else None  # a weight in bf16
    run = kernels.bind_logits_grad(logits, grads, case[1], blocks, 1, False, True, of_parts)
    parts, ends, _, whole, tall = run(logits, index, grads, of_parts)
    torch.testing.assert_close(whole, direct, rtol=0, atol=0, equal_nan=True)
    split = parts.unflatten(1, (len(blocks), -1))[:, blocks.count(0) - 1 :, :experts].float()
    direct[39, 1] = torch.inf  # rounded
    torch.testing.assert_close(split.sum(1), direct, rtol=0, atol=0, equal_nan=True)
    if blocks == (0, 1):
        dx = kernels.bind_router_dgrad(parts, weight, DEFAULT)(parts, ends, tall)
        assert torch.equal(dx[[3, 20]], weight[[5, 6]].sign() * direct[[3, 20], [5, 6]].to(BF16)[:, None])
        assert dx[31].isnan().all()
        assert dx[:3].isfinite().all()


def test_an_infinite_fp32_weight_has_an_infinite_logit(device):
    case = CASES["qwen2, fp32 weight"]
    x, weight, bias, correction = operands(case, 40, 256, device)
    weight[7, 9] = torch.inf
    logits = routed(case, x, weight, bias, correction).logits
    assert torch.equal(logits[:, 7], x[:, 9].sign().float() * torch.inf)
    assert logits[:, :7].isfinite().all()


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek-v3", "deepseek-v2", "qwen2, fp32 weight", "odd"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_tokens_that_are_not_finite(device, name, bad):
    case = CASES[name]
    experts = case[0]
    x, weight, bias, correction = operands(case, 200, 256, device)
    clean = routed(case, x, weight, bias, correction)
    x[::7, 3] = bad
    index, weights, _, counts, _ = routed(case, x, weight, bias, correction)
    assert ((index >= 0) & (index < experts)).all()
    assert (torch.diff(index.sort(-1).values, dim=-1) > 0).all()
    assert counts.sum() == index.numel()
    finite = torch.ones(200, dtype=torch.bool, device=device)
    finite[::7] = False
    assert torch.equal(index[finite], clean.expert_index[finite])
    assert torch.equal(weights[finite], clean.expert_weight[finite])
    if bad is torch.nan:
        assert weights[~finite].isnan().any(-1).all()


def test_the_lowest_ids_of_equal_logits_are_chosen(device):
    for experts, groups, kept in ((128, 1, 1), (256, 8, 4), (8, 1, 1), (512, 1, 1), (96, 32, 8)):
        corrected = Choice("sigmoid", 6, True, 1.0, groups, kept, corrected=True)
        x, weight = torch.zeros(40, 64, dtype=BF16, device=device), torch.zeros(experts, 64, dtype=BF16, device=device)
        x[::2] = -0.0
        correction = torch.zeros(experts, device=device)
        for choice in (corrected, Choice("softmax", 6), Choice("topk_softmax", min(experts, 12))):
            run = kernels.bind_router(x, weight, None, choice, False, DEFAULT)
            index = run(x, weight, None, correction if choice.corrected else None).expert_index
            assert (index == torch.arange(choice.top_k, device=device)).all()


@pytest.mark.parametrize("columns", [8, 1032, 2048])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (33, 2), (500, 8), (129, 9)])
def test_the_sum_of_a_tokens_rows_replaces_its_addend(device, tokens, chosen, columns):
    index = torch.randint(0, 14, (tokens, chosen), device=device)  # 13 is a sentinel
    _, row_of_slot, _ = sort_by_expert(index, 13)
    rows = torch.randn(tokens * chosen, columns, device=device).to(BF16)
    addend = torch.randn(tokens, columns, device=device).to(BF16)
    padded = torch.cat([rows, rows.new_zeros(1, columns)]).double()
    want = addend.double() + padded[row_of_slot].sum(1)
    run = bind_sum_slots(rows, row_of_slot, None, addend)
    with nan_in_new_tensors():
        got = run(rows, row_of_slot, None, addend)
    assert got is addend
    assert (got.double() - want).norm() <= 4e-3 * want.norm()


# ------------------------------------------------------------------------------------------------ in a layer


def layer(dtype=BF16, of_router=BF16, **options):
    torch.manual_seed(0)
    made = fm.MoE(256, 128, 16, 4, router_bias=True, device=DEVICE, dtype=dtype, **options)
    made.router.to(of_router)
    return made


def gradients(made, x, stats=False):
    x = x.detach().clone().requires_grad_()
    made.zero_grad()
    if stats:
        y, found = made(x, return_stats=True)
        loss = found.load_balancing_loss + 0.1 * found.z_loss
    else:
        y, loss = made(x), 0.0
    direction = torch.linspace(-1, 1, y.numel(), device=x.device).view_as(y).to(y.dtype)
    ((y * direction).sum() + loss).backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in made.named_parameters()}}


@pytest.mark.parametrize("stats", [False, True], ids=["", "stats"])
@pytest.mark.parametrize("of_router", [BF16, FP32], ids=str)
@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_errors_of_a_layer_are_those_of_the_unfused_path(device, score, of_router, stats):
    made = layer(of_router=of_router, score=score)
    x = torch.randn(999, 256, device=device, dtype=BF16)
    with fm.strict():
        fused = gradients(made, x, stats)
    with fm.disabled("*"):
        plain = gradients(made, x, stats)
    exact = gradients(copy.deepcopy(made).double(), x.double(), stats)
    (plan,) = made.explain(x.requires_grad_()).plans
    assert plan.fused[0].rule == "sm90.router_dispatch"
    assert not plan.unfused
    for name, want in exact.items():
        assert relative(fused[name], want) <= 1.5 * relative(plain[name], want) + 1e-6, name


@needs_gpu
def test_the_same_bits_twice_and_in_a_graph_without_waiting(device, no_sync):
    made, x = layer(score="sigmoid"), torch.randn(3000, 256, device=device, dtype=BF16)
    first = gradients(made, x, stats=True)
    with no_sync():
        second = gradients(made, x, stats=True)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name

    static = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(made, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(made, static)
    static.copy_(x)
    graph.replay()
    expected = gradients(made, x)
    for name, value in expected.items():
        assert torch.equal(captured[name], value), name


@needs_gpu
@pytest.mark.parametrize("of_router", [BF16, FP32], ids=str)
def test_tile_counters_return_to_zero(device, of_router):
    """After the router's products, those that gather rows, and one beside a sum over slots, at once and in a graph."""
    x = torch.randn(3000, 256, device=device, dtype=BF16)
    expected, made = gradients(layer(of_router=of_router, schedule="static"), x), layer(of_router=of_router)
    counters = launch.tile_counters(x.device)
    for _ in range(3):
        results = gradients(made, x)
        assert not counters._table.any()
        assert all(torch.equal(results[name], value) for name, value in expected.items())
    captured = []
    graph = capture(lambda: captured.append(gradients(made, x)))
    for _ in range(3):
        for t in captured[-1].values():
            t.fill_(torch.nan)
        graph.replay()
        assert not counters._table.any()
        assert all(torch.equal(captured[-1][name], value) for name, value in expected.items())


@needs_gpu
def test_a_layer_with_few_launches(device):
    """The router and the sort: three kernels forward. Backward: the logits' gradient, the weight's and its sum, and the
    tokens'.
    """
    chain = fm.Sequential(fm.Router(256, 16, 4, device=device, dtype=BF16), fm.Dispatch(16), fm.Combine())
    x = torch.randn(4096, 256, device=device, dtype=BF16, requires_grad=True)
    chain(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        chain(x).backward(torch.ones_like(x))
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "kernel_cutlass" in event.name]
    assert len([n for n in names if "Choose" in n]) == 2
    assert not [n for n in names if "_count_" in n and "Route" in n]
    assert not [n for n in names if "Offsets" in n or "_Parts" in n]


def test_a_gradient_of_logits_at_any_address(device):
    """Losses of several layers concatenate their logits: each gradient is a view."""
    made = layer()
    x = torch.randn(999, 256, device=device, dtype=BF16, requires_grad=True)
    found = []
    for first in (0, 1):
        y, stats = made(x, return_stats=True)
        logits = torch.cat([stats.logits.new_ones(first), stats.logits.flatten()])[first:]
        loss = (logits * torch.linspace(-1, 1, logits.numel(), device=device)).sum()
        found.append(torch.autograd.grad(y.sum() + loss, [x, *made.router.parameters()]))
    for aligned, shifted in zip(*found, strict=True):
        assert torch.equal(aligned, shifted)


def test_no_tokens(device):
    made = layer()
    x = torch.zeros(0, 256, device=device, dtype=BF16, requires_grad=True)
    with fm.strict():
        made(x).sum().backward()
    assert x.grad.shape == (0, 256)
    assert not made.router.weight.grad.any()


@pytest.mark.parametrize("of_router", [BF16, FP32], ids=str)
@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_errors_of_a_router_alone_are_those_of_the_unfused_path(device, score, of_router):
    made = layer(of_router=of_router, score=score).router
    x = torch.randn(999, 256, device=device, dtype=BF16)

    def results(router, x):
        x = x.detach().clone().requires_grad_()
        routing = router(x)
        # of one sign: the bias's gradient is a sum over the tokens, which would otherwise cancel
        loss = sum((t * torch.linspace(0.5, 1.5, t.numel()).view_as(t).to(t)).sum() for t in routing[1:])
        return routing._asdict() | dict(
            zip(("x", "weight", "bias"), torch.autograd.grad(loss, (x, *router.parameters())), strict=True)
        )

    with fm.strict():
        fused = results(made, x)
    with fm.disabled("*"):
        plain = results(made, x)
    exact = results(copy.deepcopy(made).double(), x.double())
    assert torch.equal(fused["expert_index"], exact["expert_index"])
    for name, want in exact.items():
        assert relative(fused[name], want) <= 1.5 * relative(plain[name], want) + 1e-6, name
