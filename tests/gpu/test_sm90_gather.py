"""The ragged M products with gathered rows: bit for bit the products of copies of those rows, with the same tiles.

Whatever may not be read is NaN, or an index far outside: tokens that no row chooses, rows and indices of the tail, and
the memory that results are written to. test_sm90_kernels.py compares the products of copied rows with fp64.

Axes: R rows sorted by expert, T tokens, E experts, K contraction, N features out, I intermediate features.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kit.hopper import DEVICE, needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors
from torch import Tensor

from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.tiles.choice import CO_256, PP_128, PP_192
from fusedmoe.numerics.activations import Activation

pytestmark = needs_hopper

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPLITS, TAIL = (130, 0, 61, 1, 0, 27), 21
TOKENS, N, K = 50, 200, 136  # 192 and a bit, two tiles of 64 and a bit
NOT_READ = 2**31 - 1

ACTIVATIONS = {
    "swiglu": Activation("swiglu"),
    "gpt-oss": Activation("swiglu", limit=0.75, alpha=1.702, offset=1.0, interleaved=True),
    "geglu_tanh": Activation("geglu_tanh"),
    "geglu_erf": Activation("geglu_erf"),
    "reglu": Activation("reglu"),
    "squared_relu": Activation("squared_relu"),
}
DERIVATIVES = ("swiglu", "gpt-oss", "geglu_tanh", "squared_relu")


# ---------------------------------------------------------------------------------------------------- preparations


def kernels():
    """The kernels of this file, with gathered rows and without."""
    from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN, activation, derivative
    from fusedmoe.kernels.sm90.gemm.operands import Plain
    from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM

    wanted = [
        ("bf16", PP_192, "k", PLAIN), ("bf16", PP_192, "n", PLAIN), ("bf16", CO_256, "k", PLAIN),
        ("bf16", PP_128, "k", PLAIN), ("fp16", PP_192, "k", PLAIN),
        ("bf16", PP_192, "k", activation("swiglu")),
        ("bf16", CO_256, "k", activation("swiglu", keep=True)),
        ("bf16", PP_128, "n", activation("swiglu", keep=True)),
        ("bf16", PP_192, "n", derivative("swiglu", keep=True)),
        ("bf16", PP_128, "n", derivative("swiglu", keep=True, row_scale=True)),
    ]  # fmt: skip
    for name, a in ACTIVATIONS.items():
        what = {"clamped": a.limit is not None, "interleaved": a.interleaved, "keep": True}
        wanted.append(("bf16", PP_192, "k", activation(a.kind, **what)))
        if name in DERIVATIVES:
            config = PP_128 if a.heavy else PP_192
            wanted.append(("bf16", config, "n", derivative(a.kind, **what, row_scale=True)))
    return [
        RaggedM(Plain(dtype), config, b_major=major, epilogue=epilogue, gather=gather)
        for (dtype, config, major, epilogue), gather in itertools.product(wanted, (False, True))
    ]


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    build_ahead(kernels())


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Case(NamedTuple):
    """A product of (rows, index); index None: of rows that were copied."""

    product: Callable[[Tensor, Tensor | None, KernelOptions], tuple[Tensor, ...]]
    tokens: Tensor
    index: Tensor
    used: int

    def run(self, options=DEFAULT):
        return self.product(self.tokens, self.index, options)

    def of_copies(self, options=DEFAULT):
        copied = self.tokens.new_full((len(self.index), self.tokens.shape[1]), torch.nan)
        copied[: self.used] = self.tokens[self.index[: self.used]]
        return self.product(copied, None, options)

    def check(self, options=DEFAULT):
        with nan_in_new_tensors():
            results, copies = self.run(options), self.of_copies()
        for got, want in zip(results, copies, strict=True):
            assert want[: self.used].any() or not self.used
            assert not got[self.used :].any()
            assert torch.equal(got, want)


def offsets_of(splits):
    return torch.tensor(list(itertools.accumulate(splits)), dtype=torch.int32, device=DEVICE)


def gathered(splits, tail, k, tokens=TOKENS, dtype=BF16):
    """Tokens, of which every third is NaN and never chosen, and the index of each row."""
    x, used = torch.randn(tokens, k, device=DEVICE).to(dtype), sum(splits)
    x[1::3] = torch.nan
    chosen = torch.randint(0, (tokens + 2) // 3, (used,), device=DEVICE) * 3
    index = torch.full((used + tail,), NOT_READ, dtype=torch.int32, device=DEVICE)
    index[:used] = chosen
    return x, index


def weights(experts, n, k, major="k", dtype=BF16):
    shape = (experts, n, k) if major == "k" else (experts, k, n)
    w = (torch.randn(shape, device=DEVICE) / math.sqrt(k)).to(dtype)
    return w if major == "k" else w.mT


def scales(splits, tail):
    scale = torch.rand(sum(splits) + tail, device=DEVICE) + 0.5
    scale[sum(splits) :] = torch.nan
    return scale


def plain(splits=SPLITS, tail=TAIL, n=N, k=K, *, tokens=TOKENS, dtype=BF16, major="k", extras=True):
    """``extras``: bias and row scale."""
    x, index = gathered(splits, tail, k, tokens, dtype)
    w, offsets = weights(len(splits), n, k, major, dtype), offsets_of(splits)
    bias = torch.randn(len(splits), n, device=DEVICE).to(dtype) if extras else None
    scale = scales(splits, tail) if extras else None

    def product(rows, gather, options):
        return (products.grouped_gemm(rows, w, offsets, bias=bias, row_scale=scale, options=options, gather=gather),)

    return Case(product, x, index, sum(splits))


def activation(
    splits=SPLITS, tail=TAIL, n=N, k=K, *, tokens=TOKENS, a=ACTIVATIONS["swiglu"], major="k", keep=True, extras=True
):
    """``n`` is I."""
    wide = 2 * n if a.gated else n
    x, index = gathered(splits, tail, k, tokens)
    w, offsets = weights(len(splits), wide, k, major), offsets_of(splits)
    bias = torch.randn(len(splits), wide, device=DEVICE).to(BF16) if extras else None
    scale = scales(splits, tail) if extras else None

    def product(rows, gather, options):
        return products.grouped_gemm_activation(
            rows, w, offsets, a, bias=bias, row_scale=scale, keep_preactivation=keep, options=options, gather=gather
        )

    return Case(product, x, index, sum(splits))


def derivative(
    splits=SPLITS, tail=TAIL, n=N, k=K, *, tokens=TOKENS, a=ACTIVATIONS["swiglu"], extras=True,
):  # fmt: skip
    """``n`` is I, ``k`` is H; ``extras``: row scale, and its gradient."""
    dy, index = gathered(splits, tail, k, tokens)
    w, offsets = weights(len(splits), n, k, "n").mT, offsets_of(splits)
    p = torch.randn(len(index), 2 * n if a.gated else n, device=DEVICE).to(BF16)
    p[sum(splits) :] = torch.nan
    scale = scales(splits, tail) if extras else None

    def product(rows, gather, options):
        results = products.grouped_gemm_activation_backward(
            rows, w, offsets, p, a, row_scale=scale, want_row_scale_grad=extras, options=options, gather=gather
        )
        return tuple(t for t in results if t is not None)

    return Case(product, dy, index, sum(splits))


FAMILIES = {"plain": plain, "activation": activation, "derivative": derivative}
of_families = pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)


# ---------------------------------------------------------------------------------------------------- each function


@pytest.mark.parametrize("extras", [False, True], ids=["", "bias and scale"])
@pytest.mark.parametrize(
    ("config", "major", "dtype"),
    [(PP_192, "k", BF16), (PP_192, "n", BF16), (CO_256, "k", BF16), (PP_128, "k", BF16), (PP_192, "k", FP16)],
)
def test_grouped_gemm(config, major, dtype, extras, tiles):
    tiles(config)
    plain(dtype=dtype, major=major, extras=extras).check()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_grouped_gemm_activation(kind, tiles):
    tiles(PP_192)
    activation(a=ACTIVATIONS[kind]).check()


def test_without_the_preactivation(tiles):
    tiles(PP_192)
    activation(keep=False, extras=False).check()


def test_gate_and_up_side_by_side_with_unit_stride_along_n(tiles):
    tiles(PP_128)
    activation(major="n").check()


@pytest.mark.parametrize("kind", DERIVATIVES)
def test_derivative(kind, tiles):
    tiles(PP_128 if ACTIVATIONS[kind].heavy else PP_192)
    derivative(a=ACTIVATIONS[kind]).check()


def test_derivative_without_a_row_scale(tiles):
    tiles(PP_192)
    derivative(extras=False).check()


# ------------------------------------------------------------------------------------------------------------ shapes


RAGGED = {
    "around tiles": ((5, 0, 1, 127, 128, 129, 0, 33, 255, 256, 257, 2, 0, 64, 63, 65), 37),
    "one takes all": ((0,) * 7 + (400,) + (0,) * 8, 5),
    "all tail": ((0,) * 16, 50),
    "a long tail": ((300, 1), 40_000),  # several tiles of the tail per CTA
    "no tail": ((100, 28, 0, 128, 256), 0),
    "one row": ((1,), 0),
    "128 experts": (tuple(e * e % 11 for e in range(128)), 9),
}


@pytest.mark.parametrize("options", [KernelOptions(0, "static"), KernelOptions(120)], ids=["static", "dynamic"])
@pytest.mark.parametrize("ragged", RAGGED)
@of_families
def test_splits(make, ragged, options, tiles):
    tiles(PP_192)
    splits, tail = RAGGED[ragged]
    make(splits, tail, n=136, k=72).check(options)


@pytest.mark.parametrize(("n", "k"), [(8, 8), (72, 2056), (2056, 72), (264, 768), (768, 64), (64, 192)])
@of_families
def test_widths(make, n, k, tiles):
    tiles(PP_192)
    make((130, 0, 61), 5, n=n, k=k).check()


@of_families
def test_one_token(make, tiles):
    tiles(PP_192)
    make(tokens=1).check()


def test_no_rows(tiles):
    tiles(PP_192)
    case = plain((0, 0), 0, extras=False)
    assert case.run()[0].shape == (0, N)


@of_families
def test_operands_that_are_parts_of_others(make, tiles):
    """Rows with a pitch, between NaN, and an index that begins anywhere."""
    tiles(PP_192)
    case = make()
    tokens, width = case.tokens.shape
    around = case.tokens.new_full((tokens + 4, width + 24), torch.nan)
    around[2:-2, 8:-16] = case.tokens
    index = torch.full((len(case.index) + 3,), NOT_READ, dtype=torch.int32, device=DEVICE)
    index[3:] = case.index
    got = case.product(around[2:-2, 8:-16], index[3:], DEFAULT)
    assert all(torch.equal(a, b) for a, b in zip(got, case.of_copies(), strict=True))


# ------------------------------------------------------------------------------------------------ tiles and schedules


OF_CONFIGS = [
    *((plain, config) for config in (PP_192, CO_256, PP_128)),
    *((activation, config) for config in (PP_192, CO_256)),
    *((derivative, config) for config in (PP_192, PP_128)),
]
of_configs = pytest.mark.parametrize(
    ("make", "config"), OF_CONFIGS, ids=lambda value: getattr(value, "name", getattr(value, "__name__", value))
)


@pytest.mark.parametrize("n", [192, 520, 1400])
@of_configs
def test_any_number_of_row_tiles_and_column_tiles(make, config, n, tiles):
    """Pairs of row tiles, and those left over; 1 to 11 column tiles, and one past the last."""
    tiles(config)
    splits = [max(128 * count - count % 3 * 63, 0) for count in (3, 1, 0, 2, 5, 4, 9, 8, 7, 6, 17, 10, 1, 1, 11)]
    case = make(splits, 130, n, 128, tokens=3000)
    for options in (DEFAULT, KernelOptions(126), KernelOptions(120, "static")):
        case.check(options)


@of_configs
def test_many_tiles_per_cta_repeatedly(make, config, tiles):
    """Whatever one warp hands to another goes around many times, with little work between."""
    tiles(config)
    case = make((358, 18, 100, 361, 168, 176, 276, 320), 5, 640, 256, tokens=1000)
    expected = case.of_copies()
    for options in (DEFAULT, KernelOptions(100), KernelOptions(100, "static"), KernelOptions(120)):
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(case.run(options), expected, strict=True))


@of_configs
def test_a_layer(make, config, tiles):
    """As many rows as keep all SMs loading at once: a copy that is late would show."""
    tiles(config)
    experts, rows = 32, 24_000
    chosen = torch.randint(experts, (rows,), device=DEVICE)
    case = make(torch.bincount(chosen, minlength=experts).tolist(), 100, 512, 2048, tokens=9000)
    for _ in range(3):
        case.check()


@needs_gpu
def test_a_graph_follows_changed_splits_and_indices(tiles):
    tiles(PP_192)
    splits = (100, 200, 0, 60), (0, 300, 7, 3)
    cases = [plain(counts, 400 - sum(counts)) for counts in splits]
    x, w = cases[0].tokens, weights(4, N, K)
    index, offsets = cases[0].index.clone(), offsets_of(splits[0])

    def product():
        return products.grouped_gemm(x, w, offsets, gather=index)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product()
    for counts, case in [*zip(splits, cases, strict=True), (splits[0], cases[0])]:
        index.copy_(case.index)
        offsets.copy_(offsets_of(counts))
        graph.replay()
        assert torch.equal(y, product())
        assert y[: sum(counts)].isfinite().all()
