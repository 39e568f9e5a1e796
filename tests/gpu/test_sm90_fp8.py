"""The ragged M products of FP8 codes with block scales, against fp64 of the dequantized operands.

Whatever may not be read is NaN: codes and scales of the tail, those around the operands in memory, the weights of
experts without rows, and the memory that results are written to. Problems of small integers and scales that are powers
of two are exact. Codes of results have the bits of `fusedmoe.quantize`, of what the same kernel writes in bf16.

Axes: R rows sorted by expert, E experts, K contraction, N features out, I intermediate features, H hidden features.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kit.hopper import DEVICE, EMULATED, needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors
from test_async import capture
from test_sm90_kernels import ACTIVATIONS, act, offsets_of, padded, product, scaled
from torch import Tensor

from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.sm90 import products as functions
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, CO_128, CO_256, CO_256_ROWS
from fusedmoe.numerics.formats import E4M3, E5M2, ScaleRule, fp8_block, quantize
from fusedmoe.numerics.formats.groups import group_of

pytestmark = needs_hopper

BF16, FP32 = torch.bfloat16, torch.float32
CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# of norms: about twice what rounding a result leaves; the tensor cores of a GPU sum a block with about 14 bits
TOLERANCE = {BF16: 4e-3, FP32: 1e-5 if EMULATED else 1e-3}
BLOCK = 128
SPLITS, TAIL = (130, 0, 61, 1, 2, 27), 21  # experts begin at rows 130, 191 and 194, which are no multiples of 4
N, K = 400, 272  # tiles of 128, of 256 and a bit; blocks of 128 and a bit
GATED = ("swiglu", "clamped", "geglu_tanh", "geglu_erf", "reglu")
FORMATS = {
    "e4m3": fp8_block(),
    "e5m2": fp8_block(E5M2),
    "fp32 scales": fp8_block(power_of_two=False),
    "e5m2, fp32 scales": fp8_block(E5M2, power_of_two=False),
}


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    from fusedmoe.kernels.sm90.epilogue.derivative_codes import (
        DerivativeCodes,
        derivative_codes,
    )
    from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN, activation, derivative
    from fusedmoe.kernels.sm90.epilogue.quantized import RowCodes
    from fusedmoe.kernels.sm90.gemm.block_scales import BlockScaledRows
    from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM

    kernels = [RaggedM(BlockScaledRows(d), c, epilogue=PLAIN) for d in CODES for c in CANDIDATES["fp8_plain"]]
    of_format = [None, *(RowCodes(f.element.name, f.rule is ScaleRule.POWER_OF_TWO) for f in FORMATS.values())]
    for name, keep, codes in itertools.product((*GATED, "squared_relu"), (True, False), of_format[:2]):
        a = ACTIVATIONS[name]
        epilogue = activation(a.kind, clamped=a.limit is not None, keep=keep, result=codes)
        kernels += [RaggedM(BlockScaledRows("e4m3"), c, epilogue=epilogue) for c in CANDIDATES["fp8_activation"]]
    for codes in of_format[2:]:
        epilogue = activation("swiglu", keep=True, result=codes)
        kernels += [RaggedM(BlockScaledRows("e4m3"), c, epilogue=epilogue) for c in CANDIDATES["fp8_activation"]]
    for a, gradient in itertools.product(ACTIVATIONS.values(), (True, False)):
        shape = {"clamped": a.limit is not None, "interleaved": a.interleaved}
        epilogue = derivative(a.kind, **shape, keep=True, row_scale=gradient)
        kernels += [RaggedM(BlockScaledRows("e4m3"), c, epilogue=epilogue) for c in CANDIDATES["fp8_derivative"]]
    for name, gradient in itertools.product((*GATED, "squared_relu"), (True, False)):
        a = ACTIVATIONS[name]
        epilogue = derivative_codes(a.kind, DerivativeCodes(), clamped=a.limit is not None, row_scale=gradient)
        kernels += [RaggedM(BlockScaledRows("e4m3"), c, epilogue=epilogue) for c in CANDIDATES["fp8_derivative_codes"]]
    build_ahead(kernels)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def tiles(monkeypatch):
    return lambda config: monkeypatch.setattr(functions, "choose", lambda problem: config)


# ------------------------------------------------------------------------------------------------------ operands


class Operand(NamedTuple):
    """Codes and scales, and their values in fp64: NaN where they may not be read."""

    codes: Tensor
    scale: Tensor
    values: Tensor


def inside_nan(t, unit):
    """The same values with NaN on all sides, as far away as 16 bytes allow."""
    around = torch.full([extent + 2 * unit for extent in t.shape], torch.nan, device=t.device).to(t.dtype)
    return around[tuple(slice(unit, unit + extent) for extent in t.shape)].copy_(t)


def drawn(shape, dtype, exact):
    values = torch.randint(-2, 3, shape, device=DEVICE) if exact else torch.randn(shape, device=DEVICE)
    return values.float().to(dtype).float()


def factors(shape, exact):
    if exact:
        return torch.exp2(torch.randint(-1, 2, shape, device=DEVICE).float())
    return torch.rand(shape, device=DEVICE) * 4 + 0.1


def blocks(extent):
    return -(-extent // BLOCK)


def of_experts(splits, exact):
    """A scale per expert, at an address that is no multiple of 16 bytes; NaN for those without rows."""
    scale = factors((len(splits),), exact)
    scale[torch.tensor(splits) == 0] = torch.nan
    return inside_nan(scale, 1)


def rows(splits, tail, k, dtype="e4m3", exact=False, by_expert=False):
    """Rows in 1 x 128 blocks, or with one scale per expert."""
    count, used = sum(splits) + tail, sum(splits)
    if by_expert:
        codes, scale = drawn((count, k), CODES[dtype], exact), of_experts(splits, exact)
        codes[used:] = torch.nan
        of_row = torch.cat(
            [scale.double().repeat_interleave(torch.tensor(splits, device=DEVICE)), scale.new_ones(tail)]
        )
        codes = codes.to(CODES[dtype])
        return Operand(inside_nan(codes, 16), scale, codes.double() * of_row[:, None])
    codes, scale = drawn((count, k), CODES[dtype], exact), factors((blocks(k), count), exact)
    codes[used:], scale[:, used:] = torch.nan, torch.nan
    return operand_of_rows(codes.to(CODES[dtype]), scale)


def operand_of_rows(codes, scale):
    """``scale`` is (K / 128, R)."""
    values = codes.double() * scale.mT.double().repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    room = torch.full((len(scale), -(-scale.shape[1] // 4) * 4), torch.nan, device=DEVICE)
    room[:, : scale.shape[1]] = scale
    return Operand(inside_nan(codes, 16), inside_nan(room, 4)[:, : scale.shape[1]].mT, values)


def weights(splits, n, k, exact=False, by_expert=False):
    """Weights (E, N, K) in 128 x 128 blocks, or with one scale per expert; those of experts without rows are NaN."""
    codes = drawn((len(splits), n, k), CODES["e4m3"], exact) * (1.0 if exact else 0.1)
    if by_expert:
        scale = of_experts(splits, exact)
        codes[scale.isnan()] = torch.nan
        codes = codes.to(CODES["e4m3"])
        return Operand(inside_nan(codes, 16), scale, codes.double() * scale.double()[:, None, None])
    scale = factors((len(splits), blocks(k), blocks(n)), exact)
    for e, count in enumerate(splits):
        if not count:
            codes[e], scale[e] = torch.nan, torch.nan
    return operand_of_weights(codes.to(CODES["e4m3"]), scale)


def operand_of_weights(codes, scale):
    """``scale`` is (E, K / 128, N / 128)."""
    experts, n, k = codes.shape
    wide = scale.mT.double().repeat_interleave(BLOCK, 1)[:, :n].repeat_interleave(BLOCK, 2)[..., :k]
    around = torch.full((experts + 2, scale.shape[1], blocks(n) + 8 - blocks(n) % 4), torch.nan, device=DEVICE)
    inside = around[1:-1, :, 4 : 4 + blocks(n)]  # without gaps between the experts
    inside.copy_(scale)
    assert functions.has_strides(inside.mT)
    return Operand(inside_nan(codes, 16), inside.mT, codes.double() * wide)


def biases(splits, n, exact):
    return drawn((len(splits), n), BF16, exact).to(BF16)


def row_scales(splits, tail, exact=False):
    scale = factors((sum(splits) + tail,), exact)
    scale[sum(splits) :] = torch.nan
    return scale


class Case(NamedTuple):
    """A call, and its results in fp64; rows of zeros have to be exact."""

    run: Callable[[KernelOptions], tuple[Tensor, ...]]
    want: tuple[Tensor, ...]
    exact: bool
    offsets: Tensor
    weight: Operand

    def check(self, options=DEFAULT):
        with nan_in_new_tensors():
            results = self.run(options)
        for got, want in zip(results, self.want, strict=True):
            assert got.shape == want.shape
            if self.exact:
                assert torch.equal(got, want.to(got.dtype))
                continue
            zero = ~want.flatten(1).any(1) if want.dim() > 1 else want == 0
            assert not got[zero].any(), "rows of the tail"
            if not zero.all():
                assert (got.double() - want).norm() < TOLERANCE[got.dtype] * want.norm()


def of(operand):
    return Codes(operand.codes, operand.scale)


def plain(
    splits=SPLITS, tail=TAIL, n=N, k=K, *, dtype="e4m3", biased=False, scale=False, exact=False, by_expert=False
):  # fmt: skip
    x, w = rows(splits, tail, k, dtype, exact, by_expert), weights(splits, n, k, exact, by_expert)
    bias = biases(splits, n, exact) if biased else None
    row_scale = row_scales(splits, tail, exact) if scale else None
    offsets = offsets_of(splits)

    def run(options):
        return (functions.grouped_gemm(of(x), of(w), offsets, bias=bias, row_scale=row_scale, options=options),)

    y = padded(scaled(product(x.values, w.values, splits, bias), row_scale), tail)
    assert not sum(splits) or y.count_nonzero() > 0.5 * sum(splits) * n, "zeros would pass"
    return Case(run, (y,), exact, offsets, w)


def activation(
    splits=SPLITS, tail=TAIL, n=128, k=K, *, a=ACTIVATIONS["swiglu"], biased=False, scale=False, keep=True, exact=False,
    by_expert=False,
):  # fmt: skip
    """``n`` is I. With ``exact``, only the preactivation is."""
    wide = 2 * n if a.gated else n
    x, w = rows(splits, tail, k, "e4m3", exact, by_expert), weights(splits, wide, k, exact, by_expert)
    bias = biases(splits, wide, exact) if biased else None
    row_scale, offsets = row_scales(splits, tail) if scale else None, offsets_of(splits)

    def run(options):
        results = functions.grouped_gemm_activation(
            of(x), of(w), offsets, a,
            bias=bias, row_scale=row_scale, keep_preactivation=keep, options=options,
        )  # fmt: skip
        return results[1:] if exact else results

    p = product(x.values, w.values, splits, bias)
    y = scaled(act(a, p.to(BF16).double()), row_scale)
    assert not sum(splits) or y.count_nonzero() > 0.2 * y.numel(), "zeros would pass"
    want = padded(y, tail), padded(p, tail)
    return Case(run, want[1:] if exact else want[: 1 + keep], exact, offsets, w)


def derivative(
    splits=SPLITS, tail=TAIL, n=N, k=K, *, a=ACTIVATIONS["swiglu"], dtype="e4m3", scale=True, gradient=True, keep=True,
    by_expert=False,
):  # fmt: skip
    """``n`` is I, ``k`` is H."""
    dy, w = rows(splits, tail, k, dtype, by_expert=by_expert), weights(splits, n, k, by_expert=by_expert)
    p = torch.randn(sum(splits) + tail, 2 * n if a.gated else n, device=DEVICE).to(BF16)
    p[sum(splits) :] = torch.nan
    row_scale, offsets = row_scales(splits, tail) if scale else None, offsets_of(splits)

    def run(options):
        bound = functions.bind_grouped_gemm_activation_backward(of(dy), of(w), p, row_scale, a, keep, gradient, options)
        grad, y, grad_scale = bound(of(dy), of(w), offsets, p, row_scale)
        assert (y is not None) is keep
        assert (grad_scale is not None) is gradient
        return tuple(t for t in (grad, y, grad_scale) if t is not None)

    exact = p[: sum(splits)].double().requires_grad_()
    d, y = product(dy.values, w.values, splits), act(a, exact)
    (grad,) = torch.autograd.grad(y, exact, scaled(d, row_scale))
    y = y.detach()
    want = [grad, *([scaled(y, row_scale)] if keep else []), *([(d * y).sum(1)] if gradient else [])]
    assert not sum(splits) or all(t.count_nonzero() > 0.2 * t.numel() for t in want), "zeros would pass"
    return Case(run, tuple(padded(t, tail) for t in want), False, offsets, w)


FAMILIES = {"plain": plain, "activation": activation, "derivative": derivative}
of_families = pytest.mark.parametrize("family", FAMILIES)


def each(family):
    return pytest.mark.parametrize("config", CANDIDATES[family], ids=lambda config: config.name)


# ------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", CODES)
@each("fp8_plain")
def test_small_integers_are_exact(config, dtype, tiles):
    tiles(config)
    plain(dtype=dtype, biased=dtype == "e4m3", scale=dtype == "e5m2", exact=True).check()


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
@each("fp8_plain")
def test_any_codes_and_scales(config, biased, scale, tiles):
    tiles(config)
    plain(biased=biased, scale=scale).check()


def test_gradients_in_e5m2(tiles):
    tiles(CO_256_ROWS)
    plain(dtype="e5m2").check()


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_row_scales_of_other_dtypes(dtype, tiles):
    tiles(CO_256)
    x, w, offsets = rows(SPLITS, TAIL, 144), weights(SPLITS, 48, 144), offsets_of(SPLITS)
    scale = row_scales(SPLITS, TAIL).to(dtype)
    y = functions.grouped_gemm(of(x), of(w), offsets, row_scale=scale)
    want = padded(scaled(product(x.values, w.values, SPLITS), scale), TAIL)
    assert (y.double() - want).norm() < TOLERANCE[BF16] * want.norm()


@pytest.mark.parametrize("format", [fp8_block, lambda e, across=1: fp8_block(e, across, power_of_two=False)])
def test_of_quantized_tensors(format, tiles):
    """As the quantize step of plain PyTorch writes them, except for the strides of the scales."""
    tiles(CO_256_ROWS)
    offsets = offsets_of(SPLITS)
    x = torch.randn(sum(SPLITS) + TAIL, K, device=DEVICE) * torch.randn(sum(SPLITS) + TAIL, 1, device=DEVICE).exp()
    x[sum(SPLITS) :] = torch.nan
    w = torch.randn(len(SPLITS), N, K, device=DEVICE).to(BF16)
    a, b = quantize(x.to(BF16), format(E5M2), -1, offsets=offsets), quantize(w, format(E4M3, 128), -1)
    x_scale, w_scale = functions.with_strides(a.scale), functions.with_strides(b.scale)
    assert functions.has_strides(x_scale)
    assert not functions.has_strides(b.scale)
    y = functions.grouped_gemm(Codes(a.data, x_scale), Codes(b.data, w_scale), offsets)
    want = padded(product(a.dequantize(FP32), b.dequantize(FP32), SPLITS), TAIL)
    assert (y.double() - want).norm() < TOLERANCE[BF16] * want.norm()


@pytest.mark.parametrize("config", [CO_256, CO_256_ROWS, CO_128], ids=lambda config: config.name)
def test_each_block_has_its_own_scale(config, tiles):
    """Codes of one, and scales of which no two products are alike, of one block of K at a time."""
    tiles(config)
    splits, n, k = (5, 1, 130, 127), 656, 272
    for block in range(3):
        a = torch.zeros(sum(splits), k, device=DEVICE)
        a[:, block * BLOCK] = 1
        of_rows, of_weight = factors((blocks(k), len(a)), False), factors((len(splits), blocks(k), blocks(n)), False)
        x = operand_of_rows(a.to(CODES["e4m3"]), of_rows)
        w = operand_of_weights(torch.ones(len(splits), n, k, device=DEVICE).to(CODES["e4m3"]), of_weight)
        y = functions.grouped_gemm(of(x), of(w), offsets_of(splits))
        expert = group_of(offsets_of(splits), len(a))
        want = of_rows[block][:, None] * of_weight[expert, block].repeat_interleave(BLOCK, 1)[:, :n]
        assert torch.equal(y, want.to(BF16))


RAGGED = {
    "around blocks": ((0, 1, 127, 128, 129, 0, 255, 256, 257, 2, 0), 37),
    "one takes all": ((0, 0, 0, 400, 0), 5),
    "no tail": ((100, 28, 0, 128), 0),
    "a tail of several tiles": ((100, 30), 700),
    "only a tail": ((0, 0, 0), 150),
    "one row": ((1,), 0),
    "one row of many": ((0, 0, 1, 0), 1),
    "one expert": ((300,), 3),
    "many experts": (tuple(e * e % 5 for e in range(70)), 9),
    "no rows": ((0, 0), 0),
}


@pytest.mark.parametrize("ragged", RAGGED)
@of_families
def test_splits(family, ragged):
    splits, tail = RAGGED[ragged]
    FAMILIES[family](splits, tail, 128, 144).check()


@pytest.mark.parametrize(("n", "k"), [(16, 16), (16, 528), (528, 16), (128, 256), (656, 128), (1168, 48)])
@each("fp8_plain")
def test_widths(config, n, k, tiles):
    tiles(config)
    plain((130, 3), 5, n, k, exact=True).check()


@pytest.mark.parametrize(("n", "k"), [(128, 16), (384, 144), (640, 128)])
def test_widths_of_gate_and_up(n, k, tiles):
    """Tiles of columns of up begin at any block."""
    tiles(CO_256)
    activation((130, 3), 5, n, k, exact=True).check()


@of_families
def test_options_change_no_bit(family):
    """Few CTAs, each with many tiles, under either schedule."""
    case = FAMILIES[family]((300, 0, 61, 1, 127, 258), 20, 384, 272)
    expected = case.run(DEFAULT)
    for options in (KernelOptions(2), KernelOptions(2, "static"), KernelOptions(schedule="static")):
        got = case.run(options)
        for a, b in zip(got, expected, strict=True):
            if a.dim() == 1:  # the row scale's gradient, a sum over tiles: their width may be another
                assert (a.double() - b).norm() < TOLERANCE[FP32] * b.norm()
            else:
                assert torch.equal(a, b)


def test_operands_without_strides_of_scales_are_refused():
    x = torch.rand(40, 3, device=DEVICE)
    assert not functions.has_strides(x)
    assert functions.has_strides(functions.with_strides(x))
    assert torch.equal(functions.with_strides(x), x)
    w = torch.rand(2, 5, 3, device=DEVICE)
    assert not functions.has_strides(w)
    assert functions.with_strides(w).stride() == (24, 1, 8)
    assert torch.equal(functions.with_strides(w), w)
    gaps = torch.rand(4, 3, 8, device=DEVICE)[::2].mT
    assert not functions.has_strides(gaps), "gaps between experts"
    assert torch.equal(functions.with_strides(gaps), gaps)


# ------------------------------------------------------------------------------------------------------ activations


def test_preactivations_of_small_integers_are_exact(tiles):
    tiles(CO_256)
    activation(n=384, biased=True, exact=True).check()


@pytest.mark.parametrize("keep", [True, False], ids=["keep", ""])
@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
@pytest.mark.parametrize("kind", GATED)
def test_activation(kind, scale, keep, tiles):
    tiles(CO_256)
    activation(a=ACTIVATIONS[kind], keep=keep, biased=scale is keep, scale=scale).check()


@pytest.mark.parametrize("keep", [True, False], ids=["keep", ""])
def test_squared_relu(keep, tiles):
    tiles(CO_256)
    activation(n=N, a=ACTIVATIONS["squared_relu"], keep=keep, biased=True, scale=True).check()


# ----------------------------------------------------------------------------------------------------- codes of results


def bits(t):
    return t.contiguous().view(torch.uint8 if t.element_size() == 1 else torch.int32)


def check_codes(x, w, splits, a, format=FORMATS["e4m3"], keep=True, bias=None, row_scale=None):
    """Codes and scales are those of the result in bf16, which is returned."""
    offsets = offsets_of(splits)
    operands = of(x), of(w), offsets, a
    given = {"bias": bias, "row_scale": row_scale, "keep_preactivation": keep}
    with nan_in_new_tensors():
        y, *p = functions.grouped_gemm_activation(*operands, **given)
        codes, scale, *kept = functions.grouped_gemm_activation(*operands, **given, quantized=format)
    want = quantize(y, format, -1, offsets=offsets)
    assert codes.dtype is want.data.dtype
    assert torch.equal(bits(codes), bits(want.data))
    assert scale.shape == want.scale.shape
    assert torch.equal(bits(scale), bits(want.scale))
    assert functions.has_strides(scale)
    assert len(p) == len(kept) == keep
    assert all(torch.equal(bits(q.float()), bits(r.float())) for q, r in zip(kept, p, strict=True))
    return y


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_codes(format, scale, tiles):
    tiles(CO_256)
    n = 2 * 256
    x, w = rows(SPLITS, TAIL, 144), weights(SPLITS, n, 144)
    row_scale = row_scales(SPLITS, TAIL) if scale else None
    bias = biases(SPLITS, n, exact=False) if scale else None
    y = check_codes(x, w, SPLITS, ACTIVATIONS["swiglu"], FORMATS[format], bias=bias, row_scale=row_scale)
    assert y[: sum(SPLITS)].count_nonzero() > 0.9 * y[: sum(SPLITS)].numel()


@pytest.mark.parametrize("keep", [True, False], ids=["keep", ""])
@pytest.mark.parametrize("kind", [*GATED, "squared_relu"])
def test_codes_of_every_activation(kind, keep, tiles):
    tiles(CO_256)
    splits, wide = (130, 61), 272 if kind == "squared_relu" else 256
    bias = biases(splits, wide, exact=False)
    check_codes(rows(splits, 5, 48), weights(splits, wide, 48), splits, ACTIVATIONS[kind], keep=keep, bias=bias)


def test_codes_of_a_part_of_a_block(tiles):
    """Columns after the last one have no influence on the scale. In the last column, a large bias meets a product."""
    tiles(CO_256)
    splits, n, k = (130, 7), 272, 16
    x = operand_of_rows(torch.ones(sum(splits), k, device=DEVICE).to(CODES["e4m3"]), factors((1, sum(splits)), True))
    codes = drawn((len(splits), n, k), CODES["e4m3"], True)
    codes[:, -1] = -2
    w = operand_of_weights(codes.to(CODES["e4m3"]), torch.ones(len(splits), 1, blocks(n), device=DEVICE))
    bias = torch.zeros(len(splits), n, dtype=BF16, device=DEVICE)
    bias[:, -1] = 16
    y = check_codes(x, w, splits, ACTIVATIONS["squared_relu"], bias=bias)
    assert (y[:, 256:].amax(1) < 200).any(), "columns after the last one would have 256"


def special_rows(count):
    """Rows that pick a column of the weight, and scales of any magnitude: p[r, n] = w[n, r % 16] * scale[r]."""
    of_row = torch.arange(count, device=DEVICE)
    codes = torch.zeros(count, 16, device=DEVICE)
    codes[of_row, of_row % 16] = 1
    each = [1.0, 2.0**-60, 2.0**-126, 2.0**70, 2.0**120, torch.inf, -torch.inf, torch.nan, 0.0, 2.0**-64, 2.0**63]
    scale = torch.tensor(each, device=DEVICE)[of_row // 16 % len(each)]
    return operand_of_rows(codes.to(CODES["e4m3"]), scale[None])


def special_weights(n):
    """Columns of ones, zeros, both, of -1, of any values with ones, and so on: (1, n, 16)."""
    w = torch.randn(1, n, 16, device=DEVICE)
    of_column = torch.arange(n, device=DEVICE)
    w[0, :, 0] = 1
    w[0, :, 1] = 0
    w[0, :, 2] = of_column % 2
    w[0, :, 3] = -1
    w[0, :, 4] = (of_column % 50 != 7).float()
    w[0, :, 5] = (of_column % 3 == 0) * 400.0
    w[0, : n // 2, 6] = 1  # of swiglu: the gate
    w[0, : n // 2, 7] = 0
    w[0, :, 8] = (of_column == 5).float()
    return operand_of_weights(w.to(CODES["e4m3"]), torch.ones(1, 1, blocks(n), device=DEVICE))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["swiglu", "squared_relu"])
def test_codes_of_special_values(kind, format, tiles):
    """Infinities, NaN, zeros and subnormals: some of a block's values, or all of them."""
    tiles(CO_256)
    count, n = 176, 512
    x, w = special_rows(count), special_weights(n)
    y = check_codes(x, w, (count,), ACTIVATIONS[kind], FORMATS[format])
    of_block = y.unflatten(1, (-1, BLOCK))
    for kind_of in (torch.isposinf, torch.isnan, lambda t: t == 0):
        found = kind_of(of_block)
        assert found.all(-1).any(), "all values of a block"
        assert (found.any(-1) & ~found.all(-1)).any(), "some values of a block"
    magnitude = y.abs()[y.isfinite() & (y != 0)]
    assert magnitude.max() > 1e38
    assert magnitude.min() < torch.finfo(BF16).tiny


# ------------------------------------------------------------------------------------------------------ derivatives


@pytest.mark.parametrize("gradient", [False, True], ids=["", "scale and its gradient"])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_derivative(kind, gradient, tiles):
    tiles(CANDIDATES["fp8_derivative"][gradient])
    derivative(a=ACTIVATIONS[kind], scale=gradient, gradient=gradient).check()


@pytest.mark.parametrize("kind", ["swiglu", "gpt-oss", "squared_relu"])
@each("fp8_derivative")
def test_derivative_with_every_tile(config, kind, tiles):
    tiles(config)
    derivative((300, 0, 61, 1, 127), 20, 272, 144, a=ACTIVATIONS[kind], dtype="e5m2").check()


@pytest.mark.parametrize(
    ("scale", "gradient", "keep"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, False)],
    ids=["nothing", "a scale without a gradient", "a scale of one", "no output"],
)
def test_what_a_derivative_gives(scale, gradient, keep, tiles):
    tiles(CO_128)
    derivative(scale=scale, gradient=gradient, keep=keep).check()


@each("fp8_derivative")
def test_partial_sums_stay_within_their_tensor(config, tiles, monkeypatch):
    """They are written without a TMA descriptor, which knows bounds."""
    tiles(config)
    case, guarded = derivative((300, 0, 61), 20, 336, 48), []

    def with_rows_around(shape, **how):
        guarded.append(torch.full((shape[0] + 4, *shape[1:]), torch.nan, **how))
        return guarded[-1][2:-2]

    case.run(DEFAULT)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", with_rows_around)
        case.run(DEFAULT)
    (partial,) = guarded
    assert partial[2:-2, :381].isfinite().all()
    assert partial[2:-2, 381:].isnan().all()
    assert partial[:2].isnan().all()
    assert partial[-2:].isnan().all()


def test_results_end_where_their_tensor_ends(tiles, monkeypatch):
    """Rows are stored by threads, without a TMA descriptor."""
    made = []

    def within(t, shape, **how):
        dtype = how.get("dtype", t.dtype)
        around = torch.zeros((shape[0] + 8, *shape[1:]), dtype=dtype, device=t.device)
        around.view(torch.uint8).fill_(7)
        made.append(around)
        return around[4:-4]

    new_empty = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty",
        lambda t, *shape, **how: within(t, shape, **how) if len(shape) == 2 else new_empty(t, *shape, **how),
    )  # fmt: skip
    splits, tail = (130, 61), 5
    tiles(CO_256_ROWS)
    plain(splits, tail, 272, 144).check()
    derivative(splits, tail, 272, 144, gradient=False).check()
    tiles(CO_256)
    activation(splits, tail, 384, 144).check()
    x, w = rows(splits, tail, 144), weights(splits, 272, 144)
    operands = of(x), of(w), offsets_of(splits), ACTIVATIONS["squared_relu"]
    functions.grouped_gemm_activation(*operands, quantized=fp8_block())
    assert len(made) == 8  # the last one has the scales
    for around in made:
        for edge in (around[:4], around[-4:]):
            assert (edge.contiguous().view(torch.uint8) == 7).all()


# ------------------------------------------------------------------------------------------- codes of the derivatives

ALL_FORMS = (True, True, True)


def check_derivative_codes(
    splits, tail, n=128, k=144, *, kind="swiglu", scale=True, gradient=True, forms=ALL_FORMS, element="e4m3", p=None,
    options=DEFAULT,
):  # fmt: skip
    """Codes and scales are those of the results in bf16, which are returned. ``n`` is I, ``k`` is H."""
    a, offsets = ACTIVATIONS[kind], offsets_of(splits)
    of_grad, of_output = FORMATS[element], FORMATS["e4m3"]
    dy, w = rows(splits, tail, k), weights(splits, n, k)
    if p is None:
        p = torch.randn(sum(splits) + tail, 2 * n if a.gated else n, device=DEVICE).to(BF16)
    p[sum(splits) :] = torch.nan
    row_scale = row_scales(splits, tail) if scale else None
    operands = of(dy), of(w), offsets, p, row_scale
    bound = functions.bind_grouped_gemm_activation_backward(of(dy), of(w), p, row_scale, a, True, gradient, options)
    in_codes = functions.bind_grouped_gemm_activation_backward_codes(
        of(dy), of(w), p, row_scale, a, of_grad, forms, gradient, options
    )
    with nan_in_new_tensors():
        grad, y, grad_scale = bound(*operands)
        written, grad_scale_again = in_codes(*operands)
    each = zip(forms, ((grad, of_grad, -1), (grad, of_grad, -2), (y, of_output, -2)), strict=True)
    for (codes, stored), (t, format, axis) in zip(written, [what for wanted, what in each if wanted], strict=True):
        want = quantize(t, format, axis, offsets=offsets)
        assert codes.dtype is want.data.dtype
        assert torch.equal(bits(codes), bits(want.data))
        assert stored.shape == want.scale.shape
        assert torch.equal(bits(stored), bits(want.scale))
        assert functions.has_strides(stored)
    assert (grad_scale is None) is (grad_scale_again is None) is not gradient
    if gradient:
        assert torch.allclose(grad_scale, grad_scale_again, rtol=1e-4, atol=1e-3, equal_nan=True)
    return grad, y


@pytest.mark.parametrize("gradient", [False, True], ids=["", "scale and its gradient"])
@pytest.mark.parametrize("kind", [*GATED, "squared_relu"])
def test_codes_of_a_derivative(kind, gradient, tiles):
    tiles(CO_256_ROWS)
    for t in check_derivative_codes((130, 0, 61, 1), 21, kind=kind, scale=gradient, gradient=gradient):
        assert t.count_nonzero() > 0.2 * t.numel()


@pytest.mark.parametrize("ragged", RAGGED)
def test_codes_of_a_derivative_for_any_splits(ragged, tiles):
    tiles(CO_256_ROWS)
    if ragged != "no rows":
        check_derivative_codes(*RAGGED[ragged])


@pytest.mark.parametrize("element", CODES)
@pytest.mark.parametrize("forms", [f for f in itertools.product((True, False), repeat=3) if any(f)], ids=str)
def test_forms_of_a_derivative(forms, element, tiles):
    tiles(CO_256_ROWS)
    check_derivative_codes((130, 61), 300, 256, forms=forms, element=element, gradient=False)


def test_codes_of_a_derivative_on_few_sms(tiles):
    """Each CTA has several tiles, and column tiles past the last one."""
    tiles(CO_256_ROWS)
    for options in (KernelOptions(2), KernelOptions(2, "static")):
        check_derivative_codes((300, 0, 61, 1, 127, 258), 20, 384, 272, options=options)


@pytest.mark.parametrize("element", CODES)
@pytest.mark.parametrize("kind", ["swiglu", "squared_relu"])
def test_codes_of_special_derivatives(kind, element, tiles):
    """Infinities, NaN, zeros and values of any magnitude: some of a block's values, or all of them."""
    tiles(CO_256_ROWS)
    splits, n = (176, 90), 128
    wide = 2 * n if ACTIVATIONS[kind].gated else n
    p = torch.randn(sum(splits), wide, device=DEVICE)
    of_row, of_column = torch.arange(len(p), device=DEVICE), torch.arange(wide, device=DEVICE)
    p *= torch.exp2((of_row % 61 - 30).float())[:, None]
    p[of_row % 40 == 3] = torch.nan
    p[of_row % 40 == 4, 5] = torch.inf
    p[of_row % 40 == 5] = 0
    p[:, of_column % 50 == 7] = torch.inf
    p[:, of_column % 50 == 8] = torch.nan
    p[:, of_column % 50 == 9] = 0
    grad, y = check_derivative_codes(splits, 7, n, 48, kind=kind, element=element, p=torch.cat([p, p[:7]]).to(BF16))
    for t in (grad, y):
        for found in (t.isnan(), t == 0, t.isfinite()):
            assert found.any()
    assert y.isposinf().any()


def test_codes_of_a_derivative_end_where_their_tensors_end(tiles, monkeypatch):
    made = []

    def within(t, shape, **how):
        dtype = how.get("dtype", t.dtype)
        around = torch.zeros((shape[0] + 16, *shape[1:]), dtype=dtype, device=t.device)
        around.view(torch.uint8).fill_(7)
        made.append(around)
        return around[8:-8]

    tiles(CO_256_ROWS)
    splits, n = (130, 61), 384
    dy, w, p = rows(splits, 5, 48), weights(splits, n, 48), torch.randn(196, 2 * n, device=DEVICE).to(BF16)
    run = functions.bind_grouped_gemm_activation_backward_codes(
        of(dy), of(w), p, None, ACTIVATIONS["swiglu"], fp8_block(), ALL_FORMS, False, DEFAULT
    )
    new_empty = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty",
        lambda t, *shape, **how: within(t, shape, **how) if len(shape) == 2 else new_empty(t, *shape, **how),
    )  # fmt: skip
    run(of(dy), of(w), offsets_of(splits), p, None)
    assert len(made) == 6
    for around in made:
        for edge in (around[:8], around[-8:]):
            assert (edge.contiguous().view(torch.uint8) == 7).all()


# -------------------------------------------------------------------------------------------------- a GPU's problems


QWEN = {"rows": 262_144, "experts": 128, "hidden": 2048, "intermediate": 768}


def routed(count, experts):
    """Rows per expert under random routing, with an expert without rows, and a tail."""
    load = torch.rand(experts, device=DEVICE) + 0.2
    load[17] = 0
    return torch.bincount(torch.multinomial(load, count - 300, replacement=True), minlength=experts).tolist()


def sampled(splits):
    """Some experts, among them the first and the last with rows, and one without rows."""
    return [0, 17, len(splits) // 2, len(splits) - 1]


def of_expert(t, splits, e):
    first = sum(splits[:e])
    return t[first : first + splits[e]]


@needs_gpu
@each("fp8_plain")
def test_full_size(config, tiles):
    tiles(config)
    splits = routed(QWEN["rows"], QWEN["experts"])
    tail, n, k = QWEN["rows"] - sum(splits), 2 * QWEN["intermediate"], QWEN["hidden"]
    x, w = large_rows(splits, tail, k), large_weights(splits, n, k)
    with nan_in_new_tensors():
        y = functions.grouped_gemm(Codes(*x), Codes(*w), offsets_of(splits))
    assert not y[sum(splits) :].any()
    for e in sampled(splits):
        want = (
            dequantized(of_expert(x[0], splits, e), of_expert(x[1], splits, e), 1)
            @ dequantized(w[0][e], w[1][e], BLOCK).mT
        )
        assert (of_expert(y, splits, e).double() - want).norm() <= TOLERANCE[BF16] * want.norm()


@needs_gpu
def test_full_size_activation_and_derivative(tiles):
    splits = routed(QWEN["rows"], QWEN["experts"])
    tail, inner, hidden = QWEN["rows"] - sum(splits), QWEN["intermediate"], QWEN["hidden"]
    offsets, a = offsets_of(splits), ACTIVATIONS["swiglu"]
    x, w = large_rows(splits, tail, hidden), large_weights(splits, 2 * inner, hidden)
    scale = row_scales(splits, tail)
    tiles(CO_256)
    with nan_in_new_tensors():
        operands = Codes(*x), Codes(*w), offsets, a
        y, p = functions.grouped_gemm_activation(*operands, row_scale=scale)
        codes, of_codes, again = functions.grouped_gemm_activation(*operands, row_scale=scale, quantized=fp8_block())
    assert torch.equal(p, again)
    assert not p[sum(splits) :].any()
    want = quantize(y, fp8_block(), -1, offsets=offsets)
    assert torch.equal(bits(codes), bits(want.data))
    assert torch.equal(of_codes, want.scale)
    for e in sampled(splits):
        q = (
            dequantized(of_expert(x[0], splits, e), of_expert(x[1], splits, e), 1)
            @ dequantized(w[0][e], w[1][e], BLOCK).mT
        )
        assert (of_expert(p, splits, e).double() - q).norm() <= TOLERANCE[BF16] * q.norm()
    dy, v = large_rows(splits, tail, hidden), large_weights(splits, inner, hidden)
    for config in CANDIDATES["fp8_derivative"]:
        tiles(config)
        run = functions.bind_grouped_gemm_activation_backward(Codes(*dy), Codes(*v), p, scale, a, True, True, DEFAULT)
        with nan_in_new_tensors():
            grad, h, grad_scale = run(Codes(*dy), Codes(*v), offsets, p, scale)
        for e in sampled(splits):
            exact = of_expert(p, splits, e).double().requires_grad_()
            d = (
                dequantized(of_expert(dy[0], splits, e), of_expert(dy[1], splits, e), 1)
                @ dequantized(v[0][e], v[1][e], BLOCK).mT
            )
            of_rows = of_expert(scale, splits, e)
            out = act(a, exact)
            (dp,) = torch.autograd.grad(out, exact, scaled(d, of_rows))
            out = out.detach()
            for got, wanted in ((grad, dp), (h, scaled(out, of_rows)), (grad_scale, (d * out).sum(1))):
                got = of_expert(got, splits, e)
                assert (got.double() - wanted).norm() <= TOLERANCE[got.dtype] * wanted.norm()
        assert not any(t[sum(splits) :].any() for t in (grad, h, grad_scale))


def large_rows(splits, tail, k):
    codes = torch.randn(sum(splits) + tail, k, device=DEVICE).to(CODES["e4m3"])
    scale = torch.rand(blocks(k), len(codes) + -len(codes) % 4, device=DEVICE) + 0.1
    codes.view(torch.uint8)[sum(splits) :] = 0x7F
    scale[:, sum(splits) :] = torch.nan
    return codes, scale[:, : len(codes)].mT


def large_weights(splits, n, k):
    codes = (torch.randn(len(splits), n, k, device=DEVICE) / 16).to(CODES["e4m3"])
    scale = torch.rand(len(splits), blocks(k), -(-blocks(n) // 4) * 4, device=DEVICE) + 0.1
    return codes, scale[..., : blocks(n)].mT


def dequantized(codes, scale, across):
    wide = scale.double().repeat_interleave(across, 0).repeat_interleave(BLOCK, 1)
    return codes.double() * wide[: codes.shape[0], : codes.shape[1]]


@needs_gpu
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@of_families
def test_a_graph_follows_the_splits(family, schedule):
    """Replays with other splits than the captured ones. Nothing is NaN here, since any row may become an expert's."""
    make, options = FAMILIES[family], KernelOptions(schedule=schedule)
    splits, others = (5, 0, 300, 7), [(0, 0, 0, 312), (312, 0, 0, 0), (100, 101, 102, 9), (0, 1, 2, 3), (0, 0, 0, 0)]
    case = make(splits, 0, 128, 272)
    case.weight.codes[1].copy_(case.weight.codes[0])
    case.weight.scale[1].copy_(case.weight.scale[0])
    case.run(options)
    results = []
    graph = capture(lambda: results.append(case.run(options)))
    for now in (splits, *others):
        case.offsets.copy_(offsets_of(now))
        for t in results[-1]:
            t.view(torch.uint8).fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        got = [t.clone() for t in results[-1]]
        for a, b in zip(got, case.run(options), strict=True):
            assert torch.equal(a, b)
            assert a[sum(now) :].count_nonzero() == 0
            assert not sum(now) or a[: sum(now)].any()
            assert a.isfinite().all()


@needs_gpu
def test_nothing_waits_for_the_device(no_sync):
    cases = [make() for make in FAMILIES.values()]
    expected = [case.run(DEFAULT) for case in cases]
    with no_sync():
        got = [case.run(DEFAULT) for case in cases]
    for some, wanted in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(some, wanted, strict=True))


@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_repeated_runs_are_the_same_bit_for_bit(family):
    case = FAMILIES[family]((900, 0, 61, 1, 127, 1258, 0, 300), 200, 768, 1040)
    case.check()
    for options in (DEFAULT, KernelOptions(100), KernelOptions(100, "static")):
        first, *others = [case.run(options) for _ in range(20)]
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
