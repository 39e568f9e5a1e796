"""Dispatch and Combine alone and together: rows by expert out of tokens and a routing, and back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import exact_copies, experts_dense, slots_by_expert
from rounding import ROUNDOFF, relative_error
from strategies import routings

import fusedmoe as fm

NAN = math.nan
ROUTING = torch.tensor([[2, 0], [-1, 2], [4, 99], [2, 3], [0, 4]])  # of 4 experts: one without rows, sentinels


def dispatch(x, index, weight, experts):
    return fm.Dispatch(experts)(x, expert_index=index, expert_weight=weight)


def combine(rows, provided, weights="probs"):
    names = ["row_of_slot", "slot_of_row", *([weights] if weights else [])]
    return fm.Combine(weights)(rows, **{name: provided[name] for name in names})


def as_in(index, *shape, dtype=torch.float64):
    return torch.randn(index.shape[0], *shape, dtype=dtype), torch.rand(index.shape, dtype=dtype) + 0.5


@given(routings())
def test_dispatch_is_the_loop_over_slots(drawn):
    index, experts = drawn
    x, weight = as_in(index, 3)
    rows, provided = dispatch(x, index, weight, experts)
    slots = slots_by_expert(index, experts)
    used, chosen = len(slots), index.shape[1]

    assert rows.shape == (index.numel(), 3)
    assert torch.equal(rows[:used], x[[t for t, _ in slots]])
    assert not rows[used:].any()
    assert provided["splits"].tolist() == [int((index == e).sum()) for e in range(experts)]
    assert provided["splits"].dtype is torch.int64
    assert provided["probs"].tolist() == [weight[slot].item() for slot in slots] + [0.0] * (index.numel() - used)
    assert provided["slot_of_row"][:used].tolist() == [t * chosen + k for t, k in slots]
    assert sorted(provided["slot_of_row"].tolist()) == list(range(index.numel()))
    assert provided["token_of_row"].tolist() == [slot // chosen for slot in provided["slot_of_row"].tolist()]
    assert provided["token_of_row"].dtype is torch.int32
    row_of = {slot: row for row, slot in enumerate(slots)}
    expected = [[row_of.get((t, k), index.numel()) for k in range(chosen)] for t in range(index.shape[0])]
    assert provided["row_of_slot"].tolist() == expected


@given(routings())
def test_combine_is_the_loop_over_slots(drawn):
    index, experts = drawn
    x, weight = as_in(index, 3)
    _, provided = dispatch(x, index, weight, experts)
    rows = torch.randn(index.numel(), 3, dtype=torch.float64)
    row_of = {slot: row for row, slot in enumerate(slots_by_expert(index, experts))}
    expected = torch.zeros(len(x), 3, dtype=torch.float64)
    for (t, k), row in row_of.items():
        expected[t] += weight[t, k] * rows[row]
    torch.testing.assert_close(combine(rows, provided), expected, rtol=1e-13, atol=1e-14)


@given(routings())
def test_round_trip_counts_the_slots_of_each_token(drawn):
    index, experts = drawn
    x, weight = as_in(index, 3, dtype=torch.float32)
    rows, provided = dispatch(x, index, weight, experts)
    count = ((index >= 0) & (index < experts)).sum(1, keepdim=True)
    # one product here, a sum of up to three there
    torch.testing.assert_close(combine(rows, provided, None), count * x, rtol=1e-6, atol=0)


@given(routings(), st.sampled_from(["probs", None]))
def test_gradients_are_those_of_the_loop(drawn, weights):
    index, experts = drawn
    x, weight = exact_copies(*as_in(index, 3))
    factor = torch.randn(experts, 3, dtype=torch.float64)

    rows, provided = dispatch(x, index, weight, experts)
    expert_of_row = torch.repeat_interleave(torch.arange(experts), provided["splits"])
    rows = torch.cat((rows[: len(expert_of_row)] * factor[expert_of_row], rows[len(expert_of_row) :]))
    y = combine(rows, provided, weights)
    used_weight = weight if weights else torch.ones_like(weight)
    expected = experts_dense(x, index, used_weight, experts, lambda e, row: row * factor[e])
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-14)

    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight), dy, allow_unused=True)
    # with no token, or none that has an expert, the loop has no graph
    wanted = (None, None)
    if expected.requires_grad:
        wanted = torch.autograd.grad(expected, (x, weight), dy, allow_unused=True)
    for source, got, want in zip((x, weight), found, wanted, strict=True):
        got, want = (torch.zeros_like(source) if g is None else g for g in (got, want))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("output", ["rows", "probs"])
def test_gradcheck_of_dispatch(output):
    x, weight = exact_copies(*as_in(ROUTING, 2))

    def run(x, weight):
        rows, provided = dispatch(x, ROUTING, weight, 4)
        return rows if output == "rows" else provided["probs"]

    assert torch.autograd.gradcheck(run, (x, weight))


@pytest.mark.parametrize("weights", ["probs", None])
def test_gradcheck_of_combine(weights):
    x, weight = exact_copies(*as_in(ROUTING, 2))
    provided = dispatch(x, ROUTING, weight, 4)[1]
    rows, probs = exact_copies(torch.randn(10, 2), torch.rand(10))

    def run(rows, probs):
        return combine(rows, provided | {"probs": probs}, weights)

    assert torch.autograd.gradcheck(run, (rows, probs))


def test_gradcheck_of_both():
    x, weight = exact_copies(*as_in(ROUTING, 2))
    seq = fm.Sequential(fm.Dispatch(4), fm.Combine())
    assert torch.autograd.gradcheck(lambda x, w: seq(x, expert_index=ROUTING, expert_weight=w), (x, weight))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("experts", [4, 300])
def test_ids_of_any_integer_dtype(dtype, experts):
    sentinel = 255 if dtype is torch.uint8 else -1
    ids = [[2, 0], [sentinel, 2], [1, 1]]
    x, weight = torch.randn(3, 2), torch.rand(3, 2)
    rows, provided = dispatch(x, torch.tensor(ids, dtype=dtype), weight, experts)
    skipped = int(sentinel < 0 or sentinel >= experts)
    assert provided["splits"].sum() == 6 - skipped
    assert provided["splits"][:3].tolist() == [1, 2, 2]
    assert torch.equal(rows[:5], x[[0, 2, 2, 0, 1]])
    assert int((provided["row_of_slot"] == 6).sum()) == skipped


@pytest.mark.parametrize("sentinel", [4, -1, 2**31, -(2**40), 2**63 - 1, -(2**63)])
def test_ids_of_any_size_are_skipped(sentinel):
    index = torch.tensor([[0, sentinel], [sentinel, sentinel]])
    x, weight = exact_copies(*as_in(index, 3))
    rows, provided = dispatch(x, index, weight, 4)
    y = combine(rows, provided)
    assert provided["splits"].tolist() == [1, 0, 0, 0]
    assert torch.equal(y[0], weight[0, 0] * x[0])
    assert not y[1].any()
    y.sum().backward()
    assert not x.grad[1].any()
    assert weight.grad.count_nonzero() == 1


@pytest.mark.parametrize(("tokens", "chosen"), [(0, 1), (0, 3), (1, 1), (4, 1)])
def test_no_tokens_and_one_expert_a_token(tokens, chosen):
    index = torch.arange(tokens * chosen).view(tokens, chosen) % 3
    x, weight = exact_copies(*as_in(index, 2))
    rows, provided = dispatch(x, index, weight, 3)
    assert rows.shape == (tokens * chosen, 2)
    assert provided["row_of_slot"].shape == (tokens, chosen)
    assert {provided[name].shape for name in ("probs", "slot_of_row", "token_of_row")} == {(tokens * chosen,)}
    y = combine(rows, provided)
    assert y.shape == (tokens, 2)
    if chosen == 1:
        torch.testing.assert_close(y, weight * x)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape
    torch.testing.assert_close(weight.grad, x.detach().sum(1, keepdim=True).expand(tokens, chosen))


@given(routings(), st.data())
def test_fewer_rows_than_slots(drawn, data):
    """The first slots by expert have rows; all others are as sentinels, also for gradients."""
    index, experts = drawn
    rows = data.draw(st.integers(0, index.numel()))
    x, weight = exact_copies(*as_in(index, 3))
    limited = fm.Dispatch(experts)
    limited.runtime_inputs = (*limited.runtime_inputs, "local_rows")
    seq = fm.Sequential(limited, fm.Combine())
    y = seq(x, expert_index=index, expert_weight=weight, local_rows=torch.empty(rows, 0))
    kept = torch.full_like(index, experts)
    slots = slots_by_expert(index, experts)[:rows]
    for slot in slots:
        kept[slot] = index[slot]
    want = fm.Sequential(fm.Dispatch(experts), fm.Combine())(x, expert_index=kept, expert_weight=weight)
    torch.testing.assert_close(y, want, rtol=1e-13, atol=1e-14)
    dy = torch.randn_like(y)
    for got, exact in zip(*(torch.autograd.grad(t, (x, weight), dy) for t in (y, want)), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-13)
    sorted_rows, provided = limited(x, expert_index=index, expert_weight=weight, local_rows=torch.empty(rows, 0))
    assert len(sorted_rows) == rows
    assert provided["splits"].tolist() == [int((kept == e).sum()) for e in range(experts)]
    assert torch.equal(sorted_rows[: len(slots)], x[[t for t, _ in slots]])
    assert not sorted_rows[len(slots) :].any()
    assert provided["token_of_row"].tolist() == [s // index.shape[1] for s in provided["slot_of_row"].tolist()]


def test_more_rows_than_slots_are_refused():
    limited = fm.Dispatch(4)
    limited.runtime_inputs = (*limited.runtime_inputs, "local_rows")
    x, weight = as_in(ROUTING, 2)
    with pytest.raises(fm.InputError, match=r"local_rows: expected shape \(R, 0\), R at most 10, got \(11, 0\)"):
        limited(x, expert_index=ROUTING, expert_weight=weight, local_rows=torch.empty(11, 0))


def test_a_token_may_choose_an_expert_twice():
    index = torch.tensor([[1, 1], [0, 1]])
    x, weight = exact_copies(torch.randn(2, 3), torch.tensor([[0.25, 0.5], [1.0, 2.0]]))
    rows, provided = dispatch(x, index, weight, 2)
    assert torch.equal(rows, x[[1, 0, 0, 1]])
    y = combine(rows, provided)
    torch.testing.assert_close(y, x * torch.tensor([[0.75], [3.0]]))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[0.75], [3.0]], dtype=torch.float64).expand(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_the_same_each_time(dtype):
    index = torch.randint(-1, 9, (200, 4))
    x, weight = (t.to(dtype).requires_grad_() for t in as_in(index, 16))
    dy = torch.randn(200, 16).to(dtype)
    seq = fm.Sequential(fm.Dispatch(8), fm.Combine())

    def run():
        y = seq(x, expert_index=index, expert_weight=weight)
        return (y, *torch.autograd.grad(y, (x, weight), dy))

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_sums_are_rounded_once(dtype, weight_dtype):
    index = torch.randint(0, 8, (64, 6))
    x = torch.randn(64, 32).to(dtype).requires_grad_()
    weight = torch.rand(64, 6).to(weight_dtype).requires_grad_()
    dy = torch.randn(64, 32).to(dtype)
    y = fm.Sequential(fm.Dispatch(8), fm.Combine())(x, expert_index=index, expert_weight=weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, weight_dtype)

    exact_x, exact_w = exact_copies(x, weight)
    expected = exact_x * exact_w.sum(1, keepdim=True)
    want_dx, want_dw = torch.autograd.grad(expected, (exact_x, exact_w), dy.double())
    exact = torch.promote_types(torch.promote_types(dtype, weight_dtype), torch.float32)
    noise = 16 * ROUNDOFF[exact]
    assert relative_error(y, expected) < ROUNDOFF[dtype] + noise
    assert relative_error(dw, want_dw) < ROUNDOFF[weight_dtype] + noise
    # the gradient of each row is rounded, then their sum
    assert relative_error(dx, want_dx) < 2 * ROUNDOFF[dtype] + noise


def test_what_lies_in_skipped_slots_is_never_seen():
    index = torch.tensor([[0, 9], [-1, 7], [1, 0]])  # of 2 experts; token 1 has none
    x, weight = exact_copies(torch.randn(3, 2), torch.tensor([[1.0, NAN], [NAN, NAN], [2.0, 3.0]]))
    with torch.no_grad():
        x[1] = NAN
    rows, provided = dispatch(x, index, weight, 2)
    assert not rows[3:].any()
    assert not provided["probs"][3:].any()

    poisoned, probs = exact_copies(rows, provided["probs"])
    with torch.no_grad():
        poisoned[3:] = probs[3:] = NAN
    dy = torch.randn(3, 2, dtype=torch.float64)
    dy[1] = NAN
    for rows_in, probs_in in ((rows, provided["probs"]), (poisoned, probs)):
        y = combine(rows_in, provided | {"probs": probs_in})
        torch.testing.assert_close(y, torch.stack((x[0], torch.zeros_like(x[1]), 5 * x[2])))
        drows, dprobs = torch.autograd.grad(y, (rows_in, probs_in), dy, retain_graph=True)
        assert torch.equal(drows, torch.stack((dy[0], 3 * dy[2], 2 * dy[2], *torch.zeros_like(dy))))
        torch.testing.assert_close(dprobs[:3], (dy[[0, 2, 2]] * x[[0, 2, 2]]).sum(1))
        assert not dprobs[3:].any()

    y = combine(poisoned, provided, None)
    torch.testing.assert_close(y, torch.stack((x[0], torch.zeros_like(x[1]), 2 * x[2])))

    y = fm.Sequential(fm.Dispatch(2), fm.Combine())(x, expert_index=index, expert_weight=weight)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    torch.testing.assert_close(dx, torch.stack((dy[0], torch.zeros_like(dy[1]), 5 * dy[2])))
    assert not dweight[[0, 1, 1], [1, 0, 1]].any()
    assert dweight.count_nonzero() == 3
    assert dweight.isfinite().all()


def test_poisoned_gradients_of_dispatch_stay_out():
    x, weight = exact_copies(*as_in(ROUTING, 2))
    rows, provided = dispatch(x, ROUTING, weight, 4)
    used = int(provided["splits"].sum())
    drows, dprobs = torch.ones_like(rows), torch.ones(10, dtype=torch.float64)
    drows[used:] = dprobs[used:] = NAN
    dx, dweight = torch.autograd.grad((rows, provided["probs"]), (x, weight), (drows, dprobs))
    valid = (ROUTING >= 0) & (ROUTING < 4)
    assert torch.equal(dx, valid.sum(1, keepdim=True).double().expand(5, 2))
    assert torch.equal(dweight, valid.double())


def test_only_what_is_wanted_gets_a_gradient():
    x, weight = as_in(ROUTING, 2)
    seq = fm.Sequential(fm.Dispatch(4), fm.Combine())
    for wanted, other in ((x, weight), (weight, x)):
        wanted.requires_grad_()
        seq(x, expert_index=ROUTING, expert_weight=weight).sum().backward()
        assert wanted.grad is not None
        assert other.grad is None
        wanted.grad = None
        wanted.requires_grad_(False)


def test_strided_tokens_ids_and_weights():
    x = torch.randn(3, 5, dtype=torch.float64).T.requires_grad_()
    index = ROUTING.T.contiguous().T
    weight = torch.tensor(2.0, dtype=torch.float64).expand(5, 2)
    y = fm.Sequential(fm.Dispatch(4), fm.Combine())(x, expert_index=index, expert_weight=weight)
    count = ((ROUTING >= 0) & (ROUTING < 4)).sum(1, keepdim=True)
    torch.testing.assert_close(y, 2.0 * count * x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, (2.0 * count).double().expand(5, 3))
