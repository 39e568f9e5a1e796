"""Training on Hopper with rows that products read through their index: the kernels, how exact they are, the memory.

Axes: T tokens, K chosen experts per token, E experts, H hidden, I intermediate features.
"""

import pytest
import torch
from test_async import capture
from test_sm90_training import BF16, assert_as_exact_as_plain_pytorch, outcome

import fusedmoe as fm

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not hopper, reason="needs an sm_90 GPU")

T, K, E, H, I = 700, 3, 12, 192, 136  # noqa: E741
ROUTED = ("sm90.dispatch", "sm90.gathered_gemm_activation", "sm90.grouped_gemm", "sm90.combine")


def experts(act=fm.SwiGLU, *, weighted_first=True, bias=False, dtype=BF16, **options):
    wide = 1 if act is fm.SquaredReLU else 2
    return fm.Sequential(
        fm.Dispatch(),
        fm.GroupedLinear(E, H, wide * I, bias=bias, device="cuda", dtype=dtype),
        act(),
        *([fm.Scale("probs")] if weighted_first else []),
        fm.GroupedLinear(E, I, H, bias=bias, device="cuda", dtype=dtype),
        fm.Combine(None if weighted_first else "probs"),
        **options,
    )


def routing(tokens=T, chosen=K, sentinels=False):
    index = torch.stack([torch.randperm(E, device="cuda")[:chosen] for _ in range(tokens)])
    index[index == 1] = 2  # an expert without rows; some tokens choose another twice
    if sentinels:
        index[::5, 0], index[1::7] = E, -1
    return {"expert_index": index, "expert_weight": torch.rand(tokens, chosen, device="cuda")}


def tokens(count=T, dtype=BF16):
    return tuple(torch.randn(count, H, device="cuda").to(dtype) for _ in range(2))


def planned(chain, x, named):
    named = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in named.items()}
    (plan,) = chain.explain(x.clone().requires_grad_(), **named).plans
    return plan


@pytest.mark.parametrize("sentinels", [False, True], ids=["", "sentinels"])
@pytest.mark.parametrize("act", [fm.SwiGLU, fm.GeGLU, fm.SquaredReLU])
def test_no_rows_are_written(act, sentinels):
    torch.manual_seed(1)
    chain, (x, dy), named = experts(act), tokens(), routing(sentinels=sentinels)
    plan = planned(chain, x, named)
    assert [step.rule for step in plan.steps] == [
        *ROUTED, "sm90.gathered_wgrad_dy", "sm90.gathered_dgrad_activation", "sm90.gathered_wgrad_x",
        "sm90.grouped_dgrad", "sm90.dispatch_weight_grad", "sm90.ddispatch",
    ]  # fmt: skip
    assert len(plan.gathered) == 2
    assert_as_exact_as_plain_pytorch(chain, x, named, dy)


@pytest.mark.parametrize("options", [{"sm_margin": 20}, {"schedule": "static"}], ids=str)
def test_options(options):
    torch.manual_seed(2)
    x, dy = tokens()
    assert_as_exact_as_plain_pytorch(experts(**options), x, routing(), dy)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_gradients_of_rows_that_are_scaled_or_summed_are_written(bias):
    torch.manual_seed(3)
    chain, (x, dy), named = experts(weighted_first=bias, bias=bias), tokens(), routing(sentinels=True)
    plan = planned(chain, x, named)
    assert [rows for rows, _, _ in plan.gathered] == ["1.input"]
    assert_as_exact_as_plain_pytorch(chain, x, named, dy)


@pytest.mark.parametrize("count", [1, 63, 500])
def test_one_expert_per_token(count):
    torch.manual_seed(4)
    x, dy = tokens(count)
    assert_as_exact_as_plain_pytorch(experts(), x, routing(count, 1), dy)


def test_a_layer_alone_and_fp16():
    torch.manual_seed(5)
    chain = fm.Sequential(fm.Dispatch(), fm.GroupedLinear(E, H, H, device="cuda", dtype=torch.float16), fm.Combine())
    x, dy = tokens(dtype=torch.float16)
    assert_as_exact_as_plain_pytorch(chain, x, routing(), dy)
    assert_as_exact_as_plain_pytorch(experts(dtype=torch.float16), x, routing(), dy)


def test_tokens_without_an_expert_are_never_used():
    """They and their gradients are NaN, also in the tiles that hold the last expert's last rows."""
    torch.manual_seed(6)
    chain, (x, dy), named = experts(), tokens(), routing(sentinels=True)
    x[1::7] = dy[1::7] = torch.nan
    results = outcome(chain, x, named, dy)
    for name, t in results.items():
        assert t.isfinite().all(), name
        assert t.any(), name
    assert not results["y"][1::7].any()
    assert not results["x"][1::7].any()


def test_gradients_are_added_to_main_grad():
    torch.manual_seed(7)
    chain, (x, dy), named = experts(), tokens(), routing()
    want = {name: t.float() for name, t in outcome(chain, x, named, dy).items() if name.endswith("weight")}
    for layer in (chain[1], chain[4]):
        layer.accumulate_into_main_grad = True
        layer.weight.main_grad = torch.zeros(layer.weight.shape, device="cuda")
    for _ in range(2):
        outcome(chain, x, named, dy)
    for layer, name in ((chain[1], "1.weight"), (chain[4], "4.weight")):
        error = layer.weight.main_grad - 2 * want[name]
        assert want[name].any()
        assert error.norm() < 0.01 * want[name].norm()


def test_strides_that_the_kernels_cannot_read():
    """An expanded gradient and tokens with a pitch of no 16 bytes: copied, or made by plain PyTorch."""
    torch.manual_seed(8)
    chain, (x, dy), named = experts(), tokens(), routing()
    expanded = dy[:1].expand_as(dy)
    pitched = x.new_empty(T, H + 4)[:, :H].copy_(x)
    with fm.disabled("sm90.*"):
        want = outcome(chain, x, named, expanded)
    for tokens_in in (x, pitched):
        leaf = tokens_in.detach().requires_grad_()
        y = chain(leaf, **named)
        (dx,) = torch.autograd.grad(y, leaf, expanded)
        for got, name in ((y, "y"), (dx, "x")):
            assert want[name].any()
            assert (got - want[name]).float().norm() < 0.02 * want[name].float().norm()


def test_a_step_is_one_graph_and_never_waits(no_sync):
    torch.manual_seed(9)
    chain, (x, dy), named = experts(), tokens(), routing()
    first = outcome(chain, x, named, dy)
    with no_sync():
        again = outcome(chain, x, named, dy)
    for name, t in first.items():
        assert t.any(), name
        assert torch.equal(again[name], t), name

    leaf, index = x.clone().requires_grad_(), named["expert_index"].clone()
    weight = named["expert_weight"].clone().requires_grad_()
    grads = {}

    def step():
        y = chain(leaf, expert_index=index, expert_weight=weight)
        grads.update(zip(("x", "w"), torch.autograd.grad(y, (leaf, chain[1].weight), dy), strict=True))

    graph = capture(step)
    other = routing()
    index.copy_(other["expert_index"])
    with torch.no_grad():
        weight.copy_(other["expert_weight"])
    graph.replay()
    want = outcome(chain, x, other, dy)
    assert torch.equal(grads["x"], want["x"])
    assert torch.equal(grads["w"], want["1.weight"])


def test_memory_of_a_step():
    """Neither copy of the rows exists: not that of the tokens, kept for backward, nor that of the gradient."""

    def peak():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outcome(chain, x, named, dy)
        return torch.cuda.max_memory_allocated() - before

    chain, (x, dy), named = experts(), tokens(20000), routing(20000)
    with fm.disabled("sm90.gathered_*"):
        outcome(chain, x, named, dy)
        rows = peak()
    outcome(chain, x, named, dy)
    copy = 2 * 20000 * K * H
    assert rows - peak() > 1.5 * copy


def test_a_compiled_chain():
    torch.manual_seed(10)
    chain, (x, dy), named = experts(), tokens(), routing()
    want = outcome(chain, x, named, dy)
    got = outcome(torch.compile(chain, fullgraph=True), x, named, dy)
    got = {name.removeprefix("_orig_mod."): t for name, t in got.items()}
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert t.any(), name
        assert torch.equal(got[name], t), name
