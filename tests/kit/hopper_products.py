"""Problems of the grouped products on Hopper: operands, calls, and their results in fp64.

A kind names the dtype of the rows, and for codes how they are scaled: "bf16", "fp16", "e4m3 blocks", "e5m2 tensor".
Whatever may not be read is NaN: rows after the last expert's and the surroundings of operands in memory; of codes, also
weights and scales of experts without rows; of gathered rows, tokens that no row chooses. New memory is NaN too.

Axes: R rows sorted by expert, T tokens, E experts, K contraction, N features out, I intermediate features, P padded
rows.
"""

import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from fusedmoe.kernels.build import compiler
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.sm90 import launch, products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.formats.groups import padded_rows
from kit.hopper import DEVICE, EMULATED
from kit.oracles import glu, squared_relu
from kit.poison import inside_nan, nan_in_new_tensors
from kit.rounding import ROUNDOFF

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCK = 128
# relative error of sums in tensor cores: those of codes keep about 14 bits of a sum over a block
SUMS, SUMS_OF_CODES = 1e-5, 1e-5 if EMULATED else 1e-3
SPLITS, TAIL = (130, 0, 61, 1, 2, 27), 21  # experts begin at rows 130, 191 and 194, which are no multiples of 4
TOKENS, NOT_READ = 50, 2**31 - 1

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
SIDE_BY_SIDE = tuple(name for name, a in ACTIVATIONS.items() if not a.interleaved)


class Operand(NamedTuple):
    """A tensor or codes as products take them, and their values in fp64."""

    given: Tensor | Codes
    values: Tensor

    @property
    def codes(self):
        return self.given.codes

    @property
    def scale(self):
        return self.given.scale


class Case(NamedTuple):
    """A call, and its results in fp64.

    `twin` returns the same bits by other launches. `exact`: the results are the fp64 ones, rounded once. `by_row`: each
    row meets the bound; else the whole result does. `live`: tensors that a CUDA graph reads anew.
    """

    run: Callable[[KernelOptions], tuple[Tensor, ...]]
    want: tuple[Tensor, ...]
    sums: float = SUMS
    by_row: bool = True
    exact: bool = False
    twin: Callable[[], tuple[Tensor, ...]] | None = None
    live: dict[str, Tensor] | None = None

    def check(self, options=DEFAULT):
        with nan_in_new_tensors():
            results = self.run(options)
            twins = self.twin() if self.twin else results
        for got, again, want in zip(results, twins, self.want, strict=True):
            self.compare(got, want)
            assert torch.equal(*(t.masked_fill(want.isnan(), 0) for t in (got, again)))
        return results

    def compare(self, got, want):
        assert got.shape == want.shape
        missing = want.isnan()  # an expert without rows, to which NaN is not added
        assert torch.equal(got.isnan(), missing)
        if self.exact:
            # zeros of either sign: a sum of products of zeros may have one
            assert torch.equal(got.masked_fill(missing, 0), want.to(got.dtype).masked_fill(missing, 0))
            return
        zero = (want == 0).all(tuple(range(1, want.dim()))) if want.dim() > 1 else want == 0
        assert not got[zero].any(), "rows of zeros are exact"
        bound = self.sums + (0 if got.dtype is FP32 else ROUNDOFF[got.dtype])
        got, want = got.double().masked_fill(missing, 0), want.masked_fill(missing, 0)
        dims = tuple(range(1, want.dim())) if self.by_row and want.dim() > 1 else tuple(range(want.dim()))
        error, size = ((t * t).sum(dims).sqrt() for t in (got - want, want))
        assert (error <= bound * size).all(), f"relative error {(error / size).nan_to_num().max()} of {bound}"


def assert_same_bits(got, want):
    assert got.dtype is want.dtype
    assert torch.equal(bits(got), bits(want))


def bits(t):
    """Integers that compare a NaN with itself."""
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


# ---- operands


def drawn(shape, dtype, exact=False):
    """Values that the dtype has, in fp32: normal ones, or integers from -2 to 2."""
    values = torch.randint(-2, 3, shape, device=DEVICE) if exact else torch.randn(shape, device=DEVICE)
    return values.float().to(dtype).float()


def factors(shape, exact=False):
    if exact:
        return torch.exp2(torch.randint(-1, 2, shape, device=DEVICE).float())
    return torch.rand(shape, device=DEVICE) * 4 + 0.1


def offsets_of(splits):
    return torch.tensor([*itertools.accumulate(splits)], dtype=torch.int32, device=DEVICE)


def blocks(extent):
    return -(-extent // BLOCK)


def scaled_by(kind):
    """The dtype of a kind, and "blocks", "tensor" or ""."""
    element, _, scales = kind.partition(" ")
    return DTYPES[element], scales


def of_experts(splits, exact):
    """A scale per expert, NaN for those without rows."""
    scale = factors((len(splits),), exact)
    scale[torch.tensor(splits) == 0] = torch.nan
    return inside_nan(scale)


def rows(splits, tail, k, kind="bf16", exact=False):
    """Rows (R, K); blocks are 1 x 128."""
    (dtype, scales), count, used = scaled_by(kind), sum(splits) + tail, sum(splits)
    x = drawn((count, k), dtype, exact)
    x[used:] = torch.nan
    if not scales:
        return Operand(inside_nan(x.to(dtype)), x.double())
    if scales == "blocks":
        scale = factors((blocks(k), count), exact)
        scale[:, used:] = torch.nan
        return operand_of_rows(x.to(dtype), scale)
    scale = of_experts(splits, exact)
    of_row = torch.cat([scale.repeat_interleave(torch.tensor(splits, device=DEVICE)), scale.new_ones(tail)])
    return Operand(Codes(inside_nan(x.to(dtype)), scale), x.double() * of_row.double()[:, None])


def operand_of_rows(codes, scale):
    """``scale`` is (K / 128, R)."""
    values = codes.double() * scale.mT.double().repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    room = torch.full((len(scale), -(-scale.shape[1] // 4) * 4), torch.nan, device=DEVICE)
    room[:, : scale.shape[1]] = scale
    return Operand(Codes(inside_nan(codes), inside_nan(room)[:, : scale.shape[1]].mT), values)


def weights(splits, n, k, kind="bf16", major="k", exact=False):
    """Weights (E, N, K); blocks are 128 x 128. Codes are E4M3. ``major``: the axis of unit stride."""
    (dtype, scales), experts = scaled_by(kind), len(splits)
    if not scales:
        w = drawn((experts, n, k) if major == "k" else (experts, k, n), dtype, exact)
        w = (w if exact else w / math.sqrt(k)).to(dtype)
        given, values = inside_nan(w), w.double()
        return Operand(given, values) if major == "k" else Operand(given.mT, values.mT)
    codes = drawn((experts, n, k), DTYPES["e4m3"], exact) * (1.0 if exact else 0.1)
    empty = torch.tensor(splits) == 0
    codes[empty] = torch.nan
    codes = codes.to(DTYPES["e4m3"])
    if scales == "tensor":
        scale = of_experts(splits, exact)
        return Operand(Codes(inside_nan(codes), scale), codes.double() * scale.double()[:, None, None])
    scale = factors((experts, blocks(k), blocks(n)), exact)
    scale[empty] = torch.nan
    return operand_of_weights(codes, scale)


def operand_of_weights(codes, scale):
    """``scale`` is (E, K / 128, N / 128)."""
    experts, n, k = codes.shape
    wide = scale.mT.double().repeat_interleave(BLOCK, 1)[:, :n].repeat_interleave(BLOCK, 2)[..., :k]
    around = torch.full((experts + 2, scale.shape[1], blocks(n) + 8 - blocks(n) % 4), torch.nan, device=DEVICE)
    inside = around[1:-1, :, 4 : 4 + blocks(n)]  # without gaps between the experts
    inside.copy_(scale)
    assert products.has_strides(inside.mT)
    return Operand(Codes(inside_nan(codes), inside.mT), codes.double() * wide)


def columns(splits, tail, width, kind, exact):
    """Codes (width, P), each expert's columns followed by zeros, with scales (width, P / 128) or (E,)."""
    dtype, scales = scaled_by(kind)
    padded = padded_rows(sum(splits) + tail, len(splits), BLOCK)
    codes = torch.full((width, padded), torch.nan, device=DEVICE)
    scale = torch.full((padded // BLOCK, width), torch.nan, device=DEVICE)
    of_expert, values, at = of_experts(splits, exact), [], 0
    for e, count in enumerate(splits):
        end = at + blocks(count) * BLOCK
        codes[:, at:end] = 0
        codes[:, at : at + count] = drawn((width, count), dtype, exact)
        part = (
            factors((blocks(count), width), exact) if scales == "blocks" else of_expert[e].expand(blocks(count), width)
        )
        scale[at // BLOCK : end // BLOCK] = part
        values.append(codes[:, at : at + count].double() * part.T.double().repeat_interleave(BLOCK, 1)[:, :count])
        at = end
    given = Codes(inside_nan(codes.to(dtype)), inside_nan(scale).mT if scales == "blocks" else of_expert)
    return Operand(given, torch.cat(values, 1).mT)


def row_scales(splits, tail, exact=False, dtype=FP32):
    scale = factors((sum(splits) + tail,), exact).to(dtype)
    scale[sum(splits) :] = torch.nan
    return scale


def through_index(splits, tail, k, kind="bf16", exact=False, tokens=TOKENS):
    """Tokens (T, K) and the index of each row: every third token is NaN, and no row's. Values are those of the rows."""
    x, used = drawn((tokens, k), DTYPES[kind], exact), sum(splits)
    x[1::3] = torch.nan
    index = torch.full((used + tail + 3,), NOT_READ, dtype=torch.int32, device=DEVICE)[3:]  # begins anywhere
    index[:used] = torch.randint(0, (tokens + 2) // 3, (used,), device=DEVICE) * 3
    values = torch.full((used + tail, k), torch.nan, device=DEVICE).double()
    values[:used] = x.double()[index[:used]]
    return Operand(inside_nan(x.to(DTYPES[kind])), values), index


# ---- results in fp64


def product(x, weight, splits, bias=None):
    """One expert at a time, without the rows after the last one's."""
    parts = [part @ w.T for part, w in zip(x[: sum(splits)].split(splits), weight, strict=True)]
    if bias is not None:
        parts = [part + b.double() for part, b in zip(parts, bias, strict=True)]
    return torch.cat(parts)


def outer(dy, x, splits):
    used = sum(splits)
    pairs = zip(dy[:used].split(splits), x[:used].split(splits), strict=True)
    return torch.stack([a.T @ b for a, b in pairs])


def act(a, p):
    return glu(p, a.kind, a.limit, a.alpha, a.offset, a.interleaved) if a.gated else squared_relu(p)


def scaled(y, scale):
    return y if scale is None else y * scale[: len(y)].double().reshape(-1, 1)


def padded(y, tail):
    return torch.cat((y, y.new_zeros(tail, *y.shape[1:])))


# ---- calls


def tuple_of(results):
    return tuple(t for t in (results if isinstance(results, tuple) else (results,)) if t is not None)


def ragged_m(x, index, call, want, *, kind, exact, **live):
    """A product of rows. Of gathered ones, the twin is that of rows which were gathered before."""
    codes = isinstance(x.given, Codes)
    copied = x.values.to(DTYPES[kind]) if index is not None else None
    return Case(
        lambda options: call(x.given, index, options), want, SUMS_OF_CODES if codes else SUMS, not codes, exact,
        None if index is None else lambda: call(copied, None, DEFAULT), {"index": index, "x": x, **live},
    )  # fmt: skip


def plain(
    splits=SPLITS, tail=TAIL, n=400, k=272, *, kind="bf16", major="k", biased=False, scale=None, gather=False,
    exact=False, tokens=TOKENS,
):  # fmt: skip
    """``scale``: the dtype of the rows' factors."""
    x, index = (
        through_index(splits, tail, k, kind, exact, tokens) if gather else (rows(splits, tail, k, kind, exact), None)
    )
    w, offsets = weights(splits, n, k, kind, major, exact), offsets_of(splits)
    like = DTYPES.get(kind, BF16)
    bias = drawn((len(splits), n), like, exact).to(like) if biased else None
    factor = row_scales(splits, tail, exact, scale) if scale else None

    def call(x, index, options):
        more = () if index is None else (index,)
        run = products.bind_grouped_gemm(x, w.given, bias, factor, options, *more)
        return tuple_of(run(x, w.given, bias, offsets, factor, *more))

    want = padded(scaled(product(x.values, w.values, splits, bias), factor), tail)
    return ragged_m(x, index, call, (want,), kind=kind, exact=exact, offsets=offsets, weight=w)


def activation(
    splits=SPLITS, tail=TAIL, n=128, k=272, *, kind="bf16", name="swiglu", major="k", biased=False, scale=None,
    keep=True, gather=False, exact=False, tokens=TOKENS,
):  # fmt: skip
    """``n`` is I. With ``exact``, the activation itself is compared only if it is ReGLU, and not of codes."""
    a = ACTIVATIONS[name]
    wide, like, codes = 2 * n if a.gated else n, DTYPES.get(kind, BF16), kind not in DTYPES
    x, index = (
        through_index(splits, tail, k, kind, exact, tokens) if gather else (rows(splits, tail, k, kind, exact), None)
    )
    w, offsets = weights(splits, wide, k, kind, major, exact), offsets_of(splits)
    bias = drawn((len(splits), wide), like, exact).to(like) if biased else None
    factor = row_scales(splits, tail, exact, scale) if scale else None
    first = int(exact and (codes or name != "reglu"))

    def call(x, index, options):
        more = () if index is None else (index,)
        run = products.bind_grouped_gemm_activation(x, w.given, bias, factor, a, keep, options, *more)
        return tuple_of(run(x, w.given, bias, offsets, factor, *more))[first:]

    p = product(x.values, w.values, splits, bias)
    y = scaled(act(a, p.to(BF16).double() if codes else p), factor)  # of codes, the kernel rounds first
    want = (padded(y, tail), padded(p, tail))[first : 1 + keep]
    return ragged_m(x, index, call, want, kind=kind, exact=exact, offsets=offsets, weight=w)


def derivative(
    splits=SPLITS, tail=TAIL, n=400, k=272, *, kind="bf16", name="swiglu", major="n", scale=FP32, gradient=True,
    keep=True, gather=False, exact=False, tokens=TOKENS,
):  # fmt: skip
    """``n`` is I, ``k`` is H. ``major`` "n" is a weight as layers store it. With ``exact``, gate and up are 1."""
    a = ACTIVATIONS[name]
    like, used = DTYPES.get(kind, BF16), sum(splits)
    dy, index = (
        through_index(splits, tail, k, kind, exact, tokens) if gather else (rows(splits, tail, k, kind, exact), None)
    )
    w, offsets = weights(splits, n, k, kind, major, exact), offsets_of(splits)
    stored = w.given.mT if kind in DTYPES else w.given
    p = rows(splits, tail, 2 * n if a.gated else n, "fp16" if like is FP16 else "bf16")
    if exact:
        p.given[:used], p.values[:used] = 1, 1
    factor = row_scales(splits, tail, exact, scale) if scale else None

    def call(dy, index, options):
        bind = products.bind_grouped_gemm_activation_backward
        run = bind(dy, stored, p.given, factor, a, keep, gradient, options, index)
        return tuple_of(run(dy, stored, offsets, p.given, factor, index))

    leaf = p.values[:used].clone().requires_grad_()
    d, y = product(dy.values, w.values, splits), act(a, leaf)
    (grad,) = torch.autograd.grad(y, leaf, scaled(d, factor))
    y = y.detach()
    want = [grad, *([scaled(y, factor)] if keep else []), *([(d * y).sum(1)] if gradient else [])]
    want = tuple(padded(t, tail) for t in want)
    return ragged_m(dy, index, call, want, kind=kind, exact=exact, offsets=offsets, weight=w)


def wgrad(
    splits=SPLITS, tail=TAIL, n=144, k=272, *, kind="bf16", out=None, add=False, gathered=None, transposed=False,
    exact=False, tokens=TOKENS,
):  # fmt: skip
    """``gathered``: the operand, "grad_output" or "x". Codes of x are E4M3. ``add``: to a gradient that is NaN for
    experts without rows.
    """
    index, codes = None, kind not in DTYPES
    if codes:
        dy = columns(splits, tail, n, kind, exact)
        x = columns(splits, tail, k, "e4m3 " + scaled_by(kind)[1], exact)
    else:
        operands = {"grad_output": rows(splits, tail, n, kind, exact), "x": rows(splits, tail, k, kind, exact)}
        if gathered:
            width = {"grad_output": n, "x": k}[gathered]
            operands[gathered], index = through_index(splits, tail, width, kind, exact, tokens)
        dy, x = operands["grad_output"], operands["x"]
    offsets, out = offsets_of(splits), out or DTYPES.get(kind, BF16)
    shape = (len(splits), k, n) if transposed else (len(splits), n, k)
    before = torch.randint(-64, 64, shape, device=DEVICE).to(out) if add else None
    if add and transposed:
        before = before.mT
    if add:
        before[torch.tensor(splits) == 0] = torch.nan

    def call(dy, x, index, options, add=add):
        into = before.clone() if add else None
        bind = products.bind_grouped_wgrad
        run = bind(
            dy, x, offsets, out, add, options, index, gathered if index is not None else None, transposed=transposed
        )
        got = run(dy, x, offsets, into, index)
        assert into is None or got.data_ptr() == into.data_ptr()
        assert not transposed or got.mT.is_contiguous()
        return got

    def twin():
        """Of gathered rows: of those that were gathered before. Added in 16 bits: in two steps, as by autograd."""
        given = [t.values.to(DTYPES[kind]) if name == gathered else t.given for name, t in both]
        if add and out is not FP32:
            return (before + call(*given, None, DEFAULT, add=False),)
        return (call(*given, None, DEFAULT),)

    both = [("grad_output", dy), ("x", x)]
    want = outer(dy.values, x.values, splits)
    if add:
        want = (want.to(out) if exact else want) + before.double()
    return Case(
        lambda options: (call(dy.given, x.given, index, options),), (want,),
        (SUMS_OF_CODES if codes else SUMS) + (ROUNDOFF[out] if add and out is not FP32 else 0), True, exact,
        twin if gathered or (add and out is not FP32) else None,
        {"offsets": offsets, "index": index, "grad_output": dy.given, "x": x.given, "before": before},
    )  # fmt: skip


FAMILIES = {"plain": plain, "activation": activation, "derivative": derivative, "wgrad": wgrad}


def kernels_of(calls):
    """The kernels that calls launch. Nothing is compiled or launched, so that comparisons of results fail."""
    found = {}
    functions = launch.ragged_m, launch.ragged_k, launch.ragged_m_kernel, launch.ragged_k_kernel

    def forget():
        for cached in functions:
            cached.cache_clear()

    forget()
    with (
        patch.object(compiler, "_state", compiler._State({}, {}, set())),
        patch.object(compiler, "_load", lambda kernel: found.setdefault(kernel, lambda *_: None)),
    ):
        for call in calls:
            with suppress(AssertionError):
                call()
    forget()
    return [*found]
