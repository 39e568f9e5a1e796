"""Ranks with fewer rows than slots: what each policy does with slots that find no row."""

import pytest
import torch
from kit.expert_parallel_ranks import E, H, bounds, moe, on_each, one_expert_often, pair, randn, ranks_of, result
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm

pytestmark = pytest.mark.distributed

CHOSEN = 3
TOKENS = (96, 50, 0, 71)  # of each rank
both_sizes = pytest.mark.parametrize("size", [2, 4])


def rows_of(capacity, tokens, chosen):
    return -(-int(capacity * tokens * chosen) // 128) * 128


def distinct(seed, tokens, chosen):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(E, generator=generator)[:chosen] for _ in range(tokens)])


@on_each
def local_rows(ep, index):
    """The shape of the rows of a rank, and the provided values, for an empty chain of `Dispatch` and a grouped op."""
    seen = []

    class Rows(fm.ops.Op):
        runtime_inputs = ("splits", "probs", "row_of_slot", "slot_of_row", "token_of_row")

        def compute(self, x, *values):
            seen.append((x.shape[0], *(v.clone() for v in values)))
            return x.clone()

    x, before = torch.randn(index.shape[1], 4), ep.dropped()
    chain = fm.Sequential(fm.Dispatch(E, expert_parallel=ep), Rows(), fm.Combine(None, expert_parallel=ep))
    with torch.no_grad():
        y = chain(x, expert_index=index[ep.rank], expert_weight=torch.rand(index.shape[1:]))
    return seen[-1], x, y, ep.dropped() - before


@pytest.mark.parametrize(("size", "kind"), [(2, "one expert"), (2, "sentinels"), (4, "sentinels"), (4, "random")])
def test_the_last_experts_of_a_rank_lose_rows_first(four, size, kind):
    index = distinct(3, size * 300, 2).view(size, 300, 2)
    if kind == "one expert":
        index[..., 0] = E - 1
        index[..., 1] = 0
    elif kind == "sentinels":
        index[:, ::3, 1] = -1
        index[0, 5:50] = E
    rows, here = rows_of(0.5, 300, 2), E // size
    answers = four.run(local_rows, size, {"capacity": 0.5, "overflow": "drop"}, index)[:size]
    flat = index.reshape(size * 300, 2)
    lost = torch.zeros_like(flat, dtype=torch.bool)
    for rank, ((count, splits, probs, row_of_slot, slot_of_row, token_of_row), *_) in enumerate(answers):
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
    counts = ((flat >= 0) & (flat < E) & ~lost).sum(1).view(size, 300)
    assert lost.any()
    assert counts.any()
    for (_, x, y, dropped), count in zip(answers, counts, strict=True):
        torch.testing.assert_close(y, count[:, None] * x)
        assert dropped == int(lost.sum()), "every rank knows the number"


@on_each
def gradients_without_rows(ep):
    """A layer that drops slots, against one in which these slots are sentinels."""
    index, here = distinct(4, 200 * ep.ranks, 2), E // ep.ranks
    kept = index.clone()
    for r in range(ep.ranks):
        slots = [(index.flatten() == e).nonzero().flatten() for e in range(r * here, (r + 1) * here)]
        kept.view(-1)[torch.cat(slots)[rows_of(0.4, 200, 2) :]] = -1
    assert not torch.equal(kept, index)
    results = []
    for of, ids in ((ep, index), (ranks_of(ep.ranks, 200), kept)):
        fc = fm.GroupedLinear(here, H, H, dtype=torch.float64, expert_parallel=of)
        fc.weight.data.copy_(randn(here, H, H, seed=50 + ep.rank))
        chain = fm.Sequential(
            fm.Dispatch(E, expert_parallel=of), fc, fm.Scale("probs"), fm.Combine(None, expert_parallel=of)
        )
        given = {"expert_index": ids.view(-1, 200, 2)[ep.rank], "expert_weight": randn(200, 2, seed=6).requires_grad_()}
        found = result(chain, randn(200, H, seed=ep.rank), randn(200, H, seed=7), given)
        results.append([*found.values(), fc.weight.grad])
    return results


@both_sizes
def test_gradients_are_those_of_sentinels(four, size):
    settings = {"capacity": 0.4, "overflow": "drop", "max_tokens": 200}
    for dropping, wanted in four.run(gradients_without_rows, size, settings)[:size]:
        for got, want in zip(dropping, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
            assert want.any()


def layer_and_tokens(ep):
    _, layer = pair(ep, lambda ep: moe(ep, top_k=CHOSEN))
    here = bounds(ep, TOKENS)
    return layer, *(randn(sum(TOKENS), H, seed=seed)[here] for seed in (1, 2))


@on_each
def raised(ep):
    messages, before = [], ep.dropped()
    layer, x, dy = layer_and_tokens(ep)
    for _ in range(2):
        try:
            result(layer, x, dy)
        except fm.InputError as error:
            messages.append(str(error))
    ep.check()  # the error was raised already
    chosen = layer.router(randn(sum(TOKENS), H, seed=1)[: sum(TOKENS[: ep.ranks])]).expert_index
    return (messages, ep.dropped() - before), chosen


@both_sizes
def test_every_rank_raises_the_same_error_in_the_same_call(four, size):
    (told, chosen), *others = four.run(raised, size, {"capacity": 0.4})[:size]
    assert all(other == told for other, _ in others)
    needed = [int((chosen // (E // size) == r).sum()) for r in range(size)]
    limit = rows_of(0.4, max(TOKENS[:size]), CHOSEN)
    messages, dropped = told
    assert len(messages) == 2
    assert messages[0] == messages[1]
    assert f"at most {limit} rows on each rank with capacity=0.4, got {max(needed)} rows" in messages[0]
    assert f"rank {needed.index(max(needed))}:" in messages[0]
    assert dropped == 2 * sum(max(0, n - limit) for n in needed)


@on_each
def recomputed(ep):
    layer, x, dy = layer_and_tokens(ep)
    counts = []
    with torch.inference_mode():
        layer(x)
    for reentrant in (None, True, False):
        before = ep.dropped()
        result(layer, x, dy, call=None if reentrant is None else lambda *a: checkpoint(*a, use_reentrant=reentrant))  # noqa: B023
        layer.explain(x)
        counts.append(ep.dropped() - before)
    return counts


@both_sizes
def test_a_recomputed_call_counts_once(four, size):
    for of_call, *recomputed_calls in four.run(recomputed, size, {"capacity": 0.4, "overflow": "drop"})[:size]:
        assert recomputed_calls == [of_call, of_call]
        assert of_call > 0


@pytest.mark.parametrize(("settings", "message"), [
    ({"engine": "ring"}, r"engine: expected one of 'auto', 'allgather', 'alltoall', 'symmetric', got 'ring'"),
    ({"capacity": 0}, "capacity: expected a positive number or None, got 0"),
    ({"overflow": "clip"}, "overflow: expected one of 'raise', 'rerun', 'drop', got 'clip'"),
    ({"combine_dtype": torch.float16}, r"combine_dtype: expected torch.float32 or None, got torch.float16"),
    ({"dispatch_dtype": torch.int8}, r"dispatch_dtype: expected torch.float8_e4m3fn or None, got torch.int8"),
])  # fmt: skip
@pytest.mark.usefixtures("mesh")
def test_wrong_settings(settings, message):
    with pytest.raises(fm.InputError, match=message):
        fm.ExpertParallel(**settings)


@on_each
def repeated_experts(ep):
    """Tokens that choose one expert several times may need more rows than the bound."""
    before, x = ep.dropped(), torch.randn(64, 4)
    chain, given, chosen = one_expert_often(ep, x)
    plan = str(chain.explain(x, **given))
    return x, chain(x, **given), chosen, ep.dropped() - before, "overflow='rerun'): HOST SYNC" in plan


@both_sizes
@pytest.mark.parametrize("overflow", ["rerun", "drop"])
def test_more_rows_than_the_bound(four, size, overflow):
    settings = {"capacity": 1.0, "overflow": overflow, "max_tokens": 64}
    for x, y, chosen, dropped, waits in four.run(repeated_experts, size, settings)[:size]:
        assert waits is (overflow == "rerun")
        if overflow == "rerun":
            torch.testing.assert_close(y, chosen * x)
        assert dropped == (0 if overflow == "rerun" else size * len(x) * chosen - rows_of(1.0, 64, chosen))
