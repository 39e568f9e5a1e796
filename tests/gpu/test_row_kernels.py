"""The kernels that sort slots by expert, move rows, sum them and apply activations: against plain PyTorch and fp64,
between NaN.
"""

import itertools

import pytest
import torch
from kit.activation_rows import ACTIVATIONS, assert_result_close, check_activation, in_fp64
from kit.compare import pairwise
from kit.hopper import DEVICE, capture, needs_gpu, needs_hopper
from kit.hopper_products import kernels_of
from kit.poison import nan_in_new_tensors
from kit.slots import KINDS, assert_rows_close, between_nan, check_moves, check_offsets, check_zeroed_tail, ids, routed

from fusedmoe.kernels.rows.activation.functions import bind_activation_backward
from fusedmoe.kernels.rows.move.functions import column_sums, offsets_from_splits
from fusedmoe.kernels.rows.move.slot_functions import (
    bind_gather_rows,
    bind_route,
    bind_row_dots,
    bind_slot_values,
    bind_sum_slots,
    bind_sum_slots_and_part,
)
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.expert_rows import offsets_from_splits as plain_offsets
from fusedmoe.numerics.expert_rows import sort_by_expert

pytestmark = needs_hopper

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INTEGERS, HALF = (torch.int64, torch.int32), (BF16, FP16)
# of tokens and chosen experts: within one step, one warp, one chunk, at its end, over it, many chunks
SIZES = ((1, 1), (1, 8), (5, 7), (256, 1), (256, 8), (257, 8), (1024, 2), (8192, 8), (3001, 3))
# slots of a token: every way to sum them, and more than a warp has lanes
SUMMED = ((1, 1), (3, 8), (129, 9), (500, 2), (77, 3), (300, 4), (64, 17), (40, 33), (5, 70))


EXPERTS = (1, 31, 32, 33, 64, 65, 128, 256, 512, 1024)
# each way to move rows: tokens and chosen experts, features, dtypes of rows, of factors and of dots
MOVES = pairwise(SUMMED, (8, 248, 1024, 1032, 2880, 7168), HALF, (None, FP32, BF16), (FP32, BF16, FP16))

# rows and features of the result: less than a warp's vectors, more, and more than a warp loads at once
ACTIVATED_SHAPES = ((1, 8), (3, 24), (70, 264), (33, 768), (5, 2056))
# each activation with a scale in fp32, and with another dtype or scale
ACTIVATED = [*((a, BF16, FP32) for a in ACTIVATIONS)]
ACTIVATED += [(a, (FP16, BF16)[i % 2], (None, BF16, FP16)[i % 3]) for i, a in enumerate(ACTIVATIONS)]


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    calls = [
        lambda e=experts, d=dtype: check_route(ids(2, 1, e, dtype=d), e)
        for experts, dtype in itertools.product(EXPERTS, INTEGERS)
    ]
    calls += [
        lambda k=chosen, d=dtype, s=scale, o=out: check_moves(2, k, 8, d, s, out=o)
        for (_, chosen), _, dtype, scale, out in MOVES
    ]
    calls += [lambda row=row: check_activation(*row, (1, 8)) for row in ACTIVATED]
    build_ahead(lambda: kernels_of(calls))


# ---- offsets


@pytest.mark.parametrize("kind", ["random", "zero", "negative", "all negative", "past the rows", "one has all"])
def test_offsets_are_those_of_plain_pytorch(kind):
    every = (1, 7, 31, 32, 33, 128, 512, 513, 1000, 4096), (1, 3000, 262_144, 2**31 - 1), INTEGERS
    for seed, (experts, rows, dtype) in enumerate(pairwise(*every)):
        check_offsets(kind, experts, rows, dtype, seed)


# ---- slots


def check_route(index, experts, rows=None, dtype=FP32):
    """Splits, weights, places and offsets are those of a stable sort; ``rows``: fewer than there are slots."""
    chosen = index.shape[1]
    weight = torch.rand(index.shape, device=DEVICE).to(dtype)
    with nan_in_new_tensors():
        run = bind_route(index, weight, experts, **({} if rows is None else {"num_rows": rows}))
        splits, probs, row_of_slot, slot_of_row, token_of_row, offsets = run(index, weight)
    want_slot, want_row, want_splits = sort_by_expert(index, experts, rows)
    assert probs.dtype is dtype
    assert torch.equal(splits, want_splits)
    assert torch.equal(offsets, want_splits.cumsum(0).int())
    assert torch.equal(row_of_slot, want_row)
    assert torch.equal(slot_of_row, want_slot)
    assert torch.equal(token_of_row, (want_slot // chosen).int())
    filled = min(int(want_splits.sum()), len(probs))
    assert torch.equal(probs[:filled], weight.flatten()[want_slot][:filled])
    assert not probs[filled:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_sorted_as_by_plain_pytorch(kind):
    for experts, (tokens, chosen), dtype, of_weight in pairwise(EXPERTS, SIZES, INTEGERS, (FP32, BF16, FP16)):
        check_route(ids(tokens, chosen, experts, kind, dtype, seed=tokens), experts, None, of_weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(5, 7, 3), (300, 8, 64), (1500, 2, 33), (3001, 3, 128)])
def test_fewer_rows_than_slots(tokens, chosen, experts, kind):
    index, slots = ids(tokens, chosen, experts, kind, seed=tokens), tokens * chosen
    used = int(sort_by_expert(index, experts)[2].sum())
    for rows in {1, slots // 3, max(used - 1, 1), max(used, 1), min(used + 2, slots), slots - 1}:
        check_route(index, experts, rows)


# ---- rows and slots


@pytest.mark.parametrize("kind", ["random", "sentinels", "only sentinels", "far out"])
def test_rows_and_slots(kind):
    for (tokens, chosen), columns, dtype, scale, out in MOVES:
        check_moves(tokens, chosen, columns, dtype, scale, kind, out=out, seed=tokens)


@pytest.mark.parametrize("scale", [None, FP32])
@pytest.mark.parametrize("kind", ["random", "sentinels"])
def test_rows_and_slots_of_fewer_rows(kind, scale):
    for tokens, chosen, sms in ((3, 8, 0), (129, 9, 0), (200, 2, 2), (77, 4, 2)):
        used = routed(tokens, chosen, 13, kind, tokens)[2]
        for rows in {1, used // 2, used - 1, min(used + 1, tokens * chosen)}:
            check_moves(tokens, chosen, 264, BF16, scale, kind, rows, sms=sms, seed=tokens)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_values_of_many_slots(dtype):
    _, row_of_slot, used = routed(8192, 8, 13, "sentinels")
    values = torch.randn(8192 * 8, device=DEVICE).to(dtype)
    values[used:] = torch.nan
    with nan_in_new_tensors():
        got = bind_slot_values(values, row_of_slot)(values, row_of_slot)
    assert torch.equal(got, torch.cat([values, values.new_zeros(1)])[row_of_slot])


@needs_gpu
def test_rows_beyond_32_bits_of_elements():
    tokens, chosen, columns = 70_000, 8, 4096  # 2.3e9 elements
    slot_of_row, row_of_slot, used = routed(tokens, chosen, 64, "random")
    source = torch.randn(tokens, columns, device=DEVICE, dtype=BF16)
    rows = bind_gather_rows(source, row_of_slot, None)(source, row_of_slot, slot_of_row)
    assert used == len(rows)
    for part in (slice(0, 1000), slice(used - 1000, used)):
        assert torch.equal(rows[part], source[slot_of_row[part] // chosen])
    assert torch.equal(bind_sum_slots(rows, row_of_slot, None)(rows, row_of_slot), source * chosen)
    dots = bind_row_dots(source, rows, row_of_slot, FP32)(source, rows, row_of_slot, slot_of_row)
    want = source.float().square().sum(1)[slot_of_row // chosen]
    assert (dots - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("columns", [8, 1032, 2048])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (33, 2), (500, 8), (129, 9)])
def test_the_sum_of_a_tokens_rows_replaces_its_addend(tokens, chosen, columns):
    _, row_of_slot, _ = sort_by_expert(torch.randint(0, 14, (tokens, chosen), device=DEVICE), 13)  # 13 is a sentinel
    rows, addend = (torch.randn(n, columns, device=DEVICE).to(BF16) for n in (tokens * chosen, tokens))
    want = addend.double() + torch.cat([rows, rows.new_zeros(1, columns)]).double()[row_of_slot].sum(1)
    with nan_in_new_tensors():
        got = bind_sum_slots(rows, row_of_slot, None, addend)(rows, row_of_slot, None, addend)
    assert got is addend
    assert (got.double() - want).norm() <= 4e-3 * want.norm()


def test_a_sum_of_some_slots_into_memory_that_is_given():
    rows = torch.randn(40, 32).to(DEVICE, BF16)
    row_of_slot = torch.randint(0, 41, (12, 4)).to(DEVICE)
    whole = bind_sum_slots(rows, row_of_slot, None)(rows, row_of_slot)
    out = torch.full((12, 32), torch.nan).to(DEVICE, BF16)
    for place in (slice(0, 5), slice(5, 12)):
        bind_sum_slots(rows, row_of_slot[place], None)(rows, row_of_slot[place], None, None, out[place])
    assert torch.equal(out, whole)
    assert whole.any()


@pytest.mark.parametrize(("dtype", "chosen", "scaled"), [(BF16, 4, False), (FP16, 2, True), (BF16, 9, True)])
def test_a_sum_and_a_part_have_the_bits_of_both(dtype, chosen, scaled):
    rows, part = (torch.randn(n, 520).to(DEVICE, dtype) for n in (400, 130))
    row_of_slot = torch.randint(0, 450, (130, chosen)).clamp(max=400).to(DEVICE)
    scale = torch.rand(400).to(DEVICE) if scaled else None
    total = bind_sum_slots(rows, row_of_slot, scale)(rows, row_of_slot, scale)
    with nan_in_new_tensors():
        got = bind_sum_slots_and_part(rows, row_of_slot, scale)(rows, row_of_slot, scale, part)
    assert torch.equal(got, total + part)
    assert total.any()
    assert not torch.equal(got, part)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("kind", ["random", "sentinels", "only sentinels"])
def test_the_sum_on_few_sms_has_the_bits_of_the_sum_on_all(kind, adds):
    # fewer tokens than warps, one more than warps, every number of slots; few CTAs, and more than there is work for
    sizes = (1, 1, 2), (33, 2, 4), (500, 3, 2), (129, 4, 8), (700, 7, 16), (64, 8, 132), (300, 9, 16)
    for (tokens, chosen, sms), columns, dtype in pairwise(sizes, (8, 248, 512, 1032, 1536, 4096), HALF):
        _, row_of_slot, used = routed(tokens, chosen, 13, kind, tokens)
        rows = between_nan(tokens * chosen, columns, dtype, 1, used)
        addend = between_nan(tokens, columns, dtype, 2) if adds else None
        results = []
        for beside_sms in (0, sms):
            with nan_in_new_tensors():
                run = bind_sum_slots(rows, row_of_slot, None, addend, beside_sms)
                into = None if addend is None else addend.clone()
                results.append(run(rows, row_of_slot, None, into))
            assert into is None or results[-1] is into
        assert torch.equal(*results)
        assert results[0].any() or (used == 0 and not adds)


# ---- column sums, and the tail


def sums_of_fp64(grad, offsets):
    ends = offsets.tolist()
    return torch.stack([grad[a:b].double().sum(0) for a, b in zip([0, *ends], ends, strict=False)])


def check_sums(grad, offsets, out=None):
    with nan_in_new_tensors():
        got = column_sums(grad, offsets, out)
    assert got.dtype == (out or grad.dtype)
    assert_rows_close(got, sums_of_fp64(grad, offsets))
    empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
    assert not got[empty].any()


SPLITS = {
    "even": [256] * 16,
    "ragged, some empty": [0, 1, 700, 0, 0, 33, 8, 2000, 7, 0, 9, 31, 32, 0, 65, 0],
    "one row": [0, 0, 1, 0],
    "all in one": [0, 0, 0, 4096, 0],
    "all in the only one": [4096],
    "nothing": [0, 0, 0],
    "one row per expert": [1] * 300,
    "many empty": [0] * 500 + [3, 0, 0, 5] + [0] * 500 + [1000],
}


@pytest.mark.parametrize("kind", SPLITS)
def test_column_sums_are_those_of_fp64(kind):
    used = sum(SPLITS[kind])
    offsets = offsets_from_splits(torch.tensor(SPLITS[kind], device=DEVICE), used + 77)
    for columns, dtype, out in pairwise((8, 256, 768, 1408, 2880), HALF, (None, BF16, FP16, FP32)):
        check_sums(between_nan(used + 77, columns, dtype, used=used), offsets, out)


@needs_gpu
def test_sums_of_more_than_two_to_the_31_elements():
    rows, columns = 2**18 + 5, 8200
    grad = torch.ones(rows, columns, dtype=BF16, device=DEVICE)
    ends = torch.tensor([3, rows - 10, rows - 2], dtype=torch.int32, device=DEVICE)
    grad[rows - 2 :] = torch.nan
    want = torch.tensor([3.0, rows - 13, 8], device=DEVICE)
    assert torch.equal(column_sums(grad, ends, FP32), want[:, None].expand(-1, columns))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (300, 264), (700, 2880)])
def test_the_tail_is_zeroed(rows, columns, dtype):
    check_zeroed_tail(rows, columns, dtype)


# ---- activations


@pytest.mark.parametrize(("activation", "dtype", "scale"), ACTIVATED, ids=str)
def test_activations(activation, dtype, scale):
    for number, shape in enumerate(ACTIVATED_SHAPES):
        check_activation(activation, dtype, scale, shape, 24 * (number % 2), alone=activation in ACTIVATIONS[:2])


@pytest.mark.parametrize("activation", [Activation("swiglu", limit=2.0), Activation("reglu", limit=2.0)], ids=str)
def test_the_bounds_of_a_clamp_are_inside(activation):
    """Values at a limit have the derivative of those inside; beyond it, they have none."""
    p = torch.tensor([[2.0, 2.125, 0.5, 0.5] + [0.5] * 4 + [0.5, 0.5, 2.0, -2.125] + [0.5] * 4], device=DEVICE).to(BF16)
    dy = torch.ones(1, 8, device=DEVICE, dtype=BF16)
    dp, *_ = bind_activation_backward(dy, p, None, activation, False, False)(dy, p, None)
    assert_result_close(dp, in_fp64(activation, p, None, dy)[1])
    assert dp[0, 0] != 0 == dp[0, 1]
    assert dp[0, 10] != 0 == dp[0, 11]


# ---- streams and graphs


@needs_gpu
def test_a_graph_follows_the_splits(no_sync):
    all_splits = [[5, 0, 300, 7], [0, 0, 0, 0], [400, 0, 0, 0], [0, 1, 0, 390], [1000, -3, 5, 7]]
    splits, grad, found = torch.tensor(all_splits[0], device=DEVICE), between_nan(400, 768, BF16), []

    def step():
        offsets = offsets_from_splits(splits, 400)
        found[:] = [offsets, column_sums(grad, offsets)]

    step()
    with no_sync():
        step()
    graph = capture(step, warm_ups=1)
    offsets, sums = found
    for new in all_splits:
        splits.copy_(torch.tensor(new))
        graph.replay()
        assert torch.equal(offsets, plain_offsets(splits, 400))
        assert_rows_close(sums, sums_of_fp64(grad, offsets))


@needs_gpu
def test_another_stream():
    """The kernels run on torch's current stream: they wait for what was queued there before."""
    grad = torch.zeros(4096, 768, dtype=BF16, device=DEVICE)
    splits = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    column_sums(grad, offsets_from_splits(splits, 4096))  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        grad.fill_(1)
        splits.fill_(8)
        sums = column_sums(grad, offsets_from_splits(splits, 4096))
    stream.synchronize()
    assert torch.equal(sums, torch.full_like(sums, 8))
