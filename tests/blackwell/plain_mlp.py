"""An expert MLP in MXFP8 or NVFP4, forward and backward, in plain PyTorch.

Legend: R rows sorted by expert, H hidden and I intermediate size, E experts.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

import fusedmoe as fm
from fusedmoe.numerics import formats
from fusedmoe.numerics.formats.groups import group_of

MXFP8 = formats.mxfp8()
NVFP4 = formats.Quantizer(formats.nvfp4(), hadamard=True)
BF16 = torch.bfloat16
# of rows and gradients, and of weights
FORMATS = {"mxfp8": (MXFP8, MXFP8), "nvfp4": (NVFP4, formats.nvfp4(across=16))}


@dataclass(frozen=True)
class Problem:
    """Two layers and the activation between them; rows sorted by expert."""

    act: fm.SwiGLU | fm.SquaredReLU
    w1: torch.Tensor  # (E, 2 I, H) as [gate; up], or (E, I, H)
    w2: torch.Tensor  # (E, H, I)
    x: torch.Tensor  # (R, H)
    dy: torch.Tensor  # (R, H)
    probs: torch.Tensor  # (R,)
    splits: torch.Tensor  # (E,): the rows of each expert; their sum may be less than R
    b1: torch.Tensor | None = None  # (E, 2 I) or (E, I)
    b2: torch.Tensor | None = None  # (E, H)

    @property
    def offsets(self):
        return self.splits.cumsum(0).to(torch.int32)


class Results(NamedTuple):
    """Of the rows that belong to an expert."""

    y: torch.Tensor
    dx: torch.Tensor
    dprobs: torch.Tensor
    dw1: torch.Tensor
    dw2: torch.Tensor
    db1: torch.Tensor
    db2: torch.Tensor


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
        d = written(activation(p.act, h) * prob)
        kept = kept.float().requires_grad_()
        act = activation(p.act, kept)
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


def activation(op, h):
    """Return the activation of fp32 rows; torch's clamp passes gradients at its bounds, as the kernels do."""
    if isinstance(op, fm.SquaredReLU):
        return h.relu().square()
    gate, up_projection = h.chunk(2, -1)
    if op.limit is not None:
        gate, up_projection = gate.clamp(max=op.limit), up_projection.clamp(-op.limit, op.limit)
    return gate * torch.sigmoid(op.alpha * gate) * (up_projection + op.offset)
