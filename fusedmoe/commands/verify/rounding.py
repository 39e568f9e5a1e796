"""The arithmetic of an expert MLP in MXFP8 or NVFP4, with the rounding points of the Blackwell kernels, in PyTorch.

The kernels apply the activation to the fp32 sums of the first product. Those for MXFP8 quantize its result, and the
derivative, without rounding to bf16; those for NVFP4 round both to bf16 before. The backward pass reads the
preactivation in bf16.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

import fusedmoe as fm
from fusedmoe.numerics.formats import Quantizer, mxfp8, nvfp4

if TYPE_CHECKING:
    from fusedmoe.commands.verify.calls import Call
    from fusedmoe.commands.verify.machine import Results
    from fusedmoe.numerics.formats.groups import PaddedRows
    from fusedmoe.ops.op import Op

FUSED = ("sm100.grouped_gemm_activation_quantize", "sm100.grouped_dgrad_activation_quantize")
"""The rules with these rounding points."""
QUANTIZERS = {
    "mxfp8": (Quantizer(mxfp8()), Quantizer(mxfp8())),
    "nvfp4": (Quantizer(nvfp4(), hadamard=True), Quantizer(nvfp4(across=16))),
}
"""By recipe: the quantizer of rows and gradients, and that of weights."""


def applies(call: Call, rules: Collection[str]) -> bool:
    """Whether `results` is the arithmetic of a call that runs these rules."""
    case = call.case
    return case.module in ("experts", "routed") and case.recipe in QUANTIZERS and set(FUSED) <= set(rules)


def results(call: Call) -> Results:
    """Return the results of a call for which `applies` holds: rows of experts alone differ from zero."""
    layers = {name: op for name, op in call.module.named_children() if isinstance(op, fm.GroupedLinear)}
    (name1, first), (name2, last) = layers.items()
    activation = cast("Any", call.module)[int(name1) + 1]
    if call.case.module == "experts":
        factor, ends = "probs", call.ends
        slots = row = torch.arange(ends[-1], device=call.x.device)
    else:
        factor, index = "expert_weight", call.inputs["expert_index"]
        expert = index.flatten()
        slots = expert.argsort(stable=True)
        slots = slots[expert[slots] < call.num_experts]
        ends = tuple(expert.bincount(minlength=call.num_experts)[: call.num_experts].cumsum(0).tolist())
        row = slots // index.shape[1]
    scale = call.inputs[factor].detach()
    x, dy, probs = call.x.detach()[row], call.grad_output[row], scale.flatten()[slots]
    y, dx, dprobs, *dw = _mlp(call.case.recipe, x, dy, probs, ends, first, activation, last)
    rows = dx.new_zeros(call.x.shape)
    found = {"y": rows.index_add(0, row, y), "x": rows.index_add(0, row, dx)}
    found[factor] = dprobs.new_zeros(scale.numel()).index_copy(0, slots, dprobs).view(scale.shape)
    return found | dict(zip((f"{name1}.weight", f"{name2}.weight"), dw, strict=True))


def _mlp(
    recipe: str,
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
    experts = _Experts(ends, x.device, *QUANTIZERS[recipe])
    w1, w2 = first.weight.detach().float(), last.weight.detach().float()

    def written(t: Tensor) -> Tensor:
        return t if recipe == "mxfp8" else t.bfloat16().float()

    p = experts.products(x, experts.weight(w1).mT, first.bias)
    d = written(cast("Any", activation).compute(p) * probs)
    y = experts.products(d, experts.weight(w2).mT, last.bias)

    g = experts.products(dy, experts.weight(w2, -2))
    p = p.bfloat16().float().requires_grad_()
    with torch.enable_grad():
        a = cast("Any", activation).compute(p)
    dp = written(*torch.autograd.grad(a, p, g * probs))
    dx = experts.products(dp, experts.weight(w1, -2))
    return y, dx, (g * a.detach()).sum(1), experts.sums(dp, x), experts.sums(dy, d)


class _Experts:
    """Products of quantized operands by expert, for rows in the order of experts."""

    def __init__(self, ends: tuple[int, ...], device: torch.device, of_rows: Quantizer, of_weights: Quantizer) -> None:
        self._slices = [slice(start, end) for start, end in pairwise((0, *ends))]
        self._offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        self._of_rows, self._of_weights = of_rows, of_weights

    def weight(self, weight: Tensor, axis: int = -1) -> Tensor:
        """Return a weight after quantization."""
        values: Tensor = fm.quantize(weight, self._of_weights, axis=axis).dequantize(torch.float32)
        return values

    def products(self, rows: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return each row, quantized by rows, times its expert's matrix, plus its expert's bias."""
        values: Tensor = fm.quantize(rows, self._of_rows, offsets=self._offsets).dequantize(torch.float32)
        added = weights.new_zeros(len(weights), 1) if bias is None else bias.detach().float()
        return torch.cat([values[of] @ w + b for of, w, b in zip(self._slices, weights, added, strict=True)])

    def sums(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the weight gradient of rows ``a`` and ``b``, quantized by columns."""
        return torch.stack([x @ y.T for x, y in zip(self._columns(a), self._columns(b), strict=True)])

    def _columns(self, t: Tensor) -> list[Tensor]:
        """Return the values of each expert's rows by columns, rotated where the format rotates."""
        q = fm.quantize(t, self._of_rows, axis=-2, offsets=self._offsets)
        values, factor = q.split()
        ends = cast("PaddedRows", q.padded).ends_E.tolist()
        each = [values[:, start:end] for start, end in pairwise((0, *ends))]
        return each if factor is None else [part * of for part, of in zip(each, factor, strict=True)]
