"""The keys and the arguments of launches of the Hopper GEMMs, on the CPU: the kernels only record their arguments."""

import re
from contextlib import nullcontext

import pytest
import torch
from kit.poison import nan_in_new_tensors

from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.rows.move.functions import bind_expert_blocks, bind_row_ranges
from fusedmoe.kernels.sm90 import launch, one_group, products, router
from fusedmoe.kernels.sm90.gemm.arguments import BESIDE, RaggedKArguments, RaggedMArguments
from fusedmoe.kernels.sm90.launch import Codes, Part
from fusedmoe.numerics.activations import Activation

E, K, N, R = 4, 64, 96, 32
BF16, INT32 = torch.bfloat16, torch.int32
SWIGLU, STATIC = Activation("swiglu"), KernelOptions(0, "static")
# places among the arguments
OFFSETS_OF, ROW_SCALE, COUNTER, CONSTANTS, BIASED, CTAS, DYNAMIC = map(
    RaggedMArguments._fields.index, ("offsets", "row_scale", "counter", "limit", "biased", "ctas", "dynamic")
)
TENSORS = len(RaggedMArguments._fields)
OF_WGRAD = slice(RaggedKArguments._fields.index("counter"), len(RaggedKArguments._fields))


class Streams:
    """The state of torch.cuda, as `TileCounters` sees it. There are no tile counters yet."""

    def __init__(self, monkeypatch):
        self.stream, self.capturing = 1, False
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(launch, "_tile_counters", {})

    @property
    def cuda_stream(self):
        return self.stream

    def record_event(self):
        return self

    def synchronize(self):
        assert not self.capturing


@pytest.fixture(autouse=True)
def now(monkeypatch):
    return Streams(monkeypatch)


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """(the properties that are compiled in, the arguments) of each launch."""
    calls = []

    def kernel(**compiled_for):
        return lambda *arguments: calls.append((compiled_for, arguments))

    monkeypatch.setattr(launch, "sm_count", lambda device: 132)
    monkeypatch.setattr(launch, "ragged_m_kernel", kernel)
    monkeypatch.setattr(launch, "ragged_k_kernel", kernel)
    caches = launch.ragged_m, launch.ragged_k
    for cache in caches:
        cache.cache_clear()
    yield calls
    for cache in caches:
        cache.cache_clear()


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


OFFSETS, INDEX = zeros(E, dtype=INT32), zeros(R, dtype=INT32)


def product(rows=R, weight=None, x=None, options=DEFAULT, bias=None, row_scale=None, gather=None):
    x, weight = zeros(rows, K) if x is None else x, zeros(E, N, K) if weight is None else weight
    run = products.bind_grouped_gemm(x, weight, bias, row_scale, options, gather)
    return run(x, weight, bias, OFFSETS, row_scale, gather)


def activation(rows=R, act=SWIGLU, options=DEFAULT, keep=True, bias=None, row_scale=None):
    x, weight = zeros(rows, K), zeros(E, N, K)
    return products.bind_grouped_gemm_activation(x, weight, bias, row_scale, act, keep, options)(
        x, weight, bias, OFFSETS, row_scale
    )


def wgrad(
    rows=R, grad=None, x=None, options=DEFAULT, dtype=BF16, accumulate=False, out=None, gather=None, gathered=None
):
    grad, x = zeros(rows, N) if grad is None else grad, zeros(rows, K) if x is None else x
    return products.bind_grouped_wgrad(grad, x, OFFSETS, dtype, accumulate, options, gather, gathered)(
        grad, x, OFFSETS, out, gather
    )


BOTH = pytest.mark.parametrize("run", [product, wgrad])


@pytest.mark.parametrize(("run", "found"), [(product, launch.ragged_m), (wgrad, launch.ragged_k)])
def test_what_makes_another_launch(run, found):
    changes = [{"rows": 40}, {"options": KernelOptions(8)}, {"options": STATIC}]
    changes += [{"gather": INDEX}] if run is product else []
    for count, change in enumerate(({}, *changes), 1):
        run(**change)
        run(**change)
        info = found.cache_info()
        assert (info.misses, info.hits) == (count, count)


def test_the_numbers_are_those_of_the_call(launched):
    product(bias=zeros(E, N))
    product(row_scale=zeros(R))
    product(options=KernelOptions(32, "static"))
    product(weight=zeros(E, K, N).mT)
    product(gather=INDEX)
    for limit in (7.0, 10.0):
        activation(act=Activation("swiglu", limit, 1.5, 1.0))
    (_, biased), (_, scaled), (_, static), _, _, (_, one), (_, other) = launched
    assert biased[BIASED : BIASED + 2] == (True, False)
    assert scaled[BIASED : BIASED + 2] == (False, True)
    assert scaled[ROW_SCALE].dtype is torch.float32
    assert biased[DYNAMIC] == scaled[DYNAMIC] == 1
    assert static[CTAS] <= 100
    assert static[DYNAMIC] == 0
    assert [compiled_for["b_major"] for compiled_for, _ in launched[2:5]] == ["k", "n", "k"]
    assert [compiled_for["gather"] for compiled_for, _ in launched[2:5]] == [False, False, True]
    assert one[CONSTANTS:BIASED] == (7.0, 1.5, 1.0)
    assert other[CONSTANTS:BIASED] == (10.0, 1.5, 1.0)


# ---- tile counters ---------------------------------------------------------------------------------------------------


def counted(launched, run, schedule="dynamic", count=1):
    """(place of the tile counter, whether the launch is dynamic) of each of some launches; no place under a static
    schedule, which reads no counter.
    """
    launched.clear()
    for _ in range(count):
        run(options=KernelOptions(0, schedule))
    given = [arguments[COUNTER : DYNAMIC + 1] if run is product else arguments[OF_WGRAD] for _, arguments in launched]
    assert all(counter.dtype is INT32 and counter.shape == (1,) for counter, *_ in given)
    assert all(counter.item() == 0 for counter, *_, dynamic in given if dynamic)
    return [(counter.storage_offset() if dynamic else None, dynamic) for counter, *_, dynamic in given]


@BOTH
def test_launches_on_a_stream_share_a_counter_and_captured_ones_have_their_own(launched, now, run):
    assert counted(launched, run, count=2) == [(0, 1)] * 2
    now.capturing = True
    assert counted(launched, run, count=2) == [(1, 1), (2, 1)]
    now.capturing = False
    assert counted(launched, run) == [(0, 1)]
    now.stream = 2
    assert counted(launched, run, count=2) == [(3, 1)] * 2
    launched.clear()
    product()
    wgrad()
    (_, of_product), (_, of_wgrad) = launched
    assert of_product[COUNTER].data_ptr() == of_wgrad[OF_WGRAD][0].data_ptr()


@BOTH
def test_launches_that_are_static_or_have_no_rows_take_no_counter(launched, run):
    assert counted(launched, run, "static", count=2) == [(None, 0)] * 2
    launched.clear()
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        assert not run(rows=0).any()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not launched
    assert not launch._tile_counters


@BOTH
def test_a_launch_without_a_counter_is_static(launched, now, monkeypatch, run):
    monkeypatch.setattr(launch.TileCounters, "SIZE", 3)
    now.capturing = True
    assert counted(launched, run) == [(None, 0)]  # there are none yet: a graph would own the memory
    now.capturing = False
    assert counted(launched, run) == [(0, 1)]  # the same launch
    now.stream = 2
    assert counted(launched, run) == [(1, 1)]
    now.capturing = True
    assert counted(launched, run, count=2) == [(2, 1), (None, 0)]  # all taken
    now.capturing = False
    assert counted(launched, run) == [(1, 1)]
    now.stream = 3
    assert counted(launched, run) == [(None, 0)]
    assert launch.tile_counters(torch.device("cpu")) is launch.tile_counters(torch.device("cpu"))


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_the_products_of_a_router_take_the_counter_of_the_stream(monkeypatch, schedule):
    pytest.importorskip("cutlass")
    calls, options = [], KernelOptions(0, schedule)
    monkeypatch.setattr(router, "load", lambda kernel: lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(one_group, "_tables", {})
    x, weight, parts = zeros(R, K), zeros(8, K), zeros(R, 24)
    router._bind_logits(x, 8, False, options)(x, weight, None)
    router._bind_exact_wgrad(parts, x, 4, options)(parts, x, zeros(4, dtype=INT32), None)
    logits, of_weight = calls
    counter, *_, dynamic = of_weight[4:]
    assert logits[DYNAMIC] == dynamic == (schedule == "dynamic")
    assert logits[TENSORS].shape == (R, 8)
    assert logits[COUNTER].data_ptr() == counter.data_ptr()
    assert bool(launch._tile_counters) == (schedule == "dynamic")


def bind_wgrad(options, beside):
    dy, x = zeros(R, N), zeros(R, K)
    products.bind_grouped_wgrad(dy, x, OFFSETS, BF16, False, options, None, None, beside)(dy, x, OFFSETS, None)


def bind_fp8_wgrad(options, beside):
    dy, x = (zeros(width, 256, dtype=torch.float8_e4m3fn) for width in (N, K))
    dy, x = (Codes(codes, torch.zeros(2, len(codes)).mT) for codes in (dy, x))
    products.bind_grouped_wgrad(dy, x, OFFSETS, BF16, False, options, beside=beside)(dy, x, OFFSETS)


@pytest.mark.parametrize(("schedule", "beside", "capturing"), [
    ("static", False, False), ("static", True, False), ("dynamic", False, False), ("dynamic", True, False),
    ("dynamic", True, True),
])  # fmt: skip
@pytest.mark.parametrize("bind", [bind_wgrad, bind_fp8_wgrad], ids=["bf16", "fp8"])
def test_a_weight_gradient_that_begins_early(launched, now, bind, schedule, beside, capturing):
    """One that is bound while a graph is captured begins in turn."""
    now.capturing = capturing
    bind(KernelOptions(8, schedule), beside)
    ((compiled_for, arguments),) = launched
    counter, _, ctas, dynamic = arguments[OF_WGRAD]
    assert compiled_for["beside"] is (beside and not capturing)
    assert ctas <= 124
    assert dynamic == int((beside or schedule == "dynamic") and not capturing)
    assert counter.item() == 0 or not dynamic


@pytest.mark.parametrize(("deterministic", "want"), [(False, BESIDE), (True, 1)])
def test_a_part_begins_in_its_turn_if_torch_fills_its_results(launched, deterministic, want):
    """The fill is then the launch before it."""
    x, weight, parts = zeros(R, K), zeros(E, N, K), [Part(zeros(1, dtype=INT32), beside=True)]
    run = products.bind_grouped_gemm(x, weight, None, None, KernelOptions(), ranges=True)
    with nan_in_new_tensors() if deterministic else nullcontext():
        run(x, weight, None, parts, None)
    ((_, arguments),) = launched
    assert arguments[DYNAMIC] == want


@pytest.mark.parametrize(("schedule", "capturing", "want"), [
    ("static", False, [0, BESIDE, 0]), ("dynamic", False, [1, BESIDE, 1]), ("dynamic", True, [0, 0, 0]),
])  # fmt: skip
@pytest.mark.parametrize("rows", [R, 0])
def test_a_launch_for_each_part(launched, now, rows, schedule, capturing, want):
    """Each is taken after the launch of the one before. One beside another launch draws its tiles under any schedule,
    and begins in turn if there is no counter.
    """
    now.capturing = capturing
    x, weight, ranges, counts = zeros(rows, K), zeros(E, N, K), [zeros(i, dtype=INT32) for i in (1, 2, 3)], []

    def parts():
        for part, beside in zip(ranges, (False, True, False), strict=True):
            yield Part(part, beside)
            counts.append(len(launched))

    options = KernelOptions(schedule=schedule)
    products.bind_grouped_gemm(x, weight, None, None, options, ranges=True)(x, weight, None, parts(), None)
    assert counts == ([1, 2, 3] if rows else [0, 0, 0])
    given = [arguments for _, arguments in launched]
    assert [arguments[DYNAMIC] for arguments in given] == (want if rows else [])
    assert all(arguments[OFFSETS_OF] is part for arguments, part in zip(given, ranges, strict=False))


def test_a_product_that_counts_its_tiles(launched):
    x, weight, ranges = zeros(R, K), zeros(E, 1000, K), zeros(10, dtype=INT32)
    run, tiles = products.bind_counted_gemm(x, weight, None, STATIC)
    assert run(x, weight, None, ranges).shape == (R, 1000)
    ((compiled_for, arguments),) = launched
    assert compiled_for["signals"]
    config = compiled_for["config"]
    assert tiles == (config.tile_m, -(-1000 // config.tile_n))
    assert arguments[DYNAMIC] == 0
    assert arguments[OFFSETS_OF] is ranges


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 33), (2, 2), (-1, 2)])
def test_ranks_whose_rows_no_warp_can_divide(rank, ranks):
    with pytest.raises(ValueError, match=f"^rank {rank} of {ranks} ranks: expected one of 2 to 32 ranks"):
        bind_row_ranges(OFFSETS, INDEX, rank, ranks, 64)


def test_halves_need_the_rank():
    with pytest.raises(ValueError, match="halves of the tokens: expected a rank and its number of tokens, got None"):
        bind_expert_blocks(OFFSETS, INDEX, half=32)


# ---- the tensors of an epilogue, and gathered rows -------------------------------------------------------------------


FAR = torch.empty(2, K, dtype=BF16, device="meta").as_strided((2, K), (2**30, 1))
WEIGHT = torch.empty(E, N, K, dtype=BF16, device="meta")
FAR_INDEX = torch.empty(R, dtype=INT32, device="meta")
VECTOR, APART = "strides {}: expected a contiguous", "1073741824 elements apart: expected less than 2 GiB"
INT64 = "torch.int64, (32,), strides (1,): expected a contiguous int32 vector"


@pytest.mark.parametrize(("call", "message"), [
    (lambda: wgrad(gather=INDEX), "got None, an index"), (lambda: wgrad(gathered="x"), "got 'x', no index"),
    (lambda: product(gather=INDEX.long()), INT64), (lambda: wgrad(gather=INDEX.long(), gathered="x"), INT64),
    (lambda: product(gather=zeros(64, dtype=INT32)[::2]), VECTOR.format("(2,)")),
    (lambda: product(x=FAR, weight=WEIGHT, gather=FAR_INDEX), APART),
    (lambda: wgrad(grad=FAR, x=FAR, gather=FAR_INDEX, gathered="grad_output"), APART),
    (lambda: wgrad(grad=FAR, x=FAR, gather=FAR_INDEX, gathered="x"), APART),
])  # fmt: skip
def test_refused_indices(launched, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
    assert not launched


def test_an_exchange_takes_sms_and_leaves_the_tiles(launched):
    """Of this derivative the tiles depend on the SMs, and with them the order in which its row scale is summed."""
    rows, experts, features, hidden = 2048, 16, 2880, 2048
    shapes = (rows, hidden), (experts, hidden, features), (rows, 2 * features)
    dy, w, p = (torch.empty(shape, dtype=BF16, device="meta") for shape in shapes)
    scale, offsets = torch.empty(rows, device="meta"), torch.empty(experts, dtype=INT32, device="meta")
    for options in (KernelOptions(), KernelOptions(exchange_sms=2), KernelOptions(2)):
        run = products.bind_grouped_gemm_activation_backward(dy, w, p, scale, SWIGLU, True, False, options)
        run(dy, w, offsets, p, scale)
    tiles = [compiled_for["config"].tile_n for compiled_for, _ in launched]
    assert [arguments[CTAS] for _, arguments in launched] == [132, 130, 130]
    assert tiles[0] == tiles[1] != tiles[2]
