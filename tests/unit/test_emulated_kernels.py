"""The PTX of the Hopper kernels on the emulator: `make test` runs a covering few, and `make test-emulator` all."""

import shutil
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles the kernels")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, as the kernels do")

from emulator import host
from emulator.barriers import EmulationError
from emulator.gpu import emulated
from kit import activation_rows, quantize_kernels, routers
from kit.hopper_codes import assert_same_bits, check_codes, check_derivative_codes
from kit.hopper_products import BF16, FAMILIES, FP16, FP32, offsets_of, plain, rows, weights, wgrad
from kit.poison import nan_in_new_tensors
from kit.row_ranges import check_blocks, check_ranges, problem_by_ranges, routed, tiles_of
from kit.slots import check_moves, check_offsets, check_zeroed_tail

import fusedmoe as fm
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.rows.quantize.block_functions import bind_quantize_rows
from fusedmoe.kernels.sm90 import products as functions
from fusedmoe.kernels.sm90.gemm import scheduler
from fusedmoe.kernels.sm90.launch import Part
from fusedmoe.kernels.sm90.tiles.choice import CO_256, CO_256_ROWS, CO_256_TALL, PP_128, PP_192, PP_192_TALL
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.formats import fp8_block, quantize

SMALL = {"splits": (130, 0, 61, 1), "tail": 21}


pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, which links the kernels' host code")


@pytest.fixture(scope="module", autouse=True)
def gpu():
    with emulated() as machine:
        yield machine


def slow(*values):
    """Values of a case that `make test` leaves out: quicker ones, or the whole layers, run the same kind of kernel."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def tiles(monkeypatch):
    return lambda config: monkeypatch.setattr(functions, "choose", lambda problem: config)


@pytest.mark.parametrize(
    ("family", "config", "settings"),
    [
        ("plain", PP_192, {"biased": True, "scale": FP32}),
        slow("plain", PP_192, {"kind": "fp16", "major": "n"}),
        ("activation", CO_256, {"name": "gpt-oss", "biased": True}),
        slow("activation", PP_128, {"name": "geglu_tanh", "major": "n", "keep": False}),
        slow("derivative", PP_128, {"name": "gpt-oss", "scale": BF16}),
        slow("derivative", PP_192, {"name": "squared_relu", "scale": None, "gradient": False}),
        ("wgrad", PP_192, {}),
        ("wgrad", CO_256, {"out": FP32, "add": True}),
        ("wgrad", CO_256, {"add": True}),
        slow("wgrad", CO_256_TALL, {}),
        slow("plain", CO_256, {"gather": True}),
        slow("activation", PP_128, {"gather": True}),
        slow("derivative", PP_192, {"gather": True}),
        slow("wgrad", CO_256, {"gathered": "grad_output"}),
        ("wgrad", PP_192_TALL, {"gathered": "x"}),
        # FP8 codes: of rows in E4M3, and of gradients in E5M2; with gate and up, and with the derivative
        ("plain", CO_256, {"kind": "e4m3 blocks", "biased": True, "scale": FP32, "exact": True}),
        ("plain", CO_256_ROWS, {"kind": "e5m2 blocks"}),
        slow("activation", CO_256, {"kind": "e4m3 blocks"}),
        slow("derivative", CO_256_ROWS, {"kind": "e4m3 blocks"}),
        ("wgrad", CO_256, {"kind": "e4m3 blocks", "exact": True}),
        ("wgrad", CO_256_TALL, {"kind": "e5m2 blocks", "out": FP32, "add": True, "exact": True}),
        ("wgrad", CO_256, {"kind": "e4m3 blocks", "add": True, "exact": True}),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_products(family, config, settings, tiles, gpu):
    """Of gathered rows: the same bits as with rows that were copied before."""
    tiles(config)
    launches = gpu.launches
    FAMILIES[family](**SMALL, n=128, k=144, **settings).check()
    assert gpu.launches > launches
    assert not gpu.counter.any(), "a kernel leaves its tile counter zero"


NO_TAIL = KernelOptions(zero_tail=False)


@pytest.mark.parametrize(
    ("family", "config", "settings"),
    [
        ("plain", PP_192, {"biased": True}),
        ("activation", CO_256, {"gather": True}),
        slow("derivative", PP_192, {"scale": BF16}),
        ("plain", CO_256_ROWS, {"kind": "e4m3 blocks"}),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_a_tail_that_nothing_reads(family, config, settings, tiles, gpu):
    tiles(config)
    case, end = FAMILIES[family](**SMALL, n=128, k=144, **settings), sum(SMALL["splits"])
    with nan_in_new_tensors():
        found = case.run(NO_TAIL)
    for got, want in zip(found, case.run(KernelOptions()), strict=True):
        assert torch.equal(got[:end], want[:end])
        assert want[:end].float().norm() > 0
        assert got[end:].isnan().all(), "not written"
        assert len(got) > end
    assert not gpu.counter.any()


def test_codes_of_a_tail_that_nothing_reads():
    """Of rows by rows and by columns, and of gathered tokens."""
    splits = [140, 5, 0, 50]
    offsets, end, padded = offsets_of(splits), 195, 256 + 128 + 128
    x, tokens = quantize_kernels.values(470, 160), quantize_kernels.values(70, 160)
    index = quantize_kernels.an_index(470, 70)

    def check(bind, *given):
        with nan_in_new_tensors():
            found, wanted = (bind(zero_tail=zero_tail)(*given) for zero_tail in (False, True))
        for (codes, scale), (of_codes, of_scale) in zip(found, wanted, strict=True):
            by_rows = codes.shape[0] == len(index)
            codes, of_codes = (t.view(torch.uint8) if by_rows else t.view(torch.uint8).T for t in (codes, of_codes))
            # of rows without an expert, a tile of rows may have some; of columns, a tile has one expert
            valid, until = (end, 256) if by_rows else (padded, padded)
            assert torch.equal(codes[:valid], of_codes[:valid])
            assert not of_codes[valid:].any()
            assert codes[until:].unique().tolist() in ([0x7F], [0xFF]), "not written"
            assert len(codes) > until
            lines, block = (slice(end), slice(None)) if by_rows else (slice(None), slice(padded // 128))
            assert torch.equal(scale[lines, block], of_scale[lines, block])
            assert scale[until:].isnan().all() if by_rows else scale[:, padded // 128 :].isnan().all()

    for forms in ((True, False), (True, True), (False, True)):
        how = dict(zip(("rows", "columns"), forms, strict=True))
        check(partial(bind_quantize_rows, x, fp8_block(), offsets, **how), x, offsets)
        check(partial(bind_quantize_rows, tokens, fp8_block(), offsets, index, **how), tokens, offsets, index)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_schedules_change_no_bit(schedule, tiles):
    tiles(PP_192)
    case = plain((300, 0, 7, 200), 5, 400, 64)
    (want,), (got,) = case.run(KernelOptions()), case.run(KernelOptions(sm_margin=2, schedule=schedule))
    assert torch.equal(got, want)


def test_ranges_of_rows():
    """Of all ranks: an expert with most rows, one without rows, and others with few rows of each rank."""
    cases = [(each, ranks, rank) for each in (9, 40, 130) for ranks in range(2, 9) for rank in range(ranks)]
    for seed, (each, ranks, rank) in enumerate(cases):
        tokens = each * ranks
        divided, leaving = (None, None, 0, 1, 2)[seed % 5], seed % 2 == 1
        tile, experts = (128, 256, 128)[seed % 3], 70 if seed % 11 == 0 else 5
        settings = rank, ranks, tokens, divided, seed % 4 > 1, tile, seed % 7 > 2 and not leaving
        check_ranges(*routed(tokens, 3, experts, seed), *settings, arrivals=seed % 3, leaving=leaving)


@pytest.mark.parametrize("experts", [1, 5, 32, 33, 70])
def test_blocks_of_experts(experts):
    for seed, zero_tail in enumerate((False, True)):
        check_blocks(*routed(90, 3, experts, seed), zero_tail)
    for seed, (ranks, each) in enumerate([(2, 500), (3, 400), (4, 130)]):
        of_own = [check_blocks(*routed(ranks * each, 3, experts, seed), seed < 2, (r, each))[0] for r in range(ranks)]
        assert any(of_own) or experts == 1  # which has few rows


@pytest.mark.parametrize("experts", [1, 5, 16, 33, 70])
def test_blocks_of_experts_in_halves(experts):
    for seed, (ranks, each) in enumerate([(2, 500), (3, 400), (4, 130), (5, 9)]):
        for rank in range(ranks):
            given = routed(ranks * each, 3, experts, seed)
            rows = check_blocks(*given, seed < 2, (rank, each), ranks // 2 * each)
            assert sum(rows) == (len(given[1]) if seed < 2 else given[0][-1])
            first = sum(rows[: len(rows) // 2])
            assert experts == 1 or each < 128 or 0 < first < sum(rows), "rows in both halves"


@pytest.mark.parametrize("gather", [False, slow(True)])
def test_products_by_ranges(gather, gpu):
    """A part that may begin beside the launch before it draws its tiles under either schedule."""
    x, w, _, scale, offsets, blocks, _, index = problem_by_ranges(gather)
    more = () if index is None else (index,)
    want = functions.bind_grouped_gemm(x, w, None, scale, KernelOptions(), *more)(x, w, None, offsets, scale, *more)
    assert want[: offsets[-1]].all(1).any()
    own, others = Part(blocks[0]), Part(blocks[1:].flatten(), beside=True)
    for schedule, parts in (("static", [own, others]), ("dynamic", [Part(blocks.flatten())])):
        options = KernelOptions(schedule=schedule)
        run, before = functions.bind_grouped_gemm(x, w, None, scale, options, *more, ranges=True), gpu.launches
        out = torch.full_like(want, torch.nan)
        assert torch.equal(run(x, w, None, parts, scale, *more, out=out), want)
        assert gpu.launches == before + len(parts)
        assert not gpu.counter.any()


@pytest.mark.parametrize("config", [PP_192, CO_256, slow(PP_128), slow(CO_256_ROWS)], ids=lambda config: config.name)
def test_products_that_count_their_tiles(config, tiles, gpu):
    """Each block's tiles, under either schedule: also the column tiles of a single row tile, and those of no expert."""
    tiles(config)
    x, w, _, _, offsets, blocks, *_ = problem_by_ranges(False, leaving=True)
    w = torch.cat([w, torch.randn(len(w), 272, w.shape[2]).to(BF16)], 1).contiguous()  # three column tiles or more
    want = functions.bind_grouped_gemm(x, w, None, None, KernelOptions())(x, w, None, offsets, None)
    assert want[: offsets[-1]].all(1).any()
    of_blocks = tiles_of(blocks, config.tile_m)
    assert of_blocks.unique().numel() > 1
    for schedule in ("static", "dynamic"):
        run, (tile_m, column_tiles) = functions.bind_counted_gemm(x, w, None, KernelOptions(schedule=schedule))
        assert tile_m == config.tile_m
        assert column_tiles == -(-w.shape[1] // config.tile_n)
        ranges, out = blocks.flatten().clone(), torch.full_like(want, torch.nan)
        assert torch.equal(run(x, w, None, ranges, out), want)
        counted = ranges.view(len(blocks), -1)
        assert torch.equal(counted[:, -2], 2 * of_blocks.to(torch.int32) * column_tiles)
        counted[:, -2] = 0
        assert torch.equal(counted, blocks)
        assert not gpu.counter.any()


def test_products_of_codes_by_ranges(gpu):
    """The same for the second layer in FP8, whose results leave for other ranks."""
    *_, offsets, blocks, _, _ = problem_by_ranges(False)
    count = int(blocks[:, : len(blocks[0]) - 1].max())
    splits = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    x, w = rows(splits, count - sum(splits), 144, "e4m3 blocks").given, weights(splits, 72, 144, "e4m3 blocks").given
    want = functions.bind_grouped_gemm(x, w, None, None, KernelOptions())(x, w, None, offsets, None)
    assert want[: offsets[-1]].all(1).any()
    own, others = Part(blocks[0]), Part(blocks[1:].flatten(), beside=True)
    for schedule, parts in (("static", [own, others]), ("dynamic", [Part(blocks.flatten())])):
        run, before = (
            functions.bind_grouped_gemm(x, w, None, None, KernelOptions(schedule=schedule), ranges=True),
            gpu.launches,
        )
        out = torch.full_like(want, torch.nan)
        assert torch.equal(run(x, w, None, parts, None, out=out), want)
        assert gpu.launches == before + len(parts)


@pytest.mark.parametrize("keep", [True, False])
def test_activations_of_codes_by_ranges(keep):
    """The same for the first layer in FP8, whose tokens arrive."""
    *_, offsets, blocks, _, _ = problem_by_ranges(False)
    count = int(blocks[:, : len(blocks[0]) - 1].max())
    splits = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    x, w = rows(splits, count - sum(splits), 144, "e4m3 blocks").given, weights(splits, 256, 144, "e4m3 blocks").given
    settings = Activation("swiglu"), keep, KernelOptions()
    bind = functions.bind_grouped_gemm_activation
    want = bind(x, w, None, None, *settings, quantized=fp8_block())(x, w, None, offsets, None)
    run = bind(x, w, None, None, *settings, quantized=fp8_block(), ranges=True)
    for parts in ([Part(blocks[0]), Part(blocks[1:].flatten(), beside=True)], [Part(blocks.flatten(), beside=True)]):
        with nan_in_new_tensors():
            got = run(x, w, None, parts, None)
        assert len(got) == len(want) == 2 + keep
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.float(), b.float())
    assert want[0].float().norm() > 0


@pytest.mark.parametrize(("experts", "forms", "zero_tail"), [
    (3, (True, True, True), True), slow(3, (True, True, True), False), slow(40, (False, False, True), True),
    slow(40, (False, False, True), False),
])  # fmt: skip
def test_derivatives_of_codes_by_ranges(experts, forms, zero_tail, gpu):
    """The same for the second layer's gradient in FP8, whose rows arrive: also by columns."""
    tokens, ranks, rank = 600, 2, 0
    offsets, token_of_row = routed(tokens, 2, experts, seed=1)
    count, splits = len(token_of_row), offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    dy = rows(splits, count - sum(splits), 144, "e4m3 blocks").given
    w, p = weights(splits, 128, 144, "e4m3 blocks").given, torch.randn(count, 256).to(BF16)
    scale = torch.rand(count)
    bind = partial(functions.bind_grouped_gemm_activation_backward_codes, dy, w, p, scale, Activation("swiglu"))
    settings = fp8_block(), forms, True, KernelOptions(zero_tail=zero_tail)
    by_ranks = rank, ranks, tokens, experts - 1, zero_tail, 256, True
    blocks = row_functions.bind_row_ranges(offsets, token_of_row, *by_ranks)(offsets, token_of_row)
    assert (tiles_of(blocks[: -(experts + 1)].view(ranks, -1), 256) > 0).all()
    with nan_in_new_tensors():
        want, want_scale = bind(*settings)(dy, w, offsets, p, scale)
        got, got_scale = bind(*settings, ranges=True)(dy, w, [Part(blocks, beside=True)], p, scale)
    assert len(got) == len(want) == sum(forms)
    for a, b in zip((*got, (got_scale,)), (*want, (want_scale,)), strict=True):
        for t, u in zip(a, b, strict=True):
            assert_same_bits(t, u)
    assert all(codes.float().nan_to_num().norm() > 0 for codes, _ in got)
    assert not gpu.counter.any()


def test_a_product_waits_for_the_words_of_all_ranks_up_to_its_block(monkeypatch):
    """With a kernel that gives up early. Words of ranks whose rows it does not need may be negative."""
    monkeypatch.setattr(scheduler, "MOST_READS", 50)
    monkeypatch.setattr("emulator.gpu.compiled", lambda kernel: host.compiled(kernel, "50 reads"))
    with emulated():
        x, w, _, scale, offsets, blocks, *_ = problem_by_ranges(False)
        run = functions.bind_grouped_gemm(x, w, None, scale, KernelOptions(), ranges=True)
        first, second, third = blocks
        empty = second.clone()
        empty[len(offsets) + 1 : -2] = empty[: len(offsets) + 1]
        for part, words, ends in (
            ([first, second, third], (0, 0, 0), True), ([first, second, third], (0, -1, 0), False),
            ([first, second, third], (0, 0, -1), False), ([second, third], (0, -3), False), ([second], (-1,), False),
            ([first, empty, third], (0, -1, 0), False), ([first, empty], (0, -1), True),
        ):  # fmt: skip
            part = torch.stack(part)
            part[:, -1] = torch.tensor(words)
            with nullcontext() if ends else pytest.raises(EmulationError, match="the kernel ends with an error"):
                run(x, w, None, [Part(part.flatten())], scale)


@pytest.mark.parametrize("name", [slow("qwen3"), slow("deepseek-v3"), "qwen2, fp32 weight"])
def test_the_router(name):
    routers.check_choices(routers.CASES[name], 33)


@pytest.mark.parametrize("kind", ["random", "one has all", "negative"])
def test_offsets(kind):
    check_offsets(kind, 33, 3000)


def test_weight_gradients_of_fp8_codes_beside_a_sum(monkeypatch, gpu):
    """Few CTAs, which draw their tiles under either schedule, and leave the counter zero."""
    monkeypatch.setattr(functions, "choose", lambda problem: CO_256)
    case = wgrad(kind="e4m3 blocks", exact=True)
    launches = gpu.launches
    operands = case.live["grad_output"], case.live["x"], case.live["offsets"]
    run = functions.bind_grouped_wgrad(*operands, BF16, False, KernelOptions(schedule="static"), beside=True)
    assert torch.equal(run(*operands), case.want[0].to(BF16))
    assert gpu.launches == launches + 1
    assert [kernel.symbol for kernel in gpu.hosts if kernel.symbol.endswith("_beside")]
    assert not gpu.counter.any()


@pytest.mark.slow
def test_results_in_fp8_codes(monkeypatch):
    """Also by columns, with blocks of 128 rows that end at, before and after the last one of an expert."""
    x, w = rows(**SMALL, k=144, kind="e4m3 blocks"), weights(SMALL["splits"], 512, 144, "e4m3 blocks")
    assert check_codes(x, w, SMALL["splits"], "swiglu").any()
    monkeypatch.setattr(functions, "choose", lambda problem: CO_256_ROWS)
    for t in check_derivative_codes((0, 127, 128, 129, 1, 0), 21, 128, 144):
        assert t.any()


def test_quantized_rows():
    """Both forms of rows sorted by expert, with a tail of NaN; then columns of tokens, through an index."""
    splits = quantize_kernels.SPLITS["around a tile"]
    x = quantize_kernels.with_tail(splits, 140, 48)
    quantize_kernels.check_rows(x, "block", (-1, -2), offsets_of(splits))
    tokens, index = quantize_kernels.values(70, 160), quantize_kernels.an_index(210, 70)
    quantize_kernels.check_rows(tokens, "block", (-2,), offsets_of([0, 140, 5, 0, 50]), index)
    quantize_kernels.check_columns_of_codes(tokens, offsets_of([0, 140, 5, 0, 50]), index)


@pytest.mark.parametrize("which", ["mxfp8", slow("nvfp4 gradient"), slow("row")])
def test_quantized_rows_of_other_formats(which):
    for make, dtype in ((quantize_kernels.ordinary, BF16), (quantize_kernels.values, FP16)):
        x = quantize_kernels.with_tail([33, 0, 31, 1, 20], 12, 144, dtype, make)
        quantize_kernels.check_rows(x, which, (-1, -2), offsets_of([33, 0, 31, 1, 20]))


@pytest.mark.parametrize(("which", "of_rows"), [("mxfp8 32x32", "mxfp8"), slow("nvfp4 16x16", "nvfp4 rotated")])
def test_square_blocks_and_dequantized_values(which, of_rows):
    weight = quantize_kernels.weight_like((2, 80, 144), transposed=True)
    quantize_kernels.check_weight(weight, which)
    x, offsets = quantize_kernels.values(100, 144, seed=3), offsets_of([33, 0, 31, 1, 20])
    for axis in (-1, -2):
        weight = quantize_kernels.weight_like((2, 96, 160))
        quantize_kernels.check_dequantized(quantize(weight, quantize_kernels.WEIGHTS[which], axis))
        t = quantize(x, quantize_kernels.QUANTIZERS[of_rows], axis, offsets=offsets)
        quantize_kernels.check_dequantized(t, transposed=axis == -2)


@pytest.mark.parametrize("which", ["block", slow("block fp32")])
def test_dequantized_blocks_of_rows(which):
    for rows_of in (quantize_kernels.ordinary, quantize_kernels.values):
        quantize_kernels.check_dequantized(quantize(rows_of(37, 272), quantize_kernels.QUANTIZERS[which]))


@pytest.mark.parametrize("axes", [slow((-1, -2)), (-2,)], ids=str)
def test_quantized_packed_rows(axes):
    """For Blackwell: rows sorted by expert, with a tail of NaN; then of halves, through an index."""
    splits = quantize_kernels.SPLITS["around a packed tile"]
    x = quantize_kernels.with_tail(splits, 300, 128)
    quantize_kernels.check_packed(x, "mxfp8", offsets_of(splits), axes=axes)
    quantize_kernels.check_packed_index("mxfp8", axes, halves=True)


@pytest.mark.parametrize(("axes", "halves"), [((-1, -2), True), ((-2,), False)], ids=str)
def test_quantized_packed_weights(axes, halves):
    """For Blackwell: a weight whose rows are apart, with values of all magnitudes; then ordinary ones."""
    for make, pitch in ((quantize_kernels.values, 8), (quantize_kernels.ordinary, 0)):
        weight = make(2 * 256, 128 + pitch).reshape(2, 256, 128 + pitch)[..., :128]
        quantize_kernels.check_packed_weight(weight, axes, halves)


def test_quantized_weights():
    quantize_kernels.check_weight(quantize_kernels.weight_like((2, 272, 144), transposed=True), "block")
    quantize_kernels.check_transposed_codes((2, 272, 144))


@pytest.mark.parametrize(
    "activation",
    # quick: a clamped gate beside up, and an activation with one input
    [a if (a.interleaved and a.limit) or not a.gated else slow(a) for a in activation_rows.ACTIVATIONS],
    ids=str,
)
def test_activations_of_rows(activation):
    activation_rows.check_activation(activation, pitch=24)


def test_the_tail_is_zeroed():
    check_zeroed_tail(300, 264, BF16)


def test_activations_of_other_rows():
    for shape in ((1, 8), (5, 1032)):
        activation_rows.check_activation(activation_rows.ACTIVATIONS[3], FP16, None, shape)


@pytest.mark.parametrize("scale", [slow(None), FP32], ids=["", "scale"])
def test_rows_and_slots(scale):
    """Sentinels; more slots of a token than are summed at once, and fewer."""
    for tokens, chosen in ((70, 9), (33, 2)):
        check_moves(tokens, chosen, 264, BF16, scale)


# ---- whole layers


def step(layer, x, dy):
    y = layer(x)
    return (y, *torch.autograd.grad(y, (x, *layer.parameters()), dy))


def layer_problem(hidden, width, num_experts, **settings):
    layer = fm.MoE(hidden, width, num_experts, 2, dtype=BF16, **settings)
    return layer, torch.randn(70, hidden, dtype=BF16).requires_grad_(), torch.randn(70, hidden, dtype=BF16)


def rules_of(layer, x):
    ran = {step.rule for plan in layer.explain(x).plans for step in plan.steps}
    assert None not in ran, "each step has a kernel"
    return ran


@pytest.mark.usefixtures("builtin_rules")
def test_a_whole_layer():
    """Router, gathered products and sums, forward and backward: the plan of a GPU, against the unfused steps."""
    layer, x, dy = layer_problem(128, 64, 6, router_bias=True)
    got = step(layer, x, dy)
    with fm.disabled("sm90.*"):
        want = step(layer, x, dy)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 2e-2 * b.norm()
    rules_of(layer, x)


@pytest.mark.slow  # the tests of FP8 codes above run such kernels, and test_sm90_products.py its plan
@pytest.mark.usefixtures("builtin_rules")
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_tensor", "fp8_block:wgrad=bf16", "fp8_tensor:wgrad=bf16"])
def test_a_whole_layer_in_fp8(recipe):
    """The plan of a GPU against the emulated recipe. Both have the same error, that of the format."""
    layer, x, dy = layer_problem(128, 128, 4)
    with fm.recipe(recipe):
        got, ran = step(layer, x, dy), rules_of(layer, x)
        with fm.disabled("sm90.*"):
            fm.clear_weight_cache(layer)
            emulated_recipe = step(layer, x, dy)
    with fm.recipe("bf16"):
        exact = step(deepcopy(layer).float(), x.detach().float().requires_grad_(), dy.float())
    for a, b, c in zip(got, emulated_recipe, exact, strict=True):
        error, of_recipe = (a.double() - c).norm(), (b.double() - c).norm()
        assert (a - b).norm() < 10 ** (-30 / 20) * b.norm(), "30 dB"
        assert error < 1.5 * of_recipe
        assert of_recipe < 0.1 * c.norm()
    assert {f"sm90.fp8_grouped_{name}" for name in ("gemm_activation", "gemm", "dgrad_activation", "dgrad")} <= ran
