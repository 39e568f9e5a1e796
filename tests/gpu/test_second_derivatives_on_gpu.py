"""Gradients of gradients on a GPU: against fp64, without a host synchronisation, with poisoned tails."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from kit.hopper import needs_gpu

import fusedmoe as fm
from fusedmoe.base.log import forget_said

E, H, I = 8, 128, 64  # noqa: E741
SPLITS = (60, 0, 1, 128, 33, 0, 7, 100)
TAIL = 29


def experts(bias=False):
    torch.manual_seed(0)
    kind = {"bias": bias, "device": "cuda", "dtype": torch.bfloat16}
    return fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, **kind), fm.SwiGLU(), fm.Scale("probs"), fm.GroupedLinear(E, I, H, **kind)
    )


def reference(seq, x, probs):
    """fp64, an expert at a time."""
    parts, start = [], 0
    first, last = seq[0], seq[3]
    for e, count in enumerate(SPLITS):
        rows = slice(start, start := start + count)
        gate, up = F.linear(x[rows], first.weight[e], None if first.bias is None else first.bias[e]).chunk(2, dim=-1)
        h = F.silu(gate) * up * probs[rows, None]
        parts.append(F.linear(h, last.weight[e], None if last.bias is None else last.bias[e]))
    return torch.cat([*parts, x.new_zeros(TAIL, H)])


def inputs():
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(sum(SPLITS) + TAIL, H, device="cuda", dtype=torch.bfloat16, generator=generator)
    probs = torch.rand(sum(SPLITS) + TAIL, device="cuda", generator=generator) + 0.5
    x[sum(SPLITS) :] = probs[sum(SPLITS) :] = torch.nan
    return x.requires_grad_(), probs.requires_grad_()


def penalty(y, sources, dy):
    """Gradients, and the gradients of a penalty on them: of every one with every other."""
    first = torch.autograd.grad(y, sources, dy, create_graph=True)
    loss = sum(g.float().square().mean() if g.dtype is torch.bfloat16 else g.square().mean() for g in first)
    # the last bias is in no gradient: autograd has None for it
    return [*first, *torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("bias", [False, True])
def test_a_penalty_on_every_gradient_against_fp64(device, no_sync, bias):
    seq, (x, probs), splits = experts(bias), inputs(), torch.tensor(SPLITS, device=device)
    sources = [x, probs, *seq.parameters()]
    dy = torch.randn(x.shape, device=device, dtype=torch.bfloat16)
    dy[sum(SPLITS) :] = torch.nan
    penalty(seq(x, splits=splits, probs=probs), sources, dy)
    with no_sync():
        got = penalty(seq(x, splits=splits, probs=probs), sources, dy)

    exact = copy.deepcopy(seq).double()
    used = sum(SPLITS)
    rows = [t.detach().double().nan_to_num_().requires_grad_() for t in (x, probs)]
    wanted = [*rows, *exact.parameters()]
    want = penalty(reference(exact, *rows), wanted, dy.double().nan_to_num_())
    assert sum(not b.any() for b in want) == bias  # the second derivative of the last bias
    for a, b in zip(got, want, strict=True):
        assert bool(a.any()) == bool(b.any())
        assert a.isfinite().all()
        if a.shape[0] == x.shape[0]:
            assert not a[used:].any()
        assert ((a.double() - b).norm() <= 2e-2 * b.norm()).item()


def test_it_is_deterministic(device):
    seq, (x, probs), splits = experts(bias=True), inputs(), torch.tensor(SPLITS, device=device)
    sources, dy = [x, probs, *seq.parameters()], torch.randn(x.shape, device=device, dtype=torch.bfloat16)
    first, second = (penalty(seq(x, splits=splits, probs=probs), sources, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_routed_layer(device):
    torch.manual_seed(0)
    layer = fm.MoE(H, I, E, 2, device=device, dtype=torch.bfloat16)
    x = torch.randn(96, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    sources = [x, *layer.parameters()]
    dy = torch.randn(96, H, device=device, dtype=torch.bfloat16)
    got = penalty(layer(x), sources, dy)
    exact = copy.deepcopy(layer).double().cpu()
    with torch.no_grad():  # the same experts, whatever the precision makes of a tie
        assert torch.equal(layer.router(x).expert_index.cpu().sort().values,
                           exact.router(x.double().cpu()).expert_index.sort().values)  # fmt: skip
    rows = x.detach().double().cpu().requires_grad_()
    want = penalty(exact(rows), [rows, *exact.parameters()], dy.double().cpu())
    for a, b in zip(got, want, strict=True):
        assert b.any()
        assert ((a.double().cpu() - b).norm() / b.norm()).item() < 3e-2


@needs_gpu
def test_strict_raises_and_the_log_warns(device, caplog):
    seq, (x, probs), splits = experts(), inputs(), torch.tensor(SPLITS, device=device)
    with fm.strict():
        y = seq(x, splits=splits, probs=probs)
    with pytest.raises(fm.FusionError, match=r"strict: chain 0 to 3: its backward pass runs unfused"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    forget_said()
    with caplog.at_level(logging.WARNING, "fusedmoe.fusion"):
        torch.autograd.grad(seq(x, splits=splits, probs=probs).sum(), x, create_graph=True)
    assert [r.levelname for r in caplog.records if "second derivatives" in r.getMessage()] == ["WARNING"]
