"""The sum over slots on a few SMs, and a weight gradient that begins beside it: the same bits as one after the other.

Axes: T tokens, K chosen experts per token, R = T K rows, E experts, H hidden, I intermediate features.
"""

import pytest
import torch
from kit.hopper import needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors
from test_async import capture
from test_sm90_slots import between_nan, routed

import fusedmoe as fm
from fusedmoe.fusion.search import planner
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.rows.move.slot_functions import bind_copy_rows, bind_sum_slots
from fusedmoe.kernels.sm90 import launch
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.products import bind_grouped_wgrad, with_strides
from fusedmoe.numerics.formats import fp8_block, quantize

pytestmark = needs_hopper

BF16 = torch.bfloat16
OPTIONS = KernelOptions()


def captured(step):
    """A CUDA graph of a step, and the step's results."""
    results = []
    graph = capture(lambda: results.append(step()))
    return graph, results[-1]


@pytest.mark.parametrize("columns", [8, 248, 512, 1032, 1536, 4096])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("kind", ["random", "sentinels", "only sentinels"])
def test_the_sum_on_few_sms_has_the_bits_of_the_sum_on_all(device, kind, adds, dtype, columns):
    # fewer tokens than warps, one more than warps, every number of slots; few CTAs, and more than there is work for
    for tokens, chosen, sms in ((1, 1, 2), (33, 2, 4), (500, 3, 2), (129, 4, 8), (700, 7, 16), (64, 8, 132)):
        _, row_of_slot, used = routed(tokens, chosen, 13, device, kind, seed=tokens)
        rows = between_nan(tokens * chosen, columns, dtype, device, seed=1)
        rows[used:] = torch.nan  # never read
        addend = between_nan(tokens, columns, dtype, device, seed=2) if adds else None
        results = []
        for beside_sms in (0, sms):
            with nan_in_new_tensors():
                run = bind_sum_slots(rows, row_of_slot, None, addend, beside_sms)
                into = None if addend is None else addend.clone()
                results.append(run(rows, row_of_slot, None, into))
            assert into is None or results[-1] is into
        torch.testing.assert_close(*results, rtol=0, atol=0)
        assert results[0].any() or (used == 0 and not adds)


@pytest.mark.parametrize("columns", [8, 520, 2048, 4104])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_copies_of_some_rows(device, dtype, columns):
    for rows, sms in ((1, 2), (700, 4), (33, 16)):
        source = between_nan(rows, columns, dtype, device, seed=1)
        picked = torch.rand(rows, device=device) < 0.6
        picked[0] = True
        source[~picked] = torch.nan  # never read
        row_of = torch.where(picked, torch.arange(rows, device=device), rows)
        out = torch.full_like(source, 7.0)
        bind_copy_rows(source, sms)(source, row_of, out)
        assert torch.equal(out, source.nan_to_num())
        assert out.any()


def test_slots_for_which_there_is_no_such_sum(device):
    _, row_of_slot, _ = routed(300, 9, 13, device, "random")
    rows = torch.randn(2700, 256, device=device, dtype=BF16)
    sums = [bind_sum_slots(rows, row_of_slot, None, None, sms)(rows, row_of_slot) for sms in (0, 16)]
    assert torch.equal(*sums)


class Products:
    """Tensors of a sum and a weight gradient beside it."""

    def __init__(self, device, tokens, chosen, experts, n, k, gathered, seed=0):
        slot_of_row, self.row_of_slot, used = routed(tokens, chosen, experts, device, "sentinels", seed=seed)
        generator = torch.Generator(device).manual_seed(seed)
        rows = tokens * chosen

        def randn(*shape):
            return torch.randn(*shape, device=device, generator=generator).to(BF16)

        self.index = (slot_of_row // chosen).to(torch.int32) if gathered else None
        self.dy = randn(tokens if gathered == "grad_output" else rows, n)
        self.x = randn(tokens if gathered == "x" else rows, k)
        self.rows, self.addend, self.gathered = randn(rows, n), randn(tokens, n), gathered
        ends = torch.sort(torch.randint(0, used + 1, (experts,), device=device, generator=generator)).values
        self.offsets = ends.to(torch.int32)

    def bound(self, sms):
        total = bind_sum_slots(self.rows, self.row_of_slot, None, self.addend, sms)
        of_weight = self.bound_wgrad(sms > 0)

        def run():
            sums = total(self.rows, self.row_of_slot, None, self.addend.clone())
            return sums, of_weight()

        return run

    def bound_wgrad(self, beside):
        run = bind_grouped_wgrad(self.dy, self.x, self.offsets, BF16, False, OPTIONS, self.index, self.gathered, beside)
        return lambda: run(self.dy, self.x, self.offsets, None, self.index)


class ProductsOfCodes(Products):
    """The same with the operands in FP8, by columns."""

    def bound_wgrad(self, beside):
        dy, x = (quantize(rows, fp8_block(), -2, offsets=self.offsets) for rows in (self.dy, self.x))
        operands = Codes(dy.data, with_strides(dy.scale)), Codes(x.data, with_strides(x.scale)), self.offsets
        run = bind_grouped_wgrad(*operands, BF16, False, OPTIONS, beside=beside)
        return lambda: run(*operands)


@needs_gpu
@pytest.mark.parametrize("which", ["rows", "grad_output", "x", "codes"])
def test_a_weight_gradient_beside_the_sum(device, which, no_sync):
    # more clusters than tiles, and many tiles; the sum ends long before the product, or long after
    sizes = ((64, 2, 3, 64, 64, 2), (2000, 8, 16, 768, 512, 8), (9000, 4, 8, 2048, 256, 2))
    make, gathered = ProductsOfCodes if which == "codes" else Products, which if which in ("grad_output", "x") else None
    for tokens, chosen, experts, n, k, sms in sizes:
        case = make(device, tokens, chosen, experts, n, k, gathered, seed=tokens)
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
def test_streams_and_graphs_have_counters_of_their_own(device):
    cases = [Products(device, 3000, 4, 8, 1024, 512, "x", seed=seed) for seed in range(3)]
    want = [case.bound(0)() for case in cases]
    runs = [case.bound(16) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    graphs = [captured(run) for run in runs]
    torch.cuda.synchronize()
    for _ in range(5):  # side by side: three streams, then three replays
        got = []
        for run, stream in zip(runs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(run())
        torch.cuda.synchronize()
        for results, expected in zip(got, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for (_, results), expected in zip(graphs, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@needs_gpu
def test_without_a_counter_the_schedule_is_static(device, monkeypatch):
    case = Products(device, 2000, 4, 8, 512, 512, "x")
    want = case.bound(0)()
    counters = launch.TileCounters(device)
    counters._numbers = iter(())
    monkeypatch.setitem(launch._tile_counters, case.x.device, counters)
    assert counters.get()[1] == 0
    assert all(torch.equal(a, b) for a, b in zip(case.bound(16)(), want, strict=True))


# ---- layers -------------------------------------------------------------------------------------------------------


def layer(device, count=1):
    torch.manual_seed(0)
    with device:
        made = torch.nn.Sequential(*[fm.MoE(1536, 512, 16, 8).to(BF16) for _ in range(count)])
    return made, torch.randn(4096, 1536, device=device, dtype=BF16)


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
def test_two_layers(device, alone, no_sync, recipe):
    def results():
        made, x = layer(device, 2)
        return gradients(made, x, torch.ones_like(x), recipe)

    want = alone(results)
    made, x = layer(device, 2)
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


@needs_gpu
@RECIPES
def test_a_step_in_a_cuda_graph(device, alone, recipe):
    want = alone(lambda: gradients(*layer(device), torch.ones(4096, 1536, device=device, dtype=BF16), recipe))
    made, x = layer(device)
    dy = torch.ones_like(x)
    gradients(made, x, dy, recipe)
    graph, got = captured(lambda: gradients(made, x, dy, recipe))
    for _ in range(3):
        for t in got:
            t.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert same(got, want)


@needs_gpu
@RECIPES
def test_memory_of_a_step(device, alone, recipe):
    def peak():
        made, x = layer(device)
        dy = torch.ones_like(x)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            gradients(made, x, dy, recipe)
        return torch.cuda.max_memory_allocated() - before

    assert peak() <= 1.08 * alone(peak)


def test_gradients_that_the_kernels_cannot_read(device, alone):
    dy = torch.randn(1536, device=device, dtype=BF16).expand(4096, 1536)
    want = alone(lambda: gradients(*layer(device), dy))
    assert same(gradients(*layer(device), dy), want)
