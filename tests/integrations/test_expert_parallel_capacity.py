"""Ranks with fewer rows than slots: bounds that always hold, and what each policy does with slots that find no row."""

import pytest
import torch
from torch import distributed as dist

import fusedmoe as fm

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from kit.two_ranks import Ranks

pytestmark = pytest.mark.distributed

EXPERTS, HIDDEN, INTERMEDIATE, CHOSEN = 8, 8, 6, 3
TOKENS = (96, 50, 0, 71)  # of each rank


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("capacity"), request.param)
    try:
        yield started, request.param
    finally:
        started.stop()


def on_all(ranks, function, *args):
    started, size = ranks
    return started.run(function, size, *args)


# ---- a layer of one process, and its part on a rank -----------------------------------------------------------------


def layer_of_all(dtype=torch.float64):
    torch.manual_seed(0)
    return fm.MoE(HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN, dtype=dtype)


def layer_of_rank(rank, size, ep, dtype=torch.float64):
    whole, here = layer_of_all(dtype), EXPERTS // size
    layer = fm.MoE(HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN, dtype=dtype, expert_parallel=ep)
    with torch.no_grad():
        layer.router.weight.copy_(whole.router.weight)
        for name in ("gate_up", "down"):
            getattr(layer.experts, name).weight.copy_(getattr(whole.experts, name).weight[rank * here :][:here])
    return layer


def inputs(size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(t, HIDDEN, generator=generator, dtype=torch.float64).to(dtype),
         torch.randn(t, HIDDEN, generator=generator, dtype=torch.float64).to(dtype))
        for t in TOKENS[:size]
    ]  # fmt: skip


def trained(layer, x, dy):
    """The output and all gradients; a rank without tokens has zeros for those of its router."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    experts = layer.experts
    return [y.detach(), x.grad, layer.router.weight.grad, experts.gate_up.weight.grad, experts.down.weight.grad]


def of_one_process(size):
    """The results of `trained` on each rank, computed by one process with all experts and all tokens."""
    layer, of_ranks = layer_of_all(), inputs(size)
    y, dx, drouter, *dexperts = trained(layer, *(torch.cat(parts) for parts in zip(*of_ranks, strict=True)))
    counts = [len(x) for x, _ in of_ranks]
    here = EXPERTS // size
    per_rank = zip(y.split(counts), dx.split(counts), *(dw.split(here) for dw in dexperts), strict=True)
    return [[y, dx, *dexperts] for y, dx, *dexperts in per_rank], drouter


def assert_as_one_process(size, results):
    wanted, drouter = of_one_process(size)
    for (y, dx, _, *dexperts), want in zip(results, wanted, strict=True):
        for got, exact in zip([y, dx, *dexperts], want, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(sum(r[2] for r in results), drouter, rtol=1e-12, atol=1e-13)
    assert all(t.abs().sum() > 0 for t in wanted[0])


# ---- the bound that always holds ------------------------------------------------------------------------------------


def with_settings(rank, size, settings):
    ep = fm.ExpertParallel(engine="allgather", **settings)
    layer = layer_of_rank(rank, size, ep)
    x, dy = inputs(size)[rank]
    results = trained(layer, x, dy)
    return results, ep.dropped(), str(layer.explain(x))


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_tokens": 100}, {"capacity": 100.0}, {"capacity": 1.01, "overflow": "rerun"},
     {"capacity": 0.25, "overflow": "rerun", "max_tokens": 96}],
    ids=str,
)  # fmt: skip
def test_all_slots_have_rows(ranks, settings):
    answers = on_all(ranks, with_settings, settings)
    assert_as_one_process(ranks[1], [results for results, *_ in answers])
    for _, dropped, explained in answers:
        assert dropped == 0
        assert ("overflow='rerun'): HOST SYNC" in explained) == ("overflow" in settings)


def local_rows(rank, size, settings, index):
    """The shape of the rows of a rank, and the provided values, for an empty chain of `Dispatch` and a grouped op."""
    ep = fm.ExpertParallel(engine="allgather", **settings)
    here = EXPERTS // size
    seen = []

    class Rows(fm.ops.Op):
        runtime_inputs = ("splits", "probs", "row_of_slot", "slot_of_row", "token_of_row")

        def compute(self, x, *values):
            seen.append((x.shape[0], *(v.clone() for v in values)))
            return x.clone()

    x = torch.randn(index.shape[1], 4)
    chain = fm.Sequential(fm.Dispatch(EXPERTS, expert_parallel=ep), Rows(), fm.Combine(None, expert_parallel=ep))
    with torch.no_grad():
        y = chain(x, expert_index=index[rank], expert_weight=torch.rand(index.shape[1:]))
    return seen[-1], x, y, here, ep.dropped()


def distinct(generator, tokens, chosen):
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:chosen] for _ in range(tokens)])


@pytest.mark.parametrize(
    ("chosen", "capacity", "rows"),
    [(3, None, {2: 2 * 100 * 3, 4: 4 * 100 * 2}), (1, 1.0, {2: 128, 4: 128}), (3, 1.0, {2: 384, 4: 384}),
     (3, 1.3, {2: 512, 4: 512}), (3, 9.0, {2: 600, 4: 800})],
)  # fmt: skip
def test_rows_follow_from_shapes(ranks, chosen, capacity, rows):
    size = ranks[1]
    generator = torch.Generator().manual_seed(2)
    index = torch.stack([distinct(generator, 100, chosen) for _ in range(size)])
    answers = on_all(ranks, local_rows, {"capacity": capacity, "overflow": "drop"}, index)
    for rank, ((count, splits, *_), x, y, here, dropped) in enumerate(answers):
        of_expert = [int((index == e).sum()) for e in range(rank * here, (rank + 1) * here)]
        assert count == rows[size]
        assert int(splits.sum()) == min(count, sum(of_expert))
        if not dropped:
            torch.testing.assert_close(y, chosen * x)


# ---- slots that find no row -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one expert", "sentinels", "random"])
def test_the_last_experts_of_a_rank_lose_rows_first(ranks, kind):
    size = ranks[1]
    generator = torch.Generator().manual_seed(3)
    index = torch.stack([distinct(generator, 300, 2) for _ in range(size)])
    if kind == "one expert":
        index[..., 0] = EXPERTS - 1
        index[..., 1] = 0
    elif kind == "sentinels":
        index[:, ::3, 1] = -1
        index[0, 5:50] = EXPERTS
    capacity = 0.5
    rows = -(-int(capacity * 300 * 2) // 128) * 128
    answers = on_all(ranks, local_rows, {"capacity": capacity, "overflow": "drop"}, index)
    flat = index.reshape(size * 300, 2)
    lost = torch.zeros_like(flat, dtype=torch.bool)
    for rank, ((count, splits, probs, row_of_slot, slot_of_row, token_of_row), *_, here, _) in enumerate(answers):
        experts = range(rank * here, (rank + 1) * here)
        order = [(t, k) for e in experts for t, k in (flat == e).nonzero().tolist()]
        assert count == rows
        kept = order[:rows]
        assert int(splits.sum()) == len(kept)
        assert torch.equal(slot_of_row[: len(kept)], torch.tensor([2 * t + k for t, k in kept]))
        assert torch.equal(token_of_row.long(), slot_of_row // 2)
        wanted = torch.full_like(flat, rows)
        for row, (t, k) in enumerate(kept):
            wanted[t, k] = row
        assert torch.equal(row_of_slot, wanted)
        assert not probs[len(kept) :].any()
        for t, k in order[rows:]:
            lost[t, k] = True
    valid = (flat >= 0) & (flat < EXPERTS)
    counts = (valid & ~lost).sum(1).view(size, 300)
    assert lost.any()
    assert counts.any()
    for (_, x, y, _, dropped), count in zip(answers, counts, strict=True):
        torch.testing.assert_close(y, count[:, None] * x)
        assert dropped == int(lost.sum()), "every rank knows the number"


def small_gradients(rank, size):
    """A layer that drops slots, against one in which these slots are sentinels."""
    ep = fm.ExpertParallel(capacity=0.4, overflow="drop", engine="allgather", max_tokens=200)
    all_rows = fm.ExpertParallel(engine="allgather", max_tokens=200)
    generator = torch.Generator().manual_seed(4)
    index = distinct(generator, 200 * size, 2)
    here = EXPERTS // size
    limit = -(-int(0.4 * 200 * 2) // 128) * 128
    kept = index.clone()
    for r in range(size):
        order = [
            s for e in range(r * here, (r + 1) * here) for s in (index.flatten() == e).nonzero().flatten().tolist()
        ]
        kept.view(-1)[order[limit:]] = -1
    assert not torch.equal(kept, index)
    x0, w0 = torch.randn(200, HIDDEN, dtype=torch.float64), torch.rand(200, 2, dtype=torch.float64)
    weight = torch.randn(here, 5, HIDDEN, dtype=torch.float64)
    results = []
    for of, ids in ((ep, index), (all_rows, kept)):
        x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
        fc = fm.GroupedLinear(here, HIDDEN, 5, bias=False, dtype=torch.float64)
        with torch.no_grad():
            fc.weight.copy_(weight)
        chain = fm.Sequential(
            fm.Dispatch(EXPERTS, expert_parallel=of), fc, fm.Scale("probs"), fm.Combine(None, expert_parallel=of)
        )
        y = chain(x, expert_index=ids.view(size, 200, 2)[rank], expert_weight=w)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, w.grad, fc.weight.grad])
    return results


def test_gradients_are_those_of_sentinels(ranks):
    for dropping, wanted in on_all(ranks, small_gradients):
        for got, want in zip(dropping, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
            assert want.abs().sum() > 0


def raised(rank, size):
    ep = fm.ExpertParallel(capacity=0.4, engine="allgather")
    layer = layer_of_rank(rank, size, ep)
    x, dy = inputs(size)[rank]
    messages = []
    for _ in range(2):
        try:
            trained(layer, x, dy)
        except fm.InputError as error:
            messages.append(str(error))
    ep.check()  # the error was raised already
    return messages, ep.dropped()


def test_every_rank_raises_the_same_error_in_the_same_call(ranks):
    size = ranks[1]
    (messages, dropped), *others = on_all(ranks, raised)
    assert all(other == (messages, dropped) for other in others)
    with torch.no_grad():
        index = layer_of_all().router(torch.cat([x for x, _ in inputs(size)])).expert_index
    here = EXPERTS // size
    needed = [int(((index // here) == r).sum()) for r in range(size)]
    limit = -(-int(0.4 * max(TOKENS[:size]) * CHOSEN) // 128) * 128
    assert len(messages) == 2
    assert messages[0] == messages[1]
    assert f"at most {limit} rows on each rank with capacity=0.4, got {max(needed)} rows" in messages[0]
    assert f"rank {needed.index(max(needed))}:" in messages[0]
    assert dropped == 2 * sum(max(0, n - limit) for n in needed)


def checkpointed(rank, size):
    ep = fm.ExpertParallel(capacity=0.4, overflow="drop", engine="allgather")
    layer = layer_of_rank(rank, size, ep)
    x, dy = inputs(size)[rank]
    counts = []
    with torch.inference_mode():
        layer(x)
    for reentrant in (True, False):
        before = ep.dropped()
        y = torch.utils.checkpoint.checkpoint(layer, x.clone().requires_grad_(), use_reentrant=reentrant)
        y.backward(dy)
        counts.append(ep.dropped() - before)
    before = ep.dropped()
    trained(layer, x, dy)
    layer.explain(x)
    return counts, ep.dropped() - before


def test_a_recomputed_call_counts_once(ranks):
    for counts, of_call in on_all(ranks, checkpointed):
        assert counts == [of_call, of_call]
        assert of_call > 0


def repeated_experts(rank, size, overflow):
    """Tokens that choose one expert several times may need more rows than the bound."""
    ep = fm.ExpertParallel(engine="allgather", capacity=1.0, overflow=overflow, max_tokens=64)
    chosen = EXPERTS // size + 1
    chain = fm.Sequential(fm.Dispatch(EXPERTS, expert_parallel=ep), fm.Combine(None, expert_parallel=ep))
    x = torch.randn(64, 4)
    y = chain(x, expert_index=torch.zeros(64, chosen, dtype=torch.int8), expert_weight=torch.ones(64, chosen))
    return x, y, chosen, ep.dropped()


def test_more_rows_than_the_bound(ranks):
    size = ranks[1]
    for x, y, chosen, dropped in on_all(ranks, repeated_experts, "rerun"):
        torch.testing.assert_close(y, chosen * x)
        assert dropped == 0
    for x, _, chosen, dropped in on_all(ranks, repeated_experts, "drop"):
        assert dropped == size * len(x) * chosen - -(-64 * chosen // 128) * 128


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"capacity": 0}, "capacity: expected a positive number or None, got 0"),
     ({"overflow": "clip"}, "overflow: expected one of 'raise', 'rerun', 'drop', got 'clip'")],
)  # fmt: skip
def test_wrong_settings(mesh, settings, message):
    with pytest.raises(fm.InputError, match=message):
        fm.ExpertParallel(**settings)
