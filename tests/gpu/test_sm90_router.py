"""The router on Hopper: its kernels against autograd in fp64, between NaN; its place in a layer."""

import copy
from functools import partial

import pytest
import torch
from kit.hopper import DEVICE, capture, needs_gpu, needs_hopper
from kit.hopper_products import kernels_of
from kit.poison import nan_in_new_tensors
from kit.routers import CASES, check_choices, operands, relative, routed, values

import fusedmoe as fm
from fusedmoe.kernels.options import DEFAULT
from fusedmoe.kernels.sm90 import launch
from fusedmoe.kernels.sm90 import router as kernels
from fusedmoe.kernels.sm90.router import Choice, LogitsGrads

pytestmark = needs_hopper

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    build_ahead(lambda: kernels_of([partial(check_choices, case, 33) for case in CASES.values()]))


@pytest.mark.parametrize("tokens", [33, 5000])
@CASE
def test_choices_weights_counts_and_sums(case, tokens):
    check_choices(case, tokens)


def incoming(case, tokens, others):
    generator = torch.Generator(DEVICE).manual_seed(1)
    experts, choice = case[:2]
    shapes = (tokens, choice.top_k), (tokens, experts), (experts,), ()
    return [
        torch.randn(shape, device=DEVICE, generator=generator) if i == 0 or others else None
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize(("tokens", "others"), [(1, True), (33, True), (5000, True), (5000, False)])
@pytest.mark.parametrize(
    "case", [c for c in CASES.values() if c[2] is not FP16], ids=[n for n in CASES if "fp16" not in n]
)
def test_gradients(case, tokens, others):
    experts, choice, dtype, of_weight, _ = case
    x, weight, bias, correction = operands(case, tokens, 512)
    index, weights, logits, counts, _ = routed(case, x, weight, bias, correction)
    row_of_slot = kernels.bind_route_counted(index, weights, experts)(index, weights, counts)[2]
    g, *rest = incoming(case, tokens, others)
    rows = torch.empty(g.numel(), device=DEVICE)
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


def test_only_the_gradients_of_losses():
    """No gradient of the weights arrives, as for a router whose experts are frozen and whose rows are not read."""
    case = CASES["qwen3"]
    x, weight, bias, correction = operands(case, 300, 256)
    index, _, logits, *_ = routed(case, x, weight, bias, correction)
    z = torch.ones((), device=DEVICE)
    grads = LogitsGrads(None, None, None, None, z)
    whole = kernels.bind_logits_grad(logits, grads, case[1], (), 1, False, True, None)(logits, index, grads).whole
    leaf = logits.double().requires_grad_()
    (want,) = torch.autograd.grad(torch.logsumexp(leaf, -1).square().sum(), leaf)
    assert relative(whole, want) < 1e-5


@pytest.mark.parametrize("blocks", [(0, 1), (0, 0, 1, 2)], ids=str)
def test_infinite_gradients_stay_infinite_in_parts(blocks):
    case = CASES["qwen3"]
    experts = case[0]
    x, weight, bias, correction = operands(case, 40, 256)
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


def test_an_infinite_fp32_weight_has_an_infinite_logit():
    case = CASES["qwen2, fp32 weight"]
    x, weight, bias, correction = operands(case, 40, 256)
    weight[7, 9] = torch.inf
    logits = routed(case, x, weight, bias, correction).logits
    assert torch.equal(logits[:, 7], x[:, 9].sign().float() * torch.inf)
    assert logits[:, :7].isfinite().all()


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek-v3", "deepseek-v2", "qwen2, fp32 weight", "odd"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_tokens_that_are_not_finite(name, bad):
    case = CASES[name]
    experts = case[0]
    x, weight, bias, correction = operands(case, 200, 256)
    clean = routed(case, x, weight, bias, correction)
    x[::7, 3] = bad
    index, weights, _, counts, _ = routed(case, x, weight, bias, correction)
    assert ((index >= 0) & (index < experts)).all()
    assert (torch.diff(index.sort(-1).values, dim=-1) > 0).all()
    assert counts.sum() == index.numel()
    finite = torch.ones(200, dtype=torch.bool, device=DEVICE)
    finite[::7] = False
    assert torch.equal(index[finite], clean.expert_index[finite])
    assert torch.equal(weights[finite], clean.expert_weight[finite])
    if bad is torch.nan:
        assert weights[~finite].isnan().any(-1).all()


def test_the_lowest_ids_of_equal_logits_are_chosen():
    for experts, groups, kept in ((128, 1, 1), (256, 8, 4), (8, 1, 1), (512, 1, 1), (96, 32, 8)):
        corrected = Choice("sigmoid", 6, True, 1.0, groups, kept, corrected=True)
        x, weight = torch.zeros(40, 64, dtype=BF16, device=DEVICE), torch.zeros(experts, 64, dtype=BF16, device=DEVICE)
        x[::2] = -0.0
        correction = torch.zeros(experts, device=DEVICE)
        for choice in (corrected, Choice("softmax", 6), Choice("topk_softmax", min(experts, 12))):
            run = kernels.bind_router(x, weight, None, choice, False, DEFAULT)
            index = run(x, weight, None, correction if choice.corrected else None).expert_index
            assert (index == torch.arange(choice.top_k, device=DEVICE)).all()


# ------------------------------------------------------------------------------------------------ in a layer


def with_losses(made, x):
    return gradients(made, x, stats=True)


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
    direction = torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y).to(y.dtype)
    ((y * direction).sum() + loss).backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in made.named_parameters()}}


def of_router(router, x):
    x = x.detach().clone().requires_grad_()
    routing = router(x)
    # of one sign: the bias's gradient is a sum over the tokens, which would otherwise cancel
    loss = sum((t * torch.linspace(0.5, 1.5, t.numel()).view_as(t).to(t)).sum() for t in routing[1:])
    found = torch.autograd.grad(loss, (x, *router.parameters()))
    return routing._asdict() | dict(zip(("x", "weight", "bias"), found, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_errors_are_those_of_the_unfused_path(score, dtype):
    """Of a layer with and without losses, and of a router alone."""
    made = layer(of_router=dtype, score=score)
    x = torch.randn(999, 256, device=DEVICE, dtype=BF16)
    for module, results in ((made, gradients), (made, with_losses), (made.router, of_router)):
        with fm.strict():
            fused = results(module, x)
        with fm.disabled("*"):
            plain = results(module, x)
        exact = results(copy.deepcopy(module).double(), x.double())
        for name, want in exact.items():
            if name == "expert_index":
                assert torch.equal(fused[name], want)
            else:
                assert relative(fused[name], want) <= 1.5 * relative(plain[name], want) + 1e-6, name
    (plan,) = made.explain(x.requires_grad_()).plans
    assert plan.fused[0].rule == "sm90.router_dispatch"
    assert not plan.unfused


@needs_gpu
@pytest.mark.parametrize(("dtype", "score"), [(BF16, "softmax"), (FP32, "sigmoid")], ids=str)
def test_the_same_bits_twice_and_in_a_graph_without_waiting(dtype, score, no_sync):
    """Tile counters return to zero: after the router's products, those that gather rows, and one beside a sum."""
    x = torch.randn(3000, 256, device=DEVICE, dtype=BF16)
    expected = with_losses(layer(of_router=dtype, score=score, schedule="static"), x)
    made, counters = layer(of_router=dtype, score=score), launch.tile_counters(x.device)

    def compare(results):
        assert not counters._table.any()
        for name, value in expected.items():
            assert value.any(), name
            assert torch.equal(results[name], value), name

    compare(with_losses(made, x))
    with no_sync():
        again = with_losses(made, x)
    compare(again)
    captured, static = [], torch.zeros_like(x)
    graph = capture(lambda: captured.append(with_losses(made, static)))
    static.copy_(x)
    for _ in range(3):
        for t in captured[-1].values():
            t.fill_(torch.nan)
        graph.replay()
        compare(captured[-1])


def test_a_gradient_of_logits_at_any_address():
    """Losses of several layers concatenate their logits: each gradient is a view."""
    made = layer()
    x = torch.randn(999, 256, device=DEVICE, dtype=BF16, requires_grad=True)
    found = []
    for first in (0, 1):
        y, stats = made(x, return_stats=True)
        logits = torch.cat([stats.logits.new_ones(first), stats.logits.flatten()])[first:]
        loss = (logits * torch.linspace(-1, 1, logits.numel(), device=DEVICE)).sum()
        found.append(torch.autograd.grad(y.sum() + loss, [x, *made.router.parameters()]))
    for aligned, shifted in zip(*found, strict=True):
        assert torch.equal(aligned, shifted)


def test_no_tokens():
    made = layer()
    x = torch.zeros(0, 256, device=DEVICE, dtype=BF16, requires_grad=True)
    with fm.strict():
        made(x).sum().backward()
    assert x.grad.shape == (0, 256)
    assert not made.router.weight.grad.any()
