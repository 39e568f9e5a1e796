"""Plain-PyTorch stand-ins for the Hopper kernels: the same interface, on any device. Calls are recorded.

They are as strict as the kernels about what they are given, and round as the kernels do: products and activations in
fp32, one rounding at the end.
"""

import math
from itertools import pairwise

import torch

from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.rows.activation import functions as activation_functions
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.rows.quantize import block_functions, format_functions
from fusedmoe.kernels.rows.quantize.block_functions import scale_like
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.kernels.sm90 import router as router_functions
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.router import LogitsGrad, Routed
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.expert_rows import offsets_from_splits as plain_offsets
from fusedmoe.numerics.expert_rows import sort_by_expert
from fusedmoe.numerics.formats import (
    E5M2,
    Delayed,
    QuantizedTensor,
    Quantizer,
    ScaleRule,
    fp8_block,
    fp8_tensor,
    quantize,
    quantizers,
)
from fusedmoe.numerics.formats.casts import to_codes
from fusedmoe.numerics.formats.delayed import AmaxHistory
from fusedmoe.numerics.formats.groups import PaddedRows, group_of, of_group
from fusedmoe.numerics.formats.hadamard import rotate
from fusedmoe.ops.glu import GeGLU, ReGLU, SquaredReLU, SwiGLU
from fusedmoe.ops.router import Router

BF16, CPU = torch.bfloat16, torch.device("cpu")
ROW_TILE = 4  # so that few rows have several; the kernels' tiles have 128
calls = []  # (name, what distinguishes the call)


def _op(activation):
    assert isinstance(activation, Activation)
    if activation.kind == "squared_relu":
        return SquaredReLU()
    settings = (activation.limit, activation.alpha, activation.offset, activation.interleaved)
    if activation.kind.startswith("geglu"):
        return GeGLU("tanh" if activation.kind == "geglu_tanh" else "none", *settings)
    return {"swiglu": SwiGLU, "reglu": ReGLU}[activation.kind](*settings)


def _note(name, options, **what):
    assert isinstance(options, KernelOptions)
    calls.append((name, {"options": options, **what}))


def _matrix(t, transposed=False):
    assert t.shape[0]
    assert limits.why_not_matrix("t", t.shape, t.stride(), t.data_ptr(), transposed) is None


def _product(x, weight, offsets, bias):
    """fp32, rows that belong to no expert zero."""
    assert offsets.dtype is torch.int32
    assert len({x.dtype, weight.dtype, *([] if bias is None else [bias.dtype])}) == 1
    assert x.dtype in (torch.bfloat16, torch.float16)
    return _product_of(x, weight, offsets, bias)


def _product_of(x, weight, offsets, bias):
    y = torch.zeros(x.shape[0], weight.shape[1])
    first = 0
    for e, end in enumerate(offsets.tolist()):
        y[first:end] = x[first:end].float() @ weight[e].float().T
        if bias is not None:
            y[first:end] += bias[e].float()
        first = end
    return y


def _scaled(y, row_scale, offsets):
    if row_scale is not None:
        y = y * row_scale.float()[:, None]
    y[offsets[-1] :] = 0  # not a product: the rows after the experts' may be NaN
    return y


def grouped_gemm(x, weight, offsets, *, bias=None, row_scale=None, options=DEFAULT):
    _note("grouped_gemm", options, bias=bias is not None, row_scale=row_scale is not None)
    _matrix(x)
    _matrix(weight, transposed=True)
    return _scaled(_product(x, weight, offsets, bias), row_scale, offsets).to(x.dtype)


def grouped_gemm_activation(
    x, weight, offsets, activation, *, bias=None, row_scale=None, keep_preactivation=True, options=DEFAULT
):
    _note("grouped_gemm_activation", options, keep_preactivation=keep_preactivation, row_scale=row_scale is not None)
    _matrix(x)
    _matrix(weight, transposed=True)
    p = _product(x, weight, offsets, bias)
    y = _scaled(_op(activation).compute(p), row_scale, offsets).to(x.dtype)
    return y, p.to(x.dtype) if keep_preactivation else None


def grouped_gemm_activation_backward(
    grad_output,
    weight,
    offsets,
    preactivation,
    activation,
    *,
    row_scale=None,
    want_output=True,
    want_row_scale_grad=False,
    options=DEFAULT,
):
    _note("grouped_gemm_activation_backward", options, want_output=want_output, want_row_scale_grad=want_row_scale_grad)
    _matrix(grad_output)
    _matrix(weight, transposed=True)
    _matrix(preactivation)
    op, p = _op(activation), preactivation.float()
    d = _product(grad_output, weight.mT, offsets, None)
    (derivative,) = op.backward_ops()
    y = op.compute(p)
    dp = _scaled(derivative.compute(_scaled(d.clone(), row_scale, offsets), p), None, offsets)
    ds = (d * y).sum(1)
    ds[offsets[-1] :] = 0
    return (
        dp.to(grad_output.dtype),
        _scaled(y, row_scale, offsets).to(grad_output.dtype) if want_output else None,
        ds if want_row_scale_grad else None,
    )


def grouped_wgrad(grad_output, x, offsets, *, out=None, dtype=None, accumulate=False, options=DEFAULT):
    _note("grouped_wgrad", options, accumulate=accumulate, dtype=dtype)
    _matrix(grad_output)
    _matrix(x)
    dw = torch.zeros(offsets.shape[0], grad_output.shape[1], x.shape[1])
    first = 0
    for e, end in enumerate(offsets.tolist()):
        dw[e] = grad_output[first:end].float().T @ x[first:end].float()
        first = end
    if accumulate:
        out.data.add_(dw.to(out.dtype))  # kernels do not change the version
        return out
    return dw.to(dtype or x.dtype)


class Bound:
    """A function for tensors like these, which then come in some order; it refuses others."""

    def __init__(self, run, *tensors):
        self.run, self.kinds = run, [self.kind(t) for t in tensors]

    @staticmethod
    def kind(t):
        # a gradient may come as a copy that the kernel can read
        return (t.shape, t.dtype) if isinstance(t, torch.Tensor) else None

    def __call__(self, *tensors):
        coming = [self.kind(t) for some in tensors for t in (some if isinstance(some, tuple) else (some,))]
        assert all(kind in coming for kind in self.kinds), "bound for other tensors"
        return self.run(*tensors)


def _some(*tensors):
    return [t for t in tensors if t is not None]


def _gathered(name, source, index):
    """The rows that a kernel reads through an index; the source itself without one."""
    if index is None:
        return source
    assert index.dtype is torch.int32
    assert index.is_contiguous()
    assert 0 <= int(index.min()) <= int(index.max()) < source.shape[0]
    _matrix(source)
    calls.append((f"gathered_{name}", {"source": source.shape[0], "rows": index.shape[0]}))
    return source[index]


def _rows_of(part, experts):
    """Experts and their rows, from and to, of the ranges of a launch."""
    ranges = part[:-1].view(-1, 2, experts + 1)
    calls.append(("ranges", {"of_launch": len(ranges)}))
    assert len(ranges) == 1 or part[-1] == 1, "the rows have not arrived"
    return [
        (expert, (start, end))
        for starts, ends in ranges.tolist()
        for expert, (start, end) in enumerate(zip(starts, ends, strict=True))
        if start < end
    ]


def _by_ranges(ranges, rows, experts, product):
    """The results of ``product(rows, offsets)`` for all rows: a launch per part of ``ranges``, a call per expert."""
    results = None
    for part in ranges:
        for expert, (start, end) in _rows_of(part, experts):
            # rows of no expert are those after all offsets
            offsets = torch.tensor([0] * expert + [end - start] * (experts - expert), dtype=torch.int32)
            got = product(slice(start, end), offsets)
            if results is None:
                results = [None if t is None else t.new_full((rows, *t.shape[1:]), torch.nan) for t in got]
            for whole, t in zip(results, got, strict=True):
                if whole is not None:
                    whole[start:end] = t
    return results


def _of(rows, *tensors):
    return [None if t is None else t[rows] for t in tensors]


def _in_order(rows, gather):
    """The rows of a matrix for a part of the results, through the index if there is one."""
    return (lambda x: x[rows]) if gather is None else (lambda x: x[gather[rows]])


def _of_codes(product):
    """A function of both operands, as `Codes`, for one of codes and scales."""
    return lambda a, b, *others: product(*a, *b, *others)


def bind_grouped_gemm(x, weight, bias, row_scale, options, gather=None, *, ranges=False):
    if isinstance(x, Codes):
        by_expert = x.scale.dim() == 1
        return _of_codes(_bind_block_scaled_gemm(*_values(x, weight), bias, row_scale, options, by_expert=by_expert))

    def run(x, weight, bias, offsets, row_scale, gather=None, out=None):
        def product(rows, offsets):
            (scale,) = _of(rows, row_scale)
            x_of_rows = _in_order(rows, gather)(x)
            return (grouped_gemm(x_of_rows, weight, offsets, bias=bias, row_scale=scale, options=options),)

        if ranges:
            assert out is not None, "the rules give the memory"
            for part in offsets:  # written at once: the next part may be taken after a step that reads it
                got = _by_ranges([part], len(out), len(weight), product)
                for _, (start, end) in _rows_of(part, len(weight)):
                    out[start:end] = got[0][start:end]
            return out
        x = _gathered("gemm", x, gather)
        return grouped_gemm(x, weight, offsets, bias=bias, row_scale=row_scale, options=options)

    return Bound(run, x, weight, bias, row_scale, *_some(gather))


def _values(*operands):
    return [operand.codes for operand in operands]


def bind_grouped_gemm_activation(
    x, weight, bias, row_scale, activation, keep_preactivation, options, gather=None, *, quantized=None, ranges=False
):
    if isinstance(x, Codes):
        by_expert, operands = x.scale.dim() == 1, _values(x, weight)
        how = activation, keep_preactivation, quantized, options
        return _of_codes(_bind_block_scaled_gemm_activation(*operands, bias, row_scale, *how, by_expert=by_expert))
    assert quantized is None

    def run(x, weight, bias, offsets, row_scale, gather=None):
        settings = {"bias": bias, "keep_preactivation": keep_preactivation, "options": options}

        def product(rows, offsets):
            (scale,) = _of(rows, row_scale)
            x_of_rows = _in_order(rows, gather)(x)
            return grouped_gemm_activation(x_of_rows, weight, offsets, activation, row_scale=scale, **settings)

        if ranges:
            y, p = _by_ranges(offsets, x.shape[0] if gather is None else gather.shape[0], len(weight), product)
            return (y, p) if keep_preactivation else y
        x = _gathered("gemm_activation", x, gather)
        y, p = grouped_gemm_activation(x, weight, offsets, activation, row_scale=row_scale, **settings)
        return (y, p) if keep_preactivation else y

    return Bound(run, x, weight, bias, row_scale, *_some(gather))


def bind_grouped_gemm_activation_backward(
    grad_output, weight, preactivation, row_scale, activation, want_output, want_row_scale_grad, options, gather=None,
    *, ranges=False,
):  # fmt: skip
    if isinstance(grad_output, Codes):
        by_expert, operands = grad_output.scale.dim() == 1, _values(grad_output, weight)
        how = preactivation, row_scale, activation, want_output, want_row_scale_grad, options
        return _of_codes(_bind_block_scaled_gemm_activation_backward(*operands, *how, by_expert=by_expert))

    def run(grad_output, weight, offsets, preactivation, row_scale, gather=None):
        settings = {"want_output": want_output, "want_row_scale_grad": want_row_scale_grad, "options": options}

        def product(rows, offsets):
            p, scale = _of(rows, preactivation, row_scale)
            dy = _in_order(rows, gather)(grad_output)
            return grouped_gemm_activation_backward(dy, weight, offsets, p, activation, row_scale=scale, **settings)

        if ranges:
            return _by_ranges(offsets, preactivation.shape[0], len(weight), product)
        grad_output = _gathered("gemm_activation_backward", grad_output, gather)
        return grouped_gemm_activation_backward(
            grad_output, weight, offsets, preactivation, activation, row_scale=row_scale, **settings
        )

    return Bound(run, grad_output, weight, preactivation, row_scale, *_some(gather))


def bind_grouped_wgrad(
    grad_output, x, offsets, dtype, accumulate, options, gather=None, gathered=None, beside=False, *, transposed=False
):
    assert gathered in ({None} if gather is None else {"grad_output", "x"})
    if isinstance(x, Codes):
        by_expert, operands = x.scale.dim() == 1, _values(grad_output, x)
        how = offsets, operands[0].shape[1], dtype, accumulate, options, beside
        product = _bind_block_scaled_wgrad(*operands, *how, by_expert=by_expert, transposed=transposed)
        return lambda dy, x, offsets, out=None: product(*dy, *x, offsets, out)

    def run(grad_output, x, offsets, out, gather=None):
        assert out is None or out.dtype is dtype
        if beside:
            calls.append(("beside", {}))
        if gathered == "x":
            x = _gathered("wgrad_x", x, gather)
        else:
            grad_output = _gathered("wgrad_dy", grad_output, gather)
        if transposed:
            assert out is None or out.mT.is_contiguous()
            out = None if out is None else out.mT
            settings = {"out": out, "dtype": dtype, "accumulate": accumulate, "options": options}
            return grouped_wgrad(x, grad_output, offsets, **settings).mT
        return grouped_wgrad(grad_output, x, offsets, out=out, dtype=dtype, accumulate=accumulate, options=options)

    return Bound(run, grad_output, x, offsets, *_some(gather))


def bind_column_sums(grad, offsets, dtype=None):
    return Bound(lambda grad, offsets: column_sums(grad, offsets, dtype), grad, offsets)


def bind_zero_tail(rows, offsets):
    def run(rows, offsets):
        calls.append(("zero_tail", {}))
        _matrix(rows)
        assert offsets.dtype is torch.int32
        rows[int(offsets[-1]) :] = 0
        return rows

    return Bound(run, rows, offsets)


def bind_offsets_from_splits(splits, rows):
    return Bound(lambda splits, *_: offsets_from_splits(splits, rows), splits)


def column_sums(grad, offsets, dtype=None):
    calls.append(("column_sums", {}))
    _matrix(grad)
    sums = [grad[a:b].float().sum(0) for a, b in zip([0, *offsets.tolist()], offsets.tolist(), strict=False)]
    return torch.stack(sums).to(dtype or grad.dtype)


def offsets_from_splits(splits, rows):
    calls.append(("offsets_from_splits", {}))
    assert splits.is_contiguous()
    return plain_offsets(splits, rows)


def bind_route(index, weight, experts, chunk_slots=None, num_rows=None):
    def run(index, weight, counts=None):
        calls.append(("route", {} if counts is None else {"counted": True}))
        assert (counts is None) == (chunk_slots is None)
        assert index.is_contiguous()
        assert weight.is_contiguous()
        assert index.dtype in (torch.int32, torch.int64)
        slot_of_row, row_of_slot, splits = sort_by_expert(index, experts, num_rows)
        probs = weight.flatten()[slot_of_row]
        probs[splits.sum() :] = 0
        token_of_row, offsets = slot_of_row // index.shape[1], splits.cumsum(0)
        return splits, probs, row_of_slot, slot_of_row, token_of_row.to(torch.int32), offsets.to(torch.int32)

    return Bound(run, index, weight)


def _used(row_of_slot, slot_of_row):
    return row_of_slot.flatten()[slot_of_row] < slot_of_row.numel()


def _activation_operands(x, scale):
    assert x.dtype in (torch.bfloat16, torch.float16)
    _matrix(x)
    if scale is not None:
        assert scale.shape == x.shape[:1]
        assert scale.is_contiguous()
        assert scale.dtype in (torch.float32, torch.bfloat16, torch.float16)


def bind_activation(x, scale, activation):
    def run(x, scale):
        calls.append(("activation", {"scale": scale is not None}))
        _activation_operands(x, scale)
        y = _op(activation).compute(x.float())
        return (y if scale is None else y * scale.float()[:, None]).to(x.dtype)

    return Bound(run, *_some(x, scale))


def bind_activation_backward(dy, x, scale, activation, want_scale, want_output):
    def run(dy, x, scale):
        calls.append(("activation_backward", {"want_scale": want_scale, "want_output": want_output}))
        _activation_operands(x, scale)
        _matrix(dy)
        assert dy.dtype is x.dtype
        op, p, d = _op(activation), x.float(), dy.float()
        factor = 1.0 if scale is None else scale.float()[:, None]
        (derivative,) = op.backward_ops()
        y = op.compute(p)
        return (
            derivative.compute(d * factor, p).to(x.dtype),
            (d * y).sum(1).to(scale.dtype) if want_scale else None,
            (y * factor).to(x.dtype) if want_output else None,
        )

    return Bound(run, *_some(dy, x, scale))


def bind_gather_rows(source, row_of_slot, scale, num_rows=None):
    def run(source, row_of_slot, slot_of_row, scale=None):
        assert slot_of_row.numel() == (row_of_slot.numel() if num_rows is None else num_rows)
        calls.append(("gather_rows", {"scale": scale is not None}))
        _matrix(source)
        rows = source[slot_of_row // row_of_slot.shape[1]].float()
        rows = rows if scale is None else rows * scale.float()[:, None]
        rows[~_used(row_of_slot, slot_of_row)] = 0
        return rows.to(source.dtype)

    return Bound(run, *_some(source, scale))


def bind_copy_rows(rows, sms):
    def run(rows, row_of, out):
        calls.append(("copy_rows", {"sms": sms}))
        _matrix(rows)
        out[:] = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[row_of]

    return Bound(run, rows)


def bind_row_ranges(offsets, token_of_row, first, end, tokens, divided=None):
    def run(offsets, token_of_row, out):
        calls.append(("row_ranges", {}))
        experts, rows = len(offsets), len(token_of_row)
        found = torch.zeros(3, 2, experts + 1, dtype=torch.int32)
        for e, (start, stop) in enumerate(pairwise([0, *offsets.tolist(), rows])):
            own, own_end = (start + int((token_of_row[start:stop] < bound).sum()) for bound in (first, end))
            own = min(start - (start - own) // ROW_TILE * ROW_TILE, stop)
            own_end = stop if own_end == stop else max(own, start + (own_end - start) // ROW_TILE * ROW_TILE)
            if e >= (experts if divided is None else divided):
                own, own_end = (start, start) if end < tokens else (stop, stop) if first else (start, stop)
            found[:, :, e] = torch.tensor([[own, own_end], [start, own], [own_end, stop]])
        out[:-1] = found.flatten()
        return out

    return Bound(run, offsets, token_of_row)


def bind_sum_slots(rows, row_of_slot, scale, addend=None, beside_sms=0):
    def run(rows, row_of_slot, scale=None, addend=None, into=None):
        what = {"adds": addend is not None, "beside_sms": beside_sms}
        calls.append(("sum_slots", {"scale": scale is not None} | {k: v for k, v in what.items() if v}))
        _matrix(rows)
        out = torch.zeros(row_of_slot.shape[0], rows.shape[1])
        if addend is not None:
            assert addend.dtype is rows.dtype
            out += addend.float()
        for t, of_token in enumerate(row_of_slot.tolist()):
            for row in of_token:
                if row < rows.shape[0]:
                    out[t] += rows[row].float() * (1 if scale is None else scale[row].float())
        if into is not None:
            return into.copy_(out)
        return out.to(rows.dtype) if addend is None else addend.copy_(out)

    return Bound(run, *_some(rows, scale, addend))


def bind_sum_slots_and_part(rows, row_of_slot, scale):
    total = bind_sum_slots(rows, row_of_slot, scale)

    def run(rows, row_of_slot, scale, part):
        assert part.dtype is rows.dtype
        return total(rows, row_of_slot, scale) + part

    return Bound(run, *_some(rows, scale))


def bind_row_dots(source, rows, row_of_slot, dtype):
    def run(source, rows, row_of_slot, slot_of_row):
        calls.append(("row_dots", {}))
        _matrix(rows)
        _matrix(source)
        dots = (source[slot_of_row // row_of_slot.shape[1]].float() * rows.float()).sum(1)
        dots[~_used(row_of_slot, slot_of_row)] = 0
        return dots.to(dtype)

    return Bound(run, source, rows)


def bind_slot_values(values, row_of_slot):
    def run(values, row_of_slot):
        calls.append(("slot_values", {}))
        assert values.is_contiguous()
        return torch.cat([values, values.new_zeros(1)])[row_of_slot]

    return Bound(run, values)


def bind_quantize_rows(x, format, offsets=None, index=None, *, rows=True, columns=False):
    def run(x, offsets=None, index=None):
        calls.append(("quantize_rows", {"rows": rows, "columns": columns}))
        x = _gathered("quantize_rows", x, index)
        _matrix(x)
        return _forms([quantize(x, format, axis, offsets=offsets) for axis in _axes(rows, columns)])

    return Bound(run, *_some(x, offsets, index))


def bind_quantize_weight(weight, format, *, rows=True, columns=False):
    def run(weight):
        calls.append(("quantize_weight", {"rows": rows, "columns": columns}))
        _matrix(weight, transposed=True)
        return _forms([quantize(weight, format, axis) for axis in _axes(rows, columns)])

    return Bound(run, weight)


def bind_transpose_codes(codes, scale):
    def run(codes, scale):
        calls.append(("transpose_codes", {"shape": tuple(codes.shape)}))
        assert codes.is_contiguous()
        stored = scale_like(scale, scale.shape[-1], codes.shape[-2], codes.shape[0])
        return codes.mT.contiguous(), stored.copy_(scale.mT)

    return Bound(run, codes, scale)


def _axes(rows, columns):
    assert rows or columns
    return [axis for axis, wanted in ((-1, rows), (-2, columns)) if wanted]


def _forms(forms):
    """The tensors of quantized values, with the strides that the kernels give the scales."""
    scales = [scale_like(f.scale, f.scale.shape[-2], f.data.shape[-1], *f.scale.shape[:-2]) for f in forms]
    return tuple((f.data, scale.copy_(f.scale)) for f, scale in zip(forms, scales, strict=True))


def bind_magnitudes(
    x, offsets=None, index=None, *, of_rows=False, of_columns=False, of_experts=False, of_experts_rotated=False
):
    def run(x, offsets=None, index=None):
        x = _gathered("magnitudes", x, index)
        found = []
        if of_rows:
            values, _ = quantizers._laid_out(x, -1, offsets, 1)
            found.append(quantizers._finite_magnitude(values).amax(-1).flatten())
        if of_columns:
            values, experts = quantizers._laid_out(x, -2, offsets, 16)
            amax = experts.amax_of_rows(quantizers._finite_magnitude(values))
            found.append(amax[..., 0] if x.dim() == 3 else amax.mT)
        if of_experts:
            found.append(quantizers.amax_by_expert(x, offsets))
        if of_experts_rotated:
            values, experts = quantizers._laid_out(x, -2, offsets, 16)
            turned = rotate(torch.nn.functional.pad(values, (0, -values.shape[-1] % 16))).float()
            found.append(experts.amax(quantizers._finite_magnitude(turned)))
        return tuple(found)

    return Bound(run, *_some(x, offsets, index))


def bind_quantize_format(
    x, format, offsets=None, index=None, *, rows=True, columns=False, rotated=False, stochastic=False, amax=False
):
    def run(x, offsets=None, index=None, factors=(), random=(), largest=None):
        calls.append(("quantize_format", {"rows": rows, "columns": columns}))
        x = _gathered("quantize_format", x, index)
        _matrix(x, transposed=False)
        assert amax is (largest is not None)
        if amax:
            assert not largest.any()
            largest.copy_(quantizers.amax_by_expert(x, offsets))
        forms = []
        for i, axis in enumerate(_axes(rows, columns)):
            if format.block == (1, None):
                forms.append((_scaled_by(x, axis, offsets, factors[i], format), None))
                continue
            if format.block == (None, None):
                form = quantize(x, format, axis, offsets=offsets, encode=factors[i])
                forms.append((form.data.view(torch.uint8), None))
                continue
            quantizer = Quantizer(format, stochastic, rotated)
            form = quantize(x, quantizer, axis, offsets=offsets, random_bits=random[i] if random else None)
            if factors:
                assert torch.equal(1 / factors[i], form.tensor_scale)
            forms.append((form.data.view(torch.uint8), form.scale.view(torch.uint8)))
        return tuple(forms)

    return Bound(run, *_some(x, offsets, index))


def _scaled_by(x, axis, offsets, factor, format):
    """The codes of values times the factor of each row, or of each column of an expert."""
    values, experts = quantizers._laid_out(x, axis, offsets, 16)
    if axis == -1:
        factor = factor.view(*x.shape[:-1], 1)
    elif experts.padded is not None:
        factor = of_group(factor.mT, experts.padded.expert_of_padded())
    else:
        factor = factor.view(*values.shape[:-1], 1)
    return to_codes(values * factor, format.element).view(torch.uint8)


def bind_transpose_rows(codes, offsets):
    def run(codes, offsets):
        calls.append(("transpose_rows", {}))
        assert codes.is_contiguous()
        assert codes.shape[1] % 16 == 0
        padded = PaddedRows.of(offsets, len(codes), 128)
        return padded.spread(codes.view(torch.uint8)).mT.contiguous().view(codes.dtype)

    return Bound(run, codes, offsets)


def bind_update_amax_history(most, least, *, power_of_two, most_recent):
    margin = round(math.log2(E5M2.max / most))  # as many binades from E5M2 have the same quotients
    assert E5M2.max / 2**margin == most
    format = fp8_tensor(E5M2, power_of_two, least)

    def run(history, amax, reference, encode, previous):
        calls.append(("update_amax_history", {}))
        plain = AmaxHistory(Quantizer(format, delayed=Delayed(len(history), most_recent, margin)), len(amax), CPU)
        plain.amax, plain.reference, plain.encode, plain.previous = history, reference, encode, previous
        plain.update(amax)
        return 1 / previous

    return run


def bind_dequantize(codes, scale, format, *, transposed=False):
    def run(codes, scale):
        calls.append(("dequantize", {"transposed": transposed}))
        values, _ = QuantizedTensor(codes, scale, format, -1, codes.shape, BF16, scale).split(BF16)
        return values.mT.contiguous() if transposed else values

    return Bound(run, codes)


def _dequantized(codes, scale, offsets=None):
    """fp32 values of codes and scales that a kernel can read: one scale per row, per 128 rows of a weight, or per
    expert; the latter for weights, or rows with offsets.
    """
    assert codes.stride(-1) == 1
    assert codes.stride(-2) % 16 == codes.data_ptr() % 16 == 0
    assert products.has_strides(scale)
    if scale.dim() == 1:
        of_line = scale[:, None, None] if codes.dim() == 3 else of_group(scale, group_of(offsets, len(codes)))[:, None]
        return codes.float() * of_line
    wide = scale.repeat_interleave(128, -1)[..., : codes.shape[-1]]
    if codes.dim() == 3:
        wide = wide.repeat_interleave(128, -2)[:, : codes.shape[1]]
    assert wide.shape == codes.shape
    return codes.float() * wide


def _fp8_product(x, x_scale, weight, weight_scale, offsets, bias):
    assert offsets.dtype is torch.int32
    assert weight.dtype is torch.float8_e4m3fn
    assert bias is None or (bias.dtype is BF16 and bias.is_contiguous())
    rows, weights = _dequantized(x, x_scale, offsets), _dequantized(weight, weight_scale)
    return _product_of(rows, weights, offsets, bias)


def _bind_block_scaled_gemm(x, weight, bias, row_scale, options, *, by_expert=False):
    def run(x, x_scale, weight, weight_scale, bias, offsets, row_scale):
        assert by_expert is (x_scale.dim() == 1) is (weight_scale.dim() == 1)
        _note("block_scaled_gemm", options, codes=x.dtype, row_scale=row_scale is not None)
        return _scaled(_fp8_product(x, x_scale, weight, weight_scale, offsets, bias), row_scale, offsets).to(BF16)

    return Bound(run, x, weight, bias, row_scale)


def _bind_block_scaled_gemm_activation(
    x, weight, bias, row_scale, activation, keep_preactivation, quantized, options, *, by_expert=False
):
    assert not activation.interleaved
    assert not activation.gated or weight.shape[1] % (32 if by_expert else 256) == 0

    def run(x, x_scale, weight, weight_scale, bias, offsets, row_scale, encode=None, amax=None):
        assert by_expert is (x_scale.dim() == 1) is (weight_scale.dim() == 1)
        _note("block_scaled_gemm_activation", options, keep=keep_preactivation, quantized=quantized)
        p = _fp8_product(x, x_scale, weight, weight_scale, offsets, bias).to(BF16)
        y = _scaled(_op(activation).compute(p.float()), row_scale, offsets).to(BF16)
        written = (y,)
        if quantized is not None and quantized.block[1] is None:
            form = quantize(y, quantized, -1, offsets=offsets, encode=encode)
            amax.copy_(quantizers.amax_by_expert(y, offsets))
            written = (form.data,)
        elif quantized is not None:
            (written,) = _forms([quantize(y, quantized, -1, offsets=offsets)])
        return (*written, p) if keep_preactivation else written

    return Bound(run, x, weight, bias, row_scale)


def _bind_block_scaled_gemm_activation_backward(
    grad_output, weight, preactivation, row_scale, activation, want_output, want_row_scale_grad, options, *,
    by_expert=False,
):  # fmt: skip
    def run(grad_output, grad_scale, weight, weight_scale, offsets, preactivation, row_scale):
        _note(
            "block_scaled_gemm_activation_backward", options, codes=grad_output.dtype, want_output=want_output,
            want_row_scale_grad=want_row_scale_grad,
        )  # fmt: skip
        assert by_expert is (grad_scale.dim() == 1) is (weight_scale.dim() == 1)
        _matrix(preactivation)
        op, p = _op(activation), preactivation.float()
        d = _fp8_product(grad_output, grad_scale, weight, weight_scale, offsets, None)
        y = op.compute(p)
        dp = _scaled(op.backward_ops()[0].compute(_scaled(d.clone(), row_scale, offsets), p), None, offsets)
        ds = (d * y).sum(1)
        ds[offsets[-1] :] = 0
        output = _scaled(y, row_scale, offsets).to(BF16) if want_output else None
        return dp.to(BF16), output, ds if want_row_scale_grad else None

    return Bound(run, grad_output, weight, preactivation, row_scale)


def bind_grouped_gemm_activation_backward_codes(
    grad_output, weight, preactivation, row_scale, activation, quantized, forms, want_row_scale_grad, options
):
    grad_output, weight = _values(grad_output, weight)
    assert weight.shape[1] % 128 == 0
    assert not activation.interleaved
    assert quantized.rule is ScaleRule.POWER_OF_TWO
    assert not quantized.amax_epsilon
    in_bf16 = _bind_block_scaled_gemm_activation_backward(
        grad_output, weight, preactivation, row_scale, activation, True, want_row_scale_grad, options
    ).run

    def run(grad_output, grad_scale, weight, weight_scale, offsets, preactivation, row_scale):
        dp, y, ds = in_bf16(grad_output, grad_scale, weight, weight_scale, offsets, preactivation, row_scale)
        calls.pop()
        _note(
            "block_scaled_gemm_activation_backward_codes", options, codes=grad_output.dtype, quantized=quantized,
            forms=forms, want_row_scale_grad=want_row_scale_grad,
        )  # fmt: skip
        each = zip(forms, (dp, dp, y), (-1, -2, -2), (quantized, quantized, fp8_block()), strict=True)
        written = [quantize(t, format, axis, offsets=offsets) for wanted, t, axis, format in each if wanted]
        return _forms(written), ds

    return _of_codes(Bound(run, grad_output, weight, preactivation, row_scale))


def _bind_block_scaled_wgrad(
    dy, x, offsets, rows, dtype, accumulate, options, beside=False, *, by_expert=False, transposed=False
):
    if transposed and dy.dtype is x.dtype:
        product = _bind_block_scaled_wgrad(
            x, dy, offsets, rows, dtype, accumulate, options, beside, by_expert=by_expert
        )
        return lambda dy, dy_scale, x, x_scale, offsets, out: (
            product(x, x_scale, dy, dy_scale, offsets, None if out is None else out.mT).mT
        )

    def run(dy, dy_scale, x, x_scale, offsets, out):
        if beside:
            calls.append(("beside", {}))
        _note("block_scaled_wgrad", options, dtype=dtype, accumulate=accumulate)
        assert by_expert is (dy_scale.dim() == 1) is (x_scale.dim() == 1)
        if by_expert:
            ends = PaddedRows.of(offsets, rows, 128).ends_E
            expert = group_of(ends, dy.shape[1])
            a, b = (codes.float() * of_group(scale, expert) for codes, scale in ((dy, dy_scale), (x, x_scale)))
        else:
            a, b = _dequantized(dy, dy_scale), _dequantized(x, x_scale)
        dw, first, begin = torch.zeros(len(offsets), len(dy), len(x)), 0, 0
        for e, end in enumerate(offsets.tolist()):
            last = first + end - begin
            dw[e] = a[:, first:last] @ b[:, first:last].T
            first, begin = first + -(-(end - begin) // 128) * 128, end
        if not accumulate:
            return dw.to(dtype)
        out.data.add_(dw.to(out.dtype))  # kernels do not change the version
        return out

    return run


def bind_router(x, weight, bias, choice, want_sums, options):
    def run(x, weight, bias, correction):
        _note("router", options, sums=want_sums)
        _matrix(x)
        _matrix(weight)
        assert (x.dtype, weight.dtype) in ((BF16, BF16), (BF16, torch.float32), (torch.float16, torch.float16))
        assert choice.corrected is (correction is not None)
        router = _router(choice, weight.shape[0], weight.shape[1])
        index, weights, logits, *sums = router.compute(x, weight, bias, correction, all_values=True)
        counts = torch.zeros(1, weight.shape[0] + 1, dtype=torch.int32)
        return Routed(index, weights, logits, counts, torch.cat([sums[0], sums[1][None]]) if want_sums else None)

    return Bound(run, x, weight, bias)


def _router(choice, experts, hidden):
    return Router(
        hidden, experts, choice.top_k, choice.score, choice.renormalize, choice.scale, False, choice.corrected,
        choice.num_groups, choice.top_groups,
    )  # fmt: skip


def bind_route_counted(index, weight, experts, num_rows=None):
    return bind_route(index, weight, experts, 1, num_rows)


def bind_logits_grad(logits, grads, choice, blocks, groups, want_sums, want_whole, weight):
    assert any(g is not None for g in (grads.weight, *grads[2:]))

    def run(logits, index, grads, weight=None):
        calls.append(("logits_grad", {"blocks": blocks, "rows": grads.row_of_slot is not None}))
        of_weight, row_of_slot, *others = grads
        assert all(g is None or (g.is_contiguous() and g.dtype is torch.float32) for g in (of_weight, *others))
        of_logits = others[0]
        assert of_logits is None or limits.why_not_address("the gradient of the logits", of_logits.data_ptr()) is None
        if row_of_slot is not None:
            of_weight = torch.cat([of_weight, of_weight.new_zeros(1)])[row_of_slot]
        (derivative, *_) = _router(choice, logits.shape[1], 8).backward_ops()
        whole = derivative.compute(of_weight, *others, logits, index)
        split, rest = [], whole
        for _ in range(3):
            split.append(rest.to(BF16))
            rest = torch.where(split[-1].isfinite(), rest - split[-1].float(), 0.0)
        wide = torch.zeros(len(logits), len(blocks), router_functions.padded(logits.shape[1]), dtype=BF16)
        for i, part in enumerate(blocks):
            wide[:, i, : logits.shape[1]] = split[part]
        ends = torch.arange(1, groups + 1) * (-(-len(logits) // groups // 64) * 64)
        ends = ends.clamp(max=len(logits)).to(torch.int32)
        sums, whole = whole.sum(0) if want_sums else None, whole if want_whole else None
        return LogitsGrad(wide.flatten(1), ends, sums, whole, None if weight is None else _weight_parts(weight))

    return Bound(run, logits, *_some(*grads, weight))


def _weight_parts(weight):
    split = weight.to(BF16), (weight - weight.to(BF16)).to(BF16)
    height, rows = router_functions.padded(len(weight)), router_functions.weight_rows(weight.dtype)
    tall = torch.zeros(len(rows), height, weight.shape[1], dtype=BF16)
    for i, part in enumerate(rows):
        tall[i, : len(weight)] = split[part]
    return tall.flatten(0, 1)


def _blocks(parts, experts):
    return parts.unflatten(1, (-1, router_functions.padded(experts)))[..., :experts].double()


def bind_router_dgrad(parts, weight, options):
    def run(parts, ends, weight):
        _note("router_dgrad", options)
        assert ends[-1] == len(parts)
        return (parts[:, : len(weight)].double() @ weight.double()).to(BF16)

    return Bound(run, parts, _weight_parts(weight))


def bind_router_wgrad(parts, x, experts, groups, dtype, options):
    def run(parts, ends, x):
        _note("router_wgrad", options)
        assert len(ends) == groups
        assert ends[-1] == len(parts)
        blocks = _blocks(parts, experts)
        if dtype is torch.float32:
            blocks = blocks[:, 1:]
        return (blocks.sum(1).T @ x.double()).to(dtype)

    return Bound(run, parts, x)


ROUTER = {name: function for name, function in globals().items() if name.startswith("bind_") and "rout" in name}
ROUTER |= {"bind_logits_grad": bind_logits_grad}
del ROUTER["bind_route"]
BIND = {name: f for name, f in globals().items() if name.startswith("bind_") and name not in ROUTER}
MODULES = products, activation_functions, row_functions, slot_functions, block_functions, format_functions
PLACES = {name: next(module for module in MODULES if hasattr(module, name)) for name in BIND}  # that define them


def install(put=setattr, router=False):
    """Put the stand-ins in place of the kernels; ``put`` is as `setattr`."""
    for name, module in PLACES.items():
        put(module, name, BIND[name])
    for name, function in ROUTER.items() if router else ():
        put(router_functions, name, function)
