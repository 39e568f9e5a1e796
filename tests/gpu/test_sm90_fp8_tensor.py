"""The products of FP8 codes with one scale per expert: the problems of test_sm90_fp8.py and test_sm90_fp8_wgrad.py.

Scales of experts without rows are NaN.
"""

import itertools

import pytest
import test_sm90_fp8 as fp8
import test_sm90_fp8_wgrad as fp8_wgrad
import torch
from kit.hopper import DEVICE, needs_hopper
from kit.poison import nan_in_new_tensors
from test_sm90_kernels import ACTIVATIONS, offsets_of, padded, product

from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.rows.quantize.format_functions import bind_transpose_rows
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, CO_256, CO_256_ROWS, CO_256_TALL
from fusedmoe.numerics.formats import E4M3, E5M2, amax_by_expert, fp8_tensor, quantize

pytestmark = needs_hopper

BF16, FP32, CODES = fp8.BF16, fp8.FP32, fp8.CODES


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    from fusedmoe.kernels.sm90.epilogue.codes_by_expert import CodesByExpert
    from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN, activation, derivative
    from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK
    from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM
    from fusedmoe.kernels.sm90.gemm.tensor_scales import TensorScaled

    kernels = [RaggedM(TensorScaled(d), c, epilogue=PLAIN) for d in CODES for c in CANDIDATES["fp8_plain"]]
    results = (None, CodesByExpert())
    for name, keep, result in itertools.product((*fp8.GATED, "squared_relu"), (True, False), results):
        a = ACTIVATIONS[name]
        epilogue = activation(a.kind, clamped=a.limit is not None, keep=keep, result=result)
        kernels += [RaggedM(TensorScaled("e4m3"), c, epilogue=epilogue) for c in CANDIDATES["fp8_activation"]]
    for a, gradient in itertools.product(ACTIVATIONS.values(), (True, False)):
        shape = {"clamped": a.limit is not None, "interleaved": a.interleaved}
        epilogue = derivative(a.kind, **shape, keep=True, row_scale=gradient)
        kernels += [RaggedM(TensorScaled("e5m2"), c, epilogue=epilogue) for c in CANDIDATES["fp8_derivative"]]
    outputs = ({"out": "bf16"}, {"out": "fp32"}, {"out": "fp32", "accumulate": True})
    each = itertools.product(CODES, CANDIDATES["fp8_wgrad"], outputs)
    build_ahead([*kernels, *(RaggedK(TensorScaled(dtype), config, **output) for dtype, config, output in each)])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def tiles(monkeypatch):
    def force(config):
        monkeypatch.setattr(products, "choose", lambda problem: config)

    return force


@pytest.mark.parametrize("dtype", CODES)
@fp8.each("fp8_plain")
def test_small_integers_are_exact(config, dtype, tiles):
    tiles(config)
    fp8.plain(dtype=dtype, biased=dtype == "e4m3", scale=dtype == "e5m2", exact=True, by_expert=True).check()


@fp8.each("fp8_plain")
def test_any_codes_and_scales(config, tiles):
    tiles(config)
    fp8.plain(dtype="e5m2", biased=True, scale=True, by_expert=True).check()


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("name", [*fp8.GATED, "squared_relu"])
def test_activations(name, exact):
    fp8.activation(a=ACTIVATIONS[name], biased=True, scale=True, exact=exact, by_expert=True).check()


@pytest.mark.parametrize("n", [16, 80, 144, 400])
def test_halves_of_any_width(n):
    """Gate and up need no whole blocks."""
    fp8.activation(n=n, by_expert=True).check()


@pytest.mark.parametrize("name", ACTIVATIONS)
@fp8.each("fp8_derivative")
def test_derivatives(config, name, tiles):
    tiles(config)
    fp8.derivative(a=ACTIVATIONS[name], dtype="e5m2", by_expert=True).check()


@pytest.mark.parametrize("ragged", fp8.RAGGED)
@fp8.of_families
def test_splits(family, ragged):
    splits, tail = fp8.RAGGED[ragged]
    fp8.FAMILIES[family](splits, tail, 128, 144, by_expert=True).check()


@fp8.of_families
def test_options_change_no_bit(family):
    """Few CTAs, each with many tiles, under either schedule."""
    case = fp8.FAMILIES[family]((300, 0, 61, 258, 5), 7, 384, 272, by_expert=True)
    expected = case.run(KernelOptions())
    for options in (KernelOptions(2), KernelOptions(2, "static"), KernelOptions(schedule="static")):
        assert all(torch.equal(a, b) for a, b in zip(case.run(options), expected, strict=True))


@pytest.mark.parametrize("power_of_two", [False, True], ids=["", "power of two"])
def test_of_quantized_tensors(power_of_two, tiles):
    """Rows and their weight gradient, as the quantize step of plain PyTorch writes them."""
    tiles(CO_256_ROWS)
    splits, tail = fp8.SPLITS, fp8.TAIL
    offsets = offsets_of(splits)
    x, dy = (torch.randn(sum(splits) + tail, width, device=DEVICE).to(BF16) for width in (fp8.K, fp8.N))
    x[sum(splits) :], dy[sum(splits) :] = torch.nan, torch.nan
    w = torch.randn(len(splits), fp8.N, fp8.K, device=DEVICE).to(BF16)
    forward, gradient = fp8_tensor(E4M3, power_of_two), fp8_tensor(E5M2, power_of_two)
    a, b = quantize(x, forward, -1, offsets=offsets), quantize(w, forward, -1)
    y = products.grouped_gemm(Codes(a.data, a.scale), Codes(b.data, b.scale), offsets)
    want = padded(product(a.dequantize(FP32), b.dequantize(FP32), splits), tail)
    assert (y.double() - want).norm() < fp8.TOLERANCE[BF16] * want.norm()

    tiles(CO_256)
    a, b = quantize(dy, gradient, -2, offsets=offsets), quantize(x, forward, -2, offsets=offsets)
    dw = products.grouped_wgrad(Codes(a.data, a.scale), Codes(b.data, b.scale), offsets)
    dy, x = (t.dequantize(FP32)[: sum(splits)].double().split(splits) for t in (a, b))
    want = torch.stack([p.T @ q for p, q in zip(dy, x, strict=True)])
    assert (dw.double() - want).norm() < fp8.TOLERANCE[BF16] * want.norm()


# ------------------------------------------------------------------------------------------------ delayed scaling


def check_codes(x, w, splits, a, element="e4m3", keep=True, bias=None, row_scale=None, encode=None):
    """Codes and amax are those of the result in bf16, which is returned; the form by columns has the same codes."""
    offsets = offsets_of(splits)
    rows, format = x.codes.shape[0], fp8_tensor({"e4m3": E4M3, "e5m2": E5M2}[element])
    bound = [
        products.bind_grouped_gemm_activation(fp8.of(x), fp8.of(w), bias, row_scale, a, keep, DEFAULT, quantized=result)
        for result in (None, format)
    ]
    operands = fp8.of(x), fp8.of(w), bias, offsets, row_scale
    amax = torch.zeros(len(splits), device=DEVICE)
    if encode is None:
        encode = torch.rand(len(splits), device=DEVICE) * 40 + 1  # some values saturate
    with nan_in_new_tensors():
        y, *p = bound[0](*operands)
        codes, *kept = bound[1](*operands, encode, amax)
        columns = bind_transpose_rows(codes, offsets)(codes, offsets)
    for axis, got in ((-1, codes), (-2, columns)):
        want = quantize(y, format, axis, offsets=offsets, encode=encode).data
        assert got.shape == want.shape
        assert got.dtype is want.dtype
        assert torch.equal(fp8.bits(got), fp8.bits(want))
    assert torch.equal(amax, amax_by_expert(y, offsets))
    assert len(p) == len(kept) == keep
    assert all(torch.equal(fp8.bits(q.float()), fp8.bits(r.float())) for q, r in zip(kept, p, strict=True))
    assert len(y) == rows
    return y


@pytest.mark.parametrize("element", CODES)
@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_codes(element, scale):
    splits, tail, n = fp8.SPLITS, fp8.TAIL, 2 * 208
    x, w = fp8.rows(splits, tail, 144, by_expert=True), fp8.weights(splits, n, 144, by_expert=True)
    row_scale = fp8.row_scales(splits, tail) if scale else None
    bias = fp8.biases(splits, n, exact=False) if scale else None
    y = check_codes(x, w, splits, ACTIVATIONS["swiglu"], element, bias=bias, row_scale=row_scale)
    assert y[: sum(splits)].count_nonzero() > 0.9 * y[: sum(splits)].numel()


@pytest.mark.parametrize("keep", [True, False], ids=["keep", ""])
@pytest.mark.parametrize("kind", [*fp8.GATED, "squared_relu"])
def test_codes_of_every_activation(kind, keep):
    splits, wide = (130, 61), 272 if kind == "squared_relu" else 288
    x, w = fp8.rows(splits, 5, 48, by_expert=True), fp8.weights(splits, wide, 48, by_expert=True)
    check_codes(x, w, splits, ACTIVATIONS[kind], keep=keep, bias=fp8.biases(splits, wide, exact=False))


@pytest.mark.parametrize("ragged", fp8.RAGGED)
def test_codes_of_any_splits(ragged):
    splits, tail = fp8.RAGGED[ragged]
    x, w = fp8.rows(splits, tail, 16, by_expert=True), fp8.weights(splits, 64, 16, by_expert=True)
    check_codes(x, w, splits, ACTIVATIONS["squared_relu"])


def test_neither_other_rows_nor_other_columns_count():
    """A tile has rows of the next expert, whose values would be larger here, and columns after the last one."""
    splits, n, k = (3, 130, 2), 272, 16
    codes = torch.full((sum(splits), k), 16.0, device=DEVICE)
    codes[:3], codes[-2:] = 1, 2
    x = fp8.Operand(codes.to(CODES["e4m3"]), torch.ones(3, device=DEVICE), None)
    w = fp8.Operand(torch.ones(3, n, k, device=DEVICE).to(CODES["e4m3"]), torch.ones(3, device=DEVICE), None)
    bias = torch.zeros(3, n, dtype=BF16, device=DEVICE)
    bias[:, -1] = -256  # would be the bias of the columns after it
    bias[0, -2] = 16  # the largest value of the first expert
    y = check_codes(x, w, splits, ACTIVATIONS["squared_relu"], bias=bias)
    assert y[:3].max() == 32**2


def test_codes_of_special_values():
    """Infinities and NaN become NaN, and do not count; a large factor saturates."""
    splits, n, k = (5, 1, 130), 48, 16
    x, w = fp8.rows(splits, 0, k, exact=True, by_expert=True), fp8.weights(splits, n, k, True, by_expert=True)
    bias = torch.zeros(3, n, dtype=BF16, device=DEVICE)
    bias[0, :4] = torch.tensor([torch.inf, torch.nan, 1e18, 1e-30], device=DEVICE)
    bias[1] = torch.nan
    encode = torch.tensor([3e38, 2.0, 2.0**-100], device=DEVICE)
    y = check_codes(x, w, splits, ACTIVATIONS["squared_relu"], bias=bias, encode=encode)
    assert y[:5, :2].isfinite().logical_not().all()


# ------------------------------------------------------------------------------------------------ weight gradients


@pytest.mark.parametrize("output", fp8_wgrad.OUTPUTS)
@pytest.mark.parametrize("dtype", CODES)
@fp8_wgrad.CONFIGS
def test_weight_gradients_of_small_integers_are_exact(config, dtype, output, tiles):
    tiles(config)
    fp8_wgrad.Problem(dtype=dtype, by_expert=True, **fp8_wgrad.OUTPUTS[output]).check()


@pytest.mark.parametrize("output", fp8_wgrad.OUTPUTS)
@pytest.mark.parametrize("config", [CO_256, CO_256_TALL], ids=lambda config: config.name)
def test_weight_gradients_of_any_codes_and_scales(config, output, tiles):
    tiles(config)
    settings = fp8_wgrad.OUTPUTS[output]
    case = fp8_wgrad.Problem((300, 0, 61, 128), dtype="e5m2", exact=False, by_expert=True, **settings)
    for got, want in zip(case.run(), case.want, strict=True):
        assert (got.double() - want).norm() <= fp8_wgrad.TOLERANCE[case.dtype] * want.norm()


@pytest.mark.parametrize("output", fp8_wgrad.OUTPUTS)
@pytest.mark.parametrize("ragged", fp8_wgrad.RAGGED)
def test_splits_of_weight_gradients(ragged, output):
    splits, tail = fp8_wgrad.RAGGED[ragged]
    fp8_wgrad.Problem(splits, tail, 48, 80, by_expert=True, **fp8_wgrad.OUTPUTS[output]).check()
