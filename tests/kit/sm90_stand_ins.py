"""Plain-PyTorch stand-ins for the Hopper kernels: the same interface, on any device. Calls are recorded. Rows that a
kernel need not write are NaN.

They are as strict as the kernels about what they are given, and round as the kernels do: products and activations in
fp32, one rounding at the end.
"""

import functools
import inspect
import math
from itertools import pairwise

import torch

from fusedmoe.kernels.exchange import functions as exchange_functions
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.rows.activation import functions as activation_functions
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.rows.quantize import block_functions, format_functions
from fusedmoe.kernels.rows.quantize.block_functions import scale_like
from fusedmoe.kernels.sm90 import limits, products
from fusedmoe.kernels.sm90 import router as router_functions
from fusedmoe.kernels.sm90.launch import Codes, Part
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
from kit.row_ranges import plain_blocks, plain_ranges, tiles_of

BF16, CPU = torch.bfloat16, torch.device("cpu")
ROW_TILE = 4  # so that few rows have several; the kernels' tiles have 128
COLUMN_TILES = 3
calls = []  # (name, what distinguishes the call)


def op_of(activation):
    assert isinstance(activation, Activation)
    if activation.kind == "squared_relu":
        return SquaredReLU()
    settings = (activation.limit, activation.alpha, activation.offset, activation.interleaved)
    if activation.kind.startswith("geglu"):
        return GeGLU("tanh" if activation.kind == "geglu_tanh" else "none", *settings)
    return {"swiglu": SwiGLU, "reglu": ReGLU}[activation.kind](*settings)


def _note(name, operand, options, **what):
    assert isinstance(options, KernelOptions)
    quantized = isinstance(operand, Codes)
    what |= {"codes": operand.codes.dtype} if quantized else {}
    calls.append((f"{'block_scaled' if quantized else 'grouped'}_{name}", {"options": options, **what}))


def _matrix(t, transposed=False):
    assert t.shape[0]
    assert limits.why_not_matrix("t", t.shape, t.stride(), t.data_ptr(), transposed) is None


def _kinds(operands):
    """Strides do not count, since a gradient may come as a copy that the kernel can read, nor do dtypes of integers."""
    for t in operands:
        if isinstance(t, Codes):
            t = t.codes
        if isinstance(t, tuple):
            yield from _kinds(t)
        elif isinstance(t, torch.Tensor):  # ranges of rows come as a generator
            yield t.shape, t.is_floating_point() and t.dtype


def binds(*operands, matrices=(), says=None):
    """Make a ``bind_...`` of a function of operands and settings.

    It is called with the settings and with operands, and returns a function of operands alone, in this order. That
    function refuses operands of another shape or dtype, and ``matrices`` that the kernels cannot read. It records the
    arguments ``says``: settings, and whether there is an operand.
    """

    def decorate(function):
        signature, name = inspect.signature(function), function.__name__.removeprefix("bind_")
        absent = {name: signature.parameters[name].default for name in operands}
        absent = {name: None if default is inspect.Parameter.empty else default for name, default in absent.items()}

        @functools.wraps(function)
        def bind(*args, **named):
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            given = bound.arguments
            kinds = [*_kinds(given.get(name) for name in operands)]
            settings = {name: value for name, value in given.items() if name not in operands}

            def run(*tensors, **named):
                now = dict(zip(operands, tensors, strict=False)) | named
                coming = [*_kinds(now.values())]
                assert all(kind in coming for kind in kinds), "bound for other tensors"
                values = settings | absent | now
                if says is not None:
                    calls.append((name, {n: values[n] is not None if n in operands else values[n] for n in says}))
                for matrix in matrices:
                    _matrix(values[matrix])
                return function(**values)

            return run

        return bind

    return decorate


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


# ---- products --------------------------------------------------------------------------------------------------------


def _by_expert(offsets):
    return [(e, slice(*ends)) for e, ends in enumerate(pairwise([0, *offsets.tolist()]))]


def _dequantized(operand, offsets=None):
    """fp32 values of codes and scales that a kernel can read: one scale per row, per 128 rows of a weight, or per
    expert; the latter for weights, or rows with offsets.
    """
    codes, scale = operand
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


def _product(a, b, offsets, bias=None):
    """fp32, rows that belong to no expert zero. The weight is (E, N, K)."""
    assert offsets.dtype is torch.int32
    if isinstance(a, Codes):
        assert b.codes.dtype is torch.float8_e4m3fn
        assert (a.scale.dim() == 1) is (b.scale.dim() == 1)
        assert bias is None or (bias.dtype is BF16 and bias.is_contiguous())
        a, b = _dequantized(a, offsets), _dequantized(b)
    else:
        _matrix(a)
        _matrix(b, transposed=True)
        assert len({t.dtype for t in _some(a, b, bias)}) == 1
        assert a.dtype in (torch.bfloat16, torch.float16)
    y = torch.zeros(a.shape[0], b.shape[1])
    for e, rows in _by_expert(offsets):
        y[rows] = a[rows].float() @ b[e].float().T
        if bias is not None:
            y[rows] += bias[e].float()
    return y


def _scaled(y, row_scale, offsets):
    if row_scale is not None:
        y = y * row_scale.float()[:, None]
    y[offsets[-1] :] = 0  # not a product: the rows after the experts' may be NaN
    return y


def _finished(results, offsets, options):
    """The results of rows, with an undefined tail if the kernel need not write it."""
    if not options.zero_tail:
        for t in _some(*results):
            t[offsets[-1] :] = torch.nan
    return results


def _finished_forms(forms, axes, offsets, zero_tail):
    """The same of the codes and scales of rows."""
    if offsets is not None and not zero_tail:
        for (codes, scale), axis in zip(forms, axes, strict=True):
            columns = axis == -2
            end = int(PaddedRows.of(offsets, codes.shape[1], 128).ends_E[-1] if columns else offsets[-1])
            (codes.view(torch.uint8).T if columns else codes.view(torch.uint8))[end:] = 0x7F
            (scale[:, end // 128 :] if columns else scale[end:]).fill_(torch.nan)
    return forms


def _dtype(operand):
    return BF16 if isinstance(operand, Codes) else operand.dtype


def _first(operand):
    return operand.codes if isinstance(operand, Codes) else operand


def _part_of(x, rows):
    """Some rows of an operand, as one of their own."""
    return Codes(x.codes[rows], products.with_strides(x.scale[rows])) if isinstance(x, Codes) else x[rows]


def _rows_of(part, experts):
    """Experts and their rows, from and to, of the `Part` of a launch."""
    blocks = part.ranges.view(-1, 2 * (experts + 1) + 2)
    calls.append(("ranges", {"of_launch": len(blocks)}))
    assert (blocks[:, -1] >= 0).all(), "the rows have not arrived"
    return [
        (expert, (start, end))
        for starts, ends in blocks[:, :-2].unflatten(1, (2, -1)).tolist()
        for expert, (start, end) in enumerate(zip(starts, ends, strict=True))
        if start < end
    ]


def _of_rows(name, product, offsets, experts, x, gather, by_rows, ranges, out=None):
    """The results of ``product(x, offsets, *by_rows)``: at once, or for `ranges` a launch per part of the offsets, a
    call per expert. Each part is written before the next is taken, which a step between may have to wait for. The row
    scale is the last of ``by_rows``.
    """
    if not ranges:
        return product(_gathered(name, x, gather), offsets, *by_rows)
    results, rows = None if out is None else [out], len(_first(x) if gather is None else gather)
    for part in offsets:
        scale = by_rows[-1]
        converted = scale is not None and scale.dtype is not torch.float32
        assert not (part.beside and converted), "the product begins after the kernel that converts its row scale"
        for expert, (start, end) in _rows_of(part, experts):
            # rows of no expert are those after all offsets
            one = torch.tensor([0] * expert + [end - start] * (experts - expert), dtype=torch.int32)
            of_x = _part_of(x, slice(start, end) if gather is None else gather[start:end])
            got = product(of_x, one, *(None if t is None else t[start:end] for t in by_rows))
            if results is None:
                results = [None if t is None else t.new_full((rows, *t.shape[1:]), torch.nan) for t in got]
            for whole, t in zip(results, got, strict=True):
                if whole is not None:
                    whole[start:end] = t
    return tuple(results)


@binds("x", "weight", "bias", "offsets", "row_scale", "gather", "out")
def bind_grouped_gemm(x, weight, bias, row_scale, options, gather=None, *, ranges=False, offsets=None, out=None):
    assert not ranges or out is not None, "the rules give the memory"

    def product(x, offsets, row_scale):
        _note("gemm", x, options, bias=bias is not None, row_scale=row_scale is not None)
        y = _scaled(_product(x, weight, offsets, bias), row_scale, offsets).to(_dtype(x))
        return _finished((y,), offsets, options)

    (y,) = _of_rows("gemm", product, offsets, len(_first(weight)), x, gather, (row_scale,), ranges, out)
    return y if out is None or ranges else out.copy_(y)


def bind_counted_gemm(x, weight, bias, options):
    product = bind_grouped_gemm(x, weight, bias, None, options, ranges=True)
    calls.append(("counted_gemm", {"options": options}))

    def run(x, weight, bias, blocks, out):
        of_ranks = blocks.view(-1, 2 * (len(_first(weight)) + 1) + 2)
        product(x, weight, bias, [Part(blocks)], None, None, out)
        of_ranks[:, -2] += 2 * COLUMN_TILES * tiles_of(of_ranks, ROW_TILE).to(torch.int32)
        return out

    return run, (ROW_TILE, COLUMN_TILES)


@binds("x", "weight", "bias", "offsets", "row_scale", "gather", "amax")
def bind_grouped_gemm_activation(
    x, weight, bias, row_scale, activation, keep_preactivation, options, gather=None, *, quantized=None, ranges=False,
    offsets=None, amax=None,
):  # fmt: skip
    if isinstance(x, Codes):
        assert not activation.interleaved
        assert not activation.gated or weight.codes.shape[1] % (32 if x.scale.dim() == 1 else 256) == 0
    else:
        assert quantized is None
    of_codes = isinstance(x, Codes)

    def product(x, offsets, row_scale):
        what = {"keep": keep_preactivation, "quantized": quantized} if of_codes else {
            "keep_preactivation": keep_preactivation, "row_scale": row_scale is not None,
        }  # fmt: skip
        _note("gemm_activation", x, options, **what)
        p = _product(x, weight, offsets, bias)
        kept = p.to(_dtype(x))
        y = _scaled(op_of(activation).compute(kept.float() if of_codes else p), row_scale, offsets).to(_dtype(x))
        return _finished((y, kept) if keep_preactivation else (y,), offsets, options)

    by_rows = offsets, len(_first(weight)), x, None if of_codes else gather, (row_scale,), ranges
    results = _of_rows("gemm_activation", product, *by_rows)
    if not of_codes:
        return results if keep_preactivation else results[0]
    y, *kept = results
    if quantized is not None and quantized.block[1] is None:  # the place of an index is that of the scale
        codes = quantize(y, quantized, -1, offsets=offsets, encode=gather).data
        amax.copy_(quantizers.amax_by_expert(y, offsets))
        return (codes, *kept)
    ends = None if ranges else offsets
    if quantized is None:
        return y, *kept
    written = _forms([quantize(y, quantized, -1, offsets=ends)])
    return *_finished_forms(written, [-1], ends, options.zero_tail)[0], *kept


def _derivative(grad_output, weight, offsets, preactivation, row_scale, activation):
    """The gradient of the preactivation, the recomputed result and the gradient of the row scale, all in fp32."""
    _matrix(preactivation)
    op, p = op_of(activation), preactivation.float()
    d = _product(grad_output, weight if isinstance(weight, Codes) else weight.mT, offsets)
    (derivative,) = op.backward_ops()
    y = op.compute(p)
    dp = _scaled(derivative.compute(_scaled(d.clone(), row_scale, offsets), p), None, offsets)
    ds = (d * y).sum(1)
    ds[offsets[-1] :] = 0
    return dp, _scaled(y, row_scale, offsets), ds


@binds("grad_output", "weight", "offsets", "preactivation", "row_scale", "gather")
def bind_grouped_gemm_activation_backward(
    grad_output, weight, preactivation, row_scale, activation, want_output, want_row_scale_grad, options, gather=None,
    *, ranges=False, offsets=None,
):  # fmt: skip
    name, dtype = "gemm_activation_backward", _dtype(grad_output)

    def product(dy, offsets, p, row_scale):
        _note(name, dy, options, want_output=want_output, want_row_scale_grad=want_row_scale_grad)
        dp, y, ds = _derivative(dy, weight, offsets, p, row_scale, activation)
        results = dp.to(dtype), y.to(dtype) if want_output else None, ds if want_row_scale_grad else None
        return _finished(results, offsets, options)

    by_rows = preactivation, row_scale
    return _of_rows(name, product, offsets, len(weight), grad_output, gather, by_rows, ranges)


@binds("grad_output", "weight", "offsets", "preactivation", "row_scale")
def bind_grouped_gemm_activation_backward_codes(
    grad_output, weight, preactivation, row_scale, activation, quantized, forms, want_row_scale_grad, options, *,
    ranges=False, offsets=None,
):  # fmt: skip
    assert weight.codes.shape[1] % 128 == 0
    assert not activation.interleaved
    assert quantized.rule is ScaleRule.POWER_OF_TWO
    assert not quantized.amax_epsilon
    what = {"quantized": quantized, "forms": forms, "want_row_scale_grad": want_row_scale_grad}
    _note("gemm_activation_backward_codes", grad_output, options, **what)
    if ranges:
        (part,), experts = offsets, len(weight.codes)
        in_fp32 = row_scale is None or row_scale.dtype is torch.float32
        assert not part.beside or in_fp32, "the product begins after the kernel that converts its row scale"
        assert not part.beside or products.has_strides(weight.scale), "the product begins after a copy of the scales"
        blocks = part.ranges[: -(experts + 1)]
        found = _rows_of(part._replace(ranges=blocks), experts)
        offsets, paddings = torch.zeros(experts, dtype=torch.int32), part.ranges[-(experts + 1) :]
        for expert, (_, end) in found:
            offsets[expert] = max(offsets[expert], end)
        offsets = offsets.cummax(0).values
        padding = -offsets.diff(prepend=offsets.new_zeros(1)) % 128
        assert paddings.tolist() == [0, *padding.cumsum(0).tolist()]
    dp, y, ds = _derivative(grad_output, weight, offsets, preactivation, row_scale, activation)
    each = zip(forms, (dp, dp, y), (-1, -2, -2), (quantized, quantized, fp8_block()), strict=True)
    each = [of for wanted, *of in each if wanted]
    written = _forms([quantize(t.to(BF16), format, axis, offsets=offsets) for t, axis, format in each])
    _finished_forms(written, [axis for _, axis, _ in each], offsets, options.zero_tail)
    return written, ds if want_row_scale_grad else None


def grouped_wgrad(grad_output, x, offsets, *, out=None, dtype=None, accumulate=False, options=DEFAULT, rows=None):
    """Of rows, or of codes by columns: those of each expert begin at a multiple of 128."""
    _note("wgrad", grad_output, options, accumulate=accumulate, dtype=dtype)
    a, b, ends = grad_output, x, PaddedRows.of(offsets, rows, 128).ends_E if isinstance(x, Codes) else offsets
    if not isinstance(x, Codes):
        _matrix(a)
        _matrix(b)
        a, b = a.mT, b.mT
    elif x.scale.dim() == 1:
        expert = group_of(ends, x.codes.shape[1])
        a, b = (operand.codes.float() * of_group(operand.scale, expert) for operand in (a, b))
    else:
        a, b = _dequantized(a), _dequantized(b)
    dw, first = torch.zeros(len(offsets), len(a), len(b)), 0
    for e, (count, end) in enumerate(
        zip(offsets.diff(prepend=offsets.new_zeros(1)).tolist(), ends.tolist(), strict=True)
    ):
        dw[e] = a[:, first : first + count].float() @ b[:, first : first + count].float().T
        first = end
    if accumulate:
        out.data.add_(dw.to(out.dtype))  # kernels do not change the version
        return out
    return dw.to(dtype or _dtype(x), copy=True)  # at version 0, as what a kernel writes


@binds("grad_output", "x", "offsets", "out", "gather")
def bind_grouped_wgrad(
    grad_output, x, offsets, dtype, accumulate, options, gather=None, gathered=None, beside=False, *, transposed=False,
    out=None,
):  # fmt: skip
    assert gathered in ({None} if gather is None else {"grad_output", "x"})
    swapped = transposed and not (isinstance(x, Codes) and grad_output.codes.dtype is not x.codes.dtype)
    rows = x.codes.shape[1] if isinstance(x, Codes) else None
    assert out is None or out.dtype is dtype
    if beside:
        calls.append(("beside", {}))
    if gathered == "x":
        x = _gathered("wgrad_x", x, gather)
    else:
        grad_output = _gathered("wgrad_dy", grad_output, gather)
    settings = {"dtype": dtype, "accumulate": accumulate, "options": options, "rows": rows}
    if not swapped:
        return grouped_wgrad(grad_output, x, offsets, out=out, **settings)
    assert out is None or out.mT.is_contiguous()
    return grouped_wgrad(x, grad_output, offsets, out=None if out is None else out.mT, **settings).mT


# ---- rows without a product ------------------------------------------------------------------------------------------


@binds("grad", "offsets", matrices=("grad",), says=())
def bind_column_sums(grad, offsets, dtype=None):
    sums = [grad[rows].float().sum(0) for _, rows in _by_expert(offsets)]
    return torch.stack(sums).to(dtype or grad.dtype)


@binds("rows", "offsets", matrices=("rows",), says=())
def bind_zero_tail(rows, offsets):
    assert offsets.dtype is torch.int32
    rows[int(offsets[-1]) :] = 0
    return rows


@binds("splits", says=())
def bind_offsets_from_splits(splits, rows):
    assert splits.is_contiguous()
    return plain_offsets(splits, rows)


@binds("index", "weight", "counts")
def bind_route(index, weight, experts, chunk_slots=None, num_rows=None, *, counts=None):
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


def _used(row_of_slot, slot_of_row):
    return row_of_slot.flatten()[slot_of_row] < slot_of_row.numel()


def _activation_operands(x, scale):
    assert x.dtype in (torch.bfloat16, torch.float16)
    _matrix(x)
    if scale is not None:
        assert scale.shape == x.shape[:1]
        assert scale.is_contiguous()
        assert scale.dtype in (torch.float32, torch.bfloat16, torch.float16)


@binds("x", "scale", says=("scale",))
def bind_activation(x, scale, activation):
    _activation_operands(x, scale)
    y = op_of(activation).compute(x.float())
    return (y if scale is None else y * scale.float()[:, None]).to(x.dtype)


@binds("dy", "x", "scale", matrices=("dy",), says=("want_scale", "want_output"))
def bind_activation_backward(dy, x, scale, activation, want_scale, want_output):
    _activation_operands(x, scale)
    assert dy.dtype is x.dtype
    op, p, d = op_of(activation), x.float(), dy.float()
    factor = 1.0 if scale is None else scale.float()[:, None]
    (derivative,) = op.backward_ops()
    y = op.compute(p)
    return (
        derivative.compute(d * factor, p).to(x.dtype),
        (d * y).sum(1).to(scale.dtype) if want_scale else None,
        (y * factor).to(x.dtype) if want_output else None,
    )


@binds("source", "row_of_slot", "slot_of_row", "scale", matrices=("source",), says=("scale",))
def bind_gather_rows(source, row_of_slot, scale, num_rows=None, *, slot_of_row=None):
    assert slot_of_row.numel() == (row_of_slot.numel() if num_rows is None else num_rows)
    rows = source[slot_of_row // row_of_slot.shape[1]].float()
    rows = rows if scale is None else rows * scale.float()[:, None]
    rows[~_used(row_of_slot, slot_of_row)] = 0
    return rows.to(source.dtype)


@binds("offsets", "token_of_row", "arrivals", "leaving", says=())
def bind_row_ranges(
    offsets, token_of_row, rank, ranks, tokens, divided=None, zero_tail=True, tile=128, paddings=False, *, arrivals=0,
    leaving=False,
):  # fmt: skip
    settings = divided, zero_tail, tile // 128 * ROW_TILE, paddings
    return plain_ranges(offsets, token_of_row, rank, ranks, tokens, *settings, arrivals=arrivals, leaving=leaving)


@binds("offsets", "token_of_row", "arrivals", says=())
def bind_expert_blocks(offsets, token_of_row, zero_tail=True, own=None, half=0, *, arrivals=0):
    return plain_blocks(offsets, token_of_row, arrivals, zero_tail, own, half, ROW_TILE)


@binds("codes", "scale", "row_of_slot", "out", "arrived", "words", says=("arrived", "words"))
def bind_scatter(codes, scale, row_of_slot, rank, ranks, num_rows, *, out=None, arrived=None, words=None):
    each = len(row_of_slot) // ranks
    steps = range(ranks if arrived is None else 1) if out is None else range(1, ranks)
    if out is None:
        nan = torch.full((num_rows, codes.shape[1]), 0xFF, dtype=torch.uint8)
        out = nan.view(codes.dtype), block_functions.scale_like(scale, num_rows, codes.shape[1]).fill_(torch.nan)
    for source in [(rank + step) % ranks for step in steps]:
        for token in range(source * each, (source + 1) * each):
            for row in row_of_slot[token].tolist():
                if row < num_rows:
                    out[0].view(torch.uint8)[row] = codes.view(torch.uint8)[token]
                    out[1][row] = scale[token]
    if words is not None:
        assert (arrived[1:] == 0).all(), "the tokens have not arrived"
        assert (words[1:, -1] == -exchange_functions.SCATTER_ARRIVALS).all()
        words[1:, -1] = 0
    return out


@binds("rows", "row_of_slot", "scale", "addend", "into")
def bind_sum_slots(rows, row_of_slot, scale, addend=None, beside_sms=0, *, into=None):
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


@binds("rows", "row_of_slot", "scale", "part")
def bind_sum_slots_and_part(rows, row_of_slot, scale, *, part=None):
    assert part.dtype is rows.dtype
    return bind_sum_slots(rows, row_of_slot, scale)(rows, row_of_slot, scale) + part


@binds("source", "rows", "row_of_slot", "slot_of_row", matrices=("source", "rows"), says=())
def bind_row_dots(source, rows, row_of_slot, dtype, *, slot_of_row=None):
    dots = (source[slot_of_row // row_of_slot.shape[1]].float() * rows.float()).sum(1)
    dots[~_used(row_of_slot, slot_of_row)] = 0
    return dots.to(dtype)


@binds("values", "row_of_slot", says=())
def bind_slot_values(values, row_of_slot):
    assert values.is_contiguous()
    return torch.cat([values, values.new_zeros(1)])[row_of_slot]


@binds("x", "offsets", "index", matrices=("x",), says=("rows", "columns"))
def bind_quantize_rows(x, format, offsets=None, index=None, *, rows=True, columns=False, zero_tail=True):
    x, axes = _gathered("quantize_rows", x, index), _axes(rows, columns)
    forms = _forms([quantize(x, format, axis, offsets=offsets) for axis in axes])
    return _finished_forms(forms, axes, offsets, zero_tail)


@binds("codes", "scale", "offsets", "index")
def bind_quantize_columns_of_codes(codes, scale, offsets, index):
    values = bind_dequantize(codes, scale, fp8_block())(codes, scale)
    return bind_quantize_rows(values, fp8_block(), offsets, index, rows=False, columns=True, zero_tail=False)(
        values, offsets, index
    )[0]


@binds("weight", says=("rows", "columns"))
def bind_quantize_weight(weight, format, *, rows=True, columns=False):
    _matrix(weight, transposed=True)
    return _forms([quantize(weight, format, axis) for axis in _axes(rows, columns)])


@binds("codes", "scale")
def bind_transpose_codes(codes, scale):
    calls.append(("transpose_codes", {"shape": tuple(codes.shape)}))
    assert codes.is_contiguous()
    stored = scale_like(scale, scale.shape[-1], codes.shape[-2], codes.shape[0])
    return codes.mT.contiguous(), stored.copy_(scale.mT)


def _axes(rows, columns):
    assert rows or columns
    return [axis for axis, wanted in ((-1, rows), (-2, columns)) if wanted]


def _forms(forms):
    """The tensors of quantized values, with the strides that the kernels give the scales."""
    scales = [scale_like(f.scale, f.scale.shape[-2], f.data.shape[-1], *f.scale.shape[:-2]) for f in forms]
    return tuple((f.data, scale.copy_(f.scale)) for f, scale in zip(forms, scales, strict=True))


@binds("x", "offsets", "index")
def bind_magnitudes(
    x, offsets=None, index=None, *, of_rows=False, of_columns=False, of_experts=False, of_experts_rotated=False
):
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


@binds("x", "offsets", "index", "factors", "random", "largest", matrices=("x",), says=("rows", "columns"))
def bind_quantize_format(
    x, format, offsets=None, index=None, *, rows=True, columns=False, rotated=False, stochastic=False, amax=False,
    factors=(), random=(), largest=None,
):  # fmt: skip
    x = _gathered("quantize_format", x, index)
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


@binds("codes", "offsets", says=())
def bind_transpose_rows(codes, offsets):
    assert codes.is_contiguous()
    assert codes.shape[1] % 16 == 0
    padded = PaddedRows.of(offsets, len(codes), 128)
    return padded.spread(codes.view(torch.uint8)).mT.contiguous().view(codes.dtype)


@binds("history", "amax", "reference", "encode", "previous", says=())
def bind_update_amax_history(
    most, least, *, power_of_two, most_recent, history=None, amax=None, reference=None, encode=None, previous=None
):
    margin = round(math.log2(E5M2.max / most))  # as many binades from E5M2 have the same quotients
    assert E5M2.max / 2**margin == most
    format = fp8_tensor(E5M2, power_of_two, least)
    plain = AmaxHistory(Quantizer(format, delayed=Delayed(len(history), most_recent, margin)), len(amax), CPU)
    plain.amax, plain.reference, plain.encode, plain.previous = history, reference, encode, previous
    plain.update(amax)
    return 1 / previous


@binds("codes", "scale", says=("transposed",))
def bind_dequantize(codes, scale, format, *, transposed=False):
    values, _ = QuantizedTensor(codes, scale, format, -1, codes.shape, BF16, scale).split(BF16)
    return values.mT.contiguous() if transposed else values


@binds("x", "weight", "bias", "correction", matrices=("x", "weight"), says=("options", "want_sums"))
def bind_router(x, weight, bias, choice, want_sums, options, *, correction=None):
    assert (x.dtype, weight.dtype) in ((BF16, BF16), (BF16, torch.float32), (torch.float16, torch.float16))
    assert choice.corrected is (correction is not None)
    router = _router(choice, weight.shape[0], weight.shape[1])
    index, weights, logits, *sums = router.compute(x, weight, bias, correction, all_values=True)
    counts = torch.zeros(1, weight.shape[0] + 1, dtype=torch.int32)
    return Routed(index, weights, logits, counts, torch.cat([sums[0], sums[1][None]]) if want_sums else None)


def _router(choice, experts, hidden):
    return Router(
        hidden, experts, choice.top_k, choice.score, choice.renormalize, choice.scale, False, choice.corrected,
        choice.num_groups, choice.top_groups,
    )  # fmt: skip


def bind_route_counted(index, weight, experts, num_rows=None):
    return bind_route(index, weight, experts, 1, num_rows)


@binds("logits", "index", "grads", "weight")
def bind_logits_grad(logits, grads, choice, blocks, groups, want_sums, want_whole, weight, *, index=None):
    assert any(g is not None for g in (grads.weight, *grads[2:]))
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


def _weight_parts(weight):
    split = weight.to(BF16), (weight - weight.to(BF16)).to(BF16)
    height, rows = router_functions.padded(len(weight)), router_functions.weight_rows(weight.dtype)
    tall = torch.zeros(len(rows), height, weight.shape[1], dtype=BF16)
    for i, part in enumerate(rows):
        tall[i, : len(weight)] = split[part]
    return tall.flatten(0, 1)


def _blocks(parts, experts):
    return parts.unflatten(1, (-1, router_functions.padded(experts)))[..., :experts].double()


@binds("parts", "ends", "weight_parts", says=("options",))
def bind_router_dgrad(parts, weight, options, *, ends=None, weight_parts=None):
    assert ends[-1] == len(parts)
    return (parts[:, : len(weight_parts)].double() @ weight_parts.double()).to(BF16)


@binds("parts", "ends", "x", says=("options",))
def bind_router_wgrad(parts, x, experts, groups, dtype, options, *, ends=None):
    assert len(ends) == groups
    assert ends[-1] == len(parts)
    blocks = _blocks(parts, experts)
    if dtype is torch.float32:
        blocks = blocks[:, 1:]
    return (blocks.sum(1).T @ x.double()).to(dtype)


ROUTER = {name: function for name, function in globals().items() if name.startswith("bind_") and "rout" in name}
ROUTER |= {"bind_logits_grad": bind_logits_grad}
del ROUTER["bind_route"]
BIND = {name: f for name, f in globals().items() if name.startswith("bind_") and name not in ROUTER}
MODULES = (
    products, activation_functions, row_functions, slot_functions, block_functions, format_functions,
    exchange_functions,
)  # fmt: skip
PLACES = {name: next(module for module in MODULES if hasattr(module, name)) for name in BIND}  # that define them


def install(put=setattr, router=False):
    """Put the stand-ins in place of the kernels; ``put`` is as `setattr`."""
    for name, module in PLACES.items():
        put(module, name, BIND[name])
    for name, function in ROUTER.items() if router else ():
        put(router_functions, name, function)
