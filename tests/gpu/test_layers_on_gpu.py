"""Layers on any GPU: the function of everywhere, nothing that waits for the device, and what a GPU alone can show.

Poisoned tails and empty experts, memory, CUDA graphs, random numbers, second derivatives, estimates, explanations.
"""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from kit.compare import pairwise
from kit.hopper import DEVICE, capture, needs_gpu
from kit.lifetimes import RECIPES, check_freed
from kit.oracles import meaning
from kit.poison import nan_in_new_tensors
from kit.training import BF16, E, H, I, K, error, experts, inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fusedmoe as fm
from fusedmoe.base.log import forget_said

SPLITS = {
    "uneven": [5, 0, 1, 127, 128, 129, 0, 33, 2, 0, 64, 7, 0, 0, 19, 3],
    "one takes all": [0] * 7 + [400] + [0] * 8,
    "all empty": [0] * 16,
    "first and last": [100] + [0] * 14 + [57],
}


def clean(*tensors):
    """In fp64, without NaN, as leaves."""
    return [t.detach().double().nan_to_num_().requires_grad_() for t in tensors]


# ---- the same function


@pytest.mark.parametrize(
    ("splits", "spare", "dtype"), pairwise([*SPLITS], (0, 37), (BF16, torch.float16, torch.float32)), ids=str
)
def test_expert_mlp_against_fp64(splits, spare, dtype):
    """New memory is NaN too. An expert without rows gets gradients of exact zeros."""
    splits = SPLITS[splits]
    seq, (x, probs, dy, on_device) = experts(dtype=dtype), inputs(splits, spare, dtype)
    with nan_in_new_tensors():
        y = seq(x, splits=on_device, probs=probs)
        y.backward(dy)
    exact, leaves = copy.deepcopy(seq).double(), clean(x, probs)
    wanted = [*leaves, exact[0].weight, exact[3].weight]
    want = meaning(exact, leaves[0], splits=on_device.cpu(), probs=leaves[1])
    want = [want.detach(), *torch.autograd.grad(want, wanted, clean(dy)[0])]
    tolerance = {BF16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-3}[dtype]  # fp32 may go through tf32
    empty = torch.tensor([c == 0 for c in splits], device=DEVICE)
    got = [y, x.grad, probs.grad, seq[0].weight.grad, seq[3].weight.grad]
    for a, b, zero in zip(got, want, [slice(sum(splits), None)] * 3 + [empty] * 2, strict=True):
        assert not a[zero].any()
        assert a.isfinite().all()
        assert not sum(splits) or error(a, b) < tolerance


# ---- memory


@pytest.mark.parametrize(("recipe", "autocast", "disabled"), pairwise(RECIPES, (False, True), ("", "*")))
def test_no_autograd_graph_outlives_its_step(recipe, autocast, disabled):
    """A graph in which the nodes of parameters belong to the default stream would also break a capture after it."""
    layer = fm.MoE(H, 2 * I, E, K, device=DEVICE, dtype=torch.float32 if autocast else BF16)
    x = torch.randn(300, H, device=DEVICE, dtype=BF16).requires_grad_()

    def forward():
        with fm.recipe(recipe), fm.disabled(disabled), torch.autocast("cuda", BF16, enabled=autocast):
            return layer(x)

    check_freed(forward, [x, *layer.parameters()])


def test_wrong_splits_stay_within_the_rows():
    """Values are trusted, memory is not: sums over R and negative counts read and write nothing outside."""
    op = fm.GroupedLinear(3, 64, 64, device=DEVICE, dtype=BF16)
    x = torch.randn(10, 64, device=DEVICE, dtype=BF16)
    for splits in ([4, 1000, 2], [-5, 4, 3], [2**31 - 1] * 3):
        y = op(x, splits=torch.tensor(splits, device=DEVICE))
        torch.cuda.synchronize()
        assert torch.isfinite(y).all()


@pytest.mark.parametrize("disabled", ["", "*"])
@pytest.mark.parametrize("weights", ["probs", None])
def test_places_outside_of_the_rows_address_no_memory(no_sync, weights, disabled, monkeypatch):
    """A negative index, or one past the end, counts as a sentinel; with FUSEDMOE_DEBUG=1 it is an error."""
    torch.manual_seed(5)
    tokens, chosen = 40, 4
    rows = tokens * chosen
    places = torch.randperm(rows, device=DEVICE).view(tokens, chosen)
    slots = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    slots[places.flatten()] = torch.arange(rows, device=DEVICE)
    wrong, right = places.clone(), places.clone()
    wrong[::3, 1], wrong[1::3, 2], wrong[2::3, 0] = -1, -(2**40), rows + 5
    right[::3, 1], right[1::3, 2], right[2::3, 0] = rows, rows, rows
    x = torch.randn(rows, 64, device=DEVICE, dtype=BF16)
    named = {} if weights is None else {"probs": torch.rand(rows, device=DEVICE)}
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


# ---- nothing waits


def test_what_reads_the_host_is_marked():
    splits = torch.tensor([3, 5], device=DEVICE)
    for dtype, width, marked in ((BF16, 64, False), (torch.float32, 64, True), (BF16, 60, True)):
        op = fm.Sequential(fm.GroupedLinear(2, width, 64, device=DEVICE, dtype=dtype))
        x = torch.randn(8, width, device=DEVICE, dtype=dtype)
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


def test_what_stands_between_the_ops_keeps_the_tail_out(no_sync):
    """The parts of a Sequential share its splits on the device, without a host synchronisation."""
    seq = fm.Sequential(*experts(), fm.Scale("probs_2"))
    x, probs, dy, splits = inputs(SPLITS["uneven"])
    used, probs_2 = sum(SPLITS["uneven"]), torch.rand_like(probs.detach())
    probs_2[used:] = torch.nan

    def outcome(module):
        module.zero_grad()
        leaves = [t.detach().clone().requires_grad_() for t in (x, probs, probs_2)]
        y = module(leaves[0], splits=splits, probs=leaves[1], probs_2=leaves[2])
        y.backward(dy)
        return [y.detach(), *[t.grad for t in leaves], *[p.grad for p in module.parameters()]]

    expected = outcome(seq)
    separated = fm.Sequential(torch.nn.Identity(), *[m for op in seq for m in (op, torch.nn.Identity())])
    outcome(separated)  # compiles and makes the plans
    with no_sync():
        got = outcome(separated)
    for a, b in zip(got, expected, strict=True):
        assert b.isfinite().all()
        assert error(a, b.double()) < 8e-3  # a fused epilogue rounds less often
    for t in got[:4]:
        assert not t[used:].any()
        assert t[:used].any()


@pytest.mark.parametrize(
    "options",
    [
        {"score": "softmax"},
        {"score": "topk_softmax", "router_bias": True, "bias": True},
        {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "shared_intermediate": 64, "shared_gate": True},
    ],
    ids=lambda o: o["score"],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_moe_never_synchronises(no_sync, options, deterministic):
    layer = fm.MoE(H, I, E, K, device=DEVICE, dtype=BF16, **options)
    x = torch.randn(4, 64, H, device=DEVICE, dtype=BF16, requires_grad=True)

    def step():
        y, stats = layer(x, return_stats=True)
        (y.float().square().mean() + 0.01 * stats.load_balancing_loss + 0.001 * stats.z_loss).backward()
        if layer.router.balance_bias is not None:
            layer.router.update_bias(stats.load)

    torch.use_deterministic_algorithms(deterministic)
    try:
        step()
        first, x.grad = x.grad, None
        with no_sync():
            step()
        assert first.any()
        if layer.router.balance_bias is None:  # its update may change the choice
            assert torch.equal(x.grad, first)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_whole_training_step_of_an_moe_in_one_graph():
    """Router, experts, losses, backward, bias update and optimizer; compared with the same steps run eagerly."""

    def make():
        torch.manual_seed(5)
        layer = fm.MoE(H, I, E, K, score="sigmoid", shared_intermediate=64, device=DEVICE, dtype=BF16)
        return layer, torch.optim.AdamW(layer.parameters(), lr=1e-3, capturable=True)

    batches = torch.randn(2, 256, H, device=DEVICE, dtype=BF16)
    x, target = batches[0].clone(), torch.randn(256, H, device=DEVICE, dtype=BF16)

    def stepper(layer, optimizer, losses):
        def step():
            optimizer.zero_grad(set_to_none=True)
            y, stats = layer(x, return_stats=True)
            loss = (y - target).float().square().mean() + 0.01 * stats.load_balancing_loss + 1e-3 * stats.z_loss
            loss.backward()
            layer.router.update_bias(stats.load)
            optimizer.step()
            losses["loss"] = loss.detach()

        return step

    captured, eager = make(), make()
    losses, eager_losses = {}, {}
    graph = capture(stepper(*captured, losses), warm_ups=3)
    eager_step = stepper(*eager, eager_losses)
    for _ in range(3):
        eager_step()  # the warm-ups; a capture itself runs nothing
    first = None
    for i in range(20):
        x.copy_(batches[i % 2])
        graph.replay()
        eager_step()
        assert torch.equal(losses["loss"], eager_losses["loss"])
        first = losses["loss"].item() if first is None else first
    for p, q in zip(captured[0].parameters(), eager[0].parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(captured[0].router.balance_bias, eager[0].router.balance_bias)
    assert losses["loss"].item() < 0.95 * first


# ---- explanations and estimates


@needs_gpu
@pytest.mark.parametrize(
    ("recipe", "bias", "dtype"),
    pairwise(("bf16", "fp8_row", "fp8_block", "mxfp8"), (False, True), (BF16, torch.float32)),
    ids=str,
)
def test_plans_asked_elsewhere_and_there(recipe, bias, dtype):
    """``explain(..., arch=90)`` on any machine gives the plan of an sm_90 GPU."""

    def plan(device, **asked):
        layer = fm.MoE(192, 136, 12, 3, bias=bias, device=device, dtype=dtype)
        with fm.recipe(recipe):
            return fm.explain(layer, tokens=300, **asked).groups[0].explanation.plans[0]

    there = plan("cuda")
    for device in ("cpu", "meta", "cuda"):
        asked = plan(device, arch=90)
        assert asked.steps == there.steps
        assert (asked.attempts, asked.kept_bytes) == (there.attempts, there.kept_bytes)


def count(seq, x, splits, probs):
    with FlopCounterMode(display=False) as counter:
        y = seq(x, splits=splits, probs=probs)
        forward = counter.get_total_flops()
        y.sum().backward()
    return forward, counter.get_total_flops() - forward


def test_flop_counters_and_fake_tensors_never_reach_a_kernel():
    seq, (x, probs, _, splits) = experts(), inputs([15] * E, 16)
    forward = 2 * len(x) * (H * 2 * I + I * H)
    before = seq(x, splits=splits, probs=probs)
    fused = str(seq.explain(x, splits=splits, probs=probs))
    before.sum().backward()
    assert count(seq, x, splits, probs) == (forward, 2 * forward)
    assert str(seq.explain(x, splits=splits, probs=probs)) == fused  # the calls after it are planned as those before
    assert torch.equal(seq(x, splits=splits, probs=probs), before)
    mode = FakeTensorMode()
    leaves = [mode.from_tensor(t.detach()).requires_grad_() for t in (x, probs)]
    fake_splits = mode.from_tensor(splits)
    with mode:
        fake = experts()
        assert count(fake, leaves[0], fake_splits, leaves[1]) == (forward, 2 * forward)
    for a, b in zip((*leaves, *fake.parameters()), (x, probs, *seq.parameters()), strict=True):
        assert (a.grad.shape, a.grad.dtype, a.grad.device) == (b.grad.shape, b.grad.dtype, b.grad.device)


# ---- random numbers


class Dropout(fm.Op):
    draws_random = True

    def compute(self, x):
        return F.dropout(x, 0.5)


class Undeclared(fm.Op):
    def compute(self, x):
        return F.dropout(x, 0.5)


def with_dropout(op):
    torch.manual_seed(0)
    kind = {"device": DEVICE, "dtype": BF16}
    seq = fm.Sequential(fm.GroupedLinear(4, 64, 64, **kind), op, fm.GroupedLinear(4, 64, 64, **kind))
    return seq, torch.randn(96, 64, **kind).requires_grad_(), torch.tensor([20, 0, 40, 36], device=DEVICE)


def test_the_backward_pass_draws_the_same_mask(no_sync):
    seq, x, splits = with_dropout(Dropout())
    wanted = [x, *seq.parameters()]
    torch.autograd.grad(seq(x, splits=splits).sum(), wanted)
    state, of_cpu = torch.cuda.get_rng_state(), torch.get_rng_state()
    with no_sync():
        y = seq(x, splits=splits)
        torch.rand(5, device=DEVICE)
        got = [y, *torch.autograd.grad(y.float().square().sum(), wanted)]
    after = torch.rand(1, device=DEVICE)
    assert torch.equal(torch.get_rng_state(), of_cpu)

    torch.cuda.set_rng_state(state)
    first, _, last = seq
    y = last(F.dropout(first(x, splits=splits), 0.5), splits=splits)
    torch.rand(5, device=DEVICE)
    want = [y, *torch.autograd.grad(y.float().square().sum(), wanted)]
    assert torch.equal(after, torch.rand(1, device=DEVICE))
    for a, b in zip(got, want, strict=True):
        assert b.any()
        assert error(a, b.double()) < 1e-2


def test_a_graph_captures_random_inference_and_refuses_training():
    seq, x, splits = with_dropout(Undeclared())
    with pytest.raises(fm.InputError, match="draws_random = True"):
        seq(x, splits=splits)
    seq, x, splits = with_dropout(Dropout())
    seq(x, splits=splits).sum().backward()
    found = []
    with torch.no_grad():
        graph = capture(lambda: found.append(seq(x, splits=splits)), warm_ups=1)
        graph.replay()
        first = found[-1].clone()
        graph.replay()
    assert first.any()
    assert not torch.equal(first, found[-1]), "each replay draws anew"
    with pytest.raises(fm.InputError, match="CUDA graph capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        seq(x, splits=splits)


# ---- second derivatives


def penalty(y, sources, dy):
    """Gradients, and the gradients of a penalty on them: of every one with every other."""
    first = torch.autograd.grad(y, sources, dy, create_graph=True)
    loss = sum(g.float().square().mean() if g.dtype is BF16 else g.square().mean() for g in first)
    # the last bias is in no gradient: autograd has None for it
    return [*first, *torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("bias", [False, True])
def test_a_penalty_on_every_gradient_against_fp64(no_sync, bias):
    seq, (x, probs, dy, splits) = experts(bias), inputs(SPLITS["uneven"])
    sources = [x, probs, *seq.parameters()]
    first = penalty(seq(x, splits=splits, probs=probs), sources, dy)
    with no_sync():
        got = penalty(seq(x, splits=splits, probs=probs), sources, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True)), "deterministic"

    exact, leaves, used = copy.deepcopy(seq).double(), clean(x, probs), sum(SPLITS["uneven"])
    y = meaning(exact, leaves[0], splits=splits.cpu(), probs=leaves[1])
    want = penalty(y, [*leaves, *exact.parameters()], clean(dy)[0].detach())
    assert sum(not b.any() for b in want) == bias  # the second derivative of the last bias
    for a, b in zip(got, want, strict=True):
        assert bool(a.any()) == bool(b.any())
        assert a.isfinite().all()
        if a.shape[0] == x.shape[0]:
            assert not a[used:].any()
        assert ((a.double() - b).norm() <= 2e-2 * b.norm()).item()


@needs_gpu
def test_strict_raises_and_the_log_warns(caplog):
    seq, (x, probs, _, splits) = experts(), inputs(SPLITS["uneven"])
    with fm.strict():
        y = seq(x, splits=splits, probs=probs)
    with pytest.raises(fm.FusionError, match=r"strict: chain 0 to 3: its backward pass runs unfused"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    forget_said()
    with caplog.at_level(logging.WARNING, "fusedmoe.fusion"):
        torch.autograd.grad(seq(x, splits=splits, probs=probs).sum(), x, create_graph=True)
    assert [r.levelname for r in caplog.records if "second derivatives" in r.getMessage()] == ["WARNING"]
