"""Comparisons of products whose results are codes with `fusedmoe.quantize` of the same results in bf16."""

from unittest.mock import patch

import torch

from fusedmoe.kernels.options import DEFAULT
from fusedmoe.kernels.rows.quantize.format_functions import bind_transpose_rows
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.tiles.choice import CO_256_ROWS
from fusedmoe.numerics.formats import E4M3, E5M2, amax_by_expert, fp8_block, fp8_tensor, quantize
from kit.hopper import DEVICE
from kit.hopper_products import (
    ACTIVATIONS,
    BF16,
    assert_same_bits,
    drawn,
    offsets_of,
    row_scales,
    rows,
    tuple_of,
    weights,
)
from kit.poison import nan_in_new_tensors

FORMATS = {
    "e4m3": fp8_block(),
    "e5m2": fp8_block(E5M2),
    "fp32 scales": fp8_block(power_of_two=False),
    "e5m2, fp32 scales": fp8_block(E5M2, power_of_two=False),
}
BY_EXPERT = {"e4m3": fp8_tensor(E4M3), "e5m2": fp8_tensor(E5M2)}
ALL_FORMS = (True, True, True)


def check_codes(x, w, splits, name, format=None, *, keep=True, bias=None, scale=None, encode=None, compared=True):
    """Codes and scales, or amax, are those of the result in bf16, which is returned."""
    by_expert = x.given.scale.dim() == 1
    format, offsets = format or (BY_EXPERT if by_expert else FORMATS)["e4m3"], offsets_of(splits)
    operands, more = (x.given, w.given, bias, offsets, scale), ()
    amax = torch.zeros(len(splits), device=DEVICE)
    if by_expert:
        encode = torch.rand(len(splits), device=DEVICE) * 40 + 1 if encode is None else encode  # some values saturate
        more = encode, amax
    bind = products.bind_grouped_gemm_activation
    a = ACTIVATIONS[name]
    plain, in_codes = (bind(x.given, w.given, bias, scale, a, keep, DEFAULT, quantized=q) for q in (None, format))
    with nan_in_new_tensors():
        y, *p = tuple_of(plain(*operands))
        codes, *found = in_codes(*operands, *more)
    if not compared:
        return y
    want = quantize(y, format, -1, offsets=offsets, **({"encode": encode} if by_expert else {}))
    assert_same_bits(codes, want.data)
    if by_expert:
        columns = bind_transpose_rows(codes, offsets)(codes, offsets)
        assert_same_bits(columns, quantize(y, format, -2, offsets=offsets, encode=encode).data)
        assert torch.equal(amax, amax_by_expert(y, offsets))
    else:
        of_codes = found.pop(0)
        assert_same_bits(of_codes, want.scale)
        assert products.has_strides(of_codes)
    assert len(p) == len(found) == keep
    for got, kept in zip(found, p, strict=True):
        assert_same_bits(got, kept)
    return y


def check_derivative_codes(
    splits, tail, n=128, k=144, *, name="swiglu", scale=True, gradient=True, forms=ALL_FORMS, element="e4m3", p=None,
    options=DEFAULT, compared=True,
):  # fmt: skip
    """Codes and scales are those of the results in bf16, which are returned. ``n`` is I, ``k`` is H."""
    a, offsets, of_grad = ACTIVATIONS[name], offsets_of(splits), FORMATS[element]
    dy, w = rows(splits, tail, k, "e4m3 blocks").given, weights(splits, n, k, "e4m3 blocks").given
    if p is None:
        p = drawn((sum(splits) + tail, 2 * n if a.gated else n), BF16).to(BF16)
    p[sum(splits) :] = torch.nan
    factor = row_scales(splits, tail) if scale else None
    with patch.object(products, "choose", lambda problem: CO_256_ROWS):  # the tiles of codes
        bound = products.bind_grouped_gemm_activation_backward(dy, w, p, factor, a, True, gradient, options)
        in_codes = products.bind_grouped_gemm_activation_backward_codes(
            dy, w, p, factor, a, of_grad, forms, gradient, options
        )
    with nan_in_new_tensors():
        grad, y, grad_scale = bound(dy, w, offsets, p, factor)
        written, again = in_codes(dy, w, offsets, p, factor)
    if not compared:
        return None
    each = zip(forms, ((grad, of_grad, -1), (grad, of_grad, -2), (y, FORMATS["e4m3"], -2)), strict=True)
    for (codes, stored), (t, format, axis) in zip(written, [form for wanted, form in each if wanted], strict=True):
        want = quantize(t, format, axis, offsets=offsets)
        assert_same_bits(codes, want.data)
        assert_same_bits(stored, want.scale)
        assert products.has_strides(stored)
    assert (grad_scale is None) is (again is None) is not gradient
    if gradient:
        assert torch.allclose(grad_scale, again, rtol=1e-4, atol=1e-3, equal_nan=True)
    return grad, y
