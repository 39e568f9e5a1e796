"""The Hopper matrix products against fp64 of the exact operands, and bit for bit where a product only copies.

Whatever may not be read is NaN: rows after the last expert's, and the memory that results are written to. Tolerances
are about twice what rounding a result leaves; zeros, or one wrong row, are far outside.

Axes: R rows sorted by expert, E experts, K contraction, N features out, I intermediate features, H hidden features.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kit.hopper import DEVICE, needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors
from test_async import capture
from torch import Tensor

from fusedmoe.kernels.build import shipped
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.sm90 import launch, products
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, PP_128, PP_192
from fusedmoe.numerics.activations import Activation

pytestmark = needs_hopper

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 4e-3, FP16: 6e-4, FP32: 1e-5}  # of norms
SPLITS, TAIL = (130, 0, 61, 1, 0, 27), 21
N, K = 200, 136  # 192 and a bit, two tiles of 64 and a bit

ACTIVATIONS = {
    "swiglu": Activation("swiglu"),
    "clamped": Activation("swiglu", limit=0.75, alpha=1.702, offset=1.0),
    "interleaved": Activation("swiglu", interleaved=True),
    "gpt-oss": Activation("swiglu", limit=0.75, alpha=1.702, offset=1.0, interleaved=True),
    "geglu_tanh": Activation("geglu_tanh"),
    "geglu_erf": Activation("geglu_erf"),
    "reglu": Activation("reglu"),
    "squared_relu": Activation("squared_relu"),
}


def named(*arguments):
    """A readable id of one parameter."""
    return " ".join(str(a).removeprefix("torch.") for a in arguments)


# ---------------------------------------------------------------------------------------------------- preparations


def not_shipped():
    """Kernels that tests here want besides the shipped ones."""
    from fusedmoe.kernels.sm90.epilogue.outputs import activation, derivative
    from fusedmoe.kernels.sm90.gemm.operands import Plain
    from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM

    def swiglu(clamped=False, interleaved=True, keep=True):
        return activation("swiglu", clamped=clamped, interleaved=interleaved, keep=keep)

    def backward(kind="swiglu", clamped=False, interleaved=False, keep=True, scaled=True):
        return derivative(kind, clamped=clamped, interleaved=interleaved, keep=keep, row_scale=scaled)

    wanted = [("k", PP_192, swiglu(clamped, keep=keep)) for clamped in (False, True) for keep in (False, True)]
    wanted += [
        ("n", PP_192, activation("squared_relu", keep=True)),
        ("k", PP_192, backward()),
        ("n", PP_192, backward(keep=False)),
        ("n", PP_192, backward("squared_relu", keep=False)),
        ("n", PP_192, backward(interleaved=True)),
        ("n", PP_192, backward(interleaved=True, scaled=False)),
        ("n", PP_192, backward(clamped=True, interleaved=True, keep=False)),
    ]
    wanted += [("n", config, backward(clamped=True, interleaved=True)) for config in CANDIDATES["derivative"]]
    wanted += [("n", config, backward("geglu_tanh")) for config in CANDIDATES["heavy_derivative"]]
    wanted += [
        ("n", PP_128, swiglu(True, interleaved=False)),
        ("n", PP_128, activation("geglu_tanh", keep=True)),
    ]
    kernels = [RaggedM(Plain("bf16"), config, b_major=major, epilogue=epilogue) for major, config, epilogue in wanted]
    return [kernel for kernel in kernels if kernel not in shipped.shipped("sm_90a")]


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    build_ahead([*shipped.shipped("sm_90a"), *not_shipped()])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def training_tiles(activation):
    """Tiles that kernels with this activation's derivative are shipped with."""
    return PP_128 if activation.heavy else PP_192


def test_new_tensors_are_full_of_nan(device):
    with nan_in_new_tensors():
        x = torch.empty(9, dtype=BF16, device=device)
        assert x.isnan().all()
        assert x.new_empty(2, 5).isnan().all()
        assert torch.empty_like(x).isnan().all()


# --------------------------------------------------------------------------------------------- problems and answers


class Case(NamedTuple):
    """A call, and its results in fp64; rows of zeros have to be exact."""

    run: Callable[[KernelOptions], tuple[Tensor, ...]]
    want: tuple[Tensor, ...]

    def check(self, options=DEFAULT):
        with nan_in_new_tensors():
            results = self.run(options)
        for got, want in zip(results, self.want, strict=True):
            assert_close(got, want)


def assert_close(got, want):
    assert got.shape == want.shape
    zero = ~want.reshape(len(want), -1).any(1)
    assert not got[zero].any(), "rows of zeros: those after the last expert's, or an expert's without rows"
    if not zero.all():
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < TOLERANCE[got.dtype]


def offsets_of(splits):
    return torch.tensor(list(itertools.accumulate(splits)), dtype=torch.int32, device=DEVICE)


def rows(splits, tail, *width, dtype=BF16):
    """Random rows, then NaN."""
    x = torch.randn(sum(splits) + tail, *width, device=DEVICE).to(dtype)
    x[sum(splits) :] = torch.nan
    return x


def weights(experts, n, k, major="k", dtype=BF16):
    shape = (experts, n, k) if major == "k" else (experts, k, n)
    w = (torch.randn(shape, device=DEVICE) / math.sqrt(k)).to(dtype)
    return w if major == "k" else w.mT


def factors(splits, tail, dtype):
    return None if dtype is None else rows(splits, tail, dtype=FP32).sigmoid().to(dtype)


def product(x, weight, splits, bias=None):
    """fp64, one expert at a time, without the rows after the last one's."""
    parts = [part.double() @ w.double().T for part, w in zip(x[: sum(splits)].split(splits), weight, strict=True)]
    if bias is not None:
        parts = [part + b.double() for part, b in zip(parts, bias, strict=True)]
    return torch.cat(parts)


def phi(kind, g, alpha):
    x = alpha * g
    if kind == "swiglu":
        return g * torch.sigmoid(x)
    if kind == "geglu_tanh":
        return g * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "geglu_erf":
        return g * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return g.relu()


def act(a, p):
    if not a.gated:
        return p.relu().square()
    gate, up = (p[:, ::2], p[:, 1::2]) if a.interleaved else p.chunk(2, dim=-1)
    if a.limit is not None:  # not clamp: what its gradient is on the bound depends on torch's version
        gate = torch.where(gate > a.limit, a.limit, gate)
        up = torch.where(up > a.limit, a.limit, torch.where(up < -a.limit, -a.limit, up))
    return phi(a.kind, gate, a.alpha) * (up + a.offset)


def scaled(y, scale):
    return y if scale is None else y * scale[: len(y)].double().reshape(-1, 1)


def padded(y, tail):
    return torch.cat((y, y.new_zeros(tail, *y.shape[1:])))


def plain(splits=SPLITS, tail=TAIL, n=N, k=K, *, dtype=BF16, major="k", biased=False, scale=None):
    x, w = rows(splits, tail, k, dtype=dtype), weights(len(splits), n, k, major, dtype)
    bias = torch.randn(len(splits), n, device=DEVICE).to(dtype) if biased else None
    scale, offsets = factors(splits, tail, scale), offsets_of(splits)

    def run(options):
        return (products.grouped_gemm(x, w, offsets, bias=bias, row_scale=scale, options=options),)

    return Case(run, (padded(scaled(product(x, w, splits, bias), scale), tail),))


def activation(
    splits=SPLITS, tail=TAIL, n=N, k=K, *, a=ACTIVATIONS["swiglu"], dtype=BF16, major="k", biased=False, scale=None,
    keep=True,
):  # fmt: skip
    """``n`` is I."""
    wide = 2 * n if a.gated else n
    x, w = rows(splits, tail, k, dtype=dtype), weights(len(splits), wide, k, major, dtype)
    bias = torch.randn(len(splits), wide, device=DEVICE).to(dtype) if biased else None
    scale, offsets = factors(splits, tail, scale), offsets_of(splits)

    def run(options):
        return products.grouped_gemm_activation(
            x, w, offsets, a, bias=bias, row_scale=scale, keep_preactivation=keep, options=options
        )

    p = product(x, w, splits, bias)
    want = padded(scaled(act(a, p), scale), tail), padded(p, tail)
    return Case(run, want if keep else want[:1])


def derivative(
    splits=SPLITS, tail=TAIL, n=N, k=K, *, a=ACTIVATIONS["swiglu"], dtype=BF16, major="n", scale=FP32, gradient=True,
    keep=True,
):  # fmt: skip
    """``n`` is I, ``k`` is H; ``major`` "n" is the weight as `GroupedLinear` stores it."""
    dy, w = rows(splits, tail, k, dtype=dtype), weights(len(splits), n, k, major, dtype).mT
    p = rows(splits, tail, 2 * n if a.gated else n, dtype=dtype)
    scale, offsets = factors(splits, tail, scale), offsets_of(splits)

    def run(options):
        grad, y, grad_scale = products.grouped_gemm_activation_backward(
            dy, w, offsets, p, a, row_scale=scale, want_output=keep, want_row_scale_grad=gradient, options=options
        )
        assert (y is not None) is keep
        assert (grad_scale is not None) is gradient
        return tuple(t for t in (grad, y, grad_scale) if t is not None)

    exact = p[: sum(splits)].double().requires_grad_()
    d, y = product(dy, w.mT, splits), act(a, exact)
    (grad,) = torch.autograd.grad(y, exact, scaled(d, scale))
    y = y.detach()
    want = [grad, *([scaled(y, scale)] if keep else []), *([(d * y).sum(1)] if gradient else [])]
    return Case(run, tuple(padded(t, tail) for t in want))


def wgrad(splits=SPLITS, tail=TAIL, n=N, k=K, *, dtype=BF16, out=None, accumulate=False):
    dy, x = rows(splits, tail, n, dtype=dtype), rows(splits, tail, k, dtype=dtype)
    before, offsets = torch.randn(len(splits), n, k, device=DEVICE, dtype=out or dtype), offsets_of(splits)

    def run(options):
        into = before.clone() if accumulate else None
        dw = products.grouped_wgrad(dy, x, offsets, out=into, dtype=out, accumulate=accumulate, options=options)
        assert into is None or dw is into
        return (dw,)

    used = sum(splits)
    pairs = zip(dy[:used].double().split(splits), x[:used].double().split(splits), strict=True)
    want = torch.stack([a.T @ b for a, b in pairs])
    return Case(run, (want + before.double() if accumulate else want,))


# what is shipped with every tile that `choose` may pick
FAMILIES = {"plain": plain, "activation": activation, "derivative": derivative, "wgrad": wgrad}
of_families = pytest.mark.parametrize("family", FAMILIES)


# ------------------------------------------------------------------------------------------------------ each function


@pytest.mark.parametrize("scale", [None, FP32, BF16], ids=["", "fp32 scale", "bf16 scale"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("major", ["k", "n"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=named)
def test_grouped_gemm(dtype, major, biased, scale, tiles):
    tiles(PP_192)
    plain(dtype=dtype, major=major, biased=biased, scale=scale).check()


@pytest.mark.parametrize("scale", [None, FP32], ids=["", "scale"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("keep", [True, False], ids=["keep", ""])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_grouped_gemm_activation(kind, keep, biased, scale, tiles):
    tiles(PP_192)
    activation(a=ACTIVATIONS[kind], keep=keep, biased=biased, scale=scale).check()


@pytest.mark.parametrize(("kind", "keep"), [("gpt-oss", True), ("gpt-oss", False), ("squared_relu", True)])
def test_grouped_gemm_activation_of_weights_with_unit_stride_along_n(kind, keep, tiles):
    tiles(PP_192)
    activation(a=ACTIVATIONS[kind], keep=keep, major="n", biased=True, scale=FP32).check()


@pytest.mark.parametrize(
    ("kind", "keep"), [("swiglu", True), ("swiglu", False), ("clamped", True), ("geglu_tanh", True)]
)
@pytest.mark.parametrize("n", [8, 328, 424])  # of columns that end anywhere in a load's 64
def test_gate_and_up_side_by_side_with_unit_stride_along_n(n, kind, keep, tiles):
    tiles(PP_128)
    activation(n=n, a=ACTIVATIONS[kind], keep=keep, major="n", biased=True, scale=FP32).check()


def test_gate_and_up_side_by_side_in_fp16(tiles):
    tiles(PP_128)
    activation(dtype=FP16, major="n").check()


@pytest.mark.parametrize("gradient", [False, True], ids=["", "scale and its gradient"])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_derivative(kind, gradient, tiles):
    tiles(training_tiles(ACTIVATIONS[kind]))
    derivative(a=ACTIVATIONS[kind], scale=FP32 if gradient else None, gradient=gradient).check()


@pytest.mark.parametrize("kind", ["swiglu", "gpt-oss", "squared_relu"])
def test_derivative_without_the_activation_again(kind, tiles):
    tiles(training_tiles(ACTIVATIONS[kind]))
    derivative(a=ACTIVATIONS[kind], keep=False).check()


@pytest.mark.parametrize(
    ("scale", "gradient", "keep", "major"),
    [
        (None, False, False, "n"),
        (FP32, False, True, "n"),  # somebody else's scale
        (None, True, True, "n"),  # a scale of one
        (BF16, True, True, "n"),
        (FP16, False, False, "n"),
        (FP32, True, True, "k"),
    ],
    ids=named,
)
def test_derivative_of_swiglu(scale, gradient, keep, major, tiles):
    tiles(PP_192)
    derivative(scale=scale, gradient=gradient, keep=keep, major=major).check()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=named)
@pytest.mark.parametrize("make", [activation, derivative], ids=["activation", "derivative"])
def test_dtypes(make, dtype, tiles):
    tiles(PP_192)
    make(dtype=dtype, **({"scale": None, "gradient": False} if make is derivative else {})).check()


@pytest.mark.parametrize(
    ("dtype", "out", "accumulate"),
    [(BF16, None, False), (FP16, None, False), (BF16, FP32, False), (BF16, FP32, True), (BF16, None, True),
     (FP16, None, True)],
    ids=named,
)  # fmt: skip
def test_grouped_wgrad(dtype, out, accumulate, tiles):
    tiles(PP_192)
    wgrad(dtype=dtype, out=out, accumulate=accumulate).check()


def test_accumulating_leaves_an_expert_without_rows_as_it_is(device, tiles):
    tiles(PP_192)
    dy, x = rows(SPLITS, TAIL, N), rows(SPLITS, TAIL, K)
    before = torch.randn(len(SPLITS), N, K, device=device)
    before[1] = torch.nan
    after = products.grouped_wgrad(dy, x, offsets_of(SPLITS), out=before.clone(), accumulate=True)
    empty = torch.tensor([count == 0 for count in SPLITS], device=device)
    assert torch.equal(after[empty].view(torch.int32), before[empty].view(torch.int32))
    assert (after[~empty] != before[~empty]).any((1, 2)).all()


def test_accumulating_twice_adds_twice(tiles):
    tiles(PP_192)
    dy, x, offsets = rows(SPLITS, TAIL, N), rows(SPLITS, TAIL, K), offsets_of(SPLITS)
    once = products.grouped_wgrad(dy, x, offsets, dtype=FP32)
    twice = once.clone()
    for _ in range(2):
        products.grouped_wgrad(dy, x, offsets, out=twice, accumulate=True)
    assert_close(twice, 3 * once.double())


@pytest.mark.parametrize("config", CANDIDATES["wgrad"], ids=named)
def test_adding_in_16_bits_has_the_bits_of_two_steps(device, config, tiles):
    """Of the rounded gradient and a sum that is rounded once more, as autograd computes it. An expert without rows adds
    nothing, not even to NaN.
    """
    tiles(config)
    dy, x, offsets = rows(SPLITS, TAIL, N), rows(SPLITS, TAIL, K), offsets_of(SPLITS)
    before = torch.randn(len(SPLITS), N, K, device=device).to(BF16)
    want = before + products.grouped_wgrad(dy, x, offsets)
    empty = torch.tensor([count == 0 for count in SPLITS], device=device)
    before[empty] = want[empty] = torch.nan
    for options in (KernelOptions(), KernelOptions(100, "static")):
        got = products.grouped_wgrad(dy, x, offsets, out=before.clone(), accumulate=True, options=options)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "add"])
def test_a_transposed_result(device, accumulate, tiles):
    tiles(PP_192)
    dy, x, offsets = rows(SPLITS, TAIL, N), rows(SPLITS, TAIL, K), offsets_of(SPLITS)
    out = torch.randn(len(SPLITS), K, N, device=device).to(BF16).mT if accumulate else None
    run = products.bind_grouped_wgrad(dy, x, offsets, BF16, accumulate, KernelOptions(), transposed=True)
    want = products.grouped_wgrad(dy, x, offsets)
    want = want if out is None else out + want
    with nan_in_new_tensors():
        got = run(dy, x, offsets, out)
    assert got.mT.is_contiguous()
    assert out is None or got.data_ptr() == out.data_ptr()
    assert torch.equal(got, want)


def test_wgrad_into_a_given_tensor(device, tiles):
    tiles(PP_192)
    dy, x, offsets = rows(SPLITS, TAIL, N), rows(SPLITS, TAIL, K), offsets_of(SPLITS)
    out = torch.full((len(SPLITS), N, K), torch.nan, dtype=BF16, device=device)
    assert products.grouped_wgrad(dy, x, offsets, out=out) is out
    assert torch.equal(out, products.grouped_wgrad(dy, x, offsets))


# ------------------------------------------------------------------------------ bit for bit: products that only copy


def one_hot_weights(splits, n, k, major="k"):
    """Row n of an expert's weight picks a column of x: (E, N, K), and the column of each row and n."""
    experts = len(splits)
    picked = (torch.arange(n, device=DEVICE) * 7 + 3 * torch.arange(experts, device=DEVICE)[:, None]) % k
    w = torch.zeros(experts, n, k, dtype=BF16, device=DEVICE).scatter_(2, picked[..., None], 1)
    w = w if major == "k" else w.mT.contiguous().mT
    return w, picked.repeat_interleave(torch.tensor(splits, device=DEVICE), dim=0)


def copied(x, picked):
    return padded(x[: len(picked)].gather(1, picked), len(x) - len(picked))


@pytest.mark.parametrize("major", ["k", "n"])
def test_one_hot_weights_copy_columns(major, tiles):
    tiles(PP_192)
    x, (w, picked) = rows(SPLITS, TAIL, K), one_hot_weights(SPLITS, N, K, major)
    with nan_in_new_tensors():
        y = products.grouped_gemm(x, w, offsets_of(SPLITS))
    assert torch.equal(y, copied(x, picked))


@pytest.mark.parametrize(
    ("kind", "major"), [("swiglu", "k"), ("gpt-oss", "k"), ("gpt-oss", "n"), ("squared_relu", "k")]
)
def test_one_hot_weights_copy_columns_to_the_preactivation(kind, major, tiles):
    tiles(PP_192)
    x, (w, picked) = rows(SPLITS, TAIL, K), one_hot_weights(SPLITS, 2 * N, K, major)
    with nan_in_new_tensors():
        _, p = products.grouped_gemm_activation(x, w, offsets_of(SPLITS), ACTIVATIONS[kind])
    assert torch.equal(p, copied(x, picked))


def test_one_hot_weights_copy_columns_of_the_gradient(tiles):
    """ReGLU of gate = up = 1 has the derivatives 1 and 1."""
    tiles(PP_192)
    dy, (w, picked) = rows(SPLITS, TAIL, K), one_hot_weights(SPLITS, N, K, "n")
    p = torch.ones_like(rows(SPLITS, TAIL, 2 * N))
    p[sum(SPLITS) :] = torch.nan
    with nan_in_new_tensors():
        grad, y, _ = products.grouped_gemm_activation_backward(dy, w.mT, offsets_of(SPLITS), p, ACTIVATIONS["reglu"])
    want = copied(dy, picked)
    assert torch.equal(grad, torch.cat((want, want), dim=1))
    assert (y[: sum(SPLITS)] == 1).all()
    assert not y[sum(SPLITS) :].any()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=named)
def test_one_hot_gradients_copy_rows(device, dtype, tiles):
    """Each row of an expert to another row of its weight's gradient."""
    tiles(PP_192)
    x = rows(SPLITS, TAIL, K)
    dy = torch.zeros(len(x), N, dtype=BF16, device=device)
    dy[sum(SPLITS) :] = torch.nan
    want = torch.zeros(len(SPLITS), N, K, dtype=dtype, device=device)
    ends = list(itertools.accumulate(SPLITS))
    for e, (count, end) in enumerate(zip(SPLITS, ends, strict=True)):
        to = torch.arange(count, device=device) * 7 % N
        dy[torch.arange(end - count, end, device=device), to] = 1
        want[e, to] = x[end - count : end].to(dtype)
    with nan_in_new_tensors():
        dw = products.grouped_wgrad(dy, x, offsets_of(SPLITS), dtype=dtype)
    assert torch.equal(dw, want)


# --------------------------------------------------------------------------------------------------- shapes and views


RAGGED = {
    "around tiles": ((5, 0, 1, 127, 128, 129, 0, 33, 255, 256, 257, 2, 0, 64, 63, 65), 37),
    "one takes all": ((0,) * 7 + (400,) + (0,) * 8, 5),
    "all tail": ((0,) * 16, 50),
    "no tail": ((100, 28, 0, 128, 256), 0),
    "one row": ((1,), 0),
    "one row of many": ((0, 0, 1, 0), 1),
    "one expert": ((300,), 3),
    "512 experts": (tuple(e * e % 11 for e in range(512)), 9),
    "33 experts": ((0,) * 31 + (70, 3), 300),
}


@pytest.mark.parametrize("ragged", RAGGED)
@of_families
def test_splits(family, ragged):
    splits, tail = RAGGED[ragged]
    FAMILIES[family](splits, tail, n=136, k=72).check()


@pytest.mark.parametrize(
    ("n", "k"),
    [
        (8, 8), (8, 2880), (2880, 8), (64, 192), (192, 64), (264, 768), (768, 264), (1408, 1856), (1856, 1408),
        (2880, 2880),
    ],
)  # fmt: skip
@of_families
def test_widths(family, n, k):
    FAMILIES[family]((130, 0, 61), 5, n=n, k=k).check()


def inside_nan(t):
    """The same values, with NaN on all sides."""
    around = torch.full([extent + 16 for extent in t.shape], torch.nan, dtype=t.dtype, device=t.device)
    inside = around[tuple(slice(8, 8 + extent) for extent in t.shape)]
    return inside.copy_(t)


def test_operands_that_are_parts_of_others(tiles):
    """Rows and experts with a pitch; neighbours in memory are not read."""
    tiles(PP_192)
    a, offsets, splits = ACTIVATIONS["swiglu"], offsets_of(SPLITS), SPLITS
    x, dy, p = (inside_nan(rows(splits, TAIL, width)) for width in (K, N, 2 * K))
    up, w = inside_nan(weights(len(splits), 2 * N, K)), inside_nan(weights(len(splits), N, K))
    with nan_in_new_tensors():
        y = products.grouped_gemm(x, w, offsets)
        dx = products.grouped_gemm(dy, w.mT, offsets)
        h, _ = products.grouped_gemm_activation(x, up, offsets, a)
        dw = products.grouped_wgrad(dy, x, offsets)
        dp, *_ = products.grouped_gemm_activation_backward(dy, w, offsets, p, a)
    assert dp.is_contiguous()
    assert_close(y, padded(product(x, w, splits), TAIL))
    assert_close(dx, padded(product(dy, w.mT, splits), TAIL))
    assert_close(h, padded(act(a, product(x, up, splits)), TAIL))
    used = sum(splits)
    pairs = zip(dy[:used].double().split(splits), x[:used].double().split(splits), strict=True)
    assert_close(dw, torch.stack([a.T @ b for a, b in pairs]))
    exact = p[:used].double().requires_grad_()
    assert_close(dp, padded(torch.autograd.grad(act(a, exact), exact, product(dy, w.mT, splits))[0], TAIL))


# ----------------------------------------------------------------------------------------------- tiles and schedules


CONFIGS = [
    *((f, c) for f, configs in CANDIDATES.items() for c in configs if "wgrad" not in f and not f.startswith("fp8")),
    *((name, config) for config in CANDIDATES["wgrad"] for name in ("wgrad", "accumulating wgrad")),
    *(("derivative of gpt-oss", config) for config in CANDIDATES["derivative"]),
]
OF_CONFIGS = {
    **FAMILIES,
    "transposed_activation": lambda *of: activation(*of, major="n"),
    "heavy_derivative": lambda *of: derivative(*of, a=ACTIVATIONS["geglu_tanh"]),
    "derivative of gpt-oss": lambda *of: derivative(*of, a=ACTIVATIONS["gpt-oss"]),
    "accumulating wgrad": lambda *of: wgrad(*of, out=FP32, accumulate=True),
}


@pytest.mark.parametrize(("family", "config"), CONFIGS, ids=lambda value: getattr(value, "name", value))
def test_every_candidate(family, config, tiles):
    tiles(config)
    OF_CONFIGS[family]((300, 0, 61, 1, 127, 258), 200, 424, 328).check()


@pytest.mark.parametrize("major", ["k", "n"])
@pytest.mark.parametrize("config", CANDIDATES["plain"], ids=lambda config: config.name)
def test_every_candidate_of_both_majors(config, major, tiles):
    tiles(config)
    plain((300, 0, 61, 1, 127, 258), 200, 424, 328, major=major, biased=True, scale=FP32).check()


@pytest.mark.parametrize("n", [328, 424])  # an odd number of column tiles of 128, of 192
@pytest.mark.parametrize(
    ("family", "config"),
    [(f, c) for f in ("derivative", "heavy_derivative") for c in CANDIDATES[f]],
    ids=lambda value: getattr(value, "name", value),
)
def test_partial_sums_stay_within_their_tensor(family, config, n, tiles, monkeypatch):
    """They alone are written without a TMA descriptor, which knows bounds."""
    tiles(config)
    case, guarded = OF_CONFIGS[family]((300, 0, 61), 20, n, 72), []

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


LARGER = ((900, 0, 61, 1, 127, 1258, 0, 300), 200, 776, 264)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("sm_margin", [0, 20, 1000])
@of_families
def test_options_change_no_bit(family, sm_margin, schedule):
    case = FAMILIES[family](*LARGER)
    expected, got = case.run(DEFAULT), case.run(KernelOptions(sm_margin, schedule))
    for a, b in zip(got, expected, strict=True):
        if a.dim() == 1:  # the row scale's gradient, a sum over tiles: their width may be another
            assert_close(a, b.double())
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize(("family", "config"), CONFIGS, ids=lambda value: getattr(value, "name", value))
def test_many_tiles_a_cta(family, config, tiles):
    """Whatever is handed from one warp to another goes around many times, with little work between."""
    tiles(config)
    case = OF_CONFIGS[family]((358, 18, 100, 361, 168, 176, 276, 320), 5, 640, 256)
    case.check()
    expected = case.run(DEFAULT)  # one tile a CTA or two
    for options in (KernelOptions(100), KernelOptions(100, "static"), KernelOptions(120)):
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(case.run(options), expected, strict=True))


@pytest.mark.parametrize("n", [192, 520, 1400])
@pytest.mark.parametrize(
    ("family", "config"), [c for c in CONFIGS if "wgrad" not in c[0]], ids=lambda value: getattr(value, "name", value)
)
def test_any_number_of_row_tiles_and_column_tiles(family, config, n, tiles):
    """Pairs of row tiles, and those left over; 1 to 11 column tiles, and one past the last."""
    tiles(config)
    splits = [max(128 * count - count % 3 * 63, 0) for count in (3, 1, 0, 2, 5, 4, 9, 8, 7, 6, 17, 10, 1, 1, 11)]
    case = OF_CONFIGS[family](splits, 130, n, 128)
    for options in (DEFAULT, KernelOptions(126), KernelOptions(120, "static")):
        case.check(options)


@pytest.mark.parametrize("options", [KernelOptions(0, "static"), KernelOptions(8)], ids=["static", "dynamic"])
@pytest.mark.parametrize("family", [*FAMILIES, "accumulating wgrad"])
def test_repeated_runs_are_the_same_bit_for_bit(family, options):
    case = OF_CONFIGS[family](*LARGER)
    first, *others = [case.run(options) for _ in range(6)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@needs_gpu
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize(
    "pair", [("plain", "plain"), ("activation", "derivative"), ("wgrad", "derivative")], ids=" ".join
)
def test_two_streams_at_once(pair, schedule):
    """They share nothing: not the counter of a dynamic schedule, no scratch memory."""
    options = KernelOptions(60, schedule)
    shapes = LARGER, ((300, 0, 61, 1), 20, 392, 520)
    cases = [FAMILIES[family](*shape) for family, shape in zip(pair, shapes, strict=True)]
    expected = [case.run(options) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(30):
        for case, stream, into in zip(cases, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(case.run(options))
    torch.cuda.synchronize()
    for runs, want in zip(results, expected, strict=True):
        for run in runs:
            assert all(torch.equal(a, b) for a, b in zip(run, want, strict=True))


DRAWN = {
    "uneven": LARGER[:2],
    "all tail": ((0,) * 40, 50),
    "fewer tiles than clusters": ((0, 0, 1, 0), 0),
    "no rows": ((0,) * 6, 0),
}


@needs_gpu
@pytest.mark.parametrize("sm_margin", [0, 124])
@pytest.mark.parametrize("ragged", DRAWN)
@pytest.mark.parametrize(("family", "config"), CONFIGS, ids=lambda value: getattr(value, "name", value))
def test_tile_counters_return_to_zero(family, config, ragged, sm_margin, tiles):
    """Those of a stream, and those of captured launches. The bits are those of the static schedule."""
    tiles(config)
    case, other = (OF_CONFIGS[family](*of, 776, 264) for of in (DRAWN[ragged], LARGER[:2]))
    options, captured = KernelOptions(sm_margin, "dynamic"), []
    expected = case.run(KernelOptions(sm_margin, "static"))

    def same(results):
        torch.cuda.synchronize()
        counters = launch.tile_counters(torch.device("cuda", torch.cuda.current_device()))
        assert counters.get()[1] == 1
        assert not counters._table.any()
        return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))

    for _ in range(3):
        other.run(options)  # on the same counter
        assert same(case.run(options))

    def step():
        other.run(options)
        captured.append([case.run(options) for _ in range(2)])

    graph = capture(step)
    for _ in range(3):
        for results in captured[-1]:
            for t in results:
                t.fill_(torch.nan)
        graph.replay()
        assert all(same(results) for results in captured[-1])
