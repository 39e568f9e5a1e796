"""The Hopper kernels as functions of flat tensors.

Axes: R rows sorted by expert, E experts, K contraction, N features out, I intermediate features (N = 2 I where gated),
H hidden features. ``offsets`` (E,) int32 are the running ends of the experts' rows, at most R. Rows behind the last
end, the *tail*, come out as zeros and are never read. Operands are bf16, or fp16, on one sm_90 GPU; `limits` says what
else they have to be. Nothing waits for the GPU.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.kernels import compiler
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.sm90.choice import Family, Problem, band, choose
from fusedmoe.kernels.sm90.row_functions import column_sums, offsets_from_splits

if TYPE_CHECKING:
    from collections.abc import Callable

    from fusedmoe.kernels.activation import Activation
    from fusedmoe.kernels.options import Schedule
    from fusedmoe.kernels.sm90.config import TileConfig

__all__ = [
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
    rows, columns = x.shape[0], weight.shape[1]
    out = x.new_empty(rows, columns)
    _ragged_m("plain", x, weight, offsets, out, None, None, bias, row_scale, None, None, options)
    return out


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
        (E, N, K); of a gated activation ``[gate; up]`` rows with unit stride along K, or gate and up in turns, with
        unit stride along N or K.
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
    rows, columns = x.shape[0], weight.shape[1]
    y = x.new_empty(rows, columns // 2 if activation.gated else columns)
    p = x.new_empty(rows, columns) if keep_preactivation else None
    _ragged_m("activation", x, weight, offsets, y, p, None, bias, row_scale, None, activation, options)
    return y, p


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
    rows, features = preactivation.shape
    grad = preactivation.new_empty(rows, features)
    y = grad_output.new_empty(rows, weight.shape[2]) if want_output else None
    if want_row_scale_grad and row_scale is None:
        row_scale = _ones(grad_output.device, rows)
    partial = _ragged_m(
        "derivative", grad_output, weight.mT, offsets, grad, preactivation, y, None, row_scale, True, activation,
        options,
    )  # fmt: skip
    return grad, y, partial.sum(0) if want_row_scale_grad and partial is not None else None


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
    rows, k = x.shape
    experts, n = offsets.shape[0], grad_output.shape[1]
    if out is None:
        dtype = dtype or x.dtype
        out = x.new_empty(experts, n, k) if dtype is x.dtype else x.new_empty(experts, n, k, dtype=dtype)
    if not x.shape[0]:
        return out if accumulate else out.zero_()
    launch = _ragged_k_launch(
        choose, x.device, x.dtype, rows, experts, n, k, out.dtype, accumulate, options.sm_margin, options.schedule
    )
    launch.run(grad_output, x, offsets, out, launch.tile_counter(), *launch.numbers)
    return out


class _Launch(NamedTuple):
    """What launches of a product with the same shapes have in common: found once, for that takes as long as a launch.

    The functions that make one have ``choose`` among their arguments, so that another choice is another launch.
    """

    run: Callable[..., Any]
    config: TileConfig
    device: torch.device
    counter: Tensor | None  # of a static schedule, which reads none; a dynamic one has a new one each time
    numbers: tuple[float, ...]  # the last arguments

    def tile_counter(self) -> Tensor:
        """The tile counter of a dynamic schedule, zero and this launch's own: other streams' launches have theirs."""
        if self.counter is None:
            return torch.zeros(1, dtype=torch.int32, device=self.device)
        return self.counter


def _ragged_m(
    family: Family,
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    out: Tensor,
    p: Tensor | None,
    second: Tensor | None,
    bias: Tensor | None,
    row_scale: Tensor | None,
    gradient: bool | None,
    activation: Activation | None,
    options: KernelOptions,
) -> Tensor | None:
    """Launch a product over ragged rows; the partial sums of the row scale's gradient, where there is a scale."""
    rows, depth = a.shape
    experts, columns, b_depth = b.shape
    if not rows:
        return a.new_empty(1, 0, dtype=torch.float32) if gradient else None
    b_major = "k" if b.stride()[2] == 1 and b_depth > 1 else "n"
    scaled = row_scale is not None
    launch = _ragged_m_launch(
        choose, family, a.device, a.dtype, rows, experts, columns, depth, b_major, activation,
        (second if gradient else p) is not None, bool(gradient), bias is not None, scaled, options.sm_margin,
        options.schedule,
    )  # fmt: skip
    partial = None
    if gradient and scaled:
        partial = torch.empty(-(-columns // launch.config.tile_n), rows, dtype=torch.float32, device=launch.device)
    no_bias, no_scale = _absent(launch.device, a.dtype)
    if row_scale is None:
        row_scale = no_scale
    elif row_scale.dtype is not torch.float32:
        row_scale = row_scale.float()
    launch.run(
        a, b, offsets, out, p, second, no_bias if bias is None else bias, row_scale, partial,
        launch.tile_counter(), *launch.numbers,
    )  # fmt: skip
    return partial


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
    scaled: bool,
    sm_margin: int,
    schedule: Schedule,
) -> _Launch:
    if family == "derivative" and activation is not None and heavy(activation):
        family = "heavy_derivative"
    options = KernelOptions(sm_margin, schedule)
    sms = _sms(device, options)
    problem = Problem(family, rows, experts, columns, depth, sms)
    config = choose(problem)
    run = _ragged_m_kernel(
        _NAMES[dtype], b_major, family, activation_key(activation), keep, gradient and scaled, config
    )
    limit, alpha, offset = 0.0, 1.0, 0.0
    if activation is not None:
        limit, alpha, offset = activation.limit or 0.0, activation.alpha, activation.offset
    numbers = (limit, alpha, offset, biased, scaled, *_scheduling(problem, config, sms, options))
    return _Launch(run, config, device, _counter(device, options), numbers)


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
) -> _Launch:
    options = KernelOptions(sm_margin, schedule)
    sms = _sms(device, options)
    problem = Problem("wgrad", rows, experts, k, n, sms)
    config = choose(problem)
    run = _ragged_k_kernel(_NAMES[dtype], config, _NAMES[out], accumulate)
    numbers = _scheduling(problem, config, sms, options)
    return _Launch(run, config, device, _counter(device, options), numbers)


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


@functools.cache
def _no_counter(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _counter(device: torch.device, options: KernelOptions) -> Tensor | None:
    return _no_counter(device) if options.schedule == "static" else None


@functools.cache
def _absent(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a kernel gets for a bias or a row scale that there is not; it reads neither."""
    return torch.empty(1, 8, dtype=dtype, device=device), torch.empty(1, dtype=torch.float32, device=device)


def _ones(device: torch.device, rows: int) -> Tensor:
    return torch.ones(rows, dtype=torch.float32, device=device)
