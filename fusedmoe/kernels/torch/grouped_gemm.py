"""Grouped matrix products over rows sorted by expert, and their gradients.

Axes: R rows, E experts, K input features, N output features. ``offsets_E`` (int32) are the ends of the experts' rows;
``None`` means one group with all rows.

- On an NVIDIA GPU of compute capability 9.x or 10.x, bf16 products run ``F.grouped_mm``, which reads the offsets on the
  device. On a CPU, fp32, bf16 and fp16 products run it.
- All other products run a loop over the experts. On a GPU, the loop reads the offsets on the host once, which
  ``explain()`` marks as HOST SYNC.

``F.grouped_mm`` does not write rows after the last offset, and rejects operands without elements. The functions here
set such rows to zero, and return zeros for such operands.

All products and sums are differentiable any number of times: their derivatives are products and sums of the same kinds.
None reads rows after the last offset.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from fusedmoe.base import target
from fusedmoe.base.estimating import FLOP_FORMULAS, counts_flops, has_values
from fusedmoe.numerics.expert_rows import zero_tail_

_NATIVE_ON_CUDA = {torch.bfloat16}
_NATIVE_ON_CPU = {torch.float32, torch.bfloat16, torch.float16}
_MAJOR = (9, 10)  # major compute capabilities with a device-side F.grouped_mm
_ALIGNMENT_BYTES = 16  # of the addresses and strides of F.grouped_mm's operands, which TMA loads


@functools.cache
def _has_device_side_grouped_mm(device: torch.device) -> bool:
    if not torch.cuda.is_available():  # a FakeTensor's device
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in _MAJOR


def runs_on_device(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether a grouped product of these feature widths runs without a host synchronisation.

    Inside ``explain(arch=)``, the answer is for that architecture.
    """
    if device.type != "cuda":
        return True  # reading offsets on the CPU does not synchronise
    aligned = all(width * dtype.itemsize % _ALIGNMENT_BYTES == 0 for width in widths)
    if dtype is not torch.bfloat16 or not aligned:
        return False
    asked = target.current()
    return _has_device_side_grouped_mm(device) if asked is None else asked.arch // 10 in _MAJOR


def _aligned(t: Tensor) -> Tensor | None:
    """Return ``t`` or a copy that F.grouped_mm can read; None if no copy can: its width is no multiple of 16 bytes.

    Rows sorted by expert (two axes) need unit stride in the last axis: only then is the address of every expert's first
    row a multiple of 16 bytes. On a GPU, a misaligned address aborts the process.
    """
    (*outer, row, column), unit = t.stride(), _ALIGNMENT_BYTES // t.itemsize
    # a stride below the width is rejected: the rows are expanded or overlap
    by_rows = column == 1 and row >= t.shape[-1] and row % unit == 0
    by_columns = len(outer) == 1 and row == 1 and column >= t.shape[-2] and column % unit == 0
    if not (by_rows or by_columns) or (outer and outer[0] % unit):
        # not contiguous(), which accepts any stride of a single row
        return t.clone(memory_format=torch.contiguous_format) if t.shape[-1] % unit == 0 else None
    return _aligned(t.clone()) if t.data_ptr() % _ALIGNMENT_BYTES and t.is_cuda else t


def _native(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the operands for F.grouped_mm; None if only the loop can multiply them."""
    dtypes = _NATIVE_ON_CPU if a.is_cpu else _NATIVE_ON_CUDA if a.is_cuda else ()
    if a.dtype not in dtypes:
        return None
    if a.is_cuda and not _has_device_side_grouped_mm(a.device):
        return None
    a_ok, b_ok = _aligned(a), _aligned(b)
    return None if a_ok is None or b_ok is None else (a_ok, b_ok)


def _ranges(offsets_E: Tensor) -> list[tuple[int, int, int]]:
    """Return (expert, first row, end) of every expert with rows; reads the offsets on the host."""
    ends: list[int] = offsets_E.tolist()
    return [(e, first, end) for e, (first, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > first]


def _recorded(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in operands)


class _RowsTimes(torch.autograd.Function):
    """``y[r] = x[r] @ w[expert of r]``, differentiable."""

    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RK, w_EKN, offsets_E)
        return _rows_times_now(x_RK, w_EKN, offsets_E)

    @staticmethod
    def backward(ctx: Any, dy_RN: Tensor) -> tuple[Tensor | None, ...]:
        x_RK, w_EKN, offsets_E = ctx.saved_tensors
        dx_RK = _rows_times(dy_RN.contiguous(), w_EKN.mT, offsets_E) if ctx.needs_input_grad[0] else None
        dw_EKN = grouped_mm_wgrad(x_RK, dy_RN.contiguous(), offsets_E) if ctx.needs_input_grad[1] else None
        return dx_RK, dw_EKN, None


class _Wgrad(torch.autograd.Function):
    """``dW[e] = dy[rows of e].T @ x[rows of e]``, differentiable."""

    @staticmethod
    def forward(ctx: Any, dy_RN: Tensor, x_RK: Tensor, offsets_E: Tensor) -> Tensor:
        ctx.save_for_backward(dy_RN, x_RK, offsets_E)
        return _wgrad_now(dy_RN, x_RK, offsets_E)

    @staticmethod
    def backward(ctx: Any, grad_ENK: Tensor) -> tuple[Tensor | None, ...]:
        dy_RN, x_RK, offsets_E = ctx.saved_tensors
        grad_dy = _rows_times(x_RK, grad_ENK.mT, offsets_E) if ctx.needs_input_grad[0] else None
        grad_x = _rows_times(dy_RN, grad_ENK, offsets_E) if ctx.needs_input_grad[1] else None
        return grad_dy, grad_x, None


class _SumRows(torch.autograd.Function):
    """``sums[e] = sum of rows of e``, differentiable."""

    @staticmethod
    def forward(ctx: Any, rows_RN: Tensor, offsets_E: Tensor) -> Tensor:
        ctx.save_for_backward(offsets_E)
        ctx.num_rows = rows_RN.shape[0]
        return _sum_rows_now(rows_RN, offsets_E)

    @staticmethod
    def backward(ctx: Any, grad_EN: Tensor) -> tuple[Tensor | None, ...]:
        return _SpreadRows.apply(grad_EN, ctx.saved_tensors[0], ctx.num_rows), None  # type: ignore[no-untyped-call]


class _SpreadRows(torch.autograd.Function):
    """``rows[r] = values[expert of r]``, zero for rows that belong to no expert; differentiable."""

    @staticmethod
    def forward(ctx: Any, values_EN: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(offsets_E)
        return _of_expert(values_EN, offsets_E, num_rows)

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
        return grouped_bias_grad(grad_RN, ctx.saved_tensors[0]), None, None


def _as_one_operator(offsets_E: Tensor) -> bool:
    """Whether a product must be one operator: for tensors without values, and under a FLOP counter."""
    if type(offsets_E) is not Tensor or offsets_E.is_meta:
        return not has_values(offsets_E)
    return bool(_len_torch_dispatch_stack()) and counts_flops()


def _rows_times(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor | None) -> Tensor:
    if offsets_E is None:
        return x_RK @ w_EKN[0]
    if torch.compiler.is_exporting():
        if x_RK.dtype is torch.bfloat16:
            return zero_tail_(F.grouped_mm(x_RK, w_EKN, offs=offsets_E), offsets_E)
        return torch.ops.fusedmoe.grouped_mm(x_RK, w_EKN, offsets_E)  # type: ignore[no-any-return]
    if _recorded(x_RK, w_EKN):
        return _RowsTimes.apply(x_RK, w_EKN, offsets_E)  # type: ignore[no-untyped-call, no-any-return]
    return _rows_times_now(x_RK, w_EKN, offsets_E)


def _rows_times_now(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    if _as_one_operator(offsets_E):
        return torch.ops.fusedmoe.grouped_mm(x_RK, w_EKN, offsets_E)  # type: ignore[no-any-return]
    return _rows_times_of_values(x_RK, w_EKN, offsets_E)


def _rows_times_of_values(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    if not x_RK.numel() or not w_EKN.numel():
        return x_RK.new_zeros(x_RK.shape[0], w_EKN.shape[2])
    if native := _native(x_RK, w_EKN):
        return zero_tail_(F.grouped_mm(*native, offs=offsets_E), offsets_E)
    out_RN = x_RK.new_empty(x_RK.shape[0], w_EKN.shape[2])
    last = 0
    for e, first, last in _ranges(offsets_E):
        torch.mm(x_RK[first:last], w_EKN[e], out=out_RN[first:last])
    out_RN[last:].zero_()
    return out_RN


def grouped_mm_without_tail(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """``y[r] = x[r] @ w[expert of r]``: (R, N), by ``F.grouped_mm``; rows that belong to no expert are not written.

    The operands are bf16 and have elements, on a GPU for which `runs_on_device` holds.
    """
    native = _native(x_RK, w_EKN)
    assert native is not None, "the widths are multiples of 8"
    return F.grouped_mm(*native, offs=offsets_E)


def grouped_mm(x_RK: Tensor, weight_ENK: Tensor, offsets_E: Tensor | None) -> Tensor:
    """``y[r] = x[r] @ weight[expert of r].T``: (R, N); zeros in rows that belong to no expert."""
    return _rows_times(x_RK, weight_ENK.mT, offsets_E)


def grouped_mm_dgrad(dy_RN: Tensor, weight_ENK: Tensor, offsets_E: Tensor | None) -> Tensor:
    """``dx[r] = dy[r] @ weight[expert of r]``: (R, K); zeros in rows that belong to no expert."""
    return _rows_times(dy_RN, weight_ENK, offsets_E)


def grouped_mm_wgrad(dy_RN: Tensor, x_RK: Tensor, offsets_E: Tensor | None) -> Tensor:
    """``dW[e] = dy[rows of e].T @ x[rows of e]``: (E, N, K); exact zeros for an expert without rows."""
    if offsets_E is None:
        return (dy_RN.mT @ x_RK)[None]
    if _recorded(dy_RN, x_RK):
        return _Wgrad.apply(dy_RN, x_RK, offsets_E)  # type: ignore[no-untyped-call, no-any-return]
    return _wgrad_now(dy_RN, x_RK, offsets_E)


def _wgrad_now(dy_RN: Tensor, x_RK: Tensor, offsets_E: Tensor) -> Tensor:
    if _as_one_operator(offsets_E):
        return torch.ops.fusedmoe.grouped_mm_wgrad(dy_RN, x_RK, offsets_E)  # type: ignore[no-any-return]
    return _wgrad_of_values(dy_RN, x_RK, offsets_E)


def _wgrad_of_values(dy_RN: Tensor, x_RK: Tensor, offsets_E: Tensor) -> Tensor:
    shape = offsets_E.shape[0], dy_RN.shape[1], x_RK.shape[1]
    if not dy_RN.numel() or not x_RK.numel():
        return x_RK.new_zeros(shape)
    if native := _native(dy_RN, x_RK):
        return F.grouped_mm(native[0].mT, native[1], offs=offsets_E)
    out_ENK = x_RK.new_zeros(shape)
    for e, first, last in _ranges(offsets_E):
        torch.mm(dy_RN[first:last].mT, x_RK[first:last], out=out_ENK[e])
    return out_ENK


def grouped_bias(y_RN: Tensor, bias_EN: Tensor, offsets_E: Tensor | None) -> Tensor:
    """``y[r] += bias[expert of r]``, in place; rows that belong to no expert do not change."""
    if offsets_E is None:
        return y_RN.add_(bias_EN[0])
    if _recorded(bias_EN):
        return y_RN.add_(_SpreadRows.apply(bias_EN, offsets_E, y_RN.shape[0]))  # type: ignore[no-untyped-call]
    return y_RN.add_(_of_expert(bias_EN, offsets_E, y_RN.shape[0]))


def _of_expert(values_EN: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
    """``rows[r] = values[expert of r]``, zero for rows that belong to no expert."""
    rows_R = torch.arange(num_rows, device=values_EN.device, dtype=torch.int32)
    expert_R = torch.searchsorted(offsets_E, rows_R, right=True)
    return F.pad(values_EN, (0, 0, 0, 1))[expert_R]  # rows after the last expert's get the zeros at index E


def grouped_bias_grad(dy_RN: Tensor, offsets_E: Tensor | None) -> Tensor:
    """``db[e] = sum of dy over the rows of e``, accumulated in fp32 (fp64 for fp64): (E, N) in dy's dtype.

    Deterministic: ``segment_reduce`` adds each expert's rows in order, without atomics.
    """
    if offsets_E is None:
        accumulate = torch.promote_types(dy_RN.dtype, torch.float32)
        return dy_RN.sum(0, keepdim=True, dtype=accumulate).to(dy_RN.dtype)
    if _recorded(dy_RN):
        return _SumRows.apply(dy_RN, offsets_E)  # type: ignore[no-untyped-call, no-any-return]
    return _sum_rows_now(dy_RN, offsets_E)


def _sum_rows_now(dy_RN: Tensor, offsets_E: Tensor) -> Tensor:
    accumulate = torch.promote_types(dy_RN.dtype, torch.float32)
    starts = F.pad(offsets_E.to(torch.int64), (1, 0))
    sums_EN = torch.segment_reduce(dy_RN.to(accumulate), "sum", offsets=starts, axis=0, initial=0, unsafe=True)
    return sums_EN.to(dy_RN.dtype)


# Products as operators, for exported programs and estimators. torch's own operator has a fake implementation for bf16
# only, and no FLOP formula.
_library = torch.library.Library("fusedmoe", "FRAGMENT")
_library.define("grouped_mm(Tensor rows, Tensor weight, Tensor offsets) -> Tensor")
_library.define("grouped_mm_wgrad(Tensor grad, Tensor rows, Tensor offsets) -> Tensor")
_library.impl("grouped_mm", _rows_times_of_values, "CompositeExplicitAutograd")
_library.impl("grouped_mm_wgrad", _wgrad_of_values, "CompositeExplicitAutograd")


@torch.library.register_fake("fusedmoe::grouped_mm", lib=_library)  # type: ignore[untyped-decorator]
def _(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.register_fake("fusedmoe::grouped_mm_wgrad", lib=_library)  # type: ignore[untyped-decorator]
def _(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(offsets.shape[0], grad.shape[1], rows.shape[1])


def _flops(rows: Tensor, weight: Tensor, offsets: Tensor, *, out_val: object) -> int:
    return 2 * rows.numel() * weight.shape[2]


def _wgrad_flops(grad: Tensor, rows: Tensor, offsets: Tensor, *, out_val: object) -> int:
    return 2 * grad.numel() * rows.shape[1]


FLOP_FORMULAS[torch.ops.fusedmoe.grouped_mm] = _flops
FLOP_FORMULAS[torch.ops.fusedmoe.grouped_mm_wgrad] = _wgrad_flops
