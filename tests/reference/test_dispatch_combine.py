"""Dispatch and Combine alone and together: rows by expert out of tokens and a routing, and back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.compare import assert_accurate, assert_close, assert_same_function, pairwise, with_gradients
from kit.layers import leaf
from kit.oracles import exact_copies, meaning
from kit.rounding import ROUNDOFF, error_bound
from kit.splits import routings, slots_by_expert

import fusedmoe as fm

NAN = math.nan
ROUTING = torch.tensor([[2, 0], [-1, 2], [4, 99], [2, 3], [0, 4]])  # of 4 experts: one without rows, sentinels
VALID = (ROUTING >= 0) & (ROUTING < 4)


def dispatch(x, index, weight, experts=4, **more):
    op = fm.Dispatch(experts)
    op.runtime_inputs = (*op.runtime_inputs, *more)
    return op(x, expert_index=index, expert_weight=weight, **more)


def combine(rows, provided, weights="probs"):
    names = ["row_of_slot", "slot_of_row", *([weights] if weights else [])]
    return fm.Combine(weights)(rows, **{name: provided[name] for name in names})


def both(x, index, weight, experts=4):
    return fm.Sequential(fm.Dispatch(experts), fm.Combine())(x, expert_index=index, expert_weight=weight)


def as_in(index, *shape):
    return leaf(index.shape[0], *shape), (torch.rand(index.shape, dtype=torch.float64) + 0.5).requires_grad_()


@given(routings(), st.sampled_from(["probs", None]), st.data())
def test_there_and_back_with_as_many_rows_as_slots_or_fewer(drawn, weights, data):
    """The first slots by expert have rows; all others are as sentinels, also for gradients."""
    index, experts = drawn
    (x, weight), slots, chosen = as_in(index, 3), index.numel(), index.shape[1]
    limit = data.draw(st.sampled_from([None, *range(slots + 1)]))
    more = {} if limit is None else {"local_rows": torch.empty(limit, 0)}
    total, by_expert = slots if limit is None else limit, slots_by_expert(index, experts)[:limit]
    kept = torch.full_like(index, experts)
    for slot in by_expert:
        kept[slot] = index[slot]
    rows, provided = dispatch(x, index, weight, experts, **more)
    used = len(by_expert)
    assert rows.shape == (total, 3)
    assert torch.equal(rows[:used], x[[t for t, _ in by_expert]])
    assert not rows[used:].any()
    assert provided["splits"].tolist() == [int((kept == e).sum()) for e in range(experts)]
    assert provided["splits"].dtype is torch.int64
    assert provided["probs"].tolist() == [weight[slot].item() for slot in by_expert] + [0.0] * (total - used)
    assert provided["slot_of_row"][:used].tolist() == [t * chosen + k for t, k in by_expert]
    assert len({*provided["slot_of_row"].tolist()} & {*range(slots)}) == total
    assert provided["token_of_row"].tolist() == [slot // chosen for slot in provided["slot_of_row"].tolist()]
    assert provided["token_of_row"].dtype is torch.int32
    row_of = {slot: row for row, slot in enumerate(by_expert)}
    for t, rows_of_token in enumerate(provided["row_of_slot"].tolist()):
        for k, row in enumerate(rows_of_token):
            if (t, k) in row_of:
                assert row == row_of[t, k]
            else:
                assert row >= total

    layer = fm.GroupedLinear(experts, 3, 3, dtype=torch.float64)
    seq = fm.Sequential(fm.Dispatch(experts), layer, fm.Combine(weights))
    seq[0].runtime_inputs = (*seq[0].runtime_inputs, *more)
    y, expected = seq(x, expert_index=index, expert_weight=weight, **more), meaning(seq, x, None, None, kept, weight)
    assert_same_function(y, expected, (x, weight, layer.weight), zeros=True)


SIGNED = [torch.int64, torch.int32, torch.int16, torch.int8]


@pytest.mark.parametrize(
    ("dtype", "sentinel"),
    [
        *((dtype, -1) for dtype in SIGNED),
        (torch.uint8, 255),
        *((torch.int64, i) for i in (300, 2**31, -(2**40), 2**63 - 1, -(2**63))),
    ],
    ids=str,
)
@pytest.mark.parametrize("experts", [3, 300])
def test_ids_of_any_integer_dtype_and_size(dtype, experts, sentinel):
    x, weight = torch.randn(3, 2), torch.rand(3, 2)
    index = torch.tensor([[2, 0], [sentinel, 2], [1, 1]], dtype=dtype)
    rows, provided = dispatch(x, index, weight, experts)
    skipped = int(sentinel < 0 or sentinel >= experts)
    assert provided["splits"].sum() == 6 - skipped
    assert provided["splits"][:3].tolist() == [1, 2, 2]
    assert torch.equal(rows[:5], x[[0, 2, 2, 0, 1]])
    assert int((provided["row_of_slot"] == 6).sum()) == skipped


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), pairwise([*ROUNDOFF], [torch.float32, torch.bfloat16, torch.float64]), ids=str
)
def test_sums_are_rounded_once(dtype, weight_dtype):
    index, dy = torch.randint(0, 8, (64, 6)), torch.randn(64, 32).to(dtype)
    x, weight = leaf(64, 32, dtype=dtype), torch.rand(64, 6).to(weight_dtype).requires_grad_()
    found = with_gradients(both(x, index, weight, 8), (x, weight), dy)
    assert [t.dtype for t in found] == [dtype, dtype, weight_dtype]
    exact_x, exact_w = exact_copies(x, weight)
    want = with_gradients(exact_x * exact_w.sum(1, keepdim=True), (exact_x, exact_w), dy.double())
    sums = error_bound(torch.promote_types(torch.promote_types(dtype, weight_dtype), torch.float32), 32, 6, roundings=0)
    # the gradient of each row is rounded, then their sum
    for got, exact, roundings in zip(
        found, want, (ROUNDOFF[dtype], 2 * ROUNDOFF[dtype], ROUNDOFF[weight_dtype]), strict=True
    ):
        assert_accurate(got, exact, roundings + sums)


def test_poison_in_skipped_slots_is_never_seen():
    index = torch.tensor([[0, 9], [-1, 7], [1, 0]])  # of 2 experts; token 1 has none
    x, weight = exact_copies(torch.randn(3, 2), torch.tensor([[1.0, NAN], [NAN, NAN], [2.0, 3.0]]))
    with torch.no_grad():
        x[1] = NAN
    rows, provided = dispatch(x, index, weight, 2)
    assert not rows[3:].any()
    assert not provided["probs"][3:].any()
    poisoned, probs = exact_copies(rows, provided["probs"])
    dy = torch.randn(3, 2, dtype=torch.float64)
    with torch.no_grad():
        poisoned[3:] = probs[3:] = dy[1] = NAN
    zeros = torch.zeros_like(dy[1])
    for rows_in, probs_in in ((rows, provided["probs"]), (poisoned, probs)):
        y = combine(rows_in, provided | {"probs": probs_in})
        torch.testing.assert_close(y, torch.stack((x[0], zeros, 5 * x[2])))
        drows, dprobs = torch.autograd.grad(y, (rows_in, probs_in), dy, retain_graph=True)
        assert torch.equal(drows, torch.stack((dy[0], 3 * dy[2], 2 * dy[2], zeros, zeros, zeros)))
        torch.testing.assert_close(dprobs[:3], (dy[[0, 2, 2]] * x[[0, 2, 2]]).sum(1))
        assert not dprobs[3:].any()
    torch.testing.assert_close(combine(poisoned, provided, None), torch.stack((x[0], zeros, 2 * x[2])))
    dx, dweight = torch.autograd.grad(both(x, index, weight, 2), (x, weight), dy)
    torch.testing.assert_close(dx, torch.stack((dy[0], zeros, 5 * dy[2])))
    assert dweight.isfinite().all()
    assert torch.equal(dweight != 0, torch.tensor([[True, False], [False, False], [True, True]]))


def test_poisoned_gradients_of_dispatch_stay_out():
    x, weight = as_in(ROUTING, 2)
    rows, provided = dispatch(x, ROUTING, weight)
    used = int(provided["splits"].sum())
    drows, dprobs = torch.ones_like(rows), torch.ones(10, dtype=torch.float64)
    drows[used:] = dprobs[used:] = NAN
    dx, dweight = torch.autograd.grad((rows, provided["probs"]), (x, weight), (drows, dprobs))
    assert torch.equal(dx, VALID.sum(1, keepdim=True).double().expand(5, 2))
    assert torch.equal(dweight, VALID.double())


def test_strided_tokens_ids_and_weights():
    x, index = torch.randn(3, 5, dtype=torch.float64).T.requires_grad_(), ROUTING.T.contiguous().T
    weight, count = torch.tensor(2.0, dtype=torch.float64).expand(5, 2), VALID.sum(1, keepdim=True).double()
    y, dx = with_gradients(both(x, index, weight), [x])
    assert_close([y, dx], [2 * count * x, (2 * count).expand(5, 3)])


def test_more_rows_than_slots_are_refused():
    with pytest.raises(fm.InputError, match="local_rows"):
        dispatch(torch.randn(5, 2), ROUTING, torch.rand(5, 2), local_rows=torch.empty(11, 0))
