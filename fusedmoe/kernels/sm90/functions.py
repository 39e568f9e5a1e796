"""The Hopper kernels as functions of flat tensors.

Axes: R rows sorted by expert, E experts, K contraction, N features out, I intermediate features (N = 2 I where gated),
H hidden features. ``offsets`` (E,) int32 are the running ends of the experts' rows, at most R. Rows behind the last
end, the *tail*, come out as zeros and are never read. Operands are bf16, or fp16, on one sm_90 GPU; `limits` says what
else they have to be. Nothing waits for the GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.kernels import compiler
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.sm90.choice import Family, Problem, band, choose
from fusedmoe.kernels.sm90.row_functions import (
    bind_column_sums,
    bind_offsets_from_splits,
    column_sums,
    offsets_from_splits,
)
from fusedmoe.kernels.sm90.slot_functions import (
    bind_gather_rows,
    bind_route,
    bind_row_dots,
    bind_slot_values,
    bind_sum_slots,
)

if TYPE_CHECKING:
    from fusedmoe.kernels.activation import Activation
    from fusedmoe.kernels.options import Schedule
    from fusedmoe.kernels.sm90.config import TileConfig

__all__ = [
    "bind_column_sums",
    "bind_gather_rows",
    "bind_grouped_gemm",
    "bind_grouped_gemm_activation",
    "bind_grouped_gemm_activation_backward",
    "bind_grouped_wgrad",
    "bind_offsets_from_splits",
    "bind_route",
    "bind_row_dots",
    "bind_slot_values",
    "bind_sum_slots",
    "column_sums",
    "grouped_gemm",
    "grouped_gemm_activation",
    "grouped_gemm_activation_backward",
    "grouped_wgrad",
    "offsets_from_splits",
]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    options: KernelOptions = DEFAULT,
) -> Tensor:
    """``y[r] = (x[r] @ weight[e].T + bias[e]) * row_scale[r]`` for each row r of expert e.

    Parameters
    ----------
    x
        (R, K), features with unit stride.
    weight
        (E, N, K), with unit stride along N or K: ``grouped_gemm(dy, weight.mT, offsets)`` is the gradient of the input.
    offsets
        See the module's page.
    bias, row_scale
        (E, N) and (R,).
    options
        See `KernelOptions`.

    Returns
    -------
    Tensor
        (R, N).
    """
    return bind_grouped_gemm(x, weight, bias, row_scale, options)(x, weight, bias, offsets, row_scale)


def bind_grouped_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, row_scale: Tensor | None, options: KernelOptions
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], Tensor]:
    """Return `grouped_gemm` of ``(x, weight, bias, offsets, row_scale)`` for tensors of the same shapes, dtypes and
    strides as these.
    """
    rows, columns = x.shape[0], weight.shape[1]
    launch = _ragged_m("plain", x, weight, None, options, biased=bias is not None, scale=_dtype(row_scale))
    kernel, constants = launch.kernel, launch.constants

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, row_scale: Tensor | None) -> Tensor:
        out = x.new_empty(rows, columns)  # two numbers, not a tuple of them: that takes longer by half
        kernel(x, weight, offsets, out, None, None, *(constants or launch.last(bias, row_scale)))
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
) -> tuple[Tensor, Tensor | None]:
    """``p[r] = x[r] @ weight[e].T + bias[e]``, ``y[r] = activation(p[r]) * row_scale[r]``.

    Parameters
    ----------
    x
        (R, K), features with unit stride.
    weight
        (E, N, K), with unit stride along N or K; of a gated activation ``[gate; up]`` rows, or gate and up in turns.
    offsets
        See the module's page.
    activation
        See `Activation`.
    bias, row_scale
        (E, N) and (R,).
    keep_preactivation
        Write p too.
    options
        See `KernelOptions`.

    Returns
    -------
    tuple[Tensor, Tensor or None]
        y (R, I) and p (R, N).
    """
    run = bind_grouped_gemm_activation(x, weight, bias, row_scale, activation, keep_preactivation, options)
    results = run(x, weight, bias, offsets, row_scale)
    return results if isinstance(results, tuple) else (results, None)


def bind_grouped_gemm_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    activation: Activation,
    keep_preactivation: bool,
    options: KernelOptions,
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], Tensor | tuple[Tensor, Tensor]]:
    """Return `grouped_gemm_activation` of ``(x, weight, bias, offsets, row_scale)`` for tensors of the same shapes,
    dtypes and strides as these. It returns y alone where p is not kept.
    """
    rows, columns = x.shape[0], weight.shape[1]
    features = columns // 2 if activation.gated else columns
    launch = _ragged_m(
        "activation", x, weight, activation, options,
        biased=bias is not None, scale=_dtype(row_scale), keep=keep_preactivation,
    )  # fmt: skip
    kernel, constants = launch.kernel, launch.constants

    def run(
        x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, row_scale: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        y = x.new_empty(rows, features)
        if not keep_preactivation:
            kernel(x, weight, offsets, y, None, None, *(constants or launch.last(bias, row_scale)))
            return y
        p = x.new_empty(rows, columns)
        kernel(x, weight, offsets, y, p, None, *(constants or launch.last(bias, row_scale)))
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
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of p, where ``d[r] = grad_output[r] @ weight[e]`` is that of ``activation(p[r]) * row_scale[r]``.

    Parameters
    ----------
    grad_output
        (R, H), features with unit stride.
    weight
        (E, H, I) as the layer behind the activation stores it, unit stride along H or I.
    offsets
        See the module's page.
    preactivation
        p: (R, 2 I) where gated, else (R, I).
    activation
        See `Activation`.
    row_scale
        (R,).
    want_output
        Return ``activation(p) * row_scale`` too, computed again.
    want_row_scale_grad
        Return ``sum over i of d[r, i] * activation(p)[r, i]`` too. Deterministic: tiles write partial sums.
    options
        See `KernelOptions`.

    Returns
    -------
    tuple[Tensor, Tensor or None, Tensor or None]
        Gradient of p, the activation (R, I), and the row scale's gradient (R,) in fp32.
    """
    run = bind_grouped_gemm_activation_backward(
        grad_output, weight, preactivation, row_scale, activation, want_output, want_row_scale_grad, options
    )
    return run(grad_output, weight, offsets, preactivation, row_scale)


def bind_grouped_gemm_activation_backward(
    grad_output: Tensor,
    weight: Tensor,
    preactivation: Tensor,
    row_scale: Tensor | None,
    activation: Activation,
    want_output: bool,
    want_row_scale_grad: bool,
    options: KernelOptions,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None, Tensor | None]]:
    """Return `grouped_gemm_activation_backward` of ``(grad_output, weight, offsets, preactivation, row_scale)`` for
    tensors of the same shapes, dtypes and strides as these.
    """
    (rows, features), outputs = preactivation.shape, weight.shape[2]
    unscaled = want_row_scale_grad and row_scale is None
    scale = torch.float32 if unscaled else _dtype(row_scale)
    launch = _ragged_m(
        "derivative", grad_output, weight.mT, activation, options, scale=scale, keep=want_output, gradient=True
    )
    kernel, constants = launch.kernel, launch.constants

    def run(
        grad_output: Tensor, weight: Tensor, offsets: Tensor, preactivation: Tensor, row_scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        grad = preactivation.new_empty(rows, features)
        y = grad_output.new_empty(rows, outputs) if want_output else None
        if unscaled:
            row_scale = _ones(grad_output.device, rows)
        arguments = constants or launch.last(None, row_scale)
        kernel(grad_output, weight.mT, offsets, grad, preactivation, y, *arguments)
        return grad, y, arguments[_PARTIAL].sum(0) if want_row_scale_grad else None

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
) -> Tensor:
    """``dW[e] = grad_output[rows of e].T @ x[rows of e]``; zeros for an expert without rows.

    Parameters
    ----------
    grad_output, x
        (R, N) and (R, K), features with unit stride.
    offsets
        See the module's page.
    out
        (E, N, K) to write to, or to add to.
    dtype
        Of the result where there is no ``out``: x's, or fp32.
    accumulate
        Add to ``out``, which is fp32; an expert without rows is left as it is.
    options
        See `KernelOptions`.

    Returns
    -------
    Tensor
        (E, N, K).
    """
    if out is not None:
        dtype = out.dtype
    run = bind_grouped_wgrad(grad_output, x, offsets, dtype or x.dtype, accumulate, options)
    return run(grad_output, x, offsets, out)


def bind_grouped_wgrad(
    grad_output: Tensor, x: Tensor, offsets: Tensor, dtype: torch.dtype, accumulate: bool, options: KernelOptions
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return `grouped_wgrad` of ``(grad_output, x, offsets, out)`` for tensors of the same shapes, dtypes and strides
    as these, and an ``out``, where there is one, of this dtype.
    """
    rows, k = x.shape
    experts, n = offsets.shape[0], grad_output.shape[1]
    same, device = dtype is x.dtype, x.device
    kernel, static_counter, numbers = (
        _ragged_k_launch(
            choose, device, x.dtype, rows, experts, n, k, dtype, accumulate, options.sm_margin, options.schedule
        )
        if rows
        else (None, None, ())
    )

    def run(grad_output: Tensor, x: Tensor, offsets: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            out = x.new_empty(experts, n, k) if same else x.new_empty(experts, n, k, dtype=dtype)
        if kernel is not None:
            counter = _new_counter(device) if static_counter is None else static_counter
            kernel(grad_output, x, offsets, out, counter, *numbers)
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
    *,
    biased: bool = False,
    scale: torch.dtype | None = None,
    keep: bool = False,
    gradient: bool = False,
) -> _Launch:
    """Return how to launch a product over ragged rows like these."""
    rows, depth = a.shape
    experts, columns, b_depth = b.shape
    if not rows:
        return _Launch(_no_kernel, None, a.device, a, a, None, (), (1, 0))
    b_major = "k" if b.stride()[2] == 1 and b_depth > 1 else "n"
    return _ragged_m_launch(
        choose, family, a.device, a.dtype, rows, experts, columns, depth, b_major, activation, keep, gradient,
        biased, scale, options.sm_margin, options.schedule,
    )  # fmt: skip


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _no_kernel(*_: Any) -> None:
    """Launch nothing: there are no rows."""


class _Launch(NamedTuple):
    """What launches of a product over ragged rows with the same shapes have in common.

    The kernel takes ``(a, b, offsets, out, p, second)`` and then ``(bias, row scale, partial sums of its gradient, tile
    counter, numbers ...)``. The latter are ``constants``, where they are the same at every launch, and otherwise what
    `last` returns.
    """

    kernel: Callable[..., Any]
    constants: tuple[Any, ...] | None
    device: torch.device
    no_bias: Tensor
    no_scale: Tensor
    counter: Tensor | None
    numbers: tuple[float, ...]
    partials: tuple[int, int] | None = None
    converts: bool = False  # the row scale, to fp32

    def last(self, bias: Tensor | None, row_scale: Tensor | None) -> tuple[Any, ...]:
        """Return the last arguments for this bias and this row scale."""
        if row_scale is None:
            row_scale = self.no_scale
        elif self.converts:
            row_scale = row_scale.float()
        return (
            self.no_bias if bias is None else bias,
            row_scale,
            None if self.partials is None else torch.empty(self.partials, dtype=torch.float32, device=self.device),
            _new_counter(self.device) if self.counter is None else self.counter,
            *self.numbers,
        )


_PARTIAL = 2  # the partial sums among a kernel's last arguments


@functools.lru_cache(maxsize=4096)
def _ragged_m_launch(
    choose: Callable[[Problem], TileConfig],
    family: Family,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    experts: int,
    columns: int,
    depth: int,
    b_major: str,
    activation: Activation | None,
    keep: bool,
    gradient: bool,
    biased: bool,
    scale: torch.dtype | None,
    sm_margin: int,
    schedule: Schedule,
) -> _Launch:
    """Find out how to launch a product: once for the same shapes, since it takes as long as a launch. ``choose`` is an
    argument, so that another choice is another launch.
    """
    if family == "derivative" and activation is not None and heavy(activation):
        family = "heavy_derivative"
    if family == "activation" and activation is not None and activation.gated and not activation.interleaved:
        family = "transposed_activation" if b_major == "n" else family
    options = KernelOptions(sm_margin, schedule)
    sms = _sms(device, options)
    problem = Problem(family, rows, experts, columns, depth, sms)
    config = choose(problem)
    scaled = scale is not None
    kernel = _ragged_m_kernel(
        _NAMES[dtype], b_major, family, activation_key(activation), keep, gradient and scaled, config
    )
    limit, alpha, offset = 0.0, 1.0, 0.0
    if activation is not None:
        limit, alpha, offset = activation.limit or 0.0, activation.alpha, activation.offset
    numbers = (limit, alpha, offset, biased, scaled, *_scheduling(problem, config, sms, options))
    no_bias, no_scale = _absent(device, dtype)
    partials = (-(-columns // config.tile_n), rows) if gradient and scaled else None
    launch = _Launch(
        kernel, None, device, no_bias, no_scale, _counter(device, options), numbers,
        partials, converts=scaled and scale is not torch.float32,
    )  # fmt: skip
    varies = biased or scaled or launch.counter is None
    return launch if varies else launch._replace(constants=launch.last(None, None))


@functools.lru_cache(maxsize=4096)
def _ragged_k_launch(
    choose: Callable[[Problem], TileConfig],
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    experts: int,
    n: int,
    k: int,
    out: torch.dtype,
    accumulate: bool,
    sm_margin: int,
    schedule: Schedule,
) -> tuple[Callable[..., Any], Tensor | None, tuple[int, ...]]:
    """Return the kernel, the tile counter where the schedule is static, and the numbers that come last."""
    options = KernelOptions(sm_margin, schedule)
    sms = _sms(device, options)
    problem = Problem("wgrad", rows, experts, k, n, sms)
    config = choose(problem)
    kernel = _ragged_k_kernel(_NAMES[dtype], config, _NAMES[out], accumulate)
    numbers = _scheduling(problem, config, sms, options)
    return kernel, _counter(device, options), numbers


def _scheduling(problem: Problem, config: TileConfig, sms: int, options: KernelOptions) -> tuple[int, int, int]:
    """Return what a kernel's scheduler takes: the band of row tiles, CTAs, and whether tiles are drawn."""
    return band(problem, config), _ctas(sms, config), int(options.schedule == "dynamic")


def activation_key(activation: Activation | None) -> tuple[str, bool, bool]:
    """Return what of an activation is compiled in: kind, whether it is clamped, whether gate and up alternate."""
    if activation is None:
        return "", False, False
    clamped = activation.limit is not None and math.isfinite(activation.limit)
    return activation.kind, activation.gated and clamped, activation.gated and activation.interleaved


def heavy(activation: Activation) -> bool:
    """Whether a derivative's code at the widest tile overflows an SM's instruction cache, which makes it slow."""
    return activation.kind.startswith("geglu")


@functools.cache
def _ragged_m_kernel(
    dtype: str, b_major: str, family: Family, key: tuple[str, bool, bool], keep: bool, scaled: bool, config: TileConfig
) -> Any:
    from fusedmoe.kernels.sm90.ragged_m import Epilogue, RaggedM

    kind, clamped, interleaved = key
    derivative = family in ("derivative", "heavy_derivative")
    epilogue = Epilogue(kind, derivative, clamped, interleaved, keep, scaled)
    return compiler.load(RaggedM(dtype, config, b_major=b_major, epilogue=epilogue))


@functools.cache
def _ragged_k_kernel(dtype: str, config: TileConfig, out: str, accumulate: bool) -> Any:
    from fusedmoe.kernels.sm90.ragged_k import RaggedK

    return compiler.load(RaggedK(dtype, config, out=out, accumulate=accumulate))


@functools.cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _sms(device: torch.device, options: KernelOptions) -> int:
    return max(_sm_count(device) - options.sm_margin, 2)


def _ctas(sms: int, config: TileConfig) -> int:
    return sms // config.ctas * config.ctas


def _new_counter(device: torch.device) -> Tensor:
    """A tile counter, zero and one launch's own: those of other streams have theirs."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@functools.cache
def _no_counter(device: torch.device) -> Tensor:
    return _new_counter(device)


def _counter(device: torch.device, options: KernelOptions) -> Tensor | None:
    """The tile counter of a static schedule, which reads none; None for a dynamic one, whose launches have new ones."""
    return _no_counter(device) if options.schedule == "static" else None


@functools.cache
def _absent(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a kernel gets for a bias or a row scale that there is not; it reads neither."""
    return torch.empty(1, 8, dtype=dtype, device=device), torch.empty(1, dtype=torch.float32, device=device)


def _ones(device: torch.device, rows: int) -> Tensor:
    return torch.ones(rows, dtype=torch.float32, device=device)
