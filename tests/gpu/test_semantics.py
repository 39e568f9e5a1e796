"""The same function on a GPU as everywhere: against fp64 of the exact operands, poisoned tails, empty experts."""

import pytest
import torch
import torch.nn.functional as F

import fusedmoe as fm

E, H, I = 16, 128, 64  # noqa: E741

SPLITS = {
    "uneven": [5, 0, 1, 127, 128, 129, 0, 33, 2, 0, 64, 7, 0, 0, 19, 3],
    "one takes all": [0] * 7 + [400] + [0] * 8,
    "all empty": [0] * 16,
    "first and last": [100] + [0] * 14 + [57],
}


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()


def reference(x, w1, w2, splits, probs=None):
    """fp64, an expert at a time."""
    y = x.new_zeros(x.shape[0], w2.shape[1])
    start = 0
    for e, count in enumerate(splits):
        rows = slice(start, start := start + count)
        gate, up = (x[rows] @ w1[e].T).chunk(2, dim=-1)
        h = F.silu(gate) * up
        y[rows] = (h if probs is None else h * probs[rows, None]) @ w2[e].T
    return y


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("spare_rows", [0, 37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_expert_mlp_against_fp64(device, splits, spare_rows, dtype):
    torch.manual_seed(1)
    seq = fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.Scale("probs"), fm.GroupedLinear(E, I, H)).to(
        device, dtype
    )
    used = sum(splits)
    x = torch.randn(used + spare_rows, H, device=device, dtype=dtype)
    probs = torch.rand(used + spare_rows, device=device)
    dy = torch.randn(used + spare_rows, H, device=device, dtype=dtype)
    for poisoned in (x, probs, dy):
        poisoned[used:] = torch.nan
    x.requires_grad_()
    probs.requires_grad_()
    y = seq(x, splits=torch.tensor(splits, device=device), probs=probs)
    y.backward(dy)

    exact = [t.detach()[:used].double().requires_grad_() for t in (x, probs)]
    weights = [seq[i].weight.detach().double().requires_grad_() for i in (0, 3)]
    want = reference(exact[0], *weights, splits, exact[1])
    want.backward(dy[:used].double())

    tolerance = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-3}[dtype]  # fp32 may go through tf32
    assert not y[used:].any()
    assert not x.grad[used:].any()
    assert not probs.grad[used:].any()
    if used:
        assert relative_error(y[:used], want.detach()) < tolerance
        assert relative_error(x.grad[:used], exact[0].grad) < tolerance
        assert relative_error(probs.grad[:used], exact[1].grad) < tolerance
    for i, weight in zip((0, 3), weights, strict=True):
        got = seq[i].weight.grad
        if used:
            assert relative_error(got, weight.grad) < tolerance
        empty = torch.tensor([c == 0 for c in splits], device=device)
        assert not got[empty].any(), "an expert without rows gets an exactly zero gradient"


@pytest.mark.parametrize("width", [2880, 1408, 1856, 768, 96])
def test_widths_of_real_models_need_no_host_sync(device, no_sync, width):
    seq = fm.Sequential(fm.GroupedLinear(4, width, 2 * 96), fm.SwiGLU(), fm.GroupedLinear(4, 96, width))
    seq.to(device, torch.bfloat16)
    x = torch.randn(300, width, device=device, dtype=torch.bfloat16)
    splits = torch.tensor([100, 0, 150, 50], device=device)
    seq(x, splits=splits)
    with no_sync():
        y = seq(x, splits=splits)
    want = reference(x.double(), *(seq[i].weight.double() for i in (0, 2)), splits.tolist())
    assert relative_error(y, want) < 8e-3


def test_views_whose_strides_are_off_are_copied_not_synchronised(device, no_sync):
    """In plain PyTorch, to which the fused kernels leave such rows."""
    op = fm.GroupedLinear(4, 64, 32, device=device, dtype=torch.bfloat16)
    wide = torch.randn(100, 65, device=device, dtype=torch.bfloat16)
    x = wide[:, 1:]  # rows 130 bytes apart, the first 2 bytes off
    splits = torch.tensor([10, 20, 30, 40], device=device)
    op(x, splits=splits)
    with no_sync():
        y = op(x, splits=splits)
    with fm.disabled("sm90.*"):
        assert torch.equal(y, op(x.contiguous(), splits=splits))


def test_rows_by_columns_are_copied(device, no_sync):
    """Also where their pitch is aligned: an expert's begin anywhere, and a misaligned address ends the process."""
    op = fm.GroupedLinear(4, 64, 32, device=device, dtype=torch.bfloat16)
    x, dy = (torch.randn(width, 104, device=device, dtype=torch.bfloat16).t() for width in (64, 32))
    splits = torch.tensor([11, 20, 30, 40], device=device)

    def results(x, dy):
        x = x.detach().requires_grad_()
        y = op(x, splits=splits)
        return [y, *torch.autograd.grad(y, [x, op.weight], dy)]

    with fm.disabled("sm90.*"):
        expected = results(x.contiguous(), dy.contiguous())
        for rows, grad in ((x, dy.contiguous()), (x.contiguous(), dy)):
            results(rows, grad)
            with no_sync():
                got = results(rows, grad)
            for a, b in zip(got, expected, strict=True):
                assert b.any()
                assert torch.equal(a, b)


def test_what_reads_the_host_is_marked(device):
    splits = torch.tensor([3, 5], device=device)
    for dtype, width, marked in ((torch.bfloat16, 64, False), (torch.float32, 64, True), (torch.bfloat16, 60, True)):
        op = fm.Sequential(fm.GroupedLinear(2, width, 64, device=device, dtype=dtype))
        x = torch.randn(8, width, device=device, dtype=dtype)
        explained = op.explain(x, splits=splits)
        assert all(step.host_sync is marked for step in explained.steps)
        assert ("HOST SYNC" in str(explained)) is marked
        torch.cuda.set_sync_debug_mode("error")
        try:
            if marked:
                with pytest.raises(RuntimeError, match="synchroniz"):
                    op(x, splits=splits)
            else:
                op(x, splits=splits)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_bias_gradient_reads_no_host(device):
    op = fm.Sequential(fm.GroupedLinear(2, 64, 64, bias=True, device=device))
    steps = op.explain(torch.randn(8, 64, device=device), splits=torch.tensor([3, 5], device=device)).steps
    assert {step.ops[0]: step.host_sync for step in steps} == {
        "0.GroupedLinear": True,
        "0.BiasGrad": False,
        "0.Wgrad": True,
    }


def test_wrong_splits_stay_within_the_rows(device):
    """Values are trusted, memory is not: sums over R and negative counts read and write nothing outside."""
    op = fm.GroupedLinear(3, 64, 64, device=device, dtype=torch.bfloat16)
    x = torch.randn(10, 64, device=device, dtype=torch.bfloat16)
    for splits in ([4, 1000, 2], [-5, 4, 3], [2**31 - 1] * 3):
        y = op(x, splits=torch.tensor(splits, device=device))
        torch.cuda.synchronize()
        assert torch.isfinite(y).all()


def test_debug_mode_checks_splits_on_the_gpu(device, monkeypatch):
    op = fm.GroupedLinear(2, 64, 64, device=device, dtype=torch.bfloat16)
    x = torch.randn(10, 64, device=device, dtype=torch.bfloat16)
    monkeypatch.setenv("FUSEDMOE_DEBUG", "1")
    with pytest.raises(fm.InputError, match=r"at most 10.*got 11"):
        op(x, splits=torch.tensor([5, 6], device=device))


@pytest.mark.parametrize(
    "activation", [fm.SwiGLU(), fm.GeGLU(), fm.ReGLU(), fm.SwiGLU(limit=7.0, alpha=1.702, offset=1.0)]
)
def test_moe_on_the_gpu_is_moe_on_the_cpu(device, activation):
    torch.manual_seed(2)
    layer = fm.MoE(64, 32, 8, 2, activation=activation, shared_intermediate=32, bias=True)
    twin = fm.MoE(64, 32, 8, 2, activation=activation, shared_intermediate=32, bias=True).to(device)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, 50, 64)
    y, stats = layer(x, return_stats=True)
    y_gpu, stats_gpu = twin(x.to(device), return_stats=True)
    assert torch.equal(stats.load, stats_gpu.load.cpu())
    assert relative_error(y_gpu.cpu(), y.detach().double()) < 2e-3
    assert torch.allclose(stats.load_balancing_loss, stats_gpu.load_balancing_loss.cpu(), rtol=1e-4)
    y.square().sum().backward()
    y_gpu.square().sum().backward()
    for (name, a), b in zip(layer.named_parameters(), twin.parameters(), strict=True):
        assert relative_error(b.grad.cpu(), a.grad.double()) < 5e-3, name


def test_dispatch_is_the_same_on_both_devices(device):
    torch.manual_seed(3)
    index = torch.randint(-1, 9, (500, 4))  # -1 and 8 are sentinels
    weight = torch.rand(500, 4)
    x = torch.randn(500, 16)
    rows, provided = fm.Dispatch(8)(x, expert_index=index, expert_weight=weight)
    rows_gpu, provided_gpu = fm.Dispatch(8)(
        x.to(device), expert_index=index.to(device), expert_weight=weight.to(device)
    )
    assert torch.equal(rows, rows_gpu.cpu())
    for name, value in provided.items():
        assert torch.equal(value, provided_gpu[name].cpu()), name


def nothing(*_):
    return None


@pytest.mark.parametrize("separation", ["hooks", "identities"])
def test_what_stands_between_the_ops_keeps_the_tail_out(device, no_sync, separation):
    """The parts of a Sequential share its splits on the device, without a host synchronisation."""
    torch.manual_seed(4)
    ops = [
        fm.GroupedLinear(E, H, 2 * I),
        fm.SwiGLU(),
        fm.Scale("probs"),
        fm.GroupedLinear(E, I, H),
        fm.Scale("probs_2"),
    ]
    seq = fm.Sequential(*ops).to(device, torch.bfloat16)
    splits = torch.tensor(SPLITS["uneven"], device=device)
    used, rows = sum(SPLITS["uneven"]), sum(SPLITS["uneven"]) + 37
    x, dy = (torch.randn(rows, H, device=device, dtype=torch.bfloat16) for _ in range(2))
    probs, probs_2 = (torch.rand(rows, device=device) for _ in range(2))
    for t in (x, dy, probs, probs_2):
        t[used:] = torch.nan

    def outcome(module):
        module.zero_grad()
        leaves = [t.clone().requires_grad_() for t in (x, probs, probs_2)]
        y = module(leaves[0], splits=splits, probs=leaves[1], probs_2=leaves[2])
        y.backward(dy)
        return [y.detach(), *[t.grad for t in leaves], *[p.grad for p in module.parameters()]]

    expected = outcome(seq)
    if separation == "hooks":
        for op in seq:
            op.register_forward_hook(nothing)
        separated = seq
    else:
        separated = fm.Sequential(torch.nn.Identity(), *[m for op in seq for m in (op, torch.nn.Identity())])
    outcome(separated)  # compiles and makes the plans
    with no_sync():
        got = outcome(separated)
    for a, b in zip(got, expected, strict=True):
        assert b.isfinite().all()
        assert relative_error(a, b.double()) < 8e-3  # a fused epilogue rounds less often
    for t in got[:4]:
        assert not t[used:].any()
        assert t[:used].any()


@pytest.mark.parametrize("disabled", ["", "*"])
@pytest.mark.parametrize("weights", ["probs", None])
def test_places_outside_of_the_rows_address_no_memory(device, no_sync, weights, disabled, monkeypatch):
    """A negative index, or one past the end, counts as a sentinel; with FUSEDMOE_DEBUG=1 it is an error."""
    torch.manual_seed(5)
    tokens, chosen = 40, 4
    rows = tokens * chosen
    places = torch.randperm(rows, device=device).view(tokens, chosen)
    slots = torch.empty(rows, dtype=torch.int64, device=device)
    slots[places.flatten()] = torch.arange(rows, device=device)
    wrong, right = places.clone(), places.clone()
    wrong[::3, 1], wrong[1::3, 2], wrong[2::3, 0] = -1, -(2**40), rows + 5
    right[::3, 1], right[1::3, 2], right[2::3, 0] = rows, rows, rows
    x = torch.randn(rows, 64, device=device, dtype=torch.bfloat16)
    named = {} if weights is None else {"probs": torch.rand(rows, device=device)}
    combine = fm.Combine(weights)

    def outcome(row_of_slot):
        leaves = [t.clone().requires_grad_() for t in (x, *named.values())]
        given = dict(zip(named, leaves[1:], strict=True))
        y = combine(leaves[0], row_of_slot=row_of_slot, slot_of_row=slots, **given)
        y.square().sum().backward()
        return [y.detach(), *[t.grad for t in leaves]]

    with fm.disabled(*filter(None, [disabled])):
        expected = outcome(right)
        outcome(wrong)
        with no_sync():
            got = outcome(wrong)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
            assert b.any()
        monkeypatch.setenv("FUSEDMOE_DEBUG", "1")
        with pytest.raises(fm.InputError, match="row_of_slot: expected indices from 0 to 160, for 160 rows, got -"):
            outcome(wrong)
