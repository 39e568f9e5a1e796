"""The grouped products on Hopper: each kind of kernel against fp64 of the exact operands, for any splits and widths.

Small integers have exact results. Other results have the error of one rounding in each row. Products of gathered rows
have the bits of those of copied rows.
"""

import itertools

import pytest
import torch
from kit.compare import label
from kit.hopper import DEVICE, EMULATED, capture, needs_gpu, needs_hopper
from kit.hopper_products import (
    ACTIVATIONS,
    BF16,
    FAMILIES,
    FP16,
    FP32,
    SIDE_BY_SIDE,
    SPLITS,
    assert_same_bits,
    derivative,
    factors,
    kernels_of,
    offsets_of,
    operand_of_rows,
    operand_of_weights,
    plain,
    wgrad,
)
from kit.poison import guarded_tensors, nan_in_new_tensors

from fusedmoe.kernels.build import shipped
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.sm90 import launch, products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.tiles.choice import (
    CANDIDATES,
    CO_128,
    CO_256,
    CO_256_ALONE,
    CO_256_ROWS,
    PP_128,
    PP_192,
    PP_192_TALL,
)
from fusedmoe.numerics.formats.groups import group_of

pytestmark = needs_hopper

SCALES = ("blocks", "tensor")
GATHERED_A, GATHERED_B = CANDIDATES["wgrad_gathered_a"], CANDIDATES["wgrad_gathered_b"]


def training_tiles(name):
    return PP_128 if ACTIVATIONS[name].heavy else PP_192


def table():
    """(family, tiles, settings) of every kind of kernel: each tile configuration, output and option."""
    for config, major in itertools.product(CANDIDATES["plain"], ("k", "n")):
        yield "plain", config, {"major": major, "biased": True, "scale": FP32}
    yield "plain", PP_192, {"kind": "fp16", "scale": BF16}
    yield "plain", PP_192, {"kind": "fp16", "major": "n", "biased": True}
    for config, major in ((PP_192, "k"), (PP_192, "n"), (CO_256, "k"), (PP_128, "k")):
        yield "plain", config, {"major": major, "biased": major == "k", "scale": FP32, "gather": True}
    yield "plain", PP_192, {"kind": "fp16", "gather": True}

    for number, name in enumerate(ACTIVATIONS):
        yield "activation", PP_192, {"name": name, "biased": number % 2 == 0, "scale": FP32 if number % 4 < 2 else None}
    for name in ("swiglu", "gpt-oss", "geglu_tanh", "squared_relu"):
        yield "activation", PP_192, {"name": name, "biased": True, "keep": False}
        yield "activation", PP_192, {"name": name, "biased": True, "scale": FP32, "gather": True}
    for config in CANDIDATES["activation"]:
        yield "activation", config, {"scale": BF16}
    for name, keep in (("gpt-oss", True), ("gpt-oss", False), ("squared_relu", True)):
        yield "activation", PP_192, {"name": name, "keep": keep, "major": "n", "biased": True, "scale": FP32}
    for config in CANDIDATES["transposed_activation"]:
        yield "activation", config, {"major": "n", "n": 424, "biased": True, "scale": FP32}
    for name, keep in (("swiglu", False), ("clamped", True), ("geglu_tanh", True)):
        yield "activation", PP_128, {"name": name, "keep": keep, "major": "n", "n": 328}
    yield "activation", PP_128, {"kind": "fp16", "major": "n", "n": 8}
    yield "activation", PP_192, {"kind": "fp16"}
    yield "activation", PP_192, {"keep": False, "gather": True}
    yield "activation", CO_256, {"biased": True, "gather": True}
    yield "activation", PP_128, {"major": "n", "biased": True, "gather": True}

    for name in ACTIVATIONS:
        yield "derivative", training_tiles(name), {"name": name}
        yield "derivative", training_tiles(name), {"name": name, "scale": None, "gradient": False}
    for name in ("swiglu", "gpt-oss", "squared_relu"):
        yield "derivative", training_tiles(name), {"name": name, "keep": False}
        yield "derivative", PP_128, {"name": name}
    yield "derivative", PP_192, {"scale": FP32, "gradient": False}  # somebody else's scale
    yield "derivative", PP_192, {"scale": None, "gradient": True}  # a scale of one
    yield "derivative", PP_192, {"scale": BF16}
    yield "derivative", PP_192, {"scale": FP16, "gradient": False, "keep": False}
    yield "derivative", PP_192, {"scale": None, "gradient": False, "keep": False}
    yield "derivative", PP_192, {"major": "k"}
    yield "derivative", PP_192, {"kind": "fp16", "scale": None, "gradient": False}
    for name in ("swiglu", "gpt-oss", "geglu_tanh", "squared_relu"):
        yield "derivative", training_tiles(name), {"name": name, "gather": True}
    yield "derivative", PP_192, {"scale": None, "gradient": False, "gather": True}
    yield "derivative", PP_128, {"gather": True}

    of_wgrads = {}, {"out": FP32}, {"out": FP32, "add": True}, {"add": True}
    for config, out in itertools.product(CANDIDATES["wgrad"], of_wgrads):
        yield "wgrad", config, {"n": 200, **out}
    for settings in (
        {"kind": "fp16"}, {"kind": "fp16", "add": True}, {"transposed": True}, {"transposed": True, "add": True}
    ):  # fmt: skip
        yield "wgrad", PP_192, settings
    for gathered, configs in (("grad_output", GATHERED_A), ("x", GATHERED_B)):
        for config, out in itertools.product(configs, of_wgrads):
            yield "wgrad", config, {"gathered": gathered, "n": 200, "k": 136, **out}
        for kind, out in (("fp16", None), ("fp16", FP32)):
            yield "wgrad", configs[0], {"gathered": gathered, "kind": kind, "out": out}

    for scales in SCALES:
        rows, gradients = f"e4m3 {scales}", f"e5m2 {scales}"
        for config in CANDIDATES["fp8_plain"]:
            yield "plain", config, {"kind": rows, "biased": True}
            yield "plain", config, {"kind": gradients, "scale": FP32}
        yield "plain", CO_256, {"kind": rows, "biased": True, "scale": BF16}
        yield "plain", CO_256, {"kind": rows, "scale": FP16, "n": 48, "k": 144}
        for number, name in enumerate(SIDE_BY_SIDE):
            settings = {"kind": rows, "name": name, "scale": FP32 if number % 4 < 2 else None}
            yield "activation", CO_256, {**settings, "biased": True, "keep": (number + (scales == "blocks")) % 2 == 0}
        yield "activation", CO_256, {"kind": rows}
        yield "activation", CO_256, {"kind": rows, "keep": False}
        of_gradients = gradients if scales == "tensor" else rows
        for number, name in enumerate(ACTIVATIONS):
            config = CANDIDATES["fp8_derivative"][(number + (scales == "blocks")) % 2]
            yield "derivative", config, {"kind": of_gradients, "name": name}
        for config in CANDIDATES["fp8_derivative"]:
            yield "derivative", config, {"kind": of_gradients}
        for config, name in ((CO_256_ROWS, "swiglu"), (CO_128, "gpt-oss"), (CO_128, "squared_relu")):
            yield "derivative", config, {"kind": of_gradients, "name": name, "scale": None, "gradient": False}
        yield "derivative", CO_128, {"kind": of_gradients, "gradient": False}
        yield "derivative", CO_128, {"kind": of_gradients, "scale": None}
        yield "derivative", CO_128, {"kind": of_gradients, "keep": False}
        yield "derivative", CO_256_ROWS, {"kind": of_gradients, "scale": None, "gradient": False, "keep": False}
        outputs = {}, {"out": FP32}, {"out": FP32, "add": True}, {"add": True}
        for config, (number, out) in itertools.product(CANDIDATES["fp8_wgrad"], enumerate(outputs)):
            yield "wgrad", config, {"kind": (rows, gradients)[(number + (config is CO_256)) % 2], **out}
        yield "wgrad", CO_256, {"kind": gradients, "add": True}
        yield "wgrad", CO_256, {"kind": rows, "out": FP16}


TABLE = [*table()]
# one of each kind of mainloop and epilogue
FEW = {
    "plain": ("plain", {}),
    "activation": ("activation", {}),
    "derivative": ("derivative", {}),
    "wgrad": ("wgrad", {}),
    "adding wgrad": ("wgrad", {"out": FP32, "add": True}),
    "gathered plain": ("plain", {"gather": True}),
    "gathered activation": ("activation", {"gather": True}),
    "gathered derivative": ("derivative", {"gather": True}),
    "wgrad of gathered dy": ("wgrad", {"gathered": "grad_output"}),
    "wgrad of gathered x": ("wgrad", {"gathered": "x"}),
    **{
        f"{family}, {scales}": (family, {"kind": f"e4m3 {scales}"})
        for scales, family in itertools.product(SCALES, FAMILIES)
    },
    "derivative, tensor": ("derivative", {"kind": "e5m2 tensor"}),
    "adding wgrad, blocks": ("wgrad", {"kind": "e5m2 blocks", "add": True}),
}
of_few = pytest.mark.parametrize("which", FEW)


@pytest.fixture
def few(tiles):
    """Make a problem. Gathered rows and copied ones have the same tiles, and so the same bits."""

    def make(which, *problem, **settings):
        family, given = FEW[which]
        if given.get("gather") or given.get("gathered"):
            tiles(PP_192_TALL if given.get("gathered") == "x" else PP_192)
        return FAMILIES[family](*problem, **given, **settings)

    return make


def named(row):
    family, config, settings = row
    return " ".join([family, config.name, *(f"{k}={v}".removeprefix("torch.") for k, v in settings.items())])


of_table = pytest.mark.parametrize(("family", "config", "settings"), TABLE, ids=map(named, TABLE))


def one_of_each():
    """A row for each family, tile configuration and kind of operands, and for the longest epilogues."""
    found = {}
    for family, config, settings in TABLE:
        ways = [settings.get(name) for name in ("kind", "gather", "gathered", "add")]
        long = settings.get("name") in ("gpt-oss", "geglu_tanh")
        settings = {name: value for name, value in settings.items() if name not in ("n", "k")}
        found.setdefault((family, config, long, *ways), (family, config, settings))
    return [*found.values()]


CONFIGS = one_of_each()
RAGGED_M_CONFIGS = [row for row in CONFIGS if row[0] != "wgrad"]
of_configs = pytest.mark.parametrize(("family", "config", "settings"), CONFIGS, ids=map(named, CONFIGS))


def bits_of(results):
    return [t.clone() for t in results]


def assert_all_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    def launched():
        for family, config, settings in TABLE:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(products, "choose", lambda problem, config=config: config)
                FAMILIES[family]((1,), 0, **settings).run(DEFAULT)

    build_ahead(lambda: [*shipped.shipped("sm_90a"), *kernels_of([launched])])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- results


@of_table
def test_results(family, config, settings, tiles):
    tiles(config)
    make = FAMILIES[family]
    make(**settings).check()
    exact = family in ("plain", "wgrad") or (family == "activation" and settings.get("keep", True))
    if exact or settings.get("name") == "reglu":  # of other derivatives, nothing is exact
        make(**settings, exact=True).check()


RAGGED = {
    "around tiles": ((5, 0, 1, 127, 128, 129, 0, 33, 255, 256, 257, 2, 0, 64, 63, 65), 37),
    "one takes all": ((0,) * 7 + (400,) + (0,) * 8, 5),
    "the last takes all": ((0, 0, 0, 400), 0),
    "all tail": ((0,) * 16, 50),
    "a long tail": ((300, 1), 40_000),  # several tiles of it per CTA
    "no tail": ((100, 28, 0, 128, 256), 0),
    "one row": ((1,), 0),
    "one row of many": ((0, 0, 1, 0), 1),
    "512 experts": (tuple(e * e % 11 for e in range(512)), 9),
    "33 experts": ((0,) * 31 + (70, 3), 300),
    "no rows": ((0, 0), 0),
}


@pytest.mark.parametrize("ragged", RAGGED)
@of_few
def test_splits(which, ragged, few):
    few(which, *RAGGED[ragged], 128, 144).check(KernelOptions(120) if "gathered" in which else DEFAULT)


def widths():
    for which, (family, settings) in FEW.items():
        scales = settings.get("kind", "bf16").partition(" ")[2]
        if not scales:
            found = [(8, 8), (8, 2880), (2880, 8), (64, 192), (192, 64), (264, 768), (1408, 1856), (2056, 72)]
        elif family == "derivative":
            found = [(128, 144), (272, 144), (336, 48), (400, 272)]
        elif family != "activation":
            found = [(16, 16), (16, 528), (528, 16), (128, 256), (656, 128), (1168, 48)]
        elif scales == "blocks":
            found = [(128, 16), (384, 144), (640, 128)]
        else:  # gate and up need no whole blocks
            found = [(16, 272), (80, 16), (144, 48), (400, 272)]
        yield from ((which, n, k) for n, k in found)


@pytest.mark.parametrize(("which", "n", "k"), [*widths()])
def test_widths(which, n, k, few):
    few(which, (130, 0, 61), 5, n, k).check()
    if FEW[which][0] in ("plain", "wgrad"):
        few(which, (130, 0, 61), 5, n, k, exact=True).check()


def test_one_token(few):
    for which in FEW:
        if "gathered" in which:
            few(which, tokens=1).check()


@pytest.mark.parametrize("config", [CO_256, CO_256_ROWS, CO_128], ids=lambda config: config.name)
def test_each_block_has_its_own_scale(config, tiles):
    """Codes of one, and scales of which no two products are alike, of one block of K at a time."""
    tiles(config)
    splits, n, k = (5, 1, 130, 127), 656, 272
    for block in range(3):
        a = torch.zeros(sum(splits), k, device=DEVICE)
        a[:, block * 128] = 1
        of_rows, of_weight = factors((3, len(a))), factors((len(splits), 3, 6))
        x = operand_of_rows(a.to(torch.float8_e4m3fn), of_rows).given
        w = operand_of_weights(torch.ones(len(splits), n, k, device=DEVICE).to(torch.float8_e4m3fn), of_weight).given
        y = products.bind_grouped_gemm(x, w, None, None, DEFAULT)(x, w, None, offsets_of(splits), None)
        expert = group_of(offsets_of(splits), len(a))
        want = of_rows[block][:, None] * of_weight[expert, block].repeat_interleave(128, 1)[:, :n]
        assert torch.equal(y, want.to(BF16))


def test_each_scale_of_a_weight_gradient_is_that_of_its_row_and_column():
    """Every factor differs, in each block of rows."""
    case = wgrad((300, 5), 0, 272, 144, kind="e4m3 blocks", out=FP32, exact=True)
    dy, x = case.live["grad_output"], case.live["x"]
    dy.scale[:, :4] = 1 + torch.arange(272 * 4, device=DEVICE).reshape(272, 4).float() / 1024
    x.scale[:, :4] = 1 + torch.arange(144 * 4, device=DEVICE).reshape(144, 4).flip(0).float() / 512
    a, b = (t.codes[:, :512].double() * t.scale[:, :4].double().repeat_interleave(128, 1) for t in (dy, x))
    want = torch.stack([a[:, :384] @ b[:, :384].T, a[:, 384:] @ b[:, 384:].T])
    (got,) = case.run(DEFAULT)
    assert (got.double() - want).abs().max() < 1e-6 * want.abs().max()


# ---- memory


def test_new_tensors_are_full_of_nan():
    with nan_in_new_tensors():
        x = torch.empty(9, dtype=BF16, device=DEVICE)
        assert x.isnan().all()
        assert x.new_empty(2, 5).isnan().all()


@pytest.mark.parametrize("n", [336, 432])  # an odd number of column tiles of 128, of 192
@pytest.mark.parametrize(
    ("config", "settings"),
    [(c, s) for f, c, s in CONFIGS if f == "derivative" and not s.get("gather")],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_partial_sums_stay_within_their_tensor(config, settings, n, tiles, monkeypatch):
    """They alone are written without a TMA descriptor, which knows bounds."""
    tiles(config)
    settings = {**settings, "scale": FP32, "gradient": True}
    case, guarded = derivative((300, 0, 61), 20, n, 80, **settings), []

    def with_rows_around(shape, **how):
        guarded.append(torch.full((shape[0] + 4, *shape[1:]), torch.nan, **how))
        return guarded[-1][2:-2]

    case.run(DEFAULT)  # the first call makes what all later ones share
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", with_rows_around)
        case.run(DEFAULT)
    (partial,) = guarded
    assert partial[2:-2, :381].isfinite().all()
    assert partial[2:-2, 381:].isnan().all()
    assert partial[:2].isnan().all()
    assert partial[-2:].isnan().all()


@pytest.mark.parametrize("scales", SCALES)
def test_rows_of_products_of_codes_end_where_their_tensor_ends(scales, monkeypatch):
    """Threads store them, without a TMA descriptor."""
    cases = [
        plain((130, 61), 5, 272, 144, kind=f"e4m3 {scales}"),
        FAMILIES["activation"]((130, 61), 5, 384, 144, kind=f"e4m3 {scales}"),
        derivative((130, 61), 5, 272, 144, kind=f"e4m3 {scales}", gradient=False),
    ]
    check = guarded_tensors(monkeypatch, torch.Tensor, "new_empty")
    for case in cases:
        case.run(DEFAULT)
    assert check() == [(196, 272), (196, 768), (196, 384), (196, 544), (196, 272)]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("config", CANDIDATES["fp8_wgrad"], ids=lambda config: config.name)
def test_weight_gradients_of_codes_end_where_their_tensor_ends(config, add, tiles):
    tiles(config)
    case = wgrad(kind="e4m3 blocks", out=FP32, exact=True)
    dy, x, offsets = (case.live[name] for name in ("grad_output", "x", "offsets"))
    around = torch.full((len(SPLITS) + 2, 144, 272), 7.0, device=DEVICE)
    products.bind_grouped_wgrad(dy, x, offsets, FP32, add, DEFAULT)(dy, x, offsets, around[1:-1])
    assert torch.equal(around[1:-1], (case.want[0] + (7 if add else 0)).float())
    assert (around[[0, -1]] == 7).all()


@pytest.mark.parametrize(
    ("gathered", "config"), [*(("grad_output", c) for c in GATHERED_A), *(("x", c) for c in GATHERED_B)], ids=label
)
def test_no_gathered_value_of_another_expert_is_read(gathered, config, tiles):
    """Tokens of all other experts are NaN: zero times NaN would show, wherever a stage has rows past the expert's."""
    tiles(config)
    splits = (64, 1, 65, 0, 63, 130)
    case = wgrad(splits, gathered=gathered, tokens=3 * sum(splits))
    index, source = case.live["index"], case.live[gathered]
    index[: sum(splits)] = 3 * torch.randperm(sum(splits), dtype=torch.int32, device=DEVICE)
    (want,), whole = case.run(DEFAULT), source.clone()
    for expert, own in enumerate(index[: sum(splits)].long().split(splits)):
        source.fill_(torch.nan)
        source[own] = whole[own]
        assert torch.equal(case.run(DEFAULT)[0][expert], want[expert])


@needs_gpu
@pytest.mark.parametrize("gathered", ["grad_output", "x"])
def test_tokens_further_than_32_bits_reach(gathered, tiles):
    """The offset of the last token is more than 2^32 bytes."""
    tiles(PP_192_TALL if gathered == "x" else PP_192)
    tokens, width, used = 40_000, 65_536, 73
    wide = torch.empty(tokens, width, dtype=BF16, device=DEVICE)[:, :136]
    wide[-used:] = torch.randn(used, 136, device=DEVICE)
    index = torch.arange(tokens - used, tokens, dtype=torch.int32, device=DEVICE)
    other, offsets = torch.randn(used, 200, device=DEVICE).to(BF16), offsets_of((70, 3))
    found = []
    for rows, gather in ((wide, index), (wide[-used:].contiguous(), None)):
        operands = (rows, other) if gathered == "grad_output" else (other, rows)
        named = None if gather is None else gathered
        run = products.bind_grouped_wgrad(*operands, offsets, BF16, False, DEFAULT, gather, named)
        found.append(run(*operands, offsets, None, gather))
    assert found[1].any()
    assert torch.equal(*found)


# ---- schedules


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("config", [CO_256, CO_256_ALONE], ids=lambda config: config.name)
def test_the_first_tile_of_a_cta_may_be_after_many_experts(config, schedule, tiles, monkeypatch):
    """Padded rows are counted 32 experts at a time."""
    tiles(config)
    if EMULATED:
        monkeypatch.setattr(launch, "sm_count", lambda device: 70 * config.ctas)
    launch.ragged_k.cache_clear()
    splits = [e * 37 % 3 * (e % 7 > 3) for e in range(71)]
    splits[33] = 129
    wgrad(tuple(splits), 9, 16, 32, kind="e4m3 blocks", exact=True).check(KernelOptions(schedule=schedule))
    launch.ragged_k.cache_clear()


@of_configs
def test_many_tiles_per_cta_repeatedly(family, config, settings, tiles):
    """Whatever one warp hands to another goes around many times, with little work between: the same bits always."""
    tiles(config)
    case = FAMILIES[family]((358, 18, 100, 361, 168, 176, 276, 320), 5, 640, 256, **settings)
    expected = bits_of(case.check())  # one tile per CTA, or two
    for options in (DEFAULT, KernelOptions(100), KernelOptions(100, "static"), KernelOptions(2, "static")):
        for _ in range(20):
            assert_all_same_bits(case.run(options), expected)


@pytest.mark.parametrize("n", [192, 512, 1408])
@pytest.mark.parametrize(("family", "config", "settings"), RAGGED_M_CONFIGS, ids=map(named, RAGGED_M_CONFIGS))
def test_any_number_of_row_tiles_and_column_tiles(family, config, settings, n, tiles):
    """Pairs of row tiles, and those left over; 1 to 11 column tiles, and one past the last."""
    tiles(config)
    if (family, settings.get("kind")) == ("activation", "e4m3 blocks"):
        n = n // 128 * 128
    splits = [max(128 * count - count % 3 * 63, 0) for count in (3, 1, 0, 2, 5, 4, 9, 8, 7, 6, 17, 10, 1, 1, 11)]
    case = FAMILIES[family](splits, 130, n, 128, **settings)
    for options in (DEFAULT, KernelOptions(126), KernelOptions(120, "static")):
        case.check(options)


DRAWN = {
    "uneven": ((900, 0, 61, 1, 127, 1258, 0, 300), 200),
    "all tail": ((0,) * 40, 50),
    "fewer tiles than clusters": ((0, 0, 1, 0), 0),
    "no rows": ((0,) * 6, 0),
}


@needs_gpu
@of_configs
def test_tile_counters_return_to_zero(family, config, settings, tiles):
    """Those of a stream, and those of captured launches. The bits are those of the static schedule."""
    tiles(config)
    other = FAMILIES[family](*DRAWN["uneven"], 768, 272, **settings)
    counters = launch.tile_counters(torch.device("cuda", torch.cuda.current_device()))

    def same(results, expected):
        torch.cuda.synchronize()
        assert counters.get()[1] == 1
        assert not counters._table.any()
        assert_all_same_bits(results, expected)

    for (splits, tail), margin in zip(DRAWN.values(), (0, 124, 0, 124), strict=True):
        case = FAMILIES[family](splits, tail, 768, 272, **settings)
        options, captured = KernelOptions(margin, "dynamic"), []
        expected = case.run(KernelOptions(margin, "static"))
        for _ in range(2):
            other.run(options)  # on the same counter
            same(case.run(options), expected)

        def step(case=case, options=options, captured=captured):
            other.run(options)
            captured.append([case.run(options) for _ in range(2)])

        graph = capture(step, warm_ups=1)
        for _ in range(2):
            for results in captured[-1]:
                for t in results:
                    t.fill_(torch.nan)
            graph.replay()
            for results in captured[-1]:
                same(results, expected)


@needs_gpu
@of_few
def test_a_graph_follows_the_splits(which, no_sync, few):
    """Replays with other splits and indices than the captured ones; nothing waits for the device. Nothing is NaN here,
    since any row may become an expert's.
    """
    case = few(which, (5, 0, 300, 7), 0, 128, 272)
    offsets, index = case.live.pop("offsets"), case.live.pop("index")
    for t in case.live.values():
        given = getattr(t, "given", t)
        for part in given if isinstance(given, Codes) else (given,):
            if part is not None:
                part.copy_(part.float().nan_to_num(1).to(part.dtype))
    case.run(DEFAULT)
    with no_sync():
        case.run(DEFAULT)
    results = []
    graph = capture(lambda: results.append(case.run(DEFAULT)))
    for now in ((5, 0, 300, 7), (0, 0, 0, 312), (312, 0, 0, 0), (100, 101, 102, 9), (0, 1, 2, 3), (0, 0, 0, 0)):
        offsets.copy_(offsets_of(now))
        if index is not None:
            index.copy_(3 * torch.randint(17, index.shape, device=DEVICE))
        for t in results[-1]:
            t.view(torch.uint8).fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        got = bits_of(results[-1])
        assert_all_same_bits(got, case.run(DEFAULT))
        for t in got:
            assert t.isfinite().all()
            assert t.any() or not sum(now)
            if "wgrad" not in which:
                assert not t[sum(now) :].any()
