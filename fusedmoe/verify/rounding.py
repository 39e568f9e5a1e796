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
    case = call.case
    return case.module in ("experts", "routed") and case.recipe == "mxfp8" and set(FUSED) <= set(rules)


def results(call: Call) -> Results:
    """Return the results of a call for which `applies` holds: rows of experts alone differ from zero."""
    layers = {name: op for name, op in call.module.named_children() if isinstance(op, fm.GroupedLinear)}
    (name1, first), (name2, last) = layers.items()
    activation = cast("Any", call.module)[int(name1) + 1]
    of_weights = f"{name1}.weight", f"{name2}.weight"
    if call.case.module == "experts":
        rows = call.ends[-1]
        x, dy, probs = (t.detach()[:rows] for t in (call.x, call.grad_output, call.inputs["probs"]))
        y, dx, dprobs, *dw = _mlp(x, dy, probs, call.ends, first, activation, last)
        found = {"y": y, "x": dx, "probs": dprobs}
        whole = {name: _with_tail(t, call.x.shape[0]) for name, t in found.items()}
        return whole | dict(zip(of_weights, dw, strict=True))
    index, weight = call.inputs["expert_index"], call.inputs["expert_weight"]
    expert = index.flatten()
    slots = expert.argsort(stable=True)
    slots = slots[expert[slots] < call.num_experts]
    ends = tuple(expert.bincount(minlength=call.num_experts)[: call.num_experts].cumsum(0).tolist())
    token = slots // index.shape[1]
    x, dy, probs = call.x.detach()[token], call.grad_output[token], weight.detach().flatten()[slots]
    y, dx, dprobs, *dw = _mlp(x, dy, probs, ends, first, activation, last)
    tokens = dx.new_zeros(call.x.shape)
    found = {"y": tokens.index_add(0, token, y), "x": tokens.index_add(0, token, dx)}
    found["expert_weight"] = dprobs.new_zeros(weight.numel()).index_copy(0, slots, dprobs).view(weight.shape)
    return found | dict(zip(of_weights, dw, strict=True))


def _mlp(
    x: Tensor,
    dy: Tensor,
    probs: Tensor,
    ends: tuple[int, ...],
    first: fm.GroupedLinear,
    activation: Op,
    last: fm.GroupedLinear,
) -> tuple[Tensor, ...]:
    """Return y, the gradients of x and of the row scale, and those of both weights, for rows in the order of experts.

    A bias has no gradient: one that is trained does not run these rules.
    """
    x, dy, probs = x.float(), dy.float(), probs[:, None]
    experts = _Experts(ends, x.device)
    w1, w2 = first.weight.detach().float(), last.weight.detach().float()

    p = experts.products(_rounded(x), _rounded(w1).mT, first.bias)
    d = _activation(activation, p) * probs
    y = experts.products(_rounded(d), _rounded(w2).mT, last.bias)

    g = experts.products(_rounded(dy), _rounded(w2, -2))
    p = p.bfloat16().float().requires_grad_()
    with torch.enable_grad():
        a = _activation(activation, p)
    (dp,) = torch.autograd.grad(a, p, g * probs)
    dx = experts.products(_rounded(dp), _rounded(w1, -2))
    return y, dx, (g * a.detach()).sum(1), experts.sums(dp, x), experts.sums(dy, d)


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

    def products(self, rows: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return each row times its expert's matrix, plus its expert's bias."""
        sums = [rows[of] @ weight for of, weight in zip(self._slices, weights, strict=True)]
        if bias is not None:
            sums = [t + b for t, b in zip(sums, bias.detach().float(), strict=True)]
        return torch.cat(sums)

    def sums(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the weight gradient of rows ``a`` and ``b``, quantized by columns."""
        columns = [_rounded(t, -2, self._offsets) for t in (a, b)]
        return torch.stack([columns[0][of].T @ columns[1][of] for of in self._slices])
