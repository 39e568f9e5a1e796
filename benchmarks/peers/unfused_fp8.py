"""FP8 without fused kernels, as plain PyTorch offers it on Hopper: ``F.scaled_grouped_mm`` and ``torch.compile``.

The products multiply E4M3 codes with one scale per row, ``amax / 448``, in fp32 accumulation without the fast mode.
Quantization, SwiGLU and its derivative are compiled; where they meet, in one function. The three products of each layer
have the operands that a training step needs: rows, gradients and weights by rows, and for the weight gradients rows and
gradients by columns, with one scale per column and expert. There each expert's rows are padded, which the product
requires in multiples of 16. Multiples of 128 let the largest magnitudes be found in tiles, which is faster.

Axes: R rows sorted by expert, P padded rows, E experts, K and N features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Candidate
from benchmarks.peers.plain import leaves_of
from benchmarks.problem import Problem

LARGEST = 448.0  # of E4M3
LEAST = 1e-12  # lower bound of a largest magnitude
PAD = 128


class UnfusedFp8:
    """The expert MLP; ``once`` quantizes the weights before the timed calls."""

    def __init__(self, once: bool = False) -> None:
        self.once = once
        self.name = "torch FP8 by rows, compiled" + (", weights quantized before" if once else "")

    def mlp_forward(self, problem: Problem) -> Candidate:
        call, _ = self._mlp(problem)
        return Candidate(call)

    def mlp_step(self, problem: Problem) -> Candidate:
        (call, leaves), dy = self._mlp(problem), problem.grad_y
        wanted = tuple(leaves.values())
        return Candidate(lambda: torch.autograd.grad(call(), wanted, dy), tuple(leaves))

    def _mlp(self, problem: Problem) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
        if problem.shape.activation != "swiglu" or problem.shape.biases:
            raise NotImplementedError(f"{problem.shape.activation} with biases is not compared with unfused FP8")
        leaves, run, offsets = leaves_of(problem), _compiled(), problem.offsets
        x, w1, w2 = (leaves[name] for name in ("grad_x", "grad_weight1", "grad_weight2"))
        before = None
        if self.once:
            with torch.no_grad():  # as in the calls, so that it is compiled once
                before = run.weight(w1), run.weight(w2)

        def call() -> Tensor:
            return _Mlp.apply(x, w1, w2, offsets, run, before)  # type: ignore[no-any-return, no-untyped-call]

        return call, leaves


class Codes(NamedTuple):
    """Codes (..., M, L) and scales (..., M)."""

    codes: Tensor
    scale: Tensor


class WeightCodes(NamedTuple):
    """A weight (E, N, K) by rows, and by columns: codes (E, K, N) and scales (E, K)."""

    rows: Codes
    columns: Codes


class Padded(NamedTuple):
    """Where rows go if each expert's are padded to a multiple of `PAD`."""

    ends: Tensor  # (E,), of the experts' padded rows
    row: Tensor  # (P,): the row at each place; 0 for padding
    used: Tensor  # (P,): whether there is one
    expert_of_tile: Tensor  # (P / PAD,): of each `PAD` places


class _Functions(NamedTuple):
    """The functions that are compiled."""

    rows: Callable[[Tensor], Codes]
    columns: Callable[[Tensor, Padded], Codes]
    weight: Callable[[Tensor], WeightCodes]
    swiglu: Callable[[Tensor], Codes]
    dswiglu: Callable[[Tensor, Tensor], tuple[Tensor, Codes, Tensor]]
    padded: Callable[[Tensor, int], Padded]


def _compiled() -> _Functions:
    compiled = functools.partial(torch.compile, dynamic=False)
    return _Functions(
        *(compiled(f) for f in (quantize_rows, quantize_columns, quantize_weight, swiglu, dswiglu, padded))
    )


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, offsets: Tensor, run: _Functions, before: Any) -> Tensor:
        weight1, weight2 = before or (run.weight(w1), run.weight(w2))
        p = multiply(run.rows(x), weight1.rows, offsets)
        y = multiply(run.swiglu(p), weight2.rows, offsets)
        ctx.save_for_backward(x, p, offsets)
        ctx.run, ctx.weights = run, (weight1.columns, weight2.columns)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, p, offsets), run, (weight1, weight2) = ctx.saved_tensors, ctx.run, ctx.weights
        places = run.padded(offsets, x.shape[0])
        dp, dp_codes, h = run.dswiglu(multiply(run.rows(dy), weight2, offsets), p)
        dw2 = weight_gradient(run.columns(dy, places), run.columns(h, places), places.ends)
        dw1 = weight_gradient(run.columns(dp, places), run.columns(x, places), places.ends)
        return multiply(dp_codes, weight1, offsets), dw1, dw2, None, None, None


def multiply(rows: Codes, weight: Codes, ends_E: Tensor) -> Tensor:
    """``rows[r] @ weight[expert of r].T``: rows (R, K), weight (E, N, K)."""
    return _scaled_grouped_mm(rows.codes, weight.codes.mT, rows.scale, weight.scale, ends_E)


def weight_gradient(dy: Codes, x: Codes, ends_E: Tensor) -> Tensor:
    """``dy[rows of e].T @ x[rows of e]``: codes (N, P) and (K, P), scales (E, N) and (E, K)."""
    return _scaled_grouped_mm(dy.codes, x.codes.mT, dy.scale.flatten(), x.scale.flatten(), ends_E)


def _scaled_grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends_E: Tensor) -> Tensor:
    scale_a, scale_b = scale_a.contiguous(), scale_b.contiguous()
    functional: Any = F  # the stubs lack scaled_grouped_mm
    if hasattr(functional, "scaled_grouped_mm"):
        by_row = functional.ScalingType.RowWise
        return functional.scaled_grouped_mm(  # type: ignore[no-any-return]
            a, b, scale_a, by_row, scale_b, by_row, offs=ends_E, output_dtype=torch.bfloat16, use_fast_accum=False
        )
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=ends_E, out_dtype=torch.bfloat16, use_fast_accum=False)


# ---- compiled ------------------------------------------------------------------------------------------------------


def quantize_rows(x: Tensor) -> Codes:
    """Return x (..., M, L) with one scale per row."""
    x = x.float()
    scale = x.abs().amax(-1).clamp(min=LEAST) / LARGEST
    return Codes((x / scale[..., None]).to(torch.float8_e4m3fn), scale)


def quantize_weight(weight: Tensor) -> WeightCodes:
    """Return a weight (E, N, K) by rows and by columns."""
    columns = quantize_rows(weight.mT)
    return WeightCodes(quantize_rows(weight), Codes(columns.codes.contiguous(), columns.scale))


def quantize_columns(x: Tensor, places: Padded) -> Codes:
    """Return rows (R, N) by columns: codes (N, P), and scales (E, N)."""
    values = torch.where(places.used[:, None], x[places.row], 0).float()
    of_tile = values.view(-1, PAD, x.shape[1]).abs().amax(1)
    index = places.expert_of_tile[:, None].expand_as(of_tile)
    largest = of_tile.new_zeros(places.ends.shape[0], x.shape[1]).scatter_reduce(0, index, of_tile, "amax")
    scale = largest.clamp(min=LEAST) / LARGEST
    codes = values.view(-1, PAD, x.shape[1]) / scale[places.expert_of_tile][:, None]
    return Codes(codes.flatten(0, 1).to(torch.float8_e4m3fn).mT.contiguous(), scale)


def swiglu(p: Tensor) -> Codes:
    """Return ``silu(gate) * up`` of ``[gate | up]``, quantized by rows."""
    return quantize_rows(_swiglu(p))


def _swiglu(p: Tensor) -> Tensor:
    gate, up = p.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(p.dtype)


def dswiglu(dh: Tensor, p: Tensor) -> tuple[Tensor, Codes, Tensor]:
    """Return the gradient of p, also quantized by rows, and the activated rows again."""
    gate, up = p.float().chunk(2, dim=-1)
    d, s = dh.float(), torch.sigmoid(gate)
    dp = torch.cat((d * up * s * (1 + gate * (1 - s)), d * gate * s), dim=-1).to(p.dtype)
    return dp, quantize_rows(dp), _swiglu(p)


def padded(offsets: Tensor, rows: int) -> Padded:
    """Return the places of rows for ends of experts' rows (E,). P is an upper bound for any splits."""
    experts = offsets.shape[0]
    starts = F.pad(offsets, (1, 0))[:-1]
    counts = offsets - starts
    padded_counts = (counts + PAD - 1) // PAD * PAD
    ends = padded_counts.cumsum(0, dtype=torch.int32)
    place = torch.arange((rows // PAD + min(experts, rows)) * PAD, device=offsets.device, dtype=torch.int32)
    expert = torch.searchsorted(ends, place, right=True).clamp(max=experts - 1)
    within = place - (ends - padded_counts)[expert]
    used = within < counts[expert]
    return Padded(ends, torch.where(used, starts[expert] + within, 0).long(), used, expert[::PAD])
