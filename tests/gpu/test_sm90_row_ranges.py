"""Products in several launches, each for some row tiles, have the bits of one launch. Ranges against a plain search."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from kit.hopper import DEVICE, needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors

from fusedmoe.kernels.options import DEFAULT
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.sm90 import products
from fusedmoe.numerics.activations import Activation

pytestmark = needs_hopper

BF16 = torch.bfloat16
TILE = 128
OWN = 200, 500  # tokens
SWIGLU = Activation("swiglu")
LEAVES_SMS = replace(DEFAULT, sm_margin=4)


def routed(tokens, slots, experts, seed):
    """Offsets and tokens of rows, with some rows of no expert; the experts' rows are in token order."""
    generator = torch.Generator().manual_seed(seed)
    # expert 1 gets most rows, expert 2 none
    wanted = torch.where(
        torch.rand(tokens, slots, generator=generator) < 0.5,
        1,
        torch.randint(0, experts + 1, (tokens, slots), generator=generator),
    )
    wanted[wanted == 2] = experts
    order = wanted.flatten().sort(stable=True)
    offsets = torch.searchsorted(order.values, torch.arange(experts), right=True)
    return offsets.to(torch.int32), (order.indices // slots).to(torch.int32)


def plain_ranges(offsets, token_of_row, first, end, tail):
    """The ranges, one expert at a time."""
    rows = len(token_of_row)
    starts, ends = [0, *offsets.tolist()], [*offsets.tolist(), rows]
    found = torch.zeros(3, 2, len(starts), dtype=torch.int32)
    for e, (start, stop) in enumerate(zip(starts, ends, strict=True)):
        own = [TILE * i + start for i in range(-(-(stop - start) // TILE))]
        of_tile = [token_of_row[row : min(row + TILE, stop)] for row in own]
        only_own = [bool(((t >= first) & (t < end)).all()) for t in of_tile]
        if e == len(offsets):
            only_own = [tail == 0] * len(own)
        before = next((row for row, is_own in zip(own, only_own, strict=True) if is_own), None)
        if before is None:  # no tile has own rows only: the others may be divided anywhere
            found[:, :, e] = -1
            continue
        after = stop if all(only_own[own.index(before) :]) else own[only_own.index(False, own.index(before))]
        found[:, :, e] = torch.tensor([[before, after], [start, before], [after, stop]])
    return found


def row_ranges(offsets, token_of_row, *more):
    """The ranges, and a word after them, 0."""
    out = torch.zeros(3 * 2 * (len(offsets) + 1) + 1, dtype=torch.int32, device=DEVICE)
    got = row_functions.bind_row_ranges(offsets, token_of_row, *more)(offsets, token_of_row, out)
    assert got[-1] == 0
    return got


def of_range(ranges, number):
    """The part of a launch of one range."""
    size = len(ranges) // 3
    return ranges[number * size : (number + 1) * size + 1]


@pytest.mark.parametrize("divided", [0, 2, 30])
@pytest.mark.parametrize(("first", "end"), [(0, 300), (300, 600), (600, 900)])
def test_ranges_of_some_experts(first, end, divided):
    """The rows of the other experts are where the rows of no expert are."""
    tokens, experts = 900, 37
    offsets, token_of_row = (t.to(DEVICE) for t in routed(tokens, 4, experts, seed=2))
    every, some = (
        row_ranges(offsets, token_of_row, first, end, tokens, more)[:-1].view(3, 2, experts + 1)
        for more in (None, divided)
    )
    assert torch.equal(some[..., :divided], every[..., :divided])
    assert torch.equal(some[..., -1], every[..., -1])
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])[divided:]
    there = 2 if end < tokens else 1
    assert torch.equal(some[there, 0, divided:-1], starts)
    assert torch.equal(some[there, 1, divided:-1], offsets[divided:])
    for others in {0, 1, 2} - {there}:
        assert torch.equal(some[others, 0, divided:-1], some[others, 1, divided:-1])


@pytest.mark.parametrize(("first", "end"), [(0, 300), (300, 600), (600, 900), (0, 900), (100, 100)])
@pytest.mark.parametrize("experts", [4, 37])
def test_ranges(first, end, experts):
    tokens = 900
    offsets, token_of_row = routed(tokens, 4, experts, seed=experts)
    got = row_ranges(offsets.to(DEVICE), token_of_row.to(DEVICE), first, end, tokens)[:-1].cpu().view(3, 2, experts + 1)
    tail = 2 if end < tokens else 1 if first else 0
    want = plain_ranges(offsets, token_of_row, first, end, tail)
    known = want[0, 0] >= 0
    assert known.any() or first == end
    assert torch.equal(got[..., known], want[..., known])
    starts = torch.tensor([0, *offsets.tolist()], dtype=torch.int32)
    ends = torch.tensor([*offsets.tolist(), len(token_of_row)], dtype=torch.int32)
    own, before, after = got
    # each row is in one range
    assert torch.equal(before[0], starts)
    assert torch.equal(before[1], own[0])
    assert torch.equal(own[1], after[0])
    assert torch.equal(after[1], ends)
    assert (own[1] >= own[0]).all()
    assert torch.equal(own[0][~known], own[1][~known])


def case(gather):
    torch.manual_seed(0)
    tokens, experts, hidden, features = 600, 3, 72, 64
    offsets, token_of_row = (t.to(DEVICE) for t in routed(tokens, 2, experts, seed=1))
    ranges = row_ranges(offsets, token_of_row, *OWN, tokens)
    assert (ranges[:-1].view(3, 2, -1).diff(dim=1) > 0).any(2).all(), "rows in every range"
    x = torch.randn(tokens if gather else len(token_of_row), hidden).to(DEVICE, BF16)
    gate_up = torch.randn(experts, 2 * features, hidden).to(DEVICE, BF16)
    down = torch.randn(experts, hidden, features).to(DEVICE, BF16)
    scale = torch.rand(len(token_of_row)).to(DEVICE)
    return x, gate_up, down, scale, offsets, ranges, token_of_row if gather else None


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_products_by_ranges(gather, waits):
    """Also with the rows of the later ranges unknown at the time of the first launch. ``waits``: in one launch, which
    computes the first range before another stream writes the other rows, and the word after them.
    """
    x, gate_up, down, scale, offsets, ranges, index = case(gather)
    more = () if index is None else (index,)

    def late(x):
        """The ranges of own rows first; until they are taken, the rows of other tokens are NaN."""
        whole = x.clone()
        if gather:
            x[: OWN[0]] = x[OWN[1] :] = torch.nan
        if not waits:
            yield of_range(ranges, 0)
            x.copy_(whole)
            yield from (of_range(ranges, 1), of_range(ranges, 2))
            return
        memory, side = ranges.clone(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            x.copy_(whole)
            memory[-1:].fill_(1)
        yield memory
        torch.cuda.current_stream().wait_stream(side)

    def both(bind, *arguments, weight):
        with nan_in_new_tensors():
            (one,) = [bind(*arguments, DEFAULT, *more)(*weight(offsets), *more)]
            copied = x.clone()
            parts = bind(*arguments, LEAVES_SMS, *more, ranges=True)(*weight(late(copied), copied), *more)
        return one, parts

    plain = both(
        products.bind_grouped_gemm, x, gate_up, None, scale,
        weight=lambda o, x=x: (x, gate_up, None, o, scale),
    )  # fmt: skip
    activated = both(
        products.bind_grouped_gemm_activation, x, gate_up, None, scale, SWIGLU, True,
        weight=lambda o, x=x: (x, gate_up, None, o, scale),
    )  # fmt: skip
    p = activated[0][1]
    backward = both(
        products.bind_grouped_gemm_activation_backward, x, down, p, scale, SWIGLU, True, True,
        weight=lambda o, x=x: (x, down, o, p, scale),
    )  # fmt: skip
    for one, parts in (plain, activated, backward):
        one, parts = (t if isinstance(t, tuple) else (t,) for t in (one, parts))
        for a, b in zip(one, parts, strict=True):
            assert a[: offsets[-1]].float().norm() > 0
            assert not a.isnan().any()
            assert torch.equal(a, b)


NEVER = """
import sys, time
import pytest, torch
from fusedmoe.kernels.sm90.gemm import scheduler
assert scheduler.MOST_READS > 100_000
scheduler.MOST_READS = 100_000
sys.path += sys.argv[1:]
from test_sm90_row_ranges import DEFAULT, case, products
x, gate_up, _, scale, _, ranges, _ = case(gather=False)
product = products.bind_grouped_gemm(x, gate_up, None, scale, DEFAULT, ranges=True)
torch.cuda.synchronize()
start = time.monotonic()
with pytest.raises(RuntimeError, match="CUDA error"):
    product(x, gate_up, None, [ranges], scale)
    torch.cuda.synchronize()
assert time.monotonic() - start < 30
print("an error")
"""


@needs_gpu
def test_rows_that_never_arrive_are_an_error(tmp_path):
    """In a process of its own, which loses its CUDA context, and with a cache of its own, for a kernel that waits less
    long.
    """
    environment = {**os.environ, "FUSEDMOE_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", NEVER, *sys.path]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ran.stdout == "an error\n", ran.stderr


def test_a_sum_of_some_slots_into_memory_that_is_given():
    rows = torch.randn(40, 32).to(DEVICE, BF16)
    row_of_slot = torch.randint(0, 41, (12, 4)).to(DEVICE)
    whole = slot_functions.bind_sum_slots(rows, row_of_slot, None)(rows, row_of_slot)
    out = torch.full((12, 32), torch.nan).to(DEVICE, BF16)
    for place in (slice(0, 5), slice(5, 12)):
        slot_functions.bind_sum_slots(rows, row_of_slot[place], None)(rows, row_of_slot[place], None, None, out[place])
    assert torch.equal(out, whole)
    assert whole.abs().sum() > 0


@pytest.mark.parametrize(("dtype", "chosen", "scaled"), [(BF16, 4, False), (torch.float16, 2, True), (BF16, 9, True)])
def test_a_sum_and_a_part_have_the_bits_of_both(dtype, chosen, scaled):
    rows, part = (torch.randn(n, 520).to(DEVICE, dtype) for n in (400, 130))
    row_of_slot = torch.randint(0, 450, (130, chosen)).clamp(max=400).to(DEVICE)
    scale = torch.rand(400).to(DEVICE) if scaled else None
    total = slot_functions.bind_sum_slots(rows, row_of_slot, scale)(rows, row_of_slot, scale)
    with nan_in_new_tensors():
        got = slot_functions.bind_sum_slots_and_part(rows, row_of_slot, scale)(rows, row_of_slot, scale, part)
    assert torch.equal(got, total + part)
    assert total.float().norm() > 0
    assert not torch.equal(got, part)
