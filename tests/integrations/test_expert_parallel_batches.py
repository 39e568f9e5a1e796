"""The experts of a rank in batches of rows, `ExpertParallel(batch_rows=...)`. In test_expert_parallel_ranks.py are the
results, which are those of one process.
"""

import re

import pytest
import torch
from kit import hopper_ranks as hopper
from kit.expert_parallel_ranks import (
    E,
    H,
    bounds,
    compared,
    experts,
    moe,
    on_each,
    one_expert_often,
    pair,
    randn,
    ranks_of,
    routes,
)
from kit.saved import saved_bytes
from torch import distributed as dist
from torch import nn

import fusedmoe as fm
from fusedmoe.call.batches import _Call
from fusedmoe.numerics import recipes
from fusedmoe.numerics.formats import Delayed
from fusedmoe.ops.state import grad_sums

pytestmark = pytest.mark.distributed

CHOSEN = 3
TOKENS = (96, 50, 0, 71)  # of each rank
both_sizes = pytest.mark.parametrize("size", [2, 4])


def most_rows(size):
    """The rows that a rank may need."""
    return size * max(TOKENS) * min(CHOSEN, E // size)


def tokens_of(ep):
    return randn(sum(TOKENS), H, seed=1)[bounds(ep, TOKENS)].clone().requires_grad_()


@on_each
def plan_and_run(ep):
    """The kept bytes and the plan of `explain`, which runs on rank 0 alone; the bytes that autograd keeps, and the
    batches that run, forward and then backward.
    """
    _, layer = pair(ep, lambda ep: moe(ep, top_k=CHOSEN))
    x, ran, named = tokens_of(ep), [], _Call._named
    explained = layer.explain(x) if ep.rank == 0 else None
    _Call._named = lambda call, batch, *given: ran.append(batch) or named(call, batch, *given)
    try:
        kept = saved_bytes(layer, x)
        layer(x).sum().backward()
    finally:
        _Call._named = named
    return explained and [(title, plan and plan.kept_bytes) for title, plan in explained.parts], kept, ran


@both_sizes
@pytest.mark.parametrize("rows", [128, 200])
def test_nothing_of_a_batch_is_kept(four, size, rows):
    rounded = -(-rows // 128) * 128
    batches, most = -(-most_rows(size) // rounded), most_rows(size)
    assert batches > 2
    (parts, *_), *_ = found = four.run(plan_and_run, size, {"batch_rows": rows, "max_tokens": 96})[:size]
    for _, _, ran in found:
        assert ran == [*range(batches)] * 3  # two forward passes and one backward pass
    assert any(f"{batches} times on at most {rounded} rows" in title for title, _ in parts)
    (at_once, kept_at_once, _), *_ = four.run(plan_and_run, size, {"max_tokens": 96})[:size]
    ids = size * 96 * CHOSEN * 4  # those of all ranks, which two chains keep
    assert sum(kept for _, kept in parts) == found[0][1] + ids
    assert sum(kept for _, kept in at_once) == kept_at_once
    # FC1's output and the activation's, of all rows that a rank may need
    assert kept_at_once - found[0][1] > most * 3 * 8 * 8 - most * 8 * 4


@on_each
def sums_of_weights(ep, main_grad):
    """The weights that kernels have added to, and all results, with batches and without them."""
    kernels = hopper.stand_ins()
    taken, take = [], grad_sums.take
    results = []
    for of in (ep, ranks_of(ep.ranks, hopper.MOST)):
        made = hopper.layer(of, main_grad)
        kernels.calls.clear()
        taken.clear()
        grad_sums.take = lambda op, dtype: taken.append(take(op, dtype)) or taken[-1]
        try:
            results.append(hopper.trained(made, hopper.MOST))
        finally:
            grad_sums.take = take
        if of is ep:
            added, names = [t is not None for t in taken], {name for name, _ in kernels.calls}
    return added, names, results


@pytest.mark.parametrize("main_grad", [False, True])
def test_kernels_add_the_gradients_of_weights(hopper_ranks, main_grad):
    settings = {"batch_rows": 128, "max_tokens": hopper.MOST}
    rows = 2 * hopper.MOST * hopper.CHOSEN
    batches = -(-rows // 128)
    for added, names, (got, want) in hopper_ranks.run(sums_of_weights, 2, settings, main_grad)[:2]:
        # of two weights, in each batch except the first
        assert added == ([] if main_grad else [False] * 2 + [True] * 2 * (batches - 1))
        assert "gathered_gemm_activation" in names, names
        compared(got, want, within=0.02)
        assert all(t.any() for t in want.values())


@on_each
def accumulated(ep):
    """Gradients of two micro-batches in ``weight.grad``, with batches and without them."""
    found = []
    for of in (ep, ranks_of(ep.ranks)):
        _, layer = pair(of, lambda ep: moe(ep, top_k=CHOSEN))
        for seed in (1, 2):
            layer(tokens_of(ep) * seed).square().sum().backward()
        found.append({name: p.grad for name, p in layer.named_parameters()})
    compared(*found, rtol=1e-11, atol=1e-12)
    assert all(g.any() for g in found[1].values())


def test_micro_batches(four):
    four.run(accumulated, 2, {"batch_rows": 128})


@on_each
def repeated(ep):
    """Tokens that choose an expert more often than there are rows for."""
    before, x = ep.dropped(), torch.ones(64, 4)
    chain, given, chosen = one_expert_often(ep, x)
    return float(chain(x, **given).sum()) / 4, ep.dropped() - before, 64 * chosen


@both_sizes
def test_slots_without_a_row_are_counted(four, size):
    settings = {"batch_rows": 128, "overflow": "drop", "max_tokens": 64}
    found = four.run(repeated, size, settings)[:size]
    slots = size * found[0][2]
    rows = size * 64 * (E // size)
    assert sum(computed for computed, *_ in found) == rows
    assert all(dropped == slots - rows > 0 for _, dropped, _ in found)


@on_each
def with_other_parameters(ep):
    """Gradients of a call with other parameters than those of the layer, which it has again in the backward pass."""
    found = []
    for of in (ep, ranks_of(ep.ranks, {"max_tokens": 96})):
        _, layer = pair(of, lambda ep: moe(ep, top_k=CHOSEN))
        others = {name: (1.5 * p.detach()).requires_grad_() for name, p in layer.named_parameters()}
        x = tokens_of(ep)
        torch.func.functional_call(layer, others, (x,)).square().sum().backward()
        assert all(p.grad is None for p in layer.parameters())
        found.append({"x": x.grad} | {name: p.grad for name, p in others.items()})
    compared(*found, rtol=1e-11, atol=1e-12)
    assert all(g.any() for g in found[1].values())


def test_the_backward_pass_has_the_parameters_of_the_call(four):
    four.run(with_other_parameters, 2, {"batch_rows": 128, "max_tokens": 96})


@on_each
def changed(ep):
    """The error of a weight that changes in place between the call and its backward pass."""
    _, layer = pair(ep, lambda ep: moe(ep, top_k=CHOSEN))
    y = layer(tokens_of(ep))
    with torch.no_grad():
        layer.experts.down.weight.mul_(2)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_weights_that_change_before_the_backward_pass_are_an_error(four):
    for message in four.run(changed, 2, {"batch_rows": 128, "max_tokens": 96})[:2]:
        assert "modified by an inplace operation" in message


# ---- errors ---------------------------------------------------------------------------------------------------------


class Random(fm.ops.Op):
    draws_random = True

    def compute(self, x):
        return x + torch.rand_like(x)


class Counts(fm.ops.Op):
    runtime_inputs = ("splits",)

    def compute(self, x, splits):
        return x


def hooked(layer):
    layer[1].register_forward_hook(lambda *_: None)
    return layer


# what is changed in the experts, or how they are called, and the error
WRONG = {
    "a module": (
        lambda m: m.insert(2, nn.Identity()),
        "only ops, without hooks, up to the Combine, got 1.GroupedLinear",
    ),
    "a hook": (hooked, "only ops, without hooks, up to the Combine, got 0.Dispatch"),
    "random": (lambda m: m.insert(2, Random()), "ops that draw no random numbers, got 2"),
    "splits": (lambda m: m.append(Counts()), "expected no op after the Combine that takes splits of a batch"),
    "delayed": (lambda m: m, "delayed scaling: expected experts that compute all rows at once"),
    "second derivatives": (lambda m: m, "second derivatives .* expected experts that compute all rows at once"),
}


@on_each
def error_of(ep, case):
    layer = experts(ep).double() if case == "second derivatives" else experts(ep).bfloat16()
    WRONG[case][0](layer)
    x, given = tokens_of(ep).to(layer[1].weight.dtype), routes(TOKENS[: ep.ranks], of=torch.float32)(bounds(ep, TOKENS))
    recipe = recipes.FP8Tensor(delayed=Delayed(4)) if case == "delayed" else "bf16"
    try:
        with fm.recipe(recipe):
            y = layer(x, **given)
        # that of the experts, whose part is the only one without an exchange
        part = layer._of_process.partition.parts[-2]
        inputs = {"gathered_index": torch.zeros(128, 2, dtype=torch.int32), "gathered_weight": torch.ones(128, 2)}
        rows = torch.ones(128, H, dtype=torch.float64, requires_grad=True)
        y, _ = part.run(rows, inputs, layer._options, None, counted=True)
        torch.autograd.grad(y.sum(), rows, create_graph=True)
    except fm.InputError as error:
        return str(error)
    finally:
        dist.barrier(ep.group)
    return ""


@pytest.mark.parametrize("case", WRONG)
def test_errors(four, case):
    for message in four.run(error_of, 2, {"batch_rows": 128, "max_tokens": 96}, case)[:2]:
        assert re.search(WRONG[case][1], message), message


@pytest.mark.parametrize(("settings", "message"), [
    ({"batch_rows": 0}, "batch_rows: expected a positive integer or None, got 0"),
    ({"batch_rows": 128, "capacity": 1.0}, r"batch_rows: expected None with capacity=1\.0, got 128"),
    ({"batch_rows": 128, "engine": "alltoall"}, "batch_rows: expected None with engine 'alltoall', got 128"),
])  # fmt: skip
@pytest.mark.usefixtures("mesh")
def test_wrong_settings(settings, message):
    with pytest.raises(fm.InputError, match=message):
        fm.ExpertParallel(**settings)


@pytest.mark.usefixtures("mesh")
def test_settings_are_shown():
    ep = fm.ExpertParallel(batch_rows=1000, max_tokens=8)
    assert "batch_rows=1000" in repr(ep)
    assert "experts compute at most 1024 rows at a time" in ep.settings()
    assert ep.chosen_for(1) is ep
