"""Products of FP8 codes whose results are codes too: the bits of `fusedmoe.quantize`, of the same results in bf16.

Axes: R rows sorted by expert, E experts, K contraction, N features out, I intermediate features, H hidden features.
"""

import itertools

import pytest
import torch
from kit.hopper import DEVICE, needs_hopper
from kit.hopper_codes import ALL_FORMS, BY_EXPERT, FORMATS, check_codes, check_derivative_codes
from kit.hopper_products import (
    ACTIVATIONS,
    BF16,
    SIDE_BY_SIDE,
    SPLITS,
    TAIL,
    Operand,
    drawn,
    factors,
    kernels_of,
    offsets_of,
    operand_of_rows,
    operand_of_weights,
    row_scales,
    rows,
    weights,
)
from kit.poison import guarded_tensors

from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.numerics.formats import E4M3, fp8_block

pytestmark = needs_hopper

RAGGED = {
    "around blocks": ((0, 1, 127, 128, 129, 0, 255, 256, 257, 2, 0), 37),
    "one takes all": ((0, 0, 0, 400, 0), 5),
    "no tail": ((100, 28, 0, 128), 0),
    "a tail of several tiles": ((100, 30), 700),
    "only a tail": ((0, 0, 0), 150),
    "one row": ((1,), 0),
    "many experts": (tuple(e * e % 5 for e in range(70)), 9),
}
of_ragged = pytest.mark.parametrize("ragged", RAGGED)


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    def calls():
        for name, keep, scales in NAMES:
            yield lambda n=name, k=keep, s=scales: check_codes(*small(128, s), (1,), n, keep=k, compared=False)
        for format in FORMATS.values():
            yield lambda f=format: check_codes(*small(128, "blocks"), (1,), "swiglu", f, compared=False)
        for name, gradient in DERIVATIVES:
            settings = {"name": name, "scale": gradient, "gradient": gradient}
            yield lambda s=settings: check_derivative_codes((1,), 0, 128, 16, **s, compared=False)

    build_ahead(lambda: kernels_of(calls()))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def small(inner, scales):
    return rows((1,), 0, 16, f"e4m3 {scales}"), weights((1,), 2 * inner, 16, f"e4m3 {scales}")


# each activation with each kind of scales, with and without the preactivation in turns
NAMES = [
    (name, (number + (scales == "blocks")) % 2 == 0, scales)
    for (number, name), scales in itertools.product(enumerate(SIDE_BY_SIDE), ("blocks", "tensor"))
]
DERIVATIVES = [*((name, number % 2 == 0) for number, name in enumerate(SIDE_BY_SIDE)), ("swiglu", False)]


# ---- activations


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scale and bias"])
@pytest.mark.parametrize("format", [*FORMATS.values(), *BY_EXPERT.values()], ids=[*FORMATS, "tensor", "tensor, e5m2"])
def test_codes(format, scaled):
    kind, n = ("e4m3 blocks", 512) if format.block[1] else ("e4m3 tensor", 416)
    x, w = rows(SPLITS, TAIL, 144, kind), weights(SPLITS, n, 144, kind)
    scale = row_scales(SPLITS, TAIL) if scaled else None
    bias = drawn((len(SPLITS), n), BF16).to(BF16) if scaled else None
    y = check_codes(x, w, SPLITS, "swiglu", format, bias=bias, scale=scale)
    assert y[: sum(SPLITS)].count_nonzero() > 0.9 * y[: sum(SPLITS)].numel()


@pytest.mark.parametrize(("name", "keep", "scales"), NAMES)
def test_codes_of_every_activation(name, keep, scales):
    kind = f"e4m3 {scales}"
    splits, wide = (130, 61), 272 if name == "squared_relu" else 256 if "blocks" in kind else 288
    bias = drawn((2, wide), BF16).to(BF16)
    check_codes(rows(splits, 5, 48, kind), weights(splits, wide, 48, kind), splits, name, keep=keep, bias=bias)


@of_ragged
def test_codes_of_any_splits(ragged):
    splits, tail = RAGGED[ragged]
    for kind in ("e4m3 blocks", "e4m3 tensor"):
        check_codes(rows(splits, tail, 16, kind), weights(splits, 64, 16, kind), splits, "squared_relu")


def test_codes_of_a_part_of_a_block():
    """Columns after the last one have no influence on the scale. In the last column, a large bias meets a product."""
    splits, n, k = (130, 7), 272, 16
    x = operand_of_rows(torch.ones(137, k, device=DEVICE).to(E4M3.dtype), factors((1, 137), True))
    codes = drawn((2, n, k), E4M3.dtype, True)
    codes[:, -1] = -2
    w = operand_of_weights(codes.to(E4M3.dtype), torch.ones(2, 1, 3, device=DEVICE))
    bias = torch.zeros(2, n, dtype=BF16, device=DEVICE)
    bias[:, -1] = 16
    y = check_codes(x, w, splits, "squared_relu", bias=bias)
    assert (y[:, 256:].amax(1) < 200).any(), "columns after the last one would have 256"


def test_neither_other_rows_nor_other_columns_count():
    """A tile has rows of the next expert, whose values would be larger here, and columns after the last one."""
    splits, n, k = (3, 130, 2), 272, 16
    codes = torch.full((sum(splits), k), 16.0, device=DEVICE)
    codes[:3], codes[-2:] = 1, 2
    ones = torch.ones(3, device=DEVICE)
    x = Operand(Codes(codes.to(E4M3.dtype), ones), codes)
    w = Operand(Codes(torch.ones(3, n, k, device=DEVICE).to(E4M3.dtype), ones), codes)
    bias = torch.zeros(3, n, dtype=BF16, device=DEVICE)
    bias[:, -1] = -256  # would be the bias of the columns after it
    bias[0, -2] = 16  # the largest value of the first expert
    y = check_codes(x, w, splits, "squared_relu", bias=bias)
    assert y[:3].max() == 32**2


def special_rows(count):
    """Rows that pick a column of the weight, and scales of any magnitude: p[r, n] = w[n, r % 16] * scale[r]."""
    of_row = torch.arange(count, device=DEVICE)
    codes = torch.zeros(count, 16, device=DEVICE)
    codes[of_row, of_row % 16] = 1
    each = [1.0, 2.0**-60, 2.0**-126, 2.0**70, 2.0**120, torch.inf, -torch.inf, torch.nan, 0.0, 2.0**-64, 2.0**63]
    scale = torch.tensor(each, device=DEVICE)[of_row // 16 % len(each)]
    return operand_of_rows(codes.to(E4M3.dtype), scale[None])


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
    return operand_of_weights(w.to(E4M3.dtype), torch.ones(1, 1, n // 128, device=DEVICE))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["swiglu", "squared_relu"])
def test_codes_of_special_values(name, format):
    """Infinities, NaN, zeros and subnormals: some of a block's values, or all of them."""
    y = check_codes(special_rows(176), special_weights(512), (176,), name, FORMATS[format])
    of_block = y.unflatten(1, (-1, 128))
    for kind_of in (torch.isposinf, torch.isnan, lambda t: t == 0):
        found = kind_of(of_block)
        assert found.all(-1).any(), "all values of a block"
        assert (found.any(-1) & ~found.all(-1)).any(), "some values of a block"
    magnitude = y.abs()[y.isfinite() & (y != 0)]
    assert magnitude.max() > 1e38
    assert magnitude.min() < torch.finfo(BF16).tiny


def test_codes_by_expert_of_special_values():
    """Infinities and NaN become NaN, and do not count; a large factor saturates."""
    splits, n, kind = (5, 1, 130), 48, "e4m3 tensor"
    x, w = rows(splits, 0, 16, kind, True), weights(splits, n, 16, kind, exact=True)
    bias = torch.zeros(3, n, dtype=BF16, device=DEVICE)
    bias[0, :4] = torch.tensor([torch.inf, torch.nan, 1e18, 1e-30], device=DEVICE)
    bias[1] = torch.nan
    encode = torch.tensor([3e38, 2.0, 2.0**-100], device=DEVICE)
    y = check_codes(x, w, splits, "squared_relu", bias=bias, encode=encode)
    assert y[:5, :2].isfinite().logical_not().all()


# ---- derivatives


@pytest.mark.parametrize(("name", "gradient"), DERIVATIVES)
def test_codes_of_a_derivative(name, gradient):
    for t in check_derivative_codes((130, 0, 61, 1), 21, name=name, scale=gradient, gradient=gradient):
        assert t.count_nonzero() > 0.2 * t.numel()


@of_ragged
def test_codes_of_a_derivative_for_any_splits(ragged):
    check_derivative_codes(*RAGGED[ragged])


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("forms", [f for f in itertools.product((True, False), repeat=3) if any(f)], ids=str)
def test_forms_of_a_derivative(forms, element):
    check_derivative_codes((130, 61), 300, 256, forms=forms, element=element, gradient=False)


@pytest.mark.parametrize("options", [KernelOptions(2), KernelOptions(1000, "static")], ids=str)
def test_codes_of_a_derivative_on_few_sms(options):
    """Each CTA has several tiles, and column tiles past the last one."""
    check_derivative_codes((300, 0, 61, 1, 127, 258), 20, 384, 272, options=options)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("name", ["swiglu", "squared_relu"])
def test_codes_of_special_derivatives(name, element):
    """Infinities, NaN, zeros and values of any magnitude: some of a block's values, or all of them."""
    splits, n = (176, 90), 128
    wide = 2 * n if ACTIVATIONS[name].gated else n
    p = torch.randn(sum(splits), wide, device=DEVICE)
    of_row, of_column = torch.arange(len(p), device=DEVICE), torch.arange(wide, device=DEVICE)
    p *= torch.exp2((of_row % 61 - 30).float())[:, None]
    p[of_row % 40 == 3] = torch.nan
    p[of_row % 40 == 4, 5] = torch.inf
    p[of_row % 40 == 5] = 0
    p[:, of_column % 50 == 7] = torch.inf
    p[:, of_column % 50 == 8] = torch.nan
    p[:, of_column % 50 == 9] = 0
    grad, y = check_derivative_codes(splits, 7, n, 48, name=name, element=element, p=torch.cat([p, p[:7]]).to(BF16))
    for t in (grad, y):
        for found in (t.isnan(), t == 0, t.isfinite()):
            assert found.any()
    assert y.isposinf().any()


def test_codes_end_where_their_tensors_end(monkeypatch):
    splits, count = (130, 61), 196
    dy, w = rows(splits, 5, 48, "e4m3 blocks").given, weights(splits, 384, 48, "e4m3 blocks").given
    p, offsets = drawn((count, 768), BF16).to(BF16), offsets_of(splits)
    a, reads = ACTIVATIONS["swiglu"], products.bind_grouped_gemm_activation_backward_codes
    backward = reads(dy, w, p, None, a, fp8_block(), ALL_FORMS, False, DEFAULT)
    forward = products.bind_grouped_gemm_activation(
        dy, w, None, None, ACTIVATIONS["squared_relu"], True, DEFAULT, quantized=fp8_block()
    )
    check = guarded_tensors(monkeypatch, torch.Tensor, "new_empty")
    backward(dy, w, offsets, p, None)
    forward(dy, w, None, offsets, None)
    shapes = check()
    assert len(shapes) == 6 + 3  # codes and scales of three forms; the preactivation, codes and scales
    assert {(count, 768), (count, 384)} <= {*shapes}
