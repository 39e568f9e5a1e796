"""NVIDIA's grouped products of MXFP8 operands for Blackwell, as functions of torch tensors.

The kernels are those of ``nvidia-cudnn-frontend``, ``cudnn.gemm.cutedsl.grouped``. No call waits for the device. All
operands have the layout of `fusedmoe.formats.packed`. ``ends_E``, int32, are the ends of the experts' packed rows: the
kernels do not check that they are multiples of 256, and compute wrong results otherwise.

A kernel is compiled once for each layer shape, and serves any number of rows. Work memory of a kernel is allocated in
each call, so calls on several streams share none.

Axes: P packed rows, E experts, N output and K input features of a product, I intermediate features.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fusedmoe.kernels.activation import Activation

Form = tuple[Tensor, Tensor]
"""Codes, float8_e4m3fn, and swizzled scales, float8_e8m0fnu."""

_BLOCK = 32  # codes that share a scale
_TILE_LINES, _TILE_SCALES = 128, 4  # of a tile of swizzled scales: lines of codes, and scales per line
_TILES: dict[str, Any] = {"mma_tiler_mn": (256, 256), "cluster_shape_mn": (2, 1), "sf_vec_size": _BLOCK}
_ALIGNMENT = 128  # of work memory, in bytes


def gemm(x: Form, weight: Form, bias_EN: Tensor | None, ends_E: Tensor) -> Tensor:
    """Return ``y[r] = x[r] @ weight[e].T + bias[e]`` in bf16, (P + 1, N). The last row is zeros.

    Parameters
    ----------
    x
        Rows by rows: codes (P, K). Or, for the gradient of a layer's rows, the gradient of its output.
    weight
        Codes (E, N, K), quantized along K. For the gradient of rows, the layer's weight by columns.
    bias_EN
        bf16, (E, N), contiguous.
    ends_E
        int32, (E,).
    """
    (codes, scale), (codes_ENK, scale_ENK) = x, weight
    y = codes.new_empty(codes.shape[0] + 1, codes_ENK.shape[1], dtype=torch.bfloat16)
    y[-1].zero_()
    operands: dict[str, Tensor | None] = {
        "a": codes, "sfa": scale, "b": codes_ENK, "sfb": scale_ENK, "padded_offsets": ends_E, "d": y[:-1],
        "alpha": _ones(len(ends_E), codes.device), "bias": _transposed(bias_EN),
        # with a bias, the kernel multiplies the bias by a factor per row
        "prob": None if bias_EN is None else _ones(codes.shape[0], codes.device),
    }  # fmt: skip
    _kernel("GroupedGemmQuantSm100", codes.device, tuple(codes_ENK.shape), bias_EN is not None)(operands)
    return y


def gemm_activation_quantize(
    x: Form, weight: Form, bias_EN: Tensor | None, ends_E: Tensor, factor_P: Tensor | None, activation: Activation
) -> tuple[Tensor, Form, Form]:
    """Return ``p[r] = x[r] @ weight[e].T + bias[e]`` in bf16, and ``act(p) * factor`` by rows and by columns.

    The activation is applied to p in fp32, and its result is quantized without rounding to bf16.

    Parameters
    ----------
    x, weight, bias_EN, ends_E
        As for `gemm`. Of a gated activation, the rows of ``weight`` and ``bias_EN`` alternate between gate and up.
    factor_P
        fp32, (P,): the factor of each row. Must be zero for padding rows if there is a bias.
    activation
        ``"swiglu"`` or ``"squared_relu"``.
    """
    (codes, scale), (codes_ENK, scale_ENK) = x, weight
    rows, features = codes.shape[0], codes_ENK.shape[1]
    p = codes.new_empty(rows, features, dtype=torch.bfloat16)
    by_rows, by_columns = _forms(p, features // (2 if activation.gated else 1))
    if factor_P is None and not activation.gated:
        factor_P = _ones(rows, codes.device)  # which this kernel requires
    operands: dict[str, Tensor | None] = {
        "a": codes, "sfa": scale, "b": codes_ENK, "sfb": scale_ENK, "padded_offsets": ends_E, "c": p,
        "alpha": _ones(len(ends_E), codes.device), "norm_const": _ones(1, codes.device), "prob": factor_P,
        "bias": _transposed(bias_EN), "d": by_rows[0], "sfd_row": by_rows[1], "d_col": by_columns[0],
        "sfd_col": by_columns[1],
    }  # fmt: skip
    kind = codes.device, tuple(codes_ENK.shape), bias_EN is not None, factor_P is not None
    if activation.gated:
        kernel = _kernel("GroupedGemmGluSm100", *kind, act_func=_glu(activation), discrete_col_sfd=True)
        kernel(operands, **_constants(activation))
    else:
        _kernel("GroupedGemmSreluSm100", *kind, discrete_col_sfd=True)(_in_views(operands))
    return p, by_rows, by_columns


def gemm_derivative_quantize(
    dy: Form, weight: Form, p: Tensor, ends_E: Tensor, factor_P: Tensor | None, activation: Activation
) -> tuple[Form, Form, Tensor | None]:
    """Return ``dp = act'(p) * (dy @ weight[e]) * factor`` by rows and by columns, and the gradient of the factor.

    Parameters
    ----------
    dy
        By rows: codes (P, H).
    weight
        By columns: codes (E, I, H).
    p
        What `gemm_activation_quantize` returned.
    ends_E, factor_P, activation
        As for `gemm_activation_quantize`.

    Returns
    -------
    dp, by rows and by columns : Form
        Codes (P, 2 I), gate and up alternating; (P, I) for an activation that is not gated.
    dfactor_P1 : Tensor or None
        fp32, (P + 1,), of which the last is zero; None without a factor. The kernel adds to it with atomics.
    """
    (codes, scale), (codes_EIH, scale_EIH) = dy, weight
    by_rows, by_columns = _forms(p, p.shape[1])
    ones, dfactor, dfactor_P1 = _ones(len(ends_E), codes.device), None, None
    if factor_P is not None or not activation.gated:
        dfactor_P1 = codes.new_zeros(codes.shape[0] + 1, dtype=torch.float32)
        dfactor = dfactor_P1[:-1]
    given = factor_P is not None
    if factor_P is None and not activation.gated:
        factor_P = _ones(codes.shape[0], codes.device)
    operands: dict[str, Tensor | None] = {
        "a": codes, "sfa": scale, "b": codes_EIH, "sfb": scale_EIH, "padded_offsets": ends_E, "c": p, "alpha": ones,
        "norm_const": _ones(1, codes.device), "prob": factor_P, "dprob": dfactor, "d_row": by_rows[0],
        "sfd_row": by_rows[1], "d_col": by_columns[0], "sfd_col": by_columns[1],
    }  # fmt: skip
    kind = codes.device, tuple(codes_EIH.shape), factor_P is not None
    if activation.gated:
        constants = _constants(activation)  # of compilation, other than in the forward kernel
        kernel = _kernel(
            "GroupedGemmDgluSm100", *kind, act_func=f"d{_glu(activation)}", discrete_col_sfd=True, **constants
        )
        kernel({**operands, "beta": ones})
    else:
        _kernel("GroupedGemmDsreluSm100", *kind, discrete_col_sfd=True)(_in_views(operands))
    return by_rows, by_columns, dfactor_P1 if given else None


def wgrad(dy: Form, x: Form, ends_E: Tensor, out_ENK: Tensor, accumulate: bool = False) -> None:
    """Compute ``out[e] = dy[rows of e].T @ x[rows of e]``, or add it to ``out``; zeros for an expert without rows.

    Parameters
    ----------
    dy, x
        By columns: codes (P, N) and (P, K).
    ends_E
        int32, (E,).
    out_ENK
        bf16 or fp32, (E, N, K), contiguous.
    """
    (codes_PN, scale_N), (codes_PK, scale_K) = dy, x
    operands: dict[str, Tensor | None] = {
        "a": codes_PN.T, "b": codes_PK, "sfa": scale_N, "sfb": scale_K, "offsets": ends_E, "wgrad": out_ENK,
    }  # fmt: skip
    kind = codes_PN.device, tuple(out_ENK.shape), out_ENK.dtype
    _kernel("GroupedGemmWgradSm100", *kind, accumulate_on_output=accumulate)(operands)


# ---- calls -----------------------------------------------------------------------------------------------------------


class _Kernel:
    """A kernel of cudnn-frontend, which is compiled in its first call.

    Parameters
    ----------
    name
        The name of its class.
    settings
        Further arguments of the constructor.
    """

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._name, self._settings = name, settings
        self._api: Any = None
        self._scratch: tuple[str, int] | None = None  # the argument for work memory, and its bytes

    def __call__(self, operands: dict[str, Tensor | None], **scalars: float) -> None:
        if self._api is None:
            self._compile(operands)
        given: dict[str, Any] = {n if n == "padded_offsets" else f"{n}_tensor": t for n, t in operands.items()}
        if self._scratch is not None:
            name, size = self._scratch
            given[name] = _aligned(size, next(t.device for t in operands.values() if t is not None))
        self._api.execute(**given, **scalars)

    def _compile(self, operands: dict[str, Tensor | None]) -> None:
        from cudnn.gemm.cutedsl import grouped  # deferred: imports the CuTe DSL

        samples = {f"sample_{name}": t for name, t in operands.items()}
        if (ends := operands.get("offsets")) is not None:  # the constructor reads them on the host
            samples["sample_offsets"] = torch.zeros(ends.shape, dtype=ends.dtype)
            size = grouped.get_grouped_gemm_wgrad_workspace_size_sm100(len(ends))
            self._scratch = "descriptor_workspace", size
        api = getattr(grouped, self._name)(**samples, **self._settings, **_TILES)
        api.check_support()
        api.compile()
        if hasattr(api, "scratch_workspace_bytes"):
            self._scratch = "workspace", api.scratch_workspace_bytes()
        self._api = api


@functools.cache
def _kernel(name: str, device: torch.device, shape: tuple[int, ...], *kind: object, **settings: object) -> _Kernel:
    """Return the kernel for weights of this shape. ``kind`` tells kernels with other operands apart."""
    return _Kernel(name, settings)


def _glu(activation: Activation) -> str:
    """Return the package's name of an activation: its "swiglu" has no constants."""
    return "swiglu" if activation.limit is None else "geglu"


def _constants(activation: Activation) -> dict[str, float]:
    """Return the constants of a clamped activation, by the package's names."""
    if activation.limit is None:
        return {}
    bounds = {"glu_clamp_max": activation.limit, "glu_clamp_min": -activation.limit}
    return {"linear_offset": activation.offset, "geglu_alpha": activation.alpha, **bounds}


def _forms(like: Tensor, features: int) -> tuple[Form, Form]:
    """Return empty codes and scales by rows and by columns, for as many packed rows as ``like`` has."""
    rows = like.shape[0]

    def form(lines: int, length: int) -> Form:
        down, across = _tiles(lines, length)
        codes = like.new_empty(rows, features, dtype=torch.float8_e4m3fn)
        scales = down * across * _TILE_LINES * _TILE_SCALES
        return codes, like.new_empty(scales, dtype=torch.float8_e8m0fnu)

    return form(rows, features), form(features, rows)


def _tiles(lines: int, length: int) -> tuple[int, int]:
    """Return the tiles of scales of some lines of codes: down and across."""
    return -(-lines // _TILE_LINES), -(-length // (_BLOCK * _TILE_SCALES))


@functools.cache
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count, device=device)


def _transposed(bias_EN: Tensor | None) -> Tensor | None:
    return None if bias_EN is None else bias_EN.T


def _aligned(size: int, device: torch.device) -> Tensor:
    memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % _ALIGNMENT :][:size]


def _in_views(operands: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the operands in the views that the kernels of the squared ReLU take: rows (P, F, 1), weights (N, K, E),
    factors (P, 1, 1), and scales (32, 4, lines / 128, 4, length / 128, matrices).
    """
    codes_ENK = operands["b"]
    assert codes_ENK is not None
    experts = codes_ENK.shape[0]
    found = dict(operands)
    for name, t in operands.items():
        if t is None:
            continue
        if name in ("a", "c", "d", "d_row", "d_col"):
            found[name] = t.as_strided((*t.shape, 1), (t.shape[1], 1, t.numel()))
        elif name == "b":
            found[name] = t.permute(1, 2, 0)
        elif name in ("prob", "dprob"):
            found[name] = t.view(-1, 1, 1)
        elif name.startswith("sf"):
            codes = operands[{"sfa": "a", "sfb": "b", "sfd_row": "c", "sfd_col": "c"}[name]]
            assert codes is not None
            lines, length = codes.shape[-2:] if name != "sfd_col" else codes.shape[::-1]
            blocks = t.view(experts if name == "sfb" else 1, *_tiles(lines, length), 32, 4, _TILE_SCALES)
            found[name] = blocks.permute(3, 4, 1, 5, 2, 0)
    return found
