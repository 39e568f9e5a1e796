"""Plain-PyTorch stand-ins for fusedmoe.kernels.sm100, on any device, with their layouts and their rounding."""

from itertools import pairwise

import torch

from fusedmoe.formats import Quantizer, mxfp8, quantize
from fusedmoe.formats.packed import Packed, deinterleave, interleave, quantize_packed
from fusedmoe.formats.swizzle import swizzle, swizzle_column_groups, swizzled_length, unswizzle
from fusedmoe.ops.glu import SwiGLU
from fusedmoe.ops.squared_relu import SquaredReLU

BF16 = torch.bfloat16


def gemm(x, weight, bias, ends):
    y = _products(_of_rows(x), _of_weight(weight), ends, bias).to(BF16)
    return torch.cat([y, y.new_zeros(1, y.shape[1])])


def gemm_activation_quantize(x, weight, bias, ends, factor, activation):
    p = _products(_of_rows(x), _of_weight(weight), ends, bias)
    y = _op(activation).compute(deinterleave(p) if activation.gated else p)
    return p.to(BF16), *_forms(y if factor is None else y * factor[:, None], ends)


def gemm_derivative_quantize(dy, weight, p, ends, factor, activation):
    d = _products(_of_rows(dy), _of_weight(weight), ends)
    op, p = _op(activation), p.float()
    p = deinterleave(p) if activation.gated else p
    dfactor = None
    if factor is not None:
        dfactor = torch.cat([(d * op.compute(p)).sum(1), d.new_zeros(1)])
        d = d * factor[:, None]
    dp = op.backward_ops()[0].compute(d, p)
    return *_forms(interleave(dp) if activation.gated else dp, ends), dfactor


def wgrad(dy, x, ends, out, accumulate=False):
    a, b = _of_columns(dy, ends), _of_columns(x, ends)
    sums = torch.stack([a[start:end].T @ b[start:end] for start, end in pairwise((0, *ends.tolist()))])
    out.copy_(out + sums if accumulate else sums)


def bind_quantize_packed(x, offsets, index=None, *, rows=True, columns=False, halves=False):
    def run(x, offsets, index=None):
        source = x if index is None else x[index]
        wanted = [axis for axis, given in ((-1, rows), (-2, columns)) if given]
        return tuple(
            quantize_packed(source, Quantizer(mxfp8()), Packed(axis, halves), offsets).tensors() for axis in wanted
        )

    return run


def bind_quantize_packed_weight(weight, *, rows=True, columns=False, halves=False):
    wanted = [axis for axis, given in ((-1, rows), (-2, columns)) if given]
    return lambda weight: tuple(
        quantize_packed(weight, Quantizer(mxfp8()), Packed(axis, halves)).tensors() for axis in wanted
    )


QUANTIZE = {f.__name__: f for f in (bind_quantize_packed, bind_quantize_packed_weight)}
GROUPED = {f.__name__: f for f in (gemm, gemm_activation_quantize, gemm_derivative_quantize, wgrad)}


def _op(activation):
    if activation.kind == "squared_relu":
        return SquaredReLU()
    return SwiGLU(activation.limit, activation.alpha, activation.offset)


def _values(codes, scale):
    return codes.float() * scale.float().repeat_interleave(32, -1)


def _of_rows(form):
    codes, scale = form
    return _values(codes, unswizzle(scale, codes.shape[0], codes.shape[1] // 32))


def _of_weight(form):
    codes, scale = form
    experts, lines, length = codes.shape
    parts = scale.view(experts, -1)
    return _values(codes, torch.stack([unswizzle(part, lines, length // 32) for part in parts]))


def _of_columns(form, ends):
    """The rows (P, K) of codes with scales by columns, expert by expert; zeros after the last expert's."""
    codes, scale = form
    height = -(-codes.shape[1] // 128) * 128
    values = torch.zeros(codes.shape)
    for start, end in pairwise((0, *ends.tolist())):
        if start < end:
            of_expert = scale[height * start // 32 : height * end // 32]
            unswizzled = unswizzle(of_expert, codes.shape[1], (end - start) // 32)
            values[start:end] = _values(codes[start:end].mT, unswizzled).mT
    return values


def _products(rows, weights, ends, bias=None):
    """fp32; as the kernels leave them, rows after the last expert's are not written."""
    y = torch.full((rows.shape[0], weights.shape[1]), torch.nan)
    for e, (start, end) in enumerate(pairwise((0, *ends.tolist()))):
        y[start:end] = rows[start:end] @ weights[e].T + (0 if bias is None else bias[e].float())
    return y


def _forms(rows, ends):
    """Codes and scales by rows and by columns, of rows in the packed layout."""
    by_rows, by_columns = quantize(rows, mxfp8()), quantize(rows, mxfp8(), -2, offsets=ends)
    count = rows.shape[0]
    scale = by_columns.scale[:, : count // 32]
    length = swizzled_length(rows.shape[1], scale.shape[1])
    swizzled = swizzle_column_groups(scale, ends // 32).blocked[:length].contiguous()
    return (by_rows.data, swizzle(by_rows.scale)), (by_columns.data[:, :count].mT.contiguous(), swizzled)
