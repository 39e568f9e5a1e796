"""The arithmetic of an MXFP8 expert MLP with the rounding points of the Blackwell kernels, in plain PyTorch.

The kernels apply the activation to the fp32 sums of the first product, and quantize its result without rounding to
bf16. The backward pass reads the preactivation in bf16. The derivative is quantized without rounding to bf16 too.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

import fusedmoe as fm
from fusedmoe.formats import mxfp8

if TYPE_CHECKING:
    from fusedmoe.ops.op import Op
    from fusedmoe.verify.calls import Call
    from fusedmoe.verify.machine import Results

__all__ = ["applies", "results"]

FUSED = ("sm100.grouped_gemm_activation_quantize", "sm100.grouped_dgrad_activation_quantize")
"""The rules with these rounding points."""


def applies(call: Call, rules: Collection[str]) -> bool:
    """Whether `results` is the arithmetic of a call that runs these rules."""
    return call.case.module == "experts" and call.case.recipe == "mxfp8" and set(FUSED) <= set(rules)


def results(call: Call) -> Results:
    """Return the results of a call for which `applies` holds: rows of experts alone differ from zero."""
    first, activation, last = (cast("Any", call.module)[i] for i in (0, 1, 3))  # 2: the scale
    rows = call.ends[-1]
    x, dy = call.x.detach()[:rows].float(), call.grad_output[:rows].float()
    probs = call.inputs["probs"].detach()[:rows, None]
    experts = _Experts(call.ends, call.x.device)
    w1, w2 = first.weight.detach().float(), last.weight.detach().float()

    p = experts.products(_rounded(x), _rounded(w1).mT)
    d = _activation(activation, p) * probs
    y = experts.products(_rounded(d), _rounded(w2).mT)

    g = experts.products(_rounded(dy), _rounded(w2, -2))
    p = p.bfloat16().float().requires_grad_()
    with torch.enable_grad():
        a = _activation(activation, p)
    (dp,) = torch.autograd.grad(a, p, g * probs)
    dx = experts.products(_rounded(dp), _rounded(w1, -2))
    dprobs = (g * a.detach()).sum(1)
    found = {"y": y, "x": dx, "probs": dprobs}
    whole = {name: _with_tail(t, call.x.shape[0]) for name, t in found.items()}
    return whole | {"0.weight": experts.sums(dp, x), "3.weight": experts.sums(dy, d)}


def _activation(activation: Op, p: Tensor) -> Tensor:
    return cast("Tensor", activation.compute(p))


def _rounded(t: Tensor, axis: int = -1, offsets: Tensor | None = None) -> Tensor:
    """Return values after quantization."""
    values: Tensor = fm.quantize(t, mxfp8(), axis=axis, offsets=offsets).dequantize(torch.float32)
    return values


def _with_tail(t: Tensor, rows: int) -> Tensor:
    whole = t.new_zeros(rows, *t.shape[1:])
    whole[: len(t)] = t
    return whole


class _Experts:
    """Products by expert, for rows in the order of experts."""

    def __init__(self, ends: tuple[int, ...], device: torch.device) -> None:
        self._slices = [slice(start, end) for start, end in pairwise((0, *ends))]
        self._offsets = torch.tensor(ends, dtype=torch.int32, device=device)

    def products(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return each row times its expert's matrix."""
        return torch.cat([rows[of] @ weight for of, weight in zip(self._slices, weights, strict=True)])

    def sums(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the weight gradient of rows ``a`` and ``b``, quantized by columns."""
        columns = [_rounded(t, -2, self._offsets) for t in (a, b)]
        return torch.stack([columns[0][of].T @ columns[1][of] for of in self._slices])
