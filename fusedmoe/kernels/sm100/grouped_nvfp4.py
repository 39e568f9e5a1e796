"""NVIDIA's grouped products of NVFP4 operands for Blackwell, as functions of torch tensors.

As `fusedmoe.kernels.sm100.grouped`, except that the kernels write no codes: an activation and a derivative come out in
bf16, in packed rows, and another kernel quantizes them.

Axes: P packed rows, E experts, N output and K input features of a product, I intermediate features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.kernels.sm100.calls import Operands, glu_constants, glu_name, in_views, kernel, ones, transposed
from fusedmoe.numerics.activations import Activation

Form = tuple[Tensor, Tensor, Tensor]
"""Codes, uint8, two in a byte; swizzled scales, float8_e4m3fn; and the scale of each expert, fp32."""

_BLOCK = 16  # codes that share a scale
_PER_BYTE = 2


def gemm(x: Form, weight: Form, bias_EN: Tensor | None, ends_E: Tensor) -> Tensor:
    """As `fusedmoe.kernels.sm100.grouped.gemm`, for codes (P, K / 2) and (E, N, K / 2)."""
    features = weight[0].shape[1]
    y = _bf16(x, 1, features)
    y[-1].zero_()
    operands = _product(x, weight, ends_E) | {
        "d": y[:-1], "bias": transposed(bias_EN),
        # with a bias, the kernel multiplies the bias by a factor per row
        "prob": None if bias_EN is None else ones(len(x[0]), x[0].device),
    }  # fmt: skip
    kernel("GroupedGemmQuantSm100", *_kind(weight), bias_EN is not None, block=_BLOCK)(operands)
    return y


def gemm_activation(
    x: Form, weight: Form, bias_EN: Tensor | None, ends_E: Tensor, factor_P: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Return ``p[r] = x[r] @ weight[e].T + bias[e]`` and ``act(p) * factor`` in bf16, (P, N) and (P, I).

    The activation is applied to p in fp32. The parameters are those of
    `fusedmoe.kernels.sm100.grouped.gemm_activation_quantize`.
    """
    features, gated = weight[0].shape[1], activation.gated
    p, y = _bf16(x, 0, features), _bf16(x, 0, features // (2 if gated else 1))
    if factor_P is None and not gated:
        factor_P = ones(len(y), y.device)  # which this kernel requires
    operands = _product(x, weight, ends_E) | {
        "c": p, "d": y, "d_col": y, "prob": factor_P, "bias": transposed(bias_EN),
    }  # fmt: skip
    kind = *_kind(weight), bias_EN is not None, factor_P is not None
    if gated:
        run = kernel("GroupedGemmGluSm100", *kind, block=_BLOCK, act_func=glu_name(activation))
        run(operands, **glu_constants(activation))
    else:
        kernel("GroupedGemmSreluSm100", *kind, block=_BLOCK)(in_views(operands, _BLOCK, _PER_BYTE))
    return p, y


def gemm_derivative(
    dy: Form, weight: Form, p: Tensor, ends_E: Tensor, factor_P: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor | None]:
    """Return ``dp = act'(p) * (dy @ weight[e]) * factor`` in bf16, and the gradient of the factor.

    The parameters and the second result are those of `fusedmoe.kernels.sm100.grouped.gemm_derivative_quantize`.
    """
    dp, given, gated = torch.empty_like(p), factor_P is not None, activation.gated
    dfactor, dfactor_P1 = None, None
    if given or not gated:
        dfactor_P1 = p.new_zeros(len(p) + 1, dtype=torch.float32)
        dfactor = dfactor_P1[:-1]
    if factor_P is None and not gated:
        factor_P = ones(len(p), p.device)
    operands = _product(dy, weight, ends_E) | {
        "c": p, "prob": factor_P, "dprob": dfactor, "d_row": dp, "d_col": dp,
    }  # fmt: skip
    kind = *_kind(weight), factor_P is not None
    if gated:
        constants = glu_constants(activation)  # of compilation, other than in the forward kernel
        alpha = operands["alpha"]
        assert alpha is not None
        operands |= {"alpha": alpha.sqrt(), "beta": ones(len(ends_E), p.device)}  # the kernel squares alpha
        kernel("GroupedGemmDgluSm100", *kind, block=_BLOCK, act_func=f"d{glu_name(activation)}", **constants)(operands)
    else:
        kernel("GroupedGemmDsreluSm100", *kind, block=_BLOCK)(in_views(operands, _BLOCK, _PER_BYTE))
    return dp, dfactor_P1 if given else None


def wgrad(dy: Form, x: Form, ends_E: Tensor, out_ENK: Tensor, accumulate: bool = False) -> None:
    """As `fusedmoe.kernels.sm100.grouped.wgrad`, for codes (N, P / 2) and (K, P / 2)."""
    (codes_NP, scale_N, scale_dy_E), (codes_KP, scale_K, scale_x_E) = dy, x
    operands: Operands = {
        "a": _fp4(codes_NP), "b": _fp4(codes_KP).T, "sfa": scale_N, "sfb": scale_K, "offsets": ends_E,
        "wgrad": out_ENK, "global_scale_a": scale_dy_E, "global_scale_b": scale_x_E,
    }  # fmt: skip
    kind = codes_NP.device, tuple(out_ENK.shape), out_ENK.dtype, "nvfp4"
    kernel("GroupedGemmWgradSm100", *kind, block=_BLOCK, accumulate_on_output=accumulate)(operands)


def _product(x: Form, weight: Form, ends_E: Tensor) -> Operands:
    """Return the operands that all products of rows and weights have."""
    (codes, scale, scale_x_E), (codes_ENK, scale_ENK, scale_w_E) = x, weight
    return {
        "a": _fp4(codes), "sfa": scale, "b": _fp4(codes_ENK), "sfb": scale_ENK, "padded_offsets": ends_E,
        "alpha": scale_x_E * scale_w_E,
    }  # fmt: skip


def _kind(weight: Form) -> tuple[torch.device, tuple[int, ...], str]:
    return weight[0].device, tuple(weight[0].shape), "nvfp4"


def _fp4(codes: Tensor) -> Tensor:
    return codes.view(torch.float4_e2m1fn_x2)


def _bf16(x: Form, more: int, features: int) -> Tensor:
    """Return an empty result for as many packed rows as ``x`` has, and ``more``."""
    return x[0].new_empty(len(x[0]) + more, features, dtype=torch.bfloat16)
