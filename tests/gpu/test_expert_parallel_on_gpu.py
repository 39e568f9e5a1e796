"""The engine "symmetric", and the rules that compute while tokens travel, on GPUs: bit for bit those of "allgather".

Two ranks with a GPU each, or both on the only one: their kernels then take turns, which is slow but shows the same
races. EXPERT_PARALLEL_STEPS sets the number of steps with random delays, and EXPERT_PARALLEL_RANKS the ranks of the
tests whose names have "delays".
"""

import os
import signal
import time
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from kit import hopper_ranks
from kit.hopper import needs_gpu
from kit.two_ranks import Ranks
from torch import distributed as dist

import fusedmoe as fm
from fusedmoe.builtin_rules.exchange import arriving_codes, beside
from fusedmoe.expert_parallel.engine import Wanted
from fusedmoe.expert_parallel.wire import packed
from fusedmoe.kernels.exchange.layout import BEGIN, CONTROL_BYTES, END, TELL

pytestmark = needs_gpu

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

BF16 = torch.bfloat16
HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 512, 256, 16, 4
MOST = 2500  # tokens: enough for the rules that overlap exchanges
STEPS = int(os.environ.get("EXPERT_PARALLEL_STEPS", "60"))
RANKS = int(os.environ.get("EXPERT_PARALLEL_RANKS", "2"))
OVERLAPS, OTHERS = tuple(hopper_ranks.OVERLAPS), tuple(hopper_ranks.OTHERS)
FP8_OVERLAPS, FP8_OTHERS = tuple(hopper_ranks.FP8_OVERLAPS), tuple(hopper_ranks.FP8_OTHERS)
TOKENS = {"even": (MOST, MOST), "uneven": (MOST, 1733), "empty": (0, 900)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    # the host of a step takes 10 ms, or a few times more on a busy machine
    started = Ranks(tmp_path_factory.mktemp("ranks"), RANKS, patience_s=120 + 0.03 * STEPS)
    yield started
    started.stop()


def on_device(rank, quick=False, by_experts=False, own_first=False):
    """``quick``: whether the exchanges of a test, which are small, are taken as quick; else as if they were long.
    ``by_experts``: whether products follow arriving rows by blocks of experts, although there are few; ``own_first``:
    then own rows first, and sums leave in halves, although there are few rows.
    """
    beside.LEAST_BLOCKS = 2 if by_experts else 1000
    beside.OWN_TILES = beside.HALF_TILES = beside.HALF_EXPERTS = 0 if own_first else 1000
    os.environ["FUSEDMOE_DISABLE"] = hopper_ranks.APART
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    beside.QUICK_US, beside.MEMORY_GB_S = (1e9, 3000) if quick else (0.0, 1e12)
    arriving_codes.LEAST_TILES = 0


_made = {}


def exchange(engine, most=MOST, wire=None, capacity=None):
    """One object per engine, ``dispatch_dtype`` and capacity, as a model has."""
    key = engine, most, wire, capacity
    if key not in _made:
        settings = {"max_tokens": most, "timeout_s": 60, "dispatch_dtype": wire, "capacity": capacity}
        _made[key] = fm.ExpertParallel(engine=engine, overflow="drop", **settings)
    return _made[key]


def layer(ep, rank, scale=0.1, chosen=CHOSEN, **settings):
    torch.manual_seed(0)
    made = fm.MoE(HIDDEN, INTERMEDIATE, EXPERTS, chosen, device="cuda", dtype=BF16, expert_parallel=ep, **settings)
    ranks = 1 if ep is None else ep.ranks
    here = EXPERTS // ranks
    for op in (made.experts.gate_up, made.experts.down):
        generator = torch.Generator("cuda").manual_seed(op.in_features)
        weight = torch.randn(EXPERTS, *op.weight.shape[1:], device="cuda", generator=generator)
        op.weight.data.copy_(scale * weight[rank % ranks * here : (rank % ranks + 1) * here])
    return made


def data(count, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    x, grad = (torch.randn(count, HIDDEN, device="cuda", generator=generator).to(BF16) for _ in range(2))
    return x.requires_grad_(), grad


def results(made, x, grad, wanted=None):
    y = made(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *made.parameters()] if wanted is None else wanted, grad)]


def assert_same(got, want):
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def differ(got, want):
    """Whether any values differ, on the device: the host does not wait."""
    return torch.stack([(a != b).any() for a, b in zip(got, want, strict=True)]).any()


def warmed_up(step):
    """Run a step on a stream of its own, before a capture on every rank."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()


def new_values(generator, *tensors):
    with torch.no_grad():
        for t in tensors:
            t.copy_(torch.randn(t.shape, device="cuda", generator=generator))


# ---- the engine ----------------------------------------------------------------------------------------------------


def single_exchanges(rank):
    """Exchanges by the kernels and by copies, with delays of each rank: with the results of "allgather"."""
    on_device(rank)
    engine, others, size = exchange("symmetric").engine, exchange("allgather").engine, dist.get_world_size()
    generator, delays = torch.Generator("cuda").manual_seed(rank), torch.Generator().manual_seed(rank)
    for step in range(40):
        rows, width, chosen = (8, 300, 1000, 37)[step % 4], (64, 2048, 5120, 520)[step % 4], (2, 4, 8, 6)[step % 4]
        count = (rows, rows - 3, 0 if rank == 1 else rows)[step % 3]
        dtype = (BF16, torch.float16, torch.float32)[step % 3]
        x = torch.randn(count, width, device="cuda", generator=generator).to(dtype)
        index = torch.randint(-1, EXPERTS + 1, (count, chosen), device="cuda", generator=generator)
        weight = torch.rand(count, chosen, device="cuda", generator=generator)
        here = EXPERTS // size
        delay(delays)
        got = engine.start_gather_of_tokens([x], index, weight, rows, here).wait_all()
        delay(delays)
        gradients = engine.gather([x], rows, Wanted(got[0], here))
        want = others.start_gather_of_tokens([x], index, weight, rows, here).wait_all()
        ids = [torch.where((i >= 0) & (i < here), i, -1) for i in (got[0], want[0])]
        assert torch.equal(*ids)
        for r, n in enumerate(_counts(count)):
            there = slice(r * rows, r * rows + n)
            wanted = (ids[1][there] >= 0).any(1)
            assert torch.equal(got[1][there], want[1][there])
            for of_rows in (got[2], *gradients):
                assert torch.equal(of_rows[there][wanted], want[2][there][wanted])
        parts = torch.randn(size * rows, 24, device="cuda", generator=generator)
        more = torch.rand(size * rows, 5, device="cuda", generator=generator)
        delay(delays)
        for a, b in zip(engine.exchange([parts, more]), others.exchange([parts, more]), strict=True):
            assert_same(a, b)
    assert engine.buffer_bytes() > 0


def _counts(count):
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([count]))
    return [int(n) for n in found]


def test_exchanges_are_those_of_allgather(ranks):
    ranks.run(single_exchanges)


# ---- a layer -------------------------------------------------------------------------------------------------------


def layers(rank, tokens, settings, others=()):
    on_device(rank)
    x, grad = data(tokens[rank], rank)
    found = {}
    for name, engine, disabled in (
        ("plain", "allgather", OVERLAPS), ("overlap", "allgather", others), ("symmetric", "symmetric", OVERLAPS),
        ("by experts", "symmetric", others), ("own first", "symmetric", others), ("both", "symmetric", others),
    ):  # fmt: skip
        on_device(rank, by_experts=name in ("by experts", "own first"), own_first=name == "own first")
        with fm.disabled(*disabled):
            made = layer(exchange(engine), rank, **settings)
            found[name] = results(made, x, grad)
            used = {step.rule for step in made.explain(x).steps}
            assert not used & {*disabled}
    for name, got in found.items():
        for i, (a, b) in enumerate(zip(got, found["plain"], strict=True)):
            assert torch.equal(a, b), (name, i)
            assert a.float().norm() > 0 or not min(tokens), (name, i)
    # against one GPU with the tokens of both ranks
    one = layer(None, 0, **settings)
    other = data(tokens[1 - rank], 1 - rank)
    order = [(x, grad), other] if rank == 0 else [other, (x, grad)]
    every = torch.cat([x.detach() for x, _ in order]).requires_grad_()
    want = results(one, every, torch.cat([grad for _, grad in order]))
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
    exact = results(one.double(), every.detach().double().requires_grad_(), torch.cat([g for _, g in order]).double())
    first = sum(tokens[:rank])
    mine = slice(first, first + tokens[rank])
    for got, of_one, reference in zip(found["both"][:2], want, exact, strict=False):  # output, gradient of the tokens
        if tokens[rank] and not settings:
            reference = reference[mine].double()
            error, of_one = ((t.double() - reference).norm() for t in (got, of_one[mine]))
            assert 0 < error < 1.5 * of_one
    assert settings or used >= {*OVERLAPS}


@pytest.mark.parametrize(
    ("tokens", "settings"),
    [("even", {}), ("uneven", {}), ("empty", {}), ("uneven", {"bias": True}), ("even", {"score": "sigmoid"}),
     ("uneven", {"shared_intermediate": 128})],
    ids=str,
)  # fmt: skip
def test_layers_have_the_bits_of_allgather(ranks, tokens, settings):
    ranks.run(layers, TOKENS[tokens], settings, () if settings else OTHERS)


def mixed(rank):
    """One rank with the overlaps, the other without: their exchanges are the same, at the same places in regions."""
    on_device(rank)
    x, grad = data(MOST, rank)
    ep = exchange("symmetric")
    found = []
    for disabled in ((OTHERS, OVERLAPS)[rank], (OVERLAPS, OTHERS)[rank], OVERLAPS):
        with fm.disabled(*disabled):
            made = layer(ep, rank)
            found.append(results(made, x, grad))
    for got in found[:2]:
        assert_same(got, found[2])
    assert found[2][0].any()


def test_ranks_with_different_steps(ranks):
    ranks.run(mixed)


def with_engines(rank, tokens, chosen, quick, recipe="bf16", wire=None, capacity=None):
    """A layer on all ranks, by both engines, with and without overlaps; ``wire``: the ``dispatch_dtype``. Return the
    slots that found no row, of each engine.
    """
    on_device(rank, quick)
    x, grad = data(tokens[rank], rank)
    overlaps, others = (OVERLAPS, OTHERS) if recipe == "bf16" else (FP8_OVERLAPS, FP8_OTHERS)
    without_product = hopper_ranks.GRADIENTS_AS_CODES
    if wire is not None:
        overlaps = (*overlaps, hopper_ranks.ARRIVING_CODES, hopper_ranks.ARRIVING_GRADIENTS, without_product)
    found, used = {}, {}
    for engine in ("allgather", "symmetric"):
        for disabled in (overlaps, others):
            with fm.disabled(*disabled), fm.recipe(recipe):
                made = layer(exchange(engine, wire=wire, capacity=capacity), rank, chosen=chosen)
                found[engine, disabled] = results(made, x, grad)
                used[engine] = {step.rule for step in made.explain(x).steps}
    for got in found.values():
        assert_same(got, found["allgather", overlaps])
    assert got[0].any() or not tokens[rank]
    assert used["symmetric"] >= {*overlaps} - {without_product}
    assert wire is None or without_product in used["allgather"]
    return [exchange(engine, wire=wire, capacity=capacity).dropped() for engine in ("allgather", "symmetric")]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize("capacity", [0.6, 1.5])
def test_layers_with_a_capacity_have_the_bits_of_allgather(ranks, capacity, recipe):
    for by_copies, by_kernels in ranks.run(with_engines, TOKENS["uneven"], CHOSEN, False, recipe, None, capacity):
        assert by_copies == by_kernels
        assert (by_copies > 0) is (capacity < 1)


@pytest.mark.parametrize("tokens", TOKENS)
def test_layers_in_fp8_have_the_bits_of_allgather(ranks, tokens):
    ranks.run(with_engines, TOKENS[tokens], CHOSEN, False, "fp8_block")


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_layers_whose_tokens_travel_as_codes_have_the_bits_of_separate_steps(ranks, tokens, quick):
    ranks.run(with_engines, TOKENS[tokens], CHOSEN, quick, "fp8_block", torch.float8_e4m3fn)


@pytest.mark.parametrize("capacity", [0.6, 1.5])
def test_layers_with_a_capacity_whose_tokens_travel_as_codes(ranks, capacity):
    given = TOKENS["uneven"], CHOSEN, False, "fp8_block", torch.float8_e4m3fn, capacity
    for by_copies, by_kernels in ranks.run(with_engines, *given):
        assert by_copies == by_kernels
        assert (by_copies > 0) is (capacity < 1)


def single_exchanges_of_codes(rank):
    """Gathers of codes and scales, by the kernels and by copies, with delays of each rank."""
    on_device(rank)
    engine, others, size = exchange("symmetric").engine, exchange("allgather").engine, dist.get_world_size()
    generator, delays = torch.Generator("cuda").manual_seed(rank), torch.Generator().manual_seed(rank)
    here = EXPERTS // size
    for step in range(40):
        rows, width, chosen = (8, 300, 1000, 37)[step % 4], (64, 2048, 5120, 24)[step % 4], (2, 4, 8, 6)[step % 4]
        count = (rows, rows - 3, 0 if rank == 1 else rows)[step % 3]
        tokens = packed(torch.randn(count, width, device="cuda", generator=generator).to(BF16), torch.float8_e4m3fn)
        index = torch.randint(-1, EXPERTS + 1, (count, chosen), device="cuda", generator=generator)
        weight = torch.rand(count, chosen, device="cuda", generator=generator)
        delay(delays)
        got = engine.start_gather_of_tokens(tokens, index, weight, rows, here).wait_all()
        delay(delays)
        gradients = engine.gather(tokens, rows, Wanted(got[0], here))
        want = others.start_gather_of_tokens(tokens, index, weight, rows, here).wait_all()
        for r, n in enumerate(_counts(count)):
            there = slice(r * rows, r * rows + n)
            wanted = ((want[0][there] >= 0) & (want[0][there] < here)).any(1)
            for of_rows in (got[2:], gradients):
                for a, b in zip(of_rows, want[2:], strict=True):
                    assert torch.equal(a[there][wanted].float(), b[there][wanted].float())


def test_exchanges_of_codes_are_those_of_allgather(ranks):
    ranks.run(single_exchanges_of_codes)


def test_four_ranks(tmp_path):
    started = Ranks(tmp_path, 4)
    try:
        started.run(single_exchanges)
        for chosen, quick in ((2, False), (4, False), (8, False), (4, True)):
            started.run(with_engines, (MOST, 1733, 0, 900), chosen, quick)
        started.run(with_engines, (MOST, 1733, 0, 900), 8, False, "fp8_block")
        started.run(with_engines, (MOST, 1733, 0, 900), 8, False, "fp8_block", torch.float8_e4m3fn)
    finally:
        started.stop()


# ---- no host, graphs, delays ----------------------------------------------------------------------------------------


def without_the_host(rank, others):
    """Forward and backward without a synchronisation, eager and captured; replays follow new tokens and weights."""
    on_device(rank)
    with fm.disabled(*others):
        eager_and_captured(rank, exchange("symmetric"))


def eager_and_captured(rank, ep):
    made = layer(ep, rank)
    x, grad = data(MOST, 7)
    for _ in range(2):
        results(made, x, grad)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            results(made, x, grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    warmed_up(lambda: results(made, x, grad))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(made, x, grad)
    generator = torch.Generator("cuda").manual_seed(rank)
    for step in range(STEPS // 2):
        new_values(generator, x, grad)
        if step % 3 == rank:
            torch.cuda._sleep(3_000_000)
        graph.replay()
        got = [t.clone() for t in captured]
        assert_same(got, results(made, x, grad))
    assert captured[0].any()


def test_no_synchronisation_and_graphs(ranks):
    for others in ((), OTHERS):
        ranks.run(without_the_host, others)


def in_batches(rank, recipe):
    """Experts that run in batches of rows, against all rows at once: results, the peak of memory, and a graph."""
    on_device(rank)
    ep = fm.ExpertParallel(engine="symmetric", max_tokens=MOST, batch_rows=MOST, timeout_s=60)
    _made["batches"] = ep
    x, grad = data(MOST, rank)
    found, peaks = [], []
    with fm.recipe(recipe):
        for of in (exchange("symmetric"), ep):
            made = layer(of, rank)
            results(made, x, grad)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found.append(results(made, x, grad))
            peaks.append(torch.cuda.max_memory_allocated() - before)
        eager_and_captured(rank, ep)
    for got, want in zip(*found, strict=True):
        within = 0.01 if recipe == "bf16" else 0.05  # other rows share a scale
        assert (got - want).float().norm() < within * want.float().norm()
    assert peaks[1] < 0.75 * peaks[0], peaks


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_batches_of_rows(ranks, recipe):
    ranks.run(in_batches, recipe)


def odd_graphs(rank):
    """Replays of a graph with three exchanges, and of one whose buffer is replaced by a larger one, between eager calls
    and with delays. The fixed tokens and experts want no gradients, so that no gradient of tokens returns.
    """
    on_device(rank)
    ep = fm.ExpertParallel(engine="symmetric", max_tokens=MOST, timeout_s=60)
    _made["odd"] = ep
    made = layer(ep, rank)
    made.router.requires_grad_(False)
    x, grad = data(MOST, rank)
    x.requires_grad_(False)
    weights = [*made.experts.parameters()]
    exchanges = []
    start = ep.engine.channel

    def counted(*args, **named):
        exchanges.append(args)
        return start(*args, **named)

    def step():
        return results(made, x, grad, weights)

    warmed_up(step)
    ep.engine.channel = counted
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    assert len(exchanges) == 3
    larger = fm.MoE(4 * HIDDEN, 64, EXPERTS, CHOSEN, device="cuda", dtype=BF16, expert_parallel=ep)
    wide = torch.randn(MOST, 4 * HIDDEN, device="cuda", dtype=BF16)
    delays = torch.Generator().manual_seed(rank)
    generator = torch.Generator("cuda").manual_seed(rank)
    for i in range(STEPS // 4):
        new_values(generator, x)
        want = [t.clone() for t in step()]
        for _ in range(3):
            if torch.rand((), generator=delays) < 0.5:
                torch.cuda._sleep(2_000_000)
            graph.replay()
        assert_same(captured, want)
        if i == STEPS // 8:
            with torch.no_grad():
                larger(wide)
    assert captured[0].any()


def test_graphs_with_an_odd_number_of_exchanges(ranks):
    ranks.run(odd_graphs)


def two_layers(rank, ep):
    """A step of two layers, and its results."""
    stack = [layer(ep, rank), layer(ep, rank, score="sigmoid")]
    x, grad = data(1200 + 300 * rank, rank)

    def step():
        y = stack[1](stack[0](x))
        return [y.detach(), *torch.autograd.grad(y, [x, *stack[0].parameters()], grad)]

    return step, step()


@contextmanager
def poisoned_regions(rank, ep):
    """Fill the rank's own data before each exchange, when the others have read them, and before they write there."""
    channel_of, engine = ep.engine.channel, ep.engine

    def poisoned(nbytes, device, returns=False):
        channel = channel_of(nbytes, device, returns)
        engine._signal(channel, BEGIN)
        data = channel.buffer.of_rank(rank, CONTROL_BYTES, (channel.nbytes - CONTROL_BYTES,), torch.uint8)
        data.fill_(0xFF)
        engine._signal(channel, TELL)  # an exchange of nothing: the others write in the next one
        engine._signal(channel, END)
        return channel

    engine.channel = poisoned
    try:
        yield
    finally:
        engine.channel = channel_of


def delay(generator):
    """Let the device wait for up to 2 ms, half of the time."""
    if torch.rand((), generator=generator) < 0.5:
        torch.cuda._sleep(int(torch.randint(0, 4_000_000, (1,), generator=generator)))


def delayed(rank, engine, recipe, wire=None, by_experts=False, own_first=False):
    """Steps with random delays of each rank, and buffers that are poisoned before each use."""
    on_device(rank, by_experts=by_experts, own_first=own_first)
    if engine == "symmetric" or torch.cuda.device_count() < RANKS:
        ep = exchange(engine, wire=wire)
    else:  # over gloo, a step takes 40 ms
        ep = fm.ExpertParallel(dist.new_group(backend="nccl"), engine=engine, timeout_s=60)
    delays = torch.Generator().manual_seed(rank)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    with fm.disabled(*OTHERS, *FP8_OTHERS), fm.recipe(recipe):
        step, want = two_layers(rank, ep)
        with poisoned_regions(rank, ep) if engine == "symmetric" else nullcontext():
            for i in range(STEPS):
                delay(delays)
                different += differ(step(), want)
                if i % 100 == 0:
                    torch.cuda.synchronize()
    assert int(different) == 0
    assert want[0].any()


def delayed_replays(rank, recipe, wire=None, by_experts=False, own_first=False):
    """The same as replays of a CUDA graph: the host only starts them, so that many follow each other closely."""
    on_device(rank, by_experts=by_experts, own_first=own_first)
    ep, delays = exchange("symmetric", wire=wire), torch.Generator().manual_seed(rank)
    with fm.disabled(*OTHERS, *FP8_OTHERS), fm.recipe(recipe):
        step, want = two_layers(rank, ep)
        graph = torch.cuda.CUDAGraph()
        warmed_up(step)
        with poisoned_regions(rank, ep), torch.cuda.graph(graph):
            captured = step()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(STEPS):
        delay(delays)
        graph.replay()
        different += differ(captured, want)
        for t in captured:
            t.fill_(torch.nan)
        if i % 100 == 0:
            torch.cuda.synchronize()
    assert int(different) == 0
    assert want[0].any()


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize("engine", ["symmetric", "allgather", "alltoall"])
def test_delays_and_poisoned_buffers(ranks, engine, recipe):
    if engine == "alltoall" and torch.cuda.device_count() < RANKS:
        pytest.skip("NCCL needs a GPU per rank")
    ranks.run(delayed, engine, recipe)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_replays_with_delays_and_poisoned_buffers(ranks, recipe):
    ranks.run(delayed_replays, recipe)


@pytest.mark.parametrize(("recipe", "own_first"), [("bf16", False), ("bf16", True), ("fp8_block", False)])
def test_steps_by_experts_with_delays_and_poisoned_buffers(ranks, recipe, own_first):
    """Under `fp8_block`, only the second layer follows blocks of experts."""
    ranks.run(delayed, "symmetric", recipe, by_experts=True, own_first=own_first)
    ranks.run(delayed_replays, recipe, by_experts=True, own_first=own_first)


def test_codes_with_delays_and_poisoned_buffers(ranks):
    ranks.run(delayed, "symmetric", "fp8_block", torch.float8_e4m3fn)
    ranks.run(delayed_replays, "fp8_block", torch.float8_e4m3fn)


# ---- beside another library ------------------------------------------------------------------------------------------


def beside_a_collective(rank):
    """Under FSDP, NCCL gathers the next layer's weights meanwhile: its kernel has SMs of a rank until it runs on all,
    and on other ranks it may begin after this layer.
    """
    on_device(rank)
    group = dist.new_group(backend="nccl")
    ep = exchange("symmetric")
    made, (x, grad) = layer(ep, rank), data(MOST, rank)
    want = results(made, x, grad)
    weights, side = torch.ones(1 << 26, device="cuda"), torch.cuda.Stream()
    dist.all_reduce(weights, group=group)
    for i in range(10):
        torch.cuda.synchronize()
        dist.barrier()
        before = (i + rank) % 2 == 0
        if before:
            with torch.cuda.stream(side):
                dist.all_reduce(weights, group=group)
            time.sleep(0.01)  # until it has its SMs
        got = results(made, x, grad)
        if not before:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                dist.all_reduce(weights, group=group)
        torch.cuda.current_stream().wait_stream(side)
        assert_same(got, want)


def test_beside_a_collective(ranks):
    if torch.cuda.device_count() < RANKS:
        pytest.skip("NCCL needs a GPU per rank")
    ranks.run(beside_a_collective)


# ---- a rank that is gone -------------------------------------------------------------------------------------------


def lost(rank, killed):
    """Rank 1 does not come to the second step; ``killed``: its process ends."""
    on_device(rank)
    ep = fm.ExpertParallel(engine="symmetric", max_tokens=MOST, timeout_s=4)
    _made["lost"] = ep  # torch ends a process that frees symmetric memory without a CUDA context
    made = layer(ep, rank)
    x, grad = data(MOST, rank)
    results(made, x, grad)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1 and killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        return

    def alone():
        for _ in range(2):
            results(made, x, grad)
            torch.cuda.synchronize()

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"CUDA error|did not come to exchange \d+ within 4 s"):
        alone()
    assert 2 < time.monotonic() - start < 15


@pytest.mark.parametrize("killed", [False, True])
def test_a_rank_that_does_not_come(tmp_path, killed):
    """The others end within the time-out; their CUDA context is lost, so no wrong result can be used."""
    started = Ranks(tmp_path)
    try:
        # the other rank has no error but the expected one
        with pytest.raises(AssertionError, match=r"\Arank 1 is gone\Z") if killed else nullcontext():
            started.run(lost, killed)
    finally:
        started.stop()
