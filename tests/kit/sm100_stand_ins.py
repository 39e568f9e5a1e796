"""Plain-PyTorch stand-ins for fusedmoe.kernels.sm100, on any device, with their layouts and their rounding."""

from itertools import pairwise

import torch

from fusedmoe.numerics.formats import mxfp8, quantize
from fusedmoe.numerics.formats.casts import from_codes, unpack
from fusedmoe.numerics.formats.format import E2M1
from fusedmoe.numerics.formats.packed import deinterleave, interleave
from fusedmoe.numerics.formats.swizzle import swizzle, swizzle_column_groups, swizzled_length, unswizzle
from kit import sm100_machine
from kit.sm90_stand_ins import op_of

BF16 = torch.bfloat16


def gemm(x, weight, bias, ends):
    y = _products(_of_rows(x), _of_weight(weight), ends, bias, _alpha(x, weight)).to(BF16)
    return torch.cat([y, y.new_zeros(1, y.shape[1])])


def gemm_activation_quantize(x, weight, bias, ends, factor, activation):
    p = _products(_of_rows(x), _of_weight(weight), ends, bias)
    y = op_of(activation).compute(deinterleave(p) if activation.gated else p)
    return p.to(BF16), *_forms(y if factor is None else y * factor[:, None], ends)


def gemm_derivative_quantize(dy, weight, p, ends, factor, activation):
    dp, dfactor = _derivative(_products(_of_rows(dy), _of_weight(weight), ends), p, factor, activation)
    return *_forms(dp, ends), dfactor


def gemm_activation(x, weight, bias, ends, factor, activation):
    p = _products(_of_rows(x), _of_weight(weight), ends, bias, _alpha(x, weight))
    y = op_of(activation).compute(deinterleave(p) if activation.gated else p)
    return p.to(BF16), (y if factor is None else y * factor[:, None]).to(BF16)


def gemm_derivative(dy, weight, p, ends, factor, activation):
    d = _products(_of_rows(dy), _of_weight(weight), ends, alpha=_alpha(dy, weight))
    dp, dfactor = _derivative(d, p, factor, activation)
    return dp.to(BF16), dfactor


def wgrad(dy, x, ends, out, accumulate=False):
    a, b = _of_columns(dy, ends), _of_columns(x, ends)
    sums = torch.stack([a[start:end].T @ b[start:end] for start, end in pairwise((0, *ends.tolist()))])
    if len(dy) == 3:
        sums = sums * (dy[2] * x[2])[:, None, None]
    out.copy_(out + sums if accumulate else sums)


QUANTIZE = {name: getattr(sm100_machine, name) for name in sm100_machine.QUANTIZE_FUNCTIONS}
GROUPED = {f.__name__: f for f in (gemm, gemm_activation_quantize, gemm_derivative_quantize, wgrad)}
GROUPED_NVFP4 = {f.__name__: f for f in (gemm, gemm_activation, gemm_derivative, wgrad)}


def _derivative(d, p, factor, activation):
    """The gradient of the preactivation, and that of the factor."""
    op, p = op_of(activation), p.float()
    p = deinterleave(p) if activation.gated else p
    dfactor = None
    if factor is not None:
        dfactor = torch.cat([(d * op.compute(p)).sum(1), d.new_zeros(1)])
        d = d * factor[:, None]
    dp = op.backward_ops()[0].compute(d, p)
    return interleave(dp) if activation.gated else dp, dfactor


def _alpha(x, weight):
    """The scales of experts, of NVFP4."""
    return x[2] * weight[2] if len(x) == 3 else None


def _codes(codes):
    """Values of codes, and how many share a scale."""
    if codes.dtype is torch.uint8:
        return from_codes(unpack(codes, 2 * codes.shape[-1]), E2M1, torch.float32), 16
    return codes.float(), 32


def _of_rows(form):
    values, block = _codes(form[0])
    scale = unswizzle(form[1], values.shape[0], values.shape[1] // block)
    return values * scale.float().repeat_interleave(block, -1)


def _of_weight(form):
    parts = form[1].view(form[0].shape[0], -1)
    return torch.stack([_of_rows(part) for part in zip(form[0], parts, strict=True)])


def _of_columns(form, ends):
    """The rows (P, K) of codes with scales by columns, expert by expert; zeros after the last expert's."""
    values, block = _codes(form[0] if form[0].dtype is torch.uint8 else form[0].mT)
    height = -(-values.shape[0] // 128) * 128
    rows = torch.zeros(values.shape)
    for start, end in pairwise((0, *ends.tolist())):
        if start < end:
            of_expert = form[1][height * start // block : height * end // block]
            scale = unswizzle(of_expert, values.shape[0], (end - start) // block).float()
            rows[:, start:end] = values[:, start:end] * scale.repeat_interleave(block, -1)
    return rows.mT


def _products(rows, weights, ends, bias=None, alpha=None):
    """fp32; as the kernels leave them, rows after the last expert's are not written."""
    y = torch.full((rows.shape[0], weights.shape[1]), torch.nan)
    for e, (start, end) in enumerate(pairwise((0, *ends.tolist()))):
        product = rows[start:end] @ weights[e].T * (1 if alpha is None else alpha[e])
        y[start:end] = product + (0 if bias is None else bias[e].float())
    return y


def _forms(rows, ends):
    """Codes and scales by rows and by columns, of rows in the packed layout."""
    by_rows, by_columns = quantize(rows, mxfp8()), quantize(rows, mxfp8(), -2, offsets=ends)
    count = rows.shape[0]
    scale = by_columns.scale[:, : count // 32]
    length = swizzled_length(rows.shape[1], scale.shape[1])
    swizzled = swizzle_column_groups(scale, ends // 32).blocked[:length].contiguous()
    return (by_rows.data, swizzle(by_rows.scale)), (by_columns.data[:, :count].mT.contiguous(), swizzled)
