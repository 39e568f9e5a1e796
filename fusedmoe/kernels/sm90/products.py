"""The Hopper kernels as functions of flat tensors.

Axes: R rows sorted by expert, E experts, K contraction, N output features, I intermediate features (N = 2 I if gated),
H hidden features. Operands are bf16 or fp16 tensors on one sm_90 GPU, with unit stride along their features. `limits`
states the other constraints. No function waits for the GPU, except the first call on a device, which makes the tile
counters. Arguments that several functions have:

- ``offsets`` (E,) int32, the ends of the experts' rows, at most R. Rows after the last end, the *tail*, are never read,
  and are zeros in the results.
- ``weight`` (E, N, K), with unit stride along N or K; ``bias`` (E, N); ``row_scale`` (R,).
- ``activation`` and ``options``: see `Activation` and `KernelOptions`.
- ``gather`` (R,) int32, contiguous: row r of the first operand is ``operand[gather[r]]``. That operand then has T rows,
  and R is the size of ``gather``. The indices of the tail are not read; all others must be in [0, T). The rows of the
  operand are less than 2 GiB apart.

Each ``bind_*`` returns the function for tensors of the same shapes, dtypes and strides as its arguments. That function
does no look-ups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fusedmoe.kernels.build import compiler
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.rows.activation.functions import bind_activation, bind_activation_backward
from fusedmoe.kernels.rows.move.functions import (
    NAMES,
    bind_column_sums,
    bind_offsets_from_splits,
    bind_row_ranges,
    bind_sum_partials,
    bind_zero_tail,
    column_sums,
    offsets_from_splits,
)
from fusedmoe.kernels.rows.move.slot_functions import (
    bind_copy_rows,
    bind_gather_rows,
    bind_route,
    bind_row_dots,
    bind_slot_values,
    bind_sum_slots,
    bind_sum_slots_and_part,
)
from fusedmoe.kernels.rows.quantize.block_functions import (
    TOKEN_READERS,
    bind_quantize_rows,
    bind_quantize_weight,
    bind_transpose_codes,
)
from fusedmoe.kernels.rows.quantize.format_functions import (
    bind_dequantize,
    bind_magnitudes,
    bind_quantize_format,
    bind_transpose_rows,
    bind_update_amax_history,
)
from fusedmoe.kernels.sm90 import limits
from fusedmoe.kernels.sm90.launch import (
    CompiledIn,
    compiled_in,
    constants,
    placeholders,
    schedule_of,
    scheduling,
    sms_for,
    sms_for_tiles,
    tile_counter,
)
from fusedmoe.kernels.sm90.tiles.choice import WGRADS, Family, Problem, choose

if TYPE_CHECKING:
    from fusedmoe.kernels.options import Schedule
    from fusedmoe.kernels.sm90.tiles.config import TileConfig
    from fusedmoe.numerics.activations import Activation

__all__ = [
    "TOKEN_READERS",
    "bind_activation",
    "bind_activation_backward",
    "bind_column_sums",
    "bind_copy_rows",
    "bind_dequantize",
    "bind_gather_rows",
    "bind_grouped_gemm",
    "bind_grouped_gemm_activation",
    "bind_grouped_gemm_activation_backward",
    "bind_grouped_wgrad",
    "bind_magnitudes",
    "bind_offsets_from_splits",
    "bind_quantize_format",
    "bind_quantize_rows",
    "bind_quantize_weight",
    "bind_route",
    "bind_row_dots",
    "bind_row_ranges",
    "bind_slot_values",
    "bind_sum_slots",
    "bind_sum_slots_and_part",
    "bind_transpose_codes",
    "bind_transpose_rows",
    "bind_update_amax_history",
    "bind_zero_tail",
    "column_sums",
    "grouped_gemm",
    "grouped_gemm_activation",
    "grouped_gemm_activation_backward",
    "grouped_wgrad",
    "offsets_from_splits",
]


WgradOperand = Literal["grad_output", "x"]
"""An operand of a weight gradient."""
KERNEL_OPERAND: dict[WgradOperand | None, str | None] = {None: None, "grad_output": "a", "x": "b"}


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    options: KernelOptions = DEFAULT,
    gather: Tensor | None = None,
) -> Tensor:
    """``y[r] = (x[r] @ weight[e].T + bias[e]) * row_scale[r]`` for each row r of expert e: (R, N) of x (R, K).

    ``grouped_gemm(dy, weight.mT, offsets)`` is the gradient of the input. With ``gather``, x is (T, K).
    """
    run = bind_grouped_gemm(x, weight, bias, row_scale, options, gather)
    return run(x, weight, bias, offsets, row_scale, gather)


def bind_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    options: KernelOptions,
    gather: Tensor | None = None,
    *,
    ranges: bool = False,
) -> Callable[..., Tensor]:
    """Return `grouped_gemm` of ``(x, weight, bias, offsets, row_scale, gather=None, out=None)``.

    With ``ranges``, parts of the vector of `bind_row_ranges` in place of the offsets: one launch for each of them. A
    part has one range or more, and one element more. If it has several ranges, the launch reads the rows of all but the
    first when this element is not 0.
    """
    rows, columns = _rows(x, gather), weight.shape[1]
    launch = _ragged_m(
        "plain", x, weight, None, options, gather, biased=bias is not None, scale=_dtype(row_scale), ranges=ranges
    )
    kernel = _of_ranges(launch.kernel) if ranges else launch.kernel

    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offsets: Tensor,
        row_scale: Tensor | None,
        gather: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = x.new_empty(rows, columns)  # not a tuple, which takes 1.5 times as long
        arguments = launch.arguments(bias, row_scale)
        if gather is not None:
            arguments = (*arguments, gather)
        kernel(x, weight, offsets, *arguments, out)
        return out

    return run


def grouped_gemm_activation(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    activation: Activation,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    keep_preactivation: bool = True,
    options: KernelOptions = DEFAULT,
    gather: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``p[r] = x[r] @ weight[e].T + bias[e]``, ``y[r] = activation(p[r]) * row_scale[r]``.

    Parameters
    ----------
    x
        (R, K); with ``gather`` (T, K).
    weight
        (E, N, K). For a gated activation, the rows of gate come before those of up, or the two alternate.
    keep_preactivation
        Return p too.

    Returns
    -------
    tuple[Tensor, Tensor or None]
        y (R, I) and p (R, N).
    """
    run = bind_grouped_gemm_activation(x, weight, bias, row_scale, activation, keep_preactivation, options, gather)
    results = run(x, weight, bias, offsets, row_scale, gather)
    return results if isinstance(results, tuple) else (results, None)


def bind_grouped_gemm_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    activation: Activation,
    keep_preactivation: bool,
    options: KernelOptions,
    gather: Tensor | None = None,
    *,
    ranges: bool = False,
) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """Return `grouped_gemm_activation` of ``(x, weight, bias, offsets, row_scale, gather=None)``; without p, its result
    is y. ``ranges``: as for `bind_grouped_gemm`.
    """
    rows, columns = _rows(x, gather), weight.shape[1]
    features = columns // 2 if activation.gated else columns
    launch = _ragged_m(
        "activation", x, weight, activation, options, gather,
        biased=bias is not None, scale=_dtype(row_scale), keep=keep_preactivation, ranges=ranges,
    )  # fmt: skip
    kernel = _of_ranges(launch.kernel) if ranges else launch.kernel

    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offsets: Tensor,
        row_scale: Tensor | None,
        gather: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y = x.new_empty(rows, features)
        arguments = launch.arguments(bias, row_scale)
        if gather is not None:
            arguments = (*arguments, gather)
        if not keep_preactivation:
            kernel(x, weight, offsets, *arguments, y)
            return y
        p = x.new_empty(rows, columns)
        kernel(x, weight, offsets, *arguments, p, y)
        return y, p

    return run


def grouped_gemm_activation_backward(
    grad_output: Tensor,
    weight: Tensor,
    offsets: Tensor,
    preactivation: Tensor,
    activation: Activation,
    *,
    row_scale: Tensor | None = None,
    want_output: bool = True,
    want_row_scale_grad: bool = False,
    options: KernelOptions = DEFAULT,
    gather: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of p, given ``d[r] = grad_output[r] @ weight[e]``, the gradient of ``activation(p[r]) * row_scale[r]``.

    It is one launch; with ``want_row_scale_grad``, a sum follows.

    Parameters
    ----------
    grad_output
        (R, H); with ``gather`` (T, H).
    weight
        (E, H, I) as the layer after the activation stores it, with unit stride along H or I.
    preactivation
        p: (R, 2 I) if gated, else (R, I).
    want_output
        Return the recomputed ``activation(p) * row_scale`` too.
    want_row_scale_grad
        Return ``sum over i of d[r, i] * activation(p)[r, i]`` too. The kernel writes one sum per column tile. A
        second launch adds them up in a fixed order, so the result is deterministic.

    Returns
    -------
    tuple[Tensor, Tensor or None, Tensor or None]
        Gradient of p, the activation (R, I), and the row scale's gradient (R,) in fp32.
    """
    run = bind_grouped_gemm_activation_backward(
        grad_output, weight, preactivation, row_scale, activation, want_output, want_row_scale_grad, options, gather
    )
    return run(grad_output, weight, offsets, preactivation, row_scale, gather)


def bind_grouped_gemm_activation_backward(
    grad_output: Tensor,
    weight: Tensor,
    preactivation: Tensor,
    row_scale: Tensor | None,
    activation: Activation,
    want_output: bool,
    want_row_scale_grad: bool,
    options: KernelOptions,
    gather: Tensor | None = None,
    *,
    ranges: bool = False,
) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:
    """Return `grouped_gemm_activation_backward` of ``(grad_output, weight, offsets, preactivation, row_scale,
    gather=None)``. ``ranges``: as for `bind_grouped_gemm`.
    """
    (rows, features), outputs = preactivation.shape, weight.shape[2]
    device, unscaled = grad_output.device, want_row_scale_grad and row_scale is None
    scale = torch.float32 if unscaled else _dtype(row_scale)
    launch = _ragged_m(
        "derivative", grad_output, weight.mT, activation, options, gather,
        scale=scale, keep=want_output, ranges=ranges,
    )  # fmt: skip
    kernel, partials = _of_ranges(launch.kernel) if ranges else launch.kernel, launch.partials
    total = None
    if partials is not None:
        partials = (partials[0], -(-rows // limits.UNIT) * limits.UNIT)
        total = bind_sum_partials(*partials) if want_row_scale_grad else None

    def run(
        grad_output: Tensor,
        weight: Tensor,
        offsets: Tensor,
        preactivation: Tensor,
        row_scale: Tensor | None,
        gather: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        grad = preactivation.new_empty(rows, features)
        y = grad_output.new_empty(rows, outputs) if want_output else None
        if unscaled:
            row_scale = torch.ones(rows, dtype=torch.float32, device=device)
        results: tuple[Tensor, ...] = (grad,) if y is None else (grad, y)
        partial = None
        if partials is not None:
            partial = torch.empty(partials, dtype=torch.float32, device=device)
            results = (partial[:, :rows], *results)
        arguments = launch.arguments(None, row_scale)
        if gather is not None:
            arguments = (*arguments, gather)
        kernel(grad_output, weight.mT, offsets, *arguments, preactivation, *results)
        return grad, y, None if total is None or partial is None else total(partial)[:rows]

    return run


def grouped_wgrad(
    grad_output: Tensor,
    x: Tensor,
    offsets: Tensor,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    accumulate: bool = False,
    options: KernelOptions = DEFAULT,
    gather: Tensor | None = None,
    gathered: WgradOperand | None = None,
) -> Tensor:
    """``dW[e] = grad_output[rows of e].T @ x[rows of e]``; zeros for an expert without rows.

    Parameters
    ----------
    grad_output, x
        (R, N) and (R, K). The one that is ``gathered`` has T rows instead.
    out
        (E, N, K): the tensor to write or to add to.
    dtype
        Dtype of the result without ``out``: that of x (the default), or fp32.
    accumulate
        Add to ``out``, after rounding to its dtype. The gradient of an expert without rows does not change.
    gather, gathered
        (R,) int32, and the operand that it is for: row r of that operand is its row ``gather[r]``. Entries of the tail
        are not read.

    Returns
    -------
    Tensor
        (E, N, K).

    Raises
    ------
    ValueError
        Only one of ``gather`` and ``gathered`` is given, ``gathered`` is not "grad_output" or "x", or ``gather`` is not
        a contiguous int32 vector.
    """
    if out is not None:
        dtype = out.dtype
    run = bind_grouped_wgrad(grad_output, x, offsets, dtype or x.dtype, accumulate, options, gather, gathered)
    return run(grad_output, x, offsets, out, gather)


def bind_grouped_wgrad(
    grad_output: Tensor,
    x: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    accumulate: bool,
    options: KernelOptions,
    gather: Tensor | None = None,
    gathered: WgradOperand | None = None,
    beside: bool = False,
    *,
    transposed: bool = False,
) -> Callable[..., Tensor]:
    """Return `grouped_wgrad` of ``(grad_output, x, offsets, out, gather=None)``; ``out`` has this dtype, or is None.
    With ``transposed``, the result is ``.mT`` of a contiguous tensor (E, K, N), and so is ``out``.

    With ``beside``, the kernel begins while the launch before it runs, if that launch allows it, on the SMs that this
    launch leaves free; the schedule is dynamic, see `launch.schedule_of`. No argument may be a result of that launch.
    """
    if gathered not in KERNEL_OPERAND or (gather is None) != (gathered is None):
        given = f"{'no' if gather is None else 'an'} index"
        raise ValueError(
            f"gathered: expected 'grad_output' or 'x' and an index, or None and no index, got {gathered!r}, {given}"
        )
    if transposed:
        exchanged: dict[WgradOperand | None, WgradOperand | None] = {None: None, "x": "grad_output", "grad_output": "x"}
        product = bind_grouped_wgrad(
            x, grad_output, offsets, dtype, accumulate, options, gather, exchanged[gathered], beside
        )
        return lambda dy, x, offsets, out, gather=None: (
            product(x, dy, offsets, None if out is None else out.mT, gather).mT
        )
    rows = _rows(grad_output if gathered == "grad_output" else x, gather)
    experts, n, k = offsets.shape[0], grad_output.shape[1], x.shape[1]
    same, device = dtype is x.dtype, x.device
    kernel, numbers = _RaggedKLaunch(None, ())
    if rows:
        beside, schedule = schedule_of(device, beside, options.schedule)
        key = _RaggedKKey(
            choose=choose, device=device, dtype=x.dtype, rows=rows, experts=experts, n=n, k=k, out=dtype,
            accumulate=accumulate, gathered=KERNEL_OPERAND[gathered], options=options, beside=beside,
        )  # fmt: skip
        kernel, numbers = _ragged_k_launch(key)

    def run(
        grad_output: Tensor, x: Tensor, offsets: Tensor, out: Tensor | None, gather: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = x.new_empty(experts, n, k) if same else x.new_empty(experts, n, k, dtype=dtype)
        if kernel is not None:
            index = () if gathered is None else (gather,)
            counter, dynamic = tile_counter(device, schedule)
            kernel(grad_output, x, offsets, out, counter, *numbers, dynamic, *index)
        elif not accumulate:
            out.zero_()
        return out

    return run


def _ragged_m(
    family: Family,
    a: Tensor,
    b: Tensor,
    activation: Activation | None,
    options: KernelOptions,
    gather: Tensor | None,
    *,
    biased: bool = False,
    scale: torch.dtype | None = None,
    keep: bool = False,
    ranges: bool = False,
) -> _RaggedMLaunch:
    """Return the launch of a ragged M product of tensors like these."""
    rows, depth = _rows(a, gather), a.shape[1]
    experts, columns, b_depth = b.shape
    if not rows:
        partials = (1, 0) if family == "derivative" and scale is not None else None
        return _RaggedMLaunch(_no_kernel, a.device, "static", a, a, (), partials)
    return _ragged_m_launch(
        _RaggedMKey(
            choose=choose, family=family, device=a.device, dtype=a.dtype, rows=rows, experts=experts, columns=columns,
            depth=depth, b_major="k" if b.stride()[2] == 1 and b_depth > 1 else "n", activation=activation, keep=keep,
            biased=biased, scale=scale, options=options, gathered=gather is not None, ranges=ranges,
        )
    )  # fmt: skip


def _of_ranges(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a function that launches a kernel once for each of some parts of ranges, which it takes as ``offsets``.

    They may be a generator, which waits for rows before it yields their ranges.
    """

    def launch(a: Tensor, b: Tensor, ranges: Iterable[Tensor], *others: Any) -> None:
        for part in ranges:
            kernel(a, b, part, *others)

    return launch


def _rows(operand: Tensor, gather: Tensor | None) -> int:
    """Return R, after a check of the index."""
    if gather is None:
        return operand.shape[0]
    if gather.dtype is not torch.int32 or gather.dim() != 1 or not gather.is_contiguous():
        shape, strides = tuple(gather.shape), gather.stride()
        raise ValueError(f"gather is {gather.dtype}, {shape}, strides {strides}: expected a contiguous int32 vector")
    reason = limits.why_not_gathered(operand.stride(0))
    if reason is not None:
        raise ValueError(reason)
    return gather.shape[0]


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _no_kernel(*_: Any) -> None:
    """Launch nothing: there are no rows."""


@dataclass(frozen=True, kw_only=True)
class _RaggedMKey:
    """Everything that determines the launch of a ragged M product."""

    choose: Callable[[Problem], TileConfig]  # `tuning.forced` replaces it
    family: Family
    device: torch.device
    dtype: torch.dtype
    rows: int
    experts: int
    columns: int
    depth: int
    b_major: str
    activation: Activation | None
    keep: bool
    biased: bool
    scale: torch.dtype | None  # dtype of the row scale
    options: KernelOptions
    gathered: bool
    ranges: bool


class _RaggedMLaunch(NamedTuple):
    """The common part of all launches with the same key.

    The kernel takes ``(a, b, offsets)``, the result of `arguments`, the input of its epilogue, and its outputs.
    """

    kernel: Callable[..., Any]
    device: torch.device
    schedule: Schedule
    no_bias: Tensor
    no_scale: Tensor
    numbers: tuple[float, ...]
    partials: tuple[int, int] | None = None  # shape of the row scale's gradient, before its sum over column tiles
    converts: bool = False  # whether the row scale is converted to fp32

    def arguments(self, bias: Tensor | None, row_scale: Tensor | None) -> tuple[Any, ...]:
        """Return bias, row scale, tile counter and numbers, as the kernel takes them."""
        if row_scale is None:
            row_scale = self.no_scale
        else:
            row_scale = row_scale.float() if self.converts else row_scale.contiguous()
        bias = self.no_bias if bias is None else bias
        counter, dynamic = tile_counter(self.device, self.schedule)
        return (bias, row_scale, counter, *self.numbers, dynamic)


@functools.lru_cache(maxsize=4096)
def _ragged_m_launch(key: _RaggedMKey) -> _RaggedMLaunch:
    """Make the launch of a ragged M product; cached, since that takes as long as a launch."""
    family, activation = key.family, key.activation
    if family == "derivative" and activation is not None and activation.heavy:
        family = "heavy_derivative"
    if family == "activation" and activation is not None and activation.gated and not activation.interleaved:
        family = "transposed_activation" if key.b_major == "n" else family
    sms, of_tiles = sms_for(key.device, key.options), sms_for_tiles(key.device, key.options)
    problem = Problem(
        family, key.rows, key.experts, key.columns, key.depth, of_tiles, key.dtype.itemsize, key.gathered
    )  # fmt: skip
    config = key.choose(problem)
    scaled, derivative = key.scale is not None, key.family == "derivative"
    kernel = _ragged_m_kernel(
        dtype=NAMES[key.dtype], b_major=key.b_major, derivative=derivative, activation=compiled_in(activation),
        keep=key.keep, scaled=derivative and scaled, config=config, gather=key.gathered,
        ranges=key.ranges,
    )  # fmt: skip
    numbers = (*constants(activation), key.biased, scaled, *scheduling(problem, config, sms))
    no_bias, no_scale = placeholders(key.device, key.dtype)
    return _RaggedMLaunch(
        kernel, key.device, key.options.schedule, no_bias, no_scale, numbers,
        partials=(-(-key.columns // config.tile_n), key.rows) if derivative and scaled else None,
        converts=scaled and key.scale is not torch.float32,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _RaggedKKey:
    """Everything that determines the launch of a ragged K product."""

    choose: Callable[[Problem], TileConfig]
    device: torch.device
    dtype: torch.dtype
    rows: int
    experts: int
    n: int
    k: int
    out: torch.dtype
    accumulate: bool
    gathered: str | None  # operand of the kernel: "a" or "b"
    options: KernelOptions
    beside: bool


class _RaggedKLaunch(NamedTuple):
    """A ragged K kernel and its numbers."""

    kernel: Callable[..., Any] | None
    numbers: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _ragged_k_launch(key: _RaggedKKey) -> _RaggedKLaunch:
    """Make the launch of a ragged K product."""
    sms, of_tiles = sms_for(key.device, key.options), sms_for_tiles(key.device, key.options)
    problem = Problem(WGRADS[key.gathered], key.rows, key.experts, key.k, key.n, of_tiles, key.dtype.itemsize)
    config = key.choose(problem)
    kernel = _ragged_k_kernel(
        dtype=NAMES[key.dtype], config=config, out=NAMES[key.out], accumulate=key.accumulate, gathered=key.gathered,
        beside=key.beside,
    )  # fmt: skip
    return _RaggedKLaunch(kernel, scheduling(problem, config, sms))


@functools.cache
def _ragged_m_kernel(
    *,
    dtype: str,
    b_major: str,
    derivative: bool,
    activation: CompiledIn | None,
    keep: bool,
    scaled: bool,
    config: TileConfig,
    gather: bool,
    ranges: bool,
) -> Any:
    from fusedmoe.kernels.sm90.epilogue import outputs as epilogues  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm90.gemm.operands import Plain
    from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM

    if activation is None:
        epilogue = epilogues.PLAIN
    elif derivative:
        epilogue = epilogues.derivative(**activation._asdict(), keep=keep, row_scale=scaled)
    else:
        epilogue = epilogues.activation(**activation._asdict(), keep=keep)
    return compiler.load(
        RaggedM(Plain(dtype), config, b_major=b_major, epilogue=epilogue, gather=gather, ranges=ranges)
    )


@functools.cache
def _ragged_k_kernel(
    *, dtype: str, config: TileConfig, out: str, accumulate: bool, gathered: str | None, beside: bool
) -> Any:
    from fusedmoe.kernels.sm90.gemm.operands import Plain  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK

    return compiler.load(
        RaggedK(Plain(dtype), config, out=out, accumulate=accumulate, gathered=gathered, beside=beside)
    )
