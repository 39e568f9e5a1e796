"""Matrix products, grouped by expert and dense, of operands that may be quantized.

Axes: R rows, E experts, K features in, N features out.

A product multiplies the dequantized operands and accumulates in fp32. It runs in one of three ways:

- *native*, for bf16 results of E4M3 by E4M3 with one scale per tensor or per row, on GPUs of compute capability 9.0 and
  10.0: `F.scaled_grouped_mm` multiplies the codes.
- *emulated in bf16*, for bf16 results on GPUs where `F.grouped_mm` has a bf16 kernel (9.x and 10.x): the operands are
  the codes times their block scales in bf16. This is exact except for fp32 block scales that are not powers of two. The
  product is rounded to bf16, then multiplied by the scales of rows and tensors. Dense products run in the same way.
- *emulated in fp32*, in all other cases: the result is rounded once.

If both operands of a weight gradient are rotated, the product is taken in the rotated space, padding included. The
quantized padding after an expert's last row then contributes, as in a hardware product of the codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.base import target
from fusedmoe.kernels.torch import grouped_gemm
from fusedmoe.numerics.expert_rows import zero_tail_
from fusedmoe.numerics.formats.format import E4M3, Format, column_block
from fusedmoe.numerics.formats.groups import group_of, of_group
from fusedmoe.numerics.formats.tensor import QuantizedSpec, QuantizedTensor

Operand = Tensor | QuantizedTensor

_MULTIPLIES_CODES = (90, 100)  # architectures on which F.scaled_grouped_mm runs
NATIVE, EMULATED = "native", "emulated"  # the results of `path` for a quantized operand


def grouped_mm(x: Operand, weight: Operand, offsets_E: Tensor) -> Tensor:
    """``y[r] = x[r] @ weight[expert of r].T``: x (R, K), weight (E, N, K), both by rows if quantized."""
    if isinstance(x, Tensor) and isinstance(weight, Tensor):
        return grouped_gemm.grouped_mm(x, weight, offsets_E)
    return _rows_times(x, weight, -1, offsets_E)


def grouped_mm_dgrad(dy: Operand, weight: Operand, offsets_E: Tensor) -> Tensor:
    """``dx[r] = dy[r] @ weight[expert of r]``: dy (R, N) by rows, weight (E, N, K) by columns."""
    if isinstance(dy, Tensor) and isinstance(weight, Tensor):
        return grouped_gemm.grouped_mm_dgrad(dy, weight, offsets_E)
    return _rows_times(dy, weight, -2, offsets_E)


def grouped_mm_wgrad(dy: Operand, x: Operand, offsets_E: Tensor) -> Tensor:
    """``dW[e] = dy[rows of e].T @ x[rows of e]``: dy (R, N) and x (R, K), both by columns if quantized."""
    if isinstance(dy, Tensor) and isinstance(x, Tensor):
        return grouped_gemm.grouped_mm_wgrad(dy, x, offsets_E)
    dy, x = _along(dy, -2), _along(x, -2)
    if path(dy, x, dy.device) is NATIVE:
        assert isinstance(dy, QuantizedTensor)
        assert isinstance(x, QuantizedTensor)
        return _native_wgrad(dy, x)
    dtype = torch.bfloat16 if _in_bf16(dy.dtype, dy.device) else torch.float32
    if isinstance(dy, QuantizedTensor) and isinstance(x, QuantizedTensor) and _same_layout(dy, x):
        padded = dy.padded
        assert padded is not None
        (dy_NP, dy_factor), (x_KP, x_factor) = dy.split(dtype), x.split(dtype)
        product = grouped_gemm.grouped_mm_wgrad(dy_NP.mT, x_KP.mT, padded.ends_E)
        product = _times(product, None if dy_factor is None else dy_factor[..., None], x_factor, 1)
    else:  # dequantizing rotates back an operand whose counterpart is not rotated
        product = grouped_gemm.grouped_mm_wgrad(_values(dy, dtype), _values(x, dtype), offsets_E)
    return product.to(dy.dtype)


def mm(x: Operand, weight: Operand, weight_axis: int) -> Tensor:
    """``x @ weight.T`` (weight_axis -1) or ``x @ weight`` (-2): x (..., K)."""
    if isinstance(x, Tensor) and isinstance(weight, Tensor):
        return x @ (weight.mT if weight_axis == -1 else weight)
    x, weight = _along(x, -1), _along(weight, weight_axis)
    if not _in_bf16(x.dtype, x.device):
        a, b = _values(x), _values(weight)
        return (a @ (b.mT if weight_axis == -1 else b)).to(x.dtype)
    (a, a_factor), (b, b_factor) = _bf16_and_factor(x), _bf16_and_factor(weight)
    y = _times_dense(a.flatten(0, -2) @ (b.mT if weight_axis == -1 else b), a_factor, b_factor)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def mm_wgrad(dy: Operand, x: Operand) -> Tensor:
    """``dy.T @ x`` over all rows: dy (..., N), x (..., K), both by columns if quantized."""
    if isinstance(dy, Tensor) and isinstance(x, Tensor):
        return dy.flatten(0, -2).mT @ x.flatten(0, -2)
    dy, x = _along(dy, -2), _along(x, -2)
    dtype = torch.bfloat16 if _in_bf16(dy.dtype, dy.device) else torch.float32
    if isinstance(dy, QuantizedTensor) and isinstance(x, QuantizedTensor) and _same_layout(dy, x):
        if dtype is torch.bfloat16 and dy.offsets is None:
            (dy_NP, dy_factor), (x_KP, x_factor) = dy.split(dtype), x.split(dtype)
            return _times_dense(dy_NP @ x_KP.mT, dy_factor, x_factor)
        if dy.rotated:
            return (_in_code_layout(dy) @ _in_code_layout(x).mT).to(dy.dtype)
    return (_values(dy, dtype).flatten(0, -2).mT @ _values(x, dtype).flatten(0, -2)).to(dy.dtype)


def path(a: Any, b: Any, device: torch.device) -> str:
    """Return `NATIVE` or `EMULATED` for a grouped product of two operands or specs; ``""`` if neither is quantized."""
    quantized = [s for s in (a, b) if isinstance(s, (QuantizedSpec, QuantizedTensor))]
    if not quantized:
        return ""
    if len(quantized) < 2 or not _will_multiply_codes(device):
        return EMULATED
    if any(not _is_native(s.format) or s.dtype is not torch.bfloat16 for s in quantized):
        return EMULATED
    # F.scaled_grouped_mm requires widths of 16-byte multiples; rows quantized by columns are padded to that
    widths = [size for s in quantized for size in s.shape[1:]]
    return NATIVE if all(width % 16 == 0 for width in widths) else EMULATED


def path_dense(a: Any, b: Any) -> str:
    """As `path`, for products without experts."""
    return EMULATED if any(isinstance(s, (QuantizedSpec, QuantizedTensor)) for s in (a, b)) else ""


def _is_native(format: Format) -> bool:
    return format.element == E4M3 and format.block[1] is None


def _will_multiply_codes(device: torch.device) -> bool:
    """As `multiplies_codes`, for the architecture of ``explain(arch=)`` if it is set."""
    asked = target.current()
    return multiplies_codes(device) if asked is None else asked.arch in _MULTIPLIES_CODES


def multiplies_codes(device: torch.device) -> bool:
    """Whether torch has a grouped product of FP8 codes on the device, with scales per tensor or per row."""
    return device.type == "cuda" and _has_scaled_grouped_mm(device)


@functools.cache
def _has_scaled_grouped_mm(device: torch.device) -> bool:
    if not torch.cuda.is_available():  # a FakeTensor may have the device
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return torch.version.hip is None and 10 * major + minor in _MULTIPLIES_CODES


def _along(t: Operand, axis: int) -> Operand:
    return t if isinstance(t, Tensor) else t.along(axis)


def _in_bf16(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether an emulated product runs in bf16: if torch has a grouped bf16 kernel for the GPU."""
    return device.type == "cuda" and dtype is torch.bfloat16 and grouped_gemm.runs_on_device(device, dtype)


def _values(t: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    return t.to(dtype) if isinstance(t, Tensor) else t.dequantize(dtype)


def _in_code_layout(t: QuantizedTensor) -> Tensor:
    """Return the values of rows quantized by columns, in the layout of the codes: fp32, rotated, with the padding."""
    values, factor = t.split()
    if factor is None:
        return values
    padded = t.padded
    return values * (factor.reshape(-1, 1) if padded is None else of_group(factor.mT, padded.expert_of_padded()))


def _same_layout(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether rows quantized by columns share a layout, so that a product can take their codes without conversion."""
    sorted_alike = (a.offsets is None) is (b.offsets is None)
    return a.rotated is b.rotated and sorted_alike and column_block(a.format) == column_block(b.format)


def _rows_times(x: Operand, weight: Operand, weight_axis: int, offsets_E: Tensor) -> Tensor:
    x, weight = _along(x, -1), _along(weight, weight_axis)
    product = grouped_gemm.grouped_mm if weight_axis == -1 else grouped_gemm.grouped_mm_dgrad
    if not x.shape[0]:
        return torch.empty(0, weight.shape[-2 if weight_axis == -1 else -1], dtype=x.dtype, device=x.device)
    if path(x, weight, x.device) is NATIVE:
        assert isinstance(x, QuantizedTensor)
        assert isinstance(weight, QuantizedTensor)
        return _native_rows_times(x, weight, offsets_E)
    if not _in_bf16(x.dtype, x.device):
        return product(_values(x), _values(weight), offsets_E).to(x.dtype)
    x_values, x_factor = _bf16_and_factor(x)
    weight_values, weight_factor = _bf16_and_factor(weight)
    y = product(x_values, weight_values, offsets_E)
    if weight_factor is not None:
        last = weight_factor.shape[0] - 1
        weight_factor = weight_factor[group_of(offsets_E, x.shape[0]).clamp(max=last)]
    return _times(y, None if x_factor is None else x_factor[:, None], weight_factor, 0)


def _bf16_and_factor(t: Operand) -> tuple[Tensor, Tensor | None]:
    if isinstance(t, Tensor):
        return t, None
    values, factor = t.split(torch.bfloat16)
    if t.axis == -2:
        values = values.mT
    rows, columns = t.matrix_shape
    return values[..., :rows, :columns], factor


def _times(product: Tensor, rows: Tensor | None, columns: Tensor | None, new_axis: int) -> Tensor:
    """Multiply a product by the factors of its operands (`QuantizedTensor.split`), in fp32."""
    if rows is None and columns is None:
        return product
    y = product.to(torch.float32)
    if rows is not None:
        y = y * rows
    if columns is not None:
        y = y * (columns[:, None] if new_axis else columns)
    return y.to(product.dtype)


def _times_dense(product: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """`_times` for a product without experts, whose factors may have one value."""
    of_rows = None if rows is None else rows.reshape(-1, 1)
    return _times(product, of_rows, None if columns is None else columns.reshape(-1), 0)


def _native_rows_times(x: QuantizedTensor, weight: QuantizedTensor, offsets_E: Tensor) -> Tensor:
    """`_rows_times` for codes; the weight's are (E, M, L), with the axis that is summed over last."""
    scale_R = _scales(x).reshape(-1).expand(x.shape[0]).contiguous()
    scale_EM = _scales(weight).expand(weight.data.shape[:2]).contiguous()
    y = _scaled_grouped_mm(x.data, weight.data.mT, scale_R, scale_EM, offsets_E)
    return zero_tail_(y, offsets_E)


def _native_wgrad(dy: QuantizedTensor, x: QuantizedTensor) -> Tensor:
    """`grouped_mm_wgrad` for codes, (N, P) and (K, P), with each expert's rows padded to a multiple of 16 or 128."""
    padded = dy.padded
    assert padded is not None
    experts = padded.offsets_E.shape[0]
    if not padded.num_padded:  # F.scaled_grouped_mm rejects empty operands
        return dy.data.new_zeros(experts, dy.shape[1], x.shape[1], dtype=torch.bfloat16)
    scale_dy, scale_x = [_scales(t).expand(experts, t.data.shape[0]).reshape(-1).contiguous() for t in (dy, x)]
    return _scaled_grouped_mm(dy.data, x.data.mT, scale_dy, scale_x, padded.ends_E)


def _scales(t: QuantizedTensor) -> Tensor:
    assert t.factor is not None, "formats with a native product have one scale per tensor or per row"
    return t.factor


def _scaled_grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends_E: Tensor) -> Tensor:
    functional: Any = F  # the stubs lack scaled_grouped_mm
    run: Callable[..., Tensor] = functional.scaled_grouped_mm
    by_row = functional.ScalingType.RowWise
    return run(a, b, scale_a, by_row, scale_b, by_row, offs=ends_E, output_dtype=torch.bfloat16)
