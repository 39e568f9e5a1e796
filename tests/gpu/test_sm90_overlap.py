"""Products beside other work on Hopper have the bits of one launch after the other: in several launches, each for some
row tiles; waiting for rows; beside a sum over slots on a few SMs.

Axes: T tokens, K chosen experts per token, R = T K rows, E experts, H hidden, I intermediate features.
"""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from kit.hopper import DEVICE, capture, needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors
from kit.row_ranges import RANK, RANKS, check_ranges, problem_by_ranges, routed, tiles_of
from kit.slots import routed as routed_slots

import fusedmoe as fm
from fusedmoe.fusion.search import planner
from fusedmoe.kernels.exchange import functions as exchange_functions
from fusedmoe.kernels.exchange.layout import CONTROL_WORDS, READY
from fusedmoe.kernels.options import DEFAULT
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.rows.move.slot_functions import bind_route, bind_sum_slots
from fusedmoe.kernels.sm90 import launch, products
from fusedmoe.kernels.sm90.launch import Codes, Part
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.formats import fp8_block, quantize

pytestmark = needs_hopper

BF16 = torch.bfloat16
SWIGLU = Activation("swiglu")
LEAVES_SMS = replace(DEFAULT, sm_margin=4)


# ---- ranges of rows


@pytest.mark.parametrize("divided", [None, 0, 2])
@pytest.mark.parametrize("ranks", [2, 3, 32])
@pytest.mark.parametrize("experts", [4, 37])
def test_ranges(experts, ranks, divided):
    tokens = 960
    for rank in {0, ranks // 2, ranks - 1}:
        tile = 128 if rank else 256
        settings = rank, ranks, tokens, divided, rank > 0, tile, 0 < rank < ranks - 1
        check_ranges(*routed(tokens, 4, experts, seed=experts), *settings, arrivals=5, leaving=rank == 0)


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=needs_gpu)])
@pytest.mark.parametrize("gather", [False, True])
def test_products_by_ranges(gather, waits):
    """Also with the rows of the later blocks unknown at the time of the first launch. ``waits``: in one launch, beside
    which another stream writes the rows of one rank after the other, and adds to the word of each.
    """
    x, gate_up, down, scale, offsets, blocks, rank_of_x, index = problem_by_ranges(gather, 2 * waits)
    more = () if index is None else (index,)
    others = [(RANK + step) % RANKS for step in range(1, RANKS)]
    rows_of = [(rank_of_x == rank).nonzero()[:, 0] for rank in others]

    def late(x):
        """The block of own rows, then the others; until it is taken, the rows of other ranks are NaN."""
        whole, memory = x.clone(), blocks.clone()
        for rows in rows_of:
            x.index_fill_(0, rows, torch.nan)
        if not waits:
            yield Part(memory[0])
            x.copy_(whole)
            yield Part(memory[1:].flatten())
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step, rows in enumerate(rows_of, 1):
                torch.cuda._sleep(2_000_000)
                for half in rows.chunk(2):
                    x.index_copy_(0, half, whole[half])
                    memory[step, -1:].add_(1)
        yield Part(memory.flatten())
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


def of_codes(derivative, experts, rows):
    """The first layer with its activation, or the second layer's gradient: ``bind(codes, options, **how)``, whose
    product takes codes and offsets, or parts.
    """
    of_weight = torch.randn(experts, 128 if derivative else 256, 144).to(DEVICE, BF16)
    of_weight = quantize(of_weight, fp8_block(across=128))
    weight = Codes(of_weight.data, products.with_strides(of_weight.scale))
    p, scale = torch.randn(rows, 256).to(DEVICE, BF16), torch.rand(rows).to(DEVICE)

    def bind(codes, options, **how):
        if derivative:
            run = products.bind_grouped_gemm_activation_backward_codes(
                codes, weight, p, scale, SWIGLU, fp8_block(), (True, True, True), True, options, **how
            )
            return lambda codes, parts: _flat(run(codes, weight, parts, p, scale))
        bind_product = partial(products.bind_grouped_gemm_activation, quantized=fp8_block())
        run = bind_product(codes, weight, None, None, SWIGLU, True, options, **how)
        return lambda codes, parts: run(codes, weight, None, parts, None)

    return bind


def _flat(results):
    forms, total = results
    return *(t for form in forms for t in form), total


@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=needs_gpu)])
def test_codes_that_arrive_beside_a_product(waits, derivative):
    """Codes of tokens are copied to the rows of their slots, and a product in FP8 follows the rows of each rank.
    ``waits``: another stream writes the tokens of one rank after the other, and adds to the word of each.
    """
    torch.manual_seed(0)
    tokens, chosen, experts, arrivals = (4200 if waits else 300), 2, 3, 2
    ids = torch.randint(-1, experts, (tokens, chosen)).to(DEVICE)
    routing = torch.rand(tokens, chosen).to(DEVICE)
    _, _, row_of_slot, _, token_of_row, offsets = bind_route(ids, routing, experts)(ids, routing)
    row_of_slot = row_of_slot.view(tokens, chosen)
    of_tokens, rows = quantize(torch.randn(tokens, 144).to(DEVICE, BF16), fp8_block()), len(token_of_row)
    codes, scale = of_tokens.data, of_tokens.scale.contiguous()
    scatter = exchange_functions.bind_scatter(codes, scale, row_of_slot, RANK, RANKS, rows)
    with nan_in_new_tensors():
        once = Codes(*scatter(codes, scale, row_of_slot))
    for part, given in zip(once, (codes, scale), strict=True):
        ends = int(offsets[-1])
        assert torch.equal(part[:ends].float(), given.float()[token_of_row[:ends]])
    bind = of_codes(derivative, experts, rows)
    want = bind(once, DEFAULT)(once, offsets)
    # SMs for `Scatter`, and for the stream that writes
    product = bind(once, replace(DEFAULT, sm_margin=exchange_functions.SCATTER_SMS + 4), ranges=True)
    of_product = (None, True, 256, True) if derivative else ()
    ranges = row_functions.bind_row_ranges(offsets, token_of_row, RANK, RANKS, tokens, *of_product)
    each = tokens // RANKS
    of_others = [slice(r * each, (r + 1) * each) for r in ((RANK + step) % RANKS for step in range(1, RANKS))]
    for _ in range(5 if waits else 1):
        late = codes.clone(), scale.clone()
        if waits:
            for there in of_others:
                late[0].view(torch.uint8)[there], late[1][there] = 0x7F, torch.nan
        arrived = torch.full((RANKS, 1), -arrivals if waits else 0, dtype=torch.int32, device=DEVICE)
        blocks = ranges(offsets, token_of_row, exchange_functions.SCATTER_ARRIVALS)
        words = blocks[: RANKS * (2 * (experts + 1) + 2)].view(RANKS, -1)
        with nan_in_new_tensors():
            found = scatter(*late, row_of_slot, None, arrived)
            if waits:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for step, there in enumerate(of_others, 1):
                        torch.cuda._sleep(2_000_000)
                        late[0].view(torch.uint8)[there] = codes.view(torch.uint8)[there]
                        arrived[step] += 1
                        late[1][there] = scale[there]
                        arrived[step] += 1
        # without a launch between both
        scatter(*late, row_of_slot, found, arrived, words)
        got = product(Codes(*found), [Part(blocks, beside=True)])
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        assert not words[1:, -1].any()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.float(), b.float())
            assert b.float().norm() > 0


@needs_gpu
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_part_beside_a_sum(schedule, no_sync):
    """The rows of other ranks, while a kernel on a few SMs sums other rows; then a launch that needs the sums."""
    x, gate_up, _, scale, offsets, blocks, *_ = problem_by_ranges(gather=False)
    rows, options = torch.randn(20_000, 2048, device=DEVICE).to(BF16), replace(DEFAULT, schedule=schedule)
    row_of = torch.arange(len(rows), device=DEVICE).flip(0)[:, None].repeat(1, 2)
    row_of[:, 1] = len(rows)  # a sentinel
    total = bind_sum_slots(rows, row_of, None, None, 16)
    product = products.bind_grouped_gemm(x, gate_up, None, scale, options, ranges=True)
    want = products.bind_grouped_gemm(x, gate_up, None, scale, options)(x, gate_up, None, offsets, scale)

    def run():
        sums = []

        def parts():
            yield Part(blocks[0])
            sums.append(total(rows, row_of))
            yield Part(blocks[1:].flatten(), beside=True)

        return product(x, gate_up, None, parts(), scale), sums[0].clone()

    run()
    with no_sync():
        results = [run() for _ in range(20)]
    for y, sums in results:
        assert torch.equal(y, want)
        assert torch.equal(sums, rows.flip(0))
    assert want.any()
    assert launch.tile_counters(x.device).get()[0].item() == 0


@pytest.mark.parametrize("config", CANDIDATES["plain"], ids=lambda config: config.name)
def test_a_product_that_counts_its_tiles(config, monkeypatch):
    """Under either schedule, several times; the tiles of rows of no expert count too."""
    monkeypatch.setattr(products, "choose", lambda problem: config)
    x, gate_up, _, _, offsets, blocks, *_ = problem_by_ranges(gather=False, leaving=True)
    w = gate_up.repeat(1, 3, 1)
    want = products.bind_grouped_gemm(x, w, None, None, DEFAULT)(x, w, None, offsets, None)
    assert want.any()
    for schedule in ("static", "dynamic"):
        run, (tile_m, column_tiles) = products.bind_counted_gemm(x, w, None, replace(DEFAULT, schedule=schedule))
        for ranges in [blocks.clone() for _ in range(3)]:
            assert torch.equal(run(x, w, None, ranges.flatten()), want)
            assert torch.equal(ranges[:, -2], 2 * tiles_of(blocks, tile_m).to(torch.int32) * column_tiles)
    assert launch.tile_counters(x.device).get()[0].item() == 0


COUNTED = [(dtype, config) for dtype in ("plain", "fp8_plain") for config in CANDIDATES[dtype]]


@needs_gpu
@pytest.mark.parametrize(("family", "config"), COUNTED, ids=lambda of: getattr(of, "name", of))
@pytest.mark.parametrize("chosen", [2, 8])
@pytest.mark.parametrize("order", ["ranks", "experts", "halves"])
def test_sums_leave_beside_the_product_of_their_rows(chosen, order, family, config, monkeypatch, no_sync):
    """To regions of the same GPU. The rows and the regions are NaN before. Also in replays of a CUDA graph. The first
    launches load the code of both kernels.
    """
    monkeypatch.setattr(products, "choose", lambda problem: config)
    tokens, experts, depth, columns = RANKS * 1500, 8, 256, 2048
    offsets, token_of_row = (t.to(DEVICE) for t in routed(tokens, chosen, experts, seed=1))
    row_of_slot = token_of_row.argsort(stable=True).view(tokens, chosen)
    row_of_slot[row_of_slot >= offsets[-1]] = len(token_of_row)
    x = torch.randn(len(token_of_row), depth, device=DEVICE).to(BF16)
    w = torch.randn(experts, columns, depth, device=DEVICE).to(BF16)
    if family == "fp8_plain":
        codes = quantize(x, fp8_block(), -1), quantize(w, fp8_block(across=128), -1)
        x, w = (Codes(of.data, products.with_strides(of.scale)) for of in codes)
    rows = products.bind_grouped_gemm(x, w, None, None, DEFAULT)(x, w, None, offsets, None)
    want = bind_sum_slots(rows, row_of_slot, None)(rows, row_of_slot).view(RANKS, -1, columns)
    assert (want.float().norm(dim=(1, 2)) > 1).all()

    (at,), nbytes = exchange_functions.places([want.nbytes])
    memory = torch.zeros(RANKS, nbytes // 4, dtype=torch.int32, device=DEVICE)
    peers = torch.tensor([m.data_ptr() for m in memory], device=DEVICE)
    region = exchange_functions.Region(peers, memory[RANK][:CONTROL_WORDS], RANK, 10**10)
    by_ranks = row_functions.bind_row_ranges(offsets, token_of_row, RANK, RANKS, tokens, 6)
    half = tokens // RANKS if order == "halves" else 0
    own = (RANK, tokens // RANKS) if half else None
    of_experts = row_functions.bind_expert_blocks(offsets, token_of_row, True, own, half)
    run, tiles = products.bind_counted_gemm(x, w, None, replace(DEFAULT, exchange_sms=20))
    push = exchange_functions.bind_push_sums(
        rows, row_of_slot, None, at, at, 20, tiles, 0 if order == "ranks" else experts, half
    )  # fmt: skip
    parts = memory.view(torch.uint8)[:, at : at + want.nbytes].view(BF16).view(RANKS, RANKS, -1, columns)

    def once():
        parts.fill_(torch.nan)
        out = torch.full_like(rows, torch.nan)
        given = offsets, token_of_row, 0
        blocks = by_ranks(*given, True) if order == "ranks" else of_experts(*given)
        run(x, w, None, blocks, out)
        push(region, out, row_of_slot, None, blocks)
        return out.clone(), parts[:, RANK].clone()  # a launch after both

    def check(out, sums):
        assert torch.equal(out, rows)
        for rank in {*range(RANKS)} - {RANK}:
            assert torch.equal(sums[rank], want[rank])
            assert memory[rank, READY + RANK] == 1
        assert sums[RANK].isnan().all()

    check(*once())
    with no_sync():
        results = [once() for _ in range(20)]
    for found in results:
        check(*found)
    captured = []
    graph = capture(lambda: captured.append(once()))
    for _ in range(5):
        for t in captured[-1]:
            t.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check(*captured[-1])
    assert launch.tile_counters(offsets.device).get()[0].item() == 0


NEVER = """
import sys, time
import pytest, torch
from fusedmoe.kernels.sm90.gemm import scheduler
assert scheduler.MOST_READS > 100_000
scheduler.MOST_READS = 100_000
sys.path += sys.argv[1:]
from kit.row_ranges import problem_by_ranges
from fusedmoe.kernels.options import DEFAULT
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.launch import Part
x, gate_up, _, scale, _, blocks, *_ = problem_by_ranges(gather=False, arrivals=2)
blocks[1:, -1] += 1  # of two
product = products.bind_grouped_gemm(x, gate_up, None, scale, DEFAULT, ranges=True)
torch.cuda.synchronize()
start = time.monotonic()
with pytest.raises(RuntimeError, match="CUDA error"):
    product(x, gate_up, None, [Part(blocks.flatten())], scale)
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


# ---- a sum over slots beside a weight gradient


class Products:
    """Tensors of a sum and a weight gradient beside it."""

    def __init__(self, tokens, chosen, experts, n, k, gathered, seed=0):
        slot_of_row, self.row_of_slot, used = routed_slots(tokens, chosen, experts, "sentinels", seed)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        rows = tokens * chosen

        def randn(*shape):
            return torch.randn(*shape, device=DEVICE, generator=generator).to(BF16)

        self.index = (slot_of_row // chosen).to(torch.int32) if gathered else None
        self.dy = randn(tokens if gathered == "grad_output" else rows, n)
        self.x = randn(tokens if gathered == "x" else rows, k)
        self.rows, self.addend, self.gathered = randn(rows, n), randn(tokens, n), gathered
        ends = torch.sort(torch.randint(0, used + 1, (experts,), device=DEVICE, generator=generator)).values
        self.offsets = ends.to(torch.int32)

    def bound(self, sms):
        total = bind_sum_slots(self.rows, self.row_of_slot, None, self.addend, sms)
        of_weight = self.bound_wgrad(sms > 0)

        def run():
            sums = total(self.rows, self.row_of_slot, None, self.addend.clone())
            return sums, of_weight()

        return run

    def bound_wgrad(self, beside):
        run = products.bind_grouped_wgrad(
            self.dy, self.x, self.offsets, BF16, False, DEFAULT, self.index, self.gathered, beside
        )
        return lambda: run(self.dy, self.x, self.offsets, None, self.index)


class ProductsOfCodes(Products):
    """The same with the operands in FP8, by columns."""

    def bound_wgrad(self, beside):
        dy, x = (quantize(rows, fp8_block(), -2, offsets=self.offsets) for rows in (self.dy, self.x))
        operands = (
            Codes(dy.data, products.with_strides(dy.scale)),
            Codes(x.data, products.with_strides(x.scale)),
            self.offsets,
        )
        run = products.bind_grouped_wgrad(*operands, BF16, False, DEFAULT, beside=beside)
        return lambda: run(*operands)


@needs_gpu
@pytest.mark.parametrize("which", ["rows", "grad_output", "x", "codes"])
def test_a_weight_gradient_beside_the_sum(which, no_sync):
    # more clusters than tiles, and many tiles; the sum ends long before the product, or long after
    sizes = ((64, 2, 3, 64, 64, 2), (2000, 8, 16, 768, 512, 8), (9000, 4, 8, 2048, 256, 2))
    make, gathered = ProductsOfCodes if which == "codes" else Products, which if which in ("grad_output", "x") else None
    for tokens, chosen, experts, n, k, sms in sizes:
        case = make(tokens, chosen, experts, n, k, gathered, seed=tokens)
        want, beside = case.bound(0)(), case.bound(sms)
        beside()
        with no_sync():
            results = [beside() for _ in range(20)]
        for got in results:
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert want[1].any()
        counter, dynamic = launch.tile_counters(case.x.device).get()
        assert (counter.item(), dynamic) == (0, 1)


@needs_gpu
def test_streams_and_graphs_have_counters_of_their_own():
    cases = [Products(3000, 4, 8, 1024, 512, "x", seed=seed) for seed in range(3)]
    want = [case.bound(0)() for case in cases]
    runs = [case.bound(16) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    graphs, found = [], [[] for _ in runs]
    for run, results in zip(runs, found, strict=True):
        graphs.append(capture(lambda run=run, results=results: results.append(run())))
    torch.cuda.synchronize()
    for _ in range(5):  # side by side: three streams, then three replays
        got = []
        for run, stream in zip(runs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(run())
        torch.cuda.synchronize()
        for results, expected in zip(got, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for results, expected in zip(found, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(results[-1], expected, strict=True))


# ---- layers


def layer(count=1):
    torch.manual_seed(0)
    with DEVICE:
        made = torch.nn.Sequential(*[fm.MoE(1536, 512, 16, 8).to(BF16) for _ in range(count)])
    return made, torch.randn(4096, 1536, device=DEVICE, dtype=BF16)


RECIPES = pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])


def gradients(made, x, dy, recipe="bf16"):
    x = x.clone().requires_grad_()
    made.zero_grad(set_to_none=True)
    with fm.recipe(recipe):
        y = made(x)
    y.backward(dy)
    return [y.detach(), x.grad, *[p.grad.clone() for p in made.parameters()]]


def same(got, want):
    return [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)


@pytest.fixture
def alone(monkeypatch):
    """What a function returns if no steps run beside each other. The layers that it makes are new ones."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr(planner, "pairs_of", lambda *_: [])
            return function()

    return run


@needs_gpu
@RECIPES
def test_two_layers(alone, no_sync, recipe):
    def results():
        made, x = layer(2)
        return gradients(made, x, torch.ones_like(x), recipe)

    want = alone(results)
    made, x = layer(2)
    with fm.recipe(recipe):
        (plan,) = made[0].explain(x.clone().requires_grad_()).plans
    carrier = {"bf16": "sm90.gathered_wgrad_dy", "fp8_block": "sm90.fp8_grouped_wgrad"}[recipe]
    assert [rules[:2] for rules in plan.beside] == [("sm90.router_backward", carrier)]
    dy = torch.ones_like(x)
    assert same(gradients(made, x, dy, recipe), want)
    with no_sync():
        again = [gradients(made, x, dy, recipe) for _ in range(3)]
    assert all(same(got, want) for got in again)
    assert want[1].any()
    found = []
    graph = capture(lambda: found.append(gradients(made, x, dy, recipe)), warm_ups=1)
    for _ in range(3):
        for t in found[-1]:
            t.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert same(found[-1], want)


@needs_gpu
@RECIPES
def test_memory_of_a_step(alone, recipe):
    def peak():
        made, x = layer()
        dy = torch.ones_like(x)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            gradients(made, x, dy, recipe)
        return torch.cuda.max_memory_allocated() - before

    assert peak() <= 1.08 * alone(peak)
