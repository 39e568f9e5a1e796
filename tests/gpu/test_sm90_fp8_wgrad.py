"""The weight gradient of FP8 codes with block scales against fp64 of the dequantized operands.

Whatever may not be read is NaN: codes and scales after the last expert's padding, and around the operands in memory; so
is the memory that results are written to. Problems of small integers and scales that are powers of two are exact.

Axes: R rows sorted by expert, P padded rows, E experts, N features of the gradient, K features of the input.
"""

import itertools

import pytest
import torch
from kit.hopper import DEVICE, EMULATED, needs_hopper
from kit.poison import nan_in_new_tensors

from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.sm90 import launch, products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.products import with_strides
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, CO_256, CO_256_ALONE, CO_256_TALL
from fusedmoe.numerics.formats import E4M3, E5M2, fp8_block, quantize
from fusedmoe.numerics.formats.groups import padded_rows

pytestmark = needs_hopper

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# of norms: about twice what rounding a result leaves; the tensor cores of a GPU sum a block with about 14 bits
TOLERANCE = {BF16: 4e-3, FP16: 6e-4 if EMULATED else 1e-3, FP32: 1e-6 if EMULATED else 1e-3}
BLOCK = 128
SPLITS, TAIL = (130, 0, 61, 1), 21
N, K = 144, 272  # a tile of 128 and a bit, one of 256 and a bit


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    from fusedmoe.kernels.sm90.gemm.block_scales_k import BlockScaledColumns
    from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK

    outputs = [{"out": out, "accumulate": adds} for out in ("bf16", "fp32") for adds in (False, True)]
    each = itertools.product(CODES, CANDIDATES["fp8_wgrad"], outputs)
    build_ahead([RaggedK(BlockScaledColumns(dtype), config, **output) for dtype, config, output in each])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def tiles(monkeypatch):
    return lambda config: monkeypatch.setattr(products, "choose", lambda problem: config)


def inside_nan(t, unit):
    """The same values with NaN on all sides, as far away as 16 bytes allow."""
    around = torch.full([extent + 2 * unit for extent in t.shape], torch.nan, device=t.device).to(t.dtype)
    return around[tuple(slice(unit, unit + extent) for extent in t.shape)].copy_(t)


class Problem:
    """Operands, and the gradient in fp64."""

    def __init__(
        self, splits=SPLITS, tail=TAIL, n=N, k=K, *, dtype="e4m3", exact=True, dw=BF16, accumulate=False,
        by_expert=False,
    ):  # fmt: skip
        self.by_expert = by_expert
        self.rows, self.dtype = sum(splits) + tail, dw
        self.offsets = torch.tensor(list(itertools.accumulate(splits)), dtype=torch.int32, device=DEVICE)
        self.padded = padded_rows(self.rows, len(splits), BLOCK)
        (self.dy, self.dy_scale, dy), (self.x, self.x_scale, x) = (
            self.columns(splits, width, CODES[name], exact) for width, name in ((n, dtype), (k, "e4m3"))
        )
        self.want = torch.stack([a @ b.T for a, b in zip(dy, x, strict=True)])
        self.before = None
        if accumulate:
            self.dtype = FP32 if accumulate is True else accumulate
            self.before = torch.randint(-64, 64, self.want.shape, device=DEVICE).to(self.dtype)
            self.want = self.want.to(self.dtype) + self.before  # in 16 bits, both are rounded
        if splits and sum(splits):
            assert self.want.count_nonzero() > 0.5 * self.want[torch.tensor(splits) > 0].numel()

    def columns(self, splits, width, dtype, exact):
        """Codes (width, P), scales (width, P / 128) or, by expert, (E,), and each expert's values in fp64."""
        codes = torch.full((width, self.padded), torch.nan, device=DEVICE)
        scale = torch.full((self.padded // BLOCK, width), torch.nan, device=DEVICE)
        values, of_expert, at = [], [], 0
        for count in splits:
            end = at + -(-count // BLOCK) * BLOCK
            codes[:, at:end] = 0
            shape, blocks = (width, count), (end - at) // BLOCK
            drawn = torch.randint(-2, 3, shape, device=DEVICE).float() if exact else torch.randn(shape, device=DEVICE)
            codes[:, at : at + count] = drawn.to(dtype).float()
            exponents = torch.randint(-1, 2, (blocks, width), device=DEVICE).float()
            factors = torch.exp2(exponents) if exact else torch.rand(blocks, width, device=DEVICE) * 4 + 0.1
            if self.by_expert and count:
                factors[:] = factors[0, 0].clone()
            of_expert.append(factors[0, 0].item() if count else torch.nan)
            scale[at // BLOCK : end // BLOCK] = factors
            values.append(
                codes[:, at : at + count].double() * factors.T.double().repeat_interleave(BLOCK, 1)[:, :count]
            )
            at = end
        if self.by_expert:
            return inside_nan(codes.to(dtype), 16), inside_nan(torch.tensor(of_expert, device=DEVICE), 1), values
        return inside_nan(codes.to(dtype), 16), inside_nan(scale, 4).mT, values

    def run(self, options=DEFAULT):
        into = None if self.before is None else self.before.clone()
        with nan_in_new_tensors():
            dw = products.grouped_wgrad(
                Codes(self.dy, self.dy_scale), Codes(self.x, self.x_scale), self.offsets,
                dtype=self.dtype, out=into, accumulate=into is not None, options=options,
            )  # fmt: skip
        assert into is None or dw is into
        return dw

    def check(self, options=DEFAULT):
        dw = self.run(options)
        assert torch.equal(dw, self.want.to(self.dtype))


CONFIGS = pytest.mark.parametrize("config", CANDIDATES["fp8_wgrad"], ids=lambda config: config.name)
OUTPUTS = {"bf16": {}, "fp32": {"dw": FP32}, "add": {"accumulate": True}, "add in bf16": {"accumulate": BF16}}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtype", CODES)
@CONFIGS
def test_small_integers_are_exact(config, dtype, output, tiles):
    tiles(config)
    Problem(dtype=dtype, **OUTPUTS[output]).check()


def test_fp16(tiles):
    tiles(CO_256)
    Problem(dw=FP16).check()


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("config", [CO_256, CO_256_TALL], ids=lambda config: config.name)
def test_any_codes_and_scales(config, dtype, output, tiles):
    tiles(config)
    case = Problem((300, 0, 61, 128), dtype=dtype, exact=False, **OUTPUTS[output])
    dw = case.run()
    assert not dw[1].any() or case.before is not None
    for got, want in zip(dw, case.want, strict=True):
        assert (got.double() - want).norm() <= TOLERANCE[case.dtype] * want.norm()


def test_each_scale_is_that_of_its_row_and_column(tiles):
    """Every factor differs, in each block of rows."""
    tiles(CO_256_TALL)
    case = Problem((300, 5), 0, 272, 144, dw=FP32)
    blocks = case.dy_scale.shape[1]
    used = torch.tensor([0, 1, 2, 3], device=DEVICE)
    case.dy_scale[:, used] = 1 + torch.arange(272 * 4, device=DEVICE).reshape(272, 4).float() / 1024
    case.x_scale[:, used] = 1 + torch.arange(144 * 4, device=DEVICE).reshape(144, 4).flip(0).float() / 512
    assert blocks >= 4
    dy, x = (
        codes[:, :512].double() * scale[:, :4].double().repeat_interleave(BLOCK, 1)
        for codes, scale in ((case.dy, case.dy_scale), (case.x, case.x_scale))
    )
    want = torch.stack([dy[:, :384] @ x[:, :384].T, dy[:, 384:] @ x[:, 384:].T])
    error = (case.run().double() - want).abs().max() / want.abs().max()
    assert error < 1e-6


def test_of_quantized_rows(tiles):
    """As the quantize step of plain PyTorch writes them, except for the strides of the scales."""
    tiles(CO_256)
    splits, used = (130, 0, 61, 9), 200
    offsets = torch.tensor(list(itertools.accumulate(splits)), dtype=torch.int32, device=DEVICE)
    dy, x = (torch.randn(used + 7, width, device=DEVICE).to(BF16) for width in (N, K))
    dy[used:], x[used:] = torch.nan, torch.nan
    a = quantize(dy, fp8_block(E5M2, power_of_two=False), -2, offsets=offsets)
    b = quantize(x, fp8_block(E4M3), -2, offsets=offsets)
    dw = products.grouped_wgrad(*(Codes(t.data, with_strides(t.scale)) for t in (a, b)), offsets)
    dy, x = a.dequantize(FP32)[:used].double(), b.dequantize(FP32)[:used].double()
    want = torch.stack([p.T @ q for p, q in zip(dy.split(splits), x.split(splits), strict=True)])
    assert (dw.double() - want).norm() <= TOLERANCE[BF16] * want.norm()


RAGGED = {
    "around blocks": ((0, 1, 127, 128, 129, 0, 255, 256, 257, 2, 0), 37),
    "one takes all": ((0, 0, 0, 400, 0), 5),
    "the last takes all": ((0, 0, 0, 400), 0),
    "no tail": ((100, 28, 0, 128), 0),
    "a tail of several blocks": ((100, 28), 700),
    "one row": ((1,), 0),
    "one expert": ((300,), 3),
}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("ragged", RAGGED)
def test_splits(ragged, output):
    splits, tail = RAGGED[ragged]
    Problem(splits, tail, 48, 80, **OUTPUTS[output]).check()


@pytest.mark.parametrize("output", OUTPUTS)
def test_rows_without_an_expert_only(output):
    case = Problem((0, 0, 0), 150, 48, 80, **OUTPUTS[output])
    case.check()
    assert case.before is not None or not case.run().any()


def test_no_rows():
    Problem((0, 0), 0, 48, 80).check()
    Problem((0, 0), 0, 48, 80, accumulate=True).check()


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
    Problem(tuple(splits), 9, 16, 32).check(KernelOptions(schedule=schedule))
    launch.ragged_k.cache_clear()


@pytest.mark.parametrize(("n", "k"), [(16, 16), (16, 528), (528, 16), (128, 256), (256, 128), (400, 384)])
@CONFIGS
def test_widths(config, n, k, tiles):
    tiles(config)
    Problem((130, 3), 5, n, k, dw=FP32 if n == k else BF16).check()


@CONFIGS
def test_options_change_no_bit(config, tiles):
    """Few CTAs, each with many tiles, under either schedule."""
    tiles(config)
    case = Problem((300, 0, 61, 258, 5), 7, 400, 528, exact=False)
    expected = case.run()
    for options in (KernelOptions(2), KernelOptions(2, "static"), KernelOptions(schedule="static")):
        assert torch.equal(case.run(options), expected)


def test_accumulating_leaves_an_expert_without_rows_as_it_is(tiles):
    tiles(CO_256)
    case = Problem(accumulate=True)
    case.before[1] = torch.nan
    after = case.run()
    assert torch.equal(after[1].view(torch.int32), case.before[1].view(torch.int32))
    assert (after[[0, 2, 3]] != case.before[[0, 2, 3]]).any((1, 2)).all()


def test_accumulating_adds_what_is_not_rounded(tiles):
    tiles(CO_256)
    case = Problem(exact=False, dw=FP32)
    once = case.run()
    case.before = torch.zeros_like(once)
    assert torch.equal(case.run(), once)
    case.before = once
    assert torch.equal(case.run(), 2 * once)


def test_results_end_where_their_tensor_ends(tiles):
    """Rows are stored by threads, without a TMA descriptor, which knows bounds."""
    for config, accumulate in itertools.product((CO_256, CO_256_TALL), (False, True)):
        tiles(config)
        case = Problem(accumulate=True)
        around = torch.full((len(SPLITS) + 2, N, K), 7.0, device=DEVICE)
        inside = around[1:-1].copy_(case.before)
        operands = Codes(case.dy, case.dy_scale), Codes(case.x, case.x_scale), case.offsets
        products.bind_grouped_wgrad(*operands, FP32, accumulate, DEFAULT)(*operands, inside)
        assert torch.equal(inside, (case.want - (0 if accumulate else case.before.double())).float())
        assert (around[0] == 7).all()
        assert (around[-1] == 7).all()
