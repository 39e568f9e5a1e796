"""NVIDIA's grouped products of MXFP8 operands for Blackwell, as functions of torch tensors.

The kernels are those of ``nvidia-cudnn-frontend``, ``cudnn.gemm.cutedsl.grouped``. No call waits for the device. All
operands have the layout of `fusedmoe.numerics.formats.packed`. ``ends_E``, int32, are the ends of the experts' packed
rows: the kernels do not check that they are multiples of 256, and compute wrong results otherwise.

Axes: P packed rows, E experts, N output and K input features of a product, I intermediate features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.kernels.sm100.calls import (
    Operands,
    glu_constants,
    glu_name,
    in_views,
    kernel,
    ones,
    scales_like,
    transposed,
)
from fusedmoe.numerics.activations import Activation

Form = tuple[Tensor, Tensor]  # Codes, float8_e4m3fn, and swizzled scales, float8_e8m0fnu

_BLOCK = 32  # codes that share a scale


def gemm(x: Form, weight: Form, bias_EN: Tensor | None, ends_E: Tensor) -> Tensor:
    """Return ``y[r] = x[r] @ weight[e].T + bias[e]`` in bf16, (P + 1, N). The last row is zeros.

    - ``x``: rows by rows: codes (P, K). Or, for the gradient of a layer's rows, the gradient of its output.
    - ``weight``: codes (E, N, K), quantized along K. For the gradient of rows, the layer's weight by columns.
    - ``bias_EN``: bf16, (E, N), contiguous.
    - ``ends_E``: int32, (E,).
    """
    (codes, scale), (codes_ENK, scale_ENK) = x, weight
    y = codes.new_empty(codes.shape[0] + 1, codes_ENK.shape[1], dtype=torch.bfloat16)
    y[-1].zero_()
    operands: Operands = {
        "a": codes, "sfa": scale, "b": codes_ENK, "sfb": scale_ENK, "padded_offsets": ends_E, "d": y[:-1],
        "alpha": ones(len(ends_E), codes.device), "bias": transposed(bias_EN),
        # with a bias, the kernel multiplies the bias by a factor per row
        "prob": None if bias_EN is None else ones(codes.shape[0], codes.device),
    }  # fmt: skip
    kernel("GroupedGemmQuantSm100", codes.device, tuple(codes_ENK.shape), bias_EN is not None, block=_BLOCK)(operands)
    return y


def gemm_activation_quantize(
    x: Form, weight: Form, bias_EN: Tensor | None, ends_E: Tensor, factor_P: Tensor | None, activation: Activation
) -> tuple[Tensor, Form, Form]:
    """Return ``p[r] = x[r] @ weight[e].T + bias[e]`` in bf16, and ``act(p) * factor`` by rows and by columns.

    The activation is applied to p in fp32, and its result is quantized without rounding to bf16.

    - ``x``, ``weight``, ``bias_EN``, ``ends_E``: as for `gemm`. Of a gated activation, the rows of ``weight`` and
      ``bias_EN`` alternate between gate and up.
    - ``factor_P``: fp32, (P,): the factor of each row. Must be zero for padding rows if there is a bias.
    - ``activation``: ``"swiglu"`` or ``"squared_relu"``.
    """
    (codes, scale), (codes_ENK, scale_ENK) = x, weight
    rows, features = codes.shape[0], codes_ENK.shape[1]
    p = codes.new_empty(rows, features, dtype=torch.bfloat16)
    by_rows, by_columns = _forms(p, features // (2 if activation.gated else 1))
    if factor_P is None and not activation.gated:
        factor_P = ones(rows, codes.device)  # which this kernel requires
    operands: Operands = {
        "a": codes, "sfa": scale, "b": codes_ENK, "sfb": scale_ENK, "padded_offsets": ends_E, "c": p,
        "alpha": ones(len(ends_E), codes.device), "norm_const": ones(1, codes.device), "prob": factor_P,
        "bias": transposed(bias_EN), "d": by_rows[0], "sfd_row": by_rows[1], "d_col": by_columns[0],
        "sfd_col": by_columns[1],
    }  # fmt: skip
    kind = codes.device, tuple(codes_ENK.shape), bias_EN is not None, factor_P is not None
    if activation.gated:
        act = glu_name(activation)
        run = kernel("GroupedGemmGluSm100", *kind, block=_BLOCK, act_func=act, discrete_col_sfd=True)
        run(operands, **glu_constants(activation))
    else:
        kernel("GroupedGemmSreluSm100", *kind, block=_BLOCK, discrete_col_sfd=True)(in_views(operands, _BLOCK))
    return p, by_rows, by_columns


def gemm_derivative_quantize(
    dy: Form, weight: Form, p: Tensor, ends_E: Tensor, factor_P: Tensor | None, activation: Activation
) -> tuple[Form, Form, Tensor | None]:
    """Return ``dp = act'(p) * (dy @ weight[e]) * factor`` by rows and by columns, and the gradient of the factor.

    - ``dy``: by rows: codes (P, H).
    - ``weight``: by columns: codes (E, I, H).
    - ``p``: what `gemm_activation_quantize` returned.
    - ``ends_E``, ``factor_P``, ``activation``: as for `gemm_activation_quantize`.

    dp has codes (P, 2 I), gate and up alternating; (P, I) for an activation that is not gated. The gradient of the
    factor is fp32, (P + 1,), of which the last is zero; None without a factor. The kernel adds to it with atomics.
    """
    (codes, scale), (codes_EIH, scale_EIH) = dy, weight
    by_rows, by_columns = _forms(p, p.shape[1])
    alpha, dfactor, dfactor_P1 = ones(len(ends_E), codes.device), None, None
    if factor_P is not None or not activation.gated:
        dfactor_P1 = codes.new_zeros(codes.shape[0] + 1, dtype=torch.float32)
        dfactor = dfactor_P1[:-1]
    given = factor_P is not None
    if factor_P is None and not activation.gated:
        factor_P = ones(codes.shape[0], codes.device)
    operands: Operands = {
        "a": codes, "sfa": scale, "b": codes_EIH, "sfb": scale_EIH, "padded_offsets": ends_E, "c": p, "alpha": alpha,
        "norm_const": ones(1, codes.device), "prob": factor_P, "dprob": dfactor, "d_row": by_rows[0],
        "sfd_row": by_rows[1], "d_col": by_columns[0], "sfd_col": by_columns[1],
    }  # fmt: skip
    kind = codes.device, tuple(codes_EIH.shape), factor_P is not None
    if activation.gated:
        constants = glu_constants(activation)  # of compilation, other than in the forward kernel
        run = kernel(
            "GroupedGemmDgluSm100", *kind, block=_BLOCK, act_func=f"d{glu_name(activation)}", discrete_col_sfd=True,
            **constants,
        )  # fmt: skip
        run({**operands, "beta": alpha})
    else:
        kernel("GroupedGemmDsreluSm100", *kind, block=_BLOCK, discrete_col_sfd=True)(in_views(operands, _BLOCK))
    return by_rows, by_columns, dfactor_P1 if given else None


def wgrad(dy: Form, x: Form, ends_E: Tensor, out_ENK: Tensor, accumulate: bool = False) -> None:
    """Compute ``out[e] = dy[rows of e].T @ x[rows of e]``, or add it to ``out``; zeros for an expert without rows.

    - ``dy``, ``x``: by columns: codes (P, N) and (P, K).
    - ``ends_E``: int32, (E,).
    - ``out_ENK``: bf16 or fp32, (E, N, K), contiguous.
    """
    (codes_PN, scale_N), (codes_PK, scale_K) = dy, x
    operands: Operands = {
        "a": codes_PN.T, "b": codes_PK, "sfa": scale_N, "sfb": scale_K, "offsets": ends_E, "wgrad": out_ENK,
    }  # fmt: skip
    kind = codes_PN.device, tuple(out_ENK.shape), out_ENK.dtype
    kernel("GroupedGemmWgradSm100", *kind, block=_BLOCK, accumulate_on_output=accumulate)(operands)


def _forms(like: Tensor, features: int) -> tuple[Form, Form]:
    """Return empty codes and scales by rows and by columns, for as many packed rows as ``like`` has."""
    rows = like.shape[0]

    def form(lines: int, length: int) -> Form:
        codes = like.new_empty(rows, features, dtype=torch.float8_e4m3fn)
        return codes, scales_like(codes, lines, length, _BLOCK, torch.float8_e8m0fnu)

    return form(rows, features), form(features, rows)
