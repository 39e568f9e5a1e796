"""The keys and the arguments of launches of the Hopper GEMMs, on the CPU: the kernels only record their arguments."""

import re

import pytest
import torch

from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.sm90 import launch, one_group, products, router
from fusedmoe.kernels.sm90.gemm.arguments import RaggedKArguments, RaggedMArguments
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.tiles.choice import CO_256_ALONE, PP_192
from fusedmoe.numerics.activations import Activation

E, K, N = 4, 64, 96
BF16 = torch.bfloat16
# places among the arguments
ROW_SCALE, COUNTER, CONSTANTS, BIASED, CTAS, DYNAMIC = map(
    RaggedMArguments._fields.index, ("row_scale", "counter", "limit", "biased", "ctas", "dynamic")
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


def product(rows=32, weight=None, **settings):
    weight = torch.zeros(E, N, K, dtype=BF16) if weight is None else weight
    return products.grouped_gemm(
        torch.zeros(rows, K, dtype=BF16), weight, torch.zeros(E, dtype=torch.int32), **settings
    )


def wgrad(rows=32, dtype=BF16, **settings):
    dy, x = torch.zeros(rows, N, dtype=BF16), torch.zeros(rows, K, dtype=BF16)
    return products.grouped_wgrad(dy, x, torch.zeros(E, dtype=torch.int32), dtype=dtype, **settings)


@pytest.mark.parametrize(("run", "found"), [(product, launch.ragged_m), (wgrad, launch.ragged_k)])
def test_what_makes_another_launch(run, found):
    changes = {"rows": 40}, {"options": KernelOptions(8)}, {"options": KernelOptions(0, "static")}
    for count, change in enumerate(({}, *changes), 1):
        run(**change)
        run(**change)
        info = found.cache_info()
        assert (info.misses, info.hits) == (count, count)


def test_the_numbers_are_those_of_the_call(launched):
    product(bias=torch.zeros(E, N, dtype=BF16))
    product(row_scale=torch.zeros(32, dtype=BF16))
    product(options=KernelOptions(32, "static"))
    (_, biased), (_, scaled), (_, static) = launched
    assert biased[BIASED : BIASED + 2] == (True, False)
    assert scaled[BIASED : BIASED + 2] == (False, True)
    assert scaled[ROW_SCALE].dtype is torch.float32
    assert biased[DYNAMIC] == scaled[DYNAMIC] == 1
    assert static[CTAS] <= 100
    assert static[DYNAMIC] == 0


def test_the_major_axis_is_that_of_the_weight(launched):
    product()
    product(weight=torch.zeros(E, K, N, dtype=BF16).mT)
    assert [compiled_for["b_major"] for compiled_for, _ in launched] == ["k", "n"]


def test_constants_of_the_activation_are_told_apart(launched):
    x, w, offsets = torch.zeros(32, K, dtype=BF16), torch.zeros(E, N, K, dtype=BF16), torch.zeros(E, dtype=torch.int32)
    for limit in (7.0, 10.0):
        products.grouped_gemm_activation(x, w, offsets, Activation("swiglu", limit, 1.5, 1.0))
    assert [arguments[CONSTANTS:BIASED] for _, arguments in launched] == [(7.0, 1.5, 1.0), (10.0, 1.5, 1.0)]


def test_another_choice_holds_at_once(launched, monkeypatch):
    for config in (PP_192, CO_256_ALONE, PP_192):
        monkeypatch.setattr(products, "choose", lambda problem, config=config: config)
        product()
        wgrad()
        assert launched[-2][0]["config"] is config
        assert launched[-1][0]["config"] is config


def counted(launched, run, schedule="dynamic", count=1):
    """(place of the tile counter, whether the launch is dynamic) of each of some launches; no place under a static
    schedule, which reads no counter.
    """
    launched.clear()
    for _ in range(count):
        run(options=KernelOptions(0, schedule))
    given = [arguments[COUNTER : DYNAMIC + 1] if run is product else arguments[OF_WGRAD] for _, arguments in launched]
    assert all(counter.dtype is torch.int32 and counter.shape == (1,) for counter, *_ in given)
    assert all(counter.item() == 0 for counter, *_, dynamic in given if dynamic)
    return [(counter.storage_offset() if dynamic else None, dynamic) for counter, *_, dynamic in given]


@pytest.mark.parametrize("run", [product, wgrad])
def test_launches_on_a_stream_share_a_counter_and_captured_ones_have_their_own(launched, now, run):
    assert counted(launched, run, count=2) == [(0, 1)] * 2
    now.capturing = True
    assert counted(launched, run, count=2) == [(1, 1), (2, 1)]
    now.capturing = False
    assert counted(launched, run) == [(0, 1)]
    now.stream = 2
    assert counted(launched, run, count=2) == [(3, 1)] * 2


def test_products_of_all_kinds_share_the_counter_of_their_stream(launched):
    product()
    wgrad()
    (_, of_product), (_, of_wgrad) = launched
    assert of_product[COUNTER].data_ptr() == of_wgrad[OF_WGRAD][0].data_ptr()


@pytest.mark.parametrize("run", [product, wgrad])
def test_a_static_launch_takes_no_counter(launched, run):
    assert counted(launched, run, "static", count=2) == [(None, 0)] * 2
    assert not launch._tile_counters


@pytest.mark.parametrize("run", [product, wgrad])
def test_a_launch_without_a_counter_is_static(launched, now, monkeypatch, run):
    monkeypatch.setattr(launch.TileCounters, "SIZE", 2)
    now.capturing = True
    assert counted(launched, run) == [(None, 0)]  # there are none yet
    now.capturing = False
    assert counted(launched, run) == [(0, 1)]  # the same launch
    now.capturing = True
    assert counted(launched, run, count=2) == [(1, 1), (None, 0)]  # all taken
    now.capturing = False
    assert counted(launched, run) == [(0, 1)]


@pytest.mark.parametrize("run", [product, wgrad])
def test_no_rows_take_no_counter(launched, run):
    run(rows=0)
    assert not launched
    assert not launch._tile_counters


@pytest.mark.parametrize(("gathered", "operand"), [("grad_output", "a"), ("x", "b")])
def test_the_gathered_operand_of_a_weight_gradient(launched, gathered, operand):
    given = {"grad_output": torch.zeros(32, N, dtype=BF16), "x": torch.zeros(32, K, dtype=BF16)}
    given[gathered] = given[gathered][:9]
    offsets, index = torch.zeros(E, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    dw = products.grouped_wgrad(*given.values(), offsets, gather=index, gathered=gathered)
    products.grouped_wgrad(torch.zeros(32, N, dtype=BF16), torch.zeros(32, K, dtype=BF16), offsets)
    (compiled_for, arguments), (plain, others) = launched
    assert dw.shape == (E, N, K)
    assert (compiled_for["gathered"], plain["gathered"]) == (operand, None)
    assert arguments[-1] is index
    assert len(arguments) == len(others) + 1
    assert {"a": compiled_for["config"].cluster_n, "b": compiled_for["config"].cluster_m}[operand] == 1


@pytest.mark.parametrize(("index", "gathered"), [(True, None), (False, "x"), (True, "dy")])
def test_an_index_and_its_operand_come_together(launched, index, gathered):
    with pytest.raises(ValueError, match=f"got {gathered!r}, {'an' if index else 'no'} index"):
        wgrad(gather=torch.zeros(32, dtype=torch.int32) if index else None, gathered=gathered)
    assert not launched


@pytest.mark.parametrize("keep", [False, True])
def test_the_tensors_are_the_outputs_of_the_forward_epilogue(launched, keep):
    epilogues = pytest.importorskip("fusedmoe.kernels.sm90.epilogue.outputs")
    x, w, offsets = torch.zeros(32, K, dtype=BF16), torch.zeros(E, N, K, dtype=BF16), torch.zeros(E, dtype=torch.int32)
    products.grouped_gemm_activation(x, w, offsets, Activation("swiglu"), keep_preactivation=keep)
    ((_, arguments),) = launched
    shapes = {epilogues.Preactivation: (32, N), epilogues.Result: (32, N // 2)}
    outputs = epilogues.activation("swiglu", keep=keep).outputs
    assert [t.shape for t in arguments[TENSORS:]] == [shapes[type(output)] for output in outputs]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_tensors_are_the_input_and_the_outputs_of_the_derivative(launched, keep, scaled):
    epilogues = pytest.importorskip("fusedmoe.kernels.sm90.epilogue.outputs")
    dy, w, offsets = torch.zeros(32, K, dtype=BF16), torch.zeros(E, K, N, dtype=BF16), torch.zeros(E, dtype=torch.int32)
    p, scale = torch.zeros(32, 2 * N, dtype=BF16), torch.ones(32) if scaled else None
    _, again, scale_grad = products.grouped_gemm_activation_backward(
        dy, w, offsets, p, Activation("swiglu"), row_scale=scale, want_output=keep, want_row_scale_grad=scaled
    )
    ((_, arguments),) = launched
    given, *results = arguments[TENSORS:]
    shapes = {epilogues.RowScaleGradient: (1, 32), epilogues.Gradient: (32, 2 * N), epilogues.Recomputed: (32, N)}
    outputs = epilogues.derivative("swiglu", keep=keep, row_scale=scaled).outputs
    assert given is p
    assert [t.shape for t in results] == [shapes[type(output)] for output in outputs]
    assert (again is not None, scale_grad is not None) == (keep, scaled)


def test_the_index_of_gathered_rows_comes_before_the_other_tensors(launched):
    x, w, offsets = torch.zeros(7, K, dtype=BF16), torch.zeros(E, N, K, dtype=BF16), torch.zeros(E, dtype=torch.int32)
    p, index = torch.zeros(32, 2 * N, dtype=BF16), torch.zeros(32, dtype=torch.int32)
    swiglu = Activation("swiglu")
    y = products.grouped_gemm(x, w, offsets, gather=index)
    act, kept = products.grouped_gemm_activation(x, w, offsets, swiglu, gather=index)
    grad, again, _ = products.grouped_gemm_activation_backward(x, w.mT, offsets, p, swiglu, gather=index)
    wanted = [(y,), (kept, act), (p, grad, again)]
    for (compiled_for, arguments), tensors in zip(launched, wanted, strict=True):
        assert compiled_for["gather"]
        assert arguments[0] is x
        assert all(a is b for a, b in zip(arguments[TENSORS:], (index, *tensors), strict=True))
        assert all(len(t) == 32 for t in tensors)
    assert y.shape == (32, N)


def test_gathered_rows_are_another_launch(launched):
    product()
    product(gather=torch.zeros(32, dtype=torch.int32))
    product()
    assert [compiled_for["gather"] for compiled_for, _ in launched] == [False, True, False]
    assert launch.ragged_m.cache_info().misses == 2


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.zeros(32, dtype=torch.int64), "torch.int64, (32,), strides (1,): expected a contiguous int32 vector"),
        (torch.zeros(4, 8, dtype=torch.int32), "torch.int32, (4, 8), strides (8, 1): expected a contiguous"),
        (torch.zeros(64, dtype=torch.int32)[::2], "strides (2,): expected a contiguous"),
    ],
    ids=["int64", "a matrix", "every other"],
)
def test_an_index_is_a_contiguous_vector_of_int32(index, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        product(gather=index)
    with pytest.raises(ValueError, match=re.escape(message)):
        wgrad(gather=index, gathered="x")


def test_gathered_rows_are_less_than_2_gib_apart():
    x = torch.empty(2, K, dtype=BF16, device="meta").as_strided((2, K), (2**30, 1))
    w, offsets = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((E, N, K), (E,)))
    with pytest.raises(ValueError, match="1073741824 elements apart: expected less than 2 GiB"):
        products.grouped_gemm(x, w, offsets, gather=torch.zeros(32, dtype=torch.int32, device="meta"))
    index = torch.zeros(32, dtype=torch.int32, device="meta")
    for gathered in ("grad_output", "x"):
        with pytest.raises(ValueError, match="1073741824 elements apart: expected less than 2 GiB"):
            products.grouped_wgrad(x, x, offsets, gather=index, gathered=gathered)


def test_streams_share_no_tile_counter_and_captured_launches_none_at_all(now, monkeypatch):
    monkeypatch.setattr(launch.TileCounters, "SIZE", 5)
    now.capturing = True
    assert launch.tile_counters(torch.device("cpu")) is None  # a graph would own the memory
    now.capturing = False
    counters = launch.tile_counters(torch.device("cpu"))
    assert launch.tile_counters(torch.device("cpu")) is counters

    def places(count):
        got = [counters.get() for _ in range(count)]
        assert all(t.tolist() == [0] for t, dynamic in got if dynamic)
        return [(t.storage_offset(), dynamic) for t, dynamic in got]

    assert places(2) == [(0, 1)] * 2
    now.stream = 2
    assert places(2) == [(1, 1)] * 2
    now.capturing = True
    assert places(3) == [(2, 1), (3, 1), (4, 1)]
    assert places(2) == [(0, 0)] * 2  # all taken: the schedule is static, and reads no counter
    now.capturing = False
    assert places(1) == [(1, 1)]
    now.stream = 3
    assert places(2) == [(0, 0)] * 2


def bind_wgrad(options, beside):
    dy, x = torch.zeros(32, N, dtype=BF16), torch.zeros(32, K, dtype=BF16)
    offsets = torch.zeros(E, dtype=torch.int32)
    run = products.bind_grouped_wgrad(dy, x, offsets, BF16, False, options, None, None, beside)
    run(dy, x, offsets, None)


def bind_fp8_wgrad(options, beside):
    dy, x = (torch.zeros(width, 256, dtype=torch.float8_e4m3fn) for width in (N, K))
    dy, x = (Codes(codes, torch.zeros(2, len(codes)).mT) for codes in (dy, x))
    offsets = torch.zeros(E, dtype=torch.int32)
    products.bind_grouped_wgrad(dy, x, offsets, BF16, False, options, beside=beside)(dy, x, offsets)


BIND_WGRAD = pytest.mark.parametrize("bind", [bind_wgrad, bind_fp8_wgrad], ids=["bf16", "fp8"])


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@BIND_WGRAD
def test_a_weight_gradient_that_begins_early(launched, bind, beside, schedule):
    bind(KernelOptions(8, schedule), beside)
    ((compiled_for, arguments),) = launched
    counter, _, ctas, dynamic = arguments[OF_WGRAD]
    assert compiled_for["beside"] is beside
    assert (ctas <= 124, dynamic) == (True, int(beside or schedule == "dynamic"))
    assert counter.item() == 0 or not dynamic


@BIND_WGRAD
def test_a_weight_gradient_bound_while_a_graph_is_captured_begins_in_turn(launched, bind, now):
    now.capturing = True
    bind(KernelOptions(), True)
    ((compiled_for, arguments),) = launched
    assert (compiled_for["beside"], arguments[OF_WGRAD][-1]) == (False, 0)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_the_products_of_a_router_take_the_counter_of_the_stream(monkeypatch, schedule):
    pytest.importorskip("cutlass")
    calls, options = [], KernelOptions(0, schedule)
    monkeypatch.setattr(router, "load", lambda kernel: lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(one_group, "_tables", {})
    x, weight, parts = (torch.zeros(shape, dtype=BF16) for shape in ((32, K), (8, K), (32, 24)))
    router._bind_logits(x, 8, False, options)(x, weight, None)
    router._bind_exact_wgrad(parts, x, 4, options)(parts, x, torch.zeros(4, dtype=torch.int32), None)
    logits, of_weight = calls
    counter, *_, dynamic = of_weight[4:]
    assert logits[DYNAMIC] == dynamic == (schedule == "dynamic")
    assert logits[TENSORS].shape == (32, 8)
    assert logits[COUNTER].data_ptr() == counter.data_ptr()
    assert bool(launch._tile_counters) == (schedule == "dynamic")


def test_an_exchange_takes_sms_and_leaves_the_tiles(launched):
    """Of this derivative the tiles depend on the SMs, and with them the order in which its row scale is summed."""
    rows, experts, features, hidden = 2048, 16, 2880, 2048
    meta = {"device": "meta", "dtype": BF16}
    weight, p = torch.empty(experts, hidden, features, **meta), torch.empty(rows, 2 * features, **meta)
    operands = torch.empty(rows, hidden, **meta), weight, torch.empty(experts, device="meta"), p
    scale = torch.empty(rows, device="meta")
    tiles, ctas = [], []
    for options in (KernelOptions(), KernelOptions(exchange_sms=2), KernelOptions(2)):
        products.grouped_gemm_activation_backward(
            *operands, Activation("swiglu"), row_scale=scale, options=options
        )  # fmt: skip
        compiled_for, arguments = launched[-1]
        tiles.append(compiled_for["config"].tile_n)
        ctas.append(arguments[CTAS])
    assert ctas == [132, 130, 130]
    assert tiles[0] == tiles[1] != tiles[2]
