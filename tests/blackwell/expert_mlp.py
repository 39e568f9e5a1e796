"""An expert MLP, forward and backward: in MXFP8 through the grouped GEMMs of cudnn-frontend, and in MXFP8 or NVFP4 in
plain PyTorch.

Legend: R rows sorted by expert, P rows with each expert's padded to 256, H hidden and I intermediate size, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import pairwise

import torch

import fusedmoe as fm
from blackwell import calls
from blackwell.scales import round_up
from fusedmoe.numerics import formats
from fusedmoe.numerics.formats.groups import PaddedRows, group_of

swizzling = import_module("fusedmoe.numerics.formats.swizzle")
MXFP8 = formats.mxfp8()
NVFP4 = formats.Quantizer(formats.nvfp4(), hadamard=True)
BF16 = torch.bfloat16
# of rows and gradients, and of weights
FORMATS = {"mxfp8": (MXFP8, MXFP8), "nvfp4": (NVFP4, formats.nvfp4(across=16))}


def interleaved(w):
    """Return rows [gate; up] (..., 2 I, H) as 32 of gate, 32 of up, and so on."""
    return w.unflatten(-2, (2, -1, 32)).transpose(-4, -3).flatten(-4, -2)


def deinterleaved(w):
    return w.unflatten(-2, (-1, 2, 32)).transpose(-4, -3).flatten(-4, -2)


def swizzled_columns(scale, ends):
    """Return the scales of columns (K, P / 32), one swizzled matrix for each expert."""
    blocked = swizzling.swizzle_column_groups(scale.contiguous(), ends // 32).blocked
    return blocked[: round_up(len(scale), 128) * scale.shape[1]].contiguous()


@dataclass(frozen=True)
class Glue:
    """What is between fusedmoe's tensors and the kernels. The tests replace parts by mistakes."""

    interleave: Callable = interleaved
    deinterleave: Callable = deinterleaved
    swizzle_rows: Callable = swizzling.swizzle
    swizzle_columns: Callable = swizzled_columns
    block: int = 256
    discrete_col_sfd: bool = True


def by_columns(t, ends, glue=Glue()):
    """Return codes (P, K), not transposed, quantized in blocks of 32 rows, and their scales."""
    q = fm.quantize(t, MXFP8, axis=-2, offsets=ends)
    return q.data[:, : len(t)].T.contiguous(), glue.swizzle_columns(q.scale[:, : len(t) // 32], ends)


@dataclass(frozen=True)
class Problem:
    """`act` is "swiglu" or "srelu"; `clamp` are the numbers of a clamped SwiGLU in cudnn-frontend's words."""

    act: str
    clamp: dict | None
    w1: torch.Tensor  # (E, 2 I, H) as [gate; up], or (E, I, H)
    w2: torch.Tensor  # (E, H, I)
    x: torch.Tensor  # (R, H)
    dy: torch.Tensor  # (R, H)
    probs: torch.Tensor  # (R,)
    splits: torch.Tensor  # (E,): the rows of each expert; their sum may be less than R
    b1: torch.Tensor | None = None  # (E, 2 I) or (E, I); in plain PyTorch alone, as b2
    b2: torch.Tensor | None = None  # (E, H)

    @property
    def offsets(self):
        return self.splits.cumsum(0).to(torch.int32)


@dataclass(frozen=True)
class Results:
    """Of the rows that belong to an expert."""

    y: torch.Tensor
    dx: torch.Tensor
    dprobs: torch.Tensor
    dw1: torch.Tensor
    dw2: torch.Tensor
    db1: torch.Tensor | None = None
    db2: torch.Tensor | None = None

    def errors(self, expected):
        """Return the relative error of each result in the Frobenius norm."""
        pairs = {f.name: (getattr(self, f.name), getattr(expected, f.name)) for f in fields(self)}
        return {
            name: float((got.float() - want.float()).norm() / want.float().norm())
            for name, (got, want) in pairs.items()
            if got is not None and want is not None
        }


def through_kernels(p, glue):
    """Run both directions through the kernels."""
    rows = PaddedRows.of(p.offsets, len(p.x), glue.block)
    ends = rows.ends_E
    gated = p.act == "swiglu"
    w1 = glue.interleave(p.w1) if gated else p.w1

    def by_rows(t):
        q = fm.quantize(t, MXFP8)
        return q.data, glue.swizzle_rows(q.scale.contiguous())

    def weight(w, axis):  # codes with the summed axis last, either way
        q = fm.quantize(w, MXFP8, axis=axis)
        return q.data, swizzling.swizzle(q.scale).flatten()

    def collected(t):
        return rows.collect(t)[: int(p.offsets[-1])]

    x, dy, prob = rows.spread(p.x), rows.spread(p.dy), rows.spread(p.probs[:, None])[:, 0].contiguous()
    options = {"discrete_col_sfd": glue.discrete_col_sfd} | ({"clamp": p.clamp} if gated else {})
    fc1 = (calls.glu if gated else calls.srelu)(calls.product(*by_rows(x), *weight(w1, -1), ends), prob, **options)
    y = calls.quant(calls.product(fc1["d"], fc1["sfd_row"], *weight(p.w2, -1), ends))

    derivative = calls.dglu if gated else calls.dsrelu
    dfc1 = derivative(calls.product(*by_rows(dy), *weight(p.w2, -2), ends), prob, fc1["c"], **options)
    dx = calls.quant(calls.product(dfc1["d_row"], dfc1["sfd_row"], *weight(w1, -2), ends))

    (dy_codes, sf_dy), (x_codes, sf_x) = by_columns(dy, ends, glue), by_columns(x, ends, glue)
    dw2 = calls.wgrad(dy_codes, fc1["d_col"], sf_dy, fc1["sfd_col"], ends)
    dw1 = calls.wgrad(dfc1["d_col"], x_codes, dfc1["sfd_col"], sf_x, ends)
    dprobs = collected(dfc1["dprob"][:, None])[:, 0]
    return Results(collected(y), collected(dx), dprobs, glue.deinterleave(dw1) if gated else dw1, dw2)


def in_plain_pytorch(p, middle=None, recipe="mxfp8"):
    """The same arithmetic: rounded where the kernels round, without padding, interleaving and swizzled scales.

    ``middle(h, probs)``, of bf16 rows, is between the layers; by default, what the kernels compute there in fp32. The
    kernels for NVFP4 write its results in bf16, and those for MXFP8 in codes.
    """
    rows = int(p.offsets[-1])
    x, dy, prob = p.x[:rows].float(), p.dy[:rows].float(), p.probs[:rows, None]
    group = group_of(p.offsets, rows)
    of_rows, of_weights = FORMATS[recipe]

    def rounded(t):
        return fm.quantize(t, of_rows, offsets=p.offsets).dequantize(torch.float32)

    def weight(w, axis):
        return fm.quantize(w.float(), of_weights, axis=axis).dequantize(torch.float32)

    def written(t):
        return t if recipe == "mxfp8" else t.to(BF16).float()

    def products(t, w, b=None):  # each row times its expert's matrix
        parts = [t[group == e] @ w[e] for e in range(len(w))]
        return torch.cat(parts if b is None else [part + b[e].float() for e, part in enumerate(parts)])

    def columns(t):  # of each expert, quantized by columns, rotated where the format rotates
        q = fm.quantize(t, of_rows, axis=-2, offsets=p.offsets)
        values, factor = q.split()
        starts = torch.nn.functional.pad(q.padded.ends_E, (1, 0)).tolist()
        each = [values[:, start:end] for start, end in pairwise(starts)]
        return each if factor is None else [part * of_expert for part, of_expert in zip(each, factor, strict=True)]

    def sums(a, b):
        return torch.stack([a @ b.T for a, b in zip(columns(a), columns(b), strict=True)])

    def sums_of_rows(t):
        return torch.stack([t[group == e].sum(0) for e in range(len(p.w1))])

    h = products(rounded(x), weight(p.w1, -1).mT, p.b1)
    g = products(rounded(dy), weight(p.w2, -2))
    kept = h.to(BF16)
    if middle is None:
        d = written(activation(p, h) * prob)
        kept = kept.float().requires_grad_()
        act = activation(p, kept)
        dprobs = (g * act.detach()).sum(1)
        dh = written(*torch.autograd.grad(act, kept, g * prob))
    else:
        inputs = kept.requires_grad_(), prob[:, 0].detach().requires_grad_()
        d = middle(*inputs)
        dh, dprobs = torch.autograd.grad(d, inputs, g.to(BF16))
        d, dh = d.detach().float(), dh.float()
    y = products(rounded(d), weight(p.w2, -1).mT, p.b2)
    dx = products(rounded(dh), weight(p.w1, -2))
    return Results(y, dx, dprobs, sums(dh, x), sums(dy, d), sums_of_rows(dh), sums_of_rows(dy))


def activation(p, h):
    """Return the activation of fp32 rows; torch's clamp passes gradients at its bounds, as the kernels do."""
    if p.act == "srelu":
        return h.relu().square()
    gate, up_projection = h.chunk(2, -1)
    if not p.clamp:
        return gate * torch.sigmoid(gate) * up_projection
    gate = gate.clamp(max=p.clamp["glu_clamp_max"])
    up_projection = up_projection.clamp(p.clamp["glu_clamp_min"], p.clamp["glu_clamp_max"])
    return gate * torch.sigmoid(p.clamp["geglu_alpha"] * gate) * (up_projection + p.clamp["linear_offset"])


def in_fusedmoe(p, op):
    """fusedmoe's emulation, which rounds what passes from op to op to bf16."""
    experts, hidden, intermediate = p.w2.shape
    first = fm.GroupedLinear(experts, hidden, p.w1.shape[1], bias=False)
    last = fm.GroupedLinear(experts, intermediate, hidden, bias=False)
    chain = fm.Sequential(first, op, fm.Scale("probs"), last).bfloat16()
    with torch.no_grad():
        first.weight.copy_(p.w1)
        last.weight.copy_(p.w2)
    x, probs = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_()
    with fm.recipe("mxfp8"):
        y = chain(x, splits=p.splits, probs=probs)
    y.backward(p.dy)
    rows = int(p.offsets[-1])
    return Results(y.detach()[:rows], x.grad[:rows], probs.grad[:rows], first.weight.grad, last.weight.grad)
